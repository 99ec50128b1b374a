"""SIGTERM reaches a rank in a validation: all ranks end after the same step. Lightning's own broadcast before each batch is gone."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import SIGTERMException
from pytorch_metric_learning.losses import ArcFaceLoss
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_losses import DDPLossStrategy
from tests.lightning_ranks import make_trainer
from tests.rank_pool import RankPool

BATCHES = 3  # of an epoch, on each rank


class Signalled(LightningModule):
    """Gets the signal in the validation of the first epoch, on some ranks."""

    def __init__(self, signalled: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.signalled = signalled
        self.encoder, self.loss = nn.Linear(4, 3), ArcFaceLoss(2, 3)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.loss(self.encoder(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        if self.global_rank in self.signalled and self.current_epoch == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(signalled: tuple[int, ...], epochs: int) -> tuple[int, bool, list[str]]:
    """The steps of a fit, whether the signal ended it, and the collectives of torch.distributed that Lightning calls by name in it."""
    data = TensorDataset(torch.randn(2 * BATCHES, 4), torch.arange(2 * BATCHES) % 2)
    trainer = make_trainer(DDPLossStrategy(), max_epochs=epochs, limit_val_batches=1, num_sanity_val_steps=0)
    broadcasts: list[str] = []
    broadcast = dist.broadcast

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        broadcasts.append(str(tuple(tensor.shape)))
        return broadcast(tensor, *args, **kwargs)

    has_ended = False
    dist.broadcast = counted
    try:
        trainer.fit(Signalled(signalled), DataLoader(data, batch_size=2), DataLoader(data, batch_size=2))
    except SIGTERMException:
        has_ended = True
    finally:
        dist.broadcast = broadcast
    return trainer.global_step, has_ended, broadcasts


@pytest.mark.parametrize("signalled", [(0,), (1,), (0, 1)], ids=str)
def test_a_signal_in_a_validation_ends_all_ranks_after_the_next_step(
    pool: RankPool, signalled: tuple[int, ...]
) -> None:
    for steps, has_ended, _ in pool.run(2, fit, signalled, 3):
        assert (steps, has_ended) == (BATCHES + 1, True)


def test_no_batch_has_a_broadcast_for_the_signal(pool: RankPool) -> None:
    short, long = (pool.run(2, fit, (), epochs) for epochs in (1, 3))
    for (_, _, few), (steps, has_ended, more) in zip(short, long, strict=True):
        assert (steps, has_ended) == (3 * BATCHES, False)
        assert more.count("(1,)") == few.count("(1,)")
