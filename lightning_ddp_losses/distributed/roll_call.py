"""Roll call: how the ranks of a new world agree on a value through a store, before any process group is there.

A store may hold what a former world has written: the agent of ``torchrun`` keeps one store for all attempts, and in it a rank of the new
attempt finds the addresses of dead ones. What a rank reads there proves nothing; so each rank writes a random word, and whoever answers
that word lives now. How often a node was restarted proves nothing either, since nodes count that differently
(``TORCHELASTIC_RESTART_COUNT``).

1. Each rank writes its word, with what it reports of itself.
2. Rank 0 answers each word that it has not answered yet with the token of this roll call, until every rank has said that it has it.
3. Rank 0 reads the reports, and tells all ranks its verdict: an error, or nothing.

Legend: ``W`` ranks. Rank 0 reads and writes messages for all ranks at once: a few round trips, whatever ``W`` is.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lightning_ddp_losses.errors import DDPLossError, PeerError, error_class

Report: TypeAlias = Mapping[str, Any]
"""What a rank says of itself; plain values, which travel as JSON."""

_PREFIX = "lightning_ddp_losses/roll_call"
_POLL_SECONDS = 0.01
_VERDICT_SECONDS = 5.0  # more than rank 0 waits: so long may its verdict be under way
_SHOWN_RANKS = 16


def hold_roll_call(
    store: Store,
    rank: int,
    world_size: int,
    *,
    timeout: timedelta,
    name: str = "world",
    report: Report | None = None,
    judge: Callable[[Sequence[Report]], DDPLossError | None] | None = None,
) -> str:
    """Meet all ranks in a store, which may hold what former worlds have written.

    Args:
        store: That all of them reach.
        rank: This rank's, of those that meet.
        world_size: How many meet.
        timeout: How long to wait for those that do not come.
        name: Of those who meet, where several roll calls use a store at a time.
        report: What this rank says of itself.
        judge: Looks at the reports of all ranks, on rank 0.

    Returns:
        A token, equal on all ranks, which no former roll call had.

    Raises:
        PeerError: on every rank that came, naming those that did not, as far as the store can say.
        DDPLossError: on every rank, what ``judge`` found.

    Communication: none but the store's.
    """
    own_store = PrefixStore(f"{_PREFIX}/{name}", store)
    if rank == 0:
        return _Caller(own_store, world_size, timeout).call(report or {}, judge)
    return _answer(own_store, rank, world_size, timeout, report or {})


class _Caller:
    """Rank 0 of a roll call."""

    def __init__(self, store: Store, world_size: int, timeout: timedelta) -> None:
        self._store, self._timeout = store, timeout
        self._others = range(1, world_size)
        self._token = secrets.token_hex(8)
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._answered: set[str] = set()

    def call(self, report: Report, judge: Callable[[Sequence[Report]], DDPLossError | None] | None) -> str:
        """Answer all ranks, judge what they report, and tell them."""
        self._store.set(_here(0), json.dumps(["", dict(report)]))  # for the others, who name those that are missing
        missing = self._meet()
        if missing:
            # those who are here wait for a word too
            self._answer_those([rank for rank in self._others if rank not in missing])
            error: DDPLossError | None = _missing_error(missing, len(self._others) + 1, self._timeout)
        else:
            reports = [report, *(found for _, found in self._read(self._others))]
            error = None if judge is None else judge(reports)
        verdict = None if error is None else {"class": type(error).__name__, "parts": _plain_parts(error)}
        self._store.set(_verdict(self._token), json.dumps(verdict))
        if verdict is not None:
            self._wait_until_read([rank for rank in self._others if rank not in missing])
            raise _error_from(verdict)
        return self._token

    def _meet(self) -> list[int]:
        """Answer every rank's word until all have the token; return those that have not when the time is over."""
        # 1. a word of each, which may be one of a former world
        try:
            self._store.wait([_here(rank) for rank in self._others], self._remaining())
        except RuntimeError:
            return [rank for rank in self._others if not self._store.check([_here(rank)])]
        # 2. who has come since writes another word, and is answered in the next round
        came = [_came(self._token, rank) for rank in self._others]
        while True:
            self._answer_those(self._others)
            if self._store.check(came):
                return []
            if time.monotonic() > self._deadline:
                return [rank for rank, key in zip(self._others, came, strict=True) if not self._store.check([key])]
            time.sleep(_POLL_SECONDS)

    def _answer_those(self, ranks: Sequence[int]) -> None:
        words = {word for word, _ in self._read(ranks)} - self._answered
        if words:
            self._answered |= words
            self._store.multi_set([_answer_to(word) for word in words], [self._token] * len(words))  # type: ignore[attr-defined]

    def _read(self, ranks: Sequence[int]) -> list[tuple[str, Report]]:
        if not ranks:
            return []
        values = self._store.multi_get([_here(rank) for rank in ranks])
        return [tuple(json.loads(value)) for value in values]

    def _wait_until_read(self, ranks: Sequence[int]) -> None:
        """Wait a little until the others know: this process may hold the store, and is about to end."""
        end = time.monotonic() + _VERDICT_SECONDS
        read = [_read_key(self._token, rank) for rank in ranks]
        while read and time.monotonic() < end and not self._store.check(read):
            time.sleep(_POLL_SECONDS)

    def _remaining(self) -> timedelta:
        return timedelta(seconds=max(0.001, self._deadline - time.monotonic()))


