"""Plain collectives on tensors of agreed shapes, without a graph or a handshake.

Legend: ``W`` ranks, ``B`` rows on this rank (may differ), ``G`` their sum. Each function picks the group by the tensor's device, and the
cheapest implementation on that device: gloo's reduce-scatter moves as much data as an all-reduce, and its small gather is faster than its
small all-reduce. gloo does not support ``all_gather`` into a list of uneven tensors (it can return garbage on one rank while another
aborts) or reductions of int16 and uint64 (measured with torch 2.13, 2026). Therefore rows are padded and sent as bytes, and half-precision
numbers and small integers are added in a wider dtype.

gloo supports accelerator tensors in some collectives only. If it is the group's backend (two ranks on one GPU, which NCCL rejects, or a
device that no backend supports), they are sent through host memory (``is_staged``), in the same way as tensors on the CPU.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_losses.core.host_copy import HostCopy
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.process_groups import Group

NARROW_DTYPES = (None, torch.bfloat16, torch.float16)
"""Dtypes by the number that a rank sends for a tensor. None means that the tensor is sent in its own dtype."""


class TravellingRows(NamedTuple):
    """The rows of one tensor in transit between ranks, as bytes. Ranks whose rows have a narrower dtype send that dtype.

    Attributes:
        shape: Shape of a row.
        dtypes: Dtype of each rank's rows.
        dtype: Dtype to which rows are cast after they are received. If None, they are not cast.
    """

    shape: torch.Size
    dtypes: Sequence[torch.dtype]
    dtype: torch.dtype | None = None

    @property
    def is_uniform(self) -> bool:
        """Whether all ranks send the same dtype."""
        return len(set(self.dtypes)) == 1

    def sizes(self, counts: Sequence[int]) -> list[int]:
        """Return the size in bytes of the rows of each rank."""
        numbers = self.shape.numel()
        return [rows * numbers * dtype.itemsize for rows, dtype in zip(counts, self.dtypes, strict=True)]

    def rows_in(self, message: Tensor, rank: int, rows: int) -> Tensor:
        """Return the rows of one rank as a view of their bytes (n,)."""
        return message.view(self.dtypes[rank]).view(rows, *self.shape)

    def joined(self, message: Tensor, rows: int) -> Tensor:
        """Return the rows of all ranks, of one dtype, from their bytes (n,) concatenated in rank order."""
        # not a view: autograd would refuse to change it in place
        found = self.rows_in(message, 0, rows).detach()
        return found if self.dtype is None else found.to(self.dtype)

    def concatenated(self, messages: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
        """Return the rows of all ranks from the separate bytes (n,) of each rank."""
        blocks = [self.rows_in(message, rank, counts[rank]) for rank, message in enumerate(messages)]
        if not self.is_uniform and self.dtype is not None:
            blocks = [block.to(self.dtype) for block in blocks]
        whole = torch.cat(blocks)
        return whole if self.dtype is None else whole.to(self.dtype)


_AWAKE_SECONDS = 0.002
_give_way = getattr(os, "sched_yield", None) or (lambda: time.sleep(0))


def wait(work: dist.Work, timeout: timedelta | None = None) -> None:
    """Wait for a collective on the CPU.

    Args:
        work: The collective.
        timeout: Time to wait. If None, the group's timeout.
    """
    if timeout is not None:
        work.wait(timeout)
        return
    seconds = awake_seconds()
    if seconds:
        end = time.perf_counter() + seconds
        while not work.is_completed() and time.perf_counter() < end:
            _give_way()
    work.wait()


def _wait_for(work: dist.Work | None, tensor: Tensor) -> None:
    """Wait for a collective on a tensor."""
    assert work is not None
    if tensor.device.type == "cpu":
        wait(work)
    else:
        work.wait()


def awake_seconds() -> float:
    """Return how long this rank waits actively before blocking. 0 if there are more ranks than processors on the machine."""
    return _AWAKE_SECONDS if has_own_processor(process_groups.world_size()) else 0.0


@functools.cache  # called by each wait, and takes 10 microseconds
def has_own_processor(world_size: int) -> bool:
    """Return whether there is a processor for each rank on this machine. Without torchrun all ranks of the world are counted."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    # a container or a job may be restricted to fewer processors than the machine has
    affinity = getattr(os, "sched_getaffinity", None)
    processors = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return (int(told) if told.isdecimal() else world_size) <= processors


