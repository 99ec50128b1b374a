"""What is set beside our losses: plain torch, eager and compiled, in bf16 and float32, and other libraries where they are installed.

Each function takes rows as the loss gets them. Libraries that are not installed have a row that says so (``NotInstalledError``).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "NotInstalledError",
    "arcface_by_linear_cross_entropy",
    "arcface_in_chunks",
    "compiled",
    "inf_cl",
    "siglip_kernel",
]

_CHUNK_ENTRIES = 1 << 26  # logits of a chunk of classes: 256 MiB of float32


class NotInstalledError(Exception):
    """A library that a contestant needs, or a function of torch, is not there. It is not run."""


def compiled(device: str, ways: dict[str, Callable[[], Tensor]]) -> dict[str, Callable[[], Tensor]]:
    """Return the same ways as ``torch.compile`` makes them. It is not compiled on a CPU."""
    found: dict[str, Callable[[], Tensor]] = {}
    if device.startswith("cuda"):
        for name, way in ways.items():
            library, _, dtype = name.partition(", ")
            found[f"{library}, compiled, {dtype}"] = torch.compile(way)
    return found


def siglip_kernel(images: Tensor, texts: Tensor, log_scale: Tensor, bias: Tensor) -> Tensor:
    """Compute SigLIP's loss by siglip-kernel (pip, 0.1.1), whose rows are normalised in bf16 before."""
    function = _function_of("siglip_kernel", "fused_siglip_loss")
    rows = functional.normalize(images, dim=1), functional.normalize(texts, dim=1)
    value: Tensor = function(*rows, log_scale, bias)
    return value


def inf_cl(images: Tensor, texts: Tensor, log_scale: Tensor) -> Tensor:
    """Compute CLIP's loss by Inf-CL (github.com/DAMO-NLP-SG/Inf-CLIP): the loss of each direction."""
    function = _function_of("inf_cl", "cal_inf_loss")
    rows = functional.normalize(images, dim=1), functional.normalize(texts, dim=1)
    losses = function(*rows, scale=log_scale.exp()), function(*reversed(rows), scale=log_scale.exp())
    value: Tensor = (losses[0].mean() + losses[1].mean()) / 2
    return value


def _function_of(library: str, name: str) -> Callable[..., Any]:
    if importlib.util.find_spec(library) is None:
        raise NotInstalledError(f"{library} is not installed")
    function: Callable[..., Any] = getattr(importlib.import_module(library), name)
    return function


def arcface_by_linear_cross_entropy(
    unit: Tensor, weight: Tensor, labels: Tensor, target: Callable[[Tensor], Tensor], scale: float
) -> Tensor:
    """Compute ArcFace by ``torch.nn.functional.linear_cross_entropy``, which has no margin: its log-sum-exp gets the target's margin.

    Args:
        unit: (B, D), rows of length one.
        weight: (C, D), weight rows of length one.
        labels: (B,).
        target: Applies the margin to cosines (B,).
        scale: Factor of the cosines.
    """
    function = getattr(functional, "linear_cross_entropy", None)
    if function is None:
        raise NotInstalledError(f"torch {torch.__version__} has no linear_cross_entropy")
    options: dict[str, Any] = {}
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        options["options"] = torch.nn.LinearCrossEntropyOptions()
    own = (unit * weight[labels]).sum(1)
    losses = function(scale * unit, weight, labels, reduction="none", **options)
    lse, with_margin = losses + scale * own, scale * target(own)
    # the target's term in the sum of exponentials is another one
    change = torch.exp(with_margin - lse) - torch.exp(scale * own - lse)
    return (lse + torch.log1p(change) - with_margin).mean()


def arcface_in_chunks(
    unit: Tensor, weight: Tensor, labels: Tensor, target: Callable[[Tensor], Tensor], scale: float
) -> Tensor:
    """Compute ArcFace from chunks of classes whose logits backward computes again. Arguments as above."""
    with_margin = scale * target((unit * weight[labels]).sum(1))
    step = max(1, _CHUNK_ENTRIES // len(unit))
    parts = []
    for start in range(0, len(weight), step):
        block = weight[start : start + step]
        parts.append(_LseOfChunk.apply(unit, block, labels - start, scale))
    others = torch.stack(parts).logsumexp(0)
    return (torch.logaddexp(others, with_margin) - with_margin).mean()


class _LseOfChunk(torch.autograd.Function):
    """Log-sum-exp (B,) of a chunk's logits, without targets. Backward computes the logits again."""

    @staticmethod
    def forward(ctx: Any, unit: Tensor, block: Tensor, columns: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(unit, block, columns)
        ctx.scale = scale
        return _lse_of_chunk(unit, block, columns, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        unit, block, columns = ctx.saved_tensors
        leaves = unit.detach().requires_grad_(), block.detach().requires_grad_()
        with torch.enable_grad():
            lse = _lse_of_chunk(*leaves, columns, ctx.scale)
        return *torch.autograd.grad(lse, leaves, grad), None, None


def _lse_of_chunk(unit: Tensor, block: Tensor, columns: Tensor, scale: float) -> Tensor:
    """Return the log-sum-exp (B,) of a chunk's logits, without targets."""
    logits = scale * (unit @ block.t())
    is_target = torch.arange(len(block), device=logits.device) == columns.unsqueeze(1)
    return logits.masked_fill(is_target, torch.finfo(logits.dtype).min).logsumexp(1)
