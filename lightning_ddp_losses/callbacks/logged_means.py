"""Epoch means as they were logged, beside the means over the rows of all ranks: ``self.log(..., on_epoch=True, sync_dist=True)``.

Lightning divides the ranks' mean sum by their mean number of rows. Plain DDP writes that second mean back into an integer tensor, which
floors it: the logged value is too large wherever ``W`` does not divide the rows. (Lightning 2.6.6, issue 21859; right under
``"ddp_losses"``.)

What a rank has added up must be read before Lightning reduces it in place: of a validation epoch that is at its last batch, of a training
epoch at its end, or at its last batch too, where another callback asks for metrics earlier. The true means come of all ranks' sums at the
end of the epoch; what was logged is read where it is kept, one stage later, and so is right whatever the strategy does.

Legend: ``W`` ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_ddp_losses.callbacks.findings import Finding
from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed.fingerprint import hash_text

_ROUNDING = 1e-5  # relative to the mean of absolute values; ranks add float32 sums
_HASH_BITS = 52  # exact in float64
_FIX = (
    "Lightning floors the ranks' mean number of rows where the number of ranks does not divide the rows. Take strategy='ddp_losses', "
    "which does not, log a torchmetrics.MeanMetric, or give the ranks rows that their number divides."
)


class EpochSum(NamedTuple):
    """Holds what one rank has added up of one name in an epoch.

    Attributes:
        total: The values, each times its rows.
        rows: The rows.
    """

    total: float
    rows: float


class TrueMean(NamedTuple):
    """Holds the mean over the rows of all ranks.

    Attributes:
        mean: That mean.
        scale: The mean of the ranks' absolute sums, by which rounding is measured.
        rows: The rows of each rank.
    """

    mean: float
    scale: float
    rows: tuple[float, ...]


class LoggedMeans:
    """Compares the epoch means that were logged with the true ones, in two stages: what ranks add up, then what was made of it."""

    def __init__(self) -> None:
        self._rows_before: dict[str, Tensor] = {}  # by Lightning's key, before anything was reduced
        self._names: list[str] = []  # of the epoch that has just ended
        self._true_means: dict[str, TrueMean] = {}  # those that may have been floored; the same on every rank

    def see_batch_end(self, results: Mapping[str, Any]) -> None:
        """Remember numbers of rows that Lightning may reduce in place before they are asked for. (Does not wait for the device.)"""
        for key, result in results.items():
            if _is_global_mean(result) and not compat.is_reduced(result):
                self._rows_before[key] = result.cumulated_batch_size.clone()

    # ------------------------------------------------------------------ the end of an epoch

    def measure_sums(self, results: Any) -> list[float]:
        """Return a hash of the names, then this rank's sum and rows of each."""
        sums = dict(sorted(self._sums(results)))
        self._names = list(sums)
        measured = [float(hash_text("; ".join(sums), _HASH_BITS))]
        for each in sums.values():
            measured += each
        return measured

    def _sums(self, results: Any) -> Iterator[tuple[str, EpochSum]]:
        for key, result in results.items():
            rows = self._rows_before.pop(key, None)
            if not _is_global_mean(result):
                continue
            if not compat.is_reduced(result):
                rows = result.cumulated_batch_size
            elif rows is None or "batch_end" in result.meta.fx:  # more was logged since it was remembered
                continue
            yield compat.epoch_name(results, result), EpochSum(float(result.value), float(rows))

    def judge_sums(self, table: Sequence[Sequence[float]]) -> None:
        """Remember the true means of names whose rows the number of ranks does not divide."""
        self._true_means = {}
        if len({row[0] for row in table}) > 1:  # other names per rank: they cannot be lined up
            return
        for place, name in enumerate(self._names):
            sums = [EpochSum(*row[1 + 2 * place : 3 + 2 * place]) for row in table]
            rows = sum(each.rows for each in sums)
            if rows % len(table) == 0:
                continue
            mean = sum(each.total for each in sums) / rows
            scale = sum(abs(each.total) for each in sums) / rows
            self._true_means[name] = TrueMean(mean, scale, tuple(each.rows for each in sums))

    # ------------------------------------------------------------------ after Lightning has logged

    @property
    def number(self) -> int:
        """How many means ``measure_logged`` returns; the same on every rank."""
        return len(self._true_means)

    def measure_logged(self, metrics: Mapping[str, Tensor]) -> list[float]:
        """Return what was logged of each name that may have been floored; NaN where nothing was.

        Args:
            metrics: The trainer's ``callback_metrics``.
        """
        return [float(metrics.get(name, math.nan)) for name in self._true_means]

    def judge_logged(self, logged: Sequence[float]) -> list[Finding]:
        """Report means that are not the true ones, each once.

        Args:
            logged: What rank 0 measured; reduced values are equal on every rank.
        """
        found = []
        for (name, true), value in zip(self._true_means.items(), logged, strict=True):
            # of what is not a number another fault speaks
            if abs(value - true.mean) > _ROUNDING * true.scale:
                what = f"the epoch mean of `{name}` was logged as {value:.8g}"
                expected = f"{true.mean:.8g}, the mean over the {sum(true.rows):g} rows of all ranks"
                values = tuple(f"{rows:g} rows" for rows in true.rows)
                found.append(Finding("F82", what, expected, (), name, values, _FIX))
        self._true_means = {}
        return found


def _is_global_mean(result: Any) -> bool:
    """Say whether a logged value is the mean of an epoch over all ranks, and was logged in this epoch."""
    meta = getattr(result, "meta", None)
    if meta is None or not result.is_tensor or result.has_reset:
        return False
    sync = meta.sync
    over_all_ranks = sync.should and not sync.rank_zero_only and sync.group is None
    return bool(over_all_ranks and meta.on_epoch and meta.is_mean_reduction)
