"""A fault of one step, and an error of the user's in the next: the fault comes first in the text of the error, on every rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lightning_ddp_losses
from lightning_ddp_losses import DDPChecks, GradientFlowCheck
from lightning_ddp_losses.callbacks import CheckStage, Finding, runner
from lightning_ddp_losses.testing import RankFailure, RankPool
from tests.callbacks import data_cases, training_cases
from tests.callbacks.harness import Case, Outcome, Subject, run, slices
from tests.doors import add_to_error_, liveness
from tests.fits import make_trainer

USERS = "the user's own"
AT_ONCE = 12  # cases in one task of the pool
PATIENCE = 90.0  # for peers on a busy machine


def waits_for_the_next_step(case: Case) -> bool:
    if case.fault == "F59" or case.subject in (
        data_cases.LateMean,
        data_cases.LateShape,
    ):  # told at the end of training
        return False
    return CheckStage.AFTER_STEP in getattr(lightning_ddp_losses, case.check).stages


CASES = [case for case in (*training_cases.CASES, *data_cases.CASES) if waits_for_the_next_step(case)]
WAITING = (
    training_cases.Nudged,
    training_cases.InTheLastStep,
    training_cases.QueueInTheLastStep,
    training_cases.GradientInTheLastStep,
    training_cases.Infinite,
)
TASKS = [CASES[start : start + AT_ONCE] for start in range(0, len(CASES), AT_ONCE)]


class Crash(Callback):
    """The user's error in the step after the fault. At the end of training if there is none."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step > self.step:
            raise KeyError(USERS)

    def on_train_end(self, *args: Any) -> None:
        raise KeyError(USERS)


def crashed(case: Case) -> Outcome:
    given = case.options.get("callbacks", [])
    others = given(True) if callable(given) else given
    options = {**case.options, "callbacks": [*others, Crash(case.step)]}
    return run(replace(case, options=options), sick=True)


def run_crashed(cases: list[Case]) -> list[Outcome]:
    with mock.patch.object(runner, "_WAIT_SECONDS", PATIENCE):
        return [crashed(case) for case in cases]


@pytest.mark.parametrize("task", range(len(TASKS)))
def test_each_planted_fault_is_told_before_a_crash_in_the_next_step(pool: RankPool, task: int) -> None:
    cases = TASKS[task]
    per_rank = pool.run(2, run_crashed, cases, seconds=600.0)
    for case, *outcomes in zip(cases, *per_rank, strict=True):
        assert len({outcome.text for outcome in outcomes}) == 1, outcomes
        for outcome in outcomes:
            found = [each for each in outcome.findings if (each["fault"], each["check"]) == (case.fault, case.check)]
            assert found, f"expected {case.fault} of {case.check}, got {outcome}"
            if found[0]["severity"] != "error":
                continue
            told, users, _ = outcome.text.partition(USERS)
            assert f"{case.check}, {case.fault}, " in told, outcome
            if case.subject in WAITING:  # others are errors before the crash
                assert users, outcome


# ---------------------------------------------------------------------- where the next step fails, and on which ranks

FAULTY, CRASH = 1, 2  # steps
PLACES = ["forward", "backward", "hook", "data"]


class Rows(Dataset):  # the batches of a loader, of which one cannot be read
    def __init__(self, batches: list[Any], breaks: int | None) -> None:
        self.batches, self.breaks = batches, breaks

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        if index == self.breaks:
            raise KeyError(USERS)
        return self.batches[index]


class TwoFaults(Subject):
    """The gradient of the last rank is doubled in one step. In the next some ranks raise an error of the user's."""

    def __init__(self, place: str, ranks: tuple[int, ...]) -> None:
        super().__init__(True)
        self.place, self.ranks = place, ranks

    def _crash(self, place: str, step: int) -> None:
        if place == self.place and step == CRASH and self.global_rank in self.ranks:
            raise KeyError(USERS)

    def train_dataloader(self) -> Any:
        batches = [*slices(dist.get_world_size(), dist.get_rank())]
        breaks = CRASH if self.place == "data" and dist.get_rank() in self.ranks else None
        return DataLoader(Rows(batches, breaks), batch_size=None)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        self._crash("forward", index)
        loss = super().objective(features, labels, index)
        loss.register_hook(lambda _: self._crash("backward", index))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._crash("hook", self.global_step)
        if self.odd and self.global_step == FAULTY:
            self.encoder.weight.grad *= 2


