"""torch.nn's losses as a sum and a divisor, so that uneven ranks give the one-process mean, not a mean of means."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.losses.partial_sums import PartialSum

# divided by the weights of the targets that count; LinearCrossEntropyLoss is new in torch 2.13
_CLASS_INDEX = (nn.CrossEntropyLoss, nn.NLLLoss, getattr(nn, "LinearCrossEntropyLoss", nn.CrossEntropyLoss))


def torch_partial_sum(loss: Any, args: tuple[Any, ...], kwargs: dict[str, Any], world: int) -> PartialSum:
    """This rank's elements, summed, and what the global sum is to be divided by.

    Args:
        loss: A loss of torch.nn with ``reduction`` "mean", "batchmean" or "sum".
        args: Its inputs, this rank's rows.
        kwargs: Its inputs by keyword.
        world: Number of ranks.

    Raises:
        InputError: where broadcasting compares every row with every other: that is no sum over rows.
    """
    reduction = loss.reduction
    loss.reduction = "none"
    try:
        values = loss(*args, **kwargs)
    finally:
        loss.reduction = reduction
    _refuse_crossed(loss, [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.ndim], values)
    if reduction == "sum":
        return PartialSum(values.sum(), 1.0 / world)
    if reduction == "batchmean":
        return PartialSum(values.sum(), float(args[0].shape[0] if args else kwargs["input"].shape[0]))
    target = args[1] if len(args) > 1 else kwargs.get("target")
    if isinstance(loss, _CLASS_INDEX) and isinstance(target, Tensor) and not target.is_floating_point():
        return PartialSum(values.sum(), _weight_of(target, loss.weight, loss.ignore_index))
    return PartialSum(values.sum(), float(values.numel()))


def _refuse_crossed(loss: Any, given: list[Tensor], values: Tensor) -> None:
    """(n, 1) beside (n,) makes n x n differences in one process, of which a rank sees its own rows' alone."""
    if not given or values.numel() <= max(t.numel() for t in given):
        return
    rows = [t for t in given if t.shape[0] == given[0].shape[0]]
    if len({t.ndim for t in rows}) > 1:
        raise InputError(
            f"{type(loss).__name__}: shapes",
            expected="rows along the same dimension in every argument",
            got=", ".join(str(tuple(t.shape)) for t in given),
            fix="Give them the same shape (target.unsqueeze(1), or input.squeeze(1)).",
        )


def _weight_of(target: Tensor, weight: Tensor | None, ignore_index: int | None) -> float:
    """Sum of the class weights of the targets that count."""
    counted = target[target != (-100 if ignore_index is None else ignore_index)]
    if weight is None:
        return float(counted.numel())
    return float(torch.sum(weight[counted]))
