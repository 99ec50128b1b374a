"""`global_rows`: formulas over the rows of all ranks, in value and gradient."""

from __future__ import annotations

import functools

import pytest
import torch

from lightning_ddp_losses import global_rows
from lightning_ddp_losses.testing import RankPool
from tests.losses.rows_cases import CASES, ROWS, D
from tests.oracle import Found, Place, assert_near, parity


def play(place: Place, name: str) -> Found:
    formula, make = CASES[name]
    torch.manual_seed(3)
    tensors = make(sum(place.sizes))
    weight = torch.randn(D, D).double().requires_grad_()
    theirs = functools.partial(formula, weight)
    found = place.evaluated(theirs, functools.partial(global_rows, theirs, name=name), *tensors)
    if weight.grad is not None:  # each rank has all of it
        found["value of the weight's gradient"] = weight.grad
    # what is no number in one process is none on ranks
    return {name: tensor.nan_to_num(7) for name, tensor in found.items()}


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_one_process(pool: RankPool, rows: tuple[int, ...]) -> None:
    parity(pool, play, rows, cases=CASES, compare=assert_near)
