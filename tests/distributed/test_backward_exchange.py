"""Exchanges in backward say which forward they belong to: another order on one rank is the same error on all, not a swapped gradient."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, SigLipLoss, SyncBatchNorm
from lightning_ddp_losses.collectives import all_gather_with_grad, all_reduce_with_grad, reduce_scatter_with_grad
from lightning_ddp_losses.testing import RankPool
from tests.counting import nothing_rides
from tests.doors import process_groups
from tests.oracle import assert_close, normal

ROWS, DIM, CLASSES = 4, 6, 5
Make = Callable[[], Callable[[Tensor, Tensor], Tensor]]


def rows_of(seed: int, world: int) -> tuple[Tensor, Tensor]:
    """A global batch (W x 4 rows) and its labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = normal(world * ROWS, DIM, seed=generator)
    return rows, torch.randint(CLASSES, (world * ROWS,), generator=generator)


def global_loss(loss: nn.Module, **options: Any) -> Make:
    return lambda: GlobalBatchLoss(loss, **options).double()


def towers(cls: Any, **options: Any) -> Make:
    def make() -> Callable[[Tensor, Tensor], Tensor]:
        loss = cls(**options).double()
        return lambda x, _: loss(x, x.flip(1) + x.detach())

    return make


def shards() -> Callable[[Tensor, Tensor], Tensor]:
    torch.manual_seed(2)
    return ClassShardedLoss(pml.ArcFaceLoss(num_classes=CLASSES, embedding_size=DIM)).double()


def norm() -> Callable[[Tensor, Tensor], Tensor]:
    layer = nn.Sequential(nn.BatchNorm1d(DIM).double())
    SyncBatchNorm().apply(layer)
    return lambda x, _: layer(x).square().mul(torch.arange(DIM)).sum()


def collective(function: Callable[[Tensor], Tensor]) -> Make:
    return lambda: lambda x, _: function(x).square().sum()


KINDS: dict[str, Make] = {
    "rows": global_loss(pml.CircleLoss(), mode="rows"),
    "tiles with references": lambda: (
        lambda x, y: GlobalBatchLoss(pml.NTXentLoss(), mode="rows")(x, y, ref_emb=x.flip(1), ref_labels=y)
    ),
    "CLIP": towers(ClipLoss),
    "SigLIP": towers(SigLipLoss),
    "CLIP, ring": towers(ClipLoss, gather="ring"),
    "SigLIP, ring": towers(SigLipLoss, gather="ring"),
    "class shards": shards,
    "batch norm": norm,
    "all_gather_with_grad": collective(all_gather_with_grad),
    "all_reduce_with_grad": collective(all_reduce_with_grad),
    "reduce_scatter_with_grad": collective(lambda x: reduce_scatter_with_grad(x.repeat(dist.get_world_size(), 1))),
}
# on the CPU forward brings the gradients along: backward exchanges nothing
SILENT = ["SigLIP", "SigLIP, ring"]
EXCHANGING = [kind for kind in KINDS if kind not in SILENT]


def of_a_rank(kind: str, seed: int = 0) -> tuple[Any, Tensor, Tensor]:
    """A loss, and this rank's rows, which get a gradient, and labels."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows, labels = rows_of(seed, world)
    return KINDS[kind](), rows.split(ROWS)[rank].clone().requires_grad_(), labels.split(ROWS)[rank]


def two_losses(kind: str, reverse_on: int | None, large: bool) -> list[Tensor]:
    """Gradients of two encoders' rows under two losses of one kind; one rank may back-propagate in the other order."""
    calls = [of_a_rank(kind, seed) for seed in range(2)]
    with nothing_rides() if large else contextlib.nullcontext():
        results = [loss(x, labels) for loss, x, labels in calls]
        for value in results[:: -1 if dist.get_rank() == reverse_on else 1]:
            value.backward()
    return [x.grad for _, x, _ in calls]  # type: ignore[misc]


@pytest.mark.parametrize("kind", KINDS)
def test_one_order_on_all_ranks_is_as_one_loss_at_a_time(pool: RankPool, kind: str) -> None:
    few = pool.run(2, two_losses, kind, None, False)
    many = pool.run(2, two_losses, kind, None, True)
    for a, b in zip(few, many, strict=True):
        assert_close({str(i): t for i, t in enumerate(a)}, {str(i): t for i, t in enumerate(b)}, 1e-12)


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", SILENT)
def test_what_exchanges_nothing_in_backward_has_any_order(
    pool: RankPool, kind: str, world_size: int, large: bool
) -> None:
    in_order = pool.run(world_size, two_losses, kind, None, large)
    for a, b in zip(in_order, pool.run(world_size, two_losses, kind, world_size - 1, large), strict=True):
        assert all(map(torch.equal, a, b))


def retained(kind: str, again_on: list[int]) -> Tensor:
    loss, x, labels = of_a_rank(kind)
    value = loss(x, labels)
    value.backward(retain_graph=True)
    if dist.get_rank() in again_on:
        value.backward()
    dist.barrier()
    assert len(all_gather_with_grad(x.detach())) == dist.get_world_size() * ROWS
    return x.grad


@pytest.mark.parametrize("kind", ["rows", "CLIP, ring", "CLIP", "class shards", "all_gather_with_grad"])
def test_a_second_backward_is_exact_on_all_ranks(pool: RankPool, kind: str) -> None:
    once = [found[0] for found in pool.run(2, two_losses, kind, None, False)]
    twice = pool.run(2, retained, kind, [0, 1])
    assert_close({str(r): t for r, t in enumerate(twice)}, {str(r): 2 * t for r, t in enumerate(once)}, 1e-12)


def one_rank_differentiates_for_good(seconds: float) -> None:
    """Rank 0 back-propagates; the other never comes. Raises on both, since their group is broken for the next test."""
    process_groups.set_timeout(timedelta(seconds=seconds))
    loss, x, labels = of_a_rank("rows")
    value = loss(x, labels)
    try:
        if dist.get_rank() == 0:
            value.backward()
    finally:
        process_groups.set_timeout(None)
        dist.monitored_barrier()
    raise InterruptedError("went on")


def test_a_backward_that_no_other_rank_comes_to_is_named(pool: RankPool) -> None:
    first, second = pool.errors(2, one_rank_differentiates_for_good, 1.0, fresh=True)
    assert second.type == "InterruptedError"
    assert first.type == "PeerError"
    # where a strategy has started the world, it is said which rank was silent
    assert re.match(r"rank 0 waited (for its peers )?in backward of GlobalBatchLoss\(CircleLoss\)", first.message)
    assert re.search("Look at the (ranks' output for the first error|output of that rank)", first.message)
