"""`global_mean`: the mean of any hand-written sum over all ranks, and over an accumulation window, with the exact gradient.

It replaces what detection and language models write by hand: ``num_boxes = all_reduce(n) / world_size``, ``num_items_in_batch``, the mean
over the tokens of a rank.

A token mean::

    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=-100, reduction="sum")
    loss = global_mean(total, (tokens != -100).sum())

Boxes; a rank without boxes comes with sums that went through the model, and 0. Two means, one exchange::

    corners = (boxes - targets).abs().sum()
    overlaps = (1 - giou(boxes, targets)).sum()
    corners, overlaps = global_mean(torch.stack([corners, overlaps]), len(targets))
    loss = 5 * corners + 2 * overlaps

A weighted error; the divisor is any number without a gradient::

    loss = global_mean((weights * error.square()).sum(), weights.sum(), name="error")
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.core import autograd_graph, precision
from lightning_ddp_losses.core.forward_patch import eager_recursive
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.accumulation import WindowPart, current_window, micro_batch_to_match, note_parts
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import gather_stacked, travels_on_device
from lightning_ddp_losses.distributed.upstream_grad import UpstreamGradWatch
from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.losses.partial_sums import for_mean_over_ranks, value_with_grad, wide_float

_watches: dict[str, UpstreamGradWatch] = {}  # by title, in a process that has no group


@eager_recursive
def global_mean(
    total: Tensor,
    count: float | Tensor,
    *,
    empty: float = 0.0,
    name: str | None = None,
    group: Group = None,
) -> Tensor:
    """Return the mean over all ranks of what each of them has summed.

    Equivalent to: in one process, ``total / count`` of the rows of all ranks (and, in an accumulation window, of all micro-batches).

    Args:
        total: 0-dim, or (k,) for k means at once: this rank's sum, floating, with its graph; halves are added in float32. A rank without
            rows comes with a sum that went through the model (``model(rows).sum() * 0``), so that DDP's hooks fire there too.
        count: What it is to be divided by, over all ranks together: a number, or a tensor of as many elements as ``total``, without
            gradient; 0 where there are no rows. Whole numbers are exact up to 2**53.
        empty: The value of a mean that counts nothing on any rank; its gradient is zero.
        name: In messages, and for ``expect_counts`` of an accumulation window; needed there for several calls in one micro-batch.
        group: Process group; None is the world.

    Returns:
        The mean, of the shape of ``total``, equal on every rank; logging it needs no ``sync_dist``.

    Gradient: after DDP's mean over ranks, that of ``sum(total) / sum(count)``. Multiply the value by the same factor on every rank (one
        that differs is an error before gradients are reduced, or at the next call).

    Communication: one handshake, on an accelerator a gather more, which nobody waits for (a ``count`` that lies there is waited for); none
        in backward.

    Raises:
        InputError: on every rank, for counts that are negative, not finite, or have a gradient, for shapes that differ, and where only
            some ranks' sums have a graph.
        RankMismatchError: on every rank, for another number of means, another name or another ``empty``.

    Example:
        >>> import torch
        >>> from lightning_ddp_losses import global_mean
        >>> errors = torch.tensor([1.0, 3.0], requires_grad=True)
        >>> global_mean(errors.sum(), len(errors)).item()
        2.0
    """
    title = "global_mean" if name is None else f"global_mean `{name}`"
    # 1. what this rank has
    try:
        counts = _checked_counts(title, total, count)
    except InputError as error:
        handshake.raise_on_all_ranks(error, title, group=group)
    dtype = precision.compute_dtype([total])
    totals = total.to(dtype)
    # 2. that of all ranks
    watch = _watch_of(title, group)
    has_graph = total.requires_grad and torch.is_grad_enabled()
    on_device = travels_on_device(totals, group) and len(counts) > 0
    local_totals = [0.0] * len(counts)
    if not on_device:
        local_totals = totals.detach().reshape(-1).tolist()
    form = struct.Struct(f"<?{2 * len(counts)}d")
    payload = form.pack(has_graph, *local_totals, *counts)
    must_match = {
        "total": f"{tuple(total.shape)} {dtype} {total.device.type}",
        "empty": empty,
        "gradients": "on" if torch.is_grad_enabled() else "off",
        "coefficient of the last backward": watch.take(),
        **micro_batch_to_match(),
    }
    payloads = handshake.all_gather(title, must_match, payload, group=group)
    flags, *columns = zip(*map(form.unpack, payloads), strict=True)
    _refuse_partial_graph(title, flags)
    # 3. the means, and what each rank's sum counts in them
    sums = [math.fsum(column) for column in columns]
    global_totals, global_counts = sums[: len(counts)], sums[len(counts) :]
    if on_device:
        value = _divided_on_device(totals.detach(), global_counts, empty, group)
    else:
        values = [t / n if n else empty for t, n in zip(global_totals, global_counts, strict=True)]
        value = totals.new_tensor(values).view(totals.shape)
    weights = [1.0 / n if n else 0.0 for n in global_counts]
    # in an accumulation window: as parts of what all its micro-batches make
    window, call = current_window(), None
    parts = [WindowPart("mean", n) for n in global_counts]
    if window is not None and has_graph:
        call = window.enter(name or "", title, parts)
        weights = [weight * share for weight, share in zip(weights, call.weights, strict=True)]
    # 4. the numbers, with W times this rank's part of their gradients
    graph = for_mean_over_ranks(totals, group) * _beside(totals, weights)
    mean = value_with_grad(value, graph)
    note_parts(mean, parts)
    if call is not None:
        mean = call.mark(mean)
    autograd_graph.remember_global_value(mean)
    watched: Tensor = watch.watch(mean, group=group)
    return watched


def _beside(totals: Tensor, numbers: Sequence[float]) -> Tensor | float:
    """Return numbers to multiply sums with; a single one needs no tensor."""
    return numbers[0] if totals.ndim == 0 else totals.new_tensor(numbers)


def _divided_on_device(totals: Tensor, counts: Sequence[float], empty: float, group: Group) -> Tensor:
    """Return the sums of all ranks over what the host has counted, and ``empty`` where that is 0; nobody waits."""
    wide = gather_stacked(totals.to(wide_float(totals.device)), group).sum(0)
    quotients = []
    for total, count in zip(wide.reshape(-1), counts, strict=True):
        quotients.append(total / count if count else torch.full_like(total, empty))
    return torch.stack(quotients).view(totals.shape).to(totals.dtype)


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
        if count.numel() != total.numel():
            expected = f"as many as means, {total.numel()}"
            raise InputError(f"{title}: count", expected=expected, got=f"{tuple(count.shape)}")
        counts = count.reshape(-1).tolist()
    else:
        counts = [count] * total.numel()
    if not all(math.isfinite(n) and n >= 0 for n in counts):
        raise InputError(f"{title}: count", expected="finite, 0 or more", got=counts)
    return [float(n) for n in counts]


def _refuse_partial_graph(title: str, flags: Sequence[bool]) -> None:
    """Refuse sums of which only some ranks' have a graph: DDP would wait for the gradients of the others."""
    if any(flags) and not all(flags):
        raise InputError(
            f"{title}: total",
            expected="a graph on every rank",
            ranks=["a graph" if flag else "none" for flag in flags],
            fix="A rank without rows comes with a sum that went through the model: model(rows).sum() * 0.",
            collective=True,
        )


def _watch_of(title: str, group: Group) -> UpstreamGradWatch:
    """Return what notes the upstream gradients of the means of this title; it lives as long as the group."""
    watches: dict[str, UpstreamGradWatch] = _watches
    if process_groups.world_size(group) > 1:
        watches = process_groups.internal_groups(group).notes.setdefault("global_mean", {})
    return watches.setdefault(title, UpstreamGradWatch())
