"""A feature that a call does not use is not on its way: how many functions of the package a call enters, and how many lines it executes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torchmetrics import PearsonCorrCoef

import lightning_ddp_losses
from lightning_ddp_losses import (
    ClassShardedLoss,
    ClipLoss,
    GlobalBatchLoss,
    SigLipLoss,
    SyncBatchNorm,
    differentiable,
    global_mean,
)
from lightning_ddp_losses.testing import RankPool

PACKAGE = str(Path(lightning_ddp_losses.__file__).parent)
FEW, MANY, DIM = 8, 300, 16  # rows of rank 0; so many that SupCon is evaluated in tiles
ROOM = 1.1
Arguments = tuple[Tensor, ...]


@dataclass(frozen=True)
class Way:
    """What is called, and what a later call costs one who follows it: forward only.

    Attributes:
        make: What is called.
        arguments: Number of rows -> the arguments.
        functions: Functions of the package that it enters, each once; comprehensions and lambdas do not count.
        lines: Lines that it executes, without waiting for peers.
        rows: Of rank 0.
    """

    make: Callable[[], Callable[..., Tensor]]
    arguments: Callable[[int], Arguments]
    functions: int
    lines: int
    rows: int = FEW


def pair(rows: int) -> Arguments:
    return torch.randn(rows, DIM, requires_grad=True), torch.arange(rows) % 3


def towers(rows: int) -> Arguments:
    return torch.randn(rows, DIM, requires_grad=True), torch.randn(rows, DIM, requires_grad=True)


def numbers(rows: int) -> Arguments:
    return torch.randn(rows, requires_grad=True), torch.randn(rows)


def mean() -> Callable[..., Tensor]:
    return lambda rows, _: global_mean(rows.square().sum(), rows.numel())


def batch_norm() -> Callable[..., Tensor]:
    layer = SyncBatchNorm().apply(nn.Sequential(nn.BatchNorm1d(DIM)))
    return lambda rows, _: layer(rows).square().sum()


WAYS: dict[str, Way] = {
    "SupCon": Way(lambda: GlobalBatchLoss(pml.SupConLoss()), pair, 90, 640),
    "SupCon in tiles": Way(lambda: GlobalBatchLoss(pml.SupConLoss()), pair, 174, 1330, rows=MANY),
    "ArcFace": Way(lambda: GlobalBatchLoss(pml.ArcFaceLoss(3, DIM)), pair, 100, 759),
    "class shards": Way(lambda: ClassShardedLoss(pml.ArcFaceLoss(30, DIM)), pair, 146, 877),
    "CLIP": Way(ClipLoss, towers, 124, 759),
    "SigLIP": Way(SigLipLoss, towers, 128, 883),
    "a metric": Way(lambda: differentiable(PearsonCorrCoef()), numbers, 103, 1281),
    "global_mean": Way(mean, pair, 42, 263),
    "batch norm": Way(batch_norm, pair, 40, 252),
}


@dataclass
class Followed:
    """What one who follows a call sees."""

    functions: set[tuple[str, str]] = field(default_factory=set)
    lines: int = 0

    @contextmanager
    def functions_of(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before)

    @contextmanager
    def lines_of(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            self.functions.add((code.co_filename, getattr(code, "co_qualname", code.co_name)))

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_name == "wait":
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        self.lines += event == "line"
        return self._line


def follow(name: str) -> tuple[list[str], int]:
    """Return the functions that a sixth call enters, and how many lines it executes: nothing is made or agreed on any more."""
    way, rank, followed = WAYS[name], dist.get_rank(), Followed()
    called = way.make()
    for _ in range(5):
        called(*way.arguments(way.rows + rank)).backward()
    arguments = way.arguments(way.rows + rank)
    with followed.functions_of():
        value = called(*arguments)
    value.backward()
    arguments = way.arguments(way.rows + rank)
    with followed.lines_of():
        value = called(*arguments)
    value.backward()
    functions = [f"{Path(file).relative_to(PACKAGE)}: {function}" for file, function in followed.functions]
    return sorted(functions), followed.lines


@pytest.mark.parametrize("name", WAYS)
def test_a_call_enters_few_functions_and_executes_few_lines(pool: RankPool, name: str) -> None:
    functions, lines = pool.run(2, follow, name)[0]
    way = WAYS[name]
    assert way.functions / 2 < len(functions) <= way.functions * ROOM, "\n".join(functions)
    assert way.lines / 2 < lines <= way.lines * ROOM, lines
