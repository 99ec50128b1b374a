"""Plans the buffer that holds the states of all ranks, from each rank's description of its tensors.

Each rank derives the same plan from the shapes of all ranks. Tensors of a list are ordered as one process would have appended them: by
update first, by rank second. A rank without data holds defaults, which some metrics widen in their first update. Such a default is expanded
to the shape of the other ranks' state. Any other difference is an error, the same on every rank.

Metrics of a collection's compute group share their states. A rank sends shared states once, and they are stored once in the buffer if they
are shared on every rank. (A rank without data does not have groups yet. Its defaults are compared.)

Legend: ``W`` ranks, ``B`` rows on this rank (may differ, may be 0), ``G`` their sum.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_ddp_losses.distributed.gathered_batch import aligned
from lightning_ddp_losses.errors import RankMismatchError

Kind = Literal["stack", "rows", "list"]
Entry: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""dtype and shape of a tensor."""


class Sent(NamedTuple):
    """A tensor in the message of a rank.

    Attributes:
        number: Index among the tensors that the rank sends.
        bytes: Its bytes in the message.
        dtype: Data type.
        shape: Shape.
    """

    number: int
    bytes: slice
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def entry(self) -> Entry:
        """Return dtype and shape."""
        return self.dtype, self.shape

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return int(self.bytes.stop - self.bytes.start)


class Contents(NamedTuple):
    """Message of one rank.

    Attributes:
        tensors: For each state, its tensors.
        holders: For each state, the first state with the same tensors.
        defaults: Indices of states that are defaults.
        objects: Indices of states with pickled objects.
    """

    tensors: list[list[Sent]]
    holders: list[int]
    defaults: list[int]
    objects: list[int]


def _unpack_contents(data: bytes) -> Contents:
    counts, runs, holders, defaults, objects = json.loads(data)
    sent: list[Sent] = []
    offset = 0
    for count, dtype, shape in runs:
        for _ in range(count):
            start, offset = offset, offset + getattr(torch, dtype).itemsize * math.prod(shape)
            sent.append(Sent(len(sent), slice(start, offset), getattr(torch, dtype), tuple(shape)))
    remaining = iter(sent)
    tensors = [list(itertools.islice(remaining, count)) for count in counts]
    return Contents([tensors[holder] for holder in holders], holders, defaults, objects)


