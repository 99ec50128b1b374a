"""Findings of checks: where in a run they are made, one record each, shared between ranks, grouped by their cause.

A `Finding` is a plain record, the same on every rank; it names the `CheckStage` and the step of its row. `LocalFindings` collects those
that a rank can make by itself: its row in the shared gather is two numbers, a mask (one bit for each fault of the check) and a hash of the
texts. If the hashes agree, every rank has the same texts already; else the ranks that found something send theirs.

`group_by_cause` keeps the number of warnings small: one fault shows in many places. A parameter that nothing reduces is another one on each
rank in its gradient, then in itself, then, through clipping, in every other parameter. The table of faults has which fault brings which
along; of the same fault the finding that is nearest to the cause comes first. Every rank has the same findings in the same order, so every
rank groups them in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from lightning_ddp_losses.core.faults import FAULTS, FOLLOWING, Severity
from lightning_ddp_losses.distributed.fingerprint import hash_text
from lightning_ddp_losses.errors import expect, explained_by, format_error

FAILED = "CHECK"
"""The fault of a check that failed by itself."""

MOST_NAMES = 6  # parameters or groups that one finding names
_TEXT_FIELDS = ("fault", "what", "expected", "name", "fix")
_UNEXPLAINED = "texts "  # begins the name of a finding whose texts are still on other ranks
_SEVERITIES = ("error", "warning", "note")
_RESULTS = "ParameterSyncCheck"  # its findings result from gradients and optimizers
_MOST_FOLLOWERS = 8  # findings that a warning names next to its own


class CheckStage(str, Enum):
    """Names when checks measure and judge; the value is how messages call that place of the run.

    Example:
        >>> CheckStage.AFTER_STEP.value
        'after the optimizer step'
    """

    BEFORE_WRAP = "before the wrap"
    TRAIN_START = "start of training"
    EPOCH_START = "start of an epoch"
    BEFORE_BACKWARD = "before backward"
    AFTER_STEP = "after the optimizer step"
    VALIDATION_START = "start of validation"
    TRAIN_EPOCH_END = "end of an epoch"
    VALIDATION_EPOCH_END = "end of the validation epoch"
    VALIDATION_END = "end of validation"
    SAVE = "saving a checkpoint"
    LOAD = "loading a checkpoint"
    TRAIN_END = "end of training"


_INSIDE_A_STEP = ("training_step", CheckStage.BEFORE_BACKWARD.value, CheckStage.AFTER_STEP.value)


def place_of(moment: str, step: int) -> str:
    """Return where in a run something was: in which step, or after how many. A place before the first step has no number.

    Args:
        moment: Value of a stage, or another place of the runner.
        step: Optimizer steps before it.
    """
    if moment in _INSIDE_A_STEP:
        return f"{moment} of step {step}"
    if step == 0:
        return moment
    return f"{moment}, after {step} step{'s' * (step > 1)}"


@dataclass(frozen=True)
class Finding:
    """Records one finding of one check.

    Attributes:
        fault: Id of the fault, in the one table of them (``faults.FAULTS``); ``ddp-losses explain`` shows its row.
        what: What is wrong, as the user knows it.
        expected: What it should have been.
        ranks: Ranks it concerns; empty if it concerns all of them.
        name: The parameter, buffer, loss or option.
        values: One entry per rank, if ranks differ.
        fix: What to do, as a sentence; empty: what the table says.
        check: The check's class; filled in by the runner, like the next two.
        step: Optimizer steps before this one.
        moment: Where in the run: the value of a ``CheckStage`` (a column of ``ddp_checks.jsonl``, hence its name).
        max_difference: Largest difference between ranks of the tensor's elements, if the check named a tensor.
        follows: Fault that this finding follows from; empty if it stands for itself.

    Example:
        >>> finding = Finding("F36", "epoch", "equal on all ranks", (1,), values=(3, 4))
        >>> print(finding.severity)
        error
    """

    fault: str
    what: str
    expected: str = ""
    ranks: tuple[int, ...] = ()
    name: str = ""
    values: tuple[Any, ...] = ()
    fix: str = ""
    check: str = ""
    step: int = 0
    moment: str = ""
    max_difference: float | None = None
    follows: str = ""

    def __post_init__(self) -> None:
        expect(self.fault in FAULTS, "Finding.fault", expected="an id of FAULTS", got=repr(self.fault))

    @classmethod
    def of(
        cls,
        fault: str,
        case: str = "check",
        *,
        ranks: tuple[int, ...] = (),
        name: str = "",
        values: tuple[Any, ...] = (),
        **fields: Any,
    ) -> Finding:
        """Return a finding with the texts of a case in the table of faults.

        Args:
            fault: Id of the fault.
            case: Name of the case in the fault's row.
            ranks: Ranks it concerns.
            name: Parameter, buffer, loss or option; also a field of the texts.
            values: One entry per rank.
            **fields: Other fields of the texts.
        """
        texts = FAULTS[fault].explain(case, name=name, **fields)
        return cls(fault, texts.what, texts.expected, ranks, name, values, texts.fix)

    def refine(self, fault: str, case: str = "check", **details: Any) -> Finding:
        """Return the finding that ranks make of this one together: same check and place in the fit, other texts.

        Args:
            fault: Id of the fault.
            case: Name of the case in the fault's row.
            **details: Options and fields of ``Finding.of``.
        """
        return replace(Finding.of(fault, case, **details), check=self.check, step=self.step, moment=self.moment)

    @property
    def severity(self) -> Severity:
        """Look the severity up in the one table of faults."""
        return FAULTS[self.fault].severity

    @property
    def key(self) -> tuple[str, str, str]:
        """Identify the fault: findings of the same key are one fault seen again."""
        return self.check, self.fault, self.name

    def text(self, further: str = "") -> str:
        """Format the finding for an error or a warning: what, expected, one line per rank, what to do, the command that explains it.

        Args:
            further: A line that comes before that command; empty: none.
        """
        what = f"{self.check}, {self.fault}, {place_of(self.moment, self.step)}: {self.what}"
        if self.ranks:
            what += f" (rank {', '.join(map(str, self.ranks))})"
        if self.max_difference is not None:
            what += f", max difference {self.max_difference:.3g}"
        lines = [self.fix or FAULTS[self.fault].fix, further, explained_by(self.fault)]
        fix = "\n".join(line for line in lines if line)
        return format_error(what, expected=self.expected or None, ranks=list(self.values) or None, fix=fix)

    def record(self) -> dict[str, Any]:
        """Return the line of ``ddp_checks.jsonl``."""
        plain = asdict(self)
        for key, value in plain.items():
            if isinstance(value, tuple):
                plain[key] = list(value)
        return {"step": plain.pop("step"), "check": plain.pop("check"), "severity": self.severity, **plain}


@dataclass(frozen=True)
class SwitchedOff(Finding):
    """Records that a check of this package failed by itself: a warning, for the training may be healthy. It runs no more in this fit."""

    @property
    def severity(self) -> Severity:
        """Return that it is a warning: the training may be healthy."""
        return "warning"


@dataclass(frozen=True)
class Remark(Finding):
    """Records what is a fault of its kind where it was not meant, and often is meant: a note."""

    @property
    def severity(self) -> Severity:
        """Return that it is a note."""
        return "note"


def odd_ranks(column: Sequence[Any]) -> tuple[int, ...]:
    """Return the ranks that differ from the majority; on a tie, from the first such value.

    Example:
        >>> odd_ranks([0.1, 0.1, 0.2])
        (2,)
    """
    values = list(column)
    # the most frequent value; of several, the one that comes first
    usual = max(values, key=lambda value: (values.count(value), -values.index(value)))
    return tuple(rank for rank, value in enumerate(values) if value != usual)


def differing(
    column: Sequence[Any], fault: str, case: str = "check", *, name: str, values: Sequence[Any] = ()
) -> list[Finding]:
    """Return a finding with the ranks that differ from the majority; none if all ranks have the same value.

    Args:
        column: One value per rank, which is compared.
        fault: Id of the fault.
        case: Name of the case in the fault's row.
        name: Parameter, buffer, loss or option.
        values: One entry per rank for the finding, if ranks need more than a name.
    """
    if len(set(column)) == 1:
        return []
    return [Finding.of(fault, case, ranks=odd_ranks(column), name=name, values=tuple(values))]


def shown_names(names: Sequence[str]) -> str:
    """List the first names for a message, and how many more there are."""
    shown = ", ".join(f"`{name}`" for name in names[:MOST_NAMES])
    if len(names) > MOST_NAMES:
        shown += f" and {len(names) - MOST_NAMES} more"
    return shown


def failed_check(title: str, failures: Mapping[int, str], *, is_built_in: bool) -> Finding:
    """Make the finding of a check that failed by itself, with the errors of its ranks.

    Args:
        title: Name of the check.
        failures: By rank, the error that it raised there.
        is_built_in: The check is one of this package: it is switched off, and training goes on.
    """
    ranks = tuple(failures)
    values = tuple(f"{rank}: {text}" for rank, text in failures.items())
    what = f"{title} itself failed"
    if not is_built_in:
        fix = "Mend the check, or leave it out of DDPChecks(checks=[...])."
        return Finding(FAILED, what, "a row of every rank", ranks, title, values, fix)
    what += ", by a fault of its own, and is switched off on all ranks for the rest of this fit"
    fix = f"Training is as before; leave {title} out of DDPChecks(checks=[...]) to be rid of this warning, and please report it."
    return SwitchedOff(FAILED, what, "", ranks, title, values, fix)


class LocalRow(NamedTuple):
    """Two numbers that stand for the findings that one rank made by itself; zeros for none.

    Attributes:
        faults: One bit for each fault of the check.
        texts: A hash of their texts.
    """

    faults: int = 0
    texts: int = 0


class LocalFindings:
    """Collects one rank's own findings and brings those of all ranks together.

    Args:
        faults: Which faults there may be; at most 62, one bit each.

    Attributes:
        found: The findings of this rank.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        self._faults = tuple(faults)
        self.found: list[Finding] = []

    def add(self, fault: str, case: str = "check", *, name: str, **fields: Any) -> None:
        """Add a finding of this rank, as ``Finding.of`` makes it."""
        self.found.append(Finding.of(fault, case, name=name, **fields))

    def row(self) -> LocalRow:
        """Return what travels in the check's row."""
        if not self.found:
            return LocalRow()
        faults = 0
        for finding in self.found:
            faults |= 1 << self._faults.index(finding.fault)
        return LocalRow(faults, hash_text(json.dumps([_text_fields(finding) for finding in self.found])))

    def judge(self, rows: Sequence[LocalRow]) -> list[Finding]:
        """Return the findings of all ranks: in full where every rank has the same, else by fault, to be explained."""
        if not any(row.faults for row in rows):
            return []
        # every rank found the same: its texts are here
        hashes = [row.texts for row in rows]
        if len(set(hashes)) == 1:
            return list(self.found)
        # else name the ranks of each fault; their texts follow in ``explain``
        found: list[Finding] = []
        for bit, fault in enumerate(self._faults):
            ranks = tuple(rank for rank, row in enumerate(rows) if row.faults >> bit & 1)
            if ranks:
                found.append(Finding(fault, FAULTS[fault].title, ranks=ranks, name=f"{_UNEXPLAINED}{hashes}"))
        return found

    def describe(self, finding: Finding) -> str | None:
        """Return this rank's texts of a finding that some ranks have no text of."""
        if not finding.name.startswith(_UNEXPLAINED):
            return None
        return json.dumps([_text_fields(own) for own in self.found if own.fault == finding.fault])

    def explain(self, finding: Finding, texts: Sequence[str]) -> list[Finding]:
        """Make one finding of each text, with the ranks that have it."""
        if not finding.name.startswith(_UNEXPLAINED):
            return [finding]
        # ranks by text
        ranks_of: dict[tuple[str, ...], list[int]] = {}
        for rank, text in enumerate(texts):
            for fields in json.loads(text):
                ranks_of.setdefault(tuple(fields), []).append(rank)
        explained: list[Finding] = []
        for fields, ranks in ranks_of.items():
            named = dict(zip(_TEXT_FIELDS, fields, strict=True))
            explained.append(replace(finding, **named, ranks=tuple(ranks)))  # type: ignore[arg-type]
        return explained or [finding]


