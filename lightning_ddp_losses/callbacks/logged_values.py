"""What a module logs, as it must be the same on every rank: the names that are reduced over ranks, and the values that decide.

A value decides where a callback or a scheduler monitors it: ranks that have different ones save, stop or slow down differently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_ddp_losses.callbacks.findings import Finding, odd_ranks
from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed.fingerprint import hash_text

_HASH_BITS = 52  # exact in float64
_EQUAL = 1e-6  # relative


def hash_names(names: Sequence[str] | Mapping[str, Any]) -> float:
    """Return one number for some names, exact as a float."""
    return float(hash_text("; ".join(names), _HASH_BITS))


def results_of_epoch(trainer: pl.Trainer, *, validation: bool = False) -> Any:
    """Return what training or validation has logged in this epoch, by Lightning's key."""
    loop: Any = trainer.fit_loop.epoch_loop
    if validation:
        loop = loop.val_loop
    return compat.logged_results(loop)


def reduced_keys(trainer: pl.Trainer, *, validation: bool = False) -> list[str]:
    """Return the names of logged values that need all ranks: with ``sync_dist``, or a metric."""
    results = results_of_epoch(trainer, validation=validation)
    return sorted(f"{name} ({value.meta.fx})" for name, value in results.items() if _is_reduced(value))


def _is_reduced(value: Any) -> bool:
    meta = getattr(value, "meta", None)
    if meta is None:
        return False
    return not value.is_tensor or (meta.sync.should and not meta.sync.rank_zero_only)


def monitored_values(trainer: pl.Trainer) -> dict[str, float | None]:
    """Return the values that decide on checkpoints, early stopping or learning rates, as this rank has them; None where it has none."""
    found: dict[str, float | None] = {}
    for name in sorted(set(_monitors(trainer))):
        value = trainer.callback_metrics.get(name)
        found[name] = None
        if isinstance(value, Tensor) and value.numel() == 1:
            found[name] = float(value)
    return found


def _monitors(trainer: pl.Trainer) -> Iterator[str]:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str):
            yield monitor
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor:
            yield config.monitor


def different_keys(hashes: list[float]) -> list[Finding]:
    """Report ranks that log other names, by a hash of them."""
    if len(set(hashes)) == 1:
        return []
    return [
        Finding(
            "F46",
            "names of logged values that are reduced over ranks",
            "the same on every rank, else values of other names are added up, or ranks wait for ever",
            odd_ranks(hashes),
            name="log keys",
            fix="Log the same names on every rank; a value of one rank alone needs sync_dist=False and rank_zero_only=True.",
        )
    ]


def different_values(rows: Sequence[Sequence[float]], names: list[str]) -> list[Finding]:
    """Report monitored values that are not one number; a row holds for each name whether it is there, and its value."""
    found = []
    for place, name in enumerate(names):
        is_logged = [bool(row[2 * place]) for row in rows]
        values = [row[2 * place + 1] for row in rows]
        # nowhere yet, or everywhere the same
        if not any(is_logged) or (all(is_logged) and _are_equal(values)):
            continue
        column = [value if logged else None for value, logged in zip(values, is_logged, strict=True)]
        shown = tuple("not logged" if value is None else f"{value:.6g}" for value in column)
        fix = f'Log it with sync_dist=True: self.log("{name}", ..., sync_dist=True).'
        what = f"`{name}`, which a callback or scheduler watches"
        found.append(Finding("F55", what, "one value on all ranks", odd_ranks(column), name, shown, fix))
    return found


def _are_equal(values: Sequence[float]) -> bool:
    if math.isnan(values[0]):
        return all(map(math.isnan, values))
    return all(math.isclose(value, values[0], rel_tol=_EQUAL) for value in values)
