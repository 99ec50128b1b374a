"""Two recordings compared, tensor by tensor and step by step, and how large an error may be.

Tensors are read in pieces and summed in float64. A difference is a finding if it exceeds ``MULTIPLE`` times the effect of
rounding alone on that tensor, which runs that were moved by one rounding unit have measured. In 16 bits such a multiple would hide
faults. A gradient is equal there if it is within the spread of those runs, a finding well beyond it, and ``"unclear"`` between.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Literal

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
"""A rounding unit above this is one of 16 bits."""

_CERTAIN_SPREAD = 2.0  # from this multiple on a gradient of the first step differs. Later steps add up differences
_ALL_ROUNDING = 0.25  # a tensor that one rounding unit moves by this part of its size, or more, is only rounding
_ZERO_ERROR = 0.01  # tensors that agree better than this are no rounding
_CAP = 0.4  # of a first gradient's tolerance: a factor 1/2 is an error of 0.5
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class ComparedRow:
    """One tensor at one optimizer step, on the ranks and in one process.

    Attributes:
        step: Optimizer step, from 1.
        parameter: The parameter's name.
        owner: ``"encoder"``, the name of a loss, or ``"unregistered"``.
        what: ``"gradient"`` before the step, ``"parameter"`` after it (its ratio and cosine are those of the update), or ``"buffer"``
            after it.
        ratio: Norm on the ranks over norm in one process.
        cosine: Between the two.
        error: Norm of the difference over norm in one process.
        tolerance: Largest ``error`` that is equal: ``MULTIPLE`` times the estimated rounding error, or in 16 bits ``EQUAL_SPREAD``
            times the spread of one process's runs.
        ranks_agree: True if all ranks hold the same bits, or a buffer of the same values.
        rank: The rank with the largest error, which this row shows.
        verdict: The finding. ``"zero"`` is a gradient that is only rounding on both sides, so that ratio, cosine and
            error have no meaning: that of a bias before a batch norm. ``"no gradient"`` is None on both sides, and ``"unclear"`` an
            error between ``tolerance`` and ``certain``.
        certain: Largest ``error`` that is no finding. It is larger than ``tolerance`` in 16 bits alone.
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
        """Whether the tensor is zero up to rounding on both sides, or None, so that ratio and cosine have no meaning."""
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
        """Whether all tensors agree, as far as the precision tells."""
        return self.first_step is None

    @property
    def unclear(self) -> list[ComparedRow]:
        """Gradients with a difference that may be rounding and may be none."""
        return [row for row in self.rows if row.verdict == "unclear"]

    @property
    def first_step(self) -> int | None:
        """The first step at which something differs."""
        rows = (*self.rows, *self.updates, *self.buffers)
        return min((row.step for row in rows if not row.exact), default=None)

    def first_rows(self) -> list[ComparedRow]:
        """List the gradients of the first step at which something differs: later ones follow from it."""
        return [row for row in self.rows if row.step == self.first_step]

    def worst(self) -> float:
        """Return the largest error of a gradient at the first step at which something differs, else at any."""
        rows = self.first_rows() or self.rows
        return max((row.error for row in rows), default=0.0)


