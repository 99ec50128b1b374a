"""Memory and time of losses over pairs at large global batches: tiles beside PML's wrapper and open_clip's computation, W = 2.

Forward and backward from the embeddings on, float32, dim 128, classes of four. `PML exact` and `PML efficient` are
`DistributedLossWrapper(loss, efficient=...)`; `open_clip` is its `local_loss=True, gather_with_grad=True`, written out below, on as many
pairs as the others have rows. Gradients are compared with PML's exact ones first, where PML can run at all (its NT-Xent cannot).

Limits: from 4096 up, 0.3x the time of PML exact, 0.5x of PML efficient (whose gradient is another), 0.7x of open_clip; 72 MiB of extra peak
memory at 8192, at most 2.2 times that at 16,384, and 1 GiB at 65,536. Times and memory as in `global_batch`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytorch_metric_learning.losses as pml
import torch
import torch.distributed as dist
import torch.distributed.nn
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import Tensor, nn

from benchmarks.global_batch import EQUAL
from benchmarks.memory import MIB, peak_of
from benchmarks.ranks import run_ranks
from benchmarks.records import Row
from lightning_ddp_losses.losses import GlobalBatchLoss

__all__ = ["main"]

DIM, PER_CLASS = 128, 4
LOSSES: dict[str, Callable[[], nn.Module]] = {
    "SupCon": pml.SupConLoss,
    "NTXent": pml.NTXentLoss,
    "MultiSimilarity": pml.MultiSimilarityLoss,
    "Contrastive": pml.ContrastiveLoss,
}
LIMITS = {"PML exact": 0.3, "PML efficient": 0.5, "open_clip": 0.7}
TOO_LARGE = ("NTXent",)  # PML compares every positive pair with every negative one: more than 7 GiB from 1024 on
MEMORY = {8192: 72.0, 16384: None, 65536: 1024.0}  # MiB
GROWTH = 2.2
TIMES = (4096, 8192)


class OpenClip(nn.Module):
    """Its loss with local rows against gathered ones: each direction is a matrix of its own."""

    def forward(self, images: Tensor, texts: Tensor, labels: Tensor) -> Tensor:
        every_image = torch.cat(torch.distributed.nn.all_gather(images))
        every_text = torch.cat(torch.distributed.nn.all_gather(texts))
        places = torch.arange(len(images)) + len(images) * dist.get_rank()
        per_image, per_text = images @ every_text.T / 0.07, texts @ every_image.T / 0.07
        return (nn.functional.cross_entropy(per_image, places) + nn.functional.cross_entropy(per_text, places)) / 2


class Contestant:
    """One way of evaluating a loss, and its step."""

    def __init__(self, who: str, kind: str, total: int) -> None:
        generator = torch.Generator().manual_seed(1)
        # what they share leaves half of the negative pairs within a margin of 1, as early in training
        embeddings = torch.randn(total, DIM, generator=generator) + torch.randn(1, DIM, generator=generator)
        labels = torch.arange(total // PER_CLASS).repeat_interleave(PER_CLASS)
        labels = labels[torch.randperm(total, generator=generator)]
        rank, world = dist.get_rank(), dist.get_world_size()
        self.labels = labels.chunk(world)[rank].clone()
        self.leaves = [embeddings.chunk(world)[rank].clone().requires_grad_()]
        loss = LOSSES[kind]()
        if who == "open_clip":
            self.leaves.append(self.leaves[0].detach().roll(1, 0).requires_grad_())
            self.loss: nn.Module = OpenClip()
        elif who == "ours":
            self.loss = GlobalBatchLoss(loss)
        else:
            self.loss = DistributedLossWrapper(loss, efficient=who == "PML efficient")

    def step(self) -> None:
        """Forward and backward."""
        for leaf in self.leaves:
            leaf.grad = None
        rows = [nn.functional.normalize(leaf) for leaf in self.leaves] if len(self.leaves) > 1 else self.leaves
        self.loss(*rows, self.labels).backward()


def contestants(kind: str) -> list[str]:
    """Who can run."""
    return ["ours", *(["open_clip"] if kind in TOO_LARGE else LIMITS)]


def timed(kind: str, total: int, rounds: int) -> tuple[float | None, list[list[float]]]:
    """Relative difference of ours from PML's exact gradient (None: PML cannot), and milliseconds per round and contestant."""
    names = contestants(kind)
    rivals = [Contestant(name, kind, total) for name in names]
    off = None
    if "PML exact" in names:
        for rival in rivals[:2]:
            rival.step()
        ours, theirs = (rival.leaves[0].grad for rival in (rivals[0], rivals[names.index("PML exact")]))
        assert ours is not None
        assert theirs is not None
        off = float((ours - theirs).norm() / theirs.norm())
    token, table = torch.zeros(1), []
    for number in range(rounds + 1):
        row = [0.0] * len(rivals)
        for place in range(len(rivals)):
            index = (number + place) % len(rivals)
            dist.all_reduce(token)
            before = time.perf_counter()
            rivals[index].step()
            row[index] = (time.perf_counter() - before) * 1e3
        table.append(row)
    return off, table[1:]


