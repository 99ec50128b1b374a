"""`global_rows`: formulas over the rows of all ranks, in value and gradient, exchanges and refusals."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from lightning_ddp_losses import global_rows
from lightning_ddp_losses.testing import RankPool
from tests.losses.rows_cases import CASES, ROWS, D
from tests.oracle import differences, own


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [each.clone().requires_grad_(each.is_floating_point()) for each in tensors]


def graded(value: Tensor, weight: Tensor, rows: list[Tensor]) -> dict[str, Tensor]:
    """The value, and the gradients, zeros where there are none."""
    value.backward()
    found = {"value": value.detach(), "weight": torch.zeros_like(weight) if weight.grad is None else weight.grad}
    for number, each in enumerate(rows):
        if each.requires_grad:
            found[f"argument {number}"] = torch.zeros_like(each) if each.grad is None else each.grad
    return found


def wrong_cases(rows: tuple[int, ...], names: list[str]) -> list[str]:
    """What is wrong, of the cases with these names."""
    world_size, problems = len(rows), []
    part = own(rows)
    for name in names:
        formula, make = CASES[name]
        torch.manual_seed(3)
        given = make(sum(rows))
        weight = torch.randn(D, D).double()
        oracle_rows, oracle_weight = leaves(given), weight.clone().requires_grad_()
        oracle = graded(formula(oracle_weight, *oracle_rows), oracle_weight, oracle_rows)
        own_rows, own_weight = leaves([each[part] for each in given]), weight.clone().requires_grad_()
        try:
            value = global_rows(functools.partial(formula, own_weight), *own_rows, name=name)
            found = graded(value, own_weight, own_rows)
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {error}")
            continue
        for key, truth in oracle.items():
            if key.startswith("argument"):
                truth = truth[part] * world_size
            off = differences({key: found[key].nan_to_num(7)}, {key: truth.nan_to_num(7)})[key]
            if off > 1e-9 and not (truth.norm() < 1e-14 and found[key].norm() < 1e-14):
                problems.append(f"{name}: {key} is off by {off:.2g}: {found[key]} {truth}")
    return problems


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_one_process(pool: RankPool, rows: tuple[int, ...]) -> None:
    problems = pool.run(len(rows), wrong_cases, rows, list(CASES))
    assert not any(problems), "\n".join(problems[0])
