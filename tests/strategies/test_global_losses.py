"""Global losses under the strategy: uneven ranks, accumulation, manual optimisation, against one process with the plain loss."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torch.nn import functional

from lightning_ddp_losses import ClipLoss, GlobalBatchLoss, SigLipLoss, microbatched
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close
from tests.oracle import assert_close
from tests.strategies.jobs import Job, assert_as_alone, fit, fit_alone, make_loss


class Both(Job):  # a loss over samples and one over pairs, plain; two embeddings of one batch
    wrapped = False

    def build(self, loss: str) -> None:
        losses = {"loss": make_loss(loss), "pairs": pml.SupConLoss()}
        for name, plain in losses.items():
            setattr(self, name, GlobalBatchLoss(plain) if self.wrapped else plain)

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(embeddings, labels) + 0.5 * self.pairs(embeddings, labels)


class BothWrapped(Both):  # the same, each over the rows of all ranks
    wrapped = True


class Manual(Both):  # the same by hand, a backward for each loss
    by_hand = True

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for loss in (self.loss, self.pairs):
            self.manual_backward(loss(self.encoder(batch[0]), batch[1]))
        optimizer.step()


class ManualWrapped(Manual):  # the same, each over the rows of all ranks
    wrapped = True


CASES: list[tuple[type[Job], type[Job], dict[str, Any]]] = [
    (Both, BothWrapped, {}),
    (Both, BothWrapped, {"accumulate_grad_batches": 2}),
    (Both, BothWrapped, {"gradient_clip_val": 0.1}),
    (Manual, ManualWrapped, {}),
]
STRATEGIES: list[Any] = [{}, {"check_calls": False}, "ddp"]
# under plain DDP a backward that leaves out the other loss's weight is an error of torch's
RUNS = [(*case, strategy) for case in CASES for strategy in STRATEGIES if (case[0], strategy) != (Manual, "ddp")]
# by turns on two ranks and on three; the other of both is slow
WORLDS = [
    pytest.param(*run, world_size, marks=[pytest.mark.slow] if (number + world_size) % 2 else [])
    for number, run in enumerate(RUNS)
    for world_size in (2, 3)
]


@pytest.mark.parametrize(("plain", "wrapped", "options", "strategy", "world_size"), WORLDS, ids=str)
def test_uneven_ranks_equal_one_process(
    pool: RankPool, plain: type[Job], wrapped: type[Job], options: dict[str, Any], strategy: Any, world_size: int
) -> None:
    expected = fit_alone(plain, **options)
    for state in pool.run(world_size, fit, wrapped, strategy, even=False, **options):
        assert_close(state, expected)


class Views(Job):  # two views of each row, no labels
    def build(self, loss: str) -> None:
        self.loss = pml.SelfSupervisedLoss(pml.NTXentLoss(0.5))

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(self.encoder(features), self.encoder(features.flip(1) * 1.5))  # type: ignore[no-any-return]


def test_two_views_under_global_batch_auto(pool: RankPool) -> None:
    assert_as_alone(pool, Views, {"global_batch": "auto"}, worlds=(2, 3), even=False)


def test_an_unchanged_module_under_global_batch_auto(pool: RankPool) -> None:
    expected = fit_alone(Both, accumulate_grad_batches=2)
    options = {"global_batch": "auto"}
    assert_all_close(pool.run(3, fit, Both, options, even=False, accumulate_grad_batches=2), expected)


class TwoHeads(Job):  # two losses of one kind, made in another order on rank 1
    swapped = False

    def build(self, loss: str) -> None:
        names = ["near", "far"]
        made = {name: GlobalBatchLoss(pml.SupConLoss()) for name in (names[::-1] if dist.get_rank() else names)}
        for name in names:
            setattr(self, name, made[name])

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        heads = [self.near, self.far]
        values = [head(embeddings, labels) for head in (heads[::-1] if self.swapped and dist.get_rank() else heads)]
        return sum(values, torch.zeros(()))


def test_the_strategy_tells_losses_of_one_kind_by_their_paths(pool: RankPool) -> None:
    pool.run(2, fit, TwoHeads, {})


# Two towers and encoders in pieces under the strategy, on uneven ranks, against one process with the textbook
# expression.


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
def test_two_towers_on_uneven_ranks_equal_one_process(
    pool: RankPool, kind: str, make: type[Job], options: dict[str, Any]
) -> None:
    expected = fit_alone(lambda: Towers(kind), **options)
    for world_size in (2, 3):
        assert_all_close(pool.run(world_size, fit, partial(make, kind), even=False, **options), expected)