def peak(who: str, kind: str, total: int) -> int:
    """Bytes that the resident set grows by in one step."""
    Contestant(who, kind, 64).step()  # libraries load, pools fill
    contestant = Contestant(who, kind, total)
    return peak_of(contestant.step)


def time_row(kind: str, total: int, rounds: int) -> Row:
    """Times of one loss at one global batch."""
    answers = run_ranks(timed, kind, total, rounds)
    both = list(zip(*(table for _, table in answers), strict=True))
    names = contestants(kind)
    ms = {n: statistics.median(max(rank[i] for rank in ranks) for ranks in both) for i, n in enumerate(names)}
    offs = [off for off, _ in answers if off is not None]
    ratios = {name: ms["ours"] / ms[name] for name in names[1:]}
    met = all(ratio <= LIMITS[name] for name, ratio in ratios.items())
    wrong = bool(offs) and max(offs) > EQUAL
    return {
        "table": "Time of forward and backward, 2 ranks, dim 128, slowest rank",
        "loss": kind,
        "evaluation": GlobalBatchLoss(LOSSES[kind]()).evaluation,
        "global_batch": total,
        "ours_ms": ms["ours"],
        **{f"{name}_ms": ms.get(name) for name in LIMITS},
        **{f"ours/{name}": ratios.get(name) for name in LIMITS},
        "rounds": len(both),
        "gradients_differ_by": max(offs) if offs else None,
        "verdict": "WRONG" if wrong else "met" if met else "missed",
    }


def memory_row(kind: str, totals: Sequence[int]) -> Row:
    """Extra peak memory of one loss."""
    mib = {total: max(run_ranks(peak, "ours", kind, total)) / MIB for total in totals}
    growth = mib[16384] / mib[8192] if {8192, 16384} <= set(mib) else None
    within = all(limit is None or mib[t] <= limit for t, limit in MEMORY.items() if t in mib)
    return {
        "table": "Extra peak memory of forward and backward in MiB, 2 ranks, dim 128, larger rank",
        "loss": kind,
        **{f"at_{total}": value for total, value in mib.items()},
        "growth_8192_to_16384": growth,
        "verdict": "met" if within and (growth is None or growth <= GROWTH) else "WRONG",
    }


def main(arguments: list[str]) -> list[Row]:
    """Times, then memory, of each loss."""
    parser = argparse.ArgumentParser("tiled_rows", description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(LOSSES), choices=list(LOSSES), metavar="loss")
    parser.add_argument("--times", type=int, nargs="*", default=list(TIMES), help="global batches to time")
    parser.add_argument(
        "--memory", type=int, nargs="*", default=list(MEMORY), help="global batches to measure memory at"
    )
    parser.add_argument("--rounds", type=int, default=3)
    options: Any = parser.parse_args(arguments)
    rows = [time_row(kind, total, options.rounds) for kind in options.only for total in options.times]
    return rows + [memory_row(kind, options.memory) for kind in options.only if options.memory]
