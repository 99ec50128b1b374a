"""Comparison of two recordings, tensor by tensor and step by step, and the allowed size of errors.

Tensors are read in pieces and summed in float64. A difference is a finding if it exceeds ``MULTIPLE`` times the effect of rounding on that
tensor, which is measured in runs that were perturbed by one rounding unit. In 16 bits, such a multiple would hide faults. There, a gradient
is equal if it is within the spread of these runs, a finding if it is well outside the spread, and ``"unclear"`` in between.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.audit.rank_record import Entry, Kind, ModuleCall, Recording

Verdict = Literal["exact", "zero", "no gradient", "unclear", "wrong scale", "wrong direction", "missing", "not finite"]
What = Literal["gradient", "parameter", "buffer"]

MULTIPLE = 16.0
"""A difference is a finding if it exceeds this multiple of the estimated rounding error."""

EQUAL_SPREAD = 0.75
"""In 16 bits a gradient is equal up to this multiple of the spread of one process's runs."""

COARSE = 2.0**-12
"""A rounding unit above this is that of a 16-bit dtype."""

_CERTAIN_SPREAD = 2.0  # a gradient of the first step differs beyond this multiple. Later steps accumulate differences
_ALL_ROUNDING = 0.25  # a tensor that one rounding unit changes by at least this part of its size is only rounding
_ONLY_ROUNDING = MULTIPLE * _ALL_ROUNDING  # the error that is not a finding in such a tensor
_ZERO_ERROR = 0.01  # tensors with a smaller error are not reported as rounding
_CAP = 0.4  # upper limit of a first gradient's tolerance, since a factor 1/2 is an error of 0.5
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class ComparedRow:
    """One tensor at one optimizer step, on the ranks and in one process.

    Attributes:
        step: Optimizer step, from 1.
        parameter: The parameter's name.
        owner: ``"encoder"``, the name of a loss, or ``"unregistered"``.
        what: ``"gradient"`` before the step, ``"parameter"`` after the step (with ratio and cosine of the update), or ``"buffer"`` after
            the step.
        ratio: Norm on the ranks divided by norm in one process.
        cosine: Cosine between the two tensors.
        error: Norm of the difference divided by norm in one process.
        tolerance: Largest ``error`` that counts as equal: ``MULTIPLE`` times the estimated rounding error, or in 16 bits ``EQUAL_SPREAD``
            times the spread of one process's runs.
        ranks_agree: True if the tensor has the same bits on all ranks, or for a buffer equal values.
        rank: The rank with the largest error, whose values are stored in this row.
        verdict: The finding. ``"zero"`` denotes a gradient that is only rounding on both sides, so that ratio, cosine and error are
            meaningless (the gradient of a bias before a batch norm). ``"no gradient"`` denotes None on both sides, and ``"unclear"`` an
            error between ``tolerance`` and ``certain``.
        certain: Largest ``error`` that is not a finding. It exceeds ``tolerance`` only in 16 bits.
    """

    step: int
    parameter: str
    owner: str
    what: What
    ratio: float = 1.0
    cosine: float = 1.0
    error: float = 0.0
    tolerance: float = 0.0
    ranks_agree: bool = True
    rank: int = 0
    verdict: Verdict = "exact"
    certain: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether the difference may be rounding, and the ranks agree."""
        return self.verdict in ("exact", "zero", "no gradient", "unclear") and self.ranks_agree

    @property
    def sortable_error(self) -> float:
        """The error, infinite if it is NaN."""
        return math.inf if math.isnan(self.error) else self.error

    @property
    def noise(self) -> bool:
        """Whether the tensor is zero up to rounding or None on both sides, so that ratio and cosine are meaningless."""
        if self.verdict in ("zero", "no gradient"):
            return True
        return self.verdict == "exact" and (self.tolerance > 0.5 or not 0.5 < self.ratio < 2)


@dataclass(frozen=True)
class StepLoss:
    """The loss of one batch.

    Attributes:
        step: Optimizer step that the batch belongs to.
        ranks: Each rank's value, None if training_step returned none.
        mean: Mean of the ranks.
        one: Value in one process.
        rows: Samples on each rank.
    """

    step: int
    ranks: tuple[float | None, ...]
    mean: float | None
    one: float | None
    rows: tuple[int, ...]


@dataclass
class Comparison:
    """All rows of two recordings.

    Attributes:
        rows: Gradients, in forward order of the parameters, step by step.
        updates: Parameters after the steps.
        buffers: Buffers of floating numbers after the steps.
    """

    rows: list[ComparedRow]
    updates: list[ComparedRow]
    buffers: list[ComparedRow] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether all tensors agree within the precision."""
        return self.first_step is None

    @property
    def unclear(self) -> list[ComparedRow]:
        """Gradients with a difference that may or may not be rounding."""
        return [row for row in self.rows if row.verdict == "unclear"]

    @property
    def first_step(self) -> int | None:
        """The first step at which something differs."""
        rows = (*self.rows, *self.updates, *self.buffers)
        return min((row.step for row in rows if not row.exact), default=None)

    def first_rows(self) -> list[ComparedRow]:
        """List the gradients of the first step at which something differs. Later differences follow from it."""
        return [row for row in self.rows if row.step == self.first_step]

    def worst(self) -> float:
        """Return the largest error of a gradient at the first step at which something differs, or at any step if nothing differs."""
        rows = self.first_rows() or self.rows
        return max((row.error for row in rows), default=0.0)


