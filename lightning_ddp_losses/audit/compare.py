"""Two recordings compared, tensor by tensor and step by step, and how large an error may be. Nothing here trains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_ddp_losses.audit.rank_record import Recording
from lightning_ddp_losses.audit.rows import Row, Tolerances, rows_of_step, scale_of


@dataclass
class Comparison:
    """All rows of two recordings.

    Attributes:
        rows: Gradients, in forward order of the parameters, step by step.
        updates: Parameters after the steps.
    """

    rows: list[Row]
    updates: list[Row]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return all(row.exact for row in (*self.rows, *self.updates))

    @property
    def first_step(self) -> int | None:
        """The first step at which something differs."""
        return min((row.step for row in (*self.rows, *self.updates) if not row.exact), default=None)

    def first_rows(self) -> list[Row]:
        """Gradients of the first step at which something differs: later ones follow from it."""
        return [row for row in self.rows if row.step == self.first_step]

    def first_updates(self) -> list[Row]:
        """Parameters after that step."""
        return [row for row in self.updates if row.step == self.first_step]

    def worst(self) -> float:
        """Largest error of a gradient at the first step at which something differs; else at any."""
        return max((row.error for row in (self.first_rows() or self.rows)), default=0.0)


def compare(ranks: Recording, one: Recording, allowed: Tolerances) -> Comparison:
    """Compare what the ranks did with what one process did.

    Args:
        ranks: The recording of the ranks (or of one more process).
        one: The recording of one process.
        allowed: What counts as rounding.
    """
    owner = {name: o for page in (*one.facts, *ranks.facts) for name, o in page["owners"].items()}
    rows, updates = [], []
    strict = allowed.fixed is not None
    quiet: set[str] = set()  # where a gradient is rounding, so is what an optimizer makes of it
    for step in range(1, min(ranks.steps, one.steps) + 1):
        scale = scale_of(one, step, "gradient", strict=strict)
        quiet |= scale.quiet
        rows += list(rows_of_step(ranks, one, step, "gradient", allowed, owner, scale))
        scale = dataclasses.replace(scale_of(one, step, "parameter", strict=strict), quiet=frozenset(quiet))
        updates += list(rows_of_step(ranks, one, step, "parameter", allowed, owner, scale))
    return Comparison(rows, updates)


def is_mean(parts: Sequence[Recording], ranks: Recording, allowed: Tolerances) -> bool:
    """Whether the ranks' gradients at step 1 are the mean of those of ``parts``."""
    for name, whole in ranks.entries(0, 1, "gradient").items():
        entries = [part.entries(0, 1, "gradient").get(name) for part in parts]
        present = [entry for entry in entries if entry is not None and entry.exists]
        if not whole.exists or len(present) != len(parts) or any(entry.shape != whole.shape for entry in present):
            return False
        off = size = 0.0
        for pieces in zip(whole.pieces(), *(entry.pieces() for entry in present), strict=True):
            mean = torch.stack([piece.double() for piece in pieces[1:]]).mean(0)
            off += float((pieces[0].double() - mean).square().sum())
            size += float(mean.square().sum())
        if not math.sqrt(off) <= allowed.of(1, "gradient", name) * math.sqrt(size):
            return False
    return True


def tolerances(one: Recording, nudged: Sequence[Recording], unit: float, fixed: float | None = None) -> Tolerances:
    """How far rounding alone moves each tensor: one process against itself, moved by one rounding unit.

    Args:
        one: One process.
        nudged: One process whose parameters and inputs were moved by one rounding unit, at random.
        unit: The rounding unit; no tolerance is below ``MULTIPLE`` times it.
        fixed: The user's own tolerance, for everything.
    """
    allowed = Tolerances(fixed, unit)
    if fixed is not None:
        return allowed
    for other in nudged:
        comparison = compare(other, one, Tolerances(math.inf))
        for row in (*comparison.rows, *comparison.updates):
            key = (row.step, row.what, row.parameter)
            if math.isfinite(row.error):
                allowed.measured[key] = max(allowed.measured.get(key, 0.0), row.error)
    return allowed
