"""`randomness="global"` of both strategies: W ranks train as plain torch in one process, also after a resume on other ranks."""

from __future__ import annotations

import contextlib
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from lightning_ddp_losses import DDPLossStrategy, ModelParallelLossStrategy
from lightning_ddp_losses.samplers import GlobalBatchSampler
from lightning_ddp_losses.testing import RankPool
from tests.doors import torch_compat
from tests.each_rank import each_rank
from tests.fits import Trained, listed, make_trainer, weights_of
from tests.oracle import assert_close
from tests.randomness.models import RATE, batches, loss_of, make, one_process
from tests.randomness.test_block import Splits, own_rows
from tests.strategies.test_resuming import Kill, Killed

ROWS, G, EPOCHS, SEED = 36, 12, 2, 11
UNEVEN: dict[int, Splits] = {1: [(12,)] * 3, 2: [(7, 5), (12, 0), (2, 10)], 3: [(3, 4, 5), (6, 0, 6), (0, 12, 0)]}
STRATEGIES = {"ddp": DDPLossStrategy, "fsdp2": partial(ModelParallelLossStrategy, save_distributed_checkpoint=False)}
MODELS = ("vit block", "re-entrant checkpoint", "checkpoint", "diffusion", "numbers that all rows share", "mixup")


class Module(Trained):
    """Trains one of the models, and lets each rank draw other numbers between the steps."""

    lr = RATE

    def __init__(self, name: str, *, automatic: bool = True, splits: Splits | None = None) -> None:
        super().__init__()
        self.net = make(name)
        self.splits = splits
        self.automatic_optimization = automatic
        self.seen: list[int] = []

    def configure_model(self) -> None:
        """Divide the model under FSDP2."""
        mesh = self.device_mesh
        if mesh is None or any(isinstance(parameter, DTensor) for parameter in self.parameters()):
            return
        fully_shard(self.net, mesh=mesh["data_parallel"])

    def train_dataloader(self) -> DataLoader:
        (x,) = batches([ROWS])
        if self.splits is not None:
            return listed([[own_rows(rows, counts)] for rows, counts in zip(x.split(G), self.splits, strict=True)])
        sampler = GlobalBatchSampler.batches(SequentialSampler(range(ROWS)), G, seed=0)
        return DataLoader(TensorDataset(x), batch_sampler=sampler)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch.rand(1 + dist.get_rank() + dist.get_world_size())
        numpy.random.rand(2 + dist.get_rank())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self.seen.append(batch_idx)
        loss = self.loss(batch[0]) * dist.get_world_size() / G
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def loss(self, x: Tensor) -> Tensor:
        return loss_of(self.net, x)


def by_hand(name: str, window: int = 1, epochs: int = EPOCHS) -> dict[str, Tensor]:
    """Return the weights of a plain loop, with a step for each window of batches."""
    steps = batches([ROWS])[0].split(G) * epochs
    return {f"net.{key}": value for key, value in one_process(name, steps, window=window, seed=SEED).items()}


def fit(
    name: str,
    kill: int | None = None,
    path: str = "",
    load: str | None = None,
    window: int = 1,
    strategy: str = "ddp",
    randomness: str = "global",
    module: type[Module] = Module,
    epochs: int = EPOCHS,
    **kind: Any,
) -> dict[str, Tensor]:
    """Train on the ranks of this group. Return the weights."""
    trained = module(name, **kind)
    torch.manual_seed(SEED)
    callbacks = [] if kill is None else [Kill("on_train_batch_end", kill, path)]
    made = STRATEGIES[strategy](randomness=randomness)
    trainer = make_trainer(made, max_epochs=epochs, callbacks=callbacks, accumulate_grad_batches=window)
    with contextlib.suppress(Killed):
        trainer.fit(trained, ckpt_path=load)
    assert not torch_compat.is_in_dispatch_mode()
    return weights_of(trained)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@each_rank()
def test_a_fit_is_that_of_one_process(world_size: int, strategy: str) -> None:
    for name in MODELS:
        assert_close(fit(name, strategy=strategy), by_hand(name))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [2, 3])
@each_rank()
def test_uneven_rows_and_ranks_without_rows(world_size: int, strategy: str) -> None:
    for name in ("vit block", "checkpoint"):
        assert_close(fit(name, strategy=strategy, splits=UNEVEN[world_size]), by_hand(name))


@pytest.mark.parametrize("strategy", STRATEGIES)
@each_rank(2)
def test_manual_optimisation(strategy: str) -> None:
    assert_close(fit("vit block", automatic=False, strategy=strategy), by_hand("vit block"))


