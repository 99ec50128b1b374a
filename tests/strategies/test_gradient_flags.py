"""How gradients travel, and how ranks agree on which there are: the same comes of each way.

In the call check, in a buffer right after it, in one after backward, each in its own memory, or as on an accelerator. Gradients that change
after the call check are reduced then, or are an error on every rank.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_ddp_losses.errors import LossCallError
from lightning_ddp_losses.strategies import loss_reducer
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_errors
from tests.counting import nothing_rides
from tests.oracle import assert_close
from tests.strategies.jobs import TASK, Job, assert_as_alone, fit, fit_alone, make_loss
from tests.strategies.scenarios import Alternating, NoLossAtAll, OrderByRank
from tests.strategies.test_manual import TwoForwardsThenTwoBackwards


def fit_as_on_an_accelerator(make: type[Job], *args: Any, **options: Any) -> dict[str, Tensor]:
    """Nothing is read back from the device there: flags travel from host to host."""
    with mock.patch.object(loss_reducer, "_are_on_host", return_value=False):
        return fit(make, *args, **options)


def fit_in_a_bucket(make: type[Job], *args: Any, **options: Any) -> dict[str, Tensor]:
    """Gradients find no room in the call check, and leave right after it."""
    with nothing_rides():
        return fit(make, *args, **options)


def fit_large(make: type[Job], *args: Any, **options: Any) -> dict[str, Tensor]:
    """Every gradient counts as large, and travels in its own memory."""
    with mock.patch.object(loss_reducer, "LARGE_BYTES", 0):
        return fit(make, *args, **options)


def fit_large_as_on_an_accelerator(make: type[Job], *args: Any, **options: Any) -> dict[str, Tensor]:
    with mock.patch.object(loss_reducer, "LARGE_BYTES", 0):
        return fit_as_on_an_accelerator(make, *args, **options)


def fit_late(make: type[Job], *args: Any, **options: Any) -> dict[str, Tensor]:
    """No gradient is complete at the call check: all of them are reduced after backward."""
    with mock.patch.object(loss_reducer.LossReducer, "pack", return_value=b""):
        return fit(make, *args, **options)


WAYS = [fit, fit_in_a_bucket, fit_large, fit_as_on_an_accelerator]


class Partial(Job):  # the loss runs on every rank, but one of them throws its value away
    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        value = self.loss(embeddings, labels)
        return embeddings.sum() if index == 1 and self.global_rank == 1 else value + embeddings.sum()


class Sparse(Job):  # a table of centres beside the loss, whose gradient is sparse on one rank
    def build(self, loss: str) -> None:
        super().build(loss)
        self.centres = nn.Embedding(10, 2, dtype=torch.float64)

    def on_train_start(self) -> None:
        self.centres.sparse = self.global_rank == 1  # before the set-up it would be another option of a loss

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(embeddings, labels) + self.centres(labels).sum()


def fail_then_fit(run: Any, make: type[Job], strategy: Any) -> tuple[str, dict[str, Tensor]]:
    try:
        run(make, strategy)
    except LossCallError as error:
        return str(error), run(Job)
    raise AssertionError("no error")


DENSE = "averaged over the ranks as dense tensors."


@pytest.mark.parametrize(
    ("job", "losses", "words"),
    [
        (Partial, "auto", ["`loss.W`", "rank 1: no gradient", "rank 2: gradient"]),
        (Sparse, ["loss", "centres"], ["`centres.weight`", "rank 0: dense", "rank 1: sparse", "sparse=False", DENSE]),
    ],
    ids=["partial", "sparse"],
)
@pytest.mark.parametrize("run", WAYS)
def test_gradients_that_ranks_hold_differently_are_named_on_every_rank_and_leave_nothing_on_the_wire(
    pool: RankPool, run: Any, job: type[Job], losses: Any, words: list[str]
) -> None:
    outcomes = pool.run(3, fail_then_fit, run, job, {"losses": losses})
    assert len({message for message, _ in outcomes}) == 1
    expected = fit_alone(Job)
    for message, state in outcomes:
        assert all(word in message for word in words), message
        assert job is not Sparse or message.endswith(DENSE), "advice about something else"
        assert_close(state, expected)


class UsedEarlier(Job):
    """The loss's weight also shapes the encoder's input, so its gradient grows after backward has left the loss."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(self.encoder(features + self.shift(index)), labels)

    def shift(self, index: int) -> Tensor:
        return 0.01 * self.loss.W.sum()


