"""Buffers in which a loss or a metric remembers: memory queues and running sums, compared by digests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_ddp_losses.callbacks.batch_reader import row_hashes
from lightning_ddp_losses.distributed.fingerprint import fingerprint

_QUEUE_WORDS = ("queue", "memory", "bank")
_ROWS = 1024
_MASK = (1 << 62) - 1
_IGNORED = "_ddp_params_and_buffers_to_ignore"


@dataclass(frozen=True)
class Buffer:
    """A buffer that is to be equal on all ranks.

    Attributes:
        tensor: Its value.
        queue: Whether it holds rows of earlier batches.
    """

    tensor: Tensor
    queue: bool

    def digests(self) -> tuple[int, int]:
        """Of the rows in their order, and of the rows in any order. Of a large buffer, of its first rows and some others."""
        value = self.tensor.detach()
        if not self.queue or value.ndim == 0 or not value.shape[0]:
            return fingerprint(value), 0
        if value.shape[0] > 2 * _ROWS:
            others = torch.arange(_ROWS, value.shape[0], value.shape[0] // _ROWS, device=value.device)
            value = torch.cat([value[:_ROWS], value[others]])
        return fingerprint(value), sum(row_hashes([value], value.shape[0])) & _MASK


class Place(NamedTuple):
    """Where a buffer is: it may be assigned anew."""

    path: str
    owner: nn.Module
    name: str
    queue: bool


def places(module: nn.Module) -> list[Place]:
    """Buffers of losses and metrics, and queues wherever they are; not batch norm's, nor what DDP is told to ignore."""
    ignored = frozenset(getattr(module, _IGNORED, ()))
    found: list[Place] = []
    for path, inner in module.named_modules():
        if isinstance(inner, _NormBase) or not inner._buffers:
            continue
        names = [cls.__name__ for cls in type(inner).__mro__]
        judged = any(name.endswith(("Loss", "Metric", "CrossBatchMemory")) for name in names)
        for name, buffer in inner._buffers.items():
            full = f"{path}.{name}" if path else name
            word = any(word in name.lower() for word in _QUEUE_WORDS) or "CrossBatchMemory" in names
            queue = word and buffer is not None and buffer.ndim >= 1 and buffer.shape[0] > 1
            if full not in ignored and (queue or judged):
                found.append(Place(full, inner, name, queue))
    return found


def remembering(where: list[Place]) -> dict[str, Buffer]:
    """The buffers that are there now, by name."""
    found = {
        place.path: Buffer(value, place.queue)
        for place in where
        if (value := place.owner._buffers.get(place.name)) is not None
    }
    return {
        path: held for path, held in found.items() if not held.tensor.is_meta and held.tensor.layout == torch.strided
    }


def memories(module: nn.Module) -> dict[str, Any]:
    """pytorch-metric-learning's cross-batch memories, by path."""
    return {
        name: inner
        for name, inner in module.named_modules()
        if any(cls.__name__ == "CrossBatchMemory" for cls in type(inner).__mro__) and hasattr(inner, "queue_idx")
    }


def is_unplaced(memory: Any) -> bool:
    """Whether it holds rows and says that it holds none."""
    filled = bool(getattr(memory, "embedding_memory", torch.zeros(0)).any())
    return filled and int(memory.queue_idx) == 0 and not memory.has_been_filled
