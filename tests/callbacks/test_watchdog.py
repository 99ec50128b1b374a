"""One rank fails: the others learn rank, step and message within 10 s; a rank that stands still is named."""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from typing import Any

import pytest
from pytorch_metric_learning import losses as pml
from torch import Tensor

from lightning_ddp_losses import DDPChecks, GlobalBatchLoss
from lightning_ddp_losses.callbacks import watchdog
from tests.callbacks.harness import Subject
from tests.lightning_ranks import make_trainer
from tests.rank_pool import RankFailure, RankPool

PLACES = ["training_step", "on_before_optimizer_step", "on_train_batch_end", "on_validation_batch_end"]


class Fails(Subject):
    """The last rank fails at one place of its second step."""

    def __init__(self, place: str) -> None:
        super().__init__(True)
        self.place = place

    def _maybe(self, place: str, index: int) -> None:
        if self.odd and place == self.place and index == 1:
            raise ZeroDivisionError("its own")

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        self.index = index
        self._maybe("training_step", index)
        return super().objective(features, labels, index)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._maybe("on_before_optimizer_step", self.index)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self._maybe("on_train_batch_end", index)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", self.objective(*batch, 0), sync_dist=True, on_step=True, on_epoch=False)

    def on_validation_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self._maybe("on_validation_batch_end", index)

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def fit(make: Any, strategy: str, **options: Any) -> None:
    watchdog.GRACE_SECONDS = 1.0
    checks = DDPChecks(summary=False, **options)
    make_trainer(strategy, callbacks=[checks]).fit(make())


@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
@pytest.mark.parametrize("place", PLACES)
def test_peers_learn_of_a_failure(pool: RankPool, place: str, strategy: str) -> None:
    pool.run(2, time.monotonic, fresh=True)  # to start processes takes its time
    began = time.monotonic()
    try:
        errors = pool.errors(2, fit, partial(Fails, place), strategy, fresh=True)
    except RankFailure as failure:  # a peer inside somebody else's collective ends with its process
        text = str(failure)
        assert "ZeroDivisionError: its own" in text
        assert place in ("on_train_batch_end", "on_validation_batch_end")  # Lightning's broadcast, the module's log
        assert "rank 0 stops, after it waited as shown above: rank 1 failed" in text, text
    else:
        assert errors[1].type == "ZeroDivisionError"
        assert errors[0].is_a("PeerError"), errors[0]
        assert "rank 1" in errors[0].message
        assert "ZeroDivisionError: its own" in errors[0].message
        assert errors[0].seconds < 10
    assert time.monotonic() - began < 14


class InALoss(Fails):
    """The peer waits in a loss over all ranks, whose connection breaks."""

    def build(self) -> None:
        self.pairs = GlobalBatchLoss(pml.SupConLoss())

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        value = super().objective(features, labels, index)
        return value + self.pairs(self.encoder(features), labels)


def fit_and_go() -> None:
    try:
        fit(partial(InALoss, "training_step"), "ddp")
    except ZeroDivisionError:
        os._exit(7)


def test_a_connection_that_breaks_in_a_loss_is_the_failure_behind_it(pool: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:
        pool.errors(2, fit_and_go, fresh=True)
    assert "--- rank 0: PeerError" in str(failure.value)
    assert "rank 1: died with exit code 7" in str(failure.value)
    assert "rank 1 failed, last seen at training_step of step 1:" in str(failure.value)


class Sleeps(Subject):
    """The last rank needs two seconds for its second batch."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        if self.odd and index == 1:
            time.sleep(2.5)
        return super().objective(features, labels, index)


def stall() -> list[str]:
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    log = logging.getLogger("lightning_ddp_losses.callbacks.watchdog")
    log.addHandler(handler := Keep())
    try:
        fit(partial(Sleeps, True), "ddp", stall_seconds=1.0)
    finally:
        log.removeHandler(handler)
    return said


def test_a_rank_that_stands_still_is_named(pool: RankPool) -> None:
    said = pool.run(2, stall)
    assert len(said[0]) == 1
    assert "no progress" in said[0][0]
    assert "rank 1: training_step of step 1" in said[0][0], said[0][0]
    assert "rank 0: before backward of step 1" in said[0][0]
    assert said[1] == []


class AllFail(Subject):
    """Every rank meets the same error of the user's."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        raise ZeroDivisionError("everywhere")


def test_an_error_on_every_rank_stays_what_it_is(pool: RankPool) -> None:
    errors = pool.errors(2, fit, partial(AllFail, True), "ddp")
    assert all("ZeroDivisionError" in e.type or "ZeroDivisionError: everywhere" in e.message for e in errors)
    assert any(e.type == "ZeroDivisionError" for e in errors)
    assert all(e.seconds < 10 for e in errors)
