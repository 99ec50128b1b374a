"""`GlobalBatchLoss` of a plain function: as of a module, in value, gradient, copies, names and refusals."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_ddp_losses import DDPLossError, GlobalBatchLoss, InputError, certify, global_rows
from lightning_ddp_losses.testing import RankPool
from tests import fits
from tests.each_rank import each_rank
from tests.losses.harness import SEVEN
from tests.oracle import Found, Place, assert_close, own, parity
from tests.refusals import Refused, refusals


def dice(logits: Tensor, target: Tensor) -> Tensor:
    chances = logits.sigmoid()
    return 1 - 2 * (chances * target).sum() / (chances + target).sum()


def identity(rows: Tensor) -> Tensor:
    return rows


def scaled_spread(rows: Tensor, target: Tensor, *, scale: float) -> Tensor:
    return scale * (rows - target).std(0).square().sum() + rows.mean(0).exp().sum()


class Covariance:
    """A callable object with an option and a weight that belongs to the model."""

    def __init__(self, power: int) -> None:
        self.power = power

    def __call__(self, rows: Tensor, target: Tensor) -> Tensor:
        return (rows.T @ target / len(rows)).pow(self.power).sum()


class Model(nn.Module):
    """A model that computes its loss by a method, with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(3, 2).double()
        self.scale = nn.Parameter(torch.tensor([0.5, 1.5]).double())

    def contrast(self, rows: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy((rows * self.scale) @ target.T, torch.arange(len(rows)))


FUNCTIONS: dict[str, Callable[[Model], Callable[..., Tensor]]] = {
    "dice": lambda model: dice,
    "torch's": lambda model: F.mse_loss,
    "<lambda>": lambda model: lambda rows, target: (rows * target).mean(0).square().sum(),
    "scaled_spread": lambda model: functools.partial(scaled_spread, scale=2.0),
    "Covariance": lambda model: Covariance(2),
    "contrast": lambda model: model.contrast,
}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(7, 3, generator=generator).double(), torch.rand(7, 2, generator=generator).double()


def play(place: Place, kind: str, options: dict[str, Any]) -> Found:
    model = Model()
    rows, target = map(place.own, batch())
    function = FUNCTIONS[kind](model)
    loss = function if place.alone else GlobalBatchLoss(function, **options)
    layer = place.ddp(model.layer)
    found = place.graded(loss(layer(rows), target), net=model)
    scale = model.scale.grad
    if scale is not None and not place.alone:  # is not in the wrapped model
        dist.all_reduce(scale)
        scale /= place.world_size
    return found


@pytest.mark.parametrize("options", [{}, {"mode": "replicated"}, {"backward": "sum"}], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_process(pool: RankPool, world_size: int, options: dict[str, Any]) -> None:
    parity(pool, play, SEVEN[world_size], options, cases=FUNCTIONS, every_rank=True)


@each_rank(2)
def test_auto_moves_no_row_of_a_function() -> None:
    loss = GlobalBatchLoss(dice)
    assert loss.exact_modes() == ("rows", "replicated")
    assert repr(loss) == "GlobalBatchLoss(dice, mode='auto' (rows))"
    assert "sent: sums over rows" in str(loss.plan)


@each_rank(2)
def test_views_are_gathered() -> None:
    def agreement(rows: Tensor) -> Tensor:
        first, second = rows.chunk(2)
        return (first * second).sum(1).square().mean()

    whole = torch.arange(24.0).view(2, 4, 3).double().sin()
    mine = whole[:, own([1, 3])].flatten(0, 1)
    assert_close({"value": GlobalBatchLoss(agreement, views=2)(mine)}, {"value": agreement(whole.flatten(0, 1))})


@each_rank(2)
def test_a_copy_and_a_pickle_compute_the_same() -> None:
    rows, target = batch()
    part, logits = own(SEVEN[2]), rows[:, :2]
    for function in (dice, functools.partial(scaled_spread, scale=2.0), Covariance(3)):
        loss = GlobalBatchLoss(function)
        expected = {"value": function(logits, target)}
        assert loss.state_dict() == {}
        for made in (loss, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)):
            assert_close({"value": made(logits[part], target[part])}, expected)


def local_labels() -> float:
    labels = torch.arange(dist.get_rank(), dist.get_rank() + 3).double()
    return float(GlobalBatchLoss(lambda rows: (rows * labels).sum())(torch.ones(2, 3).double()))


def with_another_option() -> float:
    power = 2 + dist.get_rank()
    return float(GlobalBatchLoss(lambda rows: rows.pow(power).mean(0).sum())(torch.ones(2, 3).double()))


def with_another_option_of_a_part() -> float:
    function = functools.partial(scaled_spread, scale=1.0 + dist.get_rank())
    return float(GlobalBatchLoss(function)(torch.randn(2, 3).double(), torch.ones(2, 3).double()))


def with_another_function() -> float:
    function = dice if dist.get_rank() else F.mse_loss
    return float(GlobalBatchLoss(function)(torch.rand(2, 3).double(), torch.rand(2, 3).double()))


def rows_as_result() -> float:
    return float(GlobalBatchLoss(functools.partial(F.mse_loss, reduction="none"))(torch.ones(2), torch.ones(2)))


async def later(rows: Tensor) -> Tensor:
    return rows.mean()


def no_arguments() -> float:
    return float(GlobalBatchLoss(dice)())


def no_arguments_of_a_module() -> float:
    return float(GlobalBatchLoss(nn.MSELoss())())


def unfinished() -> float:
    return float(GlobalBatchLoss(later, mode="replicated")(torch.ones(2, 3)))


def unfinished_formula() -> float:
    return float(global_rows(later, torch.ones(2, 3)))


def parts_of_a_generator() -> float:
    return float(GlobalBatchLoss(lambda rows: (yield rows.mean()))(torch.ones(2, 3)))


def failing_on_one_rank() -> float:
    def odd(rows: Tensor) -> Tensor:
        if dist.get_rank():
            raise ValueError("odd rows")
        return rows.mean()

    return float(GlobalBatchLoss(odd)(torch.ones(2, 3)))


WORDS: dict[Callable[[], float], str] = {
    no_arguments: "GlobalBatchLoss(dice): expected arguments of the loss, got none",
    no_arguments_of_a_module: "GlobalBatchLoss(MSELoss): expected arguments of the loss, got none",
    unfinished: "GlobalBatchLoss(later): result: expected a function that returns tensors, got a coroutine",
    unfinished_formula: "global_rows `later`: result: expected a function that returns tensors, got a coroutine",
    parts_of_a_generator: "expected a function that returns tensors, got a generator",
    local_labels: "the same values on every rank",
    with_another_option: "configuration",
    with_another_option_of_a_part: "configuration",
    with_another_function: "every rank",
    rows_as_result: "values that are equal on all ranks",
    failing_on_one_rank: "odd rows",
}
REFUSED = {
    call.__name__: Refused(lambda _, call=call: call(), words, "Exception", same=False) for call, words in WORDS.items()
}
test_what_differs_is_an_error_on_every_rank = refusals(__name__, "REFUSED")


@each_rank(2)
def test_errors_name_the_function() -> None:
    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: Tensor) -> Tensor:
            return rows.exp()

    def custom(rows: Tensor) -> Tensor:
        return Exponential.apply(rows).sum()

    with pytest.raises(DDPLossError, match=r"autograd\.Function") as caught:
        GlobalBatchLoss(custom)(torch.ones(2))
    assert "mode='replicated'" in str(caught.value)
    assert float(GlobalBatchLoss(custom, mode="replicated")(torch.zeros(2))) == 4
    with pytest.raises(InputError, match=r"GlobalBatchLoss\(identity\): result"):
        GlobalBatchLoss(identity)(torch.ones(2))


def test_a_certificate_says_what_is_sent() -> None:
    sent = certify(dice, torch.rand(8, 2), torch.rand(8, 2)).sent
    assert sent.evaluation == "rows"
    assert "sums over rows" in str(sent)
    assert "at most" in str(sent)


class Fit(fits.Trained):
    """Trains on a batch Dice."""

    lr = 0.5

    def build(self) -> None:
        self.net = Model().layer.float()
        self.loss = GlobalBatchLoss(dice)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        rows, target = batch
        return self.loss(self.net(rows), target)


def test_a_fit(pool: RankPool) -> None:
    data = torch.utils.data.TensorDataset(*(each.float()[:6] for each in batch()))
    fits.assert_fit_as_one_process(pool, Fit, data)
