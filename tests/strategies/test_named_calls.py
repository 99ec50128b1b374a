"""A call of Lightning's on some ranks only: one error on every rank, which names the call, who made it, the user's line and what to do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_ddp_losses import CommunicationMonitor, DDPChecks, GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_errors
from tests.doors import torch_compat
from tests.fits import Trained, make_trainer

SAVE_ADVICE = "Call `trainer.save_checkpoint` on every rank; Lightning writes on rank 0."
LOG_ADVICE = "Call `self.log(..., sync_dist=True)` on every rank."


class Model(Trained):
    def build(self) -> None:
        self.layer = nn.Linear(4, 3)
        self.loss = GlobalBatchLoss(nn.CrossEntropyLoss())

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.loss(self.layer(batch), torch.zeros(len(batch), dtype=torch.long))

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.layer(batch)

    @property
    def is_first(self) -> bool:
        return self.global_rank == 0


class SavesAtTheEnd(Callback):
    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        if trainer.is_global_zero:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "last.ckpt")


class LogsOnRankZero(Model):
    def on_validation_epoch_end(self) -> None:
        if self.is_first:
            self.log("val_score", torch.tensor(1.0), sync_dist=True)


class LogsOtherNames(Model):
    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("even" if self.is_first else "odd", torch.tensor(1.0), sync_dist=True)


class LogsInTheStep(Model):
    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.is_first:
            self.log("norm", self.layer.weight.norm(), sync_dist=True)
        return super().training_step(batch, index)


class Gathers(Model):
    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.is_first:
            self.all_gather(batch)
        return super().training_step(batch, index)


class GathersOtherShapes(Model):
    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.all_gather(batch[: 1 + self.global_rank])
        return super().training_step(batch, index)


class AsksForTheFolder(Model):
    def on_train_epoch_end(self) -> None:
        if self.is_first:
            _ = self.trainer.log_dir


class Waits(Model):
    def on_train_epoch_end(self) -> None:
        if self.is_first:
            self.trainer.strategy.barrier("mine")


def rows() -> DataLoader:
    """This rank's rows of 16."""
    every = torch.randn(16, 4, generator=torch.Generator().manual_seed(5))
    return DataLoader(every[dist.get_rank() :: dist.get_world_size()], batch_size=2)


def fit(
    kind: type[Model], callbacks: list[type[Callback]], checks: bool, folder: str, strategy: str = "ddp_losses"
) -> Trainer:
    given: list[Callback] = [callback() for callback in callbacks]
    if checks:
        given.insert(0, DDPChecks(summary=False, file=False))
    trainer = make_trainer(strategy, callbacks=given, default_root_dir=folder)
    trainer.fit(kind(), rows(), rows())
    return trainer


# module, callbacks, what the error must say
ALONE: dict[str, tuple[type[Model], list[type[Callback]], list[str]]] = {
    "save_checkpoint in a hook": (
        Model,
        [SavesAtTheEnd],
        ["trainer.save_checkpoint", "in on_train_end: trainer.save_checkpoint(Path(", SAVE_ADVICE],
    ),
    "log in validation": (
        LogsOnRankZero,
        [],
        [
            "self.log('val_score', sync_dist=True)",
            'in on_validation_epoch_end: self.log("val_score", torch.tensor(1.0), sync_dist=True)',
            LOG_ADVICE,
        ],
    ),
    "log of other names": (LogsOtherNames, [], ["self.log('even', sync_dist=True)", "in validation_step:", LOG_ADVICE]),
    "log in the step": (
        LogsInTheStep,
        [],
        ["strategy.reduce", 'in training_step: self.log("norm", self.layer.weight.norm(), sync_dist=True)'],
    ),
    "all_gather": (Gathers, [], ["strategy.all_gather", "in training_step: self.all_gather(batch)"]),
    "log_dir": (AsksForTheFolder, [], ["strategy.broadcast", "in on_train_epoch_end: _ = self.trainer.log_dir"]),
    "barrier": (Waits, [], ["strategy.barrier", 'self.trainer.strategy.barrier("mine")', "Call it on every rank"]),
}


# what the checks say of logged names, before the call that reduces them
NAMES = {
    "log in validation": [
        "rank 0: on_validation_epoch_end.val_score (on_validation_epoch_end), logged at test_named_calls.py:",
        "rank 1: nothing more",
        "rank_zero_only=True",
    ],
    "log of other names": [
        "rank 0: validation_step.even (validation_step), logged at test_named_calls.py:",
        "rank 1: validation_step.odd (validation_step), logged at test_named_calls.py:",
    ],
}


@pytest.mark.parametrize("checks", [False, True])
@pytest.mark.parametrize("name", ALONE)
def test_a_call_on_rank_zero_is_an_error_on_every_rank(pool: RankPool, tmp_path: Path, name: str, checks: bool) -> None:
    kind, callbacks, words = ALONE[name]
    if checks and name in NAMES:
        errors = pool.errors(2, fit, kind, callbacks, checks, str(tmp_path), fresh=True)
        assert_errors(errors, "LossCheck, F46", "Log the same names on every rank", *NAMES[name])
        return
    errors = pool.errors(2, fit, kind, callbacks, checks, str(tmp_path), fresh=True)
    assert_errors(errors, *words, "at different places of the program", "rank 0: ", "test_named_calls.py:")
    assert not any(error.timed_out for error in errors)


def test_other_shapes_are_an_error_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    errors = pool.errors(2, fit, GathersOtherShapes, [], False, str(tmp_path), fresh=True)
    assert_errors(errors, "strategy.all_gather: shape", "rank 0: shape=(1, 4)", "rank 1: shape=(2, 4)")


