"""Each kind of state: value, gradient and accumulated value of one process; updates that kept their graph."""

from __future__ import annotations

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
from tests.metrics.harness import difference, splits
from tests.metrics.kinds import KINDS, Ours, OursTwice, Stock, StockTwice

STEPS, ROWS = 3, 12
ADDED_UP_BY_UPDATE_ONLY = ("None tensor", "callable list")  # torchmetrics cannot add up the states of two batches


def steps() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(ROWS, 3, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def by_forward(metric: Metric, parts: list[Tensor]) -> list[Tensor]:
    """Value and gradient of each step, then the value of all."""
    found = []
    for part in parts:
        leaf = part.clone().requires_grad_()
        value = metric(leaf)
        value.backward()
        assert leaf.grad is not None
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


def alone(kind: str, way: Any, twice: bool) -> list[Tensor]:
    metric = (StockTwice if twice else Stock)(kind, distributed_available_fn=lambda: False).set_dtype(torch.float64)
    metric._enable_grad = way is by_compute
    return way(metric, steps())  # type: ignore[no-any-return]


def on_ranks(way: Any, kinds: list[str], even: bool, twice: bool) -> dict[str, float]:
    """By kind, the difference from one process."""
    found = {}
    world = dist.get_world_size()
    part = splits(world, even)(ROWS)
    for kind in kinds:
        oracle = alone(kind, way, twice)
        metric = (OursTwice if twice else Ours)(kind, keep_graph=way is by_compute)
        ours = way(metric, [rows[part].clone() for rows in steps()])
        ours = [t / world if t.ndim == 2 else t for t in ours]
        oracle = [t[part] if t.ndim == 2 else t for t in oracle]
        found[kind] = difference(ours, oracle)
    return found


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_kind_of_state(pool: RankPool, world_size: int, even: bool) -> None:
    for way in (by_forward, by_compute):
        for twice in (False, True):
            kinds = [kind for kind in KINDS if twice or kind not in ADDED_UP_BY_UPDATE_ONLY]
            for found in pool.run(world_size, on_ranks, way, kinds, even, twice):
                assert {kind: off for kind, off in found.items() if not off < 1e-9} == {}, (way.__name__, twice)


CHANGING = {2: [[2, 10], [11, 1], [6, 6]], 3: [[1, 4, 7], [10, 1, 1], [3, 8, 1]]}  # rows of each rank, step by step


def changing_shares(way: str, kinds: list[str]) -> dict[str, float]:
    """By kind, how far `compute` is from what it ought to say when each rank's share of the rows changes from step to step."""
    rank, world, found = dist.get_rank(), dist.get_world_size(), {}
    for kind in kinds:
        metric, oracle = Ours(kind), Stock(kind, distributed_available_fn=lambda: False).set_dtype(torch.float64)
        for rows, sizes in zip(steps(), CHANGING[world], strict=True):
            own = rows.split(sizes)[rank]
            metric(own) if way == "forward" else metric.update(own)
            oracle(rows)
        expected = oracle.compute()
        if way == "update" and kind == "mean":
            expected = mean_of_means(oracle)
        found[kind] = difference([metric.compute()], [expected])
        assert torch.equal(metric.compute(), metric.compute())
    return found


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
def test_shares_of_the_rows_that_change(pool: RankPool, world_size: int, way: str) -> None:
    kinds = [kind for kind in KINDS if kind not in ADDED_UP_BY_UPDATE_ONLY]
    for found in pool.run(world_size, changing_shares, way, kinds):
        assert {kind: off for kind, off in found.items() if not off < 1e-9} == {}


def without_rows() -> float:
    """A mean where the last rank has no rows: value, gradient and what is accumulated, against one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    metric, oracle = Ours("mean"), Stock("mean", distributed_available_fn=lambda: False).set_dtype(torch.float64)
    ours, truth = [], []
    sizes = {2: [ROWS, 0], 3: [4, ROWS - 4, 0]}[world]
    for rows in steps():
        own, whole = rows.split(sizes)[rank].clone().requires_grad_(), rows.clone().requires_grad_()
        value, expected = metric(own), oracle(whole)
        value.backward()
        expected.backward()
        assert own.grad is not None
        assert whole.grad is not None
        ours += [value.detach(), own.grad / world]
        truth += [expected.detach(), whole.grad.split(sizes)[rank]]
    return difference([*ours, metric.compute()], [*truth, oracle.compute()])


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_mean_over_no_rows_does_not_count(pool: RankPool, world_size: int) -> None:
    assert max(pool.run(world_size, without_rows)) < 1e-9


class Spread(Ours):
    """Puts back what its own reset forgets."""

    def reset(self) -> None:
        super().reset()
        self.resets = getattr(self, "resets", 0) + 1


def rarer_states() -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """What ranks have and what one process has, by the way it came about."""
    part = splits(dist.get_world_size(), even=False)(ROWS)
    found: dict[str, tuple[list[Tensor], list[Tensor]]] = {}

    # an update that looks at the rows of all ranks
    ours = differentiable(tm.NormalizedRootMeanSquaredError(normalization="range"))
    stock = tm.NormalizedRootMeanSquaredError(normalization="range", distributed_available_fn=lambda: False)
    stock.set_dtype(torch.float64)
    for rows in steps():
        ours.update(rows[part, 0], rows[part, 1].contiguous())
        stock.update(rows[:, 0], rows[:, 1].contiguous())
    found["whole batches"] = [ours.compute()], [stock.compute()]

    # rows of several dtypes, as torch.cat joins them
    ours, stock = Ours("cat list"), Stock("cat list", distributed_available_fn=lambda: False)
    for step, rows in enumerate(steps()):
        rounded = rows.float() if step == 0 else rows
        ours.update(rounded[part])
        stock.update(rounded)
    found["dtypes"] = [ours.compute()], [stock.compute()]

    # a reset of the user's own
    ours, stock = Spread("sum"), Stock("sum", distributed_available_fn=lambda: False).set_dtype(torch.float64)
    found["own reset"] = by_forward(ours, [rows[part].clone() for rows in steps()]), by_forward(stock, steps())
    world = dist.get_world_size()
    found["own reset"] = (
        [t / world if t.ndim == 2 else t for t in found["own reset"][0]],
        [t[part] if t.ndim == 2 else t for t in found["own reset"][1]],
    )
    assert ours.resets >= STEPS
    return found


def test_states_that_come_about_in_rarer_ways(pool: RankPool) -> None:
    for found in pool.run(2, rarer_states):
        for name, (ours, truth) in found.items():
            assert difference(ours, truth) < 1e-9, name


def out_of_turn() -> list[str]:
    """What a metric says where its states are those of all ranks already."""
    said = []
    metric = Ours("sum")
    metric.update(steps()[0])
    metric.sync()
    for again in (metric.sync, lambda: metric(steps()[0])):
        with pytest.raises(TorchMetricsUserError) as error:
            again()
        said.append(str(error.value))
    return said


def test_a_metric_is_synced_once(pool: RankPool) -> None:
    for synced, forward in pool.run(2, out_of_turn):
        assert "already been synced" in synced
        assert "unsync" in forward
