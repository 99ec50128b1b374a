"""Rows of checks: measured on each rank, exchanged, judged on all ranks from the same table, so that all ranks have the same findings.

`RowExchange` asks checks for their rows, sends those of all due checks together, and completes new findings with texts and the largest
difference of a tensor. Rows travel as bytes in handshakes of a separate process group, which only checks use. Ranks that come from
different places of the program still pair up there in handshakes of equal size, and raise the same error.

A row is a list of numbers, a 1-D tensor (int64, float64 or uint8), or a function that returns a list when the row travels. No check waits
for a device: the host copy of a tensor starts at once, and is read when the row travels. Lists stay lists on their way. After a step the
processor's caches hold none of this, and a few numbers in a tensor then take ten times as long as in a list (torch 2.13, measured 2026).

A check that fails sends its error instead of its next row, so that every rank knows. A check of this package is then switched off on all
ranks and leaves one warning: its fault must not end a healthy fit. A failing check of the user is an error, which the user can mend.
"""

from __future__ import annotations

import contextlib
import json
import struct
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_losses.callbacks.findings import FAILED, CheckStage, Finding, findings_of_texts, texts_of
from lightning_ddp_losses.callbacks.report import Report
from lightning_ddp_losses.core.host_copy import HostCopy
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.fingerprint import hash_text
from lightning_ddp_losses.distributed.liveness import Watch
from lightning_ddp_losses.distributed.raw_collectives import awake_seconds, gather
from lightning_ddp_losses.distributed.store_exchange import StoreExchange
from lightning_ddp_losses.errors import DDPLossError, InputError, RankMismatchError

Measured: TypeAlias = "Tensor | list[int] | list[float]"
"""One rank's numbers. A list with a float in it becomes one of floats, on this rank; ints must fit 64 bits."""

Row: TypeAlias = "Measured | Callable[[], Tensor] | Callable[[], list[int]] | Callable[[], list[float]]"
"""Numbers that ``RankCheck.measure`` returns, or a function that returns them when the row travels."""

Rows: TypeAlias = "list[list[Any]]"
"""The rows of all ranks, in rank order, of a check that measures lists."""

Table: TypeAlias = "Tensor | Rows | dict[int, str] | None"
"""The rows of all ranks: a tensor (W, n), or lists in rank order. A dict has the errors of ranks. None: some rank has no row."""

_PART_HEAD = struct.Struct("<2sxxIQ")  # kind, number of bytes, hash of the findings that this rank made by itself
_FAILED, _NOTHING = b"!!", b"--"
# kinds of rows: list or tensor, then the code that ``array`` has for the numbers
_TENSORS = {torch.int64: b"Tq", torch.float64: b"Td", torch.uint8: b"TB"}
_DTYPES = {kind: dtype for dtype, kind in _TENSORS.items()}
_LISTS = {b"Lq": "a list of ints", b"Ld": "a list of floats"}
_CHUNK = 1 << 20  # elements of a tensor that are compared at a time
_LOOK_SECONDS = 1.0  # between looks at what peers wait in
_FIRST_NAP_SECONDS, _NAP_SECONDS = 0.0001, 0.005
_MAX_TENSORS = 8  # differences that are measured at one exchange
T = TypeVar("T")


# ---------------------------------------------------------------------- rows as bytes


def encode(measured: object, title: str, found: Sequence[Finding] = ()) -> bytes:
    """Encode the numbers of one check as its part of the row, with a hash of the findings that this rank made by itself.

    Raises:
        InputError: for anything that cannot travel.
    """
    got = type(measured).__name__
    if isinstance(measured, list):
        # one float makes all of them floats
        code = "d" if any(isinstance(value, float) for value in measured) else "q"
        with contextlib.suppress(TypeError):  # refused below
            return _part(f"L{code}".encode(), array(code, measured).tobytes(), found)
        got = f"a list with {', '.join(dict.fromkeys(type(value).__name__ for value in measured))}"
    elif isinstance(measured, Tensor):
        if measured.ndim == 1 and measured.dtype in _TENSORS:
            return _part(_TENSORS[measured.dtype], measured.detach().cpu().contiguous().numpy().tobytes(), found)
        got = f"{tuple(measured.shape)} {measured.dtype}"
    expected = "a list of numbers, or a 1-D tensor of int64, float64 or uint8"
    raise InputError(f"{title}.measure", expected=expected, got=got)


