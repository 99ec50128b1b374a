"""A quiet Lightning Trainer on the ranks of a benchmark."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from lightning_ddp_losses.testing import RankEnvironment

__all__ = ["QUIET", "make_trainer"]

QUIET: dict[str, Any] = {
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
}


def make_trainer(strategy: str | Strategy, **options: Any) -> Trainer:
    """Return a trainer on CPUs over all ranks of the running group."""
    plugins = [RankEnvironment(), *options.pop("plugins", [])]
    return Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, plugins=plugins, **(QUIET | options)
    )
