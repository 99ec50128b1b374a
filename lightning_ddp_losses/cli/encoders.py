"""Two small encoders. Each row's embedding depends on that row only, so it is the same on any number of ranks; but with ``batch_norm``."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from lightning_ddp_losses.errors import InputError


class DigitsEncoder(nn.Module):
    """Three convolutions and a linear layer for 8x8 grey images.

    Args:
        embedding_size: Width D of the embedding.
        channels: Channels of the first convolution; the others have twice as many.
        batch_norm: Normalise after each layer, the embedding too (as ArcFace's authors do). Ranks then need `SyncBatchNorm`
            (``trainer.sync_batchnorm: true``) to train as one process does.
    """

    def __init__(self, embedding_size: int = 32, channels: int = 32, batch_norm: bool = False) -> None:
        super().__init__()

        def normed(width: int) -> list[nn.Module]:
            return [nn.BatchNorm2d(width), nn.ReLU()] if batch_norm else [nn.ReLU()]

        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            *normed(channels),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            *normed(2 * channels),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * channels, 2 * channels, 3, padding=1),
            *normed(2 * channels),
            nn.Flatten(),
            nn.Linear(2 * channels * 16, embedding_size),
            *([nn.BatchNorm1d(embedding_size)] if batch_norm else []),
        )

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
