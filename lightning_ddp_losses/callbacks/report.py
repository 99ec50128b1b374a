"""Reports of findings: errors and warnings, a file of JSON lines, counters for the logger, and a table at the end of the fit.

Each fit has separate files next to its checkpoints, in the run's folder. If the folder already contains files of another fit (without a
logger, with the same version, or in a second fit), a number is added to the new names.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeAlias

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_ddp_losses.callbacks.findings import FAILED, CheckStage, Finding, group_by_cause, text_of_errors
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.user_line import package_of
from lightning_ddp_losses.errors import DDPLossError, expect

FILE_NAME = "ddp_checks.jsonl"
LOSSES_FILE_NAME = "losses_by_rank.csv"
_FILE_NAMES = (FILE_NAME, LOSSES_FILE_NAME)  # files of one fit, which share a number
MOST_RANKS_ONE_BY_ONE = 8
"""With more ranks, only the smallest and the largest figure are reported."""

_MOST_FIGURES = 4  # largest number of figures of one check in the table
# stages before a collective in which ranks with these faults would wait for each other or mix values, so that the run cannot continue
_BEFORE_BACKWARD = frozenset({CheckStage.BEFORE_BACKWARD.value})
_BEFORE_REDUCTIONS = frozenset({
    *(CheckStage.TRAIN_EPOCH_END.value, CheckStage.TRAIN_LOGGED.value),
    *(CheckStage.VALIDATION_EPOCH_END.value, CheckStage.VALIDATION_LOGGED.value),
})  # fmt: skip
_ALWAYS_RAISED = {
    "F32": _BEFORE_BACKWARD,
    "F35": _BEFORE_BACKWARD,
    "F37": _BEFORE_BACKWARD,
    "F46": _BEFORE_REDUCTIONS,
    "F51": _BEFORE_REDUCTIONS,
    "F52": _BEFORE_REDUCTIONS,
}
DEFAULT_ACTION = {"error": "raise", "warning": "warn", "note": "log"}
_ACTIONS = ("raise", "warn", "log")


Action: TypeAlias = Mapping[str, str] | str | None
"""What to do with findings, by severity, or one word for errors and warnings."""


def validated_actions(action: Action, title: str) -> dict[str, str]:
    """Return the given actions by severity. Reject severities and actions that do not exist.

    Args:
        action: Actions by severity, or one word for errors and warnings.
        title: Name of the owner, for the error.

    Raises:
        ConfigurationError: for any other value.
    """
    given = {"error": action, "warning": action} if isinstance(action, str) else action
    if given is None:
        given = {}
    is_known = isinstance(given, Mapping) and given.keys() <= DEFAULT_ACTION.keys()
    expect(
        is_known and all(word in _ACTIONS for word in given.values()),
        f"{title}: action",
        expected=f"one of {', '.join(_ACTIONS)} for errors and warnings, or one for each of the severities {', '.join(DEFAULT_ACTION)}",
        got=repr(action),
        fix='For instance action={"error": "warn", "note": "warn"}.',
    )
    return dict(given)


@dataclass(kw_only=True, eq=False, repr=False)
class Settings:
    """Holds the options that control what happens with findings.

    Args:
        action: ``raise``, ``warn`` or ``log``, by severity, or one of them for errors and warnings.
        file: Write new findings to ``ddp_checks.jsonl`` in the log folder.
        summary: Print a table at the end of the fit.
        log_figures: Send the figures of the checks to the loggers, in addition to the numbers of findings.
        stall_seconds: Seconds without progress after which a rank is reported.

    Attributes:
        actions: ``raise``, ``warn`` or ``log`` for each severity.
    """

    action: Action = None
    file: bool = True
    summary: bool = True
    log_figures: bool = True
    stall_seconds: float = 120.0

    def __post_init__(self) -> None:
        self.actions = DEFAULT_ACTION | validated_actions(self.action, type(self).__name__)


class Report:
    """Collects the findings of one fit, which are equal on all ranks.

    Args:
        settings: Options of the callbacks.
        folder: Folder of the run. If None, no files are written.

    Attributes:
        findings: All findings so far, each fault once.
    """

    def __init__(self, settings: Settings, folder: Path | None) -> None:
        self._settings = settings
        self._folder = folder if settings.file else None
        self._number: int | None = None  # number in the names of this fit's files
        self._seen: set[tuple[str, str, str]] = set()
        self._leads: dict[str, list[Finding]] = {"warn": [], "log": []}  # leads of the reported causes, by action
        self.findings: list[Finding] = []

    def is_new(self, finding: Finding) -> bool:
        """Return whether this fault has not been reported before in this fit."""
        return finding.key not in self._seen

    def add(self, found: Sequence[tuple[Finding, Mapping[str, str]]], trainer: Trainer) -> None:
        """Write, log and warn about findings, once for each cause. Raise an error for findings with the action ``raise``.

        Args:
            found: Findings, in the same order on every rank, each with the actions of its check that differ from the settings.
            trainer: Trainer with the loggers.

        Raises:
            DDPLossError: on every rank, with all findings whose action is ``raise``.
        """
        raising: list[Finding] = []
        reported: dict[str, list[Finding]] = {"warn": [], "log": []}  # new findings by action
        for finding, check_action in found:
            severity, is_new = finding.severity, self.is_new(finding)
            self._seen.add(finding.key)
            # use the action of the check, of DDPChecks, or the default. A bug in this package does not end the training
            action = check_action.get(severity) or self._settings.actions[severity]
            if finding.fault == FAILED and finding.graded and action == "raise":
                action = "warn"
            if finding.moment in _ALWAYS_RAISED.get(finding.fault, ()):
                action = "raise"
            if action == "raise":
                raising.append(finding)
                if is_new:
                    self._keep(finding)
            elif is_new:
                reported[action].append(finding)
        for action, findings in reported.items():
            self._report_causes(action, findings)
        if found:
            self.log(trainer)
        if raising:
            raise DDPLossError(text_of_errors(raising), findings=raising, collective=True)

    def _report_causes(self, action: str, found: Sequence[Finding]) -> None:
        """Warn or log once for each cause. Log findings that follow from a previously reported cause."""
        causes, late = group_by_cause(found, self._leads[action])
        for cause in causes:
            self._leads[action].append(cause.lead)
            self._keep(cause.lead)
            for follower in cause.followers:
                self._keep(replace(follower, follows=cause.lead.fault))
            (_warn if action == "warn" else rank_zero_info)(cause.text())
        for finding, lead in late:
            self._keep(replace(finding, follows=lead.fault))
            rank_zero_info(finding.text(f"  of the same cause as {lead.fault} of step {lead.step}: {lead.what}"))

    def _keep(self, finding: Finding) -> None:
        """Store a new finding, and write it to the file."""
        self.findings.append(finding)
        file = self.open_file(FILE_NAME)
        if file is None:
            return
        try:
            with file:
                file.write(json.dumps(finding.record(), default=str) + "\n")
        except OSError as error:
            self._give_up(file.name, error)

    def _count(self, title: str = "") -> Counter[str]:
        """Return the number of causes by severity, for one check or, with an empty title, for all checks."""
        causes = [each for each in self.findings if not each.follows and title in ("", each.check)]
        return Counter(each.severity for each in causes)

    def log(self, trainer: Trainer, more: Mapping[str, float] | None = None) -> None:
        """Send the counters to the trainer's loggers, and other figures if ``log_figures`` is set."""
        totals = self._count()
        figures = {f"{severity}s": float(totals[severity]) for severity in DEFAULT_ACTION}
        if more and self._settings.log_figures:
            figures |= more
        _send_to_loggers(trainer, figures, trainer.global_step)

    def log_step(self, trainer: Trainer, figures: Mapping[str, float], step: int) -> None:
        """Send figures of a step to the trainer's loggers if ``log_figures`` is set."""
        if self._settings.log_figures:
            _send_to_loggers(trainer, figures, step)

    def summary(
        self, checks: Sequence[tuple[str, Mapping[str, float], Sequence[str]]], steps: int, share: float
    ) -> None:
        """Print totals, a row for each check with findings or measurements, and the names of the remaining checks, on rank 0.

        Args:
            checks: Name, figures and remarks of each check.
            steps: Optimizer steps of the fit.
            share: Fraction of the run time spent in checks.
        """
        if not self._settings.summary or process_groups.rank():
            return
        found = self._count()
        findings = found["error"] + found["warning"]  # notes are not counted as findings
        totals = [counted(len(checks), "check"), counted(steps, "step"), counted(findings, "finding")]
        if found["note"]:
            totals.append(counted(found["note"], "note"))
        totals.append(f"{share:.1%} of the time")
        # omit the column of findings if there are none
        rows, silent = [], []
        for title, figures, remarks in checks:
            counts = self._count(title)
            texts = [counted(counts[severity], severity) for severity in DEFAULT_ACTION if counts[severity]]
            row = (title, ", ".join(texts), escape(_measured(figures, remarks)))
            if any(row[1:]):
                rows.append(row)
            else:
                silent.append(title)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        columns = [0, 1, 2] if any(found.values()) else [0, 2]
        for column in columns:
            table.add_column(("check", "findings", "measured")[column], no_wrap=column == 0)
        for row in rows:
            table.add_row(*(row[column] for column in columns))
        console = Console()
        console.print(f"DDPChecks: {', '.join(totals)}", soft_wrap=True, highlight=False)
        if rows:
            console.print(table)
        if silent:
            console.print(f"Nothing to report: {', '.join(silent)}", highlight=False)

    # ------------------------------------------------------------------ files

    def open_file(self, name: str) -> IO[str] | None:
        """Open a file of this fit on rank 0 for appending. Return None on other ranks, or if no files are written."""
        if self._folder is None or process_groups.rank():
            return None
        try:
            return self._path(name).open("a")
        except OSError as error:
            self._give_up(self._folder / name, error)
            return None

    def _give_up(self, path: object, error: OSError) -> None:
        """Stop writing files: a full disk on this rank must not leave the other ranks waiting."""
        rank_zero_info(f"{path} cannot be written and will have no further lines: {error}")
        self._folder = None

    def _path(self, name: str) -> Path:
        """Return the path of a file of this fit. The first call chooses a number that no earlier fit has used."""
        assert self._folder is not None
        if self._number is None:
            self._folder.mkdir(parents=True, exist_ok=True)  # the logger may not have created it yet
            for number in itertools.count():
                if any((self._folder / _numbered(other, number)).exists() for other in _FILE_NAMES):
                    continue
                try:
                    (self._folder / _numbered(name, number)).open("x").close()
                except FileExistsError:  # another fit was faster
                    continue
                self._number = number
                break
        assert self._number is not None
        return self._folder / _numbered(name, self._number)


