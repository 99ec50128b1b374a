"""Interruptions of a run: SIGTERM, SLURM's signal before a job's time is over, and errors.

* SIGTERM, to one rank or to all: every rank ends after the same step. Lightning 2.6 broadcasts in the signal's handler, at an
  arbitrary place in the program: other ranks do not join this collective, or pair it with another one. It also broadcasts before each
  batch, which synchronizes a device. In this strategy the handler only sets a flag. The flag is sent in the handshake of the next
  synchronising backward, and Lightning ends the run after that step on all ranks. All ranks are then at the same place, so callbacks that
  save at the end (``OnExceptionCheckpoint``, ``ModelCheckpoint(save_on_exception=True)``) save a whole checkpoint.
* SLURM's signal: Lightning 2.6 saves in the handler, which takes all ranks. Here the flag travels in the same way, and when the batch is
  done all ranks do what Lightning does in the handler: save, and queue the job again.
* Errors: when a rank has failed, Lightning 2.6 calls callbacks first and the strategy afterwards. Callbacks that save would use collectives
  while other ranks, without the error, wait in a different collective. So peers are informed before any callback saves. Then

  * if every rank has the whole state, rank 0, which writes the files, writes its own state without communication;
  * a divided state (class shards, parameters that FSDP has divided) is saved by all ranks together if every rank has the error
    after the same number of steps. Otherwise callbacks do not save, and the log reports it.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import PurePath

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint, LambdaCallback
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_ddp_losses.core import lightning_compat
from lightning_ddp_losses.core.lightning_compat import attached_trainer
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.errors import DDPLossError
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart

_log = logging.getLogger(__name__)
_REQUEUED = "hpc_ckpt_"  # Lightning's names of checkpoints that it saves in SLURM's signal


class Interruptions(FitPart):
    """Ends all ranks together, and decides which ranks save a checkpoint."""

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self._sigterm = _Flag("SIGTERM reached rank {0}: all {1} ranks end after this step.", self._end_after_this_step)
        self._requeue = _Flag(
            "The signal to requeue reached rank {0}: all save after this step.", self._save_after_this_batch
        )
        self._has_to_save = self._is_saving = False  # for SLURM, in this batch
        self._is_together = False  # after an error: all ranks are at the same place, and can save divided parameters
        self._set_aside: list[Callback] = []

    def setup(self) -> None:
        """Insert a callback before Lightning's checkpoint callbacks, and after the checks, which inform peers themselves."""
        callbacks: list[Callback] = self.fit.trainer.callbacks  # type: ignore[attr-defined]
        savers = [index for index, callback in enumerate(callbacks) if isinstance(callback, Checkpoint)]
        if process_groups.world_size() > 1:
            self.undo.callback(lambda: callbacks.extend(self._set_aside))
            self._insert(min(savers, default=len(callbacks)), LambdaCallback(on_exception=self._after_error))

    def _insert(self, place: int, callback: Callback) -> None:
        """Give the trainer a callback for the length of this run."""
        callbacks: list[Callback] = self.fit.trainer.callbacks  # type: ignore[attr-defined]
        callbacks.insert(place, callback)
        self.undo.callback(callbacks.remove, callback)

    def on_train_start(self) -> None:
        """Replace the signal handlers, which Lightning has installed by now and removes at the end of the run.

        Without call checks no flag could travel. Whether SLURM's travels depends on the cluster environment, the same on all ranks.
        """
        if not self.fit.options.check_calls or process_groups.world_size() == 1:
            return
        trainer = self.fit.trainer
        lightning_compat.replace_sigterm_notice(trainer, self._note_sigterm)
        self.undo.callback(lightning_compat.skip_sigterm_broadcast(trainer))
        self.fit.strategy.attach_payload(self._sigterm.note, self._sigterm.judge, name="SIGTERM")
        if lightning_compat.requeues_on_signal(trainer):
            save = lightning_compat.replace_requeue_handler(trainer, self._requeue.set)
            self.fit.strategy.attach_payload(self._requeue.note, self._requeue.judge, name="signal to requeue")
            saver = LambdaCallback(on_train_batch_end=lambda *_: self._save_if_due(save))
            self._insert(len(trainer.callbacks), saver)  # type: ignore[attr-defined]

    def _note_sigterm(self) -> None:
        launcher = self.fit.trainer.strategy.launcher
        if not self._sigterm.is_set and launcher is not None:
            launcher.kill(signal.SIGTERM)  # stop the processes that this one has started, like Lightning
        self._sigterm.set()

    def _end_after_this_step(self) -> None:
        lightning_compat.mark_sigterm_(self.fit.trainer)

    def _save_after_this_batch(self) -> None:
        self._has_to_save = True

    def _save_if_due(self, save_and_requeue: Callable[[], None]) -> None:
        """Save on all ranks, and queue the job again on rank 0, if a flag has arrived in this batch."""
        if self._has_to_save:
            self._has_to_save, self._is_saving = False, True
            try:
                save_and_requeue()
            finally:
                self._is_saving = False

    def saves_together(self, path: object) -> bool:
        """Return whether all ranks save this checkpoint, at the same place of the run or after an error that all of them have."""
        return self._is_together or self.is_collective(path)

    def is_collective(self, path: object) -> bool:
        """Return whether all ranks save this checkpoint at the same place of a healthy run.

        A save from a SLURM signal is not collective, unless the flag of the signal has travelled. After an error each rank may be
        anywhere.
        """
        trainer = attached_trainer(self.fit.module)
        is_interrupted = trainer is not None and trainer.interrupted
        if is_interrupted and (self.fit.is_alone or not self._sigterm.is_known):
            return False
        return self._is_saving or not PurePath(str(path)).name.startswith(_REQUEUED)

    def _after_error(self, trainer: pl.Trainer, _module: pl.LightningModule, exception: BaseException) -> None:
        """Inform the peers, then decide which callbacks after this one may save, and with which ranks.

        Ranks that end by SIGTERM after the same step do not have an error, and save together.

        Communication: one handshake, paired with the peers' next one, and a second one if a state is divided and all ranks have the error.
        """
        if self._sigterm.is_known and isinstance(exception, SIGTERMException):
            return
        self.fit.on_exception(exception)
        is_divided, is_known = self.fit.is_divided, handshake.has_reached_all(exception)
        self._is_together = is_divided and is_known and _made_the_same_steps(trainer)
        self.fit.is_alone = not self._is_together
        savers = [callback for callback in trainer.callbacks if _saves_after_errors(callback)]  # type: ignore[attr-defined]
        if not savers or self._is_together:
            return
        if is_divided:
            _log.error("%s", _refused_checkpoint())
            for callback in savers:  # each would take the checkpoint for saved, and remove a former one
                trainer.callbacks.remove(callback)  # type: ignore[attr-defined]
            self._set_aside = savers
        elif not is_known and not trainer.is_global_zero:
            _log.warning(
                "Rank %d saves nothing after its error: rank 0 does, unless it has ended.", trainer.global_rank
            )


