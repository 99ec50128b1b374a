"""Keeps the losses' parameters out of a precision plugin's halving (``bf16-true``, ``16-true``)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class PrecisionKeeper:
    """Remembers floating parameters and buffers, and restores those that came back in a lower precision."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor]] = []

    def remember(self, modules: Iterable[nn.Module]) -> None:
        """Note values and dtypes as they are now."""
        self._before = [
            (tensor, tensor.data)
            for module in modules
            for tensor in (*module.parameters(), *module.buffers())
            if tensor.is_floating_point()
        ]

    def restore(self) -> None:
        """Give back the remembered values wherever the dtype went down; a wider dtype stays."""
        for tensor, before in self._before:
            if torch.promote_types(tensor.dtype, before.dtype) != tensor.dtype:
                tensor.data = before
        self._before = []
