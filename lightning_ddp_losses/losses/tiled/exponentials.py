"""Sums of exponentials over rows of tiles, and the slope they give a tile.

Legend: ``T`` rows of a tile, ``C`` columns, ``B`` rows on this rank, ``G`` columns over all ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_ddp_losses.losses.tiled.tile import Tile


class RowLogSumExp:
    """log sum exp of each row, added up tile by tile.

    Args:
        rows: B.
        like: Gives dtype and device.
        first: A number that counts in every row; None: nothing does.
    """

    def __init__(self, rows: int, like: Tensor, *, first: float | None = None) -> None:
        self._top = like.new_full((rows,), -torch.inf if first is None else first)
        self._sum = like.new_zeros(rows) if first is None else like.new_ones(rows)

    def add(self, rows: slice, values: Tensor, weights: Tensor | None = None) -> None:
        """Add a tile.

        Args:
            rows: Which rows.
            values: (T, C), -inf for what does not count; overwritten.
            weights: (T, C), how often each counts; None: once.
        """
        if not values.shape[1]:
            return
        shift, kept = self._raise(rows, torch.maximum(self._top[rows], values.amax(1)))
        values.sub_(shift.unsqueeze(1)).exp_()
        if weights is not None:
            values.mul_(weights)
        torch.add(kept, values.sum(1), out=self._sum[rows])

    def add_listed(self, rows: slice, owners: Tensor, values: Tensor) -> None:
        """Add (n,) values one by one to the tile's rows ``owners``."""
        shift, kept = self._raise(rows, self._top[rows].scatter_reduce(0, owners, values, "amax"))
        self._sum[rows] = kept.index_add_(0, owners, (values - shift[owners]).exp_())

    def top(self) -> Tensor:
        """(B,) the largest so far."""
        return self._top

    def relative(self) -> tuple[Tensor, Tensor]:
        """(B,) the largest, and log sum exp above it: exactly 0 where one entry outweighs all others."""
        return self._top, self._sum.log()

    def value(self, rows: slice = slice(None)) -> Tensor:
        """(B,), or of some rows: -inf where there was nothing."""
        return self._top[rows] + self._sum[rows].log()

    def _raise(self, rows: slice, top: Tensor) -> tuple[Tensor, Tensor]:
        """What to subtract from now on, and the sum so far relative to it."""
        shift = top.masked_fill(top == -torch.inf, 0)  # nothing has come yet
        kept = (self._top[rows] - shift).exp_().mul_(self._sum[rows])
        self._top[rows] = top
        return shift, kept


class SoftSlope:
    """``c_i exp(m_ij - l_i)``, plus ``c_j exp(m_ij - l_j)`` for the transposed entries.

    Args:
        own: (B, 2 or more), l and c of the rows; where c is 0 or l is -inf (no entries), the term is 0.
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
        every = torch.cat([level, levels, self._level.neg(), self._levels.neg()])
        # no entry is larger than the levels of its row and of its column
        highest, lowest = (float(part.max()) for part in every.view(2, -1)) if every.numel() else (0.0, 0.0)
        # one exponential instead of two where the levels lie close enough for it
        if math.isfinite(highest) and highest + lowest < 0.65 * math.log(torch.finfo(every.dtype).max):
            self._middle = highest
            self._row = count * (highest - self._level).exp_()
            self._column = counts * (highest - self._levels).exp_()

    def apply(self, tile: Tile) -> None:
        """Overwrite the tile's matrix, in which -inf becomes 0."""
        matrix, rows = tile.matrix, tile.rows
        if self._levels is None:
            matrix.sub_(self._level[rows, None]).exp_().mul_(self._count[rows, None])
        elif self._middle is not None:
            factor = torch.add(self._row[rows, None], self._column[tile.columns], out=self._room(matrix))
            matrix.sub_(self._middle).exp_().mul_(factor)
        else:
            transposed = torch.sub(matrix, self._levels[tile.columns], out=self._room(matrix))
            transposed.exp_().mul_(self._counts[tile.columns])
            matrix.sub_(self._level[rows, None]).exp_().mul_(self._count[rows, None]).add_(transposed)

    def _room(self, matrix: Tensor) -> Tensor:
        if self._spare is None or self._spare.numel() < matrix.numel():
            self._spare = torch.empty_like(matrix)
        return self._spare.view(-1)[: matrix.numel()].view(matrix.shape)


def _silenced(level: Tensor, count: Tensor) -> Tensor:
    return level.masked_fill((count == 0) | (level == -torch.inf), torch.inf)  # exp(m - inf) = 0
