"""Training as all folders write it: modules of Lightning, their batches, gradients and weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader


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
