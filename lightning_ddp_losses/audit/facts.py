"""What can be known of a module and its trainer by looking: owners, optimizers, batch norms, samplers, metrics."""

from __future__ import annotations

import re
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_ddp_losses.core.forward_patch import synchronises
from lightning_ddp_losses.core.module_search import find_hidden
from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.strategies.ddp_setup import describe_reshuffle
from lightning_ddp_losses.strategies.loss_discovery import find_losses, unwrap

_LOSS_NAME = re.compile(r"(loss|criterion|proxy)(wrapper)?$", re.IGNORECASE)
_ADOPTED = "_adopted_losses."


def is_metric(module: nn.Module) -> bool:
    """Whether the module is a metric of torchmetrics."""
    return any(cls.__module__.startswith("torchmetrics.") and cls.__name__ == "Metric" for cls in type(module).__mro__)


def batch_norms(module: nn.Module) -> dict[str, str]:
    """Class of each batch norm, by name; that of a synchronised one for a layer that this package synchronises."""
    kinds = (nn.modules.batchnorm._BatchNorm,)
    return {
        n: "SyncBatchNorm" if synchronises(m) else type(m).__name__
        for n, m in module.named_modules()
        if n and (isinstance(m, kinds) or "BatchNorm" in type(m).__name__)
    }


def named_parameters(trainer: Trainer, module: LightningModule) -> dict[str, nn.Parameter]:
    """The module's parameters, and those that only an optimizer holds, by the same names in every run.

    Unregistered ones, also where a strategy has adopted them, are named by their place in the optimizer.
    """
    named = {n: p for n, p in module.named_parameters() if not n.startswith(_ADOPTED)}
    known = {id(p) for p in named.values()}
    for i, optimizer in enumerate(trainer.optimizers):
        for j, group in enumerate(optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    named[f"optimizers[{i}].param_groups[{j}][{k}]"] = parameter
    return named


def owners(module: LightningModule, named: dict[str, nn.Parameter]) -> dict[str, str]:
    """``encoder``, or the name of the loss that a parameter belongs to."""
    losses = [loss.name for loss in find_losses(module)]
    losses += [n for n, m in module.named_modules() if n and _LOSS_NAME.search(type(unwrap(m)).__name__)]
    found = {}
    for name in named:
        mine = [loss for loss in losses if name.startswith(f"{loss}.")]
        outside = name.startswith("optimizers[")
        found[name] = min(mine, key=len) if mine else "unregistered" if outside else "encoder"
    return found


def describe(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """The page of facts that do not change during a run."""
    named = named_parameters(trainer, module)
    optimised = {id(p) for o in trainer.optimizers for g in o.param_groups for p in g["params"]}
    elsewhere = {f"callbacks[{i}]": callback for i, callback in enumerate(trainer.callbacks)}  # type: ignore[attr-defined]
    hidden = find_hidden(
        module, trainer.optimizers, {k: v for k, v in elsewhere.items() if type(v).__name__ != "Recorder"}
    )
    aliases = {id(p): f"{path}.{n}" for path, m in hidden.optimised.items() for n, p in m.named_parameters()}
    injecting = trainer._accelerator_connector.use_distributed_sampler
    return {
        "owners": owners(module, named),
        "aliases": {name: aliases[id(p)] for name, p in named.items() if id(p) in aliases},
        "unoptimised": [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in optimised],
        "shards": {name: (shard.start, shard.dim) for name, p in named.items() if (shard := shard_of(p)) is not None},
        "frozen": [n for n, p in module.named_parameters() if not p.requires_grad],
        "modules": {n: f"{type(m).__module__}.{type(m).__qualname__}" for n, m in module.named_modules() if n},
        "loss_modules": [loss.name for loss in find_losses(module)],
        "global_losses": [loss.name for loss in find_losses(module) if loss.sees_global_batch],
        "dropout": [n for n, m in module.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p],
        "automatic": module.automatic_optimization,
        "accumulate": trainer.accumulate_grad_batches,
        "clip": trainer.gradient_clip_val,
        "precision": str(trainer.precision),
        "strategy": type(trainer.strategy).__name__,
        "sync_batchnorm": trainer._accelerator_connector._layer_sync is not None,
        "optimizers": [type(o).__name__ for o in trainer.optimizers],
        "reshuffled": describe_reshuffle(trainer.train_dataloader, injecting=injecting),
    }
