"""Triplet margin loss on tiles: positives one after the other against a whole row of negatives, or all at once where the row is sorted.

Legend: ``T`` rows of a tile, ``C`` columns, ``K`` most positives of a row. ``d`` is the distance (a similarity negated): a triplet's
violation is ``d_ap - d_an + margin``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.losses.tiled.accumulators import PairSums, Reduction, Total
from lightning_ddp_losses.losses.tiled.formula import Formula
from lightning_ddp_losses.losses.tiled.tile import Tile

_SORT_FROM = 12  # positives of a row, from which sorting it is cheaper


class Triplets(Formula):
    """``relu`` (or ``softplus``) of the violation over all triplets of each row."""

    symmetric = False

    def __init__(self, loss: Any, reductions: Sequence[Reduction], rows: int, like: Tensor) -> None:
        super().__init__(loss, reductions, rows, like)
        self.scale = self.sign
        self._sums = PairSums(reductions[0], rows, like)
        reduction = reductions[0]
        self._sorts = not loss.smooth_loss and (not reduction.selects or (reduction.low, reduction.high) == (0, None))

    @classmethod
    def takes(cls, loss: Any) -> bool:
        return not loss.swap and loss.triplets_per_anchor == "all"

    @classmethod
    def reduces(cls, reduction: Reduction) -> bool:
        return not reduction.per_anchor  # nor does PML

    def look(self, tile: Tile) -> None:
        if tile.triplets is not None:
            near, far, anchors = self._named(tile)
            losses = self._loss(near - far + self.loss.margin)
            self._sums.add_listed(tile.rows, anchors, losses)
            return
        near, weights, _ = _positives(tile)
        if self._by_sorting(tile, near):
            self._sums.add_counted(tile.rows, *self._sorted_sums(tile, near, weights))
            return
        allowed = tile.counted(torch.ones_like(tile.matrix))
        for column, weight in _columns(near, weights):
            losses = self._loss(column - tile.matrix + self.loss.margin)
            self._sums.add(tile.rows, losses, allowed * weight)

    def close(self, labels: Tensor | None) -> tuple[list[Total], Tensor]:
        total, counts = self._sums.close(labels)
        self._counts = counts
        return [total], counts.unsqueeze(1)[:, :0]

    def ready(self, own: Tensor, others: Tensor | None, factors: Sequence[float]) -> None:
        self._own = self._counts * factors[0]

    def slope(self, tile: Tile) -> None:
        counts = self._own[tile.rows].unsqueeze(1)
        if tile.triplets is not None:
            near, far, anchors = self._named(tile)
            violations = near - far + self.loss.margin
            slopes = self._gated(violations, torch.ones_like(violations)) * counts[anchors, 0]
            _, positives, negatives = tile.triplets
            tile.matrix.zero_().index_put_((anchors, positives), slopes, accumulate=True)
            tile.matrix.index_put_((anchors, negatives), -slopes, accumulate=True)
            return
        near, weights, places = _positives(tile)
        if self._by_sorting(tile, near):
            far, close = self._sorted_slopes(tile, near, weights)
        else:
            allowed, far, parts = tile.counted(torch.ones_like(tile.matrix)), torch.zeros_like(tile.matrix), []
            for column, weight in _columns(near, weights):
                part = self._gated(column - tile.matrix + self.loss.margin, allowed * weight)
                parts.append(part.sum(1))
                far += part
            close = torch.stack(parts, 1) if parts else near
        torch.mul(far, -counts, out=tile.matrix)
        tile.add_at_positives((close * counts).view(-1)[places])

    def _loss(self, violations: Tensor) -> Tensor:
        return torch.nn.functional.softplus(violations) if self.loss.smooth_loss else violations.clamp_min_(0)

    def _gated(self, violations: Tensor, weights: Tensor) -> Tensor:
        slopes = violations.sigmoid() if self.loss.smooth_loss else (violations > 0).to(violations.dtype)
        return slopes.mul_(self._sums.gate(self._loss(violations), weights))

    def _named(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        assert tile.triplets is not None
        anchors, positives, negatives = tile.triplets
        return tile.matrix[anchors, positives], tile.matrix[anchors, negatives], anchors

    def _by_sorting(self, tile: Tile, near: Tensor) -> bool:
        once = tile.far is None or bool((tile.far <= 1).all())
        return self._sorts and near.shape[1] >= _SORT_FROM and once

    def _sorted_sums(self, tile: Tile, near: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(T,) each: sum, number of violated and number of all triplets."""
        far, _ = tile.keep_negatives(tile.matrix.clone(), torch.inf).sort(1)
        limits = near + self.loss.margin
        below = torch.searchsorted(far, limits)
        sums = torch.nn.functional.pad(far.masked_fill(far == torch.inf, 0).double().cumsum(1), (1, 0))
        each = limits * below - sums.gather(1, below)
        number = (below * weights).sum(1)
        return (each * weights).sum(1).to(near.dtype), number, tile.number_of_negatives() * weights.sum(1)

    def _sorted_slopes(self, tile: Tile, near: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        far = tile.keep_negatives(tile.matrix.clone(), torch.inf)
        limits = (near + self.loss.margin).masked_fill(weights == 0, -torch.inf)
        sorted_limits, order = limits.sort(1)
        upto = torch.nn.functional.pad(weights.gather(1, order).cumsum(1), (1, 0))
        not_above = torch.searchsorted(sorted_limits, far, right=True)
        above = upto[:, -1:] - upto.gather(1, not_above)
        below = torch.searchsorted(far.sort(1).values, limits)
        return above.to(near.dtype), below * weights


def _positives(tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """(T, K) each: entries of the positives, their weights (0 where a row has fewer); (n,) places in there of the tile's list."""
    owners, rows = tile.near.rows, tile.matrix.shape[0]
    number = torch.bincount(owners, minlength=rows)
    width = int(number.max()) if rows else 0
    starts = number.cumsum(0) - number
    places = owners * width + torch.arange(len(owners), device=owners.device) - starts[owners]
    entries, weights = tile.matrix.new_zeros(2, rows, width)
    entries.view(-1)[places] = tile.positives()
    weights.view(-1)[places] = 1
    return entries, weights, places


def _columns(near: Tensor, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for k in range(near.shape[1]):
        yield near[:, k : k + 1], weights[:, k : k + 1]
