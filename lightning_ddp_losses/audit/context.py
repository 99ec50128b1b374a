"""A finished audit as the rules of diagnosis see it: rows, records of the ranks, and counterfactual runs made when a rule asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from lightning_ddp_losses.audit.compare import ComparedRow, Comparison, has_same_batches
from lightning_ddp_losses.audit.rank_record import NO_TENSOR, Entry, ModuleInfo, RankRecord, Recording, fewest_rows
from lightning_ddp_losses.core.faults import FAULTS

Severity = Literal["error", "explanation", "note"]


@dataclass(frozen=True)
class Diagnosis:
    """Why the ranks differ from one process.

    Attributes:
        fault: Its id in the table of faults (``core.faults.FAULTS``); empty where it is none of them.
        title: What it is, in a few words.
        evidence: What was measured.
        fix: What to change.
        confirmed: The counterfactual run that showed it; empty for a pattern alone.
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

    @classmethod
    def of(
        cls,
        fault: str,
        case: str = "audit",
        *,
        confirmed: str = "",
        severity: Severity = "error",
        parameters: tuple[str, ...] = (),
        **fields: object,
    ) -> Diagnosis:
        """Return a diagnosis with the texts of the table of faults.

        Args:
            fault: Id in the table.
            case: Case of the fault's row.
            confirmed: Counterfactual run that showed it.
            severity: Severity of the diagnosis.
            parameters: Names that it is about.
            **fields: Numbers and names that the case's templates show.
        """
        texts = FAULTS[fault].explain(case, **fields)
        return cls(fault, texts.what, texts.evidence, texts.fix, confirmed, severity, parameters)


@dataclass(frozen=True)
class CounterfactualRuns:
    """Runs of what did not happen, each made at first use.

    Attributes:
        without: Ranks and one process again, with something switched off on both sides.
        is_local_mean: Whether the ranks' gradients are the mean of those of their own losses, up to a step.
        exchanged: Ranks with the next rank's row at every second place, against the ranks.
        reversed_order: One process with the ranks' batches joined in reverse order, against one process.
        unaccumulated: One process without accumulation, all batches of a step joined, against one process.
        reseeded: One process with other random numbers, against one process.
        single_ranks: One process for each rank, on that rank's batches of the first step.
        first_traced_difference: Where activations or gradients differ first, in forward order, as a sentence.
    """

    without: Callable[..., Comparison]
    is_local_mean: Callable[[int], bool]
    exchanged: Callable[[], Comparison]
    reversed_order: Callable[[], Comparison]
    unaccumulated: Callable[[], Comparison]
    reseeded: Callable[[], Comparison]
    single_ranks: Callable[[], Sequence[Recording]]
    first_traced_difference: Callable[[], str]


@dataclass(frozen=True)
class Factors:
    """The common ratio of the encoder's gradients and of the losses' own; None without a common one, or without rows."""

    encoder: float | None
    losses: float | None


