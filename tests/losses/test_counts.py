"""Collectives per step, counted: labels and indices travel with the embeddings, and a value costs nothing to log."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from torch import nn

from lightning_ddp_losses.losses import GlobalBatchLoss, GlobalBatchMiner
from tests.counting import CountCollectives
from tests.losses.cases import PML, two_views
from tests.losses.harness import DIM, Arguments, Case, Net, Rows, by_labels, fresh, own_rows
from tests.losses.torch_cases import TORCH
from tests.rank_pool import RankPool

ELEMENTS, REPLICATED, ROWS, SYMMETRIC = (1, 0), (2, 0), (3, 1), (3, 0)  # forward, backward
Make = Callable[[], nn.Module]


def mined(net: Net, rows: Rows) -> Arguments:
    (embeddings, labels), _ = by_labels(net, rows)
    return (embeddings, labels, miners.PairMarginMiner()(embeddings, labels)), {}


def with_mask(net: Net, rows: Rows) -> Arguments:
    return by_labels(net, rows)[0], {"enqueue_mask": rows["bits"][:, 0].bool()}


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
}


def count(name: str) -> list[list[str]]:
    """The second step's collectives: forward, backward, logging."""
    case, mode, _ = COUNTS[name]
    rows = own_rows([6, 6], dist.get_rank())
    for _ in range(2):
        net, loss = fresh(case)  # anew: PML's DynamicSoftMarginLoss cannot take a second step
        wrapped = GlobalBatchLoss(loss, mode=mode, **case.options)  # type: ignore[arg-type]
        args, kwargs = case.give(net, rows)
        with CountCollectives() as counter:
            value = wrapped(*args, **kwargs)
            forward = counter.take()
            value.backward()
            backward = counter.take()
    return [forward, backward]


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # PML 2.9, of its own HistogramLoss
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss by both")  # torch, of its own KLDivLoss
@pytest.mark.parametrize("name", COUNTS)
def test_a_step_costs_what_the_table_says(pool: RankPool, name: str) -> None:
    forward, backward = COUNTS[name][2]
    for found in pool.run(2, count, name):
        assert [len(names) for names in found] == [forward, backward], found


def count_miner() -> list[str]:
    net, _ = fresh(PML["SupConLoss"])
    miner = GlobalBatchMiner(miners.MultiSimilarityMiner())
    args, _ = by_labels(net, own_rows([6, 6], dist.get_rank()))
    miner(*args)
    with CountCollectives() as counter:
        miner(*args)
    return counter.take()


def test_a_miner_costs_a_frame_and_a_gather(pool: RankPool) -> None:
    for names in pool.run(2, count_miner):
        assert len(names) == 2, names


def count_alone() -> Any:
    return count_of_one(), torch.distributed.is_initialized()


def count_of_one() -> int:
    net, loss = fresh(PML["SupConLoss"])
    args, _ = by_labels(net, own_rows([12], 0))
    with CountCollectives() as counter:
        GlobalBatchLoss(loss)(*args).backward()
    return len(counter.take())


@pytest.mark.parametrize("distributed", [True, False])
def test_a_world_of_one_pays_nothing(pool: RankPool, distributed: bool) -> None:
    assert pool.run(1, count_alone, distributed=distributed) == [(0, distributed)]
