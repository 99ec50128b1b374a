"""Faults of parameters, gradients and optimizers, each a sabotaged run with its healthy twin."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.losses import CosFaceLoss
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import Tensor, nn

from lightning_ddp_losses import (
    CheckpointCheck,
    DDPChecks,
    GlobalBatchLoss,
    OptimizerCheck,
    ParameterSyncCheck,
    RankCheck,
)
from lightning_ddp_losses.collectives import all_gather_with_grad, all_reduce_with_grad
from lightning_ddp_losses.sharding import ClassShard
from tests.callbacks.harness import BATCHES, CLASSES, WIDTH, Case, ComplexFilter, OneLoss, SparseTable, Subject
from tests.doors import tag_shard


class Order(Subject):  # two layers of one shape, registered in another order on one rank
    def build(self) -> None:
        for name in ("b", "a") if self.odd else ("a", "b"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH, dtype=torch.float64))

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(self.b(self.a(features)), labels, index)


class Seeds(Subject):  # values drawn from the rank's own seed, and DDP told not to synchronise them
    def build(self) -> None:
        if self.sick:
            torch.manual_seed(dist.get_rank())
            self.head = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)


class Nudged(Subject):  # one rank changes one weight by one unit in the last place, before its third step
    def on_train_batch_start(self, batch: object, index: int) -> None:
        if self.odd and index == 2:
            with torch.no_grad():
                weight = self.head.weight.view(-1)
                weight[1] = torch.nextafter(weight[1], torch.tensor(9.0, dtype=torch.float64))


LAST = BATCHES - 1


class InTheLastStep(Subject):  # one rank changes a parameter after its last step
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.odd and args[1] == LAST:
            with torch.no_grad():
                self.head.weight[0, 0] += 1e-6


class QueueInTheLastStep(InTheLastStep):  # the same of a buffer
    def build(self) -> None:
        self.register_buffer("queue", torch.zeros(4, 2, dtype=torch.float64))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super(InTheLastStep, self).optimizer_step(*args, **kwargs)
        if self.odd and args[1] == LAST:
            self.queue[0, 0] = 1.0


class GradientInTheLastStep(Subject):  # the same of a gradient
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.odd and self.trainer.global_step == LAST:
            self.encoder.weight.grad *= 2


class Created(Subject):  # a second head that appears in the first training step
    def build(self) -> None:
        self.extra: nn.Module | None = None if self.sick else nn.Linear(WIDTH, CLASSES, dtype=torch.float64)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        if self.extra is None:
            torch.manual_seed(0)
            self.extra = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)
            self.trainer.optimizers[0].add_param_group({"params": list(self.extra.parameters())})
        return super().objective(features, labels, index) + nn.functional.cross_entropy(self.extra(features), labels)


class Replaced(Subject):  # a weight that another object takes the place of, after the first step
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


class CastBack(Subject):  # a cast there and back after the wrap: nothing looks different, and DDP's hooks are gone
    def on_train_start(self) -> None:
        if self.sick:
            self.float()
            self.double()


class Clipped(Subject):  # one rank clips by itself
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.odd:
            nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class Unfrozen(Subject):  # an encoder that is frozen when DDP is built, and trains from the second step on
    def build(self) -> None:
        self.encoder.requires_grad_(not self.sick)

    def on_train_batch_start(self, batch: object, index: int) -> None:
        if index == 1:
            self.encoder.requires_grad_(True)


class OwnBackward(Subject):  # a backward of the user's own in a hook: nobody reduces it
    def on_after_backward(self) -> None:
        if self.sick:
            (self.encoder.weight.sum() * (1.0 + self.global_rank)).backward()


class Manual(Subject):  # manual optimisation with ``loss.backward()``
    by_hand = True

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.objective(*batch, index)
        loss.backward() if self.sick else self.manual_backward(loss)
        optimizer.step()


class Shards(Subject):  # class shards that overlap
    def build(self) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.shard = nn.Parameter(torch.zeros(2, WIDTH, dtype=torch.float64))
        start = 0 if self.sick else 2 * rank
        tag_shard(self.shard, ClassShard(start, start + 2, 2 * world))

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features, labels, index) + (self.shard * (1.0 + self.global_rank)).sum()


def only(*checks: type[RankCheck]) -> Callable[[], DDPChecks]:
    """Return a maker of these checks alone."""
    return partial(make_checks, *checks)


def make_checks(*checks: type[RankCheck]) -> DDPChecks:
    return DDPChecks([check() for check in checks], summary=False, file=False)


def apart() -> DDPStrategy:
    return DDPStrategy(init_sync=False)


UNUSED = "ddp_find_unused_parameters_true"
P, G = "ParameterSyncCheck", "GradientFlowCheck"
CLIP = {"gradient_clip_val": 0.1}

PARAMETERS = [
    Case(Order, "F12", P, "a.weight"),
    Case(Seeds, "F04", P, "head.weight", strategy=apart),
    Case(Nudged, "SYNC", P, "head.weight", step=2),
    Case(Nudged, "SYNC", P, "head.weight", step=2, strategy="ddp_losses"),
    Case(InTheLastStep, "SYNC", P, "head.weight", step=LAST),
    Case(QueueInTheLastStep, "F64", "BufferSyncCheck", "queue", step=LAST),
    Case(GradientInTheLastStep, "F13", G, "encoder.weight", step=LAST),
    Case(Created, "F05", G, "extra.weight"),
    Case(Created, "F05", P, "extra.weight", checks=only(ParameterSyncCheck)),
    Case(Created, "F13", G, "head.weight", options=CLIP),
    Case(Replaced, "F06", G, "head.weight", step=1, strategy=UNUSED),
    Case(Replaced, "F06", P, "head.weight", step=1, strategy=UNUSED, checks=only(ParameterSyncCheck)),
    Case(Halved, "F07", G, "loss.W"),
    Case(CastBack, "F07", G, "head.weight"),
    Case(CastBack, "F07", P, "head.weight", checks=only(ParameterSyncCheck)),
    Case(Clipped, "F13", G, "head.weight"),
    Case(Clipped, "F13", G, "head.weight", strategy="ddp_losses"),
    Case(Unfrozen, "F08", G, "encoder.weight", step=1),
    Case(OwnBackward, "F09", G, "encoder.weight"),
    Case(Manual, "F10", G, "head.weight"),
    Case(Manual, "F10", P, "head.weight", checks=only(ParameterSyncCheck)),
    # "ddp_losses" refuses it before any check: tests/strategies/test_shards.py
    Case(Shards, "F16", P, "shard", ranks=()),
]


class ZeroLoss(Subject):
    """No positive pair on one rank: the loss is zero times the embeddings, and the head is not in its graph."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        if self.odd and index == 1:
            return (self.encoder(features) * 0).sum()
        return super().objective(features, labels, index)


