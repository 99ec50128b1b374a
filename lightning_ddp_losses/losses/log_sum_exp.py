"""The running log-sum-exp: of each row, over entries that arrive in pieces, from tiles, chunks of classes or other ranks.

Two numbers a row are enough: the largest entry ``m`` and ``s = sum exp(entry - m)``. Pieces are parts with numbers of their own, of which
some are merged at a time: the largest ``m`` rescales each ``s`` once; two ranks' numbers merge the same way. No exponential overflows, and
no piece is needed again.

A row without entries has the smallest finite number as its maximum and a sum of 0. With ``-inf`` in its place ``m - m`` would be nan, which
costs two more passes to prevent.

Legend: ``n`` rows, ``C`` entries of a piece, ``k`` parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_PARTS = 16  # a merge is nine operators


class RunningLogSumExp:
    """Log-sum-exp of rows whose entries arrive in pieces.

    Args:
        maximum: (n,), the largest entry so far.
        sum_exp: (n,), the sum of ``exp(entry - maximum)``.
    """

    def __init__(self, maximum: Tensor, sum_exp: Tensor) -> None:
        self._rows, self._like = len(maximum), maximum
        # (k, n) each: numbers of k parts, of which part i has pieces of its first ``_taken[i]`` rows, at most
        self._parts: tuple[Tensor, Tensor] | None = (maximum.unsqueeze(0), sum_exp.unsqueeze(0))
        self._taken = [self._rows]

    @classmethod
    def empty(cls, rows: int, like: Tensor) -> RunningLogSumExp:
        """Makes rows without entries, of the dtype and on the device of ``like``."""
        made = cls.__new__(cls)
        made._rows, made._like, made._parts, made._taken = rows, like, None, []
        return made

    @property
    def maximum(self) -> Tensor:
        """(n,), the largest entry so far."""
        return self._merged()[0]

    @property
    def sum_exp(self) -> Tensor:
        """(n,), the sum of ``exp(entry - maximum)``."""
        return self._merged()[1]

    def maximum_of(self, rows: slice) -> Tensor:
        """Returns (T,), the largest entry of some rows so far; pieces to come may overwrite it."""
        maxima = self._started()[0][:, rows]
        return maxima[0] if len(maxima) == 1 else maxima.amax(0)

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
        self,
        values: Tensor,
        *,
        rows: slice = slice(None),
        weights: Tensor | None = None,
        keep: bool = False,
        finite: bool = False,
    ) -> None:
        """Adds a piece to some of the rows.

        Args:
            values: (T, C), -inf for what does not count; overwritten unless ``keep``.
            rows: Which T rows; all by default.
            weights: (T, C), how often each entry counts; None: once.
            keep: Leave the values as they are, at the price of a copy.
            finite: None is -inf.
        """
        if not values.shape[1]:
            return
        is_first = self._parts is None and len(values) == self._rows
        places = (None, None) if is_first else self._part_for(rows)
        maximum = torch.amax(values, 1, out=places[0])
        if not finite:
            maximum.clamp_min_(torch.finfo(values.dtype).min)
        column = maximum.unsqueeze(1)
        differences = torch.sub(values, column) if keep else values.sub_(column)
        differences.exp_()
        if weights is not None:
            differences.mul_(weights)
        sum_exp = torch.sum(differences, 1, out=places[1])
        if is_first:
            self._parts, self._taken = (maximum.unsqueeze(0), sum_exp.unsqueeze(0)), [self._rows]

    def accumulate_listed_(self, owners: Tensor, values: Tensor, *, rows: slice = slice(None)) -> None:
        """Adds entries one by one to some of the rows.

        Args:
            owners: (e,), which of the T rows each entry belongs to.
            values: (e,).
            rows: Which T rows; all by default.
        """
        maxima, sums = self._started()
        self._taken[0] = self._rows
        maximum, sum_exp = maxima[0, rows], sums[0, rows]
        higher = maximum.scatter_reduce(0, owners, values, "amax")
        # sums relative to the new maxima
        sum_exp.mul_(maximum.sub_(higher).exp_())
        maximum.copy_(higher)
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

    def _part_for(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Finds (T,) places for the maximum and the sum of a piece of some rows, in a part that has none of these yet."""
        start, stop, _ = rows.indices(self._rows)
        maxima, sums = self._started()
        if min(self._taken) > start:
            maxima, sums = self._with_more_parts(maxima, sums)
        index = next(index for index, taken in enumerate(self._taken) if taken <= start)
        self._taken[index] = stop
        return maxima[index, start:stop], sums[index, start:stop]

    def _with_more_parts(self, maxima: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Makes room for twice as many parts; for as many as before once they are too many and are merged."""
        wanted = 2 * len(maxima)
        if wanted > _MOST_PARTS:
            wanted = _MOST_PARTS
            maxima, sums = (numbers.unsqueeze(0) for numbers in self._merged())
        old = len(maxima)
        self._taken += [0] * (wanted - old)
        self._parts = _nothing(wanted, self._rows, self._like)
        for numbers, before in zip(self._parts, (maxima, sums), strict=True):
            numbers[:old] = before
        return self._parts

    def _merged(self) -> tuple[Tensor, Tensor]:
        """Merges all parts; returns both numbers, (n,) each."""
        maxima, sums = self._started()
        if len(maxima) > 1:
            whole = RunningLogSumExp.merged(maxima, sums)
            self._parts, self._taken = whole._started(), whole._taken
            maxima, sums = self._parts
        return maxima[0], sums[0]

    def _started(self) -> tuple[Tensor, Tensor]:
        """Returns both numbers of the parts; one without entries where no piece has come yet."""
        if self._parts is None:
            self._parts, self._taken = _nothing(1, self._rows, self._like), [0]
        return self._parts


def _nothing(parts: int, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Makes the numbers of parts without entries, (k, n) each."""
    return like.new_full((parts, rows), torch.finfo(like.dtype).min), like.new_zeros((parts, rows))
