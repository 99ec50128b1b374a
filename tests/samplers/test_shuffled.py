"""``GlobalBatchSampler.shuffled``: a permutation for every length, its epochs independent of ranks and of where they begin."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_losses.errors import ConfigurationError, InputError
from lightning_ddp_losses.samplers import GlobalBatchSampler
from lightning_ddp_losses.samplers.shuffled_order import ShuffledOrder
from tests.counting import CountCollectives
from tests.rank_pool import RankPool
from tests.samplers.test_global_batch import together

ORDERS = [
    [6, 5, 9, 0, 2, 4, 8, 7, 3, 1],
    [492, 207, 58, 742, 218, 152],
    [24162, 32938, 46432, 58061, 34206, 3127],
]


def order(length: int, key: int) -> list[int]:
    return ShuffledOrder(length).at(torch.arange(length), key).tolist()


@pytest.mark.parametrize("lengths", [range(1, 40), [63, 64, 65, 127, 128, 129, 1000, 4097]])
def test_every_length_is_permuted(lengths: Any) -> None:
    for length in lengths:
        for key in (0, 1, 2**61 - 1):
            assert sorted(order(length, key)) == list(range(length))


def test_orders_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint names a place in an order: a release that draws another one resumes elsewhere, without a word."""
    first = [order(10, 3), order(1000, 2**61 - 1)[:6], order(70_000, 12 << 29 | 1)[:6]]
    assert first == ORDERS
    # tables and what they are computed by are the same
    monkeypatch.setattr("lightning_ddp_losses.samplers.shuffled_order._TABLE_BITS", 0)
    assert [order(10, 3), order(1000, 2**61 - 1)[:6], order(70_000, 12 << 29 | 1)[:6]] == first


def test_it_is_shuffled() -> None:
    # each of the 6 orders of 3 rows, about as often: 5 standard deviations
    counts: dict[tuple[int, ...], int] = {}
    for key in range(1200):
        drawn = tuple(order(3, key))
        counts[drawn] = counts.get(drawn, 0) + 1
    assert len(counts) == 6
    assert all(abs(count - 200) < 65 for count in counts.values())
    # neighbours and places say nothing about each other
    numbers = torch.tensor(order(20_000, 7)).double()
    pairs = [(numbers[:-1], numbers[1:]), (numbers, torch.arange(20_000.0).double())]
    for pair in pairs:
        assert abs(torch.corrcoef(torch.stack(pair))[0, 1].item()) < 0.035


def test_a_place_in_the_middle_of_100_million_rows_costs_the_rows_asked_for() -> None:
    sampler: Any = GlobalBatchSampler.shuffled(100_000_000, 4, seed=1)
    state = sampler.state_dict() | {"epoch": 3, "rows": 60_000_000}
    sampler.load_state_dict(state)
    first = next(iter(sampler))
    assert len(sampler) == 25_000_000
    key = sampler.sampler._offer() << 29 | 3
    assert first == ShuffledOrder(100_000_000).at(torch.arange(60_000_000, 60_000_004), key).tolist()
    # nothing but the rows of one piece is held
    assert len(sampler.sampler._kept[2]._computed) * 4 <= 1 << 16


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


def other_seed() -> None:
    list(GlobalBatchSampler.shuffled(53, 12, seed=dist.get_rank()))


def test_bad_input(pool: RankPool) -> None:
    for options in ({"length": 0}, {"global_batch_size": 0}, {"seed": None}, {"seed": -1}):
        with pytest.raises(ConfigurationError, match=next(iter(options))):
            GlobalBatchSampler.shuffled(**({"length": 9, "global_batch_size": 3, "seed": 1} | options))  # type: ignore[arg-type]
    sampler: Any = GlobalBatchSampler.shuffled(9, 3, seed=1)
    for change, text in [
        ({"length": 8}, "expected 8, as saved, got 9"),
        ({"sampler": "RandomSampler"}, "ShuffledOrder"),
    ]:
        with pytest.raises(InputError, match=text):
            sampler.load_state_dict(sampler.state_dict() | change)
    sampler.load_state_dict(sampler.state_dict() | {"rows": 4})
    with pytest.raises(InputError, match="got row 4"):
        list(sampler)
    for error in pool.errors(2, other_seed):
        assert "seed" in error.message
