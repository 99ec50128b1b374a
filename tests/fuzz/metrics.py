"""Differentiable metrics: sequences of forward, update, compute and reset, whatever rows each rank has in each step."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torchmetrics
from hypothesis import strategies as st
from torch import Tensor
from torchmetrics import classification, regression

from lightning_ddp_losses import DifferentiableMetric, differentiable
from tests.fuzz.engine import Domain, Found, NotDefined, Place, zero_or
from tests.oracle import normal

Batch = tuple[Tensor, Tensor]


def pair(g: torch.Generator, rows: int) -> Batch:
    target = normal(rows, seed=g)
    return target + 0.5 * normal(rows, seed=g), target


def positive(g: torch.Generator, rows: int) -> Batch:
    low, high = (0.05 + torch.rand(rows, generator=g, dtype=torch.float64) for _ in range(2))
    return low, high


def wide(g: torch.Generator, rows: int) -> Batch:
    target = normal(rows, 3, seed=g)
    return target + 0.5 * normal(rows, 3, seed=g), target


def scores(g: torch.Generator, rows: int) -> Batch:
    return normal(rows, 4, seed=g), torch.randint(4, (rows,), generator=g)


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
STEPS = ["forward", "forward", "update", "no grad", "compute", "reset", "deepcopy", "clone", "pickle"]
WITH_GRAPH = ["update", "update", "compute", "reset"]  # a copy has no graph, in torchmetrics either
IN_FLOAT32 = ("CosineSimilarity",)  # whatever they are given


@dataclass(frozen=True)
class Case:
    """A metric and what is done with it.

    Attributes:
        steps: One of `STEPS` each, with the rows of each rank where rows come in.
        keep_graph: Gradients go through `compute` to the rows of all updates since the last one; there is no `forward` then.
    """

    metric: str
    ranks: tuple[int, ...]
    steps: tuple[tuple[str, tuple[int, ...]], ...]
    gather: str
    constant: bool
    seed: int
    keep_graph: bool = False
    dtype: str = "float64"


@st.composite
def cases(draw: Any) -> Case:
    world = draw(st.integers(1, 4))
    rows = st.lists(st.integers(0, 5), min_size=world, max_size=world).map(tuple).filter(lambda r: sum(r) > 0)
    keep_graph = draw(st.sampled_from([False, False, True]))
    steps = draw(
        st.lists(st.tuples(st.sampled_from(WITH_GRAPH if keep_graph else STEPS), rows), min_size=1, max_size=6)
    )
    metric = draw(st.sampled_from(sorted(METRICS)))
    return Case(
        metric=metric,
        ranks=(0,) * world,
        steps=tuple(steps),
        gather=draw(st.sampled_from(["auto", "auto", "inputs"])),
        constant=draw(st.sampled_from([False, False, False, True])),
        seed=draw(st.integers(0, 1000)),
        keep_graph=keep_graph,
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


def perform(
    case: Case, metric: Any, part: Callable[[Tensor, tuple[int, ...]], Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Do the steps on a metric, whose copies take its place; the values and the gradients of the rows by step. `part` cuts a batch."""
    values: dict[str, Tensor] = {}
    leaves: dict[str, Tensor] = {}
    seen = has_graph = False
    for index, ((what, rows), (first, target)) in enumerate(zip(case.steps, batches(case), strict=True)):
        if what == "reset":
            metric.reset()
            seen = has_graph = False
        elif what in COPIES:
            if isinstance(metric, DifferentiableMetric):  # in one process the metric itself is its copy
                metric = COPIES[what](metric)
        elif what == "compute":
            if seen:
                value = metric.compute()
                values[f"value {index}"] = value.detach()
                if case.keep_graph and has_graph:
                    (value * (1 + index)).backward()
                    end_graph(metric)
                has_graph = False
        else:
            x = part(first, rows).clone().requires_grad_()
            arguments = (x,) if case.metric == "MeanMetric" else (x, part(target, rows))
            seen = True
            leaves[f"rank x {index}"] = x
            if what == "update":
                metric.update(*arguments)
                has_graph = True
            elif what == "no grad":
                with torch.no_grad():
                    values[f"value {index}"] = metric(*arguments)
            else:
                value = metric(*arguments)
                values[f"value {index}"] = value.detach()
                if value.requires_grad:
                    value.backward()
    return values, {name: zero_or(x) for name, x in leaves.items()}


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": deepcopy,
    "clone": lambda metric: metric.clone(),
    "pickle": lambda metric: pickle.loads(pickle.dumps(metric)),
}


def end_graph(metric: Any) -> None:
    """Let what is accumulated go on without its graph; ours do so by themselves."""
    if isinstance(metric, DifferentiableMetric):
        return
    for name in metric._defaults:
        state = getattr(metric, name)
        setattr(metric, name, [t.detach() for t in state] if isinstance(state, list) else state.detach())


def nowhere() -> bool:
    """Whether there are ranks, for one process."""
    return False


def play(case: Case, place: Place) -> Found:
    metric: Any = METRICS[case.metric][0]()
    if place.alone:
        metric.set_dtype(torch.float64)
        metric.distributed_available_fn = nowhere
        metric._enable_grad = case.keep_graph  # torchmetrics' updates have no graph
    else:
        metric = differentiable(metric, gather=case.gather, keep_graph=case.keep_graph)
    values, grads = perform(case, metric, lambda x, rows: x if place.alone else x.split(list(rows))[place.rank])
    if not values:
        raise NotDefined
    for name, grad in grads.items():
        rows = case.steps[int(name.split()[-1])][1]
        values[name] = place.parts(grad, rows) if place.alone else grad / len(case.ranks)
    return values


DOMAIN = Domain.of("metrics", cases(), play)
