"""The price of `randomness="global"` and `"by_row"`: a step of three models on one rank of W, beside the same step of plain torch.

One process draws and tracks what rank W - 1 of W does, without the handshakes of a step (`strategy_overhead` measures handshakes).
Contestants take turns, one step each, forward and backward. A/A is plain torch against itself. A rank with one row runs each call of
forward twice, because one row does not show which dimension contains the rows.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.interleave import time_in_turns
from benchmarks.ranks import run_ranks
from benchmarks.records import Row
from lightning_ddp_losses.randomness.one_row import OneRowDraws
from lightning_ddp_losses.randomness.places import Mark, RowPlace, Rows
from lightning_ddp_losses.randomness.row_blocks import draw_own_blocks
from lightning_ddp_losses.randomness.row_draws import RowDraws
from lightning_ddp_losses.randomness.whole_draws import draw_own_part

__all__ = ["main"]

WORLDS = (1, 2, 8)
MODES = {"global": draw_own_part, "by_row": draw_own_blocks}
LIMIT = 1.15  # of a step with `by_row` on 8 ranks
Step = Callable[[], object]


class Block(nn.Module):
    """A block of a vision transformer, with dropout and DropPath as timm writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        inner = 4 * width
        self.mlp = nn.Sequential(
            nn.Linear(width, inner), nn.GELU(), nn.Dropout(0.1), nn.Linear(inner, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the MLP."""
        b, t, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).reshape(b, t, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, width)
        x = x + functional.dropout(self.out(y), 0.1)
        path = x.new_empty((b, 1, 1)).bernoulli_(0.9)
        return x + self.mlp(self.norms[1](x)) * path


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "ViT block": Block,
    "encoder layer": lambda width: nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True),
    "LSTM, 2 layers": lambda width: nn.LSTM(width, width, 2, dropout=0.3, batch_first=True),
}
SIZES = ((16, 64, 256), (1, 64, 256))  # rows, tokens, width
LARGE = (32, 128, 384)  # of the ViT block only


def steps_of(name: str, size: tuple[int, int, int]) -> list[Step]:
    """Return plain torch twice, and each mode on each number of ranks."""
    torch.manual_seed(0)
    rows, tokens, width = size
    model, x = MODELS[name](width), torch.randn(rows, tokens, width)

    def plain() -> None:
        result = model(x)
        output = result[0] if isinstance(result, tuple) else result
        output.square().mean().backward()

    def drawn(world_size: int, mode: str) -> None:
        kind = OneRowDraws if rows == 1 else RowDraws
        draws = kind(Rows(rows, rows * (world_size - 1), rows * world_size), None, MODES[mode])
        draws.mark(x, Mark(RowPlace(0)))
        with draws.active():
            plain()
        if draws.refusals:
            raise RuntimeError(draws.refusals[0])

    return [plain, plain, *(partial(drawn, world_size, mode) for mode in MODES for world_size in WORLDS)]


def timed(name: str, size: tuple[int, int, int], rounds: int, seconds: float) -> list[list[float]]:
    """Return milliseconds of each step for each round."""
    return time_in_turns(steps_of(name, size), rounds, seconds, warm_up=1)


def row_of(name: str, size: tuple[int, int, int], options: Any) -> Row:
    """Return a row for one model and size."""
    (table,) = run_ranks(timed, name, size, options.rounds, options.seconds, world_size=1)
    plain, again, *others = zip(*table, strict=True)
    ratios = [statistics.median(o / p for o, p in zip(other, plain, strict=True)) for other in others]
    names = [f"{mode} W={world_size}" for mode in MODES for world_size in WORLDS]
    verdict = "met" if ratios[-1] <= LIMIT else "missed"
    return {
        "table": "a step of one rank, random numbers of one process, beside plain torch, float32, one thread",
        "module": name,
        "size": f"{size[0]} rows, {size[1]} tokens of {size[2]}",
        "plain_ms": statistics.median(plain),
        "A/A": statistics.median(a / p for a, p in zip(again, plain, strict=True)),
        **dict(zip(names, ratios, strict=True)),
        "rounds": len(table),
        "verdict": verdict,
    }


def main(arguments: list[str]) -> list[Row]:
    """Measure each model at each size."""
    parser = argparse.ArgumentParser("randomness", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=30.0, help="of timed rounds per row at most")
    options: Any = parser.parse_args(arguments)
    cases = [(name, size) for size in SIZES for name in MODELS]
    return [row_of(name, size, options) for name, size in [*cases, ("ViT block", LARGE)]]
