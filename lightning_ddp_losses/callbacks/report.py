"""Where findings go: the error or warning, a file of JSON lines, the logger's counters, and a table at the end of the fit."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from rich.console import Console
from rich.table import Table

from lightning_ddp_losses.callbacks.causes import group_by_cause
from lightning_ddp_losses.callbacks.findings import Finding, SwitchedOff
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import ConfigurationError, DDPLossError

FILE_NAME = "ddp_checks.jsonl"
DEFAULT_ACTION = {"error": "raise", "warning": "warn", "note": "log"}
_ACTIONS = ("raise", "warn", "log")


def validated_actions(action: Mapping[str, str] | None, title: str) -> dict[str, str]:
    """Return the actions that were given; refuse severities and actions that do not exist."""
    given = dict(action or {})
    if not given.keys() <= DEFAULT_ACTION.keys() or not set(given.values()) <= set(_ACTIONS):
        expected = f"severities {', '.join(DEFAULT_ACTION)} with one of {', '.join(_ACTIONS)}"
        raise ConfigurationError(f"{title}: action", expected=expected, got=given)
    return given


@dataclass(frozen=True)
class Settings:
    """Says what happens with findings.

    Attributes:
        action: By severity: ``raise``, ``warn`` or ``log``.
        file: Whether new findings are written to ``ddp_checks.jsonl`` in the log folder.
        summary: Whether a table is printed at the end of the fit.
        stall_seconds: A rank that stands still for longer is reported.
    """

    action: Mapping[str, str] = field(default_factory=lambda: dict(DEFAULT_ACTION))
    file: bool = True
    summary: bool = True
    stall_seconds: float = 120.0


class Report:
    """Collects the findings of one fit; every rank collects the same."""

    def __init__(self, settings: Settings, folder: str | None) -> None:
        self._settings = settings
        self._path: Path | None = None
        if folder and settings.file:
            self._path = Path(folder) / FILE_NAME
        self._seen: Counter[tuple[str, str, str]] = Counter()
        self._leads: dict[str, list[Finding]] = {"warn": [], "log": []}  # of the causes that were told
        self.findings: list[Finding] = []
        self.by_check: dict[str, Counter[str]] = {}

    def is_new(self, finding: Finding) -> bool:
        """Say whether this fault has not been seen before in this fit."""
        return finding.key not in self._seen

    def add(self, findings: Sequence[Finding], actions: Sequence[Mapping[str, str]], trainer: pl.Trainer) -> None:
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
            # what the check says, else what DDPChecks says, else the default
            action = check_action.get(severity) or self._settings.action.get(severity, DEFAULT_ACTION[severity])
            if action == "raise" and isinstance(finding, SwitchedOff):
                action = "warn"  # our own fault ends nobody's training
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
            if action == "warn":
                _warn(cause.text())
            else:
                rank_zero_info(cause.text())
        for finding, lead in late:
            self._keep(replace(finding, follows=lead.fault))
            rank_zero_info(f"{finding.text()}\n  of the same cause as {lead.fault} of step {lead.step}: {lead.what}")

    def _keep(self, finding: Finding, *, new: bool = True) -> None:
        """Count a finding that stands for itself; the first time, keep and write it."""
        self.by_check.setdefault(finding.check, Counter())[finding.severity] += new and not finding.follows
        if new:
            self.findings.append(finding)
            self._write(finding)

    @property
    def folder(self) -> Path | None:
        """The folder that files go to; None where none are wanted."""
        if self._path is None:
            return None
        return self._path.parent

    @property
    def count(self) -> int:
        """The number of errors and warnings seen, each once; notes are no faults."""
        return sum(counts["error"] + counts["warning"] for counts in self.by_check.values())

    def log(self, trainer: pl.Trainer, more: Mapping[str, float] | None = None) -> None:
        """Send the counters, and other figures, to the trainer's loggers."""
        # of all checks together
        totals: Counter[str] = sum(self.by_check.values(), Counter())
        figures = {f"{severity}s": float(totals[severity]) for severity in DEFAULT_ACTION}
        log_figures(trainer, {**figures, **(more or {})}, trainer.global_step)

    def summary(
        self,
        titles: Sequence[str],
        steps: int,
        share: float,
        figures: Mapping[str, float],
        remarks: Sequence[str] = (),
    ) -> None:
        """Print one row per check and one line of totals, on rank 0."""
        if not self._settings.summary or process_groups.rank():
            return
        table = Table(title=f"{len(titles)} checks, {steps} steps, {self.count} findings, {share:.1%} of the time")
        table.add_column("check")
        for severity in DEFAULT_ACTION:
            table.add_column(f"{severity}s", justify="right")
        for title in titles:
            counts = self.by_check.get(title, Counter())
            table.add_row(title, *(str(counts[severity]) for severity in DEFAULT_ACTION))
        console = Console()
        console.print(table)
        if figures:
            console.print(", ".join(f"{name}: {value:.4g}" for name, value in figures.items()))
        for remark in remarks:
            console.print(remark)

    def _write(self, finding: Finding) -> None:
        if self._path is None or process_groups.rank():
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)  # the logger may make it later
            with self._path.open("a") as file:
                file.write(json.dumps(finding.record(), default=str) + "\n")
        except OSError as error:  # a full disk on this rank is no reason to leave the others waiting
            rank_zero_info(f"{self._path} cannot be written, findings are not kept in it: {error}")
            self._path = None


def log_figures(trainer: pl.Trainer, figures: Mapping[str, float], step: int) -> None:
    """Send figures to the trainer's loggers under ``ddp_checks/``, with the epoch, as Lightning logs."""
    named = {f"ddp_checks/{name}": value for name, value in figures.items()}
    for logger in trainer.loggers:
        logger.log_metrics({"epoch": float(trainer.current_epoch), **named}, step=step)


def _warn(text: str) -> None:
    """Warn on rank 0; where the user has made warnings errors, raise on every rank."""
    if process_groups.rank() == 0:
        warnings.warn(text, stacklevel=2)
        return
    # the same filters decide here, so that an error is one on every rank; nothing is printed
    with warnings.catch_warnings(record=True):
        warnings.warn(text, stacklevel=2)
