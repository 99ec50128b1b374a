"""What a rank multiplies a global value by is compared before anything is reduced, at no further collective."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from pytorch_metric_learning import losses as pml
from torch import Tensor
from torchmetrics import MeanSquaredError

from lightning_ddp_losses import ClassShardedLoss, GlobalBatchLoss, differentiable
from lightning_ddp_losses.testing import RankPool
from tests.counting import StepCollectives
from tests.doors import raw_collectives
from tests.oracle import batches
from tests.strategies.jobs import TASK, Job, assert_as_alone, fit, make_loss
from tests.strategies.sharded_jobs import Sharded

WRONG_AT = 2


class Weighs(Job):  # one rank weighs the loss by a number of its own, in one step
    kind, wrong = "SupConLoss", True

    def build(self, loss: str) -> None:
        kinds: dict[str, Any] = {
            "SupConLoss": lambda: GlobalBatchLoss(pml.SupConLoss()),
            "rows": lambda: GlobalBatchLoss(pml.SupConLoss(), mode="rows"),
            "ArcFaceLoss": lambda: GlobalBatchLoss(make_loss()),
            "divided": lambda: ClassShardedLoss(make_loss()),
            "metric": lambda: differentiable(MeanSquaredError()),
        }
        self.loss = kinds[self.kind]()

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        second = labels[:, None].expand_as(embeddings).double() if self.kind == "metric" else labels
        value: Tensor = self.loss(embeddings, second)
        return value * self.weight(index)

    def weight(self, index: int) -> float:
        return 3.0 if self.wrong and index == WRONG_AT and self.global_rank == 1 else 0.5


def of_kind(kind: str, **given: Any) -> type[Weighs]:
    return type("OfKind", (Weighs,), {"kind": kind, **given})


class Steps(Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.steps += 1


def fit_wrong(kind: str, **options: Any) -> None:
    """Raises what the fit raises, with the number of optimizer steps before."""
    steps = Steps()
    try:
        fit(of_kind(kind), callbacks=[steps], **options)
    except Exception as error:
        raise type(error)(f"{error}\nafter {steps.steps} steps") from error


class Alike(Weighs):  # the same number on all ranks; another value that is never back-propagated stays alive
    wrong = False

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        self.kept = self.loss(self.encoder(features), labels)
        return super().objective(features, labels, index) * (1 + index)


class Summed(Weighs):  # ranks may differ where the gradients are summed; their mean is the coefficient of one process
    def build(self, loss: str) -> None:
        self.loss = GlobalBatchLoss(pml.SupConLoss(), backward="sum")

    def weight(self, index: int) -> float:
        return 2.0 * self.global_rank / max(self.trainer.world_size - 1, 1) if self.trainer.world_size > 1 else 1.0


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_what_is_right_stays_silent(pool: RankPool, options: dict[str, Any]) -> None:
    for make in (Alike, Summed):
        assert_as_alone(pool, make, worlds=(2, 3), alone=partial(without_ranks, make), **options)


def without_ranks(make: type[Weighs]) -> Job:
    return type("Alone", (make,), {"build": lambda self, loss: setattr(self, "loss", pml.SupConLoss())})()


class Parts(Weighs):  # each pair of ranks has a loss of its own, and a weight of its own
    def build(self, loss: str) -> None:
        part, _ = dist.new_subgroups(2)
        self.loss = GlobalBatchLoss(pml.SupConLoss(), group=part)

    def weight(self, index: int) -> float:
        return 1.0 + self.global_rank // 2


def test_parts_of_the_world_may_weigh_differently(pool: RankPool) -> None:
    pool.run(4, fit, Parts)


def count(kind: str) -> list[str]:
    """Collectives of the last step, forward to optimizer."""
    counter = StepCollectives()
    fit(of_kind(kind, wrong=False), callbacks=[counter])
    return counter.steps[-1]


def test_it_costs_no_collective(pool: RankPool) -> None:
    """Of a replicated loss of few rows: its handshake, the one of backward, DDP's reduction."""
    for names in pool.run(2, count, "SupConLoss"):
        assert len(names) == 3, names


class KeptOnRankOne(Weighs):
    """... and rank 1 keeps another value of each step, so that its handshake leaves at the encoder's first gradients."""

    kind = "SupConLoss"

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        other = self.loss(self.encoder(features), labels)
        if self.global_rank == 1:
            self.kept = other
        return super().objective(features, labels, index)


# What no later call of a fit reads is read when the fit ends: shards that were broadcast, and how ranks weighed the
# last value.

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


def test_healthy_shards_end_in_silence(pool: RankPool) -> None:
    pool.run(2, fit, Sharded, callbacks=[BroadcastsAfter(LAST + 1)])


class WeighsTheLast(Job):
    """One rank weighs the last value by a number of its own; nothing compares calls before backward."""

    def build(self, loss: str) -> None:
        self.loss = GlobalBatchLoss(pml.SupConLoss())

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        value: Tensor = self.loss(embeddings, labels)
        return value * (3.0 if index == LAST and self.global_rank else 0.5)


def late_value_of_an_earlier_loss() -> None:
    """What a loss outside of the fit left is no matter of the fit."""
    loss = GlobalBatchLoss(pml.SupConLoss())
    rows, labels = batches(TASK)[0]
    (loss(rows.requires_grad_(), labels) * (1 + dist.get_rank())).backward()
    fit(Sharded, max_epochs=1)


def test_what_came_before_the_fit_is_left_alone(pool: RankPool) -> None:
    pool.run(2, late_value_of_an_earlier_loss)
