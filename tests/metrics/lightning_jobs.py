"""Small LightningModules that train on a metric, on ranks and in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics as tm
from lightning.pytorch import LightningModule, Trainer
from pytorch_metric_learning.losses import SupConLoss
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_losses import GlobalBatchLoss, differentiable
from tests.fits import QUIET, make_trainer
from tests.oracle import Encoder, Task, batches, cuts

TASK = Task()


class Job(LightningModule):
    """1 - Pearson of the first output with a target, beside other losses; the metric is an attribute and is logged."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = Encoder(TASK).double()
        self.kind = kind
        self.build()

    def build(self) -> None:
        self.metric: Any = differentiable(tm.MetricCollection([tm.PearsonCorrCoef(), tm.MeanSquaredError()]))
        self.supcon: nn.Module = GlobalBatchLoss(SupConLoss())
        self.accumulated = differentiable(tm.R2Score())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        embeddings = self.encoder(x)
        target = x.sum(1)
        values = self.metric(embeddings[:, 0], target)
        loss: Tensor = 1 - values["PearsonCorrCoef"] + 0.1 * values["MeanSquaredError"]
        if self.kind == "beside others":
            loss = loss + 0.3 * self.supcon(embeddings, labels) + embeddings.square().mean()
        self.accumulated.update(embeddings[:, 1], target)
        self.log_dict(self.metric, on_step=True, on_epoch=True, batch_size=len(x))
        self.log("r2", self.accumulated, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.metric["PearsonCorrCoef"](self.encoder(batch[0])[:, 0], batch[0].sum(1)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.encoder.parameters(), lr=0.05)


class Alone(Job):
    """None of our code."""

    def build(self) -> None:
        class Wide(tm.MeanSquaredError):
            pass

        members = {"PearsonCorrCoef": tm.PearsonCorrCoef(), "MeanSquaredError": Wide()}
        self.metric = tm.MetricCollection(members, compute_groups=False)
        self.supcon = SupConLoss()
        self.accumulated = tm.R2Score()
        for metric in (*self.metric.values(), self.accumulated):
            metric.set_dtype(torch.float64)


JOBS = ("alone in the loss", "beside others")


def fit(cls: type[Job], kind: str, strategy: str | None, even: bool, accumulate: int) -> dict[str, Any]:
    """Weights, logged values and values per step after a short fit."""
    module = cls(kind)
    world = dist.get_world_size() if strategy else 1
    rank = dist.get_rank() if strategy else 0
    part = cuts(TASK.rows, world, even=even)[rank]
    data = [(x[part], labels[part]) for x, labels in batches(TASK)]
    loader = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "max_epochs": 2}
    alone = partial(Trainer, accelerator="cpu", devices=1, **QUIET)
    trainer = (partial(make_trainer, strategy) if strategy else alone)(**options)
    trainer.fit(module, loader, loader)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"weights": {n: p.detach() for n, p in module.named_parameters()}, "logged": logged}
