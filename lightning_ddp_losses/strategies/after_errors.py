"""What callbacks save after an error (``OnExceptionCheckpoint``, ``ModelCheckpoint(save_on_exception=True)``), whoever has it.

Lightning 2.6 asks callbacks first when a rank has failed, and the strategy afterwards. Saving meets the other ranks (a barrier after each
checkpoint, a broadcast of its name), which do not know of the error yet and stand in a collective of their own: all wait for the time-out,
or take one collective for another. So here the peers are told before any callback saves, and then

* where every rank holds the whole, rank 0, which writes the files, writes what it holds and meets nobody;
* what no rank holds alone (class shards, parameters that FSDP has divided) is saved by all ranks together, where they have all come to the
  error and have made the same steps; else callbacks save nothing, and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_ddp_losses.distributed import handshake, header, process_groups
from lightning_ddp_losses.errors import DDPLossError
from lightning_ddp_losses.strategies.termination import Termination

_log = logging.getLogger(__name__)


class AfterError(Callback):
    """The callback that hears of an error last before those that save.

    Attributes:
        is_alone: This rank is on its way out of the run after an error, and meets no other one.
        is_together: After the error all ranks stand at the same place, so they can save what is divided over them.
    """

    def __init__(self) -> None:
        self.is_alone = self.is_together = False
        self._tell: Callable[[BaseException], None] | None = None
        self._is_divided: Callable[[], bool] = bool
        self._termination: Termination | None = None
        self._set_aside: list[Callback] = []

    def install(
        self,
        trainer: pl.Trainer,
        tell: Callable[[BaseException], None],
        is_divided: Callable[[], bool],
        termination: Termination,
    ) -> None:
        """Come before Lightning's checkpoint callbacks from now on, and after the checks, which tell peers in a way of their own.

        Args:
            trainer: The trainer.
            tell: Lets the peers know of an error.
            is_divided: Says whether there is something of which no rank holds the whole; the same on every rank.
            termination: Knows whether all ranks end by SIGTERM after the same step, which is no error: all save together then.
        """
        if process_groups.world_size() > 1:
            self._tell, self._is_divided, self._termination = tell, is_divided, termination
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
        assert self._tell is not None
        assert self._termination is not None
        if self._termination.is_together and isinstance(exception, SIGTERMException):
            return
        self._tell(exception)
        is_divided, is_told = self._is_divided(), header.has_reached_all(exception)
        self.is_together = is_divided and is_told and _made_the_same_steps(trainer)
        self.is_alone = not self.is_together
        savers = [callback for callback in trainer.callbacks if _saves_after_errors(callback)]  # type: ignore[attr-defined]
        if not savers or self.is_together:
            return
        if is_divided:
            _log.error("%s", self.refusal())
            for callback in savers:  # each would take the checkpoint for saved, and remove a former one
                trainer.callbacks.remove(callback)  # type: ignore[attr-defined]
            self._set_aside = savers
        elif not is_told and not trainer.is_global_zero:
            _log.warning(
                "Rank %d saves nothing after its error: rank 0 does, unless it has ended.", trainer.global_rank
            )

    def refuse_alone(self) -> None:
        """Refuse to put together what is divided, where the others do not come.

        Raises:
            DDPLossError: saying why; on this rank.
        """
        if self.is_alone and self._is_divided():
            raise self.refusal()

    @staticmethod
    def refusal() -> DDPLossError:
        """Return what there is to say of a checkpoint that takes all ranks."""
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
