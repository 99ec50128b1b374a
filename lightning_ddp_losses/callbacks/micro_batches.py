"""The micro-batches that Lightning accumulates: how far the mean of their means is from the mean over all their rows.

Lightning divides each micro-batch's loss by their number, so that micro-batches count alike whatever each of them was divided by
itself. Where those divisors differ, an optimizer step is not that of one batch of all their rows.

Legend: ``M`` micro-batches of a window, ``v`` the loss of one on one rank, ``d`` what it is divided by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_ddp_losses.callbacks.element_weights import ElementWeight
from lightning_ddp_losses.callbacks.findings import Finding, Remark

_MOST = 64  # micro-batches of a window that are looked at
_SHOWN = 8  # of them in a message
_EQUAL = 1e-6  # relative: weights in half precision are computed in float32
_FIX = (
    'Where the loss of all rows of a window is meant: DDPLossStrategy(accumulation="window"), with GlobalBatchLoss around a loss of '
    "torch.nn or pytorch-metric-learning, and global_mean(total, count) for a formula of your own."
)


class MicroBatches:
    """What this rank knows of the micro-batches of the window that runs."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin a window."""
        self._values: list[float] = []
        self._weights: list[Sequence[ElementWeight]] = []

    def add(self, value: float, weights: Sequence[ElementWeight], factor: float) -> None:
        """Note a micro-batch.

        Args:
            value: What ``training_step`` returned.
            weights: The reductions of what is back-propagated, read.
            factor: What makes that into the value: Lightning's division and the scaler's factor undone.
        """
        self._values.append(value)
        self._weights.append([_times(weight, factor) for weight in weights])

    def row(self) -> list[float]:
        """Return M, then M values and M divisors; M is 0 where a window is one micro-batch, or divisors are not known."""
        several = 1 < len(self._values) <= _MOST
        # a column for each reduction that is known in every micro-batch
        known = [list(filter(_is_known, weights)) for weights in self._weights]
        if not several or len(set(map(len, known))) != 1 or not known[0]:
            return [0.0]
        columns = [list(map(_divisor_of, column)) for column in zip(*known, strict=True)]
        # the one that differs most decides
        divisors = max(columns, key=_spread)
        is_whole = all(len(weights) == len(known[0]) for weights in self._weights)
        is_whole = is_whole and all(_spread(c) < 1 + _EQUAL or _in_proportion(c, divisors) for c in columns)
        values = self._values
        if not is_whole:  # a mean over all rows would need the value of each term
            values = [math.nan] * len(values)
        return [float(len(values)), *values, *divisors]


def _times(weight: ElementWeight, factor: float) -> ElementWeight:
    return ElementWeight(float(weight.weight) * factor, weight.elements, kind=weight.kind)


def _is_known(weight: ElementWeight) -> bool:
    return weight.kind != "unknown"


def _divisor_of(weight: ElementWeight) -> float:
    """Return what a reduction divides by; nan where its elements weigh nothing."""
    size = abs(float(weight.weight))
    return 1.0 / size if size else math.nan


def _spread(divisors: Sequence[float]) -> float:
    """Return how many times the largest is the smallest; 1 where one is not known."""
    if any(map(math.isnan, divisors)) or not max(divisors):
        return 1.0
    return max(divisors) / min(divisors) if min(divisors) else math.inf


def _in_proportion(left: Sequence[float], right: Sequence[float]) -> bool:
    pairs = zip(left, right, strict=True)
    return all(math.isclose(a * right[0], b * left[0], rel_tol=_EQUAL) for a, b in pairs)


def uneven_micro_batches(rows: Sequence[Sequence[float]], bias: float) -> list[Finding]:
    """Report a window whose micro-batches have divisors further apart than ``bias``.

    Args:
        rows: Of each rank, from ``MicroBatches.row``.
        bias: 1.1 is 10%.
    """
    numbers = {row[0] for row in rows if row}
    if len(numbers) != 1 or numbers == {0.0}:
        return []
    number = int(numbers.pop())
    tables = [list(row[1:]) for row in rows]
    if all(table == tables[0] for table in tables):  # one loss, which is global
        tables = tables[:1]
    # of each micro-batch over all ranks: what it is divided by, its sum, and its mean
    by_rank = [table[number : 2 * number] for table in tables]
    divisors = [math.fsum(column) for column in zip(*by_rank, strict=True)]
    if _spread(divisors) <= bias:
        return []
    totals, means = [], []
    for m, divisor in enumerate(divisors):
        total = math.fsum(table[m] * table[number + m] for table in tables if table[number + m])
        mean = math.fsum(table[m] for table in tables) / len(tables)
        if divisor:
            mean = total / divisor
        totals.append(total)
        means.append(mean)
    # what counts micro-batches alike, and what counts rows alike
    of_means, of_rows = math.fsum(means) / number, math.fsum(totals) / math.fsum(divisors)
    shown = ", ".join(f"{divisor:g}" for divisor in divisors[:_SHOWN])
    if number > _SHOWN:
        shown += ", ..."
    what = f"the {number} micro-batches of an accumulation window count alike, and are divided by {shown}"
    if math.isfinite(of_means) and math.isfinite(of_rows):
        what += f": the mean of their means is {of_means:.6g}, that over all their rows {of_rows:.6g}"
        if of_rows:
            what += f", {abs(of_means / of_rows - 1):.2%} apart"
    return [Remark("F30", what, name="accumulation", fix=_FIX)]
