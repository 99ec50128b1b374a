"""Rows that are the views of a batch one after another: losses that pair them by place are one process's, or there is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning.losses import SupConLoss
from torch import Tensor, nn
from torch.nn import functional

from lightning_ddp_losses import GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.losses.lightly_paths import paths_of_lightly
from tests.oracle import Found, Place, normal, parity
from tests.refusals import refusals

SAMPLES, FEATURES, VIEWS = 12, 4, 3


class Paired(nn.Module):
    """Rows ``i`` and ``i + B`` are one sample, and all rows are negatives of each other."""

    def forward(self, rows: Tensor) -> Tensor:
        rows = functional.normalize(rows)
        logits = (rows @ rows.T / 0.5).fill_diagonal_(-torch.inf)
        return functional.cross_entropy(logits, torch.arange(len(rows)).roll(len(rows) // 2))


class Labelled(nn.Module):
    """The same with labels of the samples, as in implementations of SupCon that take [view 1; view 2] and (B,) labels."""

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        rows, labels = functional.normalize(rows), labels.repeat(len(rows) // len(labels))
        logits = (rows @ rows.T / 0.5).fill_diagonal_(-1e9)
        same = (labels[:, None] == labels).fill_diagonal_(False)
        return -(logits.log_softmax(1) * same).sum(1).div(same.sum(1)).mean()


class MSNLoss(nn.Module):
    def forward(self, anchors: Tensor, targets: Tensor, prototypes: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = (targets @ prototypes.T).softmax(1).repeat(len(anchors) // len(targets), 1)
        found = (anchors @ prototypes.T).log_softmax(1)
        mean = found.exp().mean(0)
        return -(wanted * found).sum(1).mean() + (mean * mean.log()).sum()


class WMSELoss(nn.Module):
    num_samples = 2

    def forward(self, input: Tensor) -> Tensor:
        white = (input - input.mean(0)) / input.std(0)
        first, second = white.chunk(2)
        return (first - second).square().mean()


class LeJEPALoss(nn.Module):
    def forward(self, *, local_proj: Tensor, global_proj: Tensor) -> Tensor:
        everything = torch.cat([local_proj, global_proj])
        spread = everything.std(1).sub(1).square().mean()
        return spread + (everything - global_proj.mean(0)).square().mean()


def views_of_batch() -> Tensor:
    """(views, samples, features)."""
    return normal(VIEWS, SAMPLES, FEATURES, seed=4)


def prototypes() -> Tensor:
    return normal(5, FEATURES, seed=2)


LABELS = torch.arange(SAMPLES) % 4


class Views(NamedTuple):
    """A loss, its options in ``GlobalBatchLoss``, and its call on some views (views, B, features) and labels (B,)."""

    make: Callable[[], nn.Module]
    options: dict[str, Any]
    call: Callable[[Any, Tensor, Tensor], Tensor]


CASES: dict[str, Views] = {
    "two views": Views(Paired, {"views": 2}, lambda f, v, y: f(v[:2].flatten(0, 1))),
    "by keyword": Views(Paired, {"views": 2}, lambda f, v, y: f(rows=v[:2].flatten(0, 1))),
    "labels of samples": Views(Labelled, {"views": 3}, lambda f, v, y: f(v.flatten(0, 1), y)),
    "labels of rows": Views(Labelled, {"views": {0: 2, 1: 2}}, lambda f, v, y: f(v[:2].flatten(0, 1), y.repeat(2))),
    "views as columns": Views(
        lambda: Columns(Paired()), {"views": 2, "batch_dims": {0: 1}}, lambda f, v, y: f(v[:2].flatten(0, 1).T)
    ),
    "a row after another": Views(
        lambda: Interleaved(Labelled()), {"batch_dims": {0: 0}}, lambda f, v, y: f(v.transpose(0, 1).flatten(0, 1), y)
    ),
    "lightly's WMSE": Views(WMSELoss, {}, lambda f, v, y: f(v[:2].flatten(0, 1))),
    "lightly's MSN": Views(
        MSNLoss, {"views": 2}, lambda f, v, y: f(anchors=v[:2].flatten(0, 1), targets=v[2], prototypes=prototypes())
    ),
    "lightly's MSN, one view": Views(MSNLoss, {}, lambda f, v, y: f(v[0], v[2], prototypes())),
    "lightly's LeJEPA": Views(LeJEPALoss, {}, lambda f, v, y: f(local_proj=v[:2], global_proj=v[2:])),
}


class Columns(nn.Module):
    """A loss whose samples are columns."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, columns: Tensor) -> Tensor:
        return self.loss(columns.T)


