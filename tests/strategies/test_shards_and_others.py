"""Sharded classes together with what treats a weight as a whole: averages of it in checkpoints, optimizers that compute with all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn

from lightning_ddp_losses import DDPLossStrategy
from tests.lightning_ranks import make_trainer
from tests.oracle import assert_close
from tests.rank_pool import RankPool
from tests.strategies.jobs import loader, trainer_alone
from tests.strategies.sharded_jobs import Plain, Sharded, fit_sharded, whole_state
from tests.strategies.test_calls import assert_same_error

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*Be aware that when using `ckpt_path`"
)


def averaged(epochs: int, load: str | None, save: str | None) -> dict[str, Tensor]:
    """Train with an average of the weights, on ranks or in one process; what the fit leaves in the module is the average."""
    ranks = dist.is_initialized()
    options: dict[str, Any] = {"callbacks": [WeightAveraging()], "max_epochs": epochs}
    trainer = make_trainer(DDPLossStrategy(), **options) if ranks else trainer_alone(**options)
    module = (Sharded if ranks else Plain)("ArcFaceLoss", "adam")
    trainer.fit(module, loader(*((dist.get_world_size(), dist.get_rank()) if ranks else (1, 0))), ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


class SavesInBetween(WeightAveraging):
    """Saves while the average is kept with the weights."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def saved_in_between(path: str, strategy: dict[str, Any]) -> None:
    trainer = make_trainer(DDPLossStrategy(**strategy), callbacks=[SavesInBetween(path)], max_epochs=2)
    trainer.fit(Sharded("ArcFaceLoss", "adam"), loader(dist.get_world_size(), dist.get_rank()))


def test_an_average_is_saved_whole_and_goes_on_anywhere(pool: RankPool, tmp_path: Path) -> None:
    file, alone = str(tmp_path / "half.ckpt"), str(tmp_path / "alone.ckpt")
    expected = averaged(2, None, None)
    trainer = trainer_alone(callbacks=[SavesInBetween(alone)], max_epochs=2)
    trainer.fit(Plain("ArcFaceLoss", "adam"), loader(1, 0))
    pool.run(2, saved_in_between, file, {})
    ours, theirs = (torch.load(path, weights_only=False) for path in (file, alone))
    for part in ("state_dict", "current_model_state"):
        assert_close(ours[part], theirs[part])
    assert_close(whole_state(pool.run(3, averaged, 2, file, None)), expected)
    assert_close(averaged(2, file, None), expected)


def test_an_average_in_a_sharded_checkpoint_is_refused(pool: RankPool, tmp_path: Path) -> None:
    errors = pool.errors(2, saved_in_between, str(tmp_path / "folder"), {"sharded_checkpoints": True})
    assert_same_error(errors, "sharded_checkpoints", "a callback put in the place of loss.W")


class Adafactor(Sharded):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class Apart(Sharded):
    """The sharded weight has an optimizer of its own kind."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.manual_backward(self.objective(*batch, index))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        rest: list[nn.Parameter] = list(self.encoder.parameters())
        return [torch.optim.Adafactor(rest), torch.optim.Adam(self.loss.parameters())]


def test_an_optimizer_of_whole_weights_is_refused(pool: RankPool) -> None:
    assert_same_error(pool.errors(2, fit_sharded, make=Adafactor), "optimizer of loss.W", "Adafactor")
    pool.run(2, fit_sharded, make=Apart)
    pool.run(1, fit_sharded, make=Adafactor)
