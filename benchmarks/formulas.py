"""Formulas over all rows: `GlobalBatchLoss` with rows that stay on their rank (`mode="rows"`) beside a gather (`"replicated"`).

Value and gradient are compared first. Counted: collectives, and the bytes that a rank hands to them, on 2 and on 8 ranks; floating-point
operations of matrix products, and the numbers that operators write, as shares of the gather's. On W ranks a formula of products takes at
least 1 / W of their time. Timed: forward and backward on 2 ranks, in turns in the same processes, the gather twice (A/A); medians, the
least of all rounds and the least processor time, which other work on the machine disturbs less. Last the price of an operator: what one
more costs on rows of all ranks, forward and backward, divided by what it costs on a plain tensor.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.interleave import time_in_turns
from benchmarks.ranks import run_ranks
from benchmarks.records import Row
from benchmarks.self_supervised import plain_barlow_twins, plain_vicreg
from lightning_ddp_losses import GlobalBatchLoss, global_rows
from lightning_ddp_losses.testing import CountCollectives

__all__ = ["main"]

FEATURES, CLASSES, SIDE = 256, 5, 16
EQUAL = 1e-3  # relative, float32
MODES = ("replicated", "rows")
OPERATORS = 60  # of the price of one


def dice(logits: Tensor, target: Tensor) -> Tensor:
    """A Dice over the pixels of all images."""
    chances = logits.softmax(1)
    wanted = functional.one_hot(target, CLASSES).permute(0, 3, 1, 2).to(logits.dtype)
    overlap, size = (chances * wanted).sum((0, 2, 3)), (chances + wanted).sum((0, 2, 3))
    return 1 - ((2 * overlap + 1) / (size + 1)).mean()


def contrast(first: Tensor, second: Tensor) -> Tensor:
    """InfoNCE, one way."""
    logits = functional.normalize(first) @ functional.normalize(second).T / 0.1
    return functional.cross_entropy(logits, torch.arange(len(logits)))


def images(rows: int) -> list[Tensor]:
    """Logits and classes."""
    return [torch.randn(rows, CLASSES, SIDE, SIDE), torch.randint(CLASSES, (rows, SIDE, SIDE))]


def views(rows: int) -> list[Tensor]:
    """Two views."""
    return [torch.randn(rows, FEATURES), torch.randn(rows, FEATURES)]


FORMULAS: dict[str, tuple[Callable[..., Tensor], Callable[[int], list[Tensor]]]] = {
    "Dice": (dice, images),
    "VICReg": (plain_vicreg, views),
    "Barlow Twins": (plain_barlow_twins, views),
    "InfoNCE": (contrast, views),
}


class Work(TorchDispatchMode):
    """Counts what operators compute.

    Attributes:
        products: Floating-point operations of matrix products.
        numbers: Numbers that operators write.
    """

    products = numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.mm:
            rows, inner = args[0].shape
            self.products += 2 * rows * inner * args[1].shape[1]
        if func.namespace != "c10d" and not func.is_view:
            self.numbers += sum(each.numel() for each in tree_leaves(result) if isinstance(each, Tensor))
        return result


class Contestant:
    """One formula on this rank's rows, in one mode."""

    def __init__(self, formula: str, mode: Any, rows: int) -> None:
        function, make = FORMULAS[formula]
        torch.manual_seed(dist.get_rank())
        self.arguments = [each.requires_grad_(each.is_floating_point()) for each in make(rows)]
        self.loss = GlobalBatchLoss(function, mode=mode)

    def step(self) -> Tensor:
        """Forward and backward."""
        for each in self.arguments:
            each.grad = None
        value: Tensor = self.loss(*self.arguments)
        value.backward()
        return value.detach()

    def grads(self) -> Tensor:
        """The gradients of the last step."""
        return torch.cat([each.grad.flatten() for each in self.arguments if each.grad is not None])


def counted(formula: str, rows: int) -> Row:
    """Collectives and bytes of a step in both modes, and how far value and gradient are apart."""
    found, counts, work = [], [], []
    for mode in MODES:
        contestant = Contestant(formula, mode, rows)
        contestant.step()  # the second call knows how much rides in a handshake, and the third one what the second one has listed
        contestant.step()
        with CountCollectives() as counter:
            value = contestant.step()
        found.append((value, contestant.grads()))
        counts.append((len(counter.names), counter.num_bytes))
        with Work() as counted_work:
            contestant.step()
        work.append(counted_work)
    (truth, truth_grads), (value, grads) = found
    off = max(float((value - truth).abs() / truth.abs()), float((grads - truth_grads).norm() / truth_grads.norm()))
    theirs, ours = work
    shares = {
        "share_of_products": ours.products / theirs.products if theirs.products else None,
        "share_of_numbers": ours.numbers / theirs.numbers,
    }
    return {"off": off, "counts": counts, "shares": shares}


def timed_step(contestant: Contestant, costs: list[float]) -> None:
    """A step, whose processor time is appended."""
    before = time.process_time()
    contestant.step()
    costs.append(time.process_time() - before)


