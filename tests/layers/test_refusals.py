"""Ranks that disagree, batches that are too small, wrong orders: the same error on every rank, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses import SyncBatchNorm
from lightning_ddp_losses.collectives import all_gather_with_grad
from lightning_ddp_losses.testing import RankPool
from tests.each_rank import each_rank
from tests.layers.test_lightning import OURS, Hidden, Normed, SkipsOnARank, fit
from tests.refusals import Refused, assert_same_error, refusals

OK = torch.linspace(0, 1, 12).view(4, 3)


def synced(layer: nn.Module) -> nn.Module:
    return SyncBatchNorm().apply(layer)


class ByHand(nn.BatchNorm1d):
    """Statistics that nobody can reach."""

    def forward(self, input: Tensor) -> Tensor:
        return (input - input.mean(0)) / input.std(0)


def then_gather(layer: nn.Module, calls: int) -> object:
    for _ in range(calls):
        layer(OK)
    return all_gather_with_grad(OK)


def another_layer_in_backward(rank: int) -> object:
    layers = synced(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)))
    outputs = [layer(OK.clone().requires_grad_()) for layer in layers]
    return outputs[rank].sum().backward()


def second_derivative(rank: int) -> object:
    x = OK.clone().requires_grad_()
    (grad,) = torch.autograd.grad(synced(nn.BatchNorm1d(3))(x).square().sum(), x, create_graph=True)
    return grad.square().sum().backward()


DIMENSIONS = "expected 4D input (got 3D input)"
REFUSED: dict[str, tuple[Any, ...]] = {
    "channels": (
        lambda r: synced(nn.BatchNorm1d(3 + r))(torch.ones(4, 3 + r)),
        ("SyncBatchNorm call 1: channels", "rank 0: channels=3", "rank 1: channels=4"),
    ),
    "dtype": (
        lambda r: synced(nn.BatchNorm1d(3).double() if r else nn.BatchNorm1d(3))(OK.double() if r else OK),
        ("dtype", "float32 cpu", "float64 cpu"),
    ),
    "momentum": (lambda r: synced(nn.BatchNorm1d(3, momentum=0.1 + r))(OK), ("settings", "momentum=1.1")),
    "number of calls": (
        lambda r: then_gather(synced(nn.BatchNorm1d(3)), 1 + r),
        ("SyncBatchNorm call 2", "all_gather"),
    ),
    "evaluation mode on one rank": (
        lambda r: then_gather(synced(nn.BatchNorm1d(3)).train(r == 0), 1),
        ("SyncBatchNorm call 1", "all_gather"),
    ),
    "gradients on one rank": (
        lambda r: (torch.no_grad() if r else torch.enable_grad())(synced(nn.BatchNorm1d(3)))(OK),
        ("gradients=True", "gradients=False"),
    ),
    "other layers": (
        lambda r: synced(nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(1 + r)])),
        ("batch norms to synchronise", "`1` BatchNorm1d", "1 in common"),
    ),
    "other layers in backward": (
        another_layer_in_backward,
        ("rank 0: backward of SyncBatchNorm `0`", "rank 1: backward of SyncBatchNorm `1` call 1"),
    ),
    "a second derivative": (second_derivative, ("second derivative of SyncBatchNorm call 1", "create_graph=True")),
    "statistics by hand": (lambda r: synced(ByHand(3))(OK), ("ByHand.forward", "torch.nn.functional.batch_norm")),
    "another number of dimensions on one rank": (
        lambda r: synced(nn.BatchNorm2d(3))(torch.ones(2, 3, 2, *[2] * r)),
        DIMENSIONS,
        "PeerError",
        2,
        True,
        {0: f"ValueError: {DIMENSIONS}"},
    ),
    "too few values in one part": (
        lambda r: SyncBatchNorm(group_size=2).apply(nn.BatchNorm1d(3))(torch.ones([3, 3, 0, 1][r], 3)),
        ("Expected more than 1 value", "rank 3: 1 value per channel"),
        "InputError",
        4,
    ),
}
test_ranks_that_disagree_get_the_same_error = refusals(__name__, "REFUSED")


ALONE_TOO: dict[str, Callable[[Callable[[nn.Module], nn.Module]], object]] = {
    "channels that the layer does not have": lambda convert: convert(nn.BatchNorm1d(3))(torch.ones(4, 5)),
    "channels of the weight alone": lambda convert: convert(nn.BatchNorm1d(3, track_running_stats=False))(OK[:, :2]),
    "eps 0": lambda convert: convert(nn.BatchNorm1d(3, eps=0.0))(OK),
    "integers": lambda convert: convert(nn.BatchNorm1d(3))(OK.long()),
    "complex numbers": lambda convert: convert(nn.BatchNorm1d(3))(OK.to(torch.complex64)),
    "one dimension": lambda convert: convert(nn.BatchNorm1d(3))(OK[0]),
}


def refused(case: str) -> object:
    return ALONE_TOO[case](synced)


@pytest.mark.parametrize("case", ALONE_TOO)
def test_what_one_process_refuses_is_refused_with_the_same_words(pool: RankPool, case: str) -> None:
    with pytest.raises((RuntimeError, ValueError)) as alone:
        ALONE_TOO[case](lambda layer: layer)
    assert [error.message for error in pool.errors(2, refused, case)] == [str(alone.value)] * 2


def too_few(rows: list[int], size: list[int]) -> object:
    return synced(nn.BatchNorm2d(3) if size else nn.BatchNorm1d(3))(torch.ones(rows[dist.get_rank()], 3, *size))


@pytest.mark.parametrize(("rows", "size"), [([1, 0], []), ([0, 0, 1], [1, 1])])
def test_one_value_per_channel_over_all_ranks_is_the_error_of_one_process(
    pool: RankPool, rows: list[int], size: list[int]
) -> None:
    layer = nn.BatchNorm2d(3) if size else nn.BatchNorm1d(3)
    with pytest.raises(ValueError, match="more than 1 value") as alone:
        layer(torch.ones(1, 3, *size))
    errors = pool.errors(len(rows), too_few, rows, size)
    assert_same_error(errors, str(alone.value), "rank 0", "1 value per channel", "0 values per channel")
    assert all(error.is_a("ValueError") and error.is_a("InputError") for error in errors)


@each_rank(2)
def test_no_rows_at_all_are_what_they_are_in_one_process() -> None:
    alone, layer = nn.BatchNorm1d(3), synced(nn.BatchNorm1d(3))
    y = layer(torch.ones(0, 3, requires_grad=True))
    y.sum().backward()
    assert y.shape == alone(torch.ones(0, 3)).shape
    assert all(map(torch.equal, layer.state_dict().values(), alone.state_dict().values()))


def part_of_the_world(rank: int) -> object:
    group = dist.new_group([0])
    return SyncBatchNorm(process_group=group).apply(nn.BatchNorm1d(3))


ORDERS: dict[str, tuple[Callable[[int], object], tuple[str, ...]]] = {
    "after the wrap": (
        lambda r: SyncBatchNorm().apply(DistributedDataParallel(nn.BatchNorm1d(3))),
        ("before the wrap in DistributedDataParallel", "the model itself, wrapped already"),
    ),
    "around a wrapped part": (
        lambda r: SyncBatchNorm().apply(nn.ModuleDict({"part": DistributedDataParallel(nn.BatchNorm1d(3))})),
        ("`part`, wrapped already",),
    ),
    "twice": (
        lambda r: SyncBatchNorm().apply(SyncBatchNorm().apply(nn.Sequential(nn.BatchNorm1d(3)))),
        ("`0`, converted already",),
    ),
    "after torch's": (
        lambda r: SyncBatchNorm().apply(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))),
        ("`0`, converted already by torch.nn.SyncBatchNorm.convert_sync_batchnorm",),
    ),
    "a group that does not divide the world": (
        lambda r: SyncBatchNorm(group_size=2).apply(nn.BatchNorm1d(3)),
        ("group_size", "a divisor of the 3 ranks", "got 2"),
    ),
    "a group without this rank": (part_of_the_world, ("a group that this rank is a member of", "rank 1")),
    "both groups": (
        lambda r: SyncBatchNorm(group_size=1, process_group=dist.group.WORLD),
        ("group_size= or process_group=",),
    ),
    "no number": (lambda r: SyncBatchNorm(group_size=0), ("group_size", "got 0")),
    "TorchScript": (
        lambda r: SyncBatchNorm().apply(nn.Sequential(torch.jit.script(nn.BatchNorm1d(3)))),
        ("`0` in TorchScript",),
    ),
}


OF_THREE = {name: (*row, "ConfigurationError", 3) for name, row in ORDERS.items()}
_warns = pytest.mark.filterwarnings("ignore:.*torch.jit.script")
test_wrong_orders_and_groups_are_errors_by_name = _warns(refusals(__name__, "OF_THREE"))


# ---------------------------------------------------------------------- fits


def fitting(job: Any, *words: str, strategy: Any = None, **row: Any) -> Refused:
    """Under ddp no strategy of ours passes on what one rank alone meets, but here all meet it."""
    return Refused(lambda _: fit(job, strategy or {}, **OURS), words, **row)


def fit_in_pairs(job: Any) -> None:
    fit(job, {}, plugins=[SyncBatchNorm(group_size=2)])


ONE_MORE, LEFT_OUT = partial(SkipsOnARank, "one forward more"), partial(SkipsOnARank, "left out")
CALL_3 = "SyncBatchNorm `encoder.1` call 3"
FITS: dict[str, Refused] = {
    "unregistered": fitting(Hidden, "BatchNorm1d at self.kept[0].0", "not synchronised", "nn.ModuleList"),
    "one forward more": fitting(ONE_MORE, CALL_3),
    "one forward more, under ddp": fitting(ONE_MORE, "SyncBatchNorm `encoder.1`", strategy="ddp"),
    "left out": fitting(
        LEFT_OUT,
        "batch norms that the loss depends on",
        "SyncBatchNorm `encoder.1` call 2",
        "rank 1: 1 in common\n",
    ),
    "left out, under ddp": fitting(LEFT_OUT, "batch norms that the loss depends on", strategy="ddp"),
    "another width": fitting(partial(SkipsOnARank, "one channel more"), "ranks met at different places"),
    "an error between forward and backward": fitting(
        partial(SkipsOnARank, "fails"), "PeerError: ", "rank 1 alone", own={1: "KeyError"}
    ),
    # ranks that part in one group end all groups
    "one forward more in a pair": Refused(lambda _: fit_in_pairs(ONE_MORE), (CALL_3, "rank 3"), ranks=4),
    # told before the first step
    "a group size that does not divide": Refused(
        lambda _: fit_in_pairs(Normed), ("group_size", "a divisor of the 3 ranks", "got 2"), ranks=3
    ),
}
test_fits = refusals(__name__, "FITS")
