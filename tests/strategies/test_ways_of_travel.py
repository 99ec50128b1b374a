"""Gradients that travel each in its own memory are those that travel packed in one reduction.

Gradients of the test jobs are small: elsewhere they are packed. Here every gradient counts as large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from lightning_ddp_losses.strategies import loss_reducer
from tests.oracle import assert_close
from tests.rank_pool import RankPool
from tests.strategies.jobs import Job, Strategy, assert_as_alone, fit, fit_alone
from tests.strategies.scenarios import Alternating, OrderByRank
from tests.strategies.test_gradient_flags import HalfUsedEarlier, Partial, Sparse, UsedEarlier, UsedEarlierOnOneRank
from tests.strategies.test_manual import TwoForwardsThenTwoBackwards


def fit_large(make: Callable[[], Job], strategy: Strategy | None = None, **options: Any) -> dict[str, Tensor]:
    before, loss_reducer.LARGE_BYTES = loss_reducer.LARGE_BYTES, 0
    try:
        return fit(make, strategy, **options)
    finally:
        loss_reducer.LARGE_BYTES = before


@pytest.mark.parametrize("job", [Job, Alternating, OrderByRank, UsedEarlier], ids=lambda job: job.__name__)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_equal_one_process(pool: RankPool, job: type[Job], accumulate: int) -> None:
    expected = fit_alone(job, accumulate_grad_batches=accumulate)
    unchecked = {"check_calls": False}
    by_turns: dict[int, list[tuple[int, Strategy]]] = {
        1: [(1, {}), (2, unchecked), (3, {})],
        3: [(2, {}), (3, unchecked)],
    }
    for world_size, strategy in by_turns[accumulate]:
        for state in pool.run(world_size, fit_large, job, strategy, accumulate_grad_batches=accumulate):
            assert_close(state, expected)


def test_manual_optimisation(pool: RankPool) -> None:
    assert_as_alone(pool, TwoForwardsThenTwoBackwards, run=fit_large)


@pytest.mark.parametrize("run", [fit_large, fit], ids=["large", "packed"])
@pytest.mark.parametrize(
    ("job", "strategy", "words"),
    [
        (Partial, {}, ("`loss.W`", "rank 1: no gradient")),
        (Sparse, {"losses": ["loss", "centres"]}, ("`centres.weight`", "rank 1: sparse")),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_errors_leave_nothing_on_the_wire(
    pool: RankPool, job: type[Job], strategy: Strategy, words: tuple[str, ...], run: Callable[..., Any]
) -> None:
    outcomes = pool.run(2, fail_then_fit, run, job, strategy)
    expected = fit_alone(Job)
    assert len({message for message, _ in outcomes}) == 1
    for message, state in outcomes:
        assert all(word in message for word in words), message
        assert_close(state, expected)


def test_a_weight_that_is_used_earlier_on_one_rank_only(pool: RankPool) -> None:
    assert_as_alone(pool, UsedEarlierOnOneRank, run=fit_large, alone=HalfUsedEarlier)


def fail_then_fit(
    run: Callable[..., Any], make: Callable[[], Job], strategy: Strategy
) -> tuple[str, dict[str, Tensor]]:
    """What the first fit says, and what a second one in the same processes and groups trains."""
    try:
        run(make, strategy)
    except RuntimeError as error:
        message = str(error)
    return message, run(Job)
