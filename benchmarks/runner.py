"""What benchmarks of whole fits have in common: a command with parts, fits that take turns, and figures of their rounds."""

from __future__ import annotations

import argparse
import gc
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from benchmarks.interleave import Fit, Round, timed_rounds
from benchmarks.records import Row

__all__ = [
    "Turns",
    "calm",
    "judge",
    "largest_difference",
    "listed",
    "median_interval",
    "parser_of",
    "run_parts",
    "take_turns",
]

# ---------------------------------------------------------------------- the command


def parser_of(name: str, doc: str | None, parts: Iterable[str]) -> argparse.ArgumentParser:
    """Return a parser that knows which parts to run, and a factor on the number of timed rounds."""
    parser = argparse.ArgumentParser(name, description=(doc or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(parts), help="parts to run")
    parser.add_argument("--rounds", type=float, default=1.0, help="factor on the number of timed rounds")
    return parser


def run_parts(parts: Mapping[str, Callable[[], list[Row]]], only: Sequence[str] | None) -> list[Row]:
    """Run the parts that are asked for; all without any."""
    rows: list[Row] = []
    for name in only or parts:
        rows += parts[name]()
    return rows


# ---------------------------------------------------------------------- fits that take turns


def take_turns(
    fits: Sequence[Fit], rounds: int, seconds: float, *, warm_up: int, check: Callable[[], None] | None = None
) -> list[Round]:
    """Return the rounds of fits after those to warm up. Fits wait for their next batch afterwards.

    Args:
        fits: The fits.
        rounds: How many are timed at most.
        seconds: After which no further round begins.
        warm_up: Rounds before the first.
        check: Called after these.
    """
    for fit in fits:
        fit.step()  # set-up, until it asks for its first batch
    timed_rounds(fits, warm_up)
    if check is not None:
        check()
    gc.collect()
    gc.disable()  # a collection would hit one of them
    table = timed_rounds(fits, rounds, seconds=seconds)
    gc.enable()
    return table


def largest_difference(first: nn.Module, second: nn.Module) -> float:
    """Return the largest difference of a parameter, relative to the largest number of the first."""
    theirs, ours = dict(first.named_parameters()), dict(second.named_parameters())
    off = [0.0]
    for name, parameter in theirs.items():
        difference = (parameter - ours[name]).detach().abs().max()
        off.append(float(difference / parameter.detach().abs().max()))
    return max(off)


# ---------------------------------------------------------------------- figures


class Turns:
    """Rounds of all ranks, by fit. The first fit is what others are compared with, the second is the same again.

    Args:
        tables: Rounds of each rank.

    Attributes:
        wall_ms: Milliseconds of each fit by round: a step takes as long as its slowest rank.
        cpu_ms: Median processor time of each fit: the mean over ranks. What a busy machine adds to the wall time is not in it.
    """

    def __init__(self, tables: Sequence[Sequence[Round]]) -> None:
        rounds = list(zip(*tables, strict=True))
        fits = range(len(rounds[0][0].wall_ms))
        self.wall_ms = [[max(r.wall_ms[i] for r in ranks) for ranks in rounds] for i in fits]
        of_ranks = [[statistics.mean(r.cpu_ms[i] for r in ranks) for ranks in rounds] for i in fits]
        self.cpu_ms = [statistics.median(values) for values in of_ranks]
        self.number = len(rounds)

    def median_ms(self, fit: int) -> float:
        """Return the median of one fit."""
        return statistics.median(self.wall_ms[fit])

    def differences(self, fit: int, other: int = 0) -> tuple[float, float, float]:
        """Return the median of the paired differences of two fits, between the ends of its interval."""
        pairs = zip(self.wall_ms[other], self.wall_ms[fit], strict=True)
        return median_interval([theirs - first for first, theirs in pairs])

    def verdict(self, fit: int, limit: float) -> str:
        """Judge a fit by its differences from the first."""
        low, difference, _ = self.differences(fit)
        return judge(self.median_ms(0), low, difference, limit)


def judge(plain_ms: float, low_ms: float, difference_ms: float, limit: float) -> str:
    """Judge by the paired differences; what the interval does not decide is left open."""
    if 1 + difference_ms / plain_ms <= limit:
        return "met"
    return "missed" if 1 + low_ms / plain_ms > limit else "open"


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median between the order statistics that hold it with 95% probability."""
    ordered, n = sorted(values), len(values)
    reach = 0.98 * math.sqrt(n)
    low, high = max(0, math.floor(n / 2 - reach)), min(n - 1, math.ceil(n / 2 + reach))
    return ordered[low], statistics.median(ordered), ordered[high]


def calm(values: Sequence[float]) -> float:
    """Return the fastest tenth."""
    return sorted(values)[len(values) // 10]


def listed(names: Mapping[str, float]) -> str:
    """Return numbers of collectives as text."""
    return ", ".join(f"{count:g} {name.strip('_')}" for name, count in sorted(names.items()))
