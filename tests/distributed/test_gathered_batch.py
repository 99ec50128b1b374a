"""Several tensors gathered as one: inside the handshake or after it, the same rows bit for bit and the same gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_losses.testing import RankPool
from tests.counting import CountCollectives, nothing_rides
from tests.distributed.test_collectives import ROWS, assert_equal, parts
from tests.doors import gather_batch, handshake
from tests.each_rank import each_rank

# as whole numbers, which every dtype holds and adds exactly
TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "float64, columns first": lambda x: x.double().T.contiguous().T,
    "bfloat16, every second column": lambda x: x.bfloat16()[:, ::2],
    "float32, one number per row": lambda x: x.float()[:, 0],
    "float16, no width": lambda x: x.half()[:, :0],
    "int64": lambda x: x.long()[:, :2],
    "bool": lambda x: x[:, 0] > 0,
    "uint8, two dimensions": lambda x: (x > 0).to(torch.uint8).reshape(len(x), 2, 2),
    "complex64": lambda x: x.to(torch.complex64),
}
RIDES: dict[str, Callable[[int], contextlib.AbstractContextManager[Any]]] = {  # who thinks that its bytes fit
    "all ride": lambda rank: contextlib.nullcontext(),
    "none rides": lambda rank: nothing_rides(),
    "the first does not": lambda rank: contextlib.nullcontext() if rank else nothing_rides(),
    "only the first does": lambda rank: nothing_rides() if rank else contextlib.nullcontext(),
}


def numbers(rows: int, seed: int) -> Tensor:
    return torch.randint(-4, 5, (rows, 4), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("backward", ["sum", "own_slice"])
@pytest.mark.parametrize("rides", RIDES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@each_rank()
def test_rows_and_gradients_however_they_travel(rides: str, backward: str) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for sizes in (make(world) for make in ROWS.values()):
        own = parts(sizes)[rank]
        everything = {name: make(numbers(sum(sizes), 0)) for name, make in TENSORS.items()}
        local = {name: make(numbers(sum(sizes), 0)[own]) for name, make in TENSORS.items()}
        trained = [name for name, tensor in local.items() if tensor.is_floating_point()]
        for name in trained:
            local[name].requires_grad_()
        with RIDES[rides](rank):
            bundle = gather_batch("bundle", local, {}, backward=backward, extra=b"x" * rank)  # type: ignore[arg-type]
        assert bundle.extras == [b"x" * r for r in range(world)]
        assert bundle.counts == [sizes] * len(TENSORS)
        for (name, expected), got in zip(everything.items(), bundle.tensors, strict=True):
            assert_equal(got, expected)
            assert got.requires_grad == (name in trained)
        gathered = dict(zip(local, bundle.tensors, strict=True))
        # one process: the sum over ranks of what they back-propagate
        seeds = [1 + r if backward == "sum" else 1 for r in range(world)]
        weights = {name: [TENSORS[name](numbers(sum(sizes), seed)) for seed in seeds] for name in trained}
        torch.stack([(gathered[name] * weights[name][rank]).sum().double() for name in trained]).sum().backward()
        for name in trained:
            assert_equal(local[name].grad, torch.stack(weights[name]).double().sum(0)[own].to(local[name].dtype))


def only_counted() -> torch.Size:
    with nothing_rides():
        return (
            gather_batch("bundle", {"rows": torch.ones(1 + dist.get_rank(), 4)}, {}, counted=["rows"]).tensors[0].shape
        )


def test_rows_that_are_only_counted_come_back_without_a_width(pool: RankPool) -> None:
    assert pool.run(3, only_counted) == [torch.Size([6, 0])] * 3


def sizes_that_change() -> list[tuple[int, int, int, int]]:
    """Over many calls: collectives, bytes of the longest and of the shortest rank, and those that a handshake has room for."""
    world, rank, found = dist.get_world_size(), dist.get_rank(), []
    for _ in range(130):
        handshake.all_gather("whatever other tests sent is forgotten", {})
    most = handshake.inline_capacity() // 512  # rows
    for call, count in enumerate([150, 150, 7, 0, 180, 100, most + 1, 200, 0, most + 40, 200, most // 2, most // 2]):
        sizes = [max(count - 3 * r, 0) if call % 2 else max(count - 3 * (world - 1 - r), 0) for r in range(world)]
        whole = torch.arange(sum(sizes) * 64, dtype=torch.float64).reshape(-1, 64)
        local = whole[parts(sizes)[rank]].clone().requires_grad_()
        with CountCollectives() as counter:
            bundle = gather_batch("bundle", {"rows": local}, {})
        assert_equal(bundle.tensors[0].detach(), whole)
        bundle.tensors[0].sum().backward()
        assert_equal(local.grad, torch.full_like(local, world))
        found.append((len(counter.names), max(sizes) * 512, min(sizes) * 512, handshake.inline_capacity()))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_batch_size_that_changes_from_call_to_call(pool: RankPool, world_size: int) -> None:
    results = pool.run(world_size, sizes_that_change)
    assert all(found == results[0] for found in results)
    largest = 0
    for number, (collectives, most, least, room) in enumerate(results[0]):
        beyond = [bytes_ + 64 > room for bytes_ in (most, least)]
        unseen = most > largest if not beyond[0] else not beyond[1] and least > largest
        expected = (
            1 + beyond[0] + unseen
        )  # handshake, gather of what is too long for one, what the handshakes have not grown to
        assert collectives == expected, number
        largest = max(largest, *(n for n, over in zip((most, least), beyond, strict=True) if not over), 0)


@pytest.mark.parametrize("world_size", [2, 3])
@each_rank()
def test_one_rank_has_too_many() -> None:
    rank = dist.get_rank()
    sizes = [3, handshake.inline_capacity() // 8 + 1, 0][: dist.get_world_size()]
    whole = torch.arange(sum(sizes))
    for _ in range(2):
        with CountCollectives() as counter:
            bundle = gather_batch("bundle", {"rows": whole[parts(sizes)[rank]]}, {})
    assert (len(counter.names), torch.equal(bundle.tensors[0], whole)) == (2, True)


def test_room_is_taken_from_all_ranks_alike() -> None:
    with mock.patch("lightning_ddp_losses.distributed.process_groups.world_size", side_effect=[2, 8, 1024]):
        two, eight, many = (handshake.inline_capacity() for _ in range(3))
    assert two > eight > many > 4096
