"""Computes batch norm over the rows of all ranks: statistics of the group, and their gradient.

Legend: ``W`` ranks, ``C`` channels, ``n`` values per channel on this rank (may differ, may be 0), ``N`` their sum over ranks. With m
and v the mean and the biased variance of a channel over all N values, x^ = (x - m) / sqrt(v + eps), y = w x^ + b:

* The ranks' (n, mean, M2), with M2 the sum of squared deviations, are merged by Chan's formula:
  M2 = sum_r M2_r + n_r (mean_r - m)^2. (A sum of squares would lose the variance if the mean is large.)
* dL/dx = w / sqrt(v + eps) (dy - sum dy / N - x^ sum(dy x^) / N), both sums over all ranks: the derivative of the SUM of all ranks'
  losses. dL/dw and dL/db remain each rank's share. DDP's mean over ranks then divides by W.

The passes over the activations use torch's kernels, on any device. The precision is at least float32.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lightning_ddp_losses.core import batch_norm_kernels
from lightning_ddp_losses.core.batch_norm_kernels import affine, input_gradient, local_moments, local_sums
from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import BackwardExchange, forbid_second_derivative
from lightning_ddp_losses.distributed.messages import Agreement
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import gather_stacked, sum_over_ranks, travels_on_device
from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.layers.forward_plan import NO_OFFER, ForwardPlan, PlannedCall

_HEAD = struct.Struct("<q?16s")  # values per channel, whether the gradient of the input is needed, the digest of a plan
_PENALTY = "Put this layer into evaluation mode for the penalty, or use a norm without batch statistics there (group norm, layer norm)."


class TooFewValuesError(InputError, ValueError):
    """One value per channel over the whole group, which a single process rejects with the same message."""

    page = "F62"


@dataclass(frozen=True)
class Scope:
    """The ranks that normalise together, and the ranks that take part in the handshakes.

    Attributes:
        group: Group that normalises together.
        handshake_group: Group of the handshakes. Its subgroups may normalise separately and still receive each other's errors.
        subgroup_size: Number of ranks in each subgroup of it. If None, it is a single subgroup.
    """

    group: Group = None
    handshake_group: Group = None
    subgroup_size: int | None = None

    @functools.cached_property
    def subgroups(self) -> list[slice]:
        """The subgroups that normalise together, as ranks of ``handshake_group``."""
        world = process_groups.world_size(self.handshake_group)
        step = self.subgroup_size or world
        return [slice(first, first + step) for first in range(0, world, step)]

    @functools.cached_property
    def own_subgroup(self) -> slice:
        """The subgroup that contains this rank."""
        rank = process_groups.rank(self.handshake_group)
        return next(ranks for ranks in self.subgroups if ranks.start <= rank < ranks.stop)


class Call(NamedTuple):
    """One call of one layer, the same on every rank.

    Attributes:
        title: Name of the layer in messages.
        number: Number of the layer's call.
        scope: Ranks that normalise together.
    """

    title: str
    number: int
    scope: Scope

    def __str__(self) -> str:
        return f"{self.title} call {self.number}"


class Statistics(NamedTuple):
    """Statistics of each channel over all ranks, equal on every rank, bit for bit.

    Attributes:
        total: Values per channel, N. A 0-dim tensor if the value is not available on the host.
        mean: (C,).
        var: (C,), biased, for the normalisation.
        unbiased: (C,), for the running average.
        in_backward: Exchange in backward, if any rank needs the gradient of its input.
    """

    total: int | Tensor
    mean: Tensor
    var: Tensor
    unbiased: Tensor
    in_backward: BackwardExchange | None


def gather_statistics(call: Call, x: Tensor, settings: str, plan: ForwardPlan | None = None) -> Statistics:
    """Return the statistics of the concatenated batch.

    Args:
        call: The call of the layer.
        x: (B, C, ...), any floating-point dtype. B and the dimensions after C may differ per rank.
        settings: Text that must be equal on all ranks.
        plan: Plan of the model's batch norms. If None, each call performs a handshake.

    Raises:
        RankMismatchError: on every rank, if channels, dtype, device, settings or the position in the program differ.
        TooFewValuesError: on every rank, for one value per channel over all ranks of a subgroup. In a plan by ``refuse_earlier_calls``.

    Communication: one handshake, or none in a plan. One gather of 2 C + 1 numbers per rank if they do not fit into it
        (``handshake.inline_capacity``), are on an accelerator, or belong to a subgroup.
    """
    # this rank's rows
    scope, channels = call.scope, x.shape[1]
    count = x.numel() // max(1, channels)
    moments = local_moments(x.detach(), count)
    has_gradients = torch.is_grad_enabled()
    needs_gradient = x.requires_grad and has_gradients
    must_match = _must_match(channels, x.dtype, x.device.type, has_gradients, settings)

    # the next call of a plan does not need a handshake
    planned, offer = None, NO_OFFER
    if plan is not None and travels_on_device(moments, scope.group):
        size, like = (1, channels, *[1] * (x.ndim - 2)), (moments.dtype, moments.device)
        planned = PlannedCall(call.title, str(must_match), size, like, needs_gradient)
        agreed = plan.follow(planned)
        if agreed is not None:
            table, known = _gather_moments(moments, count, scope)
            plan.count(planned, known)
            exchange = BackwardExchange(str(call), scope.handshake_group) if agreed.in_backward else None
            return _merge_moments(known, table, x, exchange)
        refuse_earlier_calls(plan, scope)
        offer = plan.offer(planned, count, scope.group, scope.handshake_group)

    # handshake: counts, need of a gradient, and the moments themselves if they may be inline
    payload = _HEAD.pack(count, needs_gradient, offer)
    # a copy from an accelerator would wait for it. Moments of a subgroup are not sent to all ranks
    is_inline = x.device.type == "cpu" and scope.subgroup_size is None
    if is_inline:
        payload += moments.numpy().tobytes()
    operation = str(call)
    payloads = handshake.all_gather(Agreement(operation, must_match), {}, payload, group=scope.handshake_group)
    counts, all_need, offers = zip(*map(_HEAD.unpack_from, payloads), strict=True)
    in_backward = any(all_need)
    if planned is not None and plan is not None:
        plan.met(planned._replace(in_backward=in_backward), set(offers))
    for ranks in scope.subgroups:
        if sum(counts[ranks]) == 1:
            _refuse_one_value(operation, (1, channels, *[1] * (x.ndim - 2)), counts)

    # moments of each rank, merged
    if is_inline:
        table = torch.frombuffer(bytearray(b"".join(sent[_HEAD.size :] for sent in payloads)), dtype=moments.dtype)
    else:
        table = gather_stacked(moments, scope.group)
    exchange = BackwardExchange(operation, scope.handshake_group) if in_backward else None
    return _merge_moments(counts[scope.own_subgroup], table, x, exchange)


@functools.lru_cache(maxsize=256)
def _must_match(
    channels: int, dtype: torch.dtype, device_type: str, has_gradients: bool, settings: str
) -> dict[str, object]:
    """Return the values that must be equal on all ranks, by name, cached for all calls of the same kind."""
    name = str(dtype).removeprefix("torch.")
    return {"channels": channels, "dtype": f"{name} {device_type}", "gradients": has_gradients, "settings": settings}


def refuse_earlier_calls(plan: ForwardPlan, scope: Scope, *, of_all: bool = False) -> None:
    """Reject earlier calls in a plan with one value per channel over all ranks, as soon as their counts have reached the host.

    Args:
        plan: The plan.
        scope: Ranks that normalise together.
        of_all: Whether to also check the last plans, for which the host may have to wait.

    Raises:
        TooFewValuesError: on every rank of a subgroup.
    """
    for call, counts in plan.counts(of_all=of_all):
        if sum(counts) == 1:
            # other subgroups do not have these counts
            is_known = scope.subgroup_size is None
            _refuse_one_value(f"an earlier call of {call.title}", call.size, counts, collective=is_known)


def _gather_moments(moments: Tensor, count: int, scope: Scope) -> tuple[Tensor, Tensor]:
    """Return mean and M2 of each rank, (W, 2 C), and their numbers of values, (W,), which stay on the device."""
    everyone = gather_stacked(torch.cat([moments, moments.new_full((1,), count)]), scope.group)
    return everyone[:, :-1], everyone[:, -1]


def _refuse_one_value(call: str, size: tuple[int, ...], counts: Sequence[int], *, collective: bool = True) -> NoReturn:
    """Reject a batch with one value per channel over all ranks, with the message of a single process.

    Args:
        call: Name of the call.
        size: Size of the value.
        counts: Values per channel of each rank.
        collective: Whether every rank has these counts.
    """
    raise TooFewValuesError(
        f"Expected more than 1 value per channel when training, got input size {torch.Size(size)} over all ranks, in {call}",
        ranks=[f"{n} value{'s' * (n != 1)} per channel" for n in counts],
        fix="Give the group two rows at least (drop_last=True), or put the layer into evaluation mode.",
        collective=collective,
    )


def _merge_moments(
    counts: Sequence[int] | Tensor, table: Tensor, x: Tensor, in_backward: BackwardExchange | None
) -> Statistics:
    """Apply Chan's formula to all ranks together, in float64, on the host for a device without float64."""
    dtype = table.dtype
    table = table.cpu() if table.device.type in batch_norm_kernels.LIMITED_DEVICES else table
    means, squares = table.reshape(len(counts), 2, -1).double().unbind(1)
    # (W, 1), or one number for all ranks. A non-blocking transfer does not wait for an accelerator
    rows: Any = counts[0]
    if isinstance(counts, Tensor):
        rows = counts.to(table.device).double()[:, None]
    elif len(set(counts)) > 1:
        rows = torch.tensor(counts, dtype=torch.float64)[:, None].to(table.device, non_blocking=True)
    total: Any = sum(counts)
    divisor = _at_least_one(total)
    mean = (rows * means).sum(0) / divisor
    squared = (squares + rows * (means - mean).square()).sum(0)
    merged = torch.stack([mean, squared / divisor, squared / _at_least_one(total - 1)]).to(dtype)
    mean, biased, unbiased = merged.to(x.device).unbind()
    return Statistics(total, mean, biased, unbiased, in_backward)


