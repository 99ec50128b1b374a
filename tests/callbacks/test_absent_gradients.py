"""Parameters without a gradient that DDP waits for: the error gives the fix of their kind, and after the fix ranks train as one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close
from tests.callbacks.harness import CLASSES, ROWS, WIDTH, Subject, default_checks
from tests.fits import make_trainer

GLOBAL_ROWS = 6 * ROWS


class Batches(Subject):
    """The same global batches for every number of ranks."""

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        part = slice(dist.get_rank(), None, dist.get_world_size())
        found = []
        for _ in range(3):
            features = torch.randn(GLOBAL_ROWS, WIDTH, generator=generator, dtype=torch.float64)
            found.append((features[part], (torch.arange(GLOBAL_ROWS) % CLASSES)[part]))
        return torch.utils.data.DataLoader(found, batch_size=None)


class Average(Batches):  # an average of the weights, as a submodule
    def build(self) -> None:
        self.ema = AveragedModel(self.encoder)
        if not self.sick:
            self.ema.requires_grad_(False)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.ema.update_parameters(self.encoder)


class Teacher(Batches):  # a copy that no optimizer has
    def build(self) -> None:
        self.teacher = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        if not self.sick:
            self.teacher.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.encoder.parameters(), *self.head.parameters()], lr=0.1)


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, dtype=torch.float64).requires_grad_(False)
        self.low = nn.Parameter(torch.randn(WIDTH, 2, dtype=torch.float64))

    def forward(self, rows: Tensor) -> Tensor:
        return self.base(rows) + rows @ self.low @ self.low.T


class Adapted(Batches):  # adapters of a frozen encoder, in a re-entrant checkpoint
    def build(self) -> None:
        self.encoder = Lora()

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        encoded = checkpoint(self.encoder, features, use_reentrant=self.sick)
        return nn.functional.cross_entropy(self.head(encoded), labels)


# the module, and what the error says
KINDS: dict[type[Batches], tuple[str, ...]] = {
    Average: ("`ema.module.weight`", "`self.ema.requires_grad_(False)`"),
    Teacher: ("`teacher.weight`", "`self.teacher.requires_grad_(False)`"),
    Adapted: ("`encoder.low`", "use_reentrant=False", "enable_input_require_grads()"),
}


def train(kind: type[Batches], sick: bool, strategy: str) -> dict[str, Tensor]:
    module = kind(sick)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        make_trainer(strategy, callbacks=[default_checks()]).fit(module)
    return {name: value for name, value in module.state_dict().items() if value.is_floating_point()}


@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
@pytest.mark.parametrize("kind", KINDS)
def test_after_the_fix_ranks_train_as_one_process(pool: RankPool, kind: type[Batches], strategy: str) -> None:
    (oracle,) = pool.run(1, train, kind, False, "ddp")
    assert_all_close(pool.run(2, train, kind, False, strategy), oracle)
