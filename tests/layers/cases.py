"""Batch norms of every kind, the batches they see, and what one process makes of them: plain torch on the concatenated rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle import normal

CHANNELS, STEPS = 3, 2
SPLITS: dict[int, list[list[int]]] = {  # rows of each rank
    1: [[5]],
    2: [[3, 3], [1, 4], [0, 4], [1, 1]],
    3: [[2, 2, 2], [1, 4, 2], [3, 0, 1], [0, 0, 2]],
}


class Activated(nn.BatchNorm2d):
    """A subclass that does more than its base (as timm's do)."""

    def forward(self, input: Tensor) -> Tensor:
        return F.silu(super().forward(input))


class Copied(nn.BatchNorm2d):
    """A subclass whose output, and so its gradient, is contiguous, however the input is stored."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).contiguous().clone()


@dataclass(frozen=True)
class Case:
    """A layer and how it is fed.

    Attributes:
        size: Of the dimensions after the channels.
        uneven_size: Each rank has another size.
        options: Of the layer.
        forwards: Calls before one backward.
        training: The mode of the layer.
    """

    kind: type[nn.Module]
    size: tuple[int, ...] = ()
    uneven_size: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    layout: Callable[[Tensor], Tensor] = Tensor.contiguous
    frozen: tuple[str, ...] = ()
    input_grad: bool = True
    forwards: int = 1
    training: bool = True


def strided(x: Tensor) -> Tensor:
    """The same values, not contiguous in any format."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def height_first(x: Tensor) -> Tensor:
    """The same values, stored by height, width, row and channel: for one row this is channels-last, with another stride of rows."""
    return x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)


CASES: dict[str, Case] = {
    "1d": Case(nn.BatchNorm1d),
    "1d, length": Case(nn.BatchNorm1d, (4,)),
    "1d, uneven lengths": Case(nn.BatchNorm1d, (4,), uneven_size=True),
    "2d": Case(nn.BatchNorm2d, (3, 2)),
    "2d, uneven sizes": Case(nn.BatchNorm2d, (3, 2), uneven_size=True),
    "3d": Case(nn.BatchNorm3d, (2, 3, 2)),
    "not affine": Case(nn.BatchNorm2d, (3, 2), options={"affine": False}),
    "no running statistics": Case(nn.BatchNorm2d, (3, 2), options={"track_running_stats": False}),
    "no running statistics, in evaluation mode": Case(
        nn.BatchNorm2d, (3, 2), options={"track_running_stats": False}, training=False
    ),
    "cumulative average": Case(nn.BatchNorm1d, options={"momentum": None}),
    "momentum 1": Case(nn.BatchNorm1d, options={"momentum": 1.0}),
    "momentum 0, large eps": Case(nn.BatchNorm1d, options={"momentum": 0.0, "eps": 0.5}),
    "frozen affine": Case(nn.BatchNorm2d, (3, 2), frozen=("weight", "bias")),
    "frozen bias": Case(nn.BatchNorm2d, (3, 2), frozen=("bias",)),
    "input without gradient": Case(nn.BatchNorm2d, (3, 2), input_grad=False),
    "channels last": Case(
        nn.BatchNorm2d, (3, 2), layout=lambda x: x.contiguous(memory_format=torch.channels_last), forwards=2
    ),
    "channels last 3d": Case(
        nn.BatchNorm3d, (2, 3, 2), layout=lambda x: x.contiguous(memory_format=torch.channels_last_3d)
    ),
    "strided": Case(nn.BatchNorm2d, (3, 2), layout=strided),
    "a gradient stored differently": Case(Copied, (3, 2), layout=height_first),
    "two forwards, one backward": Case(nn.BatchNorm1d, forwards=2),
    "a subclass that does more": Case(Activated, (3, 2)),
}


def build(case: Case) -> nn.Module:
    """The layer, its parameters and averages not at their defaults."""
    layer = case.kind(CHANNELS, **case.options).double().train(case.training)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if tensor.is_floating_point():
            tensor.data.copy_(torch.rand(CHANNELS, generator=generator, dtype=torch.float64) + 0.5)
        if name in case.frozen:
            tensor.requires_grad_(False)
    return layer


def inputs(case: Case, rows: Sequence[int], step: int) -> list[list[Tensor]]:
    """By forward and rank: what each rank feeds."""
    generator = torch.Generator().manual_seed(100 + step)
    feeds = []
    for _ in range(case.forwards):
        mine = []
        for rank, n in enumerate(rows):
            size = tuple(s + rank for s in case.size) if case.uneven_size else case.size
            x = normal(n, CHANNELS, *size, seed=generator)
            mine.append(case.layout((x * 2 + rank).clone()))  # ranks differ in mean
        feeds.append(mine)
    return feeds


def weights(y: Tensor) -> Tensor:
    """What the loss weighs outputs with: another weight at each place."""
    return torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape) if y.numel() else torch.zeros_like(y)


def value(outputs: Sequence[Tensor]) -> Tensor:
    """One rank's loss; the loss of all is the sum."""
    return sum(((k + 1) * (y + 0.3 * y.square()) * weights(y)).sum() for k, y in enumerate(outputs))


def forwards(case: Case, layer: nn.Module, feeds: list[list[Tensor]]) -> list[list[Tensor]]:
    """In one process: outputs by forward and rank. All values of a channel in one row, as a batch norm sees them."""
    plain = layer if case.kind in (nn.BatchNorm1d, Activated) else _same_without_checks(layer)
    results = []
    for feed in feeds:
        columns = [x.movedim(1, 0).reshape(CHANNELS, -1) for x in feed]
        flat = torch.cat(columns, 1)
        shape = (1, CHANNELS, -1, 1) if isinstance(plain, nn.BatchNorm2d) else (1, CHANNELS, -1)
        y = plain(flat.view(shape)).view(CHANNELS, -1)
        parts = y.split([c.shape[1] for c in columns], 1)
        results.append([_back(part, x) for part, x in zip(parts, feed, strict=True)])
    return results


def _same_without_checks(layer: nn.Module) -> nn.Module:
    class Any1d(nn.BatchNorm1d):
        pass

    layer.__class__ = Any1d  # a batch norm of any number of dimensions on (1, C, N)
    return layer


def _back(part: Tensor, x: Tensor) -> Tensor:
    moved = x.movedim(1, 0).shape
    return part.reshape(moved).movedim(0, 1)
