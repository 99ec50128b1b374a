"""Trainable losses that are no registered submodules: told with their path, or adopted; copies are left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_ddp_losses.testing import RankPool
from tests.fits import make_trainer
from tests.oracle import assert_close
from tests.strategies.jobs import Job, assert_as_alone, fit_alone, loader, make_loss, strategy_of


class Holder:  # a plain object of the user's
    def __init__(self, loss: nn.Module) -> None:
        self.criterion = loss


class Hidden(Job):  # the loss lies in a place where torch does not register it
    def __init__(self, place: str, optimise: bool = True) -> None:
        self.place, self.optimise = place, optimise
        super().__init__()

    def build(self, loss: str) -> None:
        if self.place != "callback":
            name, keep, _ = PLACES[self.place][1:]
            setattr(self, name, keep(make_loss(loss)))

    def hidden(self) -> nn.Module:
        if self.place == "callback":
            return self.trainer.callbacks[0].loss
        _, name, _, get = PLACES[self.place]
        return get(getattr(self, name))

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.hidden()(embeddings, labels)

    def optimised(self) -> list[nn.Parameter]:
        known = list(self.parameters())
        missing = [p for p in self.hidden().parameters() if not any(p is q for q in known)] if self.optimise else []
        return [*known, *missing]


class LossCallback(Callback):
    def __init__(self) -> None:
        self.loss = make_loss()


# where it is found, the attribute, what is kept there, and the loss in it
PLACES: dict[str, tuple[str, str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": ("losses[0]", "losses", lambda loss: [loss], lambda kept: kept[0]),
    "dict": ("losses['arc']", "losses", lambda loss: {"arc": loss}, lambda kept: kept["arc"]),
    "nested": (
        "losses['a'][0][1]",
        "losses",
        lambda loss: {"a": [(nn.Identity(), loss)]},
        lambda kept: kept["a"][0][1],
    ),
    "object": ("holder.criterion", "holder", Holder, lambda kept: kept.criterion),
    "partial": ("call.args[0]", "call", partial(partial, nn.Module.__call__), lambda kept: kept.args[0]),
    "closure": ("get", "get", lambda loss: lambda: loss, lambda kept: kept()),
    "callback": ("LossCallback", "", lambda loss: loss, lambda kept: kept),
}


def fit_hidden(make: Any, strategy: dict[str, Any], place: str) -> tuple[dict[str, Tensor], Tensor, list[str]]:
    module = make()
    callbacks = [*([LossCallback()] if place == "callback" else []), keys := Keys()]
    make_trainer(strategy_of(strategy), callbacks=callbacks).fit(module, loader())
    return dict(module.state_dict()), module.hidden().W.detach(), keys.seen


class Keys(Callback):  # the state's keys in the middle of fit
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.seen = sorted(module.state_dict())


@pytest.mark.parametrize("place", PLACES)
def test_a_hidden_loss_can_be_adopted(pool: RankPool, place: str) -> None:
    expected = fit_alone(Job)
    for state, weight, keys in pool.run(2, fit_hidden, partial(Hidden, place), {"adopt": True}, place):
        assert_close(state | {"loss.W": weight}, expected)  # gone from the module again, and trained
        assert sum(key.startswith("_adopted_losses.") for key in keys) == 1


def fit_two_modules(folder: str) -> list[str]:
    """Fit a module with a hidden loss, then another one with the same strategy; what a checkpoint of the other one holds."""
    trainer = make_trainer(strategy_of({"adopt": True}))
    for module in (Hidden("list"), Job()):
        trainer.fit(module, loader(dist.get_world_size(), dist.get_rank()))
        trainer.save_checkpoint(f"{folder}/{type(module).__name__}.ckpt")
        trainer.fit_loop.max_epochs += 1
    saved = [torch.load(f"{folder}/{name}.ckpt", weights_only=True)["state_dict"] for name in ("Hidden", "Job")]
    assert any(key.startswith("_adopted_losses.") for key in saved[0])
    return sorted(saved[1])


def test_an_adopted_loss_is_not_in_a_checkpoint_of_the_next_module(pool: RankPool, tmp_path: Path) -> None:
    for keys in pool.run(2, fit_two_modules, str(tmp_path)):
        assert keys == sorted(Job().state_dict())


class KeepsCopies(Job):
    """Weight averaging by hand: copies of module and loss that no optimizer holds, read without gradients."""

    def on_fit_start(self) -> None:
        self.average = [copy.deepcopy(self.loss)]
        self.averages = {"all": torch.optim.swa_utils.AveragedModel(self.encoder)}

    def build(self, loss: str) -> None:
        super().build(loss)
        self.before = [copy.deepcopy(self.loss)]

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        with torch.no_grad():
            for other in (*self.before, *self.average):
                assert other(embeddings, labels) > 0
        return self.loss(embeddings, labels)


@pytest.mark.parametrize("adopt", [True, False])
def test_copies_that_nobody_optimises_are_left_alone(pool: RankPool, adopt: bool) -> None:
    assert_as_alone(pool, KeepsCopies, {"adopt": adopt}, alone=Job)
