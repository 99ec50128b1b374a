"""The interface of a finished audit for rules of diagnosis: rows, records of the ranks, and counterfactual runs on request.

A counterfactual run changes one aspect: something is switched off, rows are exchanged between ranks, or batches are used in another order.
`Runs` makes each of them once.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_ddp_losses.audit import compare
from lightning_ddp_losses.audit.rank_record import (
    Entry,
    ModuleInfo,
    RankRecord,
    Recording,
    mean_of_gradients,
    rows_by_loader,
)
from lightning_ddp_losses.audit.runs import Runs
from lightning_ddp_losses.audit.targets import CountedTargets
from lightning_ddp_losses.audit.terms import term_off, terms_off
from lightning_ddp_losses.core.faults import FAULTS
from lightning_ddp_losses.errors import DDPLossError, listed

Severity = Literal["error", "explanation", "unclear", "note"]
_MOST_TERMS = 16  # largest number of terms that are tested one by one


@dataclass(frozen=True)
class Diagnosis:
    """Why the ranks differ from one process.

    Attributes:
        fault: Id in the table of faults (``core.faults.FAULTS``). Empty for other causes.
        title: The cause in a few words.
        evidence: Measured numbers.
        fix: Change that removes the difference.
        confirmed: The counterfactual run that confirmed the cause. Empty if the cause was inferred only from a pattern.
        severity: ``"error"``, ``"explanation"`` for an expected difference (dropout, rounding), ``"unclear"`` if it cannot be decided
            whether the runs differ, or ``"note"``.
        parameters: Names of the affected parameters. Empty if all are affected.
    """

    fault: str
    title: str
    evidence: str
    fix: str
    confirmed: str = ""
    severity: Severity = "error"
    parameters: tuple[str, ...] = ()


class AuditContext:
    """An audit for the rules, which compares the ranks with one process.

    Args:
        runs: Makes counterfactual runs.
        off: Names in ``ABLATIONS`` that are switched off on both sides.

    Attributes:
        ranks: Recording of the ranks. It differs from the user's run if something is switched off.
        one: Recording of one process.
        comparison: Compared rows of the two recordings.
    """

    def __init__(self, runs: Runs, off: frozenset[str]) -> None:
        self.runs, self.off = runs, off
        self.ranks, self.one = runs.pair(off)
        self.comparison = compare.compare(self.ranks, self.one, runs.allowed(off))

    def diagnosis(
        self,
        fault: str,
        case: str = "audit",
        *,
        about: Sequence[compare.ComparedRow] = (),
        parameters: Sequence[str] = (),
        severity: Severity = "error",
        **fields: object,
    ) -> Diagnosis:
        """Return a diagnosis with the texts of the table of faults.

        Args:
            fault: Id in the table.
            case: Case of the fault's row.
            about: Rows of the affected parameters.
            parameters: Names of the affected parameters, if there are no rows for them.
            severity: Severity of the diagnosis.
            **fields: Numbers and names for the case's templates. The number of ranks, the first step that differs and the names of the
                parameters are added automatically.
        """
        parameters = tuple(parameters) or tuple(row.parameter for row in about)
        known = {"W": self.W, "step": self.step, "names": quoted([self.name(name) for name in parameters])}
        texts = FAULTS[fault].explain(case, **(known | fields))
        fix = advice(texts.fix, self.runs.target.strategy)
        return Diagnosis(fault, texts.what, texts.evidence, fix, texts.confirmed, severity, parameters)

    # ------------------------------------------------------------------ counterfactual runs

    def without(self, *names: str) -> AuditContext:
        """Return the same audit with additional parts switched off on both sides."""
        # micro-batches of a joined window are not divided evenly
        off = {name for name in names if name != "uneven" or not self.runs.joins_windows}
        return AuditContext(self.runs, self.off | off)

    @property
    def draws_explain_differences(self) -> bool:
        """Whether the user's run may draw other random numbers than one process. Always True if a window is one batch in one process."""
        return self.runs.target.randomness == "rank" or self.runs.joins_windows

    def with_same_draws(self, *names: str) -> AuditContext | str:
        """Return the audit with equal random numbers for each row on any rank and without ``names``, or the reason why it is impossible."""
        try:
            return self.without("randomness", *names)
        except DDPLossError as error:
            return first_part(error)

    def _compare(self, ours: Recording, theirs: Recording) -> compare.Comparison:
        return compare.compare(ours, theirs, self.runs.allowed(self.off))

    def _replay(self, assignment: str, **options: Any) -> Recording:
        return self.runs.replays(self.off, assignment, **options)[0]

    def against_one(self, assignment: str, **options: Any) -> compare.Comparison:
        """Compare one process with another assignment of batches to the one process of this audit."""
        return self._compare(self._replay(assignment, **options), self.one)

    @cached_property
    def on_whole_windows(self) -> Recording:
        """One process on all rows of each window as a single batch."""
        if self.runs.joins_windows:
            return self.one
        return self._replay("joined", whole_windows=True)

    def needs_micro_batches(self) -> bool:
        """Return whether one process without accumulation has different gradients."""
        return not self._compare(self.on_whole_windows, self.one).equal

    def accumulation(self) -> compare.AccumulationParity | None:
        """Compare the ranks with one process for both kinds of accumulation.

        Returns None if each step has one batch, or in manual optimisation.
        """
        by_step = Counter(batch.step for batch in self.record.batches)
        most = max(by_step.values(), default=1)
        if not self.info.automatic or most == 1:
            return None
        same = self.one
        if self.runs.joins_windows:
            same = self._replay("joined", whole_windows=False)
        of_same, of_whole = self._compare(self.ranks, same), self._compare(self.ranks, self.on_whole_windows)
        return compare.AccumulationParity(most, of_same.equal, of_whole.equal, of_same.worst(), of_whole.worst())

    def accumulation_factor(self) -> float | None:
        """Return the common ratio of the gradients to one process on all rows of each step, or None if there is no common ratio."""
        rows = self._compare(self.ranks, self.on_whole_windows).first_rows()
        return _common_factor([row for row in rows if not row.noise])

    @cached_property
    def local_factor(self) -> float | None:
        """The ratio of the ranks' gradients to the mean of their local gradients, up to the first step that differs.

        It is 1 if DDP averages local losses, or W if a local loss is multiplied by W. None if the gradients are not a multiple of the mean.
        """
        for mean in self._local_means():
            comparison = self._compare(self.ranks, mean)
            if self._is_equal_so_far(comparison):
                return 1.0
            rows = [row for row in comparison.rows if row.step == 1 and not row.noise]
            common = _common_factor(rows) if self.step == 1 else None
            if common is not None and math.isclose(common, self.W, rel_tol=1e-3):
                return float(self.W)
        return None

    def _local_means(self) -> Iterator[Recording]:
        """Yield recordings with the mean of the ranks' local gradients, up to the first step that differs."""
        # one process that averages the local losses. In manual optimisation, it cannot be made to accumulate
        if self.info.automatic:
            yield self._replay("local", accumulate=self.W)
        # if a step changes a buffer, the second batch of that process uses another buffer. So use one process for each rank, unless it
        # may draw other random numbers
        if self.step == 1 and not (self.info.automatic and self.used_rng):
            yield mean_of_gradients(self.single_ranks)

    @property
    def is_local_mean(self) -> bool:
        """Whether the ranks average their local gradients, up to a factor W, up to the first step that differs."""
        return self.local_factor is not None

    @cached_property
    def local_mean_is_right(self) -> bool:
        """Whether the mean of the local gradients is the gradient of one process, up to the first step that differs."""
        return any(self._is_equal_so_far(self._compare(mean, self.one)) for mean in self._local_means())

    @cached_property
    def single_ranks(self) -> Sequence[Recording]:
        """One process for each rank, on that rank's batches of the first step."""
        return self.runs.replays(self.off, *range(self.W), steps=1)

    @cached_property
    def keeps_gradients_of_exchanged_rows(self) -> bool:
        """Whether the ranks' mean gradient is unchanged if rows are exchanged between ranks at the same positions.

        If so, rows are not combined with other rows. Also False if this cannot be tested, because there is no second row or because the
        ranks have the same rows.
        """
        for column in zip(*(record.batches for record in self.ranks.records), strict=False):
            if column[0].step <= self.step and min(chain(*(rows_by_loader(batch.rows) for batch in column))) < 2:
                return False
        for column in zip(*(record.batches for record in self.runs.user_run.records), strict=False):
            if len({batch.digest for batch in column}) < len(column):
                return False
        return self._is_equal_so_far(self._compare(self._replay("exchanged"), self.ranks))

    def _is_equal_so_far(self, comparison: compare.Comparison) -> bool:
        return all(row.exact for row in comparison.rows if row.step <= self.step)

    @property
    def _traced(self) -> list[Recording]:
        """Traced runs of the ranks and of one process. Empty if micro-batches would be compared with whole windows."""
        if self.runs.joins_windows:
            return []
        return self.runs.replays(self.off, "same", "joined", trace=self.step, steps=self.step)

    @property
    def _traced_ranks(self) -> Sequence[RankRecord]:
        return self._traced[0].records if self._traced else []

    @cached_property
    def _first_traced(self) -> compare.TracedDifference | None:
        """The first difference between the traced runs."""
        if not self._traced:
            return None
        ranks, one = self._traced
        return compare.first_traced_difference(ranks, one, min(0.1, 256 * self.runs.unit))

    def first_traced_difference(self) -> str:
        """Return where activations or gradients differ first, in forward order, as a sentence."""
        if not self._traced:
            return "(Activations of micro-batches are not compared with those of whole windows.)"
        if self._first_traced is None:
            return (
                "Activations and gradients of all modules that give one row per sample agree; "
                "what parts is inside the loss or beside the modules."
            )
        what, call, error = self._first_traced
        where = "in forward order"
        if what == "Gradients":
            where = "from the loss backwards; all activations that are rows agree"
        return f"{what} part first at `{call.name}` ({call.kind}), by {error:.2g}, {where}."

    @property
    def parts_at_local_norm(self) -> bool:
        """Whether activations first differ at a batch norm with the statistics of one rank."""
        found = self._first_traced
        return found is not None and found.what == "Activations" and found.call.name in self.local_norms

    @cached_property
    def cut_lines(self) -> list[list[str]]:
        """Kind and the user's line of each collective that cuts the graph of a rank's loss at the first step that differs."""
        return [cut for record in self._traced_ranks for cut in record.cut_lines]

    @property
    def counted_targets(self) -> list[tuple[CountedTargets, ...]]:
        """Cross entropies with consecutive targets in the first step that differs, of all ranks."""
        return [*zip(*(record.counted_targets for record in self._traced_ranks), strict=False)]

    @cached_property
    def terms(self) -> list[str]:
        """The user's lines of the loss's terms, with empty strings for unknown lines. Empty if terms are not tested one by one."""
        if terms_off(self.off) or not self._traced:
            return []
        ranks, one = self._traced
        lines = ranks.records[0].terms
        counts = {len(record.terms) for record in (*ranks.records, *one.records)}
        return lines if len(counts) == 1 and len(lines) <= _MOST_TERMS else []

    def term_alone(self, number: int) -> AuditContext:
        """Return the same audit with all terms of the loss except one switched off."""
        return self.without(*(term_off(other) for other in range(len(self.terms)) if other != number))

    # ------------------------------------------------------------------ records of the ranks

    @property
    def W(self) -> int:  # noqa: N802 - the legend's name
        """Number of ranks."""
        return self.ranks.ranks

    @property
    def record(self) -> RankRecord:
        """Record of rank 0."""
        return self.ranks.records[0]

    @property
    def info(self) -> ModuleInfo:
        """The module and its trainer, on rank 0."""
        return self.record.module_info

    @cached_property
    def used_rng(self) -> bool:
        """Whether a step drew random numbers in these runs."""
        return any(any(record.used_rng) for record in (*self.ranks.records, *self.one.records))

    @property
    def by_trainer(self) -> bool:
        """Whether the runs are fits of a LightningModule, not loops."""
        return self.runs.target.by_trainer

    @property
    def stages_by_rank(self) -> list[dict[str, dict[str, str]]]:
        """Each rank's digests of gradients before the first step that differs, by stage and name."""
        return [record.stages[self.step - 1] for record in self.ranks.records]

    @property
    def loss_scales(self) -> list[tuple[float | None, ...]]:
        """The ranks' loss scales by step, up to the scale after the first step that differs, which reveals a skipped step."""
        return list(zip(*(record.loss_scales for record in self.ranks.records), strict=False))[: self.step + 1]

    @property
    def learning_rates(self) -> list[tuple[list[float], ...]]:
        """The ranks' learning rates by step, up to the first step that differs."""
        return list(zip(*(record.learning_rates for record in self.ranks.records), strict=False))[: self.step]

    @property
    def local_norms(self) -> list[str]:
        """Batch norms with the statistics of one rank."""
        return [name for name, kind in self.record.norms_at_wrap.items() if "Sync" not in kind]

    @property
    def has_local_statistics(self) -> bool:
        """Whether batch norms normalise by the rows of one rank, so that all subsequent layers differ from one process."""
        return bool(self.local_norms) and "batch_norm" not in self.off

    @property
    def pml_wrapper(self) -> str:
        """Name of pytorch-metric-learning's distributed wrapper in the module. Empty if there is none."""
        kinds = self.info.module_types
        return next((f"`{name}`" for name, kind in kinds.items() if kind.endswith("DistributedLossWrapper")), "")

    def rows_per_rank(self, step: int) -> list[int]:
        """Count the rows that each rank had for a step."""
        of_ranks, first = [record.batches for record in self.ranks.records], self._batch_step(step)
        return [sum(batch.total_rows for batch in batches if batch.step == first) for batches in of_ranks]

    def _batch_step(self, step: int) -> int:
        """Return the step under which the batches of a step are recorded: the first step of a batch with several steps."""
        return max(batch.step for batch in self.record.batches if batch.step <= step)

    @cached_property
    def losses(self) -> list[compare.StepLoss]:
        """Loss of each batch."""
        return compare.compare_losses(self.ranks, self.one)

    @property
    def losses_at_step(self) -> Sequence[float | None]:
        """Each rank's first loss of the first step that differs."""
        return next(loss.ranks for loss in self.losses if loss.step == self._batch_step(self.step))

    @property
    def first_odd_batch(self) -> int | None:
        """The first batch of that step whose loss is finite in one process but not on all ranks. None if there is no such batch."""
        for index, loss in enumerate(self.losses):
            of_ranks = [value is None or math.isfinite(value) for value in loss.ranks]
            is_finite = loss.one is not None and math.isfinite(loss.one)
            if loss.step == self._batch_step(self.step) and is_finite and not all(of_ranks):
                return index
        return None

    @property
    def aliases(self) -> dict[str, str]:
        """Path where an unregistered parameter was found, by its name."""
        return self.one.records[0].module_info.aliases | self.info.aliases

    def name(self, parameter: str) -> str:
        """Return a parameter's name for messages, which is the path of an unregistered parameter."""
        return self.aliases.get(parameter, parameter)

    def names(self, rows: Iterable[compare.ComparedRow]) -> str:
        """List the parameters of rows, the first few."""
        return quoted([self.name(row.parameter) for row in rows])

    # ------------------------------------------------------------------ differences

    @property
    def step(self) -> int:
        """First step at which something differs."""
        return self.comparison.first_step or 1

    @cached_property
    def rows(self) -> list[compare.ComparedRow]:
        """Gradients at that step."""
        return self.comparison.first_rows()

    @property
    def wrong(self) -> list[compare.ComparedRow]:
        """Gradients that differ at that step."""
        return [row for row in self.rows if not row.exact]

    @property
    def wrong_buffers(self) -> list[compare.ComparedRow]:
        """Floating-point buffers that differ from one process at that step, but not between ranks."""
        rows = [row for row in self.comparison.buffers if row.step == self.comparison.first_step]
        return [row for row in rows if not row.exact and row.ranks_agree]

    @property
    def without_gradient(self) -> list[str]:
        """Trainable parameters without a gradient at any step in both runs."""
        rows = self.comparison.rows
        none = dict.fromkeys(row.parameter for row in rows if row.verdict == "no gradient")
        trained = {row.parameter for row in rows if row.verdict != "no gradient"}
        return [name for name in none if name not in trained]

    @property
    def desynchronized(self) -> list[compare.ComparedRow]:
        """Gradients that differ between ranks at that step."""
        return [row for row in self.rows if not row.ranks_agree]

    @property
    def desynchronized_updates(self) -> list[compare.ComparedRow]:
        """Parameters that differ between ranks after that step."""
        updates = self.comparison.updates
        return [row for row in updates if row.step == self.comparison.first_step and not row.ranks_agree]

    @cached_property
    def factors(self) -> tuple[float | None, float | None]:
        """The common ratio of the encoder's gradients and of the losses' gradients at the first step that differs.

        A ratio is None if it is not common to all gradients, or if there are no rows.
        """
        # use rows with a meaningful ratio, and coarse ones only if there are no others
        rows = [row for row in self.rows if not row.noise and row.ranks_agree]
        precise = [row for row in rows if row.tolerance < 0.25] or rows
        of_encoder = [row for row in precise if row.owner == "encoder"]
        of_losses = [row for row in precise if row.owner not in ("encoder", "unregistered")]
        return _common_factor(of_encoder), _common_factor(of_losses)

    @cached_property
    def rank_weights(self) -> list[float] | None:
        """Weights of the ranks' gradients in the gradient of one process at step 1, by least squares over all parameters together.

        If these do not explain the gradient, the weights of the gradients of each micro-batch are used. None if the ranks do not compute
        the plain mean of their local gradients, or if no weights explain the gradient of one process.
        """
        if not self.wrong or self.desynchronized or self.step != 1 or not self.is_local_mean:
            return None
        weights = self._weights_of(self.single_ranks)
        count = self.W * sum(batch.step == 1 for batch in self.record.batches)
        # this runs one process for each micro-batch, at most 16 at the same time
        if weights is None and self.info.automatic and self.W < count <= 16:
            weights = self._weights_of(self.runs.replays(self.off, *range(count), steps=1, whole_windows=True))
        return weights

    def _weights_of(self, alone: Sequence[Recording]) -> list[float] | None:
        gram = self._gradient_products(alone)
        of_ranks, with_one, total = gram[:-1, :-1], gram[:-1, -1], float(gram[-1, -1])
        if not torch.isfinite(gram).all() or total == 0:
            return None
        # solve the normal equations, because |g - sum w_r g_r|^2 depends only on the products
        weights = torch.linalg.lstsq(of_ranks, with_one[:, None], driver="gelsd").solution[:, 0]
        left = total - 2 * float(weights @ with_one) + float(weights @ of_ranks @ weights)
        unexplained = (max(0.0, left) / total) ** 0.5
        # the unexplained part may be rounding, but at most a twentieth
        allowed = max(1e-4, min(0.05, max(row.certain for row in self.wrong)))
        return [float(weight) for weight in weights] if unexplained <= allowed else None

    def _gradient_products(self, alone: Sequence[Recording]) -> Tensor:
        """Return the inner products of the gradients of all parts and of one process (the last row), computed piece by piece."""
        gram = torch.zeros(len(alone) + 1, len(alone) + 1, dtype=torch.float64)
        for name, of_one in self.one.entries(0, 1, "gradient").items():
            entries: list[Entry] = [run.entry(0, 1, "gradient", name) for run in alone]
            entries.append(of_one)
            # a parameter without a gradient on some rank does not contribute to the weights
            if not all(entry.exists and entry.shape == of_one.shape for entry in entries):
                continue
            for pieces in zip(*(entry.pieces() for entry in entries), strict=True):
                stacked = torch.stack([piece.double() for piece in pieces])
                gram += stacked @ stacked.T
        return gram


