"""SIGTERM, to one rank or to all: every rank ends after the same step, and the log says which rank was told to.

Lightning 2.6 broadcasts in the signal's handler, wherever the rank is just then: a collective that the others do not come to, or take for
another one. It broadcasts before each batch too, for which a device is waited for, and where peers stand when a rank fails between two
steps. Here the handler only takes a note; the note travels in the handshake of the next synchronising backward (after a validation, or
in the next epoch), and Lightning ends the run after that step on all ranks. They stand at the same place then, so that what callbacks
save in the end (``OnExceptionCheckpoint``, ``ModelCheckpoint(save_on_exception=True)``) is whole: a pre-empted run goes on from there
bit for bit.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.strategies.call_check import CallCheck


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

    def install(self, trainer: pl.Trainer, call_check: CallCheck) -> None:
        """Take the place of Lightning's own note in the signal's handler; Lightning takes the handler away when the run ends."""
        self._trainer = trainer
        compat.replace_sigterm_notice(trainer, self._note)
        self._restore_broadcast = compat.skip_sigterm_broadcast(trainer)
        call_check.attach(lambda: bytes([self._is_noted]), self._judge)

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
