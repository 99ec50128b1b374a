"""Exchanges the states of several metrics among all ranks at once: values from everywhere, gradient through this rank's own.

Legend: ``W`` ranks, ``B`` rows on this rank (may differ, may be 0), ``G`` their sum. A handshake carries this rank's bytes when they
fit (*inline*); when a rank has more, the handshake carries the sizes only, and the bytes follow in one all-reduce, in place in the
buffer in which they are then read. No barrier, and nothing in backward: every rank computes the same value from the same bytes, so
its own slice gets its own gradient times W.

A state is of one of three kinds:

| kind | of | gathered |
|---|---|---|
| ``stack`` | a tensor, equal in shape on all ranks | (W, ...) |
| ``rows`` | a tensor or a list reduced by "cat": tensors (B, ...) | (G, ...), or no tensor where no rank has one |
| ``list`` | any other list | the tensors of all ranks, each with its own shape |

Tensors of a list are ordered as one process would have appended them: by update first, by rank second. So rows that were collected
over an epoch come out in the order of one process too.

Measured (torchmetrics 1.9, torch 2.13, 2026): its own sync is one gather with a barrier for each state, 5 collectives for one
``MeanSquaredError`` and 58 for a collection of six; here it is one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import own_slices_with_grad
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import all_gather_slices_, as_bytes, host_bytes
from lightning_ddp_losses.errors import RankMismatchError

Kind = Literal["stack", "rows", "list"]
Entry: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""dtype and shape of a tensor."""

_HEAD = struct.Struct("<16s?I")  # digest of what must be equal, whether the bytes are inline, bytes of the contents
_WEIGHT = struct.Struct("<d")  # a rank's rows, for a mean
_ALIGN = 16  # bytes; a tensor of any dtype may start there


