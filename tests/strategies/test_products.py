"""`products="auto"` under the strategy: tensor cores where the encoder gives bfloat16, float32 where its rows are that."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_losses import ClipLoss, GlobalBatchLoss
from lightning_ddp_losses.losses import global_batch, products, two_towers
from lightning_ddp_losses.testing import RankPool
from tests.lightning_ranks import make_trainer
from tests.oracle import batches, cuts
from tests.strategies.jobs import TASK, strategy_of


class Chooses(LightningModule):
    """Two losses that choose by the dtype of their rows; ``wide``: these are float32 whatever the encoder gives."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.wide = wide
        self.encoder = nn.Linear(TASK.features, TASK.dim)
        self.of_pairs = GlobalBatchLoss(pml.SupConLoss(), mode="rows", products="auto")
        self.of_towers = ClipLoss(products="auto")

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        rows = self.encoder(batch[0])
        rows = rows.float() if self.wide else rows
        value: Tensor = self.of_pairs(rows, batch[1]) + self.of_towers(rows, rows.flip(1))
        return value

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def forms(precision: str, wide: bool) -> dict[str, set[str]]:
    """What each loss chose in a fit."""
    found: dict[str, set[str]] = {}

    def noting(title: str, *args: Any) -> products.ProductForm:
        form = products.choose_form(title, *args)
        found.setdefault(title.partition("(")[0], set()).add(form)
        return form

    part = cuts(TASK.rows, dist.get_world_size())[dist.get_rank()]
    data = DataLoader([(x[part].float(), y[part]) for x, y in batches(TASK)], batch_size=None)
    patched = mock.patch.object
    with patched(global_batch, "choose_form", noting), patched(two_towers, "choose_form", noting):
        make_trainer(strategy_of({}), precision=precision).fit(Chooses(wide), data)
    return found


@pytest.mark.parametrize(
    ("precision", "wide", "form"),
    [("bf16-mixed", False, "bf16"), ("bf16-mixed", True, "float32"), ("32-true", False, "float32")],
)
def test_auto_follows_what_the_encoder_gives(pool: RankPool, precision: str, wide: bool, form: str) -> None:
    for found in pool.run(2, forms, precision, wide):
        assert found == {"GlobalBatchLoss": {form}, "ClipLoss": {form}}