def _common_factor(rows: Sequence[compare.ComparedRow]) -> float | None:
    if not rows or any(row.verdict not in ("exact", "wrong scale") for row in rows):
        return None
    # a ratio is common if the differences do not exceed the errors
    ratios = [row.ratio for row in rows if row.ratio > 0]
    allowed = max(1e-3, 2 * max(row.certain for row in rows))
    if not ratios or max(ratios) > min(ratios) * (1 + allowed):
        return None
    return sum(ratios) / len(ratios)


# ---------------------------------------------------------------------- words of the evidence


def quoted(names: Sequence[str]) -> str:
    """List the first few names in code quotes."""
    return listed([f"`{name}`" for name in names], at_most=4)


def number_text(value: float | None, digits: int = 6) -> str:
    """Format a number, or ``none``."""
    return "none" if value is None else f"{value:.{digits}g}"


def first_part(error: Exception) -> str:
    """Return the text of an error without the stacks of processes."""
    return str(error).partition("\n\n")[0]


def comma_list(values: Iterable[object]) -> str:
    """List values with commas."""
    return ", ".join(map(str, values))


# matches advice in a fix to use our strategy, either before or after another piece of advice
_OUR_STRATEGY = re.compile(
    r"[,;] or (?:use|train under) strategy='ddp_losses'(?:, which [^.)]*)?|^(?:Use|Take) strategy='ddp_losses', or "
)


def advice(fix: str, strategy: Any) -> str:
    """Return a fix without the advice to use our strategy if it is already used.

    Args:
        fix: A sentence.
        strategy: Name or object.
    """
    is_ours = "ddp_losses" in (strategy if isinstance(strategy, str) else type(strategy).__module__)
    left = _OUR_STRATEGY.sub("", fix) if is_ours else fix
    return left[:1].upper() + left[1:]
