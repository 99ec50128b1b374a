"""Callbacks that save after an error: nobody waits, all hear of the error, and what is saved is whole and goes on exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from lightning_ddp_losses import DDPLossStrategy, GlobalBatchLoss, ModelParallelLossStrategy
from lightning_ddp_losses.testing import RankError, RankPool
from tests.fits import make_trainer, weights_of
from tests.oracle import assert_close
from tests.strategies.fsdp_jobs import Towers, make_job
from tests.strategies.jobs import TASK, Job, fit, fit_alone, loader, make_loss
from tests.strategies.sharded_jobs import Plain, Sharded, whole_state
from tests.strategies.test_signals import rows

# Lightning looks for the last checkpoint of an error by itself, and says so
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*was called without a model"),
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create"),
]

AT = 2  # optimizer steps before the error
JOBS: dict[str, Callable[[], Job]] = {"whole": Job, "sharded": Sharded, "fsdp": partial(make_job, "arcface")}
EVERYONE = (0, 1)


class Fails(Callback):
    """Raises in a hook of some ranks, or in their training step, while the others go on to the next collective."""

    def __init__(self, hook: str, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        setattr(self, hook, self.fail)

    def fail(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_rank in self.ranks and trainer.global_step == AT:
            raise ZeroDivisionError("the user's own")


def fail_in_step(module: Job, is_time: Callable[[int], bool] | None = None) -> None:
    """Fail on rank 1 in the training step of a batch."""
    objective = module.objective

    def fails(features: Tensor, labels: Tensor, index: int) -> Tensor | None:
        if module.global_rank == 1 and (is_time(index) if is_time else module.global_step == AT):
            raise ZeroDivisionError("the user's own")
        return objective(features, labels, index)

    module.objective = fails  # type: ignore[method-assign]


SAVERS = {
    "OnExceptionCheckpoint": lambda folder: OnExceptionCheckpoint(folder),
    # votes, broadcasts and waits where it saves
    "ModelCheckpoint": lambda folder: ModelCheckpoint(folder, save_on_exception=True, every_n_epochs=9, save_last=True),
}


def trainer_of(module: Job, **options: Any) -> Trainer:
    strategy = ModelParallelLossStrategy if isinstance(module, Towers) else DDPLossStrategy
    return make_trainer(strategy(use_global_sampler=True), use_distributed_sampler=True, **options)


def go_on(job: str, path: str) -> dict[str, Tensor]:
    module = JOBS[job]()
    trainer_of(module).fit(module, rows(dist.get_world_size()), ckpt_path=path)
    return weights_of(module)


def fit_and_fail(
    job: str, folder: str, hook: str, ranks: tuple[int, ...], saver: str = "OnExceptionCheckpoint"
) -> None:
    module = JOBS[job]()
    callbacks: list[Callback] = [SAVERS[saver](folder)]
    if hook == "training_step":
        fail_in_step(module)
    else:
        callbacks.append(Fails(hook, ranks))
    given = list(callbacks)
    trainer = trainer_of(module, callbacks=callbacks, enable_checkpointing=True, default_root_dir=folder)
    said = logging.FileHandler(f"{folder}/said-{dist.get_rank()}", delay=True)
    logging.getLogger("lightning_ddp_losses").addHandler(said)
    try:
        trainer.fit(module, rows(dist.get_world_size()))
    finally:
        logging.getLogger("lightning_ddp_losses").removeHandler(said)
        # they are all there again, whatever was saved
        assert {type(callback) for callback in given} <= {type(callback) for callback in trainer.callbacks}


def assert_told(errors: list[RankError]) -> None:
    """Every rank ends with the user's error, its own or that of a peer, and none by a time-out."""
    assert all("the user's own" in error.message for error in errors), errors
    assert not any(error.timed_out for error in errors), errors


def saved(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("said-"))


# (what fails, on which ranks): before the first rank has stepped, after it, and where all ranks are told in the step
PLACES = [
    ("training_step", (1,)),
    ("on_before_optimizer_step", (1,)),
    ("on_after_backward", EVERYONE),
    ("on_train_batch_end", (0,)),
    ("on_train_batch_end", (1,)),
    ("on_train_batch_end", EVERYONE),
]


@pytest.mark.parametrize(("hook", "ranks"), PLACES, ids=str)
def test_rank_0_saves_what_every_rank_holds(pool: RankPool, tmp_path: Path, hook: str, ranks: tuple[int, ...]) -> None:
    assert_told(pool.errors(2, fit_and_fail, "whole", str(tmp_path), hook, ranks))
    (file,) = saved(tmp_path)
    assert torch.load(file, weights_only=True)["global_step"] >= AT


@pytest.mark.parametrize("job", ["whole", "sharded"])
@pytest.mark.parametrize("saver", SAVERS)
def test_a_run_goes_on_exactly_from_what_was_saved(pool: RankPool, tmp_path: Path, job: str, saver: str) -> None:
    assert_told(pool.errors(2, fit_and_fail, job, str(tmp_path), "training_step", (1,), saver))
    for file in saved(tmp_path):
        results = pool.run(2, go_on, job, str(file))
        state = whole_state(results) if job == "sharded" else results[0]
        assert_close(state, fit_alone(Plain))
    assert saved(tmp_path)


@pytest.mark.parametrize(("hook", "ranks"), PLACES[1:], ids=str)
@pytest.mark.parametrize("saver", SAVERS)
def test_divided_classes_are_saved_where_all_ranks_stand_together(
    pool: RankPool, tmp_path: Path, hook: str, ranks: tuple[int, ...], saver: str
) -> None:
    assert_told(pool.errors(2, fit_and_fail, "sharded", str(tmp_path), hook, ranks, saver))
    files = saved(tmp_path)
    if hook == "on_before_optimizer_step":
        # rank 0 has made one step more than rank 1
        assert files == []
        for rank in range(2):
            assert "a checkpoint after an error: expected all ranks" in (tmp_path / f"said-{rank}").read_text()
        return
    assert files
    for file in files:
        assert torch.load(file, weights_only=True)["state_dict"]["loss.W"].shape == (TASK.dim, TASK.classes)
    assert not list(tmp_path.glob("said-*"))


def test_a_model_that_is_divided_is_saved_where_all_ranks_stand_together(pool: RankPool, tmp_path: Path) -> None:
    # of a rank that fails alone the others stand in a collective of FSDP's, until they are ended
    assert_told(pool.errors(2, fit_and_fail, "fsdp", str(tmp_path), "on_train_batch_end", EVERYONE))
    assert saved(tmp_path)


class Divided(Job):
    """A loss with a divisor that a window knows."""

    def build(self, loss: str) -> None:
        self.loss = GlobalBatchLoss(make_loss(loss))


def fit_again(options: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """Fail on rank 1 between two batches of one optimizer step, then fit the same module."""
    module, said = Divided(), ""
    fail_in_step(module, lambda index: index == 1 and not said)
    try:
        make_trainer(DDPLossStrategy(**options), accumulate_grad_batches=2).fit(module, loader())
    except Exception as error:
        said = str(error)
    make_trainer(DDPLossStrategy(**options), accumulate_grad_batches=2).fit(module, loader())
    return said, dict(module.state_dict())


@pytest.mark.parametrize("accumulation", ["mean", "window"])
def test_the_next_fit_knows_nothing_of_the_one_that_failed(pool: RankPool, accumulation: str) -> None:
    expected = pool.run(2, fit, Divided, {"accumulation": accumulation}, accumulate_grad_batches=2)[0]
    for said, state in pool.run(2, fit_again, {"accumulation": accumulation}):
        assert "the user's own" in said
        assert_close(state, expected)
