"""Ranks that disagree: the right result where there is one, else the same error on every rank, naming the state."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics as tm
from torch import Tensor
from torchmetrics.wrappers import MultitaskWrapper

from lightning_ddp_losses.collectives import all_gather_with_grad
from lightning_ddp_losses.errors import ConfigurationError, RankMismatchError
from lightning_ddp_losses.metrics import DifferentiableMetric, differentiable, synced
from lightning_ddp_losses.testing import RankPool
from tests.doors import process_groups
from tests.each_rank import each_rank
from tests.metrics.harness import offline
from tests.metrics.kinds import Ours
from tests.oracle import normal
from tests.refusals import Refused, refusals


def rows(n: int, seed: int = 0, width: int = 3) -> Tensor:
    return normal(n, width, seed=seed)


# ---------------------------------------------------------------------- right results


def ranks_without_data() -> tuple[list[float], list[float]]:
    """The last rank never updates; R2Score's states there are 0-dim defaults in float32, elsewhere (2,) in float64."""
    found, truth = [], []
    for make in (tm.R2Score, tm.PearsonCorrCoef, tm.CosineSimilarity):
        for keep_graph in (False, True):
            kwargs: dict[str, Any] = {"num_outputs": 2} if make is tm.PearsonCorrCoef else {}
            stock, ours = offline(make(**kwargs)), differentiable(make(**kwargs), keep_graph=keep_graph)
            everything = [(rows(4, r, 2), rows(4, 50 + r, 2)) for r in range(dist.get_world_size() - 1)]
            stock.update(*(torch.cat(parts) for parts in zip(*everything, strict=True)))
            if dist.get_rank() < len(everything):
                ours.update(*everything[dist.get_rank()])
            found.append(float(ours.compute().sum().detach()))
            truth.append(float(stock.compute().sum()))
    return found, truth


@pytest.mark.parametrize("world_size", [2, 3])
@each_rank()
def test_right_results_where_there_are_some() -> None:
    """Rank r updates r + 1 times: its elements come by update first, by rank second."""
    metric, rank = Ours("None list"), dist.get_rank()
    for step in range(rank + 1):
        metric.update(rows(2, 10 * step + rank))
    metric.sync()
    got = [float(piece.sum()) for piece in metric.kept]
    pairs = [(s, r) for s in range(dist.get_world_size()) for r in range(s, dist.get_world_size())]
    assert got == [float(rows(2, 10 * s + r).sum()) for s, r in pairs]


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_without_data_counts_for_nothing(pool: RankPool, world_size: int) -> None:
    for found, truth in pool.run(world_size, ranks_without_data):
        assert found == pytest.approx(truth, rel=1e-6)  # CosineSimilarity is float32


# ---------------------------------------------------------------------- errors


def called(make: Any, *inputs: Tensor, **options: Any) -> Tensor:
    """The value of a metric that is made so; without inputs, of one column and another."""
    return differentiable(make(**options))(*(inputs or (rows(4)[:, 0], rows(4, 1)[:, 0])))


def kept(tensor: Tensor) -> None:
    metric = Ours("cat list")
    metric.kept = [tensor]
    metric.sync()


def not_called(rank: int) -> None:
    if rank:
        called(tm.MeanSquaredError)
    all_gather_with_grad(rows(4))


def factors(factor: Tensor, **options: Any) -> None:
    metric = differentiable(tm.MeanSquaredError(**options))
    for _ in range(2):
        preds = rows(4).requires_grad_()
        given = (preds, rows(4, 1)) if options else (preds[:, 0], rows(4, 1)[:, 0])
        (metric(*given) * factor).sum().backward()


def different_times(rank: int) -> None:
    metric = Ours("sum")
    metric(rows(4)) if rank else metric.compute()


