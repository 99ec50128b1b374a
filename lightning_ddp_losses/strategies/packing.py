"""Small gradients in one buffer, on their way to their mean over ranks.

The buffer opens with a has-gradient flag per managed parameter. It may travel while the encoder's backward still runs: the
losses come first in backward, so their gradients are complete when it starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_ddp_losses import groups, transport

__all__ = ["PackedMean"]


class PackedMean:
    """A mean over ranks that has been started.

    Args:
        parameters: Whose gradients travel; one without a gradient contributes zeros and keeps none.
        flags: Travel along; their sums over ranks come back.
        dtype: On the wire.

    Communication: one all-reduce (for few bytes on the CPU one gather), started here, awaited in ``finish``.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], flags: Sequence[int], dtype: torch.dtype) -> None:
        self._parameters = list(parameters)
        self._grads = [_dense(p) for p in self._parameters]
        self._stamps = [_stamp(p.grad) for p in self._parameters]
        self.flags = list(flags)
        device = self._parameters[0].device if self._parameters else torch.device("cpu")
        pieces = [torch.tensor(self.flags, dtype=dtype, device=device)] if self.flags else []
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            own = parameter.new_zeros(parameter.numel()) if grad is None else grad.detach().reshape(-1)
            pieces.append(own.to(dtype))
        self._finish = transport.start_mean(torch.cat(pieces)) if pieces else None

    def still_holds(self, parameters: Sequence[nn.Parameter], flags: Sequence[int]) -> bool:
        """Whether these gradients are what was sent: nothing was added to them since."""
        same = len(parameters) == len(self._parameters) and all(
            a is b for a, b in zip(parameters, self._parameters, strict=True)
        )
        return same and self.flags == list(flags) and self._stamps == [_stamp(p.grad) for p in parameters]

    def finish(self, *, write: bool = True) -> list[int]:
        """Wait, put the means in place (unless told not to), and return the sums of the flags."""
        if self._finish is None:
            return []
        mean, world = self._finish(), groups.world_size()
        counts = [round(value * world) for value in mean[: len(self.flags)].tolist()]
        offset = len(self.flags)
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            if grad is not None and write:
                grad.copy_(mean[offset : offset + grad.numel()].view(grad.shape))
            offset += parameter.numel()
        return counts


def _dense(parameter: nn.Parameter) -> Tensor | None:
    grad = parameter.grad
    return None if grad is None or grad.is_sparse else grad


def _stamp(grad: Tensor | None) -> tuple[int, int]:
    """Which tensor it is, and how often it was written to."""
    return (0, 0) if grad is None else (id(grad), grad._version)
