"""A call inside a captured graph is refused by name, on all ranks, whichever of them captures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
import torchmetrics
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses import (
    ClassShardedLoss,
    ClipLoss,
    ConfigurationError,
    GlobalBatchLoss,
    SyncBatchNorm,
    differentiable,
)
from lightning_ddp_losses.collectives import all_reduce_with_grad
from lightning_ddp_losses.testing import RankPool

CLASSES, DIM = 4, 6


def norm(rows: Tensor) -> Tensor:
    layer = nn.BatchNorm1d(DIM)
    with mock.patch.object(torch.cuda, "is_initialized", return_value=False):  # to synchronise it is a handshake too
        SyncBatchNorm().apply(layer)
    return layer(rows)  # type: ignore[no-any-return]


CALLS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "rows": lambda rows, labels: GlobalBatchLoss(pml.SupConLoss())(rows, labels),
    "elements": lambda rows, labels: GlobalBatchLoss(nn.CrossEntropyLoss())(rows, labels),
    "class-sharded": lambda rows, labels: ClassShardedLoss(pml.ArcFaceLoss(CLASSES, DIM))(rows, labels),
    "two towers": lambda rows, labels: ClipLoss()(rows, rows),
    "metric": lambda rows, labels: differentiable(torchmetrics.MeanSquaredError())(rows, rows),
    "collective": lambda rows, labels: all_reduce_with_grad(rows),
    "batch norm": lambda rows, labels: norm(rows),
}


@contextlib.contextmanager
def capturing(here: bool) -> Iterator[None]:
    """Inside the block, torch says that a graph is captured."""
    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=here),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
    ):
        yield


def errors_on_rank(captures: list[int]) -> dict[str, str]:
    """What each call says on this rank, then that it works again."""
    rows, labels = torch.randn(4, DIM, requires_grad=True), torch.tensor([0, 0, 1, 1])
    found = {}
    for name, call in CALLS.items():
        try:
            with capturing(dist.get_rank() in captures):
                call(rows, labels)
            found[name] = "no error"
        except ConfigurationError as error:
            found[name] = str(error)
        call(rows, labels)
    return found


def test_refused_on_all_ranks(pool: RankPool) -> None:
    for captures in ([1], [0, 1]):
        found = pool.run(2, errors_on_rank, captures)
        assert found[0] == found[1]
        for name, text in found[0].items():
            assert "captured graph" in text, f"{name}: {text}"
            assert "torch.cuda.graph" in text
            assert 'mode="reduce-overhead"' in text


def test_refused_by_one_process(pool: RankPool) -> None:
    (found,) = pool.run(1, errors_on_rank, [0])
    alone = {name: text for name, text in found.items() if "captured graph" not in text}
    assert set(alone) <= {"collective", "batch norm"}, alone  # which do nothing there that a graph could not hold
