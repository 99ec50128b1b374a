"""`RowNoise`: the first random numbers of a batch that have a row for each of its samples, such as a GAN's latents or diffusion's noise.

Ranks compare the state of their generators before that draw, its operator, and its shape without rows. No number is read, so no device is
waited for. A mask is no noise: torch draws dropout by ``bernoulli_``, and a draw of one number for each row with further dimensions of
size 1 drops whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_ddp_losses.callbacks.facts.fact import Columns
from lightning_ddp_losses.callbacks.facts.rules import draw_same
from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.distributed.fingerprint import hash_text
from lightning_ddp_losses.randomness.notes import arguments_by_name, line_of_user
from lightning_ddp_losses.randomness.shared_states import device_of_draws, torch_states
from lightning_ddp_losses.randomness.step_draws import active_step

RANDOM_STEPS = 2
"""Steps with compared random states."""
_NAMES = ("normal", "normal_", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like")
_DRAWS = {f"aten::{name}" for name in _NAMES}  # distributions draw by `normal_`


def state_of_draws() -> int:
    """Return a hash of the states of torch's generators of the CPU and the device."""
    return hash_text(repr(torch_states(device_of_draws()).tolist()))


class RowNoise(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks for the first draw of one batch with a row for each sample. Drawn from torch's own generators, and not as one process.

    It looks in the first batch after all ranks have drawn the same numbers for two steps. In all other runs it costs nothing.

    Attributes:
        content: Hash of the draw, equal on ranks that draw the same numbers. 0 before it.
        text: Its operator and shape, and the user's line.
        error: Error of this watch. The draw itself ran.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._states: list[Sequence[int]] = []  # of all ranks, in the first steps
        self._rows = 0  # of the batch in which it looks
        self._is_due = self._is_entered = self._is_over = False
        self.content = 0
        self.text = ""
        self.error: Exception | None = None

    def see_states(self, columns: Columns) -> None:
        """Keep the random states of all ranks, and add those of the step before."""
        self._states.append(columns["random_state"])
        if len(self._states) == RANDOM_STEPS:
            columns["random_state_before"] = self._states[0]
        self._is_due |= draw_same(columns)

    def begin(self, rows: int) -> None:
        """Look at the draws of a batch with rows, once, if it is due."""
        if not self._is_due or not rows or self._rows:
            return
        self._rows = rows
        self._is_entered = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, *, must_leave: bool = False) -> None:
        """Look no further. A mode that was entered later has to leave first, unless all of them leave now."""
        self._is_over = self._rows > 0
        if self._is_entered and (must_leave or torch_compat.is_innermost(self)):
            self._is_entered = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def is_finished(self, step: int) -> bool:
        """Return whether no later batch will be looked at, after that many optimizer steps."""
        is_over = self._is_over or not self._is_due
        return step >= RANDOM_STEPS and is_over and not self._is_entered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator. Note it if it is the draw that is looked for."""
        if torch_compat.reads_scalar(func) and not isinstance(args[0], Tensor):
            return args[0]  # torch hands a number that autograd has saved to a mode as the number itself (torch 2.13)
        kwargs = kwargs or {}
        state = self._state_before(func, args, kwargs)
        result = func(*args, **kwargs)
        if state:
            self._note(func, result, state)
        return result

    def _state_before(self, func: Any, args: Any, kwargs: Any) -> int:
        """Return the state of the generators before a draw that may count. 0 for any other operator."""
        if self._is_over or self.content or self.error is not None:
            return 0
        try:
            name = torch_compat.operator_schema(func).name
            is_own = name in _DRAWS and arguments_by_name(func, args, kwargs).get("generator") is None
            return state_of_draws() if is_own and active_step() is None else 0
        except Exception as error:  # in the middle of the user's draw: run it, and let the check fail later
            self.error = error
            return 0

    def _note(self, func: Any, result: Any, state: int) -> None:
        """Keep a draw that has rows."""
        if not isinstance(result, Tensor) or not result.ndim or result.shape[0] != self._rows:
            return
        if result.requires_grad:  # a parameter that gets new values
            return
        shape = tuple(result.shape[1:])
        if shape and math.prod(shape) == 1:  # drops rows
            return
        operator = torch_compat.operator_schema(func).name.removeprefix("aten::")
        sizes = ", ".join(map(str, ["rows", *shape]))
        self.content = hash_text(f"{state} {operator} {shape} {result.dtype}")
        self.text = f"`{operator}` of ({sizes}) in {line_of_user()}"
