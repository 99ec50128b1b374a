"""Time, memory and bytes sent where classes or pairs are many: `ClassShardedLoss` and `ClipLoss` against the usual way.

ArcFace, global batch 256, dim 128: PML's loss on each rank's rows with DDP's mean of the weight's gradient, against classes sharded over
the ranks (limit: 0.35x the time) and against the chunked evaluation with the whole weight on every rank (0.45x); at most 32 MiB beyond
the gradient of the rank's rows. CLIP: open_clip's local_loss with gather_with_grad, written out, against tiles (0.7x from 4096 rows up,
1.1x at 512; 72 MiB at 8192, twice the rows at most 2.2x the memory). Ten million classes, trained on two ranks within 16 GiB.

Gradients are compared first. Contestants then take turns in the same processes, one step each; A/A is the usual way against itself. A
step counts as long as its slowest rank. Memory is the highest resident set of one step in fresh processes, above what was there before:
the most of five runs of ours, as it depends on what the heap has free.
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
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.interleave import time_in_turns
from benchmarks.memory import MIB, Resident, peak_of
from benchmarks.ranks import run_ranks
from benchmarks.records import Row
from lightning_ddp_losses import ClassShardedLoss, ClipLoss

__all__ = ["main"]

DIM, BATCH = 128, 256
FRESH_PROCESSES = 5
EQUAL = 1e-3  # relative, float32 at a scale of 64
Make = Callable[[], Any]


class Wire(TorchDispatchMode):
    """Bytes that this rank sends, and how many collectives and messages to one rank there are."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            world, rank, name = dist.get_world_size(), dist.get_rank(), func._schema.name
            self.calls += "recv" not in name
            if name == "c10d::send":
                self.sent += sum(t.nbytes for t in args[0])
            elif "allgather" in name:
                self.sent += args[1].nbytes * (world - 1)
            elif "alltoall" in name:
                parts = args[4] or [1] * world  # of equal size where none are given
                self.sent += args[1].nbytes * (sum(parts) - parts[rank]) // max(sum(parts), 1)
            elif "allreduce" in name:
                self.sent += sum(t.nbytes for t in args[0]) * 2 * (world - 1) // world
        return func(*args, **(kwargs or {}))


def own_rows(total: int, seed: int) -> Tensor:
    """This rank's rows of one global batch."""
    rows = torch.randn(total, DIM, generator=torch.Generator().manual_seed(seed))
    return rows.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()


