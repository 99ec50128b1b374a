"""Which rows go into which global batch: the same for any number of ranks.

`GlobalBatchSampler` deals training batches to the ranks. Held-out rows have a cut of their own, in which none counts twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from pytorch_metric_learning.samplers import MPerClassSampler
from torch.utils.data import DistributedSampler

from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import ConfigurationError, InputError


def class_batches(labels: np.ndarray, m_per_class: int, batch_size: int) -> MPerClassSampler:
    """A sampler of row numbers in batches of `batch_size` that hold `m_per_class` rows of each of their classes.

    An epoch has as many rows as there are, in whole batches. A class of fewer rows repeats some of them.

    Args:
        labels: (N,) integers.
        m_per_class: Rows of a class in a batch.
        batch_size: Rows of the global batch.
    """
    check_classes(labels, m_per_class, batch_size)
    rows = len(labels) // batch_size * batch_size
    return MPerClassSampler(labels, m_per_class, batch_size, rows)


class HeldOutSlices(DistributedSampler[list[int]]):
    """This rank's slice of every held-out batch, in rank order; one list of row numbers per step.

    Every row exactly once, in order, in batches of `batch_size` rows at most that do not depend on the number of ranks;
    the ranks' slices differ by one row at most. (With one row per rank, batches are larger and no rank gets an empty one.)
    To be given as ``DataLoader(dataset, sampler=...,
    batch_size=None)``: a `DistributedSampler` is the one thing that Lightning evaluates with on several ranks without
    advising against it.

    Args:
        size: Rows in the data set.
        batch_size: Rows of the global batch.
    """

    def __init__(self, size: int, batch_size: int) -> None:
        super().__init__(range(size), process_groups.world_size(), process_groups.rank(), shuffle=False)  # type: ignore[arg-type]
        self.size, self.batch_size = size, batch_size

    def __len__(self) -> int:
        """Number of steps, equal on every rank."""
        full, rest = divmod(self.size, self.batch_size)
        return max(1, full + (rest > 0 and self.batch_size > self.num_replicas))

    def __iter__(self) -> Iterator[list[int]]:
        """Row numbers of this rank, one list per step."""
        for batch in np.array_split(np.arange(self.size), len(self)):
            yield np.array_split(batch, self.num_replicas)[self.rank].tolist()


def check_cut(size: int, batch_size: int, world_size: int, *, shuffle: bool) -> None:
    """Raise unless every rank gets its share of every batch.

    Args:
        size: Rows in the data set.
        batch_size: Rows of the global batch.
        world_size: Number of ranks.
        shuffle: Training, with batches of exactly `batch_size` rows, or evaluation.

    Raises:
        ConfigurationError: `batch_size` is not a positive multiple of `world_size`.
        InputError: Fewer rows than a training batch, or than ranks.
    """
    if batch_size < 1 or batch_size % world_size:
        below = batch_size // world_size * world_size
        choices = " or ".join(str(choice) for choice in (below, below + world_size) if choice > 0)
        raise ConfigurationError(
            "batch_size (rows of the global batch, over all ranks)",
            expected=f"a positive multiple of the {world_size} ranks",
            got=batch_size,
            fix=f"Set data.init_args.batch_size to {choices}, or change trainer.devices.",
        )
    if size < (batch_size if shuffle else world_size):
        part, least = (
            ("training", f"batch_size={batch_size}") if shuffle else ("held-out", f"one for each of {world_size} ranks")
        )
        fix = "Lower batch_size, or give more rows." if shuffle else "Hold out more rows, or use fewer ranks."
        raise InputError(f"{part} rows", expected=f"at least {least}", got=size, fix=fix)


def check_classes(labels: np.ndarray, m_per_class: int, batch_size: int) -> None:
    """Raise unless `labels` have the classes that fill a batch with `m_per_class` rows each.

    Raises:
        ConfigurationError: `m_per_class` does not divide `batch_size`, or there are too few classes.
    """
    what = f"m_per_class (rows of a class in the global batch of {batch_size})"
    if m_per_class < 1 or batch_size % m_per_class:
        raise ConfigurationError(what, expected=f"a divisor of {batch_size}", got=m_per_class)
    classes = len(np.unique(labels))
    if classes * m_per_class < batch_size:
        raise ConfigurationError(
            what,
            expected=f"at least {-(-batch_size // classes)}, as there are {classes} classes",
            got=m_per_class,
            fix="Raise m_per_class, or lower batch_size.",
        )


def stratified_split(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split row numbers into train and held-out rows, class by class.

    Args:
        labels: (N,) integers.
        fraction: Share of every class that is held out; a class of one row stays in training.
        seed: Fixes the choice, the same on every rank.

    Returns:
        Sorted row numbers (train, held out) without overlap.
    """
    if not 0 < fraction < 1:
        raise ConfigurationError("held_out (share of every class)", expected="between 0 and 1", got=fraction)
    random = np.random.default_rng(seed)
    held_out = []
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        count = min(max(1, round(fraction * len(rows))), len(rows) - 1)
        held_out.append(rows[:count])
    chosen = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(labels)), chosen, assume_unique=True), chosen
