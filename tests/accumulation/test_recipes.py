"""The recipes in the docstrings of `global_mean` and `accumulation_window` run, on two ranks, and give the gradient of one process."""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses import GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.accumulation.jobs import IGNORED
from tests.answers import assert_all_close
from tests.fits import grads_of

RECIPE = re.compile(r"::\n\n((?:    .*\n|\n)+)")
IMPORT = "from lightning_ddp_losses import accumulation_window, global_mean\n"
TOKENS, BOXES, OWN, LOOP = range(4)
DOCUMENTED = ("losses.partial_sums", "distributed.accumulation")
WIDTH, VOCABULARY = 4, 6


def recipes() -> list[str]:
    """The code in both docstrings, in its order."""
    texts = [importlib.import_module(f"lightning_ddp_losses.{name}").__doc__ or "" for name in DOCUMENTED]
    return [textwrap.dedent(code) for text in texts for code in RECIPE.findall(text + "\n")]


def rows_of(rank: int, world_size: int) -> slice:
    """Of 12 rows, those of a rank; each has more than the one before."""
    ends = [12 * r * (r + 1) // (world_size * (world_size + 1)) for r in range(world_size + 1)]
    return slice(ends[rank], ends[rank + 1])


def names(model: nn.Module, rows: slice) -> dict[str, Any]:
    """What the recipes take for granted, for some of the rows."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(12, WIDTH, generator=generator, dtype=torch.float64)
    tokens = torch.randint(VOCABULARY, (12, 1), generator=generator)
    tokens[::3] = IGNORED
    out = model(inputs[rows])
    return {
        "torch": torch,
        "logits": out[:, None],
        "tokens": tokens[rows],
        "boxes": out[:, :4],
        "targets": inputs[rows],
        "giou": lambda boxes, targets: (boxes * targets).sum(1).tanh(),
        "weights": inputs[rows, 0].abs(),
        "error": out[:, 1],
    }


def tokens_alone(given: dict[str, Any]) -> Tensor:
    return cross_entropy(given["logits"].flatten(0, 1), given["tokens"].flatten(), ignore_index=IGNORED)


def boxes_alone(given: dict[str, Any]) -> Tensor:
    boxes, targets = given["boxes"], given["targets"]
    corners = (boxes - targets).abs().sum(1).mean()
    loss: Tensor = 5 * corners + 2 * (1 - given["giou"](boxes, targets)).mean()
    return loss


def own_alone(given: dict[str, Any]) -> Tensor:
    weights, error = given["weights"], given["error"]
    loss: Tensor = (weights * error.square()).sum() / weights.sum()
    return loss


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, VOCABULARY)).double()


def run_recipe(index: int) -> dict[str, Tensor]:
    model = make_model()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    wrapped = DistributedDataParallel(model)  # held: its hooks end with it
    given = names(wrapped, rows_of(rank, world_size))
    exec(IMPORT + recipes()[index], given)
    given["loss"].backward()
    return grads_of(model)


def run_alone(value: Callable[[dict[str, Any]], Tensor]) -> dict[str, Tensor]:
    model = make_model()
    value(names(model, slice(0, 12))).backward()
    return grads_of(model)


@pytest.mark.parametrize(
    ("index", "alone"), [(TOKENS, tokens_alone), (BOXES, boxes_alone), (OWN, own_alone)], ids=["tokens", "boxes", "own"]
)
def test_a_mean(pool: RankPool, index: int, alone: Callable[[dict[str, Any]], Tensor]) -> None:
    assert_all_close(pool.run(2, run_recipe, index), pool.run(1, run_alone, alone, distributed=False)[0])


def run_loop() -> dict[str, Tensor]:
    model = make_model()
    rank = dist.get_rank()
    given = names(nn.Identity(), slice(0, 12))
    # four micro-batches of one row on rank 0 and two on rank 1
    micro_batches = []
    for start in range(0, 12, 3):
        own = slice(start, start + 1) if rank == 0 else slice(start + 1, start + 3)
        micro_batches.append((given["targets"][own], given["tokens"][own, 0]))
    given |= {
        "model": DistributedDataParallel(model),
        "micro_batches": micro_batches,
        "cross_entropy": GlobalBatchLoss(nn.CrossEntropyLoss()),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    exec(IMPORT + recipes()[LOOP], given)
    return grads_of(model)


def test_a_loop_of_ones_own(pool: RankPool) -> None:
    assert_all_close(pool.run(2, run_loop), pool.run(1, run_alone, tokens_alone, distributed=False)[0])


def test_every_recipe_is_run() -> None:
    assert len(recipes()) == LOOP + 1
