"""Training jobs with sharded classes, and the same with the plain loss for one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses import ClassShardedLoss
from tests.fits import make_trainer
from tests.strategies.jobs import Job, loader, make_loss, strategy_of


class Plain(Job):  # the plain loss
    def build(self, loss: str) -> None:
        self.loss = make_loss(loss)


class Sharded(Job):  # its weight sharded over the ranks
    def build(self, loss: str) -> None:
        self.loss = ClassShardedLoss(make_loss(loss))


def whole_state(results: list[dict[str, Tensor]], weight: str | None = "loss.W", dim: int = 1) -> dict[str, Tensor]:
    """The ranks' states as one: equal but for the blocks of the weight, if one is divided."""
    state = dict(results[0])
    if weight is not None:
        state[weight] = torch.cat([result[weight] for result in results], dim)
    for result in results[1:]:
        assert all(torch.equal(result[name], state[name]) for name in state if name != weight)
    return state


def fit_sharded(
    loss: str = "ArcFaceLoss",
    optimizer: str = "sgd",
    *,
    even: bool = True,
    load: str | None = None,
    save: str | None = None,
    strategy: Any = None,
    make: type[Job] = Sharded,
    then: str | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Train on all ranks of the pool; returns this rank's state.

    Args:
        loss: Of pytorch-metric-learning.
        optimizer: Of ``OPTIMIZERS``.
        even: Rows per rank.
        load: Checkpoint to go on from.
        save: Where to save after the fit.
        strategy: Options of ``DDPLossStrategy``.
        make: The module.
        then: ``"validate"``, ``"test"`` or ``"predict"`` after the fit.
        options: Of the trainer.
    """
    module = make(loss, optimizer)
    trainer = make_trainer(strategy_of(strategy or {}), **options)
    data = loader(even=even)
    trainer.fit(module, data, None if then is None else data, ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    if then is not None:
        getattr(trainer, then)(module, data, **({} if then == "predict" else {"verbose": False}))
    state = module.whole() if hasattr(module, "whole") else module.state_dict()
    return {name: value.detach().clone() for name, value in state.items()}
