"""Collectives against one process: values bit for bit, gradients exactly (the numbers are small integers in any dtype)."""

from __future__ import annotations

from itertools import accumulate
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives
from tests.doors import collectives, raw_collectives
from tests.each_rank import each_rank

ROWS = {
    "even": lambda w: [3] * w,
    "uneven": lambda w: [4, 1, 2][:w],
    "one rank empty": lambda w: [2, 0, 3][:w],
    "first rank empty": lambda w: [0, 3, 1][:w],
    "all empty": lambda w: [0] * w,
}
WIDTHS = [(), (5,), (2, 3), (2, 0)]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.complex64]


def whole(rows: int, width: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    low = 0 if dtype in (torch.uint8, torch.bool) else -4
    return torch.randint(low, 2 if dtype == torch.bool else 5, (rows, *width), generator=generator).to(dtype)


def parts(rows: list[int]) -> list[slice]:
    return [slice(end - count, end) for end, count in zip(accumulate(rows), rows, strict=True)]


def assert_equal(got: Tensor | None, expected: Tensor) -> None:
    assert got is not None
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(got, expected), f"got {got.tolist()}, expected {expected.tolist()}"


def gather_and_differentiate(rows: list[int], width: tuple[int, ...], dtype: torch.dtype, backward: str) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    data, own = whole(sum(rows), width, dtype, 0), parts(rows)[rank]
    local = data[own].clone()
    kept = local.clone()
    grads = dtype.is_floating_point
    local.requires_grad_(grads)
    gathered = collectives.all_gather_with_grad(local, backward=backward)
    assert_equal(gathered, data)
    assert gathered.requires_grad == grads
    assert_equal(local.detach(), kept)
    if grads:
        weights = [whole(sum(rows), width, dtype, 1 + (s if backward == "sum" else 0)) for s in range(world)]
        (gathered * weights[rank]).sum().backward()
        # one process: the sum over ranks of what they back-propagate
        assert_equal(local.grad, torch.stack(weights).double().sum(0)[own].to(dtype))


@pytest.mark.parametrize("backward", ["sum", "own_slice"])
@pytest.mark.parametrize("width", WIDTHS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_gather(pool: RankPool, world_size: int, rows: str, width: tuple[int, ...], backward: str) -> None:
    for dtype in DTYPES:
        pool.run(world_size, gather_and_differentiate, ROWS[rows](world_size), width, dtype, backward)


def reduce_and_differentiate(shape: tuple[int, ...], dtype: torch.dtype, backward: str) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    data = whole(world, shape, dtype, 0)
    local = data[rank].clone().requires_grad_(dtype.is_floating_point)
    total = collectives.all_reduce_with_grad(local, backward=backward)
    assert_equal(total.detach(), data.sum(0).to(dtype))
    assert_equal(local.detach(), data[rank])
    if dtype.is_floating_point:
        weights = [whole(1, shape, dtype, 1 + (s if backward == "sum" else 0))[0] for s in range(world)]
        (total * weights[rank]).sum().backward()
        assert_equal(local.grad, torch.stack(weights).sum(0))


@pytest.mark.parametrize("backward", ["sum", "own_slice"])
@pytest.mark.parametrize("shape", [(), (1,), (4,), (0,), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_reduce(pool: RankPool, world_size: int, shape: tuple[int, ...], backward: str) -> None:
    for dtype in [*FLOATS, torch.int64, torch.int32, torch.int16, torch.uint8, torch.complex64]:
        pool.run(world_size, reduce_and_differentiate, shape, dtype, backward)


def scatter_and_differentiate(rows: list[int], width: tuple[int, ...], dtype: torch.dtype, say_rows: bool) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    own = parts(rows)[rank]
    data = torch.stack([whole(sum(rows), width, dtype, s) for s in range(world)])
    local = data[rank].clone().requires_grad_(dtype.is_floating_point)
    mine = collectives.reduce_scatter_with_grad(local, rows[rank] if say_rows else None)
    assert_equal(mine.detach(), data.sum(0)[own].to(dtype))
    assert_equal(local.detach(), data[rank])
    if dtype.is_floating_point:
        weight = whole(sum(rows), width, dtype, 7)  # of all rows: each rank back-propagates its own of them
        (mine * weight[own]).sum().backward()
        assert_equal(local.grad, weight)


@pytest.mark.parametrize("width", WIDTHS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reduce_scatter(pool: RankPool, world_size: int, rows: str, width: tuple[int, ...]) -> None:
    for dtype in [*FLOATS, torch.int64]:
        pool.run(world_size, scatter_and_differentiate, ROWS[rows](world_size), width, dtype, True)
        if rows == "even":
            pool.run(world_size, scatter_and_differentiate, ROWS[rows](world_size), width, dtype, False)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@each_rank()
def test_all_gather_takes_a_0_dim_tensor_as_a_row() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    scalar = torch.tensor(float(rank), dtype=torch.float64, requires_grad=True)
    gathered = collectives.all_gather_with_grad(scalar)
    assert_equal(gathered.detach(), torch.arange(world, dtype=torch.float64))
    (gathered * torch.arange(1.0, 1 + world)).sum().backward()
    assert_equal(scalar.grad, torch.tensor(world * (1.0 + rank), dtype=torch.float64))


@each_rank(3)
def test_half_precision_is_summed_in_float32() -> None:
    rank = dist.get_rank()
    share = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)[rank]  # bfloat16 steps give 256, the sum is 258
    assert collectives.all_reduce_with_grad(share).item() == 258
    assert [part.item() for part in collectives.reduce_scatter_with_grad(share.expand(3).contiguous())] == [258]
    row = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
    (collectives.all_gather_with_grad(row) * share).sum().backward()
    assert row.grad.item() == 258


@each_rank(2)
def test_views_and_strided_gradients() -> None:
    rank = dist.get_rank()
    data = whole(4, (6,), torch.float64, 0)
    for view in (data.T, data[:, ::2], data[:1].expand(3, 6), data.flip(0)):
        local = (view + rank).detach().as_strided(view.shape, (view + rank).stride()).requires_grad_()
        gathered = collectives.all_gather_with_grad(local[1:])
        assert_equal(gathered.detach(), torch.cat([view[1:], view[1:] + 1]))
        gathered.T.reshape(-1)[::2].sum().backward()  # a gradient that is a strided view
        assert_equal(local.grad[:1], torch.zeros_like(local[:1]))  # type: ignore[index]
    turned = torch.arange(6.0).reshape(2, 3).T.requires_grad_(False)
    assert_equal(collectives.all_reduce_with_grad(turned), 2 * turned)
    assert_equal(collectives.reduce_scatter_with_grad(turned, 1 + rank), 2 * turned[[slice(0, 1), slice(1, 3)][rank]])


@pytest.mark.parametrize("backward", ["sum", "own_slice"])
@pytest.mark.parametrize("owner", [0, 2])
@each_rank(3)
def test_a_gradient_that_one_rank_needs_reaches_it(owner: int, backward: Any) -> None:
    local = torch.full((2, 2), float(dist.get_rank()), requires_grad=dist.get_rank() == owner)
    gathered = collectives.all_gather_with_grad(local, backward=backward)
    assert gathered.requires_grad
    gathered.sum().backward()
    if dist.get_rank() == owner:
        assert_equal(local.grad, torch.full((2, 2), 3.0))
    else:
        assert local.grad is None


@each_rank(2)
def test_no_graph_where_none_is_asked_for() -> None:
    local = torch.ones(2, 2, requires_grad=True)
    with torch.no_grad():
        assert not collectives.all_gather_with_grad(local).requires_grad
        assert not collectives.all_reduce_with_grad(local).requires_grad
    assert not collectives.all_gather_with_grad(local.detach()).requires_grad
    with torch.inference_mode():
        assert collectives.all_gather_with_grad(local.detach()).shape == (2 * dist.get_world_size(), 2)


def counted(name: str, backward: str, *, uneven: bool) -> tuple[int, int]:
    rows = 2 + (dist.get_rank() if uneven else 0)
    local = torch.ones(rows, 3, requires_grad=True)
    collectives.all_reduce_with_grad(torch.ones(()))  # groups are made at first use
    with CountCollectives() as counter:
        if name == "reduce_scatter_with_grad":
            local = torch.ones(4, 3, requires_grad=True)
            out = collectives.reduce_scatter_with_grad(local, [1, 3][dist.get_rank()] if uneven else None)
        else:
            out = getattr(collectives, name)(local, backward=backward)
        forward = len(counter.take())
        out.sum().backward()
        return forward, len(counter.take())


@pytest.mark.parametrize(
    ("name", "backward", "uneven", "expected"),
    [
        ("all_gather_with_grad", "sum", False, (2, 1)),  # a handshake and a gather; one exchange back
        ("all_gather_with_grad", "sum", True, (2, 1)),
        ("all_gather_with_grad", "own_slice", False, (2, 0)),
        ("all_gather_with_grad", "own_slice", True, (2, 0)),
        ("all_reduce_with_grad", "sum", False, (2, 1)),
        ("all_reduce_with_grad", "own_slice", False, (2, 0)),
        ("reduce_scatter_with_grad", "sum", False, (2, 1)),
        ("reduce_scatter_with_grad", "sum", True, (2, 1)),
    ],
)
def test_number_of_collectives(
    pool: RankPool, name: str, backward: str, uneven: bool, expected: tuple[int, int]
) -> None:
    assert pool.run(2, counted, name, backward, uneven=uneven) == [expected, expected]
    alone = pool.run(1, counted, name, backward, uneven=False)
    assert alone == [(0, 0)], "a world of one communicates nothing"


@each_rank(1, distributed=False)
def test_without_torch_distributed_the_world_is_one_process() -> None:
    local = torch.ones(2, 3, requires_grad=True)
    assert_equal(collectives.all_gather_with_grad(local).detach(), torch.ones(2, 3))
    assert_equal(collectives.all_gather_with_grad(torch.tensor(2.0)), torch.tensor([2.0]))
    assert_equal(collectives.reduce_scatter_with_grad(local, 2).detach(), torch.ones(2, 3))
    collectives.all_reduce_with_grad(local).sum().backward()
    assert_equal(local.grad, torch.ones(2, 3))


# ---------------------------------------------------------------------- kinds of tensors

NARROW = [torch.int16, torch.uint16, torch.int8, torch.uint8, torch.bool]
ADDED = [*NARROW, torch.int32, torch.float8_e4m3fn, torch.complex128]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@each_rank()
def test_what_can_be_added() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for dtype in ADDED:
        drawn = torch.bool if dtype == torch.bool else torch.uint8
        data = [whole(2 * world, (3,), drawn, seed).to(dtype) for seed in range(world)]
        wide = torch.promote_types(torch.float64, dtype) if dtype.is_complex else torch.float64
        expected = torch.stack([each.to(wide) for each in data]).sum(0).to(dtype).to(wide)
        scattered = collectives.reduce_scatter_with_grad(data[rank])
        reduced = collectives.all_reduce_with_grad(data[rank])
        assert scattered.dtype == reduced.dtype == dtype
        assert torch.equal(scattered.to(wide), expected[2 * rank : 2 * rank + 2]), dtype
        assert torch.equal(reduced.to(wide), expected), dtype


@pytest.mark.parametrize("world_size", [1, 2, 3])
@each_rank()
def test_conjugated_and_negated_views() -> None:
    """Views that torch only marks: each function against the same numbers written out, with the gradient through the view."""
    world, rank = dist.get_world_size(), dist.get_rank()
    numbers = [
        torch.complex(whole(2 * world, (3,), torch.float64, s), whole(2 * world, (3,), torch.float64, 9 + s))
        for s in range(world)
    ]
    for view in (torch.conj, lambda z: z.conj().imag, lambda z: z.mH.mH.conj()):
        for name in ("all_gather_with_grad", "all_reduce_with_grad", "reduce_scatter_with_grad"):
            function = getattr(collectives, name)
            marked = numbers[rank].clone().requires_grad_()
            written = numbers[rank].clone().requires_grad_()
            found = function(view(marked))
            expected = function(view(written).resolve_conj().resolve_neg().clone())
            assert_equal(found.detach(), expected.detach())
            (found.conj() * found.conj()).real.sum().backward()
            (expected.resolve_conj() ** 2).real.sum().backward()
            assert_equal(marked.grad, written.grad)
    total = torch.stack(numbers).conj().sum(0)
    assert_equal(collectives.all_reduce_with_grad(numbers[rank].conj()).resolve_conj(), total.resolve_conj())


X = torch.ones(4, 2)


@each_rank(2)
def test_functional_call_and_autograd_grad() -> None:
    layer = torch.nn.Linear(2, 2)
    parameters = {name: parameter.detach().clone().requires_grad_() for name, parameter in layer.named_parameters()}
    gathered = collectives.all_gather_with_grad(torch.func.functional_call(layer, parameters, (X,)))
    (found,) = torch.autograd.grad(gathered.sum(), [parameters["bias"]])
    assert found.tolist() == [4.0 * dist.get_world_size()] * 2


@pytest.mark.parametrize("numbers", [4, 1 << 18])
@pytest.mark.parametrize("world_size", [2, 3])
@each_rank()
def test_a_mean_of_halves_does_not_overflow(numbers: int) -> None:
    """Means of large halves, by a gather and by an all-reduce."""
    found = raw_collectives.start_mean(torch.full((numbers,), 40_000.0, dtype=torch.float16))()
    flag = raw_collectives.start_mean(torch.full((numbers,), float(dist.get_rank() == 0), dtype=torch.float16))()
    assert (found.max().item(), round(flag[0].item() * dist.get_world_size(), 1)) == (40000.0, 1.0)


def scattered_on_a_device(dtype: torch.dtype, counts: list[int]) -> tuple[torch.dtype, bool]:
    """The dtype that a backend like NCCL adds, and whether it gets the tensor's own memory."""
    given: list[Tensor] = []
    tensor = torch.empty(sum(counts), 3, dtype=dtype, device="meta")
    with mock.patch.multiple(
        raw_collectives,
        is_staged=lambda *args: False,
        group_for=lambda *args: dist.group.WORLD,
        _reduce_scatter_into=lambda out, rows, group: given.append(rows),
    ):
        found = raw_collectives.reduce_scatter_rows(tensor, counts, None)
    assert found.dtype == dtype
    assert found.shape == (counts[dist.get_rank()], 3)
    own = given[0].untyped_storage()._cdata == tensor.untyped_storage()._cdata
    return given[0].dtype, own


@pytest.mark.parametrize(
    ("dtype", "counts", "added", "own"),
    [
        (torch.float32, [2, 2], torch.float32, True),
        (torch.float32, [2, 1], torch.float32, False),
        (torch.complex64, [2, 2], torch.float32, True),
        (torch.complex128, [0, 2], torch.float64, False),
        (torch.bfloat16, [2, 2], torch.float32, False),
    ],
    ids=str,
)
def test_reduce_scatter_on_a_device(
    pool: RankPool, dtype: torch.dtype, counts: list[int], added: torch.dtype, own: bool
) -> None:
    """Equal counts need no padded copy; NCCL adds complex numbers as pairs."""
    assert pool.run(2, scattered_on_a_device, dtype, counts, fresh=True) == [(added, own)] * 2
