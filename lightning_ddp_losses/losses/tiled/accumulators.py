"""pytorch-metric-learning's reducers on row sums: what a tile may forget once its elements are added up.

After a row is complete only three numbers of it are left: the sum of what passes the reducer's threshold, its number, and the number of
all. Where a row's sum is one of exponentials, ``losses/log_sum_exp.py`` keeps it.

Legend: ``B`` rows on this rank, ``T`` rows of a tile, ``C`` columns. A pair's loss counts with a weight (how often a miner names it; 1
or 0 without a miner).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_ddp_losses.losses.partial_sums import ElementCounts, PartialSum, host_number
from lightning_ddp_losses.losses.pml_registry import Reduction
from lightning_ddp_losses.losses.tiled.tiles import Tile


def reduce_rows(reduction: Reduction, losses: Tensor, labels: Tensor | None) -> tuple[PartialSum, Tensor | None]:
    """Reduces one loss per row.

    Args:
        reduction: ``per_anchor`` makes no difference here: rows are anchors.
        losses: (B,).
        labels: (B,), for class weights.

    Returns:
        The total, and (B,) how much each row's loss counts in S_r; None: 1.
    """
    counts, number = None, host_number(losses.numel())
    passed = above = number
    if reduction.selects:
        counts = reduction.passing(losses)
        passed = counts.sum()
        above = number if reduction.low is None else passed
        if reduction.low is not None and reduction.high is not None:
            above = (losses > reduction.low).sum()
    if reduction.weights is not None:
        # class weights weigh the sum and leave the divisor alone, as PML does
        assert labels is not None
        counts = reduction.weights.to(losses)[labels]
    weighted = losses if counts is None else losses * counts
    divisor = None if reduction.plain_sum else passed
    element_counts = ElementCounts(number, passed, above, number)
    return PartialSum(weighted.sum(dtype=torch.float64), divisor, counts=element_counts), counts


class PairSums:
    """Row sums of one sub-loss whose elements are pairs.

    Args:
        reduction: How they are reduced.
    """

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self._by_pair = reduction.selects and not reduction.per_anchor
        self._records = True  # what is only recorded

    def allocate_(self, rows: int, like: Tensor) -> None:
        """Makes ``rows`` sums of nothing, of the dtype and on the device of ``like``."""
        self._sum, self._passed, self._all, self._above = (like.new_zeros(rows) for _ in range(4))

    @property
    def limits(self) -> tuple[float | None, float | None] | None:
        """What a pair's loss must be larger and smaller than to pass; None: all pass."""
        return (self.reduction.low, self.reduction.high) if self._by_pair else None

    def take(self, total: Tensor, number: Tensor) -> None:
        """Takes the sums of all rows, (B,) each, in place of what tiles would add: sum of what passes, its number."""
        self._sum, self._passed, self._all = total, number, number
        self._records = False

    def accumulate_(self, rows: slice, losses: Tensor, weights: Tensor) -> None:
        """Adds (T, C) losses, each counted with its weight."""
        passed = self.passing_weights(losses, weights)
        self._all[rows] += weights.sum(1)
        self._sum[rows] += (losses * passed).sum(1)
        if self._by_pair:
            self._passed[rows] += passed.sum(1)
            if self.reduction.low is not None:
                self._above[rows] += (weights * (losses > self.reduction.low)).sum(1)

    def accumulate_listed_(self, rows: slice, owners: Tensor, losses: Tensor) -> Tensor:
        """Adds (n,) losses one by one to the tile's rows ``owners``; returns 1 for those that pass, else 0."""
        ones = torch.ones_like(losses)
        self._all[rows].index_add_(0, owners, ones)
        if not self._by_pair:
            self._sum[rows].index_add_(0, owners, losses)
            return ones
        passed = self.reduction.passing(losses)
        self._sum[rows].index_add_(0, owners, losses * passed)
        self._passed[rows].index_add_(0, owners, passed)
        if self.reduction.low is not None:
            self._above[rows].index_add_(0, owners, (losses > self.reduction.low).to(losses.dtype))
        return passed

    def accumulate_negatives_(self, tile: Tile, losses: Tensor) -> bool:
        """Adds the losses >= 0 of a tile's negatives, (T, C), 0 elsewhere.

        Leaves in ``losses`` how often each counts that is above 0 and passes; returns whether there is any.
        """
        rows = tile.rows
        self._all[rows] += tile.number_of_negatives()
        counts_positive = self._by_pair and self.reduction.selects_positive
        # what does not pass becomes 0; under the usual reducer (average of the non-zero) it is 0 already
        if self._by_pair and not counts_positive:
            passing = tile.weight_negatives_(self.reduction.passing(losses))
            if self.reduction.low is not None:
                self._above[rows] += tile.weight_negatives_((losses > self.reduction.low).to(losses.dtype)).sum(1)
            self._passed[rows] += passing.sum(1)
            losses.mul_(passing)
        elif tile.negative_counts is not None:
            losses.mul_(tile.negative_counts)
        total = losses.sum(1)
        self._sum[rows] += total
        # on an accelerator a pass more is cheaper than to wait
        if total.device.type == "cpu" and not bool(total.any()):
            return False
        # from losses to how often they count
        losses.sign_()
        if tile.negative_counts is not None:
            losses.mul_(tile.negative_counts)
        if counts_positive:
            number = losses.sum(1)  # counts several times faster than a comparison
            self._passed[rows] += number
            self._above[rows] += number
        return True

    def accumulate_counted_(self, rows: slice, total: Tensor, positive: Tensor, number: Tensor) -> None:
        """Adds (T,) sums of losses >= 0: how many of them are positive, and how many there are."""
        self._all[rows] += number
        self._sum[rows] += total
        self._passed[rows] += positive
        self._above[rows] += positive

    def passing_weights(self, losses: Tensor, weights: Tensor) -> Tensor:
        """Computes the weights of the pairs that pass, 0 for the others."""
        return weights * self.reduction.passing(losses) if self._by_pair else weights

    def indicate_passing_(self, losses: Tensor) -> Tensor:
        """Overwrites losses >= 0 with 1 where they are above 0 and pass, else 0; returns them."""
        if not self._by_pair or self.reduction.selects_positive:
            return losses.sign_()
        passing = self.reduction.passing(losses)
        return losses.sign_().mul_(passing)

    def finalize(self, labels: Tensor | None) -> tuple[PartialSum, Tensor | None]:
        """Computes the total, and (B,) how much a passing pair of each row counts in S_r; None: 1."""
        reduction = self.reduction
        if reduction.per_anchor:
            number = self._all.clamp(min=1)
            anchors, counts = reduce_rows(reduction, self._sum / number, labels)
            pairs = anchors.counts._replace(pairs=self._all.sum(dtype=torch.float64))
            return replace(anchors, counts=pairs), number.reciprocal() if counts is None else counts / number
        counts, weighted = None, self._sum
        if reduction.weights is not None and labels is not None:
            counts = reduction.weights.to(weighted)[labels]
            weighted = weighted * counts
        passed = (self._passed if self._by_pair else self._all).sum(dtype=torch.float64)
        elements = above = passed
        if self._by_pair and self._records:
            elements = self._all.sum(dtype=torch.float64)
            above = self._above.sum(dtype=torch.float64)
        divisor = None if reduction.plain_sum else passed
        element_counts = ElementCounts(elements, passed, above, elements)
        return PartialSum(weighted.sum(dtype=torch.float64), divisor, counts=element_counts), counts
