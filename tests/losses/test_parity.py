"""W ranks compute the value and all gradients of one process, for every loss that PML and torch.nn export."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from torch.nn.modules import loss as torch_losses

from lightning_ddp_losses.losses import GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.losses.cases import NOT_LOSSES, PML
from tests.losses.harness import SPLITS, Case, check, in_modes, splits_by_turns
from tests.losses.torch_cases import ALIASES, TORCH
from tests.losses.variants import VARIANTS
from tests.oracle import Found

CASES: dict[str, Case] = {**PML, **TORCH, **VARIANTS}


def measure(name: str) -> dict[str, Found]:
    """All modes of one case, on every rank; splits by turns."""
    splits = splits_by_turns(list(CASES).index(name), dist.get_world_size())
    return in_modes(CASES[name], splits)


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # PML 2.9, of its own HistogramLoss
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss by both")  # torch, of its own KLDivLoss
@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        # one rank has nobody to exchange with: by turns of the cases
        pytest.param(world_size, name, marks=[pytest.mark.slow] if world_size == 1 and number % 3 else [])
        for world_size in (1, 2, 3)
        for number, name in enumerate(CASES)
    ],
)
def test_ranks_are_one_process(pool: RankPool, world_size: int, name: str) -> None:
    check(CASES[name], pool.run(world_size, measure, name), SPLITS[world_size])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.modes is not None])
def test_each_loss_runs_in_its_cheapest_exact_mode(name: str) -> None:
    wrapped = GlobalBatchLoss(CASES[name].make(), **CASES[name].options)
    assert wrapped.exact_modes() == CASES[name].modes
    assert CASES[name].modes[0] in repr(wrapped)


@pytest.mark.parametrize(
    ("exported", "cases", "without"),
    [
        ({name for name, cls in vars(pml).items() if inspect.isclass(cls)}, PML, NOT_LOSSES),
        (set(torch_losses.__all__), TORCH, ALIASES),
    ],
    ids=["pml", "torch"],
)
def test_every_loss_that_is_exported_is_a_case(
    exported: set[str], cases: dict[str, Case], without: dict[str, str]
) -> None:
    tried = {name.split(",")[0].split(" ")[0].removeprefix("nn.") for name in cases}
    assert exported - tried == set(without), "write a row in tests/losses/cases.py or torch_cases.py"
    assert tried <= exported
