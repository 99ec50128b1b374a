"""Lightning modules that the shipped configs train, and two small encoders.

``EmbeddingModule`` trains an encoder with a loss and logs retrieval metrics of the whole held-out set. ``RegressionModule`` predicts a
number with a differentiable metric. A row's embedding depends on that row only, unless ``batch_norm`` is on, so it is the same on any
number of ranks.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal, Optional

import torch
from lightning.pytorch import LightningModule
from pytorch_metric_learning.losses import CrossBatchMemory
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torchmetrics import Metric

from lightning_ddp_losses.core.compat import is_made_by_command_line
from lightning_ddp_losses.demo.evaluation import HeldOutModule
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.microbatch import microbatched


class EmbeddingModule(HeldOutModule):
    """Trains `encoder` so that `loss(encoder(x), labels[, indices_tuple])` gets small.

    Batches are ``(x, labels)`` or ``(x, labels, indices)``. The indices are positions of held-out rows in their set, so that
    the metrics do not depend on how the rows were dealt out. Logged: ``train_loss`` (mean over the epoch), and on
    validation ``val_loss``, ``precision_at_1``, ``r_precision``, ``map_at_r`` of the global held-out set, equal on every
    rank. On test the names begin with ``test_``. A cross-batch memory takes no held-out rows: they see a copy of it.

    Args:
        encoder: x -> embeddings (B, D).
        loss: (embeddings, labels[, indices_tuple]) -> scalar, the pytorch-metric-learning convention. Its parameters are
            trained with the encoder's.
        miner: (embeddings, labels) -> indices_tuple.
        lr: Learning rate of the encoder.
        loss_lr: Learning rate of the loss's own parameters. Default: `lr`.
        chunk_size: Rows of a training batch that the encoder takes at a time (`microbatched`). Default: all of them.
        optimizer: Makes the optimizer from parameter groups.

    Example:
        >>> from pytorch_metric_learning.losses import ArcFaceLoss
        >>> from lightning_ddp_losses.cli import MLPEncoder
        >>> module = EmbeddingModule(MLPEncoder(6, 4), ArcFaceLoss(num_classes=3, embedding_size=4), loss_lr=0.01)
    """

    report_rows = (("loss", "val_loss"), *HeldOutModule.report_rows)

    def __init__(
        self,
        encoder: nn.Module,
        loss: nn.Module,
        miner: Optional[nn.Module] = None,  # noqa: UP045 - read by jsonargparse at run time on every Python
        *,
        lr: float = 1e-3,
        loss_lr: Optional[float] = None,  # noqa: UP045 - read by jsonargparse at run time on every Python
        chunk_size: Optional[int] = None,  # noqa: UP045 - read by jsonargparse at run time on every Python
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = torch.optim.Adam,
    ) -> None:
        super().__init__()
        # the command line describes a module by its plain config. Elsewhere its parts are no hyperparameters.
        parts = () if is_made_by_command_line() else ("encoder", "loss", "miner", "optimizer")
        self.save_hyperparameters(ignore=parts)
        self.encoder, self.loss, self.miner = encoder, loss, miner
        self.lr, self.loss_lr = lr, lr if loss_lr is None else loss_lr
        self.make_optimizer = optimizer
        # the encoder in chunks. As a submodule it would name every parameter twice.
        self._chunked: Callable[[Tensor], Tensor] | None = None
        if chunk_size is not None:
            self._chunked = microbatched(encoder, chunk_size)
        self._evaluated: tuple[nn.Module, ...] = (loss,)  # no submodule of its own

    def configure_model(self) -> None:
        """Divide the encoder over the ranks under FSDP2: each of its layers, then the rest."""
        mesh = self.device_mesh
        if mesh is None or isinstance(self.encoder, FSDPModule):
            return
        for layer in self.encoder.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh["data_parallel"])
        fully_shard(self.encoder, mesh=mesh["data_parallel"])

    def forward(self, x: Tensor) -> Tensor:
        """Embed a batch."""
        if self.training and self._chunked is not None:
            return self._chunked(x)
        embeddings: Tensor = self.encoder(x)
        return embeddings

    def compute_loss(self, embeddings: Tensor, labels: Tensor, loss: nn.Module | None = None) -> Tensor:
        """Return the loss of these rows, or another loss of them, with the miner's tuples if there is a miner."""
        mined = [] if self.miner is None else [self.miner(embeddings, labels)]
        computed = self.loss if loss is None else loss
        value: Tensor = computed(embeddings, labels, *mined)
        return value

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make one optimizer of two groups: the encoder, and the loss with its parameters."""
        encoder = list(self.encoder.parameters())
        shared = {id(parameter) for parameter in encoder}
        loss = [parameter for parameter in self.loss.parameters() if id(parameter) not in shared]
        parts = [
            {"params": encoder, "lr": self.lr, "name": "encoder"},
            {"params": loss, "lr": self.loss_lr, "name": "loss"},
        ]
        return self.make_optimizer([part for part in parts if part["params"]])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        x, labels = batch[:2]
        loss = self.compute_loss(self(x), labels)
        # reduced once an epoch, also for a global loss, as ranks with different numbers of rows weigh it differently
        self.log(
            "train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True, batch_size=len(labels)
        )
        return loss

    def on_validation_epoch_start(self) -> None:
        """Keep held-out rows out of a loss that remembers rows."""
        super().on_validation_epoch_start()
        remembers = any(isinstance(module, CrossBatchMemory) for module in self.loss.modules())
        self._evaluated = (copy.deepcopy(self.loss) if remembers else self.loss,)

    def held_out_loss(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of one held-out batch."""
        return self.compute_loss(embeddings, labels, self._evaluated[0])

    def _evaluate(self, loss_name: str, prefix: str) -> None:
        super()._evaluate(loss_name, prefix)
        self._evaluated = (self.loss,)


class DigitsEncoder(nn.Module):
    """Three convolutions and a linear layer for 8x8 grey images.

    Args:
        embedding_size: Width D of the embedding.
        channels: Channels of the first convolution. The others have twice as many.
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
        expect(x.shape[1:] == (1, 8, 8), "images", expected="(B, 1, 8, 8)", got=tuple(x.shape), error=InputError)
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
        width, expected = rows.shape[1], f"in_features={self.in_features}"
        got = f"{width} (shape {tuple(x.shape)})"
        fix = f"Set model.init_args.encoder.init_args.in_features to {width}."
        expect(width == self.in_features, "row length", expected=expected, got=got, fix=fix, error=InputError)
        embeddings: Tensor = self.layers(rows)
        return embeddings


def slant(images: Tensor) -> Tensor:
    """Return how far handwriting leans: columns of ink per row, of images (B, 1, H, W), as (B,): the slant that deslanting would remove.

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
    held-out set, equal on every rank. On test the names begin with ``test_``.

    Args:
        encoder: x -> embeddings (B, embedding_size).
        metric: (prediction (B,), target (B,)) -> scalar, over all ranks (``differentiable``).
        target: x -> the number to predict, (B,).
        embedding_size: Width of the embeddings.
        goal: ``"maximize"``: the loss is 1 - metric (a correlation, R2). ``"minimize"``: the metric (an error).
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
        # the command line describes a module by its plain config. Elsewhere its parts are no hyperparameters.
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
        """Update the metric with one held-out batch."""
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
        # every rank holds the same numbers. With both options Lightning keeps them on all ranks without reducing.
        self.log_dict(values, prog_bar=True, sync_dist=True, rank_zero_only=True)

    def _loss_of(self, value: Tensor) -> Tensor:
        return 1 - value if self.goal == "maximize" else value
