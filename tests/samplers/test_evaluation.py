"""Evaluation samplers deal each row once, as many batches to every rank, in the order of one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler

from lightning_ddp_losses import ConfigurationError, InputError
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.samplers.evaluation import EvaluationBatches, EvaluationSampler


@pytest.fixture
def deal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The batches of each of some ranks."""

    def on_ranks(W: int, source: Any, *args: Any, epoch: int = 0, **options: Any) -> list[list[list[int]]]:
        dealt, totals = [], set()
        monkeypatch.setattr(process_groups, "world_size", lambda group=None: W)
        for rank in range(W):
            monkeypatch.setattr(process_groups, "rank", lambda group=None, rank=rank: rank)
            torch.manual_seed(rank)
            sampler = EvaluationSampler(source, *args, **options)
            sampler.set_epoch(epoch)
            loader = EvaluationBatches(sampler)
            dealt.append(list(loader))
            assert len(loader) == len(dealt[-1]) == sampler.counts[rank]
            assert list(sampler) == list(itertools.chain.from_iterable(dealt[-1]))
            assert len(sampler) == sampler.num_samples == len(list(sampler))
            totals.add(sampler.total_size)
        assert totals == {sum(len(batch) for batches in dealt for batch in batches)}
        return dealt

    return on_ranks


@pytest.mark.parametrize("B", [1, 2, 3, 5])
def test_every_row_once_and_as_many_batches(deal: Any, B: int) -> None:
    for W, N in itertools.product((1, 2, 3, 4, 7), range(1, 47)):
        dealt = deal(W, SequentialSampler(range(N)), B)
        counts = [len(batches) for batches in dealt]
        assert sorted(itertools.chain(*itertools.chain(*dealt))) == list(range(N))
        # one batch of the ranks together after another is the order of one process
        steps = itertools.zip_longest(*dealt, fillvalue=[])
        assert list(itertools.chain(*itertools.chain(*steps))) == list(range(N))
        if N >= W and B > 1:
            assert len(set(counts)) == 1, (W, N)
        assert max(counts) - min(counts) <= 1
        # rows as even as they come: one less in a batch, and any number in the last
        for batches in zip(*dealt, strict=False):
            sizes = list(map(len, batches))
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) <= B
        for batches in dealt:
            assert all(len(batch) == B for batch in batches[:-2])
            assert all(len(batch) >= B - 1 for batch in batches[:-1])


def test_drop_last_keeps_full_global_batches(deal: Any) -> None:
    for W, N in itertools.product((1, 2, 3), range(1, 30)):
        dealt = deal(W, SequentialSampler(range(N)), 4, drop_last=True)
        rows = sorted(itertools.chain(*itertools.chain(*dealt)))
        assert rows == list(range(N // (4 * W) * 4 * W))
        assert all(len(batch) == 4 for batches in dealt for batch in batches)


@pytest.mark.parametrize("make", [RandomSampler, SubsetRandomSampler])
def test_random_orders_are_those_of_all_ranks(deal: Any, make: Any) -> None:
    orders = []
    for epoch in (0, 0, 1):
        dealt = deal(3, make(range(20)), 2, epoch=epoch)
        rows = list(itertools.chain(*itertools.chain(*itertools.zip_longest(*dealt, fillvalue=[]))))
        assert sorted(rows) == list(range(20))
        orders.append(rows)
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != list(range(20))


def test_a_random_order_takes_no_random_numbers_of_others(deal: Any) -> None:
    before = torch.get_rng_state()
    list(EvaluationSampler(RandomSampler(range(20)), 2))
    assert torch.equal(before, torch.get_rng_state())


class Lies:  # draws a row less than it says
    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        return iter(range(4))


def test_a_length_that_lies_or_is_missing(deal: Any) -> None:
    with pytest.raises(InputError, match=r"Lies drew for an evaluation: expected 5, .*, got 4"):
        deal(2, Lies(), 2)
    with pytest.raises(ConfigurationError, match="generator in an evaluation"):
        deal(2, (row for row in range(3)), 2)
