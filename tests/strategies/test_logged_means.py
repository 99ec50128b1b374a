"""Epoch means that `self.log` reduces over ranks are those of one process, also where the ranks do not divide the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_losses.testing import RankPool
from tests.fits import Trained, listed, make_trainer, trainer_alone
from tests.strategies.jobs import Strategy, strategy_of

STAGES = ("train", "val")
# rows of each rank in each global batch: 13 of an epoch on two ranks, 29 on three
ROWS = {2: [(3, 4), (1, 1), (2, 2)], 3: [(4, 5, 5), (5, 5, 5)]}
# by name, how far the mean of one process may be, relative
ROUNDING = {"plain": 1e-9, "forked_epoch": 1e-9, "given": 1e-9, "narrow": 1e-6}


def loaders(world_size: int, rank: int | None) -> DataLoader:
    generator = torch.Generator().manual_seed(world_size)
    batches = []
    for rows in ROWS[world_size]:
        parts = torch.rand(sum(rows), 2, generator=generator, dtype=torch.float64).split(rows)
        batches.append(torch.cat(parts) if rank is None else parts[rank])
    return listed(batches)


class Logging(Trained):  # logs means of its input in several ways; its weight stays as it is
    lr = 0.0

    def build(self) -> None:
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def log_means(self, stage: str, rows: Tensor) -> None:
        mean = rows.mean()
        options: dict[str, Any] = {"on_epoch": True, "sync_dist": True}
        self.log(f"{stage}_plain", mean, on_step=False, **options)
        self.log(f"{stage}_forked", mean, on_step=True, **options)
        # five tokens a row
        self.log(f"{stage}_given", mean, on_step=False, batch_size=5 * len(rows), **options)
        self.log(f"{stage}_narrow", mean.float(), on_step=False, **options)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.log_means("train", batch)
        return self.weight * batch.mean()

    def validation_step(self, batch: Tensor, index: int, dataloader_idx: int = 0) -> None:
        self.log_means("val", batch)


def logged_on_ranks(strategy: Strategy) -> dict[str, float]:
    return logged(make_trainer(strategy_of(strategy)), loaders(dist.get_world_size(), dist.get_rank()))


def logged(trainer: Trainer, loader: DataLoader, make: Callable[[], Logging] = Logging) -> dict[str, float]:
    trainer.fit(make(), loader, [loader, loader])
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def reduced_integers() -> dict[str, Any]:
    """What the strategy's reduce makes of tensors that are not floats, and what is left of them."""
    answers: dict[str, Any] = {}

    class Reducing(Logging):
        def on_train_start(self) -> None:
            reduce, rank = self.trainer.strategy.reduce, dist.get_rank()
            rows = torch.tensor([4 + rank, 2**40 + rank])
            answers["mean"], answers["rows"] = reduce(rows), rows
            answers["avg of bool"] = reduce(torch.tensor(rank == 0), reduce_op="avg")
            answers["complex"] = reduce(torch.tensor(1 + 2j * rank, dtype=torch.complex128))
            summed = torch.tensor(4 + rank)
            answers["sum"] = reduce(summed, reduce_op="sum")
            answers["sum in place"] = answers["sum"] is summed
            answers["no tensor"] = reduce(3)

    trainer = make_trainer("ddp_losses", limit_train_batches=1)
    logged(trainer, loaders(dist.get_world_size(), dist.get_rank()), Reducing)
    return answers


@pytest.mark.parametrize("world_size", [2, 3])
def test_logged_epoch_means_are_those_of_one_process(pool: RankPool, world_size: int) -> None:
    truth = logged(trainer_alone(), loaders(world_size, None))
    last_batches = [list(loaders(world_size, rank))[-1] for rank in range(world_size)]
    last_step = sum(float(batch.mean()) for batch in last_batches) / world_size
    for answer in pool.run(world_size, logged_on_ranks, "ddp_losses"):
        # what a step logs stays the mean over ranks, as under plain DDP
        assert answer["train_forked_step"] == pytest.approx(last_step, rel=1e-12, abs=0)
        assert answer.keys() == truth.keys()
        for stage in STAGES:
            for name, rounding in ROUNDING.items():
                keys = [key for key in truth if key.startswith(f"{stage}_{name}")]
                assert len(keys) == (1 if stage == "train" else 2), truth
                for key in keys:
                    assert answer[key] == pytest.approx(truth[key], rel=rounding, abs=0), key


@pytest.mark.parametrize("world_size", [2, 3])
def test_without_losses_they_are_those_of_plain_ddp(pool: RankPool, world_size: int) -> None:
    truth = logged(trainer_alone(), loaders(world_size, None))
    plain = pool.run(world_size, logged_on_ranks, "ddp")
    assert plain == pool.run(world_size, logged_on_ranks, {"losses": []})
    rows = sum(map(sum, ROWS[world_size]))
    floored = rows - rows % world_size
    for answer in plain:
        assert answer["train_plain"] == pytest.approx(truth["train_plain"] * rows / floored, rel=1e-9, abs=0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_integers_keep_their_mean_and_their_tensor(pool: RankPool, world_size: int) -> None:
    middle = (world_size - 1) / 2
    for rank, answer in enumerate(pool.run(world_size, reduced_integers)):
        assert answer["mean"].dtype == torch.float64
        assert answer["mean"].tolist() == [4 + middle, 2**40 + middle]
        assert answer["rows"].tolist() == [4 + rank, 2**40 + rank]
        assert float(answer["avg of bool"]) == pytest.approx(1 / world_size)
        assert complex(answer["complex"]) == pytest.approx(1 + 2j * middle)
        assert answer["sum"].dtype == torch.int64
        assert int(answer["sum"]) == sum(range(4, 4 + world_size))
        assert answer["sum in place"]
        assert answer["no tensor"] == 3
