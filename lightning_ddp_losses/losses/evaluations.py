"""``mode="rows"`` and ``mode="elements"`` of pytorch-metric-learning's (PML) losses: each rank its own anchors, then one meeting.

Three evaluations of rows give the same value and gradient: tiles of our own (``tiled``), PML's formula on a few anchors at a time
(``row_tiles``), and PML's formula on all of this rank's anchors where they are few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import own_slices_with_grad
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import ring_rows
from lightning_ddp_losses.losses import anchor_tuples as pml_rows
from lightning_ddp_losses.losses.gathered_call import PMLCall
from lightning_ddp_losses.losses.partial_sums import (
    ElementCounts,
    PartialStats,
    PartialSum,
    global_loss,
    pack_partials,
    scale_factors,
    split,
    total_counts,
    unpack_partials,
    value_with_grad,
)
from lightning_ddp_losses.losses.recorded_stats import record_norms, record_reduction, wants_counts
from lightning_ddp_losses.losses.row_chunks import RowTiles, parts_of
from lightning_ddp_losses.losses.tiled import TiledEvaluator, TiledPlan


@dataclass(frozen=True)
class PartialsExchange:
    """Where the ranks tell each other their shares.

    Attributes:
        title: How messages name the loss.
        agreed: For a tensor of the call, what must be equal on all ranks.
        group: Process group.
    """

    title: str
    must_match: Callable[[Tensor], dict[str, object]]
    group: Group

    @property
    def world(self) -> int:
        """Number of ranks."""
        return process_groups.world_size(self.group)

    def meet(self, like: Tensor, payload: bytes, handshake_bytes: int | None = None) -> list[bytes]:
        """All ranks' payloads."""
        return handshake.all_gather(
            self.title, self.must_match(like), payload, handshake_bytes=handshake_bytes, group=self.group
        )


def elements_value(loss: Any, embeddings: Tensor, labels: Tensor | None, meeting: PartialsExchange) -> Tensor:
    """A loss that is a sum over samples, from this rank's rows alone."""
    # without rows, the terms that do not depend on them still count, once
    alone = embeddings.shape[0] or labels is not None
    found = pml_rows.elements(loss, embeddings, labels) if alone else {}
    shares = split(loss.reducer, found, embeddings, labels, meeting.world)
    return reduce_partials(loss, shares, embeddings, meeting)


def rows_value(loss: Any, call: PMLCall, meeting: PartialsExchange, part_bytes: int | None) -> Tensor:
    """A loss that is a sum over anchors, by PML's formula on this rank's."""
    embeddings, labels = call.given["embeddings"], call.own_labels
    parts = parts_of(loss, call, part_bytes)
    tiles = RowTiles(loss, call, parts, meeting.world) if len(parts) > 1 else None
    if tiles is not None:
        shares = tiles.forward()
    else:
        found = pml_rows.row_elements(loss, embeddings, labels, call.own_tuples(), call.references, call.ref_labels)
        shares = split(loss.reducer, found, embeddings, labels, meeting.world)
    record_norms(getattr(loss, "distance", None), call.arguments["embeddings"], call.references)
    extra = _embedding_term(loss, call, meeting, symmetric=False)
    if extra is not None:
        shares.append(PartialSum(extra, 1.0, full=True, name="embedding_reg_loss", count=ElementCounts(1, 1, 1, 1)))
    if tiles is None:
        return reduce_partials(loss, shares, embeddings, meeting)
    value, factors = scale_factors(_met(loss, shares, embeddings, meeting), meeting.world)
    graph = tiles.value(factors[: len(factors) - (extra is not None)], value)
    return graph if extra is None else value_with_grad(graph + extra, value)


def tiled_value(
    loss: Any,
    plan: TiledPlan,
    call: PMLCall,
    meeting: PartialsExchange,
    *,
    symmetric: bool,
    tile_bytes: int | None,
    ring: bool,
) -> Tensor:
    """A loss that is a sum over anchors, in tiles of our own.

    Args:
        loss: PML's.
        plan: Its tiled evaluation.
        call: Its arguments over all ranks.
        meeting: Where ranks meet.
        symmetric: Whether ``plan.is_symmetric``; the gathered rows then get no gradient.
        tile_bytes: The most that a tile may take; None: a default.
        ring: Rows are passed on from rank to rank; the gathered ones are empty.
    """
    rows, ring_send = call.given["embeddings"], None
    if ring:
        ring_send = partial(_around, counts=call.counts["embeddings"], group=meeting.group)
    tiled = TiledEvaluator(
        loss, plan, call, symmetric=symmetric, world=meeting.world, tile_bytes=tile_bytes, ring_rows=ring_send
    )
    handshake_bytes = handshake.HANDSHAKE_BYTES + tiled.payload_capacity()
    try:
        payload = tiled.forward()
    except Exception as error:
        handshake.raise_on_all_ranks(error, meeting.title, handshake_bytes=handshake_bytes, group=meeting.group)
    graph, value, table = tiled.value(meeting.meet(rows, payload, handshake_bytes))
    _record(loss, plan.pair_loss.sub_losses, table)
    if not ring:
        record_norms(loss.distance, call.arguments["embeddings"], call.references)
    extra = _embedding_term(loss, call, meeting, symmetric=symmetric)
    return graph if extra is None else value_with_grad(graph + extra, value + float(extra.detach()))


def reduce_partials(
    loss: Any, shares: list[PartialSum], like: Tensor, meeting: PartialsExchange, *, empty: float = 0.0
) -> Tensor:
    """The global loss from this rank's shares and the others'; ``empty``: what a mean over nothing is."""
    return global_loss(shares, _met(loss, shares, like, meeting), meeting.group, empty=empty)


def _met(loss: Any, shares: list[PartialSum], like: Tensor, meeting: PartialsExchange) -> list[list[PartialStats]]:
    table = unpack_partials(meeting.meet(like, pack_partials(shares)))
    _record(loss, [share.name for share in shares], table)
    return table


def _record(loss: Any, names: Sequence[str], table: list[list[PartialStats]]) -> None:
    if wants_counts(loss):
        for name, count in zip(names, total_counts(table), strict=True):
            record_reduction(loss.reducer, name, count)


def _embedding_term(loss: Any, call: PMLCall, meeting: PartialsExchange, *, symmetric: bool) -> Tensor | None:
    """The embedding regulariser: every rank computes it whole."""
    if getattr(loss, "embedding_regularizer", None) is None:
        return None
    everyone = call.arguments["embeddings"]
    if symmetric:
        own = call.given["embeddings"]
        place = (0, call.bound[0], own.shape[0])
        (everyone,) = own_slices_with_grad([everyone.detach()], [own], [place], group=meeting.group)
    return loss.embedding_regularization_loss(everyone)["losses"]  # type: ignore[no-any-return]


def _around(rows: Tensor, *, counts: list[int], group: Group) -> Iterator[tuple[int, Tensor]]:
    return ring_rows(rows, counts, group)
