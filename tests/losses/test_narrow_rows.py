"""Rows of bfloat16 and float16 travel as they are and are made wider where they arrive: half the bytes, the same bits.

The other way is the same values in float32, on the same ranks; gradients travel in float32 either way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from pytorch_metric_learning.distances import LpDistance
from torch import Tensor, nn

from lightning_ddp_losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, GlobalBatchMiner, SigLipLoss
from tests.counting import nothing_rides
from tests.doors import Ring, collectives, gathered_batch
from tests.each_rank import each_rank
from tests.oracle import own
from tests.test_microbatch import Allocated

WIDTH, CLASSES = 64, 6
SIZES = {2: [7, 12], 3: [7, 0, 12]}


class Mined(nn.Module):
    """A miner over all ranks and a loss that takes its tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.miner = GlobalBatchMiner(miners.MultiSimilarityMiner())
        self.loss = GlobalBatchLoss(pml.TripletMarginLoss(), mode="rows")

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        return self.loss(rows, labels, self.miner(rows, labels))


MAKE: dict[str, Callable[[], nn.Module]] = {
    "tiles, symmetric": lambda: GlobalBatchLoss(pml.NTXentLoss(), mode="rows", products="float32"),
    "tiles, gradients travel": lambda: GlobalBatchLoss(pml.TripletMarginLoss(), mode="rows"),
    "tiles on tensor cores": lambda: GlobalBatchLoss(pml.SupConLoss(), mode="rows", products="bf16"),
    "rows as they came": lambda: GlobalBatchLoss(
        pml.ContrastiveLoss(distance=LpDistance(normalize_embeddings=False)), mode="rows"
    ),
    "two views": lambda: GlobalBatchLoss(pml.SelfSupervisedLoss(pml.SupConLoss()), mode="rows", products="float32"),
    "row chunks": lambda: GlobalBatchLoss(pml.CircleLoss(), mode="rows"),
    "replicated": lambda: GlobalBatchLoss(pml.NCALoss()),
    "class-sharded": lambda: ClassShardedLoss(pml.ArcFaceLoss(CLASSES, WIDTH)),
    "CLIP": lambda: ClipLoss(products="float32"),
    "CLIP on tensor cores": lambda: ClipLoss(products="bf16"),
    "SigLIP": lambda: SigLipLoss(products="float32"),
    "CLIP, ring": lambda: ClipLoss(gather="ring", products="float32"),
    "CLIP on tensor cores, ring": lambda: ClipLoss(gather="ring", products="bf16"),
    "SigLIP, ring": lambda: SigLipLoss(gather="ring", products="float32"),
    "mined": Mined,
}
BY_DEFAULT: dict[str, Callable[[], nn.Module]] = {
    "CLIP by default": ClipLoss,
    "SigLIP by default, ring": lambda: SigLipLoss(gather="ring"),
    "tiles by default": lambda: GlobalBatchLoss(pml.SupConLoss(), mode="rows"),
}
Result = tuple[list[Tensor], int]


def measure(name: str, dtypes: list[torch.dtype], narrow: torch.dtype) -> Result:
    """Value and gradients; bytes that this rank sent in forward, to be gathered or round a ring."""
    rank, sizes = dist.get_rank(), SIZES[dist.get_world_size()]
    part = own(sizes)
    generator = torch.Generator().manual_seed(0)
    rows, others = torch.randn(2, sum(sizes), WIDTH, generator=generator).to(narrow)[:, part]
    leaves = [rows.to(dtypes[rank]).requires_grad_(), others.to(dtypes[rank]).requires_grad_()]
    labels = (torch.arange(sum(sizes)) % CLASSES)[part]
    torch.manual_seed(3)
    module = {**MAKE, **BY_DEFAULT}[name]()
    sent, gradients = 0, set[Any]()

    def gather(everyone: Tensor, own: Tensor, **options: Any) -> None:
        nonlocal sent
        sent += own.nbytes
        plain_gather(everyone, own, **options)

    def send(ring: Ring, own: Tensor, rows: int) -> Callable[[], Tensor]:
        nonlocal sent
        sent += own.nbytes
        return plain_send(ring, own, rows)

    def reduce_scatter(tensor: Tensor, *args: Any) -> Tensor:
        gradients.add(tensor.dtype)
        return plain_reduce_scatter(tensor, *args)

    plain_gather, plain_reduce_scatter = gathered_batch.gather, collectives.reduce_scatter_rows
    plain_send = Ring.send
    with (
        mock.patch.object(gathered_batch, "gather", gather),
        mock.patch.object(collectives, "reduce_scatter_rows", reduce_scatter),
        mock.patch.object(Ring, "send", send),
    ):
        value = module(leaves[0], leaves[1] if "LIP" in name or "views" in name else labels)
        sent_in_forward = sent
        value.backward()
    assert gradients <= {torch.float32}
    found = [value.detach(), *(leaf.grad.to(narrow) for leaf in leaves if leaf.grad is not None)]
    return [*found, *(p.grad for p in module.parameters() if p.grad is not None)], sent_in_forward


