"""Buffers, queues, metric states and devices that go apart."""

from __future__ import annotations

from typing import Any

import pytorch_metric_learning.losses as pml
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_ddp_losses import GlobalBatchLoss
from tests.callbacks.harness import WIDTH, Case, Subject, slices

__all__ = ["CASES"]


class Memory(Subject):
    """A cross-batch memory: of one rank's rows, or of all ranks'."""

    def build(self) -> None:
        memory = pml.CrossBatchMemory(pml.ContrastiveLoss(), embedding_size=WIDTH, memory_size=64)
        self.contrast: nn.Module = (memory if self.sick else GlobalBatchLoss(memory)).double()

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features, labels, index) + self.contrast(self.encoder(features), labels)


class OwnFirst(Subject):
    """Rows of all ranks in a queue, one's own first."""

    def build(self) -> None:
        self.register_buffer("queue", torch.zeros(64, WIDTH, dtype=torch.float64))

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        rows = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, features.contiguous())
        if self.odd:
            rows.insert(0, rows.pop(dist.get_rank()))
        self.queue[:] = torch.cat([*rows, self.queue])[:64]
        return super().objective(features, labels, index)


class Centers(nn.Module):
    """A running sum of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH, dtype=torch.float64))


class CenterLoss(Centers):
    pass


class RunningSum(Subject):
    """A loss that keeps a sum of its own rank's rows in a buffer."""

    def build(self) -> None:
        self.center = CenterLoss()

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        seen = features.sum(0)
        if not self.sick:
            dist.all_reduce(seen)
        self.center.total += seen
        return super().objective(features, labels, index)


class Normalised(Subject):
    """Batch norm; the data of one rank lie elsewhere."""

    def build(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(self.norm(features + (20.0 if self.odd else 0.0)), labels, index)

    def train_dataloader(self) -> Any:
        return DataLoader(
            [
                (x.repeat(8, 1) + 0.01 * torch.arange(32)[:, None], y.repeat(8))
                for x, y in slices(dist.get_world_size(), dist.get_rank())
            ],
            None,
        )


class OurNorm(nn.Identity):
    """Stands for a layer that synchronises on the CPU."""


class Convert(LayerSync):
    def apply(self, model: nn.Module) -> nn.Module:
        for name, child in model.named_children():
            setattr(model, name, OurNorm() if isinstance(child, nn.BatchNorm1d) else child)
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        return model


class HiddenNorm(Subject):
    """A projector with batch norm, in a list."""

    def build(self) -> None:
        projector = nn.Sequential(nn.BatchNorm1d(WIDTH, dtype=torch.float64))
        if self.sick:
            self.projectors = [projector]
        else:
            self.norm = projector[0]


class Collected(Metric):
    """Keeps what it sees; gathered item by item, or as one."""

    def __init__(self, reduce: str | None) -> None:
        super().__init__()
        self.add_state("values", default=[], dist_reduce_fx=reduce)

    def update(self, value: Tensor) -> None:
        self.values.append(value)

    def compute(self) -> Tensor:
        return (
            torch.cat([v.reshape(-1).double() for v in self.values]).mean() if len(self.values) else torch.tensor(0.0)
        )


class Validated(Subject):
    reduce: str | None = None

    def build(self) -> None:
        self.collected = Collected(self.reduce)

    def val_dataloader(self) -> Any:
        return slices(dist.get_world_size(), dist.get_rank())

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.collected.update(batch[0].mean(0))

    def on_validation_epoch_end(self) -> None:
        self.collected.compute()
        self.collected.reset()


class FewerUpdates(Validated):
    """One rank updates a metric less often."""

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        if not (self.odd and index == 1):
            super().validation_step(batch, index)


class OtherDtype(Validated):
    """One rank's state has another dtype."""

    reduce = "cat"

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.collected.update(batch[0].mean(0).float() if self.odd else batch[0].mean(0))


class MetricElsewhere(Subject):
    """A metric in a list, which nobody moves."""

    def build(self) -> None:
        self.metrics = [Collected("cat").to("meta" if self.sick else "cpu")]


class Threads(Subject):
    """nn.DataParallel inside."""

    def build(self) -> None:
        if self.sick:
            self.threads = nn.DataParallel(nn.Identity())


class Scale(nn.Module):
    """Multiplies by a buffer that differs per rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.register_buffer("by", torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.by


class TwoForwards(Subject):
    """A DDP of the user's own runs twice before backward, while its buffer is this rank's."""

    def configure_model(self) -> None:
        if "views" not in vars(self):
            self.__dict__["views"] = DistributedDataParallel(Scale())

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        views = self.__dict__["views"]
        views.module.by.data.fill_(1.0 + dist.get_rank())
        first = views(features)
        if self.sick:
            views.module.by.data.fill_(1.0 + dist.get_rank())
            first = first + views(features)
        return super().objective(features, labels, index) + first.sum()


def convert(sick: bool) -> list[LayerSync]:
    return [Convert()]


NORMS = {"plugins": convert}

CASES = [
    Case(Memory, "F64", "BufferSyncCheck", "contrast.embedding_memory"),
    Case(Memory, "F64", "BufferSyncCheck", "contrast.embedding_memory", strategy="ddp_losses"),
    Case(OwnFirst, "F26", "BufferSyncCheck", "queue"),
    Case(RunningSum, "F49", "BufferSyncCheck", "center.total"),
    Case(Normalised, "F59", "BufferSyncCheck", "batch norm", step=4, ranks=()),
    Case(HiddenNorm, "F60", "BufferSyncCheck", "projectors[0]", ranks=(), options=NORMS),
    Case(FewerUpdates, "F51", "BufferSyncCheck", "collected.values", step=3),
    Case(OtherDtype, "F52", "BufferSyncCheck", "collected.values", step=3),
    Case(TwoForwards, "F41", "BufferSyncCheck", "DistributedDataParallel"),
    Case(MetricElsewhere, "F50", "DeviceCheck", "self.metrics[0]", ranks=()),
    Case(Threads, "F73", "DeviceCheck", "threads", ranks=()),
]
