"""A LightningModule that is trained on a metric of all ranks: an encoder, a linear head, and a number to predict of each input."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.mixins import hparams_mixin
from torch import Tensor, nn
from torchmetrics import Metric


def slant(images: Tensor) -> Tensor:
    """How far handwriting leans: columns of ink per row, of images (B, 1, H, W), as (B,); what deslanting would take away.

    It is the covariance of the ink's column and row over the variance of its row.
    """
    ink = images[:, 0]
    ink = ink / ink.sum((1, 2), keepdim=True)
    rows = torch.arange(ink.shape[1], dtype=ink.dtype, device=ink.device)[:, None]
    columns = torch.arange(ink.shape[2], dtype=ink.dtype, device=ink.device)
    down = rows - (ink * rows).sum((1, 2), keepdim=True)
    across = columns - (ink * columns).sum((1, 2), keepdim=True)
    return (ink * down * across).sum((1, 2)) / (ink * down * down).sum((1, 2))


class RegressionModule(LightningModule):
    """Trains `head(encoder(x))` so that `metric(prediction, target(x))` gets better.

    Logged: ``train_loss`` (mean over the epoch's batches) and, on validation, ``val_loss`` and ``val_metric`` of the whole
    held-out set, equal on every rank; on test the same with ``test_``.

    Args:
        encoder: x -> embeddings (B, embedding_size).
        metric: (prediction (B,), target (B,)) -> scalar, over all ranks (``differentiable``).
        target: x -> the number to predict, (B,).
        embedding_size: Width of the embeddings.
        goal: ``"maximize"``: the loss is 1 - metric (a correlation, R2); ``"minimize"``: the metric (an error).
        lr: Learning rate.
        optimizer: Makes the optimizer from parameters.
    """

    report_title = "Regression on the held-out set"
    report_rows = (("loss", "val_loss"), ("metric", "val_metric"))

    def __init__(
        self,
        encoder: nn.Module,
        metric: Metric,
        target: Callable[[Tensor], Tensor] = slant,
        *,
        embedding_size: int = 32,
        goal: Literal["maximize", "minimize"] = "maximize",
        lr: float = 1e-3,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = torch.optim.Adam,
    ) -> None:
        super().__init__()
        plain = hparams_mixin._given_hyperparameters.get() is not None
        self.save_hyperparameters(ignore=() if plain else ("encoder", "metric", "target", "optimizer"))
        self.encoder, self.head = encoder, nn.Linear(embedding_size, 1)
        self.metric, self.held_out_metric = metric, metric.clone()
        self.target, self.goal, self.lr, self.make_optimizer = target, goal, lr, optimizer

    def forward(self, x: Tensor) -> Tensor:
        """Predict (B,) of a batch."""
        prediction: Tensor = self.head(self.encoder(x))[:, 0]
        return prediction

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer for encoder and head."""
        return self.make_optimizer(self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Loss of the global batch."""
        x = batch[0]
        loss = self._loss_of(self.metric(self(x), self.target(x)))
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True, batch_size=len(x))
        return loss

    def on_train_epoch_start(self) -> None:
        """Only the batches' own values are of use in training."""
        self.metric.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Keep what the metric needs of one held-out batch."""
        self.held_out_metric.update(self(batch[0]), self.target(batch[0]))

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        """Log the metric of the global held-out set."""
        self._evaluate("val_")

    def on_test_epoch_end(self) -> None:
        """Log the metric of the global test set."""
        self._evaluate("test_")

    def _evaluate(self, prefix: str) -> None:
        value = self.held_out_metric.compute()
        self.held_out_metric.reset()
        values = {f"{prefix}loss": self._loss_of(value), f"{prefix}metric": value}
        # every rank holds the same numbers; with both options Lightning keeps them on all ranks, and reduces nothing
        self.log_dict(values, prog_bar=True, sync_dist=True, rank_zero_only=True)

    def _loss_of(self, value: Tensor) -> Tensor:
        return 1 - value if self.goal == "maximize" else value
