"""`StateWatch`: detects whether torch's generator has changed without a draw that the step has processed."""

from __future__ import annotations

import torch

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.randomness.shared_states import device_of_draws, torch_states


class StateWatch:
    """The states of torch's generators of the CPU and the device after the draws of a step."""

    def __init__(self) -> None:
        self._device = device_of_draws()
        self._states = [torch_states(self._device)] * 2  # after the last draw of forward, and after the last draw

    def note_draw(self) -> None:
        """Record the state after a draw."""
        self._states[1] = torch_states(self._device)
        if torch_compat.graph_task_id() == -1:
            self._states[0] = self._states[1]

    def has_moved_unseen(self) -> bool:
        """Return whether the state has changed since the last draw. In backward always False, as recomputed layers restore states."""
        if torch_compat.graph_task_id() != -1:
            return False
        state = torch_states(self._device)
        if any(torch.equal(state, each) for each in self._states):
            return False
        self._states = [state] * 2
        return True
