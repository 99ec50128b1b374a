"""Data that ranks share, miss, or get in the wrong order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytorch_metric_learning.losses as pml
import torch
import torch.distributed as dist
from pytorch_metric_learning.samplers import MPerClassSampler
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import Tensor, nn
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

from lightning_ddp_losses import GlobalBatchSampler
from tests.callbacks.harness import CLASSES, WIDTH, Case, Subject

__all__ = ["CASES", "HEALTHY", "Lonely"]


def dataset(rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(
        torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64), torch.arange(rows) % CLASSES
    )


class Loaded(Subject):
    """A data set of 24 rows for each rank, divided among them."""

    @property
    def rows(self) -> int:
        return 24 * dist.get_world_size()

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(self.rows), batch_size=4, sampler=self.sampler())

    def sampler(self) -> Any:
        return None


class SameRows(Loaded):
    """Every rank walks through the whole data set in the same order."""

    def sampler(self) -> Any:
        return None if self.sick else DistributedSampler(dataset(self.rows))


class SmallBatches(SameRows):
    """The same with one row at a time: it takes eight to be sure."""

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(self.rows), batch_size=1, sampler=self.sampler())


class Constant(Loaded):
    """Healthy: one batch over and over, on purpose, proves nothing."""

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


class Undivided(Subject):
    """An iterable dataset that gives every rank everything."""

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(6, divided=not self.sick), batch_size=None)


class ShortStream(Subject):
    """An iterable dataset that ends earlier on one rank."""

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(3 if self.odd else 6, divided=True), batch_size=None)


class ShortLoader(Loaded):
    """Twelve batches on one rank, ten on the other."""

    def train_dataloader(self) -> Any:
        rank = dist.get_rank()
        first = 40 if self.odd else 48
        features, labels = dataset(48).tensors
        data = TensorDataset(features[:first] + rank, labels[:first])
        return DataLoader(list(zip(data.tensors[0].split(4), data.tensors[1].split(4), strict=True)), batch_size=None)


class Replacement(Loaded):
    """Healthy: rows drawn with replacement, by each rank for itself."""

    def sampler(self) -> Any:
        generator = torch.Generator().manual_seed(dist.get_rank())
        return RandomSampler(dataset(self.rows), replacement=True, num_samples=40, generator=generator)


class Unseeded(Loaded):
    """A random sampler that Lightning cuts by rank, drawn from another seed on each."""

    def sampler(self) -> Any:
        generator = torch.Generator().manual_seed(dist.get_rank() if self.sick else 0)
        return SubsetRandomSampler(range(self.rows), generator=generator)


class PerClass(Loaded):
    """Batches with four rows of each class."""

    def train_dataloader(self) -> Any:
        data = dataset(self.rows)
        sampler = MPerClassSampler(data.tensors[1], m=4, batch_size=12, length_before_new_iter=self.rows)
        if self.sick:
            return DataLoader(data, batch_size=6, sampler=sampler)
        return DataLoader(data, batch_sampler=GlobalBatchSampler.batches(sampler, 12, drop_last=True, seed=0))


class HeldSampler(BatchSampler):
    """Keeps its sampler under a name that Lightning does not look for."""

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


class StaleEpoch(Loaded):
    """The epoch never reaches the sampler."""

    def train_dataloader(self) -> Any:
        inner = DistributedSampler(dataset(self.rows), shuffle=True)
        return DataLoader(dataset(self.rows), batch_sampler=HeldSampler(inner, "inner" if self.sick else "sampler"))


class Unpaired(Subject):
    """A contrastive loss whose rows all have labels of their own."""

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


class Lonely(Loaded):
    """Batch norm, and a last batch of one row."""

    @property
    def rows(self) -> int:
        return (21 if self.sick else 22) * dist.get_world_size()

    def build(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(self.norm(features), labels, index)

    def sampler(self) -> Any:
        return DistributedSampler(dataset(self.rows))


class Padded(Loaded):
    """A held-out set that the ranks do not divide."""

    def sampler(self) -> Any:
        return DistributedSampler(dataset(self.rows))

    def val_dataloader(self) -> Any:
        held_out = dataset(4 * dist.get_world_size() + self.sick)
        return DataLoader(held_out, batch_size=2, sampler=DistributedSampler(held_out, shuffle=False))

    def validation_step(self, batch: Any, index: int) -> None:
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

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        pass


CUT = {"use_distributed_sampler": True}

CASES = [
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
    Case(
        PaddedInside, "F54", "BatchCheck", "validation loader 0", step=5, ranks=(), strategy="ddp_losses", options=CUT
    ),
]
HEALTHY = [Constant, Replacement]
