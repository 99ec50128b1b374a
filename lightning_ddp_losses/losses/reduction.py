"""From per-rank shares to the global loss: the only code here that names W as a factor.

A sub-loss is a sum of elements over a divisor: ``L = S / N`` with ``S = sum_r S_r`` and ``N = sum_r n_r``. Each rank
back-propagates ``W * S_r / N``, so that DDP's mean over ranks gives the gradient of ``L``, and reports ``L``. What every rank
computes whole (a regulariser of the replicated weight) back-propagates as it is.

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
from dataclasses import dataclass
from typing import Any

import torch
from pytorch_metric_learning import reducers as pml
from pytorch_metric_learning.reducers.per_anchor_reducer import aggregation_func
from torch import Tensor

from lightning_ddp_losses import groups
from lightning_ddp_losses.groups import Group

__all__ = [
    "Share",
    "can_split",
    "combine",
    "has_per_anchor",
    "own_slice",
    "pack_shares",
    "report",
    "split",
    "unpack_shares",
    "weigh",
]

_PAIR = struct.Struct("<dd?")


@dataclass(frozen=True)
class Share:
    """This rank's part of one sub-loss.

    Attributes:
        total: S_r, 0-dim, with its graph; for ``whole`` the sub-loss itself.
        divisor: n_r.
        whole: Every rank computes the same complete value; nothing is divided or summed.
    """

    total: Tensor
    divisor: float
    whole: bool = False


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
) -> list[Share]:
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
        shares.append(_share(own, info, embeddings, labels, world))
    return shares


def pack_shares(shares: Sequence[Share]) -> bytes:
    """What the peers need of them."""
    return b"".join(_PAIR.pack(float(s.total.detach()), s.divisor, s.whole) for s in shares)


def unpack_shares(payloads: Sequence[bytes]) -> list[list[tuple[float, float, bool]]]:
    """Per rank, per sub-loss: (S_r, n_r, whole)."""
    return [list(_PAIR.iter_unpack(payload)) for payload in payloads]


def combine(shares: Sequence[Share], table: Sequence[Sequence[tuple[float, float, bool]]], group: Group) -> Tensor:
    """The global loss: its value on every rank, W times this rank's share of its gradient.

    Args:
        shares: This rank's.
        table: Every rank's, from ``unpack_shares``.
        group: Process group.

    Returns:
        0-dim, the same number on every rank.
    """
    value, factors = weigh(table, groups.world_size(group))
    graph = shares[0].total.new_zeros(())
    for share, factor in zip(shares, factors, strict=True):
        graph = graph + share.total * factor
    return report(graph, value)


def weigh(table: Sequence[Sequence[tuple[float, float, bool]]], world: int) -> tuple[float, list[float]]:
    """The global loss, and what each rank's own share of each sub-loss is multiplied with before it is back-propagated.

    Args:
        table: Every rank's (S_r, n_r, whole) per sub-loss.
        world: Number of ranks.
    """
    value, factors = 0.0, []
    for column in zip(*table, strict=True):
        if column[0][2]:
            value += column[0][0]
            factors.append(1.0)
            continue
        total, divisor = sum(c[0] for c in column), sum(c[1] for c in column)
        value += total / divisor if divisor else 0.0
        factors.append(world / divisor if divisor else 0.0)
    return value, factors


def report(graph: Tensor, value: float) -> Tensor:
    """``value``, whose gradient goes to ``graph``."""
    return _Report.apply(graph, value)  # type: ignore[no-untyped-call, no-any-return]


def own_slice(own: Tensor, everyone: Tensor, start: int, world: int) -> Tensor:
    """Gathered rows for a term that every rank computes whole: own rows get their slice of its gradient, times W.

    Args:
        own: (B, ...), this rank's rows, with their graph.
        everyone: (G, ...), without.
        start: The global row that is this rank's first.
        world: Number of ranks.
    """
    return _OwnSlice.apply(own, everyone, start, world)  # type: ignore[no-untyped-call, no-any-return]


class _OwnSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, everyone: Tensor, start: int, world: int) -> Tensor:
        ctx.place = start, own.shape[0], world
        return everyone.view_as(everyone)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        start, rows, world = ctx.place
        return grad.narrow(0, start, rows) * world, None, None, None


class _Report(torch.autograd.Function):
    """Returns ``value`` and passes the gradient on to ``graph``."""

    @staticmethod
    def forward(ctx: Any, graph: Tensor, value: float) -> Tensor:
        return torch.full_like(graph, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _share(reducer: Any, info: dict[str, Any], embeddings: Tensor, labels: Tensor | None, world: int) -> Share:
    losses, indices, kind = info["losses"], info["indices"], info["reduction_type"]
    nothing = torch.sum(embeddings * 0)
    if not torch.is_tensor(losses):  # PML's zero loss is the number 0
        return Share(nothing, 1.0 / world if type(reducer) is pml.SumReducer else 0.0)
    if kind == "already_reduced":
        return Share(losses.sum() + nothing, 1.0, whole=True)
    cls = type(reducer)
    if cls is pml.PerAnchorReducer:
        if kind != "element":
            per_anchor, rows = _per_anchor(losses, indices[0], embeddings.shape[0])
            info = {"losses": per_anchor, "indices": rows, "reduction_type": "element"}
        return _share(reducer.reducer, info, embeddings, labels, world)
    divisor: float | None = None
    if cls is pml.SumReducer:
        divisor = 1.0 / world
    elif cls is pml.DivisorReducer:
        divisor = float(info["divisor"])
    elif cls is pml.ClassWeightedReducer:
        assert labels is not None
        anchors = indices if kind == "element" else indices[0]
        losses = losses * reducer.weights.to(device=losses.device, dtype=losses.dtype)[labels[anchors]]
    elif cls in (pml.ThresholdReducer, pml.AvgNonZeroReducer):
        losses = losses[_passing(losses, reducer.low, reducer.high)]
    return Share(losses.sum() + nothing, float(losses.numel()) if divisor is None else divisor)


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
