"""The cut of global batches by rank: the union over ranks of step k is the one-process batch k."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from lightning_ddp_losses.cli.sampling import BatchSlices, check_cut, stratified_split
from lightning_ddp_losses.errors import ConfigurationError, InputError
from tests.rank_pool import RankPool


def slices(size: int, batch_size: int, shuffle: bool, epoch: int) -> tuple[int, list[list[int]]]:
    sampler = BatchSlices(size, batch_size, shuffle=shuffle, seed=3)
    sampler.set_epoch(epoch)
    return len(sampler), list(sampler)


def unions(pool: RankPool, world_size: int, *args: object) -> list[list[int]]:
    """Step by step, the ranks' rows in rank order."""
    lengths, steps = zip(*pool.run(world_size, slices, *args), strict=True)
    assert {len(each) for each in steps} == set(lengths)  # as many steps on every rank, and as announced
    return [list(chain(*step)) for step in zip(*steps, strict=True)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_training_cut_joins_to_the_one_process_batches(pool: RankPool, world_size: int) -> None:
    for epoch in (0, 1):
        assert unions(pool, world_size, 40, 12, True, epoch) == slices(40, 12, True, epoch)[1]


@pytest.mark.parametrize("size", [3, 11, 12, 13, 25, 47])
def test_evaluation_cut_takes_every_row_once_in_order_on_any_number_of_ranks(pool: RankPool, size: int) -> None:
    whole = slices(size, 12, False, 0)[1]
    assert list(chain(*whole)) == list(range(size))
    assert all(unions(pool, world_size, size, 12, False, 0) == whole for world_size in (2, 3))
    assert all(
        row for _, steps in pool.run(3, slices, size, 12, False, 0) for row in steps
    )  # no rank gets an empty batch


def test_training_drops_the_ragged_batch_and_changes_with_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = BatchSlices(40, 12, shuffle=True, seed=seed)
        sampler.set_epoch(epoch)
        assert [len(step) for step in sampler] == [12, 12, 12]
        return list(chain(*sampler))

    assert order(0, 1) == order(0, 1)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert len(set(order(0, 0))) == 36


def test_a_batch_that_does_not_divide_names_both_numbers_and_the_way_out() -> None:
    with pytest.raises(ConfigurationError, match=r"multiple of the 3 ranks, got 64\n.*63 or 66"):
        check_cut(100, 64, 3, shuffle=True)
    with pytest.raises(ConfigurationError, match="got 0"):
        check_cut(100, 0, 3, shuffle=True)
    with pytest.raises(InputError, match="training rows: expected at least batch_size=64, got 63"):
        check_cut(63, 64, 2, shuffle=True)
    with pytest.raises(InputError, match="held-out rows: expected at least one for each of 4 ranks, got 3"):
        check_cut(3, 64, 4, shuffle=False)


def test_split_is_stratified_without_overlap_and_fixed_by_its_seed() -> None:
    labels = np.repeat([4, 7, 9, 11], [100, 40, 2, 1])
    train, held_out = stratified_split(labels, 0.25, seed=0)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, held_out])), np.arange(len(labels)))
    assert [int((labels[held_out] == label).sum()) for label in (4, 7, 9, 11)] == [25, 10, 1, 0]
    np.testing.assert_array_equal(held_out, stratified_split(labels, 0.25, seed=0)[1])
    assert not np.array_equal(held_out, stratified_split(labels, 0.25, seed=1)[1])
    with pytest.raises(ConfigurationError, match=r"between 0 and 1, got 1\.5"):
        stratified_split(labels, 1.5, seed=0)
