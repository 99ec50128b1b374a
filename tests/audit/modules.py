"""Small LightningModules to audit: healthy ones, and one for each fault that the audit has to know by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import LightningModule
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_ddp_losses.collectives import all_gather_with_grad
from lightning_ddp_losses.sharding import ClassShard
from tests.doors import tag_shard

ROWS, FEATURES, DIM, CLASSES = 48, 6, 4, 5


def rows(count: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(x, torch.arange(count) % CLASSES)


def even(batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(rows(), batch_size=batch_size, **options)


class PerRank(Dataset[Any]):
    """Batches that are cut already; rank r of W takes batch W i + r (with use_distributed_sampler=False and batch_size None)."""

    def __init__(self, sizes: list[int]) -> None:
        self.parts = list(torch.split(torch.arange(sum(sizes)), sizes))
        self.x, self.y = rows(sum(sizes)).tensors

    def __len__(self) -> int:
        return len(self.parts) // world()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= len(self):
            raise IndexError(index)
        part = self.parts[index * world() + rank()]
        return self.x[part], self.y[part]


def uneven(sizes: list[int]) -> DataLoader[Any]:
    return DataLoader(PerRank(sizes), batch_size=None)


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Module(LightningModule):  # an encoder and a loss; faults override one method
    def __init__(self, loss: nn.Module | None = None, *, momentum: float = 0.9) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.momentum = momentum
        self.encoder = self.build()
        self.loss = loss if loss is not None else nn.CrossEntropyLoss()

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        return self.loss(z, y)

    def inputs(self, x: Tensor) -> Tensor:
        return x

    def training_step(self, batch: Any, index: int) -> Any:
        return self.objective(self.encoder(self.inputs(batch[0])), batch[1])

    def trained(self) -> list[nn.Parameter]:
        return list(self.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.trained(), lr=0.05, momentum=self.momentum)


def learned(name: str = "ArcFaceLoss", **options: Any) -> nn.Module:
    torch.manual_seed(4)
    return getattr(pml, name)(num_classes=CLASSES, embedding_size=CLASSES, **options)


def own_slot(z: Tensor) -> Tensor:
    if world() == 1:
        return z
    parts = [torch.empty_like(z) for _ in range(world())]
    dist.all_gather(parts, z.detach())
    parts[rank()] = z
    return torch.cat(parts)


class OwnSlotGather(Module):
    """The usual recipe: all_gather, own part put back. The loss's own weights (of `ArcFace`) are right, the encoder's 1/W."""

    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        return self.loss(own_slot(z), own_slot(y.float()).long())


class BesideProxies(Module):
    """The usual recipe beside a term that is right: the encoder's gradient is off by no known factor."""

    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        rows, labels = own_slot(z), own_slot(y.float()).long()
        alike = (labels[:, None] == labels).float()
        return F.cross_entropy(z, y) + F.mse_loss(rows @ rows.T, alike)


class LightningGather(Module):
    """Lightning's own gather, which has a gradient if it is asked for one, next to a term that is right."""

    def __init__(self, *, sync_grads: bool) -> None:
        super().__init__()
        self.sync_grads = sync_grads

    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        rows, labels = z, y
        if world() > 1:
            rows = self.all_gather(z, sync_grads=self.sync_grads).flatten(0, 1)
            labels = self.all_gather(y).flatten()
        same = (y[:, None] == labels).float()
        return F.cross_entropy(z, y) + F.mse_loss(z @ rows.T, same)


class CutGather(Module):
    """A gather whose result has no graph, made a leaf so that backward runs: the encoder has no gradient."""

    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        if world() > 1:
            z, y = self.all_gather(z).flatten(0, 1).requires_grad_(), self.all_gather(y).flatten()
        return self.loss(z, y)


class InPlaceReduce(Module):
    """The value becomes global (all_reduce works in place on the tensor's memory), the graph stays this rank's."""

    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        total, count = F.cross_entropy(z, y, reduction="sum"), torch.tensor(float(len(y)))
        if world() > 1:
            dist.all_reduce(total.data)
            dist.all_reduce(count)
        return total / count


class DoubleScaling(Module):  # a gather with gradient, and a factor W besides
    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        whole = self.all_gather(z, sync_grads=True).reshape(-1, z.shape[-1]) if world() > 1 else z
        labels = self.all_gather(y).reshape(-1) if world() > 1 else y
        return self.loss(whole, labels) * world()


class MetricAsLoss(Module):
    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanSquaredError(dist_sync_on_step=True)

    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        return self.metric(z, F.one_hot(y, CLASSES).float())


class SquaredMean(Module):  # compares no rows, and is not linear in their mean
    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        return self.loss(z, y) + z.mean(0).square().sum()


