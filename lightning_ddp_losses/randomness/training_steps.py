"""`TrainingSteps`: the draws of training steps, from generators that are used only for them.

The amount of random numbers that samplers and loaders draw depends on the number of ranks. The generators of steps therefore have their own
seed. They are active during forward and backward, and the previous states are restored in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_ddp_losses.core.random_state import seed_generators_, write_random_states_
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.randomness.pieces import in_one_process
from lightning_ddp_losses.randomness.shared_states import device_of_draws, digest_of, own_states
from lightning_ddp_losses.randomness.step import PlannedRows, RandomStep
from lightning_ddp_losses.randomness.step_draws import active_step

Places = Iterable[tuple[Tensor, int | None]]
"""Tensors with the dimension of their rows, or None if they do not have rows."""


class TrainingSteps:
    """Training steps with the same random numbers as one process. In a world of one, draws are those of plain torch.

    Args:
        takes_blocks: Whether ``global_randomness`` inside a step is treated as part of the step instead of raising an error.
        by_row: Whether each rank draws for its own rows only. The numbers are then different from those of plain torch, in a world of one
            too.

    Attributes:
        states: States of the steps' generators between steps. Empty until they are seeded.
    """

    def __init__(self, *, takes_blocks: bool = False, by_row: bool = False) -> None:
        self.states: dict[str, Tensor] = {}
        self._takes_blocks = takes_blocks
        self._by_row = by_row
        self._step: RandomStep | None = None  # until its backward
        self._are_in = False
        self._before_hooks = b""

    def begin_hooks(self) -> None:
        """Remember the states of all generators before the hooks that the user runs between loading a batch and its training step."""
        self._before_hooks = digest_of(own_states())

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
        """Draw the random numbers of one process in a forward, which is followed by its backward.

        Args:
            batch: The batch of this rank, with rows in dimension 0.
            places: Further tensors, or tensors of the batch with rows in another dimension.
            ends: Whether backward is also inside the block.
            planned: The position of the rows in a larger batch. If None, the larger batch is the concatenation of the ranks' batches.
        """
        if _is_part_of_another():
            yield
            return
        if planned is not None:
            self.seed_(planned.seed)
        before, self._before_hooks = self._before_hooks, b""
        has_drawn = before not in (b"", digest_of(own_states()))
        with self._generators():
            self._end()  # ends a previous step without backward
            is_whole = planned is None or planned.is_whole
            if process_groups.world_size() == 1 and is_whole and not self._by_row:
                with in_one_process():
                    yield
                return
            self._step = RandomStep(batch, planned=planned, by_row=self._by_row)
            self._step.takes_blocks = self._takes_blocks
            if has_drawn:
                self._step.draws.refuse(
                    "torch's, numpy's or Python's generator between a batch and its training_step",
                    "numbers that a hook has drawn outside of the step, such as an augmentation in on_after_batch_transfer",
                    "Draw in training_step, in the data set, or from a generator of your own.",
                )
            for tensor, dim in places:
                self._step.mark(tensor, dim)
            with self._step.active():
                yield
            if ends:
                self._end()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Draw the random numbers of one process in the backward of a step, and compare the draws of the ranks."""
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
        """Compare the draws of the last step, if it did not have a backward."""
        if self._step is None:
            return
        with self._generators():
            self._end()

    @contextmanager
    def _generators(self) -> Iterator[None]:
        """Activate the generators of the steps. In manual optimization, they are already active when backward runs."""
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
    """Return whether an outer step is active that treats inner steps as part of it."""
    step = active_step()
    return step is not None and step.takes_blocks
