"""A detector whose dict of losses lacks the entry of the boxes on a rank without boxes: each way to sum them leads to the right page."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_losses import DDPChecks, GlobalBatchLoss, global_mean
from lightning_ddp_losses.testing import RankPool
from tests.fits import make_trainer
from tests.processes import TORCHRUN, run_python
from tests.refusals import assert_same_error

WITHOUT_BOXES = 1  # the rank, in its second batch


class Detector(LightningModule):
    """Classes and boxes of queries, and a loss for each part that has targets."""

    def __init__(self, of_boxes: Callable[[Tensor, Tensor], Tensor] | nn.Module, *, mended: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone, self.classes, self.boxes = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 4)
        self.of_boxes, self.mended = of_boxes, mended

    def losses(self, images: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        features = self.backbone(images)
        found = {"loss_ce": nn.functional.cross_entropy(self.classes(features), torch.zeros(len(images)).long())}
        predicted = self.boxes(features)[: len(boxes)]
        if len(boxes) or self.mended:
            found["loss_bbox"] = self.of_boxes(predicted, boxes)
        return found

    def training_step(self, images: Tensor, index: int) -> Tensor:
        is_without = index == 1 and self.global_rank == WITHOUT_BOXES
        losses = self.losses(images, torch.rand(0 if is_without else len(images), 4))
        return torch.stack(list(losses.values())).sum()

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.rand(16, 4), batch_size=2)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def mean_of_own(predicted: Tensor, boxes: Tensor) -> Tensor:
    return nn.functional.l1_loss(predicted, boxes)


def mean_of_all(predicted: Tensor, boxes: Tensor) -> Tensor:
    return global_mean((predicted - boxes).abs().sum(), boxes.numel())


def fit(kind: str, strategy: str, mended: bool = False) -> list[Tensor]:
    of_boxes = {"own": mean_of_own, "counted": mean_of_all, "wrapped": GlobalBatchLoss(nn.L1Loss())}[kind]
    model = Detector(of_boxes, mended=mended)
    make_trainer(strategy, callbacks=[DDPChecks()], limit_train_batches=3).fit(model)
    return [parameter.detach() for parameter in model.parameters()]


PAGES: dict[tuple[str, str], tuple[str, ...]] = {
    ("own", "ddp"): ("F37", "`boxes.weight`", "not in the graph of the loss", "rank 1"),
    ("own", "ddp_losses"): ("F37", "`boxes.weight`", "not in the graph of the loss", "rank 1"),
    ("counted", "ddp_losses"): ("rank 0: global_mean", "rank 1: backward", "no branch on rank or on local data"),
    ("wrapped", "ddp_losses"): ("rank 0: GlobalBatchLoss", "rank 1: backward", "no branch on rank or on local data"),
}


@pytest.mark.parametrize(("kind", "strategy"), PAGES)
def test_a_missing_entry_is_named_on_all_ranks(pool: RankPool, kind: str, strategy: str) -> None:
    errors = pool.errors(2, fit, kind, strategy)
    assert_same_error(errors, *PAGES[kind, strategy])


@pytest.mark.parametrize("kind", ["counted", "wrapped"])
def test_the_advised_entry_on_every_rank_trains(pool: RankPool, kind: str) -> None:
    """A `global_mean` with a count of 0, and a loss of no rows, are given on the rank without boxes too."""
    first, second = pool.run(2, fit, kind, "ddp_losses", True)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert a.isfinite().all()


# no checks, and no loss of this package: DDP waits in backward until the group's time-out
UNCHECKED = """
    from datetime import timedelta
    from lightning.pytorch import Trainer
    from lightning_ddp_losses import DDPLossStrategy
    from tests.faults.test_missing_entries import Detector, mean_of_own

    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    strategy = DDPLossStrategy(timeout=timedelta(seconds=6))
    Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, **options).fit(Detector(mean_of_own))
"""


def test_without_checks_the_time_out_leads_to_branches_and_not_to_a_failed_rank(tmp_path: Path) -> None:
    script = tmp_path / "detector.py"
    script.write_text(textwrap.dedent(UNCHECKED))
    done = run_python(*TORCHRUN, str(script))
    assert done.returncode
    assert "all ranks say that they are here" in done.stderr
    assert "a dict of losses that lacks an entry on a rank without boxes" in done.stderr
    assert "ddp-losses explain F37" in done.stderr
    assert "ddp-losses explain F42" not in done.stderr
