"""Exchanges the states of several metrics among all ranks at once: values from everywhere, gradient through this rank's own.

Legend: ``W`` ranks, ``B`` rows on this rank (may differ, may be 0), ``G`` their sum. A handshake carries this rank's bytes when they
fit (*inline*); when a rank has more, the handshake carries the sizes only, and the bytes follow in one all-reduce, in place in the
buffer in which they are then read. No barrier, and nothing in backward: every rank computes the same value from the same bytes, so
its own slice gets its own gradient times W.

What a state is stands in ``travelling_state``, where each rank's bytes lie in ``buffer_plan``, and what happens where ranks hold
different states in ``state_mismatch``.

Measured (torchmetrics 1.9, torch 2.13, 2026): its own sync is one gather with a barrier for each state, 5 collectives for one
``MeanSquaredError`` and 58 for a collection of six; here it is one.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import own_slices_with_grad
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import (
    all_gather_slices_,
    as_bytes,
    host_bytes,
    travels_on_device,
)
from lightning_ddp_losses.metrics.buffer_plan import BufferPlan, Entry, Region, pack_contents, plan_buffer
from lightning_ddp_losses.metrics.state_mismatch import adapt_states
from lightning_ddp_losses.metrics.travelling_state import Kind, State

_HEAD = struct.Struct("<16s?I")  # digest of what must be equal, whether the bytes are inline, bytes of the contents
_WEIGHT = struct.Struct("<d")  # a rank's rows, for a mean


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
        kind, sent = state.kind, state.tensors(device)
        names.append(state.name)
        kinds.append(kind)
        reductions.append(state.reduction)
        stacks.append((sent[0].dtype, tuple(sent[0].shape)) if kind == "stack" else None)
        tensors.append(sent)
        if state.is_mean:
            weights += _WEIGHT.pack(state.weight)
    own = list(itertools.chain.from_iterable(tensors))
    layout = tuple(names), tuple(kinds), tuple(stacks)
    digest = _digest_of_layout(*layout, tuple(reductions), device.type, configuration)

    # handshake: digest, sizes and row counts, and the bytes themselves where they fit
    contents = pack_contents(kinds, tensors).encode()
    own_bytes = sum(tensor.nbytes for tensor in own)
    is_inline = _HEAD.size + len(contents) + len(weights) + own_bytes <= handshake.inline_capacity(group)
    if own and travels_on_device(own[0], group):
        is_inline = False  # to bring them to the host would wait for the device
    payload = _HEAD.pack(digest, is_inline, len(contents)) + contents + weights
    if is_inline:
        payload += _joined_bytes(own, device)
    received = [_unpack(sent, len(weights)) for sent in handshake.all_gather(title, must_match, payload, group=group)]

    # ranks that hold something else: an error that says what, or a default in the others' shape and once more
    if any(message.digest != digest for message in received):
        adapted = adapt_states(title, states, configuration, device, group)
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
        rows = next(rows_by_mean) if state.is_mean else None
        values.append(state.reduced(found, rows))
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


@lru_cache(maxsize=64)
def _digest_of_layout(*must_match: object) -> bytes:
    return hashlib.blake2b(repr(must_match).encode(), digest_size=16).digest()


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
