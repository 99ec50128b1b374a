"""Rows of bfloat16 and float16 that travel as they are, where the ranks compute with a function of them in a wider dtype.

What a receiver makes of such rows is what their own rank makes of them, row by row: half the bytes, the same bits. Each rank says of
each tensor in which dtype its rows travel (``kind``), so that ranks may differ.

Legend: ``W`` ranks, ``B`` rows on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import as_bytes, ring_rows

NARROW_DTYPES = (None, torch.bfloat16, torch.float16)
"""By what a rank says of a tensor; None: it travels as it is."""


@dataclass(frozen=True)
class NarrowRows:
    """What a tensor's rows are a function of, in fewer bytes: these travel, and each receiver makes the rows of them.

    Attributes:
        rows: (B, ...), as the caller gave them, of any floating dtype.
        expand: Such rows of any rank -> rows of the tensor. Row by row, so that it makes no difference where.
    """

    rows: Tensor
    expand: Callable[[Tensor], Tensor]

    @classmethod
    def of_cast(cls, tensor: Tensor, given: torch.dtype | None) -> NarrowRows:
        """Make them for a tensor that was cast from ``given``; None: it was not."""
        rows = tensor.detach()
        return cls(rows if given is None else rows.to(given), lambda sent: sent.to(tensor.dtype))

    def kind(self, tensor: Tensor) -> int:
        """Return what an offer says: whether these travel in place of the tensor, and their dtype."""
        is_narrow = self.rows.dtype in NARROW_DTYPES and self.rows.dtype != tensor.dtype
        return NARROW_DTYPES.index(self.rows.dtype) if is_narrow else 0


def narrow_batches(batches: Mapping[str, Tensor], given: torch.dtype | None) -> dict[str, NarrowRows]:
    """Make what may travel in place of the floating ones of some tensors, all of which were cast from ``given``; None: from none."""
    return {name: NarrowRows.of_cast(t, given) for name, t in batches.items() if t.is_floating_point()}


@dataclass(frozen=True)
class RowsOfARing:
    """How (n, D) rows go round a ring, as bytes: those that they are made of, from each rank whose are narrower.

    Attributes:
        own: (B, D), this rank's, without graph.
        narrow: What they are made of, of any floating dtype.
        dtypes: By rank, in which these travel; None: the rows themselves do.
        counts: B of each rank.
        group: Process group.
    """

    own: Tensor
    narrow: NarrowRows
    dtypes: Sequence[torch.dtype | None]
    counts: Sequence[int]
    group: Group

    def message(self) -> Tensor:
        """Return what this rank sends, bytes."""
        dtype = self.dtypes[process_groups.rank(self.group)]
        return as_bytes(self.own if dtype is None else self.narrow.rows.to(dtype))

    def sizes(self) -> list[int]:
        """Return how many bytes each rank sends."""
        sizes = []
        for count, dtype in zip(self.counts, self.dtypes, strict=True):
            like = self.own if dtype is None else self.narrow.rows
            sizes.append(count * like.shape[1] * (dtype or like.dtype).itemsize)
        return sizes

    def received(self, source: int, message: Tensor) -> Tensor:
        """Return the rows of a rank, from what it sent; this rank's own are here."""
        dtype = self.dtypes[source]
        if source == process_groups.rank(self.group):
            return self.own
        if dtype is None:
            return message.view(self.own.dtype).view(-1, self.own.shape[1])
        return self.narrow.expand(message.view(dtype).view(-1, self.narrow.rows.shape[1]))

    def visit(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its rows) in turn, own ones first. Communication: as ``ring_rows``."""
        for source, message in ring_rows(self.message(), self.sizes(), self.group):
            yield source, self.received(source, message)
