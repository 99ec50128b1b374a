"""PML's cross-batch memory: its position in the state dict, and a size that the global batch fits."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning.losses import CrossBatchMemory
from torch import nn

from lightning_ddp_losses.errors import InputError, format_error

__all__ = ["QueuePosition"]


class QueuePosition(nn.Module):
    """Where the next row of a ``CrossBatchMemory`` goes; PML keeps it in plain attributes, which no checkpoint saves."""

    position: torch.Tensor
    memory: CrossBatchMemory

    def __init__(self, memory: CrossBatchMemory) -> None:
        super().__init__()
        self.__dict__["memory"] = memory  # not a submodule: it is registered beside this one
        self.register_buffer("position", torch.zeros(2, dtype=torch.int64))
        self.register_load_state_dict_post_hook(_restore)  # type: ignore[no-untyped-call]

    def check(self, rows: int, title: str) -> None:
        """Refuse a global batch that the memory cannot hold."""
        size = self.memory.memory_size
        if rows > size:
            raise InputError(
                format_error(
                    f"{title}: memory_size",
                    expected=f"at least the global batch of {rows} rows",
                    got=size,
                    fix="The memory takes the rows of all ranks; raise memory_size.",
                ),
                collective=True,
            )

    def note(self) -> None:
        """Copy the memory's position into the buffer."""
        self.position.copy_(torch.tensor([self.memory.queue_idx, int(self.memory.has_been_filled)]))


def _restore(module: nn.Module, _: Any) -> None:
    assert isinstance(module, QueuePosition)
    index, filled = (int(v) for v in module.position)
    module.memory.queue_idx, module.memory.has_been_filled = index, bool(filled)
