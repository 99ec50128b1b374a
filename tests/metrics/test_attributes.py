"""Attributes that `update` sets besides the states: a rank without an update computes as one process does, or all ranks get one error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics as tm
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics.image import RootMeanSquaredErrorUsingSlidingWindow
from torchmetrics.segmentation import MeanIoU

from lightning_ddp_losses import differentiable, synced
from tests.counting import CountCollectives
from tests.each_rank import each_rank
from tests.metrics.harness import offline
from tests.refusals import refusals

UPDATES = (2, 0, 1)  # of each rank


class Sum(tm.Metric):
    """A sum whose `update` keeps a note that its `compute` reads."""

    full_state_update = False
    total: Tensor
    note: Any

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), "sum")

    def update(self, rows: Tensor) -> None:
        self.total = self.total + rows.sum()
        self.note = self.noted(rows)

    def noted(self, rows: Tensor) -> Any:
        return rows.dtype

    def compute(self) -> Tensor:
        return self.total.to(self.note)


class Late(Sum):
    """A note that is None until the first update, and is used without a failure."""

    def __init__(self) -> None:
        super().__init__()
        self.note = None

    def noted(self, rows: Tensor) -> Any:
        return {"width": rows.shape[1], "scale": torch.full((rows.shape[1],), 3.0, dtype=torch.float64)}

    def compute(self) -> Tensor:
        note = getattr(self, "note")  # noqa: B009 - a name in a text is one too
        return self.total if note is None else self.total * note["width"] * note["scale"].sum()


class OnDevice(Sum):
    def noted(self, rows: Tensor) -> Any:
        return rows.device


class RowsOfLast(Sum):
    """Of this rank's last batch, which is another on each rank."""

    def noted(self, rows: Tensor) -> Any:
        return len(rows)

    def compute(self) -> Tensor:
        return self.total * self.note


class Unsent(Sum):
    def noted(self, rows: Tensor) -> Any:
        return lambda value: value

    def compute(self) -> Tensor:
        return self.note(self.total)  # type: ignore[no-any-return]


class Noted(Sum):
    """The mean of this rank's rows."""

    def noted(self, rows: Tensor) -> Any:
        return rows.detach().mean(0)

    def compute(self) -> Tensor:
        return self.total * self.note.sum()


class Unread(RowsOfLast):
    """A note for the user, which `compute` does not read."""

    def compute(self) -> Tensor:
        return self.total


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(seed: int) -> tuple[Tensor, ...]:
    return (torch.randn(2 + seed % 3, 4, generator=seeded(seed), dtype=torch.float64),)


def images(seed: int) -> tuple[Tensor, ...]:
    return tuple(torch.rand(2, 3, 16, 16, generator=seeded(seed + k), dtype=torch.float64) for k in (0, 50))


def masks(seed: int) -> tuple[Tensor, ...]:
    return tuple(torch.randint(2, (2, 3, 4, 4), generator=seeded(seed + k)) for k in (0, 50))


def window_and_error() -> MetricCollection:
    return MetricCollection([RootMeanSquaredErrorUsingSlidingWindow(), tm.MeanSquaredError()])


CASES: dict[str, tuple[Callable[[], Any], Callable[[int], tuple[Tensor, ...]]]] = {
    "RootMeanSquaredErrorUsingSlidingWindow": (RootMeanSquaredErrorUsingSlidingWindow, images),
    "in a collection": (window_and_error, images),
    "MeanIoU, classes of its first update": (MeanIoU, masks),
    "a dtype": (Sum, rows),
    "a device": (OnDevice, rows),
    "None before": (Late, rows),
    "not read": (Unread, rows),
}


def updated(metric: Any, batch: Callable[[int], tuple[Tensor, ...]], seeds: list[int]) -> Any:
    for seed in seeds:
        metric.update(*batch(seed))
    return metric


def attributes(metric: Any) -> dict[str, Any]:
    parts = [part for part in torch.nn.Module.modules(metric) if isinstance(part, tm.Metric)]
    return {
        f"{k}.{name}": vars(part)[name]
        for k, part in enumerate(parts)
        for name in ("note", "rmse_map") & vars(part).keys()
    }