@dataclass
class AuditContext:
    """What the rules look at.

    Attributes:
        user_run: Recording of the ranks on the user's own data.
        ranks: Recording of the ranks; another one where something is switched off.
        one: Recording of one process.
        comparison: Their rows.
        counterfactual: Runs that a rule may ask for.
        unit: The rounding unit of the precision.
        switched_off: Names out of ``ABLATIONS``.
    """

    user_run: Recording
    ranks: Recording
    one: Recording
    comparison: Comparison
    counterfactual: CounterfactualRuns
    unit: float
    switched_off: tuple[str, ...] = field(default=())

    # ------------------------------------------------------------------ what the ranks recorded

    @property
    def W(self) -> int:  # noqa: N802 - the legend's name
        """Number of ranks."""
        return self.ranks.ranks

    @property
    def record(self) -> RankRecord:
        """What rank 0 did."""
        return self.ranks.records[0]

    @property
    def info(self) -> ModuleInfo:
        """The module and its trainer, on rank 0."""
        return self.record.module_info

    @cached_property
    def used_rng(self) -> bool:
        """Whether a step drew random numbers, with what is left switched on."""
        return any(any(record.used_rng) for record in (*self.ranks.records, *self.one.records))

    @property
    def fingerprints_by_rank(self) -> list[dict[str, dict[str, int]]]:
        """Each rank's fingerprints of gradients on their way to the step that differs first: by stage, by name."""
        return [record.fingerprints[self.step - 1] for record in self.ranks.records]

    @property
    def loss_scales(self) -> list[tuple[float | None, ...]]:
        """The ranks' loss scales by step, as far as they can explain a difference; a skipped step shows in the next scale."""
        return list(zip(*(record.loss_scales for record in self.ranks.records), strict=False))[: self.step + 1]

    @property
    def learning_rates(self) -> list[tuple[list[float], ...]]:
        """The ranks' learning rates by step, as far as they can explain a difference."""
        return list(zip(*(record.learning_rates for record in self.ranks.records), strict=False))[: self.step]

    @property
    def local_norms(self) -> list[str]:
        """Batch norms with the statistics of one rank."""
        return [name for name, kind in self.record.norms_at_wrap.items() if "Sync" not in kind]

    @property
    def pml_wrapper(self) -> str:
        """Name of pytorch-metric-learning's distributed wrapper in the module; empty without one."""
        kinds = self.info.module_types
        return next((f"`{name}`" for name, kind in kinds.items() if kind.endswith("DistributedLossWrapper")), "")

    def has_gradient_on_a_rank(self, row: ComparedRow) -> bool:
        """Return whether some rank has a gradient of the parameter at the first step that differs."""
        entries = self.ranks.entries_of(self.step, "gradient", row.parameter)
        return any(entry is not None and entry.exists for entry in entries)

    def rows_per_rank(self, step: int) -> list[int]:
        """Count the rows that each rank had for a step."""
        return [record.rows_at(step) for record in self.ranks.records]

    def losses_at(self, step: int) -> list[float | None]:
        """Return each rank's first loss of a step."""
        found = []
        for record in self.ranks.records:
            first = next(index for index, batch in enumerate(record.batches) if batch.step == step)
            found.append(record.loss_of(first))
        return found

    @property
    def first_odd_batch(self) -> int | None:
        """The first batch of the step that is looked at whose loss is not finite on some rank, and is in one process; None without one."""
        if not has_same_batches(self.ranks, self.one):
            return None
        for index, batch in enumerate(self.record.batches):
            losses = [record.loss_of(index) for record in self.ranks.records]
            of_one = self.one.records[0].loss_of(index)
            if batch.step == self.step and _is_finite(of_one) and not all(map(_is_finite, losses)):
                return index
        return None

    def name(self, parameter: str) -> str:
        """Return a parameter's name as the user knows it: for unregistered ones the path where it was found."""
        aliases = self.one.records[0].module_info.aliases | self.info.aliases
        return aliases.get(parameter, parameter)

    def names(self, rows: Iterable[ComparedRow], most: int = 4) -> str:
        """List the parameters of rows, the first few."""
        return quoted([self.name(row.parameter) for row in rows], most)

    # ------------------------------------------------------------------ what differs

    @property
    def step(self) -> int:
        """First step at which something differs."""
        return self.comparison.first_step or 1

    @cached_property
    def rows(self) -> list[ComparedRow]:
        """Gradients at that step."""
        return self.comparison.first_rows()

    @property
    def wrong(self) -> list[ComparedRow]:
        """Gradients that differ there."""
        return [row for row in self.rows if not row.exact]

    @property
    def desynchronized(self) -> list[ComparedRow]:
        """Gradients that the ranks do not agree on there."""
        return [row for row in self.rows if not row.ranks_agree]

    @cached_property
    def is_local_mean(self) -> bool:
        """Whether the ranks do what DDP promises at the first step that differs: the mean of their own gradients."""
        return self.counterfactual.is_local_mean(self.step)

    @cached_property
    def keeps_gradients_of_exchanged_rows(self) -> bool:
        """Whether the ranks' mean gradient stays the same when rows change ranks and keep their places: no row meets another.

        False as well where that cannot be tried: without a second row, or where the ranks have the same rows.
        """
        for column in zip(*(record.batches for record in self.ranks.records), strict=False):
            if column[0].step <= self.step and min(fewest_rows(batch.rows) for batch in column) < 2:
                return False
        for column in zip(*(record.batches for record in self.user_run.records), strict=False):
            if len({batch.digest for batch in column}) < len(column):
                return False
        rows = self.counterfactual.exchanged().rows
        return all(row.exact for row in rows if row.step <= self.step)

    @cached_property
    def factors(self) -> Factors:
        """Common factors at the first step that differs."""
        # rows whose ratio says something; coarse ones only where there is nothing better
        rows = [row for row in self.rows if not row.noise and row.ranks_agree]
        precise = [row for row in rows if row.tolerance < 0.25] or rows
        of_encoder = [row for row in precise if row.owner == "encoder"]
        of_losses = [row for row in precise if row.owner not in ("encoder", "unregistered")]
        return Factors(_common_factor(of_encoder), _common_factor(of_losses))

    @cached_property
    def rank_weights(self) -> list[float] | None:
        """Weights of the ranks' own gradients in that of one process at step 1, by least squares over all parameters together.

        None if the ranks do not take the plain mean of their own gradients, or if no weights explain the gradient of one process.
        """
        if not self.wrong or self.desynchronized or self.step != 1 or not self.is_local_mean:
            return None
        gram = self._gradient_products()
        of_ranks, with_one, total = gram[:-1, :-1], gram[:-1, -1], float(gram[-1, -1])
        if not torch.isfinite(gram).all() or total == 0:
            return None
        # least squares by normal equations: |g - sum w_r g_r|^2 needs the products only
        weights = torch.linalg.lstsq(of_ranks, with_one[:, None], driver="gelsd").solution[:, 0]
        left = total - 2 * float(weights @ with_one) + float(weights @ of_ranks @ weights)
        unexplained = (max(0.0, left) / total) ** 0.5
        # the rest may be rounding, but no more than a twentieth
        allowed = max(1e-4, min(0.05, max(row.tolerance for row in self.rows)))
        return [float(weight) for weight in weights] if unexplained <= allowed else None

    def _gradient_products(self) -> Tensor:
        """Multiply the ranks' own gradients and one process's (the last) with each other, a piece at a time."""
        alone = self.counterfactual.single_ranks()
        gram = torch.zeros(len(alone) + 1, len(alone) + 1, dtype=torch.float64)
        for name, of_one in self.one.entries(0, 1, "gradient").items():
            entries: list[Entry] = [run.entries(0, 1, "gradient").get(name, NO_TENSOR) for run in alone]
            entries.append(of_one)
            # a parameter without gradient on some rank says nothing about weights
            if not all(entry.exists and entry.shape == of_one.shape for entry in entries):
                continue
            for pieces in zip(*(entry.pieces() for entry in entries), strict=True):
                stacked = torch.stack([piece.double() for piece in pieces])
                gram += stacked @ stacked.T
        return gram


def _is_finite(loss: float | None) -> bool:
    return loss is None or math.isfinite(loss)


def _common_factor(rows: Sequence[ComparedRow]) -> float | None:
    if not rows or any(row.verdict not in ("exact", "wrong scale") for row in rows):
        return None
    # ratios are common where they differ by no more than their errors
    ratios = [row.ratio for row in rows if row.ratio > 0]
    allowed = max(1e-3, 2 * max(row.tolerance for row in rows))
    if not ratios or max(ratios) > min(ratios) * (1 + allowed):
        return None
    return sum(ratios) / len(ratios)


# ---------------------------------------------------------------------- words of the evidence


def quoted(names: Sequence[str], most: int = 4) -> str:
    """List names in code quotes, the first few."""
    text = ", ".join(f"`{name}`" for name in names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


def loss_text(value: float | None) -> str:
    """Format a loss; ``none`` where there was none."""
    return "none" if value is None else f"{value:.6g}"


def comma_list(values: Iterable[object]) -> str:
    """List values with commas."""
    return ", ".join(map(str, values))
