"""Numbers of rows that tiles leave behind, in memory that no tile allocates.

Nothing that is allocated while a tile is visited may outlive the visit on a CPU. glibc cuts small blocks out of the hole that a freed tile
leaves. If such a block stays, the next tile no longer fits into the hole and takes new memory. The resident set then grows with the whole
matrix, although one tile is alive at a time. A tensor is such a block itself, even if it is a view.

Legend: ``T`` rows of a tile, ``n`` numbers in all.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TileResults:
    """1-D results of tiles, each at its place among ``n`` numbers. Results of different dtypes are promoted, as ``torch.cat`` does.

    The allocator of an accelerator stores small blocks apart from large ones, and each copy is a launch. So results on an accelerator are
    not copied before they are joined.

    Args:
        size: n.
        like: A tensor of the dtype and on the device of the first numbers.
    """

    def __init__(self, size: int, like: Tensor) -> None:
        self._size, self._is_cpu = size, like.is_cpu
        self._memory = like.new_empty(size if like.is_cpu else 0)
        self._on_device: dict[int, Tensor] = {}  # by the first place

    def store_(self, numbers: Tensor, start: int) -> None:
        """Store (T,) numbers from a place on, in the place of earlier ones. If they are all n numbers, they are not copied."""
        if not self._is_cpu:
            self._on_device[start] = numbers
        elif numbers.shape[0] == self._size:
            self._memory = numbers
        else:
            if self._memory.dtype != numbers.dtype:  # tiles of one loss may count in integers or in floating numbers
                self._memory = self._memory.to(torch.promote_types(self._memory.dtype, numbers.dtype))
            self._memory[start : start + numbers.shape[0]].copy_(numbers)

    def part(self, start: int, stop: int) -> Tensor:
        """Return the numbers at some places, which must all be stored. They are a view of the memory, if they are on the CPU."""
        if self._is_cpu:
            return self._memory[start:stop]
        pieces = [numbers for place, numbers in sorted(self._on_device.items()) if start <= place < stop]
        if not pieces:
            return self._memory
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def joined(self) -> Tensor:
        """Return all numbers, (n,)."""
        return self.part(0, self._size)
