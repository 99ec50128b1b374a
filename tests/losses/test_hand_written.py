"""Whole training loops: torch's DDP written by hand, the loss inside the wrapped module and beside it, and the strategy."""

from __future__ import annotations

import warnings
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

from lightning_ddp_losses import GlobalBatchLoss, GlobalBatchMiner
from lightning_ddp_losses.testing import RankPool
from tests.lightning_ranks import make_trainer
from tests.losses.cases import classes
from tests.losses.harness import CLASSES, DIM, TASK
from tests.oracle import Encoder, Task, assert_close, batches

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
        value: Tensor = self.loss(self.encoder(features), labels)
        return value


def part(rank: int, world: int) -> slice:
    sizes = SIZES[world]
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def trained_alone(loss: str) -> tuple[list[float], dict[str, Tensor]]:
    model, values = Model(loss, wrap=False), []
    optimizer = sgd(model.parameters())
    for features, labels in STEPS:
        value = model(features, labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values, {n.replace("loss.", "loss.loss.", 1): t for n, t in model.state_dict().items()}


def inside(loss: str) -> tuple[list[float], dict[str, Tensor]]:
    """DDP around encoder and loss."""
    own = part(dist.get_rank(), dist.get_world_size())
    model, values = Model(loss, wrap=True), []
    ddp = DistributedDataParallel(model)
    optimizer = sgd(ddp.parameters())
    for features, labels in STEPS:
        value = ddp(features[own], labels[own])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values, model.state_dict()


def beside(loss: str) -> tuple[list[float], dict[str, Tensor]]:
    """DDP around the encoder; the loss in a DDP of its own where it has parameters."""
    own = part(dist.get_rank(), dist.get_world_size())
    model, values = Model(loss, wrap=True), []
    encoder = DistributedDataParallel(model.encoder)
    learns = any(p.requires_grad for p in model.loss.parameters())
    judge = DistributedDataParallel(model.loss) if learns else model.loss
    optimizer = sgd(model.parameters())
    for features, labels in STEPS:
        value = judge(encoder(features[own]), labels[own])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values, model.state_dict()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("loop", [inside, beside])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loop_without_lightning_is_one_process(pool: RankPool, world_size: int, loop: Any, loss: str) -> None:
    expected, state = trained_alone(loss)
    for values, ours in pool.run(world_size, loop, loss):
        assert values == pytest.approx(expected, rel=1e-9)
        assert_close(ours, state)


class Module(LightningModule):
    def __init__(self, loss: str) -> None:
        super().__init__()
        model = Model(loss, wrap=True)
        self.encoder, self.loss = model.encoder, model.loss
        self.values: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        value: Tensor = self.loss(self.encoder(batch[0]), batch[1])
        self.values.append(value.item())
        self.log("loss", value)
        return value

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


def fit(loss: str, strategy: str, **options: Any) -> tuple[list[float], dict[str, Tensor], list[str]]:
    own = part(dist.get_rank(), dist.get_world_size())
    data = [(features[own], labels[own]) for features, labels in STEPS]
    module = Module(loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(strategy, **options).fit(module, DataLoader(data, batch_size=None))
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


class Unchanged(Module):
    """A module that knows nothing of ranks; the strategy makes its loss global."""

    def __init__(self, loss: str) -> None:
        super().__init__(loss)
        self.loss = Model(loss, wrap=False).loss


def fit_unchanged(loss: str) -> tuple[list[float], dict[str, Tensor]]:
    from lightning_ddp_losses import DDPLossStrategy

    own = part(dist.get_rank(), dist.get_world_size())
    data = [(features[own], labels[own]) for features, labels in STEPS]
    module = Unchanged(loss)
    make_trainer(DDPLossStrategy(global_batch="auto")).fit(module, DataLoader(data, batch_size=None))
    return module.values, dict(module.state_dict())


@pytest.mark.parametrize("loss", LOSSES)
def test_the_strategy_makes_the_losses_of_an_unchanged_module_global(pool: RankPool, loss: str) -> None:
    expected, state = trained_alone(loss)
    for values, ours in pool.run(2, fit_unchanged, loss):
        assert values == pytest.approx(expected, rel=1e-9)
        assert_close(ours, {name.replace("loss.loss.", "loss.", 1): tensor for name, tensor in state.items()})


def miner_and_classes(world_size: int, rank: int, wrap: bool) -> list[float]:
    """ArcFace weighted by mined tuples, the miner global too."""
    torch.manual_seed(2)
    encoder, loss, miner = Encoder(TASK).double(), LOSSES["elements"]().double(), miners.BatchHardMiner()
    own = part(rank, world_size) if wrap else slice(None)
    judge, find = (GlobalBatchLoss(loss), GlobalBatchMiner(miner)) if wrap else (loss, miner)
    parameters = [*encoder.parameters(), *loss.parameters()]
    optimizer, values = sgd(parameters), []
    for features, labels in STEPS:
        embeddings = encoder(features[own])
        value = judge(embeddings, labels[own], find(embeddings, labels[own]))
        optimizer.zero_grad()
        value.backward()
        for parameter in parameters if wrap else []:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        optimizer.step()
        values.append(value.item())
    return values


def mined_on_ranks() -> list[float]:
    return miner_and_classes(dist.get_world_size(), dist.get_rank(), True)


@pytest.mark.parametrize("world_size", [2, 3])
def test_mined_weights_train_as_in_one_process(pool: RankPool, world_size: int) -> None:
    expected = miner_and_classes(1, 0, False)
    for values in pool.run(world_size, mined_on_ranks):
        assert values == pytest.approx(expected, rel=1e-9)


def checkpointed(name: str) -> list[Tensor]:
    """A loss inside an activation checkpoint, plainly and so; the last rank has no rows, and no graph."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = 0 if rank == world - 1 else 3
    loss = {
        "L1": lambda: GlobalBatchLoss(torch.nn.L1Loss()),
        "NTXent": lambda: GlobalBatchLoss(pml.NTXentLoss()),
        "in tiles": lambda: GlobalBatchLoss(pml.ContrastiveLoss(), mode="rows"),
        "in row chunks": lambda: GlobalBatchLoss(pml.CircleLoss(), mode="rows"),
    }[name]()
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
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
    return found


@pytest.mark.parametrize("name", ["L1", "NTXent", "in tiles", "in row chunks"])
def test_a_checkpointed_loss_with_a_rank_without_rows(pool: RankPool, name: str) -> None:
    for value, grad, value_again, grad_again in pool.run(3, checkpointed, name):
        assert torch.equal(value, value_again)
        assert torch.equal(grad, grad_again)
