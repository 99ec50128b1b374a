"""`GlobalRows`: a tensor of the rows of all ranks, of which this rank holds its own rows.

Its shape is the global shape, (G, ...), so ``len(x)``, ``x.shape[0]``, means and branches in a formula are the same as in one process.
Operators follow rules (``RULES``), which compute on this rank's rows with torch's autograd and exchange sums and rows (``RowsCall``). An
operator without a rule is called with the rows of all ranks, which is exact but more expensive. It is an error if such an operator writes
into rows, or if its result shares memory with rows and is written to, because the write would be lost.

Rules are applied above autograd (``__torch_function__``). An operator that reaches torch's dispatcher with such a tensor has not followed a
rule and raises an error, because the tensor does not have memory.

Legend: ``W`` ranks, ``B`` rows on this rank (may differ, may be 0), ``G`` their sum.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import inputs, torch_compat
from lightning_ddp_losses.distributed.rows.call import (
    RowsCall,
    is_in_custom_function,
    line_of_loss,
    number_of_checkpoints,
)
from lightning_ddp_losses.distributed.rows.maps import collect, gather
from lightning_ddp_losses.distributed.rows.nests import mapped, numbers_in, tensors_in
from lightning_ddp_losses.distributed.rows.pending import PendingValue, plain_of
from lightning_ddp_losses.errors import ConfigurationError, InputError

NO_RULE: Any = object()
"""What a rule returns for arguments that it does not cover."""

_FIX = "Write it with operators of torch on the arguments, or use GlobalBatchLoss(..., mode='replicated'), which hands in plain tensors."


_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim"}


class Rule(NamedTuple):
    """How an operator is applied to rows.

    Attributes:
        kind: ``"local"`` (row by row), ``"sum"`` (reduces the rows), ``"product"``, ``"view"``, ``"select"`` (selects rows),
            ``"loss"`` (row by row, then a sum), ``"value"`` (reads rows on the host), ``"fact"`` (does not read rows) or ``"error"``.
        run: Called with the operator, its positional arguments and its keyword arguments. Returns ``NO_RULE`` if it does not cover them.
    """

    kind: str
    run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


RULES: dict[Any, Rule] = {}
"""Rules by operator, which is a function or method of torch as passed to ``__torch_function__``. Operators without a rule gather."""

_OWNERS = (torch, Tensor, nn.functional, torch.special, torch.linalg, *torch_compat.compiled_modules())


def rule(kind: str, *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the rule of all functions and methods of torch that have one of these names."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        for name in " ".join(names).split():
            for owner in _OWNERS:
                operator = getattr(owner, name, None)
                if callable(operator):
                    RULES[operator] = Rule(kind, run)
        return run

    return register


class GlobalRows(Tensor):
    """Rows of all ranks, of which this rank holds its own rows.

    Args:
        local: (..., B, ...), this rank's rows, with their graph.
        counts: B of each rank.
        dim: The dimension of the rows.
        call: The call that they belong to.
    """

    _local: Tensor
    _counts: tuple[int, ...]
    _dim: int
    _call: RowsCall
    _ndim: int
    _shape: tuple[int, ...]

    @staticmethod
    def __new__(cls, local: Tensor, counts: tuple[int, ...], dim: int, call: RowsCall) -> GlobalRows:
        """Create a tensor with the global shape and without memory."""
        shape = list(local.shape)
        shape[dim] = sum(counts)
        rows: GlobalRows = torch_compat.without_memory(cls, shape, local.dtype, local.device)
        rows._local = local
        rows._counts = counts
        rows._dim = dim
        rows._call = call
        rows._ndim = len(shape)
        rows._shape = tuple(shape)
        return rows

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Show shapes but no values, which would start an exchange. A debugger must not do that."""
        return (
            f"GlobalRows(rows of this rank: {tuple(self._local.shape)}, of all ranks: {self._counts}, dim={self._dim})"
        )

    def _same(self, local: Tensor, dim: int | None = None, counts: tuple[int, ...] | None = None) -> GlobalRows:
        """Return different rows of the same call, with the same dimension and counts unless these are given."""
        return GlobalRows(local, counts or self._counts, self._dim if dim is None else dim, self._call)

    def _gathered(self, operator: str) -> Tensor:
        """Return the rows of all ranks as a plain tensor."""
        return gather(self._call, self._local, self._counts, self._dim, operator)

    def _collected(self, operator: str) -> Tensor:
        """Return the rows of all ranks, as an operand of this rank's rows."""
        return collect(self._call, self._local, self._counts, self._dim, operator)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Apply the rule of an operator, or call the operator with the rows of all ranks."""
        kwargs = _renamed(kwargs) if kwargs else {}
        known = RULES.get(func)
        if known is not None and known.kind == "fact":
            return known.run(func, args, kwargs)
        # for a comparison, ``types`` contains only the type of the first operand
        if (len(types) > 1 and PendingValue in types) or (len(args) == 2 and type(args[1]) is PendingValue):
            args, kwargs = mapped(plain_of, (args, kwargs))
            types = [each for each in types if each is not PendingValue]
        _refuse_place(func, types)
        if getattr(func, "__module__", "") == nn.functional.__name__ and hasattr(func, "__code__"):
            _refuse_lost_arguments(func, args, kwargs)
        first = first_rows(args, kwargs)
        if first is not None:
            first._call.note_operation(operation_text(func, args, kwargs))
            if first._call.is_over:
                _refuse_after_the_call(func)
        if known is not None and (args or known.kind == "loss"):
            result = known.run(func, args, kwargs)
            if result is not NO_RULE:
                return result
        return _on_all_rows(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Reject operators that have not followed a rule."""
        raise _transform_error(f"operator {func}", "a transform (torch.func, vmap), a compiled function or a kernel")


