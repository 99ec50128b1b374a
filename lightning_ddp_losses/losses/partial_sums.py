"""From each rank's partial sums to the global loss: numerator, divisor, and the factor W. The only code here that names W as a factor.

A sub-loss is a sum of elements over a divisor: ``L = S / N`` with ``S = sum_r S_r`` and ``N = sum_r n_r``. Each rank
back-propagates ``W * S_r / N``, so that DDP's mean over ranks gives the gradient of ``L``, and reports ``L``. A term that every rank
computes in full (a regulariser of the replicated weight) back-propagates unchanged.

1. Each rank has a ``PartialSum`` of each sub-loss: a 0-dim tensor and its divisor, which is a number if the host has counted it.
2. ``SumExchange.gather`` makes one table of the numbers of all ranks. It stays on an accelerator, and no host waits for it. On the CPU it
   travels in the handshake.
3. ``GlobalSums.sub_losses`` makes values and factors of that table: Python's numbers, or tensors that stay on the accelerator.
4. ``global_loss`` joins the value with its gradient.

``global_mean`` is the same for any hand-written sum over any count. It replaces these hand-written means of detection and language models:
``num_boxes = all_reduce(n) / world_size``, ``num_items_in_batch``, the mean over the tokens of a rank. A token mean::

    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=-100, reduction="sum")
    loss = global_mean(total, (tokens != -100).sum())

Boxes. A rank without boxes passes sums that went through the model, and 0. Two means, one exchange::

    corners = (boxes - targets).abs().sum()
    overlaps = (1 - giou(boxes, targets)).sum()
    corners, overlaps = global_mean(torch.stack([corners, overlaps]), len(targets))
    loss = 5 * corners + 2 * overlaps

A weighted error. The divisor is any number without a gradient::

    loss = global_mean((weights * error.square()).sum(), weights.sum(), name="error")

Legend: ``W`` ranks, ``s`` sub-losses of a loss.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_ddp_losses.core import precision
from lightning_ddp_losses.core.host_copy import HostNumbers
from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives
from lightning_ddp_losses.distributed.collectives import forbid_second_derivative, once_differentiable_strict
from lightning_ddp_losses.distributed.global_values import (
    UpstreamGradWatch,
    chosen_reduction,
    current_window,
    micro_batch_to_match,
    remember_global_value,
)
from lightning_ddp_losses.distributed.messages import Agreement, with_name
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import travels_on_device
from lightning_ddp_losses.distributed.window_parts import WindowPart, note_parts
from lightning_ddp_losses.errors import InputError

SUM_BYTES = 6 * torch.float64.itemsize
"""The most that one sub-loss takes in a handshake: its sum, its divisor and its counts."""

Gradients = Sequence[Tensor | None]


# ---------------------------------------------------------------------- numbers of one rank


class ElementCounts(NamedTuple):
    """Numbers of elements of a sub-loss. Only reducers that collect statistics use them.

    Attributes:
        elements: Elements that the reducer got.
        passed: Elements that count (a divisor).
        above_low: Elements that pass a lower limit.
        pairs: Elements that there were before pairs were averaged per anchor.
    """

    elements: Any = 0.0
    passed: Any = 0.0
    above_low: Any = 0.0
    pairs: Any = 0.0


NO_COUNTS = ElementCounts()
ONE_ELEMENT = ElementCounts(elements=1, pairs=1)  # already reduced: its reducer does not need limits or a divisor


@dataclass(frozen=True)
class PartialSum:
    """This rank's part of one sub-loss.

    Attributes:
        total: S_r, 0-dim, with its graph, or a number of the host without one. The sub-loss itself if it is ``full``.
        divisor: n_r, a number if the host has counted it, otherwise 0-dim. None if the sum is not divided.
        full: Every rank computes the same complete value. It is neither divided nor summed.
        name: Name of the sub-loss.
        counts: Numbers that pytorch-metric-learning records.
    """

    total: Any
    divisor: float | Tensor | None = None
    full: bool = False
    name: str = "loss"
    counts: ElementCounts = NO_COUNTS

    @property
    def may_count_nothing(self) -> bool:
        """Whether the divisor may be 0. True if the host cannot read it without waiting."""
        if self.full or self.divisor is None:
            return False
        if isinstance(self.divisor, Tensor) and not self.divisor.is_cpu:
            return True
        return not self.divisor

    def share_of(self, world: int) -> Any:
        """Return this rank's part of the divisor in such a world. A sum is divided by 1, of equal shares."""
        if self.full:
            return 1.0
        return 1.0 / world if self.divisor is None else self.divisor


