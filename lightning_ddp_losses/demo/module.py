"""Lightning modules that the included configs train, and small encoders.

``EmbeddingModule`` trains an encoder with a loss and logs retrieval metrics of the whole held-out set. ``RegressionModule`` predicts a
number with a differentiable metric. ``SelfDistillationModule`` is trained without labels. A row's embedding only depends on that row,
unless ``batch_norm`` is enabled, so it is the same on any number of ranks.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal, Optional

import numpy as np
import torch
from lightning.pytorch import LightningModule
from pytorch_metric_learning.losses import CrossBatchMemory
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchmetrics import Metric

from lightning_ddp_losses import ssl
from lightning_ddp_losses.core.lightning_compat import is_made_by_command_line
from lightning_ddp_losses.core.transparent import all_modules
from lightning_ddp_losses.demo.evaluation import HeldOutModule, effective_rank
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.losses.partial_sums import global_mean
from lightning_ddp_losses.microbatch import microbatched
from lightning_ddp_losses.samplers.global_draw import share

# logging of a mean over the rows of an epoch: reduced once, weighted by the ranks' numbers of rows
_EPOCH_MEAN: dict[str, Any] = {"on_step": False, "on_epoch": True, "prog_bar": True, "sync_dist": True}


class EmbeddingModule(HeldOutModule):
    """Trains `encoder` so that `loss(encoder(x), labels[, indices_tuple])` is minimised.

    Batches are ``(x, labels)`` or ``(x, labels, indices)``. The indices are positions of held-out rows in their set, so that
    the metrics do not depend on how the rows were distributed. Logged: ``train_loss`` (mean over the epoch), and on
    validation ``val_loss``, ``precision_at_1``, ``r_precision``, ``map_at_r`` of the global held-out set, equal on every
    rank. On test the names begin with ``test_``. Held-out rows are not stored in a cross-batch memory: a copy of it is used.

    Args:
        encoder: x -> embeddings (B, D).
        loss: (embeddings, labels[, indices_tuple]) -> scalar, the pytorch-metric-learning convention. Its parameters are
            trained with the encoder's.
        miner: (embeddings, labels) -> indices_tuple.
        lr: Learning rate of the encoder.
        loss_lr: Learning rate of the loss's own parameters. Default: `lr`.
        chunk_size: Rows of a training batch that the encoder processes at a time (`microbatched`). Default: all of them.
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
        # the command line records a module as its plain config. Otherwise its parts are not hyperparameters.
        parts = () if is_made_by_command_line() else ("encoder", "loss", "miner", "optimizer")
        self.save_hyperparameters(ignore=parts)
        self.encoder, self.loss, self.miner = encoder, loss, miner
        self.lr, self.loss_lr = lr, lr if loss_lr is None else loss_lr
        self.make_optimizer = optimizer
        # the encoder in chunks. As a submodule it would register every parameter under two names.
        self._chunked: Callable[[Tensor], Tensor] | None = None
        if chunk_size is not None:
            self._chunked = microbatched(encoder, chunk_size)
        self._evaluated: tuple[nn.Module, ...] = (loss,)  # a tuple, so that it is not registered as a submodule

    def configure_model(self) -> None:
        """Divide the encoder over the ranks under FSDP2: each of its layers, then the encoder itself."""
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
        """Return the loss of these rows, or the value of another loss, with the miner's tuples if there is a miner."""
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
        self.log("train_loss", loss, batch_size=len(labels), **_EPOCH_MEAN)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Evaluate a copy of a loss that stores rows, so that held-out rows are not stored."""
        super().on_validation_epoch_start()
        remembers = any(isinstance(module, CrossBatchMemory) for module in all_modules(self.loss))
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
        channels: Channels of the first convolution. The later convolutions have twice as many.
        batch_norm: Whether to normalise after each layer, including the embedding (as ArcFace's authors do). Ranks then need
            `SyncBatchNorm` (``trainer.sync_batchnorm: true``) to train in the same way as one process.

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
        expect(
            x.shape[1:] == (1, 8, 8),
            "images",
            expected="(B, 1, 8, 8)",
            got=tuple(x.shape),
            error=InputError,
            fix="Use an encoder for your images, or resize them to 8x8 grey values.",
        )
        embeddings: Tensor = self.layers(x)
        return embeddings


class MLPEncoder(nn.Module):
    """Linear layers with ReLU between them for rows of any shape (flattened).

    Args:
        in_features: Numbers in one row.
        embedding_size: Width D of the embedding.
        hidden: Widths of the hidden layers.

    Example:
        >>> import torch
        >>> MLPEncoder(in_features=6, embedding_size=4)(torch.rand(2, 6)).shape
        torch.Size([2, 4])
    """

    width_option = "in_features"
    """Name of the option with the row length, for messages."""

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
        width, expected = rows.shape[1], f"{self.width_option}={self.in_features}"
        got = f"{width} (shape {tuple(x.shape)})"
        fix = f"Set model.init_args.encoder.init_args.{self.width_option} to {width}."
        expect(width == self.in_features, "row length", expected=expected, got=got, fix=fix, error=InputError)
        embeddings: Tensor = self.layers(rows)
        return embeddings


def slant(images: Tensor) -> Tensor:
    """Return the slant of handwriting in images (B, 1, H, W), as (B,): columns of ink per row, which deslanting would remove.

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
    """Trains `head(encoder(x))` so that `metric(prediction, target(x))` improves.

    Logged: ``train_loss`` (mean over the epoch's batches) and, on validation, ``val_loss`` and ``val_metric`` of the whole
    held-out set, equal on every rank. On test the names begin with ``test_``.

    Args:
        encoder: x -> embeddings (B, embedding_size).
        metric: (prediction (B,), target (B,)) -> scalar, over all ranks (``differentiable``).
        target: x -> the number to predict, (B,).
        embedding_size: Width of the embeddings.
        goal: ``"maximize"``: the loss is 1 - metric (a correlation, R2). ``"minimize"``: the loss is the metric (an error).
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
        # the command line records a module as its plain config. Otherwise its parts are not hyperparameters.
        parts = () if is_made_by_command_line() else ("encoder", "metric", "target", "optimizer")
        self.save_hyperparameters(ignore=parts)
        self.encoder, self.head = encoder, nn.Linear(embedding_size, 1)
        self.metric, self.held_out_metric = metric, metric.clone()
        self.target, self.goal, self.lr, self.make_optimizer = target, goal, lr, optimizer

    def forward(self, x: Tensor) -> Tensor:
        """Predict (B,) for a batch."""
        prediction: Tensor = self.head(self.encoder(x))[:, 0]
        return prediction

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make one optimizer for encoder and head."""
        return self.make_optimizer(self.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of the global batch."""
        x = batch[0]
        loss = self._loss_of(self.metric(self(x), self.target(x)))
        self.log("train_loss", loss, batch_size=len(x), **_EPOCH_MEAN)
        return loss

    def on_train_epoch_start(self) -> None:
        """Reset the metric, because training only uses the values of single batches."""
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
        # every rank holds the same numbers. With both options Lightning stores them on all ranks without reducing.
        self.log_dict(values, prog_bar=True, sync_dist=True, rank_zero_only=True)

    def _loss_of(self, value: Tensor) -> Tensor:
        return 1 - value if self.goal == "maximize" else value


# ---------------------------------------------------------------------- without labels

# the largest change of a view: rotation (radians), scale, shear, shift (relative to half an image), brightness, and pixel noise
_TURN, _SIZE, _SHEAR, _MOVE, _BRIGHTNESS, _NOISE = 0.3, 0.15, 0.2, 0.2, 0.3, 0.1


class PrototypeHead(nn.Module):
    """Cosines (B, K) of projected embeddings and K learned prototypes.

    Args:
        embedding_size: Width of the embeddings.
        prototypes: K.
        hidden: Width of the hidden layer.
    """

    def __init__(self, embedding_size: int, prototypes: int, hidden: int = 128) -> None:
        super().__init__()
        layers = [nn.Linear(embedding_size, hidden), nn.GELU(), nn.Linear(hidden, embedding_size)]
        self.layers = nn.Sequential(nn.GELU(), *layers)
        self.prototypes = nn.Parameter(torch.randn(prototypes, embedding_size))

    def forward(self, embeddings: Tensor) -> Tensor:
        """Compare embeddings (B, D) with the prototypes."""
        return functional.normalize(self.layers(embeddings)) @ functional.normalize(self.prototypes).T


class SelfDistillationModule(HeldOutModule):
    """Trains `encoder` on grey images (B, 1, H, W) without their labels.

    A student predicts the output of a running mean of itself, the teacher, for another view of the image (DINO).

    | step | over the rows of all ranks |
    |---|---|
    | targets of the teacher | ``ssl.Center`` or ``ssl.sinkhorn`` |
    | cross entropy of the student | ``global_mean`` |
    | spread of the embeddings | ``ssl.koleo`` |

    The teacher does not need synchronisation, because it is a running mean of weights that are equal on every rank. The views are derived
    from the seed and the position of an image in the global batch, so they are the same as in one process on any number of ranks.

    Logged: ``train_loss`` (mean over the epoch), and on validation ``precision_at_1``, ``r_precision``, ``map_at_r`` and
    ``effective_rank`` of the teacher's embeddings of the global held-out set. On test the names begin with ``test_``.

    Args:
        encoder: x -> embeddings (B, embedding_size).
        embedding_size: Width of the embeddings.
        prototypes: Number of prototypes, K.
        targets: ``"center"`` or ``"sinkhorn"``, the method that keeps the teacher from assigning all images to one prototype.
        student_temperature: Divides the student's cosines.
        teacher_temperature: Divides the teacher's cosines. It is lower, which makes the teacher's distribution sharper.
        koleo_weight: Weight of the spread of the embeddings.
        teacher_momentum: Share of the previous teacher that a step keeps.
        seed: Determines the views.
        lr: Learning rate.
        optimizer: Makes the optimizer from parameters.

    Source: Caron et al., DINO (2021), arXiv 2104.14294, algorithm 1; Oquab et al., DINOv2 (2023), arXiv 2304.07193, section 4.

    Example:
        >>> module = SelfDistillationModule(DigitsEncoder())
        >>> module.embed(module.student, torch.rand(2, 1, 8, 8))[1].shape
        torch.Size([2, 64])
    """

    report_rows = (*HeldOutModule.report_rows, ("effective rank", "effective_rank"))

    def __init__(
        self,
        encoder: nn.Module,
        *,
        embedding_size: int = 32,
        prototypes: int = 64,
        targets: Literal["center", "sinkhorn"] = "center",
        student_temperature: float = 0.1,
        teacher_temperature: float = 0.03,
        koleo_weight: float = 0.02,
        teacher_momentum: float = 0.99,
        seed: int = 0,
        lr: float = 2e-3,
        optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = torch.optim.Adam,
    ) -> None:
        super().__init__()
        # the command line records a module as its plain config. Otherwise its parts are not hyperparameters.
        parts = () if is_made_by_command_line() else ("encoder", "optimizer")
        self.save_hyperparameters(ignore=parts)
        self.student = nn.Sequential(encoder, PrototypeHead(embedding_size, prototypes))
        running_mean = get_ema_multi_avg_fn(teacher_momentum)  # type: ignore[no-untyped-call]
        self.teacher = AveragedModel(self.student, multi_avg_fn=running_mean, use_buffers=True).requires_grad_(False)
        self.center = ssl.Center(prototypes)
        self.targets, self.koleo_weight, self.seed = targets, koleo_weight, seed
        self.student_temperature, self.teacher_temperature = student_temperature, teacher_temperature
        self.lr, self.make_optimizer = lr, optimizer

    def forward(self, x: Tensor) -> Tensor:
        """Embed images with the teacher's encoder."""
        return self.embed(self.teacher.module, x)[0]

    def embed(self, network: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings (B, D) and cosines (B, K) of one of the two networks."""
        encoder, head = network.children()
        embeddings: Tensor = encoder(x)
        return embeddings, head(embeddings)

    def further_metrics(self, embeddings: Tensor) -> dict[str, float]:
        """Return the number of directions over which all held-out rows are spread."""
        return {"effective_rank": effective_rank(embeddings)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make one optimizer for the student."""
        return self.make_optimizer(self.student.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of one batch, without its labels."""
        images = batch[0]
        # 1. two views of each image
        numbers = [self.seed, self.current_epoch, batch_idx]
        views = torch.cat([distorted(images, np.random.default_rng([*numbers, view])) for view in range(2)])
        # 2. both networks
        embeddings, cosines = self.embed(self.student, views)
        with torch.no_grad():
            targets = self._targets(self.embed(self.teacher.module, views)[1])
        # 3. the student's view of an image is compared with the teacher's other view
        log_student = (cosines / self.student_temperature).log_softmax(1)
        swapped = torch.cat(targets.chunk(2)[::-1])
        cross_entropy = global_mean(-(swapped * log_student).sum(), len(swapped), name="student and teacher")
        loss = cross_entropy + self.koleo_weight * ssl.koleo(embeddings, groups=2)
        self.log("train_loss", loss, batch_size=len(images), **_EPOCH_MEAN)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Move the teacher towards the student."""
        self.teacher.update_parameters(self.student)

    def _targets(self, cosines: Tensor) -> Tensor:
        """Return the distributions (2B, K) over prototypes that the student has to predict."""
        if self.targets == "sinkhorn":
            return ssl.sinkhorn(cosines, temperature=self.teacher_temperature)
        targets = self.center.softmax(cosines, self.teacher_temperature)
        self.center.update(cosines)
        return targets


def distorted(images: Tensor, random: np.random.Generator) -> Tensor:
    """Return one view of each of this rank's images: rotated, scaled, sheared, shifted, brighter or darker, and noisy.

    Random numbers are drawn for the images of all ranks, and each rank uses the numbers for its own images.

    Args:
        images: (B, 1, H, W), with equal B on every rank.
        random: Generator in the same state on every rank.
    """
    world_size = process_groups.world_size()
    everyone = len(images) * world_size
    own = share(everyone, world_size, process_groups.rank())
    shifts = images.new_tensor(random.uniform(-1, 1, (6, everyone))[:, own])
    noise = images.new_tensor(random.normal(0, _NOISE, (everyone, *images.shape[1:]))[own])
    turn, size, shear, across, down, brightness = shifts
    sine, cosine, size = (_TURN * turn).sin(), (_TURN * turn).cos(), 1 + _SIZE * size
    first = torch.stack([size * cosine, _SHEAR * shear - size * sine, _MOVE * across], 1)
    second = torch.stack([size * sine, size * cosine, _MOVE * down], 1)
    grid = functional.affine_grid(torch.stack([first, second], 1), list(images.shape), align_corners=False)
    moved = functional.grid_sample(images, grid, align_corners=False)
    views: Tensor = moved * (1 + _BRIGHTNESS * brightness)[:, None, None, None] + noise
    return views
