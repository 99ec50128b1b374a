"""A Lightning Trainer on ranks that exist already: nothing is launched, the process group is the pool's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_ddp_losses.testing import RankEnvironment
from tests.oracle import own

# one epoch: no logger, no checkpoints, no bars, no summary
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
    """A quiet CPU trainer over all ranks of the running group."""
    options = QUIET | {"barebones": False} | options
    plugins = [RankEnvironment(), *options.pop("plugins", [])]
    return Trainer(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, plugins=plugins, **options)


def fitted(
    module: LightningModule, strategy: str, data: Any, sizes: Sequence[int], **options: Any
) -> dict[str, Tensor]:
    """Weights after a fit on one batch, of all ranks or in one process; `data` has a row for each row of the batch."""
    if dist.is_initialized():
        trainer = make_trainer(strategy, **options)
        data = Subset(data, range(len(data))[own(sizes)])
    else:
        trainer = Trainer(accelerator="cpu", devices=1, **(QUIET | options))
    trainer.fit(module, DataLoader(data, batch_size=len(data)))
    return {name: value.detach() for name, value in module.named_parameters()}


@contextlib.contextmanager
def said_on_rank_zero() -> Iterator[list[str]]:
    """Yield what Lightning's `rank_zero_info` says inside the block; nothing on other ranks."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
