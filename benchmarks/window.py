"""What an accumulation window costs beside Lightning's own accumulation, and ``global_mean`` beside a hand-written all-reduce.

*Windows.* Three fits of a multilayer perceptron under ``strategy="ddp_losses"`` take turns (``interleave``), four micro-batches per
optimizer step: ``"mean"``, ``"mean"`` again (A/A) and ``"window"``. Their loss is ``GlobalBatchLoss(CrossEntropyLoss(ignore_index))``.
With *equal* counts in all micro-batches both mean the same, and their parameters are compared before and after anything is timed. With
*uneven* ones a window has to correct its estimate, one pass over all gradients; the mean of means trains on something else then. A
window takes as long as its micro-batches, each as long as its slowest rank; windows of a round are paired. *cpu* is processor time of
all ranks: waiting for the machine and the peers is left out.

*One mean.* ``global_mean(total, count)`` beside ``all_reduce`` of the sum and the count in one tensor, with W / N in front of this rank's
sum: value, gradient, collectives are compared; then both are timed in turns, alone and at the end of a step of a small encoder; *calm*
compares the fastest tenth of each. (It waits for the peers awake at first, which costs time where others need the processor.)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.interleave import Fit, Round, time_in_turns, timed_rounds
from benchmarks.ranks import run_ranks
from benchmarks.records import Row
from benchmarks.runner import calm, judge, largest_difference, listed, median_interval, parser_of, run_parts, take_turns
from benchmarks.strategy_overhead import Collectives
from benchmarks.trainers import make_trainer
from lightning_ddp_losses import DDPLossStrategy, GlobalBatchLoss, global_mean
from lightning_ddp_losses.testing import CountCollectives

__all__ = ["main"]

MICRO_BATCHES, CLASSES, IGNORED = 4, 10, -100
FITS = ("mean", "mean", "window")
EQUAL = 1e-6  # relative, float32, after the same steps
LIMIT = 1.01  # of a window, at 100 M parameters
MEAN_LIMIT = 1.1  # of a hand-written mean


@dataclass(frozen=True)
class Size:
    """A multilayer perceptron: ten layers of ``width`` times ``width``.

    Attributes:
        title: How many parameters.
        width: Of a layer.
        rows: Per rank and micro-batch.
        seconds: Of timed rounds at most, however busy the machine is.
        limit: Of the ratio; None where none was set.
    """

    title: str
    width: int
    rows: int
    seconds: float
    limit: float | None


SIZES = (Size("10 M", 1000, 64, 40.0, None), Size("100 M", 3162, 64, 90.0, LIMIT))
TINY = Size("40 k", 64, 8, 0.0, None)


class Perceptron(pl.LightningModule):
    """Trains on noise: the time of a window is all that matters."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [part for _ in range(10) for part in (nn.Linear(size.width, size.width), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(size.width, CLASSES))
        self.loss = GlobalBatchLoss(nn.CrossEntropyLoss(ignore_index=IGNORED))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy of the rows with labels, over all ranks."""
        loss: Tensor = self.loss(self.layers(batch[0]), batch[1])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD: the optimizer shall not hide the window."""
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def batches(size: Size, *, even: bool) -> Callable[[int], tuple[Tensor, Tensor]]:
    """This rank's part of each of two windows, with a quarter of the labels missing; unevenly, between none and a half."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    parts = []
    for index in range(2 * MICRO_BATCHES):
        rows = torch.randn(size.rows, size.width, generator=generator)
        labels = torch.randint(CLASSES, (size.rows,), generator=generator)
        eighths = 2 if even else index % MICRO_BATCHES + dist.get_rank() % 2
        labels[: eighths * size.rows // 8] = IGNORED
        parts.append((rows, labels))
    return lambda index: parts[index % len(parts)]


def fit(accumulation: Any, module: Perceptron, given: Iterator[Any], *callbacks: pl.Callback) -> None:
    """Train a module on batches, four per optimizer step."""
    strategy = DDPLossStrategy(accumulation=accumulation)
    options = {"accumulate_grad_batches": MICRO_BATCHES, "callbacks": list(callbacks)}
    make_trainer(strategy, **options).fit(module, given)


# ---------------------------------------------------------------------- collectives


class ThirdWindow(Collectives):
    """Records the third window: DDP's own set-up is over."""

    first, last = 2 * MICRO_BATCHES, 3 * MICRO_BATCHES - 1


def count_window(accumulation: str) -> dict[str, float]:
    """Collectives by name of one optimizer step in the middle of a fit."""
    count, batch = ThirdWindow(), batches(TINY, even=False)
    fit(accumulation, Perceptron(TINY), (batch(i) for i in range(4 * MICRO_BATCHES)), count)
    return {name: number * MICRO_BATCHES for name, number in count.per_step.items()}