def _answer(store: Store, rank: int, world_size: int, timeout: timedelta, report: Report) -> str:
    """Meet rank 0, which calls the roll."""
    word = secrets.token_hex(8)
    store.set(_here(rank), json.dumps([word, dict(report)]))
    patience = timeout + timedelta(seconds=_VERDICT_SECONDS)
    # 1. who answers this word lives now
    try:
        store.wait([_answer_to(word)], patience)
        token: str = store.get(_answer_to(word)).decode()
        store.set(_came(token, rank), "")
        # 2. the verdict
        store.wait([_verdict(token)], patience)
        verdict = json.loads(store.get(_verdict(token)))
    except RuntimeError as error:
        raise _no_answer(store, world_size, timeout, error) from error
    store.set(_read_key(token, rank), "")
    if verdict is not None:
        raise _error_from(verdict)
    return token


def _no_answer(store: Store, world_size: int, timeout: timedelta, error: RuntimeError) -> DDPLossError:
    """Return the error of a rank to which rank 0 gave no answer or no verdict."""
    try:
        missing = [rank for rank in range(world_size) if not store.check([_here(rank)])]
    except RuntimeError:  # the store went with the process that held it
        missing = []
    if missing:
        return _missing_error(missing, world_size, timeout)
    return PeerError(
        f"rendezvous of {world_size} ranks",
        expected=f"an answer of rank 0 within {timeout.total_seconds():g} s",
        got=str(error).splitlines()[0],
        fix="Look at the output of rank 0.",
        collective=True,
    )


def _missing_error(missing: Sequence[int], world_size: int, timeout: timedelta) -> DDPLossError:
    shown = ", ".join(map(str, missing[:_SHOWN_RANKS]))
    more = f" and {len(missing) - _SHOWN_RANKS} more" if len(missing) > _SHOWN_RANKS else ""
    return PeerError(
        f"rendezvous of {world_size} ranks",
        expected=f"all of them within {timeout.total_seconds():g} s",
        got=f"no word from rank {shown}{more}",
        fix="Look at the output of those ranks: they have ended, were never started, or cannot reach the store (MASTER_ADDR, MASTER_PORT).",
        collective=True,
    )


# ---------------------------------------------------------------------- what travels


def _here(rank: int) -> str:
    return f"here/{rank}"


def _answer_to(word: str) -> str:
    return f"answer/{word}"


def _came(token: str, rank: int) -> str:
    return f"{token}/came/{rank}"


def _verdict(token: str) -> str:
    return f"{token}/verdict"


def _read_key(token: str, rank: int) -> str:
    return f"{token}/read/{rank}"


def _plain_parts(error: DDPLossError) -> dict[str, Any]:
    parts = error.parts_as_text()
    if parts["ranks"] is not None:
        parts["ranks"] = list(parts["ranks"].items())  # JSON's keys are texts
    return parts


def _error_from(verdict: Mapping[str, Any]) -> DDPLossError:
    parts = dict(verdict["parts"])
    if parts["ranks"] is not None:
        parts["ranks"] = dict(parts["ranks"])
    return error_class(verdict["class"])(**parts, collective=True)