class Branch(Subject):  # one of two heads, chosen by rank
    def build(self) -> None:
        self.other = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        unused = 0 * self.other(features).sum()
        if self.odd and index == 1:
            return nn.functional.cross_entropy(self.other(self.encoder(features)), labels)
        return super().objective(features, labels, index) + unused


class Unused(Subject):  # a head that no rank's loss uses
    def build(self) -> None:
        if self.sick:
            self.other = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)


class Infinite(Subject):  # a finite loss whose gradient is not: the root of zero, on one rank
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        loss = super().objective(features, labels, index)
        if self.odd and index == 1:
            loss = loss + (self.encoder.weight * 0).sum().abs().sqrt()
        return loss


class Cut(Subject):  # embeddings times zero: the encoder learns nothing
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        embeddings = self.encoder(features)
        return nn.functional.cross_entropy(self.head(embeddings * (0 if self.sick else 1)), labels)


class ZeroStart(Subject):
    """Healthy in both forms: a head that starts at zero gives the encoder no gradient in the first step."""

    def build(self) -> None:
        nn.init.zeros_(self.head.weight)


FLOW = [
    Case(ZeroLoss, "F32", G, "head.weight", step=1),
    Case(Branch, "F37", G, "head.weight", step=1),
    Case(Unused, "F38", G, "other.weight", ranks=()),
    Case(Infinite, "F79", G, "encoder.weight", step=1, ranks=(0, 1)),
    Case(Cut, "DETACHED", G, "encoder", step=3, ranks=()),
]