@dataclass(frozen=True)
class State:
    """A state on its way to the other ranks.

    Attributes:
        name: As messages name it: metric and state.
        value: A tensor, or a list of tensors.
        device: Where the metric lives; tensors of a list that lie elsewhere are moved there.
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
        """How the state is gathered."""
        if self.reduce is dim_zero_cat:
            return "rows"
        if isinstance(self.value, Tensor):
            return "stack"
        return "list"

    @property
    def reduction(self) -> str:
        """Name of the reduction, for messages."""
        return getattr(self.reduce, "__qualname__", "none")


# ---------------------------------------------------------------------- the exchange


def exchange_states(
    title: str, states: Sequence[State], must_match: dict[str, object], configuration: str, *, group: Group = None
) -> list[Any]:
    """Exchange states and reduce them.

    Args:
        title: The operation, for the handshake.
        states: This rank's; the same names in the same order on every rank.
        must_match: What must be equal on all ranks, short.
        configuration: The same, of any length.
        group: Process group; None is the world.

    Returns:
        Each state as all ranks together have it, the same bits on every rank.

    Gradient: this rank's own states receive W times the gradient that comes back (which is the same on every rank).

    Communication:
        One handshake; when the bytes of a rank do not fit in it, one all-reduce in place, on the device. One more gather at a size that
        the handshakes have not grown to yet, and one more exchange where a rank without data holds a default of another shape.

    Raises:
        RankMismatchError: on every rank, naming the state, when ranks disagree in a way that has no right result.
    """
    if process_groups.world_size(group) == 1:
        return [state.value for state in states]
    device = states[0].device if states else torch.device("cpu")
    names: list[str] = []
    kinds: list[Kind] = []
    reductions: list[str] = []
    stacks: list[Entry | None] = []  # what may not differ between ranks
    tensors: list[list[Tensor]] = []
    weights = b""
    for state in states:
        if state.device.type != device.type:
            return _exchange_by_device(title, states, must_match, configuration, group)
        # what this rank sends, and what must be equal for the ranks' tensors to fit together
        kind = state.kind
        sent = state_tensors(state, kind, device)
        names.append(state.name)
        kinds.append(kind)
        reductions.append(state.reduction)
        stacks.append((sent[0].dtype, tuple(sent[0].shape)) if kind == "stack" else None)
        tensors.append(sent)
        if state.reduce is dim_zero_mean:
            weights += _WEIGHT.pack(state.weight)
    own = list(itertools.chain.from_iterable(tensors))
    layout = tuple(names), tuple(kinds), tuple(stacks)
    digest = _digest_of_layout(*layout, tuple(reductions), device.type, configuration)

    # handshake: digest, sizes and row counts, and the bytes themselves where they fit
    contents = _contents(kinds, tensors).encode()
    own_bytes = sum(tensor.nbytes for tensor in own)
    is_inline = _HEAD.size + len(contents) + len(weights) + own_bytes <= handshake.inline_capacity(group)
    payload = _HEAD.pack(digest, is_inline, len(contents)) + contents + weights
    if is_inline:
        payload += _joined_bytes(own, device)
    received = [_unpack(sent, len(weights)) for sent in handshake.all_gather(title, must_match, payload, group=group)]

    # ranks that hold something else: an error that says what, or a default in the others' shape and once more
    if any(message.digest != digest for message in received):
        adapted = _adapt_states(title, states, configuration, device, group)
        return exchange_states(title, adapted, must_match, configuration, group=group)

    # gather: every rank's tensors in one buffer, in the order of one process
    plan = plan_buffer(title, *layout, tuple(message.contents for message in received))
    if all(message.is_inline for message in received):
        buffer = _buffer_from_messages(plan, received).to(device)
    else:
        buffer = _gather_buffer(plan, own, device, group)

    # read: this rank's own slices with their graph, then reduce
    gathered = _read_with_grad(plan, buffer, tensors, group)
    rows_by_mean = iter(zip(*(message.weights for message in received), strict=True))
    values = []
    for state, found in zip(states, gathered, strict=True):
        rows = next(rows_by_mean) if state.reduce is dim_zero_mean else None
        values.append(_reduce(state, found, rows))
    return values


def _exchange_by_device(
    title: str, states: Sequence[State], must_match: dict[str, object], configuration: str, group: Group
) -> list[Any]:
    """Run one exchange for each device, in the order of the states."""
    by_device: dict[str, list[int]] = {}
    for index, state in enumerate(states):
        by_device.setdefault(state.device.type, []).append(index)
    found: dict[int, Any] = {}
    for device, indices in by_device.items():
        chosen = [states[index] for index in indices]
        values = exchange_states(f"{title}, on {device}", chosen, must_match, configuration, group=group)
        found.update(zip(indices, values, strict=True))
    return [found[index] for index in range(len(states))]


def state_tensors(state: State, kind: Kind, device: torch.device) -> list[Tensor]:
    """Return the tensors that travel, on one device; where they are rows, with at least one dimension and in one dtype."""
    tensors = [state.value] if isinstance(state.value, Tensor) else list(state.value)
    if kind == "rows":
        tensors = [tensor.reshape(1) if tensor.ndim == 0 else tensor for tensor in tensors]
        if len({tensor.dtype for tensor in tensors}) > 1:  # as torch.cat joins them
            wide = tensors[0].dtype
            for tensor in tensors:
                wide = torch.promote_types(wide, tensor.dtype)
            tensors = [tensor.to(wide) for tensor in tensors]
    return [tensor if tensor.device == device else tensor.to(device) for tensor in tensors]


@lru_cache(maxsize=64)
def _digest_of_layout(*must_match: object) -> bytes:
    return hashlib.blake2b(repr(must_match).encode(), digest_size=16).digest()


def _contents(kinds: Sequence[Kind], tensors: Sequence[Sequence[Tensor]]) -> str:
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


def _joined_bytes(tensors: Sequence[Tensor], device: torch.device) -> bytes:
    if device.type != "cpu" and tensors:  # one copy to the host, not one per tensor
        flat = torch.cat([as_bytes(tensor) for tensor in tensors])
        return flat.cpu().numpy().tobytes()
    return b"".join(map(host_bytes, tensors))


class _Message(NamedTuple):
    """What one rank sent in the handshake.

    Attributes:
        digest: Of what must be equal on all ranks.
        is_inline: Whether its tensors' bytes are in it.
        contents: Shapes and dtypes of what may differ.
        weights: For each mean, its rows.
        data: The bytes of its tensors, one after the other, if they are inline.
    """

    digest: bytes
    is_inline: bool
    contents: str
    weights: tuple[float, ...]
    data: memoryview


def _unpack(payload: bytes, weight_bytes: int) -> _Message:
    digest, is_inline, length = _HEAD.unpack_from(payload)
    contents_end = _HEAD.size + length
    weights_end = contents_end + weight_bytes
    contents = payload[_HEAD.size : contents_end].decode()
    weights: tuple[float, ...] = ()
    if len(payload) >= weights_end:  # a rank that has other states may send fewer; they are not read then
        weights = tuple(weight for (weight,) in _WEIGHT.iter_unpack(payload[contents_end:weights_end]))
    return _Message(digest, is_inline, contents, weights, memoryview(payload)[weights_end:])


# ---------------------------------------------------------------------- where each rank's tensors lie


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
        contents: Each rank's ``_contents``.

    Raises:
        RankMismatchError: where rows of ranks cannot stand in one tensor, naming the state.
    """
    world = len(contents)
    entries_by_rank = [_parse_contents(text) for text in contents]
    slots: list[list[Slot]] = [[] for _ in range(world)]
    regions: list[tuple[Region, ...]] = []
    size, varying = 0, 0
    for state, (kind, stack) in enumerate(zip(kinds, stacks, strict=True)):
        if stack is not None:
            size = _place_stack(state, stack, size, slots, regions)
            continue
        entries = [of_rank[varying] for of_rank in entries_by_rank]
        varying += 1
        if kind == "rows":
            size = _place_rows(title, names[state], state, entries, size, slots, regions)
        else:
            size = _place_list(state, entries, size, slots, regions)
    return BufferPlan(size, tuple(map(tuple, slots)), tuple(regions))


