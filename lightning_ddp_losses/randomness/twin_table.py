"""`TwinTable`: for each tensor of a step on a rank with one row, the tensor that it would be with two rows.

Twins are stored by tensor, and by memory and layout for other objects over the same memory (saved tensors, detached inputs of a recomputed
layer). With one row, two views of the same memory may have the same layout but different twins. These are only distinguished as objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.randomness.row_table import FIRST_SWEEP, alive_memory, layout_of

NO_TWIN: Final = "lost"
"""Represents the twin of a tensor that may have rows in an unknown position."""

Twin: TypeAlias = "Tensor | str"


class TwinTable:
    """The twin of each known tensor.

    Args:
        outside: Returns whether a tensor that is not known here has, or may have, rows elsewhere. Its twin is then lost.
    """

    def __init__(self, outside: Callable[[Tensor], bool] | None = None) -> None:
        self._outside = outside
        self._by_tensor = torch_compat.WeakTensorKeys()
        self._by_memory: dict[torch_compat.MemoryReference, dict[Any, Twin]] = {}
        self._sweep_at = FIRST_SWEEP

    def read(self, tensor: Tensor) -> Twin | None:
        """Return the twin of a tensor, or None for a tensor created outside the step, which does not have rows."""
        twin: Twin | None = self._by_tensor.get(tensor)  # type: ignore[no-untyped-call]
        if twin is not None:
            return twin
        memory = torch_compat.memory_reference(tensor)
        if memory is None:
            return NO_TWIN
        layouts = self._by_memory.get(memory)
        if layouts is None and self._outside is not None and self._outside(tensor):
            return NO_TWIN
        if layouts is None:
            return None
        return layouts.get(layout_of(tensor), NO_TWIN)

    def write_(self, tensor: Tensor, twin: Twin) -> None:
        """Record the twin of a tensor."""
        self._by_tensor[tensor] = twin
        memory = torch_compat.memory_reference(tensor)
        if memory is None:
            return
        layouts = self._by_memory.setdefault(memory, {})
        layout = layout_of(tensor)
        before = layouts.get(layout)
        if before is not None and not _are_laid_out_alike(before, twin):
            twin = NO_TWIN
        layouts[layout] = twin
        if len(self._by_memory) >= self._sweep_at:
            self._by_memory = alive_memory(self._by_memory)
            self._sweep_at = max(FIRST_SWEEP, 2 * len(self._by_memory))

    def forget_(self, tensor: Tensor) -> None:
        """Remove a tensor, which is then treated as created outside the step."""
        self._by_tensor.pop(tensor, None)  # type: ignore[no-untyped-call]
        memory = torch_compat.memory_reference(tensor)
        if memory is not None:
            self._by_memory.pop(memory, None)


def _are_laid_out_alike(first: Twin, second: Twin) -> bool:
    if isinstance(first, str) or isinstance(second, str):
        return first is second
    return layout_of(first) == layout_of(second)


def map_call(replace: Callable[[Any], Any], nest: Any) -> Any:
    """Return the arguments of a call with tensors and numbers replaced, including numbers in slices and shapes."""
    if isinstance(nest, (Tensor, int)):
        return replace(nest)
    if isinstance(nest, slice):
        return slice(*[map_call(replace, part) for part in (nest.start, nest.stop, nest.step)])
    if isinstance(nest, torch.Size):
        return tuple(map_call(replace, part) for part in nest)
    if type(nest) in (list, tuple):
        return type(nest)(map_call(replace, part) for part in nest)
    if type(nest) is dict:
        return {key: map_call(replace, part) for key, part in nest.items()}
    return nest