def on_two_ranks(
    sizes: list[int], rounds: int, seconds: float
) -> tuple[dict[tuple[str, int], Any], tuple[float, float]]:
    """Counts and milliseconds of (gather, gather again, rows) for each round, by formula and rows; the price of an operator."""
    found = {}
    for formula in FORMULAS:
        for global_batch in sizes:
            rows = global_batch // dist.get_world_size()
            counts = counted(formula, rows)
            contestants = [Contestant(formula, mode, rows) for mode in ("replicated", "replicated", "rows")]
            used: list[list[float]] = [[] for _ in contestants]
            steps = [partial(timed_step, each, costs) for each, costs in zip(contestants, used, strict=True)]
            times = time_in_turns(steps, rounds, seconds, warm_up=2, least=4)
            theirs, ours = min(*used[0], *used[1]), min(used[2])
            found[formula, global_batch] = {**counts, "processor_ms": (theirs * 1e3, ours * 1e3)}, times
    return found, prices(10 * rounds)


def on_eight_ranks(rows: int) -> dict[str, Row]:
    """Counts by formula."""
    return {formula: counted(formula, rows) for formula in FORMULAS}


def row_of_times(formula: str, global_batch: int, answers: list[tuple[Row, list[list[float]]]]) -> Row:
    """Counts and times of one formula on 2 ranks."""
    both = list(zip(*(times for _, times in answers), strict=True))
    theirs, again, ours = ([max(rank[i] for rank in ranks) for ranks in both] for i in range(3))
    their_work, our_work = (max(counts["processor_ms"][i] for counts, _ in answers) for i in range(2))
    return {
        "table": "Forward and backward on 2 ranks, slowest rank",
        "loss": formula,
        "global_batch": global_batch,
        "gather_ms": statistics.median(theirs),
        "rows_ms": statistics.median(ours),
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        "A/A": statistics.median(a / b for a, b in zip(again, theirs, strict=True)),
        "least_gather_ms": min(*theirs, *again),
        "least_rows_ms": min(ours),
        "ratio_of_least": min(ours) / min(*theirs, *again),
        "processor_gather_ms": their_work,
        "processor_rows_ms": our_work,
        "ratio_of_processor": our_work / their_work,
        **answers[0][0]["shares"],
        **_counts_of(answers[0][0]["counts"]),
        **_equality_of([counts["off"] for counts, _ in answers]),
    }


def row_of_eight(formula: str, rows: int, answers: list[Row]) -> Row:
    """Counts of one formula on 8 ranks."""
    return {
        "table": "Forward and backward on 8 ranks, counted",
        "loss": formula,
        "global_batch": 8 * rows,
        **_counts_of(answers[0]["counts"]),
        **_equality_of([answer["off"] for answer in answers]),
    }


def _counts_of(counts: list[tuple[int, int]]) -> Row:
    (their_calls, their_bytes), (calls, num_bytes) = counts
    return {
        "gather_collectives": their_calls,
        "collectives": calls,
        "gather_bytes": their_bytes,
        "bytes": num_bytes,
    }


def _equality_of(differences: list[float]) -> Row:
    return {"difference": max(differences), "ok": max(differences) <= EQUAL}


def repeated(operators: int, rows: Tensor) -> Tensor:
    """So many operators, then a sum."""
    for _ in range(operators // 2):
        rows = (rows * 0.9).tanh()
    return rows.sum()


def prices(rounds: int) -> tuple[float, float]:
    """Microseconds of one operator, forward and backward: of a plain tensor, and of rows of all ranks."""
    rows = torch.randn(8, 4, requires_grad=True)
    costs: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for operators in (0, OPERATORS):
            for kind in ("plain", "rows"):
                dist.barrier()
                started = time.perf_counter()
                value = repeated(operators, rows)
                if kind == "rows":
                    started = time.perf_counter()
                    value = global_rows(repeated, operators, rows)
                value.backward()
                costs.setdefault((kind, operators), []).append(time.perf_counter() - started)
    medians = {key: statistics.median(found) for key, found in costs.items()}
    plain = (medians["plain", OPERATORS] - medians["plain", 0]) / OPERATORS
    ours = (medians["rows", OPERATORS] - medians["rows", 0]) / OPERATORS
    return plain * 1e6, ours * 1e6


def row_of_price(plain: float, ours: float) -> Row:
    """What one more operator costs."""
    return {
        "table": "One operator, forward and backward, on few rows",
        "loss": "times 0.9, tanh",
        "plain_us": plain,
        "rows_us": ours,
        "ratio": ours / plain,
    }


def main(arguments: list[str]) -> list[Row]:
    """Run the benchmark."""
    parser = argparse.ArgumentParser("python -m benchmarks formulas", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each formula and number of rows")
    parser.add_argument("--global-batches", type=int, nargs="+", default=[128, 2048, 8192])
    options = parser.parse_args(arguments)
    sizes = options.global_batches
    limit = 200 + 3 * options.seconds * len(FORMULAS) * len(sizes)
    two = run_ranks(on_two_ranks, sizes, options.rounds, options.seconds, seconds=limit)
    rows = [row_of_times(name, size, [found[name, size] for found, _ in two]) for name in FORMULAS for size in sizes]
    eight = run_ranks(on_eight_ranks, 16, world_size=8, seconds=600)
    rows += [row_of_eight(name, 16, [found[name] for found in eight]) for name in FORMULAS]
    rows.append(row_of_price(*min((price for _, price in two), key=lambda found: found[1] / found[0])))
    return rows
