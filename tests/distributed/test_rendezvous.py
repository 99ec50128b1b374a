"""A world started over keys of its own, and what is refused before anything waits for it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed import process_groups, rendezvous
from lightning_ddp_losses.distributed.collectives import all_gather_with_grad
from tests.rank_pool import RankPool

TIMEOUT = timedelta(seconds=20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def leave_world() -> int:
    """Leave the pool's world, in which a rank that goes at once would break the connections that others are about to make."""
    rank = dist.get_rank()
    dist.barrier()
    process_groups.close(world=True)
    return rank


def start(port: int, world_size: int, timeout: float = 20.0, address: str = "127.0.0.1") -> None:
    rank = leave_world()
    rendezvous.start_world(
        address, port, rank=rank, world_size=world_size, backend="gloo", timeout=timedelta(seconds=timeout)
    )


def start_and_gather(port: int) -> list[float]:
    start(port, dist.get_world_size())
    return all_gather_with_grad(torch.tensor([float(dist.get_rank())])).tolist()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_started_world_is_a_world(pool: RankPool, world_size: int) -> None:
    expected = [float(rank) for rank in range(world_size)]
    assert pool.run(world_size, start_and_gather, free_port(), fresh=True) == [expected] * world_size
    pool.errors(world_size, fail)  # the pool's next group starts anew


def fail() -> None:
    raise InterruptedError


def start_with_interface(port: int, of_rank_1: str) -> None:
    if dist.get_rank() == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = of_rank_1
    try:
        start(port, dist.get_world_size())
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def test_an_interface_that_is_none_is_named_on_every_rank(pool: RankPool) -> None:
    errors = pool.errors(3, start_with_interface, free_port(), "nowhere0", fresh=True)
    (text,) = {error.message for error in errors}
    assert {error.type for error in errors} == {"ConfigurationError"}
    assert "rank 1: GLOO_SOCKET_IFNAME=nowhere0" in text
    assert "Unable to find address for: nowhere0" in text
    assert "interfaces: lo" in text


def start_without_rank_1(port: int) -> None:
    if dist.get_rank() == 1:
        leave_world()
        raise InterruptedError("rank 1 never comes")
    start(port, dist.get_world_size(), timeout=1.0)


def test_a_rank_that_never_comes_is_named(pool: RankPool) -> None:
    errors = pool.errors(3, start_without_rank_1, free_port(), fresh=True)
    assert [error.type for error in errors] == ["PeerError", "InterruptedError", "PeerError"]
    assert "no word from rank 1\n" in errors[0].message
    assert errors[0].message == errors[2].message


def start_where_rank_1_looks_elsewhere(port: int) -> None:
    address = "127.0.0.2" if dist.get_rank() == 1 else "127.0.0.1"
    start(port, dist.get_world_size(), timeout=2.0, address=address)


def test_a_wrong_address_is_named_and_the_others_name_who_is_missing(pool: RankPool) -> None:
    port = free_port()
    errors = pool.errors(3, start_where_rank_1_looks_elsewhere, port, fresh=True)
    assert {error.type for error in errors} == {"PeerError"}
    assert f"rendezvous at 127.0.0.2:{port}: expected the store of rank 0 within 2 s" in errors[1].message
    assert "no word from rank 1\n" in errors[0].message
    assert errors[0].message == errors[2].message


def start_alone(port: int) -> None:
    start(port, 2)


def test_a_port_in_use_is_named(pool: RankPool) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (error,) = pool.errors(1, start_alone, port, fresh=True)
    assert error.type == "ConfigurationError"
    assert f"MASTER_PORT {port}" in error.message
    assert "address already in use" in error.message.lower()


# ---------------------------------------------------------------------- devices


def test_two_ranks_of_nccl_on_one_device_are_named() -> None:
    error = rendezvous.shared_device_error(["a GPU 1", "a GPU 2", "a GPU 1", None, None])
    assert error is not None
    assert error.ranks == {0: "a GPU 1", 2: "a GPU 1"}
    assert "process_group_backend='gloo'" in str(error)
    assert rendezvous.shared_device_error(["a", "b", None]) is None


class Properties:
    uuid = "1234"


def test_a_device_is_known_by_what_it_is_and_not_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    numbers = [rendezvous.nccl_device("cpu:gloo,cuda:nccl", torch.device("cuda", number)) for number in (0, 1)]
    assert numbers == [f"{socket.gethostname()} 1234"] * 2
    assert rendezvous.nccl_device("gloo", torch.device("cuda", 0)) is None, "gloo takes two ranks on a device"
    assert rendezvous.nccl_device("nccl", torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
    assert rendezvous.nccl_device("nccl", torch.device("cuda", 3)) == f"{socket.gethostname()} cuda:3"


# ---------------------------------------------------------------------- a world of somebody else under an agent


def keys_of_our_groups(agent: bool) -> bool:
    """Whether our groups write their keys where the world has its own; all ranks write to the same place."""
    ranks, new_group = range(dist.get_world_size()), dist.new_group

    def recorded(*args: Any, **kwargs: Any) -> Any:
        store = compat.default_store()
        store.set(f"group of rank {dist.get_rank()}", "")
        store.wait([f"group of rank {rank}" for rank in ranks])
        return new_group(*args, **kwargs)

    dist.new_group = recorded
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(agent)
    try:
        process_groups.internal_groups()
        assert all_gather_with_grad(torch.ones(1)).numel() == dist.get_world_size()
    finally:
        dist.new_group = new_group
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    return bool(compat.default_store().check([f"group of rank {dist.get_rank()}"]))


@pytest.mark.parametrize("agent", [True, False])
def test_under_an_agent_our_groups_have_keys_of_their_own(pool: RankPool, agent: bool) -> None:
    assert pool.run(3, keys_of_our_groups, agent, fresh=True) == [not agent] * 3