@dataclass(frozen=True)
class AccumulationParity:
    """Whether ranks that accumulate micro-batches equal one process that also accumulates, or one process on all rows.

    Lightning's accumulation is the mean of the micro-batches' losses. With ``accumulation="window"`` it is the loss of all rows of a
    window. The two are equal if a loss is a mean over rows and every micro-batch counts the same number of rows.

    Attributes:
        micro_batches: Largest number of micro-batches in an optimizer step.
        equals_micro_batches: True if the ranks have the same gradients and parameters as one process that accumulates the same
            micro-batches with Lightning's rule.
        equals_whole_window: True if the ranks have the same gradients and parameters as one process on all rows of each window as one
            batch.
        micro_batches_error: Largest error of a gradient compared with the former, at the first step at which something differs, or at any
            step if nothing differs.
        whole_window_error: Largest error of a gradient compared with the latter.
    """

    micro_batches: int
    equals_micro_batches: bool
    equals_whole_window: bool
    micro_batches_error: float
    whole_window_error: float

    def sentence(self) -> str:
        """Return the result as a sentence."""
        micro = "one process that accumulates the same micro-batches"
        whole = "one process on all rows of each window at once"
        processes = (
            (micro, self.equals_micro_batches, self.micro_batches_error),
            (whole, self.equals_whole_window, self.whole_window_error),
        )
        equal = [text for text, is_equal, _ in processes if is_equal]
        others = [f"{text} (error {error:.1e})" for text, is_equal, error in processes if not is_equal]
        parts = [("equal", equal), ("differ from", others)]
        said = ", and ".join(f"{verb} {' and '.join(texts)}" for verb, texts in parts if texts)
        return f"Accumulation of up to {self.micro_batches} micro-batches a step: the ranks {said}."


# ---------------------------------------------------------------------- tolerances


@dataclass
class Tolerances:
    """How large an error may be, by step, kind and parameter. ``fixed`` is the user's own choice."""

    fixed: float | None = None
    unit: float = 0.0
    measured: dict[tuple[int, str, str], float] = field(default_factory=dict)

    def _spread(self, step: int, name: str) -> float:
        """Return the spread of a gradient between runs of one process.

        It is at least half the median spread, because a few runs may agree by chance.
        """
        of_step = [value for (at, what, _), value in self.measured.items() if (at, what) == (step, "gradient")]
        usual = statistics.median(of_step) if of_step else 0.0
        return max(self.unit, min(usual / 2, _ALL_ROUNDING), self.measured.get((step, "gradient", name), 0.0))

    def of(self, step: int, what: str, name: str) -> float:
        """Return the largest error that is not a finding."""
        if self.fixed is not None:
            return self.fixed
        measured = self.measured.get((step, what, name), 0.0)
        allowed = MULTIPLE * max(self.unit, measured)
        # rounding of a few per cent must not hide a factor of two. Later steps accumulate the differences of earlier ones
        if step == 1 and what == "gradient" and measured < 0.6 * _CAP:
            if self.unit > COARSE:
                allowed = _CERTAIN_SPREAD * self._spread(step, name)
            return min(allowed, _CAP)
        return allowed

    def equal_up_to(self, step: int, what: str, name: str) -> float:
        """Return the largest error that counts as equal. In 16 bits, a larger error may or may not be rounding."""
        finding = self.of(step, what, name)
        is_coarse = self.fixed is None and self.unit > COARSE and what == "gradient"
        if not is_coarse or finding >= _ONLY_ROUNDING:
            return finding
        return min(finding, EQUAL_SPREAD * self._spread(step, name))


