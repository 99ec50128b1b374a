"""What all checks share: one gather, the same findings, errors of their own, sets that differ, actions, files, counts."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_ddp_losses import DDPChecks, LossCheck, ParameterSyncCheck, RankCheck
from lightning_ddp_losses.callbacks import CheckStage, Finding, odd_ranks
from lightning_ddp_losses.errors import PeerError
from lightning_ddp_losses.testing import RankPool
from tests.callbacks.harness import OneLoss, Subject, fit, slices
from tests.callbacks.training_cases import Nudged
from tests.counting import CountCollectives
from tests.doors import DEFAULT_CHECKS, CheckRunner
from tests.fits import make_trainer, trainer_alone

Make = Callable[[], list[Callback]]


class Echo(RankCheck):  # measures a number; a finding where ranks differ
    stages = (CheckStage.BEFORE_BACKWARD, CheckStage.AFTER_STEP)
    faults = ("F44",)

    def __init__(self, fault: str = "F44", numbers: tuple[int, ...] = (0, 0, 0), **options: Any) -> None:
        super().__init__(**options)
        self.fault, self.numbers = fault, numbers
        self.seen: list[str] = []

    def see_loss(self, trainer: Any, module: Any, loss: Tensor) -> None:
        assert loss.ndim == 0
        self.seen.append("see_loss")

    def measure(self, trainer: Any, module: Any, stage: CheckStage) -> Tensor:
        self.seen.append("measure")
        return torch.tensor([self.numbers[trainer.global_rank]])

    def judge(self, table: Tensor, trainer: Any, module: Any, stage: CheckStage) -> list[Finding]:
        column = table[:, -1].tolist()
        if len(set(column)) == 1:
            return []
        return [Finding(self.fault, "numbers", "equal", odd_ranks(column), "number", tuple(column), "Make them equal.")]


class OwnEcho(Echo):  # the same, in a world of one too
    needs_peers = False


def train(make: Make, subject: Any = Subject, strategy: str = "ddp", **options: Any) -> None:
    make_trainer(strategy, callbacks=make(), **options).fit(subject(True))


def alone() -> list[Callback]:
    return [ParameterSyncCheck()]


def beside() -> list[Callback]:
    return [Echo(), DDPChecks(summary=False), ParameterSyncCheck(parts=3)]


def no_file() -> list[Callback]:
    return [DDPChecks(summary=False, file=False)]


def fit_with_two() -> tuple[list[str], list[str], int]:
    """What is said, and the checks that ran, where a trainer has two `DDPChecks` and the second one has a check more."""
    first, second = (
        DDPChecks([ParameterSyncCheck(), Echo(numbers=(1, 2, 2))], action={"error": "log"}, summary=False, file=False),
        DDPChecks([ParameterSyncCheck(parts=3), LossCheck()], summary=False, file=False),
    )
    ran: list[str] = []

    class Names(Callback):
        def on_train_start(self, *_: Any) -> None:
            ran.extend(check.title for check in first._own_runner.checks)  # type: ignore[union-attr]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer("ddp", callbacks=[first, second, Names()]).fit(Subject(False))
    said = [str(w.message) for w in caught if "DDPChecks in" in str(w.message)]
    return said, ran, len([finding for finding in first.findings if finding.fault == "F44"])


def test_two_of_them_in_one_trainer_are_told_and_run_each_check_once(pool: RankPool) -> None:
    answers = pool.run(2, fit_with_two)
    for said, ran, findings in answers:
        assert ran == ["Echo", "LossCheck", "ParameterSyncCheck"]
        assert findings == 1, "the first one's action: nothing was raised"
        assert all("expected one, got 2" in text for text in said)
    assert [len(said) for said, _, _ in answers] == [1, 0]


def fit_with_the_same_twice(make: Callable[[], Any]) -> tuple[list[int], list[str]]:
    """The runners in each of two fits, and the callbacks that are left."""
    runners: list[int] = []

    class Looks(Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            runners.append(sum(isinstance(callback, CheckRunner) for callback in trainer.callbacks))

    callback = make()
    for _ in range(2):
        trainer = make_trainer("ddp", callbacks=[callback, callback, Looks()])
        trainer.fit(Subject(False))
    return runners, [type(each).__name__ for each in trainer.callbacks]


@pytest.mark.parametrize(
    "make", [ParameterSyncCheck, partial(DDPChecks, summary=False, file=False)], ids=["one", "all"]
)
@pytest.mark.filterwarnings("ignore:.*expected one, got 2")
def test_a_callback_that_is_given_twice_runs_once(pool: RankPool, make: Callable[[], Any]) -> None:
    for runners, left in pool.run(2, fit_with_the_same_twice, make):
        assert runners == [1, 1]
        assert "CheckRunner" not in left


class FailsAtOnce(OneLoss):
    """Fails on one rank in the first step, before or behind a global loss; or only in the dry run."""

    where = "before"

    def _maybe(self, where: str) -> None:
        is_dry_run = self is not self.trainer.lightning_module
        if dist.get_rank() == 0 and self.where in (where, "dry run") and (is_dry_run or self.where == where):
            raise KeyError("its own fault")

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        self._maybe("before")
        loss = super().objective(features, labels, index)
        self._maybe("behind")
        return loss


def fail_at_once(where: str) -> str:
    subject = FailsAtOnce(False)
    subject.where = where
    try:
        fit(None, subject, "ddp_losses")
    except (KeyError, PeerError) as error:
        return type(error).__name__
    return "done"


@pytest.mark.parametrize("where", ["before", "behind", "dry run"])
def test_a_rank_that_fails_in_its_first_step_leaves_nobody_in_the_dry_run(pool: RankPool, where: str) -> None:
    expected = ["done"] * 3 if where == "dry run" else ["KeyError", "PeerError", "PeerError"]
    assert pool.run(3, fail_at_once, where, fresh=True) == expected


def different_sets(case: str) -> list[Callback]:
    odd = dist.get_rank() == 1
    if case == "set":
        return [DDPChecks([Echo()] if odd else [Echo(), ParameterSyncCheck()], summary=False)]
    return [DDPChecks([ParameterSyncCheck(parts=4 if odd else 8)], summary=False)]


def collectives_per_step(strategy: str, checks: str) -> list[int]:
    """Collectives of each batch in a fit with small and with big rows."""
    counter, counts, two = CountCollectives(), list[int](), [Echo(), ParameterSyncCheck()]
    count = LambdaCallback(
        on_train_batch_start=lambda *_: counter.take(),
        on_train_batch_end=lambda *_: counts.append(len(counter.take())),
    )
    made = {"none": [], "two": [DDPChecks(two, summary=False)], "all": [DDPChecks(summary=False)]}
    with counter:
        make_trainer(strategy, callbacks=[*made[checks], count], max_epochs=3).fit(Subject(False))
    return counts


@pytest.mark.parametrize(("strategy", "most"), [("ddp", 2), ("ddp_losses", 1)])
def test_collectives_are_counted(pool: RankPool, strategy: str, most: int) -> None:
    without, two, everything = (
        pool.run(2, collectives_per_step, strategy, checks)[0] for checks in ("none", "two", "all")
    )
    assert two == [count + most for count in without]
    assert everything[1:] == [count + most for count in without[1:]]  # the first step holds the dry run


# columns of ddp_checks.jsonl: programs of users read them
KEYS = ["step", "check", "severity", "fault", "what", "expected", "ranks", "name", "values", "fix"]
KEYS += ["moment", "max_difference", "follows"]


def actions(case: str, folder: str) -> dict[str, Any]:
    severity, action = case.split("-")
    fault = {"error": "F44", "warning": "F30", "note": "F29"}[severity]
    logger = CSVLogger(folder, "run", version=0)
    checks = DDPChecks([Echo(fault, (1, 2, 2))], action={severity: action}, summary=case == "error-log")
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            make_trainer("ddp", callbacks=[checks], logger=logger).fit(Subject(False))
        except RuntimeError as raised:
            error = str(raised)
    text = "".join(str(w.message) for w in caught if "Echo" in str(w.message))
    return {"error": error, "warned": text, "findings": len(checks.findings)}


@pytest.mark.parametrize(
    "case", ["error-raise", "error-warn", "error-log", "warning-raise", "warning-warn", "note-log", "note-warn"]
)
def test_actions_by_severity(pool: RankPool, tmp_path: Path, case: str) -> None:
    answers = pool.run(2, actions, case, str(tmp_path))
    for rank, answer in enumerate(answers):
        assert bool(answer["error"]) == case.endswith("raise")
        assert bool(answer["warned"]) == (case.endswith("warn") and rank == 0)
        assert answer["warned"].count("Echo, ") <= 1, "each fault is said once"
        assert answer["findings"] == 1
    lines = (tmp_path / "run" / "version_0" / "ddp_checks.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    assert len(lines) == 1
    assert list(record) == KEYS
    assert (record["check"], record["step"], record["name"], record["values"]) == ("Echo", 0, "number", [1, 2])
    if not case.endswith("raise"):
        metrics = (tmp_path / "run" / "version_0" / "metrics.csv").read_text()
        assert f"ddp_checks/{record['severity']}s" in metrics


def in_one_process() -> list[str]:
    """Checks that need peers stay away; the others run."""
    own, other = OwnEcho(), Echo()
    fit([own, other])
    assert other.seen == []
    return own.seen


def test_world_of_one(pool: RankPool) -> None:
    assert pool.run(1, in_one_process)[0].count("measure") == 8


def without_a_group() -> list[str]:
    """Plain Lightning in one process, no torch.distributed."""
    subject, own = Subject(False), OwnEcho()
    subject.train_dataloader = lambda: slices(1, 0)  # type: ignore[method-assign]
    trainer_alone(callbacks=[DDPChecks(summary=False), own]).fit(subject)
    return own.seen


def test_no_process_group(pool: RankPool) -> None:
    assert pool.run(1, without_a_group, distributed=False)[0].count("measure") == 8


def summed_up() -> tuple[str, int]:
    """Two fits with one set of checks, the second of them pickled in between."""
    checks = DDPChecks()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        make_trainer("ddp", callbacks=[checks]).fit(Subject(False))
        again = pickle.loads(pickle.dumps(checks))
        make_trainer("ddp", callbacks=[again]).fit(Subject(False))
    return said.getvalue(), len(again.checks)


def test_the_table_at_the_end(pool: RankPool) -> None:
    (said, number), (nothing, _) = pool.run(2, summed_up)
    assert said.count(f"{number} checks, 4 steps, 0 findings") == 2
    assert "ParameterSyncCheck" in said
    assert "of the time" in said
    assert nothing == ""


def seen_with(every_n_steps: int, accumulate: int) -> list[str]:
    check = Echo(every_n_steps=every_n_steps)
    make_trainer("ddp", callbacks=[check], accumulate_grad_batches=accumulate).fit(Subject(False))
    return check.seen


@pytest.mark.parametrize(("every_n_steps", "accumulate"), [(2, 1), (1, 2)])
def test_every_n_steps_and_the_last_batch_of_a_window(pool: RankPool, every_n_steps: int, accumulate: int) -> None:
    seen = pool.run(2, seen_with, every_n_steps, accumulate)[0]
    assert seen.count("measure") == 4
    assert seen.count("see_loss") == 4


def test_odd_ranks() -> None:
    assert odd_ranks([1, 1, 1]) == ()
    assert odd_ranks([1, 2, 1]) == (1,)
    assert odd_ranks([1, 2]) == (1,)
    assert odd_ranks([1, 2, 2]) == (0,)


class OwnCheck(RankCheck):  # uses everything that a check may define
    stages = (CheckStage.BEFORE_BACKWARD, CheckStage.AFTER_STEP)
    faults = ("F44",)
    needs_peers = True

    def __init__(self) -> None:
        super().__init__()
        self._dry_runs, self._batches = 0, 0

    def dry_run(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> list[Finding]:
        self._dry_runs += 1
        return []

    def see_batch(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._batches += 1

    def measure(self, trainer: Any, module: Any, stage: CheckStage) -> list[int]:
        runner = self.runner
        assert runner.checkpoint is None
        assert runner.synchronising
        assert runner.shared(Shared) is runner.shared(Shared)
        stepping = len(runner.stepping) * (stage == CheckStage.AFTER_STEP)
        return [runner.step, runner.backwards, stepping, self._dry_runs, self._batches, dist.get_rank()]

    def judge(self, table: Any, trainer: Any, module: Any, stage: CheckStage) -> list[Finding]:
        step, backwards, stepping, dry_runs, batches, _ = table[0]
        ranks = [row[-1] for row in table]
        if stage != CheckStage.AFTER_STEP or step < 2:
            return []
        assert (backwards, stepping, dry_runs, batches) == (1, 1, 1, step + 1)
        return [Finding("F44", "ranks", "equal", odd_ranks(ranks), "rank", tuple(ranks))]

    def describe(self, finding: Finding, trainer: Any, module: Any) -> str | None:
        return f"rank {dist.get_rank()} at {finding.moment}"

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        return [Finding("F44", "; ".join(texts), name="rank", check=finding.check)]

    def tensor(self, finding: Finding, trainer: Any, module: Any) -> Tensor | None:
        return torch.tensor([0.5 * dist.get_rank()])

    def figures(self) -> dict[str, float]:
        return {"batches_seen": self._batches}


class Shared:  # what checks of one fit share
    def __init__(self, runner: Any) -> None:
        assert runner.step >= 0

    def see_batch_end(self, *_: Any) -> None: ...

    def stop(self, *_: Any) -> None: ...


class Both(ParameterSyncCheck):  # what a check of the package compares, and a row of the user's
    def measure(self, trainer: Any, module: Any, stage: CheckStage) -> list[int]:
        return [trainer.global_rank]

    def judge(self, table: Any, trainer: Any, module: Any, stage: CheckStage) -> list[Finding]:
        return [Finding("F44", "ranks", name="rank", values=tuple(rank for (rank,) in table))]


def faults_of_both() -> list[str]:
    checks = fit(Both(), Nudged(True), action={"error": "log"}, file=False)
    return sorted({finding.fault for finding in checks.findings})


def test_a_row_beside_the_facts_of_a_check_is_judged_too(pool: RankPool) -> None:
    assert pool.run(2, faults_of_both) == [["F44", "SYNC"]] * 2


def test_a_check_joins_the_default_ones_where_it_is_defined() -> None:
    before = list(DEFAULT_CHECKS)
    try:

        class ByDefault(Echo, default=True):
            pass

        assert [type(check) for check in DDPChecks().checks] == [*before, ByDefault]
    finally:
        DEFAULT_CHECKS[:] = before
    assert ByDefault not in DEFAULT_CHECKS


@pytest.mark.parametrize("word", ["raise", "warn", "log"])
def test_one_word_is_the_action_for_errors_and_warnings(word: str) -> None:
    given = ParameterSyncCheck(action=word).action
    assert given == {"error": word, "warning": word}
