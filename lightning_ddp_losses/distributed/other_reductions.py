"""Modules of this process whose gradients may be reduced to something other than a mean over ranks.

A value over all ranks is computed for a mean. A strategy and an accumulation window contain the model, and compensate for another
reduction. A ``global_mean`` in another loop cannot find the model: under ``fully_shard`` its node is not reliably in the graph. Therefore
calls that choose another reduction are recorded, and a value that would require a guess is rejected. The same applies to losses and metrics
in such loops.
"""

from __future__ import annotations

import gc
import weakref

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.distributed import process_groups

_SETTERS = (
    (FSDPModule, "set_gradient_divide_factor"),
    (FSDPModule, "set_force_sum_reduction_for_comms"),
    (DistributedDataParallel, "register_comm_hook"),
)
noted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules for which a reduction was chosen. Empty in most programs."""


def watch_setters() -> None:
    """Record modules whose reduction is chosen from now on, and modules that were created before this import. Call it once."""
    for cls, name in _SETTERS:
        torch_compat.note_calls(cls, name, noted.add)
    if process_groups.is_distributed():
        noted.update(each for each in gc.get_objects() if issubclass(type(each), (FSDPModule, DistributedDataParallel)))


def other_reduction() -> str:
    """Return the reductions other than a mean of the live modules in this process, or an empty text."""
    if not _others():
        return ""
    gc.collect()  # modules are parts of reference cycles, and outlive their last use
    return ", ".join(sorted(_others()))


def _others() -> set[str]:
    return {_reduction_of(module) for module in list(noted)} - {""}


def _reduction_of(module: nn.Module) -> str:
    """Return the reduction of one module, or an empty text for a mean."""
    if isinstance(module, DistributedDataParallel):
        return torch_compat.foreign_comm_hook(module)
    if isinstance(module, FSDPModule):
        for factor, _, mesh, _ in torch_compat.sharded_reductions(module):
            if factor is not None and factor != len(process_groups.mesh_ranks(mesh)):
                return f"set_gradient_divide_factor({factor:g}) of {type(module).__name__}"
    return ""
