"""Gradient penalties over all ranks are an error on every rank, never W times one process's or a constant; one rank is exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

from lightning_ddp_losses.collectives import all_gather_with_grad
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, SigLipLoss, global_mean
from lightning_ddp_losses.metrics import differentiable
from lightning_ddp_losses.ssl import barlow_twins
from lightning_ddp_losses.testing import RankPool
from tests.each_rank import each_rank
from tests.losses.harness import CLASSES, DIM, Net, global_rows, own_rows
from tests.oracle import Found, Place, parity

SIZES = {2: [4, 8], 3: [1, 4, 7]}
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def arcface() -> nn.Module:
    return pml.ArcFaceLoss(num_classes=CLASSES, embedding_size=DIM)


def of(loss: nn.Module, **options: object) -> Call:
    wrapped = GlobalBatchLoss(loss, **options).double()  # type: ignore[arg-type]
    return lambda e, _, labels: wrapped(e, labels)


REFUSED: dict[str, Callable[[], Call]] = {
    "replicated": lambda: of(pml.SupConLoss(), mode="replicated"),
    "symmetric tiles": lambda: of(pml.SupConLoss(), mode="rows"),
    "tiles": lambda: of(pml.TripletMarginLoss(), mode="rows"),
    "row tiles": lambda: of(pml.AngularLoss(), mode="rows", tile_bytes=64),
    "ClipLoss": lambda: lambda e, f, _: ClipLoss().double()(e, f),
    "SigLipLoss": lambda: lambda e, f, _: SigLipLoss().double()(e, f),
    "ClassShardedLoss": lambda: lambda e, _, labels: ClassShardedLoss(arcface()).double()(e, labels),
    "all_gather_with_grad": lambda: lambda e, *_: all_gather_with_grad(e).pow(3).sum(),
}


def penalty(call: Call, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What the gradient's squared norm adds up to, and its own gradient."""
    torch.manual_seed(1)
    net = Net().double()
    e = net(rows["features"])
    (gradient,) = torch.autograd.grad(call(e, net(rows["views"]), rows["labels"]), e, create_graph=True)
    value = gradient.square().sum()
    return value.detach(), torch.autograd.grad(value, e)[0]


def refusal(make: Callable[[], Call]) -> str:
    try:
        penalty(make(), own_rows(SIZES[dist.get_world_size()]))
    except ConfigurationError as error:
        return str(error)
    return "no error"


def squared_error(e: Tensor, f: Tensor, _: Tensor) -> Tensor:
    return (e - f.detach()).square().sum()


EXACT_ALONE: dict[str, tuple[Callable[[], Call], Callable[[], Call]]] = {  # ours, and in one process without our code
    "elements": (lambda: of(seeded_arcface()), lambda: lambda e, _, labels: seeded_arcface().double()(e, labels)),
    "elements of torch": (
        lambda: lambda e, f, _: GlobalBatchLoss(nn.MSELoss())(e, f.detach()),
        lambda: lambda *rows: squared_error(*rows) / rows[0].numel(),
    ),
    "global_mean": (
        lambda: lambda *rows: global_mean(squared_error(*rows), len(rows[0])),
        lambda: lambda *rows: squared_error(*rows) / len(rows[0]),
    ),
    "several means": (
        lambda: lambda *rows: global_mean(torch.stack([squared_error(*rows), rows[0].sum()]), len(rows[0])).sum(),
        lambda: lambda *rows: (squared_error(*rows) + rows[0].sum()) / len(rows[0]),
    ),
    "metric": (
        lambda: lambda e, f, _: differentiable(MeanSquaredError())(e.flatten(), f.detach().flatten()),
        lambda: lambda *rows: squared_error(*rows) / rows[0].numel(),
    ),
}
ONLY_REFUSED: dict[str, Callable[[], Call]] = {
    "barlow_twins": lambda: lambda e, f, _: barlow_twins(e, f),
    "a linear function of all rows": lambda: lambda e, *_: all_gather_with_grad(e.square()).sum(),
}


def seeded_arcface() -> nn.Module:
    torch.manual_seed(2)
    return arcface()


def try_all() -> dict[str, str]:
    calls = REFUSED | {name: ours for name, (ours, _) in EXACT_ALONE.items()} | ONLY_REFUSED
    return {name: refusal(make) for name, make in calls.items()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_second_derivative_over_all_ranks_is_an_error_on_every_rank(pool: RankPool, world_size: int) -> None:
    first, *others = pool.run(world_size, try_all)
    assert all(other == first for other in others)
    for name, text in first.items():
        assert text.startswith("second derivative of"), (name, text)
        assert name not in REFUSED or "create_graph=True" in text


@pytest.mark.parametrize("name", EXACT_ALONE)
@each_rank(1)
def test_in_one_process_a_second_derivative_is_exact(name: str) -> None:
    ours, truth = (penalty(make(), global_rows()) for make in EXACT_ALONE[name])
    torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-15)


def encoder_penalty(place: Place) -> Found:
    """A first derivative of ours, of a loss that holds a second derivative of the encoder."""
    torch.manual_seed(1)
    net, features = Net().double(), place.own(global_rows()["features"]).requires_grad_()
    (slope,) = torch.autograd.grad(net(features).square().sum(), features, create_graph=True)
    total = slope.square().sum()
    value = total / len(slope) if place.alone else global_mean(total, len(slope))
    (gradient,) = torch.autograd.grad(value, net.logit_scale, allow_unused=True)
    assert gradient is None
    return place.graded(value, net=net)


def test_a_penalty_on_the_encoder_is_exact(pool: RankPool) -> None:
    parity(pool, encoder_penalty, SIZES[2])