class ArcFace:
    """A step of ArcFace: ``usual``, ``divided``, or ``chunked`` (the whole weight, in chunks)."""

    def __init__(self, how: str, classes: int) -> None:
        self.how = how
        options: dict[str, Any] = {"num_classes": classes, "embedding_size": DIM}
        own = [dist.new_subgroups(1)[0]] if how == "chunked" else [None]
        built = ClassShardedLoss.build(pml.ArcFaceLoss, seed=0, group=None if how == "divided" else own[0], **options)
        if how == "usual":
            self.loss: nn.Module = pml.ArcFaceLoss(**options)
            with torch.no_grad():
                self.weight = self.loss.W
                parts = [torch.empty(0)] * dist.get_world_size()
                dist.all_gather_object(parts, built.weight.detach())
                self.weight.copy_(torch.cat(parts, 1))
        else:
            self.loss, self.weight = built, built.weight
        self.rows = own_rows(BATCH, 1)
        labels = torch.randint(classes, (BATCH,), generator=torch.Generator().manual_seed(2))
        self.labels = labels.chunk(dist.get_world_size())[dist.get_rank()].clone()

    def step(self) -> None:
        """Forward, backward, and DDP's mean where the weight is whole."""
        self.rows.grad = self.weight.grad = None
        self.loss(self.rows, self.labels).backward()
        if self.how == "usual":
            dist.all_reduce(self.weight.grad)
            self.weight.grad /= dist.get_world_size()

    def gradients(self) -> list[Tensor]:
        """Of the rows (times W where the loss is one rank's mean) and of the rows' classes."""
        assert self.rows.grad is not None
        assert self.weight.grad is not None
        first = 0
        if self.how == "divided":
            first = self.loss.shard.start  # type: ignore[union-attr]
        own = [int(c) for c in self.labels if first <= c < first + self.weight.shape[1]]
        # the same columns for both: those of this rank's labels that are its own when sharded
        half = -(-self.loss.num_classes // dist.get_world_size()) * dist.get_rank()  # type: ignore[operator]
        kept = [c - first for c in own if half <= c < half + half_size(self.loss)]
        return [self.rows.grad, self.weight.grad[:, kept]]


def half_size(loss: Any) -> int:
    """Classes of a rank when sharded."""
    return -(-int(loss.num_classes) // dist.get_world_size())


class Clip:
    """A step of CLIP: ``usual`` (every rank its rows against all, both ways) or in tiles."""

    def __init__(self, how: str, total: int) -> None:
        self.how, self.total = how, total
        self.images, self.texts = own_rows(total, 1), own_rows(total, 2)
        self.loss = ClipLoss()

    def step(self) -> None:
        """Forward and backward."""
        self.images.grad = self.texts.grad = self.loss.logit_scale.grad = None
        if self.how != "usual":
            self.loss(self.images, self.texts).backward()
            return
        images, texts = functional.normalize(self.images), functional.normalize(self.texts)
        all_images, all_texts = torch.cat(all_gather(images)), torch.cat(all_gather(texts))
        scale = self.loss.logit_scale.exp()
        target = torch.arange(len(images)) + len(images) * dist.get_rank()
        ours = functional.cross_entropy(scale * images @ all_texts.t(), target)
        theirs = functional.cross_entropy(scale * texts @ all_images.t(), target)
        ((ours + theirs) / 2).backward()

    def gradients(self) -> list[Tensor]:
        """Of both towers' rows."""
        assert self.images.grad is not None
        assert self.texts.grad is not None
        return [self.images.grad, self.texts.grad]


KINDS: dict[str, Callable[[str, int], Any]] = {"ArcFace": ArcFace, "CLIP": Clip}


def timed(kind: str, how: str, size: int, rounds: int, seconds: float) -> tuple[float, list[list[float]], list[int]]:
    """Difference of gradients; milliseconds of (usual, usual again, ours) for each round; bytes sent and collectives."""
    usual, ours = KINDS[kind]("usual", size), KINDS[kind](how, size)
    usual.step()
    with Wire() as wire:
        ours.step()
    pairs = zip(ours.gradients(), usual.gradients(), strict=True)
    off = max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)
    steps = [usual.step, usual.step, ours.step]
    return off, time_in_turns(steps, rounds, seconds), [wire.sent, wire.calls]


def peak(kind: str, how: str, size: int) -> tuple[int, int]:
    """Bytes that the resident set grows by in one step; bytes of the weight's gradient, which stays."""
    KINDS[kind](how, 512).step()  # libraries load, pools fill
    contestant = KINDS[kind](how, size)
    grown = peak_of(contestant.step)
    kept = contestant.weight.grad.nbytes if kind == "ArcFace" else 0
    return grown, kept


def row_of(kind: str, how: str, size: int, limits: Sequence[float | None], options: Any) -> Row:
    """Times, memory and bytes of one comparison; limits of the time ratio and of MiB."""
    world = 2
    answers = run_ranks(timed, kind, how, size, options.rounds, options.seconds, world_size=world)
    both = list(zip(*(table for _, table, _ in answers), strict=True))
    usual, again, ours = ([max(rank[i] for rank in ranks) for ranks in both] for i in range(3))
    grown = {"usual": max(g for g, _ in run_ranks(peak, kind, "usual", size, world_size=world))}
    peaks = [each for _ in range(FRESH_PROCESSES) for each in run_ranks(peak, kind, how, size, world_size=world)]
    grown[how], kept = (max(numbers) for numbers in zip(*peaks, strict=True))
    ratio = statistics.median(o / u for o, u in zip(ours, usual, strict=True))
    off = max(difference for difference, _, _ in answers)
    beyond = (grown[how] - kept) / MIB
    time_limit, memory_limit = limits
    met = (time_limit is None or ratio <= time_limit) and (memory_limit is None or beyond <= memory_limit)
    return {
        "table": f"{kind}, {world} rank(s), dim {DIM}, forward and backward, slowest rank",
        "ours": how,
        "size": size,
        "usual_ms": statistics.median(usual),
        "ours_ms": statistics.median(ours),
        "ratio": ratio,
        "A/A": statistics.median(a / u for a, u in zip(again, usual, strict=True)),
        "time_limit": time_limit,
        "usual_peak_MiB": grown["usual"] / MIB,
        "ours_peak_MiB": grown[how] / MIB,
        "beyond_the_gradient_MiB": beyond,
        "memory_limit_MiB": memory_limit,
        "sent_KiB": max(w[0] for _, _, w in answers) / 1024,
        "collectives": max(w[1] for _, _, w in answers),
        "gradients_differ_by": off,
        "rounds": len(both),
        "verdict": "WRONG" if off > EQUAL else "met" if met else "missed",
    }


def train(classes: int, steps: int) -> tuple[list[float], list[float], float]:
    """Train ArcFace; losses, seconds of each step, and the highest resident set in GiB."""
    resident = Resident()
    loss = ClassShardedLoss.build(pml.ArcFaceLoss, num_classes=classes, embedding_size=DIM, seed=0)
    rows = own_rows(BATCH, 1)
    labels = torch.randint(classes, (BATCH,)).chunk(dist.get_world_size())[dist.get_rank()].clone()
    optimizer = torch.optim.SGD([loss.weight], lr=1.0)
    values, seconds = [], []
    for _ in range(steps):
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        value = loss(rows, labels)
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
        seconds.append(time.perf_counter() - started)
    highest = resident.peak
    resident.close()
    return values, seconds, highest / 2**30


def training_row(classes: int) -> Row:
    """A few steps with very many classes on this machine."""
    answers = run_ranks(train, classes, 3, seconds=600.0)
    total = sum(highest for _, _, highest in answers)
    losses = answers[0][0]
    return {
        "table": "ArcFace trained, classes divided over 2 ranks, dim 128, global batch 256, SGD",
        "classes": classes,
        "first_loss": losses[0],
        "third_loss": losses[-1],
        "seconds_per_step": statistics.median(max(times) for times in zip(*(a[1] for a in answers), strict=True)),
        "resident_GiB_both_ranks": total,
        "limit_GiB": 16,
        "verdict": "WRONG" if losses[-1] >= losses[0] else "met" if total <= 16 else "missed",
    }


JOBS: list[tuple[str, str, int, tuple[float | None, float | None]]] = [
    ("ArcFace", "divided", 10_000, (None, None)),
    ("ArcFace", "divided", 100_000, (None, None)),
    ("ArcFace", "divided", 1_000_000, (0.35, 32)),
    ("ArcFace", "chunked", 10_000, (None, None)),
    ("ArcFace", "chunked", 100_000, (None, None)),
    ("ArcFace", "chunked", 1_000_000, (0.45, 32)),
    ("CLIP", "tiles", 512, (1.1, None)),
    ("CLIP", "tiles", 2048, (1.1, None)),
    ("CLIP", "tiles", 4096, (0.7, None)),
    ("CLIP", "tiles", 8192, (0.7, 72)),
    ("CLIP", "tiles", 16384, (0.7, 159)),
]


def main(arguments: list[str]) -> list[Row]:
    """One row per comparison."""
    parser = argparse.ArgumentParser("large", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=15.0, help="of timed rounds per row at most")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument(
        "--train", type=int, nargs="*", default=[1_000_000, 3_000_000, 10_000_000], help="classes to train"
    )
    options: Any = parser.parse_args(arguments)
    rows = [row_of(*job, options) for job in JOBS if options.only in f"{job[0]} {job[1]} {job[2]}"]
    return rows + [training_row(classes) for classes in options.train]
