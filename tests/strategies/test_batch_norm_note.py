"""The strategies say once which batch norms are not synchronised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_losses import DDPLossStrategy, GlobalBatchLoss, ModelParallelLossStrategy
from tests.each_rank import each_rank
from tests.fits import Trained, make_trainer, said_on_rank_zero

WIDTH = 4
STRATEGIES = [DDPLossStrategy, ModelParallelLossStrategy]


class NormedRows(nn.Module):
    """A formula on the rows of all ranks, with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        return self.norm(rows).square().mean()


class OnRows(Trained):
    """Trains on any rows."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(16, WIDTH)), batch_size=4)


class InLoss(OnRows):
    """A batch norm in a loss over the rows of all ranks."""

    def build(self) -> None:
        self.encoder, self.loss = nn.Linear(WIDTH, WIDTH), GlobalBatchLoss(NormedRows())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(self.encoder(batch[0]))


class Normed(OnRows):
    """A head behind a batch norm."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.norm, self.head, self.frozen = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1), frozen

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            torch.distributed.fsdp.fully_shard(self.head, mesh=self.device_mesh["data_parallel"])

    def on_train_start(self) -> None:
        self.norm.train(not self.frozen)

    val_dataloader = OnRows.train_dataloader

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.head(self.norm(batch[0])).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def said(made: Callable[[], Any], module: LightningModule, stage: str = "fit", **options: Any) -> list[str]:
    with said_on_rank_zero() as texts:
        getattr(make_trainer(made(), max_epochs=2, **options), stage)(module)
    return [text for text in texts if text.startswith("Batch norm (")]


@pytest.mark.parametrize("made", STRATEGIES)
@each_rank(2)
def test_a_norm_of_one_rank_is_named_once(made: Callable[[], Any]) -> None:
    found = said(made, Normed())
    assert len(found) == (dist.get_rank() == 0)
    assert all(text.startswith("Batch norm (norm) is not synchronised") for text in found)


@pytest.mark.parametrize("made", STRATEGIES)
@each_rank(2)
def test_other_norms_are_not_named(made: Callable[[], Any]) -> None:
    assert said(made, Normed(), sync_batchnorm=True) == []
    assert said(made, Normed(frozen=True)) == []
    assert said(made, Normed(), "validate") == []


@each_rank(2)
def test_a_norm_of_all_rows_is_not_named() -> None:
    assert said(DDPLossStrategy, InLoss()) == []


@each_rank(1)
def test_one_rank_says_nothing() -> None:
    assert said(DDPLossStrategy, Normed()) == []
