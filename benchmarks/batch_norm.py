"""Time of one synchronised batch norm: `SyncBatchNorm` beside a gather of the activations, and beside local statistics, W = 2.

The gather is what one writes by hand: all rows to every rank (``all_gather_with_grad``), torch's batch norm on all of them, the
own rows out again. Both give the same output, gradients and running averages, which are compared first. Forward and
backward, float32, 64 channels of 28 x 28; the contestants take turns in the same processes, one step each, and a step counts as
long as its slowest rank. A/A is the gather against itself.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.interleave import time_in_turns
from benchmarks.ranks import run_ranks
from benchmarks.records import Row
from lightning_ddp_losses import SyncBatchNorm
from lightning_ddp_losses.distributed.collectives import all_gather_with_grad
from lightning_ddp_losses.testing import CountCollectives

__all__ = ["main"]

LIMIT, EQUAL = 0.5, 1e-4
SHAPES = {(8, 64, 28, 28): LIMIT, (32, 64, 28, 28): LIMIT, (32, 512, 7, 7): None}  # and what is asked of the ratio


class Gathered(nn.BatchNorm2d):
    """Batch norm on the gathered activations."""

    def forward(self, input: Tensor) -> Tensor:
        """The rows of all ranks normalised, of which this rank keeps its own."""
        rank, rows = dist.get_rank(), len(input)
        return super().forward(all_gather_with_grad(input))[rank * rows : (rank + 1) * rows]


def layers(channels: int) -> list[nn.Module]:
    """The gather twice, ours, and the local one."""
    plugin = SyncBatchNorm()
    return [
        Gathered(channels),
        Gathered(channels),
        plugin.apply(nn.BatchNorm2d(channels)),
        nn.BatchNorm2d(channels),
    ]


def step(layer: nn.Module, leaf: Tensor, grad: Tensor) -> Tensor:
    """Forward and backward; gradients are new, as an optimizer leaves them."""
    leaf.grad = None
    layer.zero_grad(set_to_none=True)
    y: Tensor = layer(leaf)
    y.backward(grad)
    return y


def outcome(layer: nn.Module, leaf: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, gradients (of parameters: the sum over ranks) and running averages."""
    y = step(layer, leaf, grad)
    assert leaf.grad is not None
    found = [y.detach(), leaf.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]
    for share in found[2:]:
        dist.all_reduce(share)
    return [*found, *(b.clone() for b in layer.buffers() if b.is_floating_point())]


def collectives(layer: nn.Module, leaf: Tensor, grad: Tensor) -> int:
    """Of one step."""
    with CountCollectives() as count:
        step(layer, leaf, grad)
        return len(count.take())


def measure(shape: Sequence[int], rounds: int, seconds: float) -> tuple[float, list[int], list[list[float]]]:
    """Largest relative difference, collectives of each contestant, milliseconds of each by round."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    whole, grads = (torch.randn(world * shape[0], *shape[1:], generator=generator) for _ in range(2))
    leaf = (whole.chunk(world)[rank].clone() + rank).requires_grad_()
    grad = grads.chunk(world)[rank].clone()
    contestants = layers(shape[1])
    found = [outcome(layer, leaf, grad) for layer in (contestants[0], contestants[2])]
    off = max(float((a - b).norm() / a.norm()) for a, b in zip(*found, strict=True))
    counts = [collectives(layer, leaf, grad) for layer in contestants]
    steps = [partial(step, layer, leaf, grad) for layer in contestants]
    return off, counts, time_in_turns(steps, rounds, seconds, warm_up=3, least=7)


def row_of(shape: tuple[int, ...], rounds: int, seconds: float) -> Row:
    """One shape."""
    answers = run_ranks(measure, shape, rounds, seconds)
    both = list(zip(*(table for _, _, table in answers), strict=True))

    def median(i: int) -> float:
        return statistics.median(max(rank[i] for rank in ranks) for ranks in both)

    gather, again, ours, local = (median(i) for i in range(4))
    off, ratio, counts = max(a[0] for a in answers), ours / gather, answers[0][1]
    few, limit = counts[2] <= 3, SHAPES[shape]  # 2 forward, 1 backward
    verdict = "-" if limit is None else "met" if ratio <= limit else "missed"
    return {
        "table": "Forward and backward of one batch norm, 2 ranks, float32, slowest rank",
        "rows_per_rank": shape[0],
        "channels": shape[1],
        "size": f"{shape[2]} x {shape[3]}",
        "gather_ms": gather,
        "ours_ms": ours,
        "local_ms": local,
        "ratio": ratio,
        "A/A": again / gather,
        "limit": limit,
        "collectives_gather": counts[0],
        "collectives_ours": counts[2],
        "rounds": len(both),
        "differ_by": off,
        "verdict": "WRONG" if off > EQUAL or not few else verdict,
    }


def main(arguments: Sequence[str] = ()) -> list[Row]:
    """One row per shape."""
    parser = argparse.ArgumentParser("batch_norm", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=15.0, help="of timed rounds per row at most")
    options = parser.parse_args(arguments)
    return [row_of(shape, options.rounds, options.seconds) for shape in SHAPES]
