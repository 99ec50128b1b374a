"""Bad input on one rank, or on all: every rank raises the same error, names the rank and says what was expected."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

import lightning_ddp_losses
from lightning_ddp_losses.strategies import loss_parallelism
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_errors
from tests.refusals import assert_same_error
from tests.strategies.jobs import TASK, Job, assert_as_alone, fit

Spoil = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def with_nan(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    bad = torch.zeros_like(embeddings)
    bad[1, 2] = float("nan")
    return embeddings + bad, labels


SPOILS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "label too high": (lambda e, y: (e, y.clone().index_fill_(0, torch.tensor([1]), 17)), ("labels", "17", "4")),
    "label negative": (lambda e, y: (e, y.clone().index_fill_(0, torch.tensor([0]), -3)), ("labels", "-3")),
    "labels of floating dtype": (lambda e, y: (e, y.float()), ("labels", "float32")),
    "labels of bool": (lambda e, y: (e, y > 1), ("labels", "bool")),
    "too few labels": (lambda e, y: (e, y[:-1]), ("labels",)),
    "labels of two dimensions": (lambda e, y: (e, nn.functional.one_hot(y, TASK.classes)), ("labels",)),
    "embeddings too wide": (lambda e, y: (torch.cat([e, e[:, :1]], 1), y), ("embeddings", "5", "4")),
    "embeddings too narrow": (lambda e, y: (e[:, :-1], y), ("embeddings", "3", "4")),
    "embeddings of three dimensions": (lambda e, y: (e[None], y), ("embeddings",)),
    "empty batch": (lambda e, y: (e[:0], y[:0]), ("empty",)),
    "NaN": (with_nan, ("NaN",)),
}


class Spoiled(Job):
    def __init__(self, case: str, ranks: tuple[int, ...], at: int, loss: str = "ArcFaceLoss") -> None:
        super().__init__(loss)
        self.case, self.ranks, self.at = case, ranks, at

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        if index == self.at and self.global_rank in self.ranks:
            embeddings, labels = SPOILS[self.case][0](embeddings, labels)
        return self.loss(embeddings, labels)


@pytest.mark.parametrize("ranks", [(1,), (0,), (0, 1)], ids=str)
@pytest.mark.parametrize("case", SPOILS)
def test_bad_input_is_the_same_error_on_every_rank(pool: RankPool, case: str, ranks: tuple[int, ...]) -> None:
    errors = pool.errors(2, fit, partial(Spoiled, case, ranks, 1))
    assert_same_error(errors, "ArcFaceLoss", *SPOILS[case][1], *(f"rank {rank}" for rank in ranks if len(ranks) == 1))


@pytest.mark.parametrize("case", SPOILS)
def test_bad_input_in_one_process(pool: RankPool, case: str) -> None:
    assert_same_error(pool.errors(1, fit, partial(Spoiled, case, (0,), 0)), "ArcFaceLoss", *SPOILS[case][1])


@pytest.mark.parametrize("loss", ["SoftTripleLoss", "ProxyNCALoss", "NormalizedSoftmaxLoss", "SubCenterArcFaceLoss"])
@pytest.mark.parametrize("case", ["label too high", "embeddings too wide", "empty batch", "NaN"])
def test_bad_input_for_other_losses(pool: RankPool, case: str, loss: str) -> None:
    assert_same_error(pool.errors(3, fit, partial(Spoiled, case, (2,), 0, loss)), loss, *SPOILS[case][1], "rank 2")


class Breaks(Job):  # the user's own code fails on one rank
    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        value = self.loss(embeddings, labels)
        if index == 1 and self.global_rank == 1:
            raise ZeroDivisionError("the user's own")
        return value


def test_the_users_own_error_on_one_rank_ends_all(pool: RankPool) -> None:
    errors = pool.errors(3, fit, Breaks)
    assert errors[1].type == "ZeroDivisionError"
    assert_errors((errors[0], errors[2]), "ZeroDivisionError", "rank 1")


class ReturnsNothing(Job):
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor | None:
        return None if index == 1 and self.global_rank == 1 else super().objective(features, labels, index)


def test_a_rank_that_lightning_stops_takes_its_peers_along(pool: RankPool) -> None:
    """Lightning refuses a step without a loss under DDP, on that rank alone; the others wait in our handshake for it."""
    errors = pool.errors(2, fit, ReturnsNothing)
    assert "returning None" in errors[1].message
    assert errors[0].is_a("DDPLossError"), errors[0]
    assert "rank 1" in errors[0].message


ODD_PARTS: dict[str, tuple[str, Callable[[nn.Module, bool], Any]]] = {
    "name": ("other", lambda job, odd: job.add_module("other" if odd else "extra", nn.Linear(2, 2))),
    "order": ("a.weight", lambda job, odd: [job.add_module(n, nn.Linear(2, 2)) for n in ("ba" if odd else "ab")]),
    "shape": ("extra", lambda job, odd: job.add_module("extra", nn.Linear(2, 3 if odd else 2))),
    "dtype": (
        "extra",
        lambda job, odd: job.add_module("extra", nn.Linear(2, 2).to([torch.float32, torch.float64][odd])),
    ),
    "missing": ("loss.W", lambda job, odd: odd and delattr(job.loss, "W")),
    "frozen": ("loss.W", lambda job, odd: job.loss.requires_grad_(not odd)),
    "buffer": ("table", lambda job, odd: job.register_buffer("table", torch.zeros(3 if odd else 2))),
}


class NamesDiffer(Job):
    def __init__(self, case: str) -> None:
        self.case = case
        super().__init__()

    def build(self, loss: str) -> None:
        super().build(loss)
        ODD_PARTS[self.case][1](self, dist.get_rank() == 1)


@pytest.mark.parametrize("case", ODD_PARTS)
def test_ranks_with_different_parameters_are_told_before_the_first_broadcast(pool: RankPool, case: str) -> None:
    assert_same_error(pool.errors(2, fit, partial(NamesDiffer, case)), ODD_PARTS[case][0], "rank 0", "rank 1")


class ValuesDiffer(Job):  # every rank has its own initial values: rank 0's are everybody's after the first broadcast
    def build(self, loss: str) -> None:
        super().build(loss)
        if dist.is_initialized() and dist.get_rank():
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.add_(dist.get_rank())


def test_initial_values_come_from_rank_0(pool: RankPool) -> None:
    assert_as_alone(pool, ValuesDiffer, worlds=(3,), alone=Job)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"losses": ["los"]}, ("'los'", "loss")),
        ({"losses": ["loss", "head"]}, ("'head'", "loss")),
        ({"losses": "nothing.*"}, ("nothing.*", "loss")),
        ({"losses": "("}, ("(",)),
        ({"losses": [""]}, ("''",)),
    ],
    ids=str,
)
def test_names_that_cannot_work(pool: RankPool, options: dict[str, Any], words: tuple[str, ...]) -> None:
    assert_same_error(pool.errors(2, fit, WithPlain, options), *words)


class WithPlain(Job):
    def build(self, loss: str) -> None:
        super().build(loss)
        self.plain = nn.CrossEntropyLoss()


# A node with another release or another option is refused at set-up, on every rank, with the difference; what else
# differs is a note.

OPTIONS: dict[str, dict[str, Any]] = {"accumulation": {"accumulation": "window"}, "bucket_cap_mb": {"bucket_cap_mb": 1}}


class OtherMargin(Job):  # rank 1 has another margin, which no shape shows
    def build(self, loss: str) -> None:
        torch.manual_seed(1)
        margin = 28.6 + dist.get_rank()
        self.loss = pml.ArcFaceLoss(TASK.classes, TASK.dim, margin=margin).double()


def fit_otherwise(what: str) -> Any:
    is_other = dist.get_rank() == 1
    with pytest.MonkeyPatch.context() as patch:
        if is_other and what == "torch":
            patch.setattr(torch, "__version__", "2.12.1+cu130")
        if is_other and what == "package":
            patch.setattr(lightning_ddp_losses, "__version__", "0.0.9")
        options = OPTIONS.get(what, {}) if is_other else {}
        precision = "bf16-mixed" if is_other and what == "precision" else "64-true"
        return fit(OtherMargin if what == "loss" else Job, options, precision=precision)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("torch", "set-up: torch: expected the same on every rank"),
        ("package", "lightning_ddp_losses=0.0.9"),
        ("accumulation", "strategy option accumulation='window'"),
        ("precision", "precision=bf16-mixed"),
        ("bucket_cap_mb", "strategy option bucket_cap_mb=1"),
        ("loss", r"loss loss=ArcFaceLoss\(.*margin="),
    ],
)
def test_a_rank_that_is_set_up_otherwise_is_refused_on_all(pool: RankPool, what: str, named: str) -> None:
    errors = pool.errors(2, fit_otherwise, what)
    (text,) = {error.message for error in errors}
    assert {error.type for error in errors} == {"RankMismatchError"}
    assert re.search(named, text), text


def test_builds_and_other_libraries_are_a_note() -> None:
    notes = [{"python": "3.12.1", "torch": "2.13.0+cpu"}] * 9 + [{"python": "3.12.1", "torch": "2.13.0+cu130"}]
    words = r"torch: 2.13.0\+cpu on rank 0, .* 7 and 1 more, 2.13.0\+cu130 on rank 9\.$"
    with pytest.warns(UserWarning, match=words) as said:
        loss_parallelism.note_differences([json.dumps(note).encode() for note in notes])
    assert "python" not in str(said[0].message)
    loss_parallelism.note_differences([loss_parallelism.pack_notes()] * 3)


def test_the_facts_of_a_set_up_fit_into_a_handshake() -> None:
    assert len(loss_parallelism.pack_notes()) < 400