@dataclass(frozen=True)
class AccumulationParity:
    """Which one process the ranks equal if an optimizer step accumulates micro-batches: one that accumulates too, or one on all rows.

    Lightning's accumulation is the mean of the micro-batches' losses. With ``accumulation="window"`` it is the loss of all rows of a
    window. The two are equal if a loss is a mean over rows and every micro-batch counts as many of them.

    Attributes:
        micro_batches: The most that an optimizer step has.
        equals_micro_batches: True if one process that accumulates the same micro-batches, as Lightning does, has the ranks' gradients
            and parameters.
        equals_whole_window: True if one process on all rows of each window at once has them.
        micro_batches_error: Largest error of a gradient against the former, at the first step at which something differs, else at any.
        whole_window_error: Against the latter.
    """

    micro_batches: int
    equals_micro_batches: bool
    equals_whole_window: bool
    micro_batches_error: float
    whole_window_error: float

    def sentence(self) -> str:
        """Return it as a sentence."""
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
        """Return how far runs of one process are apart in a gradient. Few runs may agree by chance: no less than half the usual."""
        of_step = [value for (at, what, _), value in self.measured.items() if (at, what) == (step, "gradient")]
        usual = statistics.median(of_step) if of_step else 0.0
        return max(self.unit, min(usual / 2, _ALL_ROUNDING), self.measured.get((step, "gradient", name), 0.0))

    def of(self, step: int, what: str, name: str) -> float:
        """Return the largest error that is not a finding."""
        if self.fixed is not None:
            return self.fixed
        measured = self.measured.get((step, what, name), 0.0)
        allowed = MULTIPLE * max(self.unit, measured)
        # rounding of a few per cent must not hide a factor of two. Later steps add up the differences of earlier ones
        if step == 1 and what == "gradient" and measured < 0.6 * _CAP:
            if self.unit > COARSE:
                allowed = _CERTAIN_SPREAD * self._spread(step, name)
            return min(allowed, _CAP)
        return allowed

    def equal_up_to(self, step: int, what: str, name: str) -> float:
        """Return the largest error that is equal. In 16 bits a larger one may be rounding or none."""
        finding = self.of(step, what, name)
        if self.fixed is not None or self.unit <= COARSE or what != "gradient" or self.is_rounding(step, what, name):
            return finding
        return min(finding, EQUAL_SPREAD * self._spread(step, name))

    def is_rounding(self, step: int, what: str, name: str) -> bool:
        """Return whether a tensor is only rounding: one rounding unit moves it by a good part of its size."""
        if self.fixed is not None:
            return self.fixed >= MULTIPLE * _ALL_ROUNDING
        return max(self.unit, self.measured.get((step, what, name), 0.0)) >= _ALL_ROUNDING


def measure_tolerances(
    one: Recording, perturbed: Sequence[Recording], unit: float, fixed: float | None = None
) -> Tolerances:
    """Measure how far rounding alone moves each tensor: one process against itself, moved by one rounding unit.

    Args:
        one: One process.
        perturbed: Runs of one process, with parameters and inputs moved by one rounding unit at random.
        unit: The rounding unit. No tolerance is below ``MULTIPLE`` times it.
        fixed: The user's own tolerance, for everything.
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
    """Sizes that are small next to all tensors of a step together.

    Attributes:
        floor: No error is relative to less than this.
        noise: A difference below this is rounding, in small tensors too: the bias before a batch norm.
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
    # 16 bits round so coarsely that a multiple would hide real gradients
    zero = MULTIPLE * floor if eps < 1e-5 else floor
    quiet = frozenset(name for name, size in sizes.items() if size <= zero)
    return Scale(floor, 0.0 if strict else zero, zero, quiet)


# ---------------------------------------------------------------------- comparisons


def compare(ranks: Recording, one: Recording, allowed: Tolerances) -> Comparison:
    """Compare the tensors of the ranks with those of one process.

    Args:
        ranks: The recording of the ranks (or of one more process).
        one: The recording of one process.
        allowed: Largest errors that count as rounding.
    """
    owners: dict[str, str] = {}
    for record in (*one.records, *ranks.records):
        owners |= record.module_info.owners
    rows: list[ComparedRow] = []
    updates: list[ComparedRow] = []
    buffers: list[ComparedRow] = []
    strict = allowed.fixed is not None
    quiet: frozenset[str] = frozenset()  # if a gradient is rounding, so is its update
    for step in range(1, min(ranks.steps, one.steps) + 1):
        scale = _scale_at(one, step, "gradient", strict=strict)
        quiet |= scale.quiet
        rows += list(_rows_of_step(ranks, one, step, "gradient", allowed, owners, scale))
        scale = dataclasses.replace(_scale_at(one, step, "parameter", strict=strict), quiet=quiet)
        updates += list(_rows_of_step(ranks, one, step, "parameter", allowed, owners, scale))
        buffers += list(_rows_of_buffers(ranks, one, step, allowed))
    return Comparison(rows, updates, buffers)


