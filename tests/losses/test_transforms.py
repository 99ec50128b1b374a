"""Transforms of `torch.func` around what exchanges rows: one error of ours on all ranks. `functional_call` and one rank are exact."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from torch import Tensor, nn

from lightning_ddp_losses import (
    ClassShardedLoss,
    ClipLoss,
    GlobalBatchLoss,
    GlobalBatchMiner,
    InputError,
    SigLipLoss,
    SyncBatchNorm,
    differentiable,
    global_mean,
    global_rows,
)
from lightning_ddp_losses.testing import RankPool

ROWS, DIM, CLASSES = 12, 4, 3
LABELS = torch.tensor([0, 2, 1, 0, 1, 2, 2, 0, 0, 1, 1, 2])
Call = Callable[[Tensor, Tensor], Tensor]


def of_loss(loss: nn.Module) -> Call:
    return loss.double()


def of_towers(loss: nn.Module) -> Call:
    loss.double()
    return lambda x, _: loss(x, 2 * x)


def of_metric() -> Call:
    metric = differentiable(torchmetrics.MeanSquaredError())
    return lambda x, _: metric(x, torch.zeros_like(x))


def of_batch_norm(*, training: bool) -> Call:
    layer = SyncBatchNorm().apply(nn.BatchNorm1d(DIM, track_running_stats=training).double())
    return lambda x, _: layer(x).pow(2).sum()


def of_miner() -> Call:
    miner = GlobalBatchMiner(miners.MultiSimilarityMiner())
    return lambda x, y: x.sum() * miner(x, y)[0].numel()


MAKE: dict[str, Callable[[], Call]] = {
    "tiles": lambda: of_loss(GlobalBatchLoss(pml.SupConLoss())),
    "replicated": lambda: of_loss(GlobalBatchLoss(pml.TripletMarginLoss(), mode="replicated")),
    "elements": lambda: of_loss(GlobalBatchLoss(pml.ArcFaceLoss(CLASSES, DIM))),
    "class shards": lambda: of_loss(ClassShardedLoss(pml.ArcFaceLoss(CLASSES, DIM))),
    "clip": lambda: of_towers(ClipLoss()),
    "siglip": lambda: of_towers(SigLipLoss()),
    "a formula": lambda: lambda x, _: global_rows(lambda rows: (rows @ rows.T).logsumexp(1).mean(), x),
    "a mean": lambda: lambda x, _: global_mean(x.pow(2).sum(), len(x)),
    "a metric": of_metric,
    "a miner": of_miner,
    "batch norm": lambda: of_batch_norm(training=True),
    "batch norm without running statistics": lambda: of_batch_norm(training=False),
}
TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "grad": lambda call, x: torch.func.grad(call)(x),
    "vjp": lambda call, x: torch.func.vjp(call, x)[0],
    "jacrev": lambda call, x: torch.func.jacrev(call)(x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "vmap": lambda call, x: torch.func.vmap(call)(torch.stack([x, x])),
    "vmap of grad": lambda call, x: torch.func.vmap(torch.func.grad(call))(torch.stack([x, x])),
}


def own_rows() -> tuple[Tensor, Tensor]:
    """This rank's rows and labels of one batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return rows.chunk(world)[rank], LABELS.chunk(world)[rank]


def gradient(call: Call, x: Tensor, y: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(call(leaf, y), leaf)
    return found


def refused(name: str, on_ranks: tuple[int, ...]) -> list[str]:
    """The text of each transform's error, on ranks of which only some transform; then the call is what it was."""
    torch.manual_seed(0)
    call = MAKE[name]()
    x, y = own_rows()
    if name == "a miner":
        before = torch.zeros(())
        call(x, y)
    else:
        before = gradient(call, x, y)
    texts = []
    for transform in TRANSFORMS.values():
        attempt = (
            partial(transform, lambda rows: call(rows, y), x) if dist.get_rank() in on_ranks else partial(call, x, y)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about vmap
            with pytest.raises(InputError) as raised:
                attempt()
        texts.append(str(raised.value))
    if name == "a miner":
        call(x, y)
    elif name not in (
        "a metric",
        "batch norm",
    ):  # the rank without a transform has taken the batch, and counted the call
        assert torch.allclose(gradient(call, x, y), before, rtol=1e-12, atol=0)
    return texts


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", MAKE)
def test_a_transform_on_all_ranks_is_an_error_of_ours(pool: RankPool, name: str, world_size: int) -> None:
    everyone = pool.run(world_size, refused, name, tuple(range(world_size)))
    assert all(texts == everyone[0] for texts in everyone)
    for text in everyone[0]:
        assert ": transform: expected" in text
        assert "torch.autograd.grad" in text


@pytest.mark.parametrize("name", MAKE)
def test_a_transform_on_one_rank_is_an_error_on_all(pool: RankPool, name: str) -> None:
    everyone = pool.run(2, refused, name, (1,))
    assert everyone[0] == everyone[1]
    for text in everyone[0]:
        assert "inside grad, vjp, jacrev, hessian, jvp or vmap" in text
        assert "(rank 1 of 2, in " in text


def functional(name: str) -> float:
    """The greatest difference between gradients of a call and of its `functional_call`, for rows and weights."""
    torch.manual_seed(0)
    loss = MAKE[name]()
    assert isinstance(loss, nn.Module)
    x, y = own_rows()
    found = []
    for is_functional in (False, True):
        leaf = x.clone().requires_grad_()
        weights = dict(loss.named_parameters())
        if is_functional:
            weights = {key: value.detach().clone().requires_grad_() for key, value in weights.items()}
        value = torch.func.functional_call(loss, weights, (leaf, y)) if is_functional else loss(leaf, y)
        found.append(torch.autograd.grad(value, [leaf, *weights.values()]))
    return max((a - b).abs().max().item() for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["tiles", "replicated", "elements"])
def test_a_functional_call_is_exact(pool: RankPool, name: str) -> None:
    assert max(pool.run(2, functional, name)) < 1e-12


def transformed(name: str) -> float:
    """The greatest difference between autograd's gradient and a transform's."""
    call = MAKE[name]()
    x, y = own_rows()
    expected = gradient(call, x, y)
    found = torch.func.grad(lambda rows: call(rows, y))(x)
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("name", ["tiles", "replicated", "a formula"])
def test_one_rank_takes_transforms(pool: RankPool, name: str) -> None:
    assert pool.run(1, transformed, name) < [1e-12]
