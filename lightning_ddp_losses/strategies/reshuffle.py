"""Say so when Lightning has put a shuffle of its own around a sampler that meant its order.

Under DDP, Lightning wraps any training sampler in a ``DistributedSamplerWrapper`` that shuffles, and builds a custom batch
sampler anew around a shuffling ``DistributedSampler``. Batches with M rows per class are lost; nothing tells.
"""

from __future__ import annotations

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_ddp_losses.errors import format_error

__all__ = ["warn_if_reshuffled"]


def warn_if_reshuffled(dataloader: object, *, injecting: bool = True) -> None:
    """Warn on rank zero when Lightning replaced the order of a structured sampler.

    Args:
        dataloader: As ``Strategy.process_dataloader`` gets it, when Lightning has resolved samplers.
        injecting: Lightning's ``use_distributed_sampler``; without it, a shuffle around a batch sampler is the user's own.
    """
    if not isinstance(dataloader, DataLoader):
        return
    sampler, batch_sampler = dataloader.sampler, dataloader.batch_sampler
    if isinstance(sampler, DistributedSamplerWrapper) and sampler.shuffle:
        inner = getattr(sampler.dataset, "_sampler", sampler)
        _warn(type(inner).__name__, "shuffled over all its batches", "global_batch_size")
    elif injecting and batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        held = getattr(batch_sampler, "__dict__", {}).values()
        if any(isinstance(value, DistributedSampler) and value.shuffle for value in held):
            _warn(type(batch_sampler).__name__, "built anew around a shuffling DistributedSampler", "")


def _warn(name: str, got: str, size: str) -> None:
    arguments = ", ".join(filter(None, [f"{name}(...)", size]))
    rank_zero_warn(
        format_error(
            f"{name} under DDP",
            expected="its own order",
            got=f"{got} by Lightning, which destroys batches that belong together (M per class, hierarchical, weighted)",
            fix=f"Write DataLoader(..., batch_sampler=GlobalBatchSampler.batches({arguments})), or set "
            "Trainer(use_distributed_sampler=False) where the sampler itself gives each rank its own rows.",
        )
    )
