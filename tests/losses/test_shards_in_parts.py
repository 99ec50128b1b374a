"""Class shards over parts of four ranks, in a hand-written loop: tuples of a miner over all ranks, and errors of one part alone."""

from __future__ import annotations

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
from tests.oracle import assert_close, graded, own
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


def mined(parts: list[list[int]], miner_in_part: bool) -> list[dict[str, Tensor]]:
    """By split: value and gradients of a loss over parts."""
    part, found = own_part(parts), []
    for sizes in SPLITS:
        rows = harness.own_rows(sizes)
        leaf, labels = rows["targets"].clone().requires_grad_(), rows["labels"]
        loss = ClassShardedLoss(arcface(), group=part)
        miner = GlobalBatchMiner(miners.MultiSimilarityMiner(), group=part if miner_in_part else None)
        found.append(graded(loss(leaf, labels, miner(leaf, labels)), rows=leaf, weight=loss.weight))
        found[-1]["classes"] = torch.arange(loss.shard.start, loss.shard.stop)
    return found


def alone(parts: list[list[int]] | None, sizes: list[int]) -> dict[str, Tensor]:
    """One process; a miner of a part names rows of that part."""
    rows = harness.global_rows()
    leaf, labels = rows["targets"].clone().requires_grad_(), rows["labels"]
    tuples: list[list[Tensor]] = [[], [], [], []]
    for part in parts or [range(WORLD)]:
        index = torch.cat([torch.arange(len(labels))[own(sizes, rank)] for rank in part])
        for kind, found in enumerate(miners.MultiSimilarityMiner()(leaf.detach()[index], labels[index])):
            tuples[kind].append(index[found])
    loss = arcface()
    return graded(loss(leaf, labels, tuple(map(torch.cat, tuples))), rows=leaf, weight=loss.W)


@pytest.mark.parametrize("parts", PARTS, ids=["blocks", "in turn"])
@pytest.mark.parametrize("miner_in_part", [False, True], ids=["a miner over all", "a miner of the part"])
def test_a_miner_beside_shards_in_parts(pool: RankPool, parts: list[list[int]], miner_in_part: bool) -> None:
    results = pool.run(WORLD, mined, parts, miner_in_part)
    for number, sizes in enumerate(SPLITS):
        truth = alone(parts if miner_in_part else None, sizes)
        found = [result[number] for result in results]
        # the mean over ranks is the encoder's, as DDP takes it
        rows = torch.cat([each["rows"] for each in found]) / WORLD
        assert_close({"rows": rows}, {"rows": truth["rows"]})
        for each in found:
            own = truth["weight"][:, each["classes"]]
            assert_close({"value": each["value"], "weight": each["weight"]}, {"value": truth["value"], "weight": own})


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
