"""Plain collectives on tensors whose shapes are agreed already: no graph, no frame.

Legend: ``W`` ranks, ``B`` rows on this rank (may differ), ``G`` their sum. Each picks the group by the tensor's device, and what is
cheapest there: gloo's reduce-scatter moves as much as an all-reduce, its small gather is faster than its small all-reduce.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_losses import groups
from lightning_ddp_losses.groups import Group

__all__ = [
    "as_bytes",
    "broadcast_",
    "carrier",
    "gather",
    "gather_rows",
    "host_bytes",
    "host_memory",
    "join_slices_",
    "on_wait",
    "reduce_mean_",
    "scatter_sum",
    "start_gather",
    "start_mean",
    "sum_over_ranks",
    "swap",
    "wait",
]

# torch 2.13 renames these two and deprecates the old names
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_BROADCAST_BYTES = 64 << 20
_GATHER_BYTES = 256 << 10  # over all ranks
_AWAKE_SECONDS = 0.002
_NUMPY = {torch.float32, torch.float64, torch.int64, torch.int32, torch.bool}  # the usual ones, in one call
_give_way = getattr(os, "sched_yield", None) or (lambda: time.sleep(0))


_before_waiting: Callable[[], object] | None = None


def on_wait(listener: Callable[[], object] | None) -> None:
    """What to call before a collective of ours waits for peers (frames and means of gradients apart); None: nothing."""
    global _before_waiting  # noqa: PLW0603 - one backward at a time
    _before_waiting = listener


def carrier(tensor: Tensor, group: Group) -> dist.ProcessGroup:
    """The process group for a collective on ``tensor`` that starts now."""
    if _before_waiting is not None:
        _before_waiting()
    return groups.family(group).payload(tensor)


def wait(work: dist.Work) -> None:
    """Wait for a collective; on the CPU first awake, for the time that a small one takes.

    To sleep and be woken costs more than a small collective, on virtual machines several times.
    """
    end = time.perf_counter() + _AWAKE_SECONDS
    while not work.is_completed() and time.perf_counter() < end:
        _give_way()
    work.wait()


def gather(everyone: Tensor, own: Tensor, *, group: dist.ProcessGroup) -> None:
    """(n,) of each rank -> (W * n,) in rank order."""
    work = _gather_into(everyone, own, group=group, async_op=True)
    if own.device.type == "cpu":
        wait(work)
    else:
        work.wait()


def start_gather(own: Tensor, *, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start gathering a few bytes on the CPU: (n,) of each rank -> (W, n) in rank order, once the work is done.

    As an all-to-all of W copies: gloo's own gather goes round a ring and copies twice, which takes half as long again.
    """
    copies = own.expand(groups.world_size(group), -1).contiguous()
    everyone = torch.empty_like(copies)
    return everyone, dist.all_to_all_single(everyone, copies, group=group, async_op=True)


def host_memory(tensor: Tensor) -> Any:
    """The memory of a tensor on the CPU as an array of numpy's, of bytes where numpy lacks its dtype; contiguous, else a copy."""
    flat = tensor.detach().contiguous()
    return (flat if flat.dtype in _NUMPY else as_bytes(flat)).numpy()