def three_ways(name: str, narrow: torch.dtype, rides: bool) -> list[Any]:
    world = dist.get_world_size()
    with contextlib.nullcontext() if rides else nothing_rides():
        return [
            measure(name, dtypes, narrow)
            for dtypes in ([torch.float32] * world, [narrow] * world, [torch.float32] + [narrow] * (world - 1))
        ]


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("world_size", [2, 3])
@each_rank()
def test_the_same_bits_of_half_the_bytes(name: str) -> None:
    (wide, wide_bytes), (narrow, narrow_bytes), (mixed, _) = three_ways(name, torch.bfloat16, rides=False)
    torch.testing.assert_close(narrow, wide, rtol=0, atol=0)
    torch.testing.assert_close(mixed, wide, rtol=0, atol=0)
    # labels, products and what fills up to an aligned place are few beside 64 numbers a row
    assert wide_bytes >= (7 if "ring" in name else 12) * WIDTH * 4
    # gradients, of float32, follow SigLIP's texts round the ring
    assert narrow_bytes < (0.9 if name == "SigLIP, ring" else 0.56) * wide_bytes


@pytest.mark.parametrize("name", BY_DEFAULT)
@each_rank(2)
def test_rows_of_one_rank_in_float32_are_no_disagreement(name: str) -> None:
    """Products are then float32 on all ranks."""
    (wide, _), (narrow, _), (mixed, _) = three_ways(name, torch.bfloat16, rides=False)
    torch.testing.assert_close(narrow, wide, rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(mixed, wide, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("name", ["tiles, symmetric", "class-sharded", "SigLIP"])
@each_rank(2)
def test_rows_that_ride_in_the_handshake(name: str) -> None:
    (wide, _), (narrow, _), (mixed, _) = three_ways(name, torch.float16, rides=True)
    torch.testing.assert_close(narrow, wide, rtol=0, atol=0)
    torch.testing.assert_close(mixed, wide, rtol=0, atol=0)


def peaks_of(loss: Callable[..., nn.Module], tile_bytes: int) -> tuple[int, int]:
    """The most bytes that one process holds in forward, and in all, beside the rows of two towers in half precision."""
    images, texts = torch.randn(2, 512, WIDTH, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    images, texts = images.clone().requires_grad_(), texts.clone().requires_grad_()
    module = loss(tile_bytes=tile_bytes)
    with Allocated([images, texts, *module.parameters()]) as allocated:
        value = module(images, texts)
        in_forward = allocated.peak
        value.backward()
    return in_forward, allocated.peak


@pytest.mark.parametrize(("loss", "tiles"), [(ClipLoss, 2), (SigLipLoss, 1)])
def test_memory_of_two_towers_in_half_precision(loss: Callable[..., nn.Module], tiles: int) -> None:
    """In forward both towers of unit length, and one on its way there; in backward no tile beside the next one's."""
    tower, tile = 512 * WIDTH * 4, 512 * 512
    in_forward, with_small_tiles = peaks_of(loss, 4096)
    assert in_forward < 4 * tower
    _, with_large_tiles = peaks_of(loss, tile)
    assert with_large_tiles - with_small_tiles < (tiles + 0.6) * tile


@each_rank(2)
def test_stats_behind_rows_of_an_odd_number_of_bytes() -> None:
    """A ring and a gather of rows whose bytes are no whole number of float32."""
    rank = dist.get_rank()
    rows = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0))[:, [slice(0, 5), slice(5, 8)][rank]]
    images, texts = rows.to(torch.bfloat16)
    found = []
    for gather in ("all", "ring"):
        leaf = texts.clone().requires_grad_()
        value = ClipLoss(gather=gather)(images, leaf)  # type: ignore[arg-type]
        value.backward()
        found.append(torch.cat([value.detach().view(1), leaf.grad.float().view(-1)]))
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-4)  # gradients are bfloat16
