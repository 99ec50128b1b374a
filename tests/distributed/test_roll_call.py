"""The roll call of a new world: one value on all ranks, whatever a dead world has left in the store, and a word about who is missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_ddp_losses.distributed import rendezvous
from lightning_ddp_losses.distributed.rendezvous import hold_roll_call
from lightning_ddp_losses.errors import ConfigurationError, DDPLossError, PeerError

PATIENT, BRIEF = timedelta(seconds=60), timedelta(seconds=1)
Connect = Callable[[], dist.Store]


@pytest.fixture
def connect() -> Connect:
    """A store in this process. To reach one by TCP, torch asks a name server for the name of each address, which may take seconds."""
    store = dist.HashStore()
    store.set_timeout(PATIENT)
    return lambda: store


@pytest.fixture
def connect_by_tcp() -> Iterator[Connect]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    yield lambda: dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=PATIENT)
    del server  # it serves as long as somebody holds it


def meet(
    connect: Connect, ranks: Sequence[int], world_size: int, timeout: timedelta = PATIENT, **options: Any
) -> list[Any]:
    """What a roll call gives or raises on these ranks, each a thread with a connection of its own."""

    def of_rank(rank: int) -> Any:
        try:
            return hold_roll_call(connect(), rank, world_size, timeout=timeout, report={"rank": rank}, **options)
        except DDPLossError as error:
            return error

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


def test_ranks_that_reach_the_store_by_tcp_get_one_token(connect_by_tcp: Connect) -> None:
    assert len(tokens_of_three_worlds(connect_by_tcp, 3)) == 3


def test_words_and_answers_of_dead_ranks_count_for_nothing(connect: Connect) -> None:
    left = dist.PrefixStore(f"{rendezvous._PREFIX}/world", connect())
    left.set(rendezvous._TOKEN, "dead token")
    for rank in range(4):
        left.set(rendezvous._here("dead token", rank), json.dumps([f"dead {rank}", {"rank": "dead"}]))
        left.set(rendezvous._answer_to(f"dead {rank}"), "")
    seen: list[Any] = []
    with ThreadPoolExecutor(1) as threads:
        # the others come first, find the token of the dead, and wait for a living rank 0
        others = threads.submit(meet, connect, [3, 1, 2], 4)
        while "dead 1" in left.get(rendezvous._here("dead token", 1)).decode():
            pass
        tokens = {*meet(connect, [0], 4, judge=seen.extend), *others.result()}
    assert len(tokens) == 1
    assert "dead token" not in tokens
    assert seen == [{"rank": rank} for rank in range(4)]


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
def test_what_rank_0_finds_in_the_reports_is_an_error_on_every_rank(connect: Connect, world_size: int) -> None:
    def judge(reports: Sequence[Any]) -> DDPLossError:
        ranks = {report["rank"]: "odd" for report in reports if report["rank"] % 2}
        return ConfigurationError("ranks", expected="even", ranks=ranks, fix="Add one.")

    errors = meet(connect, range(world_size), world_size, judge=judge)
    expected = ConfigurationError("ranks", expected="even", ranks={1: "odd"}, fix="Add one.")
    assert {type(error) for error in errors} == {ConfigurationError}
    assert {str(error) for error in errors} == {str(expected)}
    assert all(error.collective for error in errors)


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
