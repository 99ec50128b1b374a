"""pytorch-metric-learning's reducers on numbers of rows.

Legend: ``B`` rows on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lightning_ddp_losses.losses.partial_sums import ElementCounts, PartialSum, host_number
from lightning_ddp_losses.losses.pml_registry import Reduction
from lightning_ddp_losses.losses.tiled.tile_functions import Limits


def reduce_rows(reduction: Reduction, losses: Tensor, labels: Tensor | None) -> tuple[PartialSum, Tensor | None]:
    """Reduce one loss per row.

    Args:
        reduction: ``per_anchor`` has no effect because rows are anchors.
        losses: (B,).
        labels: (B,), for class weights.

    Returns:
        The sum, and the weight (B,) of each row's loss in it, or None if all weights are 1.
    """
    counts, number = None, host_number(losses.numel())
    passed = above = number
    if reduction.selects:
        counts = reduction.passes(losses).to(losses.dtype)
        passed = counts.sum()
        above = number if reduction.low is None else passed
        if reduction.low is not None and reduction.high is not None:
            above = (losses > reduction.low).sum()
    if reduction.weights is not None:
        # class weights apply to the sum and not to the divisor, as in PML
        assert labels is not None
        counts = reduction.weights.to(losses)[labels]
    weighted = losses if counts is None else losses * counts
    divisor = None if reduction.plain_sum else passed
    element_counts = ElementCounts(number, passed, above, number)
    return PartialSum(weighted.sum(dtype=torch.float64), divisor, counts=element_counts), counts


def reduce_pairs(
    reduction: Reduction, numbers: Sequence[Tensor], labels: Tensor | None
) -> tuple[PartialSum, Tensor | None]:
    """Reduce a sub-loss over pairs (or triplets).

    Args:
        reduction: Reducer of the sub-loss.
        numbers: (B,) each: the sum of the losses of a row that pass the limits, and their number. If counts are recorded, also the number
            of all losses and the number above the lower limit.
        labels: (B,), for class weights.

    Returns:
        The sum, and the weight (B,) of a passing pair of each row in it, or None if all weights are 1.
    """
    total, number, *recorded = numbers
    if reduction.per_anchor:
        pairs = number.clamp(min=1)
        anchors, counts = reduce_rows(reduction, total / pairs, labels)
        element_counts = anchors.counts._replace(pairs=number.sum(dtype=torch.float64))
        return replace(anchors, counts=element_counts), pairs.reciprocal() if counts is None else counts / pairs
    counts = None
    if reduction.weights is not None and labels is not None:
        counts = reduction.weights.to(total)[labels]
        total = total * counts
    passed = number.sum(dtype=torch.float64)
    elements = above = passed
    if recorded:
        elements, above = (each.sum(dtype=torch.float64) for each in recorded)
    divisor = None if reduction.plain_sum else passed
    element_counts = ElementCounts(elements, passed, above, elements)
    return PartialSum(total.sum(dtype=torch.float64), divisor, counts=element_counts), counts


def limits_of(reduction: Reduction) -> Limits | None:
    """Return the limits of single pairs, or None if all pairs pass or the reducer applies to anchors."""
    return (reduction.low, reduction.high) if reduction.selects and not reduction.per_anchor else None
