"""Memory and time of losses over pairs at large global batches: tiles beside PML's wrapper and open_clip's computation, W = 2.

Forward and backward from the embeddings on, float32, dim 128, classes of four. `PML exact` and `PML efficient` are
`DistributedLossWrapper(loss, efficient=...)`; `open_clip` is its `local_loss=True, gather_with_grad=True`, written out below, on as many
pairs as the others have rows. Value and gradient are compared with PML's exact ones first, where PML can run at all: not beyond 8192
rows, its NT-Xent not beyond 256 (it compares every positive pair with every negative one: 6 GiB a rank at 512).

`products` are the matrix products of the loss and nothing else: the similarities of this rank's rows with all rows, and the two products
of their gradient, in blocks that stay in the cache. `ours/products` is the distance to them, a figure that compares across machines.

Limits: from 4096 up, 0.3x the time of PML exact, 0.5x of PML efficient (whose gradient is another), 0.7x of open_clip; from 512 up never
more than 1.1x; 72 MiB of extra peak memory at 8192, at most 2.6 times that at 16,384, and 400 MiB at 65,536. Times as in `global_batch`.
Memory is that of fresh processes with the allocator as it comes: the most of five runs of ours, as it depends on what the heap has free.
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
PRODUCTS, BLOCK = "products", 512
SMALLEST, SMALL, SMALL_LIMIT = (
    512,
    4096,
    1.1,
)  # from the first on nobody may be much faster, from the second on nobody as fast
PML_UP_TO = {"NTXent": 256}
MEMORY = {8192: 72.0, 16384: None, 65536: 400.0}  # MiB
FRESH_PROCESSES = 5
GROWTH = 2.6  # of the most of five runs each, which scatter
TIMES = (256, 512, 2048, 4096, 8192, 16384)
SIZES = (256, 512, 2048, 8192, 16384, 65536)
TIME_TABLE = "Time of forward and backward, 2 ranks, dim 128, slowest rank"
MEMORY_TABLE = "Extra peak memory of forward and backward in MiB, 2 ranks, dim 128, larger rank"


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
        self.every_row = embeddings
        self.is_products = who == PRODUCTS
        if who == "open_clip":
            self.leaves.append(self.leaves[0].detach().roll(1, 0).requires_grad_())
            self.loss: nn.Module = OpenClip()
        elif who == "ours":
            self.loss = GlobalBatchLoss(loss)
        elif who.startswith("PML"):
            self.loss = DistributedLossWrapper(loss, efficient=who == "PML efficient")

    def products(self) -> None:
        """Multiply as the loss has to: similarities, the gradient of rows, the gradient of columns."""
        own = self.leaves[0].detach()
        grads = torch.zeros_like(own), torch.zeros_like(self.every_row)
        for rows, row_grads in zip(own.split(BLOCK), grads[0].split(BLOCK), strict=True):
            for columns, column_grads in zip(self.every_row.split(BLOCK), grads[1].split(BLOCK), strict=True):
                similarities = rows @ columns.T
                row_grads.addmm_(similarities, columns)
                column_grads.addmm_(similarities.T, rows)

    def step(self) -> float:
        """Forward and backward; the loss."""
        if self.is_products:
            self.products()
            return 0.0
        for leaf in self.leaves:
            leaf.grad = None
        rows = [nn.functional.normalize(leaf) for leaf in self.leaves] if len(self.leaves) > 1 else self.leaves
        value = self.loss(*rows, self.labels)
        value.backward()
        return float(value.detach())


def contestants(kind: str, total: int) -> list[str]:
    """Who can run."""
    return ["ours", *(n for n in LIMITS if n == "open_clip" or total <= PML_UP_TO.get(kind, 8192)), PRODUCTS]


def timed(kind: str, total: int, rounds: int, seconds: float) -> tuple[float | None, list[list[float]]]:
    """Relative difference of ours from PML's exact value and gradient (None: PML cannot), and milliseconds per round and contestant."""
    names = contestants(kind, total)
    rivals = [Contestant(name, kind, total) for name in names]
    off = None
    if "PML exact" in names:
        pair = rivals[0], rivals[names.index("PML exact")]
        value, truth = pair[0].step(), pair[1].step() / dist.get_world_size()  # the wrapper returns W times the loss
        ours, theirs = (rival.leaves[0].grad for rival in pair)
        assert ours is not None
        assert theirs is not None
        off = max(float((ours - theirs).norm() / theirs.norm()), abs(value - truth) / abs(truth))
    table, started, late = [], time.perf_counter(), torch.zeros(1)
    for number in range(rounds + 1):
        row = [0.0] * len(rivals)
        for place in range(len(rivals)):
            index = (number + place) % len(rivals)
            dist.all_reduce(late)
            before = time.perf_counter()
            rivals[index].step()
            row[index] = (time.perf_counter() - before) * 1e3
        table.append(row)
        late.fill_(time.perf_counter() - started > seconds)
        dist.all_reduce(late)
        if late.item() and number > 1:
            break
    return off, table[1:]


