"""Plain collectives on tensors whose shapes are agreed already: no graph, no frame.

Legend: ``W`` ranks, ``B`` rows on this rank (may differ), ``G`` their sum. Each picks the group by the tensor's device, and what is
cheapest there: gloo's reduce-scatter moves as much as an all-reduce, its small gather is faster than its small all-reduce.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.process_groups import Group

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


def group_for(tensor: Tensor, group: Group) -> dist.ProcessGroup:
    """The process group for a collective on ``tensor`` that starts now."""
    if _before_waiting is not None:
        _before_waiting()
    return process_groups.internal_groups(group).for_tensor(tensor)


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
    copies = own.expand(process_groups.world_size(group), -1).contiguous()
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
    world = process_groups.world_size(group)
    if world == 1:
        return lambda: tensor
    internal_groups = process_groups.internal_groups(group)
    on_host = tensor.device.type == "cpu"
    channel = internal_groups.gradients if on_host else internal_groups.device
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
    if process_groups.world_size(group) == 1:
        return
    batch: list[Tensor] = []
    for index, tensor in enumerate(tensors):
        batch.append(tensor.detach())
        last = index + 1 == len(tensors)
        if last or tensors[index + 1].device != tensor.device or sum(t.nbytes for t in batch) >= _BROADCAST_BYTES:
            _broadcast_bytes(batch, group)
            batch = []


def _broadcast_bytes(tensors: list[Tensor], group: Group) -> None:
    internal_groups = process_groups.internal_groups(group)
    packed = torch.cat([as_bytes(t) for t in tensors])
    dist.broadcast(packed, src=internal_groups.ranks[0], group=group_for(packed, group))
    offset = 0
    for tensor in tensors:
        # a slice may start at any byte; a view of another dtype needs an aligned start
        own = packed[offset : offset + tensor.nbytes].clone().view(tensor.dtype).view(tensor.shape)
        offset += tensor.nbytes
        tensor.copy_(own)


def all_gather_rows(rows: Tensor, counts: list[int], group: Group) -> Tensor:
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
    channel = group_for(own, group)
    gather(as_bytes(out), as_bytes(padded), group=channel)
    if min(counts) == longest:
        return out
    return torch.cat([out[i * longest : i * longest + n] for i, n in enumerate(counts)])


def all_gather_slices_(everyone: Tensor, group: Group) -> None:
    """Complete, in place, bytes (a multiple of 8) of which each rank has written its own and left the others zero.

    One all-reduce (for few bytes on the CPU one gather). It moves twice what a gather moves, but needs no second buffer, as
    gloo's gather does, and no padding.
    """
    words, channel = everyone.view(torch.int64), group_for(everyone, group)
    on_host = everyone.device.type == "cpu"
    if on_host and everyone.nbytes * process_groups.world_size(group) <= _GATHER_BYTES:
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


def reduce_scatter_rows(tensor: Tensor, counts: list[int], group: Group) -> Tensor:
    """(G, ...) on each rank -> own rows of the sum over ranks, added in rank order and at least float32."""
    rank, row_shape = process_groups.rank(group), tensor.shape[1:]
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
            group=group_for(source, group),
        )
        return received.to(wide).sum(0).to(tensor.dtype)
    longest = max(counts)
    padded = source.new_zeros((len(counts), longest, *row_shape), dtype=wide)
    for block, rows in zip(padded, torch.split(source, counts), strict=True):
        block[: rows.shape[0]] = rows
    out = padded.new_empty((longest, *row_shape))
    _reduce_scatter_into(out.reshape(-1), padded.reshape(-1), group=group_for(source, group))
    return out[: counts[rank]].to(tensor.dtype)


def all_to_all(parts: Sequence[Tensor], sizes: Sequence[int], group: Group) -> list[Tensor]:
    """Give rank i the i-th part (1-D, one dtype); returns what each rank gave, of these sizes. One exchange."""
    packed = torch.cat(list(parts)).contiguous()
    received = packed.new_empty(sum(sizes))
    channel = group_for(packed, group)
    dist.all_to_all_single(received, packed, list(sizes), [p.numel() for p in parts], group=channel)
    return list(torch.split(received, list(sizes)))


def sum_over_ranks(tensor: Tensor, group: Group) -> Tensor:
    """The sum, in at least float32 (integers: int32), in the tensor's dtype. One all-reduce."""
    narrow = tensor.dtype.itemsize < torch.float32.itemsize  # halves lose digits; gloo does not add int16
    wide = torch.float32 if tensor.is_floating_point() else torch.int32
    total = (tensor.detach().to(wide) if narrow else tensor.detach().clone()).contiguous()
    dist.all_reduce(total, group=group_for(total, group))
    return total.to(tensor.dtype)


