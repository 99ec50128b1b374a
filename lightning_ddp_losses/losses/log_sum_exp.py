"""The running log-sum-exp: of each row, over entries that arrive in pieces, from tiles, chunks of classes or other ranks.

Two numbers a row are enough: the largest entry ``m`` and ``s = sum exp(entry - m)``. A piece with a larger entry rescales ``s`` once;
two ranks' numbers merge the same way. No exponential overflows, and no piece is needed again.

A row without entries has the smallest finite number as its maximum and a sum of 0. With ``-inf`` in its place ``m - m`` would be nan, which
costs two more passes to prevent.

Legend: ``n`` rows, ``C`` entries of a piece, ``k`` parts.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RunningLogSumExp:
    """Log-sum-exp of rows whose entries arrive in pieces.

    Args:
        maximum: (n,), the largest entry so far.
        sum_exp: (n,), the sum of ``exp(entry - maximum)``.
    """

    _stats: tuple[Tensor, Tensor] | None  # both numbers; None: no piece has come yet

    def __init__(self, maximum: Tensor, sum_exp: Tensor) -> None:
        self._rows, self._like, self._stats = len(maximum), maximum, (maximum, sum_exp)

    @classmethod
    def empty(cls, rows: int, like: Tensor) -> RunningLogSumExp:
        """Makes rows without entries, of the dtype and on the device of ``like``."""
        made = cls.__new__(cls)
        made._rows, made._like, made._stats = rows, like, None
        return made

    @property
    def maximum(self) -> Tensor:
        """(n,), the largest entry so far."""
        return self._started()[0]

    @property
    def sum_exp(self) -> Tensor:
        """(n,), the sum of ``exp(entry - maximum)``."""
        return self._started()[1]

    @classmethod
    def of_one(cls, rows: int, like: Tensor, entry: float) -> RunningLogSumExp:
        """Makes rows that each have one entry already."""
        return cls(like.new_full((rows,), entry), like.new_ones(rows))

    @classmethod
    def merged(cls, maxima: Tensor, sums: Tensor) -> RunningLogSumExp:
        """Merges k parts of the same rows, (k, n) each, added in their order."""
        maximum = maxima.amax(0)
        return cls(maximum, (sums * torch.exp(maxima - maximum)).sum(0))

    def accumulate_(
        self, values: Tensor, *, rows: slice = slice(None), weights: Tensor | None = None, keep: bool = False
    ) -> None:
        """Adds a piece to some of the rows.

        Args:
            values: (T, C), -inf for what does not count; overwritten unless ``keep``.
            rows: Which T rows; all by default.
            weights: (T, C), how often each entry counts; None: once.
            keep: Leave the values as they are, at the price of a copy.
        """
        if not values.shape[1]:
            return
        largest = values.amax(1)
        if self._stats is None and len(values) == self._rows:  # nothing to compare the first piece with
            maximum = largest.clamp_min_(torch.finfo(values.dtype).min)
            self._stats = maximum, _sum_exp(values, maximum, weights, keep=keep)
            return
        maximum, sum_exp = self._raise_maximum_(rows, torch.maximum(self.maximum[rows], largest))
        sum_exp.add_(_sum_exp(values, maximum, weights, keep=keep))

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

    def relative_to(self, entries: Tensor) -> Tensor:
        """Computes (n,), the log-sum-exp less an entry of each row: digits are kept where that is close to the largest."""
        return (self.maximum - entries) + self.above_maximum()

    def finalize(self, rows: slice = slice(None)) -> Tensor:
        """Computes (n,), or of some rows, the log-sum-exp: -inf where there was no entry."""
        return self.maximum[rows] + self.sum_exp[rows].log()

    def _raise_maximum_(self, rows: slice, higher: Tensor) -> tuple[Tensor, Tensor]:
        """Makes sums relative to new maxima, (T,); returns the maximum and the sum of these rows, which share memory with all rows'."""
        maximum, sum_exp = (stats[rows] for stats in self._started())
        sum_exp.mul_(maximum.sub_(higher).exp_())
        maximum.copy_(higher)
        return maximum, sum_exp

    def _started(self) -> tuple[Tensor, Tensor]:
        """Returns both numbers; fills them where no piece has come yet."""
        if self._stats is None:
            lowest = torch.finfo(self._like.dtype).min
            self._stats = self._like.new_full((self._rows,), lowest), self._like.new_zeros(self._rows)
        return self._stats


def _sum_exp(values: Tensor, maximum: Tensor, weights: Tensor | None, *, keep: bool) -> Tensor:
    """Computes (T,), the sums of ``exp(value - maximum)``; overwrites the values unless ``keep``."""
    column = maximum.unsqueeze(1)
    differences = torch.sub(values, column) if keep else values.sub_(column)
    differences.exp_()
    if weights is not None:
        differences.mul_(weights)
    return differences.sum(1)
