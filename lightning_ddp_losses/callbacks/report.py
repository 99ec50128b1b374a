"""Where findings go: the error or warning, a file of JSON lines, the logger's counters, and a table at the end of the fit.

Each fit has files of its own. They lie beside its checkpoints, in the run's folder; a fit that finds files of another one there (no
logger, the same version again, a second fit) numbers its own.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import sysconfig
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias

import lightning
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_ddp_losses.callbacks.findings import Finding, SwitchedOff, group_by_cause
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import DDPLossError, expect

FILE_NAME = "ddp_checks.jsonl"
LOSSES_FILE_NAME = "losses_by_rank.csv"
_FILE_NAMES = (FILE_NAME, LOSSES_FILE_NAME)  # of one fit, which carry one number
MOST_RANKS_ONE_BY_ONE = 8
"""Of more ranks, figures are told together: the smallest and the largest."""

_MOST_FIGURES = 4  # of a check, that the table shows
# files of these folders are no place that a user would look at
_NOT_THE_USERS = (
    f"{Path(__file__).parents[1]}{os.sep}",
    str(Path(lightning.__file__).parent),
    str(Path(torch.__file__).parent),
    sysconfig.get_path("stdlib"),
    "<frozen",
)
DEFAULT_ACTION = {"error": "raise", "warning": "warn", "note": "log"}
_ACTIONS = ("raise", "warn", "log")


Action: TypeAlias = Mapping[str, str] | str | None
"""What happens with findings, by severity; or one word for errors and warnings."""


def validated_actions(action: Action, title: str) -> dict[str, str]:
    """Return the actions that were given, by severity; refuse severities and actions that do not exist.

    Args:
        action: By severity, or one word for errors and warnings.
        title: Who was given them.

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


@dataclass(frozen=True)
class Settings:
    """Says what happens with findings.

    Attributes:
        action: By severity: ``raise``, ``warn`` or ``log``.
        file: Whether new findings are written to ``ddp_checks.jsonl`` in the log folder.
        summary: Whether a table is printed at the end of the fit.
        log_figures: Whether the loggers get what the checks measured, beside the numbers of findings.
        stall_seconds: A rank that stands still for longer is reported.
    """

    action: Mapping[str, str] = field(default_factory=lambda: dict(DEFAULT_ACTION))
    file: bool = True
    summary: bool = True
    log_figures: bool = True
    stall_seconds: float = 120.0


class CheckSummary(NamedTuple):
    """What a check has to say at the end of a fit.

    Attributes:
        title: Names the check.
        figures: By name.
        remarks: Its own words.
    """

    title: str
    figures: Mapping[str, float]
    remarks: Sequence[str]


