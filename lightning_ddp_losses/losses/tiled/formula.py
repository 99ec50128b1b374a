"""What a loss has to say about one tile: the interface of the formulas, and the log-sum-exp they share.

Legend: ``T`` rows of a tile, ``C`` columns, ``b`` columns of its band, ``B`` rows on this rank, ``k`` statistics of a row.

A formula reads tiles of the scaled matrix twice. In forward it adds up rows and keeps ``k`` numbers of each (a log-sum-exp, how
much the row counts). In backward these are enough to turn a tile into its slope; where the matrix is symmetric, the other ranks'
numbers turn the same tile into the slope of the transposed entries too, so no gradient has to travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.losses.tiled.reducing import Reduction, Total

__all__ = ["Formula", "RowLogSumExp", "SoftSlope", "Tile", "both_ways"]

Stats = tuple[Tensor, ...]


class Tile(NamedTuple):
    """A few rows against columns.

    Attributes:
        matrix: (T, C), scaled; belongs to whoever gets the tile, to overwrite.
        rows: Which of this rank's rows.
        columns: Which columns of the whole batch; a block of a ring, else all.
        band: The columns, counted in the tile, that need weights; all others are negatives, once each.
        positive: (T, b).
        negative: (T, b).
        single: No pair is named more than once: weights are 0 or 1.
        triplets: (anchor, positive, negative) where a miner names them: anchors count the tile's rows; the weights then mean nothing.
    """

    matrix: Tensor
    rows: slice
    columns: slice
    band: slice
    positive: Tensor
    negative: Tensor
    single: bool
    triplets: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def has_dense(self) -> bool:
        """Whether there are columns outside the band."""
        return bool(self.band.stop - self.band.start < self.matrix.shape[1])

    def once(self, weights: Tensor) -> Tensor:
        """Weights where a pair that is named twice counts once."""
        return weights if self.single else (weights > 0).to(weights.dtype)

    def banded(self) -> Tensor:
        """A copy of the band's entries."""
        return self.matrix[:, self.band].clone()


class Formula:
    """One loss on tiles.

    Args:
        loss: pytorch-metric-learning's, for its numbers.
        reductions: One per sub-loss.
        rows: B.
        like: Gives dtype and device.

    Attributes:
        sub_losses: Their names.
        width: k.
        scale: By which the distances come multiplied.
        revisits: A second look at the bands is needed, once the first has seen all columns.
        symmetric: Slopes of transposed entries follow from the statistics.
        by_mask: A pair counts once, however often it is named.
        immediate: A tile's slope follows from the tile alone, but for one factor per sub-loss; it can be had in forward.
    """

    sub_losses: ClassVar[tuple[str, ...]] = ("loss",)
    revisits: ClassVar[bool] = False
    symmetric: ClassVar[bool] = True
    by_mask: ClassVar[bool] = False
    immediate: bool = False
    width: int = 0
    scale: float = 1.0

    def __init__(self, loss: Any, reductions: Sequence[Reduction], rows: int, like: Tensor) -> None:
        self.loss, self.reductions, self.rows, self.like = loss, reductions, rows, like
        self.sign = -1.0 if loss.distance.is_inverted else 1.0  # of a distance: large is far

    @classmethod
    def takes(cls, loss: Any) -> bool:
        """Whether the loss, as configured, is this formula."""
        return True

    @classmethod
    def reduces(cls, reduction: Reduction) -> bool:
        """Whether a sub-loss may be reduced so."""
        return True

    def look(self, tile: Tile) -> None:
        """Add up the rows of a tile."""
        raise NotImplementedError

    def look_with_slopes(self, tile: Tile, spare: Tensor) -> list[tuple[slice, Tensor]]:
        """``look``, where the slope is ``immediate``; leaves the tile's matrix as it is.

        Args:
            tile: The tile.
            spare: Like the tile's matrix; may be overwritten.

        Returns:
            For each sub-loss the columns of the tile that have a slope, and the derivative of the sub-loss's sum by them.
        """
        raise NotImplementedError

    def look_again(self, tile: Tile) -> None:
        """Add up what needs complete rows; the tile's matrix is its band."""

    def close(self, labels: Tensor | None) -> tuple[list[Total], Tensor]:
        """Reduce.

        Args:
            labels: (B,), in the tiles' order.

        Returns:
            One total per sub-loss, and (B, k) statistics.
        """
        raise NotImplementedError

    def ready(self, own: Tensor, others: Tensor | None, factors: Sequence[float]) -> None:
        """Before backward.

        Args:
            own: (B, k), in the tiles' order.
            others: (G, k), in the columns' order; None: only this rank's own entries are wanted.
            factors: What each sub-loss's sum is multiplied with.
        """
        raise NotImplementedError

    def slope(self, tile: Tile) -> None:
        """Overwrite a tile's matrix with its derivative (of the transposed entries too, after ``ready`` with ``others``)."""
        raise NotImplementedError


