"""What a user's ``on_after_backward`` sees: gradients that are the mean over ranks already, of the model and of its losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_ddp_losses.testing import RankPool
from tests.oracle import assert_close
from tests.strategies.jobs import Job, fit, fit_alone
from tests.strategies.scenarios import Alternating

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
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    return fit(make, **options) if world_size else fit_alone(make, **options)


@pytest.mark.parametrize("case", ["module", "callback", "manual", "accumulation", "scaler"])
def test_a_joint_norm_is_that_of_one_process(pool: RankPool, case: str) -> None:
    expected = clipped(0, case)
    for world_size in (2, 3):
        states = pool.run(world_size, clipped, world_size, case)
        for state in states:
            assert_close(state, expected)
            assert_close(state, states[0], rtol=0)
