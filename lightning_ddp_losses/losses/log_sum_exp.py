"""The running log-sum-exp: of each row, over entries that arrive in pieces, from tiles, chunks of classes or other ranks.

Two numbers a row are enough: the largest entry ``m`` and ``s = sum exp(entry - m)``. A piece with a larger entry rescales ``s`` once;
two ranks' numbers merge the same way. No exponential overflows, and no piece is needed again.

A row without entries has the smallest finite number as its maximum and a sum of 0. With ``-inf`` in its place ``m - m`` would be nan, which
costs two more passes to prevent.

Legend: ``n`` rows, ``C`` entries of a piece, ``k`` parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RunningLogSumExp:
    """Log-sum-exp of rows whose entries arrive in pieces.

    Attributes:
        maximum: (n,), the largest entry so far.
        sum_exp: (n,), the sum of ``exp(entry - maximum)``.
    """

    maximum: Tensor
    sum_exp: Tensor

    @classmethod
    def empty(cls, rows: int, like: Tensor) -> RunningLogSumExp:
        """Makes rows without entries, of the dtype and on the device of ``like``."""
        return cls(like.new_full((rows,), torch.finfo(like.dtype).min), like.new_zeros(rows))

    @classmethod
    def of_one(cls, rows: int, like: Tensor, entry: float) -> RunningLogSumExp:
        """Makes rows that each have one entry already."""
        return cls(like.new_full((rows,), entry), like.new_ones(rows))

    @classmethod
    def merged(cls, maxima: Tensor, sums: Tensor) -> RunningLogSumExp:
        """Merges k parts of the same rows, (k, n) each, added in their order."""
        maximum = maxima.amax(0)
        return cls(maximum, (sums * torch.exp(maxima - maximum)).sum(0))

    def accumulate_(self, values: Tensor, *, rows: slice = slice(None), weights: Tensor | None = None) -> None:
        """Adds a piece to some of the rows.

        Args:
            values: (T, C), -inf for what does not count; overwritten.
            rows: Which T rows; all by default.
            weights: (T, C), how often each entry counts; None: once.
        """
        if not values.shape[1]:
            return
        maximum, sum_exp = self._raise_maximum_(rows, torch.maximum(self.maximum[rows], values.amax(1)))
        values.sub_(maximum.unsqueeze(1)).exp_()
        if weights is not None:
            values.mul_(weights)
        sum_exp.add_(values.sum(1))

    def accumulate_listed_(self, owners: Tensor, values: Tensor, *, rows: slice = slice(None)) -> None:
        """Adds entries one by one to some of the rows.

        Args:
            owners: (e,), which of the T rows each entry belongs to.
            values: (e,).
            rows: Which T rows; all by default.
        """
        maximum, sum_exp = self._raise_maximum_(rows, self.maximum[rows].scatter_reduce(0, owners, values, "amax"))
        sum_exp.index_add_(0, owners, (values - maximum[owners]).exp_())

    def above_maximum(self) -> Tensor:
        """Computes (n,), log-sum-exp less the maximum: exactly 0 where one entry outweighs all others."""
        return self.sum_exp.log()

    def finalize(self, rows: slice = slice(None)) -> Tensor:
        """Computes (n,), or of some rows, the log-sum-exp: -inf where there was no entry."""
        return self.maximum[rows] + self.sum_exp[rows].log()

    def _raise_maximum_(self, rows: slice, higher: Tensor) -> tuple[Tensor, Tensor]:
        """Makes sums relative to new maxima, (T,); returns the maximum and the sum of these rows, which share memory with all rows'."""
        maximum, sum_exp = self.maximum[rows], self.sum_exp[rows]
        sum_exp.mul_(maximum.sub_(higher).exp_())
        maximum.copy_(higher)
        return maximum, sum_exp