def _part(kind: bytes, data: bytes = b"", found: Sequence[Finding] = ()) -> bytes:
    texts = hash_text(json.dumps(texts_of(found))) if found else 0
    return _PART_HEAD.pack(kind, len(data), texts) + data


def decode_tables(rows: Sequence[bytes], number: int) -> list[tuple[Table, tuple[int, ...]]]:
    """Sort the ranks' rows by check: a table, and the hash of each rank's own findings (0 without any).

    A rank that measured fewer values than another is padded with zeros. Values that identify such a rank come first in its row.

    Args:
        rows: One row per rank, each with the parts of all checks that were due.
        number: Number of checks that were due.
    """
    parts_by_rank = [_split(row, number) for row in rows]
    tables = []
    for parts in zip(*parts_by_rank, strict=True):  # of one check
        kinds, hashes, data = zip(*parts, strict=True)
        tables.append((_table(kinds, data), hashes))
    return tables


def _split(row: bytes, number: int) -> list[tuple[bytes, int, bytes]]:
    """Split a row into kind, hash and bytes of each check."""
    parts: list[tuple[bytes, int, bytes]] = []
    offset = 0
    for _ in range(number):
        kind, size, texts = _PART_HEAD.unpack_from(row, offset)
        offset += _PART_HEAD.size + size
        parts.append((kind, texts, row[offset - size : offset]))
    return parts


def _table(kinds: Sequence[bytes], data: Sequence[bytes]) -> Table:
    """Combine the ranks' numbers of one check."""
    # an error on any rank, a rank without a row, or kinds that cannot be compared
    if _FAILED in kinds:
        return {rank: data[rank].decode(errors="replace") for rank, kind in enumerate(kinds) if kind == _FAILED}
    if _NOTHING in kinds:
        return None
    if len(set(kinds)) > 1 and not set(kinds) <= _LISTS.keys():
        return {rank: f"measured {_LISTS.get(kind) or _DTYPES[kind]}" for rank, kind in enumerate(kinds)}
    # rows of one length
    longest = max(map(len, data))
    rows = [array(chr(kind[1]), row.ljust(longest, b"\0")).tolist() for kind, row in zip(kinds, data, strict=True)]
    dtype = _DTYPES.get(kinds[0])
    return rows if dtype is None else torch.tensor(rows, dtype=dtype)


# ---------------------------------------------------------------------- checks


