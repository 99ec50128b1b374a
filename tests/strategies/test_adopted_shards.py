"""Sharded classes in a list of the module: adopted, they train, are clipped, saved whole and loaded like registered ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_ddp_losses import ClassShardedLoss
from lightning_ddp_losses.testing import RankPool
from tests.doors import process_groups
from tests.fits import make_trainer, trainer_alone
from tests.oracle import assert_close
from tests.strategies.jobs import Job, Saves, fit_alone, loader, make_loss, strategy_of
from tests.strategies.sharded_jobs import Plain, fit_sharded, whole_state

KEY = "_adopted_losses.losses_0.W"


class InAList(Job):  # the loss is sharded before the strategy sees it
    distributed = True

    def build(self, loss: str) -> None:
        with mock.patch.object(process_groups, "is_distributed", return_value=self.distributed):
            self.losses = [ClassShardedLoss(make_loss(loss))]

    def loss_of(self, embeddings: Tensor, labels: Tensor, index: int) -> Tensor:
        return self.losses[0](embeddings, labels)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.losses[0].predict(self.encoder(batch[0]), k=2)[1]

    def whole(self) -> dict[str, Tensor]:
        return {**self.state_dict(), "loss.W": self.losses[0].weight}

    def optimised(self) -> list[nn.Parameter]:
        known = {id(p): p for p in [*self.encoder.parameters(), *self.losses[0].parameters()]}
        return list(known.values())


class NotYet(InAList):  # made before the ranks exist, as a script makes its module
    distributed = False


def fit_adopted(
    make: type[InAList] = InAList, *, inside: str | None = None, strategy: Any = None, **options: Any
) -> dict[str, Tensor]:
    """Train as ``fit_sharded`` does; a checkpoint at the end of the fit, or after it."""
    strategy = {"adopt": True, **(strategy or {})}
    return fit_sharded("ArcFaceLoss", "adam", make=make, strategy=strategy, callbacks=[Saves(inside)], **options)


@pytest.mark.parametrize("make", [InAList, NotYet])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_trains_as_one_process(pool: RankPool, world_size: int, make: type[Job]) -> None:
    for options in ({}, {"gradient_clip_val": 0.05}):
        expected = fit_alone(lambda: Plain("ArcFaceLoss", "adam"), **options)
        for even in (True, False):
            assert_close(whole_state(pool.run(world_size, fit_adopted, make, even=even, **options)), expected)


@pytest.mark.parametrize(
    ("source", "target", "sharded"),
    [
        # each way of saving to more ranks and to fewer
        *((1, 3, False), (3, 2, False), (2, 3, True), (2, 1, True)),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in ((1, 3, True), (3, 2, True), (2, 3, False), (2, 1, False))
        ),
    ],
)
def test_its_checkpoint_goes_on_at_any_size(
    pool: RankPool, tmp_path: Path, source: int, target: int, sharded: bool
) -> None:
    strategy = {"sharded_checkpoints": sharded}
    expected = fit_alone(lambda: Plain("ArcFaceLoss", "adam"), max_epochs=2)
    files = {"inside": str(tmp_path / "inside.ckpt"), "save": str(tmp_path / "after.ckpt")}
    pool.run(source, fit_adopted, strategy=strategy, **files)
    for file in files.values():
        if not sharded:
            saved = torch.load(file, weights_only=False)
            states = saved["optimizer_states"][0]["state"]
            assert saved["state_dict"][KEY].shape == states[max(states)]["exp_avg"].shape == make_loss().W.shape
        found = pool.run(target, fit_adopted, load=file, strategy=strategy, max_epochs=2)
        assert_close(whole_state(found), expected)


class Sampled(InAList):  # half the classes in each step: the optimizer must be told
    def build(self, loss: str) -> None:
        self.losses = [ClassShardedLoss(make_loss(loss), sample_rate=0.5)]


class SampledAndRegistered(Sampled):
    def build(self, loss: str) -> None:
        super().build(loss)
        self.registered = self.losses[0]


def test_sampled_classes_in_a_list_train_as_registered_ones(pool: RankPool) -> None:
    adopted, registered = (pool.run(2, fit_adopted, make) for make in (Sampled, SampledAndRegistered))
    for ours, theirs in zip(adopted, registered, strict=True):
        assert_close(ours, {name: value for name, value in theirs.items() if not name.startswith("registered.")})


def fit_twice() -> dict[str, Tensor]:
    """A fit, an evaluation, and another fit of the same module with a strategy and optimizers of its own."""
    module, data = InAList("ArcFaceLoss", "adam"), loader()
    for _ in range(2):
        trainer = make_trainer(strategy_of({"adopt": True}))
        trainer.fit(module, data)
        trainer.predict(module, data)
    return {name: value.detach().clone() for name, value in module.whole().items()}


def test_a_second_fit_adopts_again(pool: RankPool) -> None:
    plain = Plain("ArcFaceLoss", "adam")
    for _ in range(2):
        trainer_alone().fit(plain, loader(1, 0))
    for world_size in (2, 3):
        assert_close(whole_state(pool.run(world_size, fit_twice)), dict(plain.state_dict()))
