"""`TrainingSteps`: the draws of training steps, from generators that nothing else draws from.

Samplers and loaders take other amounts of random numbers on other numbers of ranks. The generators of steps begin with a seed, are put in
for forward and for backward, and are taken out in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_ddp_losses.core.random_state import seed_generators_, write_random_states_
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.randomness.shared_states import device_of_draws, own_states
from lightning_ddp_losses.randomness.step import PlannedRows, RandomStep, active_step

Places = Iterable[tuple[Tensor, int | None]]
"""Tensors with the dimension of their rows. None: they have no rows."""


class TrainingSteps:
    """Training steps whose random numbers are those of one process. A world of one draws as plain torch does.

    Args:
        takes_blocks: Whether ``global_randomness`` inside a step is a part of it, and not an error.

    Attributes:
        states: States of the steps' generators, outside of steps. Empty before they are seeded.
    """

    def __init__(self, *, takes_blocks: bool = False) -> None:
        self.states: dict[str, Tensor] = {}
        self._takes_blocks = takes_blocks
        self._step: RandomStep | None = None  # until its backward
        self._are_in = False

    def seed_(self, seed: int) -> None:
        """Seed the generators of the steps."""
        outside = own_states()
        seed_generators_(seed % (1 << 63), device_of_draws())
        self.states = own_states()
        write_random_states_(outside, device_of_draws())

    @contextmanager
    def forward(
        self, batch: Any, places: Places = (), *, ends: bool = False, planned: PlannedRows | None = None
    ) -> Iterator[None]:
        """Draw as one process in a forward, whose backward follows.

        Args:
            batch: The batch of this rank, whose rows are in dimension 0.
            places: Further tensors, or tensors of the batch with rows elsewhere.
            ends: Whether backward is inside too.
            planned: Which rows of a larger batch they are. None: the ranks' batches after each other are that batch.
        """
        if _is_part_of_another():
            yield
            return
        if planned is not None:
            self.seed_(planned.seed)
        with self._generators():
            self._end()  # one that had no backward
            is_whole = planned is None or planned.is_whole
            if process_groups.world_size() == 1 and is_whole:
                yield
                return
            self._step = RandomStep(batch, planned=planned, takes_blocks=self._takes_blocks)
            for tensor, dim in places:
                self._step.mark(tensor, dim)
            with self._step.active():
                yield
            if ends:
                self._end()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Draw as one process in the backward of a step, and compare the ranks' draws."""
        if _is_part_of_another():
            yield
            return
        with self._generators():
            if self._step is None or self._step.is_active:
                yield
                return
            with self._step.active():
                yield
            self._end()

    def end(self) -> None:
        """Compare the draws of a last step without a backward."""
        if self._step is None:
            return
        with self._generators():
            self._end()

    @contextmanager
    def _generators(self) -> Iterator[None]:
        """Put in the generators of the steps. In manual optimisation backward finds them in."""
        if self._are_in:
            yield
            return
        device = device_of_draws()
        outside = own_states()
        write_random_states_(self.states, device)
        self._are_in = True
        try:
            yield
        finally:
            self._are_in = False
            self.states = own_states()
            write_random_states_(outside, device)

    def _end(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.end()


def _is_part_of_another() -> bool:
    """Return whether a step is open that takes what is inside of it as its own."""
    step = active_step()
    return step is not None and step.takes_blocks
