"""Time and memory of a loss over the global batch: `GlobalBatchLoss` beside PML's `DistributedLossWrapper`, W = 2.

``rows`` for SupCon, Contrastive and MultiSimilarity at global batches of 1024 and 2048 (limits: 0.75x the time, 0.6x the
extra peak memory), ``elements`` for ArcFace at 10,000 classes (0.6x the time); then every loss that runs in one of these
modes from 64 to 1024 rows, and those that every rank computes whole at 64 and 256 (limit: 1.1x the time, nowhere slower).
Forward and backward from the embeddings on, float32; what DDP does to an encoder or a loss weight afterwards is the same
for both and left out.

Gradients are compared first (those of the embeddings must be equal; PML's of a loss parameter are W times ours). Both then
take turns in the same processes, one step each, PML's twice: A/A is the same estimate where nothing differs. A step counts
as long as its slowest rank. Memory is the highest resident set of one step in fresh processes, above what was there before.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytorch_metric_learning.losses as pml
import torch
import torch.distributed as dist
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import Tensor, nn

from benchmarks.interleave import time_in_turns
from benchmarks.memory import MIB, peak_of
from benchmarks.ranks import run_ranks
from benchmarks.records import Row
from lightning_ddp_losses.losses import GlobalBatchLoss

__all__ = ["main"]

DIM, PER_CLASS, CLASSES = 128, 4, 10_000
EQUAL = 1e-4  # relative, float32
FEW_CLASSES = 1000
BY_ROWS = [
    pml.AngularLoss,
    pml.CircleLoss,
    pml.ContrastiveLoss,
    pml.GeneralizedLiftedStructureLoss,
    pml.MarginLoss,
    pml.MultiSimilarityLoss,
    pml.NTXentLoss,
    pml.SignalToNoiseRatioContrastiveLoss,
    pml.SupConLoss,
    pml.TripletMarginLoss,
    pml.TupletMarginLoss,
]
BY_ELEMENTS = [
    pml.ArcFaceLoss,
    pml.CosFaceLoss,
    pml.LargeMarginSoftmaxLoss,
    pml.NormalizedSoftmaxLoss,
    pml.ProxyNCALoss,
    pml.SoftTripleLoss,
    pml.SphereFaceLoss,
    pml.SubCenterArcFaceLoss,
]
# whose value does not depend on the order of rows: PML's wrapper puts a rank's own first, and computes something else where it does
BY_ALL = [
    pml.FastAPLoss,
    pml.HistogramLoss,
    pml.IntraPairVarianceLoss,
    pml.LiftedStructureLoss,
    pml.NCALoss,
    pml.P2SGradLoss,
    pml.PNPLoss,
    pml.ProxyAnchorLoss,
    pml.RankedListLoss,
    pml.SmoothAPLoss,
]
HEADLINES: dict[str, Callable[[], nn.Module]] = {
    "SupCon": pml.SupConLoss,
    "Contrastive": pml.ContrastiveLoss,
    "MultiSimilarity": pml.MultiSimilarityLoss,
    "ArcFace, 10,000 classes": lambda: pml.ArcFaceLoss(CLASSES, DIM),
}
KINDS: dict[str, Callable[[], nn.Module]] = {
    **HEADLINES,
    **{cls.__name__: cls for cls in (*BY_ROWS, *BY_ALL)},
    **{cls.__name__: partial(cls, num_classes=FEW_CLASSES, embedding_size=DIM) for cls in BY_ELEMENTS},
    "P2SGradLoss": partial(pml.P2SGradLoss, descriptors_dim=DIM, num_classes=FEW_CLASSES),
    "ProxyAnchorLoss": partial(pml.ProxyAnchorLoss, num_classes=FEW_CLASSES, embedding_size=DIM),
    "RankedListLoss": partial(pml.RankedListLoss, margin=1, Tn=0.1),
}
# PML compares every positive pair with every negative one
PAIRS_BY_PAIRS = ("NTXentLoss", "TupletMarginLoss")
SMALL, LARGER = (64, 256), (512, 1024)


@dataclass(frozen=True)
class Job:
    """A loss on a global batch.

    Attributes:
        kind: Of ``KINDS``.
        total: Rows over all ranks.
        time_limit: Ours over PML's.
        memory_limit: Likewise; None: not asked for.
        memory: Measure it at all.
    """

    kind: str
    total: int
    time_limit: float
    memory_limit: float | None
    memory: bool = True


JOBS = [
    *(Job(kind, total, 0.75, 0.6) for kind in list(HEADLINES)[:3] for total in (1024, 2048)),
    Job("ArcFace, 10,000 classes", 256, 0.6, None),
    *(
        Job(cls.__name__, total, 1.1, None, memory=False)
        for cls in (*BY_ROWS, *BY_ELEMENTS, *BY_ALL)
        for total in (SMALL if cls.__name__ in PAIRS_BY_PAIRS or cls in BY_ALL else SMALL + LARGER)
    ),
]


class Contestant:
    """One loss under one wrapper, and its step."""

    def __init__(self, job: Job, *, ours: bool) -> None:
        torch.manual_seed(0)
        loss = KINDS[job.kind]()
        self.loss = GlobalBatchLoss(loss) if ours else DistributedLossWrapper(loss)
        generator = torch.Generator().manual_seed(1)
        embeddings = torch.randn(job.total, DIM, generator=generator)
        labels = torch.arange(job.total // PER_CLASS).repeat_interleave(PER_CLASS)
        labels = labels[torch.randperm(job.total, generator=generator)]
        rank, world = dist.get_rank(), dist.get_world_size()
        self.labels = labels.chunk(world)[rank].clone()
        self.leaf = embeddings.chunk(world)[rank].clone().requires_grad_()

    def step(self) -> None:
        """Forward and backward; gradients are new, as an optimizer leaves them."""
        self.leaf.grad = None
        self.loss.zero_grad(set_to_none=True)
        self.loss(self.leaf, self.labels).backward()

    def gradients(self) -> list[Tensor]:
        """Of the embeddings, then of the loss's own parameters."""
        return [p.grad for p in (self.leaf, *self.loss.parameters()) if p.grad is not None]


