"""Say so when Lightning has put a shuffle of its own around a sampler that meant its order.

Under DDP, Lightning wraps any training sampler in a ``DistributedSamplerWrapper`` that shuffles, and builds a custom batch
sampler anew around a shuffling ``DistributedSampler``. Batches with M rows per class are lost; nothing tells.

And refuse a DataLoader that cuts what a global sampler deals into other batches than the sampler means.
"""

from __future__ import annotations

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_ddp_losses.errors import ConfigurationError, format_error


def reshuffled(dataloader: object, *, injecting: bool = True) -> str | None:
    """What Lightning did to the order of a structured sampler, as an error text; None where it left the order alone.

    Args:
        dataloader: When Lightning has resolved samplers.
        injecting: Lightning's ``use_distributed_sampler``; without it, a shuffle around a batch sampler is the user's own.
    """
    if not isinstance(dataloader, DataLoader):
        return None
    sampler, batch_sampler = dataloader.sampler, dataloader.batch_sampler
    if isinstance(sampler, DistributedSamplerWrapper) and sampler.shuffle:
        inner = getattr(sampler.dataset, "_sampler", sampler)
        return _text(type(inner).__name__, "shuffled over all its batches", "global_batch_size")
    if injecting and batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        held = getattr(batch_sampler, "__dict__", {}).values()
        if any(isinstance(value, DistributedSampler) and value.shuffle for value in held):
            return _text(type(batch_sampler).__name__, "built anew around a shuffling DistributedSampler", "")
    return None


def warn_if_reshuffled(dataloader: object, *, injecting: bool = True) -> None:
    """Warn on rank zero when Lightning replaced the order of a structured sampler.

    Args:
        dataloader: As ``Strategy.process_dataloader`` gets it, when Lightning has resolved samplers.
        injecting: Lightning's ``use_distributed_sampler``.
    """
    text = reshuffled(dataloader, injecting=injecting)
    if text is not None:
        rank_zero_warn(text)


def _text(name: str, got: str, size: str) -> str:
    arguments = ", ".join(filter(None, [f"{name}(...)", size]))
    return format_error(
        f"{name} under DDP",
        expected="its own order",
        got=f"{got} by Lightning, which destroys batches that belong together (M per class, hierarchical, weighted)",
        fix=f"Write DataLoader(..., batch_sampler=GlobalBatchSampler.batches({arguments})), or set "
        "Trainer(use_distributed_sampler=False) where the sampler itself gives each rank its own rows.",
    )


def refuse_other_batches(dataloader: object) -> None:
    """Refuse a DataLoader whose batches are not those of its global sampler.

    Such a sampler is known by its ``local_batch_size``; it cannot see what the DataLoader makes of its indices.

    Args:
        dataloader: As ``Strategy.process_dataloader`` gets it.

    Raises:
        ConfigurationError: another batch size, or ``drop_last`` on the DataLoader, which can leave ranks with different
            numbers of batches.
    """
    if not isinstance(dataloader, DataLoader):
        return
    # under a batch sampler of its own, dataloader.sampler is torch's placeholder; in prediction the sampler is inside
    sampler = getattr(dataloader.batch_sampler, "sampler", dataloader.sampler)
    expected = getattr(sampler, "local_batch_size", None)
    if expected is None or not isinstance(sampler, DistributedSampler):
        return
    name = type(sampler).__name__
    size = getattr(dataloader.batch_sampler, "batch_size", None)
    if size != expected:
        raise ConfigurationError(
            f"batch_size of the DataLoader around {name}",
            expected=f"{expected}, as in {name}(sampler, local_batch_size={expected})",
            got=repr(size),
            fix="Give both the same number of rows per rank.",
        )
    if getattr(dataloader.batch_sampler, "drop_last", False) and not sampler.drop_last:
        raise ConfigurationError(
            f"drop_last of the DataLoader around {name}",
            expected=f"drop_last=True on the {name}, which leaves out the same batch on every rank",
            got="drop_last=True on the DataLoader alone",
            fix=f"Write {name}(sampler, {expected}, drop_last=True).",
        )
