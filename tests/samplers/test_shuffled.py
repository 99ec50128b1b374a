"""``GlobalBatchSampler.shuffled``: a permutation for every length; its epochs depend on no rank and no place."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch

from lightning_ddp_losses.samplers import GlobalBatchSampler
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives
from tests.doors import LocalBatches, Permutation
from tests.samplers.test_global_batch import together


def order(length: int, seed: int) -> list[int]:
    return Permutation(length).order(seed).tolist()


@pytest.mark.parametrize("lengths", [range(1, 40), [63, 64, 65, 127, 128, 129, 1000, 4097]])
def test_every_length_is_permuted(lengths: Any) -> None:
    for length in lengths:
        for seed in (0, 1, 2**32 - 1):
            assert sorted(order(length, seed)) == list(range(length))


def test_it_is_shuffled() -> None:
    # each of the 6 orders of 3 rows, about as often: 5 standard deviations
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(1200):
        drawn = tuple(order(3, seed))
        counts[drawn] = counts.get(drawn, 0) + 1
    assert len(counts) == 6
    assert all(abs(count - 200) < 65 for count in counts.values())
    # neighbours and places say nothing about each other
    numbers = torch.tensor(order(20_000, 7)).double()
    pairs = [(numbers[:-1], numbers[1:]), (numbers, torch.arange(20_000.0).double())]
    for pair in pairs:
        assert abs(torch.corrcoef(torch.stack(pair))[0, 1].item()) < 0.035


def test_an_epoch_is_kept_in_four_bytes_a_row() -> None:
    sampler: Any = GlobalBatchSampler.shuffled(1_000_000, 4, seed=1)
    state = sampler.state_dict() | {"epoch": 3, "rows": 600_000}
    sampler.load_state_dict(state)
    first = next(iter(sampler))
    assert len(sampler) == 250_000
    assert first == Permutation(1_000_000).order(1 + 3)[600_000:600_004].tolist()
    batches = sampler.sampler._kept[2]
    assert isinstance(batches, LocalBatches)
    assert batches.order.nbytes == 4_000_000


def leg(batches: int, state: dict[str, Any] | None) -> tuple[list[Any], dict[str, Any], int]:
    sampler: Any = GlobalBatchSampler.shuffled(53, 12, seed=9)
    if state is not None:
        sampler.load_state_dict(state)
    drawn: list[Any] = []
    with CountCollectives() as count:
        for batch in sampler:
            drawn.append(batch)
            if len(drawn) == batches:
                break
    return [drawn], sampler.state_dict(), len(count.take())


def test_any_number_of_ranks_goes_on(pool: RankPool) -> None:
    whole: Any = GlobalBatchSampler.shuffled(53, 12, seed=9)
    expected = [list(whole), list(whole)]
    assert expected[0] != expected[1]
    for epoch in expected:
        assert sorted(chain(*epoch)) == list(range(53))
    state, joined = None, []
    for world_size, batches in [(2, 2), (3, 1), (1, 9)]:
        replies = pool.run(world_size, leg, batches, state)
        joined += together([drawn for drawn, _, _ in replies])[0]
        state = replies[0][1]
        assert {count for _, _, count in replies} == {int(world_size > 1)}
    assert joined == expected[0]


def test_every_place_is_one_to_go_on_from() -> None:
    whole = list(GlobalBatchSampler.shuffled(53, 12, seed=9))
    for place in range(len(whole)):
        sampler: Any = GlobalBatchSampler.shuffled(53, 12, seed=9)
        sampler.load_state_dict(sampler.state_dict() | {"rows": 12 * place})
        assert list(sampler) == whole[place:]
