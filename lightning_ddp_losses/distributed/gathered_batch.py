"""Several tensors gathered together: labels, indices and masks are sent with the embeddings, in a single collective.

Legend: ``W`` ranks, ``B`` rows on this rank (per tensor, may differ), ``G`` their sum.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_ddp_losses.core.autograd_graph import match_requires_grad
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import Backward, gather_with_grad
from lightning_ddp_losses.distributed.messages import Agreement
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import (
    NARROW_DTYPES,
    TravellingRows,
    gather,
    group_for,
    host_bytes,
    tensor_of_bytes,
)

BackwardChoice: TypeAlias = Callable[[dict[str, list[int]]], Backward]
"""Function from the rows of each rank, by tensor, to the gradient mode, with the same result on every rank."""

_ALIGN = 16  # bytes. A view of any dtype may start at a multiple of it


class GatheredBatch(NamedTuple):
    """The rows of all ranks.

    Attributes:
        tensors: (G, ...) each, in rank order.
        counts: Rows of each rank, per tensor.
        extras: Each rank's own ``extra`` bytes.
        dtypes: Dtypes in which each rank's rows were sent, per tensor.
    """

    tensors: list[Tensor]
    counts: list[list[int]]
    extras: list[bytes]
    dtypes: list[Sequence[torch.dtype]]


class RowForm(NamedTuple):
    """The form of one tensor's rows.

    Attributes:
        dtype: Dtype of the computation. Rows may be sent in bfloat16 or float16 instead.
        shape: Shape of a row. (0,) if rows are only counted.
        is_counted: True if rows are counted and not gathered.
        keeps_narrow: True if narrow rows are not cast after they are received.
    """

    dtype: torch.dtype
    shape: torch.Size
    is_counted: bool
    keeps_narrow: bool

    def travelling(self, kinds: Sequence[int]) -> TravellingRows:
        """Return how the rows are sent, where ``kinds`` contains the index of each rank's dtype in ``NARROW_DTYPES``."""
        dtypes = [NARROW_DTYPES[kind] or self.dtype for kind in kinds]
        return TravellingRows(self.shape, dtypes, None if self.keeps_narrow else self.dtype)


@dataclass(frozen=True)
class BatchLayout:
    """What the names and forms of some tensors determine for every gather of them.

    Attributes:
        agreement: The operation, and the values that must match: names, dtypes and widths of the tensors, and the caller's values.
        offer: Format of a rank's header: rows, need of a gradient and narrow dtype of each tensor, whether the rows are inline, and the
            number of extra bytes.
        rows: Form of each tensor's rows.
        is_on_host: True if all tensors are on the CPU.
        is_grad_enabled: True if gradients are enabled.
    """

    agreement: Agreement
    offer: struct.Struct
    rows: tuple[RowForm, ...]
    is_on_host: bool
    is_grad_enabled: bool

    @classmethod
    def of(
        cls,
        what: str,
        tensors: Mapping[str, Tensor],
        options: Mapping[str, object] | None = None,
        counted: Collection[str] = (),
        *,
        keeps_narrow: bool = False,
    ) -> BatchLayout:
        """Return the layout of some tensors, as described in ``gather_batch``.

        Args:
            what: The operation.
            tensors: (B, ...) by name, in the dtype of the computation.
            options: Further values that must be equal on all ranks, in every call.
            counted: Names of the tensors that are counted and not gathered.
            keeps_narrow: True if narrow rows are not cast after they are received. ``gather_batch`` is then called with the narrow
                tensors.
        """
        is_grad_enabled = torch.is_grad_enabled()
        compared = dict(options or {})
        compared["gradients"] = "on" if is_grad_enabled else "off"
        compared["tensors"] = ", ".join(tensors)
        rows = []
        for name, tensor in tensors.items():
            shape, is_counted = tensor.shape[1:], name in counted
            compared[name] = f"{('rows', *shape)} {tensor.dtype} {tensor.device.type}"
            rows.append(RowForm(tensor.dtype, torch.Size([0]) if is_counted else shape, is_counted, keeps_narrow))
        return cls(
            agreement=Agreement(what, compared),
            offer=_offer(len(tensors)),
            rows=tuple(rows),
            is_on_host=all(tensor.device.type == "cpu" for tensor in tensors.values()),
            is_grad_enabled=is_grad_enabled,
        )


