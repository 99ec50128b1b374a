"""What this rank's training batches hold: rows, labels, and a short hash of each row, read once for all checks.

Batches on the host are read in every step (up to 64 rows, whole or, of wide ones, 32 numbers); those on an accelerator only now
and then, because reading waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_ddp_losses.callbacks.runner import Session
from lightning_ddp_losses.distributed.fingerprint import combine, hash_rows
from lightning_ddp_losses.distributed.raw_collectives import host_memory

SKETCH = 64  # smallest hashes of an epoch's rows
BUCKETS = 16  # of labels
_ROWS, _COLUMNS = 64, 32
_WIDE = 1024  # numbers in a row, of which only some are read
_LABELED = 1024  # rows whose labels are counted
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
        counts: Labels of this epoch by bucket, of the first rows of each batch.
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
        self._edge = _MASK  # no larger hash is among them

    def see(self, batch: Any, index: int) -> None:
        """Read a batch, once."""
        epoch = self._session.trainer.current_epoch
        if self._last == (epoch, index):
            return
        self._last = (epoch, index)
        if epoch != self._epoch:
            self._epoch = epoch
            self._forget()
        leaves = [leaf for leaf in _leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
        self.rows = leaves[0].shape[0] if leaves else 0
        self.total_rows += self.rows
        self.number += 1
        self.content = self.distinct = 0
        on_host = all(leaf.device.type == "cpu" for leaf in leaves)
        if self.rows and (on_host or index < _FIRST or index % _EVERY == 0):
            self._read(batch, leaves)
        self.first.setdefault(epoch, self.content)

    def _read(self, batch: Any, leaves: list[Tensor]) -> None:
        hashes = row_hashes(leaves, self.rows, _ROWS)
        self.distinct = len(set(hashes))
        self.content = combine(hashes) & _MASK or 1
        self.seen += len(hashes)
        smallest = self._smallest
        for value in [each & ~3 for each in hashes if each <= self._edge]:
            smallest[value] = smallest.get(value, 0) + 1
        if len(smallest) > SKETCH:
            kept = sorted(smallest)[:SKETCH]
            self._smallest, self._edge = {value: smallest[value] for value in kept}, kept[-1] | 3
        labels = labels_of(batch, self.rows)
        if labels is not None:
            for label in (labels if self.rows <= _LABELED else labels[:_LABELED]).tolist():
                # neighbouring classes go to different buckets, and class 0 and 16 to the same
                self.counts[label % BUCKETS] += 1

    def sketch(self) -> list[int]:
        """Rows read in this epoch, and the smallest of their hashes, each with how often it came (up to 3) in its low bits."""
        return [self.seen, *(value | min(count, 3) for value, count in sorted(self._smallest.items()))]

    def batch_end(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to leave."""


def _leaves(batch: Any) -> Iterator[Any]:
    """All that a batch holds; a plain list of tensors needs no walk."""
    for part in batch if type(batch) in (tuple, list) else (batch,):
        yield from (part,) if isinstance(part, Tensor) else tree_leaves(part)


def row_hashes(leaves: list[Tensor], rows: int, most: int | None = None) -> list[int]:
    """A hash (63 bits) of each of the first rows (all of them, unless ``most``), over all tensors that have that many."""
    looked = rows if most is None else min(rows, most)
    hashes = [0] * looked
    for leaf in leaves:
        if leaf.shape[0] == rows and leaf.numel() and leaf.layout == torch.strided and not leaf.is_complex():
            table = leaf.as_subclass(Tensor)  # what transforms make of a tensor may be a class of its own
            if looked < rows:
                table = table[:looked]
            width = table.numel() // looked
            if width > _WIDE:
                table = table.flatten(1).index_select(1, _chosen(width, table.device))
            hashes = hash_rows(host_memory(table.cpu()).reshape(looked, -1), hashes)
    return [value & _MASK for value in hashes]


@functools.lru_cache(maxsize=64)
def _chosen(width: int, device: torch.device) -> Tensor:
    """The same columns at every call, spread irregularly: pictures have empty borders."""
    return (torch.arange(_COLUMNS, device=device) * 2654435761 % width).unique()  # type: ignore[no-untyped-call,no-any-return]


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
