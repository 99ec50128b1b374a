"""`global_randomness`: programs of draws and layouts, whose rows draw on ranks what they draw in one process. Some cannot, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses import global_randomness
from lightning_ddp_losses.randomness import shared_draws
from tests.fuzz.data import Rows as DrawnRows
from tests.fuzz.data import RowsCase, rank_rows
from tests.fuzz.engine import Domain, Found, Place

WIDTH = 4
Step = Callable[[Tensor, nn.ModuleDict], Tensor]


def dropped_heads(x: Tensor, layers: nn.ModuleDict) -> Tensor:
    rows, length, _ = x.shape
    heads = x.view(rows, length, 2, WIDTH // 2).permute(0, 2, 1, 3)
    return F.dropout(heads.contiguous(), 0.4).transpose(1, 2).flatten(2)


def dropped_views(x: Tensor, layers: nn.ModuleDict) -> Tensor:
    first, second = F.dropout(torch.cat([x, 2 * x]), 0.4).chunk(2)
    return first + second


def dropped_path(x: Tensor, layers: nn.ModuleDict) -> Tensor:
    return x + x * x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.6)


def mixed_up(x: Tensor, layers: nn.ModuleDict) -> Tensor:
    order = torch.randperm(x.shape[0])
    with shared_draws():
        coefficient = torch.rand((), dtype=x.dtype)
    return coefficient * x + (1 - coefficient) * x[order]


def again_in_backward(x: Tensor, layers: nn.ModuleDict) -> Tensor:
    return checkpoint(layers["encoder"], x, use_reentrant=False)


def shuffled_within_rows(x: Tensor, layers: nn.ModuleDict) -> Tensor:
    return x.gather(1, torch.rand_like(x).argsort(1))


STEPS: dict[str, Step] = {
    # layouts and layers
    "linear": lambda x, layers: layers["linear"](x),
    "norm": lambda x, layers: F.layer_norm(x, x.shape[-1:]),
    "softmax": lambda x, layers: x.softmax(1),
    "time first": lambda x, layers: x.transpose(0, 1).contiguous().transpose(0, 1),
    "features first": lambda x, layers: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "attention": lambda x, layers: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4),
    "encoder": lambda x, layers: layers["encoder"](x),
    "encoder, time first": lambda x, layers: layers["encoder, time first"](x.transpose(0, 1)).transpose(0, 1),
    "lstm": lambda x, layers: layers["lstm"](x)[0],
    "checkpoint": again_in_backward,
    # draws
    "dropout": lambda x, layers: F.dropout(x, 0.4),
    "dropout of time first": lambda x, layers: F.dropout(x.transpose(0, 1), 0.4).transpose(0, 1),
    "dropout of all tokens": lambda x, layers: F.dropout(x.flatten(0, 1), 0.4).unflatten(0, x.shape[:2]),
    "dropout of channels": lambda x, layers: F.dropout2d(x[..., None], 0.4)[..., 0],
    "dropout of heads": dropped_heads,
    "dropout of views": dropped_views,
    "drop path": dropped_path,
    "noise like": lambda x, layers: x + torch.randn_like(x),
    "noise of sizes": lambda x, layers: x + torch.randn(x.shape[0], 1, WIDTH, dtype=x.dtype),
    "noise in place": lambda x, layers: x + x.new_empty(x.shape).exponential_(),
    "bernoulli": lambda x, layers: x + torch.bernoulli(x.detach().sigmoid()),
    "gumbel": lambda x, layers: F.gumbel_softmax(x),
    "order within rows": shuffled_within_rows,
    # rows of other ranks
    "mixup": mixed_up,
    "partners": lambda x, layers: x + x[torch.randint(0, x.shape[0], (x.shape[0],))],
    "order of draws": lambda x, layers: x.index_select(0, torch.rand(x.shape[0]).argsort()),
    # refused on several ranks
    "by len": lambda x, layers: x + torch.rand(len(x), 1, 1),
    "single number": lambda x, layers: x * torch.rand(()),
    "poisson": lambda x, layers: x + torch.poisson(x.detach().exp().clamp_max(9.0)),
    "mean of noise": lambda x, layers: x + torch.randn_like(x).mean(),
    "computed order": lambda x, layers: x[torch.randperm(x.shape[0]).argsort()],
}


@dataclass(frozen=True)
class Case(RowsCase):
    """A program.

    Attributes:
        length: Tokens of a row.
        steps: Names of `STEPS`, one after the other.
    """

    length: int
    steps: tuple[str, ...]
    dtype: str = "float64"


@st.composite
def cases(draw: Any) -> Case:
    # torch draws no number below 0
    fewest = draw(st.sampled_from([0, 1]))
    ranks = draw(rank_rows(4).filter(lambda rows: min(rows) >= fewest))
    names = sorted(STEPS.keys() - {"partners"}) if fewest == 0 else sorted(STEPS)
    return Case(
        rows=DrawnRows(ranks=ranks, dim=WIDTH, classes=2, seed=draw(st.integers(0, 10_000))),
        length=draw(st.integers(2, 4)),
        steps=tuple(draw(st.lists(st.sampled_from(names), min_size=1, max_size=5))),
    )


def build(seed: int) -> nn.ModuleDict:
    torch.manual_seed(seed)
    layers = {
        "linear": nn.Linear(WIDTH, WIDTH),
        "encoder": nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.3, batch_first=True),
        "encoder, time first": nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.3),
        "lstm": nn.LSTM(WIDTH, WIDTH, 2, dropout=0.4, batch_first=True),
    }
    return nn.ModuleDict(layers).double()


def run(case: Case, layers: nn.ModuleDict, x: Tensor) -> Tensor:
    y = x
    for name in case.steps:
        y = STEPS[name](y, layers)
    (y.sin() + y.square()).sum().backward()
    return y.detach()


def play(case: Case, place: Place) -> Found:
    layers = build(case.rows.seed)
    views = place.data(views=case.length)
    x = torch.stack([views[f"view {number}"] for number in range(case.length)], 1)
    torch.manual_seed(case.rows.seed + 1)
    if place.alone:
        x = x.requires_grad_()
        y = run(case, layers, x)
    else:
        x = place.own(x).contiguous().requires_grad_()
        with global_randomness(rows=x):
            y = run(case, layers, x)
    found = {"rank y": place.parts(y), "rank x": place.parts(torch.zeros_like(x) if x.grad is None else x.grad)}
    for name, parameter in layers.named_parameters():
        found[f"sum {name}"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return found


DOMAIN = Domain.of("randomness", cases(), play)