def measure_tolerances(
    one: Recording, perturbed: Sequence[Recording], unit: float, fixed: float | None = None
) -> Tolerances:
    """Measure the effect of rounding on each tensor, by comparing one process with runs that are perturbed by one rounding unit.

    Args:
        one: One process.
        perturbed: Runs of one process, with parameters and inputs moved by one rounding unit in random directions.
        unit: The rounding unit. No tolerance is below ``MULTIPLE`` times it.
        fixed: The user's tolerance for all tensors.
    """
    allowed = Tolerances(fixed, unit)
    for other in perturbed:
        comparison = compare(other, one, Tolerances(math.inf))
        for row in (*comparison.rows, *comparison.updates, *comparison.buffers):
            key = (row.step, row.what, row.parameter)
            if math.isfinite(row.error):
                allowed.measured[key] = max(allowed.measured.get(key, 0.0), row.error)
    return allowed


@dataclass(frozen=True)
class Scale:
    """Sizes that are small compared with all tensors of a step together.

    Attributes:
        floor: Smallest norm by which an error is divided.
        noise: A difference below this is rounding, even in small tensors such as the bias before a batch norm.
        zero: A tensor below this is only rounding, for any tolerance.
        quiet: Names of the tensors that are zero.
    """

    floor: float
    noise: float
    zero: float
    quiet: frozenset[str]


_NO_SCALE = Scale(0.0, 0.0, 0.0, frozenset())


def _scale_at(one: Recording, step: int, what: What, *, strict: bool) -> Scale:
    """Measure the scale of one process's tensors. With ``strict`` no difference of a nonzero tensor is noise."""
    if what == "buffer":
        return _NO_SCALE
    sizes: dict[str, float] = {}
    eps = 0.0
    for name, entry in one.entries(0, step, what).items():
        if entry.exists and entry.dtype in _EPS:
            eps = max(eps, _EPS[entry.dtype])
            start = _before_step(one, one, 0, step, what, name)
            products = _sum_pieces(entry, entry, start)
            assert products is not None
            sizes[name] = math.sqrt(float(products[1, 1]))
    floor = eps * math.sqrt(sum(size * size for size in sizes.values()))
    if not math.isfinite(floor):
        return _NO_SCALE
    # 16-bit rounding is so coarse that a multiple would hide real gradients
    zero = MULTIPLE * floor if eps < 1e-5 else floor
    quiet = frozenset(name for name, size in sizes.items() if size <= zero)
    return Scale(floor, 0.0 if strict else zero, zero, quiet)


# ---------------------------------------------------------------------- comparisons


def compare(ranks: Recording, one: Recording, allowed: Tolerances) -> Comparison:
    """Compare the tensors of the ranks with the tensors of one process.

    Args:
        ranks: The recording of the ranks (or of another single process).
        one: The recording of one process.
        allowed: Largest errors that count as rounding.
    """
    owners: dict[str, str] = {}
    for record in (*one.records, *ranks.records):
        owners |= record.module_info.owners
    found: dict[What, list[ComparedRow]] = {"gradient": [], "parameter": [], "buffer": []}
    strict = allowed.fixed is not None
    quiet: frozenset[str] = frozenset()  # if a gradient is only rounding, its update is too
    for step in range(1, min(ranks.steps, one.steps) + 1):
        for what in found:
            scale = _scale_at(one, step, what, strict=strict)
            if what == "gradient":
                quiet |= scale.quiet
            scale = dataclasses.replace(scale, quiet=quiet)
            found[what] += _rows_of_step(ranks, one, step, what, allowed, owners, scale)
    return Comparison(found["gradient"], found["parameter"], found["buffer"])


def compare_losses(ranks: Recording, one: Recording) -> list[StepLoss]:
    """Pair the ranks' losses with the losses of one process batch by batch, unless that process joined all batches of a step."""
    # both must have the same number of batches in each common step
    steps = min(ranks.steps, one.steps)
    of_ranks, of_one = ([batch.step for batch in run.records[0].batches if batch.step <= steps] for run in (ranks, one))
    losses_of_one = one.records[0].losses if of_ranks == of_one else []
    found = []
    columns = zip(*(record.batches for record in ranks.records), strict=False)
    losses = zip(*(record.losses for record in ranks.records), strict=False)
    for column, values, loss in zip(columns, losses, chain(losses_of_one, repeat(None)), strict=False):
        known = [value for value in values if value is not None]
        mean = sum(known) / len(known) if known else None
        rows = tuple(batch.total_rows for batch in column)
        found.append(StepLoss(column[0].step, values, mean, loss, rows))
    return found