# torch 2.13 renames these two and deprecates the old names
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_BROADCAST_BYTES = 64 << 20  # size of one broadcast
# total over all ranks up to which tensors are gathered and added locally, which takes less time than gloo's all-reduce
_GATHER_BYTES = 256 << 10
_NUMPY_DTYPES = {torch.float32, torch.float64, torch.int64, torch.int32, torch.bool}  # the most common ones


def group_for(tensor: Tensor, group: Group) -> dist.ProcessGroup:
    """Return the process group that carries ``tensor``."""
    return process_groups.internal_groups(group).for_tensor(tensor)


def travels_on_device(tensor: Tensor, group: Group) -> bool:
    """Return whether ranks gather this tensor without host memory: not on the CPU, and not if gloo carries an accelerator's tensors."""
    if tensor.device.type == "cpu":
        return False
    return not is_staged(tensor, group)


def is_staged(tensor: Tensor, group: Group) -> bool:
    """Return whether this tensor is sent through host memory: it is on an accelerator, and gloo carries it to other ranks."""
    if tensor.device.type == "cpu" or process_groups.world_size(group) == 1:
        return False
    return process_groups.internal_groups(group).are_devices_staged


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, pinned if the device supports it."""
    return HostCopy(tensor).read()


def _staged(tensor: Tensor, group: Group) -> Tensor:
    """Return the tensor to send: a copy in host memory if gloo carries it for an accelerator, otherwise the tensor itself."""
    return _on_host(tensor) if is_staged(tensor, group) else tensor


def gather(everyone: Tensor, own: Tensor, *, group: dist.ProcessGroup) -> None:
    """Gather (n,) from each rank into ``everyone``, (W * n,) in rank order."""
    if group.size() == 1:
        everyone.copy_(own)
        return
    if own.device.type != "cpu" and dist.get_backend(group) == dist.Backend.GLOO:
        gathered = torch.empty(everyone.shape, dtype=everyone.dtype)
        gather(gathered, _on_host(own), group=group)
        everyone.copy_(gathered)
        return
    _wait_for(_gather_into(everyone, own, group=group, async_op=True), own)


def gather_stacked(own: Tensor, group: Group) -> Tensor:
    """Gather a tensor of one shape on all ranks into (W, ...). Communication: one gather, or none in a world of one rank."""
    world_size = process_groups.world_size(group)
    if world_size == 1:
        return own.unsqueeze(0)
    everyone = own.new_empty((world_size, *own.shape))
    gather(everyone.view(-1), own.reshape(-1), group=group_for(own, group))
    return everyone


def start_gather(own: Tensor, *, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Start gathering a few bytes on the CPU: (n,) from each rank -> (W, n) in rank order, once the work is done.

    This is an all-to-all of W copies: gloo's own gather is a ring and copies twice, which takes half as long again.
    """
    copies = own.expand(group.size(), -1).contiguous()
    everyone = torch.empty_like(copies)
    return everyone, dist.all_to_all_single(everyone, copies, group=group, async_op=True)


def host_memory(tensor: Tensor) -> Any:
    """Return the memory of a CPU tensor as a numpy array, of bytes if numpy lacks the dtype. A non-contiguous tensor is copied."""
    flat = tensor.detach().resolve_neg().contiguous()
    return (flat if flat.dtype in _NUMPY_DTYPES else as_bytes(flat)).numpy()


