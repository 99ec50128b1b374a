"""Where findings go: the error or warning, a file of JSON lines, the logger's counters, and a table at the end of the fit.

Each fit has separate files next to its checkpoints, in the run's folder. If the folder has files of another fit (no logger, the same
version again, a second fit), the new ones get a number.
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
_FILE_NAMES = (FILE_NAME, LOSSES_FILE_NAME)  # of one fit, with one number
MOST_RANKS_ONE_BY_ONE = 8
"""With more ranks, only the smallest and the largest figure is reported."""

_MOST_FIGURES = 4  # of a check, that the table shows
_BEFORE_REDUCTIONS = (
    *(CheckStage.TRAIN_EPOCH_END.value, CheckStage.TRAIN_LOGGED.value),
    *(CheckStage.VALIDATION_EPOCH_END.value, CheckStage.VALIDATION_LOGGED.value),
)  # stages whose logged values are reduced next: other names on a rank are a hang, or values that are mixed
DEFAULT_ACTION = {"error": "raise", "warning": "warn", "note": "log"}
_ACTIONS = ("raise", "warn", "log")


Action: TypeAlias = Mapping[str, str] | str | None
"""What happens with findings, by severity; or one word for errors and warnings."""


def validated_actions(action: Action, title: str) -> dict[str, str]:
    """Return the given actions by severity. Refuse severities and actions that do not exist.

    Args:
        action: Actions by severity, or one word for errors and warnings.
        title: Name of the owner, for the error.

    Raises:
        ConfigurationError: for anything else.
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
    """Holds the options that decide what happens with findings.

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
    """Collects the findings of one fit. Every rank collects the same.

    Args:
        settings: Options of the callbacks.
        folder: Folder of the run. None for a run without files.

    Attributes:
        findings: All findings so far, each fault once.
    """

    def __init__(self, settings: Settings, folder: Path | None) -> None:
        self._settings = settings
        self._folder = folder if settings.file else None
        self._number: int | None = None  # number in the names of this fit's files
        self._seen: set[tuple[str, str, str]] = set()
        self._leads: dict[str, list[Finding]] = {"warn": [], "log": []}  # of the reported causes
        self.findings: list[Finding] = []

    def is_new(self, finding: Finding) -> bool:
        """Return whether this fit has not had this fault before."""
        return finding.key not in self._seen

    def add(self, found: Sequence[tuple[Finding, Mapping[str, str]]], trainer: Trainer) -> None:
        """Write, log and warn of findings, once for each cause. Raise an error for those with this action.

        Args:
            found: Findings, in the same order on every rank, each with the actions of its check that differ from the settings.
            trainer: Trainer with the loggers.

        Raises:
            DDPLossError: on every rank, with all findings of an action ``raise``.
        """
        raising: list[Finding] = []
        reported: dict[str, list[Finding]] = {"warn": [], "log": []}  # new findings by action
        for finding, check_action in found:
            severity, is_new = finding.severity, self.is_new(finding)
            self._seen.add(finding.key)
            # the check's action, else that of DDPChecks, else the default. A fault of our own does not end the training
            action = check_action.get(severity) or self._settings.actions[severity]
            if finding.fault == FAILED and finding.graded and action == "raise":
                action = "warn"
            if finding.fault == "F46" and finding.moment in _BEFORE_REDUCTIONS:
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
        """Warn or log once for each cause. Log findings that follow from a cause reported before."""
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
        """Keep and write a new finding."""
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
        """Return the number of causes by severity, of one check or of all."""
        causes = [each for each in self.findings if not each.follows and title in ("", each.check)]
        return Counter(each.severity for each in causes)

    def log(self, trainer: Trainer, more: Mapping[str, float] | None = None) -> None:
        """Send the counters, and other figures if they are wanted, to the trainer's loggers."""
        totals = self._count()
        figures = {f"{severity}s": float(totals[severity]) for severity in DEFAULT_ACTION}
        if more and self._settings.log_figures:
            figures |= more
        _send_to_loggers(trainer, figures, trainer.global_step)

    def log_step(self, trainer: Trainer, figures: Mapping[str, float], step: int) -> None:
        """Send figures of a step to the trainer's loggers, if they are wanted."""
        if self._settings.log_figures:
            _send_to_loggers(trainer, figures, step)

    def summary(
        self, checks: Sequence[tuple[str, Mapping[str, float], Sequence[str]]], steps: int, share: float
    ) -> None:
        """Print a line of totals, a row for each check with findings or measurements, and the names of the others, on rank 0.

        Args:
            checks: Name, figures and remarks of each check.
            steps: Optimizer steps of the fit.
            share: Share of the time that the checks took.
        """
        if not self._settings.summary or process_groups.rank():
            return
        found = self._count()
        findings = found["error"] + found["warning"]  # notes are no faults
        totals = [counted(len(checks), "check"), counted(steps, "step"), counted(findings, "finding")]
        if found["note"]:
            totals.append(counted(found["note"], "note"))
        totals.append(f"{share:.1%} of the time")
        # without findings the table needs no column for them
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
        """Open a file of this fit, on rank 0, to write at its end. Return None if there is no file."""
        if self._folder is None or process_groups.rank():
            return None
        try:
            return self._path(name).open("a")
        except OSError as error:
            self._give_up(self._folder / name, error)
            return None

    def _give_up(self, path: object, error: OSError) -> None:
        """Write no more files: a full disk on this rank is no reason to leave the others waiting."""
        rank_zero_info(f"{path} cannot be written and will have no further lines: {error}")
        self._folder = None

    def _path(self, name: str) -> Path:
        """Return the path of a file of this fit. The first call chooses a number that no earlier fit has used."""
        assert self._folder is not None
        if self._number is None:
            self._folder.mkdir(parents=True, exist_ok=True)  # the logger may make it later
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
    """Return the folder of this run, which holds its checkpoints. It is right on rank 0, which writes.

    ``log_dir`` is that folder only for loggers with a folder for each run. Others (Weights & Biases, MLflow) have one for all runs, and
    ``ModelCheckpoint`` makes one by name and version below it. Without a logger it is the folder ``ddp_checks`` below Lightning's.

    Communication: one broadcast, Lightning's.
    """
    log_dir = trainer.log_dir
    if log_dir is None:
        return None
    folder = Path(log_dir)
    if not trainer.loggers:  # Lightning's folder is then the current one, unless the user names another
        return folder / "ddp_checks"
    # only rank 0's loggers are real ones
    if process_groups.rank() == 0:
        logger = trainer.loggers[0]
        own = getattr(logger, "log_dir", None)
        if own is not None:
            return Path(own)
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        folder = folder / str(logger.name) / version
    return folder


