"""Runs the checks of one fit: who is due at a stage, one gather for all of them, the same findings on all ranks.

`CheckRunner` follows a fit from its start to its end. At each stage it asks the checks that are due for their rows, gathers them once
and lets each check judge the table of all ranks; a `CheckEvaluator` measures and judges for it. It knows checks by the `Check` protocol;
their base class is `base.RankCheck`.

A check that fails by itself looks at nothing more on that rank, and its next row carries its error instead (``check_evaluator``).
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_losses.callbacks.check_evaluator import CheckEvaluator, JudgedCheck, placed
from lightning_ddp_losses.callbacks.check_stage import CheckStage, place_of
from lightning_ddp_losses.callbacks.findings import Finding
from lightning_ddp_losses.callbacks.late_row import judges_late
from lightning_ddp_losses.callbacks.replicated_parameters import ReplicatedParameters
from lightning_ddp_losses.callbacks.report import CheckSummary, Report, Settings, run_folder
from lightning_ddp_losses.callbacks.row_exchange import RowExchange
from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed import handshake, liveness, process_groups
from lightning_ddp_losses.errors import ConfigurationError, DDPLossError, RankMismatchError

_ERROR_TIMEOUT = timedelta(seconds=2)
T = TypeVar("T")


class Check(JudgedCheck, Protocol):
    """Names what the runner needs of a check; `base.RankCheck` says what each part is for."""

    every_n_steps: int

    @property
    def stages(self) -> tuple[CheckStage, ...]:
        """When it measures and judges."""

    @property
    def needs_peers(self) -> bool:
        """Whether it has nothing to say in a world of one."""

    def join(self, runner: CheckRunner | None) -> None:
        """Become part of a run, or leave it."""

    def options(self) -> dict[str, object]:
        """Return what must be equal on all ranks."""

    def dry_run(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> list[Finding]:
        """Try out the first batch, on all ranks together."""

    def figures(self) -> dict[str, float]:
        """Return figures for the logger and the summary."""

    def remarks(self) -> list[str]:
        """Return lines for the summary."""


class CheckRunner:
    """Runs the checks of one trainer for one fit.

    Attributes:
        checkpoint: At SAVE and LOAD, the checkpoint.
        stepping: Optimizers that were about to step since the last batch ended.
        stepped: Optimizers that did (a gradient scaler may have skipped one).
        backwards: Backward passes through Lightning since the last batch ended.
        steps: Batches of this fit that made an optimizer step.
        rows_in_strategy_handshake: Whether rows before backward travel in the strategy's own handshake.
        own_time: The time that checks take, their gathers included.
    """

    def __init__(
        self, checks: Sequence[Check], settings: Settings, trainer: pl.Trainer, module: pl.LightningModule
    ) -> None:
        alone = process_groups.world_size() == 1
        self.checks = [check for check in checks if not (alone and check.needs_peers)]
        self.trainer, self.module, self.settings = trainer, module, settings
        # what a run needs of its own: news of peers, a way for rows, a place for findings
        self._watch = liveness.watch_run(process_groups.rank(), process_groups.world_size(), settings.stall_seconds)
        self.row_exchange = RowExchange(self._watch)
        folder: Path | None = None
        if settings.file:
            folder = run_folder(trainer)
        self.report = Report(settings, folder)
        self._evaluator = CheckEvaluator(trainer, module, self.row_exchange, self.report, self._switch_off)
        # what checks read
        self.checkpoint: dict[str, Any] | None = None
        self.stepping: list[Optimizer] = []
        self.stepped: list[Optimizer] = []
        self.backwards = 0
        self._has_synchronised = False  # a backward since the last batch ended
        self.steps = 0
        self._shared: dict[Callable[..., Any], Any] = {}
        self._parameters = ReplicatedParameters(trainer, module)
        self._parameters_of_batch: dict[str, Tensor] | None = None
        # who is due, and who observes what
        self._checks_at: dict[CheckStage, list[Check]] = {stage: [] for stage in CheckStage}
        for check in self.checks:
            for stage in set(check.stages):
                self._checks_at[stage].append(check)
        self._observers: dict[str, list[Check]] = {}
        self._blind: set[int] = set()  # ids of checks of ours that failed on this rank
        self._due_in_handshake: list[Check] = []
        self._handles: list[Any] = []
        self._watched: list[Optimizer] = []
        self.rows_in_strategy_handshake = False
        self._row_was_sent = False  # in the strategy's handshake, before Lightning's hook
        self._ran_dry = False
        self.own_time = Stopwatch()
        self._began = time.perf_counter()
        for check in self.checks:
            check.join(self)

    # ------------------------------------------------------------------ for checks

    @property
    def step(self) -> int:
        """The number of optimizer steps so far, as loggers count them."""
        return compat.steps_as_logged(self.trainer)

    @property
    def synchronising(self) -> bool:
        """Whether the next backward reduces gradients: not on a step that only accumulates."""
        ours = getattr(self.trainer.strategy, "sync_gradients", None)
        if ours is not None:
            return bool(ours)
        return bool(getattr(self.trainer.strategy.model, "require_backward_grad_sync", True))

    def shared(self, make: Callable[[CheckRunner], T]) -> T:
        """Return the one object of that kind for all checks, made when first asked for; it has ``batch_end()`` and ``close()``."""
        if make not in self._shared:
            self._shared[make] = make(self)
        return self._shared[make]  # type: ignore[no-any-return]

    def replicated_parameters(self) -> dict[str, Tensor]:
        """Return the parameters that ranks must hold alike; looked up once per batch."""
        if self._parameters_of_batch is None:
            self._parameters_of_batch = self._parameters.current()
        return self._parameters_of_batch

    # ------------------------------------------------------------------ the fit, in its order

    def open(self) -> None:
        """Compare the sets of checks, then judge what is to be wrapped.

        Raises:
            ConfigurationError: on every rank, when ranks run different checks.
        """
        titles = ", ".join(f"{check.title}(every_n_steps={check.every_n_steps})" for check in self.checks)
        options = "; ".join(map(_options_text, self.checks))
        digest = hashlib.blake2b(options.encode(), digest_size=6).hexdigest()
        with self.own_time:
            try:
                self.row_exchange.gather_rows("set of checks", b"", {"checks": titles, "options": digest})
            except RankMismatchError as error:
                raise ConfigurationError(str(error), collective=True) from None
        self.run_stage(CheckStage.BEFORE_WRAP)

    def train_start(self) -> None:
        """Let the checks see the steps of the optimizers, and judge what every rank starts from."""
        with self.own_time:
            self._observe("start")
            for optimizer in self.trainer.optimizers:
                self._watch_optimizer(optimizer)
            if self._checks_at[CheckStage.BEFORE_BACKWARD]:
                # under our strategy the rows before backward travel in its handshake
                attach_payload = getattr(self.trainer.strategy, "attach_payload", None)
                if attach_payload is not None:
                    self.rows_in_strategy_handshake = attach_payload(self._payload, self._judge_payloads)
        self.run_stage(CheckStage.TRAIN_START)

    def batch_start(self, batch: Any, batch_idx: int) -> None:
        """Let the checks see a training batch; before the first step they may try it out."""
        self._parameters_of_batch = None
        self._enter(f"training_step of step {self.step}")
        with self.own_time:
            self._observe("see_batch", batch, batch_idx)
            if not self._ran_dry:
                self._ran_dry = True
                self._dry_run(batch, batch_idx)

    def _enter(self, place: str) -> None:
        if self._watch is not None:
            self._watch.enter(place)

    def _dry_run(self, batch: Any, batch_idx: int) -> None:
        if process_groups.world_size() == 1:
            return
        found: list[tuple[JudgedCheck, Finding]] = []
        for check in self.checks:
            # one that has failed on this rank alone takes part all the same: its peers wait for it
            if check.overrides("dry_run"):
                found += placed(check, self._try_out(check, batch, batch_idx), self.step, "the dry run")
        self._evaluator.report_findings(found)

    def _try_out(self, check: Check, batch: Any, batch_idx: int) -> list[Finding]:
        try:
            return check.dry_run(self.trainer, self.module, batch, batch_idx)
        except Exception as error:
            if not check.is_built_in or isinstance(error, DDPLossError):
                raise
            self.note_failure(check, "dry_run", error)
            return []

    def before_backward(self, loss: Tensor) -> None:
        """Let the checks see a loss, and judge it unless that happened in the strategy's handshake."""
        self._enter(f"backward of step {self.step}")
        if self._row_was_sent:  # the loss was seen and judged there
            self._row_was_sent = False
            return
        self._see_loss(loss)
        if self.synchronising and not self.rows_in_strategy_handshake:
            self.run_stage(CheckStage.BEFORE_BACKWARD)

    def _see_loss(self, loss: Tensor | None) -> None:
        with self.own_time:
            self.backwards += 1
            self._has_synchronised |= self.synchronising
            self._observe("see_loss", loss)

    def _payload(self) -> bytes:
        """Measure this rank's row, as the strategy's handshake leaves."""
        self._row_was_sent = True
        self._see_loss(getattr(self.trainer.strategy, "closure_loss", None))
        with self.own_time:
            due = self._due_in_handshake = self.due(CheckStage.BEFORE_BACKWARD)
            return self._evaluator.measure(due, CheckStage.BEFORE_BACKWARD, self.step)

    def _judge_payloads(self, rows: list[bytes]) -> None:
        """Judge all ranks' rows, as the strategy's handshake is read."""
        due = self._due_in_handshake
        if due:
            with self.own_time:
                self._evaluator.judge(due, CheckStage.BEFORE_BACKWARD, rows, self.step)

    def after_backward(self) -> None:
        """Let the checks see what a backward left."""
        with self.own_time:
            self._observe("see_backward")

    def before_step(self, optimizer: Optimizer) -> None:
        """Let the checks see the reduced gradients of an optimizer that is about to step."""
        self._enter(f"the optimizer of step {self.step}")
        with self.own_time:
            self._watch_optimizer(
                getattr(optimizer, "optimizer", optimizer)
            )  # a user may have put another in its place
            self.stepping.append(optimizer)
            self._observe("see_gradients", optimizer)

    def _watch_optimizer(self, optimizer: Optimizer) -> None:
        """Learn of an optimizer's steps, once for each optimizer."""
        if optimizer not in self._watched and hasattr(optimizer, "register_step_post_hook"):
            self._watched.append(optimizer)
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        with self.own_time:
            self.stepped.append(optimizer)
            self._observe("see_step", optimizer)

    def batch_end(self) -> None:
        """Judge a batch that made a step, and forget it."""
        self._enter(f"end of step {self.step}")
        # a hook may leave a step out on some ranks: a backward that synchronises is one on all of them
        is_step_due = self._has_synchronised and self.module.automatic_optimization
        if self.stepping or self.stepped or is_step_due:
            self.run_stage(CheckStage.AFTER_STEP)
            self.steps += bool(self.stepping or self.stepped)
        self.stepping, self.stepped, self.backwards, self._parameters_of_batch = [], [], 0, None
        self._has_synchronised = False
        for shared in self._shared.values():
            shared.batch_end()
        self.see_batch_end()

    def see_batch_end(self) -> None:
        """Let the checks see what a batch of training or validation has left."""
        with self.own_time:
            self._observe("see_batch_end")

    def train_end(self) -> None:
        """Judge what training leaves, and sum up."""
        self.judge_late_rows()
        self.run_stage(CheckStage.TRAIN_END)
        if self.checks:
            with self.own_time:
                self._evaluator.report_remaining_failures(self.checks, self.step)
        # what the checks have to say at the end, and what they took
        share = self.own_time.seconds / max(time.perf_counter() - self._began, 1e-9)
        summaries = [CheckSummary(check.title, *_last_words(check)) for check in self.checks]
        figures: dict[str, float] = {}
        for summary in summaries:
            figures |= summary.figures
        self.report.log(self.trainer, figures)
        self.report.summary(summaries, self.steps, share)

    def fail(self, exception: BaseException) -> None:
        """Tell the peers that this rank's fit ends with an exception, or say which of them failed first.

        Raises:
            PeerError: in the exception's place, where a peer's failure is behind it.
        """
        # another rank's failure broke this rank's collective
        peer_error = None if self._watch is None else self._watch.report_failure(exception)
        if peer_error is not None:
            with contextlib.suppress(Exception):  # Lightning stops its clean-up where a hook raises
                compat.teardown_trainer(self.trainer)
            raise peer_error from exception
        if hasattr(self.trainer.strategy, "attach_payload") and isinstance(exception, Exception):
            # peers that wait in a handshake of the strategy's get it there; those that know of it already open no more
            with contextlib.suppress(Exception):
                handshake.raise_on_all_ranks(exception, "training", timeout=_ERROR_TIMEOUT)

    def close(self) -> None:
        """Leave nothing behind."""
        # hooks first: from here on no step calls a check
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._watch is not None:
            self._watch.stop()
        self._observe("stop")
        for shared in self._shared.values():
            shared.close()
        self._shared.clear()
        for check in self.checks:
            check.join(None)

    # ------------------------------------------------------------------ one stage

    def run_stage(self, stage: CheckStage) -> None:
        """Measure, gather and judge, if a check is due.

        Raises:
            DDPLossError: on every rank, for findings whose action is ``raise``.

        Communication: one gather; none where no check is due. More only where there is a new finding.
        """
        due = self.due(stage)
        self._enter(place_of(stage.value, self.step))
        if due:
            with self.own_time:
                row = self._evaluator.measure(due, stage, self.step)
                rows = self.row_exchange.gather_rows(stage.value, row, {"step": self.step})
                self._evaluator.judge(due, stage, rows, self.step)

    def judge_late_rows(self) -> None:
        """Judge the rows that wait for their check to be due again: what comes now must not come before them.

        Raises:
            DDPLossError: on every rank, for findings whose action is ``raise``.

        Communication: one gather; none on the CPU, where no row waits.
        """
        due: list[tuple[Check, CheckStage]] = []
        if judges_late(self.trainer):
            for stage, checks in self._checks_at.items():
                due += [(check, stage) for check in checks if stage in check.late_stages]
        if due:
            with self.own_time:
                row = self._evaluator.measure_waiting(due)
                rows = self.row_exchange.gather_rows("rows of the last step", row, {"step": self.step})
                self._evaluator.judge_at(due, rows, self.step)

    def due(self, stage: CheckStage) -> list[Check]:
        """Return the checks that run now; the same on every rank."""
        if not stage.repeats_every_step:
            return self._checks_at[stage]
        step = self.step
        return [check for check in self._checks_at[stage] if step % check.every_n_steps == 0]

    def _observe(self, observation: str, *args: Any) -> None:
        """Let each check that wants to see something see it; what it raises is reported when it is due next."""
        if observation not in self._observers:
            self._observers[observation] = [check for check in self.checks if check.overrides(observation)]
            if observation != "stop":  # also one that failed must leave nothing behind
                self._observers[observation] = [c for c in self._observers[observation] if id(c) not in self._blind]
        for check in self._observers[observation]:
            self._show(check, observation, *args)

    def _show(self, check: Check, observation: str, *args: Any) -> None:
        try:
            getattr(check, observation)(self.trainer, self.module, *args)
        except Exception as error:  # a rank must not leave its peers alone
            if isinstance(error, DDPLossError) and error.collective:  # every rank raises it
                raise
            self.note_failure(check, observation, error)

    # ------------------------------------------------------------------ checks that fail by themselves

    def guarded(self, check: Check, function: Callable[..., None]) -> Callable[..., None]:
        """Return a function for a hook before the user's forward: what it raises is the check's failure, and not the training's.

        A function and no method: a copy of the module (the dry run makes one) must not copy the check along.
        """

        def call(*args: Any) -> None:
            if id(check) in self._blind:
                return
            try:
                function(*args)
            except Exception as error:
                self.note_failure(check, "a hook before forward", error)

        return call

    def note_failure(self, check: JudgedCheck, method: str, error: Exception) -> None:
        """Remember what a check raised on this rank, for its next row. One of ours looks at nothing more here."""
        self._evaluator.note_failure(check, method, error)
        if check.is_built_in and id(check) not in self._blind:
            self._blind.add(id(check))
            self._observers = {}
            with contextlib.suppress(Exception):  # it has failed already
                check.stop(self.trainer, self.module)

    def _switch_off(self, check: JudgedCheck) -> None:
        """Run a check no more in this fit; called on every rank at the same place."""
        for stage, checks in self._checks_at.items():
            # a new list: the old one may be gone through just now
            self._checks_at[stage] = [each for each in checks if each is not check]
        self._blind.add(id(check))
        self._observers = {}
        with contextlib.suppress(Exception):
            check.stop(self.trainer, self.module)


def _last_words(check: Check) -> tuple[dict[str, float], list[str]]:
    """Return what a check has to say at the end of a fit; one of ours that cannot says that."""
    try:
        return check.figures(), check.remarks()
    except Exception as error:
        if not check.is_built_in:
            raise
        return {}, [f"{check.title} has no figures: {type(error).__name__}: {error}"]


def _options_text(check: Check) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in sorted(check.options().items()))


class Stopwatch:
    """Adds up the time inside ``with`` blocks that do not nest."""

    seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began
