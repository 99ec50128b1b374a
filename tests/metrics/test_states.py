"""Each kind of state: value, gradient and accumulated value of one process; updates that kept their graph."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics as tm
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.exceptions import TorchMetricsUserError

from lightning_ddp_losses.metrics import differentiable
from lightning_ddp_losses.testing import RankPool
from tests.each_rank import each_rank
from tests.metrics.harness import difference, offline, splits
from tests.metrics.kinds import KINDS, Ours, OursTwice, Stock, StockTwice
from tests.oracle import normal, own

STEPS, ROWS = 3, 12
ADDED_UP_BY_UPDATE_ONLY = ("None tensor", "callable list")  # torchmetrics cannot add up the states of two batches


def steps() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [normal(ROWS, 3, seed=generator) for _ in range(STEPS)]


def by_forward(metric: Metric, parts: list[Tensor]) -> list[Tensor]:
    """Value and gradient of each step, then the value of all."""
    found = []
    for part in parts:
        leaf = part.clone().requires_grad_()
        value = metric(leaf)
        value.backward()
        found += [value.detach(), leaf.grad]
    total = metric.compute()
    assert isinstance(metric, Stock) or not total.requires_grad  # nothing accumulated keeps a graph
    return [*found, total.detach()]


def by_compute(metric: Metric, parts: list[Tensor]) -> list[Tensor]:
    """Gradients of all steps through one `compute`, its value, and the value after one more update."""
    leaves = [part.clone().requires_grad_() for part in parts]
    for leaf in leaves[:-1]:
        metric.update(leaf)
    value = metric.compute()
    value.backward()
    metric.update(leaves[-1])
    again = metric.compute().detach()
    return [value.detach(), again, *(leaf.grad for leaf in leaves[:-1] if leaf.grad is not None)]


def kinds_of(twice: bool) -> list[str]:
    return [kind for kind in KINDS if twice or kind not in ADDED_UP_BY_UPDATE_ONLY]


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("way", [by_forward, by_compute])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@each_rank()
def test_each_kind_of_state(world_size: int, way: Any, twice: bool, even: bool) -> None:
    off, part = {}, splits(world_size, even)(ROWS)
    for kind in kinds_of(twice):
        metric = (OursTwice if twice else Ours)(kind, keep_graph=way is by_compute)
        ours = way(metric, [rows[part].clone() for rows in steps()])
        ours = [t / world_size if t.ndim == 2 else t for t in ours]
        stock = offline((StockTwice if twice else Stock)(kind))
        stock._enable_grad = way is by_compute
        off[kind] = difference(ours, [t[part] if t.ndim == 2 else t for t in way(stock, steps())])
    assert {kind: number for kind, number in off.items() if not number < 1e-9} == {}


CHANGING = {2: [[2, 10], [11, 1], [6, 6]], 3: [[1, 4, 7], [10, 1, 1], [3, 8, 1]]}  # rows of each rank, step by step


def mean_of_means(like: Stock) -> Tensor:
    """Each rank's mean over its updates, weighed by its rows: what the docstring says of `update`."""
    sizes = torch.tensor(CHANGING[dist.get_world_size()], dtype=torch.float64)
    kept = [
        torch.stack([part.square().mean(0) for part in rows.split(own)])
        for rows, own in zip(steps(), CHANGING[dist.get_world_size()], strict=True)
    ]
    assert not torch.allclose(kept[0].mean(0), kept[1].mean(0))
    like.kept = torch.tensordot(sizes.sum(0) / sizes.sum(), torch.stack(kept).mean(0), 1)
    like._computed = None
    return like.compute()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("way", ["forward", "update"])
@each_rank()
def test_shares_of_the_rows_that_change(world_size: int, way: str) -> None:
    """What `compute` says when each rank's share of the rows changes from step to step."""
    off = {}
    for kind in kinds_of(twice=False):
        metric, oracle = Ours(kind), offline(Stock(kind))
        for rows, sizes in zip(steps(), CHANGING[world_size], strict=True):
            part = rows.split(sizes)[dist.get_rank()]
            metric(part) if way == "forward" else metric.update(part)
            oracle(rows)
        expected = mean_of_means(oracle) if way == "update" and kind == "mean" else oracle.compute()
        off[kind] = difference([metric.compute()], [expected])
        assert torch.equal(metric.compute(), metric.compute())
    assert {kind: number for kind, number in off.items() if not number < 1e-9} == {}