def _rows_of_buffers(ranks: Recording, one: Recording, step: int, allowed: Tolerances) -> Iterator[ComparedRow]:
    """Compare the floating buffers of one step. Blocks of one buffer, and caches, may have other shapes."""
    caches = one.records[0].module_info.caches
    for name, theirs in one.entries(0, step, "buffer").items():
        entries = ranks.entries_of(step, "buffer", name)
        has_one_shape = all(entry.shape == theirs.shape for entry in entries)
        if not has_one_shape and (name in caches or ranks.shard_places(name) is not None):
            continue
        if any(entry.exists and entry.dtype != theirs.dtype for entry in entries) or theirs.dtype not in _EPS:
            continue
        tolerance = allowed.of(step, "buffer", name)
        rows = []
        for rank, entry in enumerate(entries):
            row = ComparedRow(step, name, "buffer", "buffer", tolerance=tolerance, certain=tolerance, rank=rank)
            rows.append(_compare_entries(row, entry, theirs, _NO_SCALE, ()))
        worst = max(rows, key=lambda row: row.sortable_error)
        # the same values on all ranks, or those of one process
        agree = worst.exact or ranks.ranks_agree(step, "buffer", name)
        yield dataclasses.replace(worst, ranks_agree=agree)


def compare_losses(ranks: Recording, one: Recording) -> list[StepLoss]:
    """Pair the ranks' losses with those of one process, batch by batch, unless it had all batches of a step as one."""
    # as many batches in each step, in the steps that both have made
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


def is_mean_of(parts: Sequence[Recording], ranks: Recording, allowed: Tolerances, factor: float = 1.0) -> bool:
    """Return whether the ranks' gradients at step 1 are the mean of those of ``parts``, times a factor."""
    for name, entry in ranks.entries(0, 1, "gradient").items():
        entries = [part.entry(0, 1, "gradient", name) for part in parts]
        if not entry.exists and not any(each.exists for each in entries):
            continue
        if not entry.exists or not all(each.exists and each.shape == entry.shape for each in entries):
            return False
        off = size = 0.0
        for ours, *theirs in zip(entry.pieces(), *(each.pieces() for each in entries), strict=True):
            mean = torch.stack([piece.double() for piece in theirs]).mean(0) * factor
            off += float((ours.double() - mean).square().sum())
            size += float(mean.square().sum())
        if not math.sqrt(off) <= allowed.of(1, "gradient", name) * math.sqrt(size):
            return False
    return True


# ---------------------------------------------------------------------- one tensor


def _rows_of_step(
    ranks: Recording, one: Recording, step: int, what: What, allowed: Tolerances, owners: dict[str, str], scale: Scale
) -> Iterator[ComparedRow]:
    """Compare the tensors of one step and kind, in the module's order. Of ranks that differ, show the one with the largest error."""
    for name in dict.fromkeys([*one.names(step, what), *ranks.names(step, what)]):
        # blocks of one parameter differ by design: the tensor that they make is compared
        joined = ranks.stored_shards(step, what, name)
        entries = ranks.entries_of(step, what, name) if joined is None else [joined]
        agree = joined is not None or ranks.ranks_agree(step, what, name)
        tolerance, certain = allowed.equal_up_to(step, what, name), allowed.of(step, what, name)
        owner = owners.get(name, "encoder")
        blank = ComparedRow(step, name, owner, what, tolerance=tolerance, certain=certain, ranks_agree=agree)
        is_rounding = allowed.is_rounding(step, what, name)
        # each content once, with the first rank that holds it
        rows, seen = [], set[str]()
        for rank, entry in enumerate(entries):
            if entry.digest not in seen:
                seen.add(entry.digest)
                row = dataclasses.replace(blank, rank=rank)
                start = _before_step(ranks, one, rank, step, what, name)
                theirs = one.entry(0, step, what, name)
                rows.append(_compare_entries(row, entry, theirs, scale, start, is_rounding=is_rounding))
        yield max(rows, key=lambda row: row.sortable_error)


def _before_step(ranks: Recording, one: Recording, rank: int, step: int, what: What, name: str) -> list[Entry]:
    """Find a parameter on both sides before the step, so that updates are compared. Gradients have none."""
    if what != "parameter":
        return []
    kind: Kind = "initial" if step == 1 else "parameter"
    ours = ranks.stored_shards(step - 1, kind, name) or ranks.entry(rank, step - 1, kind, name)
    theirs = one.entry(0, step - 1, kind, name)
    return [ours, theirs] if ours.exists and theirs.exists and ours.shape == theirs.shape else []