def run_folder(trainer: Trainer) -> Path | None:
    """Return the folder of this run, which contains its checkpoints. The result is valid only on rank 0, which writes the files.

    ``log_dir`` is that folder only for loggers with a folder for each run. Other loggers (Weights & Biases, MLflow) have one folder for all
    runs, in which ``ModelCheckpoint`` creates a folder by name and version. Without a logger, the result is the folder ``ddp_checks`` in
    Lightning's folder.

    Communication: one broadcast, by Lightning.
    """
    log_dir = trainer.log_dir
    if log_dir is None:
        return None
    folder = Path(log_dir)
    if not trainer.loggers:  # Lightning's folder is the current folder, unless the user sets another one
        return folder / "ddp_checks"
    # loggers are placeholders on other ranks
    if process_groups.rank() == 0:
        logger = trainer.loggers[0]
        own = getattr(logger, "log_dir", None)
        if own is not None:
            return Path(own)
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        folder = folder / str(logger.name) / version
    return folder


def _measured(figures: Mapping[str, float], remarks: Sequence[str]) -> str:
    """Return the text of a check in the table: its remarks, or its figures if it has no remarks and only a few figures."""
    if remarks or not figures:
        return "\n".join(remarks)
    if len(figures) > _MOST_FIGURES:
        return f"{len(figures)} figures"
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


