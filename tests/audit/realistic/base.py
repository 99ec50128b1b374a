"""The data that realistic modules train on, and what they have in common."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

ROWS, FEATURES, DIM, CLASSES, TOKENS = 32, 6, 5, 4, 7


def table(*, noise: bool = False) -> DataLoader[Any]:
    """Features, labels and tokens, four rows to a batch; with noise, numbers that the data set drew for each row."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    tokens = torch.randint(1, 9, (ROWS, TOKENS), generator=generator)
    columns = [x, torch.arange(ROWS) % CLASSES, tokens]
    if noise:
        columns.append(torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64))
    return DataLoader(TensorDataset(*columns), batch_size=4)


def two_tables() -> CombinedLoader:
    """Labelled and unlabelled rows, side by side."""
    return CombinedLoader({"labelled": table(), "unlabelled": table()}, "max_size")


class Realistic(LightningModule):  # builds from one seed; subclasses write ``build`` and ``objective``
    by_hand = draws_noise = False

    def __init__(self, *, sick: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not self.by_hand
        self.sick = sick
        torch.manual_seed(5)
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, DIM))
        self.build()
        self.double()

    def build(self) -> None:
        self.head = nn.Linear(DIM, CLASSES)

    def objective(self, x: Tensor, y: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encoder(x)), y)

    @torch.no_grad()
    def follow(self, slow: nn.Module, *fast: nn.Module) -> None:
        """Move a slow copy a tenth of the way to its model."""
        parameters = [parameter for module in fast for parameter in module.parameters()]
        for ours, theirs in zip(slow.parameters(), parameters, strict=True):
            ours.lerp_(theirs, 0.1)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.objective(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)

    def train_dataloader(self) -> Any:
        return table(noise=self.draws_noise)
