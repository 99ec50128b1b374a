"""Epoch means that plain DDP floors are named with what was logged and what one process would have; those of `"ddp_losses"` are right."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ddp_losses import DDPChecks, LossCheck
from lightning_ddp_losses.testing import RankPool
from tests.callbacks.harness import CLASSES, WIDTH, Subject
from tests.fits import make_trainer

TRAINING_ROWS, VALIDATION_ROWS = (3, 2), (1, 4)  # of each batch; the last rank has one more in the first
NUMBER = re.compile(r"[\d.]+")
NAMES = ["forked_epoch", "train", "val/dataloader_idx_0", "val/dataloader_idx_1"]


class EarlyReader(Callback):  # asks for metrics before the checks see the end of an epoch, as a progress bar does
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        assert trainer.callback_metrics


class Logging(Subject):
    """Logs the sum of the labels, of training and of two validation loaders, under names that are forked and that are not."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        value = batch[1].double().mean()
        self.log("train", value, on_step=False, on_epoch=True, sync_dist=True)
        self.log("forked", value, on_step=True, on_epoch=True, sync_dist=True)
        # neither a mean over rows, nor of all ranks
        self.log("sum", value, on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        self.log("alone", value, on_step=False, on_epoch=True, sync_dist=True, rank_zero_only=True)
        return self.objective(*batch, index) * len(batch[0])

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int, dataloader_idx: int = 0) -> None:
        self.log("val", batch[1].double().mean() + dataloader_idx, sync_dist=True)


def loader(rows: tuple[int, ...]) -> DataLoader:
    first, *others = rows
    return batches_of((first + (dist.get_rank() == dist.get_world_size() - 1), *others))


def batches_of(rows: tuple[int, ...]) -> DataLoader:
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = []
    for number in rows:
        features = torch.randn(number, WIDTH, generator=generator, dtype=torch.float64)
        batches.append((features, torch.randint(CLASSES, (number,), generator=generator)))
    return DataLoader(batches, batch_size=None)


def findings(strategy: str, *, early_reader: bool) -> dict[str, Any]:
    """Fit for two epochs; returns the findings of F82, what was logged last and the labels of this rank."""
    checks = DDPChecks([LossCheck()], action="log", summary=False, file=False)
    callbacks = [EarlyReader(), checks] if early_reader else [checks]
    trainer = make_trainer(strategy, callbacks=callbacks, max_epochs=2, num_sanity_val_steps=1)
    training, validation = loader(TRAINING_ROWS), loader(VALIDATION_ROWS)
    trainer.fit(Logging(False), training, [validation, validation])
    return {
        "found": [finding.record() for finding in checks.findings if finding.severity != "note"],
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "labels": [torch.cat([labels for _, labels in part]) for part in (training, validation)],
    }


@pytest.mark.parametrize("early_reader", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_floored_mean_is_named_with_both_values(pool: RankPool, world_size: int, early_reader: bool) -> None:
    answers = pool.run(world_size, findings, "ddp", early_reader=early_reader)
    training, validation = (
        torch.cat(part).double().mean() for part in zip(*(a["labels"] for a in answers), strict=True)
    )
    truth = dict(zip(NAMES, map(float, (training, training, validation, validation + 1)), strict=True))
    for answer in answers:
        found = {finding["name"]: finding for finding in answer["found"]}
        assert sorted(found) == NAMES, found
        for name, finding in found.items():
            assert (finding["fault"], finding["check"]) == ("F82", "LossCheck"), finding
            logged = float(NUMBER.findall(finding["what"])[-1])
            expected = float(NUMBER.findall(finding["expected"])[0])
            assert logged == pytest.approx(answer["logged"][name], rel=1e-7)
            assert expected == pytest.approx(truth[name], rel=1e-7)
            assert logged > 1.01 * expected
            assert len(finding["values"]) == world_size


def validated(strategy: str, rows: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """Validate alone; returns the findings, what was logged and the labels of this rank."""
    checks = DDPChecks(action="log", summary=False, file=False)
    trainer = make_trainer(strategy, callbacks=[checks])
    loaders = [batches_of(rows[dist.get_rank()])] * 2
    trainer.validate(Logging(False), loaders, verbose=False)
    found = [finding.record() for finding in checks.findings]
    labels = torch.cat([labels for _, labels in loaders[0]])
    return {"found": found, "logged": trainer.callback_metrics, "labels": labels}


@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
@pytest.mark.parametrize("rows", [((7, 3), (7, 2)), ((7, 3), (3,), (3,)), ((7, 3), (3, 7)), ((4, 4), (4, 4), (4, 4))])
def test_a_floored_mean_is_named_in_validation_alone(
    pool: RankPool, rows: tuple[tuple[int, ...], ...], strategy: str
) -> None:
    is_wrong = strategy == "ddp" and sum(map(sum, rows)) % len(rows) > 0
    answers = pool.run(len(rows), validated, strategy, rows)
    truth = float(torch.cat([answer["labels"] for answer in answers]).double().mean())
    for answer in answers:
        assert [finding["fault"] for finding in answer["found"]] == ["F82", "F82"] * is_wrong
        assert (float(answer["logged"]["val/dataloader_idx_0"]) == pytest.approx(truth, rel=1e-6)) != is_wrong
        for number, finding in enumerate(answer["found"]):
            assert finding["name"] == f"val/dataloader_idx_{number}"
            assert float(NUMBER.findall(finding["expected"])[0]) == pytest.approx(truth + number, rel=1e-7)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_strategys_means_are_right(pool: RankPool, world_size: int) -> None:
    for answer in pool.run(world_size, findings, "ddp_losses", early_reader=False):
        assert answer["found"] == []
