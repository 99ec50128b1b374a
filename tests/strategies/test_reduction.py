"""Right whatever is called, in whatever order, and whatever becomes of the parameters: against one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch.callbacks as callbacks
import pytest
import torch
from pytorch_metric_learning.losses import SupConLoss
from torch import Tensor, nn

from lightning_ddp_losses import GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close
from tests.fits import make_trainer
from tests.oracle import Task, assert_close, differences
from tests.strategies.jobs import TASK, Job, assert_as_alone, fit, fit_alone, loader
from tests.strategies.scenarios import JOBS, Alternating, Compiled, CompiledAot, CompiledInPlace, OrderByRank, Unreduced

# what is frozen in batches 2 and 3 trains again in the last
LONG = Task(steps=5)


def jobs_and_ranks() -> list[Any]:
    """Each job on two ranks or on three by turns, and on three where it accumulates, which it does before the ranks' reduction.

    The other numbers of ranks are slow.
    """
    found = []
    for number, job in enumerate(JOBS):
        for world_size in (1, 2, 3):
            marks = [] if world_size == 2 + number % 2 or (world_size == 1 and number % 4 == 0) else [pytest.mark.slow]
            found.append(pytest.param(job, 1, world_size, id=f"{job.__name__}-1-{world_size}", marks=marks))
        found.append(pytest.param(job, 3, 3, id=f"{job.__name__}-3-3"))
    return found


@pytest.mark.parametrize(("job", "accumulate", "world_size"), jobs_and_ranks())
def test_ranks_equal_one_process(pool: RankPool, job: type[Job], accumulate: int, world_size: int) -> None:
    make = partial(job, "CosFaceLoss")
    assert_as_alone(pool, make, worlds=(world_size,), task=LONG, accumulate_grad_batches=accumulate)


# torch's compiler looks at the gradient of every tensor it meets, here as in one process
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("job", [Compiled, CompiledAot, CompiledInPlace], ids=lambda job: job.__name__)
def test_a_compiled_loss_equals_the_plain_one(pool: RankPool, job: type[Job]) -> None:
    plain = fit_alone(Job)
    for state in pool.run(2, fit, job):
        assert_close({name.replace("_orig_mod.", ""): value for name, value in state.items()}, plain)


def fit_compiled_module(make: type[Job]) -> dict[str, Tensor]:
    module = make()
    trainer = make_trainer("ddp_losses")
    trainer.fit(torch.compile(module, backend="eager"), loader())
    return dict(module.state_dict())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_module_equals_the_plain_one(pool: RankPool) -> None:
    assert_all_close(pool.run(2, fit_compiled_module, Job), fit_alone(Job))


DDP_OPTIONS: list[dict[str, Any]] = [
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 1, "gradient_as_bucket_view": True, "find_unused_parameters": True},
    {"check_calls": False},
    {"losses": ["loss"]},
    {"losses": "lo.s"},
]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("options", DDP_OPTIONS, ids=str)
def test_options_of_ddp_change_nothing(pool: RankPool, options: dict[str, Any], accumulate: int) -> None:
    assert_as_alone(pool, Job, options, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("job", [Job, Alternating, OrderByRank], ids=lambda job: job.__name__)
def test_static_graph(pool: RankPool, job: type[Job]) -> None:
    """Without accumulation: torch's own DDP fails when its first backward under static_graph does not synchronise."""
    assert_as_alone(pool, job, {"static_graph": True, "gradient_as_bucket_view": True}, worlds=(3,))


TRAINER_OPTIONS: dict[str, dict[str, Any]] = {
    "clip by norm": {"gradient_clip_val": 0.2},
    "clip by value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
    "two epochs": {"max_epochs": 2},
    "last batches not a full accumulation": {"accumulate_grad_batches": 4, "max_epochs": 2},
}


@pytest.mark.parametrize("name", TRAINER_OPTIONS)
def test_options_of_the_trainer(pool: RankPool, name: str) -> None:
    options = TRAINER_OPTIONS[name]
    assert_as_alone(pool, Alternating, worlds=(3,), **options)


AVERAGES: dict[str, Any] = {
    "swa": partial(callbacks.StochasticWeightAveraging, 0.05, swa_epoch_start=1, device=None),
    "ema": partial(callbacks.EMAWeightAveraging, decay=0.8),
}


def averaged(run: Any, kind: str) -> dict[str, Tensor]:
    return run(Job, callbacks=[AVERAGES[kind]()], max_epochs=4)


@pytest.mark.parametrize("kind", AVERAGES)
def test_weight_averaging_callbacks(pool: RankPool, kind: str) -> None:
    expected = averaged(fit_alone, kind)
    assert max(differences(fit_alone(Job, max_epochs=4), expected).values()) > 1e-6, "averaging did nothing"
    assert_all_close(pool.run(2, averaged, fit, kind), expected)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_module_that_is_a_loss_and_nothing_else(pool: RankPool, accumulate: int) -> None:
    assert_as_alone(pool, Unreduced, accumulate_grad_batches=accumulate)


# `find_unused_parameters` with heads that only some ranks use, next to losses that meet the other ranks in backward.


class HeadsByRank(Job):  # each rank but the first has a head of its own for its rows
    wraps = True

    def build(self, loss: str) -> None:
        super().build(loss)
        torch.manual_seed(5)
        self.heads = nn.ModuleList([nn.Linear(TASK.dim, TASK.dim).double() for _ in range(3)])
        self.pairs = GlobalBatchLoss(SupConLoss()) if self.wraps else SupConLoss()

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        value = self.loss(embeddings, labels) + self.pairs(embeddings, labels)
        if self.global_rank:
            value = value + self.heads[self.global_rank - 1](embeddings).square().mean()
        return value


class HeadsOfAll(HeadsByRank):  # one process: the mean of the ranks' terms
    wraps = False
    world_size = 2

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
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
