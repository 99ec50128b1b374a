"""Parameters that must be equal on all ranks, by name, and slices of them, a part of which is compared in each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.core import lightning_compat, torch_compat
from lightning_ddp_losses.distributed.shard import ClassShard, shard_of
from lightning_ddp_losses.strategies import ModelParallelLossStrategy

DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"
"""The attribute in which a module lists parameters and buffers that DDP ignores; torch documents this name."""

_MIN_PART_BYTES = 1 << 20


def is_replicated(trainer: Trainer) -> bool:
    """Return whether ``replicated_parameters`` must be equal after every step.

    This is False for other FSDP strategies, and for local SGD, which averages parameters only at intervals.
    """
    strategy = trainer.strategy
    if isinstance(strategy, ModelParallelLossStrategy):
        return True
    return isinstance(strategy, DDPStrategy) and not lightning_compat.averages_models(strategy)


def divided_parameters(trainer: Trainer) -> frozenset[str]:
    """Return the names of parameters that are divided over the ranks, including parameters that are currently gathered."""
    strategy = trainer.strategy
    return strategy.divided_parameters if isinstance(strategy, ModelParallelLossStrategy) else frozenset()


def replicated_parameters(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
    """Return the parameters of the module and of its optimizers that must be equal on all ranks, in order.

    Class shards, parameters that ``fully_shard`` divides, parameters that DDP ignores, and copies that are neither in the module nor in an
    optimizer are excluded.
    """
    ignored = divided_parameters(trainer).union(getattr(module, DDP_IGNORES, ()))
    registered: list[tuple[str, Tensor]] = [
        (name, p) for name, p in module.named_parameters() if name not in ignored and not torch_compat.is_ddp_ignored(p)
    ]
    # additional parameters of optimizers must also be equal
    of_module = {id(parameter) for parameter in module.parameters()}
    unregistered = [(place, p) for place, p in optimizer_parameters(trainer) if id(p) not in of_module]
    return {name: parameter for name, parameter in registered + unregistered if _is_comparable(parameter)}


class ReplicatedParameters:
    """Caches ``replicated_parameters`` until modules, parameters, their layout or optimizers change.

    Attributes:
        is_current: False at the start and end of a batch. The next lookup then compares them.
        is_replicated: Whether they must be equal after every step. Set by ``current``, like ``divided``.
        divided: Names of parameters that are divided over the ranks.
    """

    is_current = is_replicated = False
    divided: frozenset[str] = frozenset()

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module = trainer, module
        self._slots: list[Any] = []
        self._known: list[list[Any]] = []
        self._kept_alive: list[Any] = []
        self._found: dict[str, Tensor] = {}

    def current(self) -> dict[str, Tensor]:
        """Return the parameters, as the same dict until a parameter, its shape, its dtype or its ``requires_grad`` changes."""
        if self.is_current:
            return self._found
        known, _ = self._structure()
        if known != self._known or not self._slots:
            self._slots = []
            for inner in self._module.modules():
                self._slots += (torch_compat.child_modules(inner), torch_compat.parameter_slots(inner))
            self._found = replicated_parameters(self._trainer, self._module)
            self.is_replicated = is_replicated(self._trainer)
            self.divided = divided_parameters(self._trainer)
            # keep the objects alive, otherwise a new object could have the same id
            self._known, self._kept_alive = self._structure()
        self.is_current = True
        return self._found

    def _structure(self) -> tuple[list[list[Any]], list[Any]]:
        """Return ids, sizes and layouts that change with the structure, and the objects. Runs in every step, mostly in C code."""
        objects = [*chain.from_iterable(map(dict.values, self._slots))]
        for optimizer in self._trainer.optimizers:
            for group in optimizer.param_groups:
                objects += group["params"]
        layout = [(p.shape, p.dtype, p.requires_grad) for p in self._found.values()]
        return [[*map(id, objects)], [*map(len, self._slots)], layout], objects


def optimizer_parameters(trainer: Trainer) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter of every optimizer, named by its position in the optimizer."""
    for i, optimizer in enumerate(trainer.optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                yield f"optimizer {i}, group {j}, parameter {k}", parameter


def class_shards(module: nn.Module) -> dict[str, ClassShard]:
    """Return the class shards of a module, by the name of their parameter."""
    shards = {name: shard_of(parameter) for name, parameter in module.named_parameters()}
    return {name: shard for name, shard in shards.items() if shard is not None}


def _is_comparable(parameter: Tensor) -> bool:
    return (
        shard_of(parameter) is None
        and not is_lazy(parameter)
        # excludes tensor subclasses that wrap other tensors, because a DTensor differs between ranks
        and not hasattr(parameter.data, "__tensor_flatten__")
        and parameter.layout == torch.strided
        and not parameter.is_meta
    )


# ---------------------------------------------------------------------- slices


@dataclass(frozen=True)
class TensorSlice:
    """Names a piece of one tensor: elements ``start`` to ``stop``."""

    name: str
    start: int
    stop: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the piece of the tensor as a view."""
        full = tensor.detach()
        size = self.stop - self.start
        if size == full.numel():
            return full
        return full.reshape(-1).narrow(0, self.start, size)


def dense_gradients(
    slices: Iterable[TensorSlice], parameters: Mapping[str, Tensor]
) -> Iterator[tuple[TensorSlice, Tensor]]:
    """Yield slices with their piece of the gradient, for parameters with a dense gradient."""
    for each in slices:
        grad = parameters[each.name].grad
        if grad is not None and not grad.is_sparse and grad.numel():
            yield each, each.of(grad)


def split_by_bytes(tensors: dict[str, Tensor], max_parts: int) -> list[list[TensorSlice]]:
    """Split tensors into at most ``max_parts`` parts of about equal size in bytes. Small models have fewer parts."""
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    part_bytes = max(-(-total_bytes // max_parts), _MIN_PART_BYTES)
    parts: list[list[TensorSlice]] = [[]]
    free_bytes = part_bytes
    for name, tensor in tensors.items():
        start, size = 0, tensor.numel()
        while start < size:
            # add as many elements as fit into the part, but at least one
            stop = min(size, start + max(1, free_bytes // tensor.element_size()))
            parts[-1].append(TensorSlice(name, start, stop))
            free_bytes -= (stop - start) * tensor.element_size()
            start = stop
            if free_bytes <= 0:
                parts.append([])
                free_bytes = part_bytes
    return [part for part in parts if part] or [[]]


class RotatingSlices:
    """Selects the slices of a step. Parts are selected in turn, so that successive steps cover all tensors.

    Args:
        max_parts: Largest number of parts.
    """

    def __init__(self, max_parts: int) -> None:
        self._max_parts = max_parts
        self._tensors: dict[str, Tensor] = {}
        self._parts: list[list[TensorSlice]] = [[]]

    def turn(self, tensors: dict[str, Tensor], number: int, *, is_full: bool = False) -> list[TensorSlice]:
        """Return the slices of one step, or all slices. A dict that differs from the previous one is split first."""
        if tensors is not self._tensors:
            self._tensors = tensors
            self._parts = split_by_bytes(tensors, self._max_parts)
        return [*chain.from_iterable(self._parts)] if is_full else self._parts[number % len(self._parts)]
