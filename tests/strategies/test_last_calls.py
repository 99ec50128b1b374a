"""What no later call of a fit reads is read when the fit ends: shards that were broadcast, and how ranks weighed the last value."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from pytorch_metric_learning import losses as pml
from torch import Tensor

from lightning_ddp_losses import ClassShardedLoss, GlobalBatchLoss
from lightning_ddp_losses.distributed import raw_collectives
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_errors
from tests.oracle import batches
from tests.strategies.jobs import TASK, Job, fit, make_loss
from tests.strategies.sharded_jobs import Sharded
from tests.strategies.test_calls import assert_same_error

LAST = TASK.steps - 1


class ShardedInParts(Job):  # its weight sharded over two ranks, with a replica on the other two
    def build(self, loss: str) -> None:
        first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
        self.loss = ClassShardedLoss(make_loss(loss), group=first if dist.get_rank() < 2 else second)


class BroadcastsAfter(Callback):  # broadcasts the shards, as something that takes them for a whole weight would
    def __init__(self, index: int, ranks: list[int] | None = None) -> None:
        self.index, self.ranks = index, ranks

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index != self.index:
            return
        group = None if self.ranks is None else dist.new_group(self.ranks)
        if self.ranks is None or trainer.global_rank in self.ranks:
            first_class = module.loss.weight.data.narrow(1, 0, 1)
            received = first_class.contiguous()
            raw_collectives.broadcast_([received], group=group)
            first_class.copy_(received)


@pytest.mark.parametrize("index", [LAST - 1, LAST])
def test_shards_that_are_broadcast_after_a_last_call(pool: RankPool, index: int) -> None:
    errors = pool.errors(2, fit, Sharded, callbacks=[BroadcastsAfter(index)])
    assert_same_error(errors, "ClassShardedLoss(ArcFaceLoss): weight", "Something broadcast the shards")


def test_shards_of_one_part_end_the_fit_of_all(pool: RankPool) -> None:
    errors = pool.errors(4, fit, ShardedInParts, callbacks=[BroadcastsAfter(LAST, [0, 1])])
    assert_errors(errors, "Something broadcast the shards")


def test_healthy_shards_end_in_silence(pool: RankPool) -> None:
    pool.run(2, fit, Sharded, callbacks=[BroadcastsAfter(LAST + 1)])


class WeighsTheLast(Job):
    """One rank weighs the last value by a number of its own; nothing compares calls before backward."""

    def build(self, loss: str) -> None:
        self.loss = GlobalBatchLoss(pml.SupConLoss())

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        value: Tensor = self.loss(self.encoder(features), labels)
        return value * (3.0 if index == LAST and self.global_rank else 0.5)


def test_the_last_coefficient_is_compared(pool: RankPool) -> None:
    assert_same_error(
        pool.errors(2, fit, WeighsTheLast, {"check_calls": False}), "coefficient", "rank 0: 0.5", "rank 1: 3.0"
    )


def late_value_of_an_earlier_loss() -> None:
    """What a loss outside of the fit left is no matter of the fit."""
    loss = GlobalBatchLoss(pml.SupConLoss())
    rows, labels = batches(TASK)[0]
    (loss(rows.requires_grad_(), labels) * (1 + dist.get_rank())).backward()
    fit(Sharded, max_epochs=1)


def test_what_came_before_the_fit_is_left_alone(pool: RankPool) -> None:
    pool.run(2, late_value_of_an_earlier_loss)
