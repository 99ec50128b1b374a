"""Losses that are missing, not finite, zero, or of unlike weight; logged values that are not one number."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.callbacks.harness import CLASSES, Case, Subject, slices

__all__ = ["CASES"]


class NotANumber(Subject):
    """The loss of one rank is NaN at its third batch."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        loss = super().objective(features, labels, index)
        return loss * float("nan") if self.odd and index == 2 else loss


class MissingLoss(Subject):
    """One rank skips a step."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
        return None if self.odd and index == 1 else super().training_step(batch, index)


class ZeroFromTheStart(Subject):
    """One rank's loss selects nothing."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        loss = super().objective(features, labels, index)
        return loss * 0 if self.odd else loss


class MeanOfMeans(Subject):
    """Targets that are ignored on one rank only."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        targets = labels.clone()
        if self.odd:
            targets[:3] = -100
        return nn.functional.cross_entropy(self.head(self.encoder(features)), targets)


class GlobalMean(Subject):
    """Healthy: the same targets, each rank's sum divided by the mean number over ranks. Sick: by its own."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        own = len(labels) - 3 * dist.get_rank() % len(labels)
        number = torch.tensor(float(own))
        if not self.sick:
            dist.all_reduce(number)
            number = number / dist.get_world_size()
        logits = self.head(self.encoder(features))[:own]
        return nn.functional.cross_entropy(logits, labels[:own], reduction="sum") / number


class Watched(Subject):
    """Early stopping on a value that each rank has for itself."""

    def val_dataloader(self) -> Any:
        return slices(dist.get_world_size(), dist.get_rank())

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val_loss", self.objective(*batch, index), sync_dist=not self.sick, batch_size=4)


class OtherKeys(Subject):
    """Each rank logs under a name of its own."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
        loss = self.objective(*batch, index)
        name = f"loss_{dist.get_rank()}" if self.sick else "loss"
        self.log(name, loss.detach(), on_step=False, on_epoch=True, sync_dist=True, batch_size=4)
        return loss


class OtherValidationKeys(Watched):
    """The same in validation."""

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        name = f"val_loss_{dist.get_rank()}" if self.sick else "val_loss"
        self.log(name, self.objective(*batch, index), sync_dist=True, batch_size=4)


class FlooredMean(Subject):
    """A row more on one rank, which the number of ranks does not divide."""

    def rows(self, index: int) -> int:
        return 4 + (self.odd and index == 0)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
        loss = self.objective(*batch, index)
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "sync_dist": True}
        self.log("mean_loss", loss.detach(), batch_size=self.rows(index), **options)
        return loss


class FlooredValidationMean(FlooredMean, Watched):
    """The same in validation."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
        return self.objective(*batch, index)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val_loss", self.objective(*batch, index), sync_dist=True, batch_size=self.rows(index))


class Uneven(Subject):
    """Three rows on one rank, one on the other."""

    def train_dataloader(self) -> Any:
        rows = 1 if self.odd else 3
        generator = torch.Generator().manual_seed(dist.get_rank())
        batches = [
            (torch.randn(rows, 4, generator=generator, dtype=torch.float64), torch.arange(rows) % CLASSES)
            for _ in range(4)
        ]
        return DataLoader(batches, batch_size=None)


def stop_early(sick: bool) -> list[Any]:
    return [EarlyStopping("val_loss", patience=3)]


CASES = [
    Case(NotANumber, "F79", "LossCheck", "loss", step=2),
    Case(NotANumber, "F79", "LossCheck", "loss", step=2, strategy="ddp_losses"),
    Case(MissingLoss, "F35", "LossCheck", "loss", step=1),
    Case(ZeroFromTheStart, "F31", "LossCheck", "loss", step=4, options={"max_epochs": 2}),
    Case(MeanOfMeans, "F30", "LossCheck", "loss", step=2, ranks=()),
    Case(GlobalMean, "F30", "LossCheck", "loss", step=2, ranks=()),
    Case(Uneven, "F30", "LossCheck", "loss", step=2, ranks=()),
    Case(Watched, "F55", "LossCheck", "val_loss", step=3, options={"callbacks": stop_early}),
    Case(FlooredMean, "F82", "LossCheck", "mean_loss", step=4, ranks=()),
    Case(FlooredValidationMean, "F82", "LossCheck", "val_loss", step=3, ranks=()),
    Case(OtherKeys, "F46", "LossCheck", "loss_0", step=0),
    Case(OtherValidationKeys, "F46", "LossCheck", "val_loss_0", step=3),
]
