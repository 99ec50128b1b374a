"""Checkpoints of a module that ``fully_shard`` divides: one file with whole tensors, or a folder into which each rank writes its parts.

The file is what one process or ``DDPLossStrategy`` would have written, so it moves between all of them. The folder (``fsdp_folder``) is
``torch.distributed.checkpoint``'s, with the keys of Lightning's ``ModelParallelStrategy``; a class shard lies there as a part of its whole,
where it says itself, so that any number of ranks can read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_ddp_losses.distributed import process_groups

METADATA = "meta.pt"
"""The file of a folder that holds what belongs to no tensor; Lightning's name."""


def is_folder(path: Path) -> bool:
    """Say whether each rank wrote its part of a checkpoint."""
    return (path / METADATA).is_file()


# ---------------------------------------------------------------------- one file


def on_rank_zero(value: Any) -> Any:
    """Return the whole of a ``DTensor`` on rank 0, elsewhere a tensor of its shape without memory; anything else as it is.

    Communication: one gather for a ``DTensor``.
    """
    if not isinstance(value, DTensor):
        return value
    whole = value.full_tensor().detach()
    return whole.cpu() if process_groups.rank() == 0 else torch.empty_like(whole, device="meta")


def own_part(value: Any, like: Tensor) -> Any:
    """Return this rank's part of a whole tensor, where ``like`` is divided; anything else as it is. Communication: none."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    device = like.to_local().device
    # every rank has read the whole and keeps its part; nobody sends
    return distribute_tensor(value.to(device), like.device_mesh, like.placements, src_data_rank=None)


def own_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved optimizer's state with this rank's part of what belongs to divided parameters."""
    entries = dict(state["state"])
    for index, parameter in enumerate(parameters_in_order(optimizer)):
        entry = entries.get(index)
        if entry is not None:
            entries[index] = {key: own_part(value, parameter) for key, value in entry.items()}
    return {**state, "state": entries}


def parameters_in_order(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield an optimizer's parameters in the order of its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def named_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state with the names of parameters in place of their numbers."""
    names = names_of(module, optimizer)
    state = optimizer.state_dict()
    groups = [{**group, "params": list(map(names.__getitem__, group["params"]))} for group in state["param_groups"]]
    return {"state": {names[i]: entry for i, entry in state["state"].items()}, "param_groups": groups}


def names_of(module: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the name of each parameter of an optimizer, in the order of its groups."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names.get(id(p), f"parameter {i} of the optimizer") for i, p in enumerate(parameters_in_order(optimizer))]
