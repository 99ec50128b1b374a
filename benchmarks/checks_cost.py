"""What ``DDPChecks`` costs beside the same fit without it: collectives, time per step, and a naive comparison beside it.

Collectives are counted by torch's profiler, as in ``strategy_overhead``. Times are of whole training steps, taken alternately
in the same processes (``interleave``), on the slowest rank, 2 ranks of one thread; rows per rank are chosen so that a plain
step of 10 M parameters takes 70 to 90 ms here. *own* is the processor's part of the checks: their time without what they
wait for in gathers; its share is that of a step of 90 ms, or of the plain step where that takes longer. *naive* gathers
every parameter after every step and compares.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from benchmarks.interleave import Fit, timed_rounds
from benchmarks.ranks import run_ranks
from benchmarks.records import Row
from benchmarks.runner import parser_of, run_parts
from benchmarks.strategy_overhead import Job, count_collectives
from benchmarks.trainers import make_trainer
from lightning_ddp_losses import DDPChecks, ParameterSyncCheck

__all__ = ["main"]

STEP_MS = 90.0  # the shortest step that shares refer to
OWN_SHARE = 0.015  # of a step, at most, with default settings
PASS_SHARE = 0.06  # of a step, at most, for a fingerprint of everything
SECONDS = 60.0  # of timed rounds per size, however busy the machine is


@dataclass(frozen=True)
class Size:
    """A multilayer perceptron: layers of ``width`` times ``width``, on so many rows per rank."""

    title: str
    layers: int
    width: int
    rows: int
    variants: tuple[str, ...]


SIZES = (
    Size("10 M", 10, 1000, 64, ("plain", "plain again", "default", "fingerprint", "naive")),
    Size("100 M", 10, 3162, 8, ("plain", "default", "fingerprint")),
)


class Perceptron(pl.LightningModule):
    """Trains on noise: the time of a step is all that matters."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [part for _ in range(size.layers) for part in (nn.Linear(size.width, size.width), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(size.width, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD: the optimizer shall not hide the checks."""
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Naive(Callback):
    """Gathers every parameter after every step and compares with this rank's."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """One gather for each parameter."""
        for name, parameter in pl_module.named_parameters():
            own = parameter.detach()
            everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, own)
            if not all(torch.equal(own, other) for other in everyone):
                raise RuntimeError(f"{name} differs")


class OwnTime(Callback):
    """The checks' time in each step, without their waiting in gathers."""

    def __init__(self, checks: DDPChecks) -> None:
        self.checks, self.waited, self.marks, self.gathers = checks, 0.0, [], 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Time the gathers."""
        runner = self.checks._own_runner
        assert runner is not None
        gather_rows = runner.row_exchange.gather_rows

        def timed(*args: Any, **options: Any) -> list[bytes]:
            began = time.perf_counter()
            try:
                return gather_rows(*args, **options)
            finally:
                self.waited += time.perf_counter() - began

        runner.row_exchange.gather_rows = timed  # type: ignore[method-assign]

    def on_train_batch_end(self, *_: Any) -> None:
        """After the checks of this step."""
        runner = self.checks._own_runner
        assert runner is not None
        self.marks.append((runner.own_time.seconds - self.waited) * 1e3)

    def per_step_ms(self) -> float:
        """Median, the first steps left out: they look at everything."""
        return statistics.median(b - a for a, b in zip(self.marks[2:-1], self.marks[3:], strict=True))


def callbacks_of(variant: str) -> list[Callback]:
    """What is added to a plain fit."""
    if variant == "naive":
        return [Naive()]
    if variant.startswith("plain"):
        return []
    only = [ParameterSyncCheck(parts=1)] if variant == "fingerprint" else None
    checks = DDPChecks(only, summary=False, file=False, action={"warning": "log"})
    return [checks, OwnTime(checks)]


def time_size(size: Size, rounds: int) -> tuple[list[tuple[float, ...]], dict[str, float]]:
    """Milliseconds of each variant by round; own milliseconds per step of those that check."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [
        (torch.randn(size.rows, size.width, generator=generator), torch.randint(10, (size.rows,), generator=generator))
        for _ in range(8)
    ]
    added = [callbacks_of(variant) for variant in size.variants]
    fits = [Fit(_starter(size, callbacks), lambda index: batches[index % 8]) for callbacks in added]
    for fit in fits:
        fit.step()
    timed_rounds(fits, 4)
    table = timed_rounds(fits, rounds, SECONDS)
    own = {
        v: c[-1].per_step_ms() for v, c in zip(size.variants, added, strict=True) if c and isinstance(c[-1], OwnTime)
    }
    for fit in fits:
        fit.end()
    return [round_.wall_ms for round_ in table], own


