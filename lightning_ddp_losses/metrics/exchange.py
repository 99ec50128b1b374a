"""The states of several metrics, of all ranks, in one exchange: values from everywhere, gradient through this rank's own.

Legend: ``W`` ranks. A frame carries this rank's bytes when they fit; when a rank has more, the frames carry the sizes only,
and the bytes follow in one all-reduce, in place in the buffer in which they are then read. No barrier; nothing in
backward: every rank computes the same value from the same bytes, so its own slice gets its own gradient times W.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import own_slices_with_grad
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import all_gather_slices_, as_bytes, host_bytes
from lightning_ddp_losses.errors import RankMismatchError

_HEAD = struct.Struct("<16s?I")  # digest of what must be equal, whether the bytes are inside, bytes of the contents
_ROWS = struct.Struct("<d")


def meet(
    title: str, states: Sequence[State], must_match: dict[str, object], configuration: str, *, group: Group = None
) -> list[Any]:
    """Exchange states and reduce them.

    Args:
        title: The operation, for the frame.
        states: This rank's; the same names in the same order on every rank.
        agreed: What must be equal on all ranks, short.
        configuration: The same, of any length.
        group: Process group; None is the world.

    Returns:
        Each state as all ranks together have it, the same bits on every rank.

    Gradient: this rank's own states receive W times the gradient that comes back (which is the same on every rank).

    Communication:
        One frame; when the bytes of a rank do not fit (``handshake.inline_capacity``), one all-reduce in place, on the device.
        One more gather at a size that the frames have not grown to yet, and one more exchange where a rank
        without data holds a default of another shape.

    Raises:
        RankMismatchError: on every rank, naming the state, when ranks disagree in a way that has no right result.
    """
    world = process_groups.world_size(group)
    if world == 1:
        return [state.value for state in states]
    if len({state.device.type for state in states}) > 1:
        return _by_device(title, states, must_match, configuration, group)
    kinds = tuple(state.kind for state in states)
    device = states[0].device if states else torch.device("cpu")
    pieces = [
        [piece if piece.device == device else piece.to(device) for piece in pieces_of(kind, state.value)]
        for kind, state in zip(kinds, states, strict=True)
    ]
    fixed = tuple(
        (p[0].dtype, tuple(p[0].shape)) if kind == "stack" else None for kind, p in zip(kinds, pieces, strict=True)
    )
    own = [piece for tensors in pieces for piece in tensors]
    size = sum(piece.nbytes for piece in own)
    names = tuple(state.name for state in states)
    reductions = tuple(getattr(state.reduce, "__qualname__", "none") for state in states)
    digest = _digest(names, reductions, fixed, device.type, configuration)
    contents = table_of_contents(kinds, pieces).encode()
    weights = b"".join(_ROWS.pack(s.weight) for s in states if s.reduce is dim_zero_mean)
    head = _HEAD.size + len(contents) + len(weights)
    inside = head + size <= handshake.inline_capacity(group)
    payload = _HEAD.pack(digest, inside, len(contents)) + contents + weights
    payloads = handshake.all_gather(
        title, must_match, payload + _bytes_of(own, device) if inside else payload, group=group
    )

    heads = [_HEAD.unpack_from(p) for p in payloads]
    if any(h[0] != digest for h in heads):
        adapted = agree_in_full(title, states, configuration, device, group)
        return meet(title, adapted, must_match, configuration, group=group)
    tables = tuple(p[_HEAD.size : _HEAD.size + h[2]].decode() for p, h in zip(payloads, heads, strict=True))
    layout = lay_out(title, names, kinds, fixed, tables)
    starts = [head - len(contents) + h[2] for h in heads]
    everything_is_here = all(h[1] for h in heads)
    frames_hold = _from_frames(layout, payloads, starts).to(device) if everything_is_here else None
    buffer = _in_place(layout, own, device, group) if frames_hold is None else frames_hold
    return _read(states, pieces, layout, buffer, _weights(payloads, heads, len(weights) // _ROWS.size), group)


def _by_device(
    title: str, states: Sequence[State], must_match: dict[str, object], configuration: str, group: Group
) -> list[Any]:
    """One exchange for each device, in the order of the states."""
    found: dict[int, Any] = {}
    parts: dict[str, list[int]] = {}
    for index, state in enumerate(states):
        parts.setdefault(state.device.type, []).append(index)
    for kind, indices in parts.items():
        values = meet(f"{title}, on {kind}", [states[i] for i in indices], must_match, configuration, group=group)
        found.update(zip(indices, values, strict=True))
    return [found[index] for index in range(len(states))]


@lru_cache(maxsize=64)
def _digest(*must_match: object) -> bytes:
    return hashlib.blake2b(repr(must_match).encode(), digest_size=16).digest()


def _bytes_of(tensors: Sequence[Tensor], device: torch.device) -> bytes:
    if device.type != "cpu" and tensors:  # one copy to the host, not one per tensor
        flat = torch.cat([as_bytes(t) for t in tensors])
        return flat.cpu().numpy().tobytes()
    return b"".join(map(host_bytes, tensors))


def _from_frames(layout: Layout, payloads: Sequence[bytes], starts: Sequence[int]) -> Tensor:
    if layout.size == 0:
        return torch.empty(0, dtype=torch.uint8)
    everything = bytearray(layout.size)
    for payload, start, slots in zip(payloads, starts, layout.slots, strict=True):
        cursor = start
        for first, length in slots:
            everything[first : first + length] = payload[cursor : cursor + length]
            cursor += length
    return torch.frombuffer(everything, dtype=torch.uint8)


def _in_place(layout: Layout, own: Sequence[Tensor], device: torch.device, group: Group) -> Tensor:
    buffer = torch.zeros(layout.size, dtype=torch.uint8, device=device)
    for tensor, (first, length) in zip(own, layout.slots[process_groups.rank(group)], strict=True):
        if length:
            flat = buffer[first : first + length].view(tensor.dtype)
            flat.view(tensor.shape).copy_(tensor.detach())
    all_gather_slices_(buffer, group)
    return buffer


def _weights(payloads: Sequence[bytes], heads: Sequence[tuple[Any, ...]], count: int) -> list[list[float]]:
    """For each mean, the rows of each rank."""
    if not count:
        return []
    ranks = [
        [_ROWS.unpack_from(p, _HEAD.size + h[2] + i * _ROWS.size)[0] for i in range(count)]
        for p, h in zip(payloads, heads, strict=True)
    ]
    return [list(column) for column in zip(*ranks, strict=True)]


def _read(
    states: Sequence[State],
    pieces: Sequence[Sequence[Tensor]],
    layout: Layout,
    buffer: Tensor,
    weights: list[list[float]],
    group: Group,
) -> list[Any]:
    """Tensors out of the buffer, this rank's own slices with their graph, reduced."""
    read = [[region.of(buffer) for region in regions] for regions in layout.regions]
    own = [piece for tensors in pieces for piece in tensors] if torch.is_grad_enabled() else []
    places = layout.places[process_groups.rank(group)]
    wanted = [(piece, place) for piece, place in zip(own, places, strict=False) if piece.requires_grad]
    if wanted:
        targets = list(dict.fromkeys((state, region) for _, (state, region, _, _) in wanted))
        slices = [(targets.index((state, region)), first, rows) for _, (state, region, first, rows) in wanted]
        whole = [read[state][region] for state, region in targets]
        joined = own_slices_with_grad(whole, [piece for piece, _ in wanted], slices, group=group)
        for (state, region), tensor in zip(targets, joined, strict=True):
            read[state][region] = tensor
    means = iter(weights)
    return [
        _reduce(state, tensors, next(means) if state.reduce is dim_zero_mean else None)
        for state, tensors in zip(states, read, strict=True)
    ]


