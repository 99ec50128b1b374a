"""Random losses: formulas of operators that keep, remove, mix, select and count rows. Most are no mean over rows, and some are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTH = 4
Step = Callable[..., Any]


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


def _branch(a: Tensor) -> Tensor:
    return a if a.mean() > 0 else -a


def _weighted(a: Tensor, y: Tensor) -> Tensor:
    mask = (y > 1).to(a.dtype)
    return (a.sum(1) * mask).sum() / mask.sum().clamp(min=1)


def _by_hand(a: Tensor) -> Tensor:
    total = torch.zeros((), dtype=a.dtype)
    for row in a:
        total = total + row.square().sum()
    return total / len(a)


def _cut(a: Tensor) -> Tensor:
    return a.sum() / max(a.shape[0], 8)


def _classes(a: Tensor, y: Tensor) -> Tensor:
    return torch.zeros(WIDTH, a.shape[1], dtype=a.dtype).index_add(0, y, a)


def _stable(a: Tensor) -> Tensor:
    return a.detach().mean(0)


# steps that keep the rows of (n, WIDTH)
KEEP: list[Step] = [
    lambda a, b, y, w: a.relu(),
    lambda a, b, y, w: a.tanh().exp(),
    lambda a, b, y, w: a.square(),
    lambda a, b, y, w: a.softmax(1),
    lambda a, b, y, w: a.log_softmax(-1),
    lambda a, b, y, w: F.normalize(a),
    lambda a, b, y, w: a * 2.5 + 0.7,
    lambda a, b, y, w: a.cumsum(1),
    lambda a, b, y, w: a.sort(1).values,
    lambda a, b, y, w: a.detach() * b,
    lambda a, b, y, w: a @ w,
    lambda a, b, y, w: F.linear(a, w, w[0]),
    lambda a, b, y, w: a + b,
    lambda a, b, y, w: a * b,
    lambda a, b, y, w: torch.maximum(a, b),
    lambda a, b, y, w: a / (1 + b.abs()),
    lambda a, b, y, w: torch.where(a > 0, a, b),
    lambda a, b, y, w: a.masked_fill(b > 0, 0.0),
    lambda a, b, y, w: a * F.one_hot(y, WIDTH),
    lambda a, b, y, w: a - w[y],
    lambda a, b, y, w: F.layer_norm(a, (WIDTH,)),
    lambda a, b, y, w: a - a.mean(1, keepdim=True),
    lambda a, b, y, w: a.flip(1).roll(1, 1),
    lambda a, b, y, w: a.view(-1, 2, 2).transpose(1, 2).reshape(-1, WIDTH),
    lambda a, b, y, w: torch.cat([a[:, :2], b[:, 2:]], 1),
    lambda a, b, y, w: a / a.shape[0],
    lambda a, b, y, w: a * a.shape[0],
    lambda a, b, y, w: a * torch.ones(a.shape[0], 1, dtype=a.dtype),
    lambda a, b, y, w: _in_place(a),
    lambda a, b, y, w: torch.einsum("nd,ne->nde", a, b).sum(2),
    lambda a, b, y, w: a.unsqueeze(1).expand(-1, 3, -1).mean(1),
    # mixed rows
    lambda a, b, y, w: a - a.mean(0),
    lambda a, b, y, w: a - _stable(a),
    lambda a, b, y, w: a.softmax(0),
    lambda a, b, y, w: a.flip(0),
    lambda a, b, y, w: a.roll(1, 0),
    lambda a, b, y, w: a.cumsum(0),
    lambda a, b, y, w: a.sort(0).values,
    lambda a, b, y, w: a / a.norm(),
    lambda a, b, y, w: (a @ b.T).softmax(1) @ b,
    lambda a, b, y, w: _written_part(a),
    lambda a, b, y, w: _written_view(a),
    lambda a, b, y, w: _branch(a),
    lambda a, b, y, w: F.batch_norm(a, None, None, training=True),
    lambda a, b, y, w: a * torch.arange(a.shape[0], dtype=a.dtype)[:, None],
    lambda a, b, y, w: a + _classes(a, y)[y],
    lambda a, b, y, w: a + a.mean(),
    lambda a, b, y, w: a * (y > 1).sum(),
    lambda a, b, y, w: a * a.mean().item(),
]
# steps that remove the rows
REMOVE: list[Step] = [
    lambda a, b, y, w: a.mean(),
    lambda a, b, y, w: a.mean(0),
    lambda a, b, y, w: a.sum(1).mean(),
    lambda a, b, y, w: a.square().mean((0, 1)),
    lambda a, b, y, w: F.mse_loss(a, b),
    lambda a, b, y, w: F.smooth_l1_loss(a, b.detach()),
    lambda a, b, y, w: F.cross_entropy(a, y),
    lambda a, b, y, w: F.cross_entropy(a, y, label_smoothing=0.2),
    lambda a, b, y, w: F.cross_entropy(a, b.softmax(1)),
    lambda a, b, y, w: F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean"),
    lambda a, b, y, w: a.sum() / a.shape[0],
    lambda a, b, y, w: a.sum(0) / len(a),
    lambda a, b, y, w: a.sum() / a.numel(),
    lambda a, b, y, w: a.T @ b / a.shape[0],
    lambda a, b, y, w: a.view(-1).mean(),
    lambda a, b, y, w: a.repeat(2, 1).mean(0),
    lambda a, b, y, w: torch.cat([a, b]).mean(0),
    lambda a, b, y, w: torch.stack([a.mean(0), b.mean(0)]),
    lambda a, b, y, w: a[torch.arange(a.shape[0]), y].mean(),
    lambda a, b, y, w: a.gather(1, y[:, None]).mean(),
    lambda a, b, y, w: torch.dot(a[:, 0], b[:, 1]) / a.size(0),
    # other divisors and statistics
    lambda a, b, y, w: a.sum(),
    lambda a, b, y, w: a.sum(0),
    lambda a, b, y, w: a.T @ b,
    lambda a, b, y, w: F.mse_loss(a, b, reduction="sum"),
    lambda a, b, y, w: a.norm(),
    lambda a, b, y, w: a.norm(dim=0),
    lambda a, b, y, w: a.logsumexp(0),
    lambda a, b, y, w: a.var(0, unbiased=False),
    lambda a, b, y, w: a.std(),
    lambda a, b, y, w: a.amax(0),
    lambda a, b, y, w: a.sum() / a.shape[0] ** 2,
    lambda a, b, y, w: a.sum() / (a.shape[0] - 1),
    lambda a, b, y, w: a.sum() / (a.shape[0] + 1e-3),
    lambda a, b, y, w: a.sum() / a.shape[0] ** 0.5,
    lambda a, b, y, w: a.mean() * a.shape[0],
    lambda a, b, y, w: a[y > 1].sum() / max((y > 1).sum().item(), 1),
    lambda a, b, y, w: a[(y > 0)].mean() if (y > 0).any() else a.sum() * 0,
    lambda a, b, y, w: F.cross_entropy(a, y, weight=w[0].abs().detach() + 0.1),
    lambda a, b, y, w: F.cross_entropy(a, y, ignore_index=0, reduction="sum") / (y != 0).sum().clamp(min=1),
    lambda a, b, y, w: _weighted(a, y),
    lambda a, b, y, w: _by_hand(a),
    lambda a, b, y, w: _cut(a),
    lambda a, b, y, w: _classes(a, y),
    lambda a, b, y, w: a[0],
    lambda a, b, y, w: a[: len(a) // 2].mean(0),
    lambda a, b, y, w: F.cross_entropy(a @ b.T, torch.arange(a.shape[0])),
    lambda a, b, y, w: (a @ b.T).mean(),
    lambda a, b, y, w: torch.cdist(a, b.detach() + 1).mean(),
    lambda a, b, y, w: a.unsqueeze(1).expand(a.shape[0], a.shape[0], WIDTH).sum() / a.shape[0],
    lambda a, b, y, w: a.unsqueeze(1).expand(a.shape[0], a.shape[0], WIDTH).mean(),
    lambda a, b, y, w: a.mean(0).expand_as(b).sum(),
    lambda a, b, y, w: a.mean(0).expand_as(b).mean(0),
    lambda a, b, y, w: (a.mean(0) * b).mean(0),
    lambda a, b, y, w: a.sum() / torch.ones_like(a).sum(),
    lambda a, b, y, w: a.sum() / torch.tensor(a.shape[0]),
    lambda a, b, y, w: a.sum() / float(a.shape[0]),
    lambda a, b, y, w: a.mean() * (a > 0).sum(),
    lambda a, b, y, w: a.nansum() / a.shape[0],
    lambda a, b, y, w: a.median(),
    lambda a, b, y, w: torch.stack([row.sum() for row in a]).mean(),
]
# steps from what is left to a scalar
FINISH: list[Step] = [
    lambda m, other: m.sum(),
    lambda m, other: m.mean(),
    lambda m, other: (m * 3 - 1).sum(),
    lambda m, other: m.sum() + other.sum(),
    lambda m, other: m.mean() - 2 * other.mean(),
    lambda m, other: torch.stack([m.sum(), other.sum()]).mean(),
    lambda m, other: m.sum() + 0.5,
    lambda m, other: m.square().sum(),
    lambda m, other: m.sum().exp().clamp(max=20),
    lambda m, other: m.abs().mean(),
    lambda m, other: m.mean() * other.mean(),
    lambda m, other: m.mean() / (1 + other.mean().abs()),
    lambda m, other: m.relu().sum(),
    lambda m, other: torch.maximum(m.sum(), other.sum()),
    lambda m, other: min(m.sum(), other.sum()),
    lambda m, other: m.detach().sum() + other.sum(),
    lambda m, other: m.sum() / other.detach().sum().clamp(min=1),
]


class RandomLoss(torch.nn.Module):
    """A random formula with a parameter.

    Args:
        seed: Its number.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        # every second formula consists of what is likely to be right
        few = draw.random() < 0.5
        keep = KEEP[:31] if few else KEEP
        remove = REMOVE[:21] if few else REMOVE
        finish = FINISH[:7] if few and draw.random() < 0.8 else FINISH
        self.seed = seed
        self.keeps = [draw.choice(keep) for _ in range(draw.randrange(4))]
        self.removes = [draw.choice(remove), draw.choice(remove)]
        self.finish = draw.choice(finish)
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))

    def forward(self, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        rows, others = a, b
        for step in self.keeps:
            rows, others = step(rows, others, y, self.weight), rows
        first, second = (step(rows, others, y, self.weight) for step in self.removes)
        value: Tensor = self.finish(first, second)
        return value