def _starter(size: Size, callbacks: list[Callback]) -> Callable[[Any], object]:
    def start(batches: Any) -> object:
        return make_trainer("ddp", callbacks=callbacks, max_epochs=1).fit(Perceptron(size), batches)

    return start


def time_table(sizes: Sequence[Size], factor: float) -> list[Row]:
    """One row for each size and variant."""
    rows = []
    for size in sizes:
        ranks = run_ranks(time_size, size, max(8, int(60 * factor)))
        walls = [tuple(map(max, zip(*same, strict=True))) for same in zip(*(wall for wall, _ in ranks), strict=True)]
        plain = statistics.median(wall[0] for wall in walls)
        for place, variant in enumerate(size.variants):
            own = max((own[variant] for _, own in ranks if variant in own), default=None)
            more = statistics.median(wall[place] - wall[0] for wall in walls)
            limit = {"default": OWN_SHARE, "fingerprint": PASS_SHARE}.get(variant)
            share = None if own is None else own / max(plain, STEP_MS)
            rows.append(
                {
                    "table": "Milliseconds per training step, 2 ranks",
                    "parameters": size.title,
                    "fit": variant,
                    "ms": statistics.median(wall[place] for wall in walls),
                    "more_than_plain": more,
                    "ratio": 1 + more / plain,
                    "own_ms": own,
                    "own_share": share,
                    "allowed_share": limit,
                    "rounds": len(walls),
                    "verdict": "-" if limit is None or share is None else "right" if share <= limit else "MISSED",
                }
            )
    return rows


def collectives_table() -> list[Row]:
    """At most 2 more under a foreign strategy, 1 beyond the strategy's own under ours."""
    job = Job("arcface", 16)
    rows = []
    for strategy, allowed in (("ddp", 2), ("ddp_losses", 1)):
        plain, checked = run_ranks(_count, strategy, job)[0]
        more = checked - plain
        rows.append(
            {
                "table": "Collectives per training step",
                "strategy": strategy,
                "plain": plain,
                "checked": checked,
                "more": more,
                "allowed": allowed,
                "verdict": "right" if more <= allowed else "WRONG",
            }
        )
    return rows


def _count(strategy: str, job: Job) -> tuple[float, float]:
    checks = DDPChecks(summary=False, file=False, action={"warning": "log"})
    both = count_collectives([(strategy, job)]), count_collectives([(strategy, job)], checks)
    plain, checked = (sum(counted[0][0].values()) for counted in both)
    return plain, checked


def main(arguments: Sequence[str] = ()) -> list[Row]:
    """Run the parts that are asked for; all without options."""
    parts: dict[str, Callable[[], list[Row]]] = {
        "collectives": collectives_table,
        "time": lambda: time_table(sizes, options.rounds),
    }
    parser = parser_of("checks_cost", __doc__, parts)
    parser.add_argument("--sizes", nargs="+", choices=[size.title for size in SIZES], help="which models to time")
    options = parser.parse_args(arguments)
    sizes = [size for size in SIZES if options.sizes is None or size.title in options.sizes]
    return run_parts(parts, options.only)
