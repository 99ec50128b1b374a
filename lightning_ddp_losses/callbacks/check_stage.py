"""The stages of a run at which checks measure and judge."""

from __future__ import annotations

from enum import Enum


class CheckStage(str, Enum):
    """Names when checks measure and judge; the value is how messages call that place of the run.

    Example:
        >>> CheckStage.AFTER_STEP.value
        'after the optimizer step'
    """

    BEFORE_WRAP = "before the wrap"
    TRAIN_START = "start of training"
    EPOCH_START = "start of an epoch"
    BEFORE_BACKWARD = "before backward"
    AFTER_STEP = "after the optimizer step"
    VALIDATION_START = "start of validation"
    TRAIN_EPOCH_END = "end of an epoch"
    VALIDATION_EPOCH_END = "end of the validation epoch"
    VALIDATION_END = "end of validation"
    SAVE = "saving a checkpoint"
    LOAD = "loading a checkpoint"
    TRAIN_END = "end of training"

    @property
    def repeats_every_step(self) -> bool:
        """Say whether ``every_n_steps`` applies to this stage."""
        return self in (CheckStage.BEFORE_BACKWARD, CheckStage.AFTER_STEP)


_INSIDE_A_STEP = ("training_step", CheckStage.BEFORE_BACKWARD.value, CheckStage.AFTER_STEP.value)


def place_of(moment: str, step: int) -> str:
    """Say where in a run something was: in which step, or after how many; what comes before the first step has no number.

    Args:
        moment: The value of a stage, or what else the runner calls a place.
        step: Optimizer steps before it.
    """
    if moment in _INSIDE_A_STEP:
        return f"{moment} of step {step}"
    if step == 0:
        return moment
    return f"{moment}, after {step} step{'s' * (step > 1)}"
