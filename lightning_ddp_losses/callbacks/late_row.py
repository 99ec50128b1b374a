"""Rows that are measured on an accelerator now and judged one step later, so that no check waits for the device.

To read a number of an accelerator waits until it has done all that was asked of it. So a check whose row is made of such numbers starts
their copies to the host and returns a `LateRow`. On an accelerator it is read when the check is due at that stage next, and travels and
is judged there; the last one before a checkpoint is saved, and at the end of training. Findings name the step that the row was measured
in. The first row of a fit is judged at once: most faults show in it, and some end the next step in torch. On the CPU there is nothing to
wait for: each row is read at once, and a fault ends the fit in the step where it happens.

Which of the two it is depends on the trainer's device alone, so every rank judges the same row at the same place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import lightning.pytorch as pl

_HOSTS = ("cpu",)  # devices that nobody waits for


@dataclass(frozen=True)
class LateRow:
    """Holds what ``RankCheck.measure`` may return at one of its ``late_stages``.

    Attributes:
        read: Returns the row, a list of numbers; called once, right before it travels, so that it can put in place what ``describe``
            will need.
    """

    read: Callable[[], list[int] | list[float]]


def judges_late(trainer: pl.Trainer) -> bool:
    """Say whether late rows are judged one step later: on any device that the host would have to wait for; the same on every rank."""
    return trainer.strategy.root_device.type not in _HOSTS
