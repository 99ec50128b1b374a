"""``EmbeddingRetrieval``: retrieval metrics over the rows of all ranks, without a matrix of all distances.

Averages of per-rank metrics differ from the metrics of the whole set, because each query is then only compared with the rows of one rank.
Gathering all rows requires memory for all of them on each rank, and a matrix of all distances (G, G) exceeds the available memory. In this
implementation each rank keeps its rows. They are not torchmetrics states: torchmetrics' operations on states (sync, forward, pickling) only
select whose rows are used.

Legend: ``W`` ranks, ``B`` rows on this rank, ``D`` embedding size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.errors import ConfigurationError, expect
from lightning_ddp_losses.metrics.composites import Members
from lightning_ddp_losses.metrics.nearest import Scores
from lightning_ddp_losses.metrics.retrieval_measures import Measure
from lightning_ddp_losses.metrics.retrieval_rows import RetrievalRows, Role
from lightning_ddp_losses.metrics.retrieval_value import TITLE, Ranks, RetrievalCounts, RetrievalEvaluation
from lightning_ddp_losses.metrics.states import ExchangingMetric


class RetrievalMember(ExchangingMetric):
    """One metric of an ``EmbeddingRetrieval``, without states: the rows belong to the collection.

    Args:
        name: Name of the metric.
        evaluation: Object shared by all members.
        **kwargs: Options of ``torchmetrics.Metric``.
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False

    def __init__(self, name: str, evaluation: RetrievalEvaluation, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.name = name
        self._evaluation = evaluation
        self._given_group: Any = None
        expected = "None: rows are not gathered"
        fix = "Leave it out. process_group= says whose rows count."
        expect(self.dist_sync_fn is None, f"{TITLE}: dist_sync_fn", expected=expected, got="a function", fix=fix)
        fix = "Leave it out, and give update embeddings that are on the CPU."
        expect(not self.compute_on_cpu, f"{TITLE}: compute_on_cpu", expected="False", got="True", fix=fix)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Reject rows, because they belong to the collection."""
        raise ConfigurationError(
            f"{TITLE}: update of its member {self.name!r}",
            expected="update of the EmbeddingRetrieval, which holds the rows of all members",
            got="update of one member, or of another collection that it was put into",
            fix="Call update of the EmbeddingRetrieval itself. log and log_dict take its members.",
        )

    forward = update

    def compute(self) -> Tensor:
        """Return the value over the rows of all ranks since ``reset``."""
        is_global = self._is_synced or (self._to_sync and self._has_peers)
        group = self._given_group if self._is_synced else self.process_group
        ranks = Ranks(group, is_alone=not is_global)
        return self._evaluation.values("compute", ranks, self.device)[self.name].clone()

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        # a rank without rows has a value as well, and the ranks decide together whether the last value is still valid
        return eager_recursive(compute)

    def _sync_dist(
        self, dist_sync_fn: Callable[..., Any] | None = gather_all_tensors, process_group: Any | None = None
    ) -> None:
        """Compute the next value over all ranks. Rows are not gathered. Communication: none."""
        expected = "None: rows are not gathered"
        is_known = dist_sync_fn in (None, gather_all_tensors)
        expect(is_known, f"{TITLE}: dist_sync_fn", expected=expected, got="a function", fix="Leave it out.")
        self._given_group = process_group or self.process_group

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Reject merging, because there are no states."""
        raise ConfigurationError(
            f"{TITLE}: merge_state",
            expected="rows that are given to update",
            got="the states of another metric",
            fix="Call update with all rows. Rows that come twice are left out by index=.",
        )

    def reset(self) -> None:
        """Remove the rows of the collection."""
        super().reset()
        if "_evaluation" in self.__dict__:
            self._evaluation.rows.reset()

    @property
    def _waits(self) -> bool:
        return False  # a collection does not have to exchange any states for it

    def _apply(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        moved = super()._apply(fn, *args, **kwargs)
        self._evaluation.rows.to_(self.device)
        return moved


class EmbeddingRetrieval(Members, MetricCollection):
    """Retrieval metrics over the rows of all ranks, without a matrix of all distances.

    It is a ``MetricCollection`` with one member for each metric. All members share the rows, so ``self.log_dict(metric)`` of a
    LightningModule works. Each query is compared with all rows of the gallery except itself. Its relevant rows are the rows with its label.

    Args:
        metrics: Names: ``precision_at_1``, ``precision@k``, ``hit_rate@k`` (1 if any of the k nearest rows is relevant, called recall@k in
            metric learning), ``recall@k`` (share of the relevant rows that are among the k nearest), ``r_precision``,
            ``map_at_r``, ``ndcg@k``, ``mrr``, ``mrr@k``, ``knn_accuracy@k``, each with a number for k. ``retrieval_measures`` defines them.
        distance: How rows are compared: ``"CosineSimilarity"``, ``"DotProductSimilarity"``, ``"LpDistance"``, ``"SNRDistance"``, or an
            instance of a distance of pytorch-metric-learning, with its options. If given by name, each normalises rows to unit length, as
            in that library: for plain products pass ``DotProductSimilarity(normalize_embeddings=False)``.
        shared_index: Whether queries and gallery are numbered together. If so, a query is not compared with the row of the gallery that
            has its index. If False, they are numbered separately, and only rows of role ``"both"`` are excluded as their own neighbours.
        prefix: Prepended to the names, as in ``MetricCollection``.
        postfix: Appended to the names.
        **kwargs: Options of ``torchmetrics.Metric``: ``process_group``, ``sync_on_compute``, ``dist_sync_on_step``,
            ``distributed_available_fn``.

    Ties are broken by index: among rows at the same distance, the one with the lower index is nearer. Without indices, the order of the
    rows in one process is used, which starts with the rows of rank 0.

    Rows with a repeated index are not counted (samplers repeat rows to equalise the number of rows per rank): the first one in rank order
    counts.

    Queries without a relevant row are not counted, including members of classes with a single row. ``counts`` contains their number. If no
    query counts, all values are NaN.

    Rows of half precision are compared in float32, rows of float64 in float64. Neither autocast nor TF32 applies.

    ``sync``, ``forward``, ``dist_sync_on_step`` and pickling never gather rows: they select whose rows the value is computed from. A pickle
    contains the rows of this rank. ``state_dict`` does not contain any rows.

    Returns:
        From ``compute``: a dict of float64 tensors, 0-dim, equal on every rank. From ``forward``: the values of the batch on this rank, or
        with ``dist_sync_on_step=True`` on all ranks.

    Memory: this rank's rows, twice, 24 bytes for each row of all ranks, a tile of 32 MiB (256 MiB on an accelerator), and the k or R
        nearest rows of a block of queries.

    Communication: ``update`` none. ``compute`` a handshake, a gather of 24 bytes per row, and for each block of queries W - 1 messages with
        the queries' rows and as many with results. ``mrr``: two more round trips for queries without a relevant row among the 10 nearest.

    Raises:
        ConfigurationError: for unsupported options.
        InputError: on every rank, for rows that are not finite, or rows of one index with several labels.
        RankMismatchError: on every rank, for rows of different widths, or with an index on some ranks only.

    Example:
        >>> import torch
        >>> metric = EmbeddingRetrieval(("precision_at_1", "map_at_r"))
        >>> metric.update(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.7, 0.3]]), torch.tensor([0, 0, 1, 1]))
        >>> {name: float(value) for name, value in metric.compute().items()}
        {'map_at_r': 0.75, 'precision_at_1': 0.75}
        >>> metric.counts
        RetrievalCounts(queries=4, left_out=0, gallery=4, repeated=0)
    """

    def __init__(
        self,
        metrics: Sequence[str] = ("map_at_r", "precision_at_1", "r_precision"),
        *,
        distance: str | BaseDistance = "CosineSimilarity",
        shared_index: bool = True,
        prefix: str | None = None,
        postfix: str | None = None,
        **kwargs: Any,
    ) -> None:
        names = [metrics] if isinstance(metrics, str) else list(metrics)
        measures = [Measure.parse(name) for name in names]
        is_set = bool(names) and len(set(names)) == len(names)
        expect(
            is_set, f"{TITLE}: metrics", expected="one name or more, each once", got=names, fix="Name each metric once."
        )
        evaluation = RetrievalEvaluation(measures, Scores(distance), shared_index=shared_index)
        members: dict[str, Any] = {
            measure.name: RetrievalMember(measure.name, evaluation, **kwargs) for measure in measures
        }
        super().__init__(members, prefix=prefix, postfix=postfix, compute_groups=False)
        self._evaluation = evaluation

    @property
    def counts(self) -> RetrievalCounts | None:
        """The numbers of rows from which the last value was computed. None before the first value."""
        return self._evaluation.counts

    @eager_recursive
    def update(  # type: ignore[override]
        self, embeddings: Tensor, labels: Tensor, index: Tensor | None = None, role: Role = "both"
    ) -> None:
        """Store rows of this rank.

        Args:
            embeddings: (B, D), floating point. B may be 0 and differ per rank.
            labels: (B,), integers or booleans.
            index: (B,), position of each row in the whole dataset. Pass it in all updates or in none.
            role: ``"query"``, ``"gallery"``, or ``"both"``: each row is a query among the remaining rows.

        Raises:
            InputError: on every rank, for tensors that are incompatible with each other.
        """
        self._add(self._evaluation.rows, "update", embeddings, labels, index, role)
        for member in self._retrieval_members():
            member._update_count += 1

    @eager_recursive
    def forward(
        self, embeddings: Tensor, labels: Tensor, index: Tensor | None = None, role: Role = "both"
    ) -> dict[str, Any]:
        """Store rows of this rank, and return the values of this batch. The arguments are the same as for ``update``."""
        first = self._retrieval_members()[0]
        batch = RetrievalRows()
        self._add(batch, "forward", embeddings, labels, index, role)
        is_global = first.dist_sync_on_step and first._has_peers
        ranks = Ranks(first.process_group, is_alone=not is_global)
        values = self._evaluation.with_rows(batch).values("forward", ranks, first.device)
        self.update(embeddings, labels, index, role)
        names = self.keys(keep_base=False)
        members = self._retrieval_members()
        found = {}
        for name, member in zip(names, members, strict=True):
            member._forward_cache = values[member.name]  # type: ignore[assignment]
            found[str(name)] = values[member.name]
        return found

    @eager_recursive
    def compute(self) -> dict[str, Any]:
        """Return the values over the rows of all ranks since ``reset``, computed by a single search."""
        evaluation = self._evaluation
        self._retrieval_members()[0].compute()
        evaluation.is_held = True
        try:
            values: dict[str, Any] = super().compute()
            return values
        finally:
            evaluation.is_held = False

    def _retrieval_members(self) -> list[RetrievalMember]:
        return list(self.values(copy_state=False))  # type: ignore[arg-type]

    def _add(
        self, rows: RetrievalRows, where: str, embeddings: Tensor, labels: Tensor, index: Tensor | None, role: Role
    ) -> None:
        """Store rows, or raise the same error on every rank."""
        first = self._retrieval_members()[0]
        try:
            rows.add(TITLE, embeddings, labels, index, role)
        except Exception as error:
            is_of_all = first.sync_on_compute or first.dist_sync_on_step
            if not (is_of_all and first._has_peers):
                raise
            handshake.raise_on_all_ranks(error, f"{TITLE}, {where}", group=first.process_group)
