"""torch.nn's losses as a sum and a divisor, so that uneven ranks give the one-process mean, not a mean of means.

Legend: ``B`` rows on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.losses.partial_sums import Number, PartialSum, undivided

# divided by the weights of the targets that count; LinearCrossEntropyLoss is new in torch 2.13
_CLASS_INDEX = (nn.CrossEntropyLoss, nn.NLLLoss, getattr(nn, "LinearCrossEntropyLoss", nn.CrossEntropyLoss))


def torch_partial_sum(loss: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parts: int) -> PartialSum:
    """Return the sum of this rank's elements, and its part of what the global sum is to be divided by.

    Args:
        loss: A loss of torch.nn with ``reduction`` "mean", "batchmean" or "sum".
        args: Its inputs, this rank's rows.
        kwargs: Its inputs by keyword.
        parts: Number of ranks.

    Raises:
        InputError: where broadcasting compares every row with every other: that is no sum over rows.
    """
    # element losses: the loss itself, unreduced
    reduction = loss.reduction
    loss.reduction = "none"
    try:
        losses = loss(*args, **kwargs)
    finally:
        loss.reduction = reduction
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim]
    _refuse_broadcast(loss, batches, losses)
    divisor = _divisor(loss, losses, args, kwargs, parts)
    return PartialSum(losses.sum(), divisor, is_sum=loss.reduction == "sum")


def _divisor(loss: Any, losses: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], parts: int) -> Number:
    """Return what torch divides the sum of these elements by; see ``partial_sums`` for a sum."""
    if loss.reduction == "sum":
        return undivided(parts)
    if loss.reduction == "batchmean":
        rows: Tensor = args[0] if args else kwargs["input"]
        return float(rows.shape[0])
    target = args[1] if len(args) > 1 else kwargs.get("target")
    if isinstance(loss, _CLASS_INDEX) and isinstance(target, Tensor) and not target.is_floating_point():
        return _weight_of(target, loss.weight, loss.ignore_index)
    return float(losses.numel())


def _refuse_broadcast(loss: Any, batches: list[Tensor], losses: Tensor) -> None:
    """Refuse (n, 1) beside (n,): it makes n x n differences in one process, of which a rank sees its own rows' alone."""
    if not batches or losses.numel() <= max(batch.numel() for batch in batches):
        return
    dimensions = {batch.ndim for batch in batches if batch.shape[0] == batches[0].shape[0]}
    if len(dimensions) > 1:
        raise InputError(
            f"{type(loss).__name__}: shapes",
            expected="rows along the same dimension in every argument",
            got=", ".join(str(tuple(batch.shape)) for batch in batches),
            fix="Give them the same shape (target.unsqueeze(1), or input.squeeze(1)).",
        )


def _weight_of(target: Tensor, weight: Tensor | None, ignore_index: int | None) -> Number:
    """Return the sum of the class weights of the targets that count."""
    if ignore_index is None:
        ignore_index = -100  # torch's default
    if target.device.type != "cpu":
        # to select them would wait for their number
        counts = target != ignore_index
        if weight is None:
            return counts.sum()
        return torch.where(counts, weight[torch.where(counts, target, 0)], 0).sum()
    counted = target[target != ignore_index]
    if weight is None:
        return float(counted.numel())
    return float(torch.sum(weight[counted]))
