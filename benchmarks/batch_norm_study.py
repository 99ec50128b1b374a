"""Why is DDP + SyncBN worse than DDP alone? Digits, a batch-norm encoder, ArcFace: MAP@R of what each setting trains.

One factor at a time, from one process on 32 rows a batch with a learning rate of its own (SGD with momentum, 6 epochs):

* same batch: the 32 rows are cut for 2 or 4 ranks; only whose rows make the batch statistics changes.
* unbalanced: the same, but each batch is sorted by class before it is cut, so that no rank sees all classes.
* same rows per rank: what "more GPUs" usually means; the batch grows with the ranks and there are fewer steps, with the learning
  rate as it was and scaled by the number of ranks.

Each row is trained from the same seeds. What counts is what a checkpoint would hold: rank 0's model on the 450 held-out images.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pytorch_metric_learning.losses import ArcFaceLoss
from torch.utils.data import DataLoader, RandomSampler, Sampler

from benchmarks.ranks import run_ranks
from benchmarks.records import RESULTS, Row
from benchmarks.trainers import make_trainer
from lightning_ddp_losses import DDPLossStrategy, GlobalBatchSampler, SyncBatchNorm
from lightning_ddp_losses.cli import DigitsDataModule, DigitsEncoder, EmbeddingModule
from lightning_ddp_losses.demo.data import as_fetched
from lightning_ddp_losses.demo.evaluation import retrieval_metrics

__all__ = ["main"]

ROWS, LR, EPOCHS, PRECISION = 32, 3e-4, 6, "64-true"
LOCAL, SYNC, ALONE = "each rank's", "all ranks'", "one process"


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    Attributes:
        part: Which comparison it belongs to.
        ranks: Processes.
        statistics: Whose rows the batch statistics are of.
        batch: Rows over all ranks.
        lr_factor: On the learning rate.
        unbalanced: Ranks see different classes.
    """

    part: str
    ranks: int
    statistics: str
    batch: int = ROWS
    lr_factor: int = 1
    unbalanced: bool = False


def settings() -> list[Setting]:
    """The table, in order."""
    kinds = (LOCAL, SYNC)
    table = [Setting("one process", 1, ALONE)]
    table += [Setting("same batch", ranks, kind) for ranks in (2, 4) for kind in kinds]
    table += [Setting("same batch, unbalanced", ranks, kind, unbalanced=True) for ranks in (2, 4) for kind in kinds]
    table += [
        Setting("same rows per rank", ranks, kind, ROWS * ranks, factor)
        for ranks in (2, 4)
        for factor in (1, ranks)
        for kind in kinds
    ]
    return table