def sum_of(parts: Sequence[PartialSum]) -> PartialSum:
    """Return one sub-loss, which is not ``full``, from its parts."""
    total = _sum_of([part.total for part in parts])
    divisors = [part.divisor for part in parts if part.divisor is not None]
    divisor = sum(divisors) if divisors else None
    columns = zip(*(part.counts for part in parts), strict=True)
    return PartialSum(total, divisor, name=parts[0].name, counts=ElementCounts(*map(sum, columns)))


def _sum_of(numbers: Any) -> Any:
    """Return the sum of numbers of the host, or of 0-dim tensors in a list or in one tensor."""
    if len(numbers) == 1:
        return numbers[0]
    if isinstance(numbers, list) and isinstance(numbers[0], Tensor):
        numbers = torch.stack(numbers)
    return numbers.sum() if isinstance(numbers, Tensor) else sum(numbers)


def host_number(number: float) -> Tensor:
    """Return a number of the host as a tensor, in float64."""
    return torch.tensor(number, dtype=torch.float64)


def wide_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a device that lacks it."""
    return torch.float32 if device.type == "mps" else torch.float64


def stack_numbers(numbers: Sequence[float | Tensor], like: Tensor) -> Tensor:
    """Return numbers, (n,), on the device of ``like`` in its widest dtype. Numbers on that device are not moved."""
    wide, parts = wide_float(like.device), []
    for number in numbers:
        if isinstance(number, Tensor) and number.device == like.device:
            parts.append(number.detach().to(wide))
        else:
            parts.append(like.new_full((), float(number), dtype=wide))
    return torch.stack(parts)


def _numbers_of(partials: Sequence[PartialSum], world: int, *, with_counts: bool) -> list[float | Tensor]:
    """Return total and divisor of each sub-loss, followed by its counts if they are wanted."""
    numbers: list[float | Tensor] = []
    for each in partials:
        numbers += (each.total, each.share_of(world))
        if with_counts:
            numbers += each.counts
    return numbers


def _read_numbers(numbers: Sequence[float | Tensor], like: Tensor, present: Tensor | None) -> list[float]:
    """Return numbers on the host, times ``present``. An accelerator is waited for once."""
    if like.is_cpu and present is None:
        return [number.item() if isinstance(number, Tensor) else number for number in numbers]
    table = stack_numbers(numbers, like)
    if present is not None:
        table.mul_(present)
    return table.tolist()


# ---------------------------------------------------------------------- numbers of all ranks


@dataclass(frozen=True)
class GlobalSums:
    """The sub-losses of one call over all ranks.

    Attributes:
        partials: This rank's part.
        table: (W, s, 2) totals and divisors, or (W, s, 6) with counts.
        divisors: (s,), divisors over all ranks that an accumulation window needs on the host. If None, they are read from the table.
        own_divisors: (s,), this rank's parts of them. None outside of a window, and if every rank has all rows.
        may_be_zero: Totals and divisors may have been multiplied by 0.
    """

    partials: Sequence[PartialSum]
    table: Tensor
    divisors: tuple[float, ...] | None = None
    own_divisors: tuple[float, ...] | None = None
    may_be_zero: bool = False

    def reduce(self, empty: float = 0.0) -> tuple[Tensor, list[Tensor]]:
        """Return the global loss, and one factor per sub-loss: each rank back-propagates its sum times that.

        Args:
            empty: Value of an empty mean on all ranks: 0 in pytorch-metric-learning, not a number in torch.
        """
        values, factors = self.sub_losses(empty)
        value = _sum_of(values)
        if isinstance(value, Tensor):
            return value, factors
        value, *factors = torch.tensor([value, *factors], dtype=torch.float64).unbind()
        return value, factors

    def sub_losses(self, empty: float = 0.0) -> tuple[Any, list[Any]]:
        """Return the value of each sub-loss and its factor, as ``reduce`` does.

        On the host both are lists of numbers. On an accelerator, which is not waited for, values are one tensor, (s,), and factors
        0-dim tensors.
        """
        if not self.table.is_cpu:
            return self._sub_losses_on_device(empty)
        values, factors = [], []
        for of_ranks in zip(*self.table.tolist(), strict=True):
            total = sum([numbers[0] for numbers in of_ranks])
            divisor = sum([numbers[1] for numbers in of_ranks])
            if divisor:
                values.append(total / divisor)
                factors.append(len(of_ranks) / divisor)
            else:
                values.append(empty or total * 0.0)  # NaN for a NaN
                factors.append(0.0)
        return values, factors

    def _sub_losses_on_device(self, empty: float) -> tuple[Tensor, list[Tensor]]:
        # use means over ranks: their quotient equals the quotient of the sums, and W over the sum is 1 over the mean
        means = self.table.mean(0) if len(self.table) > 1 else self.table[0]
        totals, divisors = means[:, 0], means[:, 1]
        if not self.may_be_zero and not any(each.may_count_nothing for each in self.partials):
            values = totals / divisors
        else:
            is_empty = divisors == 0
            divisors = divisors.masked_fill(is_empty, torch.inf)  # a share of it is 0, or NaN for a NaN
            values = totals / divisors
            if empty:
                values = values.masked_fill(is_empty, empty)
        return values, list(divisors.reciprocal().unbind())

    def window_parts(self) -> list[WindowPart]:
        """Return how each sub-loss counts in an accumulation window."""
        parts = []
        for index, each in enumerate(self.partials):
            if each.full:
                parts.append(WindowPart("once"))
            elif each.divisor is None:
                parts.append(WindowPart("sum"))
            else:
                own = None if self.own_divisors is None else self.own_divisors[index]
                parts.append(WindowPart("mean", self._divisor(index), own))
        return parts

    def _divisor(self, index: int) -> float | Tensor:
        """Return the divisor of a sub-loss over all ranks. Outside a window it may be on an accelerator."""
        if self.divisors is not None:
            return self.divisors[index]
        divisor = self.table[:, index, 1].sum() if len(self.table) > 1 else self.table[0, index, 1]
        return divisor.item() if divisor.device.type == "cpu" else divisor

    def counts(self) -> list[ElementCounts]:
        """Return how many elements each sub-loss has over all ranks."""
        found = []
        for index, each in enumerate(self.partials):
            # all ranks compute a full one. Its elements count once
            by_rank = self.table[:1, index, 2:] if each.full else self.table[:, index, 2:]
            found.append(ElementCounts(*by_rank.sum(0).tolist()))
        return found


@dataclass(frozen=True)
class SumExchange:
    """How the ranks exchange their sums in one call.

    Attributes:
        agreement: The loss, and values that must be equal on all ranks.
        must_match: Further such values, of this call.
        group: Process group.
    """

    agreement: Agreement
    must_match: Mapping[str, object]
    group: Group

    @property
    def title(self) -> str:
        """Name of the loss in messages."""
        return self.agreement.operation

    def gather(
        self,
        partials: Sequence[PartialSum],
        like: Tensor,
        *,
        with_counts: bool = False,
        present: Tensor | None = None,
        row_stats: Tensor | None = None,
        rows_by_rank: Sequence[int] = (),
        handshake_bytes: int | None = None,
    ) -> tuple[GlobalSums, Tensor | None]:
        """Return the sums of all ranks, and their statistics of rows.

        Args:
            partials: This rank's.
            like: Rows of the call. The numbers stay on their device if ranks can exchange them there.
            with_counts: Exchange the counts too, between the hosts.
            present: 0-dim, 0 if the loss is a zero, otherwise 1. None means 1.
            row_stats: (B, k), numbers of this rank's rows. None if there are none.
            rows_by_rank: B of each rank.
            handshake_bytes: Size of the handshake that all ranks have agreed on. If None, the channel's size.

        Communication: one handshake. On an accelerator a gather of the sums, and one of the statistics.
        """
        world = process_groups.world_size(self.group)
        numbers = _numbers_of(partials, world, with_counts=with_counts)
        if with_counts or not travels_on_device(like, self.group):
            own = array("d", _read_numbers(numbers, like, present)).tobytes()
            own_stats = b"" if row_stats is None else raw_collectives.host_bytes(row_stats.cpu())
            payloads = self._handshake(own + own_stats, handshake_bytes)
            if row_stats is not None:
                sent_stats = [sent[len(own) :] for sent in payloads]
                payloads = [sent[: len(own)] for sent in payloads]
                shape, device = (sum(rows_by_rank), row_stats.shape[1]), row_stats.device
                row_stats = _from_bytes(sent_stats, row_stats.dtype).view(shape).to(device)
            table = _from_bytes(payloads, torch.float64).view(world, len(partials), -1)
            own_divisors = None
            if current_window() is not None:
                own_divisors = tuple(table[process_groups.rank(self.group), :, 1].tolist())
            return GlobalSums(partials, table, own_divisors=own_divisors), row_stats
        table = stack_numbers(numbers, like).view(len(partials), -1)
        if present is not None:
            table.mul_(present)
        divisors = own_divisors = None
        if current_window() is None:
            self._handshake(b"", handshake_bytes)
        else:
            # the host divides the micro-batches of a window, and waits only for divisors that are still on the device
            shares = array("d", HostNumbers(numbers[1::2]).read())
            payloads = self._handshake(shares.tobytes(), handshake_bytes)
            by_rank = _from_bytes(payloads, torch.float64).view(-1, len(shares))
            divisors = tuple(by_rank.sum(0).tolist())
            own_divisors = tuple(shares)
        if row_stats is not None and world > 1:
            row_stats = raw_collectives.all_gather_rows(row_stats, list(rows_by_rank), self.group)
        everyone = raw_collectives.gather_stacked(table, self.group)
        return GlobalSums(partials, everyone, divisors, own_divisors, may_be_zero=present is not None), row_stats

    def _handshake(self, payload: bytes, handshake_bytes: int | None) -> list[bytes]:
        return handshake.all_gather(
            self.agreement, self.must_match, payload, handshake_bytes=handshake_bytes, group=self.group
        )


def _from_bytes(payloads: Sequence[bytes], dtype: torch.dtype) -> Tensor:
    """Return the numbers in all ranks' payloads, 1-D on the host."""
    data = bytearray().join(payloads)
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def sums_of_all_rows(partials: Sequence[PartialSum], like: Tensor) -> GlobalSums:
    """Return the sums that every rank computes from all rows, as if there were one rank."""
    numbers = _numbers_of(partials, 1, with_counts=False)
    table, divisors = stack_numbers(numbers, like).view(1, len(partials), -1), None
    if current_window() is not None:
        divisors = tuple(HostNumbers(numbers[1::2]).read())
    return GlobalSums(partials, table, divisors)