class Interleaved(Columns):
    """A loss whose views of a sample follow one another."""

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return self.loss(rows.unflatten(0, (len(labels), -1)).transpose(0, 1).flatten(0, 1), labels)


OF_LIGHTLY = (MSNLoss, WMSELoss, LeJEPALoss)


def play(place: Place, name: str) -> Found:
    case = CASES[name]
    samples = place.leaf("samples", views_of_batch().transpose(0, 1))
    with paths_of_lightly(*OF_LIGHTLY):
        loss = case.make() if place.alone else GlobalBatchLoss(case.make(), **case.options)
        return place.graded(case.call(loss, samples.transpose(0, 1), place.own(LABELS)))


@pytest.mark.parametrize("name", CASES)
def test_views_are_those_of_one_process(pool: RankPool, name: str) -> None:
    for sizes in ([12], [6, 6], [9, 3], [0, 12], [4, 0, 8]):
        parity(pool, play, sizes, name)


def rows_of(number: int) -> Tensor:
    return torch.ones(number, FEATURES).requires_grad_()


def ask(loss: nn.Module, *args: Any, **options: Any) -> Tensor:
    with paths_of_lightly(*OF_LIGHTLY):
        return GlobalBatchLoss(loss, **options)(*args)


REFUSED: dict[str, tuple[Any, ...]] = {
    "rows that may be views": (
        lambda r: ask(Labelled(), rows_of(4 + 4 * r), torch.zeros(2 + 2 * r).long()),
        ("rows of argument 0", "rank 0: 4 rows for 2", "rank 1: 8 rows for 4", "views=2", "batch_dims={0: 0}"),
    ),
    "the same, a rank without rows": (
        lambda r: ask(Labelled(), rows_of(6 * r), torch.zeros(2 * r).long()),
        ("rank 1: 6 rows for 2", "views=3"),
    ),
    "anchors of MSN": (
        lambda r: ask(MSNLoss(), rows_of(4), rows_of(2), torch.ones(5, FEATURES)),
        ("one for each row of argument 1", "views=2"),
    ),
    "rows that views do not divide": (
        lambda r: ask(Paired(), rows_of(4 + r), views=2),
        ("rows of argument 0: expected a multiple of its 2 views, got 5", "rank 1"),
    ),
    "views of an argument that is missing": (
        lambda r: ask(Paired(), rows_of(4), views={"rows": 2}),
        ("views of argument rows: expected one of the call: 0",),
    ),
    "other views on a rank": (lambda r: ask(Paired(), rows_of(6), views=2 + r), ("('rows', 2, 4)", "('rows', 3, 4)")),
    "no view": (lambda r: ask(Paired(), rows_of(4), views=0), ("views of argument first: expected 1 or more, got 0",)),
    "a loss of PML": (
        lambda r: ask(SupConLoss(), rows_of(4), torch.zeros(4).long(), views=2),
        ("views: expected none for a loss of pytorch-metric-learning", "labels.repeat(2)"),
    ),
}

test_refused = refusals(__name__, "REFUSED")


def ask_of_other_rows() -> list[float]:
    """Numbers of rows that only look like views: as many as labels on one rank, another multiple on another."""
    labels = torch.zeros(2 + 2 * dist.get_rank()).long()
    return [float(ask(Ragged(), rows_of(6).detach(), labels))]


class Ragged(nn.Module):
    def forward(self, rows: Tensor, lengths: Tensor) -> Tensor:
        return rows.sum() * 0 + len(rows) + 100 * len(lengths)


def test_other_numbers_of_rows_are_no_views(pool: RankPool) -> None:
    assert pool.run(2, ask_of_other_rows) == [[12 + 100 * 6]] * 2
