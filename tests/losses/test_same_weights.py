"""Weights of a loss that no one reduces are an error on all ranks; weights that ranks hold alike, or may hold apart, are none."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses import accumulation_window
from lightning_ddp_losses.errors import RankMismatchError
from lightning_ddp_losses.losses import ClipLoss, GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.each_rank import each_rank

CLASSES, DIM = 300, 32  # large enough for a weight that is compared in parts


def arcface(**options: Any) -> nn.Module:
    return GlobalBatchLoss(pml.ArcFaceLoss(CLASSES, DIM), **options)


KINDS: dict[str, Callable[..., nn.Module]] = {"ArcFace": arcface, "towers": ClipLoss}


def train(
    kind: str, *, same_start: bool, wrapped: bool, steps: int = 40, in_window: bool = False, **options: Any
) -> None:
    """Train an encoder under DDP; the loss starts as said, and is reduced if it is wrapped."""
    torch.manual_seed(0 if same_start else dist.get_rank())
    loss = KINDS[kind](**options)
    if not same_start:
        with torch.no_grad():
            for parameter in loss.parameters():
                parameter.add_(0.1 * dist.get_rank())
    encoder = DistributedDataParallel(nn.Linear(8, DIM))
    if wrapped:
        loss = DistributedDataParallel(loss)
    parameters = [*encoder.parameters(), *loss.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(steps):
        rows = torch.randn(6, 8)
        given = torch.randint(CLASSES, (6,)) if kind == "ArcFace" else encoder(rows.flip(1))
        window = accumulation_window(encoder, loss, counts=len(rows)) if in_window else contextlib.nullcontext()
        with window:
            loss(encoder(rows), given).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{"wrapped": True}, {"wrapped": False, "steps": 3, "check_weights": False}], ids=str
)
def test_weights_that_ddp_reduces_or_that_may_differ_for_a_while_are_silent(
    pool: RankPool, kind: str, options: dict[str, Any]
) -> None:
    pool.run(2, train, kind, same_start=False, **options)


@pytest.mark.parametrize("place", [0, CLASSES * DIM // 2, CLASSES * DIM - 1])
@each_rank(2)
def test_all_of_a_weight_is_read_in_sixteen_calls(place: int) -> None:
    torch.manual_seed(0)
    loss = arcface()
    with torch.no_grad():
        loss.W.view(-1)[place] += 1e-3 * dist.get_rank()  # type: ignore[index, operator, union-attr]
    calls = itertools.count()

    def train_on() -> None:
        while next(calls) < 16:
            loss(torch.ones(2, DIM), torch.tensor([0, 1]))

    with pytest.raises(RankMismatchError, match="weights"):
        train_on()
    assert next(calls) - 1 == place * 16 // (CLASSES * DIM)
