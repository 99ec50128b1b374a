"""Several batches gathered as one: labels, indices and masks travel with the embeddings, in a single collective.

Legend: ``W`` ranks, ``B`` rows on this rank (per tensor, may differ), ``G`` their sum.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_ddp_losses.core.autograd_graph import match_requires_grad
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.backward_exchange import BackwardExchange
from lightning_ddp_losses.distributed.collectives import Backward, once_differentiable_strict
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import gather, group_for, host_bytes

Choice: TypeAlias = Callable[[dict[str, list[int]]], Backward]
"""Rows of each rank, by tensor -> which gradient to give; the same on every rank."""

_ALIGN = 16  # bytes; a view of any dtype may start there


@dataclass(frozen=True)
class GatheredBatch:
    """What all ranks brought.

    Attributes:
        tensors: (G, ...) each, in rank order.
        counts: Rows of each rank, per tensor.
        extras: Each rank's own ``extra`` bytes.
    """

    tensors: list[Tensor]
    counts: list[list[int]]
    extras: list[bytes]

    def offset(self, index: int, rank: int) -> int:
        """First row of ``rank`` in tensor ``index``."""
        return sum(self.counts[index][:rank])


def gather_batch(
    what: str,
    tensors: Mapping[str, Tensor],
    must_match: Mapping[str, object],
    *,
    backward: Backward | Choice = "sum",
    extra: bytes = b"",
    counted: Collection[str] = (),
    group: Group = None,
) -> GatheredBatch:
    """Rows of all ranks for several tensors at once, in rank order, with their graphs.

    Args:
        what: The operation, for the frame.
        tensors: (B, ...) by name; B may differ per rank and per tensor.
        agreed: What else must be equal on all ranks.
        backward: As in ``all_gather_with_grad``; or what decides it, equally on all ranks, from the rows of each rank by name.
        extra: Own bytes that ride in the frame.
        counted: Names of (B, D) tensors whose rows stay where they are: all agree on D and dtype, and learn how many rows there are;
            they come back as (G, 0).
        group: Process group; None is the world.

    Communication:
        Forward one frame, and one gather of all tensors' bytes where those of any rank are too many to ride in it (more than
        ``handshake.inline_capacity``, or not on the CPU); one more gather at a size that the frames have not grown to yet. Backward none
        (``"own_slice"``), or one exchange per dtype that needs a gradient (``"sum"``).

    Raises:
        RankMismatchError: on every rank, when names, widths, dtypes or ``must_match`` differ, or where one computes without gradients
            (backward may be a meeting).
    """
    values = [tensor[:, :0] if name in counted else tensor for name, tensor in tensors.items()]
    if process_groups.world_size(group) == 1:
        return GatheredBatch(values, [[t.shape[0]] for t in values], [extra])
    fixed = {name: f"{('rows', *t.shape[1:])} {t.dtype} {t.device.type}" for name, t in tensors.items()}
    needs = [t.requires_grad and torch.is_grad_enabled() for t in values]
    head = struct.Struct(f"<{len(values)}Q{len(values)}??I")
    rides = head.size + len(extra) + sum(_aligned(t.nbytes) for t in values) <= handshake.inline_capacity(
        group
    ) and all(t.device.type == "cpu" for t in values)
    own = head.pack(*(t.shape[0] for t in values), *needs, rides, len(extra)) + extra
    payloads = handshake.all_gather(
        what,
        {**must_match, "gradients": "on" if torch.is_grad_enabled() else "off", "tensors": ", ".join(tensors), **fixed},
        b"".join([own, *_aligned_bytes(values)]) if rides else own,
        group=group,
    )
    heads = [head.unpack_from(p) for p in payloads]
    counts = [[h[i] for h in heads] for i in range(len(values))]
    extras = [p[head.size : head.size + h[-1]] for p, h in zip(payloads, heads, strict=True)]
    wanted = [any(h[len(values) + i] for h in heads) for i in range(len(values))]
    joined = [match_requires_grad(t, want) for t, want in zip(values, wanted, strict=True)]
    how = backward(dict(zip(tensors, counts, strict=True))) if callable(backward) else backward
    came = None
    if all(h[-2] for h in heads):
        came = [p[head.size + h[-1] :] for p, h in zip(payloads, heads, strict=True)]
    exchange = BackwardExchange(what, group)
    out = _Gather.apply(came, counts, group, how, exchange, *joined)  # type: ignore[no-untyped-call]
    return GatheredBatch(list(out), counts, extras)


_FIXED = 5  # arguments of _Gather before the tensors


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        came: list[bytes] | None,
        counts: list[list[int]],
        group: Group,
        backward: Backward,
        exchange: BackwardExchange,
        *tensors: Tensor,
    ) -> Any:
        ctx.counts, ctx.group, ctx.mode, ctx.exchange = counts, group, backward, exchange
        ctx.set_materialize_grads(False)
        out = _gather_packed(tensors, counts, group) if came is None else _unpacked(tensors, counts, came)
        # some losses refuse targets that ask for a gradient
        ctx.mark_non_differentiable(*(t for i, t in enumerate(out) if not ctx.needs_input_grad[_FIXED + i]))
        ctx.shapes = [(t.shape, t.dtype, t.device) for t in out]
        return tuple(out)

    @staticmethod
    @once_differentiable_strict("rows of all ranks", linear=True)
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        own: list[Tensor | None] = [None] * len(grads)
        rank = process_groups.rank(ctx.group)
        wanted = [i for i in range(len(grads)) if ctx.needs_input_grad[_FIXED + i]]
        if ctx.mode == "sum":
            whole = []
            for i in wanted:
                shape, dtype, device = ctx.shapes[i]
                grad = grads[i]
                whole.append(torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad)
            found = ctx.exchange.reduce_scatter(whole, [ctx.counts[i] for i in wanted])
            for i, rows in zip(wanted, found, strict=True):
                own[i] = rows
            return *[None] * _FIXED, *own
        for i in wanted:
            grad, counts = grads[i], ctx.counts[i]
            if grad is not None:
                own[i] = grad.narrow(0, sum(counts[:rank]), counts[rank]) * len(counts)
        return *[None] * _FIXED, *own


def _aligned_bytes(tensors: Sequence[Tensor]) -> Iterator[bytes]:
    """Bytes of each tensor on the CPU, with what fills them up to an aligned place."""
    for tensor in tensors:
        data = host_bytes(tensor)
        yield data
        yield bytes(_aligned(len(data)) - len(data))


def _packed(tensors: Sequence[Tensor], size: int) -> Tensor:
    """Bytes of all tensors, each at an aligned place; ``size`` of them."""
    sizes = [_aligned(t.nbytes) for t in tensors]
    packed = tensors[0].new_zeros(size, dtype=torch.uint8)
    offset = 0
    for tensor, taken in zip(tensors, sizes, strict=True):
        # not tensor.contiguous().view: none or one strided row counts as contiguous and cannot be viewed as bytes
        packed[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        offset += taken
    return packed


def _unpacked(tensors: Sequence[Tensor], counts: list[list[int]], came: list[bytes]) -> list[Tensor]:
    """Tensors like these, of all ranks' rows, from what each rank has packed."""
    out, starts = [], [0] * len(came)
    for tensor, rows in zip(tensors, counts, strict=True):
        row_bytes = _row_bytes(tensor)
        whole = bytearray().join(
            data[start : start + n * row_bytes] for data, start, n in zip(came, starts, rows, strict=True)
        )
        starts = [start + _aligned(n * row_bytes) for start, n in zip(starts, rows, strict=True)]
        shape = sum(rows), *tensor.shape[1:]
        flat = torch.frombuffer(whole, dtype=tensor.dtype) if whole else torch.empty(0, dtype=tensor.dtype)
        out.append(flat.view(shape))
    return out


def _gather_packed(tensors: Sequence[Tensor], counts: list[list[int]], group: Group) -> list[Tensor]:
    world = process_groups.world_size(group)
    row_bytes = [_row_bytes(t) for t in tensors]
    sizes = [[_aligned(counts[i][r] * row_bytes[i]) for i in range(len(tensors))] for r in range(world)]
    longest = max(map(sum, sizes))
    if longest == 0:
        return [t.detach().clone() for t in tensors]
    packed = _packed(tensors, longest)
    everyone = packed.new_empty(world * longest)
    gather(everyone, packed, group=group_for(packed, group))
    out = []
    for i, tensor in enumerate(tensors):
        parts = []
        for r in range(world):
            start = r * longest + sum(sizes[r][:i])
            part = everyone[start : start + counts[i][r] * row_bytes[i]]
            if start % _ALIGN:
                part = part.clone()
            parts.append(part.view(tensor.dtype).view(counts[i][r], *tensor.shape[1:]))
        out.append(torch.cat(parts))
    return out


def _row_bytes(tensor: Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
