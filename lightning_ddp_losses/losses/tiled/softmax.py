"""NT-Xent, supervised contrastive and multi-similarity loss on tiles: rows of exponentials, of which a log-sum-exp is kept.

Legend: ``s_ij`` the similarity of row i and column j over the temperature; ``l_i`` the log-sum-exp of row i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.losses.tiled.formula import Formula, RowLogSumExp, SoftSlope, Tile, both_ways
from lightning_ddp_losses.losses.tiled.reducing import PairSums, Reduction, Total, reduce_rows

__all__ = ["MultiSimilarity", "NTXent", "SupCon"]


class NTXent(Formula):
    """``-log r_ip`` over the positive pairs, ``r_ip = exp(s_ip) / (exp(s_ip) + sum over the negatives of exp(s_in))``.

    Statistics of a row: l over its negatives, the sum over its positives of what they give to the negatives' slope, how much a pair
    counts.
    """

    revisits = True
    width = 3

    def __init__(self, loss: Any, reductions: Sequence[Reduction], rows: int, like: Tensor) -> None:
        super().__init__(loss, reductions, rows, like)
        self.scale = -self.sign / loss.temperature
        self._negatives = RowLogSumExp(rows, like)
        self._pairs = PairSums(reductions[0], rows, like)
        self._pulls = like.new_zeros(rows)
        self._tiny = torch.finfo(like.dtype).tiny  # what PML adds to r
        self._levels: Tensor | None = None

    def look(self, tile: Tile) -> None:
        values = tile.banded()
        dense = _without_band(tile)
        self._negatives.add(tile.rows, dense, values, tile.negative)

    def look_again(self, tile: Tile) -> None:
        if self._levels is None:
            self._levels = self._negatives.value()
        losses, slopes = self._pair(tile.matrix, self._levels[tile.rows].unsqueeze(1))
        passing = self._pairs.add(tile.rows, losses, tile.positive)
        self._pulls[tile.rows] += (passing * slopes).sum(1)

    def close(self, labels: Tensor | None) -> tuple[list[Total], Tensor]:
        total, counts = self._pairs.close(labels)
        return [total], torch.stack([self._negatives.value(), self._pulls * counts, counts], 1)

    def ready(self, own: Tensor, others: Tensor | None, factors: Sequence[float]) -> None:
        factor = own.new_tensor([1.0, factors[0], factors[0]])
        self._own = own * factor
        self._others = None if others is None else others * factor
        self._soft = SoftSlope(self._own, self._others)

    def slope(self, tile: Tile) -> None:
        values = tile.banded()

        def term(level: Tensor, pull: Tensor, count: Tensor) -> Tensor:
            losses, slopes = self._pair(values, level)
            given = self._pairs.gate(losses, tile.positive) * slopes * count
            return _weighted_exp(values - level, tile.negative).mul_(pull).sub_(given)

        banded = both_ways(term, *_of(tile, self._own, self._others))
        if tile.has_dense:
            self._soft.apply(tile)
        tile.matrix[:, tile.band] = banded

    def _pair(self, values: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of a pair, and minus its derivative by s_ip."""
        above = values - level
        smaller = (
            above.abs().neg_().exp_()
        )  # not torch.sigmoid: it ends where exp(-x) overflows, before r + tiny is tiny
        whole = 1 / (1 + smaller)
        smaller *= whole
        low = above < 0
        ratio = torch.where(low, smaller, whole)
        lifted = ratio + self._tiny
        return lifted.log().neg_(), torch.where(low, whole, smaller).mul_(ratio).div_(lifted)


