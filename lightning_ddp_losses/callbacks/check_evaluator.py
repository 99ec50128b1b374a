"""Turns the rows of a stage into findings, the same on all ranks, and whatever a check raises into one more.

`CheckEvaluator` measures this rank's row, judges the rows of all ranks, and completes new findings with what every rank knows of them:
texts, and the largest difference of a tensor. It knows checks by the `JudgedCheck` protocol; their base class is `base.RankCheck`.

A check that fails by itself sends its error in place of its next row. With that row every rank knows: a check of this package is switched
off on all ranks alike and leaves one warning (its fault must not end a healthy fit); one that a user wrote is an error, which he can mend.

On an accelerator late rows (``late_row``) wait here for the next time that their check is due.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import lightning.pytorch as pl
from torch import Tensor

from lightning_ddp_losses.callbacks import row_exchange
from lightning_ddp_losses.callbacks.check_stage import CheckStage
from lightning_ddp_losses.callbacks.findings import FAILED, Finding, failed_check
from lightning_ddp_losses.callbacks.late_row import LateRow, judges_late
from lightning_ddp_losses.callbacks.report import Report
from lightning_ddp_losses.callbacks.row_exchange import RowExchange
from lightning_ddp_losses.errors import DDPLossError

_MAX_TENSORS = 8  # at one stage, whose differences are measured
T = TypeVar("T")


class JudgedCheck(Protocol):
    """Names what it takes to measure and judge a check; `base.RankCheck` says what each part is for."""

    action: dict[str, str]

    @property
    def title(self) -> str:
        """The name of its class, for messages."""

    @property
    def is_built_in(self) -> bool:
        """Whether it is one of this package, and no user's."""

    def overrides(self, method: str) -> bool:
        """Say whether it has its own of a method that does nothing by default."""

    @property
    def late_stages(self) -> tuple[CheckStage, ...]:
        """At which stages it measures late rows."""

    def measure(
        self, trainer: pl.Trainer, module: pl.LightningModule, stage: CheckStage
    ) -> row_exchange.Measured | LateRow:
        """Return this rank's row."""

    def judge(self, table: Any, trainer: pl.Trainer, module: pl.LightningModule, stage: CheckStage) -> list[Finding]:
        """Return what is wrong with the rows of all ranks."""

    def describe(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
        """Return what this rank can add to a new finding."""

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        """Return the finding, made richer by the texts of all ranks."""

    def tensor(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> Tensor | None:
        """Return the tensor that a new finding is about."""

    def stop(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Leave nothing behind; it may be called twice."""


class _Waiting(NamedTuple):
    """A late row, and the step that it is about."""

    row: LateRow
    step: int


class CheckEvaluator:
    """Turns rows into findings, and hands findings to the report."""

    def __init__(
        self,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        row_exchange: RowExchange,
        report: Report,
        switch_off: Callable[[JudgedCheck], None],
    ) -> None:
        self._trainer, self._module, self._row_exchange, self._report = trainer, module, row_exchange, report
        # by check, what it raised between two measurements; reported in place of the next one
        self._failures: dict[int, str] = {}
        self._switch_off = switch_off
        self._switched_off: set[int] = set()
        self._explained: dict[tuple[str, str, str], list[Finding]] = {}
        # by check and stage, the late row that nobody has judged, and the step of the one that travels
        self._waiting: dict[tuple[int, CheckStage], _Waiting] = {}
        self._late_steps: dict[tuple[int, CheckStage], int] = {}
        self._begun: set[tuple[int, CheckStage]] = set()

    def note_failure(self, check: JudgedCheck, method: str, error: Exception) -> None:
        """Remember what a check raised on this rank alone, so that all ranks report it when the check is due next."""
        self._failures[id(check)] = f"{method}: {type(error).__name__}: {error}"

    def measure(self, due: Sequence[JudgedCheck], stage: CheckStage, step: int) -> bytes:
        """Return this rank's row. A check that fails sends its error instead."""
        return b"".join([self._part_of(check, stage, step) for check in due])

    def measure_waiting(self, due: Sequence[tuple[JudgedCheck, CheckStage]]) -> bytes:
        """Return this rank's row of what has waited at these stages; nothing is measured anew."""
        return b"".join([self._part_of(check, stage, None) for check, stage in due])

    def _part_of(self, check: JudgedCheck, stage: CheckStage, step: int | None) -> bytes:
        key = id(check), stage
        waiting = self._waiting.pop(key, None)
        is_first = step is not None and key not in self._begun
        if is_first:
            self._begun.add(key)
        failure = self._failures.pop(id(check), None)
        if failure is not None:
            return row_exchange.encode_failure(failure)
        try:
            return row_exchange.encode(self._measure(check, stage, step, waiting, is_first=is_first), check.title)
        except Exception as error:  # it becomes a finding on every rank
            if isinstance(error, DDPLossError) and error.collective:  # every rank raises it
                raise
            self._waiting.pop(key, None)
            return row_exchange.encode_failure(f"{type(error).__name__}: {error}")

    def _measure(
        self,
        check: JudgedCheck,
        stage: CheckStage,
        step: int | None,
        waiting: _Waiting | None,
        *,
        is_first: bool,
    ) -> row_exchange.Measured:
        """Return what a check measures now; of late rows the one that has waited, behind a number that says that there is one.

        Args:
            check: Whose row it is.
            stage: Where the run is, or where it was.
            step: Optimizer steps before this one; None: nothing is measured.
            waiting: What has waited.
            is_first: Whether the check is at this stage for the first time: then nobody waits for a next time.
        """
        is_late = stage in check.late_stages and judges_late(self._trainer)
        if step is not None:
            measured = check.measure(self._trainer, self._module, stage)
            if not is_late:
                return measured.read() if isinstance(measured, LateRow) else measured
            if not isinstance(measured, LateRow):  # known at once, as that there is nothing to compare
                measured, is_first = LateRow(partial(list, measured)), True
            if is_first:
                waiting = _Waiting(measured, step)
            else:
                self._waiting[id(check), stage] = _Waiting(measured, step)
        if waiting is None:
            return [0]
        self._late_steps[id(check), stage] = waiting.step
        return [1, *waiting.row.read()]

    def judge(self, due: Sequence[JudgedCheck], stage: CheckStage, rows: Sequence[bytes], step: int) -> None:
        """Judge all ranks' rows; called with the same rows on every rank.

        Raises:
            DDPLossError: on every rank, for findings whose action is ``raise``.
        """
        self.judge_at([(check, stage) for check in due], rows, step)

    def judge_at(self, due: Sequence[tuple[JudgedCheck, CheckStage]], rows: Sequence[bytes], step: int) -> None:
        """Judge as ``judge``, each check as at a stage of its own."""
        found: list[tuple[JudgedCheck, Finding]] = []
        # each check has its own table: one row a rank
        for (check, stage), table in zip(due, row_exchange.decode_tables(rows, len(due)), strict=True):
            is_late = stage in check.late_stages and judges_late(self._trainer)
            if not isinstance(table, list) or not is_late:
                found += placed(check, self._judge(check, table, stage), step, stage.value)
            # all ranks have one that has waited, but at the second time, and after the check has failed on one of them
            elif all(row[0] for row in table):
                late = [row[1:] for row in table]
                found += placed(check, self._judge(check, late, stage), self._late_steps[id(check), stage], stage.value)
        if found:
            found = self._add_differences(self._explain(found))
            self.report_findings(found)

    def _judge(self, check: JudgedCheck, table: row_exchange.Table, stage: CheckStage) -> list[Finding]:
        """Let a check judge. One that fails on this rank alone must not leave the peers alone: that is reported when it is due next."""
        if isinstance(table, dict):
            return [self._failed(check, table)]
        try:
            found = list(check.judge(table, self._trainer, self._module, stage))
            for each in found:
                if not isinstance(each, Finding):
                    raise TypeError(f"a list of Finding was expected, with {type(each).__name__} in it")
        except Exception as error:
            self.note_failure(check, "judge", error)
            return []
        return found

    def _failed(self, check: JudgedCheck, failures: dict[int, str]) -> Finding:
        """Make the finding of a check that failed; the same on every rank, so that one of ours is switched off on all of them."""
        if check.is_built_in:
            self._switched_off.add(id(check))
            self._switch_off(check)
        return failed_check(check.title, failures, is_built_in=check.is_built_in)

    def _explain(self, found: Sequence[tuple[JudgedCheck, Finding]]) -> list[tuple[JudgedCheck, Finding]]:
        """Have every rank add the texts that it has on new findings; a finding seen again stays as it was explained first.

        Communication: one gather for each new finding of a check that describes its findings.
        """
        explained: list[tuple[JudgedCheck, Finding]] = []
        for check, finding in found:
            if not check.overrides("describe") or finding.fault == FAILED:
                explained.append((check, finding))
                continue
            # the same findings are new on every rank, so every rank takes part
            if finding.key not in self._explained:
                texts = self._row_exchange.gather_texts(self._ask(check.describe, finding))
                self._explained[finding.key] = [finding]
                if texts:
                    self._explained[finding.key] = self._made_richer(check, finding, texts)
            better = self._explained[finding.key]
            explained += [(check, replace(each, step=finding.step, moment=finding.moment)) for each in better]
        return explained

    def _made_richer(self, check: JudgedCheck, finding: Finding, texts: list[str]) -> list[Finding]:
        try:
            return check.explain(finding, texts)
        except Exception as error:  # the finding itself stands
            self.note_failure(check, "explain", error)
            return [finding]

    def _add_differences(self, found: Sequence[tuple[JudgedCheck, Finding]]) -> list[tuple[JudgedCheck, Finding]]:
        """Measure the largest difference between ranks of the tensors that new findings are about.

        Communication: one gather and the tensor's, for each of at most ``_MAX_TENSORS`` findings.
        """
        completed: list[tuple[JudgedCheck, Finding]] = []
        measured = 0
        for check, finding in found:
            is_shown = check.overrides("tensor") and finding.fault != FAILED
            if not is_shown or not self._report.is_new(finding) or measured == _MAX_TENSORS:
                completed.append((check, finding))
                continue
            measured += 1
            difference = self._row_exchange.max_difference(self._ask(check.tensor, finding))
            completed.append((check, replace(finding, max_difference=difference)))
        return completed

    def _ask(self, method: Callable[..., T | None], finding: Finding) -> T | None:
        with contextlib.suppress(Exception):  # the finding itself stands
            return method(finding, self._trainer, self._module)
        return None

    def report_remaining_failures(self, checks: Sequence[JudgedCheck], step: int) -> None:
        """Report at the end of a fit what failed since its check was last due.

        Communication: one gather.
        """
        local_failures = [self._failures.pop(id(check), "") for check in checks]
        failures_by_rank = self._row_exchange.gather_json("failures of checks", local_failures)
        found: list[tuple[JudgedCheck, Finding]] = []
        # by check, what each rank remembers; a check that is switched off has been reported
        for check, texts in zip(checks, zip(*failures_by_rank, strict=True), strict=True):
            failed = {rank: text for rank, text in enumerate(texts) if text}
            if failed and id(check) not in self._switched_off:
                found += placed(check, [self._failed(check, failed)], step, "the end")
        self.report_findings(found)

    def report_findings(self, found: Sequence[tuple[JudgedCheck, Finding]]) -> None:
        """Hand findings to the report, each with what its check wants done with it.

        Raises:
            DDPLossError: on every rank, for findings whose action is ``raise``.
        """
        findings = [finding for _, finding in found]
        actions = [check.action for check, _ in found]
        self._report.add(findings, actions, self._trainer)


def placed(check: JudgedCheck, findings: Sequence[Finding], step: int, place: str) -> list[tuple[JudgedCheck, Finding]]:
    """Fill in where findings were made, unless they say it: what is judged a step later names its own step."""
    made = []
    for finding in findings:
        there = finding if finding.moment else replace(finding, step=step, moment=place)
        made.append((check, replace(there, check=check.title)))
    return made
