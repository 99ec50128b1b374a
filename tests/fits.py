"""Training as all folders write it: trainers on ranks and in one process, modules, their batches, gradients and weights."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Subset

from benchmarks.trainers import QUIET, make_trainer
from lightning_ddp_losses.testing import RankPool
from tests.oracle import assert_close, own

__all__ = [
    "QUIET",
    "MeanSquare",
    "Trained",
    "assert_fit_as_one_process",
    "fitted",
    "grads_of",
    "listed",
    "make_trainer",
    "mean_over_ranks",
    "said_on_rank_zero",
    "scale_of",
    "scaled",
    "trainer_alone",
    "weights_of",
    "whole",
]


def trainer_alone(**options: Any) -> Trainer:
    """A quiet trainer of this process, without ranks; on ranks it is `make_trainer`."""
    with warnings.catch_warnings():
        # what Lightning tells about GPUs it could have used is not about us
        warnings.filterwarnings("ignore", message="GPU available but not used")
        return Trainer(accelerator="cpu", devices=1, **(QUIET | options))


def fitted(make: Callable[[], LightningModule], data: Any, sizes: Sequence[int]) -> dict[str, Tensor]:
    """Weights after three steps on one batch, of all ranks or in one process; `data` has a row for each row of the batch."""
    on_ranks, module = dist.is_initialized(), make()
    trainer = make_trainer("ddp_losses", max_epochs=3) if on_ranks else trainer_alone(max_epochs=3)
    rows = Subset(data, range(len(data))[own(sizes)]) if on_ranks else data
    trainer.fit(module, DataLoader(rows, batch_size=len(data)))
    return weights_of(module)


def assert_fit_as_one_process(pool: RankPool, make: Callable[[], LightningModule], data: Any) -> None:
    """Fail unless two ranks train as one process does, in float32."""
    (truth,) = pool.run(1, fitted, make, data, [len(data)], distributed=False)
    half = len(data) // 2
    for found in pool.run(2, fitted, make, data, [half, len(data) - half]):
        assert_close(found, truth, rtol=1e-6)


def scaled(init_scale: float = 2.0**4) -> MixedPrecision:
    """The plugin of float16 whose scale falls where a gradient overflows, and does not grow in a few steps."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=100))


def scale_of(trainer: Trainer) -> float:
    """What losses are multiplied by."""
    plugin = trainer.precision_plugin
    assert isinstance(plugin, MixedPrecision)
    assert plugin.scaler is not None
    return plugin.scaler.get_scale()


def listed(batches: Sequence[Any]) -> DataLoader[Any]:
    """A loader of batches that are made already."""
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


class Trained(LightningModule):
    """Modules that `build` makes from one seed, a loss of each batch, and SGD; tests override what they are about."""

    by_hand = False
    seed = 1
    lr = 0.1
    momentum = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = not self.by_hand
        torch.manual_seed(self.seed)
        self.build()

    def build(self) -> None:
        """Make the modules."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


class MeanSquare(Trained):
    """The mean square of what a linear layer gives for the rows of a batch."""

    features = 3
    dtype_of_layer = torch.float32

    def build(self) -> None:
        self.layer = nn.Linear(self.features, 1, dtype=self.dtype_of_layer)

    def training_step(self, batch: Any, index: int) -> Tensor:
        rows = batch if isinstance(batch, Tensor) else batch[0]
        value: Tensor = self.layer(rows).square().mean()
        return value


def whole(tensor: Tensor) -> Tensor:
    """A tensor, put together where it is divided; all ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's state with whole tensors. (A class shard stays this rank's.)"""
    return {name: whole(tensor).detach().clone() for name, tensor in module.state_dict().items()}


def grads_of(module: nn.Module) -> dict[str, Tensor]:
    """The gradients that its parameters have, whole."""
    with_gradient = ((name, p.grad) for name, p in module.named_parameters() if p.grad is not None)
    return {name.removeprefix("module."): whole(grad) for name, grad in with_gradient}


def mean_over_ranks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Means over ranks, as DDP makes them of gradients."""
    found = {}
    for name, tensor in tensors.items():
        total = tensor.clone()
        dist.all_reduce(total)
        found[name] = total / dist.get_world_size()
    return found


@contextlib.contextmanager
def said_on_rank_zero() -> Iterator[list[str]]:
    """Yield what Lightning's `rank_zero_info` says inside the block; nothing on other ranks."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
