"""Ranks that disagree: the right result where there is one, else the same error on every rank, naming the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics as tm
from torch import Tensor
from torchmetrics.wrappers import MultitaskWrapper

from lightning_ddp_losses.distributed.collectives import all_gather_with_grad
from lightning_ddp_losses.metrics import DifferentiableMetric, differentiable
from lightning_ddp_losses.testing import RankPool
from tests.metrics.kinds import Ours


def rows(n: int, seed: int = 0, width: int = 3) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------------- right results


def lists_of_different_length() -> tuple[list[float], list[float]]:
    """Rank r updates r + 1 times: its elements come by update first, by rank second."""
    metric, rank = Ours("None list"), dist.get_rank()
    for step in range(rank + 1):
        metric.update(rows(2, 10 * step + rank))
    metric.sync()
    got = [float(piece.sum()) for piece in metric.kept]
    pairs = [(s, r) for s in range(dist.get_world_size()) for r in range(s, dist.get_world_size())]
    return got, [float(rows(2, 10 * s + r).sum()) for s, r in pairs]


def ranks_without_data() -> tuple[list[float], list[float]]:
    """The last rank never updates; R2Score's states there are 0-dim defaults in float32, elsewhere (2,) in float64."""
    found, truth = [], []
    for make in (tm.R2Score, tm.PearsonCorrCoef, tm.CosineSimilarity):
        for keep_graph in (False, True):
            kwargs: dict[str, Any] = {"num_outputs": 2} if make is tm.PearsonCorrCoef else {}
            stock, ours = make(**kwargs).set_dtype(torch.float64), differentiable(make(**kwargs), keep_graph=keep_graph)
            stock.distributed_available_fn = lambda: False
            everything = [(rows(4, r, 2), rows(4, 50 + r, 2)) for r in range(dist.get_world_size() - 1)]
            stock.update(*(torch.cat(parts) for parts in zip(*everything, strict=True)))
            if dist.get_rank() < len(everything):
                ours.update(*everything[dist.get_rank()])
            found.append(float(ours.compute().sum().detach()))
            truth.append(float(stock.compute().sum()))
    return found, truth


def nobody_has_rows() -> str:
    """All ranks have none: what torchmetrics says to one process."""
    metric = differentiable(tm.CosineSimilarity())
    try:
        metric.compute()
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("world_size", [2, 3])
def test_right_results_where_there_are_some(pool: RankPool, world_size: int) -> None:
    for found, truth in pool.run(world_size, lists_of_different_length):
        assert found == truth


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_without_data_counts_for_nothing(pool: RankPool, world_size: int) -> None:
    for found, truth in pool.run(world_size, ranks_without_data):
        assert found == pytest.approx(truth, rel=1e-6)  # CosineSimilarity is float32
    assert pool.run(world_size, nobody_has_rows) == ["No samples to concatenate"] * world_size


# ---------------------------------------------------------------------- errors


def dimensions() -> None:
    metric = Ours("cat list")
    metric.kept = [rows(4) if dist.get_rank() else rows(4).reshape(4, 3, 1)]
    metric.sync()


def dtypes() -> None:
    metric = Ours("cat list")
    metric.kept = [rows(4) if dist.get_rank() else rows(4).float()]
    metric.sync()


def shapes() -> None:
    preds = rows(4, 0, 2) if dist.get_rank() else rows(4, 0, 3)
    differentiable(tm.R2Score())(preds, preds + 1)


def settings() -> None:
    differentiable(tm.MeanSquaredError(squared=bool(dist.get_rank())))(rows(4)[:, 0], rows(4, 1)[:, 0])


def classes() -> None:
    cls = tm.MeanSquaredError if dist.get_rank() else tm.R2Score
    differentiable(cls())(rows(4)[:, 0], rows(4, 1)[:, 0])


def not_called() -> None:
    if dist.get_rank():
        differentiable(tm.MeanSquaredError())(rows(4)[:, 0], rows(4, 1)[:, 0])
    all_gather_with_grad(rows(4))


def one_fails() -> None:
    preds = rows(4)[:, 0]
    differentiable(tm.MeanSquaredError())(preds, preds if dist.get_rank() else preds[:2])


def factors() -> None:
    metric = differentiable(tm.MeanSquaredError())
    for _ in range(2):
        preds = rows(4)[:, 0].requires_grad_()
        (metric(preds, rows(4, 1)[:, 0]) * (1 + 2 * dist.get_rank())).backward()


