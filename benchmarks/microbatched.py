"""Memory and time of an encoder in pieces (`microbatched`) beside the whole batch, forward and backward, one process.

Three encoders whose activations outweigh their embeddings, as in use; 32 pieces (limits: 1/12 of the memory, 1.45x the time), and 128
for the law. Gradients are compared first; contestants then take turns, one step each; A/A is the whole batch against itself.

Memory, two ways, in fresh processes without any gradient at the start: *held*, the most bytes of tensors alive at once (torch's allocator
reports each to its profiler); *resident*, the highest resident set above what was there before, where freed blocks of 128 KiB or more go
back to the system at once (else the C heap keeps 20 to 30 MiB of them, in either contestant, and which is chance). The batch itself and
the parameters are there before. Nothing is subtracted: the embeddings, their gradient and the loss's few numbers are in both; in pieces,
the encoder's complete gradient counts too, as each parameter's is added up before it is passed on.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from benchmarks.memory import MIB, peak_of, return_freed_blocks
from benchmarks.ranks import run_ranks
from benchmarks.records import Row
from lightning_ddp_losses import microbatched

__all__ = ["main"]

DIM, EQUAL = 128, 1e-4  # relative, float32
TIME_LIMIT, MEMORY_LIMIT, JUDGED = 1.45, 1 / 12, 32


class Convolutions(nn.Sequential):
    """Three convolutions with group norm, for one-channel images of 28 x 28."""

    def __init__(self) -> None:
        blocks: list[nn.Module] = []
        for inner, outer, stride in ((1, 16, 1), (16, 32, 2), (32, 64, 2)):
            blocks += [nn.Conv2d(inner, outer, 3, stride=stride, padding=1), nn.GroupNorm(8, outer), nn.GELU()]
        super().__init__(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, DIM))


class Layers(nn.Sequential):
    """Eight linear layers of 512 with layer norm."""

    def __init__(self) -> None:
        layers = [nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU()) for _ in range(8)]
        super().__init__(*layers, nn.Linear(512, DIM))


class Attention(nn.Module):
    """Two transformer layers of width 128 over 32 tokens, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 4, 512, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean over tokens."""
        out: Tensor = self.layers(tokens).mean(1)
        return out


ENCODERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "8 linear layers, 8192 rows of 512": (Layers, (8192, 512)),
    "3 convolutions, 1024 images of 28 x 28": (Convolutions, (1024, 1, 28, 28)),
    "2 transformer layers, 512 rows of 32 tokens": (Attention, (512, 32, DIM)),
}


class Contestant:
    """Steps of an encoder: the whole batch (0 pieces), or in pieces."""

    def __init__(self, name: str, pieces: int, share: int = 1) -> None:
        torch.manual_seed(0)
        make, shape = ENCODERS[name]
        self.encoder = make()
        rows = shape[0] // share
        self.x = torch.randn(rows, *shape[1:])
        self.run = microbatched(self.encoder, max(rows // pieces, 1)) if pieces else self.encoder

    def step(self) -> None:
        """Forward and backward."""
        self.encoder.zero_grad(set_to_none=True)
        functional.normalize(self.run(self.x)).sum(0).square().sum().backward()

    def gradient(self) -> Tensor:
        """Of all parameters, without dropout: the whole batch draws other masks than its pieces."""
        self.encoder.eval()
        self.step()
        self.encoder.train()
        return torch.cat([p.grad.reshape(-1) for p in self.encoder.parameters() if p.grad is not None])


def timed(name: str, pieces: int, rounds: int, seconds: float) -> tuple[float, list[list[float]]]:
    """Difference of gradients; milliseconds of (whole, whole again, pieces) for each round."""
    whole, ours = Contestant(name, 0), Contestant(name, pieces)
    truth = whole.gradient()
    off = float((ours.gradient() - truth).norm() / truth.norm())
    contestants, table, started = [whole, whole, ours], [], time.perf_counter()
    while len(table) < rounds and time.perf_counter() - started < seconds:
        row = [0.0] * 3
        for place in range(3):
            index = (len(table) + place) % 3
            before = time.perf_counter()
            contestants[index].step()
            row[index] = (time.perf_counter() - before) * 1e3
        table.append(row)
    return off, table


def held(name: str, pieces: int) -> int:
    """The most bytes of tensors alive at once in one step, beyond what was there before."""
    contestant = Contestant(name, pieces)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        contestant.step()
    alive = peak = 0
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def resident(name: str, pieces: int) -> int:
    """Bytes that the resident set grows by in one step."""
    return_freed_blocks()
    Contestant(name, pieces, share=8).step()  # libraries load, pools fill
    return peak_of(Contestant(name, pieces).step)


def rows_of(name: str, options: Any) -> list[Row]:
    """One encoder: a row for each number of pieces."""
    whole = [run_ranks(measure, name, 0, world_size=1)[0] for measure in (held, resident)]
    return [row_of(name, pieces, whole, options) for pieces in options.pieces]


def row_of(name: str, pieces: int, whole_bytes: list[int], options: Any) -> Row:
    """One encoder in so many pieces; held and resident bytes of the whole batch are known."""
    ((off, table),) = run_ranks(timed, name, pieces, options.rounds, options.seconds, world_size=1)
    whole, again, ours = zip(*table, strict=True)
    our_bytes = [run_ranks(measure, name, pieces, world_size=1)[0] for measure in (held, resident)]
    ratios = [o / w for o, w in zip(our_bytes, whole_bytes, strict=True)]
    ratio = statistics.median(o / w for o, w in zip(ours, whole, strict=True))
    met = ratio <= TIME_LIMIT and max(ratios) <= MEMORY_LIMIT
    return {
        "table": "microbatched beside the whole batch, forward and backward, one process, float32",
        "encoder": name,
        "pieces": pieces,
        "whole_ms": statistics.median(whole),
        "pieces_ms": statistics.median(ours),
        "ratio": ratio,
        "A/A": statistics.median(a / w for a, w in zip(again, whole, strict=True)),
        "whole_held_MiB": whole_bytes[0] / MIB,
        "pieces_held_MiB": our_bytes[0] / MIB,
        "held_1_in": 1 / ratios[0],
        "whole_resident_MiB": whole_bytes[1] / MIB,
        "pieces_resident_MiB": our_bytes[1] / MIB,
        "resident_1_in": 1 / ratios[1],
        "gradients_differ_by": off,
        "rounds": len(table),
        "verdict": "WRONG" if off > EQUAL else "-" if pieces != JUDGED else "met" if met else "missed",
    }


def main(arguments: list[str]) -> list[Row]:
    """One row per encoder and number of pieces."""
    parser = argparse.ArgumentParser("microbatched", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0, help="of timed rounds per row at most")
    parser.add_argument("--pieces", type=int, nargs="*", default=[JUDGED, 128])
    options: Any = parser.parse_args(arguments)
    return [row for name in ENCODERS for row in rows_of(name, options)]
