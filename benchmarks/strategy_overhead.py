"""What ``strategy="ddp_losses"`` costs beside ``strategy="ddp"`` on the same module: collectives, time, memory.

Collectives are counted first and asserted. torch's profiler in the training thread sees every operation that reaches the
c10d dispatcher (``c10d::allreduce_`` ...), those that DDP's reducer issues from C++ inside backward included, because a
CPU backward runs in the thread that called it; gloo's own ranges (``gloo:all_reduce`` ...) must be as many.

Times are of whole training steps of Lightning, taken alternately in the same processes (``interleave``), on the slowest
rank, after the parameters were found equal; loaders know their length. Three fits take turns: ``ddp``, ``ddp`` again,
``ddp_losses``. Reported are medians, the ratio of medians, the median of the paired differences with its 95% interval (order
statistics), and the A/A ratio: ``ddp`` again over ``ddp``, the same estimate where nothing differs. *calm* compares the
fastest tenth of each fit's steps instead of the median; *cpu* is processor time per rank, waiting for the machine and the
peers left out. The encoder's rows are chosen so that a step of plain ``ddp`` takes about 10 or 100 ms here.

Memory is the resident set, sampled every half millisecond, in fresh processes for each strategy.
"""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import pytorch_metric_learning.losses as pml
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

import lightning_ddp_losses  # noqa: F401 - registers the strategy
from benchmarks.interleave import Fit, Round, SizedBatches, timed_rounds
from benchmarks.memory import MIB, Resident
from benchmarks.ranks import run_ranks
from benchmarks.records import Row
from benchmarks.runner import Turns, calm, largest_difference, listed, parser_of, run_parts, take_turns
from benchmarks.trainers import make_trainer

__all__ = ["main"]

EMBEDDING, INPUT = 128, 256
OURS = "ddp_losses"
UNUSED = "ddp_find_unused_parameters_true"
MANY = 100_000
CASE_SECONDS = 18.0  # of timed rounds per row of the table, however busy the machine is
EQUAL = 1e-6  # relative, float32, after the same steps


@dataclass(frozen=True)
class Job:
    """One training job.

    Attributes:
        losses: ``arcface``, ``three`` (summed) or ``alternate`` (one of two per step).
        rows: Per rank and step.
        classes: Of each loss.
        width: Of the encoder's hidden layers.
    """

    losses: str
    rows: int
    classes: int = 100
    width: int = 512