def _compare_entries(
    row: ComparedRow, ours: Entry, theirs: Entry, scale: Scale, start: Sequence[Entry], *, is_rounding: bool = False
) -> ComparedRow:
    """Fill in ratio, cosine, errors and verdict of a row that is exact so far."""
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
    verdict = _judge(found, max(our_norm, their_norm), off_norm, scale, is_rounding=is_rounding)
    return dataclasses.replace(found, verdict=verdict)


def _compare_with_none(row: ComparedRow, ours: Entry, theirs: Entry) -> ComparedRow:
    """Fill in a row of which one side or both have no tensor. A gradient of zero is as good as none: the optimizer does the same."""
    if ours.exists == theirs.exists:
        return dataclasses.replace(row, verdict="no gradient")
    if _is_zero(ours) and _is_zero(theirs):
        return row
    ratio = 0.0 if theirs.exists else math.inf
    return dataclasses.replace(row, ratio=ratio, cosine=0.0, error=math.inf, verdict="missing")


def _judge(row: ComparedRow, norm: float, off_norm: float, scale: Scale, *, is_rounding: bool) -> Verdict:
    """Give the verdict on two tensors that differ: rounding, a factor, or another direction."""
    # rounding: by the tensor's own tolerance, next to all tensors together, or as the update of a gradient of rounding
    is_quiet_update = row.what == "parameter" and row.parameter in scale.quiet
    is_zero = row.what == "gradient" and norm <= scale.zero
    if row.error <= row.tolerance or off_norm <= scale.noise or is_quiet_update or is_zero:
        if row.what == "gradient" and (is_zero or is_rounding) and row.error > _ZERO_ERROR:
            return "zero"
        return "exact"
    if row.error <= row.certain:
        return "unclear"
    # the rest after the best factor is taken out
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
    """Sum over ours, theirs and their difference in float64, or over how much both changed since ``start``, a piece at a time.

    Returns:
        Scalar products of the three with each other. None if different elements are not finite.
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


_Calls = list[tuple[tuple[ModuleCall, ...], ModuleCall]]  # of a module, on the ranks and in one process


def _traced_calls(ranks: Recording, one: Recording) -> _Calls:
    columns = zip(*(record.trace for record in ranks.records), strict=False)
    pairs = zip(columns, one.records[0].trace, strict=False)
    return [(column, call) for column, call in pairs if all(each.name == call.name for each in column)]


def first_odd_activation(ranks: Recording, one: Recording, allowed: float) -> tuple[ModuleCall, float] | None:
    """Return the first call of a module, in forward order, whose output differs between two traced runs, and by how much.

    Args:
        ranks: Traced run of the ranks.
        one: Traced run of one process on the joined batches.
        allowed: Relative difference that is rounding.
    """
    for column, call in _traced_calls(ranks, one):
        off = _row_error([each.output for each in column], call.output)
        if not off <= allowed:
            return call, off
    return None


def first_traced_difference(ranks: Recording, one: Recording, allowed: float) -> str:
    """Return the first place in forward order at which two traced runs differ, as a sentence.

    Args:
        ranks: Traced run of the ranks.
        one: Traced run of one process on the joined batches.
        allowed: Relative difference that is rounding.
    """
    odd = first_odd_activation(ranks, one, allowed)
    if odd is not None:
        call, off = odd
        return f"Activations part first at `{call.name}` ({call.kind}), by {off:.2g}, in forward order."
    # gradients from behind. Each rank's loss is a mean over its own rows, W times as large as in the mean of all
    for column, call in reversed(_traced_calls(ranks, one)):
        off = _row_error([each.gradient for each in column], call.gradient, divisor=float(ranks.ranks))
        if not off <= allowed:
            where = "from the loss backwards; all activations that are rows agree"
            return f"Gradients part first at `{call.name}` ({call.kind}), by {off:.2g}, {where}."
    return (
        "Activations and gradients of all modules that give one row per sample agree; "
        "what parts is inside the loss or beside the modules."
    )


def _row_error(parts: Sequence[list[list[float]]], whole: list[list[float]], divisor: float = 1.0) -> float:
    """Compare the rows of all ranks with those of one process. Return 0 if there are not as many: a loss has one value on each rank."""
    rows = list(chain.from_iterable(parts))
    if not all(parts) or len(rows) != len(whole):
        return 0.0
    ours, theirs = torch.tensor(rows, dtype=torch.float64) / divisor, torch.tensor(whole, dtype=torch.float64)
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-300))
