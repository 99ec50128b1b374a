"""Two recordings compared, tensor by tensor and step by step, and how large an error may be. Nothing here trains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lightning_ddp_losses.audit.rank_record import Entry, Recording


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


# ----------------------------------------------------------------------

Verdict = Literal["exact", "wrong scale", "wrong direction", "missing", "not finite"]
What = Literal["gradient", "parameter"]

MULTIPLE = 16.0
"""A difference is a finding where it exceeds this multiple of the estimated rounding error."""
_CAP = 0.4  # a factor 1/2 is an error of 0.5
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Row:
    """One tensor at one optimizer step, on the ranks and in one process.

    Attributes:
        step: Optimizer step, from 1.
        parameter: The parameter's name.
        owner: ``"encoder"``, the name of a loss, or ``"unregistered"``.
        what: ``"gradient"`` before the step, or ``"parameter"`` after it (its ratio and cosine are those of the update).
        ratio: Norm on the ranks over norm in one process.
        cosine: Between the two.
        error: Norm of the difference over norm in one process.
        max_error: Largest difference over largest value in one process.
        tolerance: What ``error`` may be: ``MULTIPLE`` times the estimated rounding error.
        ranks_agree: Whether all ranks hold the same bits.
        rank: The rank with the largest error, which this row shows.
        verdict: The finding.
    """

    step: int
    parameter: str
    owner: str
    what: What
    ratio: float
    cosine: float
    error: float
    max_error: float
    tolerance: float
    ranks_agree: bool
    rank: int
    verdict: Verdict

    @property
    def exact(self) -> bool:
        """Whether the difference is rounding, and the ranks agree."""
        return self.verdict == "exact" and self.ranks_agree

    @property
    def noise(self) -> bool:
        """Whether the tensor is zero up to rounding on both sides, so that ratio and cosine say nothing."""
        return self.verdict == "exact" and (self.tolerance > 0.5 or not 0.5 < self.ratio < 2)


@dataclass
class _Sums:
    """What a pass over two tensors adds up, in float64."""

    ours: float = 0.0
    theirs: float = 0.0
    dot: float = 0.0
    off: float = 0.0
    largest: float = 0.0
    largest_off: float = 0.0
    finite: bool = True

    def add(self, ours: Tensor, theirs: Tensor, off: Tensor) -> None:
        self.ours += float(ours.dot(ours))
        self.theirs += float(theirs.dot(theirs))
        self.dot += float(ours.dot(theirs))
        self.off += float(off.dot(off))
        self.largest = max(self.largest, float(theirs.abs().max()))
        self.largest_off = max(self.largest_off, float(off.abs().max()))


def _sums(ours: Entry, theirs: Entry, before: tuple[Entry, Entry] | None) -> _Sums:
    """Both tensors, or how much both changed since ``before``; a piece at a time."""
    sums = _Sums()
    streams = [ours.pieces(), theirs.pieces(), *(entry.pieces() for entry in before or ())]
    for pieces in zip(*streams, strict=True):
        a, b, *since = (piece.double() for piece in pieces)
        odd = ~torch.isfinite(a)
        if bool(odd.any()) or not bool(torch.isfinite(b).all()):
            if not torch.equal(odd, ~torch.isfinite(b)):
                sums.finite = False
                return sums
            a, b = a.masked_fill(odd, 0.0), b.masked_fill(odd, 0.0)  # the same elements overflow in both
        off = a - b
        if since:
            a, b = a - since[0], b - since[1]
        sums.add(a, b, off)
    return sums


@dataclass
class Tolerances:
    """How large an error may be, by step, kind and parameter; ``fixed`` where the user said so."""

    fixed: float | None = None
    unit: float = 0.0
    measured: dict[tuple[int, str, str], float] = field(default_factory=dict)

    def of(self, step: int, what: str, name: str) -> float:
        """Largest error that is not a finding."""
        if self.fixed is not None:
            return self.fixed
        measured = self.measured.get((step, what, name), 0.0)
        allowed = MULTIPLE * max(self.unit, measured)
        # rounding of a few per cent must not hide a factor of two; later steps add up what earlier ones left
        return min(allowed, _CAP) if step == 1 and what == "gradient" and measured < 0.6 * _CAP else allowed


def rows_of_step(
    ranks: Recording, one: Recording, step: int, what: What, allowed: Tolerances, owner: dict[str, str], scale: Scale
) -> Iterator[Row]:
    """The rows of one step and kind, in the module's order; of ranks that differ, the one with the largest error."""
    theirs = one.entries(0, step, what)
    order = dict.fromkeys([*theirs, *ranks.names(step, what)])
    for name in order:
        whole = ranks.joined(step, what, name)  # blocks of one parameter, which differ by design
        found = _distinct(ranks, step, what, name) if whole is None else [(0, whole)]
        other = theirs.get(name)
        agree = whole is not None or ranks.agree(step, what, name) or not any(entry.exists for _, entry in found)
        rows = [
            _row(
                step,
                name,
                owner.get(name, "encoder"),
                what,
                rank,
                entry,
                other,
                agree,
                allowed.of(step, what, name),
                scale,
                _before(ranks, one, rank, step, what, name),
            )
            for rank, entry in found
        ]
        yield max(rows, key=lambda row: math.inf if math.isnan(row.error) else row.error)


