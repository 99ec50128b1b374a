"""What pytorch-metric-learning records about a call (``collect_stats=True``), over all ranks, where each evaluates its own anchors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from pytorch_metric_learning import reducers
from torch import Tensor

from lightning_ddp_losses.losses.partial_sums import ElementCounts


def wants_counts(loss: Any) -> bool:
    """Whether a reducer of the loss records anything."""
    return any(module.collect_stats for module in loss.modules() if isinstance(module, reducers.BaseReducer))


def record_norms(distance: Any, embeddings: Tensor, references: Tensor) -> None:
    """Mean norms of all ranks' rows, on the distance that compared them."""
    if distance is None or not distance.collect_stats:
        return
    with torch.no_grad():
        distance.reset_stats()
        normalized = (distance.maybe_normalize(t) for t in (embeddings, references))
        distance.set_default_stats(embeddings, references, *normalized)


def record_reduction(reducer: Any, name: str, count: ElementCounts) -> None:
    """Numbers of elements of sub-loss ``name``, on its reducer and those inside it."""
    for inner, elements in _chain(reducer, name, count):
        inner.reset_stats()
        if not inner.collect_stats:
            continue
        inner.losses_size = max(int(elements), 1)  # what has no elements is the number 0
        if isinstance(inner, reducers.ThresholdReducer) and elements:
            inner.num_past_filter = int(count.passed)
            if inner.low is not None:
                inner.num_above_low = int(count.above_low)
            if inner.high is not None:
                inner.num_above_high = int(count.passed)
        if isinstance(inner, reducers.DivisorReducer):
            inner.divisor = count.passed


def _chain(reducer: Any, name: str, count: ElementCounts) -> Iterator[tuple[Any, float]]:
    if isinstance(reducer, reducers.MultipleReducers):
        known = name in reducer.reducers
        reducer = reducer.reducers[name] if known else reducer.default_reducer
    while isinstance(reducer, reducers.PerAnchorReducer):
        yield reducer, count.pairs
        reducer = reducer.reducer
    yield reducer, count.elements
