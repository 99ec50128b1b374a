"""A loss that is a sum over samples makes no more tensors of the size of its rows than the loss alone, there and back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import pytorch_metric_learning.losses as pml
import torch
from torch import nn

from lightning_ddp_losses import GlobalBatchLoss
from tests.counting import sizes_of_results
from tests.doors import depends_on

ROWS, WIDTH, CLASSES = 32, 24, 5
LOSSES: dict[str, Callable[[], nn.Module]] = {
    "ArcFace": lambda: pml.ArcFaceLoss(CLASSES, WIDTH),
    "CosFace": lambda: pml.CosFaceLoss(CLASSES, WIDTH),
    "SphereFace": lambda: pml.SphereFaceLoss(CLASSES, WIDTH),
    "NormalizedSoftmax": lambda: pml.NormalizedSoftmaxLoss(CLASSES, WIDTH),
    "cross entropy": nn.CrossEntropyLoss,
}


def passes_over_rows(loss: nn.Module) -> int:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (ROWS,), generator=generator)
    rows = torch.randn(ROWS, WIDTH, generator=generator, requires_grad=True)
    embeddings = rows * 2  # of an encoder
    with sizes_of_results() as sizes:
        loss(embeddings, labels).backward()
    return sum(size >= ROWS * WIDTH for size in sizes)


@pytest.mark.parametrize("name", LOSSES)
def test_no_pass_over_the_rows_beside_those_of_the_loss(name: str) -> None:
    assert passes_over_rows(GlobalBatchLoss(LOSSES[name](), mode="elements")) <= passes_over_rows(LOSSES[name]())


def test_what_an_output_depends_on() -> None:
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    inner = leaf * 2
    output = (inner.exp() + inner).sum()
    assert depends_on(output, leaf)
    assert depends_on(output, inner)
    assert not depends_on(output, other)
    assert not depends_on(output, other * 2)
    assert not depends_on(output.detach(), leaf)
