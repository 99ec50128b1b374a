"""A check that fails by itself: one of this package is switched off on all ranks with one warning, a user's is an error."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_losses import CommunicationMonitor, DDPLossError, GradientFlowCheck, ParameterSyncCheck, RankCheck
from lightning_ddp_losses.callbacks import CheckStage, Finding, gradient_scale
from lightning_ddp_losses.errors import RankMismatchError
from lightning_ddp_losses.testing import RankPool
from tests.callbacks.harness import OneLoss, fit
from tests.callbacks.training_cases import Nudged
from tests.doors import CollectiveWatch

WRONG_ANSWERS: dict[str, Any] = {"no list": 7, "no finding": ["hello"]}


class Fragile(RankCheck):  # fails at one place, in its second step, on the last rank
    stages = (CheckStage.BEFORE_BACKWARD, CheckStage.AFTER_STEP)
    faults = ("F29",)
    needs_peers = False

    def __init__(self, breaks: str, **options: Any) -> None:
        super().__init__(**options)
        self.breaks = breaks
        self.seen: list[str] = []

    def _maybe(self, place: str) -> None:
        self.seen.append(place)
        if self.breaks == place and dist.get_rank() == dist.get_world_size() - 1 and self.runner.step == 1:
            raise ZeroDivisionError("its own fault")

    def dry_run(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> list[Finding]:
        if self.breaks == "dry_run":
            raise ZeroDivisionError("its own fault")
        return []

    def see_batch(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._maybe("see_batch")

    def see_loss(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self._maybe("see_loss")

    def see_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self._maybe("see_step")

    def measure(self, trainer: Any, module: Any, stage: CheckStage) -> Any:
        self._maybe("measure")
        if self.breaks == "what it measures" and self.runner.step == 1:
            return "text"
        return [self.runner.step]

    def judge(self, table: Any, trainer: Any, module: Any, stage: CheckStage) -> list[Finding]:
        self._maybe("judge")
        if self.breaks in WRONG_ANSWERS and dist.get_rank() == dist.get_world_size() - 1:
            return WRONG_ANSWERS[self.breaks]
        if self.breaks in ("describe", "explain") and self.runner.step == 1:
            return [Finding("F29", "a note", name="steps")]
        return []

    def describe(self, finding: Finding, trainer: Any, module: Any) -> str:
        return "text"

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        self._maybe("explain")
        return [finding]

    def figures(self) -> dict[str, float]:
        if self.breaks == "figures":
            raise ZeroDivisionError("its own fault")
        return {}


class Ours(Fragile):  # as if it were one of the package
    __module__ = "lightning_ddp_losses.callbacks.fragile"


def fit_fragile(breaks: str, strategy: str) -> tuple[list[str], list[dict[str, Any]], list[str], int]:
    """Warnings about checks, findings but notes, what the check was asked for, steps that another check saw."""
    check, other = Ours(breaks), Fragile("")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checks = fit([check, other, ParameterSyncCheck()], strategy=strategy)
    found = [finding.record() for finding in checks.findings if finding.severity != "note"]
    return [str(w.message) for w in caught if "itself failed" in str(w.message)], found, check.seen, len(other.seen)


PLACES = ["dry_run", "see_batch", "see_loss", "see_step", "measure", "what it measures", "judge", "explain"]


@pytest.mark.parametrize(("world_size", "strategy"), [(1, "ddp"), (3, "ddp"), (2, "ddp_losses")])
@pytest.mark.parametrize("breaks", PLACES)
def test_one_of_ours_is_switched_off_on_all_ranks(pool: RankPool, breaks: str, world_size: int, strategy: str) -> None:
    if breaks == "dry_run" and world_size == 1:
        return
    outcomes = pool.run(world_size, fit_fragile, breaks, strategy)
    healthy = 4 * 7  # of four steps: two observations, two rows and two judgements, the step
    for rank, (said, found, seen, seen_by_other) in enumerate(outcomes):
        assert len(said) == (rank == 0), "one warning"
        assert [(each["check"], each["fault"], each["severity"]) for each in found] == [("Ours", "CHECK", "warning")]
        assert "switched off on all ranks" in found[0]["what"]
        odd_rank = f"{world_size - 1}: "
        assert any(value.startswith(odd_rank) for value in found[0]["values"])
        assert found == outcomes[0][1]
        # nobody asks it any more; the others go on
        assert len(seen) < healthy - 7
        assert seen_by_other == healthy
    assert "Ours itself failed" in outcomes[0][0][0]


def test_figures_of_ours_that_fail_end_no_fit(pool: RankPool) -> None:
    for said, found, seen, _ in pool.run(2, fit_fragile, "figures", "ddp"):
        assert (said, found, len(seen)) == ([], [], 28)


class Seldom(Fragile):  # is due once, and fails to judge on the last rank
    stages = (CheckStage.AFTER_STEP,)

    def judge(self, table: Any, trainer: Any, module: Any, stage: CheckStage) -> list[Finding]:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ZeroDivisionError("its own fault")
        return []


def fit_users(breaks: str, strategy: str) -> None:
    fit(Seldom("", every_n_steps=4) if breaks == "seldom" else Fragile(breaks), strategy=strategy)


# what breaks, and how the error tells of it
OF_USERS = {
    **dict.fromkeys(PLACES, "its own fault"),
    "what it measures": "Fragile.measure: expected a list of numbers, or a 1-D tensor of int64, float64 or uint8, got str",
    "judge": "judge: ZeroDivisionError: its own fault",
    "no list": "judge: TypeError: 'int' object is not iterable",
    "no finding": "judge: TypeError: a list of Finding was expected, with str in it",
    "seldom": "the end, after 4 steps: Seldom itself failed",
    "figures": "its own fault",
}


class Refuses(Ours):  # communicates in the dry run, where ranks disagree
    __module__ = Ours.__module__

    def dry_run(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> list[Finding]:
        raise RankMismatchError("its exchange", collective=True)


def fit_refusing() -> None:
    fit(Refuses(""))


def fit_beside_a_finding() -> str:
    try:
        fit([Ours("judge"), ParameterSyncCheck()], Nudged(True), action={"warning": "log"})
    except DDPLossError as error:
        return "; ".join(f"{finding.check} {finding.fault}" for finding in error.findings)
    return ""


def test_findings_of_others_pass_through(pool: RankPool) -> None:
    assert pool.run(2, fit_beside_a_finding) == ["ParameterSyncCheck SYNC"] * 2


def fit_with_fault(place: str) -> list[str]:
    """A fit in which a part of the package itself fails on the last rank."""

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("its own fault")

    check: RankCheck = GradientFlowCheck()
    owner, name = gradient_scale, "_inner_product"
    if place == "collective":
        check, owner, name = CommunicationMonitor(every_n_steps=1), CollectiveWatch, "_note"  # type: ignore[assignment]
    is_odd = dist.get_rank() == dist.get_world_size() - 1
    with mock.patch.object(owner, name, fails) if is_odd else contextlib.nullcontext():
        checks = fit(check, OneLoss(False), action={"warning": "log"})
    return [finding.check for finding in checks.findings if finding.severity == "warning"]


@pytest.mark.parametrize(("place", "check"), [("probe", "GradientFlowCheck"), ("collective", "CommunicationMonitor")])
def test_a_fault_in_the_middle_of_collectives(pool: RankPool, place: str, check: str) -> None:
    assert pool.run(3, fit_with_fault, place) == [[check]] * 3


def test_a_file_that_cannot_be_written(pool: RankPool, tmp_path: Path) -> None:
    # a file stands where the folder shall be
    place = tmp_path / "project"
    place.write_text("")
    assert pool.run(1, fit_fragile_with_file, str(place)) == [1]


def fit_fragile_with_file(folder: str) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return len(fit(Ours("measure"), action={"warning": "log"}, default_root_dir=folder).findings)
