"""A metric on ranks and in one process: slices of ONE global batch, float64, value and gradient of every row.

One process: torchmetrics' own class with its states in float64, no code of ours. DDP's mean over ranks divides what a rank
holds by W; so a rank's rows must hold W times the gradient that they have in one process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_losses.metrics import differentiable
from tests.doors import map_tensors
from tests.metrics.cases import Case
from tests.oracle import cuts

STEPS = 2


def splits(world_size: int, even: bool) -> Callable[[int], slice]:
    """This rank's rows of a global batch, by their number."""
    return lambda rows: cuts(rows, world_size, even=even)[dist.get_rank() if world_size > 1 else 0]


def rows_of(batch: Any) -> int:
    return len(batch[0])


def own_part(batch: tuple[Any, ...], part: slice) -> tuple[Any, ...]:
    return map_tensors(lambda t: t[part].clone(), batch)  # type: ignore[no-any-return]


def flat(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(lambda t: found.append(t.detach().double()), value)
    return found


def difference(ours: Sequence[Tensor], oracle: Sequence[Tensor]) -> float:
    """Largest relative difference in norm."""
    if [t.shape for t in ours] != [t.shape for t in oracle]:
        return float("inf")
    worst = 0.0
    for a, b in zip(ours, oracle, strict=True):
        off = float((a - b).norm() / b.norm()) if a.numel() and b.norm() else float((a - b).norm())
        worst = max(worst, off if off == off else float("inf"))
    return worst


@cache
def alone(case: Case) -> list[list[Tensor]]:
    """For each step value and gradient, then what `compute` says of all steps; once in the life of a rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Metric `.*` will save all")
        metric, found = case.make().set_dtype(torch.float64), []
        metric.distributed_available_fn = lambda: False
        for step in range(STEPS):
            first, *rest = case.global_batch(step)
            leaf = first.clone().requires_grad_()
            value = metric(leaf, *rest)
            case.quantity(value).backward()
            assert leaf.grad.abs().sum() > 0
            found.append([*flat(value), leaf.grad])
        return [*found, flat(metric.compute())]


def step_on_rank(metric: Any, case: Case, step: int, part: slice) -> list[Tensor]:
    """Value of a step on this rank, and the gradient of its rows over W."""
    first, *rest = own_part(case.global_batch(step), part)
    leaf = first.requires_grad_()
    value = metric(leaf, *rest)
    case.quantity(value).backward()
    return [*flat(value), leaf.grad / dist.get_world_size()]


def on_ranks(case: Case, even: bool) -> tuple[list[list[Tensor]], slice]:
    """The same on this rank; gradients are of its own rows."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Metric `.*` will save all")
        world, found = dist.get_world_size(), []
        metric = differentiable(case.make())
        for step in range(STEPS):
            part = splits(world, even)(rows_of(case.global_batch(step)))
            found.append(step_on_rank(metric, case, step, part))
        return [*found, flat(metric.compute())], part


def compare(case: Case, even: bool) -> float:
    """Run both on this rank; the largest relative difference, of values, gradients and the accumulated value, over `rtol`."""
    ours, part = on_ranks(case, even)
    *steps, total = alone(case)
    oracle = [*([*values, grad[part]] for *values, grad in steps), total]
    return max(difference(a, b) for a, b in zip(ours, oracle, strict=True)) / case.rtol
