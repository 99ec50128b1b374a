"""How ranks agree on which parameters have gradients: in the reduced buffer, or by handshake as on an accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ddp_losses.strategies.loss_reducer import LossReducer
from tests.oracle import assert_close
from tests.rank_pool import RankPool
from tests.strategies.jobs import Job, fit, fit_alone
from tests.strategies.scenarios import Alternating, OrderByRank


def fit_as_on_an_accelerator(make: type[Job], **options: Any) -> dict[str, Tensor]:
    """Nothing is read back from the device there: flags travel from host to host."""
    before = LossReducer.__dict__["_flags_in_bucket"]
    LossReducer._flags_in_bucket = staticmethod(lambda parameters: False)  # type: ignore[method-assign]
    try:
        return fit(make, **options)
    finally:
        LossReducer._flags_in_bucket = before


@pytest.mark.parametrize("job", [Job, Alternating, OrderByRank], ids=lambda job: job.__name__)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_flags_by_frame_change_nothing(pool: RankPool, job: type[Job], accumulate: int) -> None:
    expected = fit_alone(job, accumulate_grad_batches=accumulate)
    for world_size in (1, 2, 3):
        for state in pool.run(world_size, fit_as_on_an_accelerator, job, accumulate_grad_batches=accumulate):
            assert_close(state, expected)


class Partial(Job):
    """The loss runs on every rank, but one of them throws its value away."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        embeddings = self.encoder(features)
        value = self.loss(embeddings, labels)
        return embeddings.sum() if index == 1 and self.global_rank == 1 else value + embeddings.sum()


@pytest.mark.parametrize("run", [fit, fit_as_on_an_accelerator])
def test_a_gradient_on_some_ranks_only(pool: RankPool, run: Any) -> None:
    errors = pool.errors(3, run, Partial)
    assert len({error.message for error in errors}) == 1
    for error in errors:
        assert error.is_a("LossCallError"), error.message
        assert "`loss.W`" in error.message
        assert "rank 1: no gradient" in error.message
        assert "rank 2: gradient" in error.message


class Sparse(Job):
    """A table of centres beside the loss, whose gradient is sparse on one rank."""

    def build(self, loss: str) -> None:
        super().build(loss)
        self.centres = nn.Embedding(10, 2, dtype=torch.float64)

    def on_train_start(self) -> None:
        self.centres.sparse = self.global_rank == 1  # before the set-up it would be another option of a loss

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(self.encoder(features), labels) + self.centres(labels).sum()


@pytest.mark.parametrize("run", [fit, fit_as_on_an_accelerator])
def test_a_sparse_gradient_is_named_on_every_rank(pool: RankPool, run: Any) -> None:
    for error in pool.errors(2, run, Sparse, strategy={"losses": ["loss", "centres"]}):
        assert error.is_a("LossCallError"), error.message
        assert "`centres.weight`" in error.message
        assert "rank 0: dense" in error.message
        assert "rank 1: sparse" in error.message
        assert error.message.endswith("averaged over the ranks as dense tensors."), "advice about something else"
        assert "sparse=False" in error.message


class UsedEarlier(Job):
    """The loss's weight also shapes the encoder's input, so its gradient grows after backward has left the loss."""

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.loss(self.encoder(features + self.shift(index)), labels)

    def shift(self, index: int) -> Tensor:
        return 0.01 * self.loss.W.sum()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_gradient_that_grows_after_its_loss(pool: RankPool, accumulate: int) -> None:
    expected = fit_alone(UsedEarlier, accumulate_grad_batches=accumulate)
    for world_size in (1, 2, 3):
        for state in pool.run(world_size, fit, UsedEarlier, accumulate_grad_batches=accumulate):
            assert_close(state, expected)


class UsedEarlierOnOneRank(UsedEarlier):
    """... on rank 1 only, from the second batch on."""

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


@pytest.mark.parametrize("run", [fit, fit_as_on_an_accelerator])
def test_a_weight_that_is_used_earlier_on_one_rank_only(pool: RankPool, run: Any) -> None:
    expected = fit_alone(HalfUsedEarlier)
    for state in pool.run(2, run, UsedEarlierOnOneRank):
        assert_close(state, expected)


class GrowsByHook(Job):
    """A hook adds to the loss's gradient when backward comes to the encoder's first weight, after the call check."""

    ranks: tuple[int, ...] = (0, 1, 2)

    def on_train_start(self) -> None:
        if self.global_rank in self.ranks:
            self.encoder[0].weight.register_post_accumulate_grad_hook(self.grow)

    def grow(self, _: Tensor) -> None:
        if self.trainer.global_step > 0:
            self.loss.W.grad.add_(0.01)


def test_a_gradient_that_grows_after_its_loss_on_all_ranks(pool: RankPool) -> None:
    expected = fit_alone(GrowsByHook)
    for world_size in (2, 3):
        for state in pool.run(world_size, fit, GrowsByHook):
            assert_close(state, expected)
