"""NT-Xent, supervised contrastive and multi-similarity loss on tiles: rows of exponentials, of which a log-sum-exp is kept.

Legend: ``s_ij`` the similarity of row i and column j over the temperature; ``l_i`` the log-sum-exp of row i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.losses.tiled.accumulators import PairSums, Reduction, Total, reduce_rows
from lightning_ddp_losses.losses.tiled.exponentials import RowLogSumExp, SoftSlope
from lightning_ddp_losses.losses.tiled.formula import Formula, at_positives
from lightning_ddp_losses.losses.tiled.tile import Listed, Tile


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

    def look(self, tile: Tile) -> None:
        self._negatives.add(tile.rows, tile.keep_negatives(tile.matrix, -torch.inf), tile.far)

    def look_again(self, rows: slice, near: Listed, values: Tensor) -> None:
        losses, slopes = self._pair(values, self._negatives.value(rows)[near.rows])
        passing = self._pairs.add_listed(rows, near.rows, losses)
        self._pulls[rows].index_add_(0, near.rows, slopes.mul_(passing))

    def close(self, labels: Tensor | None) -> tuple[list[Total], Tensor]:
        total, counts = self._pairs.close(labels)
        return [total], torch.stack([self._negatives.value(), self._pulls * counts, counts], 1)

    def ready(self, own: Tensor, others: Tensor | None, factors: Sequence[float]) -> None:
        factor = own.new_tensor([1.0, factors[0], factors[0]])
        self._own = own * factor
        self._others = None if others is None else others * factor
        self._soft = SoftSlope(self._own, self._others)

    def slope(self, tile: Tile) -> None:
        values = tile.positives()

        def term(level: Tensor, _: Tensor, count: Tensor) -> Tensor:
            losses, slopes = self._pair(values, level)
            return self._pairs.gate(losses, slopes).mul(-count)

        tile.keep_negatives(tile.matrix, -torch.inf)
        self._soft.apply(tile)
        if tile.far is not None:
            tile.matrix.mul_(tile.far)
        tile.add_at_positives(at_positives(term, tile, self._own, self._others))

    def _pair(self, values: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of a pair, and minus its derivative by s_ip."""
        above = values - level
        # not torch.sigmoid: it ends where exp(-x) overflows, before r + tiny is tiny
        smaller = above.abs().neg_().exp_()
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
        rows, owners, values = tile.rows, tile.near.rows, tile.positives()
        old = self._partners.top()[rows].clone()
        self._partners.add(rows, tile.keep_partners(tile.matrix, -torch.inf))
        top, number = self._partners.top()[rows], self._number[rows]
        # positives are added up relative to the largest entry, so that one which outweighs all others gives a loss of exactly 0
        near = torch.where(number > 0, (old - top) * number, 0).add_(self._near[rows])
        self._near[rows] = near.index_add_(0, owners, values - top[owners])
        number.index_add_(0, owners, torch.ones_like(values))

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
        tile.keep_partners(tile.matrix, -torch.inf)
        self._soft.apply(tile)
        tile.add_at_positives(at_positives(lambda level, count, share: -share, tile, self._own, self._others))


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
        self._positives = RowLogSumExp(rows, like, first=0.0)
        self._negatives = RowLogSumExp(rows, like, first=self._base)  # the 1 of the formula: exp(s - base) = 1

    @classmethod
    def takes(cls, loss: Any) -> bool:
        return bool(loss.alpha > 0 and loss.beta > 0)

    def look(self, tile: Tile) -> None:
        self._positives.add_listed(tile.rows, tile.near.rows, self._lifted(tile.positives()))
        self._negatives.add(tile.rows, tile.keep_negatives(tile.matrix, -torch.inf))

    def close(self, labels: Tensor | None) -> tuple[list[Total], Tensor]:
        near = self._positives.value()
        top, above = self._negatives.relative()
        losses = near / self.loss.alpha + (top - self._base + above) / self.loss.beta
        total, counts = reduce_rows(self.reductions[0], losses, labels)
        return [total], torch.stack([top + above, counts, near], 1)

    def ready(self, own: Tensor, others: Tensor | None, factors: Sequence[float]) -> None:
        factor = own.new_tensor([1.0, factors[0] / self.loss.beta, 1.0])
        self._own = own * factor
        self._others = None if others is None else others * factor
        self._soft = SoftSlope(self._own, self._others)

    def slope(self, tile: Tile) -> None:
        values = self._lifted(tile.positives())

        def term(_: Tensor, count: Tensor, near: Tensor) -> Tensor:
            return (values - near).exp_().mul_(-count)

        tile.keep_negatives(tile.matrix, -torch.inf)
        self._soft.apply(tile)
        tile.add_at_positives(at_positives(term, tile, self._own, self._others))

    def _lifted(self, positives: Tensor) -> Tensor:
        return positives.sub_(self._base).mul_(self._ratio)
