"""A world started over keys of its own, what is refused before anything waits for it, and the roll call of its ranks."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_losses.collectives import all_gather_with_grad
from lightning_ddp_losses.errors import ConfigurationError, DDPLossError, PeerError
from lightning_ddp_losses.testing import RankPool
from tests.doors import hold_roll_call, process_groups, rendezvous, torch_compat
from tests.each_rank import each_rank
from tests.processes import free_port
from tests.refusals import assert_same_error


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
    words = "rank 1: GLOO_SOCKET_IFNAME=nowhere0", "Unable to find address for: nowhere0", "interfaces: lo"
    assert_same_error(errors, *words, kind="ConfigurationError")


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


def test_a_device_is_known_by_what_it_is_and_not_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    numbers = [rendezvous.nccl_device("cpu:gloo,cuda:nccl", torch.device("cuda", number)) for number in (0, 1)]
    assert numbers == [f"{socket.gethostname()} 1234"] * 2
    assert rendezvous.nccl_device("gloo", torch.device("cuda", 0)) is None, "gloo takes two ranks on a device"
    assert rendezvous.nccl_device("nccl", torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: object())
    own = f"{socket.gethostname()} cuda:3"
    assert rendezvous.nccl_device("nccl", torch.device("cuda", 3)) == own
    monkeypatch.setenv("NCCL_HOSTID", "another host")
    assert rendezvous.nccl_device("nccl", torch.device("cuda", 3)) == f"another host {own}", "as NCCL tells hosts apart"
    assert rendezvous.nccl_device("cpu:gloo,cuda:nccl", torch.device("cpu")) is None, "ranks share a CPU on any host"


# ---------------------------------------------------------------------- a world of somebody else under an agent


@pytest.mark.parametrize("agent", [True, False])
@each_rank(3, fresh=True)
def test_under_an_agent_our_groups_have_keys_of_their_own(agent: bool) -> None:
    """Whether our groups write their keys where the world has its own; all ranks write to the same place."""
    ranks, new_group = range(dist.get_world_size()), dist.new_group

    def recorded(*args: Any, **kwargs: Any) -> Any:
        store = torch_compat.default_store()
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
    assert bool(torch_compat.default_store().check([f"group of rank {dist.get_rank()}"])) == (not agent)


# ---------------------------------------------------------------------- the roll call of a new world

PATIENT, BRIEF = timedelta(seconds=60), timedelta(seconds=1)
Connect = Callable[[], dist.Store]


@pytest.fixture
def connect() -> Connect:
    """A store in this process. To reach one by TCP, torch asks a name server for the name of each address, which may take seconds."""
    store = dist.HashStore()
    store.set_timeout(PATIENT)
    return lambda: store


def meet(
    connect: Connect, ranks: Sequence[int], world_size: int, timeout: timedelta = PATIENT, **options: Any
) -> list[Any]:
    """The token that a roll call gives, or what it raises, on these ranks: each a thread with a connection of its own."""

    def of_rank(rank: int) -> Any:
        try:
            token, reports = hold_roll_call(
                connect(), rank, world_size, timeout=timeout, report={"rank": rank}, **options
            )
        except DDPLossError as error:
            return error
        assert reports == [{"rank": each} for each in range(world_size)]
        return token

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(of_rank, ranks))


def tokens_of_three_worlds(connect: Connect, world_size: int) -> set[str]:
    tokens = set()
    for _ in range(3):
        (token,) = set(meet(connect, range(world_size), world_size))
        tokens.add(token)
    return tokens


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
def test_all_ranks_get_one_token_and_each_world_another(connect: Connect, world_size: int) -> None:
    assert len(tokens_of_three_worlds(connect, world_size)) == 3


def test_ranks_that_reach_the_store_by_tcp_get_one_token() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # it serves while somebody holds it
    connect = partial(dist.TCPStore, "127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=PATIENT)
    assert len(tokens_of_three_worlds(connect, 3)) == 3


def test_words_and_answers_of_dead_ranks_count_for_nothing(connect: Connect) -> None:
    left = dist.PrefixStore(f"{rendezvous._PREFIX}/world", connect())
    left.set(rendezvous._TOKEN, "dead token")
    for rank in range(4):
        left.set(rendezvous._here("dead token", rank), json.dumps([f"dead {rank}", {"rank": "dead"}]))
        left.set(rendezvous._answer_to(f"dead {rank}"), "")
    left.set(rendezvous._verdict("dead token"), json.dumps([[], []]))
    with ThreadPoolExecutor(1) as threads:
        # the others come first, find the token of the dead, and wait for a living rank 0
        others = threads.submit(meet, connect, [3, 1, 2], 4)
        while "dead 1" in left.get(rendezvous._here("dead token", 1)).decode():
            pass
        tokens = {*meet(connect, [0], 4), *others.result()}
    assert len(tokens) == 1
    assert "dead token" not in tokens


@pytest.mark.parametrize(("came", "missing"), [([0, 1, 3], "rank 2"), ([0], "rank 1, 2, 3"), ([1, 2, 3], "rank 0")])
def test_every_rank_that_came_names_those_that_did_not(
    connect: Connect, came: list[int], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_VERDICT_SECONDS", 3.0 if 0 in came else 0.0)
    errors = meet(connect, came, 4, BRIEF)
    assert {type(error) for error in errors} == {PeerError}
    (text,) = {str(error) for error in errors}
    assert text.startswith(f"rendezvous of 4 ranks: expected all of them within 1 s, got no word from {missing}\n")


def test_a_dead_ranks_word_does_not_hide_that_it_is_missing(connect: Connect) -> None:
    meet(connect, range(3), 3)
    errors = meet(connect, [0, 2], 3, BRIEF)
    assert {str(error).splitlines()[0] for error in errors} == {
        "rendezvous of 3 ranks: expected all of them within 1 s, got no word from rank 1"
    }


def test_many_missing_ranks_are_counted(connect: Connect) -> None:
    (error,) = meet(connect, [0], 64, BRIEF)
    assert "rank 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and 47 more" in str(error)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_problem_in_the_reports_is_an_error_on_every_rank(connect: Connect, world_size: int) -> None:
    def judge(reports: Sequence[Any]) -> DDPLossError:
        ranks = {report["rank"]: "odd" for report in reports if report["rank"] % 2}
        return ConfigurationError("ranks", expected="even", ranks=ranks, fix="Add one.")

    expected = ConfigurationError("ranks", expected="even", ranks={1: "odd"}, fix="Add one.")
    for error in meet(connect, range(world_size), world_size, judge=judge):
        assert (type(error), str(error), error.collective) == (ConfigurationError, str(expected), True)


def test_the_calls_of_rank_0_do_not_grow_with_the_world(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(dist.PrefixStore, name)

        def call(self: Any, *args: Any) -> Any:
            calls.append(name)
            return original(self, *args)

        return call

    for name in ("set", "multi_set", "multi_get"):
        monkeypatch.setattr(dist.PrefixStore, name, counted(name))
    meet(connect, range(24), 24)
    # of each other rank: its word, and that it has read the answer; of rank 0: the token
    assert calls.count("set") == 2 * 23 + 1
    assert calls.count("multi_set") == calls.count("multi_get") == 1
