"""Interruptions of a run: SIGTERM, SLURM's signal before a job's time is over, and errors.

* SIGTERM, to one rank or to all: every rank ends after the same step. Lightning 2.6 broadcasts in the signal's handler, wherever the rank
  is at that moment: a collective that the others do not join, or take for another one. It also broadcasts before each batch, which
  synchronizes a device. Here the handler only sets a flag. The flag travels in the handshake of the next synchronising backward, and
  Lightning ends the run after that step on all ranks. All ranks stand at the same place then, so callbacks that save in the end
  (``OnExceptionCheckpoint``, ``ModelCheckpoint(save_on_exception=True)``) save a whole checkpoint.
* SLURM's signal: Lightning 2.6 saves in the handler, which takes all ranks. Here the flag travels in the same way, and when the batch is
  done all ranks do what Lightning does in the handler: save, and queue the job again.
* Errors: Lightning 2.6 asks callbacks first when a rank has failed, and the strategy afterwards. Callbacks that save would meet the other
  ranks, which do not know of the error yet and wait in another collective. So the peers are informed before any callback saves. Then

  * if every rank holds the whole, rank 0, which writes the files, writes what it holds and meets no other rank;
  * what no rank holds alone (class shards, parameters that FSDP has divided) is saved by all ranks together if all of them have the error
    and have made the same steps. Otherwise callbacks save nothing, and the log says so.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.compat import attached_trainer
from lightning_ddp_losses.distributed import handshake, peer_errors, process_groups
from lightning_ddp_losses.errors import DDPLossError
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart

_log = logging.getLogger(__name__)
_REQUEUED = "hpc_ckpt_"  # Lightning's names of checkpoints that it saves in SLURM's signal


class Interruptions(FitPart):
    """Ends all ranks together, and settles who saves a checkpoint then."""

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self._termination, self._requeue = Termination(), Requeue()
        self._after_error = AfterError(fit, self._termination)

    def setup(self) -> None:
        """Take a place among the callbacks."""
        if process_groups.world_size() > 1:
            self._after_error.install(self.fit.trainer)

    def on_train_start(self) -> None:
        """Replace the signal handlers, which Lightning has installed by now; without call checks nothing could travel."""
        if self.fit.options.check_calls and process_groups.world_size() > 1:
            self._termination.install(self.fit)
            self._requeue.install(self.fit)

    def teardown(self) -> None:
        """Leave the trainer as it came."""
        trainer = attached_trainer(self.fit.module)
        self._requeue.remove(trainer)
        self._termination.remove()
        self._after_error.remove(trainer)

    def saves_together(self, path: object) -> bool:
        """Return whether all ranks save this checkpoint, at the same place of the run or after an error that all of them have."""
        return self._after_error.is_together or self.is_collective(path)

    def is_collective(self, path: object) -> bool:
        """Return whether all ranks save this checkpoint at the same place of a healthy run.

        A save from a SLURM signal is not collective, unless ``Requeue`` handles the signal. After an error each rank may be anywhere.
        """
        trainer = attached_trainer(self.fit.module)
        is_interrupted = trainer is not None and trainer.interrupted
        if is_interrupted and (self.fit.is_alone or not self._termination.is_together):
            return False
        return self._requeue.is_together or not PurePath(str(path)).name.startswith(_REQUEUED)


# ---------------------------------------------------------------------- signals


class Termination:
    """What this rank knows of a request to end.

    Attributes:
        is_together: All ranks know, and end after the step in which they were told.
    """

    def __init__(self) -> None:
        self.is_together = False
        self._is_noted = False
        self._trainer: pl.Trainer | None = None
        self._restore_broadcast: Callable[[], None] | None = None

    def install(self, fit: Fit) -> None:
        """Replace Lightning's own note in the signal's handler; Lightning removes the handler when the run ends."""
        self._trainer = trainer = fit.trainer
        compat.replace_sigterm_notice(trainer, self._note)
        self._restore_broadcast = compat.skip_sigterm_broadcast(trainer)
        fit.attach_payload(lambda: bytes([self._is_noted]), self._judge)

    def _note(self) -> None:
        trainer = self._trainer
        assert trainer is not None
        launcher = trainer.strategy.launcher
        if not self._is_noted and launcher is not None:
            launcher.kill(signal.SIGTERM)  # processes that this one has started, as Lightning does
        self._is_noted = True

    def remove(self) -> None:
        """Leave the trainer as it came."""
        if self._restore_broadcast is not None:
            self._restore_broadcast()
            self._restore_broadcast = None

    def _judge(self, notes: Sequence[bytes]) -> None:
        told = [rank for rank, note in enumerate(notes) if note == b"\1"]
        if told and not self.is_together and self._trainer is not None:
            self.is_together = True
            rank_zero_info(
                f"SIGTERM reached rank {', '.join(map(str, told))}: all {len(notes)} ranks end after this step."
            )
            compat.mark_sigterm_(self._trainer)


class Requeue(Callback):
    """What this rank knows of a request to save and be queued again; Lightning calls it when a batch is done.

    Attributes:
        is_together: All ranks save now what Lightning saves for the signal.
    """

    def __init__(self) -> None:
        self._is_noted = self._is_heard = self._is_due = self.is_together = False
        self._save_and_requeue: Callable[[], None] | None = None

    def install(self, fit: Fit) -> None:
        """Replace Lightning's handler if there is one; Lightning removes it when the run ends.

        Whether flags travel depends on the cluster environment, which is the same on all ranks.
        """
        trainer = fit.trainer
        if not compat.requeues_on_signal(trainer):
            return
        self._save_and_requeue = compat.replace_requeue_handler(trainer, self._note)
        fit.attach_payload(lambda: bytes([self._is_noted]), self._judge)
        trainer.callbacks.append(self)  # type: ignore[attr-defined]

    def remove(self, trainer: pl.Trainer | None) -> None:
        """Leave the trainer as it came."""
        callbacks: list[Callback] = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
        if self in callbacks:
            callbacks.remove(self)

    def _note(self) -> None:
        self._is_noted = True

    def _judge(self, notes: Sequence[bytes]) -> None:
        """Hear of all ranks' notes; the same on all of them."""
        told = [rank for rank, note in enumerate(notes) if note == b"\1"]
        if told and not self._is_heard:  # the signal to another rank may come a step later
            self._is_heard = self._is_due = True
            rank_zero_info(f"The signal to requeue reached rank {', '.join(map(str, told))}: all save after this step.")

    def on_train_batch_end(self, *_: Any) -> None:
        """Save on all ranks, and queue the job again on rank 0, where a rank was told to before this batch was done."""
        if self._is_due and self._save_and_requeue is not None:
            self._is_due, self.is_together = False, True
            try:
                self._save_and_requeue()
            finally:
                self.is_together = False


