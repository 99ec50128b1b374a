"""`global_rows`: formulas over the rows of all ranks, in value and gradient."""

from __future__ import annotations

import functools

import pytest
import torch

from lightning_ddp_losses import global_rows
from lightning_ddp_losses.testing import RankPool
from tests.losses.rows_cases import CASES, ROWS, WEIGHTED, D, case_of
from tests.oracle import Found, Place, assert_near, normal, parity


def play(place: Place, name: str) -> Found:
    weight = torch.randn(D, D, generator=torch.Generator().manual_seed(4)).double().requires_grad_()
    formula, make = case_of(name, weight)
    torch.manual_seed(3)
    found = place.evaluated(formula, functools.partial(global_rows, formula, name=name), *make(sum(place.sizes)))
    if weight.grad is not None:  # each rank has all of it
        found["value of the weight's gradient"] = weight.grad
    # what is no number in one process is none on ranks
    return {name: tensor.nan_to_num(7) for name, tensor in found.items()}


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_one_process(pool: RankPool, rows: tuple[int, ...]) -> None:
    parity(pool, play, rows, cases=CASES | WEIGHTED, compare=assert_near)


def in_halves(place: Place, dtype: torch.dtype) -> Found:
    """One process: of the same rows in float64."""
    rows = normal(sum(place.sizes), D, seed=5).to(dtype)
    formula = CASES["penalty of batch norm"][0]
    ours = functools.partial(global_rows, formula, name="halves")
    labels = torch.zeros(len(rows), dtype=torch.long)
    found = place.evaluated(formula, ours, rows.double() if place.alone else rows, labels)
    return {name: tensor.double() for name, tensor in found.items()}


@pytest.mark.parametrize("rows", [(9, 4), (7, 0, 6)], ids=str)
def test_batch_norm_of_halves_has_wide_statistics(pool: RankPool, rows: tuple[int, ...]) -> None:
    for dtype, rtol in ((torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float32, 1e-6)):
        parity(pool, in_halves, rows, dtype, compare=assert_near, rtol=rtol)