class Embedder(pl.LightningModule):
    """A multilayer perceptron under one or more learnable losses."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(INPUT, job.width), nn.ReLU(), nn.Linear(job.width, job.width), nn.ReLU()]
        self.encoder = nn.Sequential(*layers, nn.Linear(job.width, EMBEDDING))
        kinds = {
            "arcface": [pml.ArcFaceLoss],
            "three": [pml.ArcFaceLoss, pml.CosFaceLoss, pml.SoftTripleLoss],
            "alternate": [pml.ArcFaceLoss, pml.CosFaceLoss],
        }[job.losses]
        self.losses = nn.ModuleList(kind(job.classes, EMBEDDING) for kind in kinds)
        self.alternate = job.losses == "alternate"

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The sum of the losses, or the one whose turn it is."""
        inputs, labels = batch
        embeddings = self.encoder(inputs)
        losses = [self.losses[batch_idx % len(self.losses)]] if self.alternate else list(self.losses)
        return torch.stack([loss(embeddings, labels) for loss in losses]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD: the optimizer shall not hide the strategy."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def batches(job: Job, distinct: int = 4) -> Callable[[int], tuple[Tensor, Tensor]]:
    """This rank's part of each of a few global batches."""
    generator = torch.Generator().manual_seed(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = []
    for _ in range(distinct):
        inputs = torch.randn(world * job.rows, INPUT, generator=generator)
        labels = torch.randint(job.classes, (world * job.rows,), generator=generator)
        parts.append((inputs.chunk(world)[rank].clone(), labels.chunk(world)[rank].clone()))
    return lambda index: parts[index % distinct]


def train(strategy: str, job: Job, steps: int, *callbacks: Callback) -> None:
    """A fit of some steps from the start to the end."""
    batch = batches(job)
    trainer = make_trainer(strategy, callbacks=list(callbacks))
    trainer.fit(Embedder(job), torch.utils.data.DataLoader([batch(i) for i in range(steps)], batch_size=None))


# ---------------------------------------------------------------------- collectives


class Collectives(Callback):
    """Names of the collectives of some steps in the middle of a fit."""

    first, last = 4, 7

    def __init__(self) -> None:
        self.per_step: Counter[str] = Counter()
        self.gloo_ranges = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        """Start and stop recording between two steps."""
        if index == self.first:
            self.profiler = torch.autograd.profiler.profile(use_kineto=False)  # sees this thread, and what it calls
            self.profiler.__enter__()
        elif index == self.last + 1:
            self.profiler.__exit__(None, None, None)
            steps = self.last + 1 - self.first
            for event in self.profiler.key_averages():
                if event.key.startswith("c10d::"):
                    self.per_step[event.key.removeprefix("c10d::")] += event.count / steps
                elif event.key.startswith("gloo:"):
                    self.gloo_ranges += event.count / steps


def count_collectives(pairs: Sequence[tuple[str, Job]], *callbacks: Callback) -> list[tuple[dict[str, float], float]]:
    """Per training step of each strategy and job: collectives by name, and how many gloo itself reports."""
    counted = []
    for strategy, job in pairs:
        count = Collectives()
        train(strategy, job, count.last + 3, *callbacks, count)
        counted.append((dict(count.per_step), count.gloo_ranges))
    return counted


def collectives_table() -> list[Row]:
    """Plain DDP's plus one reduction for all losses together plus one handshake; Lightning's broadcast before each batch less."""
    jobs = {
        "ArcFace": ("ddp", Job("arcface", 16), 1),
        "3 losses": ("ddp", Job("three", 16), 1),
        "2 losses that alternate": (UNUSED, Job("alternate", 16), 0),  # theirs reduces its map of used parameters
        f"ArcFace, {MANY:,} classes": ("ddp", Job("arcface", 4, classes=MANY), 2),  # one of its own over 1 MiB
    }
    pairs = [(strategy, job) for theirs, job, _ in jobs.values() for strategy in (theirs, OURS)]
    counted = iter(run_ranks(count_collectives, pairs)[0])
    rows = []
    for title, (theirs, _, allowed) in jobs.items():
        (plain, plain_gloo), (ours, ours_gloo) = next(counted), next(counted)
        more = {key: ours.get(key, 0) - plain.get(key, 0) for key in {*plain, *ours}}
        spared = -more.pop("broadcast_", 0)  # a note of SIGTERM rides in the handshake
        gathers = more.get("alltoall_base_", 0)
        handshakes = min(gathers, 1)  # a small mean is one more gather, a larger one an all-reduce
        reductions = more.get("allreduce_", 0) + gathers - handshakes
        others = sum(more.values()) - reductions - handshakes
        confirmed = plain_gloo == sum(plain.values()) and ours_gloo == sum(ours.values())
        right = reductions <= allowed and handshakes == 1 and spared == 1 and others == 0 and confirmed
        rows.append(
            {
                "table": "Collectives per training step",
                "module": title,
                "plain": f"{theirs.replace('_parameters_true', '')}: {listed(plain)}",
                "ddp_losses": listed(ours),
                "more_reductions": reductions,
                "allowed": allowed,
                "more_handshakes": handshakes,
                "spared_broadcasts": spared,
                "more_others": others,
                "confirmed_by_gloo": confirmed,
                "verdict": "right" if right else "WRONG",
            }
        )
    return rows


# ---------------------------------------------------------------------- time


def time_side_by_side(theirs: str, job: Job, rounds: int, warm_up: int = 5) -> tuple[list[Round], float, int]:
    """Rounds of (theirs, theirs again, ours), the largest relative difference of parameters, rows per rank."""
    modules, fits, batch = [], [], batches(job)
    for strategy in (theirs, theirs, OURS):
        module = Embedder(job)
        modules.append(module)
        fits.append(_fit(strategy, module, batch))
    theirs_model, _, our_model = modules

    def check() -> None:
        off = largest_difference(theirs_model, our_model)
        if off > EQUAL:
            raise RuntimeError(f"{theirs} and {OURS} differ by {off:.1e} after {warm_up} steps")

    table = take_turns(fits, rounds, CASE_SECONDS, warm_up=warm_up, check=check)
    after = largest_difference(theirs_model, our_model)
    for fit in fits:
        fit.end()
    return table, after, job.rows


def _fit(strategy: str, module: Embedder, batch: Callable[[int], Any]) -> Fit:
    def start(given: SizedBatches) -> None:
        make_trainer(strategy, callbacks=[given]).fit(module, given)

    return Fit(start, batch, sized=True)


def time_job(theirs: str, job: Job, target_ms: float | None, rounds: int) -> tuple[list[Round], float, int]:
    """As ``time_side_by_side``, with as many rows as make a step of ``theirs`` about ``target_ms`` long."""
    if target_ms is not None:
        job = replace(job, rows=_rows_for(theirs, job, target_ms))
    return time_side_by_side(theirs, job, rounds)


def _rows_for(strategy: str, job: Job, target_ms: float) -> int:
    few, many = 16, 272
    typical = []
    for rows in (few, many):
        fit = _fit(strategy, Embedder(job), batches(replace(job, rows=rows)))
        fit.step()
        times = torch.tensor([row.wall_ms[0] for row in timed_rounds([fit], 44)[4:]])
        fit.end()
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        typical.append(float(times.quantile(0.3)))
    per_row = max((typical[1] - typical[0]) / (many - few), 1e-3)
    return max(4, min(20_000, round(few + (target_ms - typical[0]) / per_row)))


def time_table(rounds: float) -> list[Row]:
    """All comparisons of time."""
    table = "Milliseconds per training step, slowest rank (A/A: plain again over plain; calm: fastest tenth of steps)"
    cases: list[tuple[str, str, Job, float | None, int, float]] = [
        ("ArcFace", "ddp", Job("arcface", 0), 10, 300, 1.15),
        ("3 losses", "ddp", Job("three", 0), 10, 200, 1.15),
        ("ArcFace", "ddp", Job("arcface", 0), 100, 80, 1.03),
        ("2 losses that alternate", UNUSED, Job("alternate", 0), 10, 200, 1.0),
        (f"ArcFace, {MANY:,} classes", "ddp", Job("arcface", 16, classes=MANY), None, 25, 1.0),
    ]
    rows = []
    for title, theirs, job, target_ms, number, limit in cases:
        answers = run_ranks(time_job, theirs, job, target_ms, max(8, round(number * rounds)))
        turns = Turns([answer[0] for answer in answers])
        plain, again, ours = turns.wall_ms
        middle, work = turns.median_ms(0), turns.cpu_ms
        low, difference, high = turns.differences(2)
        rows.append(
            {
                "table": table,
                "module": title,
                "plain": theirs.replace("_parameters_true", ""),
                "rows": answers[0][2],
                "plain_ms": middle,
                "ours_ms": turns.median_ms(2),
                "ratio": turns.median_ms(2) / middle,
                "A/A": turns.median_ms(1) / middle,
                "difference_ms": difference,
                "95%_interval": [low, high],
                "paired_ratio": 1 + difference / middle,
                "calm_ratio": calm(ours) / calm(plain),
                "calm_A/A": calm(again) / calm(plain),
                "cpu_ratio": work[2] / work[0],
                "cpu_A/A": work[1] / work[0],
                "cpu_difference_ms": work[2] - work[0],
                "limit": limit,
                "rounds": turns.number,
                "parameters_differ_by": max(a[1] for a in answers),
                "verdict": turns.verdict(2, limit),
            }
        )
    return rows


# ---------------------------------------------------------------------- memory


class StepMemory(Callback):
    """Resident bytes between steps, at the peak of a step, and how much the reduction after backward adds."""

    first = 4

    def __init__(self, resident: Resident) -> None:
        self.resident = resident
        self.between = self.step_peak = self.reduction = 0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        """Before a step; the gradients of the last one are still there."""
        if index == self.first:
            self.between = self.resident.now()
            self.resident.reset()
            name = "reduce_loss_gradients" if hasattr(trainer.strategy, "reduce_loss_gradients") else "post_backward"
            reduce = getattr(trainer.strategy, name)

            def measured(*given: Tensor) -> None:
                self.step_peak = max(self.step_peak, self.resident.peak)
                self.resident.reset()
                before = self.resident.now()
                reduce(*given)
                self.reduction = max(self.reduction, self.resident.peak - before)

            setattr(trainer.strategy, name, measured)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        """After a step."""
        if index >= self.first:
            self.step_peak = max(self.step_peak, self.resident.peak)


def step_memory(strategy: str, job: Job) -> tuple[int, int, int]:
    """Bytes above those of the module alone: between steps, at the peak of a step; and what the reduction adds."""
    train(strategy, replace(job, classes=10), 4)  # libraries load, pools fill
    module, batch = Embedder(job), batches(job)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident = Resident()
    alone = resident.now()
    memory = StepMemory(resident)
    make_trainer(strategy, callbacks=[memory]).fit(module, (batch(i) for i in range(memory.first + 4)))
    resident.close()
    return memory.between - alone, memory.step_peak - alone, memory.reduction


def memory_table() -> list[Row]:
    """No second copy of the gradient."""
    job = Job("arcface", 2, classes=MANY)  # few rows: activations shall not hide a copy
    gradient = MANY * EMBEDDING * 4 / MIB
    found = {}
    for strategy in ("ddp", OURS):
        ranks = run_ranks(step_memory, strategy, job)
        found[strategy] = [max(column) / MIB for column in zip(*ranks, strict=True)]
    plain_between, plain_peak, _ = found["ddp"]
    rows = []
    for strategy, (between, peak, reduction) in found.items():
        # allocator pools add the same few MiB to both; DDP's bucket is the copy that ours must not have
        right = between < plain_between - 0.75 * gradient and peak < plain_peak and reduction < 0.25 * gradient
        rows.append(
            {
                "table": f"MiB per rank above the module's own, ArcFace, {MANY:,} classes",
                "strategy": strategy,
                "gradient": gradient,
                "between_steps": between,
                "peak_of_step": peak,
                "added_after_backward": reduction,
                "less_than_ddp": plain_between - between,
                "verdict": "-" if strategy == "ddp" else "right" if right else "WRONG",
            }
        )
    return rows


def main(arguments: Sequence[str] = ()) -> list[Row]:
    """Run the parts that are asked for; all without options."""
    parts: dict[str, Callable[[], list[Row]]] = {
        "collectives": collectives_table,
        "time": lambda: time_table(options.rounds),
        "memory": memory_table,
    }
    options = parser_of("strategy_overhead", __doc__, parts).parse_args(arguments)
    return run_parts(parts, options.only)
