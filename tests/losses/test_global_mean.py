"""`global_mean`: the mean of hand-written sums over all ranks, in value and gradient; what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses import InputError, global_mean
from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives
from tests.oracle import assert_close

ROWS = {1: [7], 2: [2, 5], 3: [4, 0, 3]}


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch() -> Tensor:
    return torch.randn(7, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def sums(model: Any, rows: Tensor) -> tuple[Tensor, list[int]]:
    """Two sums and their counts: over rows, and over the entries above zero."""
    out = model(rows)
    return torch.stack([out.square().sum(), out.clamp(min=0).sum()]), [len(rows), int((rows > 0).sum())]


def on_ranks(how: str) -> dict[str, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first = sum(ROWS[world_size][:rank])
    rows = batch()[first : first + ROWS[world_size][rank]]
    model = DistributedDataParallel(net())
    total, counts = sums(model, rows)
    if how == "together":
        means = global_mean(total, torch.tensor(counts), name="pair")
    else:
        means = torch.stack([global_mean(t, n) for t, n in zip(total.unbind(), counts, strict=True)])
    (means[0] + 0.5 * means[1]).backward()
    grads = {name: p.grad for name, p in model.module.named_parameters() if p.grad is not None}
    return {"values": means.detach(), **grads}


def alone() -> dict[str, Any]:
    model = net()
    total, counts = sums(model, batch())
    means = total / torch.tensor(counts)
    (means[0] + 0.5 * means[1]).backward()
    return {"values": means.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("how", ["together", "one by one"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_one_process(pool: RankPool, world_size: int, how: str) -> None:
    (oracle,) = pool.run(1, alone, distributed=False)
    for found in pool.run(world_size, on_ranks, how):
        assert_close(found, oracle)


def under_autocast() -> tuple[torch.dtype, float]:
    model = DistributedDataParallel(net().float())
    with torch.autocast("cpu", torch.bfloat16):
        out = model(batch().float())
        value = global_mean(out.sum(), out.numel())
    value.backward()
    return value.dtype, value.item()


def test_autocast_and_halves(pool: RankPool) -> None:
    with torch.no_grad():
        true = float(net()(batch()).mean())
    for dtype, value in pool.run(2, under_autocast):
        assert dtype == torch.float32
        assert value == pytest.approx(true, abs=0.02)


def without_items() -> list[float]:
    weight = torch.ones(3, requires_grad=True)
    value = global_mean((weight[:0] * 2).sum(), 0, empty=4.0)
    value.backward()
    assert weight.grad is not None
    return [value.item(), *weight.grad.tolist()]


def test_nothing_anywhere(pool: RankPool) -> None:
    assert pool.run(2, without_items) == [[4.0, 0, 0, 0]] * 2


def large_counts() -> float:
    total = torch.tensor(3.0 * 2**33, dtype=torch.float64)
    return float(global_mean(total, 2**33 + 1 - 2 * dist.get_rank()))


def test_counts_beyond_int32_are_exact(pool: RankPool) -> None:
    assert pool.run(2, large_counts) == [3.0, 3.0]


def test_one_count_of_several_means_may_be_a_number_or_a_tensor_without_dimensions() -> None:
    totals, count = torch.tensor([3.0, 6.0]), torch.tensor([1, 1, 1]).sum()
    assert global_mean(totals, count).tolist() == global_mean(totals, 3).tolist() == [1.0, 2.0]


def counted() -> int:
    weight = torch.ones(3, requires_grad=True)
    global_mean(weight.sum(), 3).backward()
    with CountCollectives() as collectives:
        global_mean(torch.stack([weight.sum(), weight.prod()]), 3).sum().backward()
    return len(collectives.names)


def test_one_collective(pool: RankPool) -> None:
    assert pool.run(2, counted) == [1, 1]


def in_part_of_the_world() -> float:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    rank = dist.get_rank()
    return float(global_mean(torch.tensor(float(rank)), 1, group=groups[rank // 2]))


def test_a_group(pool: RankPool) -> None:
    assert pool.run(3, in_part_of_the_world) == [0.5, 0.5, 2.0]


# ---------------------------------------------------------------------- bad input on one rank


def call(case: str) -> None:
    odd = dist.get_rank() == 1
    total: Any = torch.ones(2, requires_grad=True) * 2
    count: Any = 3
    name = "boxes"
    if odd and case == "negative":
        count = -1
    if odd and case == "not a number":
        count = torch.tensor([1.0, float("nan")])
    if odd and case == "a count with a graph":
        count = torch.ones(2, requires_grad=True)
    if odd and case == "another number of counts":
        count = torch.ones(3)
    if odd and case == "another number of means":
        total = torch.ones(3, requires_grad=True) * 2
    if odd and case == "whole numbers":
        total = torch.ones(2, dtype=torch.int64)
    if odd and case == "a matrix":
        total = torch.ones(2, 2)
    if odd and case == "another name":
        name = "tokens"
    if odd and case == "no graph":
        total = total.detach()
    global_mean(total, count, name=name)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("negative", "finite, 0 or more, got [-1, -1]"),
        ("not a number", "finite, 0 or more, got [1.0, nan]"),
        ("a count with a graph", "expected no gradient"),
        ("another number of counts", "as many as means, 2, got (3,)"),
        ("another number of means", "(3,) torch.float32"),
        ("whole numbers", "a floating tensor"),
        ("a matrix", "a floating tensor, 0-dim or (k,)"),
        ("another name", "global_mean `tokens`"),
        ("no graph", "went through the model"),
    ],
)
def test_errors_on_every_rank(pool: RankPool, case: str, text: str) -> None:
    for error in pool.errors(2, call, case):
        assert error.is_a("DDPLossError"), error
        assert text in error.message, error.message
        assert not error.timed_out


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


def weighed_by_rank() -> None:
    for _ in range(2):
        weight = torch.ones(3, requires_grad=True)
        (global_mean(weight.sum(), 3) * (1 + dist.get_rank())).backward()


def test_a_factor_that_differs_by_rank(pool: RankPool) -> None:
    for error in pool.errors(2, weighed_by_rank):
        assert error.is_a("RankMismatchError")
        assert "coefficient" in error.message
