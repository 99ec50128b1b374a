"""`with global_randomness(rows=x):` in a loop of Fabric: dropout and noise are those of one process, under both DDP strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor

from lightning_ddp_losses import global_randomness
from lightning_ddp_losses.testing import RankEnvironment, RankPool
from tests.each_rank import each_rank
from tests.randomness.models import batches, loss_of, make

G, STEPS, SEED, RATE = 12, 6, 7, 0.01
SPLITS = {1: [(12,), (12,)], 2: [(7, 5), (0, 12)], 3: [(3, 4, 5), (6, 0, 6)]}  # in alternate steps
MODELS = ("vit block", "re-entrant checkpoint")


def one_process(name: str) -> dict[str, Tensor]:
    net = make(name)
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    torch.manual_seed(SEED)
    for x in batches([G] * STEPS):
        optimizer.zero_grad()
        (loss_of(net, x) / G).backward()
        optimizer.step()
    return dict(net.state_dict())


def train(name: str, strategy: str, *, first: int = 0, last: int = STEPS, folder: str = "") -> dict[str, Tensor]:
    """Train from a step to another, from the checkpoint in a folder and into it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=world, plugins=[RankEnvironment()])
    fabric.launch()
    net = make(name)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), RATE))
    torch.manual_seed(SEED)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "draws": torch.get_rng_state()}
    if first:
        fabric.load(f"{folder}/{first}", state)
        torch.set_rng_state(state["draws"])
    for number, x in enumerate(batches([G] * STEPS)):
        if not first <= number < last:
            continue
        counts = SPLITS[world][number % 2]
        own = x[sum(counts[:rank]) :][: counts[rank]]
        optimizer.zero_grad()
        with global_randomness(rows=own):
            fabric.backward(loss_of(model, own) * world / G)
        optimizer.step()
    if last < STEPS:
        state["draws"] = torch.get_rng_state()
        fabric.save(f"{folder}/{last}", state)
    return {name: value.detach() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
@pytest.mark.parametrize("world_size", SPLITS)
@each_rank()
def test_a_loop_of_fabric_draws_as_one_process(world_size: int, strategy: str) -> None:
    for name in MODELS:
        expected = one_process(name)
        for key, value in train(name, strategy).items():
            torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12, msg=f"{name}: {key}")


def _until(last: int, first: int, folder: str) -> dict[str, Tensor]:
    return train("vit block", "ddp_losses", first=first, last=last, folder=folder)


def test_a_loop_resumed_on_other_ranks_draws_what_it_would_have_drawn(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, _until, 3, 0, str(tmp_path))
    weights = pool.run(3, _until, STEPS, 3, str(tmp_path))[0]
    for key, value in one_process("vit block").items():
        torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-12)