# ---------------------------------------------------------------------- the global loss


def global_loss(
    sums: GlobalSums, *, empty: float = 0.0, window_source: tuple[object, str] | None = None, group: Group = None
) -> Tensor:
    """Return the global loss: its value on every rank, W times this rank's share of its gradient.

    Args:
        sums: The sums of all ranks.
        empty: Value of an empty mean, as in ``GlobalSums.reduce``.
        window_source: The loss and its title, if an accumulation window may bring its micro-batches together.
        group: Process group of the sums, for the window.

    Returns:
        0-dim, the same number on every rank.
    """
    values, factors = sums.sub_losses(empty)
    if isinstance(values, Tensor):
        dtype = sums.partials[0].total.dtype
        factors = [factor.to(dtype) for factor in factors]
    totals = [each.total for each in sums.partials]
    # sums of one rank hold all rows, which an exchange has gathered if there are more ranks
    once = "GlobalBatchLoss" if sums.table.shape[0] > 1 else None
    window = current_window()
    if window_source is None or window is None:
        result = value_with_grad(_sum_of(values), *totals, factors=factors, once=once)
        if window_source is not None:
            note_parts(result, sums.window_parts)
        return result
    # an accumulation window needs each sub-loss as a part of the sub-loss over all micro-batches
    call = window.enter(*window_source, sums.window_parts(), process_groups.members(group))
    marked = []
    for index, (each, total, factor) in enumerate(zip(values, totals, factors, strict=True)):
        marked.append(call.mark(value_with_grad(each, total, factors=[factor], once=once), index))
    return marked[0] if len(marked) == 1 else torch.stack(marked).sum()


