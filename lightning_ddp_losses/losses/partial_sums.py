"""From each rank's partial sums to the global loss: numerator, divisor, and the factor W. The only code here that names W as a factor.

A sub-loss is a sum of elements over a divisor: ``L = S / N`` with ``S = sum_r S_r`` and ``N = sum_r n_r``. Each rank
back-propagates ``W * S_r / N``, so that DDP's mean over ranks gives the gradient of ``L``, and reports ``L``. What every rank
computes in full (a regulariser of the replicated weight) back-propagates as it is.

| reducer of PML | S_r | n_r |
|---|---|---|
| mean | sum of elements | number of elements |
| sum | sum of elements | 1 / W |
| threshold, average of the non-zero | sum of the elements that pass | their number |
| class weighted | sum of weight x element | number of elements |
| divisor | sum of elements | the rank's divisor |
| per anchor | its inner reducer, on one element per anchor | |
| multiple | each sub-loss by its own reducer, then the sum | |

Legend: ``W`` ranks, ``B`` rows on this rank, ``D`` embedding size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.core import autograd_graph
from lightning_ddp_losses.core.host_copy import HostNumbers
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.accumulation import WindowPart, current_window, note_parts
from lightning_ddp_losses.distributed.collectives import once_differentiable_strict
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import gather_stacked, travels_on_device
from lightning_ddp_losses.losses.pml_registry import Reduction, reducer_chain, reduction_of

_STATS = struct.Struct("<dd?dddd")
_NUMBER = struct.Struct("<d")

STATS_BYTES = _STATS.size
_NUMBERS = 6  # of a sub-loss, beside its flag

Gradients = Sequence[Tensor | None]
Number = float | Tensor
"""A number of the host; or 0-dim on an accelerator, where to read it would wait for the device."""


# ---------------------------------------------------------------------- what a rank holds, and what it sends


class ElementCounts(NamedTuple):
    """How many elements a sub-loss has; read only where numbers travel through the hosts.

    Attributes:
        elements: What the reducer got.
        passed: What counts (a divisor).
        above_low: What passes a lower limit.
        pairs: What there was before pairs were averaged per anchor.
    """

    elements: Any = 0.0
    passed: Any = 0.0
    above_low: Any = 0.0
    pairs: Any = 0.0


NO_COUNTS = ElementCounts()
ONE_ELEMENT = ElementCounts(elements=1, pairs=1)  # reduced already: its reducer asks for no limit and no divisor


@dataclass(frozen=True)
class PartialSum:
    """This rank's part of one sub-loss.

    Attributes:
        total: S_r, 0-dim, with its graph; for ``full`` the sub-loss itself.
        divisor: n_r.
        full: Every rank computes the same complete value; nothing is divided or summed.
        name: Of the sub-loss.
        counts: For what pytorch-metric-learning records.
        is_sum: Nothing divides it; the divisors of all ranks add up to 1.
    """

    total: Tensor
    divisor: Number
    full: bool = False
    name: str = "loss"
    counts: ElementCounts = NO_COUNTS
    is_sum: bool = False


class PartialStats(NamedTuple):
    """The numbers of one partial sum: floats where ranks exchange them through their hosts."""

    total: Any
    divisor: Any
    full: bool
    counts: ElementCounts


@dataclass(frozen=True)
class DeviceStats:
    """The numbers of all partial sums of all ranks, on the device: nobody waits for them.

    Attributes:
        table: (W, s, 2), totals and divisors of s sub-losses.
        full: (s,), which of them every rank computes completely.
        may_be_empty: Whether a divisor may be 0 over all ranks, as far as this one's host knows.
        counted: (s,), the divisors over all ranks on the host, where an accumulation window needs them there; None: it does not.
    """

    table: Tensor
    full: tuple[bool, ...]
    may_be_empty: bool = True
    counted: tuple[float, ...] | None = None

    def total_divisors(self) -> Tensor:
        """Return (s,), each sub-loss's divisor over all ranks."""
        divisors = self.table[..., 1]
        return divisors.sum(0) if len(divisors) > 1 else divisors[0]


GlobalStats = Sequence[Sequence[PartialStats]] | DeviceStats
"""Every rank's numbers of the sub-losses."""


def number_of(value: Tensor) -> Number:
    """Return what a 0-dim tensor holds: a number of the host where that is free, else the tensor itself."""
    return value.item() if value.device.type == "cpu" else value


