"""Random formulas over rows of all ranks, of operators with and without a rule, in place too: exact, or an error. Never something else."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_ddp_losses import global_rows
from lightning_ddp_losses.testing import RankPool
from tests.oracle import own

FORMULAS = int(os.environ.get("FORMULAS", "1000"))  # of the slow test, in all worlds together
FEW = 40  # of the other one, in each world
WORLDS = [(5, 2, 4), (1, 6), (0, 3), (1, 1)]
LENGTH = 6
Steps = dict[str, Callable[[], Tensor]]


def write(z: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    """A copy that was changed in place."""
    z = z * 1
    change(z)
    return z


def steps(a: Tensor, b: Tensor, w: Tensor) -> Steps:
    """What follows values (G, 4), of which `a` is the last one and `b` an earlier one."""
    return {
        "tanh": lambda: a.tanh(),
        "product": lambda: a * b,
        "difference": lambda: a - b,
        "centred": lambda: a - b.mean(0),
        "scaled": lambda: a / (1 + b.square().sum(0, keepdim=True)),
        "standard": lambda: (a - a.mean(0)) / (a.var(0, unbiased=False) + 1).sqrt(),
        "normal": lambda: F.batch_norm(a, None, None, training=True, weight=w[0], bias=b.mean(0)),
        "softmax": lambda: a.softmax(1),
        "softmax of rows": lambda: a.softmax(0) * len(b),
        "weighted": lambda: a @ w,
        "layer": lambda: F.linear(a, w, w[0]),
        "attention": lambda: (a @ b.T).tanh() @ b / len(a),
        "columns": lambda: (a.T @ b).tanh().matmul(a.t()).t() / len(a),
        "of a covariance": lambda: b @ torch.einsum("nd,ne->de", a, b).tanh(),
        "outer": lambda: torch.einsum("nd,ne->nde", a, b).sum(1).tanh(),
        "mixed": lambda: torch.einsum("nd,md->nm", a, b).softmax(1).mm(a),
        "transposed": lambda: a.transpose(0, 1).exp().clamp(max=2).transpose(0, 1) + b.T.T,
        "flat": lambda: a.reshape(-1).sin().view(-1, 4),
        "flat pairs": lambda: a.view(-1, 2).cumsum(1).view(len(b), 4),
        "parts": lambda: torch.cat([a[:, :2], b[:, 2:] * 2], dim=1),
        "stacked": lambda: torch.stack([a, b], 1).mean(1),
        "chunks": lambda: torch.cat(a.chunk(2, dim=1)[::-1], 1),
        "chosen": lambda: torch.where(b > 0, a, b),
        "masked": lambda: a.masked_fill(b > b.mean(), 0.3),
        "reversed": lambda: a.flip(0),
        "rolled": lambda: torch.roll(a, 1, 0) + b,
        "sorted": lambda: a.sort(dim=0).values,
        "sorted columns": lambda: torch.sort(a, dim=1, descending=True)[0],
        "cumulative": lambda: a.cumsum(0) / len(a),
        "joined rows": lambda: torch.cat([a, b], 0)[: len(a)].sin(),
        "shifted": lambda: torch.cat([a[1:], a[:1]], dim=0),
        "largest": lambda: a - b.max() + a.amax(dim=0),
        "largest of rows": lambda: a * b.max(dim=1, keepdim=True).values,
        "gathered": lambda: a.gather(1, b.argsort(1)),
        "of the first row": lambda: a - b[0],
        "of a few rows": lambda: a + b[:2].sum(0),
        "of every other": lambda: a * a[::2].mean(),
        "of a mask": lambda: a - a[b[:, 0] > -5].mean(0),
        "norm": lambda: a / (b.norm() + 1) + F.normalize(b, dim=1),
        "norm of columns": lambda: a / (b.norm(dim=0) + 1),
        "logsumexp": lambda: a - b.logsumexp(0),
        "distances": lambda: (-torch.cdist(a, b + 3)).exp() @ b,
        "pairs": lambda: (a[:, None] - b[None]).tanh().mean(1),
        "pairs, the other way": lambda: (a.unsqueeze(0) * b.unsqueeze(1)).sum(0) / len(a),
        "upper": lambda: (a @ b.T).triu() @ b / len(a),
        "diagonal": lambda: a * (a @ b.t()).diagonal().unsqueeze(1).tanh(),
        "host": lambda: a * (1 + abs(b.mean().item())),
        "branch": lambda: a if bool(b.sum() > 0) else b,
        "constant rows": lambda: a + torch.linspace(0, 1, len(a), dtype=a.dtype)[:, None],
        "one hot": lambda: a + F.one_hot(b.argmax(1), 4),
        "expanded": lambda: a * b[:, :1].expand(-1, 4) + b[:, 0, None].expand_as(a),
        "squeezed": lambda: a[:, None].squeeze() + b.unsqueeze(2).squeeze(-1) if len(a) > 1 else a,
        "detached": lambda: a * b.detach(),
        "without gradients": lambda: a + ema(b),
        "slope": lambda: (
            a + torch.autograd.grad(b.tanh().mean(0).square().sum(), b, create_graph=True)[0] if b.requires_grad else a
        ),
        "zeroed": lambda: write(a, lambda z: z[:, 0].zero_()),
        "set": lambda: write(a, lambda z: z.__setitem__((slice(None), 1), b[:, 2])),
        "set where": lambda: write(a, lambda z: z.__setitem__(b > 0, 0.5)),
        "set selected rows": lambda: write(a, lambda z: z.__setitem__(b[:, 0] > 0, z[b[:, 0] > 0] * 2)),
        "set other rows": lambda: write(a, lambda z: z.__setitem__(a[:, 1] > -5, b[b[:, 0] > -5])),
        "set numbers": lambda: write(a, lambda z: z.__setitem__(b > 0, b[b > 0].exp())),
        "set a column of rows": lambda: write(a, lambda z: z.__setitem__((b[:, 0] > 0, 1), 0.5)),
        "set columns of rows": lambda: write(a, lambda z: z.__setitem__((b[:, 0] > 0, slice(2)), b[b[:, 0] > 0, 2:])),
        "a column of rows": lambda: a - a[b[:, 0] > -5, 1].mean(),
        "set some rows": lambda: write(a, lambda z: z.__setitem__(slice(1, 3), 0.5)),
        "set a row": lambda: write(a, lambda z: z.__setitem__(0, 0.5)),
        "added": lambda: write(a, lambda z: z.add_(b.mean(0)).mul_(w[0])),
        "added to rows": lambda: write(a, lambda z: z.t().add_(b.t())),
        "sorted in place": lambda: write(a, lambda z: z.cumsum_(0)),
        "a view is written": lambda: write(a, lambda z: z.flatten()[:4].zero_()),
        "a view of rows is written": lambda: write(a, lambda z: z[-1].mul_(2)),
        "a diagonal is written": lambda: write(a, lambda z: z.diagonal().zero_()),
        "filled": lambda: torch.zeros(len(a), 4, dtype=a.dtype).add_(a).mul_(b),
    }


def ends(a: Tensor, b: Tensor, w: Tensor) -> Steps:
    """What ends a formula, of such values."""
    return {
        "mean": lambda: a.mean(),
        "squared mean": lambda: a.mean(0).square().sum(),
        "mse": lambda: F.mse_loss(a, b),
        "cross entropy": lambda: F.cross_entropy(a, b.argmax(1)),
        "covariance": lambda: (a.T @ b / len(a)).square().sum(),
        "std": lambda: a.std() if a.numel() > 1 else a.sum(),
        "contrast": lambda: F.cross_entropy(a @ b.T, torch.arange(len(a))),
        "all": lambda: a.sum().tanh() * b.norm() + w.sum() * a.sum(0).prod(),
    }


def ema(b: Tensor) -> Tensor:
    with torch.no_grad():
        return b * 0.5 + b.mean(0) * 0.5


def planned(seed: int) -> list[tuple[str, int]]:
    """The steps of a random formula, and which earlier value each of them takes; the last one is its end."""
    draw = random.Random(seed)
    kinds, ends_of_formulas = (list(table(*[torch.empty(0)] * 3)) for table in (steps, ends))
    found = [(draw.choice(kinds), draw.randrange(place + 2)) for place in range(draw.randint(1, LENGTH))]
    return [*found, (draw.choice(ends_of_formulas), draw.randrange(len(found) + 2))]


def formula(seed: int, weight: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """A random formula."""
    values = [x, y]
    *plan, (end, other) = planned(seed)
    for name, earlier in plan:
        values.append(steps(values[-1], values[earlier], weight)[name]().clamp(-5, 5))
    return ends(values[-1], values[other], weight)[end]()


def results(value: Tensor, *leaves: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    grads = [torch.zeros_like(leaf) if each is None else each for leaf, each in zip(leaves, found, strict=True)]
    return [value.detach(), *grads]


def outcomes(rows: tuple[int, ...], seeds: range) -> list[str]:
    """For each seed ``exact``, or what else there was."""
    part, found = own(rows), []
    for seed in seeds:
        torch.manual_seed(seed)
        x, y, weight = (
            torch.randn(sum(rows), 4).double(),
            torch.randn(sum(rows), 4).double(),
            torch.randn(4, 4).double(),
        )
        whole = [each.clone().requires_grad_() for each in (weight, x, y)]
        mine = [each.clone().requires_grad_() for each in (weight, x[part], y[part])]
        try:
            truth = results(formula(seed, *whole), *whole)
            expected = [truth[0], truth[1], truth[2][part] * len(rows), truth[3][part] * len(rows)]
        except Exception as error:
            expected = type(error).__name__
        try:
            for _ in range(2):  # the second call follows the list of exchanges of the first one
                value = global_rows(functools.partial(formula, seed, mine[0]), *mine[1:], name=f"random {seed}")
            got = results(value, *mine)
        except Exception as error:
            found.append(f"error {str(error)[:300]}")
            continue
        if isinstance(expected, str):
            found.append("no oracle")  # torch refuses to view some sizes and not others
            continue
        found.append(compared(got, expected, truth))
    return found


def compared(got: list[Tensor], expected: list[Tensor], truth: list[Tensor]) -> str:
    for ours, theirs, whole in zip(got, expected, truth, strict=True):
        if not torch.allclose(
            ours, theirs, rtol=0, atol=1e-9 * max(float(whole.nan_to_num().abs().max()), 1), equal_nan=True
        ):
            return f"WRONG: {ours} and {theirs}"
    return "exact"


def check(pool: RankPool, rows: tuple[int, ...], first: int, number: int) -> None:
    """So many formulas are exact, or an error, on all ranks alike."""
    seeds = range(sum(rows) * 1000 + first, sum(rows) * 1000 + first + number)
    by_rank = pool.run(len(rows), outcomes, rows, seeds, seconds=60 + number)
    for seed, found in zip(seeds, zip(*by_rank, strict=True), strict=True):
        assert not any("WRONG" in each for each in found), f"{seed}: {found} ({planned(seed)})"
        assert len({each.partition(" ")[0] for each in found}) == 1, f"{seed}: {found}"
    exact = sum(found == "exact" for found in by_rank[0])
    assert exact > number / 3, by_rank[0]


@pytest.mark.parametrize("rows", WORLDS, ids=str)
def test_exact_or_an_error(pool: RankPool, rows: tuple[int, ...]) -> None:
    check(pool, rows, 0, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("rows", WORLDS, ids=str)
def test_many_are_exact_or_an_error(pool: RankPool, rows: tuple[int, ...]) -> None:
    check(pool, rows, FEW, FORMULAS // len(WORLDS))
