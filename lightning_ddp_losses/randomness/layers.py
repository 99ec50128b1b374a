"""`layers_that_drop`: the layers of a model that drop units or paths while it trains."""

from __future__ import annotations

from torch import nn

from lightning_ddp_losses.core import torch_compat

_WITH_DROPOUT = (nn.RNNBase, nn.MultiheadAttention)
_PATH_DROPS = ("DropPath", "StochasticDepth")  # classes of timm and torchvision
_RATES = ("p", "drop_prob")


def layers_that_drop(module: nn.Module) -> list[str]:
    """Return the names of the layers with a dropout rate above 0, including recurrent layers, attention, and dropped paths.

    Layers in evaluation mode are left out. Functions such as ``torch.nn.functional.dropout`` are not found.
    """
    return [name for name, layer in module.named_modules() if layer.training and _rate_of(layer)]


def _rate_of(layer: nn.Module) -> float:
    """Return the dropout rate of a layer, or 0."""
    names: tuple[str, ...] = ()
    if isinstance(layer, torch_compat.DROPOUT_TYPES) or type(layer).__name__ in _PATH_DROPS:
        names = _RATES
    elif isinstance(layer, _WITH_DROPOUT):
        names = ("dropout",)
    for name in names:
        rate = getattr(layer, name, None)
        if isinstance(rate, (int, float)):
            return float(rate)
    return 0.0