def host_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a CPU tensor in row-major order, for any strides."""
    if tensor.dtype not in _NUMPY_DTYPES:
        tensor = as_bytes(tensor)
    data: bytes = tensor.numpy(force=True).tobytes()
    return data


def tensor_of_bytes(parts: Sequence[bytes]) -> Tensor:
    """Return the concatenated parts as a CPU tensor (n,) of bytes."""
    data = bytearray().join(parts)
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def start_mean(tensor: Tensor, *, group: Group = None) -> Callable[[], Tensor]:
    """Start replacing a tensor by its mean over ranks.

    Returns:
        A function that waits for the result and returns the tensor.

    Communication: one all-reduce, on a group that is not used by another collective, or one gather for few bytes on the CPU.
    """
    world_size = process_groups.world_size(group)
    if world_size == 1:
        return lambda: tensor
    if is_staged(tensor, group):
        finish = start_mean(_on_host(tensor), group=group)
        return lambda: tensor.copy_(finish())
    internal_groups = process_groups.internal_groups(group)
    is_on_host = tensor.device.type == "cpu"
    carrier = internal_groups.get("gradients") if is_on_host else internal_groups.device
    if is_on_host and tensor.nbytes * world_size <= _GATHER_BYTES and tensor.is_contiguous():
        everyone, gathering = start_gather(tensor.view(-1), group=carrier)

        def mean_of_gathered() -> Tensor:
            wait(gathering)
            return torch.mean(everyone, 0, out=tensor.view(-1)).view(tensor.shape)

        return mean_of_gathered
    divided_before = 1
    if tensor.dtype == torch.float16:  # a sum over many ranks may overflow. A power of two preserves all digits
        divided_before = 1 << (world_size - 1).bit_length()
        tensor.div_(divided_before)
    reducing = dist.all_reduce(tensor, group=carrier, async_op=True)

    def mean_of_sum() -> Tensor:
        _wait_for(reducing, tensor)
        return tensor.div_(world_size / divided_before)

    return mean_of_sum


def broadcast_(tensors: Sequence[Tensor], *, group: Group = None) -> None:
    """Overwrite tensors in place with the tensors of the group's rank 0.

    Communication: one broadcast per 64 MiB and device, as bytes.
    """
    if process_groups.world_size(group) == 1:
        return
    batch: list[Tensor] = []
    for index, tensor in enumerate(tensors):
        batch.append(tensor.detach())
        is_last = index + 1 == len(tensors)
        is_full = sum(t.nbytes for t in batch) >= _BROADCAST_BYTES
        if is_last or is_full or tensors[index + 1].device != tensor.device:
            _broadcast_bytes_(batch, group)
            batch = []


def broadcast_between_replicas_(part: Tensor, group: dist.ProcessGroup) -> None:
    """Overwrite a part in place with the part on the first rank of a mesh's own group, without creating an internal group.

    Communication: one broadcast, or none for an empty part.
    """
    if part.numel():
        dist.broadcast(part.detach(), group_src=0, group=group)


def _broadcast_bytes_(tensors: list[Tensor], group: Group) -> None:
    packed = _staged(torch.cat([as_bytes(tensor) for tensor in tensors]), group)
    source = process_groups.internal_groups(group).ranks[0]
    dist.broadcast(packed, src=source, group=group_for(packed, group))
    packed, offset = packed.to(tensors[0].device), 0
    for tensor in tensors:
        # a slice may start at any byte, whereas a view with another dtype needs an aligned start
        received = packed[offset : offset + tensor.nbytes].clone()
        tensor.copy_(received.view(tensor.dtype).view(tensor.shape))
        offset += tensor.nbytes


def all_gather_rows(rows: Tensor, counts: list[int], group: Group) -> Tensor:
    """Gather (B, ...) into (G, ...) as bytes, which is bit exact and supports dtypes that a backend cannot reduce."""
    own = rows.detach().contiguous()
    row_shape = own.shape[1:]
    longest = max(counts)
    if longest * row_shape.numel() == 0:
        return own.new_empty((sum(counts), *row_shape))
    # 1. pad to the number of rows of the rank with the most
    padded = own
    if own.shape[0] < longest:
        padded = own.new_zeros((longest, *row_shape))
        padded[: own.shape[0]] = own
    # 2. one gather of equal sizes
    out = own.new_empty((len(counts) * longest, *row_shape))
    gather(as_bytes(out), as_bytes(padded), group=group_for(own, group))
    # 3. remove the padding
    if min(counts) == longest:
        return out
    blocks = out.view(len(counts), longest, *row_shape)
    return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])


def all_gather_slices_(everyone: Tensor, group: Group) -> None:
    """Complete, in place, bytes (a multiple of 8) of which each rank has written its own part and left the remaining bytes zero.

    This moves twice as much data as a gather, but does not require padding, or a second buffer as gloo's gather does.

    Communication: one all-reduce, or one gather for few bytes on the CPU.
    """
    if is_staged(everyone, group):
        on_host = _on_host(everyone)
        all_gather_slices_(on_host, group)
        everyone.copy_(on_host)
        return
    words = everyone.view(torch.int64)
    carrier = group_for(everyone, group)
    if everyone.device.type == "cpu" and everyone.nbytes * process_groups.world_size(group) <= _GATHER_BYTES:
        gathered, work = start_gather(words, group=carrier)
        wait(work)
        torch.sum(gathered, 0, out=words)
        return
    _wait_for(dist.all_reduce(words, group=carrier, async_op=True), words)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, 1-D, sharing its memory if it is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # a single element counts as contiguous for any stride, but a view as bytes requires stride 1
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def reduce_scatter_rows(tensor: Tensor, counts: list[int], group: Group) -> Tensor:
    """Return this rank's rows of the sum of (G, ...) over ranks, added in at least float32, in rank order on the CPU, in NCCL's else."""
    if is_staged(tensor, group):
        return reduce_scatter_rows(_on_host(tensor), counts, group).to(tensor.device)
    if tensor.is_complex() and tensor.device.type != "cpu":  # NCCL does not add complex numbers
        as_pairs = torch.view_as_real(tensor.detach().resolve_conj())
        return torch.view_as_complex(reduce_scatter_rows(as_pairs, counts, group))
    rank = process_groups.rank(group)
    row_shape = tensor.shape[1:]
    wide = wide_dtype(tensor.dtype)
    source = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if source.device.type == "cpu":  # unlike gloo's reduce-scatter, this sends each row only once
        # sent as bytes, because gloo does not support all dtypes
        row_bytes = row_shape.numel() * source.element_size()
        received = source.new_empty((len(counts), counts[rank], *row_shape))
        received_sizes = [counts[rank] * row_bytes] * len(counts)
        sent_sizes = [count * row_bytes for count in counts]
        carrier = group_for(source, group)
        dist.all_to_all_single(as_bytes(received), as_bytes(source), received_sizes, sent_sizes, group=carrier)
        return received.to(wide).sum(0).to(tensor.dtype)
    longest = max(counts)
    padded = source.to(wide)
    if min(counts) < longest:
        padded = source.new_zeros((len(counts), longest, *row_shape), dtype=wide)
        for block, rows in zip(padded, torch.split(source, counts), strict=True):
            block[: rows.shape[0]] = rows
    out = padded.new_empty((longest, *row_shape))
    _reduce_scatter_into(out.reshape(-1), padded.reshape(-1), group=group_for(source, group))
    return out[: counts[rank]].to(tensor.dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers are added: half precision loses digits, and backends do not add small integers."""
    if dtype.itemsize >= torch.float32.itemsize:
        return dtype
    if dtype.is_floating_point:
        return torch.float32
    return torch.int32