class ByClass(Sampler[int]):
    """A random order in which every batch is sorted by class: cut for the ranks, each gets other classes."""

    def __init__(self, labels: Any, batch: int) -> None:
        self.labels, self.batch, self.random = labels, batch, RandomSampler(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Iterator[int]:
        order = list(self.random)
        for start in range(0, len(order), self.batch):
            yield from sorted(order[start : start + self.batch], key=lambda row: int(self.labels[row]))


class Digits(DigitsDataModule):
    """The digits, balanced over the ranks or not."""

    def __init__(self, setting: Setting, seed: int) -> None:
        super().__init__(setting.batch)
        self.order_seed, self.unbalanced = seed, setting.unbalanced

    def train_dataloader(self) -> Any:
        """This rank's slices of the global batches."""
        rows = self._rows(train=True)
        labels = self.labels[self.train_rows]
        source = ByClass(labels, self.batch_size) if self.unbalanced else RandomSampler(rows)
        batches = GlobalBatchSampler.batches(source, self.batch_size, drop_last=True, seed=self.order_seed)
        return DataLoader(rows, batch_sampler=batches, collate_fn=as_fetched)


def trained(setting: Setting, seed: int) -> float:
    """MAP@R of this rank's model on all held-out images."""
    torch.manual_seed(seed)
    module = EmbeddingModule(
        DigitsEncoder(batch_norm=True),
        ArcFaceLoss(num_classes=10, embedding_size=32, margin=28.6, scale=32),
        lr=LR * setting.lr_factor,
        loss_lr=10 * LR * setting.lr_factor,
    )
    data = Digits(setting, seed)
    plugins = [SyncBatchNorm()] if setting.statistics == SYNC else []
    trainer = make_trainer(
        DDPLossStrategy(), plugins=plugins, max_epochs=EPOCHS, limit_val_batches=0, precision=PRECISION
    )
    trainer.fit(module, datamodule=data)
    images, labels = data.held_out()
    with torch.no_grad():
        return float(retrieval_metrics(module.eval()(images.double()), labels)["map_at_r"])


def train_all(chosen: Sequence[Setting], seeds: int) -> list[list[float]]:
    """By setting and seed."""
    return [[trained(setting, seed) for seed in range(seeds)] for setting in chosen]


def row_of(setting: Setting, by_rank: Sequence[Sequence[float]], reference: Sequence[float]) -> Row:
    """One setting: by rank and seed."""
    saved = by_rank[0]
    apart = max(abs(found - own) for other in by_rank for found, own in zip(other, saved, strict=True))
    off = max(abs(a - b) for a, b in zip(saved, reference, strict=True))
    row: Row = {
        "table": f"MAP@R on 450 held-out digits, {len(saved)} seeds, {EPOCHS} epochs",
        "comparison": setting.part,
        "ranks": setting.ranks,
        "batch": setting.batch,
        "rows_per_rank": setting.batch // setting.ranks,
        "statistics_of_rows": setting.statistics,
        "learning_rate": LR * setting.lr_factor,
        "map_at_r": statistics.mean(saved),
        "lowest": min(saved),
        "highest": max(saved),
        "ranks_differ_by": apart,
        "from_one_process": off,
        "verdict": "-",
    }
    if setting.statistics == SYNC and setting.batch == ROWS:
        row["verdict"] = "right" if off < 1e-6 and apart == 0 else "WRONG"
    return row


def draw(rows: Sequence[Row], path: Path) -> None:
    """MAP@R of each setting, one panel per comparison."""
    from matplotlib.figure import Figure

    parts = ["same batch", "same batch, unbalanced", "same rows per rank"]
    reference = next(row for row in rows if row["comparison"] == "one process")
    figure = Figure(figsize=(11.5, 5.0), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True, width_ratios=[1, 1, 1.7])
    colors = {LOCAL: "tab:orange", SYNC: "tab:blue"}
    for axis, part in zip(axes, parts, strict=True):
        mine = [row for row in rows if row["comparison"] == part]
        places = list(dict.fromkeys((row["ranks"], row["learning_rate"]) for row in mine))
        axis.axhline(reference["map_at_r"], color="black", linewidth=1, linestyle="--", label="one process, 32 rows")
        axis.axhspan(reference["lowest"], reference["highest"], color="black", alpha=0.08, linewidth=0)
        for row in mine:
            side = -0.14 if row["statistics_of_rows"] == LOCAL else 0.14
            x, y = places.index((row["ranks"], row["learning_rate"])) + side, row["map_at_r"]
            reach = [[y - row["lowest"]], [row["highest"] - y]]
            first = places.index((row["ranks"], row["learning_rate"])) == 0
            kind = row["statistics_of_rows"]
            label = ("plain DDP" if kind == LOCAL else "with SyncBatchNorm") if first else None
            axis.errorbar(x, y, reach, fmt="o", color=colors[kind], capsize=4, markersize=7, label=label)
        names = [f"{ranks} ranks\n{_rows(mine, ranks)} rows each" for ranks, _ in places]
        if part == "same rows per rank":
            names = [f"{n}\nlr x {round(lr / LR)}" for n, (_, lr) in zip(names, places, strict=True)]
        axis.set_xticks(range(len(places)), names)
        axis.set_xlim(-0.5, len(places) - 0.5)
        axis.set_title(part)
        axis.grid(axis="y", alpha=0.3)
    axes[0].set_ylabel("MAP@R on held-out digits")
    marks, names = axes[0].get_legend_handles_labels()
    title = f"{reference['table']}: mean, lowest to highest"
    figure.legend(marks, names, loc="outside upper center", ncols=3, title=title, frameon=False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=130)


def _rows(rows: Sequence[Row], ranks: int) -> int:
    return next(row["rows_per_rank"] for row in rows if row["ranks"] == ranks)


def main(arguments: Sequence[str] = ()) -> list[Row]:
    """Train every setting, write the picture, return the table."""
    parser = argparse.ArgumentParser("batch_norm_study", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args(arguments)
    found: dict[Setting, list[list[float]]] = {}
    for ranks in (1, 2, 4):
        chosen = [setting for setting in settings() if setting.ranks == ranks]
        answers = run_ranks(train_all, chosen, options.seeds, world_size=ranks, seconds=1800.0)
        for index, setting in enumerate(chosen):
            found[setting] = [answer[index] for answer in answers]
    reference = found[settings()[0]][0]
    rows = [row_of(setting, found[setting], reference) for setting in settings()]
    draw(rows, RESULTS / "batch_norm_study.png")
    return rows
