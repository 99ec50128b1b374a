"""`global_rows` and ``GlobalBatchLoss(..., mode="rows")`` in use: exchanges and bytes, state, batch dimensions, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses import DDPLossError, GlobalBatchLoss, accumulation_window, global_rows
from lightning_ddp_losses.testing import RankPool
from tests import fits
from tests.counting import CountCollectives
from tests.each_rank import each_rank
from tests.losses.harness import SEVEN, seven_rows, small_net
from tests.losses.rows_cases import dice, vicreg
from tests.oracle import Found, Place, assert_close, own, parity


class Spread(nn.Module):
    """The standard deviation over the rows, which no micro-batch has a part of."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows.std(0).mean()


class CentredLoss(nn.Module):
    """Like DINO's: a centre that each call moves."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5, 0.5]).double())
        self.register_buffer("centre", torch.zeros(2).double())

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        teacher = teacher.detach()
        wanted = ((teacher - self.centre) * 5).softmax(1)
        self.centre.mul_(0.5).add_(teacher.mean(0), alpha=0.5)
        return -(wanted * (student * self.scale).log_softmax(1)).sum(1).mean() + student.std(0).square().sum()


def play(place: Place) -> Found:
    """The value and the gradients of the second of two calls, and the centre."""
    model, plain = place.ddp(small_net()), CentredLoss()
    loss = plain if place.alone else DistributedDataParallel(GlobalBatchLoss(plain, mode="rows"))
    rows = place.own(seven_rows())
    loss(model(rows), model(rows * 2))
    found = place.graded(loss(model(rows), model(rows * 2)), net=model, loss=plain)
    return found | {"centre": plain.centre.clone()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_module_with_state_and_weights(pool: RankPool, world_size: int) -> None:
    parity(pool, play, SEVEN[world_size], every_rank=True)


@each_rank(2)
def test_auto_is_as_it_was() -> None:
    assert GlobalBatchLoss(nn.MSELoss()).exact_modes() == ("elements", "replicated", "rows")
    assert GlobalBatchLoss(CentredLoss()).exact_modes() == ("replicated", "rows")


def counted(formula: Callable[..., Tensor], *given: Tensor) -> tuple[int, int, int]:
    """Collectives of a formula forward and backward, and their bytes."""
    with CountCollectives() as collectives:
        value = global_rows(formula, *given, name="counted")
        forward = len(collectives.take())
        value.backward()
        return forward, len(collectives.take()), collectives.num_bytes


@each_rank(2)
def test_views_one_after_another_are_refused() -> None:
    class Pairs(nn.Module):
        def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
            first, second = rows.chunk(2)
            return (first * second).mean()

    rows, labels = torch.ones(4, 3).double(), torch.arange(2)
    for options, words in (({"views": 2}, "one view an argument"), ({}, "give views=2")):
        with pytest.raises(DDPLossError, match=words):
            GlobalBatchLoss(Pairs(), mode="rows", **options)(rows, labels)


@each_rank(2, fresh=True)
def test_dice_sends_two_sums_and_no_row() -> None:
    def of_dice(rows: int) -> tuple[int, int, int]:
        return counted(dice, torch.randn(rows, 3, 8, 8).double().requires_grad_(), torch.zeros(rows, 8, 8).long())

    of_dice(2)
    few, many = of_dice(2), of_dice(50)
    # before the formula, and after it, with the overlap and the size. A sum needs nothing in backward
    assert few == many
    assert few[:2] == (2, 0)
    assert many[2] < 10_000


@each_rank(2, fresh=True)
def test_vicreg_sends_sums_only() -> None:
    def of_vicreg(rows: int) -> tuple[int, int, int]:
        return counted(vicreg, *(torch.randn(rows, 4).double().requires_grad_() for _ in range(2)))

    for rows in (4, 300):
        of_vicreg(rows)  # the second call does not need all handshakes of the first one
    assert of_vicreg(4) == of_vicreg(300)


@each_rank(2)
def test_another_dimension_of_rows_and_a_tensor_that_is_no_batch() -> None:
    whole = torch.arange(21.0).view(3, 7).double()
    part = own(SEVEN[2])
    table = torch.tensor([[1.0], [2.0], [3.0]]).double().requires_grad_()
    value = global_rows(
        lambda x, t: (x * t).sum(1).square().sum() + x.t().std(), whole[:, part], table, batch_dims={0: 1, 1: None}
    )
    value.backward()
    truth = table.detach().clone().requires_grad_()
    expected = (whole * truth).sum(1).square().sum() + whole.std()
    expected.backward()
    assert_close({"value": value.detach(), "table": table.grad}, {"value": expected.detach(), "table": truth.grad})


@each_rank(2)
def test_queries_and_documents_of_other_counts() -> None:
    torch.manual_seed(0)
    queries, documents = torch.randn(7, 3).double(), torch.randn(7, 3).double()
    rank = dist.get_rank()
    own_queries, own_documents = queries[: (4, 3)[rank]] if not rank else queries[4:], documents[own([2, 5])]
    value = global_rows(
        lambda q, d: F.cross_entropy(q @ d.T, torch.arange(len(q))) + (q * d).mean(), own_queries, own_documents
    )
    expected = F.cross_entropy(queries @ documents.T, torch.arange(7)) + (queries * documents).mean()
    assert_close({"value": value}, {"value": expected})


@each_rank(2)
def test_one_draw_for_all_rows() -> None:
    rows = torch.ones([2, 5][dist.get_rank()], 3).double()
    dropped = global_rows(lambda x: F.dropout(x, 0.5, training=True).tolist(), rows)
    assert len(dropped) == 7
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, dropped)
    assert everyone[0] == everyone[1]


@each_rank(2)
def test_autocast_and_halves() -> None:
    rows = seven_rows()[own(SEVEN[2])].float()
    with torch.autocast("cpu", torch.bfloat16):
        value = global_rows(lambda x: (x.T @ x).square().sum(), rows.bfloat16())
    whole = seven_rows().float().bfloat16().float()
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx(float((whole.T @ whole).square().sum()), rel=1e-5)


@each_rank(2)
def test_inference() -> None:
    with torch.inference_mode():
        rows = seven_rows()[own(SEVEN[2])] * 1
        value = global_rows(lambda x: (x - x[0]).flip(0).cumsum(0).std() + x.var(0).sum(), rows)
    whole = seven_rows()
    assert_close({"value": value}, {"value": (whole - whole[0]).flip(0).cumsum(0).std() + whole.var(0).sum()})


@each_rank(2)
def test_no_rows_anywhere() -> None:
    rows = torch.zeros(0, 3).double().requires_grad_()
    value = global_rows(lambda x: x.mean() + F.mse_loss(x, x * 2) + x.sum(), rows)
    assert value.isnan()
    value.backward()
    assert rows.grad.shape == (0, 3)


@each_rank(2)
def test_rows_that_were_kept_are_refused() -> None:
    kept = []
    rows = seven_rows()[own(SEVEN[2])]
    global_rows(lambda x: kept.append(x) or x.sum(), rows)
    with pytest.raises(Exception, match="kept from an earlier call"):
        kept[0].sum()


class Fit(fits.Trained):
    """Trains on the covariance of the whole batch."""

    def build(self) -> None:
        self.net = small_net().float()

    def training_step(self, rows: Tensor, index: int) -> Tensor:
        out = self.net(rows)
        return global_rows(lambda z: (z.T @ z / len(z) - torch.eye(2)).square().sum(), out, name="covariance")


def test_a_fit(pool: RankPool) -> None:
    fits.assert_fit_as_one_process(pool, Fit, seven_rows().float()[:6])


def accumulate(kind: str) -> None:
    net = nn.Linear(3, 4).double()
    options = {"views": 2} if kind == "views" else {"mode": "rows"}
    loss = GlobalBatchLoss(Spread(), **options)
    with accumulation_window(net, micro_batches=1) as window:
        with window.micro_batch():
            rows = net(torch.ones(2 + 2 * dist.get_rank(), 3).double())
            value = global_rows(Spread(), rows, name="spread") if kind == "a formula" else loss(rows)
        value.backward()
