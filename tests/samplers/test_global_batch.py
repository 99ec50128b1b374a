"""The ranks' batches, put together in rank order, are those of one process with the plain sampler."""

from __future__ import annotations

import copy
import pickle
import random
from array import array
from collections import Counter, deque
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning.samplers import MPerClassSampler
from pytorch_metric_learning.utils import common_functions as c_f
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
)

from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.samplers import GlobalBatchSampler, seeded_draw
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives
from tests.samplers.cases import CASES, LABELS, ROWS, SEED, Case, one_process

Epochs = list[list[list[Any]]]


def build(case: Case, form: str, world_size: int, **options: Any) -> Any:
    """The batches of this rank, as a DataLoader would ask for them."""
    if form == "batches":
        given = {"drop_last": True} if case.drop_last else {}
        return GlobalBatchSampler.batches(case.make(), case.size, **given, **options)
    size, rest = divmod(case.size or 0, world_size)
    assert not rest
    sampler = GlobalBatchSampler(case.make(), size, drop_last=case.drop_last, **options)
    return BatchSampler(sampler, size, drop_last=False)


def deal(name: str, form: str, epochs: int = 2) -> tuple[Epochs, list[int], bool]:
    """This rank's batches, the lengths told before, and whether training's random numbers were left alone."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(100 + rank)  # as training may: another stream per rank
    np.random.seed(100 + rank)
    random.seed(100 + rank)
    sampler = build(CASES[name], form, world_size, seed=SEED)
    before = streams()
    lengths, drawn = [], []
    for _ in range(epochs):
        lengths.append(len(sampler))
        drawn.append([list(batch) for batch in sampler])
    return drawn, lengths, before == streams()


def streams() -> list[Any]:
    _, numbers, place, *_ = np.random.get_state()
    return [torch.get_rng_state().tolist(), numbers.tolist(), place, random.getstate()]


def together(ranks: list[Epochs]) -> Epochs:
    """Batches of all ranks, in rank order, joined."""
    return [[list(chain(*parts)) for parts in zip(*epoch, strict=True)] for epoch in zip(*ranks, strict=True)]


@pytest.mark.parametrize("world_size", [0, 1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_union_is_the_batch_of_one_process(pool: RankPool, name: str, world_size: int) -> None:
    size = CASES[name].size
    forms = ["batches"] + ["indices"] * (size is not None and size % max(world_size, 1) == 0)
    expected = one_process(CASES[name])
    assert expected[0] != expected[1] or name in ("sequential", "list")
    for form in forms:
        replies = pool.run(max(world_size, 1), deal, name, form, distributed=world_size > 0)
        drawn, lengths, untouched = zip(*replies, strict=True)
        assert together(list(drawn)) == expected
        assert all(untouched)
        for batches in drawn:  # contiguous parts, as even as can be, none empty
            for mine, whole in zip(batches[0], expected[0], strict=True):
                assert 0 <= len(mine) - len(whole) // max(world_size, 1) <= 1
        if name != "by length":  # whose length is a guess
            assert set(map(tuple, lengths)) == {tuple(len(epoch) for epoch in expected)}


def of_each_class(form: str) -> list[list[dict[int, int]]]:
    sampler = build(CASES["m per class"], form, dist.get_world_size(), seed=SEED)
    return [[dict(Counter(LABELS[batch].tolist())) for batch in sampler] for _ in range(2)]


@pytest.mark.parametrize("form", ["batches", "indices"])
def test_whole_classes_stay_together_where_the_cut_allows(pool: RankPool, form: str) -> None:
    for epochs in pool.run(3, of_each_class, form):
        assert all(set(counts.values()) == {4} for epoch in epochs for counts in epoch)


def epochs_of(calls: list[int | None]) -> list[list[Any]]:
    sampler = build(CASES["m per class"], "batches", 1, seed=SEED)
    drawn = []
    for epoch in calls:
        if epoch is not None:
            sampler.set_epoch(epoch)
        drawn.append([list(batch) for batch in sampler])
    return drawn


def test_epochs_follow_set_epoch_and_else_each_other(pool: RankPool) -> None:
    replies = pool.run(2, epochs_of, [None, None, 1, 7, None])
    first, second, second_again, eighth, ninth = together(replies)
    expected = one_process(CASES["m per class"])
    assert [first, second] == expected
    assert second_again == second, "a sampler that shuffles in place was drawn twice for one epoch"
    assert len({str(epoch) for epoch in (first, second, eighth, ninth)}) == 4


def abandoned() -> bool:
    sampler = build(CASES["random"], "batches", 1)
    first = next(iter(sampler))
    again = next(iter(sampler))
    return first == again


def test_an_epoch_that_was_not_read_to_its_end_is_not_over(pool: RankPool) -> None:
    assert pool.run(2, abandoned) == [True, True]


def unseeded(seeds: list[int]) -> Epochs:
    torch.manual_seed(seeds[dist.get_rank()])
    sampler = build(CASES["random"], "batches", 1)
    torch.manual_seed(0)
    return [[list(batch) for batch in sampler]]


def test_without_a_seed_all_ranks_follow_the_first(pool: RankPool) -> None:
    one = together(pool.run(2, unseeded, [4, 5]))
    assert sorted(chain(*one[0])) == list(range(ROWS))


def counted(form: str) -> list[list[str]]:
    sampler = build(CASES["random"], form, dist.get_world_size())
    list(sampler)  # the groups are made here
    taken = []
    with CountCollectives() as count:
        len(sampler)
        taken.append(count.take())
        list(sampler)
        taken.append(count.take())
        sampler.sampler.set_epoch(1)
        list(sampler)
        taken.append(count.take())
    return taken


@pytest.mark.parametrize("form", ["batches", "indices"])
def test_two_frames_per_epoch(pool: RankPool, form: str) -> None:
    for taken in pool.run(3, counted, form):
        assert list(map(len, taken)) == [0, 2, 1]


def loaded(form: str, num_workers: int) -> Epochs:
    data = TensorDataset(torch.arange(ROWS))
    case = CASES["m per class"]
    options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    if form == "batches":
        loader = DataLoader(data, batch_sampler=build(case, form, 1, seed=SEED), **options)
    else:
        sampler = GlobalBatchSampler(case.make(), 6, seed=SEED)
        loader = DataLoader(data, batch_size=6, sampler=sampler, **options)
    iter(loader)  # Lightning asks for an iterator before the first epoch too
    drawn = []
    for epoch in range(2):
        (loader.batch_sampler if form == "batches" else loader.sampler).set_epoch(epoch)
        drawn.append([batch.tolist() for (batch,) in loader])
        assert len(drawn[-1]) == len(loader)
    return drawn


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("form", ["batches", "indices"])
def test_through_a_data_loader(pool: RankPool, form: str, num_workers: int) -> None:
    assert together(pool.run(2, loaded, form, num_workers)) == one_process(CASES["m per class"])


def test_generators_that_are_held_are_put_back() -> None:
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    first = list(GlobalBatchSampler(RandomSampler(range(ROWS), generator=generator), 5, seed=2))
    assert torch.equal(generator.get_state(), before)
    assert first == list(GlobalBatchSampler(RandomSampler(range(ROWS), generator=generator), 5, seed=2))
    assert first != list(GlobalBatchSampler(RandomSampler(range(ROWS), generator=generator), 5, seed=3))


def test_a_generator_given_to_pml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_f, "NUMPY_RANDOM", np.random.RandomState(8))
    before = c_f.NUMPY_RANDOM.get_state()[1].tolist()
    draw = [list(GlobalBatchSampler(CASES["m per class"].make(), 12, seed=2)) for _ in range(2)]
    assert draw[0] == draw[1]
    assert c_f.NUMPY_RANDOM.get_state()[1].tolist() == before


def test_what_it_is() -> None:
    index_form = GlobalBatchSampler(range(12), 4)
    assert isinstance(index_form, DistributedSampler)
    assert (index_form.rank, index_form.num_replicas, index_form.epoch, len(index_form)) == (0, 1, 0, 12)
    batch_form = GlobalBatchSampler.batches(range(12), 5)
    assert isinstance(batch_form, BatchSampler)
    assert (batch_form.batch_size, batch_form.drop_last, len(batch_form)) == (5, False, 3)
    for sampler in (index_form, batch_form):
        for twin in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
            assert list(twin) == list(sampler)
    rebuilt = type(batch_form)(range(3), batch_size=batch_form.batch_size, drop_last=False)
    assert list(rebuilt) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]


@pytest.mark.parametrize("name", ["m per class", "triplets", "hierarchical", "shuffles itself"])
def test_an_epoch_does_not_depend_on_those_before_it(name: str) -> None:
    """A run that is resumed at epoch 2 draws what the run without a break drew."""
    case = CASES[name]
    through, resumed = (GlobalBatchSampler.batches(case.make(), case.size, seed=SEED) for _ in range(2))
    for _ in range(2):
        list(through)
    resumed.set_epoch(2)
    assert list(resumed) == list(through)


def test_an_epoch_that_is_set_again_is_drawn_again() -> None:
    """Also by samplers that shuffle their own lists in place; what they hold is as before."""
    sampler = CASES["shuffles itself"].make()
    batches = GlobalBatchSampler.batches(sampler, 9, seed=SEED)
    drawn = []
    for epoch in (1, 3, 1):
        batches.set_epoch(epoch)  # type: ignore[attr-defined]
        drawn.append(list(batches))
    assert drawn[0] == drawn[2] != drawn[1]
    assert sampler.rows == list(range(10))
    assert sampler.by_class == {"a": list(range(10, 18)), "b": (list(range(18, 26)),)}
    assert sampler.order == list(range(42, 52))


def test_a_large_array_that_is_shuffled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeded_draw, "_MAX_COPIED", 16)
    with pytest.raises(ConfigurationError, match="unchanged by drawing"):
        list(GlobalBatchSampler.batches(CASES["shuffles itself"].make(), 9, seed=SEED))
    assert list(GlobalBatchSampler.batches(CASES["m per class"].make(), 12, seed=SEED))


@pytest.mark.parametrize(("rows", "m"), [(24, 4), (48, 8), (60, 10)])
def test_m_per_class_that_must_grow_with_the_ranks_is_told(rows: int, m: int) -> None:
    """6 labels with 4 rows each fill 24 rows; pytorch-metric-learning refuses a larger batch with its own assertion."""
    sampler = GlobalBatchSampler(MPerClassSampler(LABELS, 4, 12, length_before_new_iter=60), rows)
    with pytest.raises(ConfigurationError) as error:
        len(sampler)
    assert f"Give it batch_size={rows}" in str(error.value)
    assert (f"m={m} (m x 6 labels must be at least {rows}" in str(error.value)) == (m > 4)
    assert list(MPerClassSampler(LABELS, m, rows, length_before_new_iter=60))


def test_what_a_sampler_does_to_its_containers_is_undone() -> None:
    fixed = np.arange(3)
    fixed.flags.writeable = False
    held: dict[str, Any] = {
        "deque": deque([1, 2, 3], maxlen=3),
        "set": {1, 2},
        "dict": {"a": [1, 2]},
        "array": np.arange(3),
        "python array": array("q", [0, 1, 2]),
        "count": np.array(0),
        "fixed": fixed,
        "tensor": torch.arange(3),
        "meta": torch.empty(3, device="meta"),
    }
    sampler = RandomSampler(range(3))
    vars(sampler).update(held)
    with seeded_draw.preserve_shuffled(sampler):
        held["deque"].rotate()
        held["set"].clear()
        held["dict"]["a"].reverse()
        held["array"][:] = 7
        held["python array"].pop()
        held["count"] += 1
        held["tensor"].zero_()
        sampler.count = np.array(9)
    assert held["deque"] == deque([1, 2, 3])
    assert held["set"] == {1, 2}
    assert held["dict"] == {"a": [1, 2]}
    assert held["array"].tolist() == held["python array"].tolist() == held["tensor"].tolist() == [0, 1, 2]
    assert int(held["count"]) == 0
    assert all(vars(sampler)[name] is value for name, value in held.items())
