"""Findings of checks: the stages of a run where they are made, one record for each, their exchange between ranks, and their causes.

A `Finding` is a plain record, equal on every rank. It names the `CheckStage` and the step of its row. Findings that one rank makes without
its peers are sent as texts together with its numbers. If the texts differ, every rank makes the same findings of the texts of all ranks.

`group_by_cause` keeps the number of warnings small, because one fault has many symptoms. A parameter that DDP does not reduce first has
different gradients, then different values, and through clipping it changes every other parameter. The table of faults lists the faults
that follow from another one. Findings of one fault are sorted by their distance from the cause. Every rank has the same findings in the
same order, so every rank forms the same groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from lightning_ddp_losses.core.faults import FAULTS, FOLLOWING, Severity
from lightning_ddp_losses.errors import expect, explained_by, format_error, listed

T = TypeVar("T")
FAILED = "CHECK"
"""The fault that reports an error in the check itself."""

MOST_NAMES = 6  # largest number of parameters or groups named in one finding
_TEXT_FIELDS = ("fault", "what", "expected", "name", "fix")
_SEVERITIES = ("error", "warning", "note")
_RESULTS = "ParameterSyncCheck"  # check whose findings result from gradients and optimizers
_MOST_FOLLOWERS = 8  # largest number of further findings listed in a warning


class CheckStage(StrEnum):
    """Names the stages of a run at which checks measure and judge.

    Messages contain the value of a stage. ``trainer.test`` uses the stages of validation.

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
    TRAIN_LOGGED = "end of on_train_epoch_end"
    VALIDATION_EPOCH_END = "end of the validation epoch"
    VALIDATION_LOGGED = "end of on_validation_epoch_end"
    VALIDATION_END = "end of validation"
    SAVE = "saving a checkpoint"
    LOAD = "loading a checkpoint"
    TRAIN_END = "end of training"


def names_of_stages(*, is_test: bool) -> dict[CheckStage, str]:
    """Return the names of the stages in messages. In ``trainer.test``, "validation" is replaced by "test"."""
    evaluation = "test" if is_test else "validation"
    return {stage: stage.value.replace("validation", evaluation) for stage in CheckStage}


_INSIDE_A_STEP = ("training_step", CheckStage.BEFORE_BACKWARD.value, CheckStage.AFTER_STEP.value)


