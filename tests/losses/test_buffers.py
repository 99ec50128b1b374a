"""Floating buffers and parameters of a loss (class weights, running statistics) in another precision than its rows.

The one process is torch's loss in float64 on the very same numbers; a loss computes in float32 at least, so low rows agree to float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning.losses import MarginLoss
from torch import Tensor, nn

from lightning_ddp_losses import GlobalBatchLoss
from lightning_ddp_losses.core import autograd_graph
from lightning_ddp_losses.testing import RankPool
from tests.oracle import assert_close, graded, joined, own

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
    return torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


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


def alone(name: str, rows_dtype: torch.dtype, buffer_dtype: torch.dtype) -> dict[str, Tensor]:
    make, targets = LOSSES[name]
    rows = scores().to(rows_dtype).double().requires_grad_()
    loss = make().to(buffer_dtype).double()
    return graded(loss(rows, targets()), rows=rows)


def of_ranks(sizes: list[int]) -> dict[str, dict[str, Any]]:
    """All losses in all dtypes: this rank's value and gradient, and the buffers' dtypes afterwards."""
    part, found = own(sizes), {}
    for name, (make, targets) in LOSSES.items():
        for kind, (rows_dtype, buffer_dtype) in DTYPES.items():
            loss = GlobalBatchLoss(make()).to(buffer_dtype)
            rows = scores()[part].to(rows_dtype).requires_grad_()
            target = targets()[part]
            if target.is_floating_point():
                target = target.to(rows_dtype)
            before = {name: (id(buffer), buffer.dtype) for name, buffer in loss.named_buffers()}
            found[f"{name}, {kind}"] = graded(loss(rows, target), rows=rows)
            after = {name: (id(buffer), buffer.dtype) for name, buffer in loss.named_buffers()}
            assert before == after, f"{name}, {kind}: a buffer was replaced"
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_buffers_are_cast_like_parameters(pool: RankPool, world_size: int) -> None:
    results = pool.run(world_size, of_ranks, SIZES[world_size])
    for name in LOSSES:
        for kind, (rows_dtype, buffer_dtype) in DTYPES.items():
            ranks = [{n: t.double() for n, t in result[f"{name}, {kind}"].items()} for result in results]
            # what a gradient in the rows' own dtype can tell
            rtol = {2: 2e-2, 4: 2e-5, 8: 1e-9}[rows_dtype.itemsize]
            assert_close(joined(ranks, "rows"), alone(name, rows_dtype, buffer_dtype), rtol=rtol)


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


def in_chunks() -> dict[str, Tensor]:
    """Rows of float64, a trained margin of float32, and a few anchors at a time, which backward computes again."""
    rank, sizes = dist.get_rank(), SIZES[dist.get_world_size()]
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    rows, loss = scores()[own].requires_grad_(), margin_loss(torch.float32)
    value = GlobalBatchLoss(loss, mode="rows", tile_bytes=500)(rows, backwards()[own])
    value.backward()
    return {"value": value.detach(), "rows": rows.grad, "beta": loss.beta.grad}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_lower_parameter_gets_its_gradient_from_every_chunk(pool: RankPool, world_size: int) -> None:
    results = pool.run(world_size, in_chunks)
    rows, loss = scores().requires_grad_(), margin_loss(torch.float64)
    value = loss(rows, backwards())
    value.backward()
    found = {
        "value": results[0]["value"],
        "rows": torch.cat([result["rows"] for result in results]) / world_size,
        "beta": torch.stack([result["beta"] for result in results]).double().mean(0),
    }
    # the gradient of a margin in float32 is rounded to that
    assert_close(found, {"value": value.detach(), "rows": rows.grad, "beta": loss.beta.grad}, rtol=2e-5)
