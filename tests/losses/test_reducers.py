"""Every reducer of PML with every loss of PML that is a sum: the divisor is the global one."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import reducers
from torch import nn

from lightning_ddp_losses.losses import GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.each_rank import each_rank
from tests.losses.cases import PML, REDUCERS
from tests.losses.harness import DIM, SPLITS, Case, check, in_modes, truth_of
from tests.oracle import Found

EVERY: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(make, 1.0) for name, make in REDUCERS.items()},
    "PerAnchorReducer, Sum": lambda: reducers.PerAnchorReducer(reducers.SumReducer()),
    "MultipleReducers, AvgNonZero": lambda: reducers.MultipleReducers(
        {"pos_loss": reducers.SumReducer(), "neg_loss": reducers.AvgNonZeroReducer()}
    ),
    "MultipleReducers, default": lambda: reducers.MultipleReducers({}, default_reducer=reducers.SumReducer()),
    "DivisorReducer": reducers.DivisorReducer,
}
# (two views are compared by another loss, with its own reducer)
SUMS = [
    name
    for name, case in PML.items()
    if case.modes and case.modes[0] != "replicated" and not name.startswith("SelfSupervised")
]


@functools.cache
def reduced(loss: str, reducer: str) -> Case:
    make = PML[loss].make
    assert isinstance(make, partial)
    return Case(lambda: make.func(**make.keywords, reducer=EVERY[reducer]()))


REFUSALS = (NotImplementedError, KeyError, RuntimeError, IndexError, AssertionError)


@functools.cache
def supported(loss: str) -> list[str]:
    """The reducers that PML itself can use with the loss, in one process."""
    found = []
    for reducer in EVERY:
        with contextlib.suppress(*REFUSALS):
            truth_of(reduced(loss, reducer))
            found.append(reducer)
    return found


def measure(loss: str, names: list[str], splits: dict[str, list[int]]) -> dict[str, dict[str, Found]]:
    return {name: in_modes(reduced(loss, name), splits) for name in names}


@pytest.mark.parametrize("loss", SUMS)
@pytest.mark.parametrize(("world_size", "split"), [(2, "uneven"), (3, "a rank without rows")])
def test_reducers_divide_by_what_all_ranks_have(pool: RankPool, world_size: int, split: str, loss: str) -> None:
    names = supported(loss)
    assert len(names) >= 6, "PML takes more reducers than that"
    # each reducer on two ranks or on three, with the next loss the other way round
    by_turns = names[(SUMS.index(loss) + world_size) % 2 :: 2]
    splits = {split: SPLITS[world_size][split]}
    results = pool.run(world_size, measure, loss, by_turns, splits)
    for name in by_turns:
        check(reduced(loss, name), [result[name] for result in results], splits)


def test_every_reducer_is_tried() -> None:
    exported = {n for n, c in vars(reducers).items() if inspect.isclass(c)}
    tried = {name.split(",")[0] for name in EVERY}
    assert exported - tried == {"BaseReducer", "DoNothingReducer"}


WITH_A_NAN: dict[str, Callable[[], nn.Module]] = {
    "SupConLoss, rows": pml.SupConLoss,
    "ContrastiveLoss, rows": pml.ContrastiveLoss,
    "TripletMarginLoss, rows": pml.TripletMarginLoss,
    "CircleLoss, rows": pml.CircleLoss,
    "NTXentLoss, rows": pml.NTXentLoss,
    "SupConLoss, replicated": pml.SupConLoss,
    "ArcFaceLoss, elements": lambda: PML["ArcFaceLoss"].make(reducer=reducers.AvgNonZeroReducer()),
}


@pytest.mark.parametrize("name", WITH_A_NAN)
@each_rank(2)
def test_a_nan_is_not_lost_where_nothing_passes_a_limit(name: str) -> None:
    """Embeddings that are NaN on both ranks, of which rank 0 has one row, too few to be compared: as in one process, where PML's loss of
    nothing is the sum of the embeddings times 0.
    """
    make, mode, count = WITH_A_NAN[name], name.split(", ")[1], 1 + 6 * dist.get_rank()
    nans, labels = torch.full((8, DIM), torch.nan, requires_grad=True), torch.tensor([0, 0, 1, 2, 0, 1, 2, 0])
    assert make()(nans, labels).isnan()
    assert GlobalBatchLoss(make(), mode=mode)(nans[:count], torch.arange(count) % 3).isnan()
