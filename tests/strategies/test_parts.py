"""Losses over a part of the ranks: one that fails by itself ends all ranks at once, in its part and outside, with the reason."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from torch import Tensor

from lightning_ddp_losses import ClassShardedLoss, GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.doors import handshake, process_groups
from tests.strategies.jobs import Job, fit, make_loss


class InParts(Job):  # two groups of two; rank 1 fails before the loss of step 2
    def build(self, loss: str) -> None:
        part, _ = dist.new_subgroups(2)
        pairs = loss == "pairs"
        self.loss = (GlobalBatchLoss if pairs else ClassShardedLoss)(
            pml.SupConLoss() if pairs else make_loss(), group=part
        )

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        if index == 2 and self.global_rank == 1:
            raise ValueError("no such sample")
        return self.loss(embeddings, labels)


class BesideTheWorld(Job):
    """Parts of two ranks and of one, beside a loss over all; rank 0 fails in the first step, before, between or after the losses."""

    def build(self, place: str) -> None:
        self.place = place
        parts = [dist.new_group([0, 1]), dist.new_group([2])]
        self.loss = GlobalBatchLoss(pml.SupConLoss(), group=parts[dist.get_rank() // 2])
        self.other = GlobalBatchLoss(pml.SupConLoss())

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        self.maybe_fail("before")
        value = self.loss(embeddings, labels)
        self.maybe_fail("between")
        value = value + self.other(embeddings, labels)
        self.maybe_fail("after")
        return value

    def maybe_fail(self, place: str) -> None:
        if self.global_rank == 0 and self.place == place:
            raise ValueError("no such sample")


class DisagreesInAPart(InParts):  # ranks 0 and 1 hand their loss rows of other widths; ranks 2 and 3 do nothing wrong
    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        is_odd = index == 2 and self.global_rank < 2
        return self.loss(embeddings[:, : 3 - self.global_rank] if is_odd else embeddings, labels)


def fail_then_meet_what_is_left(make: type[Job], loss: str) -> list[str]:
    """Returns what handshakes are still on their way once all ranks have failed, and that nobody comes to.

    The garbage collector would wait for their peers in whatever the rank does next, as long as the group's time-out.
    """
    with contextlib.suppress(Exception):
        fit(partial(make, loss))
    dist.barrier()  # every rank has sent all that it sends
    left = []
    for group in [None, *process_groups.subgroups()]:
        channel = handshake.Channel.of(group, "handshakes")
        pending = channel.pending
        if pending is None:
            continue
        try:
            pending.receive(timedelta(seconds=20))
        except RuntimeError as error:
            left.append(f"{dist.get_process_group_ranks(channel.group)}: {error}")
    dist.barrier()
    return left


@pytest.mark.parametrize(
    ("ranks", "job", "loss"),
    [
        (4, InParts, "pairs"),
        (4, InParts, "classes"),
        (4, DisagreesInAPart, "pairs"),
        (3, BesideTheWorld, "before"),
        (3, BesideTheWorld, "between"),
        (3, BesideTheWorld, "after"),
    ],
)
def test_no_handshake_is_left_on_its_way(pool: RankPool, ranks: int, job: type[Job], loss: str) -> None:
    assert pool.run(ranks, fail_then_meet_what_is_left, job, loss) == [[]] * ranks
