"""Right whatever is called, in whatever order, and whatever becomes of the parameters: against one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch.callbacks as callbacks
import pytest
import torch
from torch import Tensor

from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close
from tests.lightning_ranks import make_trainer
from tests.oracle import Task, assert_close, differences
from tests.strategies.jobs import Job, assert_as_alone, fit, fit_alone, loader
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
