"""Private names of torch, Lightning, torchmetrics and pytorch-metric-learning: every import or read of one goes through here.

Each function says why no public name serves, and in which release the private one was read. Libraries above torch are imported
inside functions, so that this layer needs torch alone. Overriding a private method and subclassing stay where they are; the layer
test lists them.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, dropout, loss

# ---------------------------------------------------------------------- torch 2.13

BATCH_NORM_TYPES: tuple[type[nn.Module], ...] = (batchnorm._BatchNorm,)
"""The base of all batch norms; torch has no public one."""

NORM_TYPES: tuple[type[nn.Module], ...] = (batchnorm._NormBase,)
"""The base of all norms with running statistics (batch norm, instance norm); torch has no public one."""

DROPOUT_TYPES: tuple[type[nn.Module], ...] = (dropout._DropoutNd,)
"""The base of all dropouts; torch has no public one."""

TORCH_LOSS_TYPES: tuple[type[nn.Module], ...] = (loss._Loss,)
"""The base of ``torch.nn``'s losses; torch has no public one."""

DISABLED_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
"""What a subclass of Tensor takes as ``__torch_function__`` when its operations shall be plain ones; torch's documentation names it so."""


def tensor_version(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place; autograd's own counter, which has no public reader."""
    return tensor._version


def child_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the slots of submodules; ``children()`` leaves out repeated ones and takes ten times as long."""
    return module._modules


def parameter_slots(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the slots of a module's own parameters, which may be assigned a tensor for the length of a call."""
    return module._parameters


def without_parameter(module: nn.Module, name: str) -> nn.Module:
    """Return a shallow copy of a module that lacks one of its parameters; a copy shares its dict of slots, which has no public setter."""
    bare = copy.copy(module)
    bare._parameters = {key: value for key, value in module._parameters.items() if key != name}
    return bare


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile``'s wrapper, or the module itself."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def is_ddp_ignored(tensor: Tensor) -> bool:
    """Say whether DDP was told to leave a tensor alone; it marks the tensor itself."""
    return bool(getattr(tensor, "_ddp_ignored", False))


def graph_task_id() -> int:
    """Return the number of the backward that runs in this thread, -1 outside of one."""
    return torch._C._current_graph_task_id()


def saved_by_node(node: Any, name: str, default: Any = None) -> Any:
    """Return what an autograd node saved in forward (``_saved_<name>``); torch documents these for built-in nodes only in passing."""
    return getattr(node, f"_saved_{name}", default)


def operator_schema(function: Any) -> Any:
    """Return the schema of an operator that a dispatch mode sees; torch gives it no public name."""
    return function._schema


# ---------------------------------------------------------------------- Lightning 2.6


def injects_distributed_sampler(trainer: Any) -> bool:
    """Say whether the trainer replaces samplers (``use_distributed_sampler``); it keeps the option in a private part."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside a ``LightningOptimizer``, or the optimizer itself."""
    return getattr(optimizer, "_optimizer", optimizer)


def start_method(strategy: Any) -> str | None:
    """Return how a strategy starts its processes (``popen``, ``spawn``, ``fork``); None where it does not say."""
    method: str | None = getattr(strategy, "_start_method", None)
    return method


def use_existing_processes_(strategy: Any, timeout: Any) -> None:
    """Let a strategy start no processes and wait ``timeout`` for other ranks; Lightning takes both in constructors only."""
    if hasattr(strategy, "_start_method"):
        strategy._start_method = "popen"  # the one that leaves existing processes alone
    if hasattr(strategy, "_timeout"):
        strategy._timeout = timeout


def syncs_batch_norm(trainer: Any) -> bool:
    """Say whether the trainer was asked to synchronise batch norm; it keeps the plugin in a private part."""
    return trainer._accelerator_connector._layer_sync is not None


def attached_trainer(module: Any) -> Any:
    """Return the trainer that a module is attached to, None without one; ``LightningModule.trainer`` raises there."""
    return getattr(module, "_trainer", None)


def is_made_by_command_line() -> bool:
    """Say whether LightningCLI builds the module now; it hands the plain config to ``save_hyperparameters`` in a private context."""
    from lightning.pytorch.core.mixins import hparams_mixin

    return hparams_mixin._given_hyperparameters.get() is not None