@pytest.mark.parametrize("sizes", [[ROWS, 0], [4, ROWS - 4, 0]], ids=str)
def test_the_mean_over_no_rows_does_not_count(pool: RankPool, sizes: list[int]) -> None:
    pool.run(len(sizes), without_rows, sizes)


def without_rows(sizes: list[int]) -> None:
    """A mean where the last rank has no rows: value, gradient and what is accumulated, against one process."""
    metric, oracle = Ours("mean"), offline(Stock("mean"))
    for rows in steps():
        part, whole = rows[own(sizes)].clone().requires_grad_(), rows.clone().requires_grad_()
        value, expected = metric(part), oracle(whole)
        value.backward()
        expected.backward()
        ours, truth = [value.detach(), part.grad / len(sizes)], [expected.detach(), whole.grad[own(sizes)]]
        assert difference(ours, truth) < 1e-9
    assert difference([metric.compute()], [oracle.compute()]) < 1e-9


class Spread(Ours):
    """Puts back what its own reset forgets."""

    def reset(self) -> None:
        super().reset()
        self.resets = getattr(self, "resets", 0) + 1


@each_rank(2)
def test_states_that_come_about_in_rarer_ways() -> None:
    """What ranks have and what one process has, by the way it came about."""
    part, world = splits(dist.get_world_size(), even=False)(ROWS), dist.get_world_size()
    # an update that looks at the rows of all ranks
    ours = differentiable(tm.NormalizedRootMeanSquaredError(normalization="range"))
    stock = offline(tm.NormalizedRootMeanSquaredError(normalization="range"))
    for rows in steps():
        ours.update(rows[part, 0], rows[part, 1].contiguous())
        stock.update(rows[:, 0], rows[:, 1].contiguous())
    assert difference([ours.compute()], [stock.compute()]) < 1e-9
    # rows of several dtypes, as torch.cat joins them
    ours, stock = Ours("cat list"), offline(Stock("cat list"), None)
    for step, rows in enumerate(steps()):
        rounded = rows.float() if step == 0 else rows
        ours.update(rounded[part])
        stock.update(rounded)
    assert difference([ours.compute()], [stock.compute()]) < 1e-9
    # a reset of the user's own
    ours, stock = Spread("sum"), offline(Stock("sum"))
    found = [t / world if t.ndim == 2 else t for t in by_forward(ours, [rows[part].clone() for rows in steps()])]
    truth = [t[part] if t.ndim == 2 else t for t in by_forward(stock, steps())]
    assert difference(found, truth) < 1e-9
    assert ours.resets >= STEPS


@each_rank(2)
def test_a_metric_is_synced_once() -> None:
    """What a metric says where its states are those of all ranks already."""
    metric = Ours("sum")
    metric.update(steps()[0])
    metric.sync()
    with pytest.raises(TorchMetricsUserError, match="already been synced"):
        metric.sync()
    with pytest.raises(TorchMetricsUserError, match="unsync"):
        metric(steps()[0])


@each_rank(2)
def test_a_rank_whose_updates_have_no_rows_takes_part_in_backward() -> None:
    """``MeanMetric`` leaves out an update without rows by itself."""
    metric = differentiable(tm.MeanMetric(), keep_graph=True).double()
    rows = torch.full((dist.get_rank(),), 3.0, dtype=torch.float64, requires_grad=True)
    metric.update(rows)
    value = metric.compute()
    value.backward()
    assert value.item() == 3.0
    assert rows.grad is not None
    assert rows.grad.tolist() == [2.0] * dist.get_rank()


@pytest.mark.parametrize("world_size", [1, 2])
@each_rank()
def test_a_compute_that_fails_leaves_the_states_of_this_rank(world_size: int) -> None:
    metric = differentiable(tm.CosineSimilarity(reduction="mean")).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compute before update
        with pytest.raises(ValueError, match="No samples"):
            metric.compute()
    rows = torch.eye(2, dtype=torch.float64)[[dist.get_rank() % 2]]
    metric.update(rows, rows)
    assert metric.compute().item() == pytest.approx(1.0)
    assert metric(rows, rows).item() == pytest.approx(1.0)