def _place_stack(
    state: int, entry: Entry, size: int, slots: list[list[Slot]], regions: list[tuple[Region, ...]]
) -> int:
    """Place one tensor of equal shape per rank, in rank order; return the buffer's new size."""
    dtype, shape = entry
    length = _num_bytes(dtype, shape)
    for rank, of_rank in enumerate(slots):
        of_rank.append(Slot(size + rank * length, length, state, 0, rank, 1))
    regions.append((Region(size, dtype, (len(slots), *shape)),))
    return _next_start(size + len(slots) * length)


def _place_rows(
    title: str,
    name: str,
    state: int,
    entries: Sequence[Sequence[Entry]],
    size: int,
    slots: list[list[Slot]],
    regions: list[tuple[Region, ...]],
) -> int:
    """Place rows of all ranks in one tensor, by update and then by rank; return the buffer's new size."""
    dtype, row_shape = _common_row(title, name, entries)
    placed: dict[tuple[int, int], Slot] = {}
    start, first_row = size, 0
    for rank, k in _append_order(entries):
        _, shape = entries[rank][k]
        rows = shape[0] if shape[1:] == row_shape else 0
        length = _num_bytes(dtype, (rows, *row_shape))
        placed[rank, k] = Slot(start, length, state, 0, first_row, rows)
        start, first_row = start + length, first_row + rows
    found = [Region(size, dtype, (first_row, *row_shape))] if placed else []
    regions.append(tuple(found))
    _add_in_order_(slots, placed)
    return _next_start(start)


def _place_list(
    state: int,
    entries: Sequence[Sequence[Entry]],
    size: int,
    slots: list[list[Slot]],
    regions: list[tuple[Region, ...]],
) -> int:
    """Place each tensor of all ranks by itself, by update and then by rank; return the buffer's new size."""
    placed: dict[tuple[int, int], Slot] = {}
    found = []
    for position, (rank, k) in enumerate(_append_order(entries)):
        dtype, shape = entries[rank][k]
        length = _num_bytes(dtype, shape)
        found.append(Region(size, dtype, shape))
        placed[rank, k] = Slot(size, length, state, position, None, 0)
        size = _next_start(size + length)
    regions.append(tuple(found))
    _add_in_order_(slots, placed)
    return size


def _append_order(entries: Sequence[Sequence[Entry]]) -> list[tuple[int, int]]:
    """Return (rank, position) in the order in which one process would have appended: by update, then by rank."""
    order = []
    for k in range(max(map(len, entries))):
        order += [(rank, k) for rank, of_rank in enumerate(entries) if k < len(of_rank)]
    return order


