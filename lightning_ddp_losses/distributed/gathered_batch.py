"""Several batches gathered as one: labels, indices and masks travel with the embeddings, in a single collective.

Legend: ``W`` ranks, ``B`` rows on this rank (per tensor, may differ), ``G`` their sum.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    NarrowRows,
    TravellingRows,
    gather,
    group_for,
    host_bytes,
)

BackwardChoice: TypeAlias = Callable[[dict[str, list[int]]], Backward]
"""Rows of each rank, by tensor -> the gradient to give, the same on every rank."""

_ALIGN = 16  # bytes. A view of any dtype may start there


@dataclass(frozen=True)
class GatheredBatch:
    """The rows of all ranks.

    Attributes:
        tensors: (G, ...) each, in rank order.
        counts: Rows of each rank, per tensor.
        extras: Each rank's own ``extra`` bytes.
        narrow_dtypes: Dtypes of each rank's rows that travel in place of a tensor's, per tensor. None: the tensor's own rows travel.
    """

    tensors: list[Tensor]
    counts: list[list[int]]
    extras: list[bytes]
    narrow_dtypes: list[list[torch.dtype | None]]


@dataclass(frozen=True)
class BatchLayout:
    """What the names and forms of some tensors decide about every gather of them.

    Attributes:
        agreement: The operation, and what must match: names, dtypes and widths of the tensors, and the caller's values.
        form: Form of an offer.
        counted: Positions of the tensors that are counted and not gathered.
        is_on_host: True if all tensors are on the CPU.
        is_grad_enabled: True if gradients are on.
    """

    agreement: Agreement
    form: struct.Struct
    counted: frozenset[int]
    is_on_host: bool
    is_grad_enabled: bool

    @classmethod
    def of(
        cls,
        what: str,
        tensors: Mapping[str, Tensor],
        options: Mapping[str, object] | None = None,
        counted: Collection[str] = (),
    ) -> BatchLayout:
        """Return the layout of some tensors, as ``gather_batch`` describes them.

        Args:
            what: The operation.
            tensors: (B, ...) by name.
            options: Further values that must be equal on all ranks, in every call.
            counted: Names of the tensors that are counted and not gathered.
        """
        is_grad_enabled = torch.is_grad_enabled()
        compared = dict(options or {})
        compared["gradients"] = "on" if is_grad_enabled else "off"
        compared["tensors"] = ", ".join(tensors)
        for name, tensor in tensors.items():
            compared[name] = f"{('rows', *tensor.shape[1:])} {tensor.dtype} {tensor.device.type}"
        return cls(
            agreement=Agreement(what, compared),
            form=_form(len(tensors)),
            counted=frozenset(place for place, name in enumerate(tensors) if name in counted),
            is_on_host=all(tensor.device.type == "cpu" for tensor in tensors.values()),
            is_grad_enabled=is_grad_enabled,
        )


def gather_batch(
    what: str | BatchLayout,
    tensors: Mapping[str, Tensor],
    must_match: Mapping[str, object],
    *,
    backward: Backward | BackwardChoice = "sum",
    extra: bytes = b"",
    counted: Collection[str] = (),
    narrow: Mapping[str, NarrowRows] | None = None,
    given_dtype: torch.dtype | None = None,
    group: Group = None,
) -> GatheredBatch:
    """Gather the rows of all ranks for several tensors at once, in rank order, with their graphs.

    Args:
        what: The operation, for the handshake, or the layout of these tensors from an earlier call.
        tensors: (B, ...) by name. B may differ per rank and per tensor.
        must_match: Further values that must be equal on all ranks.
        backward: Gradient to give, as in ``all_gather_with_grad``, or a function that decides it from the rows of each rank by name.
        extra: Own bytes that go with the handshake.
        counted: Names of (B, D) tensors that are not gathered: all ranks agree on D and dtype, and learn the numbers of rows.
            They come back as (G, 0). A layout has its own.
        narrow: Rows by name of a tensor that travel in its place if they are bfloat16 or float16 and the tensor is wider,
            from any rank, of any dtype. Gradients travel in the dtype of the tensor.
        given_dtype: Dtype from which the floating tensors that ``narrow`` does not name were cast. They travel in it. None: they were
            not cast.
        group: Process group. None is the world.

    Communication:
        Forward one handshake, and one gather of all tensors' bytes where those of any rank are too many to be inline (more than
        ``handshake.inline_capacity``, or not on the CPU). One more gather at a size that the handshakes have not grown to yet. Backward
        none (``"own_slice"``), or one exchange per dtype that needs a gradient (``"sum"``).

    Raises:
        RankMismatchError: on every rank, when names, widths, dtypes or ``must_match`` differ, or one computes without gradients
            (backward may communicate).
    """
    if process_groups.world_size(group) == 1:
        names = counted if isinstance(what, str) else [name for i, name in enumerate(tensors) if i in what.counted]
        values = [tensor[:, :0] if name in names else tensor for name, tensor in tensors.items()]
        return GatheredBatch(values, [[t.shape[0]] for t in values], [extra], [[None]] * len(values))
    layout = what
    if isinstance(layout, str):
        layout = BatchLayout.of(layout, tensors, counted=counted)
    values = list(tensors.values())
    for place in layout.counted:
        values[place] = values[place][:, :0]
    # 1. this rank's part of the handshake
    narrow_rows = _narrow_rows(tensors, narrow or {}, given_dtype)
    kinds = [0 if rows is None else rows.kind(tensor) for rows, tensor in zip(narrow_rows, values, strict=True)]
    # counted tensors travel later, in the dtypes that the ranks exchange here
    for place in layout.counted:
        narrow_rows[place] = None
    sent = list(values)
    for place, rows in enumerate(narrow_rows):
        if rows is not None and kinds[place]:
            sent[place] = rows.rows.detach()
    payload = _pack_offer(layout, values, sent, kinds, extra, handshake.inline_capacity(group))
    # 2. the handshake: all agree on the tensors
    payloads = handshake.all_gather(layout.agreement, must_match, payload, group=group)
    offers = [_Offer.read(layout.form, payload) for payload in payloads]
    counts = [list(of_ranks) for of_ranks in zip(*[offer.counts for offer in offers], strict=True)]
    # 3. who needs no gradient of a tensor still takes part in its backward where another rank needs it
    for place, value in enumerate(values):
        if layout.is_grad_enabled and not value.requires_grad and any(offer.needs_grad[place] for offer in offers):
            values[place] = match_requires_grad(value, True)
    # 4. the rows, from the payloads or by one more gather, and how their gradient comes back
    how = backward
    if callable(how):
        how = how(dict(zip(tensors, counts, strict=True)))
    travelling = []
    narrow_dtypes = []
    for place, value in enumerate(values):
        dtypes = [NARROW_DTYPES[offer.kinds[place]] for offer in offers]
        rows = narrow_rows[place]
        if rows is None and place not in layout.counted and any(dtypes):  # another rank's rows were cast
            rows = NarrowRows.of_cast(value, None)
        narrow_dtypes.append(dtypes)
        travelling.append(TravellingRows(value.detach(), rows, dtypes))
    receive = partial(_gather_packed, travelling, sent, counts, group)
    if all(offer.is_inline for offer in offers):
        receive = partial(_unpack, travelling, counts, _as_buffers([offer.rows for offer in offers]))
    gathered = gather_with_grad(layout.agreement.operation, receive, values, counts, how, group)
    return GatheredBatch(list(gathered), counts, [offer.extra for offer in offers], narrow_dtypes)


def _pack_offer(
    layout: BatchLayout,
    tensors: Sequence[Tensor],
    sent: Sequence[Tensor],
    kinds: Sequence[int],
    extra: bytes,
    inline_capacity: int,
) -> bytes:
    """Return the offer of this rank: rows, need of a gradient and dtype of each tensor, the extra bytes, few tensors themselves."""
    counts = [tensor.shape[0] for tensor in tensors]
    needs_grad = [tensor.requires_grad and layout.is_grad_enabled for tensor in tensors]
    sizes = [aligned(tensor.nbytes) for tensor in sent]
    is_inline = layout.is_on_host and layout.form.size + len(extra) + sum(sizes) <= inline_capacity
    parts = [layout.form.pack(*counts, *needs_grad, *kinds, is_inline, len(extra)), extra]
    if is_inline:
        for tensor, size in zip(sent, sizes, strict=True):
            parts.append(host_bytes(tensor).ljust(size, b"\0"))
    return b"".join(parts)


def _narrow_rows(
    tensors: Mapping[str, Tensor], narrow: Mapping[str, NarrowRows], given_dtype: torch.dtype | None
) -> list[NarrowRows | None]:
    """Return the rows that may travel in place of each tensor. None: the tensor travels, unless another rank has narrow ones."""
    found = []
    for name, tensor in tensors.items():
        rows = narrow.get(name)
        if rows is None and given_dtype is not None and tensor.is_floating_point():
            rows = NarrowRows.of_cast(tensor, given_dtype)
        found.append(rows)
    return found


Messages: TypeAlias = Tensor | Sequence[Tensor]
"""Bytes of each rank, (W, n), or (n,) of each if these are of different lengths."""


@functools.cache
def _form(tensors: int) -> struct.Struct:
    """Return the form of an offer: rows, need of a gradient and dtype of each tensor, whether rows are inline, and extra bytes."""
    return struct.Struct(f"<{tensors}Q{tensors}?{tensors}B?I")


class _Offer(NamedTuple):
    """A rank's message about its tensors in the handshake.

    Attributes:
        counts: Rows of each.
        needs_grad: True for tensors that need a gradient on the rank.
        kinds: ``NarrowRows.kind`` of each.
        is_inline: True if their bytes travel in the handshake.
        extra: The caller's bytes.
        rows: The tensors' bytes, each at an aligned place. Empty if they are not inline.
    """

    counts: tuple[int, ...]
    needs_grad: tuple[bool, ...]
    kinds: tuple[int, ...]
    is_inline: bool
    extra: bytes
    rows: bytes

    @classmethod
    def read(cls, form: struct.Struct, payload: bytes) -> _Offer:
        *fields, is_inline, extra_bytes = form.unpack_from(payload)
        tensors = len(fields) // 3
        rows_start = form.size + extra_bytes
        counts, needs_grad, kinds = (tuple(fields[i * tensors : (i + 1) * tensors]) for i in range(3))
        return cls(counts, needs_grad, kinds, is_inline, payload[form.size : rows_start], payload[rows_start:])


def _unpack(travelling: Sequence[TravellingRows], counts: list[list[int]], messages: Messages) -> list[Tensor]:
    """Return the rows of all ranks, of each tensor, from the bytes that each rank has sent of them."""
    out, starts = [], [0] * len(messages)
    for each, rows in zip(travelling, counts, strict=True):
        if isinstance(messages, Tensor) and len({*zip(starts, rows, each.dtypes, strict=True)}) == 1:
            # the usual case, with no work per rank: all have as many rows at the same place
            sizes = [each.num_bytes(0, rows[0])] * len(messages)
            whole = each.rows_in(messages[:, starts[0] : starts[0] + sizes[0]], 0, rows[0]).flatten(0, 1)
            out.append(each.expanded(0, whole))
        else:
            sizes = list(map(each.num_bytes, range(len(rows)), rows))
            parts = [message[a : a + size] for message, a, size in zip(messages, starts, sizes, strict=True)]
            blocks = tuple(map(each.rows_in, parts, range(len(rows)), rows))
            out.append(each.joined(blocks))
        starts = [start + aligned(size) for start, size in zip(starts, sizes, strict=True)]
    return out


def _as_buffers(parts: Sequence[bytes]) -> Messages:
    """Return the bytes of all ranks as one tensor, or as one of each rank if they are of different lengths, or none."""
    size = len(parts[0])
    if size and all(len(part) == size for part in parts):
        return torch.frombuffer(bytearray().join(parts), dtype=torch.uint8).view(-1, size)
    none = torch.empty(0, dtype=torch.uint8)
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) if part else none for part in parts]


def _gather_packed(
    travelling: Sequence[TravellingRows], sent: Sequence[Tensor], counts: list[list[int]], group: Group
) -> list[Tensor]:
    """Return the rows of all ranks, of each tensor, by one gather of their bytes."""
    # 1. as many bytes of each rank as the one with the most has
    sizes = [0] * process_groups.world_size(group)
    for each, rows in zip(travelling, counts, strict=True):
        for rank, number in enumerate(rows):
            sizes[rank] += aligned(each.num_bytes(rank, number))
    longest = max(sizes)
    if longest == 0:
        return [
            each.own.new_empty(sum(rows), *each.own.shape[1:]) for each, rows in zip(travelling, counts, strict=True)
        ]
    packed = _pack_rows(sent, longest)
    everyone = packed.new_empty(len(sizes) * longest)
    # 2. one gather
    gather(everyone, packed, group=group_for(packed, group))
    # 3. each tensor's block of each rank
    return _unpack(travelling, counts, everyone.view(-1, longest))


def _pack_rows(tensors: Sequence[Tensor], size: int) -> Tensor:
    """Return ``size`` bytes with those of all tensors, each at an aligned place."""
    packed = tensors[0].new_zeros(size, dtype=torch.uint8)
    offset = 0
    for tensor in tensors:
        # not tensor.contiguous().view: none or one strided row counts as contiguous and cannot be viewed as bytes
        place = packed[offset : offset + tensor.nbytes]
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        offset += aligned(tensor.nbytes)
    return packed


def aligned(size: int) -> int:
    """Round a number of bytes up, so that a tensor of any dtype may start there."""
    return -(-size // _ALIGN) * _ALIGN
