"""One rank fails: the others learn rank, step and message, not by a time-out; a rank that stands still is named."""

from __future__ import annotations

import logging
import os
import time
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from torch import Tensor

from lightning_ddp_losses import DDPChecks, GlobalBatchLoss, ParameterSyncCheck
from lightning_ddp_losses.testing import RankFailure, RankPool
from tests.callbacks.harness import Subject
from tests.doors import liveness, torch_compat
from tests.fits import make_trainer

PLACES = ["training_step", "on_before_optimizer_step", "on_train_batch_end", "on_validation_batch_end"]


class Fails(Subject):  # the last rank fails at one place of its second step
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


def fit(make: Any, strategy: str, grace: float = 60.0, **options: Any) -> None:
    checks = DDPChecks(summary=False, **options)
    with mock.patch.object(liveness, "GRACE_SECONDS", grace):
        make_trainer(strategy, callbacks=[checks]).fit(make())


@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
@pytest.mark.parametrize("place", PLACES)
def test_peers_learn_of_a_failure(pool: RankPool, place: str, strategy: str) -> None:
    # a peer inside somebody else's collective (Lightning's broadcast, the module's log) may be woken by nobody
    elsewhere = place in ("on_train_batch_end", "on_validation_batch_end")
    try:
        errors = pool.errors(2, fit, partial(Fails, place), strategy, grace=1.0 if elsewhere else 60.0, fresh=True)
    except RankFailure as failure:  # it ends with its process
        text = str(failure)
        assert elsewhere, text
        assert "ZeroDivisionError: its own" in text
        assert "rank 0 stops, after it waited as shown above: rank 1 failed" in text, text
    else:
        assert errors[1].type == "ZeroDivisionError"
        assert errors[0].is_a("PeerError"), errors[0]
        assert "rank 1" in errors[0].message
        assert "ZeroDivisionError: its own" in errors[0].message
        assert not errors[0].timed_out


class InALoss(Fails):  # the peer waits in a loss over all ranks, whose connection breaks
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


class Stands(Subject):  # the last rank stands still in its second batch until the first has said so
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        if self.odd and index == 1:
            store = torch_compat.default_store()
            assert store is not None
            store.wait(["reported"], timedelta(seconds=100))
        return super().objective(features, labels, index)


def stall() -> list[str]:
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            if "rank 1: training_step of step 1" in said[-1]:
                store = torch_compat.default_store()
                assert store is not None
                store.set("reported", "yes")

    log = logging.getLogger("lightning_ddp_losses.distributed.liveness")
    log.addHandler(handler := Keep())
    try:
        fit(partial(Stands, True), "ddp", stall_seconds=2.0)
    finally:
        log.removeHandler(handler)
    return said


def test_a_rank_that_stands_still_is_named(pool: RankPool) -> None:
    said = pool.run(2, stall, fresh=True)
    # a busy machine may stand still elsewhere too
    reports = [text for text in said[0] if "rank 1: training_step of step 1" in text]
    assert len(reports) == 1
    assert "no progress" in reports[0]
    assert "rank 0: before backward of step 1" in reports[0]
    assert said[1] == []


class WithoutLoss(Subject):  # the last rank has no loss in its second batch
    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        return None if self.odd and index == 1 else loss


class WithoutEncoder(
    Subject
):  # the last rank's second loss does not reach the encoder, whose gradients its peers wait for
    factor = 1.0

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        if self.odd and index == 1:
            return self.factor * self.head(features).square().mean()
        return super().objective(features, labels, index)


class ZeroWithoutEncoder(WithoutEncoder):
    factor = 0.0


@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
@pytest.mark.parametrize("action", ["warn", "raise"])
def test_a_partial_backward_is_named_without_the_check_that_compares_graphs(
    pool: RankPool, action: str, strategy: str
) -> None:
    """DDP on the peer waits for gradients that never come, and nothing interrupts it: its process ends with the reason."""
    options = {"checks": [ParameterSyncCheck()], "action": action, "stall_seconds": 1.0, "file": False}
    with pytest.raises(RankFailure) as failure:
        pool.errors(2, fit, partial(WithoutEncoder, True), strategy, grace=1.0, fresh=True, **options)
    text = str(failure.value)
    assert "rank 0 stops, after it waited as shown above: rank 1 failed" in text
    assert "backward of step 1: F37: `encoder.weight`, `encoder.bias` not in the graph of the loss (rank 1)" in text


class SlowAfterBackward(
    Subject
):  # the last rank is slow, and every rank drops a gradient as DINO does for its last layer
    def on_after_backward(self) -> None:
        self.head.weight.grad = None
        if self.odd and self.trainer.global_step == 1:
            time.sleep(4.0)


def test_a_rank_that_is_slow_after_its_backward_is_no_fault(pool: RankPool) -> None:
    options = {"checks": [ParameterSyncCheck()], "stall_seconds": 1.0, "file": False}
    assert pool.run(2, fit, partial(SlowAfterBackward, True), "ddp", **options) == [None, None]


class AllFail(Subject):  # every rank meets the same error of the user's
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        raise ZeroDivisionError("everywhere")


def test_an_error_on_every_rank_stays_what_it_is(pool: RankPool) -> None:
    errors = pool.errors(2, fit, partial(AllFail, True), "ddp")
    assert all("ZeroDivisionError" in e.type or "ZeroDivisionError: everywhere" in e.message for e in errors)
    assert any(e.type == "ZeroDivisionError" for e in errors)
    assert not any(e.timed_out for e in errors)


def find_what_rank_0_wrote(objects: int) -> bool:
    _ = [object() for _ in range(objects)]  # so that a new group lies elsewhere in memory on some ranks
    store = liveness._own_store(dist.get_rank())
    if dist.get_rank() == 0:
        store.set("failure", "its own")
    dist.barrier()
    return bool(store.check(["failure"]))


def test_ranks_share_a_store_however_many_groups_came_before(pool: RankPool) -> None:
    for count in range(20):
        assert pool.run(2, find_what_rank_0_wrote, count, fresh=True) == [True, True]
