"""Which of a rank's classes a call looks at, and where the targets of its rows are among them.

Nothing here has a length that the host would have to wait for on an accelerator: targets of other ranks are masked there, on the CPU they
are left out. Where one rank has all classes there is nothing to mask.

Legend: ``G`` rows over all ranks, ``D`` embedding size, ``c`` classes on this rank, ``K`` weight rows per class, ``n`` rows whose class is
on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.distributed.shard import ClassShard
from lightning_ddp_losses.losses.sharded_weight import rows_of_classes


def positions_in(shard: ClassShard, labels: Tensor) -> Tensor:
    """Return labels as positions among the classes of a shard: negative, or beyond the last, where another rank has the class."""
    return labels - shard.start if shard.start else labels


def only_local(shard: ClassShard, positions: Tensor) -> Tensor:
    """Return positions among the classes of a shard, -1 where another rank has the class."""
    return torch.where((positions >= 0) & (positions < shard.classes), positions, -1)


@dataclass(frozen=True)
class LocalClasses:
    """Says which of this rank's classes a call looks at, and finds their rows in the weight.

    Attributes:
        labels: (G,) each row's class as a position among the classes looked at; negative or beyond the last where another rank has it.
        chunk: How many classes have their logits alive at a time.
        per_class: K.
        sampled: (c',) the classes looked at, as positions among this rank's; None: all of them.
        has_all: Whether no other rank has classes: every row's is here.
    """

    labels: Tensor
    chunk: int
    per_class: int
    sampled: Tensor | None = None
    has_all: bool = False

    def number(self, weight: Tensor) -> int:
        """Return how many classes are looked at."""
        return len(weight) // self.per_class if self.sampled is None else len(self.sampled)

    def chunks(self, weight: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the first and one past the last class of each chunk, and their weight rows (classes * K, D)."""
        total = self.number(weight)
        for start in range(0, total, self.chunk):
            stop = min(start + self.chunk, total)
            yield start, stop, weight[self.weight_rows(start, stop)]

    def weight_rows(self, start: int, stop: int) -> Any:
        """Return where the weight rows of some of the classes looked at are: a slice, or an index."""
        if self.sampled is None:
            return slice(start * self.per_class, stop * self.per_class)
        return rows_of_classes(self.sampled[start:stop], self.per_class)

    def targets_in_all(self, number: int) -> Targets:
        """Find the targets among so many classes, all that are looked at."""
        # what lies outside is not where it was
        columns = self.labels.clamp(0, number - 1)
        return Targets(columns == self.labels, columns.unsqueeze(1))

    def local_targets(self, weight: Tensor, *, listed: bool) -> LocalTargets:
        """Find the rows whose class is on this rank.

        Args:
            weight: (c * K, D), this rank's.
            listed: They must be listed: nothing may be computed of the other rows.
        """
        number = self.number(weight)
        if self.has_all:
            return LocalTargets(self, number, Targets(None, self.labels.unsqueeze(1)), None)
        # a rank without classes (7 over 4 ranks) has no row that could stand beside those of others
        if not number:
            nothing = torch.empty(0, dtype=torch.int64, device=self.labels.device)
            is_inside = torch.zeros_like(self.labels, dtype=torch.bool)
            return LocalTargets(self, number, Targets(is_inside, self.labels.unsqueeze(1)), nothing)
        targets = self.targets_in_all(number)
        if waits_to_list(self.labels) and self.sampled is None and not listed:
            return LocalTargets(self, number, targets, None)
        assert targets.is_inside is not None
        return LocalTargets(self, number, targets, targets.is_inside.nonzero().squeeze(1))


@dataclass(frozen=True)
class Targets:
    """The targets among some classes, of which each row of their logits has one entry or none.

    Attributes:
        is_inside: (G,), whether a row's target is among them; None: every row's is.
        columns: (G, 1), where; of the others any column.
    """

    is_inside: Tensor | None
    columns: Tensor

    def entries(self, logits: Tensor) -> Tensor:
        """Return each row's entry, (G,)."""
        return logits.gather(1, self.columns).squeeze(1)

    def entries_or(self, other: Tensor, logits: Tensor) -> Tensor:
        """Return each row's entry where its target is here, else the other value, (G,)."""
        entries = self.entries(logits)
        return entries if self.is_inside is None else torch.where(self.is_inside, entries, other)

    def put_(self, logits: Tensor, values: Tensor) -> None:
        """Write (G,) values to the targets."""
        if self.is_inside is not None:
            values = torch.where(self.is_inside, values, self.entries(logits))
        logits.scatter_(1, self.columns, values.unsqueeze(1))

    def clear_(self, logits: Tensor) -> None:
        """Write 0 to the targets."""
        if self.is_inside is None:
            logits.scatter_(1, self.columns, 0.0)
        else:
            kept = self.entries(logits).masked_fill_(self.is_inside, 0)
            logits.scatter_(1, self.columns, kept.unsqueeze(1))

    def add_(self, logits: Tensor, value: float) -> None:
        """Add a number to the targets."""
        if not value:
            return
        if self.is_inside is None:
            added = logits.new_full(self.columns.shape, value)
        else:
            added = self.is_inside.to(logits.dtype).mul_(value).unsqueeze(1)
        logits.scatter_add_(1, self.columns, added)


@dataclass(frozen=True)
class LocalTargets:
    """The rows whose class is on this rank.

    Attributes:
        classes: Among which.
        number: How many classes these are.
        targets: Where the rows' targets are among all of them.
        listed: (n,), their places; None: all G rows are computed, and those of others, if there are any, count 0.
    """

    classes: LocalClasses
    number: int
    targets: Targets
    listed: Tensor | None

    @property
    def are_none(self) -> bool:
        """Whether there are none, as far as the host knows."""
        return self.listed is not None and not len(self.listed)

    @property
    def rows(self) -> int:
        """How many rows are computed."""
        return len(self.targets.columns) if self.listed is None else len(self.listed)

    def count(self) -> Tensor | int:
        """Return how many there are."""
        return self.rows if self.targets.is_inside is None else self.targets.is_inside.sum()

    def in_chunk(self, start: int, stop: int) -> Targets:
        """Return the targets that lie in a chunk."""
        if stop - start == self.number:
            return self.targets
        is_inside, columns = self._places
        if stop - start < self.classes.chunk:  # the last chunk, where those of others may lie beyond
            columns = columns.clamp_max(stop - start - 1)
        return Targets(is_inside[start // self.classes.chunk], columns)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Tell for each chunk whether a row's target is in it, (chunks, G); and where, (G, 1)."""
        labels, are_here = self.classes.labels, self.targets.is_inside
        chunks = labels.div(self.classes.chunk, rounding_mode="floor")
        if are_here is not None:
            chunks = torch.where(are_here, chunks, -1)
        number = -(-self.number // self.classes.chunk)
        is_inside = chunks == torch.arange(number, device=chunks.device).unsqueeze(1)
        return is_inside, labels.remainder(self.classes.chunk).unsqueeze(1)

    def weight_rows(self) -> Tensor:
        """Return the index (n * K,) of the weight rows of these targets' classes."""
        labels = self.of(self.targets.columns.squeeze(1))
        if self.classes.sampled is not None:
            labels = self.classes.sampled[labels]
        return rows_of_classes(labels, self.classes.per_class)

    def of(self, values: Tensor) -> Tensor:
        """Take these rows of (G, ...) values."""
        return values if self.listed is None else values[self.listed]

    def spread(self, values: Tensor) -> Tensor:
        """Return (G, ...) values, these rows' and 0 for the others."""
        if self.listed is None:
            return self.silence(values)
        whole = values.new_zeros(len(self.targets.columns), *values.shape[1:])
        return whole.index_add_(0, self.listed, values)

    def add_to_(self, whole: Tensor, values: Tensor) -> Tensor:
        """Add these rows' values to (G, ...); return it."""
        if self.listed is None:
            return whole.add_(self.silence(values))
        return whole.index_add_(0, self.listed, values)

    def silence(self, values: Tensor) -> Tensor:
        """Return these rows' values, 0 for those that only stand beside them."""
        is_inside = self.targets.is_inside
        if self.listed is not None or is_inside is None:
            return values
        return torch.where(is_inside.view(-1, *[1] * (values.ndim - 1)), values, 0)


def waits_to_list(labels: Tensor) -> bool:
    """Say whether the host would wait to learn how many rows there are; samples are drawn on the host and wait anyway."""
    return labels.device.type != "cpu"