class Forgotten(Subject):  # the head trains and is in no optimizer
    def configure_optimizers(self) -> Any:
        trained = self.encoder.parameters() if self.sick else self.parameters()
        return torch.optim.SGD(trained, lr=0.1)


class InAList(Subject):  # a second head in a plain list; in the healthy form in an nn.ModuleList
    def build(self) -> None:
        heads = [nn.Linear(WIDTH, CLASSES, dtype=torch.float64)]
        self.heads = heads if self.sick else nn.ModuleList(heads)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features, labels, index) + nn.functional.cross_entropy(self.heads[0](features), labels)

    def configure_optimizers(self) -> Any:
        held = [*self.encoder.parameters(), *self.head.parameters(), *self.heads[0].parameters()]
        return torch.optim.SGD(held, lr=0.1)


class Shared(Subject):  # memory that spawned ranks share
    def setup(self, stage: str) -> None:
        if self.sick:
            self.trainer.strategy._start_method = "spawn"
            self.head.share_memory()


class Rates(Subject):  # a schedule that one rank runs differently
    def on_train_batch_start(self, batch: object, index: int) -> None:
        if self.odd and index == 1:
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.025


class Half(Subject):  # float16 with a scaler
    def build(self) -> None:
        self.float()

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features.float(), labels, index)


class Scaled(Half):  # the same; where sick, a parameter that nobody reduces overflows on one rank
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        loss = super().objective(features, labels, index)
        if not self.sick:
            return loss
        if not hasattr(self, "own"):
            self.own = nn.Parameter(torch.ones(1))
            self.trainer.optimizers[0].add_param_group({"params": [self.own]})
        return loss + (self.own * (1e38 if self.odd and index == 2 else 0.0)).sum()


class Skips(Subject):  # a hook that leaves a step out on one rank
    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        if self.sick and self.odd and index == 2:
            closure()
        else:
            super().optimizer_step(epoch, index, optimizer, closure)


class StepsTwice(Subject):  # a hook that steps once more on one rank
    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        super().optimizer_step(epoch, index, optimizer, closure)
        if self.sick and self.odd and index == 2:
            optimizer.step()


class SkipsByHand(Subject):  # manual optimization: one rank leaves out a step, and all ranks step every second batch
    by_hand = True

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizer: Any = self.optimizers()
        if index % 2 == 0:
            optimizer.zero_grad()
        self.manual_backward(self.objective(*batch, index))
        if index % 2 == 0 or (self.odd and index == 3):
            return
        optimizer.step()


class Idle(Subject):  # an optimizer whose step does nothing
    def configure_optimizers(self) -> Any:
        class Still(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                return closure()

        return (Still if self.sick else torch.optim.SGD)(self.parameters(), lr=0.1)


class Saving(Subject):  # saves a checkpoint after its second batch
    def on_train_batch_end(self, outputs: object, batch: object, index: int) -> None:
        if index == 1:
            self.trainer.save_checkpoint("unsaved.ckpt")


class Unsaved(Saving):  # a state_dict without the head
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {k: v for k, v in state.items() if "head" not in k} if self.sick else state


class SavedWrapped(Saving):  # a wrapped loss as an attribute
    def build(self) -> None:
        if self.sick:
            self.wrapped = nn.DataParallel(nn.Identity())


def scaler(sick: bool, scale: float = 1024.0) -> list[MixedPrecision]:
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))]


def own_scaler(sick: bool) -> list[MixedPrecision]:
    return scaler(sick, 1024.0 * (1 + sick * dist.get_rank()))


