"""Training jobs whose encoder `fully_shard` divides, and the same for one process: plain modules, plain losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_ddp_losses import (
    ClassShardedLoss,
    ClipLoss,
    DDPLossStrategy,
    GlobalBatchLoss,
    ModelParallelLossStrategy,
    SigLipLoss,
)
from tests.fits import make_trainer, weights_of
from tests.oracle import Encoder, clip_of, siglip_of
from tests.strategies.jobs import TASK, Job, fit_alone, loader, make_loss


def shard(module: LightningModule, *encoders: nn.Module) -> None:
    """What a user writes in `configure_model`; nothing where no strategy divides the model."""
    mesh = module.device_mesh
    if mesh is None:
        return
    for encoder in encoders:
        for layer in encoder.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(encoder, mesh=mesh["data_parallel"])


class Towers(Job):
    """Losses over one embedding; `wrap` makes them global. A plain parameter beside encoder and losses is trained too."""

    kind = "arcface"
    is_global = True

    def build(self, loss: str) -> None:
        torch.manual_seed(3)
        self.bias = nn.Parameter(torch.randn(TASK.dim, dtype=torch.float64))
        self.loss = make_loss("ArcFaceLoss")
        self.pairs = pml.SupConLoss() if self.kind in ("supcon", "three") else None
        self.other = make_loss("ProxyNCALoss", 1) if self.kind == "three" else None
        if self.is_global:
            divide = ClassShardedLoss if self.kind == "divided" else GlobalBatchLoss
            self.loss = divide(self.loss)
            self.pairs = None if self.pairs is None else GlobalBatchLoss(self.pairs)
            self.other = None if self.other is None else GlobalBatchLoss(self.other)

    def configure_model(self) -> None:
        if not any(isinstance(p, DTensor) for p in self.parameters()):
            shard(self, self.encoder)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        embeddings = self.encoder(features) + self.bias
        value = self.loss(embeddings, labels)
        for factor, more in ((0.5, self.pairs), (0.3, self.other)):
            if more is not None:
                value = value + factor * more(embeddings, labels)
        return value

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)
        return super().configure_optimizers()


class NaiveClip(nn.Module):  # the contrastive loss of two towers with a learnable temperature, written down
    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(1 / 0.07, dtype=torch.float64).log())

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        one, other = nn.functional.normalize(one), nn.functional.normalize(other)
        return clip_of(self.logit_scale.exp() * one @ other.T)


class NaiveSigLip(nn.Module):  # the sigmoid loss of two towers with a learnable temperature and bias, written down
    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(10.0, dtype=torch.float64).log())
        self.logit_bias = nn.Parameter(torch.tensor(-1.0, dtype=torch.float64))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        one, other = nn.functional.normalize(one), nn.functional.normalize(other)
        return siglip_of(self.logit_scale.exp() * one @ other.T + self.logit_bias)


class PlainClip(Towers):  # two towers and a temperature
    kind = "clip"

    def build(self, loss: str) -> None:
        torch.manual_seed(4)
        self.text = Encoder(TASK).double()
        if self.kind == "siglip":
            self.loss = SigLipLoss(init_bias=-1.0).double() if self.is_global else NaiveSigLip()
            with torch.no_grad():  # float32 rounded it
                self.loss.logit_scale.fill_(math.log(10.0))
        else:
            self.loss = ClipLoss().double() if self.is_global else NaiveClip()

    def configure_model(self) -> None:
        if not any(isinstance(p, DTensor) for p in self.parameters()):
            shard(self, self.encoder, self.text)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(self.encoder(features), self.text(features.flip(1)))


TOWERS = ("clip", "siglip")
KINDS = ("arcface", "divided", "supcon", "three", *TOWERS)


def make_job(kind: str, optimizer: str = "sgd", *, is_global: bool = True) -> Towers:
    """The job of a kind, global, or plain for one process."""
    base = PlainClip if kind in TOWERS else Towers
    cls = type(kind, (base,), {"kind": kind, "is_global": is_global, "__module__": __name__})
    return cls("ArcFaceLoss", optimizer)


def fit_kind_alone(kind: str, optimizer: str = "sgd", **options: Any) -> dict[str, Tensor]:
    """The state that one process reaches on the whole batches."""
    return fit_alone(lambda: make_job(kind, optimizer, is_global=False), **options)


def step_alone(optimizer: torch.optim.Optimizer, value: Tensor) -> None:
    optimizer.zero_grad()
    value.backward()
    optimizer.step()


def fit_sharded_model(
    kind: str | Callable[[], Job],
    optimizer: str = "sgd",
    strategy: dict[str, Any] | str | None = None,
    *,
    even: bool = True,
    ddp: bool = False,
    prepare: Callable[[Towers], None] | None = None,
    load: str | None = None,
    save: str | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Train on all ranks of the pool; returns the whole state, of a class shard this rank's part."""
    module: Any = make_job(kind, optimizer) if isinstance(kind, str) else kind()
    if prepare is not None:
        prepare(module)
    if not isinstance(strategy, str):
        strategy = (DDPLossStrategy if ddp else ModelParallelLossStrategy)(**(strategy or {}))
    trainer = make_trainer(strategy, **options)
    trainer.fit(module, loader(even=even), ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    assert ddp or any(isinstance(p, DTensor) for p in module.encoder.parameters()), "nothing was divided"
    return weights_of(module)