# ---------------------------------------------------------------------- one tensor


def _rows_of_step(
    ranks: Recording, one: Recording, step: int, what: What, allowed: Tolerances, owners: dict[str, str], scale: Scale
) -> Iterator[ComparedRow]:
    """Compare the tensors of one step and kind, in the module's order. If ranks differ, yield the row with the largest error."""
    for name in dict.fromkeys([*one.names(step, what), *ranks.names(step, what)]):
        entries, theirs = ranks.entries_of(step, what, name), one.entry(0, step, what, name)
        if what == "buffer" and not _are_comparable(
            entries, theirs, is_cache=name in one.records[0].module_info.caches
        ):
            continue
        tolerance, certain = allowed.equal_up_to(step, what, name), allowed.of(step, what, name)
        owner = "buffer" if what == "buffer" else owners.get(name, "encoder")
        blank = ComparedRow(step, name, owner, what, tolerance=tolerance, certain=certain)
        # compare each distinct content once, for the first rank that has it
        rows, seen = [], set[str]()
        for rank, entry in enumerate(entries):
            if entry.digest not in seen:
                seen.add(entry.digest)
                row = dataclasses.replace(blank, rank=rank)
                start = _before_step(ranks, one, rank, step, what, name)
                rows.append(_compare_entries(row, entry, theirs, scale, start))
        worst = max(rows, key=lambda row: row.sortable_error)
        # buffers agree too if all ranks have the values of one process
        agree = len(seen) == 1 or (what == "buffer" and worst.exact)
        yield dataclasses.replace(worst, ranks_agree=agree)


def _are_comparable(entries: Sequence[Entry], theirs: Entry, *, is_cache: bool) -> bool:
    """Return whether buffers contain floating-point numbers of one dtype. Caches may have different shapes."""
    if is_cache and any(entry.shape != theirs.shape for entry in entries):
        return False
    return theirs.dtype in _EPS and all(entry.dtype == theirs.dtype for entry in entries if entry.exists)


def _before_step(ranks: Recording, one: Recording, rank: int, step: int, what: What, name: str) -> list[Entry]:
    """Return a parameter on both sides before the step, so that updates can be compared, or an empty list for gradients."""
    if what != "parameter":
        return []
    kind: Kind = "initial" if step == 1 else "parameter"
    ours = ranks.entry(rank, step - 1, kind, name)
    theirs = one.entry(0, step - 1, kind, name)
    return [ours, theirs] if ours.exists and theirs.exists and ours.shape == theirs.shape else []


def _compare_entries(row: ComparedRow, ours: Entry, theirs: Entry, scale: Scale, start: Sequence[Entry]) -> ComparedRow:
    """Return a row with ratio, cosine, error and verdict filled in."""
    if not ours.exists or not theirs.exists:
        return _compare_with_none(row, ours, theirs)
    if ours.shape != theirs.shape:
        return _incomparable(row, "wrong direction")
    if ours.digest == theirs.digest:
        return row

    # norms, scalar product and differences
    products = _sum_pieces(ours, theirs, start)
    if products is None:
        return _incomparable(row, "not finite")
    our_norm, their_norm, off_norm = products.diagonal().sqrt().tolist()
    error = _ratio_of(off_norm, max(their_norm, scale.floor))
    ratio = _ratio_of(our_norm, their_norm)
    cosine = 0.0
    if our_norm and their_norm:
        cosine = float(products[0, 1]) / (our_norm * their_norm)
    elif our_norm == their_norm:  # both zero
        ratio = cosine = 1.0

    found = dataclasses.replace(row, ratio=ratio, cosine=cosine, error=error)
    verdict = _judge(found, max(our_norm, their_norm), off_norm, scale)
    return dataclasses.replace(found, verdict=verdict)


def _compare_with_none(row: ComparedRow, ours: Entry, theirs: Entry) -> ComparedRow:
    """Return a row for a tensor that is missing on one or both sides. A zero gradient equals a missing one for the optimizer."""
    if ours.exists == theirs.exists:
        return dataclasses.replace(row, verdict="no gradient")
    if _is_zero(ours) and _is_zero(theirs):
        return row
    ratio = 0.0 if theirs.exists else math.inf
    return dataclasses.replace(row, ratio=ratio, cosine=0.0, error=math.inf, verdict="missing")


