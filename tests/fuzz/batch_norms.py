"""Exact batch norm: kinds, options, rows of each rank, several forwards, evaluation mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_ddp_losses import SyncBatchNorm
from tests.fuzz.data import DTYPES, Rows, cut, global_rows, own, rows_strategy
from tests.fuzz.engine import Domain, Found, NotDefined, leaf

__all__ = ["DOMAIN"]


@dataclass(frozen=True)
class Case:
    rows: Rows
    kind: str
    affine: bool
    momentum: float | None
    track: bool
    eps: float
    forwards: int
    images: bool
    training: bool
    dtype: str

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.rows.ranks


@st.composite
def cases(draw: Any) -> Case:
    training = draw(st.sampled_from([True, True, True, False]))
    return Case(
        rows=draw(rows_strategy()),
        kind=draw(st.sampled_from(["one", "two"])),
        affine=draw(st.booleans()),
        momentum=draw(st.sampled_from([0.1, 1.0, None])),
        track=draw(st.booleans())
        if training
        else True,  # evaluation is not synchronised: there batch statistics are a rank's own
        eps=draw(st.sampled_from([1e-5, 1e-2])),
        forwards=draw(st.integers(1, 3)),
        images=draw(st.booleans()),
        training=training,
        dtype=draw(st.sampled_from(["float64", "float64", "float32"])),
    )


def build(case: Case) -> nn.Module:
    kind: Any = nn.BatchNorm1d if case.kind == "one" else nn.BatchNorm2d
    layer: nn.Module = kind(
        case.rows.dim, eps=case.eps, momentum=case.momentum, affine=case.affine, track_running_stats=case.track
    )
    layer.to(DTYPES[case.dtype])
    if case.affine:
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.linspace(0.5, 1.5, case.rows.dim))
    return layer.train(case.training)


def shaped(case: Case, tensor: Tensor) -> Tensor:
    """(n, D), (n, D, 2) or (n, D, 2, 2)."""
    if case.kind == "two":
        return torch.stack([tensor, tensor * 0.5 + 0.1, tensor.square(), -tensor], -1).reshape(*tensor.shape, 2, 2)
    return torch.stack([tensor, tensor * 2 - 1], -1) if case.images else tensor


def quantity(y: Tensor, index: int) -> Tensor:
    return (y.square() * torch.linspace(0.1, 1, y.shape[1], dtype=y.dtype).view(1, -1, *[1] * (y.ndim - 2))).sum() * (
        index + 1
    ) + y.sin().sum()


def results(layer: nn.Module) -> Found:
    found = {f"sum d{name}": p.grad for name, p in layer.named_parameters() if p.grad is not None}
    found.update({f"value {name}": b.double() for name, b in layer.named_buffers()})
    return found


def alone(case: Case) -> dict[str, Any]:
    layer, found = build(case), {}
    data = global_rows(case.rows, DTYPES[case.dtype], views=case.forwards)
    try:
        for index in range(case.forwards):
            x = leaf(data[f"view {index}"])
            y = layer(shaped(case, x))
            quantity(y, index).backward()
            found[f"rank y {index}"] = cut(case.rows, y.detach())
            found[f"rank x {index}"] = cut(case.rows, x.grad)
    except ValueError as error:
        raise NotDefined from error
    return {**found, **results(layer)}


def on_rank(case: Case) -> Found:
    rank = dist.get_rank()
    layer, found = build(case), {}
    SyncBatchNorm().apply(layer)
    data = global_rows(case.rows, DTYPES[case.dtype], views=case.forwards)
    for index in range(case.forwards):
        x = own(case.rows, data[f"view {index}"], rank).requires_grad_()
        y = layer(shaped(case, x))
        quantity(y, index).backward()
        found[f"rank y {index}"], found[f"rank x {index}"] = y.detach(), x.grad
    return {**found, **results(layer)}


DOMAIN = Domain("batch norms", cases(), on_rank, alone)