class Region(NamedTuple):
    """A tensor inside the buffer.

    Attributes:
        start: First byte.
        dtype: Data type.
        shape: Shape.
    """

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, buffer: Tensor) -> Tensor:
        """Return the tensor in the buffer's memory. Autograd does not treat it as a view, so that it may be changed in place."""
        # contiguous: torch computes the strides, although its type stubs require them
        empty: Any = buffer.new_empty(0, dtype=self.dtype)
        tensor: Tensor = empty.set_(buffer.untyped_storage(), self.start // self.dtype.itemsize, self.shape)
        return tensor


class Slot(NamedTuple):
    """The position of one tensor of one rank.

    Attributes:
        sent: The tensor in the rank's message.
        bytes: Its bytes in the buffer.
        state: Index of its state.
        tensor: Index of the tensor that is read for that state.
        first_row: First row in that tensor. None if it is the whole tensor.
        rows: Number of rows in that tensor.
    """

    sent: Sent
    bytes: slice
    state: int
    tensor: int
    first_row: int | None
    rows: int


@dataclass
class BufferPlan:
    """The buffer that holds the states of all ranks.

    Attributes:
        slots: For each rank, the positions of its tensors.
        objects: States with pickled objects.
        defaults: For each rank, indices of states that are defaults.
        regions: For each state the tensors to read: one, none, or one per tensor of a ``list``.
        expanded: For each state with defaults that are expanded to the other ranks' state, its dtype and shape.
        twins: For each state that has the tensors of an earlier state on every rank, the earlier state.
        size: Number of bytes.
    """

    slots: list[list[Slot]]
    objects: list[int]
    defaults: list[list[int]]
    regions: list[list[Region]] = field(default_factory=list)
    expanded: dict[int, Entry] = field(default_factory=dict)
    twins: dict[int, int] = field(default_factory=dict)
    size: int = 0

    def add_rows(self, tensors: Sequence[Sequence[Sent]], dtype: torch.dtype, row_shape: tuple[int, ...]) -> None:
        """Place the tensors of the next state consecutively, to be read as one."""
        state, start, first_row = len(self.regions), self.size, 0
        for rank, sent in _in_one_process(tensors):
            rows = sent.shape[0] if sent.shape[1:] == row_shape else 0  # a tensor of shape (0,) does not have rows
            self.slots[rank].append(Slot(sent, self._take(sent), state, 0, first_row, rows))
            first_row += rows
        regions = [Region(start, dtype, (first_row, *row_shape))] if any(tensors) else []
        self.regions.append(regions)
        self.size = aligned(self.size)

    def add_each(self, tensors: Sequence[Sequence[Sent]], stacked: Entry | None = None) -> None:
        """Place the tensors of the next state, to be read separately, or stacked after a cast to this dtype and shape."""
        state = len(self.regions)
        self.regions.append([])
        if stacked is not None:
            self.expanded[state] = stacked
        for rank, sent in _in_one_process(tensors):
            slot = Slot(sent, self._take(sent), state, len(self.regions[state]), None, 0)
            self.slots[rank].append(slot if stacked is None else slot._replace(tensor=0, first_row=rank, rows=1))
            self.regions[state].append(Region(slot.bytes.start, sent.dtype, sent.shape))
            self.size = aligned(self.size)

    def _take(self, sent: Sent) -> slice:
        """Reserve the next bytes of the buffer for a tensor."""
        start, self.size = self.size, self.size + sent.num_bytes
        return slice(start, self.size)

    def read(self, buffer: Tensor) -> list[list[Tensor]]:
        """Return the tensors of each state, in the buffer's memory."""
        found = [[region.of(buffer) for region in regions] for regions in self.regions]
        for state, (dtype, shape) in self.expanded.items():
            found[state] = [torch.stack([tensor.to(dtype).expand(shape) for tensor in found[state]])]
        return found


def _in_one_process(tensors: Sequence[Sequence[Sent]]) -> Iterator[tuple[int, Sent]]:
    """Yield ranks and their tensors of one state by update, then by rank, which is the order of appending in one process."""
    for of_update in itertools.zip_longest(*tensors):
        yield from ((rank, sent) for rank, sent in enumerate(of_update) if sent is not None)


@functools.lru_cache(maxsize=64)
def plan_buffer(title: str, states: tuple[tuple[str, Kind], ...], contents: tuple[bytes, ...]) -> BufferPlan:
    """Assign a position to every tensor of every rank.

    Args:
        title: Name of the operation, for messages.
        states: Names and kinds of the states.
        contents: Contents of each rank, as packed by ``exchange``.

    Raises:
        RankMismatchError: if tensors of ranks are incompatible, naming the state.
    """
    by_rank = [_unpack_contents(text) for text in contents]
    objects = sorted(set().union(*(of_rank.objects for of_rank in by_rank)))
    plan = BufferPlan([[] for _ in contents], objects, [of_rank.defaults for of_rank in by_rank])
    first: dict[tuple[int, ...], int] = {}
    for index, (name, kind) in enumerate(states):
        what = f"{title}: state `{name}`"
        twin = first.setdefault(tuple(of_rank.holders[index] for of_rank in by_rank), index)
        tensors = [of_rank.tensors[index] for of_rank in by_rank]
        if index in objects:
            _refuse_other_items(what, tensors, [index in of_rank.objects for of_rank in by_rank])
        if twin != index:
            plan.twins[index] = twin
            plan.regions.append([])
        elif kind == "list":
            plan.add_each(tensors)
        elif kind == "rows":
            plan.add_rows(tensors, *_common_row(what, tensors))
        else:
            dtype, shape = _common_shape(what, tensors, [index in of_rank.defaults for of_rank in by_rank])
            if all(sent.entry == (dtype, shape) for (sent,) in tensors):  # each rank has one row of the stack
                plan.add_rows([[sent._replace(shape=(1, *shape))] for (sent,) in tensors], dtype, shape)
            else:
                plan.add_each(tensors, (dtype, shape))
    return plan


def _refuse_other_items(what: str, tensors: Sequence[Sequence[Sent]], has_objects: Sequence[bool]) -> None:
    """Reject a list that contains other objects on some ranks and tensors on others. A list may be empty."""
    found = ["objects" if objects else "tensors" for objects in has_objects]
    found = [items if sent else "nothing" for items, sent in zip(found, tensors, strict=True)]
    if len({*found} - {"nothing"}) > 1:
        fix = "Append the same kind of items on every rank."
        expected = "tensors, or other objects, on every rank"
        raise RankMismatchError(what, expected=expected, ranks=found, fix=fix, collective=True, page="F52")


def _common_row(what: str, tensors: Sequence[Sequence[Sent]]) -> Entry:
    """Return dtype and shape of one row, ignoring tensors of shape (0,), as torch.cat does, and the dtype of empty tensors."""
    known = [sent.entry for sent in itertools.chain.from_iterable(tensors)]
    with_rows = [entry for entry in known if entry[1] != (0,)] or known
    dtypes = [dtype for dtype, shape in with_rows if shape[0]]
    found = {(dtype if shape[0] or not dtypes else dtypes[0], shape[1:]) for dtype, shape in with_rows}
    if len(found) > 1:
        rows = [[f"rows of shape {sent.shape[1:]} {str(sent.dtype)[6:]}" for sent in of_rank] for of_rank in tensors]
        by_rank = [", ".join(dict.fromkeys(of_rank)) or "no data" for of_rank in rows]
        fix = "Call update with inputs of the same number of dimensions, width and dtype on every rank."
        expected = "rows of one shape and dtype on every rank"
        raise RankMismatchError(what, expected=expected, ranks=by_rank, fix=fix, collective=True, page="F52")
    return found.pop() if found else (torch.float32, ())


def _common_shape(what: str, tensors: Sequence[Sequence[Sent]], is_default: Sequence[bool]) -> Entry:
    """Return the common dtype and shape of a state, to which defaults are adapted."""
    entries = [sent.entry for (sent,) in tensors]
    if len(set(entries)) == 1:
        return entries[0]
    described = [f"{shape} {str(dtype)[6:]}" for dtype, shape in entries]
    touched = {entry for entry, untouched in zip(entries, is_default, strict=True) if not untouched}
    expected = "one shape and dtype on every rank"
    fix = "Call update with inputs of the same width, number of dimensions and dtype on every rank."
    if len(touched) == 1:
        ((dtype, wanted),) = touched
        if all(_expands(shape, wanted) for _, shape in entries):
            return dtype, wanted
        expected = f"a default that fits the shape {wanted} of the ranks with data"
        fix = "Give every rank data before compute."
    raise RankMismatchError(what, expected=expected, ranks=described, fix=fix, collective=True, page="F52")


def _expands(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether a tensor of one shape expands to another, as `Tensor.expand` does."""
    ends = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, other) for size, other in ends)
