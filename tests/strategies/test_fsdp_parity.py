"""W ranks under `fsdp2_ddp_losses` train as one process does, and as `ddp_losses` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_losses import ClassShardedLoss, GlobalBatchLoss, ModelParallelLossStrategy
from lightning_ddp_losses.testing import RankPool
from tests.fits import make_trainer, weights_of
from tests.oracle import assert_close, batches
from tests.strategies.fsdp_jobs import Towers, fit_kind_alone, fit_sharded_model, make_job
from tests.strategies.jobs import OPTIMIZERS, TASK, fit_alone, loader, make_loss

# kind, optimizer, world size, whether ranks have equally many rows, options of the trainer
CASES: list[tuple[str, str, int, bool, dict[str, Any]]] = [
    ("arcface", "sgd", 2, True, {}),
    ("arcface", "adamw", 2, False, {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}),
    ("divided", "adamw", 2, False, {"gradient_clip_val": 0.3}),
    ("divided", "sgd", 2, False, {"accumulate_grad_batches": 2}),
    ("supcon", "adamw", 2, False, {}),
    ("three", "adamw", 2, False, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3}),
    ("clip", "adamw", 2, False, {"gradient_clip_val": 0.3}),
    ("siglip", "sgd", 2, False, {}),
    ("three", "adamw", 4, True, {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}),
    ("divided", "adamw", 4, False, {"gradient_clip_val": 0.3, "gradient_clip_algorithm": "value"}),
    ("clip", "adamw", 3, False, {"gradient_clip_val": 0.3}),
    ("three", "sgd", 3, False, {}),
]


def joined(states: list[dict[str, Tensor]], kind: str) -> dict[str, Tensor]:
    """The ranks' states as one: equal, but for a divided weight."""
    whole = dict(states[0])
    if kind == "divided":
        whole["loss.W"] = torch.cat([state["loss.W"] for state in states], 1)
    for state in states:
        assert all(torch.equal(state[name], whole[name]) for name in state if (kind, name) != ("divided", "loss.W"))
    return whole


@pytest.mark.parametrize(("kind", "optimizer", "world_size", "even", "options"), CASES, ids=str)
def test_a_fit_equals_one_process(
    pool: RankPool, kind: str, optimizer: str, world_size: int, even: bool, options: dict[str, Any]
) -> None:
    expected = fit_kind_alone(kind, optimizer, **options)
    states = pool.run(world_size, fit_sharded_model, kind, optimizer, even=even, **options)
    assert_close(joined(states, kind), expected, rtol=1e-8)


def fit_with_empty_batches(kind: str) -> dict[str, Tensor]:
    """In each step one rank, in turn, has no row, and the others share all."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    own = []
    for index, (features, labels) in enumerate(batches(TASK)):
        having = [other for other in range(world_size) if other != index % world_size]
        part = slice(having.index(rank), None, len(having)) if rank in having else slice(0, 0)
        own.append((features[part], labels[part]))
    module = make_job(kind)
    make_trainer(ModelParallelLossStrategy()).fit(module, DataLoader(own, batch_size=None))
    return weights_of(module)


def start_apart(module: nn.Module) -> None:
    """Rank 0 has loaded its weights, the others have not."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + dist.get_rank())


def test_all_ranks_start_as_rank_0(pool: RankPool) -> None:
    """What fully_shard divides too, of which each rank takes its part from what it holds itself."""
    states = pool.run(2, fit_sharded_model, "arcface", prepare=start_apart)
    assert_close(joined(states, "arcface"), fit_kind_alone("arcface"), rtol=1e-8)


@pytest.mark.parametrize(("kind", "world_size"), [("three", 2), ("divided", 3)])
def test_a_rank_may_have_no_rows(pool: RankPool, kind: str, world_size: int) -> None:
    states = pool.run(world_size, fit_with_empty_batches, kind)
    assert_close(joined(states, kind), fit_kind_alone(kind), rtol=1e-8)


class ByHand(Towers):
    """Each optimizer steps after a backward of its own: first the encoder and one loss, then the other loss with the encoder at rest."""

    def build(self, loss: str) -> None:
        self.automatic_optimization = False
        first, second = make_loss("ArcFaceLoss"), make_loss("CosFaceLoss", 1)
        self.first: nn.Module = GlobalBatchLoss(first) if self.is_global else first
        self.second: nn.Module = ClassShardedLoss(second) if self.is_global else second

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        features, labels = batch
        for optimizer, loss in zip(self.optimizers(), (self.first, self.second), strict=True):
            embeddings = self.encoder(features)
            optimizer.zero_grad()
            self.manual_backward(loss(embeddings if loss is self.first else embeddings.detach(), labels))
            self.clip_gradients(optimizer, 0.3, "norm")
            optimizer.step()

    def configure_optimizers(self) -> Any:
        make = OPTIMIZERS["adam"]
        return [make([*self.encoder.parameters(), *self.first.parameters()]), make(self.second.parameters())]


class PlainByHand(ByHand):  # the same for one process
    is_global = False


def test_two_optimizers_step_by_hand(pool: RankPool) -> None:
    expected = fit_alone(PlainByHand)
    states = pool.run(2, fit_sharded_model, ByHand, even=False)
    divided = torch.cat([state["second.W"] for state in states], 1)
    for state in states:
        assert_close({**state, "second.W": divided}, expected, rtol=1e-8)


# ---------------------------------------------------------------------- halves

# of what training moved, at most: about twice the largest that was measured
ROUNDING = {"32-true": 1e-5, "bf16-mixed": 0.02}


def fit_rounded(precision: str) -> dict[str, Tensor]:
    module = make_job("three").float()
    data = loader(even=False)
    own = [(features.float(), labels) for features, labels in data]
    trainer = make_trainer(ModelParallelLossStrategy(), precision=precision)
    trainer.fit(module, DataLoader(own, batch_size=None))
    return weights_of(module)


@pytest.mark.parametrize("precision", ROUNDING)
def test_lower_precision_rounds_and_does_nothing_else(pool: RankPool, precision: str) -> None:
    before, expected = fit_kind_alone("three", "still"), fit_kind_alone("three")
    for state in pool.run(2, fit_rounded, precision):
        assert all(value.dtype == torch.float32 for value in state.values())
        for name, truth in expected.items():
            off, moved = (state[name].double() - truth).norm(), (before[name] - truth).norm()
            assert off <= ROUNDING[precision] * moved, (name, float(off / moved))
