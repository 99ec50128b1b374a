"""`RowSizes`: sizes that are read from a tensor with rows remember that they count rows.

``torch.rand(x.shape[0], 3)`` draws for rows, and ``torch.rand(8, 3)`` may do so by chance. Inside the mode, ``x.shape`` and ``x.size()``
give an ``int`` for the rows that says so, and a tensor that is made with it has rows. ``len(x)`` is a plain number: Python makes one of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_ddp_losses.randomness.row_tracker import RowTracker


class RowCount(int):
    """A number of rows that was read from a tensor. What is computed from it is a ``RowProduct``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)

    def __mul__(self, other: Any) -> Any:
        return _product(int.__mul__(self, other), other)

    def __rmul__(self, other: Any) -> Any:
        return _product(int.__rmul__(self, other), other)

    def __add__(self, other: Any) -> Any:
        return _product(int.__add__(self, other), other)

    def __radd__(self, other: Any) -> Any:
        return _product(int.__radd__(self, other), other)

    def __sub__(self, other: Any) -> Any:
        return _product(int.__sub__(self, other), other)

    def __floordiv__(self, other: Any) -> Any:
        return _product(int.__floordiv__(self, other), other)


class RowProduct(RowCount):
    """A number that was computed from a number of rows."""


def _product(value: Any, other: Any) -> Any:
    """Return a computed number, which still says that it comes from rows. One row less or more is another number of rows."""
    if value is NotImplemented or not isinstance(other, int):
        return value
    return RowProduct(value)


class RowSizes(TorchFunctionMode):
    """Marks sizes that are read from tensors with rows, and notes those with which a tensor is made.

    Args:
        tracker: Knows the tensors with rows.

    Attributes:
        declared: While a tensor is made or viewed with sizes: the dimension whose size was read from a tensor with rows. None: none was.
        is_computed: Whether a size was computed from a number of rows.
    """

    def __init__(self, tracker: RowTracker) -> None:
        super().__init__()
        self._tracker = tracker
        self.declared: int | None = None
        self.is_computed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is Tensor.shape:
            return self._with_rows(args[0], func(*args, **kwargs))
        if func is Tensor.size:
            return self._size(func, args, kwargs)
        if func is Tensor.contiguous and self._tracker.rows == 1:
            return _contiguous(func, args, kwargs)
        if getattr(func, "__name__", "") not in _MAKERS:
            return func(*args, **kwargs)
        before = self.declared, self.is_computed
        self._note_sizes(args, kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            self.declared, self.is_computed = before

    def _with_rows(self, tensor: Tensor, shape: torch.Size) -> torch.Size:
        place = self._tracker.certain_place(tensor)
        if place is None:
            return shape
        sizes = list(shape)
        kind = RowCount if place.outer == place.inner == 1 else RowProduct
        sizes[place.dim] = kind(sizes[place.dim])
        return torch.Size(sizes)

    def _size(self, func: Any, args: Any, kwargs: Any) -> Any:
        size = func(*args, **kwargs)
        if isinstance(size, torch.Size):
            return self._with_rows(args[0], size)
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        if not isinstance(dim, int):
            return size
        return self._with_rows(args[0], torch.Size(args[0].shape))[dim]

    def _note_sizes(self, args: Any, kwargs: Any) -> None:
        """Look for a number of rows among the sizes of a tensor that is made."""
        numbers = [*args, *kwargs.values()]
        self.is_computed = any(isinstance(number, RowProduct) for number in _flat(numbers))
        self.declared = None
        for number in numbers:
            if isinstance(number, (tuple, list)):
                self._declare(number)
        self._declare([number for number in args if isinstance(number, int) and not isinstance(number, bool)])

    def _declare(self, sizes: Sequence[Any]) -> None:
        for dim, size in enumerate(sizes):
            if isinstance(size, RowCount):
                # rows in two dimensions are as uncertain as a computed number of them
                self.is_computed = self.is_computed or self.declared is not None
                self.declared = dim


def _contiguous(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a contiguous tensor of one row whose strides are those of several rows: torch leaves a stride of size 1 as it is."""
    tensor = func(*args, **kwargs)
    if len(args) > 1 or kwargs or tensor.stride() == _row_major(tensor.shape):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _flat(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, (tuple, list)):
            found += value
        else:
            found.append(value)
    return found


_MAKERS = {
    "view",
    "reshape",
    "unflatten",
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
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
}
