"""Each fault is reported by the right check, for the right name, at its step, on every rank; the healthy twin is silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.callbacks.cases import CASES
from tests.callbacks.harness import Case, Outcome, run_all
from tests.rank_pool import RankPool

Runs = Callable[[int, int, bool], list[Outcome]]
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

    def ask(index: int, world_size: int, sick: bool) -> list[Outcome]:
        if (index, world_size, sick) not in done:
            task = TASK_OF[index]
            per_rank = pool.run(world_size, run_all, [CASES[i] for i in task], sick, seconds=600.0)
            for i, outcomes in zip(task, zip(*per_rank, strict=True), strict=True):
                done[i, world_size, sick] = list(outcomes)
        return done[index, world_size, sick]

    return ask


@pytest.mark.parametrize(("world_size", "index"), [each for index in ORDER for each in on_two_and_three_ranks(index)])
def test_a_sick_run_is_reported_on_every_rank(runs: Runs, index: int, world_size: int) -> None:
    case, outcomes = CASES[index], runs(index, world_size, True)
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
    assert_silent(CASES[index], runs(index, 2, False))


def test_each_check_has_a_case_on_three_ranks() -> None:
    assert {case.check for case in CASES} == {case.check for case in CASES[::_ON_THREE]}


def assert_silent(case: Case, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert not outcome.error, outcome
        assert not [f for f in outcome.findings if f["severity"] != "note"], outcome