def counted(number: int, noun: str) -> str:
    """Return a count with its noun in the singular or plural, such as ``1 finding`` or ``2 findings``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _numbered(name: str, number: int) -> str:
    """Return the name of a file of the fit with that number. For 0, the name is unchanged."""
    if number == 0:
        return name
    stem, _, suffix = name.partition(".")
    return f"{stem}_{number}.{suffix}"


def _send_to_loggers(trainer: Trainer, figures: Mapping[str, float], step: int) -> None:
    """Send figures and the epoch to the trainer's loggers. Names of figures begin with ``ddp_checks/``."""
    named = {f"ddp_checks/{name}": value for name, value in figures.items()}
    for logger in trainer.loggers:
        logger.log_metrics({"epoch": float(trainer.current_epoch), **named}, step=step)


def _warn(text: str) -> None:
    """Warn on rank 0. If the user's filters turn warnings into errors, raise on every rank."""
    level = _users_stack_level()
    # other ranks apply the same filters, so that an error is raised on every rank, but do not print the text
    quietly = warnings.catch_warnings(record=True) if process_groups.rank() else contextlib.nullcontext()
    with quietly:
        warnings.warn(text, stacklevel=level)


def _users_stack_level() -> int:
    """Return the ``stacklevel`` with which a warning points to the user's line instead of a library's."""
    # level 1 is the caller of this function, which issues the warning
    frame, level = inspect.currentframe(), 0
    while frame is not None:
        if not package_of(frame.f_code.co_filename):
            return level
        frame, level = frame.f_back, level + 1
    return 2
