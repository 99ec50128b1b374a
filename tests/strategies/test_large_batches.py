"""Two towers and encoders in pieces under the strategy, on uneven ranks, against one process with the textbook expression."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_ddp_losses import ClipLoss, ConfigurationError, SigLipLoss, microbatched
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close, assert_errors
from tests.strategies.jobs import Job, fit, fit_alone
from tests.strategies.sharded_jobs import Sharded


class Textbook(nn.Module):  # CLIP's or SigLIP's loss on the whole matrix of products
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.2)).double())
        if kind == "siglip":
            self.logit_bias = nn.Parameter(torch.tensor(-1.0, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.logit_scale.exp() * functional.normalize(x) @ functional.normalize(y).t()
        target = torch.arange(len(x))
        if not hasattr(self, "logit_bias"):
            return (functional.cross_entropy(logits, target) + functional.cross_entropy(logits.t(), target)) / 2
        signs = 2 * torch.eye(len(x), dtype=torch.float64) - 1
        return -functional.logsigmoid(signs * (logits + self.logit_bias)).sum() / len(x)


class Towers(Job):  # one encoder, two views of a row
    def build(self, loss: str) -> None:
        self.loss = Textbook(loss)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(self.encoder(features), self.encoder(features.flip(1)))


class Tiled(Towers):  # in tiles, over the rows of all ranks
    def build(self, loss: str, **further: Any) -> None:
        options: dict[str, Any] = {"init_temperature": 0.2, "tile_bytes": 128, **further}
        self.loss = ClipLoss(**options) if loss == "clip" else SigLipLoss(**options, init_bias=-1.0)
        self.loss.double()


class Pieces(Tiled):  # the encoder in pieces of two rows; one tower goes round a ring
    def build(self, loss: str) -> None:
        super().build(loss, gather="ring")
        self.run = microbatched(self.encoder, 2)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(self.run(features), self.run(features.flip(1)))


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}], ids=str)
@pytest.mark.parametrize("make", [Tiled, Pieces])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_uneven_ranks_equal_one_process(pool: RankPool, kind: str, make: type[Job], options: dict[str, Any]) -> None:
    expected = fit_alone(lambda: Towers(kind), **options)
    for world_size in (2, 3):
        assert_all_close(pool.run(world_size, fit, partial(make, kind), even=False, **options), expected)


def test_divided_classes_need_the_strategy(pool: RankPool) -> None:
    assert_errors(pool.errors(2, fit, Sharded, {"losses": []}), "losses=[]", of=ConfigurationError.__name__)
