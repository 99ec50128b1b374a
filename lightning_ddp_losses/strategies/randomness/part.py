"""`StepRandomness`: ``randomness="global"`` and ``"by_row"``, where dropout and noise of W ranks are those of one process.

Training steps draw from generators that nothing else draws from (``TrainingSteps``). They begin with the run's seed, are put in for
``training_step`` and for its backward, and are in the checkpoint. So a run that resumes on another number of ranks continues with the
same numbers.

| where | what |
|---|---|
| a batch was loaded | from here to ``training_step`` a hook of the user must not draw |
| ``training_step`` | the numbers of rows are exchanged, and draws with rows are those of all ranks |
| backward | layers run again under activation checkpointing; then the ranks compare their draws |
| manual optimisation | both inside of ``training_step`` |
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from lightning_ddp_losses.core import lightning_compat
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.randomness.training_steps import TrainingSteps
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart, LossOptions

STEP_STATES = "step_random_states"
"""Key of a checkpoint."""

_SEED = struct.Struct("<Q")


class StepRandomness(FitPart):
    """Draws in each training step what one process draws."""

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self._steps = TrainingSteps(by_row=fit.options.randomness == "by_row")
        self._batch: Any = None

    @classmethod
    def is_on(cls, options: LossOptions) -> bool:
        """Return whether training steps draw as one process."""
        return options.randomness != "rank"

    def on_train_start(self) -> None:
        """Seed the generators of the steps, if no checkpoint did, and watch the hooks between a batch and its step for draws.

        Communication: one handshake.
        """
        payload = _SEED.pack(torch.initial_seed() % (1 << 64))
        payloads = handshake.all_gather("the seed of training steps", {}, payload)
        if not self._steps.states:
            (seed,) = _SEED.unpack(payloads[0])
            self._steps.seed_(seed)
        self.undo.callback(lightning_compat.before_batch_hooks(self.fit.trainer, self._steps.begin_hooks))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Take the batch, whose tensors have rows."""
        self._batch = batch

    def training_step(self) -> AbstractContextManager[None]:
        """Draw as one process inside of a training step. Backward follows, or ran inside."""
        module = self.fit.module
        places = [(buffer, None) for buffer in module.buffers()]
        return self._steps.forward(self._batch, places, ends=not module.automatic_optimization)

    def backward_pass(self) -> AbstractContextManager[None]:
        """Draw as one process in the backward of a step, and compare the ranks' draws."""
        return self._steps.backward()

    def state_dict(self, checkpoint: Mapping[str, Any], *, together: bool) -> Mapping[str, Any]:
        """Save the generators of the steps, which are in one state on all ranks."""
        return {STEP_STATES: dict(self._steps.states)}

    def load_state_dict(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Restore them."""
        states = checkpoint.get(STEP_STATES)
        if states:
            self._steps.states = dict(states)
        return checkpoint

    def on_train_end(self) -> None:
        """Compare the draws of a last step without a backward."""
        self._steps.end()
