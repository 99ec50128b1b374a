"""On an accelerator a check judges a step later what it would have to wait for; it finds the same, names the step, and loses no last step.

Here the CPU takes that way; on the pretended device ``tests/test_pretend_device.py`` counts the waits.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_ddp_losses import DDPChecks, GradientFlowCheck, OptimizerCheck, ParameterSyncCheck, RankCheck
from lightning_ddp_losses.callbacks import late_row
from lightning_ddp_losses.callbacks.check_stage import CheckStage
from lightning_ddp_losses.callbacks.findings import Finding
from lightning_ddp_losses.callbacks.late_row import LateRow
from tests.callbacks.cases import CASES
from tests.callbacks.harness import BATCHES, Case, Outcome, Subject, run, run_all
from tests.lightning_ranks import make_trainer
from tests.rank_pool import RankPool

JUDGE_LATE = ("GradientFlowCheck", "ParameterSyncCheck", "BufferSyncCheck", "OptimizerCheck")
# a gradient that is not finite spoils the next loss, which LossCheck judges at once on the CPU: it would come first here alone
LATE = [case for case in CASES if case.check in JUDGE_LATE and case.fault != "F79"]
LAST = BATCHES - 1


def as_on_an_accelerator() -> Any:
    """In the block nobody takes the CPU for a device that need not be waited for."""
    return mock.patch.object(late_row, "_HOSTS", ())


def run_late(cases: Sequence[Case]) -> list[Outcome]:
    with as_on_an_accelerator():
        return run_all(cases, sick=True)


@pytest.fixture(scope="module")
def outcomes(pool: RankPool) -> list[tuple[Outcome, Outcome]]:
    """By case, what the two ranks saw."""
    found = []
    for start in range(0, len(LATE), 12):
        found += [*zip(*pool.run(2, run_late, LATE[start : start + 12], seconds=300.0), strict=True)]
    return found


@pytest.mark.parametrize("index", range(len(LATE)), ids=[f"{i}-{case.title}" for i, case in enumerate(LATE)])
def test_the_same_is_found_of_the_same_step(outcomes: list[tuple[Outcome, Outcome]], index: int) -> None:
    case = LATE[index]
    first, second = outcomes[index]
    assert first.text == second.text
    mine = [f for f in first.findings if f["fault"] == case.fault and f["check"] == case.check]
    assert mine, first
    assert any(case.name in f["name"] or case.name in f["what"] for f in mine), mine
    assert mine[0]["step"] == case.step
    assert case.ranks is None or tuple(mine[0]["ranks"]) == case.ranks


class AtTheEnd(Subject):
    """Rank 1 changes in its last step what is left of it; ``what`` says what."""

    what = ""

    def build(self) -> None:
        self.register_buffer("queue", torch.zeros(4, 2, dtype=torch.float64))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if not self.odd or args[1] != LAST:
            return
        if self.what == "parameter":
            with torch.no_grad():
                self.head.weight[0, 0] += 1e-6
        if self.what == "buffer":
            self.queue[0, 0] = 1.0

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.odd and self.what == "gradient" and self.trainer.global_step == LAST:
            self.encoder.weight.grad *= 2


class WrongParameter(AtTheEnd):
    what = "parameter"


class WrongBuffer(AtTheEnd):
    what = "buffer"


class WrongGradient(AtTheEnd):
    what = "gradient"


AT_THE_END = {
    "ParameterSyncCheck, SYNC": WrongParameter,
    "BufferSyncCheck, F64": WrongBuffer,
    "GradientFlowCheck, F13": WrongGradient,
}


def run_to_the_end() -> dict[str, Outcome]:
    found = {}
    for name, subject in AT_THE_END.items():
        with as_on_an_accelerator():
            found[name] = run(Case(subject, "", ""), sick=True)
    return found


def test_the_last_step_is_judged_at_the_end(pool: RankPool) -> None:
    first, second = pool.run(2, run_to_the_end)
    for name, outcome in first.items():
        assert f"{name}, after the optimizer step of step {LAST}: " in outcome.text
        assert second[name].text == outcome.text


class LateNumber(RankCheck):
    """A check of a user: tells its numbers late, and fails by itself on rank 1 where it is told to."""

    stages = (CheckStage.AFTER_STEP,)
    late_stages = (CheckStage.AFTER_STEP,)
    needs_peers = False

    def __init__(self, fails_at: int, at_once: bool) -> None:
        super().__init__(action={"error": "log"})
        self.fails_at, self.at_once = fails_at, at_once
        self.tables: list[tuple[int, list[list[int]]]] = []

    def measure(self, trainer: Any, module: Any, stage: CheckStage) -> list[int] | LateRow:
        step = self.runner.step
        if step == self.fails_at and trainer.global_rank == 1:
            raise ValueError("here")
        row = [step, trainer.global_rank]
        return row if self.at_once else LateRow(lambda: row)

    def judge(self, table: list[list[int]], trainer: Any, module: Any, stage: CheckStage) -> list[Finding]:
        self.tables.append((self.runner.step, table))
        return []


def tables_of_a_user(fails_at: int, at_once: bool = False) -> list[tuple[int, list[list[int]]]]:
    check = LateNumber(fails_at, at_once)
    trainer = make_trainer("ddp", callbacks=[DDPChecks([check], summary=False, file=False)])
    with as_on_an_accelerator():
        trainer.fit(Subject(sick=False))
    return check.tables


def test_a_check_of_a_user_may_judge_late(pool: RankPool) -> None:
    """The first step at once, the others one later, the last at the end; only rows of one step meet, also where a rank has none."""
    both = [(0, 0), (2, 1), (3, 2), (4, 3)]
    expected = [(at, [[step, 0], [step, 1]]) for at, step in both]
    assert pool.run(2, tables_of_a_user, -1) == [expected, expected]
    assert pool.run(2, tables_of_a_user, 1) == [[expected[0], *expected[2:]]] * 2
    known = [(step, [[step, 0], [step, 1]]) for step in range(BATCHES)]
    assert pool.run(2, tables_of_a_user, -1, True) == [known, known]


def picklable_after_a_fit() -> bool:
    checks = [GradientFlowCheck(), ParameterSyncCheck(), OptimizerCheck()]
    with as_on_an_accelerator():
        make_trainer("ddp", callbacks=[DDPChecks(checks, summary=False, file=False)]).fit(Subject(sick=False))
    return all(type(pickle.loads(pickle.dumps(check))) is type(check) for check in checks)


def test_a_check_lets_go_of_its_fit(pool: RankPool) -> None:
    assert pool.run(2, picklable_after_a_fit) == [True, True]
