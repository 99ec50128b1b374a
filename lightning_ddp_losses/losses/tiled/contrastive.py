"""Contrastive loss on tiles: two sums over pairs, whose slope needs nothing of the rest of the row.

Where pairs of all rows count alike, a tile's slope is known in forward but for one factor per sum: backward only multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.losses.tiled.accumulators import PairSums, Reduction, Total
from lightning_ddp_losses.losses.tiled.formula import Formula, at_positives
from lightning_ddp_losses.losses.tiled.tile import Tile


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
        self._add(tile, tile.matrix)

    def look_with_slopes(self, tile: Tile, spare: Tensor) -> list[tuple[slice, Tensor]]:
        near, far = self._add(tile, spare)
        slopes = [(tile.band, tile.banded(near.mul_(self.sign)))]
        if far is not None:
            slopes.append((slice(None), far.mul_(-self.sign)))
        return slopes

    def _add(self, tile: Tile, spare: Tensor) -> tuple[Tensor, Tensor | None]:
        """How often each positive counts, (n,), and each negative, (T, C) in ``spare``; None: none has a loss."""
        near = self._positive(tile.positives())
        passing = self._sums[0].add_listed(tile.rows, tile.near.rows, near)
        far = tile.keep_negatives(self._negative(tile.matrix, spare), 0)
        return passing.mul_(near.sign_()), far if self._sums[1].add_negatives(tile, far) else None

    def close(self, labels: Tensor | None) -> tuple[list[Total], Tensor]:
        totals, counts = zip(*(sums.close(labels) for sums in self._sums), strict=True)
        return list(totals), torch.stack(counts, 1)[:, : self.width]

    def ready(self, own: Tensor, others: Tensor | None, factors: Sequence[float]) -> None:
        self._factors, self._others = factors, others
        self._own = own.new_ones((self.rows, 2)) if self._uniform else own

    def slope(self, tile: Tile) -> None:
        near = self._positive(tile.positives())
        far = self._sums[1].pass_as_one(tile.keep_negatives(self._negative(tile.matrix, tile.matrix), 0))
        counts = self._own[tile.rows, 1:]
        if self._others is not None:
            counts = counts + self._others[tile.columns, 1]
        far.mul_(counts * (-self.sign * self._factors[1]))
        if tile.far is not None:
            far.mul_(tile.far)

        def term(counts: Tensor, _: Tensor) -> Tensor:
            return self._sums[0].gate(near, near.sign()).mul(counts)

        slopes = at_positives(term, tile, self._own, self._others)
        tile.add_at_positives(slopes.mul_(self.sign * self._factors[0]))

    def _positive(self, values: Tensor) -> Tensor:
        return values.sub(self.loss.pos_margin).mul_(self.sign).clamp_min_(0)

    def _negative(self, values: Tensor, out: Tensor) -> Tensor:
        """Losses of all pairs as negatives, written to ``out``."""
        if self.sign < 0:
            return torch.sub(values, self.loss.neg_margin, out=out).clamp_min_(0)
        margin = torch.tensor(self.loss.neg_margin, dtype=values.dtype, device=values.device)
        return torch.sub(margin, values, out=out).clamp_min_(0)
