"""Collections, compositions and wrappers: one exchange for all members, the values and gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics as tm
from torch import Tensor
from torchmetrics.wrappers import LambdaInputTransformer, MultitaskWrapper

from lightning_ddp_losses import ConfigurationError
from lightning_ddp_losses.metrics import differentiable
from tests.counting import CountCollectives
from tests.each_rank import each_rank
from tests.metrics.harness import difference, flat, offline, splits
from tests.oracle import normal

ROWS, STEPS, WINDOW = 12, 3, 2


def squared() -> tm.Metric:
    return tm.MeanSquaredError(num_outputs=2)


def collection() -> tm.MetricCollection:
    members = [tm.MeanSquaredError(), tm.MeanAbsoluteError(), tm.R2Score(), tm.ExplainedVariance()]
    return tm.MetricCollection({type(m).__name__: m for m in members}, prefix="train_")


def nested() -> tm.MetricCollection:
    return tm.MetricCollection(
        {"sum": tm.MeanSquaredError() + 2 * tm.MeanAbsoluteError(), "by_class": tm.ClasswiseWrapper(squared())}
    )


def reused() -> tm.Metric:
    metric = tm.MeanSquaredError()
    return metric + metric


# how to make it, and how many collectives its forward needs
MAKE: dict[str, tuple[Callable[[], Any], int]] = {
    "collection": (collection, 1),
    "a collection without groups": (lambda: tm.MetricCollection([squared(), tm.R2Score()], compute_groups=False), 1),
    "nested": (nested, 1),
    "a + b": (lambda: tm.MeanSquaredError() + tm.R2Score(), 1),
    "2 * a - abs(b)": (lambda: 2 * tm.MeanSquaredError() - abs(tm.MeanAbsoluteError()), 1),
    "a[0]": (lambda: squared()[0], 1),
    "a + a": (reused, 2),
    "ClasswiseWrapper": (lambda: tm.ClasswiseWrapper(squared(), labels=["x", "y"]), 1),
    "MultioutputWrapper": (lambda: tm.MultioutputWrapper(tm.R2Score(), 2), 1),
    "MinMaxMetric": (lambda: tm.MinMaxMetric(tm.MeanSquaredError()), 1),
    "Running": (lambda: tm.wrappers.Running(tm.MeanSquaredError(), window=WINDOW), 1),
    "LambdaInputTransformer": (lambda: LambdaInputTransformer(tm.MeanSquaredError(), torch.sigmoid), 1),
}


def batches() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(3)
    return [(normal(ROWS, 2, seed=g), normal(ROWS, 2, seed=g)) for _ in range(STEPS)]


def scalar(value: Any) -> Tensor:
    """Something of every part of a value; the second part weighs differently."""
    if isinstance(value, dict):
        return sum(((i + 1) * scalar(v) for i, v in enumerate(value.values())), torch.tensor(0.0))
    return value.sum()


@cache
def one_process(make: Callable[[], Any]) -> tuple[list[list[Tensor]], list[Tensor]]:
    """torchmetrics' own, in float64, on whole batches; `compute` after updates only, which its wrappers get right."""
    metric, counted, found = offline(make()), offline(make()), []
    for preds, target in batches():
        leaf = preds.clone().requires_grad_()
        if isinstance(metric, tm.MinMaxMetric):  # its own forward cuts the graph
            raw = metric._base_metric(leaf, target)
            high = [raw.detach(), *(f[0] for f in found)]
            most, least = (raw if raw == edge else edge for edge in (max(high), min(high)))
            value = {"raw": raw, "max": most, "min": least}
        else:
            value = metric(leaf, target)
        scalar(value).backward()
        found.append([*flat(value), leaf.grad])
        counted.update(preds, target)
    return found, flat(counted.compute())


def test_min_max_counts_every_batch_that_forward_saw() -> None:
    """torchmetrics' own keeps the last batch alone, which the docstring of `differentiable` says."""
    theirs, ours = tm.MinMaxMetric(tm.MeanSquaredError()), differentiable(tm.MinMaxMetric(tm.MeanSquaredError()))
    for metric in (theirs, ours):
        for factor in (1.0, 3.0):
            metric(torch.full((2,), factor), torch.zeros(2))
    assert {name: float(value) for name, value in theirs.compute().items()} == {"raw": 9.0, "max": 9.0, "min": 1.0}
    assert {name: float(value) for name, value in ours.compute().items()} == {"raw": 5.0, "max": 9.0, "min": 1.0}


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", MAKE)
@each_rank()
def test_members_share_one_exchange_and_give_the_values_of_one_process(name: str, even: bool) -> None:
    make, limit = MAKE[name]
    oracle, total = one_process(make)
    world = dist.get_world_size()
    part = splits(world, even)(ROWS)
    metric = differentiable(make())
    assert isinstance(metric, type(make()))
    for (preds, target), truth in zip(batches(), oracle, strict=True):
        leaf = preds[part].clone().requires_grad_()
        with CountCollectives() as collectives:
            value = metric(leaf, target[part])
            assert len(collectives.take()) <= limit
            scalar(value).backward()
            assert not collectives.take()
        assert difference([*flat(value), leaf.grad / world], [*truth[:-1], truth[-1][part]]) < 1e-9
    with CountCollectives() as collectives:
        final = flat(metric.compute())
    assert len(collectives.names) == 1
    if name == "MinMaxMetric":
        final, total = final[:1], total[:1]  # here forward counts among the smallest and largest too
    assert difference(final, total) < 1e-9
    assert difference(flat(metric.compute())[: len(final)], total) < 1e-9


