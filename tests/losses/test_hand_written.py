"""Whole training loops: torch's DDP written by hand, the loss inside the wrapped module and beside it, and the strategy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_ddp_losses import DDPLossStrategy, GlobalBatchLoss, GlobalBatchMiner
from lightning_ddp_losses.testing import RankPool
from tests.each_rank import each_rank
from tests.fits import make_trainer
from tests.losses.cases import classes
from tests.losses.harness import CLASSES, DIM, TASK
from tests.oracle import Encoder, Task, assert_close, batches, normal, own

STEPS = batches(Task(rows=12, features=TASK.features, dim=DIM, classes=CLASSES, steps=3))
SIZES = {1: [12], 2: [4, 8], 3: [1, 4, 7]}
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
LOSSES: dict[str, Any] = {
    "elements": partial(pml.ArcFaceLoss, scale=4, **classes),
    "rows": pml.MultiSimilarityLoss,
    "rows with a parameter": partial(pml.MarginLoss, learn_beta=True, num_classes=CLASSES, nu=0.1),
    "replicated": partial(pml.ProxyAnchorLoss, **classes),
    "several": lambda: pml.MultipleLosses([pml.SupConLoss(), pml.ArcFaceLoss(scale=2, **classes)]),
}


class Model(nn.Module):
    """Encoder and loss; `inside`: forward returns the loss."""

    def __init__(self, loss: str, *, wrap: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.encoder = Encoder(TASK).double()
        inner = LOSSES[loss]().double()
        self.loss = GlobalBatchLoss(inner) if wrap else inner

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.encoder(features), labels)


def trained(
    model: Model, call: Callable[[Tensor, Tensor], Tensor], part: slice = slice(None)
) -> tuple[list[float], Any]:
    """The value of each step, and the state at the end."""
    optimizer, values = sgd(model.parameters()), []
    for features, labels in STEPS:
        value = call(features[part], labels[part])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values, model.state_dict()


def trained_alone(loss: str) -> tuple[list[float], dict[str, Tensor]]:
    model = Model(loss, wrap=False)
    values, state = trained(model, model)
    return values, state


def inside(loss: str) -> tuple[list[float], dict[str, Tensor]]:
    """DDP around encoder and loss."""
    model = Model(loss, wrap=True)
    return trained(model, DistributedDataParallel(model), own(SIZES[dist.get_world_size()]))


def beside(loss: str) -> tuple[list[float], dict[str, Tensor]]:
    """DDP around the encoder; the loss in a DDP of its own where it has parameters."""
    model = Model(loss, wrap=True)
    encoder = DistributedDataParallel(model.encoder)
    learns = any(p.requires_grad for p in model.loss.parameters())
    judge = DistributedDataParallel(model.loss) if learns else model.loss
    return trained(model, lambda rows, labels: judge(encoder(rows), labels), own(SIZES[dist.get_world_size()]))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("loop", [inside, beside])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loop_without_lightning_is_one_process(pool: RankPool, world_size: int, loop: Any, loss: str) -> None:
    expected, state = trained_alone(loss)
    for values, ours in pool.run(world_size, loop, loss):
        assert values == pytest.approx(expected, rel=1e-9)
        assert_close(ours, state)


class Module(LightningModule):
    """Its loss is wrapped, or the strategy makes it global."""

    def __init__(self, loss: str, wrap: bool = True) -> None:
        super().__init__()
        model = Model(loss, wrap=wrap)
        self.encoder, self.loss = model.encoder, model.loss
        self.values: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        value: Tensor = self.loss(self.encoder(batch[0]), batch[1])
        self.values.append(value.item())
        self.log("loss", value)
        return value

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


def fit(
    loss: str, strategy: str | dict[str, Any], wrap: bool = True
) -> tuple[list[float], dict[str, Tensor], list[str]]:
    part = own(SIZES[dist.get_world_size()])
    data = [(features[part], labels[part]) for features, labels in STEPS]
    module = Module(loss, wrap)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(strategy if isinstance(strategy, str) else DDPLossStrategy(**strategy))
        trainer.fit(module, DataLoader(data, batch_size=None))
    return module.values, dict(module.state_dict()), [str(w.message) for w in caught if "rows of" in str(w.message)]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("strategy", ["ddp_losses", "ddp"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_uneven_rows_under_lightning_are_one_process(pool: RankPool, world_size: int, strategy: str, loss: str) -> None:
    expected, state = trained_alone(loss)
    for values, ours, warned in pool.run(world_size, fit, loss, strategy):
        assert values == pytest.approx(expected, rel=1e-9)
        assert_close(ours, state)
        assert not warned, "uneven rows are right in a global loss"


@pytest.mark.parametrize("loss", LOSSES)
def test_the_strategy_makes_the_losses_of_an_unchanged_module_global(pool: RankPool, loss: str) -> None:
    expected, state = trained_alone(loss)
    for values, ours, _ in pool.run(2, fit, loss, {"global_batch": "auto"}, wrap=False):
        assert values == pytest.approx(expected, rel=1e-9)
        assert_close(ours, state)


def mined(encoder: Any, loss: Any, miner: Any, rows: Tensor, labels: Tensor) -> Tensor:
    """A loss weighted by mined tuples."""
    embeddings = encoder(rows)
    value: Tensor = loss(embeddings, labels, miner(embeddings, labels))
    return value


def mined_on_ranks() -> tuple[list[float], dict[str, Tensor]]:
    model, miner = Model("elements", wrap=True), GlobalBatchMiner(miners.BatchHardMiner())
    encoder, loss = DistributedDataParallel(model.encoder), DistributedDataParallel(model.loss)
    return trained(model, partial(mined, encoder, loss, miner), own(SIZES[dist.get_world_size()]))


@pytest.mark.parametrize("world_size", [2, 3])
def test_mined_weights_train_as_in_one_process(pool: RankPool, world_size: int) -> None:
    model = Model("elements", wrap=False)
    expected, state = trained(model, partial(mined, model.encoder, model.loss, miners.BatchHardMiner()))
    for values, ours in pool.run(world_size, mined_on_ranks):
        assert values == pytest.approx(expected, rel=1e-9)
        assert_close(ours, state)


CHECKPOINTED: dict[str, Callable[[], nn.Module]] = {
    "L1": lambda: GlobalBatchLoss(torch.nn.L1Loss()),
    "NTXent": lambda: GlobalBatchLoss(pml.NTXentLoss()),
    "in tiles": lambda: GlobalBatchLoss(pml.ContrastiveLoss(), mode="rows"),
    "in row chunks": lambda: GlobalBatchLoss(pml.CircleLoss(), mode="rows"),
}


@pytest.mark.parametrize("name", CHECKPOINTED)
@each_rank(3)
def test_a_checkpointed_loss_with_a_rank_without_rows(name: str) -> None:
    """A loss inside an activation checkpoint, plainly and so; the last rank has no rows, and no graph."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = 0 if rank == world - 1 else 3
    loss = CHECKPOINTED[name]()
    values = normal(rows, 4, seed=rank)
    target = torch.zeros_like(values) if name == "L1" else torch.arange(rows) % 2
    found = []
    for is_checkpointed in (False, True):
        x = values.clone()
        if rows:
            x.requires_grad_()
        run = partial(checkpoint, loss, use_reentrant=False) if is_checkpointed else loss
        value = run(x, target)
        value.backward()
        found += [value.detach(), torch.zeros_like(x) if x.grad is None else x.grad]
    value, grad, value_again, grad_again = found
    assert torch.equal(value, value_again)
    assert torch.equal(grad, grad_again)
