"""One value of a retrieval metric over the rows of all ranks: the search, and when it is repeated.

In ``compute`` the ranks compare their state in one handshake, gather labels and indices, and derive one plan from them
(``retrieval_rows``). Queries are passed around the ranks in blocks and return with their nearest rows (``nearest``). Each rank adds up the
values of its own queries (``retrieval_measures``), and the sums are added in rank order.

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` of all ranks, ``n`` queries of a block.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.messages import Agreement, Instance
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import all_gather_rows, gather_stacked, ring_round_trip
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.metrics.nearest import (
    GalleryPart,
    Nearest,
    Queries,
    Scores,
    merge_packed,
    search_precision,
)
from lightning_ddp_losses.metrics.retrieval_measures import Measure, Neighbours
from lightning_ddp_losses.metrics.retrieval_rows import (
    ABSENT,
    CommonRows,
    RankSummary,
    RetrievalPlan,
    RetrievalRows,
)

TITLE = "EmbeddingRetrieval"
"""Name of the metric in messages."""

_QUERIES, _QUERIES_ON_DEVICE = 256, 4096  # number of a rank's queries in one round
_NEIGHBOURS, _NEIGHBOURS_ON_DEVICE = 1 << 16, 1 << 18  # number of neighbours of these queries


class RetrievalCounts(NamedTuple):
    """The number of rows over all ranks from which the last value was computed.

    Attributes:
        queries: Queries that count.
        left_out: Queries without a relevant row, including members of classes with a single row. They do not count.
        gallery: Rows of the gallery.
        repeated: Rows with a repeated index. They do not count.
    """

    queries: int
    left_out: int
    gallery: int
    repeated: int


# ---------------------------------------------------------------------- the ranks of a value


class Ranks:
    """The ranks whose rows a value is computed from: the ranks of a group, or only this one.

    Args:
        group: Process group. None is the world.
        is_alone: True for the value of this rank's rows.
    """

    def __init__(self, group: Group, *, is_alone: bool) -> None:
        self.group, self.is_alone = group, is_alone or process_groups.world_size(group) == 1
        self.rank = 0 if self.is_alone else process_groups.rank(group)

    def meet(self, title: str, must_match: dict[str, object], own: object, instance: Instance) -> list[Any]:
        """Return the information of all ranks, in rank order. Communication: one handshake."""
        if self.is_alone:
            return [own]
        of_call = {"which": instance}
        payload = json.dumps(own).encode()
        payloads = handshake.all_gather(Agreement(title, must_match), of_call, payload, group=self.group)
        return [json.loads(payload) for payload in payloads]

    def gathered(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Return the rows (G, ...) of all ranks. Communication: one gather."""
        return rows if self.is_alone else all_gather_rows(rows, counts, self.group)

    def round_trip(
        self,
        rows: Tensor,
        counts: list[int],
        visit: Callable[[int, Tensor], Tensor],
        join: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return what all ranks found for this rank's rows (n, ...). Communication: 2 (W - 1) messages to the next rank."""
        if self.is_alone:
            return visit(0, rows)
        found = ring_round_trip(rows, counts, visit, join, counts, self.group)
        assert found is not None  # results are collected
        return found

    def summed(self, values: Tensor) -> Tensor:
        """Return the sums over ranks, added in rank order. Communication: one gather of a few numbers."""
        return values if self.is_alone else gather_stacked(values, self.group).sum(0)


# ---------------------------------------------------------------------- the search


class _Search:
    """The search for one value over the rows of all ranks, after the ranks have agreed on it.

    Args:
        ranks: The ranks.
        rows: This rank's rows, joined.
        common: The common properties of the rows of all ranks.
        plan: The plan of their labels and indices.
        measures: Metrics to compute.
        scores: How rows are compared.
        device: Device of the computation.
    """

    def __init__(
        self,
        ranks: Ranks,
        rows: RetrievalRows,
        common: CommonRows,
        plan: RetrievalPlan,
        measures: Sequence[Measure],
        scores: Scores,
        device: torch.device,
    ) -> None:
        self._ranks, self._plan, self._measures, self._device = ranks, plan, measures, device
        own = torch.empty(0, common.width, dtype=common.dtype, device=device)
        if rows.embeddings:
            own = rows.embeddings[0].to(common.dtype)
        self._rows = scores.prepared(own)
        numbers, places = plan.numbers_on(ranks.rank)
        gallery = self._rows
        if not torch.equal(places, torch.arange(len(gallery))):
            gallery = gallery[places.to(device)]
        numbers = numbers.to(device)
        self._gallery_labels = plan.gallery_labels.to(device)
        self._gallery = GalleryPart(scores, gallery, numbers, self._gallery_labels[numbers])
        self._most = (_QUERIES, _NEIGHBOURS) if device.type == "cpu" else (_QUERIES_ON_DEVICE, _NEIGHBOURS_ON_DEVICE)

    def sums(self) -> Tensor:
        """Return the sum of each metric over the queries of all ranks, followed by the number of NaN scores."""
        plan = self._plan
        counted = (plan.relevant > 0).nonzero().squeeze(1)
        depths = self._depths(counted)
        totals = torch.zeros(len(self._measures) + 1, dtype=torch.float64)
        unplaced = []
        for round_ in plan.rounds(counted, depths, *self._most):
            own = round_.blocks[self._ranks.rank]
            nearest = self._nearest(round_.blocks, round_.depth)
            neighbours = self._neighbours(own, nearest)
            values = [measure.values(neighbours).sum() for measure in self._measures]
            is_nan = nearest.scores.isnan().sum()
            totals += torch.stack([*values, is_nan.to(values[0].dtype)]).cpu()
            unplaced.append(own[~neighbours.hits.any(1).cpu()])
        if any(measure.counts_rows for measure in self._measures):
            reciprocal = self._reciprocal_places(torch.cat(unplaced) if unplaced else counted[:0])
            for number, measure in enumerate(self._measures):
                totals[number] += reciprocal * measure.counts_rows
        return self._ranks.summed(totals)

    def _depths(self, queries: Tensor) -> Tensor:
        """Return how many nearest rows each query requires."""
        plan = self._plan
        depth = max([measure.depth for measure in self._measures])
        depths = torch.full((len(queries),), depth)
        if any(measure.is_at_r for measure in self._measures):
            depths = torch.maximum(depths, plan.relevant[queries])
        return depths.clamp(max=len(plan.gallery_rows))

    def _queries(self, numbers: Tensor, rows: Tensor) -> Queries:
        plan, device = self._plan, self._device
        return Queries(rows, plan.own[numbers].to(device), plan.query_labels[numbers].to(device))

    def _rows_of(self, numbers: Tensor) -> Tensor:
        """Return this rank's rows (n, D) of queries."""
        plan = self._plan
        places = plan.query_rows[numbers] - plan.offsets[self._ranks.rank]
        return self._rows[places.to(self._device)]

    def _nearest(self, blocks: Sequence[Tensor], depth: int) -> Nearest:
        """Return the nearest rows for this rank's block, out of the gallery of all ranks."""

        def visit(rank: int, rows: Tensor) -> Tensor:
            return self._gallery.nearest(self._queries(blocks[rank], rows), depth).packed()

        own = self._rows_of(blocks[self._ranks.rank])
        found = self._ranks.round_trip(own, list(map(len, blocks)), visit, merge_packed)
        return Nearest.unpacked(found)

    def _neighbours(self, queries: Tensor, nearest: Nearest) -> Neighbours:
        exist = nearest.numbers != ABSENT
        labels = self._gallery_labels[nearest.numbers.masked_fill(~exist, 0)]
        own_labels = self._plan.query_labels[queries].to(self._device)
        hits = (labels == own_labels.unsqueeze(1)) & exist
        return Neighbours(hits, labels, exist, own_labels, self._plan.relevant[queries].to(self._device))

    def _reciprocal_places(self, unplaced: Tensor) -> float:
        """Return the sum of 1 / position of the nearest relevant row, over this rank's queries without one among their nearest rows.

        Its position is one more than the number of nearer rows, which all have other labels.

        Communication: two gathers, two round trips of these queries, and a gather of the results of the first.
        """
        ranks, plan = self._ranks, self._plan
        counts = [len(unplaced)]
        if not ranks.is_alone:
            counts = gather_stacked(torch.tensor(len(unplaced)), ranks.group).tolist()
        total = 0.0
        everyone = ranks.gathered(unplaced, counts)
        depths = torch.ones(len(everyone), dtype=torch.int64)
        for blocks, _ in plan.rounds(everyone, depths, *self._most):
            sizes = list(map(len, blocks))
            own = self._rows_of(blocks[ranks.rank])

            def best(rank: int, rows: Tensor, blocks: Sequence[Tensor] = blocks) -> Tensor:
                return self._gallery.nearest_relevant(self._queries(blocks[rank], rows)).packed()

            first = ranks.gathered(ranks.round_trip(own, sizes, best, merge_packed), sizes)
            of_ranks = torch.split(first, sizes)

            def nearer(rank: int, rows: Tensor, blocks: Any = blocks, of_ranks: Any = of_ranks) -> Tensor:
                queries = self._queries(blocks[rank], rows)
                return self._gallery.count_nearer(queries, Nearest.unpacked(of_ranks[rank]))

            count = ranks.round_trip(own, sizes, nearer, torch.add)
            total += float((1 / (1 + count.cpu().double())).sum())
        return total


# ---------------------------------------------------------------------- the value


class RetrievalEvaluation:
    """The rows, options and last value that the members of a collection share.

    Args:
        measures: Metrics.
        scores: How rows are compared.
        shared_index: Whether queries and gallery are numbered together.
    """

    def __init__(self, measures: Sequence[Measure], scores: Scores, *, shared_index: bool) -> None:
        self.measures, self.scores, self.shared_index = measures, scores, shared_index
        self.rows = RetrievalRows()
        self.counts: RetrievalCounts | None = None
        self.is_held = False
        """Whether the last value is also the next one, because the members of a collection are computed together."""
        self.instance = Instance(TITLE)
        self._values: dict[str, Tensor] = {}
        self._made_of: tuple[object, ...] = ()

    def with_rows(self, rows: RetrievalRows) -> RetrievalEvaluation:
        """Return an evaluation of the same metrics on other rows."""
        found = RetrievalEvaluation(self.measures, self.scores, shared_index=self.shared_index)
        found.rows, found.instance = rows, self.instance
        return found

    def values(self, where: str, ranks: Ranks, device: torch.device) -> dict[str, Tensor]:
        """Return the value of each metric, float64.

        Args:
            where: ``compute`` or ``forward``.
            ranks: The ranks whose rows count.
            device: Device to use if all ranks are without rows.
        """
        made_of = (self.rows.version, ranks.is_alone, id(ranks.group))
        if self.is_held and self._made_of == made_of:
            return self._values
        title = f"{TITLE}, {where}"
        if ranks.is_alone:
            self._evaluate(title, ranks, device, made_of)
            return self._values
        with handshake.raising_on_all_ranks(title, group=ranks.group):
            self._evaluate(title, ranks, device, made_of)
        return self._values

    def _evaluate(self, title: str, ranks: Ranks, device: torch.device, made_of: tuple[object, ...]) -> None:
        # 1. exchange the ranks' state. If no rank has changed, the last value is still valid
        rows = self.rows
        rows.join_()
        has_changed = self._made_of != made_of
        must_match = {
            "metrics": ", ".join([measure.name for measure in self.measures]),
            "distance": self.scores,
            "shared_index": self.shared_index,
        }
        told = ranks.meet(title, must_match, [has_changed, *self._summary()], self.instance)
        if not any(changed for changed, *_ in told):
            return
        summaries = [RankSummary(*summary) for _, *summary in told]
        common = CommonRows.of(TITLE, summaries)
        if device.type != common.device:
            device = torch.device(common.device)
        if rows.embeddings:
            device = rows.embeddings[0].device
        # 2. labels and indices of all rows, and the plan for them
        table = ranks.gathered(self._table(ranks, common), common.counts)
        plan = RetrievalPlan.of(TITLE, table, common.counts, shared_index=self.shared_index)
        # 3. the search
        with search_precision(common.dtype, device):
            sums = _Search(ranks, rows, common, plan, self.measures, self.scores, device).sums()
        # 4. means over the queries that count
        *totals, nan_count = sums.tolist()
        expect(
            not nan_count,
            f"{TITLE}: distances",
            expected="numbers",
            got=f"NaN in the nearest rows of queries, {int(nan_count)} times",
            fix="Give distances that are defined for these rows.",
            error=InputError,
            collective=True,
        )
        queries = int((plan.relevant > 0).sum())
        self.counts = RetrievalCounts(queries, len(plan.relevant) - queries, len(plan.gallery_rows), plan.repeated)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._values = {}
        for measure, total in zip(self.measures, totals, strict=True):
            mean = total / queries if queries else torch.nan
            self._values[measure.name] = torch.tensor(mean, dtype=dtype, device=device)
        self._made_of = made_of

    def _summary(self) -> RankSummary:
        summary = self.rows.summary()
        if summary.rows and self.scores.needs_variance:
            # the signal of a row without variance is zero, and its distances are NaN
            constant = (self.rows.embeddings[0].var(1) == 0).sum()
            summary = summary._replace(bad=summary.bad + int(constant))
        return summary

    def _table(self, ranks: Ranks, common: CommonRows) -> Tensor:
        """Return labels, indices and roles (B, 3) of this rank's rows, on the CPU."""
        rows = self.rows
        if not rows.embeddings:
            return torch.empty(0, 3, dtype=torch.int64)
        labels, roles = rows.labels[0], rows.roles[0]
        if common.is_indexed:
            indices = rows.indices[0]
        else:
            first = sum(common.counts[: ranks.rank])
            indices = torch.arange(first, first + len(labels), device=labels.device)
        return torch.stack([labels, indices, roles], 1).cpu()
