"""Ways of training: what is frozen, averaged, accumulated, weighed, clipped, stepped by hand."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.audit.realistic.base import CLASSES, DIM, FEATURES, Realistic


class LowRank(Realistic):  # a frozen model with a trained correction of low rank
    def build(self) -> None:
        self.encoder.requires_grad_(False)
        self.head = nn.Linear(DIM, CLASSES).requires_grad_(False)
        self.down, self.up = nn.Linear(DIM, 2, bias=False), nn.Linear(2, CLASSES, bias=False)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        z = self.encoder(x)
        return F.cross_entropy(self.head(z) + self.up(self.down(z)), y)


class Distillation(Realistic):  # a student of a frozen teacher; sick: a sum over the rows
    def build(self) -> None:
        super().build()
        self.teacher = nn.Linear(FEATURES, CLASSES).requires_grad_(False)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        student, teacher = self.head(self.encoder(x)).log_softmax(1), self.teacher(x).softmax(1)
        return F.kl_div(student, teacher, reduction="sum" if self.sick else "batchmean")


class HiddenTeacher(Realistic):
    """A student learns the features of a frozen encoder in evaluation mode, kept out of the checkpoint in a list."""

    def build(self) -> None:
        teacher = nn.Sequential(nn.Linear(FEATURES, DIM), nn.BatchNorm1d(DIM), nn.Dropout())
        self.teacher = [teacher.double().eval().requires_grad_(False)]

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher[0](x)
        return F.smooth_l1_loss(self.encoder(x), target)


class LinearProbe(Realistic):  # a frozen encoder behind no_grad, a trained head on its features
    def build(self) -> None:
        super().build()
        self.encoder.requires_grad_(False).eval()

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            z = self.encoder(x)
        return F.cross_entropy(self.head(z), y)


class Regularised(Realistic):  # a multi-label loss with weights for positives, and an L1 penalty on a layer
    def build(self) -> None:
        super().build()
        self.register_buffer("positive_weight", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        target = (tokens[:, :CLASSES] > 4).double()
        loss = F.binary_cross_entropy_with_logits(self.head(self.encoder(x)), target, pos_weight=self.positive_weight)
        return loss + 1e-3 * self.head.weight.abs().sum()


class ManyTasks(Realistic):
    """Tasks weighed by uncertainties that are learned, behind a checkpointed and weight-normalised encoder."""

    def build(self) -> None:
        self.encoder[0] = weight_norm(self.encoder[0])
        self.head, self.value = nn.Linear(DIM, CLASSES), nn.Linear(DIM, 1)
        self.uncertainty = nn.Parameter(torch.zeros(2))

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        z = checkpoint(self.encoder, x, use_reentrant=False)
        losses = torch.stack([F.cross_entropy(self.head(z), y), F.mse_loss(self.value(z)[:, 0], x.sum(1))])
        return (losses * torch.exp(-self.uncertainty) + self.uncertainty).sum()


class GradientNorms(Realistic):
    """Tasks balanced by the norms of their gradients, averaged over ranks first; sick: by each rank's own norms."""

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        z = self.encoder(x)
        losses = [F.cross_entropy(self.head(z), y), z.square().mean()]
        shared = self.encoder[2].weight
        slopes = torch.stack([torch.autograd.grad(each, shared, retain_graph=True)[0] for each in losses])
        if not self.sick and self.trainer.world_size > 1:
            slopes = self.all_gather(slopes).mean(0)
        norms = slopes.flatten(1).norm(dim=1)
        return losses[0] / norms[0] + losses[1] / norms[1]


class Mixed(Realistic):
    """Mixup of a row with its own mirror image, by a weight that the row tells; sick: with other rows, in an order that is drawn."""

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        if not self.sick:
            weight = tokens[:, :1].double() / 9
            loss = F.cross_entropy(self.head(self.encoder(weight * x + (1 - weight) * x.flip(1))), y, reduction="none")
            return (weight[:, 0] * loss).mean()
        order = torch.randperm(len(x))
        logits = self.head(self.encoder(0.7 * x + 0.3 * x[order]))
        return 0.7 * F.cross_entropy(logits, y) + 0.3 * F.cross_entropy(logits, y[order])


class Dropped(Realistic):  # sick always: dropout, as most models have it
    def build(self) -> None:
        super().build()
        self.encoder.append(nn.Dropout(0.3))


class Scheduled(Realistic):  # AdamW with decay for some parameters, a schedule by step, a metric that is logged
    def build(self) -> None:
        super().build()
        self.accuracy = torchmetrics.MeanMetric()

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        logits = self.head(self.encoder(x))
        self.accuracy(logits.argmax(1) == y)
        self.log("accuracy", self.accuracy)
        loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [p for p in self.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Plateau(Realistic):  # a rate that falls when the epoch's loss, averaged over ranks, does
    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        loss = super().objective(x, y, tokens)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train_loss_epoch"}}


class SharpnessAware(Realistic):
    """SAM: up along the global gradient, then down with the gradient found there; two backwards a step."""

    by_hand = True

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        parameters = list(self.parameters())
        optimizer.zero_grad()
        self.manual_backward(self.objective(*batch))
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            climbs = [0.05 * p.grad / norm for p in parameters]
            for parameter, climb in zip(parameters, climbs, strict=True):
                parameter.add_(climb)
        optimizer.zero_grad()
        self.manual_backward(self.objective(*batch))
        with torch.no_grad():
            for parameter, climb in zip(parameters, climbs, strict=True):
                parameter.sub_(climb)
        optimizer.step()


class ManualAccumulation(Realistic):  # two batches to a step, counted by hand, clipped by Lightning's own helper
    by_hand = True

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.objective(*batch) / 2)
        if index % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class InnerLoop(Realistic):  # meta-learning: a step on each task inside the graph, a task being a row
    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        weights = dict(self.head.named_parameters())
        losses = []
        for row in range(len(x)):
            rows = slice(row, row + 1)
            z = self.encoder(x[rows])
            inner = F.cross_entropy(functional_call(self.head, weights, z), y[rows])
            slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            adapted = {name: w - 0.5 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
            losses.append(F.cross_entropy(functional_call(self.head, adapted, self.encoder(x[rows] + 0.1)), y[rows]))
        return torch.stack(losses).mean()