# ---------------------------------------------------------------------- signals


class _Flag:
    """The flag of a signal, which travels in the call check.

    Args:
        report: Text for the log, with places for the ranks that the signal reached and for the number of ranks.
        then: Function that all ranks call in the first step after the signal.

    Attributes:
        is_set: True if the signal reached this rank.
        is_known: True if it reached some rank and every rank has received its flag.
    """

    def __init__(self, report: str, then: Callable[[], None]) -> None:
        self.is_set = self.is_known = False
        self._report = report
        self._then = then

    def set(self) -> None:
        """Note the signal."""
        self.is_set = True

    def note(self) -> bytes:
        """Return what this rank sends."""
        return bytes([self.is_set])

    def judge(self, flags: Sequence[bytes]) -> None:
        """Take the flags of all ranks, in rank order."""
        ranks = [str(rank) for rank, flag in enumerate(flags) if flag == b"\1"]
        if ranks and not self.is_known:  # the signal may reach another rank a step later
            self.is_known = True
            rank_zero_info(self._report.format(", ".join(ranks), len(flags)))
            self._then()


# ---------------------------------------------------------------------- errors


def refuse_alone(fit: Fit) -> None:
    """Refuse to assemble a checkpoint of divided tensors if the other ranks do not join.

    Raises:
        DDPLossError: saying why. On this rank.
    """
    if fit.is_alone and fit.is_divided:
        raise _refused_checkpoint()


def _refused_checkpoint() -> DDPLossError:
    return DDPLossError(
        "a checkpoint after an error",
        expected="all ranks after the same step, to put together what is divided over them",
        got="ranks at different places, or gone; nothing is saved",
        fix="Former checkpoints are as they were. ModelCheckpoint(every_n_train_steps=...) saves while all ranks are there.",
        collective=True,  # no rank is waited for
    )


def _saves_after_errors(callback: Callback) -> bool:
    """Return whether this is one of Lightning's callbacks that save after an error."""
    if not isinstance(callback, Checkpoint) or type(callback).on_exception is Callback.on_exception:
        return False
    return bool(getattr(callback, "save_on_exception", True))


def _made_the_same_steps(trainer: pl.Trainer) -> bool:
    """Return whether the optimizers of all ranks have made the same number of steps. All ranks have the error and call this."""
    try:
        pending = handshake.start("the end of a run after an error", {"global_step": trainer.global_step})
        pending.receive(handshake.PEER_TIMEOUT)
        pending.finish()
    except RuntimeError:  # other steps, or a rank has gone since
        return False
    return True
