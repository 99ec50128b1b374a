"""Floating buffers and parameters of a loss (class weights, running statistics) in another precision than its rows.

The one process is torch's loss in float64 on the very same numbers; a loss computes in float32 at least, so low rows agree to float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from pytorch_metric_learning.losses import MarginLoss
from torch import Tensor, nn

from lightning_ddp_losses import GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.doors import autograd_graph
from tests.oracle import Found, Place, normal, parity

ROWS, CLASSES = 12, 4
SIZES = {1: [12], 2: [4, 8], 3: [1, 4, 7]}
WEIGHT = torch.linspace(0.3, 2, CLASSES)
# of the rows, of the loss's buffers
DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "half": (torch.float16, torch.float16),
    "rows in bf16": (torch.bfloat16, torch.float32),
    "buffers in bf16": (torch.float32, torch.bfloat16),
    "rows in float64": (torch.float64, torch.float32),
}


def scores() -> Tensor:
    return normal(ROWS, CLASSES, seed=2)


def classes() -> Tensor:
    return torch.arange(ROWS) * 5 % CLASSES


def bits() -> Tensor:
    return (torch.arange(ROWS * CLASSES).view(ROWS, CLASSES) * 7 % 3 == 0).double()


class Normalised(nn.Module):
    """A user's loss over a batch norm: buffers that are written in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(CLASSES, affine=False)

    def forward(self, rows: Tensor, targets: Tensor) -> Tensor:
        return (self.norm(rows) - targets).square().mean() + self.norm.running_mean.square().sum()


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "CrossEntropyLoss": (lambda: nn.CrossEntropyLoss(weight=WEIGHT.clone()), classes),
    "NLLLoss": (lambda: nn.NLLLoss(weight=WEIGHT.clone()), classes),
    "MultiMarginLoss": (lambda: nn.MultiMarginLoss(weight=WEIGHT.clone()), classes),
    "BCEWithLogitsLoss": (lambda: nn.BCEWithLogitsLoss(WEIGHT.clone(), pos_weight=WEIGHT.flip(0)), bits),
    "MultiLabelSoftMarginLoss": (lambda: nn.MultiLabelSoftMarginLoss(weight=WEIGHT.clone()), bits),
    "of a user, with a batch norm": (Normalised, bits),
}


def play(place: Place, case: tuple[str, str]) -> Found:
    """A loss in a dtype, and whether its buffers stay as they are."""
    name, kind = case
    (make, targets), (rows_dtype, buffer_dtype) = LOSSES[name], DTYPES[kind]
    rows = place.leaf("", scores().to(rows_dtype).to(torch.float64 if place.alone else rows_dtype))
    target = place.own(targets())
    if place.alone:
        return place.graded(make().to(buffer_dtype).double()(rows, target))
    loss = GlobalBatchLoss(make()).to(buffer_dtype)
    before = {name: (id(buffer), buffer.dtype) for name, buffer in loss.named_buffers()}
    value = loss(rows, target.to(rows_dtype) if target.is_floating_point() else target)
    found = {name: tensor.double() for name, tensor in place.graded(value).items()}
    after = {name: (id(buffer), buffer.dtype) for name, buffer in loss.named_buffers()}
    assert before == after, f"{case}: a buffer was replaced"
    return found


def rtol_of(case: tuple[str, str]) -> float:
    """What a gradient in the rows' own dtype can tell."""
    return {2: 2e-2, 4: 2e-5, 8: 1e-9}[DTYPES[case[1]][0].itemsize]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_buffers_are_cast_like_parameters(pool: RankPool, world_size: int) -> None:
    parity(pool, play, SIZES[world_size], cases=itertools.product(LOSSES, DTYPES), rtol=rtol_of)


class Counts(nn.Module):
    """A loss with buffers that it writes, replaces, and holds twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("untouched", torch.full((2,), 0.1))
        self.register_buffer("wide", torch.full((2,), 0.1, dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        assert self.twice is self.written
        self.written += rows.detach().sum(0)
        self.replaced = self.replaced + rows.detach().sum(0)
        assert self.untouched.dtype == rows.dtype
        return rows.sum() * self.written.sum()


@pytest.mark.parametrize("inference", [False, True])
def test_what_a_loss_writes_into_a_buffer_stays(inference: bool) -> None:
    loss = Counts().bfloat16()
    loss.register_buffer("twice", loss.written)
    loss.wide = loss.wide.double()
    before = dict(loss.named_buffers(remove_duplicate=False))
    with torch.inference_mode(inference):
        for _ in range(2):
            autograd_graph.run_full_precision(loss, loss.forward, (torch.ones(3, 2),), {})
    after = dict(loss.named_buffers(remove_duplicate=False))
    for name in ("written", "twice", "untouched", "wide"):
        assert after[name] is before[name], name
    assert after["twice"].tolist() == after["written"].tolist() == after["replaced"].tolist() == [6, 6]
    assert after["written"].dtype == torch.bfloat16


# ---------------------------------------------------------------------- trained parameters


def backwards() -> Tensor:
    """Classes that do not count from 0 on several ranks, which looks like rows that are each of a class."""
    return classes().flip(0)


def margin_loss(dtype: torch.dtype) -> MarginLoss:
    return MarginLoss(beta=0.8, learn_beta=True, num_classes=CLASSES).to(dtype)


def in_chunks(place: Place) -> Found:
    """Rows of float64, a trained margin of float32, and a few anchors at a time, which backward computes again."""
    rows, loss = place.leaf("", scores()), margin_loss(torch.float64 if place.alone else torch.float32)
    judge = loss if place.alone else GlobalBatchLoss(loss, mode="rows", tile_bytes=500)
    return {name: t.double() for name, t in place.graded(judge(rows, place.own(backwards())), loss=loss).items()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_lower_parameter_gets_its_gradient_from_every_chunk(pool: RankPool, world_size: int) -> None:
    # the gradient of a margin in float32 is rounded to that
    parity(pool, in_chunks, SIZES[world_size], rtol=2e-5)