@functools.cache
def _offer(tensors: int) -> struct.Struct:
    """Return the format of a header for the given number of tensors."""
    return struct.Struct(f"<{tensors}Q{tensors}?{tensors}B?I")


def gather_batch(
    what: str | BatchLayout,
    tensors: Mapping[str, Tensor],
    must_match: Mapping[str, object],
    *,
    backward: Backward | BackwardChoice = "sum",
    extra: bytes = b"",
    counted: Collection[str] = (),
    given_dtype: torch.dtype | None = None,
    group: Group = None,
) -> GatheredBatch:
    """Gather the rows of all ranks for several tensors together, in rank order, with their graphs.

    Args:
        what: The operation, for the handshake, or the layout of these tensors from an earlier call.
        tensors: (B, ...) by name. B may differ per rank and per tensor.
        must_match: Further values that must be equal on all ranks.
        backward: Gradient mode, as in ``all_gather_with_grad``, or a function that derives it from the rows of each rank by name.
        extra: Additional bytes of this rank that are sent with the handshake.
        counted: Names of (B, D) tensors that are not gathered: all ranks agree on D and dtype, and receive the numbers of rows.
            They are returned as (G, 0). Ignored if a layout is given, which contains its own.
        given_dtype: bfloat16 or float16, from which the floating-point tensors were cast. They are sent in this dtype even if other ranks
            send a different one, and their gradients in the dtype of the tensor. If None, they were not cast.
        group: Process group. None is the world.

    Communication:
        Forward one handshake, and one gather of all tensors' bytes if the bytes of any rank are too many to be inline (more than
        ``handshake.inline_capacity``, or not on the CPU). One more gather at a size that the handshakes have not grown to yet. Backward
        none (``"own_slice"``), or one exchange per dtype that needs a gradient (``"sum"``).

    Raises:
        RankMismatchError: on every rank, when names, widths, dtypes or ``must_match`` differ, or some ranks compute without gradients
            (backward may communicate).
    """
    layout = what
    if isinstance(layout, str):
        layout = BatchLayout.of(layout, tensors, counted=counted)
    values = []
    for form, tensor in zip(layout.rows, tensors.values(), strict=True):
        values.append(tensor[:, :0] if form.is_counted else tensor)
    if process_groups.world_size(group) == 1:
        counts = [[value.shape[0]] for value in values]
        return GatheredBatch(values, counts, [extra], [[value.dtype] for value in values])
    # 1. this rank's rows, in the dtype that the caller had before a cast, and the handshake: all ranks agree on the tensors
    sent = values
    if given_dtype is not None:
        sent = [_as_given(tensor, given_dtype) for tensor in values]
    offer = _pack_offer(layout, values, sent, extra, handshake.inline_capacity(group))
    payloads = handshake.all_gather(layout.agreement, must_match, offer, group=group)
    # 2. the information of all ranks about each tensor
    number = len(values)
    columns = list(zip(*map(layout.offer.unpack_from, payloads), strict=True))
    counts = list(map(list, columns[:number]))
    needs_grad = columns[number : 2 * number]
    kinds = columns[2 * number : 3 * number]
    are_inline, extra_sizes = columns[3 * number :]
    starts = [layout.offer.size + size for size in extra_sizes]
    extras = [payload[layout.offer.size : start] for payload, start in zip(payloads, starts, strict=True)]
    # 3. the rows of all ranks, from the payloads or by one more gather
    travelling = list(map(RowForm.travelling, layout.rows, kinds))
    if all(are_inline):
        gathered = _rows_of_payloads(payloads, starts, travelling, counts)
    else:
        gathered = _gather_packed(sent, travelling, counts, group)
    # 4. their graph. A rank takes part in the backward of a tensor if any rank needs its gradient
    needed = [place for place in range(number) if any(needs_grad[place])]
    if needed:
        how = backward
        if callable(how):
            how = how(dict(zip(tensors, counts, strict=True)))
        own = [match_requires_grad(values[place], True) for place in needed]
        rows = [gathered[place] for place in needed]
        counts_needed = [counts[place] for place in needed]
        in_graph = gather_with_grad(layout.agreement.operation, rows, own, counts_needed, how, group)
        for place, tensor in zip(needed, in_graph, strict=True):
            gathered[place] = tensor
    return GatheredBatch(gathered, counts, extras, [each.dtypes for each in travelling])


