"""Ranks that do not call the same losses, or not on the same rows: the same error on all of them, or one warning."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_ddp_losses.errors import LossCallError
from lightning_ddp_losses.strategies import register_loss_type
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close
from tests.counting import CountCollectives
from tests.oracle import assert_close, batches, cuts
from tests.strategies.jobs import TASK, Job, assert_as_alone, fit, fit_alone, make_loss
from tests.strategies.scenarios import NeverCalled, TwoLosses


class SkipsALoss(TwoLosses):  # from batch `at` on, the ranks in `ranks` do not call the second loss
    at, ranks, skipped = 0, (1,), "second"
    names: tuple[str, ...] = ("first", "second")

    def __init__(self, at: int, ranks: tuple[int, ...], skipped: str = "second") -> None:
        self.at, self.ranks, self.skipped = at, ranks, skipped
        super().__init__()

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        skip = index >= self.at and self.global_rank in self.ranks
        value = embeddings.square().mean()
        for name in self.names:
            if not (skip and self.skipped in (name, "both")):
                value = value + getattr(self, name)(embeddings, labels)
        return value


@pytest.mark.filterwarnings("ignore:rows of .* differ between ranks")  # they do: 12 and 6 in an accumulation
def test_a_loss_skipped_in_part_of_an_accumulation_is_fine(pool: RankPool) -> None:
    """Rank 1 calls the loss on the second batch of each accumulation only; the mean over ranks is defined all the same."""
    states = pool.run(2, fit, EverySecondBatchOnRank1, accumulate_grad_batches=2, limit_train_batches=4)
    assert_close(states[1], states[0], rtol=0)


class EverySecondBatchOnRank1(TwoLosses):
    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        value = self.first(embeddings, labels)
        return value + (self.second(embeddings, labels) if index % 2 or self.global_rank == 0 else 0)


def test_the_next_fit_works_after_an_error(pool: RankPool) -> None:
    assert_all_close(pool.run(2, fail_then_fit), fit_alone(Job))


def fail_then_fit() -> dict[str, Tensor]:
    from lightning_ddp_losses import DDPLossError

    try:
        fit(partial(SkipsALoss, 1, (1,)))
    except DDPLossError:
        return fit(Job)
    raise AssertionError("no error")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_no_rank_calls_is_fine(pool: RankPool, accumulate: int) -> None:
    expected = fit_alone(NeverCalled, accumulate_grad_batches=accumulate)
    for state in pool.run(3, fit, NeverCalled, accumulate_grad_batches=accumulate):
        assert_close(state, expected)
        assert torch.equal(state["second.W"], make_loss(seed=2).W)


def fit_recording(make: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(make, **options)
    return [str(warning.message) for warning in caught if "rows" in str(warning.message)]


def test_uneven_rows_warn_once_with_all_counts_and_the_fix(pool: RankPool) -> None:
    told = pool.run(2, fit_recording, Job, even=False)
    assert [len(messages) for messages in told] == [1, 0], told
    assert all(word in told[0][0] for word in ("4", "8", "ArcFaceLoss", "rank 0", "rank 1", "drop_last"))
    assert pool.run(2, fit_recording, Job, even=True) == [[], []]
    assert len(pool.run(2, fit_recording, Job, even=False, accumulate_grad_batches=2)[0]) == 1


@register_loss_type
class ZeroAtTimes(nn.Module):
    """Returns a zero that depends on the embeddings only, or on nothing, where no label reaches the threshold."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.kind = kind
        self.W = nn.Parameter(torch.randn(TASK.dim, TASK.classes, dtype=torch.float64))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Any:
        kept = labels >= 4
        if not kept.any():
            zero = torch.zeros((), dtype=torch.float64)
            return {"sum": (embeddings * 0).sum(), "constant": zero, "dict": {"loss": zero}}[self.kind]
        value = nn.functional.cross_entropy(embeddings @ self.W, labels, reduction="none")[kept].sum() / len(labels)
        return {"loss": value} if self.kind == "dict" else value


class ZeroOnSomeRanks(Job):
    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__()

    def build(self, loss: str) -> None:
        self.loss = ZeroAtTimes(self.kind)

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        value = self.loss(self.encoder(features), labels)
        value = value["loss"] if isinstance(value, dict) else value
        return value + self.encoder(features).square().mean()


@pytest.mark.parametrize("kind", ["sum", "constant", "dict"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_zero_loss_keeps_its_parameters_in_the_graph(pool: RankPool, world_size: int, kind: str) -> None:
    slices = [labels[part] for _, labels in batches(TASK) for part in cuts(TASK.rows, world_size)]
    assert {bool((labels >= 4).any()) for labels in slices} == {True, False}
    make = partial(ZeroOnSomeRanks, kind)
    assert_as_alone(pool, make, worlds=(world_size,))


# Checks whose bytes travel in the handshake of each synchronising backward.


class Riders(Callback):  # two riders: one sends rows of any length, one raises on all ranks when told to
    def __init__(self, length: int = 3, fail_at: int | None = None) -> None:
        self.length, self.fail_at = length, fail_at
        self.rode: list[bool] = []
        self.seen: list[list[bytes]] = []
        self.step_gradients: list[bool] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        own = bytes([dist.get_rank()]) * (self.length + dist.get_rank())

        def judge(rows: list[bytes]) -> None:
            self.step_gradients.append(pl_module.encoder[0].weight.grad is not None)
            if self.fail_at == len(self.seen):
                raise LossCallError("told to", collective=True)
            self.seen.append(rows)

        self.rode = [
            strategy.attach_payload(lambda: own, judge),
            strategy.attach_payload(lambda: b"", lambda rows: None),
        ]


def ride(strategy: dict[str, Any], length: int, **options: Any) -> tuple[list[bool], list[list[bytes]], list[bool]]:
    riders = Riders(length, options.pop("fail_at", None))
    fit(Job, strategy, callbacks=[riders], **options)
    return riders.rode, riders.seen, riders.step_gradients


@pytest.mark.parametrize("length", [3, 5000])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_rides_reaches_every_rank_before_the_encoder_has_a_gradient(
    pool: RankPool, length: int, accumulate: int
) -> None:
    for world_size in (1, 2, 3):
        rows = [bytes([rank]) * (length + rank) for rank in range(world_size)]
        for rode, seen, gradients in pool.run(
            world_size, ride, {}, length, accumulate_grad_batches=accumulate, limit_train_batches=4
        ):
            assert rode == [True, True]
            assert seen == [rows] * (4 // accumulate)
            assert gradients[0] is (accumulate > 1)


class OnFirstRank(Riders):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if dist.get_rank() == 0:
            super().on_train_start(trainer, pl_module)


def ride_on_first_rank() -> None:
    fit(Job, {}, callbacks=[OnFirstRank()])


def test_without_the_frame_nothing_rides(pool: RankPool) -> None:
    for strategy in ({"check_calls": False}, {"losses": []}):
        for rode, seen, _ in pool.run(2, ride, strategy, 3):
            assert (rode, seen) == ([False, False], [])


def gathers(riding: bool) -> int:
    with CountCollectives() as count:
        fit(Job, callbacks=[Riders()] * riding)
    return sum("allgather" in name for name in count.names)


def test_a_ride_costs_no_collective(pool: RankPool) -> None:
    assert pool.run(2, gathers, True) == pool.run(2, gathers, False)
