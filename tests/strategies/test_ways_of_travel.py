"""How gradients travel: each in its own memory; packed, in one reduction; inline in the handshake. The same comes of it.

Those of the test jobs are small: elsewhere they are inline. Here every gradient counts as large, or finds no room there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from torch import Tensor, nn

from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.strategies import loss_reducer
from lightning_ddp_losses.strategies.call_check import CallCheck
from tests.oracle import assert_close
from tests.rank_pool import RankPool
from tests.strategies.jobs import TASK, Job, Strategy, fit, fit_alone
from tests.strategies.scenarios import Alternating, OrderByRank
from tests.strategies.test_gradient_flags import (
    GrowsByHookOnRankOne,
    HalfUsedEarlier,
    Partial,
    Sparse,
    UsedEarlier,
    UsedEarlierOnOneRank,
)
from tests.strategies.test_manual import TwoForwardsThenTwoBackwards


def fit_large(make: Callable[[], Job], strategy: Strategy | None = None, **options: Any) -> dict[str, Tensor]:
    before, loss_reducer.LARGE_BYTES = loss_reducer.LARGE_BYTES, 0
    try:
        return fit(make, strategy, **options)
    finally:
        loss_reducer.LARGE_BYTES = before


def fit_packed(make: Callable[[], Job], strategy: Strategy | None = None, **options: Any) -> dict[str, Tensor]:
    before, handshake.inline_capacity = handshake.inline_capacity, lambda group=None: 0
    try:
        return fit(make, strategy, **options)
    finally:
        handshake.inline_capacity = before


WAYS = pytest.mark.parametrize("run", [fit_large, fit_packed], ids=["large", "packed"])


@WAYS
@pytest.mark.parametrize("job", [Job, Alternating, OrderByRank, UsedEarlier], ids=lambda job: job.__name__)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_equal_one_process(pool: RankPool, job: type[Job], accumulate: int, run: Callable[..., Any]) -> None:
    expected = fit_alone(job, accumulate_grad_batches=accumulate)
    # without the check of calls another handshake carries what is inline
    unchecked = {"check_calls": False}
    by_turns: dict[int, list[tuple[int, Strategy]]] = {
        1: [(1, {}), (2, unchecked), (3, {})],
        3: [(2, {}), (3, unchecked)],
    }
    for world_size, strategy in by_turns[accumulate]:
        for state in pool.run(world_size, run, job, strategy, accumulate_grad_batches=accumulate):
            assert_close(state, expected)


@WAYS
def test_manual_optimisation(pool: RankPool, run: Callable[..., Any]) -> None:
    expected = fit_alone(TwoForwardsThenTwoBackwards)
    for state in pool.run(2, run, TwoForwardsThenTwoBackwards):
        assert_close(state, expected)


@pytest.mark.parametrize("run", [fit_large, fit_packed, fit], ids=["large", "packed", "inline"])
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


@WAYS
def test_a_weight_that_is_used_earlier_on_one_rank_only(pool: RankPool, run: Callable[..., Any]) -> None:
    expected = fit_alone(HalfUsedEarlier)
    for state in pool.run(2, run, UsedEarlierOnOneRank):
        assert_close(state, expected)


def test_one_that_grows_on_one_rank_leaves_nothing_on_the_wire(pool: RankPool) -> None:
    outcomes = pool.run(2, fail_then_fit, fit, GrowsByHookOnRankOne, {})
    expected = fit_alone(Job)
    for message, state in outcomes:
        assert "rank 1: gradients that grew after their losses (parameters=loss.W)" in message
        assert_close(state, expected)


def fail_then_fit(
    run: Callable[..., Any], make: Callable[[], Job], strategy: Strategy
) -> tuple[str, dict[str, Tensor]]:
    """What the first fit says, and what a second one in the same processes and groups trains."""
    try:
        run(make, strategy)
    except RuntimeError as error:
        message = str(error)
    return message, run(Job)


# ---------------------------------------------------------------------- when the call check leaves


class WithSyncedNorm(Job):
    """Batch norm over the ranks opens handshakes of its own, in forward and in backward."""

    def build(self, loss: str) -> None:
        super().build(loss)
        self.norm = nn.BatchNorm1d(TASK.dim).double()

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        loss: Tensor = self.loss(self.norm(self.encoder(features)), labels)
        return loss


def fit_and_note_sending(make: Callable[[], Job], **options: Any) -> list[bool]:
    """For each step, whether the call check left before this rank had to read it."""
    noted: list[bool] = []
    plain = CallCheck._send

    def send(self: CallCheck, prepared: Any) -> Any:
        noted.append(self._ready_bytes < self._parameters.first_bucket)
        return plain(self, prepared)

    with mock.patch.object(CallCheck, "_send", send):
        fit(make, None, **options)
    return noted


def test_the_call_check_leaves_early_where_it_is_the_only_handshake(pool: RankPool) -> None:
    for noted in pool.run(2, fit_and_note_sending, Job):
        assert noted
        assert all(noted)


def test_the_call_check_leaves_where_it_is_read_beside_other_handshakes(pool: RankPool) -> None:
    for noted in pool.run(2, fit_and_note_sending, WithSyncedNorm, sync_batchnorm=True):
        assert noted
        assert not any(noted)