class GradientPenalty(Module):  # a penalty on the gradient of the batch's mean loss
    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(z, y)
        (gradient,) = torch.autograd.grad(loss, [self.encoder[2].weight], create_graph=True)
        return loss + gradient.square().sum()


class HandWrittenContrast(Module):  # compares rows, as a function that no table knows
    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        logits = z @ z.T - torch.eye(len(z)) * 1e3
        return -(logits.log_softmax(1) * (y[:, None] == y)).mean()


class SameNoise(Module):  # noise from a generator that every rank seeds alike
    def inputs(self, x: Tensor) -> Tensor:
        return x + 0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(self.global_step))


class ByPlace(Module):  # weights by a row's place in its batch
    def inputs(self, x: Tensor) -> Tensor:
        return x * torch.arange(1.0, len(x) + 1)[:, None] / 8


class Sharded(Module):  # a head whose rows are dealt to the ranks: logits of own classes for the rows of all
    def configure_model(self) -> None:
        if hasattr(self, "head"):
            return
        torch.manual_seed(5)
        whole, W = torch.randn(6, CLASSES), world()
        part = self.part(rank(), W)
        self.head = nn.Linear(CLASSES, part.stop - part.start, bias=False)
        self.head.weight = nn.Parameter(whole[part].clone())
        tag_shard(self.head.weight, ClassShard(part.start, part.stop, 6))

    def part(self, rank: int, world_size: int) -> slice:
        return slice(rank * 6 // world_size, (rank + 1) * 6 // world_size)

    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        W = world()
        scaled = W * z - (W - 1) * z.detach()  # DDP's mean divides the encoder's gradient, and that of nobody's block
        everyone = all_gather_with_grad(scaled)
        return self.head(everyone).square().sum() / len(everyone)


class ShardedTwice(Sharded):  # every rank holds the only block: each is a replica of the others
    def part(self, rank: int, world_size: int) -> slice:
        return slice(0, 6)

    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        everyone = all_gather_with_grad(z)
        return self.head(everyone).square().sum() / len(everyone)


class BatchNorm(Module):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


class OwnCovariance(BatchNorm):
    """Distances of pairs, and a covariance of one rank's rows as a small part of the loss. Both leave the last bias without a gradient."""

    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        return (z[::2] - z[1::2]).square().mean() + 0.05 * z.T.cov().square().mean()


class SyncedNorm(nn.BatchNorm1d):
    """Stands in for a synchronised batch norm on the CPU: its class, parameters of its own."""


class ConvertedLate(BatchNorm):
    def on_train_start(self) -> None:
        if world() == 1:
            return
        new = SyncedNorm(8)
        new.load_state_dict(self.encoder[1].state_dict())
        self.encoder[1] = new
        self.optimizers().param_groups[0]["params"] = list(self.parameters())


class Dropout(Module):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, CLASSES))


class Noise(Module):
    def inputs(self, x: Tensor) -> Tensor:
        return x + 0.3 * torch.randn_like(x)


class Permuted(Module):  # mixup: rows are mixed with rows drawn at random, which no mean can replace
    def inputs(self, x: Tensor) -> Tensor:
        return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


class Hidden(Module):
    def __init__(self, name: str = "ArcFaceLoss") -> None:
        super().__init__()
        self.hidden = [learned(name)]

    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        return self.hidden[0](z, y)

    def trained(self) -> list[nn.Parameter]:
        return [*self.parameters(), *self.hidden[0].parameters()]


class Forgotten(Module):
    def trained(self) -> list[nn.Parameter]:
        return list(self.encoder.parameters())


class StaleOptimizer(Module):  # the optimizer holds a copy of the encoder
    def trained(self) -> list[nn.Parameter]:
        self.copies = [copy.deepcopy(self.encoder)]
        return list(self.copies[0].parameters())


class CreatedLate(Module):
    def on_train_start(self) -> None:
        torch.manual_seed(7)
        self.late = nn.Linear(CLASSES, CLASSES)
        self.optimizers().add_param_group({"params": list(self.late.parameters())})

    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.late(z), y)


class Replaced(Module):
    def on_train_start(self) -> None:
        old = self.encoder[2].weight
        self.encoder[2].weight = nn.Parameter(old.detach().clone())
        self.optimizers().param_groups[0]["params"] = list(self.parameters())