def global_quotient(
    total: Tensor, divisor: float, handshake: Callable[[bytes], list[bytes]], *, group: Group
) -> Tensor:
    """Return the sum of all ranks' totals over a divisor that all ranks have: its value on every rank, W times this share's gradient.

    Args:
        total: This rank's, 0-dim.
        divisor: The same on all ranks.
        handshake: Exchanges payloads.
        group: Process group.

    Communication: one handshake, or one gather on the device. The ranks must have agreed on the call.
    """
    share = for_mean_over_ranks(total / divisor, group)
    own = total.detach().to(wide_float(total.device))
    if travels_on_device(total, group):
        if process_groups.world_size(group) == 1:
            return share
        totals = raw_collectives.gather_stacked(own, group)
    else:
        own = own.cpu()
        totals = _from_bytes(handshake(raw_collectives.host_bytes(own)), own.dtype)
    return value_with_grad(totals.sum() / divisor, share)


def for_mean_over_ranks(share: Tensor, group: Group) -> Tensor:
    """Scale this rank's part of a sum over ranks such that DDP's mean over ranks leaves the sum."""
    world = process_groups.world_size(group)
    return share if world == 1 else share * world


def value_with_grad(
    value: float | Tensor,
    *inputs: Tensor | None,
    factors: Sequence[float | Tensor] | None = None,
    vjp: Callable[[Sequence[bool]], Gradients] | None = None,
    once: str | None = None,
) -> Tensor:
    """Return a number with a separately computed gradient.

    Args:
        value: The number, on the host or 0-dim. With one input it may be a tensor of its shape.
        inputs: Tensors that it depends on. The first one sets dtype and device.
        factors: The derivative of the number by each of the inputs. None means one input with derivative 1.
        vjp: Computes these derivatives in backward instead: which inputs need a gradient -> the derivative by each of them.
        once: Name in the error of a second derivative, which would be W times one process's. None if it is exact.

    Returns:
        A tensor like ``value``.
    """
    return _ValueWithGrad.apply(value, factors, vjp, once, *inputs)  # type: ignore[no-untyped-call, no-any-return]


