"""Does my MAP@R change, must I change the learning rate? Digits, the same global batch of 32 in one process and on two ranks.

NormalizedSoftmax (a loss with weights) and SupCon (a loss that compares samples) are trained from the same seeds in four ways: in one
process, with ``GlobalBatchLoss`` under ``"ddp_losses"``, with PML's ``DistributedLossWrapper`` under plain ``"ddp"``, and with the loss of
each rank's own rows under plain ``"ddp"``. All use SGD with momentum and the same learning rate. Rank 0's model, which a checkpoint would
hold, embeds the 450 held-out images. The weight of NormalizedSoftmax after training is compared with that of one process.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from pytorch_metric_learning.losses import NormalizedSoftmaxLoss, SupConLoss
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.ranks import run_ranks
from benchmarks.records import Row
from benchmarks.trainers import make_trainer
from lightning_ddp_losses import GlobalBatchLoss, GlobalBatchSampler
from lightning_ddp_losses.cli import DigitsDataModule, DigitsEncoder, EmbeddingModule
from lightning_ddp_losses.demo.data import as_fetched
from lightning_ddp_losses.demo.evaluation import retrieval_metrics

__all__ = ["main"]

ROWS, EPOCHS = 32, 10
ALONE, OURS, WRAPPER, LOCAL = "one process", "GlobalBatchLoss", "PML's wrapper", "each rank's rows"
LEARNING_RATES = {"NormalizedSoftmax": 3e-4, "SupCon": 0.03}


class Digits(DigitsDataModule):
    """The digits, in global batches that do not depend on the number of ranks."""

    def train_dataloader(self) -> Any:
        """This rank's slices of the global batches."""
        rows = self._rows(train=True)
        batches = GlobalBatchSampler.batches(RandomSampler(rows), ROWS, drop_last=True, seed=0)
        return DataLoader(rows, batch_sampler=batches, collate_fn=as_fetched)


def make_loss(loss: str, way: str) -> nn.Module:
    """Return the loss of a column, wrapped as a row says."""
    made = SupConLoss() if loss == "SupCon" else NormalizedSoftmaxLoss(num_classes=10, embedding_size=32)
    if way == OURS:
        return GlobalBatchLoss(made)
    return DistributedLossWrapper(made) if way == WRAPPER else made


def trained(loss: str, way: str, seed: int) -> tuple[float, NDArray[Any] | None]:
    """Return MAP@R of this rank's model on all held-out images, and the weight of its loss."""
    torch.manual_seed(seed)
    module = EmbeddingModule(
        DigitsEncoder(), make_loss(loss, way), lr=LEARNING_RATES[loss], optimizer=partial(torch.optim.SGD, momentum=0.9)
    )
    data = Digits(ROWS)
    strategy = "ddp_losses" if way == OURS else "ddp"
    if dist.get_world_size() == 1:
        strategy = "ddp"
    torch.manual_seed(seed)  # of the order of rows, after weights that differ by loss
    trainer = make_trainer(strategy, max_epochs=EPOCHS, limit_val_batches=0, precision="64-true")
    trainer.fit(module, datamodule=data)
    images, labels = data.held_out()
    with torch.no_grad():
        score = float(retrieval_metrics(module.eval()(images.double()), labels)["map_at_r"])
    weights = [weight.detach().numpy() for weight in module.loss.parameters()]
    return score, weights[0] if weights else None


def train_all(ways: Sequence[str], seeds: int) -> dict[tuple[str, str], list[tuple[float, NDArray[Any] | None]]]:
    """Return scores and weights by loss, way and seed."""
    return {(loss, way): [trained(loss, way, seed) for seed in range(seeds)] for loss in LEARNING_RATES for way in ways}


def main(arguments: Sequence[str] = ()) -> list[Row]:
    """Train every row and return the table."""
    parser = argparse.ArgumentParser("python -m benchmarks migration", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    found = run_ranks(train_all, (ALONE,), options.seeds, world_size=1, seconds=1800.0)[0]
    found |= run_ranks(train_all, (OURS, WRAPPER, LOCAL), options.seeds, world_size=2, seconds=1800.0)[0]
    rows = []
    for (loss, way), by_seed in found.items():
        scores = [score for score, _ in by_seed]
        truth = found[loss, ALONE]
        row: Row = {
            "table": f"MAP@R on 450 held-out digits, SGD with momentum, global batch {ROWS}, {options.seeds} seeds",
            "loss": loss,
            "learning_rate": LEARNING_RATES[loss],
            "way": way,
            "map_at_r": statistics.mean(scores),
            "lowest": min(scores),
            "highest": max(scores),
            "from_one_process": max(abs(score - alone) for score, (alone, _) in zip(scores, truth, strict=True)),
            "weight_off": float("nan"),
            "verdict": "-",
        }
        pairs = [(weight, alone) for (_, weight), (_, alone) in zip(by_seed, truth, strict=True)]
        if loss == "NormalizedSoftmax":
            row["weight_off"] = max(
                float(np.linalg.norm(weight - alone) / np.linalg.norm(alone)) for weight, alone in pairs
            )
        if way == OURS:
            row["verdict"] = "right" if row["from_one_process"] < 1e-6 else "WRONG"
        rows.append(row)
    return rows
