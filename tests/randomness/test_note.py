"""Without `randomness="global"`, the strategy says once whether the ranks' dropout masks are equal, and which option changes that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_losses import DDPLossStrategy, ModelParallelLossStrategy
from tests.doors import layers_that_drop
from tests.each_rank import each_rank
from tests.fits import make_trainer, said_on_rank_zero
from tests.randomness.models import batches

WIDTH = 8


class Module(LightningModule):
    """A head behind a layer, with a seed that may depend on the rank."""

    def __init__(self, layer: nn.Module, seed: Callable[[int], int]) -> None:
        super().__init__()
        self.layer, self.head, self.seed = layer, nn.Linear(WIDTH, 1), seed

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is not None:
            torch.distributed.fsdp.fully_shard(self.head, mesh=mesh["data_parallel"])

    def on_train_start(self) -> None:
        torch.manual_seed(self.seed(dist.get_rank()))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(batches([12])[0].float().mean(1)), batch_size=2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.head(self.layer(batch[0])).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def said(strategy: Any, layer: nn.Module, seed: Callable[[int], int] = lambda rank: 0) -> list[str]:
    with said_on_rank_zero() as texts:
        make_trainer(strategy, max_epochs=2).fit(Module(layer, seed))
    return [text for text in texts if text.startswith("Dropout (")]


@pytest.mark.parametrize("made", [DDPLossStrategy, ModelParallelLossStrategy])
@each_rank(2)
def test_masks_are_named_once_with_the_option(made: Callable[[], Any]) -> None:
    seeds: list[tuple[Callable[[int], int], str]] = [
        (lambda rank: 0, "equal masks on all ranks"),
        (lambda rank: rank, "different masks on each rank"),
    ]
    for seed, text in seeds:
        found = said(made(), nn.Dropout(0.5), seed)
        if dist.get_rank():
            assert found == []
            continue
        (note,) = found
        assert note.startswith(f"Dropout (layer) draws {text}")
        assert 'randomness="global"' in note


@each_rank(3)
def test_masks_of_some_ranks() -> None:
    found = said(DDPLossStrategy(), nn.Dropout(0.5), lambda rank: rank // 2)
    assert dist.get_rank() or "equal masks on some ranks" in found[0]


@each_rank(2)
def test_runs_without_a_note() -> None:
    assert said(DDPLossStrategy(randomness="global"), nn.Dropout(0.5)) == []
    assert said(DDPLossStrategy(), nn.Identity()) == []
    assert said(DDPLossStrategy(), nn.Dropout(0.0)) == []


@each_rank(1)
def test_one_rank_says_nothing() -> None:
    assert said(DDPLossStrategy(), nn.Dropout(0.5)) == []


def test_what_counts_as_a_layer_that_drops() -> None:
    class DropPath(nn.Module):
        drop_prob = 0.1

    model = nn.ModuleDict({
        "dropout": nn.Dropout2d(0.1),
        "idle": nn.Dropout(0.0),
        "frozen": nn.Dropout(0.1).eval(),
        "lstm": nn.LSTM(2, 2, 2, dropout=0.1),
        "gru": nn.GRU(2, 2),
        "attention": nn.MultiheadAttention(2, 1, dropout=0.1),
        "path": DropPath(),
        "linear": nn.Linear(2, 2),
    })  # fmt: skip
    assert layers_that_drop(model) == ["dropout", "lstm", "attention", "path"]