def _as_given(tensor: Tensor, given_dtype: torch.dtype) -> Tensor:
    """Return a floating-point tensor's rows in the narrow dtype that they were cast from. Other tensors are returned unchanged."""
    return tensor.detach().to(given_dtype) if tensor.is_floating_point() else tensor


def _pack_offer(
    layout: BatchLayout, tensors: Sequence[Tensor], sent: Sequence[Tensor], extra: bytes, inline_capacity: int
) -> bytes:
    """Return the message of this rank: the header for each tensor, the extra bytes, and the rows themselves if they fit."""
    counts = [tensor.shape[0] for tensor in tensors]
    needs_grad = [tensor.requires_grad and layout.is_grad_enabled for tensor in tensors]
    kinds = []
    for form, rows in zip(layout.rows, sent, strict=True):
        kinds.append(0 if rows.dtype == form.dtype else NARROW_DTYPES.index(rows.dtype))
    num_bytes = layout.offer.size + len(extra) + sum([rows.nbytes for rows in sent])
    is_inline = layout.is_on_host and num_bytes <= inline_capacity
    parts = [layout.offer.pack(*counts, *needs_grad, *kinds, is_inline, len(extra)), extra]
    if is_inline:
        parts += map(host_bytes, sent)
    return b"".join(parts)


def _rows_of_payloads(
    payloads: Sequence[bytes], starts: list[int], travelling: Sequence[TravellingRows], counts: list[list[int]]
) -> list[Tensor]:
    """Return the rows of all ranks, of each tensor, from payloads in which the first tensor's rows begin at ``starts``."""
    gathered = []
    for each, rows in zip(travelling, counts, strict=True):
        stops = list(map(operator.add, starts, each.sizes(rows)))
        parts = [payload[start:stop] for payload, start, stop in zip(payloads, starts, stops, strict=True)]
        starts = stops
        if each.is_uniform:
            gathered.append(each.joined(tensor_of_bytes(parts), sum(rows)))
        else:
            gathered.append(each.concatenated([tensor_of_bytes([part]) for part in parts], rows))
    return gathered


def _gather_packed(
    sent: Sequence[Tensor], travelling: Sequence[TravellingRows], counts: list[list[int]], group: Group
) -> list[Tensor]:
    """Return the rows of all ranks, of each tensor, by one gather of their bytes."""
    # 1. the offset of each rank's rows of each tensor, and the number of bytes of the rank with the most
    starts = [[0] * len(counts[0])]
    for each, rows in zip(travelling, counts, strict=True):
        starts.append([start + aligned(size) for start, size in zip(starts[-1], each.sizes(rows), strict=True)])
    longest = max(starts[-1])
    packed = _pack_rows(sent, longest)
    if longest == 0:
        return [each.joined(packed, sum(rows)) for each, rows in zip(travelling, counts, strict=True)]
    # 2. one gather
    messages = packed.new_empty(len(starts[0]), longest)
    gather(messages.view(-1), packed, group=group_for(packed, group))
    # 3. each tensor's block of each rank
    gathered = []
    for each, rows, places in zip(travelling, counts, starts, strict=False):
        sizes = each.sizes(rows)
        if each.is_uniform and len({*zip(places, sizes, strict=True)}) == 1:
            # the common case, without work per rank: all ranks have the same number of rows at the same offset
            block = messages[:, places[0] : places[0] + sizes[0]].reshape(-1)
            gathered.append(each.joined(block, sum(rows)))
        else:
            blocks = [message[at : at + size] for message, at, size in zip(messages, places, sizes, strict=True)]
            gathered.append(each.concatenated(blocks, rows))
    return gathered


def _pack_rows(tensors: Sequence[Tensor], size: int) -> Tensor:
    """Return ``size`` bytes that contain the bytes of all tensors, each at an aligned offset."""
    packed = tensors[0].new_zeros(size, dtype=torch.uint8)
    offset = 0
    for tensor in tensors:
        # not tensor.contiguous().view: zero rows or one strided row count as contiguous and cannot be viewed as bytes
        place = packed[offset : offset + tensor.nbytes]
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        offset += aligned(tensor.nbytes)
    return packed


def aligned(size: int) -> int:
    """Round a number of bytes up to an offset at which a tensor of any dtype may start."""
    return -(-size // _ALIGN) * _ALIGN
