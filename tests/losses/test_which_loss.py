"""Several losses of one kind: ranks that call them in different orders are told so, and what differs harmlessly is not refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from torch import nn

from lightning_ddp_losses.losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, GlobalBatchMiner
from lightning_ddp_losses.metrics import differentiable
from lightning_ddp_losses.testing import RankPool
from tests.losses.harness import line_of_rows

Call = Callable[[], Any]


def rows() -> torch.Tensor:
    return line_of_rows(dtype=torch.float32)


def labelled(made: nn.Module) -> Call:
    return lambda: made(rows(), torch.tensor([0, 0, 1, 1]))


def paired(made: nn.Module) -> Call:
    return lambda: made(rows(), rows())


KINDS: dict[str, Callable[..., Call]] = {
    "replicated": lambda **name: labelled(GlobalBatchLoss(pml.SupConLoss(), **name)),
    "rows": lambda **name: labelled(GlobalBatchLoss(pml.SupConLoss(), mode="rows", **name)),
    "elements": lambda **name: labelled(GlobalBatchLoss(nn.CrossEntropyLoss(), **name)),
    "miner": lambda **name: labelled(GlobalBatchMiner(miners.MultiSimilarityMiner(), **name)),
    "class shards": lambda **name: labelled(ClassShardedLoss(pml.ArcFaceLoss(4, 6), **name)),
    "towers": lambda **name: paired(ClipLoss(**name)),
    "metric": lambda: paired(differentiable(torchmetrics.MeanSquaredError())),
}
MADE_ALONE = [kind for kind in KINDS if kind != "class shards"]  # which all ranks make together
NAMED = [kind for kind in KINDS if kind != "metric"]


def call_in_order(calls: list[Call], swapped: bool) -> None:
    """Call each three times, the ranks alike or rank 1 the other way round."""
    if swapped and dist.get_rank() == 1:
        calls = calls[::-1]
    for _ in range(3):
        for call in calls:
            call()


def two(kind: str, swapped: bool, extra_on: int | None = None) -> None:
    if dist.get_rank() == extra_on:
        KINDS[kind]()
    call_in_order([KINDS[kind](), KINDS[kind]()], swapped)


@pytest.mark.parametrize("kind", KINDS)
def test_another_order_on_one_rank_is_an_error_on_all(pool: RankPool, kind: str) -> None:
    errors = pool.errors(2, two, kind, True)
    assert {error.type for error in errors} == {"RankMismatchError"}
    assert len({error.message for error in errors}) == 1
    assert "Call them in the same order on all ranks" in errors[0].message


@pytest.mark.parametrize("kind", MADE_ALONE)
def test_one_more_on_one_rank_does_not_hide_another_order(pool: RankPool, kind: str) -> None:
    errors = pool.errors(2, two, kind, True, 0)
    assert {error.type for error in errors} == {"RankMismatchError"}


@pytest.mark.parametrize("kind", MADE_ALONE)
@pytest.mark.parametrize("extra_on", [None, 0, 1])
def test_the_same_order_is_silent(pool: RankPool, kind: str, extra_on: int | None) -> None:
    pool.run(2, two, kind, False, extra_on)


def named(kind: str, swapped: bool) -> None:
    names = ["first", "second"]
    # made in another order on rank 1
    calls = {name: KINDS[kind](name=name) for name in (names[::-1] if dist.get_rank() else names)}
    call_in_order([calls[name] for name in names], swapped)


@pytest.mark.parametrize("kind", NAMED)
def test_a_name_tells_what_is_made_in_another_order(pool: RankPool, kind: str) -> None:
    pool.run(2, named, kind, False)
    errors = pool.errors(2, named, kind, True)
    assert {error.type for error in errors} == {"RankMismatchError"}
    assert "which=first" in errors[0].message
    assert "which=second" in errors[0].message


def copies() -> None:
    loss = GlobalBatchLoss(pml.SupConLoss())
    if dist.get_rank():
        copy.deepcopy(loss)
    again, other = copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))
    call_in_order([labelled(each) for each in (loss, again, loss, other)], swapped=False)
    call_in_order([labelled(again), labelled(other)], swapped=True)


def test_copies_are_losses_of_their_own(pool: RankPool) -> None:
    errors = pool.errors(2, copies)
    assert {error.type for error in errors} == {"RankMismatchError"}


def one_each_step() -> None:
    kept = GlobalBatchLoss(pml.SupConLoss())
    for _ in range(100):
        labelled(GlobalBatchLoss(pml.SupConLoss()))()
        labelled(kept)()


def test_a_loss_made_in_each_step_is_silent(pool: RankPool) -> None:
    pool.run(3, one_each_step)
