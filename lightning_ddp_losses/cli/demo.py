"""Something to try it all on: real images without a download, two small encoders, and a number to predict of each image.

The images are scikit-learn's bundled handwritten digits, 1,797 grey images of 8x8 pixels in 10 classes. Each row's embedding depends on
that row only, so it is the same on any number of ranks; but with ``batch_norm``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_ddp_losses.cli.data import BatchedArrayDataModule, stratified_split
from lightning_ddp_losses.core.compat import is_made_by_command_line
from lightning_ddp_losses.errors import ConfigurationError, InputError


class DigitsDataModule(BatchedArrayDataModule):
    """The digits as (1, 8, 8) images in [0, 1], split by class into training and held-out images.

    Args:
        batch_size: Images of the GLOBAL batch, over all ranks.
        held_out: Share of every class that is never trained on.
        seed: Fixes the split and, with the epoch, the order of training.
        num_workers: Processes that read ahead on each rank.
        m_per_class: Rows of each class in a training batch, for losses that compare rows; None: rows at random.
        missing_labels: Share of the training images whose label is taken away, for losses that leave such rows out. Held-out images
            keep theirs.
        ignore_index: Stands where a label is missing; that of the loss.

    Raises:
        ConfigurationError: scikit-learn is not installed; options that cannot work.

    Example:
        >>> data = DigitsDataModule(batch_size=64)
        >>> data.batch_size
        64
    """

    inputs_name = "raw pixels"

    def __init__(
        self,
        batch_size: int = 128,
        *,
        held_out: float = 0.25,
        seed: int = 0,
        num_workers: int = 0,
        m_per_class: int | None = None,
        missing_labels: float = 0.0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__(batch_size, seed, num_workers, m_per_class)
        _refuse_missing_labels(missing_labels, ignore_index, m_per_class)
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ConfigurationError(
                "DigitsDataModule",
                expected="scikit-learn, which brings the images",
                got="no such package",
                fix="Run: pip install 'lightning-ddp-losses[demo]'",
            ) from error
        digits = load_digits()
        # sixteenths are exact in every floating dtype
        self.features = self.held_out_features = digits.images[:, None].astype(np.float32) / 16
        self.labels = self.held_out_labels = digits.target.astype(np.int64)
        self.train_rows, self.held_out_rows = stratified_split(self.labels, held_out, seed)
        if missing_labels:
            # a stream of its own: the split stays as it is without them
            random = np.random.default_rng([seed, 1])
            count = round(missing_labels * len(self.train_rows))
            self.labels = self.labels.copy()
            self.labels[random.choice(self.train_rows, count, replace=False)] = ignore_index


def _refuse_missing_labels(share: float, ignore_index: int, m_per_class: int | None) -> None:
    """Refuse options for missing labels that cannot work.

    Raises:
        ConfigurationError: for a share that leaves no label, a class as what stands for none, and batches of classes.
    """
    if not 0 <= share < 1:
        expected = "0 or more, below 1"
        raise ConfigurationError("missing_labels (share of the training images)", expected=expected, got=share)
    if ignore_index >= 0:
        raise ConfigurationError("ignore_index", expected="below 0, as classes are not", got=ignore_index)
    if share and m_per_class is not None:
        raise ConfigurationError(
            "m_per_class",
            expected="none beside missing_labels: an image without a label has no class to be drawn by",
            got=m_per_class,
        )


class DigitsEncoder(nn.Module):
    """Three convolutions and a linear layer for 8x8 grey images.

    Args:
        embedding_size: Width D of the embedding.
        channels: Channels of the first convolution; the others have twice as many.
        batch_norm: Normalise after each layer, the embedding too (as ArcFace's authors do). Ranks then need `SyncBatchNorm`
            (``trainer.sync_batchnorm: true``) to train as one process does.

    Example:
        >>> import torch
        >>> DigitsEncoder(embedding_size=16)(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 16])
    """

    def __init__(self, embedding_size: int = 32, channels: int = 32, batch_norm: bool = False) -> None:
        super().__init__()

        def activation(width: int) -> list[nn.Module]:
            return [nn.BatchNorm2d(width), nn.ReLU()] if batch_norm else [nn.ReLU()]

        layers = [
            nn.Conv2d(1, channels, 3, padding=1),
            *activation(channels),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            *activation(2 * channels),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * channels, 2 * channels, 3, padding=1),
            *activation(2 * channels),
            nn.Flatten(),
            nn.Linear(2 * channels * 16, embedding_size),
        ]
        if batch_norm:
            layers.append(nn.BatchNorm1d(embedding_size))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Embed images (B, 1, 8, 8) as (B, D).

        Raises:
            InputError: Images of another shape.
        """
        if x.shape[1:] != (1, 8, 8):
            raise InputError("images", expected="(B, 1, 8, 8)", got=tuple(x.shape))
        embeddings: Tensor = self.layers(x)
        return embeddings


