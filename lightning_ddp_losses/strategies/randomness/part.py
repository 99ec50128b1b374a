"""`StepRandomness`: ``randomness="global"``, where dropout and noise of W ranks are those of one process.

Training steps draw from generators that nothing else draws from: samplers and loaders take other amounts of random numbers on other
numbers of ranks. They begin with the run's seed, are put in for ``training_step`` and for its backward, and are in the checkpoint. So a run
that resumes on another number of ranks continues with the same numbers.

| where | what |
|---|---|
| ``training_step`` | the numbers of rows are exchanged, and draws with rows are those of all ranks |
| backward | layers run again under activation checkpointing; then the ranks compare their draws |
| manual optimisation | both inside of ``training_step`` |
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.core.random_state import seed_generators_, write_random_states_
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.randomness.shared_states import device_of_draws, own_states
from lightning_ddp_losses.randomness.step import RandomStep
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart

STEP_STATES = "step_random_states"
"""Key of a checkpoint."""

_SEED = struct.Struct("<Q")


class StepRandomness(FitPart):
    """Draws in each training step what one process draws."""

    needs = ("randomness", "global")

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self._states: dict[str, Tensor] = {}  # of the steps' generators, outside of steps
        self._batch: Any = None
        self._step: RandomStep | None = None  # until its backward

    # ------------------------------------------------------------------ hooks of a fit

    def on_train_start(self) -> None:
        """Seed the generators of the steps, if no checkpoint did.

        Communication: one handshake.
        """
        payload = _SEED.pack(torch.initial_seed() % (1 << 64))
        payloads = handshake.all_gather("the seed of training steps", {}, payload)
        if self._states:
            return
        (seed,) = _SEED.unpack(payloads[0])
        outside = own_states()
        seed_generators_(seed % (1 << 63), device_of_draws())
        self._states = own_states()
        write_random_states_(outside, device_of_draws())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Take the batch, whose tensors have rows."""
        self._batch = batch

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """Draw as one process inside of a training step. Backward follows, or ran inside."""
        with self._generators_of_steps():
            self._end_step()  # one that had no backward
            if process_groups.world_size() == 1:
                yield
                return
            self._step = RandomStep(self._batch)
            for buffer in self.fit.module.buffers():
                self._step.mark(buffer, None)
            with self._step.active():
                yield
            if not self.fit.module.automatic_optimization:
                self._end_step()

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Draw as one process in the backward of a step, and compare the ranks' draws."""
        if self._step is not None and self._step.is_active:
            yield
            return
        with self._generators_of_steps():
            if self._step is None:
                yield
                return
            with self._step.active():
                yield
            self._end_step()

    def state_dict(self, checkpoint: Mapping[str, Any], *, together: bool) -> Mapping[str, Any]:
        """Save the generators of the steps, which are in one state on all ranks."""
        return {STEP_STATES: dict(self._states)}

    def load_state_dict(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Restore them."""
        states = checkpoint.get(STEP_STATES)
        if states:
            self._states = dict(states)
        return checkpoint

    def on_train_end(self) -> None:
        """Compare the draws of a last step without a backward."""
        with self._generators_of_steps():
            self._end_step()

    # ------------------------------------------------------------------ generators

    @contextmanager
    def _generators_of_steps(self) -> Iterator[None]:
        """Put in the generators of the steps."""
        device = device_of_draws()
        outside = own_states()
        write_random_states_(self._states, device)
        try:
            yield
        finally:
            self._states = own_states()
            write_random_states_(outside, device)

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.end()
