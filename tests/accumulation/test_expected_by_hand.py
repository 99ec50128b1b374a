"""Counts that a program gives by hand, where the last window of an epoch has fewer micro-batches."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_ddp_losses import DDPLossStrategy
from lightning_ddp_losses.testing import RankPool
from tests.accumulation.jobs import loader as listed
from tests.accumulation.test_loss_counts import Counted, alone, rows_of
from tests.answers import assert_all_close
from tests.lightning_ranks import make_trainer

WINDOW, BATCHES = 3, 5


class ByHand(Counted):
    """Its penalty is of no rows, and has the weight of one loss in each window."""

    loss_counts = None  # type: ignore[assignment]

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index % WINDOW == 0:
            rank, world = dist.get_rank(), dist.get_world_size()
            rows = [rows_of(i, rank, world) for i in range(index, min(index + WINDOW, BATCHES))]
            counts = {
                "ce": sum(int((each["labels"] >= 0).sum()) for each in rows),
                "square": sum(len(each["labels"]) for each in rows),
            }
            self.trainer.strategy.expect_counts(counts)
        return super().training_step(batch, index)


def fit() -> dict[str, Tensor]:
    module, batches = ByHand(), [rows_of(i, dist.get_rank(), dist.get_world_size()) for i in range(BATCHES)]
    strategy = DDPLossStrategy(accumulation="window")
    make_trainer(strategy, accumulate_grad_batches=WINDOW, limit_val_batches=0).fit(module, listed(batches))
    return dict(module.state_dict())


def test_a_term_of_no_row_counts_once_in_a_short_window(pool: RankPool) -> None:
    assert_all_close(pool.run(2, fit), alone([[0, 1, 2], [3, 4]], 2))