OPTIMIZERS = [
    Case(Forgotten, "F01", "OptimizerCheck", "head.weight", ranks=()),
    Case(InAList, "F02", "OptimizerCheck", "self.heads[0].weight", ranks=()),
    Case(Shared, "F03", "OptimizerCheck", "head.weight", ranks=()),
    Case(Scaled, "F14", "OptimizerCheck", "step", step=2, options={"plugins": scaler}, checks=only(OptimizerCheck)),
    Case(Skips, "F37", "OptimizerCheck", "step", step=2, checks=only(OptimizerCheck)),
    Case(Half, "F15", "OptimizerCheck", "scale", options={"plugins": own_scaler}),
    Case(Rates, "F17", "OptimizerCheck", "lr", step=1),
    Case(Idle, "STEP", "OptimizerCheck", "step", step=1, ranks=()),
    Case(Unsaved, "F75", "CheckpointCheck", "head.weight", step=1, ranks=()),
    Case(SavedWrapped, "F75", "CheckpointCheck", "wrapped", step=1, ranks=(), checks=only(CheckpointCheck)),
]


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


class Gathered(Subject):  # a contrastive loss of all ranks' rows, gathered without gradients where sick
    def gather(self, rows: Tensor) -> Tensor:
        return cut_gather(rows) if self.sick else all_gather_with_grad(rows)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return contrast(self.gather(self.head(self.encoder(features))), cut_gather(labels))


class ComplexGathered(ComplexFilter, Gathered):  # the same below a complex parameter of half the precision
    dtype_of_filter = torch.complex64


class SparselyGathered(SparseTable, Gathered):
    """The same below an embedding whose gradient is sparse."""


class Repaired(Gathered):  # Healthy in both forms: the gather cuts the graph, and the factor W mends the encoder
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features, labels, index) * dist.get_world_size()


class InPlace(Subject):  # a sum over ranks in place
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        mean = self.head(self.encoder(features)).mean(0)
        if self.sick:
            total = mean.clone()
            dist.all_reduce(total)
        else:
            total = all_reduce_with_grad(mean)
        return (total - 1).square().sum()


class Wrapped(Subject):  # a learnable loss in pytorch-metric-learning's wrapper; in the healthy form in ours
    def build(self) -> None:
        torch.manual_seed(2)
        loss = pml.CosFaceLoss(CLASSES, WIDTH).double()
        del self.head
        self.loss = DistributedLossWrapper(loss) if self.sick else GlobalBatchLoss(loss)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(self.encoder(features), labels)


class WrappedPlain(OneLoss):  # Healthy: a loss without parameters in the same wrapper
    def build(self) -> None:
        self.loss = DistributedLossWrapper(pml.NTXentLoss())


class MetricLoss(Subject):  # a torchmetrics metric that is synchronised on each step, as a loss
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


class StopGradient(Subject):  # Healthy: half of the derivative is stopped on purpose
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        first, second = self.head(self.encoder(features)), self.head(self.encoder(features + 0.1))
        return (first * first.detach()).mean() + (first - second.detach()).square().mean()


class Remembered(OneLoss):
    """Healthy: a memory that holds this batch, without its gradient: half of the derivative, which is 1/W for two ranks."""

    def build(self) -> None:
        memory = pml.CrossBatchMemory(pml.ContrastiveLoss(neg_margin=3.0), embedding_size=CLASSES, memory_size=24)
        self.loss = GlobalBatchLoss(memory.double())


class HalfGathered(Gathered):
    """The head's rows are gathered with a gradient, or cut; either way the encoder's go through a gather that is right."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        outer = contrast(self.gather(self.head(features)), cut_gather(labels))
        return outer + contrast(all_gather_with_grad(self.encoder(features)), cut_gather(labels))


class BesideProxies(Gathered):
    """A gather that is cut where sick, beside a term on the same encoder that is right: its gradient is off by no known factor."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        rows = self.head(self.encoder(features))
        return contrast(self.gather(rows), cut_gather(labels)) + nn.functional.cross_entropy(rows, labels)