def _judge(row: ComparedRow, norm: float, off_norm: float, scale: Scale) -> Verdict:
    """Return the verdict on two tensors that differ: rounding, a factor, or another direction."""
    # rounding is judged by the tensor's tolerance, by the size of all tensors, or by a gradient that is only rounding
    is_quiet_update = row.what == "parameter" and row.parameter in scale.quiet
    is_zero = row.what == "gradient" and norm <= scale.zero
    if row.error <= row.tolerance or off_norm <= scale.noise or is_quiet_update or is_zero:
        if row.what == "gradient" and (is_zero or row.certain >= _ONLY_ROUNDING) and row.error > _ZERO_ERROR:
            return "zero"
        return "exact"
    if row.error <= row.certain:
        return "unclear"
    # compute the part that no factor explains
    across = math.sqrt(max(0.0, 1 - row.cosine**2)) if row.cosine > 0 else 1.0
    return "wrong scale" if across <= max(row.certain, 1e-7) else "wrong direction"


def _incomparable(row: ComparedRow, verdict: Verdict) -> ComparedRow:
    return dataclasses.replace(row, ratio=math.nan, cosine=math.nan, error=math.inf, verdict=verdict)


def _is_zero(entry: Entry) -> bool:
    return not entry.exists or not any(bool(piece.any()) for piece in entry.pieces())


def _ratio_of(part: float, total: float) -> float:
    if total:
        return part / total
    return 0.0 if part == 0 else math.inf


def _sum_pieces(ours: Entry, theirs: Entry, start: Sequence[Entry]) -> Tensor | None:
    """Sum the products of ours, theirs and their difference in float64, piece by piece. With ``start``, use the changes of both since then.

    Returns:
        Inner products of the three with each other, or None if different elements are not finite.
    """
    products = torch.zeros(3, 3, dtype=torch.float64)
    for pieces in zip(*(entry.pieces() for entry in (ours, theirs, *start)), strict=True):
        a, b, *before = (piece.double() for piece in pieces)
        odd = ~torch.isfinite(a)
        if not torch.equal(odd, ~torch.isfinite(b)):
            return None
        a, b = a.masked_fill(odd, 0.0), b.masked_fill(odd, 0.0)  # the same elements overflow in both
        off = a - b
        if before:
            a, b = a - before[0], b - before[1]
        rows = torch.stack([a, b, off])
        products += rows @ rows.T
    return products


# ---------------------------------------------------------------------- traced steps


class TracedDifference(NamedTuple):
    """The first difference between two traced runs.

    Attributes:
        what: ``"Activations"``, or ``"Gradients"`` of activations.
        call: Call of the module whose output, or its gradient, differs.
        error: Relative difference.
    """

    what: str
    call: ModuleCall
    error: float


def first_traced_difference(ranks: Recording, one: Recording, allowed: float) -> TracedDifference | None:
    """Return the first difference between two traced runs: of activations in forward order, then of gradients in reverse.

    Args:
        ranks: Traced run of the ranks.
        one: Traced run of one process on the joined batches.
        allowed: Relative difference that is rounding.
    """
    columns = zip(*(record.trace for record in ranks.records), strict=False)
    pairs = zip(columns, one.records[0].trace, strict=False)
    calls = [(column, call) for column, call in pairs if all(each.name == call.name for each in column)]
    for column, call in calls:
        off = _row_error([each.output for each in column], call.output)
        if not off <= allowed:
            return TracedDifference("Activations", call, off)
    # gradients of a local mean are W times as large as gradients of the mean over all ranks
    for column, call in reversed(calls):
        off = _row_error([each.gradient for each in column], call.gradient, divisor=float(ranks.ranks))
        if not off <= allowed:
            return TracedDifference("Gradients", call, off)
    return None


def _row_error(parts: Sequence[list[list[float]]], whole: list[list[float]], divisor: float = 1.0) -> float:
    """Return the error of the ranks' rows compared with one process, or 0 if the numbers of rows differ (a loss has one value per rank)."""
    rows = list(chain.from_iterable(parts))
    if not all(parts) or len(rows) != len(whole):
        return 0.0
    ours, theirs = torch.tensor(rows, dtype=torch.float64) / divisor, torch.tensor(whole, dtype=torch.float64)
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-300))
