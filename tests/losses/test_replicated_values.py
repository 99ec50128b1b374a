"""The value of the call before: rounding passes, one per cent is an error on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_ddp_losses import GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.losses.test_late_changes import FEW, Unreadable, labelled


def two_calls(factor: float) -> list[torch.Tensor]:
    """Two calls of a loss with a number that nobody can read, which rank 1 has times a factor."""
    loss = GlobalBatchLoss(Unreadable(0.5 * factor if dist.get_rank() else 0.5))
    return [loss(*labelled(FEW)) for _ in range(2)]


def test_another_order_of_summation_is_no_difference(pool: RankPool) -> None:
    assert len(pool.run(2, two_calls, 1 + 1e-12)) == 2