def collectives_table() -> list[Row]:
    """At most one more per optimizer step, and none per micro-batch."""
    plain, window = (run_ranks(count_window, accumulation)[0] for accumulation in ("mean", "window"))
    more = sum(window.values()) - sum(plain.values())
    return [
        {
            "table": f"Collectives per optimizer step, {MICRO_BATCHES} micro-batches",
            "loss": "GlobalBatchLoss(CrossEntropyLoss)",
            "mean": listed(plain),
            "window": listed(window),
            "more": more,
            "allowed": 1,
            "verdict": "right" if more <= 1 else "WRONG",
        }
    ]


# ---------------------------------------------------------------------- time of windows


def time_windows(size: Size, even: bool, windows: int) -> tuple[list[Round], float]:
    """Rounds of (mean, mean again, window), one micro-batch each, and the largest relative difference of parameters."""
    modules, fits, batch = [], [], batches(size, even=even)
    for accumulation in FITS:
        module = Perceptron(size)
        modules.append(module)
        fits.append(Fit(_starter(accumulation, module), batch))
    mean, _, window = modules

    def check() -> None:
        off = largest_difference(mean, window)
        if even and off > EQUAL:
            raise RuntimeError(f"mean and window differ by {off:.1e} with equal counts")

    table = take_turns(fits, windows * MICRO_BATCHES, size.seconds, warm_up=2 * MICRO_BATCHES, check=check)
    # where time ran out inside a window: to its end, untimed
    for _ in range(-len(table) % MICRO_BATCHES):
        timed_rounds(fits, 1)
    after = largest_difference(mean, window)
    for each in fits:
        each.end()
    return table, after


def _starter(accumulation: str, module: Perceptron) -> Callable[[Iterator[Any]], object]:
    return lambda given: fit(accumulation, module, given)