class Check:
    """Defines the methods that a check writes, and those that its runner calls. `base.RankCheck` makes a callback of it."""

    stages: ClassVar[tuple[CheckStage, ...]] = ()
    faults: ClassVar[tuple[str, ...]] = ()
    needs_peers: ClassVar[bool] = True
    every_n_steps: int
    action: Any  # by severity
    _found: list[Finding]  # of this rank alone, since ``measure`` began

    # ------------------------------------------------------------------ written by a check

    def measure(self, trainer: Trainer, module: LightningModule, stage: CheckStage) -> Row:
        """Return this rank's row, without communication: a 1-D tensor of int64, float64 or uint8, or a list of ints or floats.

        A function that returns such a row is called when the row travels: after a step that is one step later, when numbers that come off
        a device (``host_copy.HostNumbers``) have long arrived.
        """
        raise NotImplementedError

    def judge(self, table: Any, trainer: Trainer, module: LightningModule, stage: CheckStage) -> list[Finding]:
        """Return the findings in the rows of all ranks: a tensor (W, n), or a list of lists if ``measure`` returns lists.

        Decide from the table alone. It is the same on every rank.
        """
        return []

    def describe(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Any:
        """Return this rank's text about a new finding, or another value that JSON has, for ``explain``. None for nothing."""
        return None

    def explain(self, finding: Finding, texts: list[Any]) -> list[Finding]:
        """Return the finding with details from the texts of all ranks, or other findings for its check and place."""
        return [finding]

    def tensor(self, finding: Finding, trainer: Trainer, module: LightningModule) -> Tensor | None:
        """Return this rank's tensor for a new finding. Its largest difference between ranks is added to the finding."""
        return None

    def add(self, fault: str, case: str = "check", *, name: str, **fields: Any) -> None:
        """Add a finding that this rank makes by itself in ``measure``, as ``Finding.of`` makes it. All ranks report it."""
        self._found.append(Finding.of(fault, case, name=name, **fields))

    # ------------------------------------------------------------------ observations of a check, without communication

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Forget an earlier fit: training starts."""

    def see_batch(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Look at a training batch, on the device."""

    def dry_run(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> list[Finding]:
        """Try out the first batch before its step, on all ranks together.

        Only here may a check communicate by itself. It must make the same findings on every rank.
        """
        return []

    def see_loss(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        """Look at the loss before each backward, those of accumulation steps too."""

    def see_backward(self, trainer: Trainer, module: LightningModule) -> None:
        """Look at gradients right after each backward, those of accumulation steps too, before the module's own hook."""

    def see_gradients(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        """Look at reduced and unscaled gradients, before the module's own hook and before clipping."""

    def see_step(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        """Look at the module right after a step: gradients are those that the optimizer used."""

    def see_batch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Look at the module after a batch of training or validation (``trainer.validating``), before the module's own hook."""

    def stop(self, trainer: Trainer, module: LightningModule) -> None:
        """Remove hooks and drop references: the fit is over, maybe after an error. It may be called twice."""

    def figures(self) -> dict[str, float]:
        """Return figures for the logger and the summary, by name."""
        return {}

    def remarks(self) -> list[str]:
        """Return lines for the summary."""
        return []

    # ------------------------------------------------------------------ for the runner

    @property
    def title(self) -> str:
        """The name of its class, for messages."""
        return type(self).__name__

    @property
    def is_built_in(self) -> bool:
        """Whether it is a check of this package: such a check is switched off when it fails, but a user's check raises."""
        return type(self).__module__.partition(".")[0] == __name__.partition(".")[0]

    def join(self, runner: Any) -> None:
        """Join a run with a fresh state, or leave it."""
        vars(self).pop("runner", None)
        if runner is not None:
            self.runner = runner
            self._forget()

    def _forget(self) -> None:
        """Reset the state of one fit. Called by the constructor and at the start of a fit."""

    def overrides(self, method: str) -> bool:
        """Return whether this check overrides a method with an empty default."""
        return getattr(type(self), method) is not getattr(Check, method)

    def options(self) -> dict[str, object]:
        """Return the options that must be equal on all ranks: its plain attributes."""
        plain = (bool, int, float, str, tuple, list, dict, type(None))
        own = vars(self).items()
        return {name: value for name, value in own if not name.startswith("_") and isinstance(value, plain)}


# ---------------------------------------------------------------------- rows between ranks


class RowExchange:
    """Exchanges the rows of checks between the ranks of the world, and turns them into findings.

    Args:
        trainer: Trainer of the fit.
        module: Module that it trains.
        watch: Watch of the run, which raises when a peer has failed. None without one.
        report: Report that takes the findings.
        stop_check: Function that is called when a check of this package fails, and on every rank when it is switched off.

    Attributes:
        report: As given.
        watch: As given.
        after_error: Exchange through the store, which replaces the handshakes once this rank has an error. None before.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        watch: Watch | None,
        report: Report,
        stop_check: Callable[[Check], None],
    ) -> None:
        self.watch, self.report = watch, report
        self.after_error: StoreExchange | None = None
        self._trainer, self._module, self._stop_check = trainer, module, stop_check
        # by the id of a check and the stage: rows that have not been judged, and the step of the last row measured
        self._waiting: dict[tuple[int, CheckStage], bytes | Callable[[], Measured]] = {}
        self._steps: dict[tuple[int, CheckStage], int] = {}
        self._local: dict[tuple[int, CheckStage], list[Finding]] = {}  # findings of this rank alone
        self._failures: dict[int, str] = {}  # sent in place of the next row
        self._switched_off: set[int] = set()
        self._explained: dict[tuple[str, ...], list[Finding]] = {}

    # ------------------------------------------------------------------ transport

    def gather_rows(self, place: str, row: bytes, must_match: Mapping[str, object] | None = None) -> list[bytes]:
        """Return the rows of all ranks, in rank order.

        Raises:
            RankMismatchError: on every rank, when ranks are at different places, or ``must_match`` differs.
            TimeoutError: after an error, when peers have not come in time.

        Communication: one gather. One more when a row outgrew the agreed size. None in a world of one. After an error the store is used.
        """
        if self.after_error is not None:
            self.after_error.post(row)
            return self.after_error.collect()
        # one handshake: ranks at different places get the same error in it
        pending = handshake.start(place, must_match or {}, row, channel="checks")
        # busy wait first, then sleep. Leave when a peer has failed, because it will not come
        began, awake, looked = time.perf_counter(), awake_seconds(), 0.0
        while not pending.is_completed():
            waited = time.perf_counter() - began
            if waited < awake:
                time.sleep(0)  # peers are usually here at once, and a nap takes longer than the gather
                continue
            if self.watch is not None:
                self.watch.check_peers()
            if waited > looked + _LOOK_SECONDS:
                looked = waited
                self._refuse_missed_call(pending, place)
            time.sleep(min(max(waited / 20, _FIRST_NAP_SECONDS), _NAP_SECONDS))
        return pending.finish()

    def _refuse_missed_call(self, pending: handshake.PendingHandshake, place: str) -> None:
        """Refuse to wait for ranks that wait for this one, in a call of the program or of a loss that this rank does not make.

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

    def gather_json(self, place: str, value: object) -> list[Any]:
        """Return a plain value of each rank, in rank order. Communicates as ``gather_rows``."""
        return [json.loads(row) for row in self.gather_rows(place, json.dumps(value, default=str).encode())]

    def max_difference(self, local: Tensor | None) -> float | None:
        """Return the largest difference between any two ranks of a tensor's elements. None if ranks cannot be compared.

        Communication: one gather, and two for each 8 MiB of the tensor.
        """
        if process_groups.world_size() == 1 or self.after_error is not None:
            return None
        # agree that every rank has a tensor of one shape and dtype
        description = b""
        if local is not None and not local.is_quantized and local.layout == torch.strided:
            description = f"{tuple(local.shape)} {local.dtype}".encode()
        descriptions = set(self.gather_rows("a tensor's difference", description))
        if local is None or not description or len(descriptions) > 1:
            return None
        # compare it chunk by chunk
        group = process_groups.internal_groups().get("checks")
        flat = local.detach().reshape(-1)
        if flat.is_complex():  # the larger of real and imaginary part
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

    def is_on(self, check: Check) -> bool:
        """Return whether a check still runs. The same on every rank."""
        return id(check) not in self._switched_off

    def has_begun(self, check: Check, stage: CheckStage) -> bool:
        """Return whether a check has measured a row at this stage. The same on every rank."""
        return (id(check), stage) in self._steps

    def note_failure(self, check: Check, method: str, error: Exception) -> None:
        """Remember the error of a check on this rank alone. All ranks report it at the next exchange of the check.

        A check of this package is stopped on this rank. An error that every rank raises is raised.
        """
        if isinstance(error, DDPLossError) and error.collective:
            raise error
        self._failures[id(check)] = f"{method}: {type(error).__name__}: {error}"
        if check.is_built_in:
            self._stop_check(check)

    def measure(self, due: Sequence[Check], stage: CheckStage, step: int) -> None:
        """Measure this rank's rows, which travel at the next exchange of their checks."""
        for check in due:
            self._steps[id(check), stage] = step
            if id(check) in self._failures:
                continue
            check._found = found = self._local[id(check), stage] = []
            try:
                row = check.measure(self._trainer, self._module, stage)
                if isinstance(row, Tensor):
                    row = HostCopy(row).read
                self._waiting[id(check), stage] = row if callable(row) else encode(row, check.title, found)
            except Exception as error:
                self.note_failure(check, "measure", error)

    def pack(self, checks: Sequence[Check], stage: CheckStage) -> bytes:
        """Return this rank's row: the parts that wait, and the errors of checks that failed."""
        return b"".join([self._pack_one(check, stage) for check in checks])

    def _pack_one(self, check: Check, stage: CheckStage) -> bytes:
        key = id(check), stage
        row = self._waiting.get(key, _part(_NOTHING))
        try:
            part = row if isinstance(row, bytes) else encode(row(), check.title, self._local[key])
        except Exception as error:
            self.note_failure(check, "measure", error)
        if id(check) in self._failures:
            part = _part(_FAILED, self._failures.pop(id(check)).encode())
        if not part.startswith(_NOTHING):
            self._waiting[key] = part  # until it is judged: an error of a peer may end the exchange
        return part

    def has_waiting(self, checks: Sequence[Check], stage: CheckStage) -> bool:
        """Return whether rows of a stage have not been judged."""
        return any((id(check), stage) in self._waiting for check in checks)

    def steps_of(self, checks: Sequence[Check], stage: CheckStage) -> list[int]:
        """Return the step of the last row of each check. -1 for a check without a row."""
        return [self._steps.get((id(check), stage), -1) for check in checks]

    def exchange(self, checks: Sequence[Check], stage: CheckStage, step: int, *, place: str = "") -> None:
        """Exchange the rows of these checks that wait since a stage, and judge them.

        Args:
            checks: Checks that are due, the same on every rank.
            stage: Stage of the rows.
            step: Optimizer steps so far.
            place: Place of the exchange, if it differs from the stage.

        Raises:
            DDPLossError: on every rank, for findings with the action ``raise``.

        Communication: one gather. More only if there is a new finding. None without checks.
        """
        if checks:
            place = place or stage.value
            rows = self.gather_rows(place, self.pack(checks, stage), {"step": step})
            self.judge(checks, stage, rows, step, place=place)

    def judge(
        self, checks: Sequence[Check], stage: CheckStage, rows: Sequence[bytes], step: int, *, place: str
    ) -> None:
        """Judge all ranks' rows. Every rank calls it with the same rows.

        Raises:
            DDPLossError: on every rank, for findings with the action ``raise``.
        """
        found: list[tuple[Check, Finding]] = []
        for check in checks:
            self._waiting.pop((id(check), stage), None)
        # each check has its own table: one row a rank, all of the same step
        for check, (table, hashes) in zip(checks, decode_tables(rows, len(checks)), strict=True):
            if isinstance(table, dict):
                found += placed(check, [self._failed(check, table)], step, place)
            elif table is not None:
                judged = self._combine_local(check, stage, hashes) + self._judge(check, table, stage)
                found += placed(check, judged, self._steps[id(check), stage], stage.value)
        if found:
            self.report_findings(self._complete(found))

    def _combine_local(self, check: Check, stage: CheckStage, hashes: Sequence[int]) -> list[Finding]:
        """Return the findings that ranks made by themselves.

        Communication: none if every rank made the same. Else one gather, once for the same findings.
        """
        local = self._local.get((id(check), stage), [])
        if len(set(hashes)) == 1:
            return local
        key = check.title, str(hashes)
        if key not in self._explained:
            self._explained[key] = findings_of_texts(self.gather_json("texts about findings", texts_of(local)))
        return self._explained[key]

    def _judge(self, check: Check, table: Table, stage: CheckStage) -> list[Finding]:
        """Let a check judge. The error of a check that fails on this rank alone travels at its next exchange."""
        try:
            found = list(check.judge(table, self._trainer, self._module, stage))
            for each in found:
                if not isinstance(each, Finding):
                    raise TypeError(f"a list of Finding was expected, with {type(each).__name__} in it")
            return found
        except Exception as error:
            self.note_failure(check, "judge", error)
            return []

    def _failed(self, check: Check, failures: dict[int, str]) -> Finding:
        """Make the finding of a check that failed, the same on every rank. A check of this package is switched off on all of them."""
        texts = tuple(f"{rank}: {text}" for rank, text in failures.items())
        details: dict[str, Any] = {"ranks": tuple(failures), "name": check.title, "values": texts}
        if not check.is_built_in:
            return Finding.of(FAILED, **details)
        self._switched_off.add(id(check))
        self._stop_check(check)
        return Finding.of(FAILED, "switched_off", graded="warning", **details)

    # ------------------------------------------------------------------ new findings

    def _complete(self, found: Sequence[tuple[Check, Finding]]) -> list[tuple[Check, Finding]]:
        """Add the texts of all ranks to findings, and the largest differences of their tensors.

        Communication: for each new finding one gather, if its check describes findings, and one with the tensor's, if the check names a
            tensor, at most ``_MAX_TENSORS`` of them.
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
        """Let every rank add its text to a finding. A finding seen again keeps its first explanation."""
        if not check.overrides("describe"):
            return [finding]
        # findings are new on every rank or on none, so every rank takes part
        if finding.key not in self._explained:
            self._explained[finding.key] = self._explain_first(check, finding)
        return self._explained[finding.key]

    def _explain_first(self, check: Check, finding: Finding) -> list[Finding]:
        texts = self.gather_json("texts about findings", self._ask(check.describe, finding))
        if all(text is not None for text in texts):
            try:
                return check.explain(finding, texts)
            except Exception as error:  # the finding itself stands
                self.note_failure(check, "explain", error)
        return [finding]

    def _ask(self, method: Callable[..., T | None], finding: Finding) -> T | None:
        with contextlib.suppress(Exception):  # the finding itself stands
            return method(finding, self._trainer, self._module)
        return None

    def report_findings(self, found: Sequence[tuple[Check, Finding]]) -> None:
        """Hand findings to the report, each with the actions of its check.

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