class Casting(nn.Linear):
    """What pytorch-metric-learning's losses do to their weight when embeddings come in another dtype."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.double()
        return F.linear(x.double(), self.weight)


class ChangedDtype(Module):  # a head in a DDP of its own, which loses its hook when the head changes its weight's dtype
    def __init__(self) -> None:
        super().__init__()
        self.head = Casting(CLASSES, CLASSES, bias=False)
        self._ddp_params_and_buffers_to_ignore = ["head.weight"]

    def on_fit_start(self) -> None:
        self.called = [nn.parallel.DistributedDataParallel(self.head) if world() > 1 else self.head]

    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.called[0](z), y)


class CastBack(Module):  # a cast there and back, after which no gradient passes where DDP's hooks hang
    def on_train_start(self) -> None:
        self.double()
        self.float()


class ClippedInStep(Module):  # training_step clips what earlier micro-batches have left, before Lightning's backward
    def training_step(self, batch: Any, index: int) -> Any:
        nn.utils.clip_grad_norm_(self.parameters(), 0.01)
        return super().training_step(batch, index)


class ClippedInHook(Module):  # one rank clips by itself, in the hook before the step
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if rank() == 1:
            nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class ClippedByOneRank(Module):  # one rank clips by itself, where Lightning clips
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if rank() == 1:
            self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")


class Nudged(Module):  # one rank writes a parameter between two steps
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if rank() == 1 and index == 1:
            with torch.no_grad():
                self.encoder[2].bias.add_(0.1)


class Unfrozen(Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == 1:
            self.encoder[0].requires_grad_(True)


class FrozenLate(Module):
    def on_train_start(self) -> None:
        self.encoder[0].requires_grad_(False)


class RankSeeded(Module):  # DDP is told to leave the head alone, and each rank has built its own
    def configure_model(self) -> None:
        if not hasattr(self, "head"):
            torch.manual_seed(rank())
            self.head = nn.Linear(CLASSES, CLASSES)
            self._ddp_params_and_buffers_to_ignore = ["head.weight", "head.bias"]

    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.head(z), y)


class OtherOrder(Module):
    def configure_model(self) -> None:
        if not hasattr(self, "left"):
            for name in ("left", "right") if rank() == 0 else ("right", "left"):
                torch.manual_seed(1 if name == "left" else 2)
                setattr(self, name, nn.Linear(CLASSES, CLASSES))

    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.left(z).tanh() + self.right(z), y)


class OwnBackward(Module):
    def on_after_backward(self) -> None:
        x = torch.full((2, FEATURES), float(rank() + 1))
        self.encoder(x).square().mean().backward()


class Manual(Module):
    def __init__(self, loss: nn.Module | None = None, *, right: bool) -> None:
        super().__init__(loss)
        self.automatic_optimization = False
        self.right = right

    def training_step(self, batch: Any, index: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.objective(self.encoder(batch[0]), batch[1])
        self.manual_backward(loss) if self.right else loss.backward()
        optimizer.step()
        return loss


class TwoSteps(Module):
    """Two optimizer steps with each batch: the loss of the second one weights rows by their place."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        for weights in (torch.ones(len(batch[1])), torch.arange(len(batch[1]))):
            optimizer.zero_grad()
            self.manual_backward((self.encoder(batch[0])[:, 0] * weights).square().mean())
            optimizer.step()


class RateOfOwnLoss(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + rank())


class InfiniteOnOneRank(Module):
    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        return self.loss(z, y) * (float("inf") if rank() == 1 else 1.0)


class NotFiniteLater(Module):  # from the second step on the gradient is NaN, on ranks as in one process
    def objective(self, z: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(z, y)
        return loss + (0 * z).sum().sqrt() if self.global_step else loss


class RowsOfOthers(Module):  # no known pattern: each rank's head works on another part of the features
    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), ByRank(), nn.Linear(8, CLASSES))


class ByRank(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.roll(rank(), dims=1) * (1.0 + 0.5 * (world() > 1))


class SameOnAllRanks(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([tuple(t[i : i + 8] for t in rows().tensors) for i in range(0, ROWS, 8)])


class Masked(PerRank):  # even batches; in every second one most targets are ignored
    def __init__(self) -> None:
        super().__init__([8] * 6)
        self.y = torch.where((torch.arange(ROWS) // 8 % 2 == 1) & (torch.arange(ROWS) % 8 > 1), -100, self.y)


class NoTargets(PerRank):  # even batches; the first one of rank 1 has no valid target
    def __init__(self) -> None:
        super().__init__([4] * 8)
        self.y = torch.where(torch.arange(32) // 4 == 1, -100, self.y)


Make = Callable[[], LightningModule]
PMLWrapper = DistributedLossWrapper


class TwoLoaders(Module):  # a loss on the batch of each loader, where it has one
    def training_step(self, batch: Any, index: int) -> Any:
        batches = batch.values() if isinstance(batch, dict) else batch
        losses = [self.objective(self.encoder(each[0]), each[1]) for each in batches if each is not None]
        return torch.stack(losses).sum()
