"""Where checks measure and are heard: one row per rank, one verdict for all, and what ranks add to a new finding."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl

from lightning_ddp_losses.callbacks import rows
from lightning_ddp_losses.callbacks.check_stage import Moment
from lightning_ddp_losses.callbacks.findings import Finding, failed_check
from lightning_ddp_losses.callbacks.meeting import Meeting
from lightning_ddp_losses.callbacks.report import Report

if TYPE_CHECKING:
    from lightning_ddp_losses.callbacks.base import RankCheck


_MOST_TENSORS = 8  # of one moment, whose differences are measured
T = TypeVar("T")


class Court:
    """Turns rows into findings, and findings into what the report is told.

    Attributes:
        failures: By check, what an observation raised; it is reported in place of the next measurement.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, meeting: Meeting, report: Report) -> None:
        self._trainer, self._module, self._meeting, self._report = trainer, module, meeting, report
        self.failures: dict[int, str] = {}
        self._described: dict[tuple[str, str, str], list[Finding]] = {}

    def measure(self, due: Sequence[RankCheck], moment: Moment) -> bytes:
        """This rank's row. A check that fails sends its error instead."""
        return b"".join(self._measure(check, moment) for check in due)

    def judge(self, due: Sequence[RankCheck], moment: Moment, everyone: Sequence[bytes], step: int) -> None:
        """The verdict on all ranks' rows; called with the same rows on every rank."""
        heard: list[tuple[RankCheck, Finding]] = []
        for check, table in zip(due, rows.tables(everyone, len(due)), strict=True):
            found = (
                [failed_check(check.title, table)] if isinstance(table, dict) else self._verdict(check, table, moment)
            )
            heard += [(check, replace(f, check=check.title, step=step, moment=moment.value)) for f in found]
        if heard:
            told = self._look_into(heard)
            self._report.take([finding for _, finding in told], [check.action for check, _ in told], self._trainer)

    def _verdict(self, check: RankCheck, table: Any, moment: Moment) -> list[Finding]:
        """What a check finds. One that fails on this rank alone must not leave the peers alone: that is told when it is due next."""
        try:
            found = list(check.judge(table, self._trainer, self._module, moment))
            wrong = [type(each).__name__ for each in found if not isinstance(each, Finding)]
            if wrong:
                raise TypeError(f"a list of Finding was expected, with {wrong[0]} in it")
        except Exception as error:
            self.failures[id(check)] = f"judge: {type(error).__name__}: {error}"
            return []
        return found

    def leftovers(self, checks: Sequence[RankCheck], step: int) -> None:
        """What failed since its check was last due, at the end of a fit.

        Communication: one gather.
        """
        own = [self.failures.pop(id(check), "") for check in checks]
        everyone = [json.loads(row) for row in self._meeting.swap("failures of checks", json.dumps(own).encode())]
        failed = [{rank: text for rank, text in enumerate(texts) if text} for texts in zip(*everyone, strict=True)]
        told = [
            (check, replace(failed_check(check.title, texts), check=check.title, step=step, moment="the end"))
            for check, texts in zip(checks, failed, strict=True)
            if texts
        ]
        self._report.take([finding for _, finding in told], [check.action for check, _ in told], self._trainer)

    def _measure(self, check: RankCheck, moment: Moment) -> bytes:
        failure = self.failures.pop(id(check), None)
        if failure is not None:
            return rows.failure(failure)
        try:
            return rows.encode(check.measure(self._trainer, self._module, moment), check.title)
        except Exception as error:  # it becomes a finding on every rank
            return rows.failure(f"{type(error).__name__}: {error}")

    def _look_into(self, heard: Sequence[tuple[RankCheck, Finding]]) -> list[tuple[RankCheck, Finding]]:
        """Have every rank add what it knows of new findings.

        Communication: one gather for the texts, where a check has any; one, and the tensor's, for each finding about a tensor.
        """
        told: list[tuple[RankCheck, Finding]] = []
        for check, finding in heard:
            if not overrides(check, "describe"):
                told.append((check, finding))
                continue
            if finding.key not in self._described:
                texts = self._meeting.texts(self._quietly(check.describe, finding))
                self._described[finding.key] = check.explain(finding, texts) if texts else [finding]
            # seen again, it is told as it was explained the first time
            known = self._described[finding.key]
            told += [(check, replace(better, step=finding.step, moment=finding.moment)) for better in known]
        measured = 0
        for i, (check, finding) in enumerate(told):
            if overrides(check, "tensor") and self._report.is_new(finding) and measured < _MOST_TENSORS:
                measured += 1
                spread = self._meeting.spread(self._quietly(check.tensor, finding))
                told[i] = check, replace(finding, max_difference=spread)
        return told

    def _quietly(self, ask: Callable[..., T | None], finding: Finding) -> T | None:
        with contextlib.suppress(Exception):  # the finding itself stands
            return ask(finding, self._trainer, self._module)
        return None


def overrides(check: RankCheck, method: str) -> bool:
    """Whether a check has its own of a method that does nothing by default."""
    return _class_overrides(type(check), method)  # type: ignore[arg-type] # mypy takes a class for unhashable


@functools.cache
def _class_overrides(cls: Any, method: str) -> bool:
    from lightning_ddp_losses.callbacks.base import RankCheck

    return getattr(cls, method) is not getattr(RankCheck, method)