class _Narrow(DifferentiableMetric):
    """Its update leaves a shape to which its default does not expand."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("kept", torch.zeros(3, dtype=torch.float64), "sum")

    def update(self, rows: Tensor) -> None:
        self.kept = rows.sum(0)[:2]

    def compute(self) -> Tensor:
        return self.kept.sum()


class Span(tm.Metric):
    """A running minimum and maximum without a reduction: the value of W ranks would be W numbers."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("low", torch.tensor(torch.inf, dtype=torch.float64), None)
        self.add_state("high", torch.tensor(-torch.inf, dtype=torch.float64), None)

    def update(self, rows: Tensor) -> None:
        self.low, self.high = torch.minimum(self.low, rows.min()), torch.maximum(self.high, rows.max())

    def compute(self) -> Tensor:
        return self.high - self.low


def defaults(rank: int) -> None:
    metric = _Narrow()
    if rank:
        metric.update(rows(4))
    metric.sync()


def states(rank: int) -> None:
    metric = Ours("sum")
    if rank:
        metric.add_state("more", torch.zeros(1), "sum")
    metric.sync()


def other_tasks(rank: int) -> None:
    metric = differentiable(MultitaskWrapper({"a": tm.MeanSquaredError(), "b": tm.MeanSquaredError()}))
    values = {"a": rows(4)[:, 0], "b": rows(4)[:, 1]}
    metric({"a": values["a"]} if rank else values, values)


def apart(rank: int, *, states: bool) -> None:
    """On rank 1 the metric, or its rows, are on another device."""
    metric, place = differentiable(tm.MeanSquaredError()), "meta" if rank else "cpu"
    metric.to(place if states else "cpu")
    metric(*(part.to("cpu" if states else place) for part in (rows(4), rows(4, 1))))


MISMATCH, RANKS = "RankMismatchError", ("rank 0", "rank 1")
DEVICES = ("metric MeanSquaredError: devices: expected", "on cpu", "on meta")


def one_fails() -> None:
    preds = rows(4)[:, 0]
    called(tm.MeanSquaredError, preds, preds if dist.get_rank() else preds[:2])


def fails_beside_a_member_without_peers() -> None:
    rank = dist.get_rank()
    alone = [dist.new_group([other]) for other in range(dist.get_world_size())]
    members = {"a": tm.MeanSquaredError(process_group=alone[rank]), "b": tm.MeanAbsoluteError()}
    metric = differentiable(tm.MetricCollection(members, compute_groups=False))
    preds, target = pairs_of(rank)
    metric(preds, target if rank == 0 else target[:2])


def computed_in_another_order(kind: str) -> None:
    make = synced if kind.startswith("synced") else differentiable
    metrics = [make(tm.MeanSquaredError()) for _ in range(2)]
    if kind.endswith("copies"):
        metrics = [metrics[0].clone() for _ in range(2)]
    for metric in metrics:
        metric.update(*pairs_of(dist.get_rank()))
    for metric in metrics if dist.get_rank() == 0 else reversed(metrics):
        metric.compute()