def peak(who: str, kind: str, total: int) -> int:
    """Bytes that the resident set grows by in one step."""
    Contestant(who, kind, 64).step()  # libraries load, pools fill
    contestant = Contestant(who, kind, total)
    return peak_of(contestant.step)


def time_row(kind: str, total: int, rounds: int, seconds: float) -> Row:
    """Times of one loss at one global batch."""
    answers = run_ranks(timed, kind, total, rounds, seconds)
    both = list(zip(*(table for _, table in answers), strict=True))
    names = contestants(kind, total)
    steps = {n: [max(rank[i] for rank in ranks) for ranks in both] for i, n in enumerate(names)}
    ms = {name: statistics.median(values) for name, values in steps.items()}
    offs = [off for off, _ in answers if off is not None]
    ratios = {
        name: statistics.median(o / t for o, t in zip(steps["ours"], steps[name], strict=True)) for name in names[1:]
    }
    limits = LIMITS if total >= SMALL else dict.fromkeys(LIMITS, SMALL_LIMIT) if total >= SMALLEST else {}
    met = all(ratios[name] <= limit for name, limit in limits.items() if name in ratios)
    wrong = bool(offs) and max(offs) > EQUAL
    return {
        "table": TIME_TABLE,
        "loss": kind,
        "evaluation": GlobalBatchLoss(LOSSES[kind]()).evaluation,
        "global_batch": total,
        "ours_ms": ms["ours"],
        **{f"{name}_ms": ms.get(name) for name in (*LIMITS, PRODUCTS)},
        **{f"ours/{name}": ratios.get(name) for name in (*LIMITS, PRODUCTS)},
        "rounds": len(both),
        "differs_by": max(offs) if offs else None,
        "verdict": "WRONG" if wrong else "met" if met else "missed",
    }


def memory_row(kind: str, who: str, totals: Sequence[int]) -> Row:
    """Extra peak memory of one loss."""
    able = [t for t in totals if who in contestants(kind, t) and (who == "ours" or t <= 16384)]
    runs = FRESH_PROCESSES if who == "ours" else 1
    mib = {
        total: max(max(run_ranks(peak, who, kind, total, seconds=900.0)) for _ in range(runs)) / MIB for total in able
    }
    growth = mib[16384] / mib[8192] if {8192, 16384} <= set(mib) else None
    within = all(limit is None or mib[t] <= limit for t, limit in MEMORY.items() if t in mib)
    met = "met" if within and (growth is None or growth <= GROWTH) else "WRONG"
    return {
        "table": MEMORY_TABLE,
        "loss": kind,
        "who": who,
        **{f"at_{total}": mib.get(total) for total in SIZES},
        "growth_8192_to_16384": growth,
        "verdict": met if who == "ours" else "-",
    }


def main(arguments: list[str]) -> list[Row]:
    """Times, then memory, of each loss."""
    parser = argparse.ArgumentParser("tiled_rows", description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(LOSSES), choices=list(LOSSES), metavar="loss")
    parser.add_argument("--times", type=int, nargs="*", default=list(TIMES), help="global batches to time")
    parser.add_argument(
        "--memory", type=int, nargs="*", default=list(SIZES), help="global batches to measure memory at"
    )
    parser.add_argument("--who", nargs="*", default=["ours", *LIMITS], help="whose memory", metavar="contestant")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=8.0, help="of timed rounds per row; two rounds at least")
    options: Any = parser.parse_args(arguments)
    rows = [time_row(kind, total, options.rounds, options.seconds) for kind in options.only for total in options.times]
    return rows + [
        memory_row(kind, who, options.memory) for kind in options.only if options.memory for who in options.who
    ]
