"""Parameters in parts under DDP are refused by name; Fabric is told what to do instead, and that is one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from pytorch_metric_learning.losses import ArcFaceLoss, SupConLoss
from torch import Tensor, nn

from lightning_ddp_losses import GlobalBatchLoss
from lightning_ddp_losses.testing import RankEnvironment, RankPool
from tests.answers import assert_all_close

ROWS = (7, 4, 0)


def train_with_fabric(strategy: str) -> dict[str, Tensor]:
    """Train the loop of the documentation on this rank's rows, or alone, with the losses as they are, on those of all."""
    torch.manual_seed(0)
    encoder = nn.Linear(6, 4).double()
    arcface, supcon = ArcFaceLoss(3, 4).double(), SupConLoss()
    own, losses, plugins = slice(0, sum(ROWS)), [arcface, supcon], []
    if dist.is_initialized():
        start = sum(ROWS[: dist.get_rank()])
        own = slice(start, start + ROWS[dist.get_rank()])
        losses, plugins = [GlobalBatchLoss(arcface), GlobalBatchLoss(supcon)], [RankEnvironment()]
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=len(ROWS) if plugins else 1, plugins=plugins)
    fabric.launch()
    model, learnable = fabric.setup_module(encoder), fabric.setup_module(losses[0])
    optimizer = fabric.setup_optimizers(torch.optim.SGD([*model.parameters(), *learnable.parameters()], lr=0.5))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(sum(ROWS), 6, generator=generator, dtype=torch.float64)[own]
        labels = torch.randint(3, (sum(ROWS),), generator=generator)[own]
        optimizer.zero_grad()
        embeddings = model(features)
        fabric.backward(learnable(embeddings, labels) + losses[1](embeddings, labels))
        optimizer.step()
    return {"W": arcface.W.detach(), **dict(encoder.state_dict())}


def test_a_loop_with_fabric_is_one_process(pool: RankPool) -> None:
    expected = pool.run(1, train_with_fabric, "auto", distributed=False)[0]
    for strategy in ("ddp", "ddp_losses"):
        assert_all_close(pool.run(len(ROWS), train_with_fabric, strategy), expected)
