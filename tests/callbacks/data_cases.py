"""Faults of data, losses and state next to the parameters, each a sabotaged run with its healthy twin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytorch_metric_learning.losses as pml
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins.layer_sync import LayerSync
from pytorch_metric_learning.samplers import MPerClassSampler
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)
from torchmetrics import Metric

from lightning_ddp_losses import GlobalBatchLoss, GlobalBatchSampler, global_mean, ssl, synced
from tests.callbacks.harness import BATCHES, CLASSES, WIDTH, Case, Subject, Validated


def dataset(rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(
        torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64), torch.arange(rows) % CLASSES
    )


class Loaded(Subject):  # a data set of 24 rows for each rank, divided among them
    @property
    def rows(self) -> int:
        return 24 * dist.get_world_size()

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(self.rows), batch_size=4, sampler=self.sampler())

    def sampler(self) -> Any:
        return None


class SameRows(Loaded):  # every rank walks through the whole data set in the same order
    def sampler(self) -> Any:
        return None if self.sick else DistributedSampler(dataset(self.rows))


class SmallBatches(SameRows):  # the same with one row at a time: it takes eight to be sure
    def train_dataloader(self) -> Any:
        return DataLoader(dataset(self.rows), batch_size=1, sampler=self.sampler())


class OwnLoader:  # batches of the whole data set, without a DataLoader
    def __init__(self, step: int, start: int) -> None:
        self.step, self.start = step, start

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        rows = dataset(4 * self.step * len(self))
        return iter(
            [rows[index :: self.step * len(self)] for index in range(self.start, self.step * len(self), self.step)]
        )


class SameBatches(Subject):  # Lightning puts no sampler into a loader of one's own
    def train_dataloader(self) -> Any:
        return OwnLoader(1, 0) if self.sick else OwnLoader(dist.get_world_size(), dist.get_rank())


class Constant(Loaded):  # Healthy: one batch over and over, on purpose, proves nothing
    def train_dataloader(self) -> Any:
        return DataLoader([dataset(4)[:] for _ in range(4)], batch_size=None)


class Stream(IterableDataset[Any]):
    def __init__(self, batches: int, divided: bool) -> None:
        self.batches, self.divided = batches, divided

    def __iter__(self) -> Iterator[Any]:
        rows = 4 * dist.get_world_size()
        features, labels = dataset(12 * rows).tensors
        offset = 4 * dist.get_rank() if self.divided else 0
        for batch in range(self.batches):
            start = rows * batch + offset
            yield features[start : start + 4], labels[start : start + 4]


class Undivided(Subject):  # an iterable dataset that gives every rank everything
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(6, divided=not self.sick), batch_size=None)


class ShortStream(Subject):  # an iterable dataset that ends earlier on one rank
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(3 if self.odd else 6, divided=True), batch_size=None)


class ShortLoader(Loaded):  # twelve batches on one rank, ten on the other
    def train_dataloader(self) -> Any:
        rank = dist.get_rank()
        first = 40 if self.odd else 48
        features, labels = dataset(48).tensors
        data = TensorDataset(features[:first] + rank, labels[:first])
        return DataLoader(list(zip(data.tensors[0].split(4), data.tensors[1].split(4), strict=True)), batch_size=None)


class Replacement(Loaded):  # Healthy: rows drawn with replacement, by each rank for itself
    def sampler(self) -> Any:
        generator = torch.Generator().manual_seed(dist.get_rank())
        return RandomSampler(dataset(self.rows), replacement=True, num_samples=40, generator=generator)


class Unseeded(Loaded):  # a random sampler that Lightning cuts by rank, drawn from another seed on each
    def sampler(self) -> Any:
        generator = torch.Generator().manual_seed(dist.get_rank() if self.sick else 0)
        return SubsetRandomSampler(range(self.rows), generator=generator)


class PerClass(Loaded):  # batches with four rows of each class
    def train_dataloader(self) -> Any:
        data = dataset(self.rows)
        sampler = MPerClassSampler(data.tensors[1], m=4, batch_size=12, length_before_new_iter=self.rows)
        if self.sick:
            return DataLoader(data, batch_size=6, sampler=sampler)
        return DataLoader(data, batch_sampler=GlobalBatchSampler.batches(sampler, 12, drop_last=True, seed=0))


class HeldSampler(BatchSampler):  # keeps its sampler under a name that Lightning does not look for
    def __init__(self, inner: Any, name: str) -> None:
        super().__init__(inner, 4, drop_last=True)
        if name != "sampler":
            self.sampler = range(len(inner.dataset))
            setattr(self, name, inner)
        self.name = name

    def __iter__(self) -> Iterator[list[int]]:
        rows = list(getattr(self, self.name))
        return (rows[start : start + 4] for start in range(0, 24, 4))

    def __len__(self) -> int:
        return 6


class StaleEpoch(Loaded):  # the epoch never reaches the sampler
    def train_dataloader(self) -> Any:
        inner = DistributedSampler(dataset(self.rows), shuffle=True)
        return DataLoader(dataset(self.rows), batch_sampler=HeldSampler(inner, "inner" if self.sick else "sampler"))


class Unpaired(Subject):  # a contrastive loss whose rows all have labels of their own
    def build(self) -> None:
        self.contrast = pml.ContrastiveLoss()

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        own = torch.arange(len(labels)) if self.odd else torch.arange(len(labels)) % 2
        embeddings = self.encoder(features)
        return super().objective(features, labels, index) + self.contrast(embeddings, own)


class ForeignGather(Subject):
    """A wrapper that gathers equal numbers of rows only; gloo ends the process where they differ."""

    def build(self) -> None:
        self.contrast = DistributedLossWrapper(pml.ContrastiveLoss())

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features, labels, index) + self.contrast(self.encoder(features), labels)

    def train_dataloader(self) -> Any:
        rows = 10 if self.odd else 12
        features, labels = (t[12 * dist.get_rank() :][:rows] for t in dataset(12 * dist.get_world_size()).tensors)
        return DataLoader(TensorDataset(features, labels), batch_size=4, drop_last=False)


class Lonely(Loaded):  # batch norm, and a last batch of one row
    @property
    def rows(self) -> int:
        return (21 if self.sick else 22) * dist.get_world_size()

    def build(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(self.norm(features), labels, index)

    def sampler(self) -> Any:
        return DistributedSampler(dataset(self.rows))


class Padded(Loaded):  # a held-out set that the ranks do not divide
    def sampler(self) -> Any:
        return DistributedSampler(dataset(self.rows))

    def val_dataloader(self) -> Any:
        held_out = dataset(4 * dist.get_world_size() + self.sick)
        return DataLoader(held_out, batch_size=2, sampler=DistributedSampler(held_out, shuffle=False))

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        pass


class OwnBatches(BatchSampler):
    """A batch sampler of the user's, which Lightning builds around a sampler that pads."""