_FIXED = 4  # arguments of _ValueWithGrad before the inputs


class _ValueWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        value: float | Tensor,
        factors: Sequence[float | Tensor] | None,
        vjp: Callable[[Sequence[bool]], Gradients] | None,
        once: str | None,
        *inputs: Tensor | None,
    ) -> Tensor:
        # factors are not saved as tensors: a checkpointed loss would need a second exchange to recompute them
        ctx.factors, ctx.vjp, ctx.once = factors, vjp, once
        ctx.depends_on = () if once is None else inputs
        if vjp is not None:
            ctx.save_for_backward(*inputs)
        like = inputs[0]
        assert like is not None
        if isinstance(value, Tensor):
            if value.device == like.device:
                return value.to(like.dtype, copy=True)
            value = value.item()
        return like.new_full((), value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.vjp is not None:
            return _scaled_vjp(ctx, grad)
        found = (grad,) if ctx.factors is None else tuple(grad * factor for factor in ctx.factors)
        if ctx.once is not None and torch.is_grad_enabled():
            found = forbid_second_derivative(found, (grad, *ctx.depends_on), ctx.once)
        return *[None] * _FIXED, *found


@once_differentiable_strict("GlobalBatchLoss")
def _scaled_vjp(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    derivatives = ctx.vjp(ctx.needs_input_grad[_FIXED:])
    scaled = [None if derivative is None else derivative * grad for derivative in derivatives]
    return *[None] * _FIXED, *scaled


# ---------------------------------------------------------------------- any hand-written sum


@eager_recursive
def global_mean(
    total: Tensor,
    count: float | Tensor,
    *,
    empty: float = 0.0,
    name: str | None = None,
    group: Group = None,
    mesh: DeviceMesh | None = None,
    copies: DeviceMesh | None = None,
    reduces: Literal["auto", "mean", "sum"] | float = "auto",
    module: nn.Module | None = None,
) -> Tensor:
    """Return the mean over all ranks of sums that each rank has computed.

    Equivalent to: in one process, ``total / count`` of the rows of all ranks (and, in an accumulation window, of all micro-batches).

    Args:
        total: 0-dim, or (k,) for k means in one call: this rank's sum, floating, with its graph. Halves are added in float32. A rank
            without rows passes a sum that went through the model (``model(rows).sum() * 0``), so that DDP's hooks run on it.
        count: This rank's part of the divisor: a number or 0-dim tensor, or one of as many elements as
            ``total``, without gradient. 0 for a rank without rows. Whole numbers are exact up to 2**53.
        empty: Value of a mean that is empty on all ranks. Its gradient is zero.
        name: Name in messages, and of the term in an accumulation window. Without a name, the calling line is used. Ranks
            that make several calls in a different order get an error if the calls have names. Without names they cannot be told apart.
        group: Process group. None is the world.
        mesh: Dimensions of a device mesh over which rows differ, in place of ``group``: ``mesh["dp", "cp"]``.
        copies: Dimensions along which ranks hold the same rows, which count once: ``mesh["tp"]``.
        reduces: Reduction of the gradients. ``"mean"`` or ``"sum"`` over the ranks of ``mesh``, or the divisor of that sum
            (``set_gradient_divide_factor``). ``"auto"``: the strategy's model's, or else the accumulation window's, or else ``module``'s.
            Without these a mean, and an error if some module of this process is reduced in another way.
        module: The model, in a loop without a strategy and without a window: a DDP, or one that ``fully_shard`` has divided.

    Returns:
        The mean, of the shape of ``total``, equal on every rank. Log it without ``sync_dist``.

    Gradient: after the reduction of the model's gradients, the gradient of ``sum(total) / sum(count)``. Multiply the value by the same
        factor on every rank (one that differs is an error before gradients are reduced, or at the next call). A second derivative over
        several ranks is an error.

    Communication: one handshake, and on an accelerator a gather for which the host does not wait (it waits for a ``count`` there). None
        in backward. ``copies`` take another handshake, and the host waits for ``total``. A mesh over several dimensions, but not the
        whole world, creates its process groups at first use, in which every rank of the world must take part.

    Raises:
        InputError: on every rank, for counts that are negative, not finite, or have a gradient, for shapes that differ, for copies with
            different numbers, and if the sums of only some ranks have a graph.
        ConfigurationError: on every rank, for a reduction that cannot be read or is not the model's, and for a mesh of other ranks.
        RankMismatchError: on every rank, if the number of means, the name or ``empty`` differs.

    Example:
        >>> import torch
        >>> from lightning_ddp_losses import global_mean
        >>> errors = torch.tensor([1.0, 3.0], requires_grad=True)
        >>> global_mean(errors.sum(), len(errors)).item()
        2.0
    """
    title = with_name("global_mean", name)
    # 1. the sums of this rank
    try:
        if mesh is not None or copies is not None:  # before the exchange: an error is sent to the ranks of the group
            group = process_groups.group_of_mesh(title, mesh, copies, group)
        counts = _checked_counts(title, total, count)
        has_graph = total.requires_grad and torch.is_grad_enabled()
        reduction = chosen_reduction(reduces, module, group, exact_ranks=mesh is not None, has_graph=has_graph)
        scale = 1.0 if reduction is None else reduction.scale
        dtype = precision.compute_dtype([total])
        totals = total.to(dtype)
        on_device = travels_on_device(totals, group) and len(counts) > 0
        numbers = counts if on_device else [*counts, *totals.detach().view(-1).tolist()]
    except Exception as error:
        handshake.raise_on_all_ranks(error, title, group=group)
    if copies is not None:
        _refuse_other_copies(title, copies, totals, counts, group)
    # 2. the sums of all ranks
    watch = UpstreamGradWatch.of(title, group)
    agreement, form = _plan_of_means(
        title, total.shape, dtype, total.device.type, torch.is_grad_enabled(), len(numbers)
    )
    must_match = {"empty": empty, "coefficient of the last backward": watch.take(), **micro_batch_to_match()}
    if scale != 1.0:
        must_match["gradients end as"] = reduction
    payloads = handshake.all_gather(agreement, must_match, form.pack(has_graph, *numbers), group=group)
    flags, *columns = zip(*map(form.unpack, payloads), strict=True)
    _refuse_partial_graph(title, flags)
    # 3. the means, and the factor of this rank's sum in their gradients
    sums = list(map(sum, columns))
    global_counts = sums[: len(counts)]
    known_totals = sums[len(counts) :]
    global_totals: Sequence[Any] = known_totals
    if on_device:
        wide = totals.detach().view(-1).to(wide_float(totals.device))
        global_totals = raw_collectives.gather_stacked(wide, group).sum(0).unbind()
    world = len(payloads)
    values = [s / n if n else empty for s, n in zip(global_totals, global_counts, strict=True)]
    factors = [world / n if n else 0.0 for n in global_counts]
    value = _as_shape_of(totals, values)
    # an accumulation window needs them as parts of all its micro-batches
    window, call = current_window(), None
    parts = functools.partial(_window_parts, global_counts, counts, known_totals)
    if window is not None and has_graph:
        call = window.enter(name or "", title, parts(), process_groups.members(group))
        if call.values is not None:
            value = _as_shape_of(totals, call.values)
    # 4. the numbers, with W times this rank's part of their gradients
    factor = _as_shape_of(totals, factors)
    mean = value_with_grad(value, totals, factors=[factor], once=title if world > 1 else None)
    note_parts(mean, parts)
    if call is not None:
        mean = call.mark(mean)
    remember_global_value(mean)
    return watch.watch(mean, group=group, scale=scale)  # type: ignore[no-any-return]


def _as_shape_of(totals: Tensor, numbers: Sequence[float | Tensor]) -> Any:
    """Return numbers as a tensor like ``totals``, or a single number unchanged."""
    if totals.ndim == 0:
        return numbers[0]
    if any(isinstance(number, Tensor) for number in numbers):
        return stack_numbers(numbers, totals).to(totals.dtype)
    return totals.new_tensor(numbers)


@functools.lru_cache(maxsize=32)
def _plan_of_means(
    title: str, shape: torch.Size, dtype: torch.dtype, device_type: str, has_gradients: bool, numbers: int
) -> tuple[Agreement, struct.Struct]:
    """Return what the ranks agree on in all means of one shape, next to the values of a call, and the form of what they send."""
    gradients = "on" if has_gradients else "off"
    agreement = Agreement(title, {"total": f"{tuple(shape)} {dtype} {device_type}", "gradients": gradients})
    return agreement, struct.Struct(f"<?{numbers}d")


def _window_parts(counts: Sequence[float], own_counts: Sequence[float], totals: Sequence[float]) -> list[WindowPart]:
    """Return how each mean counts in an accumulation window. On an accelerator the totals are not read."""
    columns = itertools.zip_longest(counts, own_counts, totals)
    return [WindowPart("mean", count, own, total) for count, own, total in columns]


def _refuse_other_copies(title: str, copies: DeviceMesh, totals: Tensor, counts: Sequence[float], group: Group) -> None:
    """Refuse ranks that should hold the same rows and do not. Communication: one handshake among them."""
    if copies.size() == 1:
        return
    own = [*totals.detach().reshape(-1).tolist(), *counts]
    form = struct.Struct(f"<{len(own)}d")
    among_copies = process_groups.group_of_mesh(title, copies)
    payloads = handshake.all_gather(f"copies of {title}", {"numbers": len(own)}, form.pack(*own), group=among_copies)
    of_ranks = [form.unpack(payload) for payload in payloads]
    eps = torch.finfo(totals.dtype).eps
    for of_rank in of_ranks:
        if _are_equal_but_for_rounding(own, of_rank, totals.numel(), eps):
            continue
        error = InputError(
            f"{title}: copies",
            expected="the same rows, so the same total and count",
            got="; ".join(map(str, of_ranks)),
            fix="Name in copies= only the dimensions of the mesh whose ranks hold the same rows; those whose rows differ go into mesh=.",
        )
        handshake.raise_on_all_ranks(error, title, group=group)


def _are_equal_but_for_rounding(own: Sequence[float], other: Sequence[float], num_totals: int, eps: float) -> bool:
    """Return whether two ranks have the same totals and counts. Terms that cancel leave a total that is rounding only, and NaN is NaN."""
    most_rows = max(own[num_totals:], default=0.0)
    for place, (a, b) in enumerate(zip(own, other, strict=True)):
        if math.isnan(a) and math.isnan(b):
            continue
        allowed = eps * most_rows if place < num_totals else 0.0
        if not math.isclose(a, b, rel_tol=64 * eps, abs_tol=allowed):
            return False
    return True


def _checked_counts(title: str, total: Any, count: Any) -> list[float]:
    """Return the counts of this rank, one per mean.

    Raises:
        InputError: for sums and counts that do not go together.
    """
    if not isinstance(total, Tensor) or not total.is_floating_point() or total.ndim > 1:
        got = f"{tuple(total.shape)} {total.dtype}" if isinstance(total, Tensor) else repr(total)
        raise InputError(f"{title}: total", expected="a floating tensor, 0-dim or (k,)", got=got, fix="Sum it first.")
    if isinstance(count, Tensor):
        if count.requires_grad:
            fix = "Detach it: a divisor has no gradient."
            raise InputError(f"{title}: count", expected="no gradient", got="a tensor with a graph", fix=fix)
        if count.ndim and count.numel() != total.numel():
            expected = f"as many as means, {total.numel()}"
            raise InputError(
                f"{title}: count",
                expected=expected,
                got=f"{tuple(count.shape)}",
                fix="Pass a count for each mean, or one number for all of them.",
            )
        counts = count.expand(total.numel()).tolist() if count.ndim == 0 else count.reshape(-1).tolist()
    else:
        counts = [count] * total.numel()
    if not all(math.isfinite(n) and n >= 0 for n in counts):
        raise InputError(
            f"{title}: count",
            expected="finite, 0 or more",
            got=counts,
            fix="Count the terms of the total on this rank, 0 if it has none.",
        )
    return [float(n) for n in counts]


def _refuse_partial_graph(title: str, flags: Sequence[bool]) -> None:
    """Refuse sums that have a graph on some ranks only: DDP would wait for gradients of ranks without one."""
    if any(flags) and not all(flags):
        raise InputError(
            f"{title}: total",
            expected="a graph on every rank",
            ranks=["a graph" if flag else "none" for flag in flags],
            fix="A rank without rows comes with a sum that went through the model: model(rows).sum() * 0.",
            collective=True,
        )
