"""Gradient penalties: exact where a rank's own rows suffice, an error on every rank where they do not, never a constant in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses.distributed.collectives import all_gather_with_grad
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.losses import ClassShardedLoss, ClipLoss, GlobalBatchLoss, SigLipLoss
from tests.losses.harness import CLASSES, DIM, Net, global_rows, own_rows
from tests.rank_pool import RankPool

SIZES = [4, 8]
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
        penalty(make(), own_rows(SIZES, dist.get_rank()))
    except ConfigurationError as error:
        return str(error)
    return "no error"


def try_all() -> dict[str, str]:
    return {name: refusal(make) for name, make in REFUSED.items()}


def test_a_second_derivative_over_all_ranks_is_an_error_on_every_rank(pool: RankPool) -> None:
    first, second = pool.run(2, try_all)
    assert first == second
    assert first.keys() == REFUSED.keys()
    for text in first.values():
        assert text.startswith("second derivative of")
        assert "create_graph=True" in text


def alone_or_not(wrapped: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    loss = arcface().double()
    call = of(loss) if wrapped else lambda e, _, labels: loss(e, labels)
    rows = own_rows(SIZES, dist.get_rank()) if wrapped else global_rows()
    return penalty(call, rows)


def test_a_loss_over_samples_may_be_differentiated_twice(pool: RankPool) -> None:
    ranks = pool.run(2, alone_or_not, True)
    (value, gradient), *_ = pool.run(1, alone_or_not, False)
    # what a rank back-propagates is W times its share of the loss
    assert float(sum(v for v, _ in ranks)) == pytest.approx(4 * float(value), rel=1e-9)
    torch.testing.assert_close(torch.cat([g for _, g in ranks]), 4 * gradient, rtol=1e-9, atol=0)
