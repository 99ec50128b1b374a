"""`RowSizes`: sizes that are read from a tensor with rows are marked as numbers of rows.

``torch.rand(x.shape[0], 3)`` draws for rows, and the size in ``torch.rand(8, 3)`` may equal the number of rows by chance. Inside the mode,
``x.shape`` and ``x.size()`` return a subclass of ``int`` for the number of rows, and a tensor that is created with it has rows. ``len(x)``
is a plain number because Python converts it, so a draw of that size is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.errors import is_whole
from lightning_ddp_losses.randomness.notes import is_of_user
from lightning_ddp_losses.randomness.places import Mark


class SizeUse:
    """How a step uses sizes.

    Args:
        rows: Number of rows of this rank.

    Attributes:
        largest_harmless: A number below the number of rows of every rank and of one process, so that comparisons with it are harmless.
        has_escaped: Whether a number of rows became a plain number.
        branch: A comparison whose result may depend on the number of rows. Empty if there was none.
    """

    def __init__(self, rows: int) -> None:
        self.largest_harmless = min(rows - 1, 1)
        self.has_escaped = False
        self.branch = ""


class OtherSize(int):
    """A size that was read from a tensor with rows but is not the number of rows."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int.__int__(self),)


class RowCount(int):
    """A number of rows that was read from a tensor. Results computed from it are of type ``RowProduct``.

    Attributes:
        use: Records how it is used.
        of_two: The value that it would have if this rank had two rows.
    """

    use: SizeUse
    of_two: int

    @classmethod
    def of(cls, value: int, use: SizeUse, of_two: int) -> RowCount:
        """Return a number that records how it is used."""
        count = cls(value)
        count.use = use
        count.of_two = of_two
        return count

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int.__int__(self),)

    def __hash__(self) -> int:
        return int.__hash__(self)

    def _largest_harmless(self) -> int:
        return self.use.largest_harmless

    def _compare(self, other: Any, sign: str, value: Any) -> Any:
        is_size = isinstance(other, (RowCount, OtherSize))
        is_number = isinstance(other, (int, float)) and not is_size
        if is_number and other > self._largest_harmless() and _user_compares():
            self.use.branch = f"{int.__int__(self)} {sign} {other}"
        return value

    def __lt__(self, other: Any) -> Any:
        return self._compare(other, "<", int.__lt__(self, other))

    def __le__(self, other: Any) -> Any:
        return self._compare(other, "<=", int.__le__(self, other))

    def __gt__(self, other: Any) -> Any:
        return self._compare(other, ">", int.__gt__(self, other))

    def __ge__(self, other: Any) -> Any:
        return self._compare(other, ">=", int.__ge__(self, other))

    def __eq__(self, other: Any) -> Any:
        return self._compare(other, "==", int.__eq__(self, other))

    def __ne__(self, other: Any) -> Any:
        return self._compare(other, "!=", int.__ne__(self, other))

    def __int__(self) -> int:
        self.use.has_escaped = True
        return int.__int__(self)

    def __float__(self) -> float:
        self.use.has_escaped = True
        return int.__float__(self)


class RowProduct(RowCount):
    """A number that was computed from a number of rows. The result of any comparison may depend on the number of rows."""

    def _largest_harmless(self) -> int:
        return -(1 << 62)

    def __bool__(self) -> bool:
        return bool(self._compare(0, "!=", int.__bool__(self)))


def _computed(name: str) -> Callable[[RowCount, Any], Any]:
    operation = getattr(int, name)

    def compute(self: RowCount, *others: Any) -> Any:
        value = operation(self, *others)
        if type(value) is int:
            return RowProduct.of(value, self.use, _computed_of_two(operation, self, others))
        self.use.has_escaped = True
        return value

    return compute


def _computed_of_two(operation: Callable[..., Any], count: RowCount, others: Sequence[Any]) -> int:
    """Return the result of an operation if this rank had two rows, or -1, which is not a valid size, if the operation then fails."""
    others_of_two = [other.of_two if isinstance(other, RowCount) else other for other in others]
    try:
        value = operation(count.of_two, *others_of_two)
    except (ArithmeticError, ValueError):
        return -1
    return int(value) if type(value) is int else -1


for _name in (
    *("__mul__", "__rmul__", "__add__", "__radd__", "__sub__", "__rsub__", "__floordiv__", "__rfloordiv__", "__mod__"),
    *("__rmod__", "__pow__", "__rpow__", "__neg__", "__pos__", "__abs__", "__truediv__", "__rtruediv__", "__and__"),
    *("__or__", "__xor__", "__lshift__", "__rshift__", "__invert__", "__trunc__", "__round__", "__divmod__"),
):
    setattr(RowCount, _name, _computed(_name))


def _user_compares() -> bool:
    """Return whether the comparison, three frames up, is in the user's code."""
    frame: Any = inspect.currentframe()
    for _ in range(3):
        if frame is not None:
            frame = frame.f_back
    return frame is not None and is_of_user(frame)