@pytest.mark.parametrize("convert", [synced, differentiable], ids=["synced", "differentiable"])
@pytest.mark.parametrize("name", CASES)
@each_rank(3)
def test_a_rank_without_an_update_computes_as_one_process(name: str, convert: Callable[..., Any]) -> None:
    """Twice: the attributes of other ranks are put back after a value, and its own update makes them anew."""
    make, batch = CASES[name]
    rank = dist.get_rank()
    options = {"without_gradient": "keep"} if convert is differentiable else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metric = convert(make().set_dtype(torch.float64), **options)
        updated(metric, batch, [10 * rank + step for step in range(UPDATES[rank])])
        before = attributes(metric)
        value = metric.compute()
        alone = updated(offline(make()), batch, [0, 20, 1])
        torch.testing.assert_close(value, alone.compute(), rtol=1e-9, atol=0)
        assert attributes(metric).keys() == before.keys()
        assert rank != 1 or all(note is None for note in before.values())
        updated(metric, batch, [90 + rank])
        torch.testing.assert_close(metric.compute(), updated(alone, batch, [90, 91, 92]).compute(), rtol=1e-9, atol=0)


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
@each_rank(2)
def test_no_exchange_more_where_all_ranks_had_an_update_or_none_has() -> None:
    """A handshake of their own is for metrics with such attributes, if some ranks had no update."""
    numbers = []
    for make, updates in ((Sum, (1, 1)), (Sum, (0, 1)), (Unread, (0, 1)), (tm.SumMetric, (0, 1))):
        metric = updated(synced(make()), rows, [0] * updates[dist.get_rank()])
        with CountCollectives() as collectives:
            metric.compute()
        numbers.append(len(collectives.names))
    assert [number > 1 for number in numbers] == [False, True, False, False]


@each_rank(2)
def test_forward_of_a_rank_without_rows() -> None:
    """Its update fails without rows, and does not count; the value is the one of its peer's rows, with its gradient."""

    class Scaled(Late):
        def noted(self, rows: Tensor) -> Any:
            if not len(rows):
                raise ValueError("no rows")
            return super().noted(rows)

    metric = differentiable(Scaled())
    given = rows(0)[0][: 2 * dist.get_rank()].requires_grad_()
    value = metric(given)
    torch.testing.assert_close(value, rows(0)[0][:2].sum() * 4 * 12)
    value.backward()
    torch.testing.assert_close(given.grad, torch.full_like(given, 2 * 4 * 12))
    assert metric.note is None or dist.get_rank() == 1


def without_update_on_the_last(make: Callable[[], tm.Metric]) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    updated(synced(make()), rows, [] if rank == last else [rank]).compute()


REFUSED: dict[str, tuple[Any, ...]] = {
    "another value on each rank": (
        lambda _: without_update_on_the_last(RowsOfLast),
        (
            "RowsOfLast",
            "`note`",
            "rank 0: 2",
            "rank 1: 3",
            "no such attribute, without an update",
            "add_state('note'",
            "__init__",
        ),
        "RankMismatchError",
        3,
    ),
    "another value on each rank, all with an update": (
        lambda _: updated(synced(RowsOfLast()), rows, [dist.get_rank()]).compute(),
        ("RowsOfLast", "`note`", "rank 0: 2", "rank 1: 3", "declare it as a state: add_state('note'"),
    ),
    "a tensor that differs, in forward": (
        lambda _: differentiable(Noted())(rows(dist.get_rank())[0].requires_grad_()),
        ("Noted", "`note`", "(4,) float64: ", "declare it as a state: add_state('note'"),
    ),
    "one of two in a collection": (
        lambda _: updated(synced(MetricCollection([Sum(), RowsOfLast()])), rows, [dist.get_rank()]).compute(),
        ("RowsOfLast", "`note`", "rank 0: 2", "rank 1: 3"),
    ),
    "a value that cannot be sent": (
        lambda _: without_update_on_the_last(Unsent),
        ("Unsent", "`note`", "cannot be sent", "rank 1: no such attribute, without an update"),
    ),
}
_warns = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
test_an_attribute_that_no_rank_can_take_over_is_an_error_on_all_ranks = _warns(refusals(__name__, "REFUSED"))
