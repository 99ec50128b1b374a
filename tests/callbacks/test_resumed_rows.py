"""A run that is resumed in an epoch and begins it again is found; one that goes on at its place, or repeats rows on purpose, is silent."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler, TensorDataset

from lightning_ddp_losses import BatchCheck, DDPChecks
from lightning_ddp_losses.samplers import GlobalBatchSampler
from lightning_ddp_losses.testing import RankPool
from tests.fits import MeanSquare, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")

ROWS, G = 120, 6  # 20 batches of all ranks
DATA = TensorDataset(torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(7)))


class Killed(Exception):
    pass


class Kill(Callback):  # saves after so many batches, and ends the run
    def __init__(self, batches: int, path: str) -> None:
        self.batches, self.path = batches, path

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.batches:
            trainer.save_checkpoint(self.path)
            raise Killed


def own(sampler: Any, **options: Any) -> DataLoader:
    """This rank's rows."""
    return DataLoader(DATA, batch_size=G // dist.get_world_size(), sampler=sampler, **options)


def ours(kind: Any, **options: Any) -> DataLoader:
    return DataLoader(DATA, batch_sampler=GlobalBatchSampler.batches(kind(DATA), G, seed=3), **options)


def drawn_with_replacement() -> DataLoader:
    torch.seed()  # other rows in every run
    return own(RandomSampler(DATA, replacement=True, num_samples=60))


LOADERS: dict[str, Callable[[], DataLoader]] = {
    "in order": lambda: own(DistributedSampler(DATA, shuffle=False)),
    "shuffled": lambda: own(DistributedSampler(DATA)),
    "ours": lambda: ours(RandomSampler),
    "ours in order": lambda: ours(SequentialSampler),
    "replacement": drawn_with_replacement,
    "workers": lambda: own(DistributedSampler(DATA), num_workers=1),
    "rows": lambda: DataLoader(DATA, batch_size=None, sampler=DistributedSampler(DATA)),
    "workers in order": lambda: own(DistributedSampler(DATA, shuffle=False), num_workers=1),
    "ours, workers": lambda: ours(RandomSampler, num_workers=1),
    "one batch": lambda: DataLoader([[DATA.tensors[0][:3]] for _ in range(20)], batch_size=None),
}


def leg(strategy: str, name: str, kill: int | None, save: str, load: str | None, window: int = 1) -> list[str]:
    """Train until it is killed, or for two epochs; returns what the check found."""
    checks = DDPChecks(checks=[BatchCheck()], action="log", summary=False, file=False)
    callbacks = [checks] if kill is None else [checks, Kill(kill, save)]
    trainer = make_trainer(strategy, callbacks=callbacks, max_epochs=2, accumulate_grad_batches=window)
    with contextlib.suppress(Killed), warnings.catch_warnings():
        # the sampler says the same of a strategy that does not restore its place
        warnings.filterwarnings("ignore", message="This fit goes on after")
        trainer.fit(MeanSquare(), LOADERS[name](), ckpt_path=load)
    return [finding.what for finding in checks.findings if finding.fault == "F83"]


@pytest.mark.parametrize(
    ("strategy", "name", "batches", "sick"),
    [
        ("ddp", "in order", 8, True),
        ("ddp", "shuffled", 13, True),
        ("ddp_losses", "in order", 28, True),  # in the second epoch
        ("ddp", "in order", 20, False),  # at the end of an epoch
        ("ddp_losses", "ours", 8, False),
        ("ddp", "replacement", 8, False),
        ("ddp", "one batch", 8, False),
    ],
)
def test_rows_that_come_twice_after_a_resume(
    pool: RankPool, tmp_path: Path, strategy: str, name: str, batches: int, sick: bool
) -> None:
    path = str(tmp_path / "killed.ckpt")
    assert pool.run(2, leg, strategy, name, batches, path, None) == [[], []]
    for found in pool.run(2, leg, strategy, name, None, "", path):
        assert bool(found) == sick
        if sick:
            assert f"after the resume, batch {batches % 20} of epoch {batches // 20}, is the first one" in found[0]


class Ids(MeanSquare):  # remembers the rows of each epoch
    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, list[float]] = {}

    def training_step(self, batch: Any, index: int) -> Tensor:
        rows = batch[0] if batch[0].ndim > 1 else batch[0][None]
        self.rows.setdefault(self.trainer.current_epoch, []).extend(rows[:, 0].tolist())
        return super().training_step([rows], index)


def replayed(strategy: str, name: str, path: str) -> tuple[list[str], bool]:
    """Train for an epoch, then resume for another one; what the check found, and whether the rows came in the order of the first."""
    first = Ids()
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(first, LOADERS[name]())
    trainer.save_checkpoint(path)
    checks = DDPChecks(checks=[BatchCheck()], action="log", summary=False, file=False)
    second = Ids()
    make_trainer(strategy, callbacks=[checks], max_epochs=3).fit(second, LOADERS[name](), ckpt_path=path)
    assert set(second.rows) == {1, 2}
    assert (second.rows[2] == first.rows[0]) == name.endswith("in order")
    return [finding.text() for finding in checks.findings if finding.fault == "F85"], second.rows[1] == first.rows[0]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("strategy", "name", "sick"),
    [
        ("ddp", "workers", True),
        ("ddp", "rows", True),
        ("ddp", "shuffled", False),
        ("ddp", "workers in order", False),
        ("ddp", "ours, workers", True),
        ("ddp_losses", "workers", None),  # whatever it does is named
        ("ddp_losses", "ours, workers", False),
    ],
)
def test_a_resumed_epoch_in_the_order_of_the_first(
    pool: RankPool, tmp_path: Path, strategy: str, name: str, sick: bool | None, world_size: int
) -> None:
    for found, is_replayed in pool.run(world_size, replayed, strategy, name, str(tmp_path / "end.ckpt")):
        assert len(found) == (is_replayed and name != "workers in order")
        assert sick is None or len(found) == sick
        assert all("epoch 1 after the resume has the order of epoch 0: `" in text for text in found)


def test_a_window_that_is_done_again_and_a_second_resume_by_other_ranks(pool: RankPool, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.ckpt") for number in range(2)]
    # 11 batches, of which 8 have stepped; then 4 more; then the rest
    assert pool.run(2, leg, "ddp_losses", "ours in order", 11, paths[0], None, 4) == [[], []]
    assert pool.run(3, leg, "ddp_losses", "ours in order", 14, paths[1], paths[0], 4) == [[], [], []]
    assert pool.run(1, leg, "ddp_losses", "ours in order", None, "", paths[1], 4) == [[]]


def test_rows_of_both_runs_before_a_second_resume_count(pool: RankPool, tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}.ckpt") for number in range(2)]
    # the second run goes on at its place, the third does not: its rows are those of the first
    pool.run(2, leg, "ddp_losses", "ours in order", 8, paths[0], None)
    pool.run(2, leg, "ddp_losses", "ours in order", 13, paths[1], paths[0])
    for found in pool.run(2, leg, "ddp", "ours in order", None, "", paths[1]):
        assert "the first batch after the resume, batch 13 of epoch 0, is the first one of that epoch" in found[0]
