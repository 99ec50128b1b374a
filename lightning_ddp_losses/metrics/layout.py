"""Where each rank's piece of each state lies in the buffer that holds all of them.

Legend: ``W`` ranks, ``B`` rows on this rank (may differ, may be 0), ``G`` their sum. A state is of one of three kinds:

| kind | of | gathered |
|---|---|---|
| ``stack`` | a tensor, equal in shape on all ranks | (W, ...) |
| ``rows`` | a tensor or a list reduced by "cat": pieces (B, ...) | (G, ...), or no tensor where no rank has a piece |
| ``list`` | any other list | the pieces of all ranks, each with its own shape |

Pieces of a list are ordered as one process would have appended them: by update first, by rank second. So rows that were
collected over an epoch come out in the order of one process too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics.utilities.data import dim_zero_cat

from lightning_ddp_losses.errors import RankMismatchError

Kind = Literal["stack", "rows", "list"]
Slot = tuple[int, int]  # first byte and number of bytes
_ALIGN = 16  # bytes; a tensor of any dtype may start there


@dataclass(frozen=True)
class State:
    """A state on its way to the other ranks.

    Attributes:
        name: As messages name it: metric and state.
        value: A tensor, or a list of tensors.
        device: Where the metric lives; pieces of a list that lie elsewhere are moved there.
        reduce: torchmetrics' reduction: a function of the stacked tensors or of the list; None: none.
        weight: This rank's rows; a mean over ranks is one over their rows.
        untouched: Nothing was ever put in: the default.
    """

    name: str
    value: Tensor | list[Tensor]
    device: torch.device
    reduce: Callable[..., Any] | None
    weight: float = 1.0
    untouched: bool = False

    @property
    def kind(self) -> Kind:
        """How it is gathered."""
        if self.reduce is dim_zero_cat:
            return "rows"
        return "stack" if isinstance(self.value, Tensor) else "list"


@dataclass(frozen=True)
class Region:
    """A tensor inside the buffer.

    Attributes:
        start: First byte.
        dtype: Of the tensor.
        shape: Of the tensor.
    """

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, buffer: Tensor) -> Tensor:
        """The tensor, in the buffer's memory; not a view to autograd, so that it may be changed in place."""
        strides, step = [], 1
        for n in reversed(self.shape):
            strides.append(step)
            step *= max(n, 1)
        offset = self.start // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=buffer.device)
        return empty.set_(buffer.untyped_storage(), offset, self.shape, strides[::-1])


@dataclass(frozen=True)
class Layout:
    """The buffer.

    Attributes:
        size: Bytes, a multiple of 8.
        slots: For each rank, where its pieces lie, in the order of ``pieces_of`` over all states.
        regions: For each state the tensors to read: one, none, or one per piece (``list``).
        places: For each rank and each of its pieces: state, region of that state, first row (None: all of it), rows.
    """

    size: int
    slots: tuple[tuple[Slot, ...], ...]
    regions: tuple[tuple[Region, ...], ...]
    places: tuple[tuple[tuple[int, int, int | None, int], ...], ...]