@each_rank(2)
def test_a_window_that_updates_fill() -> None:
    """`compute` of a window that updates filled, after each of them."""
    part = splits(dist.get_world_size(), even=False)(ROWS)
    ours = differentiable(tm.wrappers.Running(tm.MeanSquaredError(), window=WINDOW))
    for step, (preds, target) in enumerate(batches()):
        ours.update(preds[part], target[part])
        window = batches()[max(0, step + 1 - WINDOW) : step + 1]
        assert difference([ours.compute()], [torch.cat([p - t for p, t in window]).square().mean()]) < 1e-9


def test_members_that_are_not_ours_are_refused_and_their_own_forward_stays() -> None:
    metrics = differentiable(tm.MetricCollection({"a": tm.MeanSquaredError(), "b": tm.MeanAbsoluteError()}))
    own = metrics["a"].forward
    metrics["a"].forward = own  # as a profiler that wraps it does
    metrics(torch.ones(2), torch.zeros(2))
    assert vars(metrics["a"])["forward"] == own
    assert "forward" not in vars(metrics["b"])
    metrics.add_metrics({"plain": tm.R2Score()})
    with pytest.raises(ConfigurationError, match="a plain R2Score, added later"):
        metrics(torch.ones(2), torch.zeros(2))
    several = differentiable(tm.MinMaxMetric(tm.MeanSquaredError(num_outputs=2)))
    with pytest.raises(RuntimeError, match="scalar"):
        several(torch.ones(2, 2), torch.zeros(2, 2))


@each_rank(2)
def test_tasks_of_their_own() -> None:
    """Two tasks with a metric each."""
    part = splits(dist.get_world_size(), even=False)(ROWS)
    (preds, target), _, _ = batches()
    metrics = {"a": tm.MeanSquaredError(), "b": tm.MetricCollection([tm.R2Score()])}
    leaf, whole = preds[part].clone().requires_grad_(), preds.clone().requires_grad_()
    for metric, x, y in (
        (differentiable(MultitaskWrapper(metrics)), leaf, target[part]),
        (MultitaskWrapper(metrics), whole, target),
    ):
        value = metric({"a": x[:, 0], "b": x[:, 1]}, {"a": y[:, 0], "b": y[:, 1]})
        (value["a"] + value["b"]["R2Score"]).backward()
    # torchmetrics' states are float32
    assert difference([leaf.grad / dist.get_world_size()], [whole.grad[part]]) < 1e-6


@each_rank(2)
def test_groups_of_a_collection_share_their_updates_and_their_exchange() -> None:
    from torchmetrics.classification import MulticlassPrecision, MulticlassRecall

    make = [lambda: MulticlassPrecision(3), lambda: MulticlassRecall(3)]
    metrics = differentiable(tm.MetricCollection([m() for m in make]), without_gradient="keep")
    alone = [offline(m()) for m in make]
    g = torch.Generator().manual_seed(0)
    for _ in range(2):
        preds, target = torch.randint(3, (ROWS,), generator=g), torch.randint(3, (ROWS,), generator=g)
        part = splits(2, even=False)(ROWS)
        metrics.update(preds[part], target[part])
        for metric in alone:
            metric.update(preds, target)
    assert len(metrics.compute_groups) == 1
    with CountCollectives() as collectives:
        values = {name: float(value) for name, value in metrics.compute().items()}
    assert values == pytest.approx({type(metric).__name__: float(metric.compute()) for metric in alone})
    assert len(collectives.names) == 1


@each_rank(3)
def test_a_group_of_one_rank_beside_larger_ones() -> None:
    """A member over part of the world, beside one over all of it: ranks 0 and 1 together, rank 2 alone."""
    parts = [dist.new_group([0, 1]), dist.new_group([2])]
    own = [(0, 1), (0, 1), (2,)][dist.get_rank()]
    members = {"part": tm.MeanSquaredError(process_group=parts[own == (2,)]), "all": tm.MeanAbsoluteError()}
    metrics = differentiable(tm.MetricCollection(members, compute_groups=False))
    cut = splits(3, even=False)(ROWS)
    sizes = [cut.stop - cut.start] * 3
    dist.all_gather_object(sizes, sizes[0])
    seen: list[tuple[Tensor, Tensor]] = []
    for preds, target in batches():
        metrics.update(preds[cut], target[cut])
        rows = torch.arange(ROWS).split(sizes)
        mine = torch.cat([rows[rank] for rank in own])
        seen.append((preds[mine] - target[mine], preds - target))
    truth = {
        "part": float(torch.cat([part for part, _ in seen]).square().mean()),
        "all": float(torch.cat([whole for _, whole in seen]).abs().mean()),
    }
    assert {name: float(value) for name, value in metrics.compute().items()} == pytest.approx(truth, rel=1e-9)
