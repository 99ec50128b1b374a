"""Manual optimisation: each manual_backward reduces what it must, with one or several optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from lightning_ddp_losses.testing import RankPool
from tests.fits import scaled
from tests.oracle import assert_close
from tests.strategies.jobs import OPTIMIZERS, Job, assert_as_alone, fit, fit_alone
from tests.strategies.scenarios import Alternating, TwoLosses


class Manual(TwoLosses):
    by_hand = True

    def __init__(self, loss: str = "CosFaceLoss", optimizer: str = "sgd") -> None:
        super().__init__(loss, optimizer)

    def configure_optimizers(self) -> Any:
        make = OPTIMIZERS[self.optimizer]
        return [make([*self.encoder.parameters(), *self.first.parameters()]), make(self.second.parameters())]


class OneAfterTheOther(Manual):
    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        features, labels = batch
        for optimizer, loss in zip(self.optimizers(), (self.first, self.second), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss(self.encoder(features), labels))
            optimizer.step()


class TwoForwardsThenTwoBackwards(Manual):
    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        features, labels = batch
        values = [loss(self.encoder(features), labels) for loss in (self.first, self.second)]
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        for value in values:
            self.manual_backward(value)
        for optimizer in self.optimizers():
            optimizer.step()


class SameLossTwice(Manual):  # two forwards through one loss, then two backwards in the other order
    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        features, labels = batch
        values = [self.first(self.encoder(features * k), labels) for k in (1, 2)]
        optimizer, _ = self.optimizers()
        optimizer.zero_grad()
        for value in reversed(values):
            self.manual_backward(value)
        optimizer.step()


class EverySecondStep(Manual):  # accumulation by hand: gradients stay over two batches
    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        loss = self.first if index % 2 else self.second
        self.manual_backward(loss(self.encoder(batch[0]), batch[1]))
        if index % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()


class ToggledAndClipped(Manual):
    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        features, labels = batch
        first, second = self.optimizers()
        with torch.no_grad():
            frozen = self.encoder(features)
        second.zero_grad()
        self.manual_backward(self.second(frozen, labels))
        self.clip_gradients(second, 0.1, "norm")
        second.step()
        if index % 2 == 0:
            first.zero_grad()
            self.manual_backward(self.first(self.encoder(features), labels) + self.encoder(features).square().mean())
            first.step()


class NoBackwardOnSomeSteps(Manual):
    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        if index % 2:
            return
        optimizer, _ = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.first(self.encoder(batch[0]), batch[1]))
        optimizer.step()


@pytest.mark.parametrize("job", Manual.__subclasses__(), ids=lambda job: job.__name__)
def test_manual_optimisation_equals_one_process(pool: RankPool, job: type[Job]) -> None:
    assert_as_alone(pool, job, {"find_unused_parameters": True}, worlds=(1, 2, 3))


# What a user's ``on_after_backward`` sees: gradients that are the mean over ranks already, of the model and of its
# losses.

LIMIT = 0.02


def clip_jointly(module: LightningModule) -> None:
    """Clip by the norm over all parameters, where the gradients of this step are complete."""
    if module.trainer.fit_loop.epoch_loop.batch_idx % 2 or module.trainer.accumulate_grad_batches == 1:
        torch.nn.utils.clip_grad_norm_(module.parameters(), LIMIT)


class ClipsInTheModule(Alternating):
    def on_after_backward(self) -> None:
        clip_jointly(self)


class ClipsByHand(Job):
    by_hand = True

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.objective(*batch, index))
        optimizer.step()

    def on_after_backward(self) -> None:
        clip_jointly(self)


class Clips(Callback):
    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        clip_jointly(pl_module)


def clipped(world_size: int, case: str) -> dict[str, Tensor]:
    """Train on ranks (0: in one process under plain Lightning)."""
    make: type[Job] = {"module": ClipsInTheModule, "manual": ClipsByHand}.get(case, Alternating)
    options: dict[str, Any] = {} if make is not Alternating else {"callbacks": [Clips()]}
    if case == "accumulation":
        options["accumulate_grad_batches"] = 2
    if case == "scaler":
        options["plugins"] = [scaled(8.0)]
    return fit(make, **options) if world_size else fit_alone(make, **options)


@pytest.mark.parametrize("case", ["module", "callback", "manual", "accumulation", "scaler"])
def test_a_joint_norm_is_that_of_one_process(pool: RankPool, case: str) -> None:
    expected = clipped(0, case)
    for world_size in (2, 3):
        states = pool.run(world_size, clipped, world_size, case)
        for state in states:
            assert_close(state, expected)
            assert_close(state, states[0], rtol=0)
