"""Cuts one-process batches by rank: the union over ranks of step k's rows is the batch that one process would take at step k.

It must exist because Lightning replaces every training sampler that is not a `DistributedSampler`, and because the samplers it
puts there pad (a held-out sample counts twice) and deal the rows out in another order for every number of ranks.
Legend: `W` ranks, `B` rows of the global batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import DistributedSampler

from lightning_ddp_losses import groups
from lightning_ddp_losses.errors import ConfigurationError, InputError, format_error

__all__ = ["BatchSlices", "check_cut", "stratified_split"]


class BatchSlices(DistributedSampler[list[int]]):
    """This rank's contiguous slice of every global batch, in rank order; one list of row numbers per step.

    To be given as `DataLoader(dataset, sampler=..., batch_size=None)`: the dataset is asked for a whole slice at once.

    * ``shuffle=True`` (training): batches of exactly `batch_size` rows from a permutation of (seed, epoch); the ragged last
      one is dropped; every rank gets `batch_size / W` rows.
    * ``shuffle=False`` (evaluation): every row exactly once, in order, in batches of `batch_size` to twice that many rows
      that do not depend on W; the ranks' slices differ by one row at most.

    Args:
        size: Rows in the data set.
        batch_size: Rows of the global batch.
        shuffle: Training or evaluation cut.
        seed: Together with the epoch, fixes the order of training.

    Raises:
        ConfigurationError: The global batch does not divide into the ranks.
        InputError: Fewer rows than a training batch, or than ranks.
    """

    def __init__(self, size: int, batch_size: int, *, shuffle: bool, seed: int = 0) -> None:
        world = groups.world_size()
        check_cut(size, batch_size, world, shuffle=shuffle)
        super().__init__(range(size), num_replicas=world, rank=groups.rank(), shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        self.size, self.batch_size = size, batch_size

    def __len__(self) -> int:
        """Number of steps in an epoch, equal on every rank."""
        return max(1, self.size // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Row numbers of this rank, one list per step."""
        if self.shuffle:
            # a sequence as seed: (seed, epoch) = (0, 1) and (1, 0) are different orders
            order = np.random.default_rng((self.seed, self.epoch)).permutation(self.size)
            batches = np.split(order[: len(self) * self.batch_size], len(self))
        else:
            batches = np.array_split(np.arange(self.size), len(self))
        for batch in batches:
            yield np.array_split(batch, self.num_replicas)[self.rank].tolist()


def check_cut(size: int, batch_size: int, world_size: int, *, shuffle: bool) -> None:
    """Raise unless every rank gets its share of every batch; arguments as for `BatchSlices`.

    Raises:
        ConfigurationError: `batch_size` is not a positive multiple of `world_size`.
        InputError: Fewer rows than a training batch, or than ranks.
    """
    if batch_size < 1 or batch_size % world_size:
        below = batch_size // world_size * world_size
        choices = " or ".join(str(choice) for choice in (below, below + world_size) if choice > 0)
        raise ConfigurationError(
            format_error(
                "batch_size (rows of the global batch, over all ranks)",
                expected=f"a positive multiple of the {world_size} ranks",
                got=batch_size,
                fix=f"Set data.init_args.batch_size to {choices}, or change trainer.devices.",
            )
        )
    if size < (batch_size if shuffle else world_size):
        part, least = (
            ("training", f"batch_size={batch_size}") if shuffle else ("held-out", f"one for each of {world_size} ranks")
        )
        fix = "Lower batch_size, or give more rows." if shuffle else "Hold out more rows, or use fewer ranks."
        raise InputError(format_error(f"{part} rows", expected=f"at least {least}", got=size, fix=fix))


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
        raise ConfigurationError(
            format_error("held_out (share of every class)", expected="between 0 and 1", got=fraction)
        )
    random = np.random.default_rng(seed)
    held_out = []
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        count = min(max(1, round(fraction * len(rows))), len(rows) - 1)
        held_out.append(rows[:count])
    chosen = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(labels)), chosen, assume_unique=True), chosen
