"""Gradients off by W or 1/W, found before the first step by the dry run."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torchmetrics
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import Tensor, nn

from lightning_ddp_losses import GlobalBatchLoss
from lightning_ddp_losses.distributed.collectives import all_gather_with_grad, all_reduce_with_grad
from tests.callbacks.harness import CLASSES, WIDTH, Case, ComplexFilter, SparseTable, Subject

__all__ = ["CASES", "HEALTHY"]


def contrast(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Smooth, and a loss of all rows together."""
    similar = torch.nn.functional.normalize(embeddings) @ torch.nn.functional.normalize(embeddings).T
    same = (labels[:, None] == labels[None]).to(similar)
    return (nn.functional.softplus(similar) * (1 - same) - similar * same).mean()


def cut_gather(rows: Tensor) -> Tensor:
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.detach().contiguous())
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


class Gathered(Subject):
    """A contrastive loss of all ranks' rows, gathered without gradients where sick."""

    def gather(self, rows: Tensor) -> Tensor:
        return cut_gather(rows) if self.sick else all_gather_with_grad(rows)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return contrast(self.gather(self.head(self.encoder(features))), cut_gather(labels))


class ComplexGathered(ComplexFilter, Gathered):
    """The same below a complex parameter of half the precision."""

    dtype_of_filter = torch.complex64


class SparselyGathered(SparseTable, Gathered):
    """The same below an embedding whose gradient is sparse."""


class Repaired(Gathered):
    """Healthy in both forms: the gather cuts the graph, and the factor W mends the encoder."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features, labels, index) * dist.get_world_size()


class InPlace(Subject):
    """A sum over ranks in place."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        mean = self.head(self.encoder(features)).mean(0)
        if self.sick:
            total = mean.clone()
            dist.all_reduce(total)
        else:
            total = all_reduce_with_grad(mean)
        return (total - 1).square().sum()


class Wrapped(Subject):
    """A learnable loss in pytorch-metric-learning's wrapper; in the healthy form in ours."""

    def build(self) -> None:
        torch.manual_seed(2)
        loss = pml.CosFaceLoss(CLASSES, WIDTH).double()
        del self.head
        self.loss = DistributedLossWrapper(loss) if self.sick else GlobalBatchLoss(loss)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(self.encoder(features), labels)


class WrappedPlain(Subject):
    """Healthy: a loss without parameters in the same wrapper."""

    def build(self) -> None:
        self.loss = DistributedLossWrapper(pml.NTXentLoss())

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(self.head(self.encoder(features)), labels)


class MetricLoss(Subject):
    """A torchmetrics metric that is synchronised on each step, as a loss."""

    def build(self) -> None:
        self.metric = torchmetrics.MeanSquaredError(dist_sync_on_step=self.sick).double()

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        target = nn.functional.one_hot(labels, CLASSES).to(features)
        output = self.head(self.encoder(features))
        return self.metric(output, target) if self.sick else (output - target).square().mean()


class Twice(Subject):
    """Every rank's whole loss, summed over ranks with a gather whose backward sums too, in a graph that counts it twice."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        mean = self.head(self.encoder(features)).square().mean()
        total = all_reduce_with_grad(mean)  # backward: the sum over ranks
        if self.sick:  # and once more, by hand
            total = total + (total - total.detach()) * (dist.get_world_size() - 1)
        return total


class StopGradient(Subject):
    """Healthy: half of the derivative is stopped on purpose."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        first, second = self.head(self.encoder(features)), self.head(self.encoder(features + 0.1))
        return (first * first.detach()).mean() + (first - second.detach()).square().mean()


class Remembered(Subject):
    """Healthy: a memory that holds this batch, without its gradient: half of the derivative, which is 1/W for two ranks."""

    def build(self) -> None:
        memory = pml.CrossBatchMemory(pml.ContrastiveLoss(neg_margin=3.0), embedding_size=CLASSES, memory_size=24)
        self.loss = GlobalBatchLoss(memory.double())

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(self.head(self.encoder(features)), labels)


class HalfGathered(Gathered):
    """The head's rows are gathered with a gradient, or cut; either way the encoder's go through a gather that is right."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        outer = contrast(self.gather(self.head(features)), cut_gather(labels))
        return outer + contrast(all_gather_with_grad(self.encoder(features)), cut_gather(labels))


class Dropping(Subject):
    """Healthy: dropout, batch norm, random noise."""

    def build(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.drop = nn.Dropout(0.3)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        noise = 0.1 * torch.randn(features.shape, dtype=features.dtype)
        return super().objective(self.drop(self.norm(features + noise)), labels, index)


G = "GradientFlowCheck"
CASES = [
    Case(Gathered, "F20", G, "encoder", ranks=()),
    Case(Gathered, "F20", G, "head", ranks=(), strategy="ddp_losses"),
    Case(ComplexGathered, "F20", G, "filter", ranks=()),
    Case(SparselyGathered, "F20", G, "table", ranks=()),
    Case(HalfGathered, "F20", G, "head", ranks=()),
    Case(InPlace, "F23", G, "encoder", ranks=()),
    Case(Wrapped, "F24", G, "loss", ranks=()),
    Case(MetricLoss, "F27", G, "encoder", ranks=()),
    Case(Twice, "F21", G, "encoder", ranks=()),
]
HEALTHY = [Repaired, WrappedPlain, StopGradient, Remembered, Dropping]
