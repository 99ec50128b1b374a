"""`find_unused_parameters` with heads that only some ranks use, next to losses that meet the other ranks in backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytorch_metric_learning.losses import SupConLoss
from torch import Tensor, nn

from lightning_ddp_losses import GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.strategies.jobs import TASK, Job, assert_as_alone


class HeadsByRank(Job):  # each rank but the first has a head of its own for its rows
    wraps = True

    def build(self, loss: str) -> None:
        super().build(loss)
        torch.manual_seed(5)
        self.heads = nn.ModuleList([nn.Linear(TASK.dim, TASK.dim).double() for _ in range(3)])
        self.pairs = GlobalBatchLoss(SupConLoss()) if self.wraps else SupConLoss()

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        embeddings = self.encoder(features)
        value = self.loss(embeddings, labels) + self.pairs(embeddings, labels)
        if self.global_rank:
            value = value + self.heads[self.global_rank - 1](embeddings).square().mean()
        return value


class HeadsOfAll(HeadsByRank):  # one process: the mean of the ranks' terms
    wraps = False
    world_size = 2

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        embeddings = self.encoder(features)
        value = self.loss(embeddings, labels) + self.pairs(embeddings, labels)
        parts = embeddings.chunk(self.world_size)
        for head, part in zip(self.heads, parts[1:], strict=False):
            value = value + head(part).square().mean() / self.world_size
        return value


class HeadsOfThree(HeadsOfAll):
    world_size = 3


@pytest.mark.parametrize("check_calls", [True, False])
@pytest.mark.parametrize(("world_size", "alone"), [(2, HeadsOfAll), (3, HeadsOfThree)])
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True}], ids=["", "buckets"])
def test_heads_of_some_ranks(
    pool: RankPool, check_calls: bool, world_size: int, alone: type[Job], options: dict[str, Any]
) -> None:
    strategy = {"find_unused_parameters": True, "check_calls": check_calls, **options}
    assert_as_alone(pool, HeadsByRank, strategy, worlds=(world_size,), alone=alone)
