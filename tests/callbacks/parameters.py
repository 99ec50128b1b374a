"""Parameters that go apart: by name, at the start, by their gradients, by a hand that changes them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from pytorch_metric_learning.losses import CosFaceLoss
from torch import Tensor, nn

from lightning_ddp_losses import DDPChecks, ParameterSyncCheck
from lightning_ddp_losses.distributed.shard import ClassShard, tag_shard
from tests.callbacks.harness import CLASSES, WIDTH, Case, Subject

__all__ = ["CASES"]


class Order(Subject):
    """Two layers of one shape, registered in another order on one rank."""

    def build(self) -> None:
        for name in ("b", "a") if self.odd else ("a", "b"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH, dtype=torch.float64))

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(self.b(self.a(features)), labels, index)


class Seeds(Subject):
    """Values drawn from the rank's own seed, and DDP told not to synchronise them."""

    def build(self) -> None:
        if self.sick:
            torch.manual_seed(dist.get_rank())
            self.head = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)


class Nudged(Subject):
    """One rank changes one weight by one unit in the last place, before its third step."""

    def on_train_batch_start(self, batch: object, index: int) -> None:
        if self.odd and index == 2:
            with torch.no_grad():
                weight = self.head.weight.view(-1)
                weight[1] = torch.nextafter(weight[1], torch.tensor(9.0, dtype=torch.float64))


class Created(Subject):
    """A second head that appears in the first training step."""

    def build(self) -> None:
        self.extra: nn.Module | None = None if self.sick else nn.Linear(WIDTH, CLASSES, dtype=torch.float64)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        if self.extra is None:
            torch.manual_seed(0)
            self.extra = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
            self.trainer.optimizers[0].add_param_group({"params": list(self.extra.parameters())})
        return super().objective(features, labels, index) + nn.functional.cross_entropy(self.extra(features), labels)


class Replaced(Subject):
    """A weight that another object takes the place of, after the first step."""

    def on_train_batch_start(self, batch: object, index: int) -> None:
        if self.sick and index == 1:
            self.head.weight = nn.Parameter(self.head.weight.detach().clone())
            self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1)]


class Halved(Subject):
    """A loss of pytorch-metric-learning that gets bfloat16 embeddings: it casts its weight, and DDP's hook is gone."""

    def build(self) -> None:
        torch.manual_seed(1)
        self.encoder.float()
        self.loss = CosFaceLoss(CLASSES, WIDTH)
        del self.head

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        embeddings = self.encoder(features.float())
        return self.loss(embeddings.bfloat16() if self.sick else embeddings, labels)


class CastBack(Subject):
    """A cast there and back after the wrap: nothing looks different, and DDP's hooks are gone."""

    def on_train_start(self) -> None:
        if self.sick:
            self.float()
            self.double()


class Clipped(Subject):
    """One rank clips by itself."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.odd:
            nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class Unfrozen(Subject):
    """An encoder that is frozen when DDP is built, and trains from the second step on."""

    def build(self) -> None:
        self.encoder.requires_grad_(not self.sick)

    def on_train_batch_start(self, batch: object, index: int) -> None:
        if index == 1:
            self.encoder.requires_grad_(True)


class OwnBackward(Subject):
    """A backward of the user's own in a hook: nobody reduces it."""

    def on_after_backward(self) -> None:
        if self.sick:
            (self.encoder.weight.sum() * (1.0 + self.global_rank)).backward()


class Manual(Subject):
    """Manual optimisation with ``loss.backward()``."""

    def __init__(self, sick: bool) -> None:
        super().__init__(sick)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.objective(*batch, index)
        loss.backward() if self.sick else self.manual_backward(loss)
        optimizer.step()


class Shards(Subject):
    """Class shards that overlap."""

    def build(self) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.shard = nn.Parameter(torch.zeros(2, WIDTH, dtype=torch.float64))
        start = 0 if self.sick else 2 * rank
        tag_shard(self.shard, ClassShard(start, start + 2, 2 * world))

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features, labels, index) + (self.shard * (1.0 + self.global_rank)).sum()


def only_parameters() -> DDPChecks:
    return DDPChecks([ParameterSyncCheck()], summary=False, file=False)


def apart() -> DDPStrategy:
    return DDPStrategy(init_sync=False)


UNUSED = "ddp_find_unused_parameters_true"
P, G = "ParameterSyncCheck", "GradientFlowCheck"
CLIP = {"gradient_clip_val": 0.1}
BOTH: tuple[int, ...] | None = None

CASES = [
    Case(Order, "F12", P, "a.weight"),
    Case(Seeds, "F04", P, "head.weight", strategy=apart),
    Case(Nudged, "SYNC", P, "head.weight", step=2),
    Case(Nudged, "SYNC", P, "head.weight", step=2, strategy="ddp_losses"),
    Case(Created, "F05", G, "extra.weight"),
    Case(Created, "F05", P, "extra.weight", checks=only_parameters),
    Case(Created, "F13", G, "head.weight", options=CLIP),
    Case(Replaced, "F06", G, "head.weight", step=1, strategy=UNUSED),
    Case(Replaced, "F06", P, "head.weight", step=1, strategy=UNUSED, checks=only_parameters),
    Case(Halved, "F07", G, "loss.W"),
    Case(CastBack, "F07", G, "head.weight"),
    Case(CastBack, "F07", P, "head.weight", checks=only_parameters),
    Case(Clipped, "F13", G, "head.weight"),
    Case(Clipped, "F13", G, "head.weight", strategy="ddp_losses"),
    Case(Unfrozen, "F08", G, "encoder.weight", step=1),
    Case(OwnBackward, "F09", G, "encoder.weight"),
    Case(Manual, "F10", G, "head.weight"),
    Case(Manual, "F10", P, "head.weight", checks=only_parameters),
    Case(
        Shards, "F16", P, "shard", ranks=()
    ),  # "ddp_losses" refuses it before any check: tests/strategies/test_shards.py
]
