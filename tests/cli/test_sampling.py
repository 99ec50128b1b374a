"""Which rows go into which global batch: the union over ranks of step k is the one-process batch k."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from lightning_ddp_losses.cli import DigitsDataModule
from lightning_ddp_losses.demo.data import HeldOutSlices, stratified_split
from lightning_ddp_losses.testing import RankPool

Steps = list[list[int]]


def train_steps(m_per_class: int | None, seed: int, epochs: tuple[int, ...], held_out: float = 0.25) -> list[Steps]:
    """This rank's row numbers, epoch by epoch, as its loader asks for them."""
    data = DigitsDataModule(60, held_out=held_out, seed=seed, m_per_class=m_per_class)
    batches = data.train_dataloader().batch_sampler
    found = []
    for epoch in epochs:
        batches.set_epoch(epoch)
        found.append(list(batches))
        assert len(found[-1]) == len(batches)
    return found


def held_out_steps(size: int, batch_size: int) -> list[Steps]:
    return [list(HeldOutSlices(size, batch_size))]


def unions(per_rank: list[list[Steps]]) -> list[Steps]:
    """Step by step, the ranks' rows in rank order."""
    return [
        [list(chain(*step)) for step in zip(*epoch, strict=True)]  # as many steps on every rank
        for epoch in zip(*per_rank, strict=True)
    ]


@pytest.mark.parametrize("m_per_class", [None, 10])
def test_training_batches_join_to_those_of_one_process(pool: RankPool, m_per_class: int | None) -> None:
    one = train_steps(m_per_class, 3, (0, 1))
    for world_size in (2, 3):
        per_rank = pool.run(world_size, train_steps, m_per_class, 3, (0, 1))
        assert {len(step) for rank in per_rank for epoch in rank for step in epoch} == {60 // world_size}
        assert unions(per_rank) == one


@pytest.mark.parametrize("size", [3, 11, 12, 13, 25, 47])
def test_held_out_rows_come_once_in_order_on_any_number_of_ranks(pool: RankPool, size: int) -> None:
    (whole,) = held_out_steps(size, 12)
    assert list(chain(*whole)) == list(range(size))
    assert max(len(step) for step in whole) <= 12
    for world_size in (2, 3):
        per_rank = pool.run(world_size, held_out_steps, size, 12)
        assert unions(per_rank) == [whole]
        assert all(step for rank in per_rank for epoch in rank for step in epoch)  # no rank gets an empty batch


def test_with_one_row_for_each_rank_no_rank_gets_an_empty_held_out_batch(pool: RankPool) -> None:
    per_rank = pool.run(2, held_out_steps, 7, 2)
    assert unions(per_rank) == [[[0, 1, 2], [3, 4], [5, 6]]]
    assert all(step for rank in per_rank for epoch in rank for step in epoch)


def test_training_takes_rows_once_drops_the_ragged_batch_and_changes_with_seed_and_epoch() -> None:
    first, second = train_steps(None, 0, (0, 1))
    assert {len(step) for step in first} == {60}
    assert len(set(chain(*first))) == 60 * len(first) == 1347 // 60 * 60
    assert first != second
    assert [first, second] == train_steps(None, 0, (0, 1))
    assert first != train_steps(None, 5, (0,))[0]


def test_batches_by_class_hold_that_many_of_each_and_do_not_depend_on_the_epochs_before() -> None:
    data = DigitsDataModule(60, m_per_class=10)
    _, _, last = epochs = train_steps(10, 0, (0, 1, 2))
    for step in chain(*epochs):
        assert len(set(step)) == 60
        assert sorted(np.bincount(data.labels[data.train_rows[step]], minlength=10)) == [0] * 4 + [10] * 6
    assert train_steps(10, 0, (2,)) == [last]  # as a resumed run asks for it


def test_split_is_stratified_without_overlap_and_fixed_by_its_seed() -> None:
    labels = np.repeat([4, 7, 9, 11], [100, 40, 2, 1])
    train, held_out = stratified_split(labels, 0.25, seed=0)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, held_out])), np.arange(len(labels)))
    assert [int((labels[held_out] == label).sum()) for label in (4, 7, 9, 11)] == [25, 10, 1, 0]
    np.testing.assert_array_equal(held_out, stratified_split(labels, 0.25, seed=0)[1])
    assert not np.array_equal(held_out, stratified_split(labels, 0.25, seed=1)[1])
