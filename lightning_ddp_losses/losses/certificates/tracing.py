"""The trace of a loss: its operators as they run on an example, each with the kind of its result.

Two of torch's modes see a run. A mode of functions sees what Python calls: sizes become numbers with a kind (`followed_numbers`), and a
value that Python reads is noted. A mode of operators sees what those calls consist of, and applies the rules (`rules`).
"""

from __future__ import annotations

import builtins
import contextlib
import linecache
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, has_torch_function

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed.user_line import callers, package_of
from lightning_ddp_losses.losses.certificates import functions, kinds, rules
from lightning_ddp_losses.losses.certificates.certificate import Reason
from lightning_ddp_losses.losses.certificates.followed_numbers import Followed, followed, kind_of_number, plain
from lightning_ddp_losses.losses.certificates.kinds import Broken, Constant, Count, Kind, Rows, Scale
from lightning_ddp_losses.losses.certificates.memory import KnownTensors
from lightning_ddp_losses.losses.certificates.operation import Operation

_ARITHMETIC = frozenset(
    "add sub mul div true_divide multiply divide subtract rsub add_ sub_ mul_ div_ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ "
    "__truediv__ __rtruediv__ __iadd__ __isub__ __imul__ __itruediv__ __div__ __rdiv__ __idiv__".split()
)
_BRANCHES = frozenset(["__bool__", "is_nonzero", "equal", "allclose", "__contains__", "is_same_size"])
_PLAIN_READS = frozenset(["dim", "ndimension", "element_size", "get_device", "__get__ndim", "__get__itemsize"])
_FROM_NUMBERS = frozenset(["tensor", "as_tensor", "scalar_tensor", "asarray"])
# functions that read values only to refuse some
_VALIDATES = frozenset(["gaussian_nll_loss"])
_NUMBER_TYPES = ("number", "Optional[number]", "float", "Optional[float]", "Tensor", "Optional[Tensor]")


class OperatorBlame(NamedTuple):
    """Makes reasons of one operator.

    Attributes:
        file: File of the line that calls it.
        line: Number of that line.
        text: Its source.
        operator: Name of the operator.
    """

    file: str
    line: int
    text: str
    operator: str

    def __call__(self, why: str) -> Reason:
        """Return a reason."""
        return Reason(self.file, self.line, self.text, self.operator, why)


class Trace:
    """One run of a loss on an example.

    Args:
        rows: Rows of the example, a prime number that no other dimension is a multiple of.

    Attributes:
        known: Kinds of all tensors.
        limits: Branches of Python on values.
        escapes: What cannot be followed, so that no verdict can be given.
        numbers: Numbers among the arguments of each operator. They must not change with the number of rows.
        dtypes: Floating dtypes of all results.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.known = KnownTensors()
        self.limits: dict[Reason, None] = {}
        self.escapes: dict[Reason, None] = {}
        self.numbers: list[tuple[OperatorBlame, tuple[Any, ...]]] = []
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
            self.known.add(tensor, Rows(0, is_integral=integral, is_data=not tensor.requires_grad))
        operators = _Operators(self)
        with torch.compiler.set_stance("force_eager"), followed_len(self), operators, _Functions(self, operators):
            value = loss(*args)
        return self.known.kind(value, self.blame("the value")), value

    def blame(self, operator: str) -> OperatorBlame:
        """Return the maker of reasons of an operator that runs now."""
        return OperatorBlame(*_line_of(sys._getframe(1)), operator)

    # ------------------------------------------------------------------ notes

    def note_limit(self, reason: Reason) -> None:
        """Note what the verdict assumes."""
        self.limits[reason] = None

    def note_branch(self, name: str, outcome: object) -> None:
        """Note that Python reads an outcome that depends on rows."""
        self.note_limit(self.blame(name)(f"a branch of Python on a value that depends on the rows ({outcome} here)"))

    def note_escape(self, name: str, why: str) -> None:
        """Note that a value cannot be followed."""
        self.escapes[self.blame(name)(why)] = None

    def combined(self, name: str, left: Kind, right: Kind, exponent: object) -> Kind:
        """Return the kind of a result of two of Python's numbers."""
        blame = self.blame(name)
        broken = kinds.broken_of([left, right])
        if broken is not None:
            return broken
        if name == "mul":
            return kinds.product(left, right, blame)
        if name == "div":
            return kinds.quotient(left, right, blame)
        if name in ("add", "sub"):
            return kinds.added([left, right], blame)
        if name == "pow" and isinstance(left, Count) and isinstance(right, Constant) and isinstance(exponent, (int, float)):
            return Count(Scale(left.scale.degree * exponent, left.scale.counts))
        return Broken((blame("a number that is not proportional to the number of rows"),))


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
        blame = trace.blame(name)
        special = functions.rule_of(func, args, given)
        if special is not None:
            run, bound = special
            return run(trace, func, bound, blame)
        values = list(_values_in((args, given)))
        numbers = [value for value in values if isinstance(value, Followed)]
        is_arithmetic = name in _ARITHMETIC
        args = _without_numbers(args, trace, as_tensors=is_arithmetic)
        given = _without_numbers(given, trace, as_tensors=is_arithmetic)
        with self._operators.inside(name, has_sizes=bool(numbers) and not is_arithmetic):
            result = func(*args, **given)
        tensors = [value for value in values if isinstance(value, Tensor)]
        followed_kinds = [trace.known.kind(tensor, blame) for tensor in tensors]
        if all(isinstance(kind, Constant) for kind in followed_kinds) and not numbers:
            return result
        if numbers and not is_arithmetic:
            _check_sizes(trace, name, numbers, result, blame)
        if tensors and not all(isinstance(kind, Constant) for kind in followed_kinds):
            return _followed_result(trace, name, result, tensors[0], (args, given), blame)
        return result


