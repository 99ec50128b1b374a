"""Ways in which a training step calls a loss, on ranks and in one process alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

WAYS = [
    "plain",
    "plain",
    "plain",
    "no grad first",
    "inference first",
    "twice",
    "summed twice",
    "retained",
    "accumulated",
    "checkpointed",
    "checkpointed below",
    "compiled",
]


def call_and_differentiate(way: str, call: Callable[..., Tensor], leaves: Sequence[Tensor]) -> Tensor:
    """Call a loss of some leaves in one of `WAYS` and differentiate; all gradients lie in the leaves afterwards."""
    if way == "no grad first":
        with torch.no_grad():
            call(*leaves)
    elif way == "inference first":
        with torch.inference_mode():
            call(*leaves)
    elif (
        way == "compiled" and dist.is_initialized()
    ):  # one process needs no compiler; the first call is the compiled one
        torch.compiler.reset()
        call = torch.compile(call, backend="eager")

    def once() -> Tensor:
        if way == "checkpointed":  # the loss, its collectives too, runs once more in backward
            return checkpoint(call, *leaves, use_reentrant=False)
        if way == "checkpointed below":
            return call(*[checkpoint(torch.tanh, x, use_reentrant=False) for x in leaves])
        return call(*leaves)

    value = once()
    if way == "summed twice":
        value = value + 0.5 * once()
    if way == "retained":
        value.backward(retain_graph=True)
    value.backward()
    if way == "twice":
        once().backward()
    if way == "accumulated":
        (once() * 0.25).backward()
    return value.detach()
