"""What happens to a hidden loss: the same refusal on every rank, or a place under ``_adopted_losses``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_ddp_losses.core.module_search import Hidden, find_hidden
from lightning_ddp_losses.core.precision import PrecisionKeeper
from lightning_ddp_losses.distributed import handshake, raw_collectives
from lightning_ddp_losses.distributed.shard import shard_of
from lightning_ddp_losses.errors import HiddenLossError
from lightning_ddp_losses.strategies import ddp_setup
from lightning_ddp_losses.strategies.loss_discovery import FoundLoss
from lightning_ddp_losses.strategies.sharded_parameters import divide

NAME = "_adopted_losses"


def find(trainer: pl.Trainer, module: nn.Module, optimizers: Iterable[Optimizer], *, adopt: bool) -> Hidden:
    """Search the module, the callbacks and the data module for hidden losses; refuse those that will not be adopted.

    Raises:
        HiddenLossError: on every rank, with the paths.
        RankMismatchError: on every rank, when ranks would adopt different modules.

    Communication: one frame.
    """
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    elsewhere: dict[str, Any] = {f"callbacks[{i}] ({type(c).__name__})": c for i, c in enumerate(callbacks)}
    elsewhere["datamodule"] = getattr(trainer, "datamodule", None)
    hidden = find_hidden(module, optimizers, elsewhere)
    named = [f"{type(m).__name__} at {path}" for path, m in hidden.optimised.items()]
    refused = hidden.loose if adopt else named + hidden.loose
    must_match = {"modules to adopt": "; ".join(named) or "none"} if adopt else {}
    everyone = [json.loads(p) for p in handshake.all_gather("hidden losses", must_match, json.dumps(refused).encode())]
    if any(everyone):
        raise _refusal(everyone, adopt=adopt)
    return hidden


def adopt(
    module: nn.Module,
    hidden: Hidden,
    precision: Precision,
    device: torch.device,
    ddp: DistributedDataParallel | None,
) -> nn.ModuleDict:
    """Register the optimised hidden modules under ``module._adopted_losses``, on the device, divided or equal on all ranks.

    Communication: one broadcast; what ``divide`` needs. (That all ranks adopt the same was agreed in ``find``.)
    """
    adopted = nn.ModuleDict()
    for path, found in hidden.optimised.items():
        key = _key(path)
        adopted[key if key not in adopted else f"{key}_{len(adopted)}"] = found
    divide(adopted)  # before its values are remembered
    keeper = PrecisionKeeper()
    keeper.remember([adopted])
    precision.convert_module(adopted)
    keeper.restore()
    adopted.to(device)
    module.add_module(NAME, adopted)
    if ddp is not None:  # it reads the buffers of the live module anew each step
        ddp.parameters_to_ignore |= {f"{NAME}.{name}" for name, _ in adopted.named_buffers()}
    raw_collectives.broadcast_([tensor for _, tensor in ddp_setup.named_tensors(adopted) if shard_of(tensor) is None])
    rank_zero_info(f"Adopted as submodules: {', '.join(hidden.optimised)}.")
    return adopted


def as_losses(adopted: nn.ModuleDict) -> list[FoundLoss]:
    """The adopted modules as the strategy knows losses."""
    return [FoundLoss(f"{NAME}.{key}", module, learnable=True, owned=True) for key, module in adopted.items()]


def _key(path: str) -> str:
    return re.sub(r"\W+", "_", path.removeprefix("self.")).strip("_")


def _refusal(everyone: list[list[str]], *, adopt: bool) -> HiddenLossError:
    same = all(own == everyone[0] for own in everyone)
    if adopt:
        fix = "Only modules that can be reached by attributes, containers, closures or callbacks can be adopted."
    else:
        fix = (
            "They would not be moved, synchronised or saved. Assign them to attributes of the LightningModule (nn.ModuleList or "
            "nn.ModuleDict for several), or pass DDPLossStrategy(adopt=True)."
        )
    return HiddenLossError(
        "parameters in an optimizer",
        expected="parameters of registered submodules",
        got="; ".join(everyone[0]) if same else None,
        ranks=None if same else ["; ".join(own) or "none hidden" for own in everyone],
        fix=fix,
        collective=True,
    )