def host_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor on the CPU, row by row whatever its strides."""
    if tensor.dtype in _NUMPY:
        return tensor.detach().numpy().tobytes()
    return as_bytes(tensor).numpy().tobytes()


def start_mean(tensor: Tensor, *, group: Group = None) -> Callable[[], Tensor]:
    """Start replacing a tensor by its mean over ranks; the answer waits for it and returns it.

    Communication: one all-reduce, on a group that no other collective uses; for few bytes on the CPU one gather.
    """
    world = groups.world_size(group)
    if world == 1:
        return lambda: tensor
    family = groups.family(group)
    on_host = tensor.device.type == "cpu"
    channel = family.gradients if on_host else family.device
    if on_host and tensor.nbytes * world <= _GATHER_BYTES and tensor.is_contiguous():
        everyone, gathering = start_gather(tensor.view(-1), group=channel)  # gloo reduces few bytes more slowly

        def add() -> Tensor:
            wait(gathering)
            return torch.mean(everyone, 0, out=tensor.view(-1)).view(tensor.shape)

        return add
    reducing = dist.all_reduce(tensor, group=channel, async_op=True)
    assert reducing is not None

    def divide() -> Tensor:
        if on_host:
            wait(reducing)
        else:
            reducing.wait()
        return tensor.div_(world)

    return divide


def reduce_mean_(tensor: Tensor, *, group: Group = None) -> Tensor:
    """Replace a tensor by its mean over ranks, in place. Communication: as ``start_mean``."""
    return start_mean(tensor, group=group)()


def broadcast_(tensors: Sequence[Tensor], *, group: Group = None) -> None:
    """Overwrite tensors with those of the group's rank 0, in place.

    Communication: one broadcast per 64 MiB and device, as bytes.
    """
    if groups.world_size(group) == 1:
        return
    batch: list[Tensor] = []
    for index, tensor in enumerate(tensors):
        batch.append(tensor.detach())
        last = index + 1 == len(tensors)
        if last or tensors[index + 1].device != tensor.device or sum(t.nbytes for t in batch) >= _BROADCAST_BYTES:
            _broadcast_bytes(batch, group)
            batch = []


def _broadcast_bytes(tensors: list[Tensor], group: Group) -> None:
    family = groups.family(group)
    packed = torch.cat([as_bytes(t) for t in tensors])
    dist.broadcast(packed, src=family.ranks[0], group=carrier(packed, group))
    offset = 0
    for tensor in tensors:
        # a slice may start at any byte; a view of another dtype needs an aligned start
        own = packed[offset : offset + tensor.nbytes].clone().view(tensor.dtype).view(tensor.shape)
        offset += tensor.nbytes
        tensor.copy_(own)


def gather_rows(rows: Tensor, counts: list[int], group: Group) -> Tensor:
    """(B, ...) -> (G, ...) as bytes: bit exact, and for dtypes that a backend cannot reduce."""
    longest, own = max(counts), rows.detach().contiguous()
    row_shape, row_bytes = own.shape[1:], own[:0].new_empty((1, *own.shape[1:])).nbytes
    if longest * row_bytes == 0:
        return own.new_empty((sum(counts), *row_shape))
    padded = own
    if own.shape[0] < longest:
        padded = own.new_zeros((longest, *row_shape))
        padded[: own.shape[0]] = own
    out = own.new_empty((len(counts) * longest, *row_shape))
    channel = carrier(own, group)
    gather(as_bytes(out), as_bytes(padded), group=channel)
    if min(counts) == longest:
        return out
    return torch.cat([out[i * longest : i * longest + n] for i, n in enumerate(counts)])


def join_slices_(everyone: Tensor, group: Group) -> None:
    """Complete, in place, bytes (a multiple of 8) of which each rank has written its own and left the others zero.

    One all-reduce (for few bytes on the CPU one gather). It moves twice what a gather moves, but needs no second buffer, as
    gloo's gather does, and no padding.
    """
    words, channel = everyone.view(torch.int64), carrier(everyone, group)
    on_host = everyone.device.type == "cpu"
    if on_host and everyone.nbytes * groups.world_size(group) <= _GATHER_BYTES:
        gathered, work = start_gather(words, group=channel)
        wait(work)
        torch.sum(gathered, 0, out=words)
        return
    reducing = dist.all_reduce(words, group=channel, async_op=True)
    assert reducing is not None
    if on_host:
        wait(reducing)
    else:
        reducing.wait()


def as_bytes(tensor: Tensor) -> Tensor:
    """Its bytes, 1-D; the tensor's own memory where that is contiguous."""
    flat = tensor.detach().resolve_conj().contiguous()
    # one element counts as contiguous whatever its stride; a view as bytes needs stride 1
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def scatter_sum(tensor: Tensor, counts: list[int], group: Group) -> Tensor:
    """(G, ...) on each rank -> own rows of the sum over ranks, added in rank order and at least float32."""
    rank, row_shape = groups.rank(group), tensor.shape[1:]
    wide = torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype
    source = tensor.detach().contiguous()
    if source.device.type == "cpu":  # gloo's reduce-scatter moves as much as an all-reduce; this moves each row once
        width = row_shape.numel()
        received = source.new_empty((len(counts), counts[rank], *row_shape))
        dist.all_to_all_single(
            received.reshape(-1),
            source.reshape(-1),
            [counts[rank] * width] * len(counts),
            [n * width for n in counts],
            group=carrier(source, group),
        )
        return received.to(wide).sum(0).to(tensor.dtype)
    longest = max(counts)
    padded = source.new_zeros((len(counts), longest, *row_shape), dtype=wide)
    for block, rows in zip(padded, torch.split(source, counts), strict=True):
        block[: rows.shape[0]] = rows
    out = padded.new_empty((longest, *row_shape))
    _reduce_scatter_into(out.reshape(-1), padded.reshape(-1), group=carrier(source, group))
    return out[: counts[rank]].to(tensor.dtype)


def swap(parts: Sequence[Tensor], sizes: Sequence[int], group: Group) -> list[Tensor]:
    """Give rank i the i-th part (1-D, one dtype); returns what each rank gave, of these sizes. One exchange."""
    packed = torch.cat(list(parts)).contiguous()
    received = packed.new_empty(sum(sizes))
    channel = carrier(packed, group)
    dist.all_to_all_single(received, packed, list(sizes), [p.numel() for p in parts], group=channel)
    return list(torch.split(received, list(sizes)))


def sum_over_ranks(tensor: Tensor, group: Group) -> Tensor:
    """The sum, in at least float32 (integers: int32), in the tensor's dtype. One all-reduce."""
    narrow = tensor.dtype.itemsize < torch.float32.itemsize  # halves lose digits; gloo does not add int16
    wide = torch.float32 if tensor.is_floating_point() else torch.int32
    total = (tensor.detach().to(wide) if narrow else tensor.detach().clone()).contiguous()
    dist.all_reduce(total, group=carrier(total, group))
    return total.to(tensor.dtype)