class PaddedInside(Padded):
    """Held-out sets that the ranks do not divide, dealt without repeating; or batches that Lightning pads."""

    def val_dataloader(self) -> Any:
        held_out = dataset(4 * dist.get_world_size() + 1)
        order = SequentialSampler(held_out)
        exact = DataLoader(held_out, batch_size=2)
        if self.sick:
            exact = DataLoader(held_out, batch_sampler=OwnBatches(order, 2, False))
        rows = dataset(7 * dist.get_world_size() - 1)
        ours = GlobalBatchSampler(SequentialSampler(rows), 4)
        return [exact, DataLoader(rows, batch_size=4, sampler=ours)]


class StreamOfWindows(Subject):  # an iterable data set of six batches, whose end is known at its last one
    def train_dataloader(self) -> Any:
        return DataLoader(Stream(6, divided=True), batch_size=None)


def three_or_two(sick: bool) -> int:
    return 3 if sick else 2


def four_or_three(sick: bool) -> int:
    return 4 if sick else 3


CUT = {"use_distributed_sampler": True}
SHORT = {"accumulate_grad_batches": three_or_two}
SHORT_STREAM = {"accumulate_grad_batches": four_or_three}

DATA = [
    Case(SameRows, "F67", "BatchCheck", "batches", step=1, ranks=(0, 1)),
    Case(SameRows, "F67", "BatchCheck", "batches", step=1, ranks=(0, 1), strategy="ddp_losses"),
    Case(SmallBatches, "F67", "BatchCheck", "batches", step=7, ranks=(0, 1)),
    Case(Undivided, "F71", "BatchCheck", "batches", step=1, ranks=(0, 1)),
    Case(ShortStream, "F36", "BatchCheck", "number of batches", step=2),
    Case(ShortLoader, "F36", "BatchCheck", "number of batches"),
    Case(Unseeded, "F69", "BatchCheck", "order", options=CUT),
    Case(PerClass, "F68", "BatchCheck", "MPerClassSampler", ranks=(), options=CUT),
    Case(StaleEpoch, "F70", "BatchCheck", "batch_sampler.inner", step=6, ranks=(), options={"max_epochs": 2}),
    Case(Unpaired, "F31", "BatchCheck", "contrast", step=2),
    Case(ForeignGather, "F28", "BatchCheck", "contrast", ranks=()),
    Case(Padded, "F54", "BatchCheck", "validation loader 0", step=5, ranks=()),
    Case(PaddedInside, "F54", "BatchCheck", "loader 0", step=5, ranks=(), strategy="ddp_losses", options=CUT),
]
HEALTHY = [Constant, Replacement]


