"""Retrieval metrics of the whole held-out set, from rows that were embedded on several ranks, and the module that logs them.

The metrics are computed by ``EmbeddingRetrieval``, for which rows stay on their ranks. The report also draws the embeddings and needs their
spread, so the rows are gathered once per epoch and restored to the order of one process.
Legend: `G` rows of all ranks, `D` embedding size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.collectives import all_gather_with_grad, all_reduce_with_grad
from lightning_ddp_losses.errors import InputError, expect, format_error
from lightning_ddp_losses.metrics import EmbeddingRetrieval
from lightning_ddp_losses.samplers.evaluation import repeated_rows

_MEASURES = ("precision_at_1", "r_precision", "map_at_r")


@dataclass(frozen=True)
class HeldOut:
    """The held-out set as one process would have it.

    Attributes:
        embeddings: (G, D), at least float32.
        labels: (G,) int64.
        loss: Mean loss over rows. None if it was not computed.
    """

    embeddings: Tensor
    labels: Tensor
    loss: float | None


@dataclass
class HeldOutRows:
    """The rows of the held-out set that this rank has embedded so far."""

    batches: list[tuple[Tensor, ...]] = field(default_factory=list)
    loss_sum: float = 0.0
    loss_rows: int = 0

    def add(self, embeddings: Tensor, labels: Tensor, *indices: Tensor, loss: Tensor | None = None) -> None:
        """Store one batch: (B, D), (B,), optionally positions in the held-out set (B,), and the mean loss of its rows."""
        wide = embeddings.detach().to(torch.promote_types(embeddings.dtype, torch.float32))
        self.batches.append((wide, labels.detach(), *indices))
        if loss is not None:
            self.loss_sum += float(loss) * len(labels)
            self.loss_rows += len(labels)

    @torch.no_grad()
    def gather(self) -> HeldOut:
        """Return the rows of all ranks, equal on every rank.

        With indices, rows are returned in their order and repeated ones are counted once. The loss is the mean over the
        rows for which it was computed, including repeated ones.

        Raises:
            InputError: This rank got no held-out batch.

        Communication: two gathers (three with indices) and one small all-reduce. No backward.
        """
        fix = "Give every rank at least one held-out batch."
        expect(self.batches, "held-out rows of this rank", expected="one at least", got=0, fix=fix, error=InputError)
        # the rows of all ranks, by rank
        columns = [torch.cat(column) for column in zip(*self.batches, strict=True)]
        embeddings, labels, *indices = map(all_gather_with_grad, columns)
        # restore the order of the set, each row once
        if indices:
            positions = indices[0].cpu().numpy()
            first = torch.from_numpy(np.unique(positions, return_index=True)[1]).to(labels.device)
            embeddings, labels = embeddings[first], labels[first]
        # the mean loss over rows
        sums = exact_scalars([self.loss_sum, self.loss_rows], embeddings.device)
        loss_sum, loss_rows = all_reduce_with_grad(sums).tolist()
        loss = loss_sum / loss_rows if loss_rows else None
        return HeldOut(embeddings, labels, loss)


def exact_scalars(values: list[float], device: torch.device) -> Tensor:
    """Return numbers as a tensor of the widest floating-point dtype that the device supports."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.tensor(values, dtype=dtype, device=device)


