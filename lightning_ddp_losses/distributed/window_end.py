"""The end of an accumulation window: what each rank has back-propagated, and the factor of all gradients that follows from it.

``Note`` is what a rank sends. ``end_of_window`` is a rule over the notes of all ranks, which gives the factor or an error that is the same
on every rank (``accumulation`` describes the mathematics). A rank that skipped a micro-batch sends smaller sums.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_ddp_losses.distributed.window_parts import EQUAL, Term, WindowCall, is_equal, other_slopes
from lightning_ddp_losses.errors import ConfigurationError, expect

_TOTALS = 1e-6  # relative difference of totals that is attributed to rounding


@dataclass
class Note:
    """What one rank has back-propagated in a window.

    Attributes:
        counts: By term, the sum of the counts of its parts. If every rank computes the term from all rows, the counts of all ranks.
            For sums, the number of their parts.
        calls: For each term that all ranks have to back-propagate together, or may have to, the numbers of its calls.
        learned: Terms with a learned weight. The weight's gradient consists of the values, which are over the rows of all ranks.
        totals: By term with an expected total, the sum of its totals over all ranks. None if one of them is unknown.
        slopes: By term, its upstream gradient.
        unnamed: The losses without a name.
        failure: Text of an error of this rank, or an empty text.
    """

    counts: dict[str, float] = field(default_factory=dict)
    calls: dict[str, list[int]] = field(default_factory=dict)
    totals: dict[str, float | None] = field(default_factory=dict)
    slopes: dict[str, float] = field(default_factory=dict)
    learned: list[str] = field(default_factory=list)
    unnamed: list[str] = field(default_factory=list)
    failure: str = ""

    @classmethod
    def of(cls, calls: Sequence[WindowCall], unnamed: Mapping[int, Set[str]], *, of_all: bool = False) -> Note:
        """Return the note of a window.

        Args:
            calls: Its calls of losses, in their order.
            unnamed: Losses without a name in each micro-batch.
            of_all: Whether to use the counts of all ranks, if each rank is known to have back-propagated the same.

        Raises:
            ConfigurationError: if micro-batches have different losses without a name.
        """
        by_micro_batch = list(unnamed.values())
        if any(names != by_micro_batch[0] for names in by_micro_batch):
            raise _other_losses("in each micro-batch", {n: sorted(names) for n, names in unnamed.items()})
        note = cls(unnamed=sorted(by_micro_batch[0]) if by_micro_batch else [])
        counts: dict[str, list[float]] = {}
        for number, call in enumerate(calls):
            for index, term in enumerate(call.terms):
                counts.setdefault(term.key, [])
                if not call.is_counted:
                    continue
                counts[term.key].append(_count_of(call, index, of_all=of_all))
                if term.is_together or call.is_share:
                    note.calls.setdefault(term.key, []).append(number)
                if term.expected_total is not None:
                    total = call.parts[index].total
                    before = note.totals.get(term.key, 0.0)
                    note.totals[term.key] = None if total is None or before is None else before + total
        for call in calls:
            if call.is_weighed and call.is_counted:
                note.learned += [term.key for term in call.terms if term.key not in note.learned]
        note.counts = {key: math.fsum(each) for key, each in counts.items()}
        return note

    def pack(self) -> bytes:
        """Return the note as bytes."""
        return json.dumps({name: value for name, value in asdict(self).items() if value}).encode()

    @classmethod
    def read(cls, payload: bytes) -> Note:
        """Return the note of a rank."""
        found: dict[str, Any] = json.loads(payload)
        return cls(**found)


def _count_of(call: WindowCall, index: int, *, of_all: bool) -> float:
    """Return the count of a part on this rank, or on all ranks."""
    part, term = call.parts[index], call.terms[index]
    if term.kind == "sum":
        return 1.0
    if term.kind == "beside":
        return 0.0
    share = None if term.is_together or of_all else part.own_count
    return float(part.count if share is None else share)


def end_of_window(terms: Collection[Term], calls: Sequence[WindowCall], notes: Sequence[Note]) -> float:
    """Return the factor of all gradients.

    Args:
        terms: Terms of the window.
        calls: Its calls of losses on this rank.
        notes: Notes of all ranks, in rank order.

    Raises:
        ConfigurationError: with the same text on every rank that has these terms.
    """
    _compare_ranks(terms, notes)
    # 1. the counts of the terms over all ranks
    counted: dict[int, float] = {}
    titles: dict[int, Term] = {}
    for term in terms:
        counted[id(term)] = _counted(term, notes)
        titles[id(term)] = term
    for term in titles.values():
        _refuse_other_numbers("count", term, term.expected, counted[id(term)])
        totals = [note.totals[term.key] for note in notes if term.key in note.totals]
        total = totals[0] if totals else 0.0
        _refuse_other_numbers("total", term, term.expected_total, total)
    _refuse_no_rows(calls, counted)
    # 2. one factor for all of them
    used = [term for term in titles.values() if term.kind != "beside" and counted[id(term)]]
    factors = []
    for term in used:
        divisor = term.divisor or 1.0
        factors.append(1.0 if term.kind == "sum" else divisor / counted[id(term)])
    if not factors:
        return 1.0  # no row was counted, so there is nothing to correct
    expect(
        all(is_equal(factor, factors[0]) for factor in factors),
        "accumulation window: losses with different divisors",
        expected="counts in the same proportion in every micro-batch",
        got="; ".join(_describe(term, counted[id(term)]) for term in used),
        fix="Give before the first micro-batch what each counts in the whole window: expect_counts({loss or name: count of this "
        "rank}), of the strategy or of what accumulation_window gives.",
        collective=True,
    )
    return 1.0 if is_equal(factors[0], 1.0) else factors[0]


def refuse_failures(notes: Sequence[Note]) -> None:
    """Raise the first error of any rank on all ranks."""
    for note in notes:
        if note.failure:
            raise ConfigurationError(note.failure, collective=True)


def _compare_ranks(terms: Collection[Term], notes: Sequence[Note]) -> None:
    """Reject ranks with different losses, different upstream gradients, or parts that only some of them back-propagated."""
    unnamed = [note.unnamed for note in notes]
    if any(names != unnamed[0] for names in unnamed):
        raise _other_losses("on each rank", dict(enumerate(unnamed)))
    shown = {term.key: term.title for term in terms}
    slopes: dict[str, float] = {}
    for note in notes:
        for key, slope in note.slopes.items():
            first = slopes.setdefault(key, slope)
            is_same = math.isclose(slope, first, rel_tol=1e-6) or not (math.isfinite(slope) or math.isfinite(first))
            if not is_same:
                error = other_slopes(
                    shown.get(key, key.partition("|")[0]), [n.slopes[key] for n in notes if key in n.slopes]
                )
                error.collective = True
                raise error
    learned = {key for note in notes for key in note.learned}
    for term in terms:
        if not term.is_together and term.key not in learned:
            continue
        numbers = [note.calls.get(term.key, []) for note in notes if term.key in note.counts]
        if any(each != numbers[0] for each in numbers):
            raise ConfigurationError(
                f"accumulation window: {term.title}",
                expected="backward in the same micro-batches on every rank, as its value is over the rows of all",
                ranks=[f"calls {', '.join(str(number + 1) for number in each) or 'none'}" for each in numbers],
                fix="Leave out a micro-batch on every rank, or on none.",
                collective=True,
            )


def _other_losses(where: str, found: Mapping[int, Sequence[str]]) -> ConfigurationError:
    shown = {number: ", ".join(names) or "none" for number, names in found.items()}
    return ConfigurationError(
        "accumulation window: losses without a name",
        expected=f"the same {where}",
        got="; ".join(f"{number}: {names}" for number, names in shown.items()),
        fix="Give global_mean a name=, and make other losses submodules of the model, or hand them to accumulation_window.",
        collective=True,
    )


def _counted(term: Term, notes: Sequence[Note]) -> float:
    """Return the count of a term over all ranks."""
    counts = [note.counts[term.key] for note in notes if term.key in note.counts]
    if not counts:
        return 0.0
    return counts[0] if term.is_together else math.fsum(counts)


def _refuse_no_rows(calls: Sequence[WindowCall], counted: Mapping[int, float]) -> None:
    """Reject a regulariser that was back-propagated beside a mean without any row in the whole window."""
    for call in calls:
        means = [term for part, term in zip(call.parts, call.terms, strict=True) if part.kind == "mean"]
        has_weight = any(weight for part, weight in zip(call.parts, call.weights, strict=False) if part.kind == "once")
        is_lost = any(part.kind == "once" for part in call.parts) and means and call.is_counted
        if not is_lost or has_weight or any(counted[id(term)] for term in means):
            continue
        # another call may include it
        others = [each for each in calls if each.is_counted and each.terms == call.terms]
        if any(sum(each.weights) for each in others):
            continue
        raise ConfigurationError(
            f"accumulation window: {call.title}",
            expected="a row that counts in some micro-batch",
            got="none, beside a regulariser that counts once",
            fix="Leave out the step.",
            collective=True,
        )


def _describe(term: Term, counted: float) -> str:
    """Return the divisor that was used, and the divisor that would have been correct."""
    if term.kind == "sum":
        return f"{term.title}: a sum, not divided"
    return f"{term.title}: divided by {term.divisor:.17g}, counted {counted:.17g}"


def _refuse_other_numbers(what: str, term: Term, expected: float | None, got: float | None) -> None:
    """Reject numbers of a window that differ from the user's."""
    if expected is None or got is None:
        return
    rounding = _TOTALS
    if what == "count":
        rounding = EQUAL if expected.is_integer() else term.rounding
    expect(
        math.isclose(got, expected, rel_tol=rounding),
        f"accumulation window: {what} in expect_counts of {term.title}",
        expected=f"{expected:.17g} over all ranks and micro-batches, as was said",
        got=f"{got:.17g}",
        fix=f"Give this rank's {what} in all micro-batches of the window, as the loss counts. If a micro-batch calls the loss several "
        "times, declare micro-batches (window.micro_batch()) and give a list, a number for each call: their sum would divide each by too "
        "much.",
        collective=True,
    )