class NotANumber(Subject):  # the loss of one rank is NaN at its third batch
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        loss = super().objective(features, labels, index)
        return loss * float("nan") if self.odd and index == 2 else loss


class MissingLoss(Subject):  # one rank skips a step
    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
        return None if self.odd and index == 1 else super().training_step(batch, index)


class ZeroFromTheStart(Subject):  # one rank's loss selects nothing
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        loss = super().objective(features, labels, index)
        return loss * 0 if self.odd else loss


class MeanOfMeans(Subject):  # targets that are ignored on one rank only
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


class Watched(Validated):  # early stopping on a value that each rank has for itself
    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val_loss", self.objective(*batch, index), sync_dist=not self.sick, batch_size=4)


class OtherKeys(Subject):  # each rank logs under a name of its own
    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
        loss = self.objective(*batch, index)
        name = f"loss_{dist.get_rank()}" if self.sick else "loss"
        self.log(name, loss.detach(), on_step=False, on_epoch=True, sync_dist=True, batch_size=4)
        return loss


class OtherValidationKeys(Watched):  # the same in validation
    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        name = f"val_loss_{dist.get_rank()}" if self.sick else "val_loss"
        self.log(name, self.objective(*batch, index), sync_dist=True, batch_size=4)


def stop_early(sick: bool) -> list[Any]:
    return [EarlyStopping("val_loss", patience=3)]


LOSSES = [
    Case(NotANumber, "F79", "LossCheck", "loss", step=2),
    Case(NotANumber, "F79", "LossCheck", "loss", step=2, strategy="ddp_losses"),
    Case(MissingLoss, "F35", "LossCheck", "loss", step=1),
    Case(ZeroFromTheStart, "F31", "LossCheck", "loss", step=4, options={"max_epochs": 2}),
    Case(MeanOfMeans, "F30", "LossCheck", "loss", step=2, ranks=()),
    Case(GlobalMean, "F30", "LossCheck", "loss", step=2, ranks=()),
    Case(Watched, "F55", "LossCheck", "val_loss", step=3, options={"callbacks": stop_early}),
    Case(OtherKeys, "F46", "LossCheck", "loss_0", step=0),
    Case(OtherValidationKeys, "F46", "LossCheck", "val_loss_0", step=3),
]


class Memory(Subject):  # a cross-batch memory: of one rank's rows, or of all ranks'
    def build(self) -> None:
        memory = pml.CrossBatchMemory(pml.ContrastiveLoss(), embedding_size=WIDTH, memory_size=64)
        self.contrast: nn.Module = (memory if self.sick else GlobalBatchLoss(memory)).double()

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features, labels, index) + self.contrast(self.encoder(features), labels)


class OwnFirst(Subject):  # rows of all ranks in a queue, one's own first
    def build(self) -> None:
        self.register_buffer("queue", torch.zeros(64, WIDTH, dtype=torch.float64))

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        rows = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, features.contiguous())
        if self.odd:
            rows.insert(0, rows.pop(dist.get_rank()))
        self.queue[:] = torch.cat([*rows, self.queue])[:64]
        return super().objective(features, labels, index)


class CenterLoss(nn.Module):  # a running sum of the rows seen
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH, dtype=torch.float64))


