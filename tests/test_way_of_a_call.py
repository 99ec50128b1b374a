"""A feature that a call does not use is not on its way: how many files of the package a call of a loss or a metric enters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning.losses import ArcFaceLoss, SupConLoss
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

import lightning_ddp_losses
from lightning_ddp_losses import ClassShardedLoss, GlobalBatchLoss, differentiable
from lightning_ddp_losses.testing import RankPool

PACKAGE = Path(lightning_ddp_losses.__file__).parent
ROWS = 300  # of a rank: so many that SupCon is evaluated in tiles

# what is called, and the files that one who follows a call there and back has to read
WAYS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "GlobalBatchLoss": (lambda: GlobalBatchLoss(SupConLoss()), 20),
    "ClassShardedLoss": (lambda: ClassShardedLoss(ArcFaceLoss(10, 8)), 18),
    "differentiable": (lambda: differentiable(MeanSquaredError()), 13),
}


def entered_files(kind: str) -> list[str]:
    """Return the files that a third call enters, forward and backward: by then nothing is made or agreed on any more."""
    called = WAYS[kind][0]()
    rows, labels = torch.randn(ROWS, 8), torch.randint(10, (ROWS,))
    arguments: tuple[Tensor, ...] = (rows[:, 0], rows[:, 1]) if kind == "differentiable" else (rows, labels)
    entered = set[str]()

    def see(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.add(str(path.relative_to(PACKAGE)))

    for call in range(3):
        given = arguments[0].clone().requires_grad_()
        before = sys.getprofile()
        if call == 2:
            sys.setprofile(see)
        try:
            called(given, *arguments[1:]).backward()
        finally:
            sys.setprofile(before)
    return sorted(entered) if dist.get_rank() == 0 else []


@pytest.mark.parametrize("kind", WAYS)
def test_a_call_passes_few_files(pool: RankPool, kind: str) -> None:
    files, _ = pool.run(2, entered_files, kind)
    assert "distributed/handshake.py" in files
    assert len(files) <= WAYS[kind][1], "\n".join(files)
