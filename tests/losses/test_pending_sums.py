"""Sums of a formula over rows of all ranks that travel together, and what reads them before they are known: exact, or an error."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses import global_rows
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives, nothing_rides
from tests.each_rank import each_rank
from tests.losses.rows_cases import CASES, Square, Thrice, rows_of, rows_of_all
from tests.oracle import Found, Place, assert_near, parity
from tests.refusals import Refused, refusals

ROWS = (5, 2, 4)

# of a formula: exchanges forward (one before it and one after it included) and backward
EXCHANGES = {
    "mse": (2, 0),
    "cross entropy": (2, 0),
    "dice": (2, 0),
    "tversky": (2, 0),
    "matthews": (2, 0),
    "focal": (2, 0),
    # the means are known before the rows are centred; backward sends the gradients of both at once
    "vicreg": (4, 1),
    "concordance": (4, 1),
    "info nce": (4, 1),
}


@each_rank(2, fresh=True)
def test_neighbouring_sums_share_an_exchange() -> None:
    for name, expected in EXCHANGES.items():
        formula, make = CASES[name]
        given = [each.requires_grad_(each.is_floating_point()) for each in make(6)]
        for _ in range(2):
            with CountCollectives() as collectives:
                value = global_rows(formula, *given, name=name)
                forward = len(collectives.take())
                value.backward()
                found = forward, len(collectives.take())
        assert found == expected, f"{name}: {found}"


def written(x: Tensor) -> Tensor:
    """A sum, another name of it, and a view of it, written to in turn."""
    m = x.mean(0)
    other = m
    m += x.sum(0)
    view = m.view(2, 2)
    view[0] = 1.0
    return (m * other).sum() + view.sum()


def written_later(x: Tensor) -> Tensor:
    m = x.mean(0)
    before = m * 2
    m *= 3
    both = m + before
    m -= 1
    return (both * m).sum()


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.mean(0) * 2
    total = x.sum(0) * 2
    with torch.no_grad():
        offset = total * 3
    return (total * scale).sum() + offset.sum()


def caught(x: Tensor) -> Tensor:
    total = x.sum()
    try:
        x.mean(0).view(3, 3)
    except RuntimeError:
        total = total * 2
    return total


def checkpointed(x: Tensor) -> Tensor:
    means = x.mean(0)
    squares = means * means

    def region(z: Tensor, s: Tensor) -> Tensor:
        return ((z - s).square().mean(0) * (z.std(0) + 1)).sum() * z.sum()

    return checkpoint(region, x, squares, use_reentrant=False)


def hooked(x: Tensor) -> Tensor:
    means = x.mean(0) * 2
    means.retain_grad()
    means.register_hook(lambda grad: grad * 2)
    return means.sum()


FORMULAS: dict[str, Callable[[Tensor], Any]] = {
    "a custom function of a sum": lambda x: Square.apply(x.sum(0)).sum() + x.sum(),
    "a custom function of a mean": lambda x: Square.apply(x.mean(0) * 2).sum() + x.sum(),
    "a custom identity": lambda x: Thrice.apply(x.mean(0) * 2).sum() + x.sum(),
    "a transform": lambda x: torch.func.grad(lambda m: (m * m).sum())(x.mean(0)).sum() + x.sum(),
    "a map": lambda x: torch.vmap(lambda m: m * 2)(x.mean(0)).sum() + x.sum(),
    "a slope of means": lambda x: (
        torch.autograd.grad((x.mean(0) * 2).square().sum(), x, create_graph=True)[0].square().sum()
    ),
    "a new tensor": lambda x: torch.tensor([x.sum().detach(), x.detach().mean() * 2]).sum() * x.sum(),
    "the same tensor": lambda x: torch.as_tensor(x.mean(0) * 2).sum() * 2,
    "written to": written,
    "written to later": written_later,
    "without gradients": without_gradients,
    "an error that is caught": caught,
    "a checkpoint": checkpointed,
    "the smallest": lambda x: min(x.mean(), x.sum() * 2, x.std()) + max(x.mean(), x.sum()),
    "an index": lambda x: torch.arange(100.0).double()[(x > 0).sum()] * x.sum(),
    "a place in a list": lambda x: list(range(50))[(x > 0).sum()] * x.sum(),
    "a branch": lambda x: x.sum() if x.mean() > 0 and x.sum() != 5 else -x.sum(),
    "one by one": lambda x: sum(x.mean(0)),
    "stacked": lambda x: torch.stack([x.mean(), x.sum() * 2]).prod(),
    "where": lambda x: torch.where(x.mean(0) > 0, x.mean(0), x.sum(0)).sum(),
    "other dtypes": lambda x: x.mean(0).to(torch.float32).double().sum() + x.sum().float().double(),
    "a copy": lambda x: copy.deepcopy(x.detach().mean(0)).sum() * x.sum(),
    "a hook": hooked,
    "a loss of means": lambda x: F.cross_entropy(x.mean(0)[None], torch.tensor([1])),
    "never used": lambda x: (x.std(), x.mean())[1],
    "a fact of the graph": lambda x: x.sum() * (1 + int((x.mean(0) * 2).requires_grad)),
    "variances": lambda x: x.std() + x.var(0, unbiased=False).sum() + x.std((0, 1), keepdim=True).sum(),
    "variances of few rows": lambda x: x[:1].var(0, unbiased=False).sum() + x[1:3].std(0).sum(),
    "variances of many numbers": lambda x: (x[:, :, None] * torch.ones(1, 1, 12_000).double()).var(0).sum(),
    "variances far from zero": lambda x: (x + 1e6).std(0).sum() * 1e-2 + x.sum(),
    "a parameter": lambda x: (nn.Parameter(torch.ones(4).double()) * x.mean(0)).sum(),
}


def play(place: Place, name: str, is_large: bool) -> Found:
    """The value, and the gradient of two backwards."""
    torch.manual_seed(7)
    rows = place.leaf("x", torch.randn(11, 4).double())
    with nothing_rides() if is_large else contextlib.nullcontext():
        value = FORMULAS[name](rows) if place.alone else global_rows(FORMULAS[name], rows)
        assert type(value) is Tensor
        value.backward(retain_graph=True)
        return place.graded(value)


def tolerance(name: str) -> float:
    return 1e-6 if name == "variances far from zero" else 1e-9


def test_exact_however_a_sum_is_read(pool: RankPool) -> None:
    parity(pool, play, ROWS, False, cases=FORMULAS, rtol=tolerance, compare=assert_near)


def test_large_sums(pool: RankPool) -> None:
    parity(pool, play, ROWS, True, cases=FORMULAS, rtol=tolerance, compare=assert_near)


def first_reads(x: Tensor) -> Tensor:
    first = x.sum()
    if dist.get_rank() == 0:
        print(first.item())
    return first + x.mean()


def first_fails(x: Tensor) -> Tensor:
    first = x.sum()
    if dist.get_rank() == 0:
        raise KeyError("absent")
    return first * x.std()


def other_operands(x: Tensor) -> Tensor:
    first, second = x.sum(), x.mean()
    return first * (second if dist.get_rank() else first)


def uncounted_write(x: Tensor) -> Tensor:
    first = x.sum().detach()
    first.data.add_(dist.get_rank())
    return first * x.mean()


kept: list[Tensor] = []


def keep_and_fail() -> None:
    def formula(x: Tensor) -> Tensor:
        kept.append(x.sum())
        raise KeyError("absent")

    with pytest.raises(KeyError):
        global_rows(formula, rows_of())
    kept.pop().item()


REFUSED: dict[str, tuple[Any, ...]] = {
    "an error of one rank before the exchange": Refused(
        lambda rank: global_rows(first_fails, rows_of()), (), "PeerError", own={0: "KeyError"}
    ),
    "a sum of a call that failed": (
        lambda rank: keep_and_fail(),
        "one whose call has failed before it was exchanged",
        "DDPLossError",
        2,
        False,
    ),
    "an uncounted write": (
        lambda rank: global_rows(uncounted_write, rows_of()),
        "the same values",
        "RankMismatchError",
    ),
    "a value that one rank reads": (
        lambda rank: global_rows(first_reads, rows_of()),
        "in first_reads: first = x.sum()",
        "RankMismatchError",
    ),
    "other operands": (
        lambda rank: global_rows(other_operands, rows_of()),
        ("mul #0 #0", "mul #0 #"),
        "RankMismatchError",
    ),
}
test_errors_on_every_rank = refusals(__name__, "REFUSED")


class Mean(nn.Module):
    """Keeps the mean of its rows, as buffer and as attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4).double())

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.detach().mean(0)
        self.last = x.detach().sum()
        return x.std()


@each_rank(2)
def test_a_module_keeps_plain_buffers() -> None:
    loss = Mean()
    global_rows(loss, rows_of())
    assert type(loss.mean) is Tensor
    whole = rows_of_all((5, 2))
    assert torch.allclose(loss.mean, whole.mean(0))
    assert torch.allclose(copy.deepcopy(loss).last, whole.sum())
    # a buffer of a closure is broadcast as any other
    global_rows(lambda x: loss(x), rows_of())
    dist.broadcast(loss.mean, 0)
    assert torch.allclose(loss.mean * 1, whole.mean(0))
