"""What can be read off a DataLoader without drawing from it: sizes, samplers, who shuffles, who knows the epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_ddp_losses.distributed.fingerprint import hash_text

_READ = 1 << 16  # indices of an order
_DEPTH = 3


def loaders(trainer: pl.Trainer, *, validation: bool = False) -> list[DataLoader[Any]]:
    """The DataLoaders as they run, with Lightning's samplers."""
    loop = trainer.fit_loop.epoch_loop.val_loop if validation else trainer.fit_loop
    combined = loop._combined_loader
    return [found for found in (combined.flattened if combined is not None else []) if isinstance(found, DataLoader)]


def is_iterable(loader: DataLoader[Any]) -> bool:
    """Whether no sampler decides which rows a rank gets."""
    return isinstance(loader.dataset, IterableDataset)


def batch_sizes(loader: DataLoader[Any]) -> tuple[int, int]:
    """Rows of this rank's full batches and of its last one; zeros where they cannot be known."""
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler or is_iterable(loader):
        return 0, 0
    try:
        rows = len(batches.sampler)  # type: ignore[arg-type]
    except TypeError:
        return 0, 0
    size = batches.batch_size
    rest = 0 if batches.drop_last else rows % size
    return size, rest or size


def reshuffled(loader: DataLoader[Any]) -> str:
    """The class of a sampler that makes batches which belong together, and that Lightning shuffles all the same.

    Known by a batch size or a number of rows per class of its own; torch's samplers have none.
    """
    sampler = loader.sampler
    if not isinstance(sampler, DistributedSamplerWrapper) or not sampler.shuffle:
        return ""
    inner = getattr(sampler.dataset, "_sampler", None)
    torchs = type(inner).__module__.startswith("torch.")
    structured = any(hasattr(inner, name) for name in ("m_per_class", "batch_size", "samples_per_class"))
    return type(inner).__name__ if structured and not torchs else ""


def drawn_order(loader: DataLoader[Any]) -> int:
    """A number that must be equal on all ranks, which cut their parts out of one order; 0 where nothing can be said."""
    sampler = loader.sampler
    if isinstance(sampler, DistributedSamplerWrapper):
        drawn = getattr(sampler.dataset, "_sampler_list", None)
        head = drawn[:_READ] if drawn else []
        if head and all(isinstance(index, int) for index in head) and len(set(head)) == len(head):
            return hash_text(repr(head), 62)
        return 0  # drawn with replacement, every rank's part is as good as another
    if type(sampler) is DistributedSampler and sampler.shuffle:
        return hash_text(f"{sampler.seed} {sampler.epoch}", 62)
    return 0


def repeated_rows(loader: DataLoader[Any]) -> int:
    """Rows that a padding sampler hands out twice, all ranks together."""
    sampler = loader.sampler
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last or len(sampler) * sampler.num_replicas == 0:
        return 0
    try:
        rows = len(sampler.dataset)  # type: ignore[arg-type]
    except TypeError:
        return 0
    return max(0, len(sampler) * sampler.num_replicas - rows)


def shuffling_samplers(loader: DataLoader[Any]) -> dict[str, Any]:
    """Samplers that shuffle by epoch, by path, also those inside other samplers."""
    found: dict[str, Any] = {}
    queue = [("sampler", loader.sampler, 0), ("batch_sampler", loader.batch_sampler, 0)]
    seen: set[int] = set()
    for path, thing, depth in queue:
        if id(thing) in seen or thing is None:
            continue
        seen.add(id(thing))
        if hasattr(thing, "set_epoch") and getattr(thing, "shuffle", False) is True and hasattr(thing, "epoch"):
            found[path] = thing
        if depth < _DEPTH:
            queue += [(f"{path}.{name}", value, depth + 1) for name, value in _parts(thing)]
    return found


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    attributes = getattr(thing, "__dict__", {}).items()
    for name, value in itertools.islice(attributes, 64):
        if hasattr(value, "__iter__") and hasattr(value, "__dict__") and not isinstance(value, Dataset):
            yield name, value
