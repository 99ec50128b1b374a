"""A rank that computes in another mode than the others is an error on all ranks: under autocast, or without gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from torch import nn

from lightning_ddp_losses import global_mean
from lightning_ddp_losses.losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, GlobalBatchMiner
from lightning_ddp_losses.metrics import differentiable
from lightning_ddp_losses.testing import RankPool
from tests.losses.harness import line_of_rows

LABELS = torch.tensor([0, 0, 1, 1])
CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "replicated": lambda rows: GlobalBatchLoss(pml.SupConLoss())(rows, LABELS),
    "rows": lambda rows: GlobalBatchLoss(pml.SupConLoss(), mode="rows")(rows, LABELS),
    "elements": lambda rows: GlobalBatchLoss(nn.CrossEntropyLoss())(rows, LABELS),
    "elements of PML": lambda rows: GlobalBatchLoss(pml.ArcFaceLoss(4, 6))(rows, LABELS),
    "class shards": lambda rows: ClassShardedLoss(pml.ArcFaceLoss(4, 6))(rows, LABELS),
    "towers": lambda rows: ClipLoss()(rows, rows),
    "metric": lambda rows: differentiable(torchmetrics.MeanSquaredError())(rows, rows * 0.5),
    "global_mean": lambda rows: global_mean(rows.sum(), 4),
    "miner": lambda rows: GlobalBatchMiner(miners.MultiSimilarityMiner())(rows, LABELS),
}
MODES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no_grad": torch.no_grad,
}


def call(name: str, mode: str, ranks: list[int]) -> None:
    torch.manual_seed(0)
    encoder = nn.Linear(6, 6)
    with MODES[mode]() if dist.get_rank() in ranks else contextlib.nullcontext():
        CALLS[name](encoder(line_of_rows(dtype=torch.float32)))


CASES = [(name, mode) for name in CALLS for mode in MODES if (name, mode) != ("miner", "no_grad")]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_another_mode_on_one_rank_is_an_error_on_all(pool: RankPool, name: str, mode: str) -> None:
    pool.run(2, call, name, mode, [0, 1])
    errors = pool.errors(2, call, name, mode, [1])
    assert {error.type for error in errors} == {"RankMismatchError"}
    assert {"autocast": "autocast=on", "no_grad": "gradients=off"}[mode] in errors[0].message
