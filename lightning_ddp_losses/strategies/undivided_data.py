"""Iterable data sets that every rank reads as a whole: W ranks see the rows of one, W times.

Samplers divide numbers, and an iterable data set has none: unless it asks for the rank, all ranks get the same rows. Hashes of the first
batches of an epoch are compared in a handshake that is there anyway, that of backward or that at the end of an evaluation.

Equal batches prove it only where they change: two of them in a row, with 8 different rows in all. A constant batch (a toy, a benchmark,
overfitting on purpose) is no evidence, and neither are rows that a rank augments for itself. Where a check that looks for it (F71) is at
work, that one decides what comes of it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_losses.core.faults import FAULTS
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.fingerprint import MAX_ROWS, batch_leaves, combine, row_hashes
from lightning_ddp_losses.errors import InputError

_FAULT = "F71"
_MIN_SAME_BATCHES, _MIN_SAME_ROWS = 2, 8
_LOOKED_AT = 4  # batches of an epoch
_SEEN = struct.Struct("<QI")  # content of a batch, its different rows


class SameRows:
    """Counts how long pairs of ranks have been given the same batches.

    Batches that do not change from step to step prove nothing (a toy, or overfitting on purpose).
    """

    def __init__(self) -> None:
        self._evidence: dict[tuple[int, int], tuple[int, int]] = {}  # by pair of ranks: batches and rows in a row
        self._contents_before: list[int] = []

    def see(self, contents: Sequence[int], distinct: Sequence[int]) -> list[int]:
        """Compare the contents of this step's batches by rank.

        Args:
            contents: A hash of each rank's batch; 0 where it was not read.
            distinct: How many different rows it has.

        Returns:
            The ranks of which it is certain by now that another has the same batches.
        """
        if 0 in contents:
            return []
        evidence: dict[tuple[int, int], tuple[int, int]] = {}
        first_rank_with: dict[int, int] = {}
        ranks_involved: set[int] = set()
        for rank, content in enumerate(contents):
            first = first_rank_with.setdefault(content, rank)
            if first == rank:
                continue
            # new evidence only where the batch is another one than before
            batches, rows = self._evidence.get((first, rank), (0, 0))
            if not self._contents_before or self._contents_before[rank] != content:
                batches, rows = batches + 1, rows + distinct[rank]
            evidence[first, rank] = batches, rows
            if batches >= _MIN_SAME_BATCHES and rows >= _MIN_SAME_ROWS:
                ranks_involved |= {first, rank}
        self._evidence, self._contents_before = evidence, list(contents)
        return sorted(ranks_involved)


class UndividedData:
    """Looks at the first batches of the iterable loaders of one stage.

    Args:
        stage: Its name.

    Attributes:
        is_looking: Whether ``see`` looks at batches: at the first ones of an epoch.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self.begin()

    def begin(self) -> None:
        """Begin an epoch."""
        self._seen: list[bytes] = []  # of the batches that have yet to travel
        self._looked_at = 0
        self.is_looking = True
        self._name = ""
        self._rows = SameRows()

    def see(self, loaders: Sequence[Any], batch: Any) -> None:
        """Read a batch, where it is one of the first, and all that it comes from is iterable. Communication: none."""
        if not self.is_looking or not loaders:
            return
        if process_groups.world_size() == 1 or not all(_is_iterable(loader) for loader in loaders):
            self.is_looking = False
            return
        self._looked_at += 1
        self.is_looking = self._looked_at < _LOOKED_AT
        self._name = ", ".join(type(loader.dataset).__name__ for loader in loaders)
        self._seen.append(_SEEN.pack(*_read(batch)))

    def take(self) -> bytes:
        """Return what has yet to travel."""
        seen, self._seen = b"".join(self._seen), []
        return seen

    def judge(self, trainer: pl.Trainer, payloads: Sequence[bytes]) -> None:
        """Compare what all ranks have taken, in rank order.

        Raises:
            InputError: on every rank.
        """
        by_rank = [list(_SEEN.iter_unpack(payload)) for payload in payloads]
        for step in zip(*by_rank, strict=False):
            contents, distinct = zip(*step, strict=True)
            ranks = self._rows.see(contents, distinct)
            if ranks and not _is_checked(trainer):
                whose = "all ranks" if len(ranks) == len(payloads) else f"ranks {', '.join(map(str, ranks))}"
                raise InputError(
                    f"batches of {self._name} in {self._stage} ({_FAULT})",
                    expected="rows of its own for each rank",
                    got=f"the same on {whose}, which count them so many times",
                    fix=FAULTS[_FAULT].cases["check"]["fix"],
                    collective=True,
                )


def _is_iterable(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def _read(batch: Any) -> tuple[int, int]:
    """Return a hash of a batch and its number of different rows; zeros where it has none that can be read."""
    tensors = [leaf for leaf in batch_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    rows = tensors[0].shape[0] if tensors else 0
    if not rows:
        return 0, 0
    hashes = row_hashes(tensors, rows, MAX_ROWS)
    return combine(hashes) & ((1 << 63) - 1) or 1, len(set(hashes))


def _is_checked(trainer: pl.Trainer) -> bool:
    """Say whether a check is at work that looks for the same, or the audit."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        checks = callback.checks_to_run() if hasattr(callback, "checks_to_run") else [callback]
        if any(_FAULT in getattr(check, "faults", ()) for check in checks):
            return True
    return False
