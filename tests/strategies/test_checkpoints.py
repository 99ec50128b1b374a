"""A checkpoint moves freely between one process, `ddp`, `ddp_losses` and any number of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close
from tests.fits import make_trainer
from tests.oracle import assert_close
from tests.strategies.jobs import Job, Saves, fit, fit_alone, loader, strategy_of
from tests.strategies.test_hidden import Hidden

ALONE = "one process"
MAKE = partial(Job, "SoftTripleLoss", "adam")
Place = tuple[Any, int]
PLACES: dict[str, Place] = {
    "one process": (ALONE, 1),
    "ddp on 2": ("ddp", 2),
    "ddp_losses on 1": ({}, 1),
    "ddp_losses on 2": ({}, 2),
    "ddp_losses on 3": ({}, 3),
}


def at(pool: RankPool, place: str, epochs: int, load: str | None, save: str | None) -> list[dict[str, Tensor]]:
    strategy, world_size = PLACES[place]
    options: dict[str, Any] = {"max_epochs": epochs, "ckpt_path": load, "save": save}
    return [fit_alone(MAKE, **options)] if strategy == ALONE else pool.run(world_size, fit, MAKE, strategy, **options)


@pytest.mark.parametrize("target", PLACES)
@pytest.mark.parametrize("source", PLACES)
def test_training_goes_on_elsewhere(pool: RankPool, tmp_path: Path, source: str, target: str) -> None:
    file = str(tmp_path / "half.ckpt")
    (expected,) = at(pool, ALONE, 2, None, None)
    at(pool, source, 1, None, file)
    assert_all_close(at(pool, target, 2, file, None), expected)


def test_keys_are_those_of_the_plain_module(pool: RankPool, tmp_path: Path) -> None:
    ours, plain = str(tmp_path / "ours.ckpt"), str(tmp_path / "plain.ckpt")
    at(pool, "ddp_losses on 2", 1, None, ours)
    at(pool, "one process", 1, None, plain)
    one, other = (torch.load(file, weights_only=False) for file in (ours, plain))
    assert list(one["state_dict"]) == list(other["state_dict"])
    assert list(one) == [*other, "ddp_losses_kinds", "random_states"]
    states = [checkpoint["optimizer_states"][0] for checkpoint in (one, other)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert sorted(states[0]["state"]) == sorted(states[1]["state"])


def adopted_part(epochs: int, load: str | None, save: str | None) -> tuple[dict[str, Tensor], Tensor]:
    module = Hidden("list")
    trainer = make_trainer(strategy_of({"adopt": True}), max_epochs=epochs, callbacks=[Saves(save)])
    trainer.fit(module, loader(), ckpt_path=load)
    return dict(module.state_dict()), module.hidden().W.detach()


def test_an_adopted_loss_is_saved_and_restored(pool: RankPool, tmp_path: Path) -> None:
    file = str(tmp_path / "adopted.ckpt")
    expected = fit_alone(Job, max_epochs=2)
    pool.run(2, adopted_part, 1, None, file)
    keys = torch.load(file, weights_only=False)["state_dict"]
    assert sum(key.startswith("_adopted_losses.") for key in keys) == 1
    for state, weight in pool.run(3, adopted_part, 2, file, None):
        assert_close(state | {"loss.W": weight}, expected)
