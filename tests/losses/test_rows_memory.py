"""What formulas on rows of all ranks keep and send: no tensor of the rows of all ranks, and as many numbers as counted by hand."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_ddp_losses import GlobalBatchLoss
from lightning_ddp_losses.testing import RankPool
from tests.counting import Operators
from tests.doors import Exchanged, RowsCall, evaluation
from tests.each_rank import each_rank
from tests.losses.rows_cases import CASES, D

ROWS = 300  # of each rank
FORMULAS = ("dice", "jaccard", "flops", "vicreg", "barlow", "barlow of torch", "mean entropy", "coral")


def largest(name: str, mode: Any) -> float:
    """Numbers of the largest memory of a step, for each row of this rank and number of a row."""
    formula, make = CASES[name]
    loss = GlobalBatchLoss(formula, mode=mode, name=name)
    torch.manual_seed(0)
    given = [each.requires_grad_(each.is_floating_point()) for each in make(ROWS)]
    loss(*given).backward()
    numbers = [0]

    def note(operator: Any, _: Any, results: list[Tensor]) -> None:
        # a handshake is padded to a size of its own
        if operator.namespace != "c10d":
            floating = [each for each in results if type(each) is Tensor and each.is_floating_point()]
            numbers.extend(each.untyped_storage().nbytes() // each.element_size() for each in floating)

    with Operators(note):
        loss(*given).backward()
    return max(numbers) / given[0].numel()


@each_rank(2)
def test_no_tensor_of_the_rows_of_all_ranks() -> None:
    for name in FORMULAS:
        assert largest(name, "rows") <= 1, name
        assert largest(name, "replicated") >= 2, name


def exchanged(name: str) -> list[Exchanged]:
    """The exchanges of a step, forward and backward."""
    formula, make = CASES[name]
    made = []

    def remember(*args: Any) -> RowsCall:
        made.append(RowsCall(*args))
        return made[-1]

    given = [each.requires_grad_(each.is_floating_point()) for each in make(ROWS)]
    with mock.patch.object(evaluation, "RowsCall", remember):
        GlobalBatchLoss(formula, name=name)(*given).backward()
    return made[0].exchanged


# how many numbers a rank sends in each exchange
BY_HAND: dict[str, list[int]] = {
    # overlap and size of 3 classes
    "dice": [2 * 3],
    # a mean of each number
    "flops": [D],
    # squared error and mean of the first view; its moments and covariance and the second view's mean; moments and covariance of that one
    # backward: the gradients of both means
    "vicreg": [1 + D, 3 * D + D * D + D, 3 * D + D * D, 2 * D],
    # moments of each rank, of one view and of the other, and their correlation; backward: the gradients of both
    "barlow of torch": [3 * D, 3 * D, D * D, 4 * D],
}


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_as_many_numbers_as_counted_by_hand(pool: RankPool, world_size: int) -> None:
    for name, numbers in BY_HAND.items():
        for found in pool.run(world_size, exchanged, name):
            assert {each.kind for each in found} == {"sum"}
            assert [each.numbers for each in found] == numbers
