"""Which parameters ranks must hold alike, by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.distributed.shard import ClassShard, shard_of

_IGNORED = "_ddp_params_and_buffers_to_ignore"
_LEAST_BYTES = 1 << 20


def is_replicated(trainer: pl.Trainer) -> bool:
    """Whether every rank is to hold every parameter after every step (not under FSDP, nor between local SGD's averages)."""
    strategy = trainer.strategy
    return isinstance(strategy, DDPStrategy) and getattr(strategy, "_model_averager", None) is None


def tracked(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Tensor]:
    """Parameters of the module and of its optimizers that are the same on all ranks by contract, in their order.

    Left out: class shards, what the user told DDP to ignore, and copies that are in neither.
    """
    ignored = frozenset(getattr(module, _IGNORED, ()))
    found: dict[str, Tensor] = {
        name: parameter
        for name, parameter in module.named_parameters()
        if name not in ignored and not getattr(parameter, "_ddp_ignored", False) and _is_comparable(parameter)
    }
    registered = {id(p) for p in module.parameters()}
    return found | {n: p for n, p in optimised(trainer) if id(p) not in registered and _is_comparable(p)}


class Tracked:
    """``tracked``, looked up again only when modules, parameters, their layout or optimizers have changed."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self._tables: list[Any] = []
        self._known: list[list[Any]] = []
        self._kept: list[Any] = []
        self._found: dict[str, Tensor] = {}

    def now(self) -> dict[str, Tensor]:
        """The same dict for as long as its parameters, their shapes, dtypes and which of them train are the same."""
        known, _ = self._look()
        if known != self._known or not self._tables:
            self._tables = [table for inner in self._module.modules() for table in (inner._modules, inner._parameters)]
            self._found = tracked(self._trainer, self._module)
            self._known, self._kept = self._look()  # kept, or another object could get the same id
        return self._found

    def _look(self) -> tuple[list[list[Any]], list[Any]]:
        """Most of it in C: a model has many modules, and this runs in every step."""
        objects = [*chain.from_iterable(map(dict.values, self._tables))]
        for optimizer in self._trainer.optimizers:
            for group in optimizer.param_groups:
                objects += group["params"]
        layout = [(p.shape, p.dtype, p.requires_grad) for p in self._found.values()]
        return [[*map(id, objects)], [*map(len, self._tables)], layout], objects


def optimised(trainer: pl.Trainer) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter of every optimizer, named by its place there."""
    for i, optimizer in enumerate(trainer.optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                yield f"optimizer {i}, group {j}, parameter {k}", parameter


def shards(module: nn.Module) -> dict[str, ClassShard]:
    """The class shards, by name."""
    found = {name: shard_of(parameter) for name, parameter in module.named_parameters()}
    return {name: shard for name, shard in found.items() if shard is not None}


def _is_comparable(parameter: Tensor) -> bool:
    return (
        shard_of(parameter) is None
        and not is_lazy(parameter)
        and type(parameter.data) is Tensor  # a DTensor differs by rank
        and parameter.layout == torch.strided
        and not parameter.is_meta
    )


@dataclass(frozen=True)
class Unit:
    """A piece of one tensor: elements ``start`` to ``stop``."""

    name: str
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """The piece itself."""
        whole, size = tensor.detach(), self.stop - self.start
        return whole if size == whole.numel() else whole.reshape(-1).narrow(0, self.start, size)


def divide(tensors: dict[str, Tensor], most_parts: int) -> list[list[Unit]]:
    """Divide tensors into at most that many parts of about the same number of bytes; small models into fewer."""
    total = sum(t.nbytes for t in tensors.values())
    share = max(-(-total // most_parts), _LEAST_BYTES)
    parts: list[list[Unit]] = [[]]
    room = share
    for name, tensor in tensors.items():
        start, size = 0, tensor.numel()
        while start < size:
            stop = min(size, start + max(1, room // tensor.element_size()))
            parts[-1].append(Unit(name, start, stop))
            room -= (stop - start) * tensor.element_size()
            start = stop
            if room <= 0:
                parts.append([])
                room = share
    return [part for part in parts if part] or [[]]