def _add_in_order_(slots: list[list[Slot]], placed: dict[tuple[int, int], Slot]) -> None:
    """Add to each rank's slots those of one state, in the order in which the rank sends them."""
    for rank, k in sorted(placed):
        slots[rank].append(placed[rank, k])


def _parse_contents(contents: str) -> list[list[Entry]]:
    """Read ``_contents``: for each state that may differ, dtype and shape of each tensor."""
    found = []
    for runs in json.loads(contents):
        entries: list[Entry] = []
        for count, dtype, shape in runs:
            entries += [(getattr(torch, dtype), tuple(shape))] * count
        found.append(entries)
    return found


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
        _raise_mismatch(
            f"{title}: state `{name}`",
            "rows of one shape and dtype on every rank",
            by_rank,
            "Call update with inputs of the same number of dimensions, width and dtype on every rank.",
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


# ---------------------------------------------------------------------- filling and reading the buffer


def _buffer_from_messages(plan: BufferPlan, received: Sequence[_Message]) -> Tensor:
    """Put the bytes that came inline in their places."""
    if plan.size == 0:
        return torch.empty(0, dtype=torch.uint8)
    gathered = bytearray(plan.size)
    for message, slots in zip(received, plan.slots, strict=True):
        cursor = 0
        for slot in slots:
            gathered[slot.start : slot.start + slot.length] = message.data[cursor : cursor + slot.length]
            cursor += slot.length
    return torch.frombuffer(gathered, dtype=torch.uint8)


def _gather_buffer(plan: BufferPlan, own: Sequence[Tensor], device: torch.device, group: Group) -> Tensor:
    """Put this rank's tensors in their places and gather the others'. Communication: one all-reduce."""
    buffer = torch.zeros(plan.size, dtype=torch.uint8, device=device)
    for tensor, slot in zip(own, plan.slots[process_groups.rank(group)], strict=True):
        if slot.length:
            flat = buffer[slot.start : slot.start + slot.length].view(tensor.dtype)
            flat.view(tensor.shape).copy_(tensor.detach())
    all_gather_slices_(buffer, group)
    return buffer


def _read_with_grad(
    plan: BufferPlan, buffer: Tensor, tensors: Sequence[Sequence[Tensor]], group: Group
) -> list[list[Tensor]]:
    """Read the tensors of each state out of the buffer; those that hold a part of this rank's get its graph."""
    read = [_tensors_at(regions, buffer) for regions in plan.regions]
    if not torch.is_grad_enabled():
        return read
    own = (tensor for sent in tensors for tensor in sent)
    slots = plan.slots[process_groups.rank(group)]
    with_graph = [(tensor, slot) for tensor, slot in zip(own, slots, strict=False) if tensor.requires_grad]
    if not with_graph:
        return read
    # one autograd node for all: several tensors of this rank may lie in one that is read
    targets = list(dict.fromkeys((slot.state, slot.region) for _, slot in with_graph))
    places = [(targets.index((slot.state, slot.region)), slot.first_row, slot.rows) for _, slot in with_graph]
    whole = [read[state][region] for state, region in targets]
    joined = own_slices_with_grad(whole, [tensor for tensor, _ in with_graph], places, group=group)
    for (state, region), tensor in zip(targets, joined, strict=True):
        read[state][region] = tensor
    return read


def _tensors_at(regions: Sequence[Region], buffer: Tensor) -> list[Tensor]:
    return [region.of(buffer) for region in regions]


def _reduce(state: State, gathered: list[Tensor], rows: Sequence[float] | None) -> Any:
    """Reduce what all ranks hold as torchmetrics does; ``rows`` of each rank weigh a mean."""
    if state.kind == "rows":
        return gathered[0] if gathered else []
    if state.kind == "list" and state.reduce is None:
        return gathered
    if state.kind == "list":
        return state.reduce(gathered)  # type: ignore[misc]
    (stacked,) = gathered
    if state.reduce is None:
        return stacked
    if rows is not None and len(set(rows)) > 1 and stacked.is_floating_point():
        ranks = [rank for rank, n in enumerate(rows) if n]  # the mean over no rows is not a number
        shares = stacked.new_tensor([rows[rank] for rank in ranks]) / sum(rows)
        return torch.tensordot(shares, stacked[ranks], 1)
    return state.reduce(stacked)


# ---------------------------------------------------------------------- ranks that hold something else


def _adapt_states(
    title: str, states: Sequence[State], configuration: str, device: torch.device, group: Group
) -> list[State]:
    """Compare in full what the ranks hold: an error that names it, or defaults in the shape of what other ranks have.

    Raises:
        RankMismatchError: on every rank, with what differs.

    Communication: one handshake, and one gather of what does not fit in it.
    """
    own = {
        "configuration": configuration,
        "device": device.type,
        "states": [[s.name, s.reduction, s.kind, *_described(s.value), s.untouched] for s in states],
    }
    payloads = handshake.all_gather(f"{title}, in full", {}, json.dumps(own).encode(), group=group)
    gathered = [json.loads(payload) for payload in payloads]

    # the metric itself: how it was made, where it lives, which states it has
    for what in ("configuration", "device"):
        texts = [of_rank[what] for of_rank in gathered]
        if len(set(texts)) > 1:
            by_rank = _differing_parts(texts)
            _raise_mismatch(
                f"{title}: {what}", "the same on every rank", by_rank, "Build the metric alike on every rank."
            )
    by_rank = []
    for of_rank in gathered:
        described = [f"{name} ({kind}, {reduction})" for name, reduction, kind, *_ in of_rank["states"]]
        by_rank.append(", ".join(described) or "no states")
    if len(set(by_rank)) > 1:
        _raise_mismatch(f"{title}: states", "the same on every rank", by_rank, "Build the metric alike on every rank.")

    # each state: the ranks that put something in must agree, the others' defaults follow
    adapted = []
    for index, state in enumerate(states):
        entries = [of_rank["states"][index][3:] for of_rank in gathered]
        adapted.append(_adapt_state(title, state, entries))
    return adapted


def _adapt_state(title: str, state: State, entries: Sequence[Sequence[Any]]) -> State:
    """Return the state, or its default in the other ranks' shape; ``entries``: dtype, shape, untouched of each rank."""
    shapes = [(dtype, tuple(shape)) for dtype, shape, _ in entries]
    if state.kind != "stack" or len(set(shapes)) == 1:
        return state
    touched = {entry for entry, (_, _, untouched) in zip(shapes, entries, strict=True) if not untouched}
    if len(touched) != 1:
        _raise_mismatch(
            f"{title}: state `{state.name}`",
            "one shape and dtype on every rank",
            [f"{shape} {dtype}" for dtype, shape in shapes],
            "Call update with inputs of the same width, number of dimensions and dtype on every rank.",
        )
    if not state.untouched:
        return state
    assert isinstance(state.value, Tensor)
    dtype, shape = touched.pop()
    try:
        default = state.value.to(getattr(torch, dtype)).expand(shape).contiguous()
    except RuntimeError:
        raise RankMismatchError(
            f"{title}: state `{state.name}`",
            expected=f"a default that fits the other ranks' shape {shape}",
            got=f"{tuple(state.value.shape)} on a rank without data",
            fix="Give every rank data before compute.",
        ) from None
    return replace(state, value=default)


def _described(value: Tensor | list[Tensor]) -> tuple[str, list[int]]:
    """Return dtype and shape of a tensor; nothing of a list, whose contents are compared elsewhere."""
    if isinstance(value, Tensor):
        return str(value.dtype)[6:], list(value.shape)
    return "", []


def _differing_parts(texts: Sequence[str]) -> list[str]:
    """Return of each text the parts, between semicolons and commas, that not all texts have."""
    found = []
    common = set.intersection(*(set(_parts_of(text)) for text in texts))
    for text in texts:
        own = [part for part in _parts_of(text) if part not in common]
        found.append(", ".join(own) or text)
    return found


def _parts_of(text: str) -> list[str]:
    return [part.strip() for part in text.replace("; ", ", ").split(", ")]


def _raise_mismatch(what: str, expected: str, by_rank: Sequence[str], fix: str) -> NoReturn:
    raise RankMismatchError(what, expected=expected, ranks=by_rank, fix=fix, collective=True)
