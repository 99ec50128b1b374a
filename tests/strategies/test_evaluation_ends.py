"""A rank that fails in an evaluation tells the others after their last batch, without checks: nobody waits in what comes next."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_losses import DDPLossStrategy
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_errors
from tests.lightning_ranks import make_trainer


class Unreadable(RuntimeError):
    pass


class Rows(Dataset[Tensor]):  # on rank 1 one of them cannot be read
    def __init__(self, broken: bool) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        if self.broken and index > 15 and dist.get_rank() == 1:
            raise Unreadable("row 16")
        return torch.full((3,), float(index))


class Fails(LightningModule):
    """In a step of rank 1, or where it gets its rows; the peers go on to a metric over all ranks."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where = nn.Linear(3, 1), where
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.layer(batch).mean()

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        if self.where == "step" and index == 1 and dist.get_rank() == 1:
            raise Unreadable("row 16")
        return batch

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.mean.update(self.predict_step(batch, index))
        self.log("mean", self.mean, on_epoch=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(stage: str, where: str) -> int:
    """Return how many handshakes an evaluation without a failure opens."""
    # batches are of one rank each, as Lightning injects no sampler here
    loader = DataLoader(Rows(where == "data"), batch_size=4)
    trainer = make_trainer(DDPLossStrategy(check_calls=False))
    before = handshake.number_opened()
    if stage == "fit":
        trainer.fit(Fails(where), DataLoader(Rows(False), batch_size=4), loader)
    else:
        getattr(trainer, stage)(Fails(where), loader, **({} if stage == "predict" else {"verbose": False}))
    return handshake.number_opened() - before


@pytest.mark.parametrize("where", ["step", "data"])
@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_failure_of_one_rank_ends_all(pool: RankPool, stage: str, where: str) -> None:
    errors = pool.errors(3, run, stage, where)
    assert [error.type for error in errors] == ["PeerError", "Unreadable", "PeerError"]
    assert_errors(errors[::2], "rank 1", "Unreadable: row 16")


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_that_is_well_ends_well(pool: RankPool, stage: str) -> None:
    assert len(set(pool.run(2, run, stage, "nowhere"))) == 1
