"""Runs the checks of one fit, with one schedule on every device.

`CheckRunner` follows a fit from its start to its end, passes its events to the checks, and reads a row from each check that is due at a
stage. Findings name the step in which a row was measured. When the row is judged depends on its stage:

* After a step, a row is judged when the check is next due at this stage, so that checks do not wait for a device and gathers do not wait
  for a row. The first row of a fit is judged immediately, because it reveals most faults, some of which raise errors in torch in the next
  step. The last row is judged before a checkpoint is written and at the end of training.
* At all other stages, a row is judged immediately. Before backward this is necessary: a rank without a loss, a parameter that the losses of
  some ranks do not reach, or batches that end on some ranks only would cause a hang in the same step.

The schedule depends only on stages, so every rank exchanges the same rows at the same stage. ``trainer.validate`` and ``trainer.test`` have
the stages of a validation inside a fit. The runner calls checks through the interface `check.Check`. Their base class is `base.RankCheck`.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ddp_losses.callbacks.check import Check
from lightning_ddp_losses.callbacks.facts.hook_ends import EpochEnds
from lightning_ddp_losses.callbacks.findings import CheckStage, Finding, place_of
from lightning_ddp_losses.callbacks.last_rows import LastRows
from lightning_ddp_losses.callbacks.replicas import ReplicatedParameters
from lightning_ddp_losses.callbacks.report import Report, Settings, run_folder
from lightning_ddp_losses.callbacks.row_exchange import RowExchange, placed
from lightning_ddp_losses.core import lightning_compat
from lightning_ddp_losses.distributed import handshake, liveness, process_groups
from lightning_ddp_losses.errors import ConfigurationError, DDPLossError, RankMismatchError

_ERROR_TIMEOUT = timedelta(seconds=2)
_WAIT_SECONDS = 10.0  # limit of the wait for peers that also end with an error
_THE_END = "the end"
T = TypeVar("T")


@dataclass
class Batch:
    """Events since the last batch ended.

    Attributes:
        step: Number of optimizer steps before it, as loggers count them. It does not change inside a batch.
        stepping: Optimizers that were about to step.
        stepped: Number of steps that were made (a gradient scaler may have skipped one).
        backwards: Backward passes through Lightning.
        has_synchronised: True if one of them reduced gradients.
        is_row_sent: True if the strategy's handshake has already sent the row of this backward, before Lightning calls its hook.
        is_first: True before the first batch of the fit.
    """

    step: int = 0
    stepping: list[Optimizer] = field(default_factory=list)
    stepped: int = 0
    backwards: int = 0
    has_synchronised: bool = False
    is_row_sent: bool = False
    is_first: bool = False


class CheckRunner(Callback):
    """Runs the checks of one trainer for one fit, as a callback that `base.CheckCallback` adds to the trainer for that time.

    Args:
        checks: Checks of all callbacks.
        settings: Options for findings.
        trainer: Trainer of the fit.
        module: Module that it trains.

    Attributes:
        checks: Checks that run with this number of ranks.
        trainer: Trainer of the fit.
        module: Module that it trains.
        checkpoint: Checkpoint that is being saved or loaded, at SAVE and LOAD.
        steps: Number of batches of this fit with an optimizer step.
        epoch_ends: Runs the stages at the end of an epoch, and records where values were logged.
        rows_in_strategy_handshake: True if the rows before backward are sent in the strategy's handshake.
        row_exchange: Measures, exchanges and judges rows.
        own_time: Time that checks take, including their gathers.
        batch: Events since the last batch ended.
        parameters: Parameters that must be equal on all ranks, and whether they must.
    """

    def __init__(self, checks: Sequence[Check], settings: Settings, trainer: Trainer, module: LightningModule) -> None:
        world_size = process_groups.world_size()
        self.checks = [check for check in checks if world_size > 1 or not check.needs_peers]
        self.trainer, self.module = trainer, module
        self.checkpoint: dict[str, Any] | None = None
        self.steps = 0
        self.own_time = Stopwatch()
        # the watch of peers, the report, and the exchange of rows
        watch = liveness.watch_run(process_groups.rank(), world_size, settings.stall_seconds)
        folder: Path | None = run_folder(trainer) if settings.file else None
        self.row_exchange = RowExchange(trainer, module, self.checks, watch, Report(settings, folder), self._blind)
        self.batch, self.rows_in_strategy_handshake = Batch(is_first=True), False
        self._shared: dict[Callable[..., Any], Any] = {}
        self.parameters = ReplicatedParameters(trainer, module)
        # functions to call by observation, each with its check. Ids of our checks that failed on this rank, and with the name of an
        # observation the checks that no longer need it, are not called
        self._observers: dict[str, list[tuple[Check, Callable[..., None]]]] = {}
        self._not_called: set[int | tuple[int, str]] = set()
        self._handles: dict[object, Any] = {}
        self.epoch_ends = EpochEnds(trainer, module, self.run_stage)
        for check in self.checks:
            check.join(self)

    # ------------------------------------------------------------------ for checks

    @property
    def step(self) -> int:
        """The number of optimizer steps so far, as loggers count them."""
        return self.batch.step

    @property
    def stepping(self) -> list[Optimizer]:
        """Optimizers that were about to step since the last batch ended."""
        return self.batch.stepping

    @property
    def backwards(self) -> int:
        """Backward passes through Lightning since the last batch ended."""
        return self.batch.backwards

    @property
    def synchronising(self) -> bool:
        """Whether the next backward reduces gradients. False on a step that only accumulates."""
        strategy = self.trainer.strategy
        of_ddp = getattr(strategy.model, "require_backward_grad_sync", True)
        return bool(getattr(strategy, "sync_gradients", of_ddp))

    def shared(self, make: Callable[[CheckRunner], T]) -> T:
        """Return the object that all checks share, created by the first call. It may have observations of a check (``see_batch``)."""
        if make not in self._shared:
            self._shared[make] = make(self)
            self._observers = {}
        return self._shared[make]  # type: ignore[no-any-return]

    def stop_observing(self, check: Check, *observations: str) -> None:
        """Stop calling observations (``see_batch``) of a check that has nothing to do in them for the remainder of the fit."""
        self._not_called.update((id(check), observation) for observation in observations)
        self._observers = {}

    def before_forward(self, check: Check, module: nn.Module, see: Callable[..., None]) -> None:
        """Call ``see(args, kwargs)`` with the arguments of each forward of a module, until the fit ends.

        An error in ``see`` is a failure of the check, not of the training. Forwards of copies (as in the dry run) are ignored.
        """
        own = id(module)

        # a function instead of a method, so that copying the module does not copy the check
        def hook(called: nn.Module, *arguments: Any) -> None:
            if id(called) != own or id(check) in self._not_called:
                return
            try:
                see(*arguments)
            except Exception as error:
                self.row_exchange.note_failure(check, "a hook before forward", error)

        self._handles[id(check), own] = module.register_forward_pre_hook(hook, with_kwargs=True)

    # ------------------------------------------------------------------ the fit, in its order

    def open(self) -> None:
        """Compare the sets of checks, then judge the module before the wrap.

        Raises:
            ConfigurationError: on every rank, when ranks run different checks.
        """
        titles = ", ".join(f"{check.title}(every_n_steps={check.every_n_steps})" for check in self.checks)
        options = [sorted(check.options().items()) for check in self.checks]
        digest = hashlib.blake2b(repr(options).encode(), digest_size=6).hexdigest()
        with self.own_time:
            try:
                self.row_exchange.gather_rows("set of checks", b"", {"checks": titles, "options": digest})
            except RankMismatchError as error:
                raise ConfigurationError(str(error), collective=True) from None
        self.epoch_ends.follow()
        self.run_stage(CheckStage.BEFORE_WRAP)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register hooks for the steps of the optimizers, and judge the state of every rank at the start."""
        self._observe("start")
        with self.own_time:
            for optimizer in dict.fromkeys(self.trainer.optimizers):
                self._watch_optimizer(optimizer)
            # our strategy sends the rows before backward in its handshake
            attach_payload = getattr(self.trainer.strategy, "attach_payload", None)
            if attach_payload is not None and any(CheckStage.BEFORE_BACKWARD in check.stages for check in self.checks):
                self.rows_in_strategy_handshake = attach_payload(
                    self._payload, self._judge_payloads, name="rows of checks"
                )
        self.run_stage(CheckStage.TRAIN_START)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge the data of the epoch."""
        self.epoch_ends.close(CheckStage.TRAIN_LOGGED)
        self.run_stage(CheckStage.EPOCH_START)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Pass a training batch to the checks. Before the first step, they may run the module on it."""
        self.parameters.is_current = False
        self.batch.step = lightning_compat.steps_as_logged(trainer)
        self._enter(f"training_step of step {self.step}")
        self._observe("see_batch", batch, batch_idx)
        if self.batch.is_first:
            self.batch.is_first = False
            with self.own_time:
                self._dry_run(batch, batch_idx)

    def _dry_run(self, batch: Any, batch_idx: int) -> None:
        found: list[tuple[Check, Finding]] = []
        # a check that has failed only on this rank still takes part, because its peers wait for it
        for check in self.checks:
            if process_groups.world_size() == 1 or not check.overrides("dry_run"):
                continue
            try:
                tried = check.dry_run(self.trainer, self.module, batch, batch_idx)
                found += placed(check, tried, self.step, "the dry run")
            except Exception as error:
                if not check.is_built_in or isinstance(error, DDPLossError):
                    raise
                self.row_exchange.note_failure(check, "dry_run", error)
        self.row_exchange.report_findings(found)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Pass a loss to the checks, and judge it unless the strategy's handshake has done so."""
        self.row_exchange.last_backward = f"backward of step {self.step}"
        self._enter(self.row_exchange.last_backward)
        if self.batch.is_row_sent:  # the strategy's handshake has passed on and judged the loss
            self.batch.is_row_sent = False
            return
        self._see_loss(loss)
        if self.synchronising and not self.rows_in_strategy_handshake:
            self.run_stage(CheckStage.BEFORE_BACKWARD)
            self._enter(self.row_exchange.last_backward)

    def _see_loss(self, loss: Tensor | None) -> None:
        self.batch.backwards += 1
        self.batch.has_synchronised |= self.synchronising
        self._observe("see_loss", loss)

    def _payload(self) -> bytes:
        """Measure and return this rank's row when the strategy's handshake is sent."""
        self.batch.is_row_sent = True
        self._see_loss(getattr(self.trainer.strategy, "closure_loss", None))
        with self.own_time:
            due = self.row_exchange.due(CheckStage.BEFORE_BACKWARD, self.step)
            self.row_exchange.measure(due, self.step)
            return self.row_exchange.pack(due)

    def _judge_payloads(self, rows: list[bytes]) -> None:
        """Judge the rows of all ranks when the strategy's handshake has been received."""
        stage = CheckStage.BEFORE_BACKWARD
        with self.own_time:
            due = self.row_exchange.due(stage, self.step)
            self.row_exchange.judge(due, rows, self.step, place=stage.value)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call the checks after a backward, before the module's own hook."""
        self._enter(f"hooks after backward of step {self.step}")
        self._observe("see_backward")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Pass an optimizer that is about to step to the checks, with reduced gradients and before clipping."""
        self._enter(f"the optimizer of step {self.step}")
        # the user may have replaced the optimizer since training started
        inner = getattr(optimizer, "optimizer", optimizer)
        if inner not in self._handles:
            self._watch_optimizer(inner)
        self.batch.stepping.append(optimizer)
        self._observe("see_gradients", optimizer)

    def _watch_optimizer(self, optimizer: Optimizer) -> None:
        """Register a hook that is called after each step of an optimizer."""
        if hasattr(optimizer, "register_step_post_hook"):
            self._handles[optimizer] = optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.batch.stepped += 1
        self._observe("see_step", optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Judge a batch that made a step, and start the next one."""
        self._enter(f"end of step {self.step}")
        # a hook may skip a step on some ranks, but a backward that synchronises runs on all of them
        has_stepped = bool(self.batch.stepping or self.batch.stepped)
        if has_stepped or self.batch.has_synchronised:
            self.run_stage(CheckStage.AFTER_STEP)
            self.steps += has_stepped
        self.batch, self.parameters.is_current = Batch(self.step), False
        self._observe("see_batch_end")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge the state at the start of a validation."""
        self.epoch_ends.close(CheckStage.VALIDATION_LOGGED)
        self.run_stage(CheckStage.VALIDATION_START)
        self.epoch_ends.start_evaluation()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *batch: Any, **options: Any
    ) -> None:
        """Call the checks after a validation batch, before the module's own hook."""
        if not trainer.sanity_checking:
            self._observe("see_batch_end")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge the results of validation."""
        self.run_stage(CheckStage.VALIDATION_END)

    on_test_start = on_validation_start
    on_test_batch_end = on_validation_batch_end
    on_test_end = on_validation_end

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Judge the last step and the checkpoint before it is written, unless only a failed rank saves it. Checks may add entries."""
        if trainer.state.status == TrainerStatus.INTERRUPTED:
            return
        self._judge_last_step(CheckStage.SAVE.value)
        self.checkpoint = checkpoint
        self.run_stage(CheckStage.SAVE)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Judge a checkpoint that was loaded."""
        self.checkpoint = checkpoint
        self.run_stage(CheckStage.LOAD)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Judge the last step and the state at the end, and print the summary."""
        self._judge_last_step(_THE_END)
        self.run_stage(CheckStage.TRAIN_END)
        with self.own_time:  # exchange the errors of checks that occurred after their last exchange
            facts = self.row_exchange.of_all_checks(CheckStage.TRAIN_END)
            self.row_exchange.exchange(facts, self.step, place=_THE_END)
        # figures and remarks of the checks, and the time that they took
        summaries = [(check.title, *_last_words(check)) for check in self.checks]
        figures: dict[str, float] = {}
        for _, of_check, _ in summaries:
            figures |= of_check
        self.row_exchange.report.log(self.trainer, figures)
        self.row_exchange.report.summary(summaries, self.steps, self.own_time.share())

    def fail(self, exception: BaseException) -> None:
        """Report to the peers that this rank's fit ends with an exception, or raise the error of the peer that failed first.

        Pending rows are judged first. Their findings precede the text of the error, and are added to its ``findings``.

        Raises:
            PeerError: instead of the exception, if a peer's failure caused it.
        """
        self.batch.step = lightning_compat.steps_as_logged(self.trainer)
        last_rows = None
        if isinstance(exception, Exception):
            facts = self.row_exchange.due(CheckStage.AFTER_STEP, step=0)
            last_rows = LastRows(self.row_exchange, facts, _WAIT_SECONDS)
        # another rank's failure broke this rank's collective
        watch = self.row_exchange.watch
        peer_error = None if watch is None else watch.report_failure(exception)
        if watch is not None and last_rows is not None:
            watch.clean_up()  # otherwise the process would be ended while it waits for the rows of its peers
        is_informed = peer_error is not None or not hasattr(self.trainer.strategy, "attach_payload")
        if isinstance(exception, Exception) and not is_informed:
            # peers that wait in a handshake of the strategy receive the error there. Informed peers do not open another one
            with contextlib.suppress(Exception):
                handshake.raise_on_all_ranks(exception, "training", timeout=_ERROR_TIMEOUT)
        if last_rows is not None:
            last_rows.judge_before_(peer_error or exception, self.step)
        if peer_error is not None:
            with contextlib.suppress(Exception):  # Lightning stops its clean-up where a hook raises
                lightning_compat.teardown_trainer(self.trainer)
            raise peer_error from exception

    def close(self) -> None:
        """Remove all hooks and drop the shared objects."""
        # remove hooks first, so that steps no longer call checks
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self.epoch_ends.remove()
        if self.row_exchange.watch is not None:
            liveness.release(self.row_exchange.watch)
        self._observe("stop")
        self._shared.clear()
        for check in self.checks:
            check.join(None)

    # ------------------------------------------------------------------ one stage

    def run_stage(self, stage: CheckStage) -> None:
        """Measure, gather and judge, if a check is due.

        Raises:
            DDPLossError: on every rank, for findings with the action ``raise``.

        Communication: one gather. None if no check is due. More only if there is a new finding.
        """
        if self.trainer.sanity_checking:  # checks do not run in the validation before training
            return
        self.batch.step = lightning_compat.steps_as_logged(self.trainer)
        due = self.row_exchange.due(stage, self.step)
        self._enter(place_of(self.row_exchange.names[stage], self.step))
        if not due:
            return
        with self.own_time:
            now = due
            if stage == CheckStage.AFTER_STEP:
                # judge pending rows first, because the next measurement replaces them in the checks
                now = [facts for facts in due if facts.step < 0]
                waiting = [facts for facts in due if facts.step >= 0]
                self.row_exchange.exchange(waiting, self.step)
                due = self.row_exchange.due(stage, self.step)  # excludes checks that have just been switched off
            self.row_exchange.measure(due, self.step)
            self.row_exchange.exchange(now, self.step)

    def _judge_last_step(self, place: str) -> None:
        """Judge pending rows of a step without waiting until their check is due again.

        Raises:
            DDPLossError: on every rank, for findings with the action ``raise``.

        Communication: one gather.
        """
        self.batch.step = lightning_compat.steps_as_logged(self.trainer)
        with self.own_time:
            self.row_exchange.exchange(self.row_exchange.due(CheckStage.AFTER_STEP, step=0), self.step, place=place)

    def _enter(self, place: str) -> None:
        """Record what the main thread is about to run, and raise if a peer has failed."""
        if self.row_exchange.watch is not None:
            self.row_exchange.watch.enter(place)

    def _observe(self, observation: str, *args: Any) -> None:
        """Call an observation of all checks and shared objects, timed as a check. An error is reported when its check is next due."""
        if observation not in self._observers:
            self._observers[observation] = self._find_observers(observation)
        with self.own_time:
            for check, observe in self._observers[observation]:
                try:
                    observe(self.trainer, self.module, *args)
                except Exception as error:  # peers would wait for this rank
                    self.row_exchange.note_failure(check, observation, error)

    def _find_observers(self, observation: str) -> list[tuple[Check, Callable[..., None]]]:
        """Return the functions for an observation: those of shared objects, for the first check that uses them, then those of checks."""
        active = self.checks
        if observation != "stop":  # a check that failed must remove its hooks too
            active = [check for check in self.checks if id(check) not in self._not_called]
        found: list[tuple[Check, Callable[..., None]]] = []
        for make, shared in self._shared.items():
            users = [check for check in active if make in dict(check.shares).values()]
            if users and hasattr(shared, observation):
                found.append((users[0], getattr(shared, observation)))
        own = [check for check in active if check.overrides(observation)]
        own = [check for check in own if (id(check), observation) not in self._not_called]
        return found + [(check, getattr(check, observation)) for check in own]

    def _blind(self, check: Check) -> None:
        """Stop calling a check that failed, for the remainder of this fit."""
        if id(check) not in self._not_called:
            self._not_called.add(id(check))
            self._observers = {}
            with contextlib.suppress(Exception):  # it has failed already
                check.stop(self.trainer, self.module)


def _last_words(check: Check) -> tuple[dict[str, float], list[str]]:
    """Return figures and remarks of a check at the end of a fit. If a check of this package fails, return a remark with its error."""
    try:
        return check.figures(), check.remarks()
    except Exception as error:
        if not check.is_built_in:
            raise
        return {}, [f"{check.title} has no figures: {type(error).__name__}: {error}"]


class Stopwatch:
    """Adds up the time inside ``with`` blocks that do not nest."""

    seconds = 0.0

    def __init__(self) -> None:
        self._made = time.perf_counter()

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began

    def share(self) -> float:
        """Return the share of the time since it was made."""
        return self.seconds / max(time.perf_counter() - self._made, 1e-9)
