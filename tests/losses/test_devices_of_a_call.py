"""Tensors of a call on two devices, or a loss on one and its rows on another: one error that names both, on every rank.

The other device is torch's ``meta``, on rank 1 alone.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from torch import Tensor, nn

from lightning_ddp_losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, GlobalBatchMiner, SigLipLoss
from lightning_ddp_losses.testing import RankPool
from tests.losses.harness import CLASSES, DIM, line_of_rows

LABELS = torch.tensor([0, 0, 1, 1])


def arc() -> nn.Module:
    return pml.ArcFaceLoss(num_classes=CLASSES, embedding_size=DIM).double()


class Weighted(nn.Module):
    """A user's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM, dtype=torch.float64))

    def forward(self, rows: Tensor, others: Tensor) -> Tensor:
        return (rows * others * self.weight).mean()


MAKE: dict[str, Callable[[], nn.Module]] = {
    "CLIP": lambda: ClipLoss().double(),
    "SigLIP": lambda: SigLipLoss(gather="ring").double(),
    "elements": lambda: GlobalBatchLoss(arc()),
    "rows": lambda: GlobalBatchLoss(pml.SupConLoss(), mode="rows"),
    "replicated": lambda: GlobalBatchLoss(Weighted()),
    "class-sharded": lambda: ClassShardedLoss(arc()),
    "class weights": lambda: GlobalBatchLoss(nn.CrossEntropyLoss(torch.ones(DIM, dtype=torch.float64))),
    "miner": lambda: GlobalBatchMiner(miners.MultiSimilarityMiner()),
}
WITHOUT_TENSORS = ("rows", "miner")


def second_argument(name: str) -> Tensor:
    return line_of_rows() if name in ("CLIP", "SigLIP", "replicated") else LABELS


def tensors_apart(name: str) -> None:
    other = second_argument(name)
    MAKE[name]()(line_of_rows(), other.to("meta") if dist.get_rank() else other)


def loss_apart(name: str) -> None:
    loss = MAKE[name]()
    loss(line_of_rows(), second_argument(name))
    if dist.get_rank():
        loss.to("meta")
    loss(line_of_rows(), second_argument(name))


def logits_apart(name: str) -> None:
    loss: ClassShardedLoss = MAKE[name]()  # type: ignore[assignment]
    loss.predict(line_of_rows().to("meta") if dist.get_rank() else line_of_rows())


JOBS = [(tensors_apart, name) for name in MAKE]
JOBS += [(loss_apart, name) for name in MAKE if name not in WITHOUT_TENSORS]
JOBS += [(logits_apart, "class-sharded")]


@pytest.mark.parametrize(("job", "name"), JOBS)
def test_both_devices_are_named_on_all_ranks(pool: RankPool, job: Callable[[str], None], name: str) -> None:
    for error in pool.errors(2, job, name):
        assert error.is_a("InputError"), error.traceback
        assert ": devices: expected" in error.message
        assert "on cpu" in error.message
        assert "on meta" in error.message