def windows_of(rounds: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Milliseconds of each fit in each whole window, from those of its micro-batches."""
    starts = range(0, len(rounds) - MICRO_BATCHES + 1, MICRO_BATCHES)
    return [tuple(map(sum, zip(*rounds[start : start + MICRO_BATCHES], strict=True))) for start in starts]


def time_table(sizes: Sequence[Size], windows: int) -> list[Row]:
    """One row for each size, with equal and with uneven counts."""
    rows = []
    for size in sizes:
        for even in (True, False):
            answers = run_ranks(time_windows, size, even, windows, seconds=600.0)
            rounds = list(zip(*(table for table, _ in answers), strict=True))
            # the ranks meet before every micro-batch: each takes as long as its slowest rank, and as much work as all do
            wall = windows_of([tuple(map(max, zip(*(r.wall_ms for r in same), strict=True))) for same in rounds])
            work = windows_of([tuple(map(sum, zip(*(r.cpu_ms for r in same), strict=True))) for same in rounds])
            mean = statistics.median(window[0] for window in wall)
            low, difference, high = median_interval([window[2] - window[0] for window in wall])
            verdict = "-" if size.limit is None else judge(mean, low, difference, size.limit)
            differ = max(after for _, after in answers)
            if even and differ > EQUAL:
                verdict = "WRONG"
            rows.append(
                {
                    "table": f"Milliseconds per optimizer step, {MICRO_BATCHES} micro-batches, 2 ranks, slowest rank",
                    "parameters": size.title,
                    "fit": "equal counts" if even else "uneven counts",
                    "rows": size.rows,
                    "mean_ms": mean,
                    "window_ms": statistics.median(window[2] for window in wall),
                    "difference_ms": difference,
                    "95%_interval": [low, high],
                    "paired_ratio": _paired(wall, 2),
                    "A/A": _paired(wall, 1),
                    "cpu_ratio": _paired(work, 2),
                    "cpu_A/A": _paired(work, 1),
                    "most": size.limit,
                    "windows": len(wall),
                    "parameters_differ_by": differ,
                    "verdict": verdict,
                }
            )
    return rows


def _paired(windows: Sequence[tuple[float, ...]], place: int) -> float:
    """The median ratio of one fit's windows to those of the first beside them."""
    return statistics.median(window[place] / window[0] for window in windows)


# ---------------------------------------------------------------------- one mean


def mean_by_hand(total: Tensor, count: int) -> Tensor:
    """The mean over all ranks with the gradient that DDP's mean makes that of one process, in one all-reduce."""
    both = torch.stack([total.detach(), total.new_tensor(count)])
    dist.all_reduce(both)
    mean, scale = both[0] / both[1], dist.get_world_size() / both[1]
    return total * scale + (mean - total * scale).detach()


class Contestant:
    """A mean over this rank's rows, which are not as many as the other's, with or without a small encoder before it."""

    def __init__(self, mean: Callable[[Tensor, int], Tensor], hidden: int) -> None:
        torch.manual_seed(0)
        layers = [part for _ in range(4) for part in (nn.Linear(hidden, hidden), nn.ReLU())] if hidden else []
        self.model = nn.Sequential(*layers, nn.Linear(hidden or 4, 1))
        self.count = 48 + 32 * dist.get_rank()
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.rows = torch.randn(self.count, hidden or 4, generator=generator)
        self.mean = mean

    def step(self) -> Tensor:
        """Forward and backward; returns the value."""
        self.model.zero_grad()
        value = self.mean(self.model(self.rows).square().sum(), self.count)
        torch.autograd.backward(value)
        return value.detach()

    def grads(self) -> Tensor:
        """All gradients, after DDP's mean."""
        flat = torch.cat(
            [parameter.grad.flatten() for parameter in self.model.parameters() if parameter.grad is not None]
        )
        dist.all_reduce(flat)
        return flat / dist.get_world_size()


def time_means(hidden: int, rounds: int, seconds: float) -> tuple[Row, list[list[float]]]:
    """What was compared; milliseconds of (by hand, by hand again, ours) in each round."""
    contestants = [Contestant(mean, hidden) for mean in (mean_by_hand, mean_by_hand, global_mean)]
    # 1. equal values and gradients
    values = [contestant.step() for contestant in contestants]
    grads = [contestant.grads() for contestant in contestants]
    off = max(float((values[2] - values[0]).abs() / values[0]), float((grads[2] - grads[0]).norm() / grads[0].norm()))
    # 2. collectives
    counts = []
    for contestant in contestants:
        with CountCollectives() as collectives:
            contestant.step()
        counts.append(len(collectives.names))
    checked = {"off": off, "by_hand": counts[0], "ours": counts[2]}
    # 3. times, in turns
    steps = [contestant.step for contestant in contestants]
    return checked, time_in_turns(steps, rounds, seconds, warm_up=3)


def means_table(rounds: int, seconds: float) -> list[Row]:
    """The mean alone, and at the end of a step."""
    rows = []
    for title, hidden, limit in (("alone", 0, None), ("step of an encoder", 1024, MEAN_LIMIT)):
        answers = run_ranks(time_means, hidden, rounds, seconds)
        by_hand, again, ours = (
            [max(rank[i] for rank in same) for same in zip(*(table for _, table in answers), strict=True)]
            for i in range(3)
        )
        middle = statistics.median(by_hand)
        low, difference, high = median_interval([a - b for a, b in zip(ours, by_hand, strict=True)])
        checked = answers[0][0]
        off = max(answer[0]["off"] for answer in answers)
        right = off <= EQUAL * 10 and checked["ours"] == 1
        verdict = "-" if limit is None else judge(middle, low, difference, limit)
        rows.append(
            {
                "table": "global_mean beside a hand-written all-reduce, forward and backward, 2 ranks, slowest rank",
                "fit": title,
                "by_hand_ms": middle,
                "ours_ms": statistics.median(ours),
                "difference_ms": difference,
                "95%_interval": [low, high],
                "paired_ratio": statistics.median(a / b for a, b in zip(ours, by_hand, strict=True)),
                "calm_ratio": calm(ours) / calm(by_hand),
                "A/A": statistics.median(a / b for a, b in zip(again, by_hand, strict=True)),
                "most": limit,
                "by_hand_collectives": checked["by_hand"],
                "collectives": checked["ours"],
                "gradients_differ_by": off,
                "rounds": len(ours),
                "verdict": verdict if right else "WRONG",
            }
        )
    return rows


def main(arguments: Sequence[str] = ()) -> list[Row]:
    """Run the parts that are asked for; all without options."""
    parts: dict[str, Callable[[], list[Row]]] = {
        "collectives": collectives_table,
        "time": lambda: time_table(sizes, max(2, round(30 * options.rounds))),
        "means": lambda: means_table(max(8, round(300 * options.rounds)), seconds=15.0),
    }
    parser = parser_of("window", __doc__, parts)
    parser.add_argument("--sizes", nargs="+", choices=[size.title for size in SIZES], help="which models to time")
    options = parser.parse_args(arguments)
    sizes = [size for size in SIZES if options.sizes is None or size.title in options.sizes]
    return run_parts(parts, options.only)