def place_of(moment: str, step: int) -> str:
    """Return the text for a place in a run, with its step or the number of steps before it. The number is omitted before the first step.

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
        fault: Id of the fault in ``faults.FAULTS``. ``ddp-losses explain`` shows its row. Empty for a fault that is not in the table. In
            that case ``fix`` is required, and the severity is ``error`` unless ``graded`` is set.
        what: Fault in the user's terms.
        expected: Healthy state.
        ranks: Affected ranks. Empty if all ranks are affected.
        name: Parameter, buffer, loss or option.
        values: One entry per rank, if ranks differ.
        fix: Advice, as a sentence. If empty, the advice of the table is used.
        check: Class of the check. The runner fills in this field and the next two.
        step: Number of optimizer steps before this one.
        moment: Place in the run, the value of a ``CheckStage`` (also a column of ``ddp_checks.jsonl``).
        max_difference: Largest difference of the tensor's elements between ranks, if the check named a tensor.
        follows: Fault that this finding follows from. Empty for an independent finding.
        graded: Severity, if it differs from the severity of the fault.

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
    graded: Severity | None = None

    def __post_init__(self) -> None:
        is_known = self.fault in FAULTS
        is_own = self.fault == "" and self.fix != ""
        expected = 'an id of FAULTS, or "" with a `fix`'
        expect(
            is_known or is_own,
            "Finding.fault",
            expected=expected,
            got=repr(self.fault),
            fix="Write what the reader should do in `fix`, or name a known fault.",
        )

    @classmethod
    def of(
        cls,
        fault: str,
        case: str = "check",
        *,
        ranks: tuple[int, ...] = (),
        name: str = "",
        values: tuple[Any, ...] = (),
        graded: Severity | None = None,
        **fields: Any,
    ) -> Finding:
        """Return a finding with the texts of a case in the table of faults.

        Args:
            fault: Id of the fault.
            case: Name of the case in the fault's row.
            ranks: Affected ranks.
            name: Parameter, buffer, loss or option. Also a field of the texts.
            values: One entry per rank.
            graded: Severity, if it differs from the severity of the fault.
            **fields: Other fields of the texts.
        """
        texts = FAULTS[fault].explain(case, name=name, **fields)
        return cls(fault, texts.what, texts.expected, ranks, name, values, texts.fix, graded=graded)

    @property
    def severity(self) -> Severity:
        """Return the severity of the finding if it is set, otherwise the severity of the fault."""
        if self.graded or not self.fault:
            return self.graded or "error"
        return FAULTS[self.fault].severity

    @property
    def key(self) -> tuple[str, str, str]:
        """Identify the fault: findings with the same key are repeated observations of one fault."""
        return self.check, self.fault, self.name

    def text(self, further: str = "") -> str:
        """Format the finding for an error or a warning: fault, healthy state, one line per rank, advice, the command that explains it.

        Args:
            further: Additional line before that command. No line is added if it is empty.
        """
        where = ", ".join(part for part in (self.check, self.fault, place_of(self.moment, self.step)) if part)
        what = f"{where}: {self.what}"
        if self.ranks:
            what += f" (rank {', '.join(map(str, self.ranks))})"
        if self.max_difference is not None:
            what += f", max difference {self.max_difference:.3g}"
        lines = [self.fix, further]
        if self.fault:
            lines = [self.fix or FAULTS[self.fault].fix, further, explained_by(self.fault)]
        fix = "\n".join(line for line in lines if line)
        return format_error(what, expected=self.expected or None, ranks=list(self.values) or None, fix=fix)

    def record(self) -> dict[str, Any]:
        """Return the line of ``ddp_checks.jsonl``."""
        plain = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        del plain["graded"]
        return {"step": plain.pop("step"), "check": plain.pop("check"), "severity": self.severity, **plain}


def odd_ranks(column: Sequence[Any]) -> tuple[int, ...]:
    """Return the ranks that differ from the most frequent value. On a tie, the first of the most frequent values is used.

    Example:
        >>> odd_ranks([0.1, 0.1, 0.2])
        (2,)
    """
    values = list(column)
    # the most frequent value, and the first one if there are several
    usual = max(values, key=lambda value: (values.count(value), -values.index(value)))
    return tuple(rank for rank, value in enumerate(values) if value != usual)


def differing(
    column: Sequence[Any], fault: str, case: str = "check", *, name: str, values: Sequence[Any] = ()
) -> list[Finding]:
    """Return a finding with the ranks that differ from the majority, or an empty list if all ranks have the same value.

    Args:
        column: One value per rank, to be compared.
        fault: Id of the fault.
        case: Name of the case in the fault's row.
        name: Parameter, buffer, loss or option.
        values: One entry per rank for the finding, if the name does not suffice.
    """
    if len(set(column)) == 1:
        return []
    return [Finding.of(fault, case, ranks=odd_ranks(column), name=name, values=tuple(values))]


def differing_columns(by_rank: Sequence[Mapping[T, Any]]) -> dict[T, list[Any]]:
    """Return the names whose values differ between ranks, with the value of every rank, or None for a rank without a value."""
    names = dict.fromkeys(name for values in by_rank for name in values)
    columns = {name: [values.get(name) for values in by_rank] for name in names}
    return {name: column for name, column in columns.items() if any(value != column[0] for value in column)}


def shown_names(names: Sequence[str]) -> str:
    """List the first names for a message, and the number of further ones."""
    return listed([f"`{name}`" for name in names], MOST_NAMES)


def texts_of(found: Sequence[Finding]) -> list[list[str]]:
    """Return the texts of findings that one rank made without its peers, in the form in which they are sent."""
    return [[str(getattr(finding, field)) for field in _TEXT_FIELDS] for finding in found]


def findings_of_texts(texts_by_rank: Sequence[list[list[str]]]) -> list[Finding]:
    """Return one finding for each distinct text, with the ranks that have it."""
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank, texts in enumerate(texts_by_rank):
        for fields in texts:
            ranks_of.setdefault(tuple(fields), []).append(rank)
    found: list[Finding] = []
    for shared, ranks in ranks_of.items():
        named: dict[str, Any] = dict(zip(_TEXT_FIELDS, shared, strict=True))
        found.append(Finding(**named, ranks=tuple(ranks)))
    return found


# ---------------------------------------------------------------------- findings of one cause


@dataclass
class Cause:
    """One finding, with the findings that follow from it.

    Attributes:
        lead: Most informative finding.
        followers: Other findings, oldest first.
    """

    lead: Finding
    followers: list[Finding] = field(default_factory=list)

    def text(self) -> str:
        """Format the lead, and list its followers in one line."""
        if not self.followers:
            return self.lead.text()
        shown = "; ".join(f"{each.check}, {each.fault}, {each.what}" for each in self.followers[:_MOST_FOLLOWERS])
        if len(self.followers) > _MOST_FOLLOWERS:
            shown += f" and {len(self.followers) - _MOST_FOLLOWERS} more"
        return self.lead.text(f"  of the same cause: {shown}")


def group_by_cause(
    found: Sequence[Finding], earlier: Sequence[Finding] = ()
) -> tuple[list[Cause], list[tuple[Finding, Finding]]]:
    """Return the causes among new findings, most informative first, and pairs of a finding and the earlier lead that it follows from.

    Args:
        found: New findings of one place in the fit.
        earlier: Leads of causes that have been reported.
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


def text_of_errors(found: Sequence[Finding]) -> str:
    """Return the texts of findings in order. A finding that follows from another one is listed in a line below it."""
    causes: list[Cause] = []
    for finding in sorted(found, key=lambda each: _is_brought(each, found)):  # causes first
        is_brought = _is_brought(finding, found)
        lead = next((cause for cause in causes if is_brought and _spreads(cause.lead, finding)), None)
        if lead is None:
            causes.append(Cause(finding))
        else:
            lead.followers.append(finding)
    return "\n".join(cause.text() for cause in causes)


def _brings(lead: Finding, finding: Finding) -> bool:
    """Return whether a finding of the same exchange follows from ``lead``, or is the same fault in another object."""
    same = finding.fault == lead.fault and finding.check == lead.check and finding.fix == lead.fix
    return same or _spreads(lead, finding)


def _spreads(lead: Finding, finding: Finding) -> bool:
    """Return whether a finding of the same or a later exchange follows from ``lead``."""
    return finding.fault in FOLLOWING.get(lead.fault, ())


def _is_brought(finding: Finding, found: Sequence[Finding]) -> bool:
    """Return whether a finding follows from another one of the same exchange."""
    return any(_spreads(other, finding) and not _spreads(finding, other) for other in found)


def _distance(finding: Finding, found: Sequence[Finding]) -> tuple[int, bool, bool]:
    """Return a sort key that puts severe findings first, causes before their effects, and gradients before parameters."""
    return _SEVERITIES.index(finding.severity), _is_brought(finding, found), finding.check == _RESULTS
