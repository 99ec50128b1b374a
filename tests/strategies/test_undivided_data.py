"""Iterable data sets that all ranks read as a whole are found without checks, in training and in evaluation; constant ones are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_losses import DDPLossStrategy
from lightning_ddp_losses.testing import RankPool
from tests.fits import MeanSquare, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")

TABLE = torch.sin(torch.arange(120.0, dtype=torch.float64) ** 2).reshape(40, 3)


class Divided(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(TABLE[dist.get_rank() :: dist.get_world_size()])


class Whole(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(TABLE)


class Sized(Whole):
    def __len__(self) -> int:
        return len(TABLE)


class Pairs(Whole):  # ranks 0 and 1 have the same rows, rank 2 others
    def __iter__(self) -> Iterator[Tensor]:
        return iter(TABLE[20 * (dist.get_rank() // 2) :][:20])


class Constant(Whole):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(TABLE[:4].repeat(6, 1))


class Few(Whole):  # two rows that take turns: of so few nobody can say
    def __iter__(self) -> Iterator[Tensor]:
        return iter(TABLE[:2].repeat_interleave(4, 0).repeat(3, 1))


class Trains(MeanSquare):
    dtype_of_layer = torch.float64


class Reads(Trains):
    def predict_step(self, batch: Tensor, index: int, dataloader_idx: int = 0) -> Tensor:
        return self.layer(batch)

    def validation_step(self, batch: Tensor, index: int, dataloader_idx: int = 0) -> None:
        self.layer(batch)

    test_step = validation_step


def run(stage: str, *kinds: type[IterableDataset[Any]], **options: Any) -> None:
    """Read a data set in a stage; training reads one of its own where that is not it."""
    trainer = make_trainer(DDPLossStrategy(), **options)
    loaders = [DataLoader(kind(), batch_size=4) for kind in kinds]
    if stage == "fit":
        trainer.fit(Trains(), loaders[0])
    elif stage == "validation in fit":
        trainer.fit(Reads(), DataLoader(Divided(), batch_size=4), loaders)
    else:
        getattr(trainer, stage)(Reads(), loaders)


@pytest.mark.parametrize("kind", [Divided, Constant, Few])
def test_what_is_divided_or_proves_nothing_is_left_alone(pool: RankPool, kind: type[IterableDataset[Any]]) -> None:
    for stage in ("fit", "validate"):
        pool.run(2, run, stage, kind)
    pool.run(1, run, "fit", Whole)
