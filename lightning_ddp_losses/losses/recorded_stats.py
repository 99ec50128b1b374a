"""What pytorch-metric-learning records about a call (``collect_stats=True``), over all ranks, where each evaluates its own anchors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pytorch_metric_learning.reducers import BaseReducer
from torch import Tensor

from lightning_ddp_losses.losses.partial_sums import DeviceStats, ElementCounts, GlobalStats, total_counts
from lightning_ddp_losses.losses.pml_registry import reducer_chain, reduction_of


def record_norms(distance: Any, embeddings: Tensor, references: Tensor) -> None:
    """Record the mean norms of all ranks' rows, on the distance that compared them."""
    if distance is None or not distance.collect_stats:
        return
    with torch.no_grad():
        distance.reset_stats()
        normalized = (distance.maybe_normalize(rows) for rows in (embeddings, references))
        distance.set_default_stats(embeddings, references, *normalized)


def record_counts(loss: Any, names: Sequence[str], stats_by_rank: GlobalStats) -> None:
    """Record the numbers of elements of the sub-losses ``names`` over all ranks, on the loss's reducers."""
    if not collects_counts(loss) or isinstance(stats_by_rank, DeviceStats):
        return
    for name, counts in zip(names, total_counts(stats_by_rank), strict=True):
        record_sub_loss(loss, name, counts)


def record_sub_loss(loss: Any, name: str, counts: ElementCounts) -> None:
    """Record the numbers of elements of one sub-loss over all ranks, on its reducers."""
    # reducers that average per anchor got the pairs, the last one what is left of them
    *per_anchor, last = reducer_chain(loss.reducer, name)
    for reducer in per_anchor:
        _record_size(reducer, counts.pairs)
    _record_size(last, counts.elements)
    _record_passed(last, counts)


def collects_counts(loss: Any) -> bool:
    """Say whether a reducer of the loss records anything; its numbers then travel through the hosts."""
    return any(module.collect_stats for module in loss.modules() if isinstance(module, BaseReducer))


def _record_size(reducer: Any, elements: float) -> None:
    reducer.reset_stats()
    if reducer.collect_stats:
        reducer.losses_size = max(int(elements), 1)  # what has no elements is the number 0


def _record_passed(reducer: Any, counts: ElementCounts) -> None:
    """Record what passed a reducer's limits, or its divisor, in the attributes that PML 2.9 gives it."""
    reduction = reduction_of(reducer)
    if reduction is None or not reducer.collect_stats:
        return
    if reduction.selects and counts.elements:
        reducer.num_past_filter = int(counts.passed)
        if reduction.low is not None:
            reducer.num_above_low = int(counts.above_low)
        if reduction.high is not None:
            reducer.num_above_high = int(counts.passed)
    if reduction.given_divisor:
        reducer.divisor = counts.passed