def check(job: Job) -> float:
    """Largest relative difference between the two contestants' gradients."""
    found = []
    for ours in (True, False):
        contestant = Contestant(job, ours=ours)
        contestant.step()
        found.append(contestant.gradients())
    worst = 0.0
    for index, (mine, other) in enumerate(zip(*found, strict=True)):
        if index:  # the mean over ranks is what counts; PML's is W times too large
            dist.all_reduce(mine)
            dist.all_reduce(other)
            other /= dist.get_world_size()  # noqa: PLW2901 - in place
        worst = max(worst, float((mine - other).norm() / other.norm()))
    return worst


def timed(job: Job, rounds: int, seconds: float) -> tuple[float, list[list[float]]]:
    """Difference of gradients; milliseconds of (PML, PML again, ours) for each round."""
    off = check(job)
    contestants = [Contestant(job, ours=ours) for ours in (False, False, True)]
    steps = [contestant.step for contestant in contestants]
    return off, time_in_turns(steps, rounds, seconds, warm_up=1, least=5)


def timed_all(jobs: list[Job], rounds: int, seconds: float) -> list[tuple[float, list[list[float]]]]:
    """``timed`` of several jobs in the same processes."""
    return [timed(job, rounds, seconds) for job in jobs]


def peak(job: Job, ours: bool) -> int:
    """Bytes that the resident set grows by in one step."""
    small = Job(job.kind, 64, 0, None)
    Contestant(small, ours=ours).step()  # libraries load, pools fill
    contestant = Contestant(job, ours=ours)
    return peak_of(contestant.step)


def row_of(job: Job, answers: Sequence[tuple[float, list[list[float]]]]) -> Row:
    """Times, of each rank, and memory of one job."""
    both = list(zip(*(table for _, table in answers), strict=True))
    theirs, again, ours = ([max(rank[i] for rank in ranks) for ranks in both] for i in range(3))
    bytes_theirs, bytes_ours = (max(run_ranks(peak, job, mine)) if job.memory else 0 for mine in (False, True))
    middle = statistics.median(theirs)
    # a round's neighbours lie milliseconds apart: what slows one down slows the other
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    memory = bytes_ours / bytes_theirs if job.memory else None
    off = max(difference for difference, _ in answers)
    met = ratio <= job.time_limit and (job.memory_limit is None or memory is None or memory <= job.memory_limit)
    return {
        "table": "Forward and backward of a loss over the global batch, 2 ranks, dim 128, slowest rank",
        "loss": job.kind,
        "mode": GlobalBatchLoss(KINDS[job.kind]()).exact_modes()[0],
        "global_batch": job.total,
        "pml_ms": middle,
        "ours_ms": statistics.median(ours),
        "ratio": ratio,
        "A/A": statistics.median(a / b for a, b in zip(again, theirs, strict=True)),
        "time_limit": job.time_limit,
        "pml_peak_MiB": bytes_theirs / MIB if job.memory else None,
        "ours_peak_MiB": bytes_ours / MIB if job.memory else None,
        "memory_ratio": memory,
        "memory_limit": job.memory_limit,
        "rounds": len(both),
        "gradients_differ_by": off,
        "verdict": "WRONG" if off > EQUAL else "met" if met else "missed",
    }


def main(arguments: list[str]) -> list[Row]:
    """One row per loss and global batch."""
    parser = argparse.ArgumentParser("global_batch", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=18.0, help="of timed rounds per row at most")
    parser.add_argument("--only", nargs="*", help="losses, by what their names begin with")
    parser.add_argument("--rows", nargs="*", type=int, help="global batches")
    options: Any = parser.parse_args(arguments)
    chosen, rows = tuple(options.only or ("",)), options.rows
    jobs = [job for job in JOBS if job.kind.startswith(chosen) and (rows is None or job.total in rows)]
    answers = run_ranks(timed_all, jobs, options.rounds, options.seconds, seconds=60 + 2 * len(jobs) * options.seconds)
    return [row_of(job, ranks) for job, ranks in zip(jobs, zip(*answers, strict=True), strict=True)]
