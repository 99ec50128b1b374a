"""Plans one buffer for the states of all ranks: where each rank's tensors lie in it, and which tensors are read out of it.

No tensor is touched here. Each rank makes the same plan from what all ranks said about shapes and dtypes (``pack_contents``), so a rank
can put its own bytes in their place before it has seen another's.

Tensors of a list are ordered as one process would have appended them: by update first, by rank second. So rows that were collected
over an epoch come out in the order of one process too.

Legend: ``W`` ranks, which hold states of the kinds of ``travelling_state``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_ddp_losses.errors import RankMismatchError
from lightning_ddp_losses.metrics.travelling_state import Kind

Entry: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""dtype and shape of a tensor."""

_ALIGN = 16  # bytes; a tensor of any dtype may start there


# ---------------------------------------------------------------------- what a rank says of its tensors


def pack_contents(kinds: Sequence[Kind], tensors: Sequence[Sequence[Tensor]]) -> str:
    """Return shapes and dtypes of the tensors that may differ between ranks, as runs of equal ones."""
    if all(kind == "stack" for kind in kinds):
        return "[]"
    found = []
    for kind, sent in zip(kinds, tensors, strict=True):
        if kind == "stack":
            continue
        runs: list[list[Any]] = []
        for tensor in sent:
            entry = [str(tensor.dtype)[6:], list(tensor.shape)]
            if runs and runs[-1][1:] == entry:
                runs[-1][0] += 1
            else:
                runs.append([1, *entry])
        found.append(runs)
    return json.dumps(found, separators=(",", ":"))


def _unpack_contents(contents: str) -> list[list[Entry]]:
    """Read what ``pack_contents`` wrote: for each state that may differ, dtype and shape of each tensor."""
    found = []
    for runs in json.loads(contents):
        entries: list[Entry] = []
        for count, dtype, shape in runs:
            entries += [(getattr(torch, dtype), tuple(shape))] * count
        found.append(entries)
    return found


# ---------------------------------------------------------------------- the plan


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
        """Return the tensor, in the buffer's memory; not a view to autograd, so that it may be changed in place."""
        strides, step = [], 1
        for n in reversed(self.shape):
            strides.append(step)
            step *= max(n, 1)
        offset = self.start // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=buffer.device)
        return empty.set_(buffer.untyped_storage(), offset, self.shape, strides[::-1])


class Slot(NamedTuple):
    """Where one tensor of one rank lies.

    Attributes:
        start: Its first byte in the buffer.
        length: Its bytes.
        state: Which state it belongs to.
        region: Which tensor of that state it lies in.
        first_row: Its first row there; None: it is all of it.
        rows: How many rows it has there.
    """

    start: int
    length: int
    state: int
    region: int
    first_row: int | None
    rows: int


@dataclass(frozen=True)
class BufferPlan:
    """The buffer that holds the states of all ranks.

    Attributes:
        size: Bytes, a multiple of 8.
        slots: For each rank, where its tensors lie, in the order in which it sends them.
        regions: For each state the tensors to read: one, none, or one per tensor of a ``list``.
    """

    size: int
    slots: tuple[tuple[Slot, ...], ...]
    regions: tuple[tuple[Region, ...], ...]


@lru_cache(maxsize=64)
def plan_buffer(
    title: str,
    names: tuple[str, ...],
    kinds: tuple[Kind, ...],
    stacks: tuple[Entry | None, ...],
    contents: tuple[str, ...],
) -> BufferPlan:
    """Give every tensor of every rank its place.

    Args:
        title: What the states belong to, for messages.
        names: Of the states.
        kinds: Of the states.
        stacks: dtype and shape of each ``stack``, None for the others.
        contents: What each rank said with ``pack_contents``.

    Raises:
        RankMismatchError: where rows of ranks cannot stand in one tensor, naming the state.
    """
    # for each state that may differ between ranks, what each rank holds
    varying = zip(*map(_unpack_contents, contents), strict=True)
    plan = _GrowingPlan(len(contents))
    for name, kind, stack in zip(names, kinds, stacks, strict=True):
        if stack is not None:
            plan.add_stack(stack)
        elif kind == "rows":
            entries = next(varying)
            plan.add_rows(entries, _common_row(title, name, entries))
        else:
            plan.add_list(next(varying))
    return plan.finish()