def device_table(numbers: Sequence[tuple[Number, Number]], like: Tensor) -> Tensor:
    """Return (s, 2): this rank's totals and divisors, on the device of ``like`` and in its widest floating dtype."""
    wide = wide_float(like.device)
    flat = [value for pair in numbers for value in pair]
    parts = []
    for value in flat:
        part = value.detach().to(wide) if isinstance(value, Tensor) else like.new_full((), value, dtype=wide)
        parts.append(part)
    return torch.stack(parts).view(-1, 2)


def wide_float(device: torch.device) -> torch.dtype:
    """Return float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def pack_partials(partials: Sequence[PartialSum]) -> bytes:
    """Return what the peers need of this rank's partial sums."""
    return pack_stats([PartialStats(p.total.detach(), p.divisor, p.full, p.counts) for p in partials])


def pack_stats(several: Sequence[PartialStats]) -> bytes:
    """Return sub-losses as ``STATS_BYTES`` bytes each; an accelerator is waited for once."""
    numbers: list[Number] = []
    for stats in several:
        numbers += [stats.total, stats.divisor, *stats.counts]
    on_host = _numbers_on_host(numbers)
    packed = []
    for index, stats in enumerate(several):
        total, divisor, *counts = on_host[index * _NUMBERS : (index + 1) * _NUMBERS]
        packed.append(_STATS.pack(total, divisor, stats.full, *counts))
    return b"".join(packed)


def _numbers_on_host(numbers: Sequence[Number]) -> list[float]:
    """Return what the host knows of numbers after it has waited for an accelerator once, if any of them lies there."""
    alike: list[Number] = []
    for number in numbers:
        # of one dtype they travel together
        if isinstance(number, Tensor) and number.device.type != "cpu":
            alike.append(number.to(wide_float(number.device)))
        else:
            alike.append(number)
    return HostNumbers(alike).read()


def exchange_partials(
    partials: Sequence[PartialSum],
    like: Tensor,
    handshake: Callable[[bytes], list[bytes]],
    *,
    group: Group,
    on_host: bool,
) -> GlobalStats:
    """Return all ranks' numbers of the sub-losses.

    Args:
        partials: This rank's.
        like: Rows of the call, on whose device the numbers stay where that can be.
        handshake: This rank's payload -> those of all ranks; ranks that disagree learn it there.
        group: Process group.
        on_host: The numbers are needed on the host, which waits for them.

    Communication: one handshake; one gather on the device.
    """
    if on_host or not travels_on_device(like, group):
        return unpack_partials(handshake(pack_partials(partials)))
    if current_window() is None:
        handshake(b"")
        return device_stats(partials, like, group)
    # the host divides what the micro-batches of a window make: it counts, and waits only for counts that it does not know
    divisors = _numbers_on_host([partial.divisor for partial in partials])
    form = struct.Struct(f"<{len(divisors)}d")
    by_rank = [form.unpack(payload) for payload in handshake(form.pack(*divisors))]
    counted = tuple(map(sum, zip(*by_rank, strict=True)))
    return replace(device_stats(partials, like, group), counted=counted)


def device_stats(partials: Sequence[PartialSum], like: Tensor, group: Group) -> DeviceStats:
    """Return all ranks' numbers of the sub-losses on the device of ``like``. Communication: one gather."""
    table = device_table([(partial.total, partial.divisor) for partial in partials], like)
    divisors = [partial.divisor for partial in partials]
    may_be_empty = any(isinstance(divisor, Tensor) or divisor == 0 for divisor in divisors)
    return DeviceStats(gather_stacked(table, group), tuple(partial.full for partial in partials), may_be_empty)


def stats_of_one(partials: Sequence[PartialSum], like: Tensor) -> GlobalStats:
    """Return the numbers of sub-losses that every rank computes from all rows, as if there were one rank."""
    if like.device.type == "cpu":
        return unpack_partials([pack_partials(partials)])
    table = device_table([(partial.total, partial.divisor) for partial in partials], like).unsqueeze(0)
    counted = None
    if current_window() is not None:
        counted = tuple(_numbers_on_host([partial.divisor for partial in partials]))
    return DeviceStats(table, tuple(partial.full for partial in partials), counted=counted)


def unpack_partials(payloads: Sequence[bytes]) -> list[list[PartialStats]]:
    """Return each rank's sub-losses."""
    return [_unpack_stats(payload) for payload in payloads]


def _unpack_stats(payload: bytes) -> list[PartialStats]:
    sub_losses = _STATS.iter_unpack(payload)
    return [PartialStats(total, divisor, full, ElementCounts(*counts)) for total, divisor, full, *counts in sub_losses]


