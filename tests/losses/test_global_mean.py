"""`global_mean`: the mean of hand-written sums over all ranks, in value and gradient; what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses import InputError, global_mean
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives
from tests.each_rank import each_rank
from tests.losses.harness import SEVEN, seven_rows, small_net
from tests.oracle import Found, Place, parity
from tests.refusals import refusals


def sums(model: Any, rows: Tensor) -> tuple[Tensor, list[int]]:
    """Two sums and their counts: over rows, and over the entries above zero."""
    out = model(rows)
    return torch.stack([out.square().sum(), out.clamp(min=0).sum()]), [len(rows), int((rows > 0).sum())]


def play(place: Place, how: str) -> Found:
    model = place.ddp(small_net())
    total, counts = sums(model, place.own(seven_rows()))
    if place.alone:
        means = total / torch.tensor(counts)
    elif how == "together":
        means = global_mean(total, torch.tensor(counts), name="pair")
    else:
        means = torch.stack([global_mean(t, n) for t, n in zip(total.unbind(), counts, strict=True)])
    return place.graded(means[0] + 0.5 * means[1], net=model) | {"values": means.detach()}


@pytest.mark.parametrize("how", ["together", "one by one"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_process(pool: RankPool, world_size: int, how: str) -> None:
    parity(pool, play, SEVEN[world_size], how, every_rank=True)


@each_rank(2)
def test_autocast_and_halves() -> None:
    model = DistributedDataParallel(small_net().float())
    with torch.autocast("cpu", torch.bfloat16):
        out = model(seven_rows().float())
        value = global_mean(out.sum(), out.numel())
    value.backward()
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(float(small_net()(seven_rows()).mean().detach()), abs=0.02)


@each_rank(2)
def test_nothing_anywhere() -> None:
    weight = torch.ones(3, requires_grad=True)
    value = global_mean((weight[:0] * 2).sum(), 0, empty=4.0)
    value.backward()
    assert [value.item(), *weight.grad.tolist()] == [4.0, 0, 0, 0]


@each_rank(2)
def test_counts_beyond_int32_are_exact() -> None:
    total = torch.tensor(3.0 * 2**33, dtype=torch.float64)
    assert float(global_mean(total, 2**33 + 1 - 2 * dist.get_rank())) == 3.0


def test_one_count_of_several_means_may_be_a_number_or_a_tensor_without_dimensions() -> None:
    totals, count = torch.tensor([3.0, 6.0]), torch.tensor([1, 1, 1]).sum()
    assert global_mean(totals, count).tolist() == global_mean(totals, 3).tolist() == [1.0, 2.0]


@each_rank(2)
def test_one_collective() -> None:
    weight = torch.ones(3, requires_grad=True)
    global_mean(weight.sum(), 3).backward()
    with CountCollectives() as collectives:
        global_mean(torch.stack([weight.sum(), weight.prod()]), 3).sum().backward()
    assert len(collectives.names) == 1


@each_rank(3)
def test_a_group() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    rank = dist.get_rank()
    assert float(global_mean(torch.tensor(float(rank)), 1, group=groups[rank // 2])) == [0.5, 0.5, 2.0][rank]


# ---------------------------------------------------------------------- bad input on one rank


def ask(total: Any = None, count: Any = 3, name: str = "boxes") -> Tensor:
    return global_mean(torch.ones(2, requires_grad=True) * 2 if total is None else total, count, name=name)


def in_a_mesh() -> str:
    mesh, rank = DeviceMesh("cpu", [0, 1]), dist.get_rank()
    try:
        if rank < 2:
            global_mean(torch.ones((), requires_grad=True), -1 if rank else 1, mesh=mesh)
    except InputError as error:
        return str(error)
    return ""


def test_an_error_inside_a_mesh_goes_to_its_ranks(pool: RankPool) -> None:
    first, second, outside = pool.run(3, in_a_mesh)
    assert "finite, 0 or more, got [-1]" in first
    assert first == second
    assert not outside


def weighed(factor: float) -> None:
    for _ in range(2):
        weight = torch.ones(3, requires_grad=True)
        (global_mean(weight.sum(), 3) * factor).backward()


REFUSED: dict[str, tuple[Any, ...]] = {
    "negative": (lambda r: ask(count=-1 if r else 3), "finite, 0 or more, got [-1, -1]"),
    "not a number": (
        lambda r: ask(count=torch.tensor([1.0, float("nan")]) if r else 3),
        "finite, 0 or more, got [1.0, nan]",
    ),
    "a count with a graph": (
        lambda r: ask(count=torch.ones(2, requires_grad=True) if r else 3),
        "expected no gradient",
    ),
    "another number of counts": (lambda r: ask(count=torch.ones(3) if r else 3), "as many as means, 2, got (3,)"),
    "another number of means": (lambda r: ask(torch.ones(2 + r, requires_grad=True) * 2), "(3,) torch.float32"),
    "whole numbers": (lambda r: ask(torch.ones(2, dtype=torch.int64) if r else None), "a floating tensor"),
    "a matrix": (lambda r: ask(torch.ones(2, 2) if r else None), "a floating tensor, 0-dim or (k,)"),
    "another name": (lambda r: ask(name="tokens" if r else "boxes"), "global_mean `tokens`"),
    "no graph": (lambda r: ask(torch.ones(2) * 2 if r else None), "went through the model"),
    "a factor that differs by rank": (lambda r: weighed(1 + r), "coefficient", "RankMismatchError"),
}
test_errors_on_every_rank = refusals(__name__, "REFUSED")
