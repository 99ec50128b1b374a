"""What one rank can say of its data by itself: losses on own rows only, repeated, reshuffled and lonely rows."""

from __future__ import annotations

from collections.abc import Iterator

import lightning.pytorch as pl

from lightning_ddp_losses.callbacks import loaders
from lightning_ddp_losses.callbacks.findings import Finding
from lightning_ddp_losses.callbacks.loss_observations import local_contrastive
from lightning_ddp_losses.distributed import process_groups


def sizes(trainer: pl.Trainer) -> tuple[int, int]:
    """Rows of this rank's full batches and of its last one; zeros where they cannot be known, or loaders are several."""
    found = loaders.loaders(trainer)
    return loaders.batch_sizes(found[0]) if len(found) == 1 else (0, 0)


def local_losses(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[Finding]:
    """Losses that compare the rows of this rank only, and accumulation that does not help them."""
    names = [f"`{name}`" for name in local_contrastive(module)]
    if not names or process_groups.world_size() == 1:
        return
    listed = ", ".join(names)
    wrap = "Wrap it in GlobalBatchLoss, which evaluates it over the rows of all ranks."
    yield _own("F29", f"{listed} compares the rows of one rank only", listed, wrap)
    if trainer.accumulate_grad_batches > 1:
        what = f"accumulating {trainer.accumulate_grad_batches} batches gives {listed} no more negatives"
        yield _own("F33", what, listed, "Use larger batches, GlobalBatchLoss, or more ranks.")


def repeated(trainer: pl.Trainer) -> Iterator[Finding]:
    """Held-out rows that padding hands out twice."""
    for index, loader in enumerate(loaders.loaders(trainer, validation=True)):
        rows = loaders.repeated_rows(loader)
        if rows:
            yield _own(
                "F54",
                f"{rows} held-out rows count twice in validation",
                f"validation loader {index}",
                "Use a sampler that does not pad (Trainer(use_distributed_sampler=False) and your own slices), or a number "
                "of rows that the ranks divide.",
            )


def reshuffled(trainer: pl.Trainer) -> Iterator[Finding]:
    """Batches that belong together and that Lightning shuffles."""
    for loader in loaders.loaders(trainer):
        name = loaders.reshuffled(loader)
        if name:
            yield _own(
                "F68",
                f"{name} is shuffled over all its batches by Lightning",
                name,
                f"Write DataLoader(..., batch_sampler=GlobalBatchSampler.batches({name}(...), global_batch_size)).",
                "its own order, in which the rows of a batch belong together",
            )


def lonely_rows(trainer: pl.Trainer) -> Iterator[Finding]:
    """A last batch of one row."""
    found = loaders.loaders(trainer)
    size, last = sizes(trainer)
    if last == 1 < size and trainer.num_training_batches == len(found[0]):
        yield _own(
            "F62",
            "the last batch of this rank has one row, of which batch norm makes no statistics",
            "last batch",
            "Set drop_last=True on the DataLoader.",
            "two rows or more",
        )


def _own(fault: str, what: str, name: str, fix: str, expected: str = "") -> Finding:
    return Finding(fault, what, expected, name=name, fix=fix)