def pieces_of(kind: Kind, value: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The tensors that travel, each with at least one dimension where they are rows, in one dtype."""
    if kind != "rows":
        return [value] if isinstance(value, Tensor) else list(value)
    rows = [value] if isinstance(value, Tensor) else list(value)
    rows = [piece.reshape(1) if piece.ndim == 0 else piece for piece in rows]
    dtypes = {piece.dtype for piece in rows}
    if len(dtypes) > 1:  # as torch.cat joins them
        wide = rows[0].dtype
        for piece in rows:
            wide = torch.promote_types(wide, piece.dtype)
        rows = [piece.to(wide) for piece in rows]
    return rows


def table_of_contents(kinds: Sequence[Kind], pieces: Sequence[Sequence[Tensor]]) -> str:
    """Shapes and dtypes of the pieces that may differ between ranks, as runs of equal ones."""
    if all(kind == "stack" for kind in kinds):
        return "[]"
    found = []
    for kind, tensors in zip(kinds, pieces, strict=True):
        if kind == "stack":
            continue
        runs: list[list[object]] = []
        for tensor in tensors:
            entry = [str(tensor.dtype)[6:], list(tensor.shape)]
            if runs and runs[-1][1:] == entry:
                runs[-1][0] += 1  # type: ignore[operator]
            else:
                runs.append([1, *entry])
        found.append(runs)
    return json.dumps(found, separators=(",", ":"))


@lru_cache(maxsize=64)
def lay_out(
    title: str,
    names: tuple[str, ...],
    kinds: tuple[Kind, ...],
    fixed: tuple[tuple[torch.dtype, tuple[int, ...]] | None, ...],
    contents: tuple[str, ...],
) -> Layout:
    """Place everything.

    Args:
        title: What the states belong to, for messages.
        names: Of the states.
        kinds: Of the states.
        fixed: dtype and shape of each ``stack``, None for the others.
        contents: Each rank's ``table_of_contents``.

    Raises:
        RankMismatchError: where rows of ranks cannot stand in one tensor, naming the state.
    """
    variable = [_expand(text) for text in contents]
    world, size, index = len(contents), 0, 0
    regions: list[tuple[Region, ...]] = []
    slots: list[list[Slot]] = [[] for _ in range(world)]
    places: list[list[tuple[int, int, int | None, int]]] = [[] for _ in range(world)]
    for state, (kind, stack) in enumerate(zip(kinds, fixed, strict=True)):
        if stack is not None:
            dtype, shape = stack
            length = _bytes(dtype, shape)
            for rank in range(world):
                slots[rank].append((size + rank * length, length))
                places[rank].append((state, 0, rank, 1))
            regions.append((Region(size, dtype, (world, *shape)),))
            size = _aligned(size + world * length)
            continue
        lists = [ranks[index] for ranks in variable]
        index += 1
        order = [(r, k) for k in range(max(map(len, lists))) for r in range(world) if k < len(lists[r])]
        mine: list[dict[int, tuple[Slot, tuple[int, int, int | None, int]]]] = [{} for _ in range(world)]
        if kind == "rows":
            dtype, rest = _common(title, names[state], lists)
            row, begin, first = 0, size, size
            for rank, k in order:
                shape = lists[rank][k][1]
                rows = shape[0] if shape[1:] == rest else 0
                length = _bytes(dtype, (rows, *rest))
                mine[rank][k] = ((first, length), (state, 0, row, rows))
                row, first = row + rows, first + length
            regions.append((Region(begin, dtype, (row, *rest)),) if order else ())
            size = _aligned(first)
        else:
            tensors = []
            for position, (rank, k) in enumerate(order):
                dtype, shape = lists[rank][k]
                tensors.append(Region(size, dtype, shape))
                mine[rank][k] = ((size, _bytes(dtype, shape)), (state, position, None, 0))
                size = _aligned(size + _bytes(dtype, shape))
            regions.append(tuple(tensors))
        for rank in range(world):
            for k in range(len(lists[rank])):
                slots[rank].append(mine[rank][k][0])
                places[rank].append(mine[rank][k][1])
    return Layout(size, tuple(map(tuple, slots)), tuple(regions), tuple(map(tuple, places)))


Entry = tuple[torch.dtype, tuple[int, ...]]


def _expand(contents: str) -> list[list[Entry]]:
    return [
        [(getattr(torch, dtype), tuple(shape)) for count, dtype, shape in runs for _ in range(count)]
        for runs in json.loads(contents)
    ]


def _common(title: str, name: str, lists: Sequence[Sequence[Entry]]) -> tuple[torch.dtype, tuple[int, ...]]:
    """The rows' dtype and the shape of one row; pieces that hold nothing in one dimension have no say, as in torch.cat."""
    everything = [entry for entries in lists for entry in entries]
    telling = [entry for entry in everything if entry[1] != (0,)] or everything
    found = {(dtype, shape[1:]) for dtype, shape in telling}
    if len(found) > 1:
        told = [
            ", ".join(dict.fromkeys(f"rows of shape {shape[1:]} {str(dtype)[6:]}" for dtype, shape in entries))
            or "no data"
            for entries in lists
        ]
        raise RankMismatchError(
            f"{title}: state `{name}`",
            expected="rows of one shape and dtype on every rank",
            ranks=told,
            fix="Call update with inputs of the same number of dimensions, width and dtype on every rank.",
            collective=True,
        )
    return found.pop() if found else (torch.float32, ())


def _bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    count = dtype.itemsize
    for n in shape:
        count *= n
    return count


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