def total_counts(stats_by_rank: Sequence[Sequence[PartialStats]]) -> list[ElementCounts]:
    """Return how many elements each sub-loss has over all ranks."""
    totals = []
    for sub_loss in zip(*stats_by_rank, strict=True):
        # what every rank computes in full has its elements once
        counted = sub_loss[:1] if sub_loss[0].full else sub_loss
        columns = zip(*(stats.counts for stats in counted), strict=True)
        totals.append(ElementCounts(*map(sum, columns)))
    return totals


# ---------------------------------------------------------------------- PML's element losses -> partial sums


def element_losses(loss: Any, embeddings: Tensor, labels: Tensor | None) -> dict[str, Any]:
    """Return the element losses of local rows, for a loss that is a sum over samples."""
    loss.reset_stats()
    return loss.compute_loss(embeddings, labels, None, embeddings, labels)  # type: ignore[no-any-return]


def anchor_losses(
    loss: Any,
    embeddings: Tensor,
    labels: Tensor | None,
    tuples: tuple[Tensor, ...],
    ref_emb: Tensor,
    ref_labels: Tensor | None,
) -> dict[str, Any]:
    """Return the element losses of local anchors against all rows, for a loss that is a sum over anchors.

    Args:
        loss: PML's.
        embeddings: (B, D), the anchors.
        labels: (B,).
        tuples: From ``anchor_tuples``: local anchors, global others.
        ref_emb: (G, D).
        ref_labels: (G,).
    """
    loss.reset_stats()
    return loss.compute_loss(embeddings, labels, tuples, ref_emb, ref_labels)  # type: ignore[no-any-return]


def partial_sums_of(
    reducer: Any, loss_dict: dict[str, Any], embeddings: Tensor, labels: Tensor | None, parts: int
) -> list[PartialSum]:
    """Return one partial sum per sub-loss.

    Args:
        reducer: The loss's reducer, which ``pml_registry.can_split``.
        loss_dict: Element losses by sub-loss, as PML's ``compute_loss`` returns them; under ``kept`` a mask of those that there are,
            where to select them would wait for an accelerator.
        embeddings: (B, D), the rows that they are of.
        labels: (B,), their labels.
        parts: In how many parts the global batch is computed: the number of ranks, times the chunks of each.
    """
    return [_partial_sum(reducer, name, info, embeddings, labels, parts) for name, info in loss_dict.items()]


def undivided(parts: int) -> float:
    """Return one part's share of the divisor 1, for what is summed and never divided."""
    return 1.0 / parts


def _partial_sum(
    reducer: Any, name: str, info: dict[str, Any], embeddings: Tensor, labels: Tensor | None, parts: int
) -> PartialSum:
    losses, indices, kind = info["losses"], info["indices"], info["reduction_type"]
    reduction = reduction_of(reducer, name)
    assert reduction is not None
    if not torch.is_tensor(losses):  # PML's zero loss is the number 0
        share = undivided(parts) if reduction.plain_sum else 0.0
        return PartialSum(no_loss(embeddings), share, name=name, is_sum=reduction.plain_sum)
    if kind == "already_reduced":
        return PartialSum(_sum_over(losses, embeddings), 1.0, full=True, name=name, counts=ONE_ELEMENT)
    # pairs are averaged within their anchor first, if at all
    pairs = len(losses)
    if reduction.per_anchor and kind != "element":
        losses = _mean_per_anchor(losses, indices[0], embeddings.shape[0])
        anchors = torch.arange(len(losses), device=losses.device)
    else:
        anchors = indices if kind == "element" else indices[0]
    # what counts, and with which weight
    elements: Number = len(losses)
    above_low: Number = float(losses.numel())
    if reduction.weights is not None:
        assert labels is not None
        losses = losses * reduction.weights.to(device=losses.device, dtype=losses.dtype)[labels[anchors]]
    if reduction.low is not None and reducer_chain(reducer, name)[-1].collect_stats:
        above_low = number_of((losses > reduction.low).sum())
    losses, divisor = _what_passes(reduction, losses, info.get("kept"))
    # what the sum is to be divided by
    if reduction.plain_sum:
        divisor = undivided(parts)
    elif reduction.given_divisor:
        given = info["divisor"]
        divisor = number_of(given) if isinstance(given, Tensor) else float(given)
    counts = ElementCounts(elements, divisor, above_low, pairs)
    total = _sum_over(losses, embeddings)
    # a NaN passes no limit: where nothing passes it would be lost
    if reduction.selects and (isinstance(divisor, Tensor) or not divisor):
        total = total + no_loss(embeddings.detach())
    return PartialSum(total, divisor, name=name, counts=counts, is_sum=reduction.plain_sum)


