"""Checks whose bytes travel in the handshake of each synchronising backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ddp_losses.errors import LossCallError
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives
from tests.strategies.jobs import Job, fit
from tests.strategies.test_calls import assert_same_error


class Riders(Callback):  # two riders: one sends rows of any length, one raises on all ranks when told to
    def __init__(self, length: int = 3, fail_at: int | None = None) -> None:
        self.length, self.fail_at = length, fail_at
        self.rode: list[bool] = []
        self.seen: list[list[bytes]] = []
        self.step_gradients: list[bool] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        own = bytes([dist.get_rank()]) * (self.length + dist.get_rank())

        def judge(rows: list[bytes]) -> None:
            self.step_gradients.append(pl_module.encoder[0].weight.grad is not None)
            if self.fail_at == len(self.seen):
                raise LossCallError("told to", collective=True)
            self.seen.append(rows)

        self.rode = [
            strategy.attach_payload(lambda: own, judge),
            strategy.attach_payload(lambda: b"", lambda rows: None),
        ]


def ride(strategy: dict[str, Any], length: int, **options: Any) -> tuple[list[bool], list[list[bytes]], list[bool]]:
    riders = Riders(length, options.pop("fail_at", None))
    fit(Job, strategy, callbacks=[riders], **options)
    return riders.rode, riders.seen, riders.step_gradients


@pytest.mark.parametrize("length", [3, 5000])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_rides_reaches_every_rank_before_the_encoder_has_a_gradient(
    pool: RankPool, length: int, accumulate: int
) -> None:
    for world_size in (1, 2, 3):
        rows = [bytes([rank]) * (length + rank) for rank in range(world_size)]
        for rode, seen, gradients in pool.run(
            world_size, ride, {}, length, accumulate_grad_batches=accumulate, limit_train_batches=4
        ):
            assert rode == [True, True]
            assert seen == [rows] * (4 // accumulate)
            assert gradients[0] is (accumulate > 1)


def test_without_the_frame_nothing_rides(pool: RankPool) -> None:
    for strategy in ({"check_calls": False}, {"losses": []}):
        for rode, seen, _ in pool.run(2, ride, strategy, 3):
            assert (rode, seen) == ([False, False], [])


def test_what_a_judge_raises_ends_all_ranks_in_backward(pool: RankPool) -> None:
    assert_same_error(pool.errors(3, ride, {}, 3, fail_at=1), "told to")


def gathers(riding: bool) -> int:
    with CountCollectives() as count:
        fit(Job, callbacks=[Riders()] * riding)
    return sum("allgather" in name for name in count.names)


def test_a_ride_costs_no_collective(pool: RankPool) -> None:
    assert pool.run(2, gathers, True) == pool.run(2, gathers, False)
