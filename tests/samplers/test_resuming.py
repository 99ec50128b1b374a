"""A sampler that is left in the middle of an epoch goes on with the batch that would have come, on any number of ranks."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lightning_ddp_losses.samplers import GlobalBatchSampler
from lightning_ddp_losses.testing import RankPool
from tests.samplers.cases import CASES, ROWS, SEED, one_process
from tests.samplers.test_global_batch import build, together

State = dict[str, Any]


def until(name: str, form: str, batches: int, state: State | None, seed: int | None = SEED) -> tuple[list[Any], State]:
    """This rank's next batches, over the end of an epoch where there is one, and the state then."""
    torch.manual_seed(40 + dist.get_rank())
    reader = build(CASES[name], form, dist.get_world_size(), seed=seed)
    # of the index form, torch's BatchSampler makes the batches
    sampler = reader.sampler if form == "indices" else reader
    if state is not None:
        sampler.load_state_dict(state)
    drawn: list[Any] = []
    while len(drawn) < batches:
        for batch in reader:
            drawn.append(list(batch))
            if len(drawn) == batches:
                break
    return [drawn], sampler.state_dict()


def legs(pool: RankPool, name: str, forms: list[str], steps: list[int], seed: int | None = SEED) -> list[Any]:
    """The global batches of runs on 2, 3 and 1 ranks, each of which goes on where the one before it stopped."""
    state, joined = None, []
    for world_size, form, batches in zip([2, 3, 1], forms, steps, strict=True):
        replies = pool.run(world_size, until, name, form, batches, state, seed)
        joined += together([drawn for drawn, _ in replies])[0]
        states = [reply for _, reply in replies]
        state = states[0]
        assert states == [state] * world_size
    return joined


EVEN = "random, last dropped"


@pytest.mark.parametrize(
    "name", ["random", EVEN, "m per class", "hierarchical", "by length", "shuffles itself", "keys"]
)
def test_any_number_of_ranks_goes_on_with_the_next_global_batch(pool: RankPool, name: str) -> None:
    expected = list(chain(*one_process(CASES[name], [0, 1, 2, 3])))
    for steps in ([1, 2, 4], [3, 3, 3]):
        assert legs(pool, name, ["batches"] * 3, steps) == expected[: sum(steps)]


def test_both_forms_and_no_seed(pool: RankPool) -> None:
    """12 rows are 6, 4 or 12 a rank; a seed that nobody gave is the first run's."""
    forms = ["indices", "batches", "indices"]
    assert legs(pool, EVEN, forms, [1, 2, 4]) == list(chain(*one_process(CASES[EVEN])))[:7]
    drawn = legs(pool, EVEN, forms, [1, 1, 2], seed=None)
    assert sorted(chain(*drawn)) == sorted(set(chain(*drawn)))


def test_the_state_names_epoch_seed_and_rows() -> None:
    sampler: Any = GlobalBatchSampler.batches(RandomSampler(range(ROWS)), 12, seed=SEED)
    assert sampler.state_dict()["rows"] == 0
    reader = iter(sampler)
    for _ in range(3):
        next(reader)
    state = sampler.state_dict()
    assert {key: state[key] for key in ("epoch", "seed", "rows")} == {"epoch": 0, "seed": SEED, "rows": 36}
    assert sampler.state_dict(batches=1)["rows"] == 12  # workers have drawn more than was trained on
    list(reader)
    assert [sampler.state_dict()[key] for key in ("epoch", "rows")] == [1, 0]
    # a state that was loaded is the state until the next batch, and the length is the epoch's
    other: Any = GlobalBatchSampler.batches(RandomSampler(range(ROWS)), 12)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert len(other) == len(sampler) == 5
    other.set_epoch(0)
    rest = list(other)
    assert len(rest) == 2
    # the epoch after it is a whole one; so is one that is asked for by number
    assert len(list(other)) == 5
    other.load_state_dict(state)
    other.set_epoch(4)
    assert len(list(other)) == 5


@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_that_workers_have_drawn_are_drawn_again(num_workers: int) -> None:
    data = TensorDataset(torch.arange(ROWS))
    expected = list(chain(*one_process(CASES["random"])))
    sampler: Any = GlobalBatchSampler.batches(CASES["random"].make(), 12, seed=SEED)
    reader = iter(DataLoader(data, batch_sampler=sampler, num_workers=num_workers))
    first = [next(reader)[0].tolist()]
    state = sampler.state_dict(batches=1)
    sampler.load_state_dict(state)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=num_workers)
    assert len(loader) == 5
    assert first + [rows.tolist() for (rows,) in loader] == expected[:5]