@pytest.mark.parametrize("strategy", STRATEGIES)
@each_rank(2)
def test_accumulation(strategy: str) -> None:
    assert_close(fit("checkpoint", window=3, strategy=strategy), by_hand("checkpoint", window=3))


def _part(strategy: str, kill: int | None, path: str, load: str | None) -> dict[str, Tensor]:
    return fit("checkpoint", kill, path, load, strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_resumed_on_other_ranks_draws_what_it_would_have_drawn(
    pool: RankPool, tmp_path: Path, strategy: str
) -> None:
    """Killed at step 2 of the second epoch on two ranks, resumed on three."""
    path = str(tmp_path / "killed.ckpt")
    pool.run(2, _part, strategy, 5, path, None)
    assert_close(pool.run(3, _part, strategy, None, "", path)[0], by_hand("checkpoint"))


class DrawsAfterTheStep(Module):
    """Other numbers of draws on each rank, in the hooks between the step's draws and the next batch."""

    def draw(self) -> None:
        torch.rand(1 + dist.get_rank())
        random.random()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.draw()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.draw()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.draw()


@each_rank(2)
def test_draws_of_hooks_after_the_step_change_no_training_step() -> None:
    assert_close(fit("mc dropout", module=DrawsAfterTheStep), by_hand("mc dropout"))


class Shuffling(Module):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        return loss_of(self.net, 0.3 * x + 0.7 * x[torch.randperm(x.shape[0]).argsort()])


class Unseen(Module):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.net, F.dropout(batch[0], 0.5)) * float(numpy.random.rand())


class Alone(Module):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if dist.get_rank() == 1:
            torch.rand(())
        return loss_of(self.net, batch[0])


class MonteCarloValidation(Module):
    """Draws in validation too, with as many numbers as this rank has rows."""

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(batches([7])[0]), batch_size=2)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.net.train()
        self.log("spread", torch.stack([self.net(batch[0]) for _ in range(3)]).std(0).mean(), sync_dist=True)
        random.random()


@pytest.mark.parametrize("world_size", [1, 2])
@each_rank()
def test_draws_of_validation_change_no_training_step(world_size: int) -> None:
    module = MonteCarloValidation("vit block")
    torch.manual_seed(SEED)
    trainer = make_trainer(
        DDPLossStrategy(randomness="global"), max_epochs=EPOCHS, limit_val_batches=2, val_check_interval=1
    )
    trainer.fit(module)
    assert float(trainer.callback_metrics["spread"]) > 0
    assert_close(dict(module.state_dict()), by_hand("vit block"))


class Augmented(Module):
    def on_after_batch_transfer(self, batch: list[Tensor], index: int) -> list[Tensor]:
        return [batch[0] + 0.1 * torch.randn_like(batch[0])]


class AugmentedBefore(Module):
    def on_before_batch_transfer(self, batch: list[Tensor], index: int) -> list[Tensor]:
        return [batch[0] + 0.1 * torch.randn_like(batch[0])]


class DrawsAfterBackward(Module):
    def on_after_backward(self) -> None:
        torch.rand(1)


class DrawnOnRankOne(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if dist.get_rank() == 1:
            random.random()


class Half(Module):
    """Keeps the masks of a dropout."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.float()
        self.masks: list[Tensor] = []
        self.net.mlp[2].register_forward_hook(self.keep)

    def keep(self, layer: Any, args: tuple[Tensor], output: Tensor) -> None:
        assert output.dtype == torch.float16
        self.masks.append((output == 0) & (args[0] != 0))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        return super().training_step([batch[0].float()], batch_idx)


def fit_in_half(randomness: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    module = Half("vit block")
    torch.manual_seed(SEED)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=100)
    strategy = DDPLossStrategy(randomness=randomness)  # type: ignore[arg-type]
    trainer = make_trainer(strategy, max_epochs=EPOCHS, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    trainer.fit(module)
    assert scaler.get_scale() == 2.0**4, "no step was skipped"
    return module.masks, module.state_dict()


@pytest.mark.parametrize("randomness", ["global", "by_row"])
def test_half_precision_with_a_scaler_has_the_masks_of_one_process(pool: RankPool, randomness: str) -> None:
    ((expected, weights),) = pool.run(1, fit_in_half, randomness)
    of_ranks = pool.run(2, fit_in_half, randomness)
    assert len(expected) == EPOCHS * ROWS // G
    assert any(mask.any() for mask in expected)
    masks = zip(*(masks for masks, _ in of_ranks), strict=True)
    for parts, mask in zip(masks, expected, strict=True):
        assert torch.equal(torch.cat(parts), mask)
    for _, found in of_ranks:
        for key, value in weights.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=2e-3)
