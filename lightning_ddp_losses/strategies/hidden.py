"""Trainable modules that a LightningModule uses but has not registered: in a list, a dict, a closure, a callback.

Lightning does not move, synchronise or save them. *Hidden* is what an optimizer holds (or what runs with gradients inside
``training_step``) without being in ``module.parameters()``; copies that nobody optimises are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_ddp_losses.core.module_search import unregistered_modules


@dataclass(frozen=True)
class Hidden:
    """What the search found.

    Attributes:
        optimised: Unregistered modules whose parameters an optimizer holds, by path.
        idle: Other unregistered modules with trainable parameters, by path.
        loose: Optimised parameters of no module that the search could reach, described.
    """

    optimised: dict[str, nn.Module]
    idle: dict[str, nn.Module]
    loose: list[str]


def find_hidden(module: nn.Module, optimizers: Iterable[Optimizer], elsewhere: Mapping[str, Any]) -> Hidden:
    """Search the module's attributes, and other roots, for unregistered trainable modules.

    Args:
        module: The LightningModule.
        optimizers: Its optimizers.
        elsewhere: Other objects to search, by the name that paths shall start with (callbacks, data module).
    """
    registered = {id(p) for p in module.parameters()}
    strangers = {
        id(p): f"a parameter of shape {tuple(p.shape)} in optimizer {i}, group {j}"
        for i, optimizer in enumerate(optimizers)
        for j, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if id(p) not in registered
    }
    optimised: dict[str, nn.Module] = {}
    idle: dict[str, nn.Module] = {}
    for path, found in unregistered_modules(module, elsewhere):
        own = [p for p in found.parameters() if id(p) not in registered]
        if any(id(p) in strangers for p in own):
            optimised[path] = found
            for p in own:
                strangers.pop(id(p), None)
        elif any(p.requires_grad for p in own):
            idle[path] = found
    return Hidden(optimised, idle, list(strangers.values()))
