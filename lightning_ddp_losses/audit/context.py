"""A finished audit as the rules of diagnosis see it: rows, facts, and counter-runs that are made when a rule asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from lightning_ddp_losses.audit.compare import Comparison, Row
from lightning_ddp_losses.audit.rank_record import Recording

Severity = Literal["error", "explanation", "note"]


@dataclass(frozen=True)
class Diagnosis:
    """Why the ranks differ from one process.

    Attributes:
        fault: Its number in the catalogue of faults.
        title: What it is, in a few words.
        evidence: What was measured.
        fix: What to change.
        confirmed: The counter-run that showed it; empty for a pattern alone.
        severity: ``"error"``; ``"explanation"`` for a difference that has to be (dropout, rounding); ``"note"``.
        parameters: Names that it is about; empty: all.
    """

    fault: str
    title: str
    evidence: str
    fix: str
    confirmed: str = ""
    severity: Severity = "error"
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Counters:
    """Counter-runs, each made at first use.

    Attributes:
        without: Ranks and one process again, with something switched off on both sides.
        local: Whether the ranks' gradients are the mean of those of their own losses, up to a step.
        backwards: One process with the ranks' batches joined in reverse order, against one process.
        whole: One process without accumulation, all batches of a step joined, against one process.
        reseeded: One process with other random numbers, against one process.
        alone: One process for each rank, on that rank's batches of the first step.
        part: Where activations or gradients part, in forward order, as a sentence.
    """

    without: Callable[..., Comparison]
    local: Callable[[int], bool]
    backwards: Callable[[], Comparison]
    whole: Callable[[], Comparison]
    reseeded: Callable[[], Comparison]
    alone: Callable[[], Sequence[Recording]]
    part: Callable[[], str]


@dataclass(frozen=True)
class Factors:
    """The common ratio of the encoder's gradients and of the losses' own; None without a common one, or without rows."""

    encoder: float | None
    losses: float | None


@dataclass
class Case:
    """What the rules look at.

    Attributes:
        source: Recording of the ranks on the user's own data.
        ranks: Recording of the ranks; another one where something is switched off.
        one: Recording of one process.
        comparison: Their rows.
        counters: Counter-runs.
        unit: The rounding unit of the precision.
    """

    source: Recording
    ranks: Recording
    one: Recording
    comparison: Comparison
    counters: Counters
    unit: float
    switched_off: tuple[str, ...] = field(default=())

    @property
    def W(self) -> int:  # noqa: N802 - the legend's name
        """Number of ranks."""
        return self.ranks.ranks

    @property
    def facts(self) -> dict[str, Any]:
        """Rank 0's facts."""
        return self.ranks.facts[0]

    @cached_property
    def draws(self) -> bool:
        """Whether a step drew random numbers, with what is left switched on."""
        return any(any(page["draws"]) for page in (*self.ranks.facts, *self.one.facts))

    @property
    def step(self) -> int:
        """First step at which something differs."""
        return self.comparison.first_step or 1

    @cached_property
    def rows(self) -> list[Row]:
        """Gradients at that step."""
        return self.comparison.first_rows()

    @property
    def wrong(self) -> list[Row]:
        """Gradients that differ there."""
        return [row for row in self.rows if not row.exact]

    @property
    def torn(self) -> list[Row]:
        """Gradients that the ranks do not agree on there."""
        return [row for row in self.rows if not row.ranks_agree]

    def name(self, parameter: str) -> str:
        """A parameter as the user knows it; unregistered ones by their path where it was found."""
        aliases = self.one.facts[0]["aliases"] | self.facts["aliases"]
        return str(aliases.get(parameter, parameter))

    def names(self, rows: Iterable[Row], most: int = 4) -> str:
        """Parameters of rows, the first few."""
        found = [f"`{self.name(row.parameter)}`" for row in rows]
        return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")

    @cached_property
    def local(self) -> bool:
        """Whether the ranks do what DDP promises at the first step that differs: the mean of their own gradients."""
        return self.counters.local(self.step)

    @cached_property
    def factors(self) -> Factors:
        """Common factors at the first step that differs."""
        whole = [row for row in self.rows if not row.noise and row.ranks_agree]
        telling = [row for row in whole if row.tolerance < 0.25] or whole
        encoder = _common([row for row in telling if row.owner == "encoder"])
        losses = _common([row for row in telling if row.owner not in ("encoder", "unregistered")])
        return Factors(encoder, losses)

    def rows_per_rank(self, step: int) -> list[int]:
        """Rows that each rank had for a step."""
        return [sum(b["rows"] or 0 for b in page["batches"] if b["step"] == step) for page in self.ranks.facts]

    def losses_at(self, step: int) -> list[float | None]:
        """Each rank's first loss of a step."""
        found = []
        for page in self.ranks.facts:
            at = next(i for i, b in enumerate(page["batches"]) if b["step"] == step)
            found.append(page["losses"][at] if at < len(page["losses"]) else None)
        return found

    @cached_property
    def shares(self) -> tuple[list[float], float] | None:
        """Weights with which the ranks' own gradients make up that of one process at step 1, and what they leave over.

        Least squares over all parameters together; None where the difference begins later.
        """
        if self.step != 1:
            return None
        alone = self.counters.alone()
        gram = torch.zeros(len(alone) + 1, len(alone) + 1, dtype=torch.float64)
        for name, whole in self.one.entries(0, 1, "gradient").items():
            parts = [recording.entries(0, 1, "gradient").get(name) for recording in alone]
            present = [entry for entry in (*parts, whole) if entry is not None and entry.exists]
            if len(present) != len(alone) + 1 or len({entry.shape for entry in present}) != 1:
                continue
            for pieces in zip(*(entry.pieces() for entry in present), strict=True):
                stacked = torch.stack([piece.double() for piece in pieces])
                gram += stacked @ stacked.T
        ours, mixed, total = gram[:-1, :-1], gram[:-1, -1], float(gram[-1, -1])
        if not torch.isfinite(gram).all() or total == 0:
            return None
        weights = torch.linalg.lstsq(ours, mixed[:, None], driver="gelsd").solution[:, 0]
        left = total - 2 * float(weights @ mixed) + float(weights @ ours @ weights)
        return [float(w) for w in weights], (max(0.0, left) / total) ** 0.5


def _common(rows: Sequence[Row]) -> float | None:
    if not rows or any(row.verdict not in ("exact", "wrong scale") for row in rows):
        return None
    ratios = [row.ratio for row in rows if row.ratio > 0]
    allowed = max(1e-3, 2 * max(row.tolerance for row in rows))
    if not ratios or max(ratios) > min(ratios) * (1 + allowed):
        return None
    return sum(ratios) / len(ratios)