def _text_fields(finding: Finding) -> list[str]:
    return [str(getattr(finding, field)) for field in _TEXT_FIELDS]


# ---------------------------------------------------------------------- findings of one cause


@dataclass
class Cause:
    """One finding, and those that follow from it.

    Attributes:
        lead: The finding that tells most.
        followers: The others, in the order in which they were found.
    """

    lead: Finding
    followers: list[Finding] = field(default_factory=list)

    def text(self) -> str:
        """Format the lead, and in a line what else it shows in."""
        if not self.followers:
            return self.lead.text()
        shown = "; ".join(f"{each.fault} {each.what}" for each in self.followers[:_MOST_FOLLOWERS])
        if len(self.followers) > _MOST_FOLLOWERS:
            shown += f" and {len(self.followers) - _MOST_FOLLOWERS} more"
        return self.lead.text(f"  of the same cause: {shown}")


def group_by_cause(
    found: Sequence[Finding], earlier: Sequence[Finding] = ()
) -> tuple[list[Cause], list[tuple[Finding, Finding]]]:
    """Return the causes among new findings, the most telling first; and pairs of a finding and the earlier lead that it follows from.

    Args:
        found: New findings of one place in the fit.
        earlier: The leads of causes that have been reported.
    """
    causes: list[Cause] = []
    late: list[tuple[Finding, Finding]] = []
    for finding in sorted(found, key=lambda each: _distance(each, found)):
        lead = next((each for each in earlier if _spreads(each, finding)), None)
        cause = next((each for each in causes if _brings(each.lead, finding)), None)
        if lead is not None:
            late.append((finding, lead))
        elif cause is not None:
            cause.followers.append(finding)
        else:
            causes.append(Cause(finding))
    return causes, late


def _brings(lead: Finding, finding: Finding) -> bool:
    """Say whether a finding of the same place follows from ``lead``, or is the same fault of something else."""
    same = finding.fault == lead.fault and finding.check == lead.check and finding.fix == lead.fix
    return same or _spreads(lead, finding)


def _spreads(lead: Finding, finding: Finding) -> bool:
    """Say whether a finding anywhere later follows from ``lead``."""
    return finding.fault in FOLLOWING.get(lead.fault, ())


def _distance(finding: Finding, found: Sequence[Finding]) -> tuple[int, bool, bool]:
    """Tell how far a finding is from its cause: grave ones first, causes before what they bring, gradients before parameters."""
    is_brought = any(_spreads(other, finding) and not _spreads(finding, other) for other in found)
    return _SEVERITIES.index(finding.severity), is_brought, finding.check == _RESULTS
