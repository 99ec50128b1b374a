"""The trace of a loss: its operators in the order of a run on an example, each with the kind of its result.

Two of torch's modes intercept a run. A function mode intercepts calls from Python: sizes become numbers with a kind (`followed_numbers`),
and values that Python reads are recorded. A dispatch mode intercepts the operators of these calls, and applies the rules (`rules`).
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, has_torch_function

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.losses.certificates import functions, kinds, rules
from lightning_ddp_losses.losses.certificates.certificate import Reason
from lightning_ddp_losses.losses.certificates.followed_numbers import Followed, followed, plain
from lightning_ddp_losses.losses.certificates.kinds import Broken, Constant, Count, Kind, Rows, Scale
from lightning_ddp_losses.losses.certificates.lines import Blame, blame_here
from lightning_ddp_losses.losses.certificates.memory import KnownTensors
from lightning_ddp_losses.losses.certificates.operation import Operation, words

_ARITHMETIC = words(
    "add sub mul div true_divide multiply divide subtract rsub add_ sub_ mul_ div_ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ "
    "__truediv__ __rtruediv__ __iadd__ __isub__ __imul__ __itruediv__ __div__ __rdiv__ __idiv__"
)
_BRANCHES = frozenset(["__bool__", "is_nonzero", "equal", "allclose", "__contains__", "is_same_size"])
_PLAIN_READS = frozenset(["dim", "ndimension", "element_size", "get_device", "__get__ndim", "__get__itemsize"])
_FROM_NUMBERS = frozenset(["tensor", "as_tensor", "scalar_tensor", "asarray"])
# functions that read values only to refuse some
_VALIDATES = frozenset(["gaussian_nll_loss"])
_NUMBER_TYPES = ("number", "Optional[number]", "float", "Optional[float]", "Tensor", "Optional[Tensor]")


class Trace:
    """One run of a loss on an example.

    Args:
        rows: Rows of the example, a prime number that no other dimension is a multiple of.

    Attributes:
        known: Kinds of all tensors.
        branches: Branches of Python on values.
        assumptions: What else the kinds assume about values.
        escapes: What cannot be followed, so that no verdict can be given.
        numbers: Numbers among the arguments of each operator. They must not change with the number of rows.
        dtypes: Floating dtypes of all results.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.known = KnownTensors()
        self.branches: dict[Reason, None] = {}
        self.assumptions: dict[Reason, None] = {}
        self.escapes: dict[Reason, None] = {}
        self.numbers: list[tuple[Blame, tuple[Any, ...]]] = []
        self.dtypes: set[torch.dtype] = set()

    def run(self, loss: Callable[..., Any], args: tuple[Any, ...], row_tensors: list[Tensor]) -> tuple[Kind, Tensor]:
        """Run a loss and return the kind of its value, and the value.

        Args:
            loss: The loss.
            args: Its arguments.
            row_tensors: Tensors among them. Dimension 0 counts rows.
        """
        for tensor in row_tensors:
            integral = not tensor.is_floating_point()
            self.known.add_argument(tensor, Rows(0, is_integral=integral, is_data=not tensor.requires_grad))
        operators = _Operators(self)
        with torch.compiler.set_stance("force_eager"), followed_len(self), operators, _Functions(self, operators):
            value = run_loss(loss, args)
        return self.known.kind(value, blame_here("the value")), value

    # ------------------------------------------------------------------ notes

    def note_branch(self, name: str, outcome: object) -> None:
        """Note that Python reads an outcome that depends on rows."""
        why = f"a branch of Python on a value that depends on the rows ({outcome} on the example)"
        self.branches[blame_here(name)(why)] = None

    def note_escape(self, name: str, why: str) -> None:
        """Note that a value cannot be followed."""
        self.escapes[blame_here(name)(why)] = None

    def combined(self, name: str, left: Kind, right: Kind, exponent: object) -> Kind:
        """Return the kind of a result of two of Python's numbers."""
        blame = blame_here(name)
        broken = kinds.broken_of([left, right])
        if broken is not None:
            return broken
        if name == "mul":
            return kinds.product(left, right, blame)
        if name == "div":
            return kinds.quotient(left, right, blame)
        if name in ("add", "sub"):
            return kinds.added([left, right], blame)
        if (
            name == "pow"
            and isinstance(left, Count)
            and isinstance(right, Constant)
            and isinstance(exponent, (int, float))
        ):
            return Count(Scale(left.scale.degree * exponent, left.scale.counts))
        return Broken((blame("a number that is not proportional to the number of rows"),))