class RowSizes(TorchFunctionMode):
    """Marks sizes that are read from tensors with rows, and records sizes with which a tensor is created.

    Args:
        mark_of: Returns the mark of a tensor.
        rows: Number of rows of this rank.
        run_call: Runs a call of the user.

    Attributes:
        use: How the step uses sizes.
        is_in_call: Whether a call of Python runs.
        is_paused: Whether sizes are currently read by the code that tracks the rows.
        given: Sizes of the shape that the user's call specifies. None outside of such a call.
        numbers: All numbers among the arguments of such a call.
        reads_draws: Called for a call that reads draws into Python.
        shares_memory: Called for a tensor whose memory other code may write to.
    """

    def __init__(
        self, mark_of: Callable[[Tensor], Mark], rows: int, run_call: Callable[[Any, Any, dict[str, Any]], Any]
    ) -> None:
        super().__init__()
        self._mark_of = mark_of
        self._run_call = run_call
        self._rows = rows
        self.use = SizeUse(rows)
        self.is_in_call = False
        self.is_paused = False
        self.given: tuple[Any, ...] | None = None
        self.numbers: tuple[Any, ...] = ()
        self.reads_draws: Callable[[str], None] | None = None
        self.shares_memory: Callable[[Tensor], None] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if getattr(func, "__self__", None) is Tensor.shape:
            return self._with_rows(args[0], func(*args, **kwargs))
        if func is Tensor.size:
            return self._size(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in _ESCAPES and isinstance(args[0], Tensor):
            self._escape(name, args[0])
        was_in_call, self.is_in_call = self.is_in_call, name not in _BACKWARD
        try:
            if name in _MAKERS or name in _DROP_CHANNELS:
                return self._run_with_sizes(name, func, args, kwargs)
            return self._run_call(func, args, kwargs)
        finally:
            self.is_in_call = was_in_call

    def _run_with_sizes(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a call that creates a tensor or a view from sizes."""
        before = self.given, self.numbers
        if name in _DROP_CHANNELS:
            self.given = tuple(self._with_rows(args[0], args[0].shape)[:2])  # of the noise, one number for each channel
        else:
            self.given = _sizes_among(name, args, kwargs)
        self.numbers = tuple(value for value in [*args, *kwargs.values()] if isinstance(value, int))
        try:
            return self._run_call(func, args, kwargs)
        finally:
            self.given, self.numbers = before

    def declared_dims(self) -> list[int]:
        """Return the dimensions whose sizes were read from a tensor with rows, among those of the user's call."""
        if self.given is None:
            return []
        return [dim for dim, size in enumerate(self.given) if type(size) is RowCount]

    def is_computed(self) -> bool:
        """Return whether a size of the user's call was computed from a number of rows."""
        return self.given is not None and any(isinstance(size, RowProduct) for size in self.given)

    def has_escaped(self) -> bool:
        """Return whether a number of rows became a plain number. Layers that run again in backward were checked in forward."""
        return self.use.has_escaped and torch_compat.graph_task_id() == -1

    def may_count_rows(self, size: int) -> bool:
        """Return whether a number that was not read as a number of rows may be a number of rows."""
        if isinstance(size, OtherSize):
            return False
        if self.has_escaped():
            return size > 0 and size % self._rows == 0
        return size == self._rows

    def _with_rows(self, tensor: Tensor, shape: torch.Size) -> torch.Size:
        place = self._mark_of(tensor).place
        if place is None:
            return shape
        sizes: list[int] = [OtherSize(size) for size in shape]
        kind = RowCount if place.outer == place.inner == 1 else RowProduct
        sizes[place.dim] = kind.of(shape[place.dim], self.use, 2 * place.outer * place.inner)
        return torch.Size(sizes)

    def _size(self, func: Any, args: Any, kwargs: Any) -> Any:
        size = func(*args, **kwargs)
        if isinstance(size, torch.Size):
            return self._with_rows(args[0], size)
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        if not isinstance(dim, int):
            return size
        return self._with_rows(args[0], args[0].shape)[dim]

    def _escape(self, name: str, tensor: Tensor) -> None:
        mark = self._mark_of(tensor)
        if mark.place is not None or mark.is_lost:
            self.use.has_escaped = self.use.has_escaped or name in _COUNTS
        has_rows = mark.place is not None or tensor.numel() > 1
        if mark.is_drawn and name in _READS and has_rows and self.reads_draws is not None:
            self.reads_draws(name)
        if name in _SHARES and self.shares_memory is not None:
            self.shares_memory(tensor)


def _sizes_among(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the sizes among the arguments of a call that creates a tensor or a view. None represents an unchanged size."""
    if name == "unflatten":
        return _sizes_unflattened(*args, **kwargs)
    for value in [*kwargs.values(), *reversed(args)]:
        if isinstance(value, (tuple, list)):
            return tuple(value)
    return tuple(value for value in args if is_whole(value))


def _sizes_unflattened(tensor: Tensor, dim: int, sizes: Sequence[Any]) -> tuple[Any, ...]:
    dim %= tensor.ndim
    return (*[None] * dim, *sizes, *[None] * (tensor.ndim - dim - 1))


_BACKWARD = {"backward", "grad"}
_COUNTS = {"__len__", "numel", "nelement", "stride", "tolist", "numpy", "nbytes", "ndimension"}
_READS = {"tolist", "numpy", "__array__", "__iter__", "__dlpack__"}
_SHARES = {"numpy", "__array__", "__dlpack__", "data_ptr"}
_ESCAPES = _COUNTS | _READS | _SHARES

_DROP_CHANNELS = {
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_alpha_dropout",
    "feature_alpha_dropout_",
    "feature_dropout",
    "feature_dropout_",
}

_MAKERS = {
    "view",
    "reshape",
    "unflatten",
    "expand",
    "broadcast_to",
    "repeat",
    "tile",
    "split",
    "split_with_sizes",
    "unsafe_split",
    "rand",
    "randn",
    "randint",
    "randperm",
    "normal",
    "empty",
    "zeros",
    "ones",
    "full",
    "arange",
    "linspace",
    "eye",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
}
