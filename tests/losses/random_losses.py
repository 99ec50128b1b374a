"""Random losses: formulas of operators that keep, remove, mix, select and count rows. Most are no mean over rows, and some are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTH = 4
Step = Callable[[], Any]


def _in_place(a: Tensor) -> Tensor:
    made = a * 1.0
    made.clamp_(min=0.1)
    return made


def _written_view(a: Tensor) -> Tensor:
    made = torch.zeros_like(a)
    made[:, 0] = a.sum(1)
    return made


def _written_part(a: Tensor) -> Tensor:
    made = a * 1.0
    made[0] = a.mean(0)
    return made


def _weighted(a: Tensor, y: Tensor) -> Tensor:
    mask = (y > 1).to(a.dtype)
    return (a.sum(1) * mask).sum() / mask.sum().clamp(min=1)


def _by_hand(a: Tensor) -> Tensor:
    total = torch.zeros((), dtype=a.dtype)
    for row in a:
        total = total + row.square().sum()
    return total / len(a)


def _classes(a: Tensor, y: Tensor) -> Tensor:
    return torch.zeros(WIDTH, a.shape[1], dtype=a.dtype).index_add(0, y, a)


def keep(a: Tensor, b: Tensor, y: Tensor, w: Tensor) -> list[Step]:
    """Steps that keep the rows of (n, WIDTH)."""
    return [
        lambda: a.relu(),
        lambda: a.tanh().exp(),
        lambda: a.square(),
        lambda: a.softmax(1),
        lambda: a.log_softmax(-1),
        lambda: F.normalize(a),
        lambda: a * 2.5 + 0.7,
        lambda: a.cumsum(1),
        lambda: a.sort(1).values,
        lambda: a.detach() * b,
        lambda: a @ w,
        lambda: F.linear(a, w, w[0]),
        lambda: a + b,
        lambda: a * b,
        lambda: torch.maximum(a, b),
        lambda: a / (1 + b.abs()),
        lambda: torch.where(a > 0, a, b),
        lambda: a.masked_fill(b > 0, 0.0),
        lambda: a * F.one_hot(y, WIDTH),
        lambda: a - w[y],
        lambda: F.layer_norm(a, (WIDTH,)),
        lambda: a - a.mean(1, keepdim=True),
        lambda: a.flip(1).roll(1, 1),
        lambda: a.view(-1, 2, 2).transpose(1, 2).reshape(-1, WIDTH),
        lambda: torch.cat([a[:, :2], b[:, 2:]], 1),
        lambda: a / a.shape[0],
        lambda: a * a.shape[0],
        lambda: a * torch.ones(a.shape[0], 1, dtype=a.dtype),
        lambda: _in_place(a),
        lambda: torch.einsum("nd,ne->nde", a, b).sum(2),
        lambda: a.unsqueeze(1).expand(-1, 3, -1).mean(1),
        # mixed rows
        lambda: a - a.mean(0),
        lambda: a - a.detach().mean(0),
        lambda: a.softmax(0),
        lambda: a.flip(0),
        lambda: a.roll(1, 0),
        lambda: a.cumsum(0),
        lambda: a.sort(0).values,
        lambda: a / a.norm(),
        lambda: (a @ b.T).softmax(1) @ b,
        lambda: _written_part(a),
        lambda: _written_view(a),
        lambda: a if a.mean() > 0 else -a,
        lambda: F.batch_norm(a, None, None, training=True),
        lambda: a * torch.arange(a.shape[0], dtype=a.dtype)[:, None],
        lambda: a + _classes(a, y)[y],
        lambda: a + a.mean(),
        lambda: a * (y > 1).sum(),
        lambda: a * a.mean().item(),
    ]


def remove(a: Tensor, b: Tensor, y: Tensor, w: Tensor) -> list[Step]:
    """Steps that remove the rows."""
    return [
        lambda: a.mean(),
        lambda: a.mean(0),
        lambda: a.sum(1).mean(),
        lambda: a.square().mean((0, 1)),
        lambda: F.mse_loss(a, b),
        lambda: F.smooth_l1_loss(a, b.detach()),
        lambda: F.cross_entropy(a, y),
        lambda: F.cross_entropy(a, y, label_smoothing=0.2),
        lambda: F.cross_entropy(a, b.softmax(1)),
        lambda: F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean"),
        lambda: a.sum() / a.shape[0],
        lambda: a.sum(0) / len(a),
        lambda: a.sum() / a.numel(),
        lambda: a.T @ b / a.shape[0],
        lambda: a.view(-1).mean(),
        lambda: a.repeat(2, 1).mean(0),
        lambda: torch.cat([a, b]).mean(0),
        lambda: torch.stack([a.mean(0), b.mean(0)]),
        lambda: a[torch.arange(a.shape[0]), y].mean(),
        lambda: a.gather(1, y[:, None]).mean(),
        lambda: torch.dot(a[:, 0], b[:, 1]) / a.size(0),
        # other divisors and statistics
        lambda: a.sum(),
        lambda: a.sum(0),
        lambda: a.T @ b,
        lambda: F.mse_loss(a, b, reduction="sum"),
        lambda: a.norm(),
        lambda: a.norm(dim=0),
        lambda: a.logsumexp(0),
        lambda: a.var(0, unbiased=False),
        lambda: a.std(),
        lambda: a.amax(0),
        lambda: a.sum() / a.shape[0] ** 2,
        lambda: a.sum() / (a.shape[0] - 1),
        lambda: a.sum() / (a.shape[0] + 1e-3),
        lambda: a.sum() / a.shape[0] ** 0.5,
        lambda: a.mean() * a.shape[0],
        lambda: a[y > 1].sum() / max((y > 1).sum().item(), 1),
        lambda: a[(y > 0)].mean() if (y > 0).any() else a.sum() * 0,
        lambda: F.cross_entropy(a, y, weight=w[0].abs().detach() + 0.1),
        lambda: F.cross_entropy(a, y, ignore_index=0, reduction="sum") / (y != 0).sum().clamp(min=1),
        lambda: _weighted(a, y),
        lambda: _by_hand(a),
        lambda: a.sum() / max(a.shape[0], 8),
        lambda: _classes(a, y),
        lambda: a[0],
        lambda: a[: len(a) // 2].mean(0),
        lambda: F.cross_entropy(a @ b.T, torch.arange(a.shape[0])),
        lambda: (a @ b.T).mean(),
        lambda: torch.cdist(a, b.detach() + 1).mean(),
        lambda: a.unsqueeze(1).expand(a.shape[0], a.shape[0], WIDTH).sum() / a.shape[0],
        lambda: a.unsqueeze(1).expand(a.shape[0], a.shape[0], WIDTH).mean(),
        lambda: a.mean(0).expand_as(b).sum(),
        lambda: a.mean(0).expand_as(b).mean(0),
        lambda: (a.mean(0) * b).mean(0),
        lambda: a.sum() / torch.ones_like(a).sum(),
        lambda: a.sum() / torch.tensor(a.shape[0]),
        lambda: a.sum() / float(a.shape[0]),
        lambda: a.mean() * (a > 0).sum(),
        lambda: a.nansum() / a.shape[0],
        lambda: a.median(),
        lambda: torch.stack([row.sum() for row in a]).mean(),
    ]


def finish(m: Tensor, other: Tensor) -> list[Step]:
    """Steps from what is left to a scalar."""
    return [
        lambda: m.sum(),
        lambda: m.mean(),
        lambda: (m * 3 - 1).sum(),
        lambda: m.sum() + other.sum(),
        lambda: m.mean() - 2 * other.mean(),
        lambda: torch.stack([m.sum(), other.sum()]).mean(),
        lambda: m.sum() + 0.5,
        lambda: m.square().sum(),
        lambda: m.sum().exp().clamp(max=20),
        lambda: m.abs().mean(),
        lambda: m.mean() * other.mean(),
        lambda: m.mean() / (1 + other.mean().abs()),
        lambda: m.relu().sum(),
        lambda: torch.maximum(m.sum(), other.sum()),
        lambda: min(m.sum(), other.sum()),
        lambda: m.detach().sum() + other.sum(),
        lambda: m.sum() / other.detach().sum().clamp(min=1),
    ]


NOTHING = torch.empty(0)
KEEPS, REMOVES = (len(table(NOTHING, NOTHING, NOTHING, NOTHING)) for table in (keep, remove))
FINISHES = len(finish(NOTHING, NOTHING))


class RandomLoss(torch.nn.Module):
    """A random formula with a parameter.

    Args:
        seed: Its number.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        # every second formula consists of what is likely to be right, which comes first in each table
        few = draw.random() < 0.5
        keep, remove = (31, 21) if few else (KEEPS, REMOVES)
        finish = 7 if few and draw.random() < 0.8 else FINISHES
        self.seed = seed
        self.keeps = [draw.randrange(keep) for _ in range(draw.randrange(4))]
        self.removes = [draw.randrange(remove), draw.randrange(remove)]
        self.finish = draw.randrange(finish)
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))

    def forward(self, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        rows, others = a, b
        for number in self.keeps:
            rows, others = keep(rows, others, y, self.weight)[number](), rows
        first, second = (remove(rows, others, y, self.weight)[number]() for number in self.removes)
        value: Tensor = finish(first, second)[self.finish]()
        return value
