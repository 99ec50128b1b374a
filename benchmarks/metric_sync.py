"""A metric's forward and compute over all ranks, compared to torchmetrics, W = 2.

256 rows per rank. Forward: `differentiable` and torchmetrics with `dist_sync_on_step=True`. Counted: collectives of a forward in steady
state (1 for states that are scalars, for a collection of them and for few rows, 2 with many) and of a backward (none). Compute: `synced`
and torchmetrics, after two updates on each rank. Counted: collectives (1, or 2 with many rows).

Both are timed in turns in the same processes, torchmetrics' twice (A/A is the same estimate without a difference). A call takes the time
of its slowest rank. Values are compared first, and so are gradients: torchmetrics' are 1/W of ours. Last, the memory of a sync of many
rows: the highest resident set in fresh processes above the one before, over the bytes that were gathered.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics as tm
from torch import Tensor

from benchmarks.interleave import time_in_turns
from benchmarks.memory import MIB, Resident
from benchmarks.ranks import run_ranks
from benchmarks.records import Row
from lightning_ddp_losses import differentiable, synced
from lightning_ddp_losses.core.inputs import tensors_in
from lightning_ddp_losses.testing import CountCollectives

__all__ = ["main"]

ROWS = 256
EQUAL = 1e-5  # relative, float32
SIX = ("MeanSquaredError", "MeanAbsoluteError", "R2Score", "ExplainedVariance", "PearsonCorrCoef", "SpearmanCorrCoef")
FIVE = SIX[:5]
JOBS: dict[str, tuple[tuple[str, ...], float | None, int]] = {  # metrics, limit of the time, of the collectives
    "MeanSquaredError": (SIX[:1], 0.45, 1),
    "R2Score": (("R2Score",), 0.45, 1),
    "SpearmanCorrCoef": (("SpearmanCorrCoef",), 0.45, 2),
    "PearsonCorrCoef": (("PearsonCorrCoef",), 0.2, 1),
    "collection of 5, scalar states": (FIVE, None, 1),
    "collection of 6": (SIX, 0.15, 2),
}


BINARY = ("BinaryAUROC", "BinaryAveragePrecision", "BinaryROC", "BinaryAccuracy", "BinaryF1Score", "BinaryStatScores")
COMPUTES: dict[str, tuple[Callable[[], Any], int]] = {  # metric, limit of the collectives
    "ConfusionMatrix": (lambda: tm.ConfusionMatrix(task="binary", compute_with_cache=False), 1),
    "PearsonCorrCoef": (lambda: tm.PearsonCorrCoef(compute_with_cache=False), 1),
    "SpearmanCorrCoef": (lambda: tm.SpearmanCorrCoef(compute_with_cache=False), 2),
    "AUROC": (lambda: tm.AUROC(task="binary", compute_with_cache=False), 2),
    "RetrievalMAP": (lambda: tm.retrieval.RetrievalMAP(compute_with_cache=False), 2),
    "collection with compute groups": (
        lambda: tm.MetricCollection([getattr(tm.classification, name)(compute_with_cache=False) for name in BINARY]),
        2,
    ),
}


def make(job: str, *, ours: bool) -> Any:
    """One metric, or a collection."""
    names = JOBS[job][0]
    members = [getattr(tm, name)(**({} if ours else {"dist_sync_on_step": True})) for name in names]
    metric = members[0] if len(members) == 1 else tm.MetricCollection(members)
    return differentiable(metric, without_gradient="keep") if ours else metric


def values_of(value: Any) -> list[Tensor]:
    """All numbers that came out."""
    return tensors_in(value)


class Contestant:
    """One metric on this rank's rows."""

    def __init__(self, job: str, *, ours: bool) -> None:
        self.metric = make(job, ours=ours)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.target = torch.randn(ROWS, generator=generator)
        self.preds = (self.target + torch.randn(ROWS, generator=generator)).requires_grad_()

    def call(self) -> Any:
        """One forward."""
        return self.metric(self.preds, self.target)

    def after(self) -> None:
        """Reset the states: rows would pile up."""
        self.metric.reset()

    def step(self) -> list[Tensor]:
        """One forward from reset states."""
        found = values_of(self.call())
        self.after()
        return found


class Evaluated:
    """One metric with two updates on this rank's rows."""

    def __init__(self, job: str, *, ours: bool) -> None:
        metric = COMPUTES[job][0]()
        self.metric = synced(metric) if ours else metric
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(2):
            target = torch.randint(2, (ROWS,), generator=generator)
            preds = (target + torch.randn(ROWS, generator=generator)).sigmoid()
            queries = {"indexes": torch.arange(ROWS) % 16} if job == "RetrievalMAP" else {}
            self.metric.update(preds, target.float() if "Corr" in job else target, **queries)

    def call(self) -> Any:
        """One compute."""
        return self.metric.compute()

    def after(self) -> None:
        """Keep the states."""


def relative(a: Tensor, b: Tensor) -> float:
    """Difference in norm."""
    return float((a - b).norm() / b.norm())