@pytest.mark.parametrize("job", [Job, Alternating, OrderByRank, UsedEarlier], ids=lambda job: job.__name__)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("run", [fit_large, fit_as_on_an_accelerator])
def test_gradients_equal_one_process(pool: RankPool, run: Any, job: type[Job], accumulate: int) -> None:
    assert_as_alone(pool, job, worlds=(1, 2, 3), run=run, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_without_the_call_check(pool: RankPool, run: Any, accumulate: int) -> None:
    assert_as_alone(pool, UsedEarlier, {"check_calls": False}, run=run, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_that_grows_after_its_loss(pool: RankPool, accumulate: int) -> None:
    assert_as_alone(pool, UsedEarlier, worlds=(1, 2, 3), accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("run", WAYS)
def test_manual_optimisation(pool: RankPool, run: Any) -> None:
    assert_as_alone(pool, TwoForwardsThenTwoBackwards, run=run)


class UsedEarlierOnOneRank(UsedEarlier):  # ... on rank 1 only, from the second batch on
    def shift(self, index: int) -> Tensor:
        weight = self.loss.W if self.global_rank == 1 and index > 0 else self.loss.W.detach()
        return 0.01 * weight.sum()


class HalfUsedEarlier(UsedEarlier):
    """What one process trains for: half of the rows see the weight there, as those of rank 1 do."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        half, fixed = len(labels) // 2, self.loss.W.detach()
        shifts = [0.01 * weight.sum() for weight in (fixed, self.loss.W if index else fixed)]
        rows = torch.cat([features[:half] + shifts[0], features[half:] + shifts[1]])
        return self.loss(self.encoder(rows), labels)


@pytest.mark.parametrize("run", WAYS)
def test_a_weight_that_is_used_earlier_on_one_rank_only(pool: RankPool, run: Any) -> None:
    assert_as_alone(pool, UsedEarlierOnOneRank, run=run, alone=HalfUsedEarlier)


class GrowsByHook(Job):
    """A hook adds to the loss's gradient when backward comes to the encoder's first weight, after the call check."""

    ranks: tuple[int, ...] = (0, 1, 2)

    def on_train_start(self) -> None:
        if self.global_rank in self.ranks:
            self.encoder[0].weight.register_post_accumulate_grad_hook(self.grow)

    def grow(self, _: Tensor) -> None:
        if self.trainer.global_step > 0:
            self.loss.W.grad.add_(0.01)


@pytest.mark.parametrize("run", WAYS)
def test_a_gradient_that_grows_after_its_loss_on_all_ranks(pool: RankPool, run: Any) -> None:
    assert_as_alone(pool, GrowsByHook, worlds=(2, 3), run=run)


class GrowsByHookOnRankOne(GrowsByHook):  # ... on one rank
    ranks = (1,)


class GoneOnRankOne(GrowsByHookOnRankOne):  # the gradient is taken away on one rank, which shows in its flag
    def grow(self, _: Tensor) -> None:
        if self.trainer.global_step == 1:
            self.loss.W.grad = None


class ComesOnRankOne(GrowsByHookOnRankOne):
    """A step without the loss, in which one rank gets a gradient of it all the same."""

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return embeddings.square().mean() if index == 1 else self.loss(embeddings, labels)

    def grow(self, _: Tensor) -> None:
        if self.trainer.global_step == 1:
            self.loss.W.grad = torch.ones_like(self.loss.W)


@pytest.mark.parametrize(
    ("run", "job"),
    [
        (fit, GrowsByHookOnRankOne),
        (fit_in_a_bucket, GrowsByHookOnRankOne),
        (fit, GoneOnRankOne),
        (fit, ComesOnRankOne),
        (fit_as_on_an_accelerator, ComesOnRankOne),
        (fit_as_on_an_accelerator, GoneOnRankOne),
        (fit_large, GoneOnRankOne),
        (fit_large, GrowsByHookOnRankOne),
        (fit_large_as_on_an_accelerator, GoneOnRankOne),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gradient_that_changes_on_one_rank_only(pool: RankPool, run: Any, job: type[Job], world_size: int) -> None:
    """The peers, which may be reducing that gradient, learn of it at their next handshake."""
    assert_errors(
        pool.errors(world_size, run, job),
        "rank 1: gradients that changed after the call check (parameters=loss.W)",
        of="RankMismatchError",
    )


class MixedLosses(Job):  # losses of three dtypes next to each other
    def build(self, loss: str) -> None:
        self.loss = make_loss(loss)
        self.single = make_loss(loss, 1).float()
        self.narrow = nn.Linear(TASK.dim, 1, dtype=torch.bfloat16)

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        value = self.loss(embeddings, labels) + self.single(embeddings.float(), labels)
        return value + self.narrow(embeddings.bfloat16()).double().sum()


@pytest.mark.parametrize("job", [Job, Alternating, MixedLosses, NoLossAtAll], ids=lambda job: job.__name__)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_way_of_travel_changes_no_bit(pool: RankPool, job: type[Job], world_size: int) -> None:
    strategy = {"losses": ["loss", "single", "narrow"]} if job is MixedLosses else {}
    late = pool.run(world_size, fit_late, job, strategy)[0]
    for run in (fit, fit_in_a_bucket):
        for state in pool.run(world_size, run, job, strategy):
            assert all(torch.equal(value, late[name]) for name, value in state.items())