def _measured(figures: Mapping[str, float], remarks: Sequence[str]) -> str:
    """Return the text about a check for the table: its remarks, or else its figures if they are few."""
    if remarks or not figures:
        return "\n".join(remarks)
    if len(figures) > _MOST_FIGURES:
        return f"{len(figures)} figures"
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


def counted(number: int, noun: str) -> str:
    """Return a number of things in words: ``1 finding``, ``2 findings``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _numbered(name: str, number: int) -> str:
    """Return the name of a file of the fit with that number. The first has none."""
    if number == 0:
        return name
    stem, _, suffix = name.partition(".")
    return f"{stem}_{number}.{suffix}"


def _send_to_loggers(trainer: Trainer, figures: Mapping[str, float], step: int) -> None:
    """Send figures to the trainer's loggers under ``ddp_checks/``, with the epoch, as Lightning logs."""
    named = {f"ddp_checks/{name}": value for name, value in figures.items()}
    for logger in trainer.loggers:
        logger.log_metrics({"epoch": float(trainer.current_epoch), **named}, step=step)


def _warn(text: str) -> None:
    """Warn on rank 0. If the user has made warnings errors, raise on every rank."""
    level = _users_stack_level()
    # elsewhere the same filters decide, so that an error is one on every rank. No text is printed
    quietly = warnings.catch_warnings(record=True) if process_groups.rank() else contextlib.nullcontext()
    with quietly:
        warnings.warn(text, stacklevel=level)


def _users_stack_level() -> int:
    """Return the ``stacklevel`` of a warning that names the user's line that led here, not a library's."""
    # level 1 is the caller of this function, which warns
    frame, level = inspect.currentframe(), 0
    while frame is not None:
        if not package_of(frame.f_code.co_filename):
            return level
        frame, level = frame.f_back, level + 1
    return 2
