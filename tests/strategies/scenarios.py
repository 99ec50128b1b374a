"""Jobs in which losses are called, shared, frozen, replaced and created in ways that break hook-driven reduction."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from pytorch_metric_learning.losses import CosFaceLoss
from torch import Tensor, nn

from tests.strategies.jobs import OPTIMIZERS, TASK, Job, make_loss


class TwoLosses(Job):
    def build(self, loss: str) -> None:
        self.first, self.second = make_loss(loss, 1), make_loss(loss, 2)


class Alternating(TwoLosses):
    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return (self.first, self.second)[index % 2](embeddings, labels)


class RarelyCalled(TwoLosses):  # the second loss runs at one batch only, which may be one that does not synchronise
    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.first(embeddings, labels) + (self.second(embeddings, labels) if index == 1 else 0)


class NeverCalled(TwoLosses):
    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.first(embeddings, labels)


class NoLossAtAll(TwoLosses):  # steps without any loss between steps with losses
    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return embeddings.square().mean() if index in (0, 3) else self.first(embeddings, labels)


class OrderByRank(TwoLosses):
    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        calls = [(1.0, self.first), (2.0, self.second)]
        if self.global_rank % 2:
            calls.reverse()
        return sum(weight * loss(embeddings, labels) for weight, loss in calls)


class SeveralCalls(Job):
    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return sum(self.loss(embeddings * k, (labels + k) % TASK.classes) for k in range(1, 2 + index % 3))


class TwoForwardsOfTheEncoder(Job):
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(self.encoder(features), labels) + self.loss(self.encoder(-features), labels)


class SharedByTwoLosses(TwoLosses):
    def build(self, loss: str) -> None:
        super().build(loss)
        self.second.W = self.first.W

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        if index == 2:
            return self.second(embeddings, labels)
        return self.first(embeddings, labels) + 2 * self.second(embeddings, labels)


class SharedWithTheModel(Job):
    def build(self, loss: str) -> None:
        super().build(loss)
        self.head = nn.Module()
        self.head.weight = self.loss.W

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(embeddings, labels) + nn.functional.cross_entropy(embeddings @ self.head.weight, labels)


class OneModuleTwoNames(Job):
    def build(self, loss: str) -> None:
        super().build(loss)
        self.again = nn.ModuleList([self.loss])

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.again[0](embeddings, labels)


class WeightUsedDirectly(Job):  # the loss's weight takes part outside of the loss's forward too
    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        logits = embeddings @ self.loss.W if index else self.loss.get_logits(embeddings)
        return nn.functional.cross_entropy(logits, labels) + (self.loss(embeddings, labels) if index > 2 else 0)


class LinearProbe(Job):
    def build(self, loss: str) -> None:
        super().build(loss)
        self.encoder.requires_grad_(False)

    def optimised(self) -> list[nn.Parameter]:
        return list(self.loss.parameters())


class PartlyFrozen(Job):
    def build(self, loss: str) -> None:
        super().build(loss)
        self.encoder[0].requires_grad_(False)


class UnfrozenLater(TwoLosses):  # a loss and a layer are unfrozen after the wrap
    def build(self, loss: str) -> None:
        super().build(loss)
        self.second.requires_grad_(False)
        self.encoder[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.second.requires_grad_(index >= 2)
        self.encoder[0].requires_grad_(index >= 2)

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.first(embeddings, labels) + self.second(embeddings, labels)


class FrozenLater(Job):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.loss.requires_grad_(index not in (1, 2))


class PartOfEncoderFrozenLater(Job):
    """Its first layer does not train in batches 1 and 2, then the second does not any more."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.encoder[0].requires_grad_(index not in (1, 2))
        self.encoder[-1].requires_grad_(index < 3)


class EncoderFrozenLater(Job):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.encoder.requires_grad_(index not in (2, 3))


class Replaced(Job):  # the weight is another parameter from batch 2 on
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 2:
            old, self.loss.W = self.loss.W, nn.Parameter(2 * self.loss.W.detach())
            for group in self.trainer.optimizers[0].param_groups:
                group["params"] = [self.loss.W if p is old else p for p in group["params"]]


class CreatedLater(Job):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 2:
            self.later = make_loss(seed=5)
            self.trainer.optimizers[0].add_param_group({"params": list(self.later.parameters())})

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(embeddings, labels) + (self.later(embeddings, labels) if hasattr(self, "later") else 0)


class BuiltInConfigureModel(Job):
    def build(self, loss: str) -> None:
        self.loss = None

    def configure_model(self) -> None:
        if self.loss is None:
            self.loss = make_loss()


class NestedLosses(Job):
    def build(self, loss: str) -> None:
        self.heads = nn.ModuleDict({"b": nn.ModuleList([make_loss(loss, 1), make_loss("SoftTripleLoss", 2)])})
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        embeddings = self.encoder(features) * self.scale
        return self.heads["b"][index % 2](embeddings, labels)


class BigWeight(Job):  # a weight of over 1 MiB
    def build(self, loss: str) -> None:
        torch.manual_seed(7)
        self.loss = CosFaceLoss(40_000, TASK.dim).double()
        self.second = make_loss()

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(embeddings, labels * 7919) + (self.second(embeddings, labels) if index % 2 else 0)


class Compiled(Job):
    backend = "eager"

    def build(self, loss: str) -> None:
        self.loss = torch.compile(make_loss(loss), backend=self.backend)


class CompiledAot(Compiled):
    backend = "aot_eager"


class CompiledInPlace(Job):
    def build(self, loss: str) -> None:
        super().build(loss)
        self.loss.compile(backend="eager")


class Unreduced(LightningModule):  # nothing that DDP could reduce: no encoder at all, the loss's weight is all there is
    def __init__(self) -> None:
        super().__init__()
        self.loss = make_loss()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return self.loss(batch[0][:, : TASK.dim], batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS["sgd"](self.parameters())


JOBS: list[type[Job]] = [
    Alternating, RarelyCalled, NeverCalled, NoLossAtAll, OrderByRank, SeveralCalls, TwoForwardsOfTheEncoder,
    SharedByTwoLosses, SharedWithTheModel, OneModuleTwoNames, WeightUsedDirectly, LinearProbe, PartlyFrozen,
    UnfrozenLater, FrozenLater, PartOfEncoderFrozenLater, EncoderFrozenLater, Replaced, CreatedLater,
    BuiltInConfigureModel, NestedLosses, BigWeight,
]  # fmt: skip
