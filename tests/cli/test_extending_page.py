"""The code of the page about extending the package from outside runs, and does what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_losses import DDPChecks
from lightning_ddp_losses.cli import manual
from lightning_ddp_losses.testing import RankPool
from tests.doors import is_loss
from tests.fits import make_trainer

LOSS, PAIRS, TYPE, CHECK, STRATEGY = range(5)
CUTS = (0, 5, 12)


def page_names(block: int) -> dict[str, Any]:
    """Run a block of the page, with those before it that it needs."""
    blocks = re.findall(r"```python\n(.*?)```", manual.about()["extending"], re.DOTALL)
    given: dict[str, Any] = {}
    for needed in sorted({LOSS, block}):
        exec(blocks[needed], given)
    return given


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(12) % 4
    return torch.randn(12, 8, generator=generator, dtype=torch.float64), labels


def loss_of_rank(block: int, name: str) -> tuple[Tensor, Tensor]:
    """The value, and the gradient of this rank's rows as one process has it."""
    given = page_names(block)
    loss = given["GlobalBatchLoss"](given[name]())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = slice(CUTS[rank], CUTS[rank + 1])
    embeddings, labels = rows()
    mine = embeddings[own].requires_grad_()
    value = loss(mine, labels[own])
    value.backward()
    assert mine.grad is not None
    return value.detach(), mine.grad / world_size


@pytest.mark.parametrize(("block", "name"), [(LOSS, "Spread"), (PAIRS, "SquaredContrastive")])
def test_a_loss_of_the_page_is_that_of_one_process(pool: RankPool, block: int, name: str) -> None:
    embeddings, labels = rows()
    embeddings.requires_grad_()
    truth = page_names(block)[name]()(embeddings, labels)
    truth.backward()
    found = pool.run(2, loss_of_rank, block, name)
    for value, _ in found:
        torch.testing.assert_close(value, truth.detach(), rtol=1e-9, atol=0)
    torch.testing.assert_close(torch.cat([grad for _, grad in found]), embeddings.grad, rtol=1e-9, atol=1e-12)


def test_a_registered_class_is_a_loss() -> None:
    given = page_names(TYPE)
    assert is_loss(given["Centers"]())
    assert not is_loss(given["Spread"]())


class Padded(LightningModule):
    """Batches of a width that the ranks may differ in."""

    def __init__(self, differ: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.differ = differ

    def train_dataloader(self) -> DataLoader[Any]:
        width = 3 + self.differ * dist.get_rank()
        return DataLoader([(torch.ones(width), torch.ones(1)) for _ in range(4)], batch_size=2)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0].mean(1, keepdim=True)).sum()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_with_check(differ: bool) -> None:
    check = page_names(CHECK)["EqualWidths"]()
    callbacks = [DDPChecks(), check]
    make_trainer("ddp_losses", callbacks=callbacks, max_steps=1, use_distributed_sampler=False).fit(Padded(differ))


def test_the_check_of_the_page_is_silent_where_nothing_differs(pool: RankPool) -> None:
    pool.run(2, fit_with_check, False)


def announced() -> str:
    strategy = page_names(STRATEGY)["Announced"](name="mine", losses="auto")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        make_trainer(strategy, max_steps=1).fit(Padded(False))
    return printed.getvalue()


def test_the_strategy_of_the_page_starts_and_keeps_the_options(pool: RankPool) -> None:
    first, second = pool.run(2, announced)
    assert "mine: 2 ranks\n" in first
    assert "mine" not in second