def _at_least_one(total: Any) -> Any:
    return total.clamp(min=1) if isinstance(total, Tensor) else max(1, total)


def normalise(
    call: Call, x: Tensor, statistics: Statistics, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Return the rows normalised: weight (x - mean) / sqrt(var + eps) + bias, in the dtype and memory format of ``x``.

    Gradient: the gradient of the sum of all ranks' losses. The parameters receive this rank's share.

    Communication: none. In backward one handshake with 2 C numbers (a separate sum if they do not fit), if any rank needs the
        gradient of its input. On an accelerator no handshake, if the ranks have agreed on this call before backward.
    """
    if statistics.in_backward is not None and torch.is_grad_enabled() and not x.requires_grad:
        x = x.detach().requires_grad_()  # other ranks need this rank's share of the sums
    y: Tensor = _NormaliseFunction.apply(x, weight, bias, statistics, eps, call)  # type: ignore[no-untyped-call]
    return y


class _NormaliseFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Statistics, eps: float, call: Call
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.statistics, ctx.eps, ctx.call = statistics, eps, call
        ctx.bias_dtype = None if bias is None else bias.dtype
        # whether the ranks have agreed that this call takes part in the next backward
        ctx.is_agreed = False
        if statistics.in_backward is not None:
            ctx.synced_call = str(call)
        return affine(x, weight, bias, statistics.mean, statistics.var, eps)

    @staticmethod
    @eager_recursive
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        with torch.no_grad():
            found = _gradients(ctx, grad, x, weight)
        if torch.is_grad_enabled():  # create_graph=True: the result depends on these tensors, and on the peers
            found = forbid_second_derivative(found, (grad, x, weight), str(ctx.call), _PENALTY)
        return (*found, None, None, None)


def _gradients(ctx: Any, grad: Tensor, x: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of the input, the weight and the bias."""
    statistics, wide = ctx.statistics, ctx.statistics.mean.dtype
    grad = batch_norm_kernels.in_layout_of(x, grad)

    # weight and bias: this rank's share
    inverse_std = (statistics.var + ctx.eps).rsqrt()
    own_dyx, own_dy = local_sums(grad, x, statistics.mean, statistics.var, inverse_std, ctx.eps)
    grad_weight = grad_bias = None
    if weight is not None and ctx.needs_input_grad[1]:
        grad_weight = own_dyx.to(weight.dtype)
    if ctx.needs_input_grad[2]:
        grad_bias = own_dy.to(ctx.bias_dtype)
    if statistics.in_backward is None:
        return None, grad_weight, grad_bias

    # input: the sums of all ranks. A rank takes part in the exchange even if it does not need the gradient
    own_sums, scope = torch.cat([own_dyx, own_dy]), ctx.call.scope
    is_agreed, ctx.is_agreed = ctx.is_agreed, False
    if is_agreed and travels_on_device(own_sums, scope.group):
        sums = sum_over_ranks(own_sums, scope.group)  # the host does not wait for any rank
    elif scope.subgroup_size is None:
        sums = statistics.in_backward.all_reduce(own_sums)
    else:
        statistics.in_backward.open()
        sums = sum_over_ranks(own_sums, scope.group)
    if not ctx.needs_input_grad[0]:
        return None, grad_weight, grad_bias
    scale = inverse_std if weight is None else inverse_std * weight.to(wide)
    means = sums.view(2, -1) / _at_least_one(statistics.total)
    grad_input = input_gradient(grad, x, means, statistics.mean, statistics.var, scale, ctx.eps)
    return grad_input, grad_weight, grad_bias
