"""Class shards over parts of four ranks, in a hand-written loop: tuples of a miner over all ranks, and errors of one part alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from torch import Tensor

from lightning_ddp_losses import ClassShardedLoss, GlobalBatchMiner
from lightning_ddp_losses.testing import RankPool
from tests.losses import harness
from tests.losses.harness import CLASSES, DIM
from tests.oracle import Found, Place, own, parity
from tests.refusals import Refused, refusals

WORLD = 4
PARTS = [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
SPLITS = [[3, 3, 3, 3], [1, 0, 5, 6], [5, 7, 0, 0]]


def arcface() -> torch.nn.Module:
    torch.manual_seed(3)
    return pml.ArcFaceLoss(CLASSES, DIM).double()


def own_part(parts: list[list[int]]) -> dist.ProcessGroup:
    groups = [dist.new_group(part) for part in parts]
    return next(group for group, part in zip(groups, parts, strict=True) if dist.get_rank() in part)


def tuples_of(leaf: Tensor, labels: Tensor, parts: list[list[int]], sizes: list[int]) -> tuple[Tensor, ...]:
    """What one process mines in each part by itself."""
    tuples: list[list[Tensor]] = [[], [], [], []]
    for part in parts:
        index = torch.cat([torch.arange(len(labels))[own(sizes, rank)] for rank in part])
        for kind, found in enumerate(miners.MultiSimilarityMiner()(leaf.detach()[index], labels[index])):
            tuples[kind].append(index[found])
    return tuple(map(torch.cat, tuples))


def mined(place: Place, parts: list[list[int]], miner_in_part: bool) -> Found:
    """Value and gradients of a loss over parts."""
    rows = harness.global_rows()
    leaf, labels = place.leaf("rows", rows["targets"]), place.own(rows["labels"])
    if place.alone:
        tuples = tuples_of(leaf, labels, parts if miner_in_part else [[*range(WORLD)]], list(place.sizes))
        plain = arcface()
        found = place.graded(plain(leaf, labels, tuples))
        return found | {"value of the weight's gradient": plain.W.grad}
    part = own_part(parts)
    loss = ClassShardedLoss(arcface(), group=part)
    miner = GlobalBatchMiner(miners.MultiSimilarityMiner(), group=part if miner_in_part else None)
    found = place.graded(loss(leaf, labels, miner(leaf, labels)))
    # a weight of each part; the gradients of its shards, one after the other
    shards: list[Any] = [None] * 2
    dist.all_gather_object(shards, (loss.shard.start, loss.weight.grad), group=part)
    shards.sort(key=lambda shard: shard[0])
    return found | {"value of the weight's gradient": torch.cat([grad for _, grad in shards], 1)}


@pytest.mark.parametrize("parts", PARTS, ids=["blocks", "in turn"])
@pytest.mark.parametrize("miner_in_part", [False, True], ids=["a miner over all", "a miner of the part"])
def test_a_miner_beside_shards_in_parts(pool: RankPool, parts: list[list[int]], miner_in_part: bool) -> None:
    for sizes in SPLITS:
        parity(pool, mined, sizes, parts, miner_in_part)


def ask(rank: int, *, more_rows: bool = False, label: int = 1) -> None:
    """A loss in parts, of which one hands in tuples of more rows, or a label."""
    loss = ClassShardedLoss(arcface(), group=own_part(PARTS[0]))
    rows, labels = harness.line_of_rows(), torch.tensor([0, 0, 1, label])
    tuples = GlobalBatchMiner(miners.MultiSimilarityMiner())(rows, labels) if more_rows else None
    if more_rows and rank > 1:
        rows, labels = rows[:3], labels[:3]
    loss(rows, labels, tuples)


def drifting(apart: bool) -> None:
    loss = ClassShardedLoss(arcface(), group=own_part(PARTS[0]))
    for _ in range(3):
        loss(harness.line_of_rows(), torch.arange(4) % CLASSES)
        with torch.no_grad():
            loss.weight.add_(0.1 * (dist.get_rank() == 3 if apart else 1))


NAME = "ClassShardedLoss(ArcFaceLoss): "
# each part has its own text
REFUSED: dict[str, Refused] = {
    "tuples of other rows": Refused(lambda r: ask(r, more_rows=True), NAME, "InputError", WORLD, same=False),
    "labels out of range": Refused(lambda r: ask(r, label=1 + 100 * (r == 2)), NAME, "InputError", WORLD, same=False),
    "replicas that nobody averages": Refused(
        lambda r: drifting(True), "replicas: weights", "RankMismatchError", WORLD, same=False
    ),
}
test_an_error_of_one_part_is_that_of_all = refusals(__name__, "REFUSED")


def test_weights_of_replicas_that_are_averaged_are_none(pool: RankPool) -> None:
    pool.run(WORLD, drifting, False)