def fit_and_save(checks: bool, folder: str) -> None:
    trainer = fit(Model, [], checks, folder)
    if trainer.is_global_zero:
        trainer.save_checkpoint(Path(folder) / "after.ckpt")
    trainer.strategy.barrier("all of us")


@pytest.mark.parametrize("checks", [False, True])
def test_saving_after_the_fit_too(pool: RankPool, tmp_path: Path, checks: bool) -> None:
    errors = pool.errors(2, fit_and_save, checks, str(tmp_path), fresh=True)
    assert_errors(
        errors, "trainer.save_checkpoint on rank 0 only", "in fit_and_save: trainer.save_checkpoint(", SAVE_ADVICE
    )
    assert_errors(errors, "rank 1: strategy.barrier, at test_named_calls.py", 'trainer.strategy.barrier("all of us")')


# ---------------------------------------------------------------------- what ranks may do


class FirstRankFirst(Model):
    """Rank 0 does something before the others, which wait on another line."""

    def on_train_start(self) -> None:
        if not self.is_first:
            self.trainer.strategy.barrier("download")
        if self.is_first:
            self.trainer.strategy.barrier("download done")

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.is_first:
            self.log("norm", torch.tensor(2.0), sync_dist=True)
        else:
            self.log("norm", torch.tensor(4.0), sync_dist=True)
        gathered = self.all_gather(torch.tensor(self.global_rank))
        assert gathered.tolist() == [0, 1]
        return super().training_step(batch, index)

    def on_train_epoch_end(self) -> None:
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "epoch.ckpt")


def fit_healthy(checks: bool, folder: str) -> float:
    return float(fit(FirstRankFirst, [], checks, folder).callback_metrics["norm"])


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is deprecated")  # Lightning's own
@pytest.mark.parametrize("checks", [False, True])
def test_calls_on_different_lines_meet(pool: RankPool, tmp_path: Path, checks: bool) -> None:
    assert pool.run(2, fit_healthy, checks, str(tmp_path)) == [3.0, 3.0]
    assert (tmp_path / "epoch.ckpt").exists()


# ---------------------------------------------------------------------- a report under plain DDP


class Reported(logging.Handler):
    """Ends the wait of the other rank once the report is there."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        if "Call `" in self.said[-1]:
            store = torch_compat.default_store()
            assert store is not None
            store.set("reported", "yes")


class CallsAlone(Callback):
    """Rank 0 makes a call at the end of training. The other ranks make it when its wait has been reported."""

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        if not trainer.is_global_zero:
            store = torch_compat.default_store()
            assert store is not None
            store.wait(["reported"])
        self.call(trainer)

    def call(self, trainer: Trainer) -> None:
        raise NotImplementedError


class SavesAlone(CallsAlone):
    def call(self, trainer: Trainer) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "last.ckpt")


class Printed(Metric):  # what its users read is printed, not returned
    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self) -> None:
        self.total += 1

    def compute(self) -> None:
        return None


class ComputesAlone(CallsAlone):
    def call(self, trainer: Trainer) -> None:
        metric = Printed()
        metric.update()
        metric.compute()


class LogsAlone(CallsAlone):
    """Rank 0 logs a value of all ranks at the end of a validation, and reads it. The other ranks do so after the report."""

    def on_validation_epoch_end(self, trainer: Trainer, module: Any) -> None:
        super().on_train_end(trainer, module)
        module.log("val_score", torch.tensor(1.0), sync_dist=True)
        assert float(trainer.callback_metrics["val_score"]) == 1.0

    def call(self, trainer: Trainer) -> None:
        return

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        return


def fit_under_plain_ddp(callback: type[CallsAlone], folder: str) -> list[str]:
    log = logging.getLogger("lightning_ddp_losses.distributed.liveness")
    log.addHandler(handler := Reported())
    # LossCheck would name the value before rank 0 waits
    only = [CommunicationMonitor()] if callback is LogsAlone else None
    checks = DDPChecks(only, summary=False, file=False, stall_seconds=2.0)
    trainer = make_trainer("ddp", callbacks=[checks, callback()], default_root_dir=folder)
    try:
        trainer.fit(Model(), rows(), rows())
    finally:
        log.removeHandler(handler)
    return handler.said


@pytest.mark.parametrize(
    ("callback", "place", "call", "advice"),
    [
        (SavesAlone, "end of training", "trainer.save_checkpoint", SAVE_ADVICE),
        (LogsAlone, "end of on_validation_epoch_end", "self.log('val_score', sync_dist=True)", LOG_ADVICE),
        (
            ComputesAlone,
            "end of training",
            "metric.compute() of Printed",
            "Call `compute()` on every rank, and print or log its value on rank 0.",
        ),
    ],
)
def test_a_report_under_plain_ddp_says_the_same(
    pool: RankPool, tmp_path: Path, callback: type[CallsAlone], place: str, call: str, advice: str
) -> None:
    said = pool.run(2, fit_under_plain_ddp, callback, str(tmp_path), fresh=True)
    (report,) = [text for text in said[0] if call in text]
    assert "no progress" in report
    assert f"rank 0: {place}" in report
    assert f"in {call}, at test_named_calls.py:" in report
    assert "rank 1: " in report
    assert advice in report


def test_a_log_on_rank_zero_under_plain_ddp_is_an_error_of_the_checks(pool: RankPool, tmp_path: Path) -> None:
    """Checks compare the names before Lightning reduces the value on rank 0 only, so that no rank waits."""
    errors = pool.errors(2, fit, LogsOnRankZero, [], True, str(tmp_path), "ddp", fresh=True)
    assert_errors(errors, "LossCheck, F46", "Log the same names on every rank", *NAMES["log in validation"])
    assert not any(error.timed_out for error in errors)
