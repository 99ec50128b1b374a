"""The roll call of a new world: one value on all ranks, whatever a dead world has left in the store, and a word about who is missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_ddp_losses.distributed import roll_call
from lightning_ddp_losses.distributed.roll_call import hold_roll_call
from lightning_ddp_losses.errors import ConfigurationError, DDPLossError, PeerError

PATIENT, BRIEF = timedelta(seconds=60), timedelta(seconds=1)


@pytest.fixture
def port() -> Iterator[int]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port
    del server  # it serves as long as somebody holds it


def meet(port: int, ranks: Sequence[int], world_size: int, timeout: timedelta = PATIENT, **options: Any) -> list[Any]:
    """What a roll call gives or raises on these ranks, each a thread with a connection of its own."""

    def of_rank(rank: int) -> Any:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=PATIENT)
        try:
            return hold_roll_call(store, rank, world_size, timeout=timeout, report={"rank": rank}, **options)
        except DDPLossError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(of_rank, ranks))


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
def test_all_ranks_get_one_token_and_each_world_another(port: int, world_size: int) -> None:
    tokens = set()
    for _ in range(3):
        (token,) = set(meet(port, range(world_size), world_size))
        tokens.add(token)
    assert len(tokens) == 3


def test_words_and_answers_of_dead_ranks_count_for_nothing(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    server = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    left = dist.PrefixStore(f"{roll_call._PREFIX}/world", server)
    for rank in range(4):
        left.set(roll_call._here(rank), json.dumps([f"dead {rank}", {"rank": "dead"}]))
        left.set(roll_call._answer_to(f"dead {rank}"), "dead token")
    seen: list[Any] = []

    def judge(reports: Sequence[Any]) -> None:
        seen.extend(reports)

    with ThreadPoolExecutor(1) as threads:
        # rank 0 comes first, finds a word of every rank, and waits for the living
        rank_0 = threads.submit(meet, port, [0], 4, judge=judge)
        while not left.check([roll_call._answer_to("dead 3")]):
            pass
        others = meet(port, [3, 1, 2], 4)
    assert {*rank_0.result(), *others} == {others[0]}
    assert others[0] != "dead token"
    assert seen == [{"rank": rank} for rank in range(4)]


@pytest.mark.parametrize(("came", "missing"), [([0, 1, 3], "rank 2"), ([0], "rank 1, 2, 3"), ([1, 2, 3], "rank 0")])
def test_every_rank_that_came_names_those_that_did_not(
    port: int, came: list[int], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roll_call, "_VERDICT_SECONDS", 3.0 if 0 in came else 0.0)
    errors = meet(port, came, 4, BRIEF)
    assert {type(error) for error in errors} == {PeerError}
    (text,) = {str(error) for error in errors}
    assert text.startswith(f"rendezvous of 4 ranks: expected all of them within 1 s, got no word from {missing}\n")


def test_a_dead_ranks_word_does_not_hide_that_it_is_missing(port: int) -> None:
    meet(port, range(3), 3)
    errors = meet(port, [0, 2], 3, BRIEF)
    assert {str(error).splitlines()[0] for error in errors} == {
        "rendezvous of 3 ranks: expected all of them within 1 s, got no word from rank 1"
    }


def test_many_missing_ranks_are_counted(port: int) -> None:
    (error,) = meet(port, [0], 64, BRIEF)
    assert "rank 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and 47 more" in str(error)


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_rank_0_finds_in_the_reports_is_an_error_on_every_rank(port: int, world_size: int) -> None:
    def judge(reports: Sequence[Any]) -> DDPLossError:
        ranks = {report["rank"]: "odd" for report in reports if report["rank"] % 2}
        return ConfigurationError("ranks", expected="even", ranks=ranks, fix="Add one.")

    errors = meet(port, range(world_size), world_size, judge=judge)
    expected = ConfigurationError("ranks", expected="even", ranks={1: "odd"}, fix="Add one.")
    assert {type(error) for error in errors} == {ConfigurationError}
    assert {str(error) for error in errors} == {str(expected)}
    assert all(error.collective for error in errors)


def test_the_calls_of_rank_0_do_not_grow_with_the_world(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(dist.PrefixStore, name)

        def call(self: Any, *args: Any) -> Any:
            calls.append(name)
            return original(self, *args)

        return call

    for name in ("set", "multi_set", "multi_get"):
        monkeypatch.setattr(dist.PrefixStore, name, counted(name))
    monkeypatch.setattr(roll_call, "_POLL_SECONDS", 0.2)
    meet(port, range(24), 24)
    # of each other rank: its word, that it has the token, that it has read the verdict; of rank 0: its word and the verdict
    assert calls.count("set") == 3 * 23 + 2
    assert calls.count("multi_set") <= calls.count("multi_get") <= 30