def check(job: str) -> Row:
    """Equal values, gradients W times as large, and counts."""
    found: list[tuple[list[Tensor], Tensor | None, list[str], list[str]]] = []
    for ours in (True, False):
        contestant = Contestant(job, ours=ours)
        contestant.step()
        with CountCollectives() as collectives:
            values = contestant.step()
            forward = collectives.take()
            trained = [value for value in values if value.requires_grad]
            if trained:
                torch.stack(trained).sum().backward()
            found.append((values, contestant.preds.grad, forward, collectives.take()))
    (values, grad, names, backward), (theirs, other, their_names, _) = found
    off = max(relative(a.detach(), b.detach()) for a, b in zip(values, theirs, strict=True))
    scale = float((grad * other).sum() / other.square().sum()) if grad is not None and other is not None else None
    if scale is not None and grad is not None and other is not None:
        off = max(off, relative(grad, other * dist.get_world_size()))
    barriers = sum("barrier" in name for name in names)
    return {
        "off": off,
        "ours": len(names),
        "theirs": len(their_names),
        "extra": len(backward) + barriers,
        "scale": scale,
    }


def check_compute(job: str) -> Row:
    """Equal values, and counts. Rows of an update lie together in ours, by rank in torchmetrics'."""
    found: list[tuple[Tensor, list[str]]] = []
    for ours in (True, False):
        contestant = Evaluated(job, ours=ours)
        contestant.call()
        with CountCollectives() as collectives:
            values = torch.cat([value.double().flatten() for value in values_of(contestant.call())])
            found.append((values, collectives.take()))
    (values, names), (theirs, their_names) = found
    return {"off": relative(values, theirs), "ours": len(names), "theirs": len(their_names), "extra": 0, "scale": None}


def timed(is_forward: bool, job: str, rounds: int, seconds: float) -> tuple[Row, list[list[float]]]:
    """Milliseconds of (torchmetrics, torchmetrics again, ours) for each round."""
    warnings.filterwarnings("ignore", message="Metric `.*` will save all")
    checked = check(job) if is_forward else check_compute(job)
    kind: type[Contestant | Evaluated] = Contestant if is_forward else Evaluated
    contestants = [kind(job, ours=ours) for ours in (False, False, True)]
    steps = [each.call for each in contestants]
    times = time_in_turns(steps, rounds, seconds, warm_up=3, least=7, after=lambda index: contestants[index].after())
    return checked, times


def row_of(job: str, rounds: int, seconds: float, *, is_forward: bool) -> Row:
    """Counts and times of one job."""
    limit, most = JOBS[job][1:] if is_forward else (None, COMPUTES[job][1])
    answers = run_ranks(timed, is_forward, job, rounds, seconds)
    both = list(zip(*(table for _, table in answers), strict=True))
    theirs, again, ours = ([max(rank[i] for rank in ranks) for ranks in both] for i in range(3))
    checked = answers[0][0]
    off = max(answer[0]["off"] for answer in answers)
    # a round's neighbours lie milliseconds apart: what slows one down slows the other
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    right = off <= EQUAL and checked["ours"] <= most and checked["extra"] == 0
    return {
        "table": f"{'Forward' if is_forward else 'Compute'} of a metric over all ranks, 2 ranks, {ROWS} rows each, slowest rank",
        "metric": job,
        "torchmetrics_ms": statistics.median(theirs),
        "ours_ms": statistics.median(ours),
        "ratio": ratio,
        "A/A": statistics.median(a / b for a, b in zip(again, theirs, strict=True)),
        "time_limit": limit,
        "torchmetrics_collectives": checked["theirs"],
        "collectives": checked["ours"],
        "most_collectives": most,
        "in_backward_or_barriers": checked["extra"],
        "gradient_over_torchmetrics": checked["scale"],
        "values_differ_by": off,
        "rounds": len(both),
        "verdict": "WRONG" if not right else "met" if limit is None or ratio <= limit else "missed",
    }


def peak(mebibytes: int, ours: bool) -> tuple[int, int]:
    """Bytes that the resident set grows by in one sync of rows, and bytes gathered."""

    def rows(count: int) -> Tensor:
        return torch.ones(count, 256)

    def metric() -> Any:
        made = tm.CatMetric(nan_strategy="disable")
        return differentiable(made, without_gradient="keep") if ours else made

    small = metric()
    small.update(rows(1024))  # libraries load, pools fill
    small.sync()
    count = mebibytes * MIB // 1024 // 4
    big = metric()
    for _ in range(4):
        big.update(rows(count))
    gathered = dist.get_world_size() * 4 * count * 1024
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident = Resident()
    resident.reset()
    before = resident.now()
    big.sync()
    grown = resident.peak - before
    resident.close()
    assert big.value.shape[0] == dist.get_world_size() * 4 * count
    return grown, gathered


def memory_row(mebibytes: int) -> Row:
    """Peak memory of a sync beside torchmetrics'."""
    answers = {mine: run_ranks(peak, mebibytes, mine) for mine in (False, True)}
    shares = {mine: max(grown / gathered for grown, gathered in found) for mine, found in answers.items()}
    return {
        "table": "Peak memory of the sync of rows (CatMetric), over the bytes gathered",
        "rows": f"{mebibytes} MiB per rank",
        "torchmetrics": shares[False],
        "ours": shares[True],
        "limit": 1.2,
        "verdict": "met" if shares[True] <= 1.2 else "WRONG",
    }


def main(arguments: list[str]) -> list[Row]:
    """One row per metric, for forward and for compute, and one for memory."""
    parser = argparse.ArgumentParser("metric_sync", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=15.0, help="of timed rounds per row at most")
    parser.add_argument("--mebibytes", type=int, default=96, help="of rows on each rank, for memory")
    options: Any = parser.parse_args(arguments)
    rows = [row_of(job, options.rounds, options.seconds, is_forward=True) for job in JOBS]
    rows += [row_of(job, options.rounds, options.seconds, is_forward=False) for job in COMPUTES]
    return [*rows, memory_row(options.mebibytes)]
