"""One fit's session of checks: who is due, one gather for all of them, one verdict for all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_losses.callbacks.check_stage import Moment
from lightning_ddp_losses.callbacks.court import Court, overrides
from lightning_ddp_losses.callbacks.meeting import Meeting
from lightning_ddp_losses.callbacks.replicated_parameters import Tracked
from lightning_ddp_losses.callbacks.report import Report, Settings
from lightning_ddp_losses.callbacks.watchdog import Alarm
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.errors import ConfigurationError, RankMismatchError

if TYPE_CHECKING:
    from lightning_ddp_losses.callbacks.base import RankCheck


_FRAME_PATIENCE = timedelta(seconds=2)
T = TypeVar("T")


class Session:
    """Runs the checks of one trainer for one fit.

    Attributes:
        checkpoint: At SAVE and LOAD, the checkpoint.
        stepping: Optimizers that were about to step since the last batch ended.
        stepped: Optimizers that did (a gradient scaler may have skipped one).
        backwards: Backward passes through Lightning since the last batch ended.
    """

    def __init__(
        self, checks: Sequence[RankCheck], settings: Settings, trainer: pl.Trainer, module: pl.LightningModule
    ) -> None:
        alone = process_groups.world_size() == 1
        self.checks = [check for check in checks if not (alone and check.needs_peers)]
        self.trainer, self.module, self.settings = trainer, module, settings
        self.alarm = Alarm(settings.stall_seconds)
        self.meeting = Meeting(self.alarm.look)
        self.report = Report(settings, trainer.log_dir if settings.file else None)
        self._court = Court(trainer, module, self.meeting, self.report)
        self.checkpoint: dict[str, Any] | None = None
        self.stepping: list[Optimizer] = []
        self.stepped: list[Optimizer] = []
        self.backwards = 0
        self.steps = 0
        self._shared: dict[Callable[..., Any], Any] = {}
        self._tracked: dict[str, Tensor] | None = None
        self._structure = Tracked(trainer, module)
        self._handles: list[Any] = []
        self._watched: list[Optimizer] = []
        self._due = {moment: [c for c in self.checks if moment in c.moments] for moment in Moment}
        self._seeing: dict[str, list[RankCheck]] = {}
        self._own = Stopwatch()
        self._begun = time.perf_counter()
        self._rides = self._ridden = self._rehearsed = False
        for check in self.checks:
            check.join(self)

    # ------------------------------------------------------------------ for checks

    @property
    def step(self) -> int:
        """Optimizer steps so far, as loggers count them."""
        return int(self.trainer.fit_loop.epoch_loop._batches_that_stepped)

    def shared(self, make: Callable[[Session], T]) -> T:
        """One object of that kind for all checks of the session; it has ``batch_end()`` and ``close()``."""
        if make not in self._shared:
            self._shared[make] = make(self)
        return self._shared[make]  # type: ignore[no-any-return]

    def tracked(self) -> dict[str, Tensor]:
        """The parameters that ranks must hold alike; looked up once per batch."""
        if self._tracked is None:
            self._tracked = self._structure.now()
        return self._tracked

    @property
    def synchronising(self) -> bool:
        """Whether the next backward reduces gradients: not on a step that only accumulates."""
        ours = getattr(self.trainer.strategy, "sync_gradients", None)
        if ours is not None:
            return bool(ours)
        return bool(getattr(self.trainer.strategy.model, "require_backward_grad_sync", True))

    @property
    def rides(self) -> bool:
        """Whether rows before backward travel in the strategy's frame."""
        return self._rides

    # ------------------------------------------------------------------ the run

    def open(self) -> None:
        """Agree on the set of checks, then judge what is to be wrapped.

        Raises:
            ConfigurationError: on every rank, when ranks run different checks.
        """
        own = ", ".join(f"{c.title}(every_n_steps={c.every_n_steps})" for c in self.checks)
        configuration = repr([sorted((k, repr(v)) for k, v in c.options().items()) for c in self.checks])
        digest = hashlib.blake2b(configuration.encode(), digest_size=6).hexdigest()
        with self._own:
            try:
                self.meeting.swap("set of checks", b"", {"checks": own, "options": digest})
            except RankMismatchError as error:
                raise ConfigurationError(str(error), collective=True) from None
        self.at(Moment.BEFORE_WRAP)

    def train_start(self) -> None:
        """Let the checks see the steps of the optimizers, and judge what every rank starts from."""
        with self._own:
            self._tell("start")
            for optimizer in self.trainer.optimizers:
                self._watch(optimizer)
            if any(Moment.BEFORE_BACKWARD in c.moments for c in self.checks):
                # under our strategy the checks before backward share its frame
                attach_payload = getattr(self.trainer.strategy, "attach_payload", None)
                self._rides = attach_payload is not None and attach_payload(self._ride, self._arrive)
        self.at(Moment.TRAIN_START)

    def batch_start(self, batch: Any, batch_idx: int) -> None:
        """A training batch."""
        self._tracked = None
        self.alarm.at(f"training_step of step {self.step}")
        with self._own:
            self._tell("see_batch", batch, batch_idx)
            if not self._rehearsed:
                self._rehearsed = True
                self._rehearse(batch, batch_idx)

    def _rehearse(self, batch: Any, batch_idx: int) -> None:
        found = [
            (check, replace(finding, check=check.title, step=self.step, moment="the rehearsal"))
            for check in self.checks
            if overrides(check, "rehearse") and process_groups.world_size() > 1
            for finding in check.rehearse(self.trainer, self.module, batch, batch_idx)
        ]
        self.report.take([finding for _, finding in found], [check.action for check, _ in found], self.trainer)

    def before_backward(self, loss: Tensor) -> None:
        """A loss is about to be differentiated."""
        self.alarm.at(f"backward of step {self.step}")
        if self._ridden:  # in the strategy's frame
            self._ridden = False
            return
        self._see_loss(loss)
        if self.synchronising and not self._rides:
            self.at(Moment.BEFORE_BACKWARD)

    def _see_loss(self, loss: Tensor | None) -> None:
        with self._own:
            self.backwards += 1
            self._tell("see_loss", loss)

    def _ride(self) -> bytes:
        """This rank's row, as the strategy's frame leaves."""
        self._ridden = True
        self._see_loss(getattr(self.trainer.strategy, "closure_loss", None))
        with self._own:
            due = self.due(Moment.BEFORE_BACKWARD)
            return self._court.measure(due, Moment.BEFORE_BACKWARD) if due else b""

    def _arrive(self, everyone: list[bytes]) -> None:
        """All ranks' rows, as the strategy's frame is read."""
        due = self.due(Moment.BEFORE_BACKWARD)
        if due:
            with self._own:
                self._court.judge(due, Moment.BEFORE_BACKWARD, everyone, self.step)

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        self.alarm.at(f"the optimizer of step {self.step}")
        with self._own:
            self._watch(getattr(optimizer, "optimizer", optimizer))  # a user may have put another in its place
            self.stepping.append(optimizer)
            self._tell("see_gradients", optimizer)

    def _watch(self, optimizer: Optimizer) -> None:
        if optimizer not in self._watched and hasattr(optimizer, "register_step_post_hook"):
            self._watched.append(optimizer)
            self._handles.append(optimizer.register_step_post_hook(self._stepped))

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        with self._own:
            self.stepped.append(optimizer)
            self._tell("see_step", optimizer)

    def batch_end(self) -> None:
        """A batch is through; judge, if it made a step."""
        self.alarm.at(f"end of step {self.step}")
        if self.stepping or self.stepped:
            self.at(Moment.AFTER_STEP)
            self.steps += 1
        self.stepping, self.stepped, self.backwards, self._tracked = [], [], 0, None
        for observer in self._shared.values():
            observer.batch_end()

    def train_end(self) -> None:
        """Judge what training leaves, and sum up."""
        self.at(Moment.TRAIN_END)
        if self.checks:
            with self._own:
                self._court.leftovers(self.checks, self.step)
        share = self._own.seconds / max(time.perf_counter() - self._begun, 1e-9)
        figures = {name: value for check in self.checks for name, value in check.figures().items()}
        self.report.log(self.trainer, figures)
        remarks = [line for check in self.checks for line in check.remarks()]
        self.report.summary([c.title for c in self.checks], self.steps, share, figures, remarks)

    def failed(self, exception: BaseException) -> None:
        """This rank's fit ends with an exception: tell the peers, or say which of them failed first.

        Raises:
            PeerError: in the exception's place, where a peer's failure is behind it.
        """
        peer = self.alarm.failed(exception)
        if peer is not None:
            with contextlib.suppress(Exception):  # Lightning stops its clean-up where a hook raises
                self.trainer._teardown()
            raise peer from exception
        if hasattr(self.trainer.strategy, "attach_payload") and isinstance(exception, Exception):
            # peers that wait in a frame of the strategy's get it there; those that have heard of it open no more frames
            with contextlib.suppress(Exception):
                handshake.raise_on_all_ranks(exception, "training", timeout=_FRAME_PATIENCE)

    def close(self) -> None:
        """Leave nothing behind."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.alarm.end()
        self._tell("stop")
        for observer in self._shared.values():
            observer.close()
        self._shared.clear()
        for check in self.checks:
            check.join(None)

    # ------------------------------------------------------------------ who is due

    def at(self, moment: Moment) -> None:
        """Measure, gather and judge, if a check is due.

        Raises:
            DDPLossError: on every rank, for findings whose action is ``raise``.

        Communication: one gather; none where no check is due. More only where there is a new finding.
        """
        due = self.due(moment)
        self.alarm.at(f"{moment.value} of step {self.step}")
        if due:
            with self._own:
                own = self._court.measure(due, moment)
                everyone = self.meeting.swap(moment.value, own, {"step": self.step})
                self._court.judge(due, moment, everyone, self.step)

    def due(self, moment: Moment) -> list[RankCheck]:
        """The checks that run now; the same on every rank."""
        step = self.step if moment.repeats_every_step else 0
        return [check for check in self._due[moment] if step % check.every_n_steps == 0]

    def _tell(self, observation: str, *args: Any) -> None:
        """Let each check that wants to see something see it; what it raises is reported when it is due next."""
        if observation not in self._seeing:
            self._seeing[observation] = [check for check in self.checks if overrides(check, observation)]
        for check in self._seeing[observation]:
            self._show(check, observation, *args)

    def _show(self, check: RankCheck, observation: str, *args: Any) -> None:
        try:
            getattr(check, observation)(self.trainer, self.module, *args)
        except Exception as error:  # a rank must not leave its peers alone
            self._court.failures[id(check)] = f"{observation}: {type(error).__name__}: {error}"


class Stopwatch:
    """Adds up the time inside ``with`` blocks that do not nest."""

    seconds = 0.0

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._begun
