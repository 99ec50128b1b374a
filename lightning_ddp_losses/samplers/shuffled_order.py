"""Epochs in an order that every rank computes from the seed: a permutation of the rows, or the rows as they come.

The permutation of epoch ``e`` is ``torch.randperm`` from ``seed + e``. It is kept as a tensor (4 bytes a row). Each batch becomes a list
when it is read. A resumed epoch starts at its place at once.

Legend: ``n`` rows of the data set, ``W`` ranks, ``G`` rows of a global batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from lightning_ddp_losses.core.random_state import NUMPY_SEEDS
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.fingerprint import hash_bytes
from lightning_ddp_losses.distributed.raw_collectives import host_memory
from lightning_ddp_losses.samplers.global_draw import EpochPlace, GlobalDraw
from lightning_ddp_losses.samplers.seeded_draw import share

_INT32_ROWS = 1 << 31


class Permutation(Sampler[int]):
    """The numbers 0 to n - 1, in another order for each seed.

    Args:
        length: Number of rows, n.
    """

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    @property
    def dtype(self) -> torch.dtype:
        """The smallest integer dtype for a row number."""
        return torch.int32 if self.length < _INT32_ROWS else torch.int64

    def order(self, seed: int) -> Tensor:
        """Return the order for a seed.

        Returns:
            (n,), int32 if the numbers fit.
        """
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(self.length, generator=generator, dtype=self.dtype)


class NaturalOrder(Permutation):
    """The numbers 0 to n - 1 as they come, for every seed."""

    def order(self, seed: int) -> Tensor:
        """Return the numbers in ascending order."""
        return torch.arange(self.length, dtype=self.dtype)


@dataclass(frozen=True)
class LocalBatches(Sequence[list[int]]):
    """This rank's part of each batch of an epoch. A batch is made when it is read.

    Attributes:
        order: Row numbers of the epoch, all ranks together.
        global_batch_size: Rows of a global batch, G. The last batch may have fewer.
        world_size: Number of ranks.
        rank: Number of this rank.
    """

    order: Tensor
    global_batch_size: int
    world_size: int
    rank: int

    def __len__(self) -> int:
        return math.ceil(len(self.order) / self.global_batch_size)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = number * self.global_batch_size
        batch = self.order[start : start + self.global_batch_size]
        return batch[share(len(batch), self.world_size, self.rank)].tolist()


class ShuffledDraw(GlobalDraw):
    """The batches of an order that follows from the seed alone.

    Args:
        sampler: Order of the rows.
        global_batch_size: Rows of a global batch, G.
        local_batch_size: Rows of a rank's batch. G is W times this.
        drop_last: Leave out a last batch of fewer than G rows.
        seed: Seed of epoch 0. Epoch ``e`` has ``seed + e``. None: 0, or the seed of a loaded state.
        title: Name in errors.
    """

    source: Permutation

    def _first_seed(self) -> int:
        return 0  # ranks exchange none

    def _draw_together(self, epoch: int) -> Sequence[list[Any]]:
        W, rank = process_groups.world_size(), process_groups.rank()
        G = self._global_rows()
        assert G is not None
        place = (epoch, W, rank)
        if self._kept is None or self._kept[0] != place:
            order = self.source.order((self._offer() + epoch) % NUMPY_SEEDS)[: self._epoch_rows(G)]
            digest = hash_bytes(host_memory(order)).to_bytes(8, "little", signed=True)
            self._kept = (place, digest, LocalBatches(order, G, W, rank))
        _, digest, batches = self._kept
        # seed and length give the order. Its hash finds ranks with other releases of torch
        handshake.all_gather(self.title, {**self._must_match(epoch), "order": digest.hex()})
        return batches

    def _first_batch(self, place: EpochPlace | None) -> int:
        G = self._global_rows()
        assert G is not None
        rows = self._epoch_rows(G)
        self._sizes = [min(G, rows - start) for start in range(0, rows, G)] if place else ()
        return super()._first_batch(place)
