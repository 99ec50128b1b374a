"""What a LightningModule logs: the names that are reduced over ranks, and the values that callbacks and schedulers watch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from torch import Tensor


def reduced_keys(trainer: pl.Trainer, *, validation: bool = False) -> list[str]:
    """Names of logged values that need all ranks: with ``sync_dist``, or a metric."""
    loop = trainer.fit_loop.epoch_loop.val_loop if validation else trainer.fit_loop.epoch_loop
    return sorted(f"{name} ({value.meta.fx})" for name, value in loop._results.items() if _is_reduced(value))


def _is_reduced(value: Any) -> bool:
    meta = getattr(value, "meta", None)
    if meta is None:
        return False
    return not value.is_tensor or (meta.sync.should and not meta.sync.rank_zero_only)


def watched(trainer: pl.Trainer) -> dict[str, float | None]:
    """Values that decide on checkpoints, early stopping or learning rates, as this rank has them; None where it has none."""
    found: dict[str, float | None] = {}
    for name in sorted(set(_monitors(trainer))):
        value = trainer.callback_metrics.get(name)
        found[name] = float(value) if isinstance(value, Tensor) and value.numel() == 1 else None
    return found


def _monitors(trainer: pl.Trainer) -> Iterator[str]:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str):
            yield monitor
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.monitor:
            yield config.monitor