# ---------- from messages.py


def ring_rows(rows: Tensor, counts: Sequence[int], group: Group) -> Iterator[tuple[int, Tensor]]:
    """Every rank's rows in turn, own ones first: two ranks' rows are here at a time, and the next travel while these are used.

    Args:
        rows: (B, ...), this rank's.
        counts: B of each rank.
        group: Process group.

    Returns:
        (rank, its rows), W times; every rank must go all the way.

    Communication: W - 1 messages to the next rank.
    """
    world, rank = process_groups.world_size(group), process_groups.rank(group)
    here = rows.detach().contiguous()
    subgroup_of_size = _Neighbours(here, group) if world > 1 else None
    for step in range(world):
        source, coming = (rank - step) % world, None
        if subgroup_of_size is not None and step + 1 < world:
            coming = subgroup_of_size.ring_send(here, counts[source - 1])
        yield source, here
        if coming is not None:
            here = coming()


def ring_round_trip(
    rows: Tensor,
    counts: Sequence[int],
    visit: Callable[[int, Tensor], Tensor],
    join: Callable[[Tensor, Tensor], Tensor],
    found_counts: Sequence[int],
    group: Group,
) -> Tensor:
    """What all ranks find out about this rank's rows, which pass by all of them; what is found goes on behind the rows.

    Args:
        rows: (B, ...), this rank's.
        counts: B of each rank.
        visit: Rank and its rows -> what this rank finds, (n, ...), of one dtype and width for all; called W times.
        join: What one rank found and what those before it did -> both.
        found_counts: n of each rank.
        group: Process group.

    Returns:
        (n, ...), joined over all ranks: that of the next rank first, own last.

    Communication: 2 (W - 1) messages to the next rank. Each found block travels while the next one is computed.
    """
    own: Tensor | None = None
    before: Callable[[], Tensor] | None = None
    subgroup_of_size = _Neighbours(rows, group) if process_groups.world_size(group) > 1 else None
    for source, here in ring_rows(rows, counts, group):
        found = visit(source, here)
        if own is None or subgroup_of_size is None:
            own = found
            continue
        if before is not None:
            found, before = join(found, before()), None
        before = subgroup_of_size.ring_send(found, found_counts[source - 1])  # what comes last is about this rank's own
        del here, found  # else they would be held while the next are made
    assert own is not None
    return own if before is None else join(own, before())


class _Neighbours:
    """The ranks before and after this one in the ring."""

    def __init__(self, like: Tensor, group: Group) -> None:
        ranks, rank = process_groups.internal_groups(group).ranks, process_groups.rank(group)
        self._channel = group_for(like, group)
        self._after, self._before = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]

    def ring_send(self, tensor: Tensor, rows: int) -> Callable[[], Tensor]:
        """Start to give a tensor to the next rank; the answer waits for what comes from the one before, so many rows.

        Both ranks know the sizes: what is empty is not sent.
        """
        arriving = tensor.new_empty((rows, *tensor.shape[1:]))
        ways = ((dist.isend, tensor, self._after), (dist.irecv, arriving, self._before))
        messages = [dist.P2POp(what, given, peer, self._channel) for what, given, peer in ways if given.numel()]
        works = dist.batch_isend_irecv(messages) if messages else []

        def arrived() -> Tensor:
            for work in works:
                work.wait()
            return arriving

        return arrived


def send(tensor: Tensor, to: int) -> None:
    """Give a tensor to one rank of the world, which calls ``receive``."""
    own = tensor.detach().contiguous()
    dist.send(own, to, group=group_for(own, None))


def receive(shape: Sequence[int], like: Tensor, source: int) -> Tensor:
    """The tensor of this shape that one rank of the world sends, in the dtype and on the device of ``like``."""
    out = like.new_empty(tuple(shape))
    dist.recv(out, source, group=group_for(out, None))
    return out
