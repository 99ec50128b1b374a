"""Rule of batch normalization: means and variances of all ranks are exchanged, D numbers each, and rows stay on their rank.

Forward and backward use torch's fused kernels. Backward takes two sums over all rows, of the gradient and of its product with the result:
the last node of the formula records this rank's part (`_Normalize`), and the first one awaits it (`_Await`), as described in ``maps``.
Second derivatives differentiate the same formula written in operators.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lightning_ddp_losses.core import batch_norm_kernels, torch_compat
from lightning_ddp_losses.distributed.rows.call import Place, line_of_loss
from lightning_ddp_losses.distributed.rows.maps import LaterSum, added_now, share
from lightning_ddp_losses.distributed.rows.pending import plain_of, stack
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
        number = math.prod(rows._shape) // max(1, rows._shape[1])
        if number < 2 or not rows._local.dtype.is_floating_point:
            return NO_RULE
        statistics = _statistics_of(rows, number, given["eps"])
        _update_(plain, statistics, given["momentum"])
        found = _normalized(rows, statistics)
    elif plain["running_mean"] is None or plain["running_var"] is None:
        return NO_RULE
    else:
        values = torch.stack([plain["running_mean"], plain["running_var"]])
        mean, var = share(rows._call, values, "batch_norm")
        found = _scaled(rows._local, mean, var, given["eps"])
    shape = [1, -1] + [1] * (rows._ndim - 2)
    if plain["weight"] is not None:
        found = found * share(rows._call, plain["weight"], "batch_norm").view(shape)
    if plain["bias"] is not None:
        found = found + share(rows._call, plain["bias"], "batch_norm").view(shape)
    return rows._same(found)


class _Statistics(NamedTuple):
    """Statistics of each channel over the rows of all ranks, without a graph, equal on all ranks.

    Attributes:
        number: Values per channel.
        mean: (C,), at least float32.
        var: (C,), biased.
        eps: Added to the variance.
    """

    number: int
    mean: Tensor
    var: Tensor
    eps: float


@torch.no_grad()
def _statistics_of(rows: GlobalRows, number: int, eps: float) -> _Statistics:
    """Merge the moments of all ranks (Chan et al.). Communication: one exchange, which is awaited."""
    channels, per_row = rows._shape[1], number // sum(rows._counts)
    own_number = rows._local.shape[0] * per_row
    moments = batch_norm_kernels.local_moments(rows._local.detach(), own_number)
    # the number is sent, too: weights from the host would be copied to the device in each call
    moments = torch.cat([moments, moments.new_full((channels,), own_number)])
    means, squares, numbers = plain_of(stack(rows._call, moments.view(3, channels), "batch_norm")).unbind(1)
    weights = numbers / number
    mean = (weights * means).sum(0)
    var = squares.sum(0) / number + (weights * (means - mean).square()).sum(0)
    return _Statistics(number, mean, var, eps)


@torch.no_grad()
def _update_(plain: dict[str, Tensor | None], statistics: _Statistics, momentum: float) -> None:
    """Update the running statistics."""
    unbiased = statistics.var * (statistics.number / (statistics.number - 1))
    for running, batch in ((plain["running_mean"], statistics.mean), (plain["running_var"], unbiased)):
        if running is not None:
            running.mul_(1 - momentum).add_(batch, alpha=momentum)


def _normalized(rows: GlobalRows, statistics: _Statistics) -> Tensor:
    """Return this rank's rows, centered and scaled."""
    call, local = rows._call, rows._local
    if not local.requires_grad or not torch.is_grad_enabled():
        return _kernel(local, statistics)
    place = Place(call, "batch_norm", line_of_loss())
    later = None if call.is_over else LaterSum(place)
    context = _Context(place, later, rows._counts, statistics)
    awaited: Tensor = _Await.apply(local, context)  # type: ignore[no-untyped-call]
    if later is not None:
        torch_compat.number_node_(awaited, call.waiting.first_node)
    return _Normalize.apply(awaited, context)  # type: ignore[no-any-return, no-untyped-call]


class _Context(NamedTuple):
    """What both nodes of one normalization need in backward.

    Attributes:
        place: Origin of the exchange in backward.
        later: The sums of backward. None if they are exchanged by a separate exchange.
        counts: Rows of each rank.
        statistics: Those of forward.
    """

    place: Place
    later: LaterSum | None
    counts: tuple[int, ...]
    statistics: _Statistics


class _Normalize(torch.autograd.Function):
    """The normalized rows. Backward records this rank's part of the two sums, and returns the gradient of the result."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, context: _Context) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.context = context
        return _kernel(rows, context.statistics)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        later: LaterSum | None = ctx.context.later
        rows = ctx.saved_tensors[0]
        grad = batch_norm_kernels.in_layout_of(rows, grads[0])
        if later is not None and not torch.is_grad_enabled():
            later.note(_sums_of(grad, rows, ctx.context.statistics))
        return grad, None


class _Await(torch.autograd.Function):
    """The rows. Backward turns the gradient of the normalized rows into that of the rows, with the sums over all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, context: _Context) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.context = context
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        context: _Context = ctx.context
        rows, statistics = ctx.saved_tensors[0], context.statistics
        if torch.is_grad_enabled():
            return _differentiable_gradient(rows, grads[0], context), None
        sums = None if context.later is None else context.later.take()
        if sums is None:
            sums = added_now(_sums_of(grads[0], rows, statistics), context.place.backward())
        number, mean, var, eps = statistics
        scale = (var + eps).rsqrt()
        return batch_norm_kernels.input_gradient(grads[0], rows, sums / number, mean, var, scale, eps), None


def _kernel(rows: Tensor, statistics: _Statistics) -> Tensor:
    return batch_norm_kernels.affine(rows, None, None, statistics.mean, statistics.var, statistics.eps)


def _sums_of(grad: Tensor, rows: Tensor, statistics: _Statistics) -> Tensor:
    """Return this rank's sums of grad x^ and of grad, (2, C)."""
    _, mean, var, eps = statistics
    return torch.stack(batch_norm_kernels.local_sums(grad, rows, mean, var, (var + eps).rsqrt(), eps))


def _differentiable_gradient(local: Tensor, grad: Tensor, context: _Context) -> Tensor:
    """Return the gradient of the rows, with a graph for second derivatives. Communication: an exchange for each sum."""
    rows = GlobalRows(local, context.counts, 0, context.place.call)
    dims = [dim for dim in range(rows._ndim) if dim != 1]
    number, _, _, eps = context.statistics
    with torch.enable_grad():
        moments = plain_of(moments_of_ranks(rows, dims, "batch_norm"))
        mean, squares = merged_moments(moments, number)
        statistics = torch.stack([mean.flatten(), squares.flatten() / number])
        shared_mean, shared_var = share(rows._call, statistics, "batch_norm")
        normalized = _scaled(local, shared_mean, shared_var, eps)
        return torch.autograd.grad(normalized, local, grad, create_graph=True)[0]


def _scaled(local: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """Return rows centered and scaled by operators of autograd."""
    shape = [1, -1] + [1] * (local.ndim - 2)
    # backward of a difference would negate a gradient of the size of the rows
    return (local + (-mean).view(shape)) * (var + eps).rsqrt().view(shape)