def _sum_over(losses: Tensor, embeddings: Tensor) -> Tensor:
    """Return the sum of element losses, with the embeddings in its graph."""
    total = losses.sum()
    # what depends on them anyway is spared three passes over them, there and back
    if not embeddings.requires_grad or autograd_graph.depends_on(total, embeddings):
        return total
    return total + no_loss(embeddings)


def no_loss(embeddings: Tensor) -> Tensor:
    """Return 0, with the embeddings in its graph; as PML's own zero loss, NaN where they hold NaN or an infinity."""
    return torch.sum(embeddings * 0)


def _what_passes(reduction: Reduction, losses: Tensor, kept: Tensor | None) -> tuple[Tensor, Number]:
    """Return the losses that are there and pass, and how many they are."""
    if kept is None:
        if not reduction.selects:
            return losses, float(losses.numel())
        passes = reduction.passes(losses)
    else:
        passes = reduction.passes(losses) & kept if reduction.selects else kept
    if losses.device.type == "cpu":
        selected = losses[passes]
        return selected, float(selected.numel())
    # to select them would wait for their number
    return torch.where(passes, losses, 0), passes.sum()


def _mean_per_anchor(losses: Tensor, anchors: Tensor, rows: int) -> Tensor:
    """Return the mean of each anchor's pair losses, (rows,); 0 for an anchor without pairs."""
    total = losses.new_zeros(rows).index_add(0, anchors, losses)
    count = losses.new_zeros(rows).index_add(0, anchors, torch.ones_like(losses))
    return total / count.clamp(min=1)


# ---------------------------------------------------------------------- all ranks' numbers -> the global loss


def global_loss(
    partials: Sequence[PartialSum],
    stats_by_rank: GlobalStats,
    *,
    empty: float = 0.0,
    window_source: tuple[object, str] | None = None,
) -> Tensor:
    """Return the global loss: its value on every rank, W times this rank's share of its gradient.

    Args:
        partials: This rank's.
        stats_by_rank: Every rank's, as they were exchanged.
        empty: As in ``scale_factors``.
        window_source: The loss and its title, for one whose micro-batches an accumulation window may bring together.

    Returns:
        0-dim, the same number on every rank.
    """
    value, factors = scale_factors(stats_by_rank, empty)
    # in an accumulation window: as parts of what all its micro-batches make
    window, call = current_window(), None
    parts = window_parts(partials, stats_by_rank) if window_source is not None else []
    if window is not None and window_source is not None:
        call = window.enter(*window_source, parts)
        factors = [factor * weight for factor, weight in zip(factors, call.weights, strict=True)]
    terms = []
    for partial, factor in zip(partials, factors, strict=True):
        terms.append(partial.total * cast_number(factor, partials[0].total.dtype))
    graph = terms[0]
    for term in terms[1:]:
        graph = graph + term
    result = value_with_grad(value, graph)
    if call is not None:
        return call.mark(result)
    if parts:
        note_parts(result, parts)
    return result


def global_quotient(
    total: Tensor, divisor: float, handshake: Callable[[bytes], list[bytes]], *, group: Group
) -> Tensor:
    """Return the sum of all ranks' totals over a divisor that every rank knows: its value on every rank, W times this share's gradient.

    Args:
        total: This rank's, 0-dim.
        divisor: The same on all ranks.
        handshake: This rank's payload -> those of all ranks; ranks that disagree learn it there.
        group: Process group.

    Communication: one handshake; one gather on the device.
    """
    share = for_mean_over_ranks(total / divisor, group)
    if not travels_on_device(total, group):
        payloads = handshake(_NUMBER.pack(float(total.detach())))
        value = sum(number for payload in payloads for number in _NUMBER.unpack(payload))
        return value_with_grad(value / divisor, share)
    handshake(b"")
    if process_groups.world_size(group) == 1:
        return share
    totals = gather_stacked(total.detach().to(wide_float(total.device)), group)
    return value_with_grad(totals.sum() / divisor, share)


def cast_number(number: Number, dtype: torch.dtype) -> Any:
    """Return a number that does not widen what it is multiplied with."""
    return number.to(dtype) if isinstance(number, Tensor) else number


