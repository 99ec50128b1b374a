"""What a finding advises is done, and the logged value is then that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryF1Score

from lightning_ddp_losses import DDPChecks, gather_predictions, synced
from lightning_ddp_losses.callbacks import FAULTS
from lightning_ddp_losses.testing import RankPool
from tests.fits import make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders")

ROWS = 8


class Evaluated(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)


class SomeHaveBoxes(Evaluated):
    """Even rows have boxes. The code of F46's page runs in each step."""

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        row = int(batch[0])
        exec(FAULTS["F46"].after, {"self": self, "has_boxes": row % 2 == 0, "box_loss": 0.1 * row})


class Scored(Evaluated):
    """Logs a score that is no mean of rows as F55's fix says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.seen = way, list[Any]()
        self.score = synced(BinaryF1Score()) if way == "synced" else BinaryF1Score()

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.seen.append(predicted(batch[0]))
        self.score.update(*predicted(batch[0]))

    def on_validation_epoch_end(self) -> None:
        if self.way == "gather_predictions":
            rows, labels = gather_predictions(self.trainer, self.seen)
            self.score.reset()
            self.score.sync_on_compute = False
            self.score.update(rows, labels)
        self.log("val_f1", self.score.compute(), sync_dist=True)


class LossOfARank(Evaluated):
    """Logs a loss of this rank's rows with the option that F56's fix names."""

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", 0.1 * batch[0].float().mean(), sync_dist=True)


class ScoredOnAll(Scored):
    """F53's fix: every rank computes, and rank 0 uses the value."""

    def on_validation_epoch_end(self) -> None:
        value = self.score.compute()
        if self.trainer.is_global_zero:
            self.shown = value
        self.log("val_f1", value, sync_dist=True)


def predicted(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Predictions and labels of some rows."""
    return (rows % 3 == 0).long(), (rows < 3).long()


MODELS: dict[str, Any] = {
    "F46": SomeHaveBoxes,
    "F53": lambda: ScoredOnAll("synced"),
    "F56": LossOfARank,
    "F55, synced": lambda: Scored("synced"),
    "F55, gather_predictions": lambda: Scored("gather_predictions"),
}
EXPECTED = {
    "F46": {"box_loss": sum(0.1 * row for row in range(0, ROWS, 2)) / (ROWS / 2)},
    "F56": {"val_loss": sum(0.1 * row for row in range(ROWS)) / ROWS},
}


def validate(name: str, strategy: str) -> tuple[dict[str, float], list[str]]:
    checks = DDPChecks(file=False)
    trainer = make_trainer(strategy, callbacks=[checks], use_distributed_sampler=True)
    rows = DataLoader(TensorDataset(torch.arange(ROWS)), batch_size=1)
    trainer.validate(MODELS[name](), rows, verbose=False)
    found = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return found, [finding.fault for finding in checks.findings]


@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
@pytest.mark.parametrize("name", MODELS)
def test_the_advised_code_logs_the_value_of_one_process(pool: RankPool, name: str, strategy: str) -> None:
    f1 = float(BinaryF1Score()(*predicted(torch.arange(ROWS))))
    expected = EXPECTED.get(name, {"val_f1": f1})
    for found, faults in pool.run(2, validate, name, strategy):
        assert found == pytest.approx(expected)
        assert not {"F46", "F53", "F55", "F56"} & set(faults)