class MLPEncoder(nn.Module):
    """Linear layers with ReLU between them for rows of any shape (flattened).

    Args:
        in_features: Numbers in one row.
        embedding_size: Width D of the embedding.
        hidden: Widths of the layers between.

    Example:
        >>> import torch
        >>> MLPEncoder(in_features=6, embedding_size=4)(torch.rand(2, 6)).shape
        torch.Size([2, 4])
    """

    def __init__(self, in_features: int, embedding_size: int = 64, hidden: tuple[int, ...] = (256,)) -> None:
        super().__init__()
        self.in_features = in_features
        widths = (in_features, *hidden, embedding_size)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """Embed rows (B, ...) as (B, D).

        Raises:
            InputError: Rows of another length.
        """
        rows = torch.flatten(x, 1)
        if rows.shape[1] != self.in_features:
            raise InputError(
                "row length",
                expected=f"in_features={self.in_features}",
                got=f"{rows.shape[1]} (shape {tuple(x.shape)})",
                fix=f"Set model.init_args.encoder.init_args.in_features to {rows.shape[1]}.",
            )
        embeddings: Tensor = self.layers(rows)
        return embeddings


def slant(images: Tensor) -> Tensor:
    """Return how far handwriting leans: columns of ink per row, of images (B, 1, H, W), as (B,); what deslanting would take away.

    It is the covariance of the ink's column and row over the variance of its row.

    Example:
        >>> import torch
        >>> slant(torch.eye(8).reshape(1, 1, 8, 8))  # ink on the diagonal: a column to the right for each row down
        tensor([1.])
    """
    # ink as a distribution over the image
    ink = images[:, 0]
    ink = ink / ink.sum((1, 2), keepdim=True)
    rows = torch.arange(ink.shape[1], dtype=ink.dtype, device=ink.device)[:, None]
    columns = torch.arange(ink.shape[2], dtype=ink.dtype, device=ink.device)
    # distances from its centre
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

    Example:
        >>> from torchmetrics import PearsonCorrCoef
        >>> from lightning_ddp_losses import differentiable
        >>> module = RegressionModule(DigitsEncoder(), differentiable(PearsonCorrCoef()))
    """

    report_title = "Regression on the held-out set"
    report_heading = "prediction"
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
        # made by the command line, the module is described by its plain config; else its parts are not hyperparameters
        parts = () if is_made_by_command_line() else ("encoder", "metric", "target", "optimizer")
        self.save_hyperparameters(ignore=parts)
        self.encoder, self.head = encoder, nn.Linear(embedding_size, 1)
        self.metric, self.held_out_metric = metric, metric.clone()
        self.target, self.goal, self.lr, self.make_optimizer = target, goal, lr, optimizer

    def forward(self, x: Tensor) -> Tensor:
        """Predict (B,) of a batch."""
        prediction: Tensor = self.head(self.encoder(x))[:, 0]
        return prediction

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make one optimizer for encoder and head."""
        return self.make_optimizer(self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of the global batch."""
        x = batch[0]
        loss = self._loss_of(self.metric(self(x), self.target(x)))
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True, batch_size=len(x))
        return loss

    def on_train_epoch_start(self) -> None:
        """Reset the metric: only the batches' own values are of use in training."""
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
        if self.goal == "maximize":
            return 1 - value
        return value
