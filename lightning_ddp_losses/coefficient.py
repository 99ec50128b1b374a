"""Is a global value back-propagated with the same coefficient on every rank? Noted in backward, compared in the next frame.

Every rank computes the whole loss or metric, or its share of it, on the assumption that all of them weigh it alike. A rank
that multiplies it by something of its own would get a wrong gradient without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses import numerics

__all__ = ["CoefficientWatch"]


class CoefficientWatch:
    """Notes what comes back into a value that all ranks share."""

    def __init__(self) -> None:
        self._noted: list[tuple[Tensor, Any]] = []

    def watch(self, value: Any) -> Any:
        """The same value, or nest of values; the upstream gradient of each tensor will be noted."""
        return numerics.map_tensors(self._watch, value)

    def _watch(self, value: Tensor) -> Tensor:
        if not value.requires_grad:
            return value
        if value.is_leaf:  # a parameter, on which a hook would stay
            return _Note.apply(value, self)  # type: ignore[no-untyped-call, no-any-return]
        value.register_hook(self.note)  # type: ignore[no-untyped-call]
        return value

    def take(self) -> str:
        """What was noted since the last call, as text for a frame."""
        noted, self._noted = self._noted, []
        for _, event in noted:
            if event is not None:
                event.synchronize()
        texts = [" and ".join(map(repr, value.reshape(-1).tolist())) for value, _ in noted]
        return ", ".join(texts) or "none yet"

    def note(self, grad: Tensor) -> None:
        """Remember a coefficient without waiting for the device; of one with dimensions its sum and sum of squares."""
        if grad.ndim:
            grad = torch.stack([grad.sum(), grad.square().sum()])
        if grad.device.type != "cuda":
            self._noted.append((grad.detach().clone(), None))
            return
        copy = torch.empty(grad.shape, dtype=grad.dtype, pin_memory=True).copy_(grad.detach(), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._noted.append((copy, event))

    def __deepcopy__(self, memo: dict[int, Any]) -> CoefficientWatch:
        return CoefficientWatch()

    def __reduce__(self) -> tuple[Any, ...]:
        return CoefficientWatch, ()


class _Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, watch: CoefficientWatch) -> Tensor:
        ctx.watch = watch
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.watch.note(grad)
        return grad, None
