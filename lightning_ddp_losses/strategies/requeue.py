"""SLURM's signal before a job's time is over, to one rank or to all: one checkpoint of all ranks, after the same step.

Lightning 2.6 saves in the signal's handler, wherever the rank is just then. To save takes all ranks, which may be in other steps, or never
hear of it where the signal reached one. Here the handler only takes a note; the note travels in the handshake of the next synchronising
backward, and when the batch is done all ranks do what Lightning does in the handler: save, and queue the job again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.strategies.call_check import CallCheck


class Requeue(Callback):
    """What this rank knows of a request to save and be queued again; Lightning calls it when a batch is done.

    Attributes:
        is_together: All ranks save now what Lightning saves for the signal.
    """

    def __init__(self) -> None:
        self._is_noted = self._is_heard = self._is_due = self.is_together = False
        self._save_and_requeue: Callable[[], None] | None = None

    def install(self, trainer: pl.Trainer, call_check: CallCheck) -> None:
        """Take the place of Lightning's handler, where there is one; Lightning takes it away when the run ends.

        Whether notes travel is a matter of the cluster environment, which is the same on all ranks.
        """
        if not compat.requeues_on_signal(trainer):
            return
        self._save_and_requeue = compat.replace_requeue_handler(trainer, self._note)
        call_check.attach(lambda: bytes([self._is_noted]), self._judge)
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
