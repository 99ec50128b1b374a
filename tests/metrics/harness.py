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
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_ddp_losses.metrics import differentiable
from tests.doors import map_tensors
from tests.metrics.cases import Case
from tests.oracle import Place, cuts

STEPS = 2


def splits(world_size: int, even: bool) -> Callable[[int], slice]:
    """This rank's rows of a global batch, by their number."""
    return lambda rows: cuts(rows, world_size, even=even)[dist.get_rank() if world_size > 1 else 0]


def offline(metric: Any, dtype: torch.dtype | None = torch.float64) -> Any:
    """The metric of one process: it never looks for other ranks, and its states have the dtype."""
    for part in nn.Module.modules(metric):
        if isinstance(part, Metric):
            part.distributed_available_fn = lambda: False
            if dtype is not None:
                part.set_dtype(dtype)
    return metric


def rows_of(batch: Any) -> int:
    return len(batch[0])


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


def step(place: Place, metric: Any, case: Case, number: int) -> list[Tensor]:
    """Value of a step, and the gradient of the rows that are here, over W."""
    first, *rest = map_tensors(lambda t: place.own(t).clone(), case.global_batch(number))
    leaf = first.requires_grad_()
    value = metric(leaf, *rest)
    case.quantity(value).backward()
    assert not place.alone or leaf.grad.abs().sum() > 0
    return [*flat(value), leaf.grad / place.world_size]


def play(place: Place, case: Case) -> list[list[Tensor]]:
    """For each step value and gradient, then what `compute` says of all steps."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Metric `.*` will save all")
        metric: Any = offline(case.make()) if place.alone else differentiable(case.make())
        found = [step(place, metric, case, number) for number in range(STEPS)]
        return [*found, flat(metric.compute())]


@cache
def truth_of(case: Case) -> list[list[Tensor]]:
    """In one process; once in the life of a rank."""
    return play(Place(()), case)


def compare(case: Case, even: bool) -> float:
    """Run both on this rank; the largest relative difference, of values, gradients and the accumulated value, over `rtol`."""
    parts = cuts(rows_of(case.global_batch(0)), dist.get_world_size(), even=even)
    place = Place([part.stop - part.start for part in parts], dist.get_rank())
    *steps, total = truth_of(case)
    oracle = [*([*values, place.own(grad)] for *values, grad in steps), total]
    return max(difference(a, b) for a, b in zip(play(place, case), oracle, strict=True)) / case.rtol
