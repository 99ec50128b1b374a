"""The command line and what it trains: an embedding module, two data modules, small encoders."""

from lightning_ddp_losses.cli.app import LossCLI, main
from lightning_ddp_losses.cli.arrays import ArrayDataModule
from lightning_ddp_losses.cli.demo import DigitsDataModule
from lightning_ddp_losses.cli.encoders import DigitsEncoder, MLPEncoder
from lightning_ddp_losses.cli.module import EmbeddingModule
from lightning_ddp_losses.cli.regression import RegressionModule, slant

__all__ = [
    "ArrayDataModule",
    "DigitsDataModule",
    "DigitsEncoder",
    "EmbeddingModule",
    "LossCLI",
    "MLPEncoder",
    "RegressionModule",
    "main",
    "slant",
]
