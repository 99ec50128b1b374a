"""One call of a tiled loss: what this rank computes, what it tells the others, and what follows from what they tell.

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` over all ranks, ``k`` statistics of a row. All ranks' totals and statistics
travel in one frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from pytorch_metric_learning import losses as pml
from torch import Tensor

from lightning_ddp_losses.core.autograd_graph import match_requires_grad
from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.losses.gathered_call import PMLCall
from lightning_ddp_losses.losses.partial_sums import (
    STATS_BYTES,
    ElementCounts,
    PartialStats,
    pack_stats,
    scale_factors,
    unpack_partials,
)
from lightning_ddp_losses.losses.tiled.accumulators import Total
from lightning_ddp_losses.losses.tiled.evaluator import Block, Passes, tiled_value
from lightning_ddp_losses.losses.tiled.geometry import Geometry, geometry_of
from lightning_ddp_losses.losses.tiled.plan import Plan
from lightning_ddp_losses.losses.tiled.tiles import LabelPairs, Pairs, TripletTuples, TuplePairs

_WIDEST = 3  # the most statistics that a formula keeps


class TiledCall:
    """A loss on tiles, from gathered rows to its value.

    Args:
        loss: pytorch-metric-learning's.
        plan: Its tiled evaluation.
        call: The arguments over all ranks.
        symmetric: Whether ``plan.is_symmetric``; the gathered rows then get no gradient.
        world: W.
        tile_bytes: The most that a tile may take; None: a default.
        around: Passes this rank's rows on and yields (rank, its rows) in turn, where they are not gathered; only if ``symmetric``.
    """

    def __init__(
        self,
        loss: Any,
        plan: Plan,
        call: PMLCall,
        *,
        symmetric: bool,
        world: int,
        tile_bytes: int | None,
        around: Callable[[Tensor], Iterator[tuple[int, Tensor]]] | None = None,
    ) -> None:
        self._loss, self._plan, self._call, self._symmetric, self._world = loss, plan, call, symmetric, world
        self._tile_bytes, self._around = tile_bytes, around
        self._stats: Tensor | None = None
        self._columns: Tensor | None = None

    def room(self) -> int:
        """Bytes that any rank's payload fits in; the same on all ranks."""
        rows = max(self._call.counts["embeddings"]) if self._symmetric else 0
        item: int = self._call.given["embeddings"].element_size()
        return STATS_BYTES * len(self._plan.formula.sub_losses) + rows * _WIDEST * item

    def forward(self) -> bytes:
        """Go over the tiles.

        Returns:
            This rank's payload.
        """
        loss, call = self._loss, self._call
        embeddings = match_requires_grad(call.given["embeddings"], call.arguments["embeddings"].requires_grad)
        geometry = geometry_of(loss.distance, call.references.shape[0])
        self._rows = geometry.prepare(embeddings)
        formula = self._plan.formula(loss, self._plan.reductions, embeddings.shape[0], self._rows)
        if self._around is None:
            blocks, order = self._gathered(geometry)
        else:
            blocks, order = self._ring(geometry, self._around)
        self._passes = Passes(formula, geometry, self._rows.detach(), blocks, order, self._tile_bytes)
        backward_comes = torch.is_grad_enabled() and (self._rows.requires_grad or self._columns is not None)
        totals, self._stats = self._passes.forward(
            call.own_labels, backward_comes=backward_comes, rows_only=self._symmetric
        )
        self._passes.release()
        ordinary = self._ordinary()
        packed = [
            pack_stats(self._row(total) if ordinary else PartialStats(0.0, 0.0, False, ElementCounts()))
            for total in totals
        ]
        if not self._symmetric:
            return b"".join(packed)
        return b"".join(packed) + self._stats.cpu().numpy().tobytes()

    def value(self, payloads: Sequence[bytes]) -> tuple[Tensor, float, list[list[PartialStats]]]:
        """What follows from all ranks' payloads.

        Returns:
            The loss with its graph, as a number, and each rank's sub-losses.
        """
        count = len(self._plan.formula.sub_losses)
        size = count * STATS_BYTES
        table = unpack_partials([p[:size] for p in payloads])
        value, factors = scale_factors(table, self._world)
        others = self._others([p[size:] for p in payloads]) if self._symmetric else None
        stats = self._stats
        assert stats is not None

        def pull(rows_wanted: bool, columns_wanted: bool) -> tuple[Tensor | None, Tensor | None]:
            into = torch.zeros_like(self._columns) if columns_wanted and self._columns is not None else None
            grad = self._passes.backward(stats, others, factors, into)
            if into is not None and self._order is not None:
                into = torch.empty_like(into).index_copy_(0, self._order, into)
            return grad if rows_wanted else None, into

        return tiled_value(self._rows, self._columns, pull, value), value, table

    def _gathered(self, geometry: Geometry) -> tuple[Callable[[], Iterator[Block]], Tensor | None]:
        """All columns as one block."""
        references = self._call.references
        prepared = geometry.prepare(references.detach() if self._symmetric else references)
        pairs = self._pairs(prepared.shape[0])
        self._order = pairs.column_order
        if prepared.requires_grad:
            self._columns = prepared
        columns = prepared.detach()
        kept = geometry.columns(columns if self._order is None else columns[self._order])

        def blocks() -> Iterator[Block]:
            yield Block(kept, pairs, whole=True)

        return blocks, pairs.row_order

    def _ring(
        self, geometry: Geometry, around: Callable[[Tensor], Iterator[tuple[int, Tensor]]]
    ) -> tuple[Callable[[], Iterator[Block]], Tensor]:
        """Each rank's rows as a block, one after the other."""
        labels, own = self._call.arguments["labels"], self._call.own_labels
        assert own is not None
        bounds, mine, rows = self._call.bounds(), self._call.bound, self._rows.detach()
        pairs = [LabelPairs(own, labels[a:b], 0 if (a, b) == mine else None) for a, b in bounds]
        self._order = torch.cat([p.column_order + a for p, (a, _) in zip(pairs, bounds, strict=True)])

        def blocks() -> Iterator[Block]:
            for rank, columns in around(rows):
                yield Block(geometry.columns(columns[pairs[rank].column_order]), pairs[rank], bounds[rank][0])

        return blocks, pairs[0].row_order

    def _pairs(self, columns: int) -> Pairs:
        call = self._call
        labels, references = call.own_labels, call.ref_labels
        assert labels is not None
        assert references is not None
        if "indices_tuple" in call.arguments:
            tuples = call.own_tuples()
            if len(tuples) == 3 and isinstance(self._loss, pml.TripletMarginLoss):
                return TripletTuples(tuples, labels.shape[0])
            once = self._plan.formula.by_mask
            pairs = TuplePairs(tuples, labels.shape[0], columns, self._rows.dtype, once=once)
            if once and pairs.contradict():
                raise InputError(
                    f"{type(self._loss).__name__}: indices_tuple",
                    expected="each pair to be either positive or negative",
                    got="a pair that is both",
                )
            return pairs
        kind = torch.promote_types(labels.dtype, references.dtype)
        first = call.bound[0] if references is call.arguments["labels"] else None
        return LabelPairs(labels.to(kind), references.to(kind), first)

    def _ordinary(self) -> bool:
        """Whether PML would not return a zero at once; the same on all ranks."""
        given = self._call.arguments.get("indices_tuple")
        if isinstance(self._loss, pml.TripletMarginLoss):
            return True  # without triplets all totals are 0
        if given is None:
            positive, negative = self._call.pairs()
        else:
            positive, negative = len(given[1]), len(given[-1])
        if isinstance(self._loss, pml.SupConLoss) and not (positive and negative):
            return False
        return max(positive, negative) > 1

    def _row(self, total: Total) -> PartialStats:
        divisor = 1.0 / self._world if total.divisor is None else total.divisor
        return PartialStats(
            total.total, divisor, False, ElementCounts(total.elements, total.passed, total.above_low, total.pairs)
        )

    def _others(self, packed: Sequence[bytes]) -> Tensor:
        """(G, k) statistics in the order of the columns."""
        assert self._stats is not None
        width = self._stats.shape[1]
        if width == 0:
            return self._stats.new_empty((self._call.total_rows, 0))
        data = bytearray(b"".join(packed))
        everyone = torch.frombuffer(data, dtype=self._stats.dtype) if data else self._stats.new_empty(0)
        everyone = everyone.view(-1, width).to(self._stats.device)
        return everyone if self._order is None else everyone[self._order]
