"""What the figures of the scale probe amount to: which fault, if any, they can only mean."""

from __future__ import annotations

from torch import nn

from lightning_ddp_losses.callbacks.findings import Finding
from lightning_ddp_losses.callbacks.gradient_scale import Probed

_FIXES = {
    "F20": "Gather with autograd (lightning_ddp_losses.distributed.collectives.all_gather_with_grad), or wrap the loss in GlobalBatchLoss.",
    "F21": "Leave the factor out: the gather's backward sums over ranks already.",
    "F23": "Use lightning_ddp_losses.distributed.collectives.all_reduce_with_grad: an in-place all-reduce has no gradient.",
    "F24": "The factor W mends the encoder and spoils the loss's own parameters: wrap the inner loss in GlobalBatchLoss.",
    "F27": "A torchmetrics metric keeps the gradient of its own rank's rows only: make it lightning_ddp_losses.differentiable.",
}


def scale_verdict(probed: Probed, world: int, module: nn.Module) -> list[Finding]:
    """Findings, from figures that are the same on every rank.

    A value that is W times a loss is compared with the loss: its encoder may have 1/W of the value's derivative.
    """
    cut = [part for part in probed.parts if part.shared and part.is_about(1 / world)]
    large = [part for part in probed.parts if part.shared and part.is_about(world)]
    found = [_finding("F21", part.name, world, part.ratio) for part in large]
    if not cut:
        return found
    if probed.multiplied:
        whole = [part for part in probed.parts if part.is_about(1.0)]
        return found + [_finding("F24", part.name, world, part.ratio * world) for part in whole]
    if any(_is_metric(m) for m in module.modules()):
        fault = "F27"
    else:
        reduced = any("reduce" in name for name in probed.operations)
        fault = "F23" if reduced and not any("gather" in name for name in probed.operations) else "F20"
    return found + [_finding(fault, part.name, world, part.ratio) for part in cut]


def _finding(fault: str, name: str, world: int, ratio: float) -> Finding:
    known = "W" if ratio > 1 else "1/W"
    what = f"gradient of `{name}` is {ratio:.4f} times the derivative of the loss, {known} for W = {world}"
    return Finding(fault, what, expected="1", name=name, fix=_FIXES[fault])


def _is_metric(module: nn.Module) -> bool:
    return any(
        base.__module__.startswith("torchmetrics.metric") and base.__name__ == "Metric" for base in type(module).__mro__
    )
