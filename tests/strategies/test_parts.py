"""Losses over a part of the ranks: one that fails by itself ends all ranks at once, in its part and outside, with the reason."""

from __future__ import annotations

import contextlib
import gc
import time

import pytest
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from torch import Tensor

from lightning_ddp_losses import ClassShardedLoss, GlobalBatchLoss
from lightning_ddp_losses.distributed import process_groups
from tests.lightning_ranks import make_trainer
from tests.oracle import Task
from tests.rank_pool import RankPool
from tests.rank_worker import GROUP_TIMEOUT
from tests.strategies.jobs import Job, loader, make_loss


class InParts(Job):
    """Two groups of two; rank 1 fails before the loss of step 2."""

    def build(self, loss: str) -> None:
        part, _ = dist.new_subgroups(2)
        self.loss = (
            GlobalBatchLoss(pml.SupConLoss(), group=part)
            if loss == "pairs"
            else ClassShardedLoss(make_loss(), group=part)
        )

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        if index == 2 and self.global_rank == 1:
            raise ValueError("no such sample")
        return self.loss(self.encoder(features), labels)


class BesideTheWorld(Job):
    """A part of two and one of a single rank, beside a loss over all; rank 0 fails in the first step, before or between the losses."""

    def build(self, place: str) -> None:
        self.place = place
        parts = [dist.new_group([0, 1]), dist.new_group([2])]
        self.loss = GlobalBatchLoss(pml.SupConLoss(), group=parts[dist.get_rank() // 2])
        self.other = GlobalBatchLoss(pml.SupConLoss())

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        embeddings, fails = self.encoder(features), self.global_rank == 0
        if fails and self.place == "before":
            raise ValueError("no such sample")
        value = self.loss(embeddings, labels)
        if fails:
            raise ValueError("no such sample")
        return value + self.other(embeddings, labels)


class DisagreesInAPart(InParts):
    """Ranks 0 and 1 hand their loss rows of other widths; ranks 2 and 3 do nothing wrong."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        embeddings = self.encoder(features)
        return self.loss(
            embeddings[:, : 3 - self.global_rank] if index == 2 and self.global_rank < 2 else embeddings, labels
        )


def fit_parts(make: type[Job], loss: str) -> None:
    data = loader(dist.get_world_size(), dist.get_rank(), task=Task(rows=12))
    make_trainer("ddp_losses").fit(make(loss), data)


@pytest.mark.parametrize("loss", ["pairs", "classes"])
def test_a_rank_that_fails_ends_all_at_once_with_its_reason(pool: RankPool, loss: str) -> None:
    errors = pool.errors(4, fit_parts, InParts, loss)
    assert errors[1].type == "ValueError"
    for error in errors:
        assert "no such sample" in error.message
        assert not error.timed_out


@pytest.mark.parametrize("place", ["before", "between"])
def test_a_first_step_that_fails_beside_a_loss_over_all_ends_all(pool: RankPool, place: str) -> None:
    for error in pool.errors(3, fit_parts, BesideTheWorld, place):
        assert "no such sample" in error.message
        assert not error.timed_out


def test_a_part_that_disagrees_ends_the_rest_too(pool: RankPool) -> None:
    for error in pool.errors(4, fit_parts, DisagreesInAPart, "pairs"):
        assert error.type == "RankMismatchError"
        assert "('rows', 3)" in error.message
        assert "('rows', 2)" in error.message
        assert not error.timed_out


def fail_then_leave(make: type[Job], loss: str) -> None:
    """Raises the seconds that it takes to leave all groups after the error: a handshake that nobody met would be waited for."""
    with contextlib.suppress(Exception):
        fit_parts(make, loss)
    dist.barrier()
    begun = time.perf_counter()
    process_groups.close(world=True)
    gc.collect()
    raise TimeoutError(time.perf_counter() - begun)


@pytest.mark.parametrize(("job", "loss"), [(InParts, "pairs"), (InParts, "classes"), (DisagreesInAPart, "pairs")])
def test_no_handshake_is_left_on_its_way(pool: RankPool, job: type[Job], loss: str) -> None:
    for error in pool.errors(4, fail_then_leave, job, loss):
        assert error.type == "TimeoutError", error.message
        assert float(error.message) < GROUP_TIMEOUT.total_seconds()
