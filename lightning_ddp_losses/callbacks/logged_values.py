"""Logged values that must be the same on every rank: names that are reduced over ranks, values that decide, and epoch means.

A value decides if a callback or a scheduler monitors it: ranks that have different ones save, stop or slow down differently.

An epoch mean is ``self.log(..., on_epoch=True, sync_dist=True)``. Lightning divides the ranks' mean sum by their mean number of rows.
Plain DDP writes that second mean back into an integer tensor, which floors it: the logged value is too large if ``W`` does not divide the
rows. (Lightning 2.6.6, issue 21859; right under ``"ddp_losses"``.) The sums of a rank must be read before Lightning reduces them in place:
those of a validation epoch at its last batch, those of a training epoch at its end, or at its last batch too if another callback asks
for metrics earlier. All ranks' sums give the true mean at the end of the epoch. The logged value is read one stage later.

Legend: ``W`` ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_ddp_losses.callbacks.findings import Finding, differing, odd_ranks
from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed.fingerprint import hash_text

_HASH_BITS = 52  # exact in float64
_EQUAL = 1e-6  # relative
_ROUNDING = 1e-5  # relative to the mean of absolute values; ranks add float32 sums


class TrueMean(NamedTuple):
    """Holds the mean over the rows of all ranks.

    Attributes:
        mean: That mean.
        scale: Mean of the ranks' absolute sums, by which rounding is measured.
        rows: Rows of each rank.
    """

    mean: float
    scale: float
    rows: tuple[float, ...]


class LoggedValues:
    """Compares logged values between ranks, and epoch means with the true ones."""

    def __init__(self) -> None:
        self._keys: list[str] = []  # that this rank logs and reduces
        self._rows_before: dict[str, Tensor] = {}  # by Lightning's key, before anything was reduced
        self._names: list[str] = []  # of the means of the epoch that has just ended
        self._true_means: dict[str, TrueMean] = {}  # that may have been floored; the same on every rank

    # ------------------------------------------------------------------ names

    def hash_keys(self, trainer: Trainer, *, validation: bool = False) -> float:
        """Return a number of the names of logged values that need all ranks: with ``sync_dist``, or a metric."""
        results = _results_of_epoch(trainer, validation=validation)
        self._keys = sorted(f"{name} ({value.meta.fx})" for name, value in results.items() if _is_reduced(value))
        return _hash_of(self._keys)

    def describe_keys(self) -> str:
        """Return this rank's names as JSON."""
        return json.dumps(self._keys)

    # ------------------------------------------------------------------ an epoch, before and after Lightning has logged its means

    def see_batch_end(self, trainer: Trainer) -> None:
        """Remember numbers of rows that Lightning may reduce in place before they are asked for. (Does not wait for the device.)"""
        if not (trainer.validating or trainer.is_last_batch):
            return
        for key, result in _results_of_epoch(trainer, validation=trainer.validating).items():
            if _is_global_mean(result) and not compat.is_reduced(result):
                self._rows_before[key] = result.cumulated_batch_size.clone()

    def measure_epoch(self, trainer: Trainer, *, validation: bool = False) -> list[float]:
        """Return a hash of the names that are reduced, one of the names of means, then this rank's sum and rows of each."""
        keys = self.hash_keys(trainer, validation=validation)
        sums = dict(sorted(self._sums(_results_of_epoch(trainer, validation=validation))))
        self._names = list(sums)
        measured = [keys, _hash_of(sums)]
        for each in sums.values():
            measured += each
        return measured

    def _sums(self, results: Any) -> Iterator[tuple[str, tuple[float, float]]]:
        """Yield names with the sum of their values, each times its rows, and the number of rows."""
        for key, result in results.items():
            rows = self._rows_before.pop(key, None)
            if not _is_global_mean(result):
                continue
            if not compat.is_reduced(result):
                rows = result.cumulated_batch_size
            elif rows is None or "batch_end" in result.meta.fx:  # more was logged since it was remembered
                continue
            yield compat.epoch_name(results, result), (float(result.value), float(rows))

    def judge_epoch(self, table: Sequence[Sequence[float]]) -> list[Finding]:
        """Report other names, and remember the true means of names with rows that the number of ranks does not divide."""
        self._true_means = {}
        found = different_keys([row[0] for row in table])
        if len({row[1] for row in table}) > 1:  # other names per rank: they cannot be lined up
            return found
        for place, name in enumerate(self._names):
            totals = [row[2 + 2 * place] for row in table]
            rows = tuple(row[3 + 2 * place] for row in table)
            if sum(rows) % len(table):
                mean, scale = sum(totals) / sum(rows), sum(map(abs, totals)) / sum(rows)
                self._true_means[name] = TrueMean(mean, scale, rows)
        return found

    def measure_logged(self, trainer: Trainer) -> list[float]:
        """Return the means that may have been floored, a hash of the monitored names, then whether each is logged, and its value."""
        means = [float(trainer.callback_metrics.get(name, math.nan)) for name in self._true_means]
        values = _monitored_values(trainer)
        measured = [*means, _hash_of(values)]
        for value in values.values():
            measured += [float(value is not None), value or 0.0]
        return measured

    def judge_logged(self, table: Sequence[Sequence[float]], trainer: Trainer) -> list[Finding]:
        """Report means that are not the true ones, each once, and monitored values that differ."""
        number = len(self._true_means)
        found = self._wrong_means(table[0][:number])
        monitored = [row[number:] for row in table]
        if len({row[0] for row in monitored}) > 1:  # other monitors per rank: their names cannot be lined up
            return found
        return found + _different_values([row[1:] for row in monitored], list(_monitored_values(trainer)))

    def _wrong_means(self, logged: Sequence[float]) -> list[Finding]:
        """Compare rank 0's values; reduced ones are equal on every rank."""
        found = []
        for (name, true), value in zip(self._true_means.items(), logged, strict=True):
            # a value that is not a number is another fault's
            if abs(value - true.mean) > _ROUNDING * true.scale:
                values = tuple(f"{number:g} rows" for number in true.rows)
                texts: dict[str, Any] = {"value": value, "mean": true.mean, "rows": sum(true.rows)}
                found.append(Finding.of("F82", name=name, values=values, **texts))
        self._true_means = {}
        return found


