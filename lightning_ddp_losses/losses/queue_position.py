"""`QueuePosition`: where a cross-batch memory stands, saved and loaded with its loss; pytorch-metric-learning saves it nowhere."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning.losses import CrossBatchMemory
from torch import Tensor, nn

from lightning_ddp_losses.errors import InputError


class QueuePosition(nn.Module):
    """Where the next row of a ``CrossBatchMemory`` goes; PML keeps it in plain attributes, which no checkpoint saves.

    Args:
        memories: Of one loss, in the order of its modules.
    """

    position: Tensor
    memories: list[CrossBatchMemory]

    def __init__(self, memories: list[CrossBatchMemory]) -> None:
        super().__init__()
        self.__dict__["memories"] = memories  # no submodules: they are registered beside this one
        self.register_buffer("position", torch.zeros(2 * len(memories), dtype=torch.int64))
        self.register_load_state_dict_post_hook(_restore)  # type: ignore[no-untyped-call]

    def check(self, rows: int, title: str) -> None:
        """Refuse a global batch that a memory cannot hold."""
        for memory in self.memories:
            if rows > memory.memory_size:
                raise InputError(
                    f"{title}: memory_size",
                    expected=f"at least the global batch of {rows} rows",
                    got=memory.memory_size,
                    fix="The memory takes the rows of all ranks; raise memory_size.",
                    collective=True,
                )

    def update_(self) -> None:
        """Copy the memories' positions into the buffer."""
        positions = []
        for memory in self.memories:
            positions += [memory.queue_idx, int(memory.has_been_filled)]
        self.position.copy_(torch.tensor(positions))


def _restore(module: nn.Module, _: Any) -> None:
    assert isinstance(module, QueuePosition)
    for memory, (index, filled) in zip(module.memories, module.position.view(-1, 2).tolist(), strict=True):
        memory.queue_idx, memory.has_been_filled = index, bool(filled)