class Report:
    """Collects the findings of one fit; every rank collects the same.

    Args:
        settings: What happens with them.
        folder: Of the run, for files; None: none are written.
    """

    def __init__(self, settings: Settings, folder: Path | None) -> None:
        self._settings = settings
        self._folder = folder if settings.file else None
        self._number: int | None = None  # that this fit's files carry
        self._seen: Counter[tuple[str, str, str]] = Counter()
        self._leads: dict[str, list[Finding]] = {"warn": [], "log": []}  # of the reported causes
        self.findings: list[Finding] = []
        self.by_check: dict[str, Counter[str]] = {}

    def is_new(self, finding: Finding) -> bool:
        """Say whether this fault has not been seen before in this fit."""
        return finding.key not in self._seen

    def add(self, findings: Sequence[Finding], actions: Sequence[Mapping[str, str]], trainer: Trainer) -> None:
        """Count, write, log and warn, once for each cause; raise what is to be raised.

        Args:
            findings: In the same order on every rank.
            actions: What the check of each finding does by severity, where it differs from the settings.
            trainer: For its loggers.

        Raises:
            DDPLossError: on every rank, with all findings of an action ``raise``.
        """
        raising: list[Finding] = []
        told: dict[str, list[Finding]] = {"warn": [], "log": []}  # new findings by what is done with them
        for finding, check_action in zip(findings, actions, strict=True):
            severity = finding.severity
            new = self.is_new(finding)
            self._seen[finding.key] += 1
            # the check's action, else that of DDPChecks, else the default; a fault of our own does not end the training
            action = check_action.get(severity) or self._settings.action.get(severity, DEFAULT_ACTION[severity])
            if action == "raise" and isinstance(finding, SwitchedOff):
                action = "warn"
            if action == "raise":
                raising.append(finding)
                self._keep(finding, new=new)
            elif new:
                told[action].append(finding)
        for action, found in told.items():
            self._tell(action, found)
        if findings:
            self.log(trainer)
        if raising:
            text = "\n".join(finding.text() for finding in raising)
            raise DDPLossError(text, findings=raising, collective=True)

    def _tell(self, action: str, found: Sequence[Finding]) -> None:
        """Warn or log once for each cause; what follows from one that was reported before is logged."""
        causes, late = group_by_cause(found, self._leads[action])
        for cause in causes:
            self._leads[action].append(cause.lead)
            self._keep(cause.lead)
            for follower in cause.followers:
                self._keep(replace(follower, follows=cause.lead.fault))
            tell = _warn if action == "warn" else rank_zero_info
            tell(cause.text())
        for finding, lead in late:
            self._keep(replace(finding, follows=lead.fault))
            rank_zero_info(finding.text(f"  of the same cause as {lead.fault} of step {lead.step}: {lead.what}"))

    def _keep(self, finding: Finding, *, new: bool = True) -> None:
        """Count a finding that stands for itself; the first time, keep and write it."""
        self.by_check.setdefault(finding.check, Counter())[finding.severity] += new and not finding.follows
        if not new:
            return
        self.findings.append(finding)
        file = self.open_file(FILE_NAME)
        if file is None:
            return
        try:
            with file:
                file.write(json.dumps(finding.record(), default=str) + "\n")
        except OSError as error:
            rank_zero_info(f"{file.name} cannot be written, findings are not kept in it: {error}")
            self._folder = None

    def log(self, trainer: Trainer, more: Mapping[str, float] | None = None) -> None:
        """Send the counters, and other figures where they are wanted, to the trainer's loggers."""
        # of all checks together
        totals: Counter[str] = sum(self.by_check.values(), Counter())
        figures = {f"{severity}s": float(totals[severity]) for severity in DEFAULT_ACTION}
        if more and self._settings.log_figures:
            figures |= more
        _send_to_loggers(trainer, figures, trainer.global_step)

    def log_step(self, trainer: Trainer, figures: Mapping[str, float], step: int) -> None:
        """Send figures of a step to the trainer's loggers, where they are wanted."""
        if self._settings.log_figures:
            _send_to_loggers(trainer, figures, step)

    def summary(self, checks: Sequence[CheckSummary], steps: int, share: float) -> None:
        """Print one line of totals and one row per check, on rank 0.

        Args:
            checks: What each has to say.
            steps: That the fit has made.
            share: Of the time, that the checks took.
        """
        if not self._settings.summary or process_groups.rank():
            return
        found: Counter[str] = sum(self.by_check.values(), Counter())
        findings = found["error"] + found["warning"]  # notes are no faults
        totals = [counted(len(checks), "check"), counted(steps, "step"), counted(findings, "finding")]
        totals += [counted(found["note"], "note"), f"{share:.1%} of the time"]
        table = Table()
        for column in ("check", "found", "seen"):
            table.add_column(column)
        for check in checks:
            counts = self.by_check.get(check.title, Counter())
            texts = [counted(counts[severity], severity) for severity in DEFAULT_ACTION if counts[severity]]
            table.add_row(check.title, ", ".join(texts) or "-", escape(_seen_by(check)))
        console = Console()
        console.print(f"DDPChecks: {', '.join(totals)}", soft_wrap=True, highlight=False)
        console.print(table)

    # ------------------------------------------------------------------ files

    def open_file(self, name: str) -> IO[str] | None:
        """Open a file of this fit, on rank 0, to write at its end; None where none is wanted or can be made."""
        if self._folder is None or process_groups.rank():
            return None
        try:
            return self._path(name).open("a")
        except OSError as error:  # a full disk on this rank is no reason to leave the others waiting
            rank_zero_info(f"{self._folder / name} cannot be written, nothing is kept in it: {error}")
            self._folder = None
            return None

    def _path(self, name: str) -> Path:
        """Return the path of a file of this fit; the first time its number is chosen, which no fit before it has used."""
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
    """Return the folder of this run, the one that holds its checkpoints; right on rank 0, which writes.

    ``log_dir`` is that folder only for loggers that make one for each run. Of others (Weights & Biases, MLflow) it is one for all runs,
    below which ``ModelCheckpoint`` makes one by name and version.

    Communication: one broadcast, Lightning's.
    """
    log_dir = trainer.log_dir
    if log_dir is None:
        return None
    folder = Path(log_dir)
    # only rank 0's loggers are real ones
    if trainer.loggers and process_groups.rank() == 0:
        logger = trainer.loggers[0]
        own = getattr(logger, "log_dir", None)
        if own is not None:
            return Path(own)
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        folder = folder / str(logger.name) / version
    return folder


def counted(number: int, noun: str) -> str:
    """Return a number of things in words: ``1 finding``, ``2 findings``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def _numbered(name: str, number: int) -> str:
    """Return the name of a file of the fit of that number; the first has none."""
    if number == 0:
        return name
    stem, _, suffix = name.partition(".")
    return f"{stem}_{number}.{suffix}"


def _seen_by(check: CheckSummary) -> str:
    """Return what a check has seen, in its own words; its figures, where they are few, if it has none."""
    if check.remarks or not check.figures:
        return "; ".join(check.remarks) or "-"
    if len(check.figures) > _MOST_FIGURES:
        return f"{len(check.figures)} figures"
    return ", ".join(f"{name} {value:.4g}" for name, value in check.figures.items())


def _send_to_loggers(trainer: Trainer, figures: Mapping[str, float], step: int) -> None:
    """Send figures to the trainer's loggers under ``ddp_checks/``, with the epoch, as Lightning logs."""
    named = {f"ddp_checks/{name}": value for name, value in figures.items()}
    for logger in trainer.loggers:
        logger.log_metrics({"epoch": float(trainer.current_epoch), **named}, step=step)


def _warn(text: str) -> None:
    """Warn on rank 0; where the user has made warnings errors, raise on every rank."""
    level = _users_stack_level()
    # elsewhere the same filters decide, so that an error is one on every rank; nothing is printed
    quietly = warnings.catch_warnings(record=True) if process_groups.rank() else contextlib.nullcontext()
    with quietly:
        warnings.warn(text, stacklevel=level)


def _users_stack_level() -> int:
    """Return the ``stacklevel`` by which a warning names the user's line that led here, and no file of a library."""
    # level 1 is the caller of this function, which warns
    frame, level = inspect.currentframe(), 0
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            return level
        frame, level = frame.f_back, level + 1
    return 2