def vector_factors() -> None:
    metric = differentiable(tm.MeanSquaredError(num_outputs=3))
    for _ in range(2):
        preds = rows(4).requires_grad_()
        metric(preds, rows(4, 1))[: 1 + dist.get_rank()].sum().backward()


def different_times() -> None:
    metric = Ours("sum")
    metric(rows(4)) if dist.get_rank() else metric.compute()


class _Narrow(DifferentiableMetric):
    """Its update leaves a shape to which its default does not expand."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("kept", torch.zeros(3, dtype=torch.float64), "sum")

    def update(self, rows: Tensor) -> None:
        self.kept = rows.sum(0)[:2]

    def compute(self) -> Tensor:
        return self.kept.sum()


def defaults() -> None:
    metric = _Narrow()
    if dist.get_rank():
        metric.update(rows(4))
    metric.sync()


def states() -> None:
    metric = Ours("sum")
    if dist.get_rank():
        metric.add_state("more", torch.zeros(1), "sum")
    metric.sync()


def texts() -> None:
    metric, sentences = differentiable(tm.NormalizedRootMeanSquaredError()), ["a", "b"]
    metric(sentences if dist.get_rank() else rows(2)[:, 0], rows(2, 1)[:, 0])


def other_tasks() -> None:
    metric = differentiable(MultitaskWrapper({"a": tm.MeanSquaredError(), "b": tm.MeanSquaredError()}))
    values = {"a": rows(4)[:, 0], "b": rows(4)[:, 1]}
    metric({"a": values["a"]} if dist.get_rank() else values, values)


ERRORS: dict[str, tuple[Any, str, tuple[str, ...]]] = {
    "defaults": (defaults, "RankMismatchError", ("_Narrow.kept", "(3,)", "(2,)", "rank 0", "rank 1", "before compute")),
    "states": (states, "RankMismatchError", ("states", "Ours.more", "rank 0", "rank 1")),
    "texts": (texts, "InputError", ("NormalizedRootMeanSquaredError", "a list of str", "gather='states'")),
    "other tasks": (other_tasks, "InputError", ("tasks", "['a', 'b']", "['a']", "rank 1")),
    "dimensions": (dimensions, "RankMismatchError", ("Ours.kept", "(3, 1)", "(3,)", "rank 0", "rank 1")),
    "dtypes": (dtypes, "RankMismatchError", ("Ours.kept", "float32", "float64", "rank 0", "rank 1")),
    "shapes": (shapes, "RankMismatchError", ("R2Score.sum_squared_error", "(3,)", "(2,)", "rank 0", "rank 1")),
    "settings": (settings, "RankMismatchError", ("configuration", "squared=False", "squared=True")),
    "classes": (classes, "RankMismatchError", ("metric R2Score", "metric MeanSquaredError")),
    "not called": (not_called, "RankMismatchError", ("all_gather_with_grad", "metric MeanSquaredError")),
    "one fails": (one_fails, "", ("same shape",)),
    "factors": (factors, "RankMismatchError", ("factor", "rank 0", "1.0", "rank 1", "3.0")),
    "vector factors": (vector_factors, "RankMismatchError", ("factor", "1.0 and 1.0", "2.0 and 2.0")),
    "different times": (different_times, "RankMismatchError", ("forward", "compute")),
}


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@pytest.mark.parametrize("name", ERRORS)
def test_the_same_error_on_every_rank(pool: RankPool, name: str) -> None:
    job, kind, words = ERRORS[name]
    errors = pool.errors(2, job)
    for error in errors:
        assert not kind or error.type == kind, error
        for word in words:
            assert word in error.message, error.message
        assert not error.timed_out
    if kind:
        assert len({error.message for error in errors}) == 1


# ---------------------------------------------------------------------- devices


def states_apart() -> None:
    """On rank 1 the metric is on another device than its rows."""
    metric = differentiable(tm.MeanSquaredError())
    if dist.get_rank():
        metric.to("meta")
    metric(rows(4), rows(4, 1))


def rows_apart() -> None:
    """On rank 1 the rows are on another device than the metric."""
    inputs = rows(4), rows(4, 1)
    if dist.get_rank():
        inputs = inputs[0].to("meta"), inputs[1].to("meta")
    differentiable(tm.MeanSquaredError())(*inputs)


@pytest.mark.parametrize("job", [states_apart, rows_apart])
def test_devices_of_a_metric_and_its_rows(pool: RankPool, job: Callable[[], None]) -> None:
    for error in pool.errors(2, job):
        assert error.is_a("InputError"), error.traceback
        assert "metric MeanSquaredError: devices: expected" in error.message
        assert "on cpu" in error.message
        assert "on meta" in error.message
