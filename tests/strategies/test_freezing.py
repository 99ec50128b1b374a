"""Parts of the encoder that are frozen during a fit, which plain DDP waits for: as in one process, or the same error on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from torch.optim import Optimizer

from lightning_ddp_losses import DDPChecks
from tests.oracle import assert_close
from tests.rank_pool import RankPool
from tests.strategies.jobs import Job, fit, fit_alone
from tests.strategies.test_calls import assert_same_error


class Finetuning(BaseFinetuning):
    """The first layer trains from epoch 1 on; the last one no more from epoch 2 on."""

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


def fit_in_stages(alone: bool, strategy: dict[str, Any], **options: Any) -> Any:
    callbacks = [Finetuning(), *([] if alone else [DDPChecks()])]
    if alone:
        return fit_alone(TrainableJob, callbacks=callbacks, max_epochs=4, **options)
    return fit(TrainableJob, strategy, callbacks=callbacks, max_epochs=4, **options)


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
    expected = fit_in_stages(True, {}, **options)
    for world_size in (2, 3):
        for state in pool.run(world_size, fit_in_stages, False, strategy, **options):
            assert_close(state, expected)


class FrozenByRank(Job):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.encoder[0].requires_grad_(index < 2 or self.global_rank == 0)


def test_ranks_that_freeze_something_else_get_the_same_error(pool: RankPool) -> None:
    assert_same_error(pool.errors(2, fit, FrozenByRank), "frozen since the model was wrapped")


class FrozenLayer(Job):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.encoder[0].requires_grad_(index < 2)


def test_a_hook_that_keeps_something_of_each_bucket_is_an_error(pool: RankPool) -> None:
    errors = pool.errors(2, fit, FrozenLayer, {"ddp_comm_state": {"of": "buckets"}})
    assert_same_error(errors, "encoder.0.weight", "ddp_comm_state")