class RunningSum(Subject):  # a loss that keeps a sum of its own rank's rows in a buffer
    def build(self) -> None:
        self.center = CenterLoss()

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        seen = features.sum(0)
        if not self.sick:
            dist.all_reduce(seen)
        self.center.total += seen
        return super().objective(features, labels, index)


class RunningMean(Subject):  # a running mean of rows in a buffer: of one rank's rows, or of all ranks'
    def build(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        total, rows = features.sum(0), len(features)
        mean = total / rows if self.sick else global_mean(total, rows)
        self.mean = 0.9 * self.mean + 0.1 * mean  # a new tensor in each step
        return super().objective(features - self.mean, labels, index)


class LateMean(Subject):  # a centre that is made after the last step, by `.data`, which autograd does not count
    def build(self) -> None:
        self.register_buffer("centre", torch.zeros(WIDTH))

    def on_train_epoch_end(self) -> None:
        self.centre.data += self.sick * dist.get_rank()


class LateShape(Subject):  # a buffer that grows with this rank's rows
    def build(self) -> None:
        self.register_buffer("kept", torch.zeros(0))

    def on_train_epoch_end(self) -> None:
        self.kept = torch.zeros(1 + self.sick * dist.get_rank())


class OtherBuffers(Subject):  # buffers that may differ, and buffers that are equal because their parameters are
    def build(self) -> None:
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("counter", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("nothing", None)
        self.register_buffer("constant", torch.arange(4.0) + 1j)
        self.encoder = nn.utils.spectral_norm(self.encoder)
        self.norm = nn.InstanceNorm1d(1, track_running_stats=True, dtype=torch.float64)
        self.centre = ssl.Center(WIDTH, momentum=0.9)
        self.average = AveragedModel(self.head).requires_grad_(False)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        self.cache = torch.full((3,), float(dist.get_rank()))
        self.counter += dist.get_rank()
        self.average.update_parameters(self.head)
        self.centre.update(features)
        return super().objective(self.norm(features[:, None])[:, 0], labels, index)


class Normalised(Subject):  # batch norm; the data of one rank lie elsewhere
    def build(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(self.norm(features + (20.0 if self.odd else 0.0)), labels, index)

    def train_dataloader(self) -> Any:
        shift = 0.01 * torch.arange(32)[:, None]
        return DataLoader([(x.repeat(8, 1) + shift, y.repeat(8)) for x, y in super().train_dataloader()], None)


class OurNorm(nn.Identity):
    """Stands for a layer that synchronises on the CPU."""


class Convert(LayerSync):
    def apply(self, model: nn.Module) -> nn.Module:
        for name, child in model.named_children():
            setattr(model, name, OurNorm() if isinstance(child, nn.BatchNorm1d) else child)
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        return model


class HiddenNorm(Subject):  # a projector with batch norm, in a list
    def build(self) -> None:
        projector = nn.Sequential(nn.BatchNorm1d(WIDTH, dtype=torch.float64))
        if self.sick:
            self.projectors = [projector]
        else:
            self.norm = projector[0]


class Collected(Metric):  # keeps what it sees; gathered item by item, or as one
    def __init__(self, reduce: str | None) -> None:
        super().__init__()
        self.add_state("values", default=[], dist_reduce_fx=reduce)

    def update(self, value: Tensor) -> None:
        self.values.append(value)

    def compute(self) -> Tensor:
        seen = [value.reshape(-1).double() for value in self.values]
        return torch.cat(seen).mean() if seen else torch.tensor(0.0)


class Collecting(Validated):
    reduce: str | None = None

    def build(self) -> None:
        self.collected = Collected(self.reduce)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.collected.update(batch[0].mean(0))

    def on_validation_epoch_end(self) -> None:
        self.collected.compute()
        self.collected.reset()


class FewerUpdates(Collecting):  # one rank updates a metric less often
    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        if not (self.odd and index == 1):
            super().validation_step(batch, index)


class FewerInAList(FewerUpdates):  # the same of a metric that is no submodule
    def build(self) -> None:
        self.hidden = [Collected(None)]
        self.__dict__["collected"] = self.hidden[0]


class TwoStates(Collected):  # two states of one metric
    def __init__(self) -> None:
        super().__init__(None)
        self.add_state("labels", default=[], dist_reduce_fx=None)

    def update(self, value: Tensor) -> None:
        super().update(value)
        self.labels.append(value)


class FewerOfTwoStates(FewerUpdates):
    def build(self) -> None:
        self.collected = TwoStates()


class FewerSynced(FewerUpdates):  # Healthy: the same of a metric whose one exchange takes any number of updates
    def build(self) -> None:
        self.collected = synced(Collected(None))

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        if index <= dist.get_rank():
            self.collected.update(batch[0].mean(0))


class OtherDtype(Collecting):  # one rank's state has another dtype
    reduce = "cat"

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.collected.update(batch[0].mean(0).float() if self.odd else batch[0].mean(0))


class MetricElsewhere(Subject):  # a metric in a list, which nobody moves
    def build(self) -> None:
        self.metrics = [Collected("cat").to("meta" if self.sick else "cpu")]


class Threads(Subject):  # nn.DataParallel inside
    def build(self) -> None:
        if self.sick:
            self.threads = nn.DataParallel(nn.Identity())


class Scale(nn.Module):  # multiplies by a buffer that differs per rank
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self.register_buffer("by", torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.by


class TwoForwards(Subject):  # a DDP of the user's own runs twice before backward, while its buffer is this rank's
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

STATES = [
    Case(Memory, "F64", "BufferSyncCheck", "contrast.embedding_memory"),
    Case(Memory, "F64", "BufferSyncCheck", "contrast.embedding_memory", strategy="ddp_losses"),
    Case(OwnFirst, "F26", "BufferSyncCheck", "queue"),
    Case(RunningSum, "F49", "BufferSyncCheck", "center.total"),
    Case(Normalised, "F59", "BufferSyncCheck", "batch norm", step=4, ranks=()),
    Case(HiddenNorm, "F60", "BufferSyncCheck", "projectors[0]", ranks=(), options=NORMS),
    Case(FewerUpdates, "F51", "BufferSyncCheck", "collected.values", step=3),
    Case(OtherDtype, "F52", "BufferSyncCheck", "collected.values", step=3),
    Case(MetricElsewhere, "F50", "DeviceCheck", "self.metrics[0]", ranks=()),
    Case(TwoForwards, "F41", "BufferSyncCheck", "DistributedDataParallel"),
    Case(Threads, "F73", "DeviceCheck", "threads", ranks=()),
]

HEALTHY += [FewerSynced, OtherBuffers]

WINDOWS = [
    Case(Subject, "F84", "BatchCheck", "has 1 of 3 batches", ranks=(), options=SHORT),
    Case(FewerUpdates, "F51", "BufferSyncCheck", "collected.values", step=3, strategy="ddp_losses"),
    Case(FewerInAList, "F51", "BufferSyncCheck", "collected.values", step=3),
    Case(StreamOfWindows, "F84", "BatchCheck", "has 2 of 4 batches", step=1, ranks=(), options=SHORT_STREAM),
    Case(Subject, "F84", "BatchCheck", "has 1 of 3 batches", ranks=(), strategy="ddp_losses", options=SHORT),
]

LOADERS = [
    Case(FewerOfTwoStates, "F51", "BufferSyncCheck", "collected.values, collected.labels", step=3),
    Case(SameBatches, "F67", "BatchCheck", "come from `OwnLoader`, which is not a DataLoader", step=1, ranks=(0, 1)),
]

BUFFERS = [
    Case(RunningMean, "F64", "BufferSyncCheck", "mean", step=0),
    Case(RunningMean, "F64", "BufferSyncCheck", "mean", step=0, strategy="ddp_losses"),
    Case(RunningMean, "F64", "BufferSyncCheck", "mean", step=0, options={"accumulate_grad_batches": 2}),
    Case(LateMean, "F64", "BufferSyncCheck", "centre", step=BATCHES),
    Case(LateMean, "F64", "BufferSyncCheck", "centre", step=BATCHES, strategy="ddp_losses"),
    Case(LateShape, "F64", "BufferSyncCheck", "kept", step=BATCHES),
    Case(LateShape, "F64", "BufferSyncCheck", "kept", step=BATCHES, strategy="ddp_losses"),
]
CASES = [*DATA, *LOSSES, *STATES, *WINDOWS, *LOADERS, *BUFFERS]
