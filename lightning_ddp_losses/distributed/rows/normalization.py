"""Rule of batch normalization: the mean and variance of all rows are exchanged, D numbers each, and rows stay on their rank.

Both form one operand of this rank's rows, so backward takes one sum.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_ddp_losses.distributed.rows.maps import share
from lightning_ddp_losses.distributed.rows.pending import plain_of
from lightning_ddp_losses.distributed.rows.sums import merged_moments, moments_of_ranks
from lightning_ddp_losses.distributed.rows.tensor import NO_RULE, GlobalRows, rule

_SIGNATURE = inspect.signature(functional.batch_norm)
_PLAIN = ("running_mean", "running_var", "weight", "bias")


@rule("sum", "batch_norm")
def batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Center and scale each channel by the mean and variance of all rows, or by the running statistics in evaluation."""
    if func is not functional.batch_norm:  # torch.batch_norm has different arguments
        return NO_RULE
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    rows = given["input"]
    if not isinstance(rows, GlobalRows) or rows._dim != 0 or rows._ndim < 2 or given["eps"] <= 0:
        return NO_RULE
    plain = {name: None if given[name] is None else plain_of(given[name]) for name in _PLAIN}
    if any(isinstance(tensor, GlobalRows) for tensor in plain.values()):
        return NO_RULE
    if given["training"]:
        statistics = _statistics_of(rows, plain, given["momentum"])
    elif plain["running_mean"] is None or plain["running_var"] is None:
        statistics = None
    else:
        statistics = torch.stack([plain["running_mean"], plain["running_var"]])
    if statistics is None:
        return NO_RULE
    return rows._same(_normalized(rows, statistics, plain, given["eps"]))


def _statistics_of(rows: GlobalRows, plain: dict[str, Tensor | None], momentum: float) -> Tensor | None:
    """Return mean and variance of each channel, (2, C), and update the running statistics, or return None if there are too few numbers."""
    dims = [dim for dim in range(rows._ndim) if dim != 1]
    number = math.prod(rows._shape[dim] for dim in dims)
    if number < 2 or not rows._local.dtype.is_floating_point:
        return None
    # the value is required immediately, so operators on it do not wait
    moments = plain_of(moments_of_ranks(rows, dims, "batch_norm"))
    mean, squares = merged_moments(moments, number)
    statistics = torch.stack([mean.flatten(), squares.flatten() / number])
    with torch.no_grad():
        mean, variance = statistics.detach()
        for running, batch in (
            (plain["running_mean"], mean),
            (plain["running_var"], variance * (number / (number - 1))),
        ):
            if running is not None:
                running.mul_(1 - momentum).add_(batch, alpha=momentum)
    return statistics


def _normalized(rows: GlobalRows, statistics: Tensor, plain: dict[str, Tensor | None], eps: float) -> Tensor:
    """Return this rank's rows, centered and scaled."""
    call, local = rows._call, rows._local
    shape = [1, -1] + [1] * (rows._ndim - 2)
    mean, variance = share(call, statistics, "batch_norm")
    # backward of a difference would negate a gradient of the size of the rows
    found: Tensor = (local + (-mean).view(shape)) * (variance + eps).rsqrt().view(shape)
    weight, bias = plain["weight"], plain["bias"]
    if weight is not None:
        found = found * share(call, weight, "batch_norm").view(shape)
    if bias is not None:
        found = found + share(call, bias, "batch_norm").view(shape)
    return found
