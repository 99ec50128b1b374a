"""Collectives per step, counted: labels and indices travel with embeddings, few rows in the handshake; a value costs nothing to log."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from torch import nn

from lightning_ddp_losses.losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, GlobalBatchMiner, SigLipLoss
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives, nothing_rides
from tests.doors import handshake
from tests.losses.cases import PML, both_views, two_views
from tests.losses.harness import CLASSES, DIM, Arguments, Case, Net, Rows, by_labels, fresh, own_rows
from tests.losses.torch_cases import TORCH
from tests.oracle import CLASS_LOSSES, normal

ELEMENTS, REPLICATED, ROWS, SYMMETRIC = (1, 0), (2, 0), (3, 1), (3, 0)  # forward, backward


def mined(net: Net, rows: Rows) -> Arguments:
    (embeddings, labels), _ = by_labels(net, rows)
    return (embeddings, labels, miners.PairMarginMiner()(embeddings, labels)), {}


def with_mask(net: Net, rows: Rows) -> Arguments:
    return by_labels(net, rows)[0], {"enqueue_mask": rows["bits"][:, 0].bool()}


def sharded(name: str) -> nn.Module:
    return ClassShardedLoss(getattr(pml, name)(num_classes=CLASSES, embedding_size=DIM))


def rows_count(case: Case) -> tuple[int, int]:
    """Where the slope of both halves follows from one tile, no gradient travels."""
    return SYMMETRIC if GlobalBatchLoss(case.make()).evaluation == "tiled, symmetric" else ROWS


COUNTS: dict[str, tuple[Case, str, tuple[int, int]]] = {
    **{n: (c, "auto", ELEMENTS) for n, c in (PML | TORCH).items() if c.modes and c.modes[0] == "elements"},
    **{n: (c, "rows", rows_count(c)) for n, c in PML.items() if c.modes and c.modes[0] == "rows"},
    **{n: (c, "auto", REPLICATED) for n, c in (PML | TORCH).items() if c.modes and c.modes[0] == "replicated"},
    "SupConLoss, few rows": (PML["SupConLoss"], "auto", REPLICATED),
    "SupConLoss, replicated": (PML["SupConLoss"], "replicated", REPLICATED),
    "ArcFaceLoss, replicated": (PML["ArcFaceLoss"], "replicated", REPLICATED),
    "nn.CrossEntropyLoss, replicated": (TORCH["nn.CrossEntropyLoss"], "replicated", REPLICATED),
    "NTXentLoss, two views": (Case(pml.NTXentLoss, two_views), "rows", ROWS),
    "ContrastiveLoss, plainly": (Case(pml.ContrastiveLoss), "rows", SYMMETRIC),
    "NTXentLoss, plainly": (Case(pml.NTXentLoss), "rows", SYMMETRIC),
    "SupConLoss, plainly": (Case(pml.SupConLoss), "rows", SYMMETRIC),
    "MultiSimilarityLoss, plainly": (Case(pml.MultiSimilarityLoss), "rows", SYMMETRIC),
    "ContrastiveLoss, mined": (Case(pml.ContrastiveLoss, mined), "rows", ROWS),
    "ArcFaceLoss, mined": (Case(PML["ArcFaceLoss"].make, mined), "auto", REPLICATED),
    "CrossBatchMemory, masked": (
        Case(partial(pml.CrossBatchMemory, pml.NTXentLoss(), DIM, memory_size=50), with_mask),
        "auto",
        REPLICATED,
    ),
    # no `GlobalBatchLoss`, so no mode
    **{f"{name}, divided": (Case(partial(sharded, name)), "", ROWS) for name in CLASS_LOSSES},
    "CLIP": (Case(ClipLoss, both_views), "", ROWS),
    "SigLIP": (Case(SigLipLoss, both_views), "", (4, 0)),
}
FEW_ROWS = {"SigLIP": (2, 0)}  # the second handshake carries the sum of the loss and the sums for the texts


def count(name: str, rides: bool) -> list[int]:
    """Collectives of the second step, forward and backward."""
    case, mode, _ = COUNTS[name]
    with contextlib.nullcontext() if rides else nothing_rides():
        for _ in range(2):
            net, loss = fresh(case)  # anew: PML's DynamicSoftMarginLoss cannot take a second step
            wrapped = GlobalBatchLoss(loss, mode=mode, **case.options) if mode else loss  # type: ignore[arg-type]
            args, kwargs = case.give(net, own_rows([6, 6]))
            with CountCollectives() as counter:
                value = wrapped(*args, **kwargs)
                forward = len(counter.take())
                value.backward()
                backward = len(counter.take())
    return [forward, backward]


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # PML 2.9, of its own HistogramLoss
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss by both")  # torch, of its own KLDivLoss
@pytest.mark.parametrize("rides", [False, True], ids=["many rows", "few rows"])
@pytest.mark.parametrize("name", COUNTS)
def test_a_step_costs_what_the_table_says(pool: RankPool, name: str, rides: bool) -> None:
    forward, backward = COUNTS[name][2]
    if rides:  # few rows are in the handshake
        forward, backward = FEW_ROWS.get(name, (forward - (forward > 1), backward))
    else:  # many need an exchange of their own, in backward behind the handshake that says whose gradient it is
        backward *= 2
    assert pool.run(2, count, name, rides) == [[forward, backward]] * 2


def count_wide(mode: str, bytes_over: int) -> list[int]:
    """Four rows of a rank whose bytes are so many more than go into a handshake (of all ranks' embeddings and labels)."""
    width = (handshake.inline_capacity() + bytes_over) // 32
    embeddings = normal(4, width, seed=dist.get_rank())
    loss = GlobalBatchLoss(pml.SupConLoss(), mode=mode)  # type: ignore[arg-type]
    found = []
    for _ in range(3):
        with CountCollectives() as counter:
            loss(embeddings.requires_grad_(), torch.tensor([0, 0, 1, 1])).backward()
        found.append(len(counter.take()))
    return found


@pytest.mark.parametrize(("mode", "costs"), [("replicated", 2), ("rows", 3)])
def test_bytes_decide_whether_rows_travel_in_the_frame(pool: RankPool, mode: str, costs: int) -> None:
    assert pool.run(2, count_wide, mode, 0) == [[costs] * 3] * 2
    for found in pool.run(2, count_wide, mode, -1024):
        assert found[0] <= costs  # the handshakes may have grown before
        assert found[1:] == [costs - 1] * 2


def count_miner(rides: bool) -> int:
    net, _ = fresh(PML["SupConLoss"])
    miner = GlobalBatchMiner(miners.MultiSimilarityMiner())
    args, _ = by_labels(net, own_rows([6, 6]))
    with contextlib.nullcontext() if rides else nothing_rides():
        miner(*args)
        with CountCollectives() as counter:
            miner(*args)
    return len(counter.take())


def test_a_miner_costs_a_frame_and_for_many_rows_a_gather(pool: RankPool) -> None:
    assert pool.run(2, count_miner, False) == [2, 2]
    assert pool.run(2, count_miner, True) == [1, 1]


def count_alone() -> tuple[list[int], bool]:
    found = []
    for make in (lambda: GlobalBatchLoss(pml.SupConLoss()), partial(sharded, "ArcFaceLoss")):
        net, loss = fresh(Case(make))
        with CountCollectives() as counter:
            loss(*by_labels(net, own_rows([12], 0))[0]).backward()
        found.append(len(counter.take()))
    return found, dist.is_initialized()


@pytest.mark.parametrize("distributed", [True, False])
def test_a_world_of_one_pays_nothing(pool: RankPool, distributed: bool) -> None:
    assert pool.run(1, count_alone, distributed=distributed) == [([0, 0], distributed)]
