"""`RowTable`: the marks of the tensors of a step, by memory and layout.

A mark on a Python object would be lost, because autograd creates other objects over the same memory: views, saved tensors, detached inputs
of a recomputed layer. The table holds weak references to memory. Memory that was freed and allocated again counts as different memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

from torch import Tensor

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.randomness.places import LOST, Mark

_Layout: TypeAlias = "tuple[int, tuple[int, ...], tuple[int, ...]]"

_Value = TypeVar("_Value")

FIRST_SWEEP = 1024


class RowTable:
    """The mark of each known tensor.

    Args:
        outside: Returns whether a tensor that is not marked here has, or may have, rows elsewhere. It is then lost.
    """

    def __init__(self, outside: Callable[[Tensor], bool] | None = None) -> None:
        self._outside = outside
        self._by_memory: dict[torch_compat.MemoryReference, dict[_Layout, Mark]] = {}
        self._lost: set[torch_compat.MemoryReference] = set()
        self._sweep_at = FIRST_SWEEP

    def read(self, tensor: Tensor) -> Mark | None:
        """Return the mark of a tensor, or None if it is not marked."""
        memory = torch_compat.memory_reference(tensor)
        if memory is None or memory in self._lost:
            return LOST
        layouts = self._by_memory.get(memory)
        if layouts is None and self._outside is not None and self._outside(tensor):
            return LOST
        if layouts is None:
            return None
        known = layouts.get(layout_of(tensor))
        if known is None and any(mark.place is not None or mark.is_lost for mark in layouts.values()):
            return LOST  # a view of rows that was not created by an operator
        return known

    def write_(self, tensor: Tensor, mark: Mark) -> None:
        """Mark a tensor."""
        memory = torch_compat.memory_reference(tensor)
        if memory is None or memory in self._lost:
            return
        self._by_memory.setdefault(memory, {})[layout_of(tensor)] = mark
        if len(self._by_memory) >= self._sweep_at:
            self._sweep()

    def lose_(self, tensor: Tensor) -> None:
        """Mark all tensors in the memory of a tensor as lost."""
        memory = torch_compat.memory_reference(tensor)
        if memory is not None:
            self._lost.add(memory)

    def _sweep(self) -> None:
        """Remove entries whose memory was freed."""
        self._by_memory = alive_memory(self._by_memory)
        self._lost = {memory for memory in self._lost if not memory.expired()}  # type: ignore[no-untyped-call]
        self._sweep_at = max(FIRST_SWEEP, 2 * len(self._by_memory))


def alive_memory(by_memory: dict[torch_compat.MemoryReference, _Value]) -> dict[torch_compat.MemoryReference, _Value]:
    """Return the entries whose memory was not freed."""
    return {memory: found for memory, found in by_memory.items() if not memory.expired()}  # type: ignore[no-untyped-call]


def layout_of(tensor: Tensor) -> _Layout:
    """Return the layout of a tensor's elements in its memory."""
    return int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
