"""From per-rank shares to the global loss: the only code here that names W as a factor.

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
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from pytorch_metric_learning import reducers as pml
from pytorch_metric_learning.reducers.per_anchor_reducer import aggregation_func
from torch import Tensor

from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.process_groups import Group

_SHARE = struct.Struct("<dd?dddd")


STATS_BYTES = _SHARE.size


class ElementCounts(NamedTuple):
    """How many elements a sub-loss has.

    Attributes:
        elements: What the reducer got.
        passed: What counts (a divisor).
        above_low: What passes a lower limit.
        pairs: What there was before pairs were averaged per anchor.
    """

    elements: float = 0.0
    passed: float = 0.0
    above_low: float = 0.0
    pairs: float = 0.0


NO_COUNTS = ElementCounts()


class PartialStats(NamedTuple):
    """One sub-loss as a rank tells it."""

    total: float
    divisor: float
    full: bool
    counted: ElementCounts


@dataclass(frozen=True)
class PartialSum:
    """This rank's part of one sub-loss.

    Attributes:
        total: S_r, 0-dim, with its graph; for ``full`` the sub-loss itself.
        divisor: n_r.
        full: Every rank computes the same complete value; nothing is divided or summed.
        name: Of the sub-loss.
        count: For what pytorch-metric-learning records.
    """

    total: Tensor
    divisor: float
    full: bool = False
    name: str = "loss"
    count: ElementCounts = NO_COUNTS


def can_split(reducer: Any) -> bool:
    """Whether ``split`` knows the reducer, by its exact class (a subclass may reduce differently)."""
    cls = type(reducer)
    if cls is pml.MultipleReducers:
        return can_split(reducer.default_reducer) and all(can_split(r) for r in reducer.reducers.values())
    if cls is pml.PerAnchorReducer:
        return reducer.aggregation_func is aggregation_func and can_split(reducer.reducer)
    return cls in (
        pml.MeanReducer,
        pml.SumReducer,
        pml.ThresholdReducer,
        pml.AvgNonZeroReducer,
        pml.ClassWeightedReducer,
        pml.DivisorReducer,
    )


def has_per_anchor(reducer: Any) -> bool:
    """Whether a reducer, or one inside it, works per anchor."""
    return any(isinstance(inner, pml.PerAnchorReducer) for inner in reducer.modules())


def split(
    reducer: Any, loss_dict: dict[str, Any], embeddings: Tensor, labels: Tensor | None, world: int
) -> list[PartialSum]:
    """One share per sub-loss of ``compute_loss``'s answer.

    Args:
        reducer: The loss's reducer.
        loss_dict: Element losses of this rank's anchors, as PML's ``compute_loss`` returns them.
        embeddings: (B, D), this rank's rows.
        labels: (B,), this rank's labels.
        world: Number of ranks.
    """
    shares = []
    for name, info in loss_dict.items():
        own = reducer
        if type(reducer) is pml.MultipleReducers:
            own = reducer.reducers[name] if name in reducer.reducers else reducer.default_reducer  # noqa: SIM401 - no dict
        shares.append(replace(_share(own, info, embeddings, labels, world), name=name))
    return shares


def pack_partials(shares: Sequence[PartialSum]) -> bytes:
    """What the peers need of them."""
    return b"".join(pack_stats(PartialStats(float(s.total.detach()), s.divisor, s.full, s.count)) for s in shares)


def pack_stats(row: PartialStats) -> bytes:
    """One sub-loss as ``STATS_BYTES`` bytes."""
    return _SHARE.pack(*row[:3], *row.counted)


def unpack_stats(payload: bytes) -> list[PartialStats]:
    """Sub-losses of one rank."""
    return [
        PartialStats(total, divisor, full, ElementCounts(*count))
        for total, divisor, full, *count in _SHARE.iter_unpack(payload)
    ]


def unpack_partials(payloads: Sequence[bytes]) -> list[list[PartialStats]]:
    """Per rank, per sub-loss."""
    return [unpack_stats(payload) for payload in payloads]


def total_counts(table: Sequence[Sequence[PartialStats]]) -> list[ElementCounts]:
    """Per sub-loss, over all ranks."""
    out = []
    for column in zip(*table, strict=True):
        ranks = [row.counted for row in (column[:1] if column[0].full else column)]
        out.append(ElementCounts(*(sum(numbers) for numbers in zip(*ranks, strict=True))))
    return out


def global_loss(
    shares: Sequence[PartialSum], table: Sequence[Sequence[PartialStats]], group: Group, *, empty: float = 0.0
) -> Tensor:
    """The global loss: its value on every rank, W times this rank's share of its gradient.

    Args:
        shares: This rank's.
        table: Every rank's, from ``unpack_partials``.
        group: Process group.
        empty: As in ``scale_factors``.

    Returns:
        0-dim, the same number on every rank.
    """
    value, factors = scale_factors(table, process_groups.world_size(group), empty)
    graph = shares[0].total.new_zeros(())
    for share, factor in zip(shares, factors, strict=True):
        graph = graph + share.total * factor
    return value_with_grad(graph, value)


def scale_factors(table: Sequence[Sequence[PartialStats]], world: int, empty: float = 0.0) -> tuple[float, list[float]]:
    """The global loss, and what each rank's own share of each sub-loss is multiplied with before it is back-propagated.

    Args:
        table: Every rank's sub-losses.
        world: Number of ranks.
        empty: What a mean over nothing on any rank is: 0 in pytorch-metric-learning, not a number in torch.
    """
    value, factors = 0.0, []
    for column in zip(*table, strict=True):
        if column[0].full:
            value += column[0].total
            factors.append(1.0)
            continue
        total, divisor = sum(row.total for row in column), sum(row.divisor for row in column)
        value += total / divisor if divisor else empty
        factors.append(world / divisor if divisor else 0.0)
    return value, factors


def value_with_grad(graph: Tensor, value: float) -> Tensor:
    """``value``, whose gradient goes to ``graph``."""
    return _Report.apply(graph, value)  # type: ignore[no-untyped-call, no-any-return]


def for_mean_over_ranks(share: Tensor, group: Group) -> Tensor:
    """This rank's part of a sum over ranks, such that DDP's mean over ranks leaves the sum."""
    return share * process_groups.world_size(group)


class _Report(torch.autograd.Function):
    """Returns ``value`` and passes the gradient on to ``graph``."""

    @staticmethod
    def forward(ctx: Any, graph: Tensor, value: float) -> Tensor:
        return torch.full_like(graph, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _share(reducer: Any, info: dict[str, Any], embeddings: Tensor, labels: Tensor | None, world: int) -> PartialSum:
    losses, indices, kind = info["losses"], info["indices"], info["reduction_type"]
    nothing = torch.sum(embeddings * 0)
    if not torch.is_tensor(losses):  # PML's zero loss is the number 0
        return PartialSum(nothing, 1.0 / world if type(reducer) is pml.SumReducer else 0.0)
    if kind == "already_reduced":
        return PartialSum(losses.sum() + nothing, 1.0, full=True, count=ElementCounts(1, 1, 1, 1))
    cls, number = type(reducer), len(losses)
    if cls is pml.PerAnchorReducer:
        if kind != "element":
            per_anchor, rows = _per_anchor(losses, indices[0], embeddings.shape[0])
            info = {"losses": per_anchor, "indices": rows, "reduction_type": "element"}
        share = _share(reducer.reducer, info, embeddings, labels, world)
        return replace(share, count=share.count._replace(pairs=number))
    divisor: float | None = None
    above: float = losses.numel()
    if cls is pml.SumReducer:
        divisor = 1.0 / world
    elif cls is pml.DivisorReducer:
        divisor = float(info["divisor"])
    elif cls is pml.ClassWeightedReducer:
        assert labels is not None
        anchors = indices if kind == "element" else indices[0]
        losses = losses * reducer.weights.to(device=losses.device, dtype=losses.dtype)[labels[anchors]]
    elif cls in (pml.ThresholdReducer, pml.AvgNonZeroReducer):
        if reducer.collect_stats:
            above = float(_passing(losses, reducer.low, None).sum())
        losses = losses[_passing(losses, reducer.low, reducer.high)]
    divisor = float(losses.numel()) if divisor is None else divisor
    return PartialSum(losses.sum() + nothing, divisor, count=ElementCounts(number, divisor, above, number))


def _passing(losses: Tensor, low: float | None, high: float | None) -> Tensor:
    passing = torch.ones_like(losses, dtype=torch.bool)
    if low is not None:
        passing &= losses > low
    if high is not None:
        passing &= losses < high
    return passing


def _per_anchor(losses: Tensor, anchors: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Mean of each anchor's pair losses; 0 for an anchor without pairs."""
    total = losses.new_zeros(rows).index_add(0, anchors, losses)
    count = losses.new_zeros(rows).index_add(0, anchors, torch.ones_like(losses))
    return total / count.clamp(min=1), torch.arange(rows, device=losses.device)
