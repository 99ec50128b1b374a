"""``Trainer(sync_batchnorm=True)`` on a device where torch's ``SyncBatchNorm`` does not run: the exact one takes its place.

Layers and strategies do not know each other; the package hands the plugin over when it is imported.
"""

from __future__ import annotations

import torch
from lightning.pytorch.plugins import LayerSync, TorchSyncBatchNorm

_NOT_TORCHS = ("cpu", "mps")
_exact: list[type[LayerSync]] = []


def use_layer_sync(kind: type[LayerSync]) -> None:
    """Say what synchronises batch norm on any device (``SyncBatchNorm``)."""
    _exact[:] = [kind]


def fit_for(device: torch.device, chosen: LayerSync | None) -> LayerSync | None:
    """The plugin that Lightning chose, or the exact one where torch's would fail in the first training step."""
    return _exact[0]() if type(chosen) is TorchSyncBatchNorm and device.type in _NOT_TORCHS else chosen


def meets_in_backward(chosen: LayerSync | None) -> bool:
    """Whether layers will meet their peers during backward, so that what the ranks have to say must be said before."""
    return isinstance(chosen, _exact[0])
