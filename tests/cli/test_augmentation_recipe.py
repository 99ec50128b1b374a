"""`ddp-losses explain migrate augmentation`: a sample's random numbers follow from the seed, the epoch and its index alone."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import Dataset

from lightning_ddp_losses import DDPChecks
from lightning_ddp_losses.testing import RankEnvironment, RankPool
from tests.cli.test_recipes import OURS, THEIRS, code_of
from tests.fits import QUIET, MeanSquare
from tests.strategies.test_resuming import Kill, Killed

SAMPLES, BATCHES = 24, 2  # of an epoch, with 12 rows each
Drawn = dict[tuple[int, int], list[float]]
"""What was drawn for a sample, by epoch and index."""


class Images(Dataset[Any]):
    """Samples whose transform draws from all three generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        noise = [torch.rand(()).item(), float(np.random.rand()), random.random()]
        return index, torch.tensor(noise, dtype=torch.float64)


class Recorder(MeanSquare):
    dtype_of_layer = torch.float64

    def __init__(self) -> None:
        super().__init__()
        self.drawn: Drawn = {}
        self.seen: list[float] = []  # what the steps draw

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        indices, images = batch
        self.seen.append(torch.rand(()).item())
        for number, image in zip(indices.tolist(), images.tolist(), strict=True):
            key = self.current_epoch, number
            assert key not in self.drawn
            self.drawn[key] = image
        return super().training_step(images, index)


def train(
    code: str, workers: int, *, persistent: bool = False, kill: int = 0, save: str = "", load: str | None = None
) -> tuple[Drawn, list[float]]:
    """Run the page's code on this number of ranks; what its samples drew, and what the steps drew."""
    callbacks: list[Callback] = [Kill("on_train_batch_end", kill, save)] if kill else []
    callbacks.append(DDPChecks(file=False, summary=False, action={"warning": "raise"}))
    options = QUIET | {"plugins": [RankEnvironment()], "accelerator": "cpu", "callbacks": callbacks}
    for name in ("max_epochs", "use_distributed_sampler"):
        del options[name]
    changes = {
        "devices=2": f"devices={dist.get_world_size()}",
        "num_workers=2": f"num_workers={workers}, persistent_workers={persistent}",
        "pl.Trainer(": "pl.Trainer(**options, ",
        "trainer.fit(module, loader)": "trainer.fit(module, loader, ckpt_path=load)",
    }
    for before, after in changes.items():
        assert before in code
        code = code.replace(before, after)
    module = Recorder()
    given = {"__name__": "train", "data": Images(), "module": module, "options": options, "load": load}
    torch.manual_seed(3)
    with mock.patch.dict(os.environ), contextlib.suppress(Killed):
        exec(code, given)
    return module.drawn, module.seen


def of_all_ranks(replies: list[tuple[Drawn, list[float]]]) -> Drawn:
    pairs = [*chain(*(drawn.items() for drawn, _ in replies))]
    found = dict(pairs)
    assert len(found) == len(pairs), "each sample once in an epoch"
    return found


@pytest.fixture(scope="module")
def ours() -> str:
    (code,) = code_of("augmentation", OURS)
    return code


@pytest.fixture(scope="module")
def of_one_process(pool: RankPool, ours: str) -> Drawn:
    """What samples draw in one process without workers."""
    found = of_all_ranks(pool.run(1, train, ours, 0))
    assert sorted(found) == [(epoch, index) for epoch in range(2) for index in range(SAMPLES)]
    values = [value for numbers in found.values() for value in numbers]
    assert len(set(values)) == len(values) == 3 * 2 * SAMPLES, "no two draws are equal"
    return found


Runs = Callable[[int, int, bool], list[tuple[Drawn, list[float]]]]


@pytest.fixture(scope="module")
def runs(pool: RankPool, ours: str) -> Runs:
    """What samples and steps draw with so many ranks and workers, persistent or not."""

    @cache
    def run(world_size: int, workers: int, persistent: bool) -> list[tuple[Drawn, list[float]]]:
        return pool.run(world_size, train, ours, workers, persistent=persistent)

    return run


PLACES = [(1, 2, False), (2, 0, False), (2, 2, False), (2, 2, True), (3, 0, False), (3, 2, False)]


@pytest.mark.parametrize(("world_size", "workers", "persistent"), PLACES)
def test_a_sample_draws_the_same_anywhere(
    runs: Runs, of_one_process: Drawn, world_size: int, workers: int, persistent: bool
) -> None:
    assert of_all_ranks(runs(world_size, workers, persistent)) == of_one_process


# ranks and workers of the run that is killed after so many steps, and of the one that goes on
RESUMED = [(2, 2, 3, 3, 2), (3, 2, 3, 1, 0), (1, 0, 2, 2, 2)]


@pytest.mark.parametrize(("world_size", "workers", "kill", "then", "then_workers"), RESUMED)
def test_a_resumed_run_draws_what_one_run_does(
    pool: RankPool,
    ours: str,
    of_one_process: Drawn,
    tmp_path: Path,
    world_size: int,
    workers: int,
    kill: int,
    then: int,
    then_workers: int,
) -> None:
    save = str(tmp_path / "killed.ckpt")
    first = of_all_ranks(pool.run(world_size, train, ours, workers, kill=kill, save=save))
    second = of_all_ranks(pool.run(then, train, ours, then_workers, load=save))
    assert len(first) == 12 * kill
    assert not set(first) & set(second)
    assert first | second == of_one_process


def test_the_steps_draw_what_they_draw_without_it(runs: Runs) -> None:
    """Without workers the samples are read in the process that trains, whose generators the page's code puts back."""
    noise = [[steps for _, steps in runs(2, workers, False)] for workers in (0, 2)]
    assert noise[0] == noise[1]
    assert len(set(noise[0][0])) == 2 * BATCHES


@pytest.fixture(scope="module")
def theirs(pool: RankPool) -> dict[tuple[int, int], list[Drawn]]:
    """What samples draw before, on each rank, by ranks and workers."""
    (code,) = code_of("augmentation", THEIRS)
    places = [(1, 0), (1, 2), (2, 0), (2, 2)]
    return {(size, workers): [drawn for drawn, _ in pool.run(size, train, code, workers)] for size, workers in places}


def numbers_of(replies: list[Drawn]) -> dict[tuple[int, int], float]:
    """Torch's draw for each sample."""
    return {key: numbers[0] for drawn in replies for key, numbers in drawn.items()}


def test_before_a_sample_draws_something_else_elsewhere(theirs: dict[tuple[int, int], list[Drawn]]) -> None:
    elsewhere = numbers_of(theirs[2, 2])
    assert len(elsewhere) == 2 * SAMPLES
    for place, equal in {(1, 0): 0, (1, 2): 1}.items():
        alone = numbers_of(theirs[place])
        # the first sample of rank 0's first worker
        assert sum(elsewhere[key] == alone[key] for key in elsewhere) == equal


def test_before_ranks_draw_the_same_without_workers(theirs: dict[tuple[int, int], list[Drawn]]) -> None:
    first, second = (next(iter(drawn.values())) for drawn in theirs[2, 0])
    assert first == second
