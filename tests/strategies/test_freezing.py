"""Parts of the encoder that are frozen during a fit, which plain DDP waits for: as in one process, or the same error on all ranks."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_losses import DDPChecks
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close
from tests.strategies.jobs import Job, assert_as_alone, fit, fit_alone


class Finetuning(BaseFinetuning):  # the first layer trains from epoch 1 on; the last one no more from epoch 2 on
    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.encoder[0])

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.encoder[0], optimizer, lr=0.05)
        elif epoch == 2:
            self.freeze(pl_module.encoder[-1])


class TrainableJob(Job):
    def optimised(self) -> list[Any]:
        return [p for p in self.parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ({}, {}),
        ({"gradient_as_bucket_view": True}, {"accumulate_grad_batches": 2}),
        ({"find_unused_parameters": True}, {"gradient_clip_val": 0.2}),
        ({"static_graph": True}, {}),
    ],
    ids=str,
)
def test_stages_of_finetuning_are_one_process(
    pool: RankPool, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    expected = fit_alone(TrainableJob, callbacks=[Finetuning()], max_epochs=4, **options)
    options |= {"callbacks": [Finetuning(), DDPChecks()], "max_epochs": 4}
    for world_size in (2, 3):
        assert_all_close(pool.run(world_size, fit, TrainableJob, strategy, **options), expected)


class FrozenInside(Job):  # one rank, or both, freeze a layer inside the step at one batch
    def __init__(self, ranks: tuple[int, ...], at: int) -> None:
        super().__init__()
        self.ranks, self.at = ranks, at

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        self.encoder[0].requires_grad_(index != self.at or self.global_rank not in self.ranks)
        return super().objective(features, labels, index)


def test_freezing_inside_the_step_is_exact_where_unused_parameters_are_searched(pool: RankPool) -> None:
    make = partial(FrozenInside, (0, 1), 1)
    assert_as_alone(pool, make, {"find_unused_parameters": True})


class FrozenLayer(Job):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.encoder[0].requires_grad_(index < 2)


class OldWraps(Callback):
    """Whether the DDP that the fit began with is still there behind each batch."""

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.first, self.lives = weakref.ref(trainer.strategy.model), list[bool]()

    def on_train_batch_end(self, *_: Any) -> None:
        gc.collect()
        self.lives.append(self.first() is not None)


def lives_of_the_first_wrap(checks: bool) -> list[bool]:
    wraps = OldWraps()
    fit(FrozenLayer, callbacks=[wraps, *([DDPChecks(summary=False, file=False)] if checks else [])])
    return wraps.lives


@pytest.mark.parametrize("checks", [False, True])
def test_the_first_wrap_goes_when_the_model_is_wrapped_again(pool: RankPool, checks: bool) -> None:
    for lives in pool.run(2, lives_of_the_first_wrap, checks):
        assert lives == [True] * 2 + [False] * (len(lives) - 2)
        assert not lives[-1]
