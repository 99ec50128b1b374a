"""Rows of arrays as global batches cut by rank: what the two data modules share.

Training batches are ``(x, labels)``; held-out ones ``(x, labels, indices)``, the indices being positions in the held-out set:
with them the ranks' results are put back into the order of one process, and no row counts twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from lightning_ddp_losses.cli.sampling import HeldOutSlices, check_classes, check_cut, class_batches
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.samplers import GlobalBatchSampler

Array = np.ndarray[Any, Any]


class Rows(Dataset[tuple[Tensor, ...]]):
    """Some rows of two arrays, fetched a batch at a time (a memory map is read only where it is asked for).

    Args:
        features: (N, ...) numbers.
        labels: (N,) integers.
        rows: Row numbers that belong to this set, (n,).
        dtype: Floating dtype of what comes out.
        with_indices: Whether a batch also carries its positions in this set.
    """

    def __init__(
        self, features: Array, labels: Array, rows: Array, *, dtype: torch.dtype, with_indices: bool = False
    ) -> None:
        self.features, self.labels, self.rows = features, labels, rows
        self.dtype, self.with_indices = dtype, with_indices

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, positions: Sequence[int]) -> tuple[Tensor, ...]:
        """Batch of the rows at `positions`: features (b, ...) of `dtype`, labels (b,) int64 and, if asked for, (b,) int64 positions."""
        rows = self.rows[positions]
        batch = (
            torch.as_tensor(np.asarray(self.features[rows]), dtype=self.dtype),
            torch.as_tensor(np.asarray(self.labels[rows]), dtype=torch.int64),
        )
        return (*batch, torch.as_tensor(positions, dtype=torch.int64)) if self.with_indices else batch

    __getitems__ = __getitem__  # under this name PyTorch asks for the rows of a batch sampler


def _as_fetched(batch: Any) -> Any:
    """Collate nothing: a batch comes out of `Rows` in one piece."""
    return batch


class BatchedArrayDataModule(LightningDataModule):
    """Two arrays, a split and a global batch size; a subclass sets `features`, `labels`, `train_rows` and `held_out_rows`.

    Args:
        batch_size: Rows of the GLOBAL batch, over all ranks.
        seed: Fixes the split and, with the epoch, the order of training.
        num_workers: Processes that read ahead on each rank.
        m_per_class: Rows of each class in a training batch; None: rows at random, each once an epoch.
    """

    inputs_name = "raw features"
    """What the inputs are called beside the embeddings in the report."""

    features: Array
    labels: Array
    held_out_features: Array
    held_out_labels: Array
    train_rows: Array
    held_out_rows: Array

    def __init__(self, batch_size: int, seed: int, num_workers: int, m_per_class: int | None) -> None:
        super().__init__()
        self.batch_size, self.seed, self.num_workers, self.m_per_class = batch_size, seed, num_workers, m_per_class

    @property
    def num_classes(self) -> int:
        """Largest label of either part, plus one."""
        return 1 + int(max(self.labels[self.train_rows].max(), self.held_out_labels[self.held_out_rows].max()))

    def check(self, world_size: int) -> None:
        """Find out before anything is written whether this many ranks can share the batches.

        Raises:
            ConfigurationError: The global batch does not divide into the ranks, or into classes.
            InputError: Too few rows.
        """
        check_cut(len(self.train_rows), self.batch_size, world_size, shuffle=True)
        if self.m_per_class is not None:
            check_classes(self.labels[self.train_rows], self.m_per_class, self.batch_size)
        check_cut(len(self.held_out_rows), self.batch_size, world_size, shuffle=False)

    @property
    def held_out_bytes(self) -> int:
        """Size of all held-out rows in their file's dtype."""
        return len(self.held_out_rows) * int(self.held_out_features[:1].nbytes)

    def held_out(self) -> tuple[Tensor, Tensor]:
        """All held-out rows in order: features (n, ...) and labels (n,)."""
        x, labels, _ = self._rows(train=False)[range(len(self.held_out_rows))]
        return x, labels

    def _rows(self, *, train: bool) -> Rows:
        # in double precision the trainer widens what it gets, which is too late for a float64 file read as float32
        double = self.trainer is not None and str(self.trainer.precision).startswith("64")
        dtype = torch.float64 if double else torch.get_default_dtype()
        if train:
            return Rows(self.features, self.labels, self.train_rows, dtype=dtype)
        return Rows(self.held_out_features, self.held_out_labels, self.held_out_rows, dtype=dtype, with_indices=True)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """This rank's slices of the global batches, which differ by epoch."""
        self.check(process_groups.world_size())
        rows, G = self._rows(train=True), self.batch_size
        labels, m_per_class = self.labels[self.train_rows], self.m_per_class
        source = RandomSampler(rows) if m_per_class is None else class_batches(labels, m_per_class, G)
        batches = GlobalBatchSampler.batches(source, G, drop_last=True, seed=self.seed)
        return DataLoader(rows, batch_sampler=batches, collate_fn=_as_fetched, **self._workers())

    def _held_out_loader(self) -> DataLoader[tuple[Tensor, ...]]:
        self.check(process_groups.world_size())
        rows = self._rows(train=False)
        cut = HeldOutSlices(len(rows), self.batch_size)
        return DataLoader(rows, sampler=cut, batch_size=None, **self._workers())

    def _workers(self) -> dict[str, Any]:
        return {"num_workers": self.num_workers, "persistent_workers": self.num_workers > 0}

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """This rank's slices of the held-out rows, each row on one rank only."""
        return self._held_out_loader()

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """The held-out rows again: a data set of its own for testing is another data module."""
        return self._held_out_loader()

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """The held-out rows."""
        return self._held_out_loader()
