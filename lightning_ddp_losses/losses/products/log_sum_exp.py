"""Sums of exponentials of products: the log-sum-exp of rows, also from pieces.

Legend: ``n`` rows, ``T`` rows and ``C`` columns of a piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.losses.tile_results import TileResults

_MOST_PIECES = 16  # of a running log-sum-exp: a merge is seven operators


class LogSumExp(NamedTuple):
    """The log-sum-exp of n rows: the largest entry ``m``, and ``s = sum exp(entry - m)``.

    Attributes:
        maximum: (n,), m.
        sum_exp: (n,), s.
    """

    maximum: Tensor
    sum_exp: Tensor

    @classmethod
    def merged(cls, maxima: Tensor, sums: Tensor) -> LogSumExp:
        """Merge k parts of the same rows, (k, n) each, added in their order."""
        maximum = maxima.amax(0)
        return cls(maximum, (sums * torch.exp(maxima - maximum)).sum(0))

    def above_maximum(self) -> Tensor:
        """Return (n,), the log-sum-exp less the maximum: exactly 0 if one entry outweighs all others."""
        return self.sum_exp.log()

    def relative_to(self, entries: Tensor) -> Tensor:
        """Return (n,), the log-sum-exp less an entry of each row. Digits are kept if that is close to the largest."""
        return (self.maximum - entries) + self.sum_exp.log()


class RunningLogSumExp:
    """Log-sum-exp of rows that arrive in pieces: from tiles, chunks of classes or other ranks.

    Two numbers a row are enough: the largest entry ``m`` and ``s = sum exp(entry - m)``. Pieces are kept side by side, and some are merged
    at a time: the largest ``m`` rescales each ``s`` once. Two ranks' numbers merge the same way. No exponential overflows, and no piece is
    needed again. A row without entries has the smallest finite number as its maximum and a sum of 0: with ``-inf`` in its place ``m - m``
    would be nan, which costs two more passes to prevent.

    Args:
        rows: n, without entries at first.
        like: A tensor of their dtype and on their device.
    """

    def __init__(self, rows: int, like: Tensor) -> None:
        self._rows, self._like = rows, like
        # piece k of a part of the rows begins k * n behind the first of these rows
        self._maxima = TileResults(_MOST_PIECES * rows, like)
        self._sums = TileResults(_MOST_PIECES * rows, like)
        # how many pieces each part has, by its first row
        self._piece_counts: dict[int, int] = {}
        self._whole: LogSumExp | None = None

    @property
    def maximum(self) -> Tensor:
        """(n,), the largest entry so far."""
        return self._merged().maximum

    @property
    def sum_exp(self) -> Tensor:
        """(n,), the sum of ``exp(entry - maximum)``."""
        return self._merged().sum_exp

    def add_piece(self, numbers: tuple[Tensor, Tensor], start: int = 0) -> None:
        """Add the numbers of a piece (``max_and_sum_exp``), (T,) each. ``start``: the first of its rows. Different ones do not overlap."""
        count = self._piece_counts.get(start, 0)
        self._store_(numbers, count * self._rows + start)
        count += 1
        if count == _MOST_PIECES:
            self._store_(_merge(self._pieces(start, start + len(numbers[0]), count)), start)
            count = 1
        self._piece_counts[start] = count
        self._whole = None

    def above_maximum(self) -> Tensor:
        """Return (n,), the log-sum-exp less the maximum: exactly 0 if one entry outweighs all others."""
        return self._merged().above_maximum()

    def relative_to(self, entries: Tensor) -> Tensor:
        """Return (n,), the log-sum-exp less an entry of each row. Digits are kept if that is close to the largest."""
        return self._merged().relative_to(entries)

    def _merged(self) -> LogSumExp:
        """Return all pieces merged."""
        if self._whole is None:
            if self._piece_counts:
                # every part has as many pieces
                count = next(iter(self._piece_counts.values()))
                self._whole = _merge(self._pieces(0, self._rows, count))
            else:
                lowest = torch.finfo(self._like.dtype).min
                maximum = self._like.new_full((self._rows,), lowest)
                self._whole = LogSumExp(maximum, self._like.new_zeros(self._rows))
        return self._whole

    def _store_(self, numbers: tuple[Tensor, Tensor], place: int) -> None:
        for results, each in zip((self._maxima, self._sums), numbers, strict=True):
            results.store_(each, place)

    def _pieces(self, start: int, stop: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return the first pieces of some rows."""
        pieces = []
        for index in range(count):
            place = index * self._rows + start, index * self._rows + stop
            pieces.append((self._maxima.part(*place), self._sums.part(*place)))
        return pieces


def max_and_sum_exp(values: Tensor, *, keep: bool = False) -> tuple[Tensor, Tensor]:
    """Return the maximum of rows (T, C) and the sum of exponentials relative to it, (T,) each. ``values`` are overwritten unless kept."""
    maximum = values.amax(1)
    column = maximum.unsqueeze(1)
    differences = values - column if keep else values.sub_(column)
    return maximum, differences.exp_().sum(1)


def _merge(pieces: Sequence[tuple[Tensor, Tensor]]) -> LogSumExp:
    """Merge pieces of the same rows."""
    if len(pieces) == 1:
        return LogSumExp(*pieces[0])
    maxima, sums = (torch.stack(numbers) for numbers in zip(*pieces, strict=True))
    return LogSumExp.merged(maxima, sums)
