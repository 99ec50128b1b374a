"""`RowPlace` and `Mark`: the position of the batch's rows in a tensor of a step.

A tensor of ``B`` local rows often has the rows first, as in ``(B, D)``. It may also be ``(T, B, D)``, ``(B * H, T, T)`` in attention, or
``(2 * B, D)`` after two views were concatenated. In one process, the same tensor has ``G`` rows in the same position.

With one row, sizes and strides do not show which dimension contains the rows (``one_row``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class RowPlace(NamedTuple):
    """A dimension of size ``outer * B * inner`` that contains the rows.

    Attributes:
        dim: The dimension.
        outer: Number of consecutive blocks of all rows (2 for two views).
        inner: Number of consecutive entries of each row (heads).
    """

    dim: int
    outer: int = 1
    inner: int = 1


class Mark(NamedTuple):
    """Information about a tensor.

    Attributes:
        place: Position of the rows. None if no dimension is known to contain them.
        is_lost: Whether it may contain rows in an unknown position or order.
        is_drawn: Whether its values were computed only from draws.
        is_summed: Whether it contains sums of draws over this rank's rows.
        is_order: Whether its values are indices of rows of all ranks.
    """

    place: RowPlace | None = None
    is_lost: bool = False
    is_drawn: bool = False
    is_summed: bool = False
    is_order: bool = False


WITHOUT_ROWS = Mark()
LOST = Mark(is_lost=True)


class Rows(NamedTuple):
    """The rows of this rank among the rows of all ranks.

    Attributes:
        local: Number of rows of this rank.
        start: Number of rows of all lower ranks.
        total: Number of rows of all ranks.
        order: Index of each local row among all rows. If None, they are consecutive, beginning at ``start``.
    """

    local: int
    start: int
    total: int
    order: tuple[int, ...] | None = None


def whole_shape(shape: Sequence[int], place: RowPlace, total: int) -> list[int]:
    """Return the shape in one process with ``total`` rows."""
    whole = list(map(int, shape))
    whole[place.dim] = place.outer * total * place.inner
    return whole


def own_part(whole: Tensor, place: RowPlace, rows: Rows) -> Tensor:
    """Return this rank's rows of a tensor of all rows, as a view if possible."""
    if rows.order is not None:
        own = empty_whole(whole, place, rows.local)
        picked = _rows_apart(whole, place, rows.total)[_at(place, rows.order)]
        _rows_apart(own, place, rows.local).copy_(picked)
        return own
    if place.outer == 1:
        return whole.narrow(place.dim, rows.start * place.inner, rows.local * place.inner)
    blocks = _blocks(whole, place, rows.total)
    own = blocks.narrow(place.dim + 1, rows.start * place.inner, rows.local * place.inner)
    return own.flatten(place.dim, place.dim + 1)


def put_own_(whole: Tensor, own: Tensor, place: RowPlace, rows: Rows) -> None:
    """Write this rank's rows into a tensor of all rows."""
    if rows.order is not None:
        _rows_apart(whole, place, rows.total)[_at(place, rows.order)] = _rows_apart(own, place, rows.local)
        return
    blocks = _blocks(whole, place, rows.total)
    target = blocks.narrow(place.dim + 1, rows.start * place.inner, rows.local * place.inner)
    target.copy_(_blocks(own, place, rows.local))


def _blocks(tensor: Tensor, place: RowPlace, rows: int) -> Tensor:
    """Return a view with an additional dimension for the blocks of all rows."""
    shape = list(tensor.shape)
    shape[place.dim : place.dim + 1] = [place.outer, rows * place.inner]
    strides = list(tensor.stride())
    step = strides[place.dim]
    strides[place.dim : place.dim + 1] = [step * rows * place.inner, step]
    return tensor.as_strided(shape, strides)


def _rows_apart(tensor: Tensor, place: RowPlace, rows: int) -> Tensor:
    """Return a view in which the dimension of the rows is split into blocks, rows, and entries of a row."""
    shape = list(tensor.shape)
    shape[place.dim : place.dim + 1] = [place.outer, rows, place.inner]
    strides = list(tensor.stride())
    step = strides[place.dim]
    strides[place.dim : place.dim + 1] = [step * rows * place.inner, step * place.inner, step]
    return tensor.as_strided(shape, strides)


def rows_first(tensor: Tensor, place: RowPlace, rows: int) -> Tensor:
    """Return a view with the rows in dimension 0, followed by all other dimensions. Blocks and entries of a row are dimensions, too."""
    return _rows_apart(tensor, place, rows).movedim(place.dim + 1, 0)


def _at(place: RowPlace, order: Sequence[int]) -> tuple[Any, ...]:
    """Return the index of rows in the result of ``_rows_apart``."""
    return (*[slice(None)] * (place.dim + 1), list(order))


def empty_whole(like: Tensor, place: RowPlace, total: int) -> Tensor:
    """Return an uninitialized tensor for all rows, with the same order of dimensions in memory as ``like``.

    A generator fills memory in order, so a transposed tensor must be drawn transposed.
    """
    order = memory_order(like)
    shape = whole_shape(like.shape, place, total)
    memory = like.new_empty([shape[dim] for dim in order])
    return memory.permute([order.index(dim) for dim in range(like.ndim)])


def memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions of a tensor, outermost in memory first. At equal strides, dimensions of size 1 come last."""
    strides, shape = tensor.stride(), tensor.shape
    return sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], shape[dim] == 1))


def is_dense(tensor: Tensor) -> bool:
    """Return whether each position in a tensor's memory belongs to exactly one element."""
    step = 1
    for dim in reversed(memory_order(tensor)):
        if tensor.shape[dim] == 1:
            continue
        if tensor.stride(dim) != step:
            return False
        step *= tensor.shape[dim]
    return True


def place_in_view(shape: Sequence[int], place: RowPlace, rows: int, new_shape: Sequence[int]) -> RowPlace | None:
    """Return the position of the rows after ``view``, or None if no dimension contains them. With two or more rows it is unique.

    Args:
        shape: Shape before the view.
        place: Position of the rows before the view.
        rows: Number of rows.
        new_shape: Shape after the view.
    """
    before = math.prod(shape[: place.dim]) * place.outer
    after = math.prod(shape[place.dim + 1 :]) * place.inner
    for dim, size in enumerate(new_shape):
        prefix, suffix = math.prod(new_shape[:dim]), math.prod(new_shape[dim + 1 :])
        if not prefix or not suffix:
            return None
        outer, outer_rest = divmod(before, prefix)
        inner, inner_rest = divmod(after, suffix)
        if not outer_rest and not inner_rest and outer * rows * inner == size:
            return RowPlace(dim, outer, inner)
    return None
