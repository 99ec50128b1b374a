"""Each fault is reported by the right check, for the right name, at its step, on every rank; the healthy twin is silent.

Runs that differ for good reason are silent too: accumulation, clipping, half precision, copies, several optimizers, uneven rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses import DDPLossStrategy, GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.callbacks import data_cases, training_cases
from tests.callbacks.data_cases import LateShape
from tests.callbacks.harness import CLASSES, WIDTH, Case, OneLoss, Outcome, Subject, Validated, drawn, run, run_all
from tests.callbacks.training_cases import UNUSED, Half, ZeroStart, scaler

CASES = [*training_cases.CASES, *data_cases.CASES, *training_cases.STEPS]
Runs = Callable[[Case, int, bool, list[Case]], list[Outcome]]
# in one task of the pool run cases that are on three ranks in the suite proper, or cases that are not
_AT_ONCE, _ON_THREE = 12, 4
TASKS = [
    list(range(len(CASES)))[start : start + _ON_THREE * _AT_ONCE][number::_ON_THREE]
    for start in range(0, len(CASES), _ON_THREE * _AT_ONCE)
    for number in range(_ON_THREE)
]
TASK_OF = {index: task for task in TASKS for index in task}
ORDER = list(TASK_OF)  # what shares a task stays together
IDS = {index: f"{index}-{case.title}" for index, case in enumerate(CASES)}


def on_two_and_three_ranks(index: int) -> list[Any]:
    """Each case on two ranks, every fourth one on three: who is odd among three is found by one vote for all cases of a check."""
    marks = [] if index % _ON_THREE == 0 else [pytest.mark.slow]
    return [pytest.param(2, index, id=f"2-{IDS[index]}"), pytest.param(3, index, id=f"3-{IDS[index]}", marks=marks)]


@pytest.fixture(scope="module")
def runs(pool: RankPool) -> Runs:
    """A case on that many ranks, sick or healthy, run once with the others of its task: the outcome of each rank."""
    done: dict[tuple[int, int, bool], list[Outcome]] = {}

    def ask(case: Case, world_size: int, sick: bool, task: list[Case]) -> list[Outcome]:
        key = id(case), world_size, sick
        if key not in done:
            per_rank = pool.run(world_size, run_all, task, sick, seconds=600.0)
            for each, outcomes in zip(task, zip(*per_rank, strict=True), strict=True):
                done[id(each), world_size, sick] = list(outcomes)
        return done[key]

    return ask


def task_of(index: int) -> list[Case]:
    return [CASES[i] for i in TASK_OF[index]]


@pytest.mark.parametrize(("world_size", "index"), [each for index in ORDER for each in on_two_and_three_ranks(index)])
def test_a_sick_run_is_reported_on_every_rank(runs: Runs, index: int, world_size: int) -> None:
    case, outcomes = CASES[index], runs(CASES[index], world_size, True, task_of(index))
    for outcome in outcomes:
        mine = [f for f in outcome.findings if f["fault"] == case.fault and f["check"] == case.check]
        assert mine, f"expected {case.fault} of {case.check}, got {outcome}"
        assert any(case.name in f["name"] or case.name in f["what"] for f in mine), mine
        assert mine[0]["step"] == case.step, mine
        assert case.ranks is None or world_size > 2 or tuple(mine[0]["ranks"]) == case.ranks, mine
        if mine[0]["severity"] == "error":
            assert case.fault in outcome.text, outcome
    assert len({outcome.text for outcome in outcomes}) == 1, outcomes


@pytest.mark.parametrize("index", ORDER, ids=[IDS[index] for index in ORDER])
def test_its_healthy_twin_is_silent(runs: Runs, index: int) -> None:
    assert_silent(runs(CASES[index], 2, False, task_of(index)))


def test_shapes_of_a_buffer_are_shown_by_rank(pool: RankPool) -> None:
    case = Case(LateShape, "F64", "BufferSyncCheck")
    for outcome in pool.run(2, run, case, True):
        (found,) = [f for f in outcome.findings if f["fault"] == "F64"]
        assert (found["name"], found["values"]) == ("kept", ["shape (1,)", "shape (2,)"])


def test_each_check_has_a_case_on_three_ranks() -> None:
    assert {case.check for case in CASES} == {case.check for case in CASES[::_ON_THREE]}


def assert_silent(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert not outcome.error, outcome
        assert not [f for f in outcome.findings if f["severity"] != "note"], outcome


class Uneven(Subject):  # ranks with different numbers of rows, each of which weighs the same
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        mean_rows = 2 + 3 * (dist.get_world_size() - 1) / 2
        return nn.functional.cross_entropy(self.head(self.encoder(features)), labels, reduction="sum") / mean_rows

    def train_dataloader(self) -> Any:
        return drawn(2 + 3 * dist.get_rank(), 5)


class Frozen(Subject):
    def build(self) -> None:
        self.encoder.requires_grad_(False)


class Ema(Subject):  # a trainable copy that nobody optimises, and a frozen average
    def build(self) -> None:
        self.average = copy.deepcopy(self.encoder).requires_grad_(False)
        self.spare = copy.deepcopy(self.head)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        with torch.no_grad():
            for a, p in zip(self.average.parameters(), self.encoder.parameters(), strict=True):
                a.lerp_(p, 0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.encoder.parameters(), *self.head.parameters()], lr=0.1)


class Adversaries(Subject):  # two optimizers in turn, manual, with toggles; one of them every second batch
    by_hand = True

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):
            if number and index % 2:
                continue
            self.toggle_optimizer(optimizer)
            loss = self.objective(*batch, index) * (1 - 2 * number)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.encoder, self.head)]


class BothInTurn(Adversaries):  # two optimizers for one loss in each batch, without toggles
    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.objective(*batch, index))
            optimizer.step()


class GlobalContrast(Subject):  # a contrastive loss over all ranks, of one and three rows where it is ragged
    is_ragged = False

    def build(self) -> None:
        self.contrast = GlobalBatchLoss(pml.SupConLoss())

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        if self.is_ragged:
            rows = 1 + 2 * (dist.get_rank() == 0)
            return self.contrast(self.head(self.encoder(features[:rows])), labels[:rows] % 2)
        return super().objective(features, labels, index) + self.contrast(self.encoder(features), labels)


class Ragged(GlobalContrast):
    is_ragged = True


class InTurn(Subject):  # two losses that alternate
    def build(self) -> None:
        torch.manual_seed(0)
        self.losses = nn.ModuleList(pml.ArcFaceLoss(CLASSES, WIDTH).double() for _ in range(2))
        del self.head

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.losses[index % 2](self.encoder(features), labels)


class Scheduled(Validated):  # a warm-up from zero, two epochs with validation, a plateau on a synchronised value
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))
        return [optimizer], [{"scheduler": warm, "interval": "step"}]

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val_loss", self.objective(*batch, index), sync_dist=True)


class Overflows(Half):  # gradients that overflow on every rank at once: the scaler skips the step everywhere
    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features, labels, index) * (1e38 if index == 1 else 1.0)


class Lbfgs(Subject):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class OwnReduction(Subject):
    """A parameter that DDP is told to ignore and that the user averages in his own hook, before the optimizer."""

    def build(self) -> None:
        self.own = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        self._ddp_params_and_buffers_to_ignore = ["own"]

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features * self.own, labels, index)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        dist.all_reduce(self.own.grad)


def averages(sick: bool) -> list[WeightAveraging]:
    return [WeightAveraging(use_buffers=False)]


static = partial(DDPStrategy, static_graph=True)
windows = partial(DDPLossStrategy, accumulation="window", process_group_backend="gloo")
views = partial(DDPStrategy, gradient_as_bucket_view=True, find_unused_parameters=True)

CLIP = {"gradient_clip_val": 0.01, "accumulate_grad_batches": 2}
FP16 = {"plugins": scaler}
TWO = {"max_epochs": 2}

HEALTHY = [
    *(Case(each, "", "", strategy=s) for each in (Subject, Uneven, ZeroStart) for s in ("ddp", "ddp_losses")),
    *(Case(each, "", "") for each in [*training_cases.HEALTHY, *data_cases.HEALTHY, Ragged, BothInTurn]),
    *(
        Case(Subject, "", "", options=o, strategy=s)
        for o in (CLIP, {"precision": "bf16-true"}, TWO)
        for s in ("ddp", "ddp_losses")
    ),
    Case(Half, "", "", options={"precision": "bf16-mixed", "gradient_clip_val": 0.01}),
    Case(Subject, "", "", options={"accumulate_grad_batches": 4, "max_epochs": 2}),
    Case(OneLoss, "", "", options={"accumulate_grad_batches": 3, "max_epochs": 2}, strategy=windows),
    Case(Subject, "", "", options={"accumulate_grad_batches": 3, "max_steps": 1, "max_epochs": -1}),
    Case(Subject, "", "", options={"max_steps": 3, "max_epochs": -1}),
    Case(GlobalContrast, "", "", options={"accumulate_grad_batches": 2}, strategy="ddp_losses"),
    Case(Half, "", "", options=FP16),
    Case(Overflows, "", "", options=FP16),
    Case(Frozen, "", ""),
    Case(Frozen, "", "", strategy="ddp_losses"),
    Case(Ema, "", "", strategy=UNUSED),
    Case(Adversaries, "", "", strategy=UNUSED),
    Case(Adversaries, "", "", strategy=views),
    Case(InTurn, "", "", strategy="ddp_losses"),
    Case(InTurn, "", "", strategy=UNUSED),
    Case(Scheduled, "", "", options=TWO),
    Case(Scheduled, "", "", options=TWO, strategy="ddp_losses"),
    Case(Lbfgs, "", ""),
    Case(OwnReduction, "", ""),
    Case(Subject, "", "", strategy=static),
    Case(Subject, "", "", options={"callbacks": averages}),
]
HEALTHY_IDS = [f"{index}-{case.title}" for index, case in enumerate(HEALTHY)]

# all cases on three ranks; of two neighbours, which differ in the strategy often, every second pair on two ranks and the others on one
TRIED = {
    3: list(range(len(HEALTHY))),
    2: [index for index in range(len(HEALTHY)) if index // 2 % 2 == 0],
    1: [index for index in range(len(HEALTHY)) if index // 2 % 2 == 1],
}


@pytest.mark.parametrize(
    ("world_size", "index"),
    [pytest.param(W, index, id=f"{HEALTHY_IDS[index]}-{W}") for W, indices in TRIED.items() for index in indices],
)
def test_healthy_runs_are_silent(runs: Runs, world_size: int, index: int) -> None:
    assert_silent(runs(HEALTHY[index], world_size, False, [HEALTHY[i] for i in TRIED[world_size]]))