ERRORS: dict[str, tuple[Any, ...]] = {
    "defaults": (defaults, ("_Narrow.kept", "(3,)", "(2,)", *RANKS, "before compute"), MISMATCH),
    "states that nobody joins, as a loss": (
        lambda r: differentiable(Span())(rows(4 * r)),
        ("metric Span: state `low`", "dist_reduce_fx=None", "shape (2,) for two ranks, () for one"),
        "ConfigurationError",
    ),
    "states that nobody joins": (
        lambda r: differentiable(Span()).compute(),
        ("metric Span: state `low`", "dist_reduce_fx=None"),
        "ConfigurationError",
    ),
    "states": (states, ("states", "Ours.more", *RANKS), MISMATCH),
    "texts": (
        lambda r: called(tm.NormalizedRootMeanSquaredError, ["a", "b"] if r else rows(2)[:, 0], rows(2, 1)[:, 0]),
        ("NormalizedRootMeanSquaredError", "a list of str", "gather='states'"),
        "InputError",
    ),
    "other tasks": (other_tasks, ("tasks", "['a', 'b']", "['a']", "rank 1"), "InputError"),
    "dimensions": (
        lambda r: kept(rows(4) if r else rows(4).reshape(4, 3, 1)),
        ("Ours.kept", "(3, 1)", "(3,)", *RANKS),
        MISMATCH,
    ),
    "dtypes": (
        lambda r: kept(rows(4) if r else rows(4).float()),
        ("Ours.kept", "float32", "float64", *RANKS),
        MISMATCH,
    ),
    "shapes": (
        lambda r: called(tm.R2Score, rows(4, 0, 3 - r), rows(4, 0, 3 - r) + 1),
        ("R2Score.sum_squared_error", "(3,)", "(2,)", *RANKS),
        MISMATCH,
    ),
    "settings": (
        lambda r: called(tm.MeanSquaredError, squared=bool(r)),
        ("configuration", "squared=False", "squared=True"),
        MISMATCH,
    ),
    "classes": (
        lambda r: called(tm.MeanSquaredError if r else tm.R2Score),
        ("metric R2Score", "metric MeanSquaredError"),
        MISMATCH,
    ),
    "not called": (not_called, ("all_gather_with_grad", "metric MeanSquaredError"), MISMATCH),
    "factors": (lambda r: factors(torch.tensor(1 + 2 * r)), ("factor", *RANKS, "1.0", "3.0"), MISMATCH),
    "vector factors": (
        lambda r: factors(torch.tensor([1, r, 0]), num_outputs=3),
        ("factor", "1.0 and 1.0", "2.0 and 2.0"),
        MISMATCH,
    ),
    "different times": (different_times, ("forward", "compute"), MISMATCH),
    **{
        f"another order of {kind}": Refused(
            lambda _, kind=kind: computed_in_another_order(kind), "metric MeanSquaredError, compute", MISMATCH
        )
        for kind in ("synced", "synced copies", "differentiable", "differentiable copies")
    },
    # what torchmetrics says to one process
    **{
        f"no rows on {ranks} ranks": Refused(
            lambda _: differentiable(tm.CosineSimilarity()).compute(),
            "No samples to concatenate",
            "ValueError",
            ranks,
            False,
        )
        for ranks in (2, 3)
    },
    "an error of torchmetrics on one rank": Refused(lambda _: one_fails(), "same shape", "Exception", same=False),
    # The first member has no peers.
    "an error of one member on one rank": Refused(
        lambda _: fails_beside_a_member_without_peers(), "same shape", "PeerError", own={1: "RuntimeError"}
    ),
    "states on another device": (lambda r: apart(r, states=True), DEVICES, "InputError"),
    "rows on another device": (lambda r: apart(r, states=False), DEVICES, "InputError"),
}
_warns = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
test_the_same_error_on_every_rank = _warns(refusals(__name__, "ERRORS"))


# ---------------------------------------------------------------------- sync_on_compute, changed after the first call


def pairs_of(seed: int) -> tuple[Tensor, Tensor]:
    return rows(4, seed)[:, 0].clone().requires_grad_(), rows(4, seed + 1)[:, 0].clone()


def made(kind: str) -> Any:
    if kind == "synced":
        return synced(tm.MeanSquaredError())
    if kind == "collection":
        return differentiable(tm.MetricCollection([tm.MeanSquaredError(), tm.PearsonCorrCoef()]))
    return differentiable(tm.MeanSquaredError())


def switch_off(metric: Any) -> None:
    member = metric["MeanSquaredError"] if isinstance(metric, tm.MetricCollection) else metric
    member.sync_on_compute = False


@pytest.mark.parametrize(
    ("kind", "next_call"),
    [
        ("one", "forward"),
        ("one", "compute"),
        ("collection", "forward"),
        ("collection", "compute"),
        ("synced", "compute"),
    ],
)
@each_rank(2)
def test_a_sync_that_one_rank_switches_off_is_an_error_on_all_ranks(kind: str, next_call: str) -> None:
    metric, rank = made(kind), dist.get_rank()
    # a forward of a synced metric does not exchange
    first = metric.update if kind == "synced" else metric
    first(*pairs_of(rank))
    if rank == 1:
        switch_off(metric)
    with pytest.raises(RankMismatchError, match=r"sync_on_compute[\s\S]*rank 1: sync_on_compute=.*False"):
        metric(*pairs_of(rank)) if next_call == "forward" else metric.compute()


