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
from torch import Tensor, nn

from lightning_ddp_losses.losses import GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.each_rank import each_rank
from tests.losses.cases import PML, REDUCERS
from tests.losses.harness import DIM, SPLITS, Case, on_ranks, truth_of
from tests.oracle import assert_near, joined, problem

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


def reduced(loss: str, reducer: str) -> Case:
    make = PML[loss].make
    assert isinstance(make, partial)
    return Case(lambda: make.func(**make.keywords, reducer=EVERY[reducer]()))


REFUSALS = (NotImplementedError, KeyError, RuntimeError, IndexError, AssertionError)


@functools.cache
def supported(loss: str) -> dict[str, dict[str, Tensor]]:
    """What one process finds, by reducer; without those that PML itself cannot use with the loss."""
    found = {}
    for reducer in EVERY:
        with contextlib.suppress(*REFUSALS):
            found[reducer] = truth_of(reduced(loss, reducer))
    return found


def measure(loss: str, names: list[str], split: str) -> dict[str, dict[str, Tensor]]:
    sizes = SPLITS[torch.distributed.get_world_size()][split]
    cases = {name: reduced(loss, name) for name in names}
    return {
        f"{name}: {mode}": on_ranks(case, sizes, mode)
        for name, case in cases.items()
        for mode in GlobalBatchLoss(case.make()).exact_modes()
    }


@pytest.mark.parametrize("loss", SUMS)
@pytest.mark.parametrize(("world_size", "split"), [(2, "uneven"), (3, "a rank without rows")])
def test_reducers_divide_by_what_all_ranks_have(pool: RankPool, world_size: int, split: str, loss: str) -> None:
    truths = supported(loss)
    assert len(truths) >= 6, "PML takes more reducers than that"
    # each reducer on two ranks or on three, with the next loss the other way round
    by_turns = list(truths)[(SUMS.index(loss) + world_size) % 2 :: 2]
    results = pool.run(world_size, measure, loss, by_turns, split)
    problems: list[str] = []
    for key in results[0]:
        problems += problem(key, assert_near, joined([result[key] for result in results]), truths[key.split(": ")[0]])
    assert not problems, "\n".join(problems)


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