def _hash_of(names: Iterable[str]) -> float:
    """Return one number for some names, exact as a float."""
    return float(hash_text("; ".join(names), _HASH_BITS))


def _results_of_epoch(trainer: Trainer, *, validation: bool = False) -> Any:
    """Return the values that training or validation has logged in this epoch, by Lightning's key."""
    loop: Any = trainer.fit_loop.epoch_loop
    return compat.logged_results(loop.val_loop if validation else loop)


def _is_reduced(value: Any) -> bool:
    meta = getattr(value, "meta", None)
    if meta is None:
        return False
    return not value.is_tensor or (meta.sync.should and not meta.sync.rank_zero_only)


def _is_global_mean(result: Any) -> bool:
    """Return whether a logged value is the mean of an epoch over all ranks, and was logged in this epoch."""
    meta = getattr(result, "meta", None)
    if meta is None or not result.is_tensor or result.has_reset:
        return False
    sync = meta.sync
    over_all_ranks = sync.should and not sync.rank_zero_only and sync.group is None
    return bool(over_all_ranks and meta.on_epoch and meta.is_mean_reduction)


def _monitored_values(trainer: Trainer) -> dict[str, float | None]:
    """Return the values that decide on checkpoints, early stopping or learning rates, as this rank has them; None if it has none."""
    monitors = [getattr(callback, "monitor", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    monitors += [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    found: dict[str, float | None] = {}
    for name in sorted({monitor for monitor in monitors if monitor and isinstance(monitor, str)}):
        value = trainer.callback_metrics.get(name)
        is_number = isinstance(value, Tensor) and value.numel() == 1
        found[name] = float(value) if is_number else None  # type: ignore[arg-type]
    return found


def different_keys(hashes: Sequence[float]) -> list[Finding]:
    """Report ranks that log other names, by a hash of them."""
    return differing(hashes, "F46", name="log keys")


def name_keys(finding: Finding, texts: Sequence[str]) -> Finding:
    """Name the keys that only some ranks log, from the texts of ``LoggedValues.describe_keys``."""
    names_by_rank: list[list[str]] = [json.loads(text) for text in texts]
    common = set.intersection(*map(set, names_by_rank))
    further = [[name for name in names if name not in common] for names in names_by_rank]
    only_some = sorted(set().union(*further))
    values = tuple(", ".join(names) or "nothing more" for names in further)
    return replace(finding, values=values, name=", ".join(only_some))


def _different_values(rows: Sequence[Sequence[float]], names: list[str]) -> list[Finding]:
    """Report monitored values that are not one number; a row holds for each name whether it is there, and its value."""
    found = []
    for place, name in enumerate(names):
        column = [row[2 * place + 1] if row[2 * place] else None for row in rows]
        # nowhere yet, or everywhere the same
        logged = [value for value in column if value is not None]
        if logged and not (len(logged) == len(rows) and _are_equal(logged)):
            shown = tuple("not logged" if value is None else f"{value:.6g}" for value in column)
            found.append(Finding.of("F55", ranks=odd_ranks(column), name=name, values=shown))
    return found


def _are_equal(values: Sequence[float]) -> bool:
    if math.isnan(values[0]):
        return all(map(math.isnan, values))
    return all(math.isclose(value, values[0], rel_tol=_EQUAL) for value in values)
