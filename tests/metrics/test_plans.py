"""What is decided once about a metric's exchange: at most 32 plans, none in a copy, another one if the signature changes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torchmetrics as tm
from torch import Tensor

from lightning_ddp_losses.errors import RankMismatchError
from lightning_ddp_losses.metrics import differentiable, synced
from tests.doors import ExchangePlan, Plans, plans_of
from tests.each_rank import each_rank
from tests.metrics.kinds import Ours
from tests.oracle import normal


def rows(n: int, seed: int) -> Tensor:
    return normal(n, 3, seed=seed)


def exchange_plans(metric: tm.Metric) -> list[ExchangePlan]:
    return list(plans_of(metric).values())


def test_the_oldest_of_too_many_goes() -> None:
    plans = Plans()
    for number in range(40):
        plans.add((number,), number)
    assert plans.get((7,)) is None
    assert [plans.get((number,)) for number in range(8, 40)] == list(range(8, 40))


@pytest.mark.parametrize("number", [1, 4, 9])
@each_rank(2)
def test_calls_of_one_kind_share_a_plan(number: int) -> None:
    """Rows may change in number. Their lists have one description in each call, tensors of fixed shapes have one for all calls."""
    for kind in ("sum", "cat list"):
        metric = Ours(kind)
        for step in range(3):
            metric(rows(number + step + dist.get_rank(), step).requires_grad_()).backward()
        (plan,) = exchange_plans(metric)
        assert (plan.contents is None) == (kind == "cat list")
        # another title, and no gradient
        with torch.no_grad():
            metric.compute()
        assert len(exchange_plans(metric)) == 2


@each_rank(2)
def test_a_copy_has_no_plans() -> None:
    for metric in (differentiable(tm.MeanSquaredError()), synced(tm.MeanSquaredError())):
        metric.update(rows(4, 0), rows(4, 1))
        metric.compute()
        assert exchange_plans(metric)
        copies = [copy.deepcopy(metric), pickle.loads(pickle.dumps(metric)), metric.clone()]
        assert not any(exchange_plans(copied) for copied in copies)
        for updated in (metric, *copies):
            updated.update(rows(4, 2), rows(4, 3))
            assert updated.compute() == metric.compute()


@each_rank(2)
def test_a_state_that_is_declared_otherwise_is_followed() -> None:
    """On all ranks, then the new reduction counts. On one rank, then it is an error on both."""
    metric, rank = Ours("sum"), dist.get_rank()
    metric(rows(4, rank))
    for name, reduced in (("max", torch.maximum), ("min", torch.minimum)):
        metric.add_state("kept", torch.zeros(3, dtype=torch.float64), name)
        metric.reset()
        metric.update(rows(4, rank))
        metric.sync()
        both = [rows(4, each).square().sum(0) for each in range(2)]
        assert torch.equal(metric.kept, reduced(*both))
        metric.unsync()
    if rank == 1:
        metric.add_state("kept", torch.zeros(3, dtype=torch.float64), "max")
    metric.reset()
    metric.update(rows(4, rank))
    with pytest.raises(RankMismatchError, match="states"):
        metric.sync()