# ---------------------------------------------------------------------- arguments


def _renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by torch's names, without ``out=None``, which functions of torch pass on."""
    found = {_NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()}
    if found.get("out", found) is None:
        del found["out"]
    return found


def first_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalRows | None:
    """Return the first rows among arguments."""
    for value in args:
        if type(value) is GlobalRows:
            return value
    return next((value for value in tensors_in((args, kwargs)) if isinstance(value, GlobalRows)), None)


@functools.lru_cache(maxsize=4096)
def name_of(func: Any) -> str:
    """Return the name of an operator."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return f"attribute {getattr(getattr(func, '__self__', None), '__name__', '')!r}"
    return str(name)


def operation_text(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return an operator and its numbers in the form in which ranks compare them."""
    text = name_of(func)
    numbers = numbers_in(args)
    if numbers:
        text += " " + numbers
    return f"{text} {numbers_in(kwargs.values())}" if kwargs else text


# ---------------------------------------------------------------------- operators without a rule


def _on_all_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator with rows replaced by the rows of all ranks.

    Raises:
        InputError: if the operator writes into rows.

    Communication: a gather for each argument with rows.
    """
    operator = name_of(func)
    if any(isinstance(each, GlobalRows) for each in tensors_in(kwargs.get("out"))):
        raise write_error(f"{operator} with out=")
    found: dict[int, tuple[GlobalRows, Tensor]] = {}

    def gathered(value: Tensor) -> Tensor:
        if not isinstance(value, GlobalRows):
            return value
        if id(value) not in found:
            found[id(value)] = value, value._gathered(operator)
        return found[id(value)][1]

    args, kwargs = mapped(gathered, (args, kwargs))
    versions = {key: whole._version for key, (_, whole) in found.items()}
    result = func(*args, **kwargs)
    for key, (_, whole) in found.items():
        if whole._version != versions[key]:
            raise write_error(operator)
    memory = {torch_compat.memory_key(whole): rows for rows, whole in found.values()}
    for tensor in tensors_in(result):
        if tensor.layout == torch.strided and torch_compat.memory_key(tensor) in memory:
            rows = memory[torch_compat.memory_key(tensor)]
            rows._call.watch(tensor, operator)
            rows._call.watch_rows(rows._local, operator)
    return result


def write_error(operator: str) -> InputError:
    """Return the error for a write into rows that is not covered by a rule."""
    return InputError(
        f"{operator} on rows of all ranks",
        expected="an operator that returns its result, or a write of which each row follows from the same row",
        got=f"a write in place, at {line_of_loss(inspect.currentframe())}",
        fix="Use the operator without the underscore (out of place).",
    )


def _transform_error(operator: str, where: str) -> InputError:
    """Return the error for an operator that is not called directly by the formula."""
    return InputError(
        f"{operator} on rows of all ranks",
        expected="an operator that is called by the formula itself",
        got=f"one inside {where}, at {line_of_loss(inspect.currentframe())}",
        fix=_FIX,
    )


def memory_error(what: str, line: str) -> InputError:
    """Return the error for an operation that reads or replaces memory, which rows do not have."""
    return InputError(
        what,
        expected="operators that compute with the rows: they have no memory of their own",
        got=f"it, at {line}",
        fix="Use mode='replicated' of GlobalBatchLoss for a formula that needs it.",
    )


def _refuse_place(func: Any, types: Any) -> None:
    """Reject an operator in a context in which its gradient or its exchange would be lost."""
    if inputs.is_capturing():
        raise inputs.capture_error(f"{name_of(func)} on rows of all ranks")
    if torch_compat.is_in_transform():
        raise _transform_error(name_of(func), "a transform (torch.func, vmap)")
    others = [
        each for each in types if each is not GlobalRows and not issubclass(each, nn.Parameter) and each is not Tensor
    ]
    if others:
        raise InputError(
            f"{name_of(func)} on rows of all ranks",
            expected="plain tensors next to them",
            got=f"{others[0].__name__}, at {line_of_loss(inspect.currentframe())}",
            fix="Convert it to a plain tensor first: x.as_subclass(torch.Tensor).",
        )
    if not torch.is_grad_enabled():
        _refuse_custom_function(func)
    elif torch_compat.are_saved_tensors_hooked() and number_of_checkpoints() > 1:
        raise ConfigurationError(
            f"{name_of(func)} on rows of all ranks",
            expected="one checkpoint around it",
            got=f"one inside another one, at {line_of_loss(inspect.currentframe())}",
            fix="Leave out the inner or the outer one: backward of the inner one cannot compute its rows once more.",
        )


@functools.lru_cache(maxsize=1024)
def _signature_of(func: Any) -> inspect.Signature:
    return inspect.signature(func)


def _refuse_lost_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Reject a function of torch that does not pass on all of its arguments, such as the weight of ``l1_loss`` (torch 2.13)."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not func.__code__:
        # the function calls ``handle_torch_function``, so only frames of this module and of torch.overrides are in between
        is_between = frame.f_globals.get("__name__") in (__name__, "torch.overrides")
        frame = frame.f_back if is_between else None
    if frame is None:
        return
    given = _signature_of(func).bind_partial(*args, **kwargs).arguments
    for name, parameter in _signature_of(func).parameters.items():
        value = frame.f_locals.get(name)
        is_lost = name not in given and value is not None and value is not parameter.default
        if is_lost and (isinstance(value, Tensor) or value != parameter.default):
            raise InputError(
                f"{name_of(func)} on rows of all ranks",
                expected=f"{name}=None: torch does not hand it on",
                got=f"{type(value).__name__}, at {line_of_loss(inspect.currentframe())}",
                fix="Write the formula by hand: (weight * (input - target).abs()).sum() / weight.sum() for a weighted l1_loss.",
            )


def _refuse_after_the_call(func: Any) -> None:
    """Reject rows that were stored by an earlier call, except during backward, where a checkpoint recomputes."""
    if torch_compat.graph_task_id() != -1:
        return
    raise InputError(
        f"{name_of(func)} on rows of all ranks",
        expected="rows of this call",
        got=f"rows that were kept from an earlier call, at {line_of_loss(inspect.currentframe())}",
        fix="Keep sums of rows, or what is computed from them.",
    )


def _refuse_custom_function(func: Any) -> None:
    """Reject operators in the forward of a custom ``autograd.Function``, whose backward would not receive rows."""
    if is_in_custom_function():
        raise ConfigurationError(
            f"{name_of(func)} on rows of all ranks",
            expected="operators that autograd differentiates",
            got=f"one in a custom autograd.Function, at {line_of_loss(inspect.currentframe())}",
            fix="Its backward would get no rows. " + _FIX,
        )
