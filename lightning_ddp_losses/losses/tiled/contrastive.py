"""Contrastive loss on tiles: two sums over pairs, whose slope needs nothing of the rest of the row.

Where pairs of all rows count alike, a tile's slope is known in forward but for one factor per sum: backward only multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.losses.tiled.formula import Formula, Tile
from lightning_ddp_losses.losses.tiled.reducing import PairSums, Reduction, Total

__all__ = ["Contrastive"]


class Contrastive(Formula):
    """``relu(m_ip - pos_margin)`` over positive pairs and ``relu(neg_margin - m_in)`` over negative ones (similarities: negated)."""

    sub_losses = ("pos_loss", "neg_loss")

    def __init__(self, loss: Any, reductions: Sequence[Reduction], rows: int, like: Tensor) -> None:
        super().__init__(loss, reductions, rows, like)
        self._sums = [PairSums(reduction, rows, like) for reduction in reductions]
        # pairs of every row count alike, unless ...
        self._uniform = not any(r.per_anchor or r.weights is not None for r in reductions)
        self.width = 0 if self._uniform else 2
        self.immediate = self._uniform

    def look(self, tile: Tile) -> None:
        self.look_with_slopes(tile, tile.matrix)

    def look_with_slopes(self, tile: Tile, spare: Tensor) -> list[tuple[slice, Tensor]]:
        values, rows = tile.banded(), tile.rows
        near, far = self._positive(values), self._negative(values)
        positive = self._sums[0].add(rows, near, tile.positive) * near.sign_()
        negative = self._sums[1].add(rows, far, tile.negative) * far.sign_()
        slopes = [(tile.band, positive.mul_(self.sign)), (tile.band, negative.mul_(-self.sign))]
        if tile.has_dense:
            losses = self._dense(tile.matrix, spare)
            if self._sums[1].add_dense(rows, losses, tile.band):
                losses.mul_(-self.sign)[:, tile.band] = negative
                slopes[1] = slice(None), losses
        return slopes

    def close(self, labels: Tensor | None) -> tuple[list[Total], Tensor]:
        totals, counts = zip(*(sums.close(labels) for sums in self._sums), strict=True)
        return list(totals), torch.stack(counts, 1)[:, : self.width]

    def ready(self, own: Tensor, others: Tensor | None, factors: Sequence[float]) -> None:
        self._factors = factors
        self._own = own if self.width else own.new_ones((self.rows, 2))
        self._others = others
        if others is not None and not self.width:
            self._others = others.new_ones((others.shape[0], 2))

    def slope(self, tile: Tile) -> None:
        values, rows, band = tile.banded(), tile.rows, tile.band
        own, others = self._own[rows], None if self._others is None else self._others[tile.columns]
        if tile.has_dense:
            losses = self._dense(tile.matrix, tile.matrix)
            gate = self._sums[1].gate_dense(losses)
            losses.sign_()
            if gate is not None:
                losses.mul_(gate)
            factor = -self.sign * self._factors[1]
            if self._uniform:
                losses.mul_(factor if others is None else 2 * factor)
            else:
                counts = own[:, 1:] if others is None else own[:, 1:] + others[:, 1]
                losses.mul_(counts * factor)
        pairs = []
        for index, (values_of, weights) in enumerate(
            [(self._positive(values), tile.positive), (self._negative(values), tile.negative)]
        ):
            passing = self._sums[index].gate(values_of, weights) * (values_of > 0)
            counts = own[:, index].unsqueeze(1)
            if others is not None:
                counts = counts + others[band, index]
            pairs.append(passing * counts * self._factors[index])
        tile.matrix[:, band] = (pairs[0] - pairs[1]) * self.sign

    def _positive(self, values: Tensor) -> Tensor:
        return values.sub(self.loss.pos_margin).mul_(self.sign).clamp_min_(0)

    def _negative(self, values: Tensor) -> Tensor:
        return values.sub(self.loss.neg_margin).mul_(-self.sign).clamp_min_(0)

    def _dense(self, values: Tensor, out: Tensor) -> Tensor:
        """Losses of negative pairs, written to ``out``."""
        if self.sign < 0:
            return torch.sub(values, self.loss.neg_margin, out=out).clamp_min_(0)
        margin = torch.tensor(self.loss.neg_margin, dtype=values.dtype, device=values.device)
        return torch.sub(margin, values, out=out).clamp_min_(0)
