"""Counts that a program gives by hand, where the last window of an epoch has fewer micro-batches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_ddp_losses.testing import RankPool
from tests.accumulation.jobs import train
from tests.accumulation.test_loss_counts import Counted, counts_of, own_rows, truth_of_windows
from tests.answers import assert_all_close
from tests.fits import weights_of

WINDOW = 3


class ByHand(Counted):
    """Its penalty is of no rows, and has the weight of one loss in each window."""

    loss_counts = None  # type: ignore[assignment]

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index % WINDOW == 0:
            counts = counts_of(*own_rows()[index : index + WINDOW])
            self.trainer.strategy.expect_counts({name: int(count) for name, count in counts.items()})
        return super().training_step(batch, index)


def fit() -> dict[str, Tensor]:
    module = ByHand()
    train(module, own_rows(), accumulate_grad_batches=WINDOW, limit_val_batches=0)
    return weights_of(module)


def test_a_term_of_no_row_counts_once_in_a_short_window(pool: RankPool) -> None:
    assert_all_close(pool.run(2, fit), truth_of_windows([[0, 1, 2], [3, 4]], 2))