@each_rank(2)
def test_a_sync_that_one_rank_has_left_out_is_an_error_where_ranks_meet_next() -> None:
    metric, rank = synced(tm.MeanSquaredError()), dist.get_rank()
    for _ in range(2):
        metric(*pairs_of(rank))
        if rank == 1:
            metric.sync_on_compute = False
    # rank 1 computes a value of its own rows, and goes on
    meets = metric.compute if rank == 0 else partial(all_gather_with_grad, rows(4))
    if rank == 1:
        metric.compute()
    with pytest.raises(RankMismatchError, match="metric MeanSquaredError, compute"):
        meets()


@pytest.mark.parametrize("kind", ["one", "collection", "synced"])
@each_rank(2)
def test_a_sync_that_all_ranks_switch_off_is_followed(kind: str) -> None:
    metric, rank = made(kind), dist.get_rank()
    metric(*pairs_of(rank))
    switch_off(metric)
    metric(*pairs_of(rank))
    value = metric.compute()
    value = value["MeanSquaredError"] if kind == "collection" else value
    preds, target = pairs_of(rank)
    expected = (preds - target).square().mean().detach()
    assert float(value.detach()) == pytest.approx(float(expected), rel=1e-6 if kind == "synced" else 1e-9)


# ---------------------------------------------------------------------- which of several


@each_rank(2)
def test_a_metric_that_one_rank_has_made_more_of_meets_its_peer() -> None:
    """A rank that logs may make metrics of its own."""
    if dist.get_rank() == 0:
        synced(tm.MeanSquaredError())
    for _ in range(2):
        metric = synced(tm.MeanSquaredError())
        metric.update(*pairs_of(dist.get_rank()))
        metric.compute()


# ---------------------------------------------------------------------- states that compute writes to


class KeptTotal(tm.Metric):
    """A metric of one's own whose ``compute`` writes to a state."""

    full_state_update = False

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("last", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        self.total = self.total + values.sum()

    def compute(self) -> Tensor:
        if self.in_place:
            self.last += self.total.detach()
        else:
            self.last = self.total
        return self.total


def total_that_is_kept(kind: str, in_place: bool) -> None:
    metric = (synced if kind == "synced" else differentiable)(KeptTotal(in_place=in_place))
    metric.update(torch.ones(3, requires_grad=True))
    with pytest.raises(ConfigurationError, match=r"compute: state `last`[\s\S]*an attribute that is no state"):
        metric.compute()
    # the states are this rank's again
    assert not metric._is_synced
    assert metric.total.item() == 3.0


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("kind", ["synced", "differentiable"])
def test_a_compute_that_writes_to_a_state_is_refused(pool: RankPool, kind: str, in_place: bool) -> None:
    pool.run(2, total_that_is_kept, kind, in_place)


# ---------------------------------------------------------------------- a member alone in its group


def compute_again_on_one_rank() -> None:
    """Only rank 0 has an update after the first compute: its peer answers from torchmetrics' cache."""
    process_groups.set_timeout(timedelta(seconds=2))
    try:
        metric = synced(tm.MeanSquaredError())
        metric.update(torch.ones(2), torch.zeros(2))
        metric.compute()
        if dist.get_rank() == 0:
            metric.update(torch.ones(2), torch.zeros(2))
        metric.compute()
    finally:
        process_groups.set_timeout(None)
    raise InterruptedError("rank 1 has its value")


def test_a_peer_that_answers_from_the_cache_is_named(pool: RankPool) -> None:
    waited, answered = pool.errors(2, compute_again_on_one_rank, fresh=True)
    assert "no answer from some rank" in waited.message
    assert "compute_with_cache=False" in waited.message
    assert "ddp-losses explain F37" in waited.traceback
    assert answered.type == "InterruptedError"
