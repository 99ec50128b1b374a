"""``Trainer(sync_batchnorm=True)`` on a device where torch's ``SyncBatchNorm`` does not run: the exact one takes its place.

Layers and strategies do not know each other; the package hands the plugin over when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from lightning.pytorch.plugins import LayerSync, TorchSyncBatchNorm

__all__ = ["fit_for", "use_layer_sync"]

_NOT_TORCHS = ("cpu", "mps")
_make: list[Callable[[], LayerSync]] = []


def use_layer_sync(make: Callable[[], LayerSync]) -> None:
    """Say what synchronises batch norm on any device (``SyncBatchNorm``)."""
    _make[:] = [make]


def fit_for(device: torch.device, chosen: LayerSync | None) -> LayerSync | None:
    """The plugin that Lightning chose, or ours where it would fail in the first training step."""
    return _make[0]() if type(chosen) is TorchSyncBatchNorm and device.type in _NOT_TORCHS else chosen