# ---------------------------------------------------------------------- errors


class AfterError(Callback):
    """Handles an error before the callbacks that save.

    Args:
        fit: The fit.
        termination: Knows whether all ranks end by SIGTERM after the same step. That is no error: all save together then.

    Attributes:
        is_together: After the error all ranks stand at the same place, so they can save what is divided over them.
    """

    def __init__(self, fit: Fit, termination: Termination) -> None:
        self.is_together = False
        self._fit, self._termination = fit, termination
        self._set_aside: list[Callback] = []

    def install(self, trainer: pl.Trainer) -> None:
        """Come before Lightning's checkpoint callbacks, and after the checks, which inform peers by themselves."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        savers = [index for index, callback in enumerate(callbacks) if isinstance(callback, Checkpoint)]
        callbacks.insert(min(savers, default=len(callbacks)), self)

    def remove(self, trainer: pl.Trainer | None) -> None:
        """Leave the trainer as it came."""
        callbacks: list[Callback] = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
        if self in callbacks:
            callbacks.remove(self)
            callbacks += self._set_aside
        self._set_aside = []

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Tell the peers, then settle what the callbacks after this one may save, and with whom.

        Communication: one handshake, which meets the peers' next one; one more where something is divided and all ranks have the error.
        """
        if self._termination.is_together and isinstance(exception, SIGTERMException):
            return
        self._fit.on_exception(exception)
        is_divided, is_told = self._fit.is_divided, peer_errors.has_reached_all(exception)
        self.is_together = is_divided and is_told and _made_the_same_steps(trainer)
        self._fit.is_alone = not self.is_together
        savers = [callback for callback in trainer.callbacks if _saves_after_errors(callback)]  # type: ignore[attr-defined]
        if not savers or self.is_together:
            return
        if is_divided:
            _log.error("%s", _refusal())
            for callback in savers:  # each would take the checkpoint for saved, and remove a former one
                trainer.callbacks.remove(callback)  # type: ignore[attr-defined]
            self._set_aside = savers
        elif not is_told and not trainer.is_global_zero:
            _log.warning(
                "Rank %d saves nothing after its error: rank 0 does, unless it has ended.", trainer.global_rank
            )


def refuse_alone(fit: Fit) -> None:
    """Refuse to assemble a checkpoint of divided tensors if the other ranks do not join.

    Raises:
        DDPLossError: saying why; on this rank.
    """
    if fit.is_alone and fit.is_divided:
        raise _refusal()


def _refusal() -> DDPLossError:
    return DDPLossError(
        "a checkpoint after an error",
        expected="all ranks after the same step, to put together what is divided over them",
        got="ranks at different places, or gone; nothing is saved",
        fix="Former checkpoints are as they were. ModelCheckpoint(every_n_train_steps=...) saves while all ranks are there.",
        collective=True,  # no rank is waited for
    )


def _saves_after_errors(callback: Callback) -> bool:
    """Say whether this is one of Lightning's callbacks that save, and will do so after an error."""
    if not isinstance(callback, Checkpoint) or type(callback).on_exception is Callback.on_exception:
        return False
    return bool(getattr(callback, "save_on_exception", True))


def _made_the_same_steps(trainer: pl.Trainer) -> bool:
    """Meet the other ranks, all of which have the error, and say whether their optimizers have made as many steps as this one's."""
    try:
        pending = handshake.start("the end of a run after an error", {"global_step": trainer.global_step})
        pending.receive(handshake.PEER_TIMEOUT)
        pending.finish()
    except RuntimeError:  # other steps, or a rank has gone since
        return False
    return True
