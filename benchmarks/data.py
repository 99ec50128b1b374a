"""What global batches cost: drawing one, holding the sampler, resuming in the middle of an epoch, lengths that are known.

*Drawing.* Samplers take turns in one process (``interleave``). ``GlobalBatchSampler.shuffled`` beside ``DistributedSampler`` in torch's
``BatchSampler``, many batches a turn. An epoch's *start*, in which both draw their permutation, is measured by itself and shared out
over the epoch's batches. ``GlobalBatchSampler.batches(MPerClassSampler)`` beside
that sampler alone: a turn is an epoch of 65,536 rows, drawn and cut; what it costs more is to compare what ranks have drawn.

*Memory.* How much the resident set of a fresh rank grows at most, on two ranks, from making the sampler to the first batch.

*Resuming.* From a saved state to the first batch: of ``shuffled`` at 100 million rows, and of a sampler of torch's. Both draw again.

*Known lengths.* Collectives of a training step under ``"ddp"`` and under ``DDPLossStrategy`` without the call check.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from pytorch_metric_learning.samplers import MPerClassSampler
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset

from benchmarks.interleave import time_in_turns
from benchmarks.memory import MIB, peak_of
from benchmarks.ranks import run_ranks
from benchmarks.records import Row
from benchmarks.runner import judge, median_interval
from benchmarks.strategy_overhead import Collectives
from benchmarks.trainers import make_trainer
from lightning_ddp_losses import DDPLossStrategy, GlobalBatchSampler

__all__ = ["main"]

SET, LARGE_SET = 10_000_000, 100_000_000  # rows of data sets
GLOBAL_BATCH = 256
TOGETHER = 256  # batches of a turn
CLASSES, M, CLASS_ROWS = 1000, 4, 1 << 16  # of an epoch with M rows per class
LIMIT = 1.05  # of the usual sampler's time
STARTS = 3  # measured starts of an epoch

# ---------------------------------------------------------------------- drawing


def usual_batches(rows: int, world_size: int = 1) -> BatchSampler:
    """Batches as Lightning makes them, of rank 0."""
    sampler: Any = DistributedSampler(range(rows), world_size, 0)  # type: ignore[arg-type]
    return BatchSampler(sampler, GLOBAL_BATCH // world_size, drop_last=False)


def our_batches(rows: int) -> BatchSampler:
    """The permutation as a tensor."""
    return GlobalBatchSampler.shuffled(rows, GLOBAL_BATCH, seed=0)


def forever(make: Callable[[], BatchSampler]) -> Iterator[list[int]]:
    """Batches of one epoch after the other."""
    sampler = make()
    while True:
        yield from sampler


def start_ms(make: Callable[[], BatchSampler]) -> float:
    """Milliseconds from a sampler to the first batch of its epoch."""
    spent = []
    for _ in range(STARTS):
        sampler = make()
        before = time.perf_counter()
        next(iter(sampler))
        spent.append((time.perf_counter() - before) * 1e3)
    return statistics.median(spent)


def time_draws(rows: int, rounds: int, seconds: float) -> tuple[list[list[float]], list[float]]:
    """Milliseconds of ``TOGETHER`` batches for each round (usual, usual again, ours), and of each start."""
    makers = [lambda: usual_batches(rows), lambda: usual_batches(rows), lambda: our_batches(rows)]

    def turn(batches: Iterator[list[int]]) -> Callable[[], object]:
        return lambda: [next(batches) for _ in range(TOGETHER)]

    steps = [turn(forever(make)) for make in makers]
    table = time_in_turns(steps, rounds, seconds, warm_up=2, least=5)
    return table, [start_ms(make) for make in makers]


def time_classes(rows: int, rounds: int, seconds: float) -> list[list[float]]:
    """Milliseconds of an epoch with M rows per class for each round (usual, usual again, ours)."""
    labels = torch.arange(rows) % CLASSES
    inner = MPerClassSampler(labels, m=M, batch_size=GLOBAL_BATCH, length_before_new_iter=min(CLASS_ROWS, rows))
    usual, ours = BatchSampler(inner, GLOBAL_BATCH, drop_last=False), GlobalBatchSampler.batches(inner, GLOBAL_BATCH)

    def epoch(batches: BatchSampler) -> Callable[[], object]:
        return lambda: sum(1 for _ in batches)

    return time_in_turns([epoch(usual), epoch(usual), epoch(ours)], rounds, seconds, least=2)


def draw_table(rows: int, rounds: int, seconds: float) -> list[Row]:
    """Per batch, beside what is usual."""
    table, starts = run_ranks(time_draws, rows, rounds, seconds, world_size=1)[0]
    batches = -(-rows // GLOBAL_BATCH)
    # 1. milliseconds of a batch, with its share of the epoch's start
    computed = [[row[i] / TOGETHER + starts[i] / batches for row in table] for i in range(3)]
    found = [_draw_row("DistributedSampler", "shuffled", rows, computed, [starts[0], starts[2]])]
    # 2. the same of epochs that are drawn as a whole
    table = run_ranks(time_classes, rows, max(rounds // 10, 2), seconds, world_size=1)[0]
    batches = -(-min(CLASS_ROWS, rows) // GLOBAL_BATCH)
    drawn = [[row[i] / batches for row in table] for i in range(3)]
    return [*found, _draw_row("MPerClassSampler", "batches(MPerClassSampler)", rows, drawn, [None, None])]


def _draw_row(usual: str, who: str, rows: int, times: list[list[float]], starts: Sequence[float | None]) -> Row:
    plain, again, ours = times
    middle = statistics.median(plain)
    low, difference, high = median_interval([a - b for a, b in zip(ours, plain, strict=True)])
    return {
        "table": f"Drawing a global batch of {GLOBAL_BATCH} rows out of {rows / 1e6:g} million, one process",
        "ours": who,
        "usual": usual,
        "usual_start_ms": starts[0],
        "ours_start_ms": starts[1],
        "usual_us": middle * 1e3,
        "ours_us": statistics.median(ours) * 1e3,
        "difference_us": difference * 1e3,
        "95%_interval": [low * 1e3, high * 1e3],
        "paired_ratio": statistics.median(a / b for a, b in zip(ours, plain, strict=True)),
        "A/A": statistics.median(a / b for a, b in zip(again, plain, strict=True)),
        "most": LIMIT,
        "rounds": len(ours),
        "verdict": judge(middle, low, difference, LIMIT),
    }


# ---------------------------------------------------------------------- memory


def memory_of(who: str, rows: int) -> float:
    """MiB that a rank of two needs for its sampler and the start of an epoch."""
    makers = {"DistributedSampler": lambda: usual_batches(rows, 2), "shuffled": lambda: our_batches(rows)}
    next(iter(our_batches(1000)))  # groups and buffers are there
    kept: list[object] = []

    def start() -> None:
        reader = iter(makers[who]())
        kept.extend([reader, next(reader)])

    return peak_of(start) / MIB


def memory_table(rows: int) -> list[Row]:
    """Of one rank."""
    return [
        {
            "table": f"Memory of a sampler over {rows / 1e6:g} million rows, per rank of two",
            "who": who,
            "peak_MiB": max(run_ranks(memory_of, who, rows)),
        }
        for who in ("DistributedSampler", "shuffled")
    ]


# ---------------------------------------------------------------------- resuming


def resume_ms(who: str, rows: int) -> float:
    """Milliseconds from a saved state, in the middle of an epoch, to the next batch."""

    def make() -> Any:
        return our_batches(rows) if who == "shuffled" else GlobalBatchSampler.batches(RandomSampler(range(rows)), 256)

    state = make().state_dict() | {"epoch": 3, "rows": rows // 512 * 256}
    sampler = make()
    before = time.perf_counter()
    sampler.load_state_dict(state)
    next(iter(sampler))
    return (time.perf_counter() - before) * 1e3


def resume_table(rows: int, large: int) -> list[Row]:
    """On two ranks, the slower one."""
    found: list[Row] = []
    for who, count in (("shuffled", large), ("batches(RandomSampler)", rows)):
        spent = max(run_ranks(resume_ms, who, count))
        found.append(
            {"table": "From a saved state to the next batch, 2 ranks", "ours": who, "size": count, "ms": spent}
        )
    return found


# ---------------------------------------------------------------------- known lengths


class Line(pl.LightningModule):
    """As little as trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Sum over the rows."""
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def count_steps(who: str) -> dict[str, float]:
    """Collectives of a training step, by name, on a loader that has a length."""
    count = Collectives()
    strategy = "ddp" if who == "ddp" else DDPLossStrategy(check_calls=False)
    trainer = make_trainer(strategy, callbacks=[count], limit_val_batches=0)
    trainer.fit(Line(), DataLoader(TensorDataset(torch.zeros(64, 4)), batch_size=4))
    return dict(count.per_step)


def lengths_table() -> list[Row]:
    """None more."""
    plain, ours = (run_ranks(count_steps, who)[0] for who in ("ddp", "ddp_losses"))
    more = sum(ours.values()) - sum(plain.values())
    return [
        {
            "table": "Collectives of a training step where lengths are known, 2 ranks",
            "strategy": "ddp_losses, check_calls=False",
            "ddp": sum(plain.values()),
            "collectives": sum(ours.values()),
            "allowed_more": 0,
            "verdict": "right" if more <= 0 else "WRONG",
        }
    ]


def main(arguments: Sequence[str] = ()) -> list[Row]:
    """Run the parts that are asked for; all without options."""
    parser = argparse.ArgumentParser("data", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=["draw", "memory", "resume", "lengths"], help="parts to run")
    parser.add_argument("--rounds", type=int, default=400, help="timed turns of each sampler")
    parser.add_argument("--seconds", type=float, default=60.0, help="of timed turns at most")
    parser.add_argument("--rows", type=int, default=SET, help="of the data set")
    parser.add_argument("--large", type=int, default=LARGE_SET, help="of the data set that is resumed")
    options = parser.parse_args(arguments)
    parts: dict[str, Callable[[], list[Row]]] = {
        "draw": lambda: draw_table(options.rows, options.rounds, options.seconds),
        "memory": lambda: memory_table(options.rows),
        "resume": lambda: resume_table(options.rows, options.large),
        "lengths": lengths_table,
    }
    return [row for name, part in parts.items() if name in (options.only or parts) for row in part()]
