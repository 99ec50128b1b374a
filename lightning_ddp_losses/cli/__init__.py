"""The command line and what it trains: an embedding module, two data modules, small encoders."""

from lightning_ddp_losses.cli.app import LossCLI, main
from lightning_ddp_losses.cli.data import ArrayDataModule
from lightning_ddp_losses.cli.demo import DigitsDataModule, DigitsEncoder, MLPEncoder, RegressionModule, slant
from lightning_ddp_losses.cli.module import EmbeddingModule

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
