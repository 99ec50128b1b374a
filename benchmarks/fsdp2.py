"""What ``strategy="fsdp2_ddp_losses"`` costs beside Lightning's ``ModelParallelStrategy``, and what it saves beside ``"ddp_losses"``.

The module is that of ``strategy_overhead``, its encoder divided by ``fully_shard`` layer by layer. Lightning's own strategy trains it with
a loss whose weight is frozen, as it can do nothing for one that learns; ours trains the loss too. Collectives are counted and asserted:
one handshake and one reduction more, and one broadcast less (Lightning asks before each batch whether SIGTERM has come). Times are of
whole steps, taken alternately in the same processes: Lightning's, Lightning's again, ours, and *by hand*: Lightning's with a loss that
learns, whose gradient the module averages over the ranks after each backward. That is what ours does without its checks, and its result
is asserted to be equal. Loaders know their length. Python calls of a step are counted by ``cProfile``, which no busy machine changes.
Memory is the resident set of fresh processes above the module's own, between steps and at the peak.
"""

from __future__ import annotations

import cProfile
import ctypes
import gc
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.interleave import Fit, Round, SizedBatches, timed_rounds
from benchmarks.memory import MIB, Resident
from benchmarks.ranks import run_ranks
from benchmarks.records import Row, machine
from benchmarks.runner import Turns, listed, parser_of, run_parts, take_turns
from benchmarks.strategy_overhead import Collectives, Embedder, Job, StepMemory, batches
from benchmarks.trainers import make_trainer
from lightning_ddp_losses import DDPLossStrategy, ModelParallelLossStrategy

__all__ = ["main"]

WORLDS = (2, 4)
CASE_SECONDS = 24.0  # of timed rounds per row of the table
LIGHTNINGS, OURS, DDP = "ModelParallelStrategy", "fsdp2_ddp_losses", "ddp_losses"
BY_HAND = "ModelParallelStrategy, the loss's gradient averaged by hand"
FITS = (LIGHTNINGS, LIGHTNINGS, OURS, BY_HAND)  # which take turns


