"""Each fault is reported by the right check, for the right name, at its step, on every rank; the healthy twin is silent."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.callbacks.cases import CASES
from tests.callbacks.harness import Case, Outcome, run_all
from tests.rank_pool import RankPool

Runs = Callable[[int, bool], list[list[Outcome]]]
_AT_ONCE = 12
IDS = [f"{i}-{case.title}" for i, case in enumerate(CASES)]


@pytest.fixture(scope="module")
def runs(pool: RankPool) -> Runs:
    """All cases on that many ranks, sick or healthy, each run once: by case, the outcome of each rank."""
    done: dict[tuple[int, bool], list[list[Outcome]]] = {}

    def ask(world_size: int, sick: bool) -> list[list[Outcome]]:
        if (world_size, sick) not in done:
            outcomes = []
            for start in range(0, len(CASES), _AT_ONCE):
                per_rank = pool.run(world_size, run_all, CASES[start : start + _AT_ONCE], sick, seconds=600.0)
                outcomes += [list(row) for row in zip(*per_rank, strict=True)]
            done[world_size, sick] = outcomes
        return done[world_size, sick]

    return ask


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("index", range(len(CASES)), ids=IDS)
def test_a_sick_run_is_reported_on_every_rank(runs: Runs, index: int, world_size: int) -> None:
    case, outcomes = CASES[index], runs(world_size, True)[index]
    for outcome in outcomes:
        mine = [f for f in outcome.findings if f["fault"] == case.fault and f["check"] == case.check]
        assert mine, f"expected {case.fault} of {case.check}, got {outcome}"
        assert any(case.name in f["name"] or case.name in f["what"] for f in mine), mine
        assert mine[0]["step"] == case.step, mine
        assert case.ranks is None or world_size > 2 or tuple(mine[0]["ranks"]) == case.ranks, mine
        if mine[0]["severity"] == "error":
            assert case.fault in outcome.text, outcome
    assert len({outcome.text for outcome in outcomes}) == 1, outcomes


@pytest.mark.parametrize("index", range(len(CASES)), ids=IDS)
def test_its_healthy_twin_is_silent(runs: Runs, index: int) -> None:
    assert_silent(CASES[index], runs(2, False)[index])


def assert_silent(case: Case, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert not outcome.error, outcome
        assert not [f for f in outcome.findings if f["severity"] != "note"], outcome