def all_to_all(parts: Sequence[Tensor], sizes: Sequence[int], group: Group) -> list[Tensor]:
    """Send the i-th part (1-D, one dtype) to rank i, and return the parts received, of these sizes. Communication: one exchange."""
    packed = _staged(torch.cat(list(parts)).contiguous(), group)
    received = packed.new_empty(sum(sizes))
    sent_sizes = [part.numel() for part in parts]
    dist.all_to_all_single(received, packed, list(sizes), sent_sizes, group=group_for(packed, group))
    return list(torch.split(received.to(parts[0].device), list(sizes)))


def sum_over_ranks(tensor: Tensor, group: Group) -> Tensor:
    """Return the sum in the tensor's dtype, added in its ``wide_dtype``. Communication: one all-reduce."""
    return _all_reduce(tensor, wide_dtype(tensor.dtype), dist.ReduceOp.SUM, group)


def add_over_ranks_(tensor: Tensor, group: Group) -> None:
    """Replace a contiguous tensor, of a dtype that backends add, by its sum. Communication: one all-reduce."""
    carried = _staged(tensor, group)
    reducing = dist.all_reduce(carried, group=group_for(carried, group), async_op=True)
    _wait_for(reducing, carried)
    if carried is not tensor:
        tensor.copy_(carried)


def max_over_ranks(tensor: Tensor, group: Group) -> Tensor:
    """Return the element-wise maximum over ranks. Communication: one all-reduce, or none in a world of one rank."""
    if process_groups.world_size(group) == 1:
        return tensor
    return _all_reduce(tensor, tensor.dtype, dist.ReduceOp.MAX, group)