def window_parts(partials: Sequence[PartialSum], stats_by_rank: GlobalStats) -> list[WindowPart]:
    """Return how each sub-loss counts in an accumulation window."""
    divisors: list[Number]
    if isinstance(stats_by_rank, DeviceStats):
        divisors = list(stats_by_rank.counted or stats_by_rank.total_divisors().unbind())
    else:
        divisors = []
        for sub_loss in zip(*stats_by_rank, strict=True):
            divisors.append(sum(stats.divisor for stats in sub_loss))
    parts = []
    for partial, divisor in zip(partials, divisors, strict=True):
        if partial.full:
            parts.append(WindowPart("once"))
        elif partial.is_sum:
            parts.append(WindowPart("sum"))
        else:
            parts.append(WindowPart("mean", divisor))
    return parts


def scale_factors(stats_by_rank: GlobalStats, empty: float = 0.0) -> tuple[Number, list[Number]]:
    """Return the global loss, and what each rank multiplies its partial sums with before it back-propagates them.

    Args:
        stats_by_rank: Every rank's sub-losses.
        empty: What a mean over nothing on any rank is: 0 in pytorch-metric-learning, not a number in torch.
    """
    if isinstance(stats_by_rank, DeviceStats):
        return _scale_factors_on_device(stats_by_rank, empty)
    world = len(stats_by_rank)
    value, factors = 0.0, list[Number]()
    for sub_loss in zip(*stats_by_rank, strict=True):
        if sub_loss[0].full:
            # the same on all ranks: DDP's mean leaves it as it is
            value += sub_loss[0].total
            factors.append(1.0)
            continue
        total = sum(stats.total for stats in sub_loss)
        divisor = sum(stats.divisor for stats in sub_loss)
        if divisor:
            value += total / divisor
            factors.append(world / divisor)
        else:
            value += empty + 0 * total
            factors.append(0.0)
    return value, factors


def _scale_factors_on_device(stats: DeviceStats, empty: float) -> tuple[Tensor, list[Number]]:
    """Do what ``scale_factors`` does with numbers that the host does not know."""
    own = stats.table[0, :, 0]
    # means over ranks: their quotient is that of the sums, and W over the sum is 1 over the mean
    means = stats.table.mean(0) if len(stats.table) > 1 else stats.table[0]
    totals, divisors = means.unbind(1)
    is_empty = divisors == 0 if stats.may_be_empty else None
    if is_empty is not None:
        divisors = divisors.masked_fill(is_empty, torch.inf)  # of which a share is 0
    values, factors = totals / divisors, divisors.reciprocal()
    if empty and is_empty is not None:
        values = values.masked_fill(is_empty, empty)
    chosen, scale = values.unbind(), list[Number](factors.unbind())
    for index, full in enumerate(stats.full):
        # the same on all ranks: DDP's mean leaves it as it is
        if full:
            chosen = (*chosen[:index], own[index], *chosen[index + 1 :])
            scale[index] = 1.0
    if len(chosen) == 1:
        return chosen[0], scale
    return torch.stack(chosen).sum(), scale


def for_mean_over_ranks(share: Tensor, group: Group) -> Tensor:
    """Scale this rank's part of a sum over ranks such that DDP's mean over ranks leaves the sum."""
    world = process_groups.world_size(group)
    return share if world == 1 else share * world


def value_with_grad(
    value: Number, *inputs: Tensor | None, vjp: Callable[[Sequence[bool]], Gradients] | None = None
) -> Tensor:
    """Return a number whose gradient is computed apart from it.

    Args:
        value: The number; or a tensor of them, of the shape of the one input.
        inputs: What it depends on; dtype and device are the first's.
        vjp: Which inputs want a gradient -> the derivative of the number by each of them. None: there is one input, 0-dim, whose
            gradient is that of the number.

    Returns:
        0-dim, or like ``value``.
    """
    return _ValueWithGrad.apply(value, vjp, *inputs)  # type: ignore[no-untyped-call, no-any-return]


class _ValueWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Number, vjp: Callable[[Sequence[bool]], Gradients] | None, *inputs: Tensor | None
    ) -> Tensor:
        ctx.vjp = vjp
        if vjp is not None:
            ctx.save_for_backward(*inputs)
        assert inputs[0] is not None
        if isinstance(value, Tensor):
            return value.to(inputs[0].dtype, copy=True)
        return inputs[0].new_full((), value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.vjp is None:
            return None, None, grad
        return _scaled_vjp(ctx, grad)


@once_differentiable_strict("GlobalBatchLoss")
def _scaled_vjp(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    derivatives = ctx.vjp(ctx.needs_input_grad[2:])
    scaled = [None if derivative is None else derivative * grad for derivative in derivatives]
    return None, None, *scaled
