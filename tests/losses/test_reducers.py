"""Every reducer of PML with every loss of PML that is a sum: the divisor is the global one."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import reducers
from torch import Tensor, nn

from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.losses import GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.losses.cases import PML
from tests.losses.harness import CLASSES, DIM, SPLITS, Case, alone, compare, mean_over_ranks, on_ranks

REDUCERS: dict[str, Callable[[], nn.Module]] = {
    "MeanReducer": reducers.MeanReducer,
    "SumReducer": reducers.SumReducer,
    "AvgNonZeroReducer": reducers.AvgNonZeroReducer,
    "ThresholdReducer, low": partial(reducers.ThresholdReducer, low=0.3),
    "ThresholdReducer, high": partial(reducers.ThresholdReducer, high=1.0),
    "ThresholdReducer, both": partial(reducers.ThresholdReducer, low=0.1, high=1.2),
    "PerAnchorReducer": reducers.PerAnchorReducer,
    "PerAnchorReducer, AvgNonZero": lambda: reducers.PerAnchorReducer(reducers.AvgNonZeroReducer()),
    "PerAnchorReducer, Sum": lambda: reducers.PerAnchorReducer(reducers.SumReducer()),
    "ClassWeightedReducer": lambda: reducers.ClassWeightedReducer(torch.linspace(0.1, 2, CLASSES)),
    "MultipleReducers": lambda: reducers.MultipleReducers(
        {"pos_loss": reducers.SumReducer(), "neg_loss": reducers.AvgNonZeroReducer()}
    ),
    "MultipleReducers, default": lambda: reducers.MultipleReducers({}, default_reducer=reducers.SumReducer()),
}
REDUCERS["DivisorReducer"] = reducers.DivisorReducer
# (two views are compared by another loss, with its own reducer)
SUMS = [
    name
    for name, case in PML.items()
    if case.modes and case.modes[0] != "replicated" and not name.startswith("SelfSupervised")
]


def reduced(loss: str, reducer: str) -> Case:
    make = PML[loss].make
    assert isinstance(make, partial)
    return Case(lambda: make.func(**make.keywords, reducer=REDUCERS[reducer]()))


REFUSALS = (NotImplementedError, KeyError, RuntimeError, IndexError, AssertionError)


@functools.cache
def supported(loss: str) -> dict[str, dict[str, Tensor]]:
    """What one process finds, by reducer; without those that PML itself cannot use with the loss."""
    found = {}
    for reducer in REDUCERS:
        with contextlib.suppress(*REFUSALS):
            found[reducer] = alone(reduced(loss, reducer), [])
    return found


def measure(loss: str, names: list[str], split: str) -> dict[str, dict[str, Tensor]]:
    sizes = SPLITS[torch.distributed.get_world_size()][split]
    result = {}
    for name in names:
        case = reduced(loss, name)
        for mode in GlobalBatchLoss(case.make()).exact_modes():
            result[f"{name}: {mode}"] = on_ranks(case, sizes, mode)
    return result


@pytest.mark.parametrize("loss", SUMS)
@pytest.mark.parametrize(("world_size", "split"), [(2, "uneven"), (3, "a rank without rows")])
def test_reducers_divide_by_what_all_ranks_have(pool: RankPool, world_size: int, split: str, loss: str) -> None:
    truths = supported(loss)
    assert len(truths) >= 6, "PML takes more reducers than that"
    # each reducer on two ranks or on three, with the next loss the other way round
    by_turns = list(truths)[(SUMS.index(loss) + world_size) % 2 :: 2]
    results = pool.run(world_size, measure, loss, by_turns, split)
    for key in results[0]:
        compare(mean_over_ranks([result[key] for result in results]), truths[key.split(": ")[0]], key)


def test_every_reducer_is_tried() -> None:
    exported = {n for n, c in vars(reducers).items() if inspect.isclass(c)}
    tried = {name.split(",")[0] for name in REDUCERS}
    assert exported - tried == {"BaseReducer", "DoNothingReducer"}


@pytest.mark.parametrize(
    "make",
    [
        lambda r: pml.ContrastiveLoss(reducer=r),
        lambda r: pml.MultipleLosses([pml.NTXentLoss(), pml.ContrastiveLoss(reducer=r)]),
        lambda r: pml.CrossBatchMemory(pml.ContrastiveLoss(reducer=r), 4),
    ],
)
def test_a_reducer_that_reduces_nothing_is_refused_by_name(make: Callable[[Any], nn.Module]) -> None:
    with pytest.raises(ConfigurationError, match="DoNothingReducer"):
        GlobalBatchLoss(make(reducers.DoNothingReducer()))


WITH_A_NAN: dict[str, Callable[[], nn.Module]] = {
    "SupConLoss, rows": pml.SupConLoss,
    "ContrastiveLoss, rows": pml.ContrastiveLoss,
    "TripletMarginLoss, rows": pml.TripletMarginLoss,
    "CircleLoss, rows": pml.CircleLoss,
    "NTXentLoss, rows": pml.NTXentLoss,
    "SupConLoss, replicated": pml.SupConLoss,
    "ArcFaceLoss, elements": lambda: PML["ArcFaceLoss"].make(reducer=reducers.AvgNonZeroReducer()),
}


def values_of_nan() -> dict[str, float]:
    """Embeddings that are NaN on both ranks, of which rank 0 has one row: too few to be compared."""
    rank, found = dist.get_rank(), {}
    for name, make in WITH_A_NAN.items():
        mode = name.split(", ")[1]
        embeddings = torch.full((1 + 6 * rank, DIM), torch.nan, requires_grad=True)
        found[name] = GlobalBatchLoss(make(), mode=mode)(embeddings, torch.arange(1 + 6 * rank) % 3).item()
    return found


def test_a_nan_is_not_lost_where_nothing_passes_a_limit(pool: RankPool) -> None:
    """As in one process: PML's loss of nothing is the sum of the embeddings times 0."""
    for name, make in WITH_A_NAN.items():
        embeddings, labels = torch.full((8, DIM), torch.nan), torch.tensor([0, 0, 1, 2, 0, 1, 2, 0])
        assert make()(embeddings, labels).isnan(), name
    for found in pool.run(2, values_of_nan):
        assert all(math.isnan(value) for value in found.values()), found