def _name_of(function: Any) -> str:
    """Return the name of a function of torch. That of an attribute begins with ``__get__``."""
    name = str(getattr(function, "__name__", function))
    if name == "__get__":
        name += str(getattr(getattr(function, "__self__", None), "__name__", ""))
    return name


def _values_in(nest: Any) -> Iterator[Any]:
    """Yield tensors and numbers in nested arguments, bounds of slices too."""
    for leaf in compat.tree_leaves(nest):
        if isinstance(leaf, slice):
            yield from (leaf.start, leaf.stop, leaf.step)
        else:
            yield leaf


def _without_numbers(nest: Any, trace: Trace, *, as_tensors: bool) -> Any:
    """Return arguments with followed numbers as tensors, whose kinds operators see, or as plain numbers."""
    if isinstance(nest, dict):
        return {name: _without_numbers(value, trace, as_tensors=as_tensors) for name, value in nest.items()}
    if isinstance(nest, torch.Size):
        return torch.Size([plain(size) for size in nest])
    if type(nest) in (tuple, list):
        return type(nest)(_without_numbers(value, trace, as_tensors=as_tensors) for value in nest)
    if isinstance(nest, slice):
        return slice(plain(nest.start), plain(nest.stop), plain(nest.step))
    if not isinstance(nest, Followed):
        return nest
    if not as_tensors:
        return plain(nest)
    with compat.without_dispatch_modes():
        tensor = torch.tensor(plain(nest))
    trace.known.add(tensor, nest.kind)
    return tensor


def _check_sizes(trace: Trace, name: str, numbers: list[Followed], result: Any, blame: OperatorBlame) -> None:
    """Refuse results whose size, or whose entries, depend on the number of rows in another way than one entry for each row."""
    outputs = [value for value in compat.tree_leaves(result) if isinstance(value, Tensor)]
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


def _followed_result(trace: Trace, name: str, result: Any, first: Tensor, given: Any, blame: OperatorBlame) -> Any:
    """Return the result of a function of followed tensors: sizes and values as numbers with a kind."""
    kind = trace.known.kind(first, blame)
    outputs = [value for value in compat.tree_leaves(result) if isinstance(value, Tensor)]
    for output in outputs:
        if output not in trace.known:
            trace.known.add(output, Broken((blame("a result that no operator returned"),)))
    if outputs:
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
    """Return whether a result holds no number that depends on rows."""
    is_plain = result is None or isinstance(result, (bool, str, torch.dtype, torch.device, torch.layout))
    return is_plain or name in _PLAIN_READS or name.startswith("__get__grad") or name == "__setitem__"


def _followed_size(trace: Trace, result: Any, tensor: Tensor, kind: Kind, given: Any, blame: OperatorBlame) -> Any:
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


def size_kind(kind: Kind, blame: OperatorBlame) -> Kind:
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
        with compat.without_function_modes():
            blame = trace.blame("len")
            kind = trace.known.kind(value, blame)
        if isinstance(kind, Rows) and kind.dim != 0:
            return found
        return followed(found, size_kind(kind, blame), trace)  # type: ignore[no-any-return]

    builtins.len = len_of_rows  # type: ignore[assignment]
    try:
        yield
    finally:
        builtins.len = python_len


# ---------------------------------------------------------------------- operators


class _Operators(compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators, and applies the rules."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
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
        with compat.without_function_modes():
            return self._followed(func, args, kwargs or {})

    def _followed(self, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Run an operator, and note the kind of its result."""
        trace, known = self._trace, self._trace.known
        blame = trace.blame(func.__name__.partition(".")[0].strip("_"))
        op = Operation(func, args, given, lambda tensor: known.kind(tensor, blame), blame, trace.rows)
        if not self._has_sizes:
            trace.numbers.append((blame, _numbers_of(func, op)))
        result = func(*args, **given)
        if compat.reads_scalar(func):
            self._read(op)
            return result
        outputs = [value for value in compat.tree_leaves(result) if isinstance(value, Tensor)]
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
        written = [op.given[argument.name] for argument in compat.operator_schema(func).arguments if _is_written(argument)]
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
    for argument in compat.operator_schema(func).arguments:
        value = op.given[argument.name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and str(argument.type) in _NUMBER_TYPES:
            found.append(value)
    return tuple(found)


# ---------------------------------------------------------------------- lines


def _line_of(frame: FrameType | None) -> tuple[str, int, str]:
    """Return file, number and text of the user's line that a frame was called from, else of the innermost line outside of torch."""
    others: list[tuple[str, FrameType]] = []
    for each in callers(frame):
        file = each.f_code.co_filename
        if file == __file__ and each.f_code.co_name == "run":
            break
        package = package_of(file)
        if not package:
            return _shown(each)
        if not file.startswith(_FOLDER):
            others.append((package, each))
    # the line of another library, else torch's own method that the loss consists of
    of_libraries = [each for package, each in others if package not in ("torch", "python")]
    of_torch = [each for _, each in others if not each.f_code.co_name.endswith("_call_impl")]
    found = of_libraries[:1] or of_torch[-1:]
    return _shown(found[0]) if found else ("", 0, "")


def _shown(frame: FrameType) -> tuple[str, int, str]:
    file, line = frame.f_code.co_filename, frame.f_lineno
    return file, line, linecache.getline(file, line, frame.f_globals).strip()


_FOLDER = __file__.rpartition("tracing")[0]
