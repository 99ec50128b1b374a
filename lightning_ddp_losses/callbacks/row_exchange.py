"""Facts are read on each rank, exchanged, and judged by the same rules on all ranks, so that all ranks have the same findings.

`RowExchange` reads facts from the checks, sends the facts of all due checks together, and adds texts and the largest difference of a tensor
to new findings. Notes are sent as bytes in handshakes of a separate process group, which only checks use. Ranks at different places of
the program are still matched in handshakes of equal size there, and raise the same error.

Checks do not wait for a device: the copy of a number to the host starts immediately, and is read when the note is sent. Numbers remain
Python numbers throughout. After a step, the processor's caches no longer contain this data, and a few numbers in a tensor then take ten
times as long as in a list (torch 2.13, measured 2026).

A check that fails sends its error instead of its next numbers, so every rank receives the error. A check of this package is then switched
off on all ranks with one warning, because a bug in a check must not end a healthy fit. A failing check of the user is an error, which the
user can fix.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_ddp_losses.callbacks.check import Check
from lightning_ddp_losses.callbacks.facts.fact import columns_of
from lightning_ddp_losses.callbacks.facts.user_rows import facts_of_rows
from lightning_ddp_losses.callbacks.findings import (
    FAILED,
    MOST_NAMES,
    CheckStage,
    Finding,
    findings_of_texts,
    names_of_stages,
    shown_names,
    texts_of,
)
from lightning_ddp_losses.callbacks.report import Report
from lightning_ddp_losses.core.autograd_graph import parameters_without_gradient
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.liveness import Watch
from lightning_ddp_losses.distributed.raw_collectives import awake_seconds, gather
from lightning_ddp_losses.distributed.store_exchange import StoreExchange
from lightning_ddp_losses.errors import DDPLossError, RankMismatchError

_CHUNK = 1 << 20  # elements of a tensor that are compared at a time
_LOOK_SECONDS = 1.0  # interval between queries for the calls in which peers wait
_FIRST_NAP_SECONDS, _NAP_SECONDS = 0.0001, 0.005
_EVERY_N_STEPS = (CheckStage.BEFORE_BACKWARD, CheckStage.AFTER_STEP)  # stages to which ``every_n_steps`` applies
_MAX_TENSORS = 8  # largest number of differences measured in one exchange
# gives each NaN an object of its own. Python takes a NaN for equal to the same object in lists and sets
_DECODER = json.JSONDecoder(parse_constant=float)
T = TypeVar("T")


class StageFacts:
    """The facts of one check at one stage, with this rank's pending numbers.

    Args:
        check: Check that reads the facts.
        stage: Stage of the run.

    Attributes:
        check: Check that reads the facts.
        stage: Stage of the run.
        facts: Facts of the check at this stage, equal on all ranks.
        step: Step of the last numbers. -1 before the first ones.
        numbers: For each fact its numbers, a function that returns them when they are sent, or None. The error of a check that failed,
            as a text. None if nothing is pending.
        found: Findings that this rank made without its peers while reading.
    """

    def __init__(self, check: Check, stage: CheckStage) -> None:
        self.check, self.stage = check, stage
        self.facts = [fact for fact in (*check.facts, *facts_of_rows(check)) if stage in fact.stages]
        self.step = -1
        self.numbers: list[Any] | str | None = None
        self.found: list[Finding] = []

    def entry_(self) -> str:
        """Return the entry of the note: null if nothing is pending, the error of a check that failed, or a list.

        The list contains the texts of this rank's findings and the values of each fact. Repeated calls are allowed.

        Raises:
            TypeError: for a value that JSON does not have.
        """
        if not isinstance(self.numbers, list):
            return json.dumps(self.numbers)
        self.numbers = [numbers() if callable(numbers) else numbers for numbers in self.numbers]
        values = (None if numbers is None else [*numbers.values()] for numbers in self.numbers)
        return json.dumps([texts_of(self.found), *values])


class RowExchange:
    """Exchanges the facts of checks between the ranks of the world, and turns them into findings.

    Args:
        trainer: Trainer of the fit.
        module: Module that it trains.
        checks: Checks of the fit, equal on all ranks.
        watch: Watch of the run, which raises when a peer has failed. None if the run is not watched.
        report: Report that collects the findings.
        stop_check: Function that is called when a check of this package fails, and on every rank when it is switched off.

    Attributes:
        report: Report that collects the findings.
        watch: Watch of the run, or None.
        names: Names of the stages in messages.
        after_error: Exchange through the store, which replaces the handshakes once this rank has an error. None until an error occurs.
        last_backward: Name of this rank's last backward, as the watch publishes it. Empty before the first one.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        checks: Sequence[Check],
        watch: Watch | None,
        report: Report,
        stop_check: Callable[[Check], None],
    ) -> None:
        self.watch, self.report = watch, report
        self.names = names_of_stages(is_test=trainer.testing)
        self.after_error: StoreExchange | None = None
        self.last_backward = ""
        self._trainer, self._module, self._stop_check = trainer, module, stop_check
        # active checks, their facts at each stage, and the stages of the checks when these facts were looked up
        self._checks = [*checks]
        self._facts: dict[tuple[int, CheckStage], StageFacts] = {}
        self._plan: dict[CheckStage, list[StageFacts]] = {}
        self._planned_for: list[tuple[CheckStage, ...]] = []
        self._failures: dict[int, str] = {}  # by check, sent in place of its next numbers
        self._explained: dict[tuple[str, ...], list[Finding]] = {}

    # ------------------------------------------------------------------ transport

    def gather_rows(self, place: str, row: bytes, must_match: Mapping[str, object] | None = None) -> list[bytes]:
        """Return the rows of all ranks, in rank order.

        Raises:
            RankMismatchError: on every rank, when ranks are at different places, or ``must_match`` differs.
            TimeoutError: after an error, when peers have not sent their rows in time.

        Communication: one gather. One more when a row exceeds the agreed size. None in a world of one. After an error the store is used.
        """
        if self.after_error is not None:
            self.after_error.post(row)
            return self.after_error.collect()
        # ranks at different places raise the same error in this handshake
        pending = handshake.start(place, must_match or {}, row, channel="checks")
        # busy-wait first, then sleep. Raise when a peer has failed, because the handshake would never complete
        began, awake, looked = time.perf_counter(), awake_seconds(), 0.0
        while not pending.is_completed():
            waited = time.perf_counter() - began
            if waited < awake:
                time.sleep(0)  # peers usually arrive immediately, and sleeping takes longer than the gather
                continue
            if self.watch is not None:
                self.watch.check_peers()
            if waited > looked + _LOOK_SECONDS:
                looked = waited
                self._refuse_missed_call(pending, place)
                self._refuse_partial_backward()
            time.sleep(min(max(waited / 20, _FIRST_NAP_SECONDS), _NAP_SECONDS))
        return pending.finish()

    def _refuse_missed_call(self, pending: handshake.PendingHandshake, place: str) -> None:
        """Raise if other ranks wait for this one in a call of the program or of a loss that this rank does not make.

        Raises:
            RankMismatchError: on every rank.
        """
        waits = {} if self.watch is None else self.watch.waits_of_peers(handshake.number_sent())
        if waits and not pending.is_completed():
            advice = " ".join(dict.fromkeys(call.advice for call in waits.values()))
            error = RankMismatchError(
                "ranks wait for each other at different places of the program",
                expected="the same call on every rank",
                ranks=waits,
                fix=f"The other ranks have come to {place}. {advice}",
                page="F45",
            )
            handshake.raise_on_all_ranks(error, place)

    def _refuse_partial_backward(self) -> None:
        """Raise F37 if a peer is stalled in the backward that this rank has finished without the gradients of some parameters.

        DDP waits for these gradients on the peer, and nothing can interrupt it. `GradientFlowCheck` finds this before backward, if it runs
        in this step.

        Raises:
            DDPLossError: on this rank. Its peers end with it.
        """
        if self.watch is None or not self.last_backward or not self.watch.is_any_peer_at(self.last_backward):
            return
        names = parameters_without_gradient(self._trainer.strategy.model)
        if names:
            name = ", ".join(names[:MOST_NAMES])
            finding = Finding.of("F37", ranks=(process_groups.rank(),), name=name, shown=shown_names(names))
            raise DDPLossError(f"{self.last_backward}: {finding.text()}", findings=[finding])

    def gather_json(self, place: str, value: object) -> list[Any]:
        """Return a JSON value from each rank, in rank order. Communicates like ``gather_rows``."""
        return [json.loads(row) for row in self.gather_rows(place, json.dumps(value, default=str).encode())]

    def max_difference(self, local: Tensor | None) -> float | None:
        """Return the largest difference between any two ranks of a tensor's elements. None if ranks cannot be compared.

        Communication: one gather, and two for each 8 MiB of the tensor.
        """
        if process_groups.world_size() == 1 or self.after_error is not None:
            return None
        # check that every rank has a tensor with the same shape and dtype
        description = b""
        if local is not None and not local.is_quantized and local.layout == torch.strided:
            description = f"{tuple(local.shape)} {local.dtype}".encode()
        descriptions = set(self.gather_rows("a tensor's difference", description))
        if local is None or not description or len(descriptions) > 1:
            return None
        # compare the tensor chunk by chunk
        group = process_groups.internal_groups().get("checks")
        flat = local.detach().reshape(-1)
        if flat.is_complex():  # compares real and imaginary parts separately
            flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
        largest = 0.0
        for start in range(0, flat.numel(), _CHUNK):
            chunk = flat[start : start + _CHUNK].double().cpu()
            gathered = chunk.new_empty(process_groups.world_size() * chunk.numel())
            gather(gathered, chunk, group=group)
            gathered = gathered.view(-1, chunk.numel())
            difference = gathered.amax(0) - gathered.amin(0)
            largest = max(largest, float(difference.nan_to_num(nan=float("inf")).max()))
        return largest

    # ------------------------------------------------------------------ measure, gather, judge

    def due(self, stage: CheckStage, step: int) -> list[StageFacts]:
        """Return the facts of the checks that run at a stage in this step, equal on all ranks.

        The lookup is repeated only if a check is switched off or changes its stages.
        """
        stages = [check.stages for check in self._checks]
        if stages != self._planned_for:
            self._planned_for = stages
            self._plan = {at: [self._facts_of(c, at) for c in self._checks if at in c.stages] for at in CheckStage}
        if stage not in _EVERY_N_STEPS:
            return self._plan[stage]
        return [facts for facts in self._plan[stage] if step % facts.check.every_n_steps == 0]

    def of_all_checks(self, stage: CheckStage) -> list[StageFacts]:
        """Return the facts of all active checks, including checks without facts at this stage, whose errors are sent too."""
        return [self._facts_of(check, stage) for check in self._checks]

    def _facts_of(self, check: Check, stage: CheckStage) -> StageFacts:
        key = id(check), stage
        if key not in self._facts:
            self._facts[key] = StageFacts(check, stage)
        return self._facts[key]

    def note_failure(self, check: Check, method: str, error: Exception) -> None:
        """Store the error of a check that failed on this rank. All ranks report it at the next exchange of the check.

        A check of this package is stopped on this rank. An error that every rank raises is raised immediately.
        """
        if isinstance(error, DDPLossError) and error.collective:
            raise error
        self._failures[id(check)] = f"{method}: {type(error).__name__}: {error}"
        if check.is_built_in:
            self._stop_check(check)

    def measure(self, due: Sequence[StageFacts], step: int) -> None:
        """Read facts on this rank, to be sent at the next exchange of their checks."""
        for facts in due:
            check = facts.check
            facts.step = step
            if id(check) in self._failures or isinstance(facts.numbers, str):  # its error is sent first
                continue
            check._found = found = list[Finding]()
            try:
                numbers = [fact.read(check) for fact in facts.facts]
            except Exception as error:
                self.note_failure(check, "measure", error)
            else:
                facts.numbers, facts.found = numbers, found

    def pack(self, due: Sequence[StageFacts]) -> bytes:
        """Return this rank's note, with pending facts and the errors of checks that failed.

        Both remain pending until they are judged, because an error of a peer may end the exchange.
        """
        entries: list[str] = []
        for facts in due:
            if id(facts.check) not in self._failures:
                try:
                    entries.append(facts.entry_())
                    continue
                except Exception as error:
                    self.note_failure(facts.check, "measure", error)
            facts.numbers = self._failures.pop(id(facts.check))
            entries.append(facts.entry_())
        return f"[{', '.join(entries)}]".encode()

    def exchange(self, due: Sequence[StageFacts], step: int, *, place: str = "") -> None:
        """Exchange the pending facts of one stage, and judge them.

        Args:
            due: Facts of the checks that are due, equal on all ranks.
            step: Optimizer steps so far.
            place: Name of the exchange, if it differs from the stage.

        Raises:
            DDPLossError: on every rank, for findings with the action ``raise``.

        Communication: one gather. More only if there is a new finding. None without checks.
        """
        if due:
            place = place or self.names[due[0].stage]
            notes = self.gather_rows(place, self.pack(due), {"step": step})
            self.judge(due, notes, step, place=place)

    def judge(self, due: Sequence[StageFacts], notes: Sequence[bytes], step: int, *, place: str) -> None:
        """Apply the rules to the notes of all ranks. Every rank calls this with the same notes.

        Raises:
            DDPLossError: on every rank, for findings with the action ``raise``.
        """
        own = [(facts, facts.numbers, facts.found) for facts in due]
        for facts in due:
            facts.numbers = None
        entries_by_check = zip(*[_DECODER.decode(note.decode()) for note in notes], strict=True)
        found: list[tuple[Check, Finding]] = []
        for (facts, numbers, of_rank), entries in zip(own, entries_by_check, strict=True):
            check = facts.check
            failures = {rank: entry for rank, entry in enumerate(entries) if isinstance(entry, str)}
            if failures:
                found += placed(check, [self._failed(check, failures)], step, place)
                continue
            if not isinstance(numbers, list) or None in entries:
                continue
            texts, *values = zip(*entries, strict=True)
            judged = of_rank
            if any(own_texts != texts[0] for own_texts in texts):
                judged = findings_of_texts(texts)
            judged = judged + self._apply(facts, numbers, values)
            if judged:
                found += placed(check, judged, facts.step, self.names[facts.stage])
        if found:
            self.report_findings(self._complete(found))

    def _apply(self, facts: StageFacts, numbers: Sequence[Any], values: Sequence[Any]) -> list[Finding]:
        """Apply the rules of a check. If a rule fails only on this rank, its error is sent at the next exchange of the check."""
        found: list[Finding] = []
        try:
            for fact, names, values_by_rank in zip(facts.facts, numbers, values, strict=True):
                if None in values_by_rank:
                    continue
                columns = columns_of(names, values_by_rank)
                if fact.see is not None:
                    fact.see(facts.check, columns)
                if fact.rule is not None and not fact.is_healthy(columns):
                    found += fact.rule(columns)
            for each in found:
                if not isinstance(each, Finding):
                    raise TypeError(f"a list of Finding was expected, with {type(each).__name__} in it")
            return found
        except Exception as error:
            self.note_failure(facts.check, "judge", error)
            return []

    def _failed(self, check: Check, failures: dict[int, str]) -> Finding:
        """Return the finding for a check that failed, equal on all ranks. A check of this package is switched off on all ranks."""
        texts = tuple(f"{rank}: {text}" for rank, text in failures.items())
        details: dict[str, Any] = {"ranks": tuple(failures), "name": check.title, "values": texts}
        if not check.is_built_in:
            return Finding.of(FAILED, **details)
        self._checks = [other for other in self._checks if other is not check]
        self._stop_check(check)
        return Finding.of(FAILED, "switched_off", graded="warning", **details)

    # ------------------------------------------------------------------ new findings

    def _complete(self, found: Sequence[tuple[Check, Finding]]) -> list[tuple[Check, Finding]]:
        """Add the texts of all ranks to findings, and the largest differences of their tensors.

        Communication: for each new finding, one gather if its check describes findings, and the gathers of ``max_difference`` if its check
            names a tensor, for at most ``_MAX_TENSORS`` tensors.
        """
        completed: list[tuple[Check, Finding]] = []
        measured = 0
        for check, finding in found:
            if finding.fault == FAILED:
                completed.append((check, finding))
                continue
            for explained in self._explain(check, finding):
                each = replace(explained, check=finding.check, step=finding.step, moment=finding.moment)
                if check.overrides("tensor") and self.report.is_new(each) and measured < _MAX_TENSORS:
                    measured += 1
                    each = replace(each, max_difference=self.max_difference(self._ask(check.tensor, each)))
                completed.append((check, each))
        return completed

    def _explain(self, check: Check, finding: Finding) -> list[Finding]:
        """Add the texts of all ranks to a finding. A repeated finding keeps its first explanation."""
        if not check.overrides("describe"):
            return [finding]
        # a finding is new on all ranks or on none, so every rank takes part
        if finding.key not in self._explained:
            texts = self.gather_json("texts about findings", self._ask(check.describe, finding))
            explained = [finding]
            if all(text is not None for text in texts):
                try:
                    explained = check.explain(finding, texts)
                except Exception as error:  # the finding itself remains valid
                    self.note_failure(check, "explain", error)
            self._explained[finding.key] = explained
        return self._explained[finding.key]

    def _ask(self, method: Callable[..., T | None], finding: Finding) -> T | None:
        with contextlib.suppress(Exception):  # the finding itself remains valid
            return method(finding, self._trainer, self._module)
        return None

    def report_findings(self, found: Sequence[tuple[Check, Finding]]) -> None:
        """Pass findings to the report, each with the actions of its check.

        Raises:
            DDPLossError: on every rank, for findings with the action ``raise``.
        """
        self.report.add([(finding, check.action) for check, finding in found], self._trainer)


def placed(check: Check, findings: Sequence[Finding], step: int, place: str) -> list[tuple[Check, Finding]]:
    """Fill in the check, the step and the place of findings, unless they name their own step."""
    made = []
    for finding in findings:
        there = finding if finding.moment else replace(finding, step=step, moment=place)
        made.append((check, replace(there, check=check.title)))
    return made
