"""Optimizers that hold something else than the model, or that differ per rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_ddp_losses import DDPChecks, OptimizerCheck
from tests.callbacks.harness import CLASSES, WIDTH, Case, Subject

__all__ = ["CASES"]


class Forgotten(Subject):
    """The head trains and is in no optimizer."""

    def configure_optimizers(self) -> Any:
        trained = self.encoder.parameters() if self.sick else self.parameters()
        return torch.optim.SGD(trained, lr=0.1)


class InAList(Subject):
    """A second head in a plain list; in the healthy form in an nn.ModuleList."""

    def build(self) -> None:
        heads = [nn.Linear(WIDTH, CLASSES, dtype=torch.float64)]
        self.heads = heads if self.sick else nn.ModuleList(heads)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features, labels, index) + nn.functional.cross_entropy(self.heads[0](features), labels)

    def configure_optimizers(self) -> Any:
        held = [*self.encoder.parameters(), *self.head.parameters(), *self.heads[0].parameters()]
        return torch.optim.SGD(held, lr=0.1)


class Shared(Subject):
    """Memory that spawned ranks share."""

    def setup(self, stage: str) -> None:
        if self.sick:
            self.trainer.strategy._start_method = "spawn"
            self.head.share_memory()


class Rates(Subject):
    """A schedule that one rank runs differently."""

    def on_train_batch_start(self, batch: object, index: int) -> None:
        if self.odd and index == 1:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.025


class Scaled(Subject):
    """float16 with a scaler; where sick, a parameter that nobody reduces overflows on one rank."""

    def build(self) -> None:
        self.float()

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        loss = super().objective(features.float(), labels, index)
        if not self.sick:
            return loss
        if not hasattr(self, "own"):
            self.own = nn.Parameter(torch.ones(1))
            self.trainer.optimizers[0].add_param_group({"params": [self.own]})
        return loss + (self.own * (1e38 if self.odd and index == 2 else 0.0)).sum()


class Skips(Subject):
    """A hook that leaves a step out on one rank."""

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        if self.sick and self.odd and index == 2:
            closure()
        else:
            super().optimizer_step(epoch, index, optimizer, closure)


class Idle(Subject):
    """An optimizer whose step does nothing."""

    def configure_optimizers(self) -> Any:
        class Still(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                return closure()

        return (Still if self.sick else torch.optim.SGD)(self.parameters(), lr=0.1)


class Unsaved(Subject):
    """A state_dict without the head."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {k: v for k, v in state.items() if "head" not in k} if self.sick else state

    def on_train_batch_end(self, outputs: object, batch: object, index: int) -> None:
        if index == 1:
            self.trainer.save_checkpoint("unsaved.ckpt")


def scaler(sick: bool) -> list[MixedPrecision]:
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))]


def own_scaler(sick: bool) -> list[MixedPrecision]:
    scale = 1024.0 * (1 + sick * dist.get_rank())
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))]


def only_optimizers() -> DDPChecks:
    return DDPChecks([OptimizerCheck()], summary=False, file=False)


class Half(Subject):
    """float16 with a scaler that is in order."""

    def build(self) -> None:
        self.float()

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features.float(), labels, index)


O = "OptimizerCheck"  # noqa: E741 - a column of the table
CASES = [
    Case(Forgotten, "F01", O, "head.weight", ranks=()),
    Case(InAList, "F02", O, "self.heads[0].weight", ranks=()),
    Case(Shared, "F03", O, "head.weight", ranks=()),
    Case(Scaled, "F14", O, "step", step=2, options={"plugins": scaler}, checks=only_optimizers),
    Case(Skips, "F14", O, "step", step=2, checks=only_optimizers),
    Case(Half, "F15", O, "scale", options={"plugins": own_scaler}),
    Case(Rates, "F17", O, "lr", step=1),
    Case(Idle, "STEP", O, "step", step=1, ranks=()),
    Case(Unsaved, "F75", "CheckpointCheck", "head.weight", step=1, ranks=()),
]
