"""The states of several metrics, of all ranks, in one exchange: values from everywhere, gradient through this rank's own.

Legend: ``W`` ranks. A frame carries this rank's bytes when they fit; when a rank has more, the frames carry the sizes only,
and the bytes follow in one all-reduce, in place in the buffer in which they are then read. No barrier; nothing in
backward: every rank computes the same value from the same bytes, so its own slice gets its own gradient times W.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torchmetrics.utilities.data import dim_zero_mean

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import own_slices_with_grad
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import all_gather_slices_, as_bytes, host_bytes
from lightning_ddp_losses.metrics.disagreement import agree_in_full
from lightning_ddp_losses.metrics.layout import Layout, State, lay_out, pieces_of, table_of_contents

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
