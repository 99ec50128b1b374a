"""Exact batch norm: kinds, options, rows of each rank, several forwards, evaluation mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_ddp_losses import SyncBatchNorm
from tests.fuzz.data import DTYPES, RowsCase, rows_strategy
from tests.fuzz.engine import Domain, Found, Place, leaf


@dataclass(frozen=True)
class Case(RowsCase):
    kind: str
    affine: bool
    momentum: float | None
    track: bool
    eps: float
    forwards: int
    images: bool
    training: bool
    dtype: str


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


def play(case: Case, place: Place) -> Found:
    layer, data, found = build(case), place.data(views=case.forwards), {}
    if not place.alone:
        SyncBatchNorm().apply(layer)
    for index in range(case.forwards):
        x = place.own(leaf(data[f"view {index}"])).detach().requires_grad_()
        y = layer(shaped(case, x))
        quantity(y, index).backward()
        found[f"rank y {index}"], found[f"rank x {index}"] = place.parts(y.detach()), place.parts(x.grad)
    return {**found, **results(layer)}


DOMAIN = Domain.of("batch norms", cases(), play)