class SupCon(Formula):
    """``l_i`` minus the mean of ``s_ip`` over the positives of each row; l over all its partners.

    Statistics of a row: l, how much the row counts, the same over its number of positives.
    """

    width = 3
    by_mask = True

    def __init__(self, loss: Any, reductions: Sequence[Reduction], rows: int, like: Tensor) -> None:
        super().__init__(loss, reductions, rows, like)
        self.scale = -self.sign / loss.temperature
        self._partners = RowLogSumExp(rows, like)
        self._near, self._number = like.new_zeros(rows), like.new_zeros(rows)

    def look(self, tile: Tile) -> None:
        values, rows = tile.banded(), tile.rows
        positive = tile.once(tile.positive)
        old = self._partners.top(rows).clone()
        self._partners.add(rows, _without_band(tile), values, tile.once(tile.positive + tile.negative))
        top = self._partners.top(rows)
        # positives are added up relative to the largest entry, so that one which outweighs all others gives a loss of exactly 0
        lifted = torch.where(self._number[rows] > 0, (old - top) * self._number[rows], 0)
        self._near[rows] += lifted + ((values - top.unsqueeze(1)).masked_fill_(positive == 0, 0)).sum(1)
        self._number[rows] += positive.sum(1)

    def close(self, labels: Tensor | None) -> tuple[list[Total], Tensor]:
        top, above = self._partners.relative()
        number = self._number.clamp(min=1)
        losses = torch.where(self._number > 0, above - self._near / number, 0)
        total, counts = reduce_rows(self.reductions[0], losses, labels)
        counts = counts * (self._number > 0)
        return [total], torch.stack([top + above, counts, counts / number], 1)

    def ready(self, own: Tensor, others: Tensor | None, factors: Sequence[float]) -> None:
        factor = own.new_tensor([1.0, factors[0], factors[0]])
        self._own = own * factor
        self._others = None if others is None else others * factor
        self._soft = SoftSlope(self._own, self._others)

    def slope(self, tile: Tile) -> None:
        values, positive = tile.banded(), tile.once(tile.positive)
        partners = tile.once(tile.positive + tile.negative)

        def term(level: Tensor, count: Tensor, share: Tensor) -> Tensor:
            return _weighted_exp(values - level, partners).mul_(count).sub_(positive * share)

        banded = both_ways(term, *_of(tile, self._own, self._others))
        if tile.has_dense:
            self._soft.apply(tile)
        tile.matrix[:, tile.band] = banded


class MultiSimilarity(Formula):
    """``log(1 + sum exp(alpha (base - s_ip))) / alpha + log(1 + sum exp(beta (s_in - base))) / beta`` over positives and negatives.

    The matrix comes times beta. Statistics of a row: both logarithms, how much the row counts.
    """

    width = 3
    by_mask = True

    def __init__(self, loss: Any, reductions: Sequence[Reduction], rows: int, like: Tensor) -> None:
        super().__init__(loss, reductions, rows, like)
        self.scale = -self.sign * loss.beta
        self._base = -self.sign * loss.beta * loss.base
        self._ratio = -loss.alpha / loss.beta
        self._positives = RowLogSumExp(rows, like, add_one=True)
        self._negatives = RowLogSumExp(rows, like, add_one=True)

    @classmethod
    def takes(cls, loss: Any) -> bool:
        return bool(loss.alpha > 0 and loss.beta > 0)

    def look(self, tile: Tile) -> None:
        values = tile.banded().sub_(self._base)
        dense = _without_band(tile)
        if dense is not None:
            dense.sub_(self._base)
        self._positives.add(tile.rows, None, values * self._ratio, tile.once(tile.positive))
        self._negatives.add(tile.rows, dense, values, tile.once(tile.negative))

    def close(self, labels: Tensor | None) -> tuple[list[Total], Tensor]:
        near, far = self._positives.value(), self._negatives.value()
        total, counts = reduce_rows(self.reductions[0], near / self.loss.alpha + far / self.loss.beta, labels)
        return [total], torch.stack([far, counts, near], 1)

    def ready(self, own: Tensor, others: Tensor | None, factors: Sequence[float]) -> None:
        factor = own.new_tensor([1.0, factors[0] / self.loss.beta, 1.0])
        self._own = own * factor
        self._others = None if others is None else others * factor
        self._soft = SoftSlope(self._own, self._others)

    def slope(self, tile: Tile) -> None:
        values = tile.banded().sub_(self._base)
        positive, negative = tile.once(tile.positive), tile.once(tile.negative)

        def term(far: Tensor, count: Tensor, near: Tensor) -> Tensor:
            given = _weighted_exp(values * self._ratio - near, positive)
            return _weighted_exp(values - far, negative).sub_(given).mul_(count)

        banded = both_ways(term, *_of(tile, self._own, self._others))
        if tile.has_dense:
            tile.matrix.sub_(self._base)
            self._soft.apply(tile)
        tile.matrix[:, tile.band] = banded


def _without_band(tile: Tile) -> Tensor | None:
    if not tile.has_dense:
        return None
    tile.matrix[:, tile.band] = -torch.inf
    return tile.matrix


def _weighted_exp(exponent: Tensor, weights: Tensor) -> Tensor:
    """Overwrites ``exponent``, which no pair of some weight has above 0: nothing is larger than a row's log-sum-exp over all of them."""
    return exponent.clamp_max_(0).exp_().mul_(weights)


def _of(tile: Tile, own: Tensor, others: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
    rows = own[tile.rows].unbind(1)
    return rows, None if others is None else others[tile.columns][tile.band].unbind(1)