def _all_reduce(tensor: Tensor, dtype: torch.dtype, operation: Any, group: Group) -> Tensor:
    """Return the reduced tensor as a new tensor, computed in ``dtype``."""
    plain = _staged(tensor.detach().resolve_conj().resolve_neg(), group)
    reduced = plain.to(dtype, copy=True).contiguous()
    dist.all_reduce(reduced, operation, group=group_for(reduced, group))
    return reduced.to(tensor.device, tensor.dtype)


# ---------------------------------------------------------------------- point-to-point messages


def ring_round_trip(
    rows: Tensor,
    counts: Sequence[int],
    visit: Callable[[int, Tensor], Tensor | None],
    join: Callable[[Tensor, Tensor], Tensor],
    found_counts: Sequence[int] | None,
    group: Group,
) -> Tensor | None:
    """Visit every rank's rows in turn, starting with the local ones, and return the results of all ranks for this rank's rows.

    The next rows are in transit while the current ones are visited, so that the rows of two ranks are in memory at a time. Results follow
    the rows around the ring.

    Args:
        rows: (B, ...), this rank's rows.
        counts: B of each rank.
        visit: Maps a rank and its rows to this rank's result, (n, ...), of one dtype and width for all ranks. Called W times.
        join: Joins one rank's result with the joined result of the ranks before it.
        found_counts: n of each rank. If None, results are not collected.
        group: Process group.

    Returns:
        (n, ...), joined over all ranks: first the next rank's result, last this rank's own. None if results are not collected.

    Communication: W - 1 messages to the next rank, and the same number of messages with results.
    """
    world_size, rank = process_groups.world_size(group), process_groups.rank(group)
    here = rows.detach().contiguous()
    if world_size == 1:
        found = visit(rank, here)
        return None if found_counts is None else found
    ring, own = Ring(here, group), None
    receive_found: Callable[[], Tensor] | None = None
    for step in range(world_size):
        source = (rank - step) % world_size
        receive_next = None
        if step + 1 < world_size:
            receive_next = ring.send(here, counts[source - 1])
        found = visit(source, here)
        if step == 0:
            own = found
        elif found_counts is not None and found is not None:
            if receive_found is not None:
                found = join(found, receive_found())
            # the last results are for this rank's own rows
            receive_found = ring.send(found, found_counts[source - 1])
        del found  # release it before the next result is computed
        if receive_next is not None:
            here = receive_next()
    if found_counts is None or own is None:
        return None
    return own if receive_found is None else join(own, receive_found())


class Ring:
    """The ranks arranged in a ring, each with a predecessor and a successor.

    Args:
        like: A tensor on the device of the messages.
        group: Process group.
    """

    def __init__(self, like: Tensor, group: Group) -> None:
        internal_groups = process_groups.internal_groups(group)
        ranks, rank = internal_groups.ranks, process_groups.rank(group)
        self._is_staged = is_staged(like, group)
        self._carrier = group_for(like, group)
        internal_groups.warm_up(like.device)  # because a rank without rows does not send messages
        self._next, self._previous = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]

    def send(self, tensor: Tensor, rows: int) -> Callable[[], Tensor]:
        """Start sending a tensor to the next rank and receiving one with the given number of rows from the previous rank.

        The sizes must be known on both ranks. Empty tensors are not sent.

        Returns:
            A function that waits for both and returns the received rows.
        """
        device = tensor.device
        if self._is_staged:
            tensor = _on_host(tensor)
        received = tensor.new_empty((rows, *tensor.shape[1:]))
        messages = []
        if tensor.numel():
            messages.append(dist.P2POp(dist.isend, tensor, self._next, self._carrier))
        if received.numel():
            messages.append(dist.P2POp(dist.irecv, received, self._previous, self._carrier))
        works = dist.batch_isend_irecv(messages) if messages else []

        def receive() -> Tensor:
            for work in works:
                work.wait()
            return received.to(device)

        return receive


def send(tensor: Tensor, to: int) -> None:
    """Send a tensor to one rank of the world, which calls ``receive``. All ranks must have used the group of the device already."""
    own = _staged(tensor.detach().contiguous(), None)
    dist.send(own, to, group=group_for(own, None))


def receive(shape: Sequence[int], like: Tensor, source: int) -> Tensor:
    """Return the tensor of this shape sent by one rank of the world, in the dtype and on the device of ``like``."""
    device = torch.device("cpu") if is_staged(like, None) else like.device
    out = like.new_empty(tuple(shape), device=device)
    dist.recv(out, source, group=group_for(out, None))
    return out.to(like.device)