def _distinct(ranks: Recording, step: int, what: str, name: str) -> list[tuple[int, Entry]]:
    """What the ranks hold, each content once, with the first rank that holds it."""
    found: dict[str, tuple[int, Entry]] = {}
    for rank in range(ranks.ranks):
        entry = ranks.entries(rank, step, what).get(name, Entry("", (), "", ""))
        found.setdefault(entry.digest, (rank, entry))
    return list(found.values())


def _before(ranks: Recording, one: Recording, rank: int, step: int, what: str, name: str) -> tuple[Entry, Entry] | None:
    if what != "parameter":
        return None
    at = (0, "initial") if step == 1 else (step - 1, "parameter")
    ours, theirs = ranks.joined(*at, name) or ranks.entries(rank, *at).get(name), one.entries(0, *at).get(name)
    return (ours, theirs) if ours is not None and theirs is not None and ours.shape == theirs.shape else None


@dataclass(frozen=True)
class Scale:
    """What is small beside all tensors of a step together.

    Attributes:
        floor: No error is relative to less than this.
        noise: A difference below this is rounding, whatever it is relative to: the bias before a batch norm.
        quiet: Names whose tensors are no larger than the noise.
    """

    floor: float
    noise: float
    quiet: frozenset[str]


def scale_of(one: Recording, step: int, what: What, *, strict: bool) -> Scale:
    """The scale of one process's tensors; ``strict`` lets no difference pass as noise."""
    sizes: dict[str, float] = {}
    eps = 0.0
    for name, entry in one.entries(0, step, what).items():
        if entry.exists and entry.dtype in _EPS:
            eps = max(eps, _EPS[entry.dtype])
            before = _before(one, one, 0, step, what, name)
            sizes[name] = math.sqrt(_sums(entry, entry, before).theirs)
    whole = eps * math.sqrt(sum(size * size for size in sizes.values()))
    if not math.isfinite(whole):
        return Scale(0.0, 0.0, frozenset())
    noise = 0.0 if strict else whole * (MULTIPLE if eps < 1e-5 else 1.0)
    return Scale(whole, noise, frozenset(name for name, size in sizes.items() if size <= noise))


def _row(  # noqa: PLR0911 - one return for each verdict
    step: int,
    name: str,
    owner: str,
    what: What,
    rank: int,
    ours: Entry,
    theirs: Entry | None,
    agree: bool,
    tolerance: float,
    scale: Scale,
    before: tuple[Entry, Entry] | None,
) -> Row:
    def made(ratio: float, cosine: float, error: float, largest: float, verdict: Verdict) -> Row:
        return Row(step, name, owner, what, ratio, cosine, error, largest, tolerance, agree, rank, verdict)

    if theirs is None or not theirs.exists or not ours.exists:
        here, there = ours.exists, theirs is not None and theirs.exists
        if here == there:
            return made(1.0, 1.0, 0.0, 0.0, "exact")
        if _zero(ours) and _zero(theirs):  # a gradient of zero, and none: the optimizer does the same
            return made(1.0, 1.0, 0.0, 0.0, "exact")
        return made(0.0 if there else math.inf, 0.0, math.inf, math.inf, "missing")
    if ours.shape != theirs.shape:
        return made(math.nan, math.nan, math.inf, math.inf, "wrong direction")
    if ours.digest == theirs.digest:
        return made(1.0, 1.0, 0.0, 0.0, "exact")
    sums = _sums(ours, theirs, before)
    if not sums.finite:
        return made(math.nan, math.nan, math.inf, math.inf, "not finite")
    a, b, off = math.sqrt(sums.ours), math.sqrt(sums.theirs), math.sqrt(sums.off)
    error = _over(off, max(b, scale.floor))
    largest = _over(sums.largest_off, max(sums.largest, scale.floor))
    cosine = sums.dot / (a * b) if a and b else float(a == b)
    ratio = _over(a, b) if b or a else 1.0
    if error <= tolerance or off <= scale.noise or (what == "parameter" and name in scale.quiet):
        return made(ratio, cosine, error, largest, "exact")
    # what is left when the best factor is taken out
    across = math.sqrt(max(0.0, 1 - cosine * cosine)) if cosine > 0 else 1.0
    return made(ratio, cosine, error, largest, "wrong scale" if across <= max(tolerance, 1e-7) else "wrong direction")


def _zero(entry: Entry | None) -> bool:
    return entry is None or not entry.exists or not any(bool(piece.any()) for piece in entry.pieces())


def _over(part: float, whole: float) -> float:
    return part / whole if whole else (0.0 if part == 0 else math.inf)
