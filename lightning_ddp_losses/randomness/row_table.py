"""`RowTable`: in which tensors of a step the rows of the batch are, by memory and layout.

A mark on a Python object would be lost, as autograd makes other objects over the same memory: views, saved tensors, detached inputs of a
recomputed layer. The table refers to memory weakly. Memory that was freed and allocated again is other memory.
"""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.randomness.places import Candidates

_Layout: TypeAlias = "tuple[int, tuple[int, ...], tuple[int, ...]]"

_FIRST_SWEEP = 1024


class RowTable:
    """Where the rows are in each known tensor."""

    def __init__(self) -> None:
        self._by_memory: dict[compat.MemoryReference, dict[_Layout, Candidates]] = {}
        self._sweep_at = _FIRST_SWEEP

    def read(self, tensor: Tensor) -> Candidates | None:
        """Return what was written of a tensor. None if nothing was."""
        memory = compat.memory_reference(tensor)
        if memory is None:
            return None
        layouts = self._by_memory.get(memory)
        return None if layouts is None else layouts.get(_layout(tensor))

    def write_(self, tensor: Tensor, candidates: Candidates) -> None:
        """Remember where the rows of a tensor are."""
        memory = compat.memory_reference(tensor)
        if memory is None:
            return
        self._by_memory.setdefault(memory, {})[_layout(tensor)] = candidates
        if len(self._by_memory) >= self._sweep_at:
            self._sweep()

    def clear(self) -> None:
        """Forget all tensors."""
        self._by_memory.clear()

    def _sweep(self) -> None:
        """Remove memory that is gone."""
        self._by_memory = {memory: found for memory, found in self._by_memory.items() if not memory.expired()}  # type: ignore[no-untyped-call]
        self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._by_memory))


def _layout(tensor: Tensor) -> _Layout:
    return int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