class Divided(Embedder):
    """The encoder in parts, one for each layer; where nothing divides it, whole."""

    def __init__(self, job: Job, *, learns: bool = True) -> None:
        super().__init__(job)
        self.losses.requires_grad_(learns)

    def configure_model(self) -> None:
        """What the user writes."""
        if self.device_mesh is None:
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in self.encoder:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.encoder, mesh=mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD of what is trained."""
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01)


class AveragedByHand(Divided):
    """The gradients of its losses are averaged by the module's own line."""

    def on_after_backward(self) -> None:
        """What a careful user writes; without it each rank's loss learns for itself."""
        for parameter in self.losses.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def strategy_of(name: str) -> Strategy:
    """A new strategy of that name, over all ranks."""
    if name in (LIGHTNINGS, BY_HAND):
        return ModelParallelStrategy(data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
    return ModelParallelLossStrategy() if name == OURS else DDPLossStrategy()


def module_of(name: str, job: Job) -> Divided:
    """The module that a strategy trains."""
    return AveragedByHand(job) if name == BY_HAND else Divided(job, learns=name != LIGHTNINGS)


# ---------------------------------------------------------------------- collectives


def count_collectives(name: str, job: Job) -> dict[str, float]:
    """Per training step, by name; of a loader with a length."""
    count, batch = Collectives(), batches(job)
    data = torch.utils.data.DataLoader([batch(i) for i in range(count.last + 3)], batch_size=None)
    make_trainer(strategy_of(name), callbacks=[count]).fit(module_of(name, job), data)
    return dict(count.per_step)


def collectives_table(worlds: Sequence[int]) -> list[Row]:
    """One handshake and one reduction more than Lightning's, and its broadcast of SIGTERM before each batch less."""
    rows = []
    for world in worlds:
        job = Job("arcface", 16)
        theirs, ours = (run_ranks(count_collectives, name, job, world_size=world)[0] for name in (LIGHTNINGS, OURS))
        more = {key: ours.get(key, 0) - theirs.get(key, 0) for key in {*theirs, *ours}}
        more = {key: count for key, count in more.items() if count}
        # few bytes ride in a gather of their own or in an all-reduce
        spared = -more.pop("broadcast_", 0)
        allowed = sum(more.values()) <= 2 and set(more) <= {"alltoall_base_", "allreduce_"} and spared == 1
        rows.append(
            {
                "table": "Collectives per training step",
                "ranks": world,
                "plain": listed(theirs),
                "more": listed(more),
                "spared_broadcasts": spared,
                "verdict": "right" if allowed else "WRONG",
            }
        )
    return rows


# ---------------------------------------------------------------------- Python calls


class PythonCalls(Callback):
    """Counts the calls of some steps in the middle of a fit, of functions written in Python and in C."""

    first, last = 12, 31

    def __init__(self) -> None:
        self._profile = cProfile.Profile()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        """Start and stop counting between two steps."""
        if index == self.first:
            self._profile.enable()
        elif index == self.last + 1:
            self._profile.disable()

    def per_step(self) -> float:
        """Return the calls of one step; those of waiting awake, of which there are as many as fit, are not in it."""
        self._profile.create_stats()
        waiting = ("is_completed", "sched_yield", "perf_counter")
        counts = [row[1] for name, row in self._profile.stats.items() if not any(word in name[2] for word in waiting)]  # type: ignore[attr-defined]
        return sum(counts) / (self.last + 1 - self.first)


def count_calls(name: str, job: Job) -> float:
    """Python calls per training step; of a loader with a length."""
    count, batch = PythonCalls(), batches(job)
    data = torch.utils.data.DataLoader([batch(i) for i in range(count.last + 3)], batch_size=None)
    make_trainer(strategy_of(name), callbacks=[count]).fit(module_of(name, job), data)
    return count.per_step()


def calls_table(worlds: Sequence[int]) -> list[Row]:
    """What Lightning's strategy calls with a loss whose gradient is averaged by hand, and what ours does."""
    rows = []
    for world in worlds:
        theirs, ours = (
            max(run_ranks(count_calls, name, Job("arcface", 16), world_size=world)) for name in (BY_HAND, OURS)
        )
        rows.append(
            {
                "table": "Python calls per training step",
                "ranks": world,
                "plain_calls": theirs,
                "ours_calls": ours,
                "more_calls": ours - theirs,
            }
        )
    return rows


# ---------------------------------------------------------------------- time


def _fit(name: str, job: Job) -> Fit:
    def start(given: SizedBatches) -> None:
        make_trainer(strategy_of(name), callbacks=[given]).fit(module_of(name, job), given)

    return Fit(start, batches(job), sized=True)


def _typical_ms(job: Job, count: int = 24) -> float:
    """The time of a step of Lightning's strategy on the slowest rank."""
    fit = _fit(LIGHTNINGS, job)
    fit.step()
    times = torch.tensor([row.wall_ms[0] for row in timed_rounds([fit], count + 4)[4:]])
    fit.end()
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return float(times.quantile(0.3))


def assert_equal_results(job: Job, steps: int = 5) -> None:
    """Ours and the gradient averaged by hand train the same losses, on every rank."""
    trained = []
    for name in (BY_HAND, OURS):
        batch, module = batches(job), module_of(name, job)
        data = torch.utils.data.DataLoader([batch(i) for i in range(steps)], batch_size=None)
        make_trainer(strategy_of(name)).fit(module, data)
        trained.append([p.detach() for p in module.losses.parameters()])
    torch.testing.assert_close(*trained, rtol=1e-5, atol=1e-7)


def time_side_by_side(target_ms: float, rounds: int) -> tuple[list[Round], int]:
    """Rounds of ``FITS``, with as many rows as make a step about that long."""
    few, many = 16, 272
    typical = [_typical_ms(Job("arcface", rows)) for rows in (few, many)]
    per_row = max((typical[1] - typical[0]) / (many - few), 1e-3)
    job = Job("arcface", max(4, min(20_000, round(few + (target_ms - typical[0]) / per_row))))
    fits = [_fit(name, job) for name in FITS]
    table = take_turns(fits, rounds, CASE_SECONDS, warm_up=5)
    for fit in fits:
        fit.end()
    return table, job.rows


def time_table(worlds: Sequence[int], rounds: float) -> list[Row]:
    """Steps of about 10 and 100 ms; and of 100 ms of work on each rank, which take longer where ranks share a processor."""
    rows = []
    for world in worlds:
        run_ranks(assert_equal_results, Job("arcface", 16), world_size=world)
        shared_by = world / machine()["cores"]
        longer = [(100.0 * shared_by, 80, 1.03)] if shared_by > 1 else []
        for target_ms, number, limit in ((10.0, 300, 1.15), (100.0, 80, 1.03), *longer):
            answers = run_ranks(time_side_by_side, target_ms, max(8, round(number * rounds)), world_size=world)
            turns = Turns([answer[0] for answer in answers])
            middle, work = turns.median_ms(0), turns.cpu_ms
            low, difference, high = turns.differences(2)
            rows.append(
                {
                    "table": "Milliseconds per training step, slowest rank (A/A: Lightning's again over Lightning's)",
                    "ranks": world,
                    "rows": answers[0][1],
                    "plain_ms": middle,
                    "ours_ms": turns.median_ms(2),
                    "ratio": turns.median_ms(2) / middle,
                    "A/A": turns.median_ms(1) / middle,
                    "difference_ms": difference,
                    "95%_interval": [low, high],
                    "by_hand_ms": turns.median_ms(3),
                    "difference_from_by_hand_ms": turns.differences(2, 3)[1],
                    "cpu_ms": work[0],
                    "cpu_A/A": work[1] / work[0],
                    "cpu_ours_ms": work[2],
                    "cpu_by_hand_ms": work[3],
                    "limit": limit,
                    "rounds": turns.number,
                    "verdict": turns.verdict(2, limit),
                }
            )
    return rows


# ---------------------------------------------------------------------- memory


def step_memory(name: str, job: Job) -> tuple[float, float]:
    """MiB between steps and at the peak of a step, above what the process held before the module."""
    batch = batches(job)
    small = Job("arcface", 2, classes=10, width=8)
    data = torch.utils.data.DataLoader([batches(small)(i) for i in range(3)], batch_size=None)
    make_trainer(strategy_of(name)).fit(module_of(name, small), data)  # libraries load, pools fill
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident = Resident()
    alone = resident.now()
    memory = StepMemory(resident)
    steps = torch.utils.data.DataLoader([batch(i) for i in range(memory.first + 4)], batch_size=None)
    make_trainer(strategy_of(name), callbacks=[memory]).fit(module_of(name, job), steps)
    resident.close()
    return (memory.between - alone) / MIB, (memory.step_peak - alone) / MIB


def memory_table(worlds: Sequence[int], width: int) -> list[Row]:
    """What a rank holds of a wide encoder, under DDP and divided."""
    rows = []
    for world in worlds:
        job = Job("arcface", 2, width=width)
        parameters = sum(p.nbytes for p in Divided(job).parameters()) / MIB
        for name in (DDP, OURS):
            between, peak = map(max, zip(*run_ranks(step_memory, name, job, world_size=world), strict=True))
            rows.append(
                {
                    "table": f"MiB per rank, encoder of width {width}",
                    "ranks": world,
                    "strategy": name,
                    "parameters": parameters,
                    "between_steps": between,
                    "peak_of_step": peak,
                }
            )
    return rows


def main(arguments: Sequence[str] = ()) -> list[Row]:
    """Run the parts that are asked for; all without options."""
    parts: dict[str, Callable[[], list[Row]]] = {
        "collectives": lambda: collectives_table(options.ranks),
        "calls": lambda: calls_table(options.ranks),
        "time": lambda: time_table(options.ranks, options.rounds),
        "memory": lambda: memory_table(options.ranks, options.width),
    }
    parser = parser_of("fsdp2", __doc__, parts)
    parser.add_argument("--ranks", nargs="+", type=int, default=WORLDS, help="numbers of ranks")
    parser.add_argument("--width", type=int, default=4096, help="of the encoder whose memory is measured")
    options = parser.parse_args(arguments)
    return run_parts(parts, options.only)
