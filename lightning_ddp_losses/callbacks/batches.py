"""What this rank's training batches hold: rows, labels, and a short hash of each row, read once for all checks.

Batches on the host are read whole (up to 64 rows, 64 numbers of each); those on an accelerator only now and then, because
reading waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_ddp_losses.callbacks.session import Session

__all__ = ["SKETCH", "Batches", "labels_of", "row_hashes"]

SKETCH = 64  # smallest hashes of an epoch's rows
BUCKETS = 16  # of labels
_ROWS, _COLUMNS = 64, 32
_FIRST, _EVERY = 16, 50  # on an accelerator
_LABELS = ("labels", "label", "targets", "target", "y")
_MASK = (1 << 63) - 1


class Batches:
    """What was read; one for all checks of a session.

    Attributes:
        rows: Of the latest batch.
        content: A hash of it; 0 where it was not read.
        distinct: Different rows in it.
        first: Of each epoch, the content of its first batch.
        counts: Labels of this epoch by bucket.
        seen: Rows read in this epoch.
        total_rows: Of the fit.
        number: Batches of the fit.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last: tuple[int, int] | None = None
        self.rows = self.content = self.distinct = self.total_rows = self.number = 0
        self.first: dict[int, int] = {}
        self._epoch = -1
        self._forget()

    def _forget(self) -> None:
        self.seen = 0
        self.counts = [0] * BUCKETS
        self._smallest: dict[int, int] = {}

    def see(self, batch: Any, index: int) -> None:
        """Read a batch, once."""
        epoch = self._session.trainer.current_epoch
        if self._last == (epoch, index):
            return
        self._last = (epoch, index)
        if epoch != self._epoch:
            self._epoch = epoch
            self._forget()
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
        self.rows = leaves[0].shape[0] if leaves else 0
        self.total_rows += self.rows
        self.number += 1
        self.content = self.distinct = 0
        on_host = all(leaf.device.type == "cpu" for leaf in leaves)
        if self.rows and (on_host or index < _FIRST or index % _EVERY == 0):
            self._read(batch, leaves)
        self.first.setdefault(epoch, self.content)

    def _read(self, batch: Any, leaves: list[Tensor]) -> None:
        hashes = row_hashes(leaves, self.rows).tolist()
        self.distinct = len(set(hashes))
        self.content = hash(tuple(hashes)) & _MASK or 1
        self.seen += len(hashes)
        smallest = self._smallest
        for value in (each & _MASK & ~3 for each in hashes):
            smallest[value] = smallest.get(value, 0) + 1
        if len(smallest) > SKETCH:
            self._smallest = {value: smallest[value] for value in sorted(smallest)[:SKETCH]}
        labels = labels_of(batch, self.rows)
        if labels is not None:
            # neighbouring classes go to different buckets, and class 0 and 16 to the same
            for bucket, count in enumerate(torch.bincount(labels.cpu().remainder(BUCKETS), minlength=BUCKETS).tolist()):
                self.counts[bucket] += count

    def sketch(self) -> list[int]:
        """Rows read in this epoch, and the smallest of their hashes, each with how often it came (up to 3) in its low bits."""
        return [self.seen, *(value | min(count, 3) for value, count in sorted(self._smallest.items()))]

    def batch_end(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to leave."""


def row_hashes(leaves: list[Tensor], rows: int) -> Tensor:
    """(at most 64,) int64: a hash of each of the first rows, over all tensors that have that many."""
    looked = min(rows, _ROWS)
    total = torch.zeros(looked, dtype=torch.int64)
    for place, leaf in enumerate(leaves):
        if leaf.shape[0] == rows and leaf.layout == torch.strided and not leaf.is_complex():
            total += _hash(leaf.detach()[:looked].reshape(looked, -1), place)
    return _mixed(total)


def _hash(table: Tensor, place: int) -> Tensor:
    width = table.shape[1]
    if width > _COLUMNS:
        # the same columns at every call, spread irregularly: pictures have empty borders
        columns = (torch.arange(_COLUMNS, device=table.device) * 2654435761 % width).unique()  # type: ignore[no-untyped-call]
        table = table[:, columns]
    if table.is_floating_point():
        bits = table.float().contiguous().view(torch.int32) if table.dtype != torch.float64 else table.contiguous()
        words = bits.view(torch.int64) if bits.dtype == torch.float64 else bits.long()
    else:
        words = table.long()
    weights = _mixed(torch.arange(1, words.shape[1] + 1) + (place << 32)) | 1
    return (_mixed(words.cpu() * weights) * weights).sum(1)


def _mixed(bits: Tensor) -> Tensor:
    bits = bits ^ (bits >> 29)
    bits = bits * -4658895280553007687
    bits = bits ^ (bits >> 32)
    return bits * -7046029254386353131


def labels_of(batch: Any, rows: int) -> Tensor | None:
    """The class labels of a batch: a named entry, or the second of a tuple; one integer per row."""
    found: Any = None
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in _LABELS if name in batch), None)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        found = batch[1]
    usable = isinstance(found, Tensor) and found.ndim == 1 and found.shape[0] == rows
    if not usable or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool:
        return None
    return torch.Tensor.detach(found)