def _reduce(state: State, tensors: list[Tensor], rows: list[float] | None) -> Any:
    if state.kind == "rows":
        return tensors[0] if tensors else []
    if state.kind == "list":
        return tensors if state.reduce is None else state.reduce(tensors)
    (stacked,) = tensors
    if state.reduce is None:
        return stacked
    if rows is not None and len(set(rows)) > 1 and stacked.is_floating_point():
        some = [rank for rank, n in enumerate(rows) if n]  # the mean over no rows is not a number
        shares = stacked.new_tensor([rows[rank] for rank in some]) / sum(rows)
        return torch.tensordot(shares, stacked[some], 1)
    return state.reduce(stacked)


# ---------- from layout.py: Where each rank's piece of each state lies in the buffer that holds all of them.

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


# ---------- from disagreement.py: Ranks whose states differ: what each holds, in words, as one error; or defaults that fit the other ranks' shapes.


def agree_in_full(
    title: str, states: Sequence[State], configuration: str, device: torch.device, group: Group
) -> list[State]:
    """What the ranks hold, told in full: an error that names it, or defaults in the shape of what other ranks have.

    Raises:
        RankMismatchError: on every rank, with what differs.

    Communication: one frame, and one gather of what does not fit in it.
    """
    own = {
        "configuration": configuration,
        "device": device.type,
        "states": [
            [s.name, getattr(s.reduce, "__qualname__", "none"), s.kind, *_dtype_and_shape(s.value), s.untouched]
            for s in states
        ],
    }
    everyone = [
        json.loads(p) for p in handshake.all_gather(f"{title}, in full", {}, json.dumps(own).encode(), group=group)
    ]
    for what in ("configuration", "device"):
        if len({ranks[what] for ranks in everyone}) > 1:
            told = _differing([ranks[what] for ranks in everyone])
            _raise_mismatch(f"{title}: {what}", "the same on every rank", told, "Build the metric alike on every rank.")
    kept = [[entry[:3] for entry in ranks["states"]] for ranks in everyone]
    if any(k != kept[0] for k in kept):
        told = [", ".join(f"{name} ({kind}, {reduce})" for name, reduce, kind in k) or "no states" for k in kept]
        _raise_mismatch(f"{title}: states", "the same on every rank", told, "Build the metric alike on every rank.")
    adapted = []
    for index, state in enumerate(states):
        entries = [ranks["states"][index] for ranks in everyone]
        shapes = {(entry[3], tuple(entry[4])) for entry in entries if not entry[5]}
        adapted.append(state)
        if state.kind != "stack" or len({(e[3], tuple(e[4])) for e in entries}) == 1:
            continue
        if len(shapes) != 1:
            told = [f"{tuple(entry[4])} {entry[3]}" for entry in entries]
            _raise_mismatch(
                f"{title}: state `{state.name}`",
                "one shape and dtype on every rank",
                told,
                "Call update with inputs of the same width, number of dimensions and dtype on every rank.",
            )
        dtype, shape = shapes.pop()
        if state.untouched:
            assert isinstance(state.value, Tensor)
            adapted[-1] = replace(state, value=_as_default(title, state, getattr(torch, dtype), shape))
    return adapted


def _as_default(title: str, state: State, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    assert isinstance(state.value, Tensor)
    try:
        return state.value.to(dtype).expand(shape).contiguous()
    except RuntimeError:
        raise RankMismatchError(
            f"{title}: state `{state.name}`",
            expected=f"a default that fits the other ranks' shape {shape}",
            got=f"{tuple(state.value.shape)} on a rank without data",
            fix="Give every rank data before compute.",
        ) from None


def _dtype_and_shape(value: Tensor | list[Tensor]) -> tuple[str, list[int]]:
    return (str(value.dtype)[6:], list(value.shape)) if isinstance(value, Tensor) else ("", [])


def _differing(texts: Sequence[str]) -> list[str]:
    """The parts, between semicolons and commas, that not all texts have."""
    parts = [[part.strip() for part in text.replace("; ", ", ").split(", ")] for text in texts]
    common = set(parts[0]).intersection(*parts[1:])
    return [
        ", ".join(part for part in own if part not in common) or text for own, text in zip(parts, texts, strict=True)
    ]


def _raise_mismatch(what: str, expected: str, told: Sequence[str], fix: str) -> None:
    raise RankMismatchError(what, expected=expected, ranks=told, fix=fix, collective=True)