def retrieval_metrics(embeddings: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the metrics with each row as a query among all other rows, by cosine similarity.

    Args:
        embeddings: (G, ...), flattened, compared in their own precision and at least float32.
        labels: (G,) integers.

    Returns:
        precision_at_1, r_precision and map_at_r (mean average precision at R), each in [0, 1], over the queries whose
        class has another row; NaN without any such query.

    Raises:
        InputError: Embeddings that are not finite.

    Source: Musgrave, Belongie, Lim, "A Metric Learning Reality Check" (2020), section 3.2.
    """
    metric = EmbeddingRetrieval(_MEASURES, sync_on_compute=False)
    metric.update(torch.flatten(embeddings.detach(), 1), labels)
    return as_numbers(metric.compute())


def as_numbers(values: dict[str, Tensor]) -> dict[str, float]:
    """Return the values of retrieval metrics in the order of the report."""
    return {name: float(values[name]) for name in _MEASURES}


def effective_rank(rows: Tensor) -> float:
    """Return the number of directions over which rows (G, D) are spread: from 1 to D, by the entropy of their singular values.

    Embeddings that collapse have a rank near 1.

    Source: Roy, Vetterli, "The effective rank" (2007), EUSIPCO, definition 1.

    Example:
        >>> round(effective_rank(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])), 6)
        2.0
    """
    rows = torch.flatten(rows.detach(), 1).double()
    shares = torch.linalg.svdvals(rows - rows.mean(0))
    return float(torch.special.entr(shares / shares.sum()).sum().exp())


class HeldOutModule(LightningModule):
    """A module that embeds rows, and logs the metrics of the whole held-out set.

    Held-out batches are ``(x, labels)`` or ``(x, labels, indices)``. A subclass defines ``forward``, and may define ``held_out_loss``
    and ``further_metrics``. A result from before training is stored for the report, if the trainer's sanity check takes all batches.
    """

    report_title = "Retrieval on the held-out set"
    report_heading = "embeddings"
    report_rows: tuple[tuple[str, str], ...] = (
        ("precision@1", "precision_at_1"),
        ("R-precision", "r_precision"),
        ("MAP@R", "map_at_r"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.rows = HeldOutRows()
        self.retrieval = EmbeddingRetrieval(_MEASURES)
        self.held_out: HeldOut | None = None
        """The held-out set as last evaluated, on rank 0."""
        self.untrained: dict[str, float] = {}
        """The metrics before training, on every rank."""

    def held_out_loss(self, embeddings: Tensor, labels: Tensor) -> Tensor | None:
        """Return the loss of one held-out batch, or None."""
        return None

    def measure(self, embeddings: Tensor, labels: Tensor) -> dict[str, float]:
        """Return the metrics of rows that are all on one process."""
        return {**retrieval_metrics(embeddings, labels), **self.further_metrics(embeddings)}

    def further_metrics(self, embeddings: Tensor) -> dict[str, float]:
        """Return metrics of all held-out rows in addition to the retrieval metrics."""
        return {}

    def on_validation_epoch_start(self) -> None:
        """Reset the last evaluation."""
        self.rows = HeldOutRows()
        self.retrieval.reset()

    on_predict_epoch_start = on_validation_epoch_start

    def on_test_epoch_start(self) -> None:
        """Reset the last evaluation."""
        self.on_validation_epoch_start()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Embed one batch and store it until the epoch's end."""
        x, labels, *indices = batch
        embeddings = self(x)
        # every rank has the value of a global loss and adds it for its share of the rows
        self.rows.add(embeddings, labels, *indices, loss=self.held_out_loss(embeddings, labels))
        self.retrieval.update(torch.flatten(embeddings, 1), labels, *indices)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the embeddings (B, D) of one batch."""
        x, *columns = batch
        embeddings: Tensor = self(x)
        self.rows.add(embeddings, *columns)
        return embeddings

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of the global held-out set."""
        self._evaluate("val_loss", "")

    def on_test_epoch_end(self) -> None:
        """Log the metrics of the global test set."""
        self._evaluate("test_loss", "test_")

    def on_predict_epoch_end(self) -> None:
        """Join the ranks' embeddings and store them on rank 0."""
        self._keep(self._gather())

    def _evaluate(self, loss_name: str, prefix: str) -> None:
        held_out = self._gather()
        metrics = {} if held_out.loss is None else {loss_name: held_out.loss}
        found = {**as_numbers(self.retrieval.compute()), **self.further_metrics(held_out.embeddings)}
        self.retrieval.reset()
        for name, value in found.items():
            metrics[prefix + name] = value
        if self.trainer.sanity_checking:
            self.untrained = metrics
        # float64, because the logger would round them otherwise
        values = exact_scalars(list(metrics.values()), held_out.embeddings.device)
        # every rank holds the same numbers. With both options Lightning stores them on all ranks without reducing.
        self.log_dict(dict(zip(metrics, values, strict=True)), prog_bar=True, sync_dist=True, rank_zero_only=True)
        self._keep(held_out)

    def _gather(self) -> HeldOut:
        self._warn_of_repeated_rows()
        held_out = self.rows.gather()
        self.rows = HeldOutRows()
        return held_out

    def _keep(self, held_out: HeldOut) -> None:
        if process_groups.rank() == 0 and not self.trainer.sanity_checking:
            self.held_out = HeldOut(held_out.embeddings.cpu(), held_out.labels.cpu(), held_out.loss)

    def _warn_of_repeated_rows(self) -> None:
        """Warn if a padding sampler repeats rows and their positions are unknown."""
        stage = "test" if self.trainer.testing else "predict" if self.trainer.predicting else "val"
        loader = getattr(self.trainer, f"{stage}_dataloaders")
        repeated = repeated_rows(loader) if isinstance(loader, DataLoader) else 0
        has_positions = any(len(columns) > 2 for columns in self.rows.batches)
        if repeated and not has_positions:
            fix = "Return (x, labels, index) from the dataset, index being the row's position: repeated rows are then dropped."
            what = "held-out rows that the distributed sampler repeats"
            rank_zero_warn(format_error(what, expected=0, got=repeated, fix=fix))