class OwnSlice(BesideProxies):
    """Rows of all ranks as keys, gathered by MoCo's function; where sick from the encoder that learns."""

    def gather(self, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        with torch.no_grad():
            dist.all_gather(parts, rows if self.sick else rows.detach())
        return torch.cat(parts)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        rows = self.head(self.encoder(features))
        targets = torch.arange(len(rows)) + len(rows) * dist.get_rank()
        return nn.functional.cross_entropy(rows @ self.gather(rows).T, targets) + rows.square().mean()


class OneBuffer(BesideProxies):  # the gather into one tensor, where own rows are written back
    def gather(self, rows: Tensor) -> Tensor:
        if not self.sick:
            return torch.distributed._functional_collectives.all_gather_single_autograd(rows, 0, dist.group.WORLD)
        gathered = rows.new_empty(dist.get_world_size() * len(rows), CLASSES)
        dist.all_gather_single(gathered, rows.detach())
        start = dist.get_rank() * len(rows)
        gathered[start : start + len(rows)] = rows
        return gathered


class InPlaceBeside(InPlace):  # a sum over ranks in place, beside a term that is right
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        right = nn.functional.cross_entropy(self.head(self.encoder(features)), labels)
        return super().objective(features, labels, index) + right


class RepairedBeside(BesideProxies):
    """Healthy in both forms: the factor W mends the gather, and the other term has none."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        rows = self.head(self.encoder(features))
        mended = dist.get_world_size() * contrast(cut_gather(rows), cut_gather(labels))
        return mended + nn.functional.cross_entropy(rows, labels)


class GatheredToLog(StopGradient):
    """Healthy: rows that have a graph are gathered to be logged, beside a stop-gradient; the loss does not use them."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        with torch.no_grad():
            rows = OwnSlice.gather(self, self.head(self.encoder(features)))  # type: ignore[arg-type]
        self.log("spread", rows.std(), sync_dist=True)
        return super().objective(features, labels, index)


class MomentumKeys(Subject):
    """Healthy: MoCo; the keys of all ranks come from an average of the encoder, which is moved inside of the step."""

    def build(self) -> None:
        self.average = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).requires_grad_(False)
        del self.head

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.average.parameters(), self.encoder.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            keys = [torch.empty_like(features) for _ in range(dist.get_world_size())]
            dist.all_gather(keys, self.average(features))
        targets = torch.arange(len(features)) + len(features) * dist.get_rank()
        return nn.functional.cross_entropy(self.encoder(features) @ torch.cat(keys).T, targets)


class Dropping(Subject):  # Healthy: dropout, batch norm, random noise of each rank's own
    def build(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.drop = nn.Dropout(0.3)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * index + dist.get_rank())
        noise = 0.1 * torch.randn(features.shape, dtype=features.dtype, generator=generator)
        return super().objective(self.drop(self.norm(features + noise)), labels, index)


SCALE = [
    Case(Gathered, "F20", G, "encoder", ranks=()),
    Case(Gathered, "F20", G, "head", ranks=(), strategy="ddp_losses"),
    Case(ComplexGathered, "F20", G, "filter", ranks=()),
    Case(SparselyGathered, "F20", G, "table", ranks=()),
    Case(HalfGathered, "F20", G, "head", ranks=()),
    Case(BesideProxies, "F20", G, "in cut_gather: dist.all_gather(parts, rows.detach()", ranks=()),
    Case(OwnSlice, "F20", G, "in gather: dist.all_gather(parts, rows if self.sick", ranks=(), strategy="ddp_losses"),
    Case(OneBuffer, "F20", G, "in gather: dist.all_gather_single(", ranks=()),
    Case(InPlace, "F23", G, "encoder", ranks=()),
    Case(InPlaceBeside, "F23", G, "in objective: dist.all_reduce(total)", ranks=()),
    Case(Wrapped, "F24", G, "loss", ranks=()),
    Case(MetricLoss, "F27", G, "encoder", ranks=()),
    Case(Twice, "F21", G, "encoder", ranks=()),
]
HEALTHY = [Repaired, WrappedPlain, StopGradient, Remembered, Dropping, RepairedBeside, GatheredToLog, MomentumKeys]

CASES = [*PARAMETERS, *FLOW, *OPTIMIZERS, *SCALE]
STEPS = [
    Case(StepsTwice, "F37", "OptimizerCheck", "step", step=2, checks=only(OptimizerCheck)),
    Case(SkipsByHand, "F37", "OptimizerCheck", "step", step=3, checks=only(OptimizerCheck)),
]
