"""The log-sum-exp of rows, as two numbers a row that merge: of all ranks, or of a call that is evaluated in one piece.

``products.RunningLogSumExp`` makes the same of rows that arrive in several pieces.

Legend: ``n`` rows, ``k`` parts of the same rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
