"""Weights of a loss that no one reduces are an error on all ranks; weights that ranks hold alike, or may hold apart, are none."""

from __future__ import annotations

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

CLASSES, DIM = 300, 32  # large enough for a weight that is compared in parts


def arcface(**options: Any) -> nn.Module:
    return GlobalBatchLoss(pml.ArcFaceLoss(CLASSES, DIM), **options)


def towers(**options: Any) -> nn.Module:
    return ClipLoss(**options)


KINDS: dict[str, Callable[..., nn.Module]] = {"ArcFace": arcface, "towers": towers}


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
        if in_window:
            with accumulation_window(encoder, loss):
                loss(encoder(rows), given).backward()
        else:
            loss(encoder(rows), given).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("same_start", [False, True], ids=["other start", "drift"])
def test_weights_that_nobody_reduces_are_an_error_on_all_ranks(pool: RankPool, kind: str, same_start: bool) -> None:
    # what only drifts is found once the part that differs is read
    errors = pool.errors(2, train, kind, same_start=same_start, wrapped=False)
    assert {error.type for error in errors} == {"RankMismatchError"}
    assert len({error.message for error in errors}) == 1
    assert "Wrap the loss in DistributedDataParallel, or put it in the model" in errors[0].message
    assert "check_weights=False" in errors[0].message


def test_also_in_an_accumulation_window(pool: RankPool) -> None:
    errors = pool.errors(2, train, "ArcFace", same_start=False, wrapped=False, in_window=True)
    assert {error.type for error in errors} == {"RankMismatchError"}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_ddp_reduces_are_silent(pool: RankPool, kind: str) -> None:
    pool.run(2, train, kind, same_start=False, wrapped=True)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_may_differ_for_a_while_if_that_is_said(pool: RankPool, kind: str) -> None:
    pool.run(2, train, kind, same_start=False, wrapped=False, steps=3, check_weights=False)


def one_number_differs(place: int) -> int:
    """Return after how many calls it was noticed."""
    torch.manual_seed(0)
    loss = arcface()
    with torch.no_grad():
        loss.loss.W.view(-1)[place] += 1e-3 * dist.get_rank()  # type: ignore[index, operator, union-attr]
    calls = itertools.count()

    def train_on() -> None:
        while next(calls) < 16:
            loss(torch.ones(2, DIM), torch.tensor([0, 1]))

    with pytest.raises(RankMismatchError, match="weights"):
        train_on()
    return next(calls) - 1


@pytest.mark.parametrize("place", [0, CLASSES * DIM // 2, CLASSES * DIM - 1])
def test_all_of_a_weight_is_read_in_sixteen_calls(pool: RankPool, place: int) -> None:
    noticed = pool.run(2, one_number_differs, place)
    assert noticed == [place * 16 // (CLASSES * DIM)] * 2
