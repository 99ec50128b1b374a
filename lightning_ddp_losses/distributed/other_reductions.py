"""Modules of this process whose gradients may end as something else than a mean over ranks.

A value over all ranks is made for a mean. A strategy and an accumulation window contain the model, and make up for another reduction. A
``global_mean`` in another loop has no way to the model: under ``fully_shard`` its node is not reliably in the graph. So the calls that
choose another reduction are noted, and a value that would need a guess is refused. So are losses and metrics, in the same loops.
"""

from __future__ import annotations

import gc
import weakref

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed import process_groups

_SETTERS = (
    (FSDPModule, "set_gradient_divide_factor"),
    (FSDPModule, "set_force_sum_reduction_for_comms"),
    (DistributedDataParallel, "register_comm_hook"),
)
noted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules for which a reduction was chosen. Most programs have none."""


def watch_setters() -> None:
    """Note the modules whose reduction is chosen from now on, and those that a program has made before its import. Call it once."""
    for cls, name in _SETTERS:
        compat.note_calls(cls, name, noted.add)
    if process_groups.is_distributed():
        noted.update(each for each in gc.get_objects() if issubclass(type(each), (FSDPModule, DistributedDataParallel)))


def other_reduction() -> str:
    """Return the reductions that are no mean, of the modules that live in this process. Empty without one."""
    if not _others():
        return ""
    gc.collect()  # modules are parts of circles, and outlive their last use
    return ", ".join(sorted(_others()))


def _others() -> set[str]:
    return {_described(module) for module in list(noted)} - {""}


def _described(module: nn.Module) -> str:
    """Return the reduction of one module. Empty for a mean."""
    if isinstance(module, DistributedDataParallel):
        hook = next(iter(compat.foreign_comm_hooks(module)), None)
        return "" if hook is None else f"comm hook {hook} of DistributedDataParallel"
    if isinstance(module, FSDPModule):
        for factor, _, mesh, _ in compat.sharded_reductions(module):
            if factor is not None and factor != len(process_groups.mesh_ranks(mesh)):
                return f"set_gradient_divide_factor({factor:g}) of {type(module).__name__}"
    return ""
