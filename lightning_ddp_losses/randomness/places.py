"""`RowPlace`: where the rows of a batch are in a tensor, and the shape that the tensor has in one process.

A tensor of ``B`` local rows is often laid out with the rows first, as ``(B, D)``. It may be ``(T, B, D)`` too, ``(B * H, T, T)`` in
attention, or ``(2 * B, D)`` after two views were concatenated. In one process the same tensor has ``G`` rows at the same place.

What is known of a tensor is a tuple of candidates, as sizes do not always tell: with one row, a dimension of size 1 may count the rows or
not. One candidate is certain. ``None`` is the candidate without rows. ``UNKNOWN`` is a tensor of which nothing can be said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor


class RowPlace(NamedTuple):
    """A dimension of size ``outer * B * inner`` that counts the rows.

    Attributes:
        dim: The dimension.
        outer: Number of blocks of all rows, one after the other (two views: 2).
        inner: Number of entries of each row next to each other (heads).
    """

    dim: int
    outer: int = 1
    inner: int = 1


UNKNOWN = RowPlace(-1)
"""The rows of a tensor, or a part of them, are in it, and nobody knows where."""

Candidates: TypeAlias = "tuple[RowPlace | None, ...]"

NO_ROWS: Candidates = (None,)

OF_PARAMETER: Candidates = (None, None)
"""No rows, as the tensor comes from parameters only. A part of it has none either."""


class Rows(NamedTuple):
    """The rows of this rank among those of all ranks.

    Attributes:
        local: Number of rows of this rank.
        start: Number of rows of the ranks before it.
        total: Number of rows of all ranks.
    """

    local: int
    start: int
    total: int


def whole_shape(shape: Sequence[int], place: RowPlace, total: int) -> list[int]:
    """Return the shape in one process with so many rows."""
    whole = list(shape)
    whole[place.dim] = place.outer * total * place.inner
    return whole


def own_part(whole: Tensor, place: RowPlace, rows: Rows) -> Tensor:
    """Return this rank's rows of a tensor of all rows, as a view where possible."""
    if place.outer == 1:
        return whole.narrow(place.dim, rows.start * place.inner, rows.local * place.inner)
    blocks = _blocks(whole, place, rows.total)
    own = blocks.narrow(place.dim + 1, rows.start * place.inner, rows.local * place.inner)
    return own.flatten(place.dim, place.dim + 1)


def put_own_(whole: Tensor, own: Tensor, place: RowPlace, rows: Rows) -> None:
    """Write this rank's rows into a tensor of all rows."""
    blocks = _blocks(whole, place, rows.total)
    target = blocks.narrow(place.dim + 1, rows.start * place.inner, rows.local * place.inner)
    target.copy_(_blocks(own, place, rows.local))


def _blocks(tensor: Tensor, place: RowPlace, rows: int) -> Tensor:
    """Return a tensor with one more dimension, for the blocks of all rows."""
    shape = list(tensor.shape)
    shape[place.dim : place.dim + 1] = [place.outer, rows * place.inner]
    strides = list(tensor.stride())
    step = strides[place.dim]
    strides[place.dim : place.dim + 1] = [step * rows * place.inner, step]
    return tensor.as_strided(shape, strides)


def empty_whole(like: Tensor, place: RowPlace, total: int) -> Tensor:
    """Return memory for all rows, in the order of memory that ``like`` has.

    A generator fills memory in its order, so a transposed tensor must be drawn transposed. Between equal strides, a dimension of size 1 is
    the inner one: the stride of a single row means nothing.
    """
    order = memory_order(like)
    shape = whole_shape(like.shape, place, total)
    memory = like.new_empty([shape[dim] for dim in order])
    return memory.permute([order.index(dim) for dim in range(like.ndim)])


def memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions of a tensor, the outermost in memory first."""
    strides, shape = tensor.stride(), tensor.shape
    return sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], shape[dim] == 1))


def elements_around(shape: Sequence[int], place: RowPlace) -> tuple[int, int]:
    """Return how many elements of a contiguous tensor there are for each step of the blocks before the rows, and within a row."""
    before = math.prod(shape[: place.dim]) * place.outer
    after = math.prod(shape[place.dim + 1 :]) * place.inner
    return before, after


def places_in_view(shape: Sequence[int], place: RowPlace, rows: int, new_shape: Sequence[int]) -> Candidates:
    """Return where the rows are after ``view``.

    Args:
        shape: Shape before.
        place: Place of the rows before.
        rows: Number of rows.
        new_shape: Shape after.

    Returns:
        One candidate if there are several rows. With one row, a boundary between two dimensions may belong to either of them.
    """
    before, after = elements_around(shape, place)
    found: list[RowPlace | None] = []
    for dim, size in enumerate(new_shape):
        prefix, suffix = math.prod(new_shape[:dim]), math.prod(new_shape[dim + 1 :])
        outer, outer_rest = divmod(before, prefix)
        inner, inner_rest = divmod(after, suffix)
        if not outer_rest and not inner_rest and outer * rows * inner == size:
            found.append(RowPlace(dim, outer, inner))
    # a dimension that holds the rows and nothing else is theirs
    exact = [each for each in found if each is not None and each.outer == 1 and each.inner == 1]
    return tuple(exact or found or [UNKNOWN])