def both_ways(term: Callable[..., Tensor], own: Stats, others: Stats | None) -> Tensor:
    """``term`` with the rows' statistics as (T, 1), plus with the columns' as (1, b) where there are any."""
    total = term(*(s.unsqueeze(1) for s in own))
    return total if others is None else total + term(*(s.unsqueeze(0) for s in others))


class RowLogSumExp:
    """log sum exp of each row, added up tile by tile.

    Args:
        rows: B.
        like: Gives dtype and device.
        add_one: exp(0) counts too.
    """

    def __init__(self, rows: int, like: Tensor, *, add_one: bool = False) -> None:
        self._top = like.new_zeros(rows) if add_one else like.new_full((rows,), -torch.inf)
        self._sum = like.new_ones(rows) if add_one else like.new_zeros(rows)

    def add(self, rows: slice, dense: Tensor | None, values: Tensor, weights: Tensor) -> None:
        """Add a tile.

        Args:
            rows: Which rows.
            dense: (T, C) that count once each; overwritten.
            values: (T, b).
            weights: (T, b), how often each counts.
        """
        old, values = self._top[rows], values.masked_fill(weights == 0, -torch.inf)
        top = old
        for part in (dense, values):
            if part is not None and part.shape[1]:
                top = torch.maximum(top, part.amax(1))
        shift = top.masked_fill(top == -torch.inf, 0)  # nothing has come yet
        total = self._sum[rows] * (old - shift).exp()
        total += ((values - shift.unsqueeze(1)).exp_() * weights).sum(1)
        if dense is not None:
            total += dense.sub_(shift.unsqueeze(1)).exp_().sum(1)
        self._top[rows], self._sum[rows] = top, total

    def top(self, rows: slice) -> Tensor:
        """(T,) the largest so far."""
        return self._top[rows]

    def relative(self) -> tuple[Tensor, Tensor]:
        """(B,) the largest, and log sum exp above it: exactly 0 where one entry outweighs all others."""
        return self._top, self._sum.log()

    def value(self) -> Tensor:
        """(B,) -inf where there was nothing."""
        return self._top + self._sum.log()


class SoftSlope:
    """``c_i exp(m_ij - l_i)``, plus ``c_j exp(m_ij - l_j)`` for the transposed entries, on dense tiles.

    Args:
        own: (B, 2 or more), l and c of the rows; where c is 0, l does not matter.
        others: (G, 2 or more), of the columns; None: the rows' own term only.
    """

    def __init__(self, own: Tensor, others: Tensor | None) -> None:
        level, count = own[:, 0], own[:, 1]
        self._level, self._count = _silenced(level, count), count
        self._levels: Tensor | None = None
        self._spare: Tensor | None = None
        self._middle: float | None = None
        if others is None:
            return
        levels, counts = others[:, 0], others[:, 1]
        self._levels, self._counts = _silenced(levels, counts), counts
        every = torch.cat([level[count != 0], levels[counts != 0]])
        if not every.numel():
            return
        low, high = (float(v) for v in torch.aminmax(every))
        # one exponential instead of two where the levels lie close enough for it
        if high - low < 0.65 * torch.log(torch.tensor(torch.finfo(level.dtype).max, dtype=torch.float64)):
            self._middle = high
            self._row = count * (high - self._level).exp()
            self._column = counts * (high - self._levels).exp()

    def apply(self, tile: Tile) -> None:
        """Overwrite the tile's matrix."""
        matrix, rows = tile.matrix, tile.rows
        if self._levels is None:
            matrix.sub_(self._level[rows, None]).exp_().mul_(self._count[rows, None])
            return
        spare = self._room(matrix)
        if self._middle is not None:
            torch.add(self._row[rows, None], self._column[tile.columns], out=spare)
            matrix.sub_(self._middle).exp_().mul_(spare)
            return
        torch.sub(matrix, self._levels[tile.columns], out=spare).exp_().mul_(self._counts[tile.columns])
        matrix.sub_(self._level[rows, None]).exp_().mul_(self._count[rows, None]).add_(spare)

    def _room(self, matrix: Tensor) -> Tensor:
        if self._spare is None or self._spare.numel() < matrix.numel():
            self._spare = torch.empty_like(matrix)
        return self._spare.view(-1)[: matrix.numel()].view(matrix.shape)


def _silenced(level: Tensor, count: Tensor) -> Tensor:
    return level.masked_fill(count == 0, torch.inf)  # exp(m - inf) = 0