def run_loss(loss: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
    """Call the loss. This frame is the end of its lines (``lines.ENTRY``)."""
    return loss(*args)


# ---------------------------------------------------------------------- functions that Python calls


class _Functions(TorchFunctionMode):
    """Sees the calls of Python."""

    def __init__(self, trace: Trace, operators: _Operators) -> None:
        super().__init__()
        self._trace, self._operators = trace, operators

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and follow what it returns."""
        given = dict(kwargs or {})
        trace, name = self._trace, _name_of(func)
        blame = blame_here(name)
        special = functions.rule_of(func, args, given)
        if special is not None:
            run, bound = special
            ruled = run(trace.known, func, bound, blame)
            trace.known.add(ruled.value, ruled.kind)
            if ruled.assumption is not None:
                trace.assumptions[ruled.assumption] = None
            return ruled.value
        values = list(_values_in((args, given)))
        numbers = [value for value in values if isinstance(value, Followed)]
        is_arithmetic = name in _ARITHMETIC
        args = _without_numbers(args, trace, as_tensors=is_arithmetic)
        given = _without_numbers(given, trace, as_tensors=is_arithmetic)
        with self._operators.inside(name, has_sizes=bool(numbers) and not is_arithmetic):
            result = func(*args, **given)
        self._refuse_outside_tensors(result, blame)
        tensors = [value for value in values if isinstance(value, Tensor)]
        followed_kinds = [trace.known.kind(tensor, blame) for tensor in tensors]
        if all(isinstance(kind, Constant) for kind in followed_kinds) and not numbers:
            return result
        if numbers and not is_arithmetic:
            _check_sizes(trace, name, numbers, result, blame)
        if tensors and not all(isinstance(kind, Constant) for kind in followed_kinds):
            return _followed_result(trace, name, result, tensors[0], (args, given), blame)
        return result

    def _refuse_outside_tensors(self, result: Any, blame: Blame) -> None:
        """Note tensors that no operator has made, from an array for example, with a number for each row."""
        trace = self._trace
        for output in (value for value in torch_compat.tree_leaves(result) if isinstance(value, Tensor)):
            if output not in trace.known and any(size and size % trace.rows == 0 for size in output.shape):
                trace.known.add(output, Broken((blame("an array with a number for each row of the batch"),)))


def _name_of(function: Any) -> str:
    """Return the name of a function of torch. That of an attribute begins with ``__get__`` or ``__set__``."""
    name = str(getattr(function, "__name__", function))
    if name in ("__get__", "__set__"):
        name += str(getattr(getattr(function, "__self__", None), "__name__", ""))
    return name


def _values_in(nest: Any) -> Iterator[Any]:
    """Yield tensors and numbers in nested arguments, bounds of slices too."""
    for leaf in torch_compat.tree_leaves(nest):
        if isinstance(leaf, slice):
            yield from (leaf.start, leaf.stop, leaf.step)
        else:
            yield leaf


def _without_numbers(nest: Any, trace: Trace, *, as_tensors: bool) -> Any:
    """Return arguments with followed numbers as tensors, so that operators get their kinds, or as plain numbers."""
    if isinstance(nest, dict):
        return {name: _without_numbers(value, trace, as_tensors=as_tensors) for name, value in nest.items()}
    if type(nest) in (tuple, list, torch.Size):
        return type(nest)(_without_numbers(value, trace, as_tensors=as_tensors) for value in nest)
    if isinstance(nest, slice):
        return slice(plain(nest.start), plain(nest.stop), plain(nest.step))
    if not isinstance(nest, Followed) or not as_tensors:
        return plain(nest)
    with torch_compat.without_dispatch_modes():
        tensor = torch.tensor(plain(nest))
    trace.known.add(tensor, nest.kind)
    return tensor


def _check_sizes(trace: Trace, name: str, numbers: list[Followed], result: Any, blame: Blame) -> None:
    """Refuse results whose size, or whose entries, depend on the number of rows in another way than one entry for each row."""
    outputs = [value for value in torch_compat.tree_leaves(result) if isinstance(value, Tensor)]
    for output in outputs:
        if name in _FROM_NUMBERS and output.numel() == 1:
            trace.known.add(output, numbers[0].kind)
            continue
        kind = trace.known.kind(output, blame)
        if isinstance(kind, Broken):
            continue
        sizes = [number for number in numbers if not isinstance(number.kind, Constant)]
        is_size = isinstance(kind, Rows) and len(sizes) == 1 and isinstance(sizes[0].kind, Count)
        if not is_size or not isinstance(kind, Rows) or plain(sizes[0]) != output.shape[kind.dim]:
            trace.known.add(output, Broken((blame("a size or number that depends on the number of rows"),)))


def _followed_result(trace: Trace, name: str, result: Any, first: Tensor, given: Any, blame: Blame) -> Any:
    """Return the result of a function of followed tensors: sizes and values as numbers with a kind."""
    kind = trace.known.kind(first, blame)
    outputs = [value for value in torch_compat.tree_leaves(result) if isinstance(value, Tensor)]
    for output in outputs:
        if output not in trace.known:
            trace.known.add(output, Broken((blame("a result that no operator returned"),)))
    if outputs:
        return result
    if name == "__set__data":
        trace.known.add(first, Broken((blame("a write in place that is not followed"),)))
        return result
    if name in ("__get__shape", "size", "numel", "nelement", "__len__"):
        return _followed_size(trace, result, first, kind, given, blame)
    if name == "item":
        if isinstance(result, bool):
            trace.note_branch(name, result)
            return result
        return followed(result, kind, trace)
    if name in _BRANCHES:
        trace.note_branch(name, result)
    elif name in ("register_hook", "register_post_accumulate_grad_hook"):
        trace.note_escape(name, "a hook may change the gradient")
    elif not _is_harmless(name, result):
        trace.note_escape(name, "values of rows leave torch")
    return result


def _is_harmless(name: str, result: Any) -> bool:
    """Return whether a result cannot contain numbers that depend on rows."""
    is_plain = result is None or isinstance(result, (bool, str, torch.dtype, torch.device, torch.layout))
    return is_plain or name in _PLAIN_READS or name.startswith("__get__grad") or name == "__setitem__"


def _followed_size(trace: Trace, result: Any, tensor: Tensor, kind: Kind, given: Any, blame: Blame) -> Any:
    """Return a size, or all of a shape, with the kinds of their numbers."""
    size = size_kind(kind, blame)
    if isinstance(size, Constant):
        return result
    has_rows = [isinstance(kind, Broken) or (isinstance(kind, Rows) and dim == kind.dim) for dim in range(tensor.ndim)]
    if isinstance(result, torch.Size):
        marked = zip(result, has_rows, strict=True)
        return torch.Size([followed(number, size, trace) if own else number for number, own in marked])
    args, kwargs = given
    dims = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, int)]
    if dims and not has_rows[dims[0]]:
        return result
    return followed(result, size, trace)


def size_kind(kind: Kind, blame: Blame) -> Kind:
    """Return the kind of the number of a tensor's rows."""
    if isinstance(kind, Broken):
        return kind
    if not isinstance(kind, Rows):
        return kinds.CONSTANT
    counted = () if kind.selected is None else (blame("the number of selected rows of one rank"),)
    return Count(Scale(1, counted))


@contextlib.contextmanager
def followed_len(trace: Trace) -> Iterator[None]:
    """Let ``len(rows)`` return a number with a kind. Python makes a plain ``int`` of whatever a class returns.

    Args:
        trace: The trace that follows it.
    """
    python_len = builtins.len

    def len_of_rows(value: Any, /) -> int:
        found = python_len(value)
        if not isinstance(value, Tensor) or not has_torch_function((value,)):
            return found
        with torch_compat.without_function_modes():
            blame = blame_here("len")
            kind = trace.known.kind(value, blame)
        if isinstance(kind, Rows) and kind.dim != 0:
            return found
        return followed(found, size_kind(kind, blame), trace)  # type: ignore[no-any-return]

    builtins.len = len_of_rows
    try:
        yield
    finally:
        builtins.len = python_len


# ---------------------------------------------------------------------- operators


class _Operators(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators, and applies the rules."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace
        self._function, self._has_sizes = "", False

    @contextlib.contextmanager
    def inside(self, function: str, *, has_sizes: bool) -> Iterator[None]:
        """Name the function that Python calls. A function inside it is called by torch.

        Args:
            function: Its name.
            has_sizes: Numbers that depend on the rows are among its arguments.
        """
        before = self._function, self._has_sizes
        self._function, self._has_sizes = function, has_sizes
        try:
            yield
        finally:
            self._function, self._has_sizes = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note the kind of its result."""
        with torch_compat.without_function_modes():
            return self._followed(func, args, kwargs or {})

    def _followed(self, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Run an operator, and note the kind of its result."""
        trace, known = self._trace, self._trace.known
        blame = blame_here(func.__name__.partition(".")[0].strip("_"))
        op = Operation(func, args, given, lambda tensor: known.kind(tensor, blame), blame, trace.rows)
        if not self._has_sizes:
            trace.numbers.append((blame, _numbers_of(func, op)))
        result = func(*args, **given)
        if torch_compat.reads_scalar(func):
            self._read(op)
            return result
        outputs = [value for value in torch_compat.tree_leaves(result) if isinstance(value, Tensor)]
        trace.dtypes.update(output.dtype for output in outputs if output.is_floating_point())
        if op.writes:
            self._write(func, op)
            return result
        for output, kind in zip(outputs, rules.kinds_of(op, outputs), strict=True):
            if output not in known or not any(output is tensor for tensor, _ in op.tensors):
                known.add(output, kind)
        return result

    def _read(self, op: Operation) -> None:
        """Note a value that torch reads inside of a function."""
        is_read_by_python = self._function in ("item", "__float__", "__int__", "__index__", "tolist", *_BRANCHES)
        if is_read_by_python or self._function in _VALIDATES or isinstance(op.kinds[0], Constant):
            return
        self._trace.note_branch(self._function or "item", "a value")

    def _write(self, func: Any, op: Operation) -> None:
        """Set the kind of what an operator has written to."""
        written = [
            op.given[argument.name]
            for argument in torch_compat.operator_schema(func).arguments
            if _is_written(argument)
        ]
        tensors = [tensor for tensor in written if isinstance(tensor, Tensor)]
        is_in_place = len(tensors) == 1 and op.base_name != op.name
        for tensor in tensors:
            kind: Kind = op.broken("an operator without a rule")
            if is_in_place:
                (kind,) = rules.kinds_of(op, [tensor])
            if self._trace.known.write(tensor, kind, op.blame):
                self._trace.note_escape(op.name, "the loss writes its state, which follows from the rows of one rank")


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _numbers_of(func: Any, op: Operation) -> tuple[Any, ...]:
    """Return the numbers among an operator's arguments that are not sizes, dimensions or places."""
    found = []
    for argument in torch_compat.operator_schema(func).arguments:
        value = op.given[argument.name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and str(argument.type) in _NUMBER_TYPES:
            found.append(value)
    return tuple(found)