class _GrowingPlan:
    """Places one state after the other.

    Args:
        world_size: W.
    """

    def __init__(self, world_size: int) -> None:
        self._size = 0
        self._slots: list[list[Slot]] = [[] for _ in range(world_size)]
        self._regions: list[tuple[Region, ...]] = []

    def finish(self) -> BufferPlan:
        """Return the plan of all states."""
        return BufferPlan(self._size, tuple(map(tuple, self._slots)), tuple(self._regions))

    def add_stack(self, entry: Entry) -> None:
        """Place one tensor of equal shape per rank, in rank order."""
        (dtype, shape), world_size = entry, len(self._slots)
        length = _num_bytes(dtype, shape)
        # one region for all ranks, in which each has its row
        for rank, of_rank in enumerate(self._slots):
            of_rank.append(Slot(self._size + rank * length, length, len(self._regions), 0, rank, 1))
        self._regions.append((Region(self._size, dtype, (world_size, *shape)),))
        self._size = _next_start(self._size + world_size * length)

    def add_rows(self, entries: Sequence[Sequence[Entry]], row: Entry) -> None:
        """Place rows of all ranks in one tensor, by update and then by rank; ``row``: dtype and shape of one."""
        dtype, row_shape = row
        placed: dict[tuple[int, int], Slot] = {}
        start, first_row = self._size, 0
        for rank, k in _append_order(entries):
            _, shape = entries[rank][k]
            # a tensor of shape (0,) has no rows, whatever a row looks like
            rows = shape[0] if shape[1:] == row_shape else 0
            length = _num_bytes(dtype, (rows, *row_shape))
            placed[rank, k] = Slot(start, length, len(self._regions), 0, first_row, rows)
            start, first_row = start + length, first_row + rows
        found = [Region(self._size, dtype, (first_row, *row_shape))] if placed else []
        self._add(placed, found, _next_start(start))

    def add_list(self, entries: Sequence[Sequence[Entry]]) -> None:
        """Place each tensor of all ranks by itself, by update and then by rank."""
        placed: dict[tuple[int, int], Slot] = {}
        found, start = [], self._size
        # shapes differ, so each has a region of its own
        for position, (rank, k) in enumerate(_append_order(entries)):
            dtype, shape = entries[rank][k]
            length = _num_bytes(dtype, shape)
            found.append(Region(start, dtype, shape))
            placed[rank, k] = Slot(start, length, len(self._regions), position, None, 0)
            start = _next_start(start + length)
        self._add(placed, found, start)

    def _add(self, placed: dict[tuple[int, int], Slot], regions: Sequence[Region], size: int) -> None:
        """Add a state whose tensors were placed by (rank, position); each rank sends them in the order of their positions."""
        for rank, k in sorted(placed):
            self._slots[rank].append(placed[rank, k])
        self._regions.append(tuple(regions))
        self._size = size


def _append_order(entries: Sequence[Sequence[Entry]]) -> list[tuple[int, int]]:
    """Return (rank, position) in the order in which one process would have appended: by update, then by rank."""
    order = []
    for k in range(max(map(len, entries))):
        order += [(rank, k) for rank, of_rank in enumerate(entries) if k < len(of_rank)]
    return order


def _common_row(title: str, name: str, entries: Sequence[Sequence[Entry]]) -> Entry:
    """Return the rows' dtype and the shape of one row; tensors of shape (0,) have no say, as in torch.cat.

    Raises:
        RankMismatchError: where there is no such shape.
    """
    known = [entry for of_rank in entries for entry in of_rank]
    with_rows = [entry for entry in known if entry[1] != (0,)] or known
    found = {(dtype, shape[1:]) for dtype, shape in with_rows}
    if len(found) > 1:
        by_rank = []
        for of_rank in entries:
            rows = [f"rows of shape {shape[1:]} {str(dtype)[6:]}" for dtype, shape in of_rank]
            by_rank.append(", ".join(dict.fromkeys(rows)) or "no data")
        raise RankMismatchError(
            f"{title}: state `{name}`",
            expected="rows of one shape and dtype on every rank",
            ranks=by_rank,
            fix="Call update with inputs of the same number of dimensions, width and dtype on every rank.",
            collective=True,
        )
    if not found:
        return torch.float32, ()
    return found.pop()


def _num_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    count = dtype.itemsize
    for n in shape:
        count *= n
    return count


def _next_start(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
