"""Differentiable metrics: sequences of forward, update, compute and reset, whatever rows each rank has in each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics import classification, regression

from lightning_ddp_losses import differentiable
from tests.fuzz.engine import Domain, Found, NotDefined

__all__ = ["DOMAIN"]

Batch = tuple[Tensor, Tensor]


def pair(g: torch.Generator, rows: int) -> Batch:
    target = torch.randn(rows, generator=g, dtype=torch.float64)
    return target + 0.5 * torch.randn(rows, generator=g, dtype=torch.float64), target


def positive(g: torch.Generator, rows: int) -> Batch:
    low, high = (0.05 + torch.rand(rows, generator=g, dtype=torch.float64) for _ in range(2))
    return low, high


def wide(g: torch.Generator, rows: int) -> Batch:
    target = torch.randn(rows, 3, generator=g, dtype=torch.float64)
    return target + 0.5 * torch.randn(rows, 3, generator=g, dtype=torch.float64), target


def scores(g: torch.Generator, rows: int) -> Batch:
    return torch.randn(rows, 4, generator=g, dtype=torch.float64), torch.randint(4, (rows,), generator=g)


METRICS: dict[str, tuple[Callable[[], torchmetrics.Metric], Callable[[torch.Generator, int], Batch]]] = {
    "MeanSquaredError": (regression.MeanSquaredError, pair),
    "RootMeanSquaredError": (partial(regression.MeanSquaredError, squared=False), pair),
    "MeanAbsoluteError": (regression.MeanAbsoluteError, pair),
    "MinkowskiDistance": (partial(regression.MinkowskiDistance, p=3), pair),
    "ExplainedVariance": (regression.ExplainedVariance, pair),
    "R2Score": (regression.R2Score, pair),
    "RelativeSquaredError": (regression.RelativeSquaredError, pair),
    "LogCoshError": (regression.LogCoshError, pair),
    "PearsonCorrCoef": (regression.PearsonCorrCoef, pair),
    "ConcordanceCorrCoef": (regression.ConcordanceCorrCoef, pair),
    "MeanSquaredLogError": (regression.MeanSquaredLogError, positive),
    "MeanAbsolutePercentageError": (regression.MeanAbsolutePercentageError, positive),
    "TweedieDevianceScore": (partial(regression.TweedieDevianceScore, power=1.5), positive),
    "CosineSimilarity": (partial(regression.CosineSimilarity, reduction="mean"), wide),
    "KLDivergence": (regression.KLDivergence, lambda g, n: tuple(t.softmax(-1) for t in wide(g, n))),  # type: ignore[dict-item, return-value]
    "MulticlassHingeLoss": (partial(classification.MulticlassHingeLoss, num_classes=4), scores),
    "MeanMetric": (torchmetrics.MeanMetric, pair),
}
IN_FLOAT32 = ("CosineSimilarity",)  # whatever they are given


@dataclass(frozen=True)
class Case:
    """A metric and what is done with it.

    Attributes:
        steps: `forward`, `update`, `compute` or `reset`; the first two with the rows of each rank.
    """

    metric: str
    ranks: tuple[int, ...]
    steps: tuple[tuple[str, tuple[int, ...]], ...]
    gather: str
    constant: bool
    seed: int
    dtype: str = "float64"


@st.composite
def cases(draw: Any) -> Case:
    world = draw(st.integers(1, 4))
    rows = st.lists(st.integers(0, 5), min_size=world, max_size=world).map(tuple).filter(lambda r: sum(r) > 0)
    steps = draw(
        st.lists(
            st.tuples(st.sampled_from(["forward", "forward", "update", "compute", "reset"]), rows),
            min_size=1,
            max_size=5,
        )
    )
    metric = draw(st.sampled_from(sorted(METRICS)))
    return Case(
        metric=metric,
        ranks=(0,) * world,
        steps=tuple(steps),
        gather=draw(st.sampled_from(["auto", "auto", "inputs"])),
        constant=draw(st.sampled_from([False, False, False, True])),
        seed=draw(st.integers(0, 1000)),
        dtype="float32" if metric in IN_FLOAT32 else "float64",
    )


def batches(case: Case) -> list[Batch]:
    make = METRICS[case.metric][1]
    found = []
    for index, (_, rows) in enumerate(case.steps):
        first, target = make(torch.Generator().manual_seed(case.seed * 10 + index), sum(rows))
        if case.constant and first.is_floating_point():  # sorted data: rows do not vary within a rank
            owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows)).double()
            while owner.ndim < first.ndim:
                owner = owner[:, None]
            first = first * 0 + 0.3 + 0.1 * owner
        found.append((first, target))
    return found


def play(
    case: Case, metric: Any, part: Callable[[Tensor, tuple[int, ...]], Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Do the steps; values by step, gradients of the rows by step."""
    values: dict[str, Tensor] = {}
    grads: dict[str, Tensor] = {}
    seen = False
    for index, ((what, rows), (first, target)) in enumerate(zip(case.steps, batches(case), strict=True)):
        if what == "reset":
            metric.reset()
            seen = False
        elif what == "compute":
            if seen:
                values[f"value {index}"] = metric.compute().detach()
        else:
            x = part(first, rows).clone().requires_grad_()
            arguments = (x,) if case.metric == "MeanMetric" else (x, part(target, rows))
            seen = True
            if what == "update":
                metric.update(*arguments)
                continue
            value = metric(*arguments)
            values[f"value {index}"] = value.detach()
            if value.requires_grad:
                value.backward()
            grads[f"rank x {index}"] = torch.zeros_like(x) if x.grad is None else x.grad
    return values, grads


def alone(case: Case) -> dict[str, Any]:
    metric = METRICS[case.metric][0]()
    metric.set_dtype(torch.float64)
    metric.distributed_available_fn = lambda: False
    try:
        values, grads = play(case, metric, lambda tensor, rows: tensor)
    except Exception as error:
        raise NotDefined from error
    if not values or any(not t.isfinite().all() for t in (*values.values(), *grads.values())):
        raise NotDefined
    found: dict[str, Any] = dict(values)
    for name, grad in grads.items():
        rows = case.steps[int(name.split()[-1])][1]
        found[name] = list(grad.split(list(rows)))
    return found


def on_rank(case: Case) -> Found:
    rank, world = dist.get_rank(), dist.get_world_size()
    metric = differentiable(METRICS[case.metric][0](), gather=case.gather)
    values, grads = play(case, metric, lambda tensor, rows: tensor.split(list(rows))[rank])
    return {**values, **{name: grad / world for name, grad in grads.items()}}


DOMAIN = Domain("metrics", cases(), on_rank, alone)
