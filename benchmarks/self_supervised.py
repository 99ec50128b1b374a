"""Barlow Twins and VICReg over all rows: `ssl`'s sums of D x D numbers beside a gather of (G, D) rows, W = 2.

The peer gathers both views with a right gradient and evaluates lightly's formula on all rows, on every rank. Loss and gradient are
compared first. Counted: collectives, and the bytes that a rank hands to them. Timed: forward and backward, in turns in the same
processes, the peer twice (A/A). Last, the highest resident set of a step above what was there before, in fresh processes.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.interleave import time_in_turns
from benchmarks.memory import MIB, peak_of, return_freed_blocks
from benchmarks.ranks import run_ranks
from benchmarks.records import Row
from lightning_ddp_losses import ssl
from lightning_ddp_losses.collectives import all_gather_with_grad
from lightning_ddp_losses.testing import CountCollectives

__all__ = ["main"]

ROWS, FEATURES, EQUAL = 8192, 2048, 1e-3  # relative, float32
OURS = {"Barlow Twins": ssl.barlow_twins, "VICReg": ssl.vicreg}


def plain_barlow_twins(first: Tensor, second: Tensor) -> Tensor:
    """The loss of one process."""
    views = [functional.batch_norm(view, None, None, training=True) for view in (first, second)]
    correlation = views[0].T @ views[1] / len(first)
    diagonal = correlation.diagonal()
    return (diagonal - 1).square().sum() + 5e-3 * (correlation - diagonal.diag()).square().sum()


def plain_vicreg(first: Tensor, second: Tensor) -> Tensor:
    """The loss of one process."""
    value = 25 * functional.mse_loss(first, second)
    for view in (first, second):
        centred = view - view.mean(0)
        covariance = centred.T @ centred / (len(view) - 1)
        variance = covariance.diagonal()
        value = value + 25 * 0.5 * (1 - (variance + 1e-4).sqrt()).relu().mean()
        value = value + (covariance - variance.diag()).square().sum() / view.shape[1]
    return value


PLAIN = {"Barlow Twins": plain_barlow_twins, "VICReg": plain_vicreg}


class Contestant:
    """One loss on this rank's rows."""

    def __init__(self, loss: str, *, ours: bool) -> None:
        self.loss, self.ours = loss, ours
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = ROWS // dist.get_world_size(), FEATURES
        self.views = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(2)]

    def step(self) -> Tensor:
        """Forward and backward."""
        for view in self.views:
            view.grad = None
        if self.ours:
            value = OURS[self.loss](*self.views)
        else:
            value = PLAIN[self.loss](*(all_gather_with_grad(view, backward="own_slice") for view in self.views))
        value.backward()
        return value.detach()


def timed(loss: str, rounds: int, seconds: float) -> tuple[Row, list[list[float]]]:
    """Differences and counts; milliseconds of (gather, gather again, ours) for each round."""
    found, counts = [], []
    for ours in (False, True):
        contestant = Contestant(loss, ours=ours)
        with CountCollectives() as counter:
            value = contestant.step()
        grads = torch.cat([view.grad for view in contestant.views if view.grad is not None])
        found.append((value, grads))
        counts.append((len(counter.names), counter.num_bytes))
    (truth, truth_grads), (value, grads) = found
    off = max(float((value - truth).abs() / truth.abs()), float((grads - truth_grads).norm() / truth_grads.norm()))
    contestants = [Contestant(loss, ours=ours) for ours in (False, False, True)]
    times = time_in_turns([each.step for each in contestants], rounds, seconds, warm_up=1, least=3)
    return {"off": off, "counts": counts}, times


def resident(loss: str, ours: bool) -> int:
    """Bytes that the resident set grows by in one step."""
    return_freed_blocks()
    return peak_of(partial(Contestant(loss, ours=ours).step))


def row_of(loss: str, options: Any) -> Row:
    """Counts, times and memory of one loss."""
    answers = run_ranks(timed, loss, options.rounds, options.seconds)
    both = list(zip(*(times for _, times in answers), strict=True))
    theirs, again, ours = ([max(rank[i] for rank in ranks) for ranks in both] for i in range(3))
    checked = answers[0][0]
    off = max(answer[0]["off"] for answer in answers)
    peaks = [max(run_ranks(resident, loss, ours)) for ours in (False, True)]
    (their_calls, their_bytes), (calls, num_bytes) = checked["counts"]
    return {
        "table": f"Forward and backward, {ROWS} x {FEATURES} rows of 2 ranks, slowest rank",
        "loss": loss,
        "gather_ms": statistics.median(theirs),
        "ours_ms": statistics.median(ours),
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        "A/A": statistics.median(a / b for a, b in zip(again, theirs, strict=True)),
        "gather_collectives": their_calls,
        "collectives": calls,
        "gather_mib": their_bytes / MIB,
        "mib": num_bytes / MIB,
        "peak_ratio": peaks[1] / peaks[0],
        "difference": off,
        "ok": off <= EQUAL and num_bytes < their_bytes,
    }


def main(arguments: list[str]) -> list[Row]:
    """Run the benchmark."""
    parser = argparse.ArgumentParser("python -m benchmarks self_supervised", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args(arguments)
    return [row_of(loss, options) for loss in OURS]