def fit_twice_faulty(
    place: str, ranks: tuple[int, ...], strategy: str, grace: float, patience: float
) -> tuple[str, str, list[str]]:
    checks = DDPChecks([GradientFlowCheck()], summary=False, file=False)
    trainer = make_trainer(strategy, callbacks=[checks])
    with mock.patch.object(liveness, "GRACE_SECONDS", grace), mock.patch.object(runner, "_WAIT_SECONDS", patience):
        try:
            trainer.fit(TwoFaults(place, ranks))
        except Exception as error:
            findings = getattr(error, "findings", ())
            return type(error).__name__, str(error), [finding.fault for finding in findings]
    return "", "", []


def reachable() -> Iterator[tuple[str, tuple[int, ...], str]]:
    """List the crashes after which every rank comes to its end."""
    for strategy in ("ddp", "ddp_losses"):
        for place in PLACES:
            yield place, (0, 1), strategy
            if place != "backward":  # the peer waits in DDP's reduction
                yield place, (1,), strategy


@pytest.mark.parametrize(("place", "ranks", "strategy"), [*reachable()], ids=str)
def test_what_was_found_is_first_in_the_error(
    pool: RankPool, place: str, ranks: tuple[int, ...], strategy: str
) -> None:
    outcomes = pool.run(2, fit_twice_faulty, place, ranks, strategy, PATIENCE, PATIENCE, fresh=True)
    for rank, (name, text, faults) in enumerate(outcomes):
        assert faults == ["F13"], text
        assert text.startswith("GradientFlowCheck, F13, after the optimizer step of step 1: gradient of"), text
        assert USERS in text
        assert "\\n" not in text, "KeyError shows the literal of its argument"
        assert "not judged" not in text
        # the class of the user's error stays, on the ranks that have it
        if rank in ranks:
            assert name == "KeyError"


def fit_and_tell(place: str, strategy: str) -> None:
    # the peer waits, and its thread has time to say where
    name, text, faults = fit_twice_faulty(place, (1,), strategy, PATIENCE, 8.0)
    assert (name, faults) == ("KeyError", []), text
    raise RuntimeError(text)


def test_a_peer_in_a_foreign_collective_is_named(pool: RankPool) -> None:
    with pytest.raises(RankFailure) as failure:  # the pool ends the peer, in DDP's reduction
        pool.run(2, fit_and_tell, "backward", "ddp", fresh=True)
    text = str(failure.value)
    assert re.search(rf"{USERS}.*\n.*not judged: rank 0 is in backward of step {CRASH}\.", text), text


def fit_one_process() -> tuple[str, list[str]]:
    class Infinite(TwoFaults):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if self.global_step == FAULTY:
                self.encoder.weight.grad.fill_(torch.inf)

    checks = DDPChecks([GradientFlowCheck()], summary=False, file=False)
    try:
        make_trainer("ddp", callbacks=[checks]).fit(Infinite("forward", (0,)))
    except KeyError as error:
        return str(error), [finding.fault for finding in error.findings]  # type: ignore[attr-defined]
    return "", []


def test_a_world_of_one_judges_its_own_row(pool: RankPool) -> None:
    ((text, faults),) = pool.run(1, fit_one_process)
    assert faults == ["F79"], text
    assert text.startswith("GradientFlowCheck, F79"), text


# ---------------------------------------------------------------------- the text of any error

FINDING = Finding("F36", "epoch")


class OwnText(Exception):
    def __str__(self) -> str:
        return "a text of its own"


ERRORS: dict[str, tuple[Callable[[], BaseException], bool]] = {
    "a text": (lambda: ValueError("wrong"), True),
    "nothing": (lambda: AssertionError(), True),
    "a key": (lambda: KeyError("label"), True),
    "one of ours": (lambda: lightning_ddp_losses.DDPLossError("rows", expected=8, got=6), True),
    "a number and a text": (lambda: FileNotFoundError(2, "No such file", "rows.npy"), False),
    "two arguments": (lambda: ValueError("wrong", 3), False),
    "a text of its own": (OwnText, False),
}


@pytest.mark.parametrize("name", ERRORS)
def test_lines_are_added_to_any_error(name: str) -> None:
    make, takes_text = ERRORS[name]
    error, plain = make(), str(make())
    add_to_error_(error, before="found", after="not judged", findings=[FINDING])
    assert type(error) is type(make())
    assert error.findings == [FINDING]  # type: ignore[attr-defined]
    if takes_text:
        assert str(error).split("\n") == [line for line in ("found", *plain.split("\n"), "not judged") if line]
    else:
        assert str(error) == plain
        assert error.args == make().args
        assert error.__notes__ == ["found", "not judged"]
