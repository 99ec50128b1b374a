"""Real images without a download: scikit-learn's bundled handwritten digits, 1,797 grey images of 8x8 pixels in 10 classes."""

from __future__ import annotations

import numpy as np

from lightning_ddp_losses.cli.data import BatchedArrayDataModule
from lightning_ddp_losses.cli.sampling import stratified_split
from lightning_ddp_losses.errors import ConfigurationError


class DigitsDataModule(BatchedArrayDataModule):
    """The digits as (1, 8, 8) images in [0, 1], split by class into training and held-out images.

    Args:
        batch_size: Images of the GLOBAL batch, over all ranks.
        held_out: Share of every class that is never trained on.
        seed: Fixes the split and, with the epoch, the order of training.
        num_workers: Processes that read ahead on each rank.
        m_per_class: Rows of each class in a training batch, for losses that compare rows; None: rows at random.

    Raises:
        ConfigurationError: scikit-learn is not installed.
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
    ) -> None:
        super().__init__(batch_size, seed, num_workers, m_per_class)
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
