"""Ranks of one process over an in-memory wire with a virtual clock, which run the handshakes' own code.

Each simulated rank is a thread, of which one runs at a time until it waits, ends or fails: a run is the same each time. The wire keeps the
rules of gloo: the n-th gather of a rank on a group meets the n-th gather of the others, gathers of different sizes would end the
process, a rank that gave up has closed its connections, and so has a process that has ended. If all ranks wait, the clock goes on to the
first time-out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.doors import handshake, process_groups

GROUP_TIMEOUT = 1800.0  # of each group, in virtual seconds


class WireFault(BaseException):
    """What would have ended the processes, or left them waiting for ever."""


@dataclass(eq=False)
class Group:
    """One rank's end of a group."""

    name: str
    own_rank: int
    world_size: int
    sent: int = 0  # gathers so far
    is_closed: bool = False  # this rank gave up, or its process has ended

    def rank(self) -> int:
        return self.own_rank

    def size(self) -> int:
        return self.world_size


@dataclass
class Rank:
    """One simulated rank: its groups, and where it stands.

    Attributes:
        number: The rank.
        groups: Our groups over the simulated world.
        ends: Its end of each group, by name.
        waits_for: Whether it may go on. None: it runs.
        deadline: Virtual time at which it stops waiting.
    """

    number: int
    groups: Any = None
    ends: dict[str, Group] = field(default_factory=dict)
    waits_for: Callable[[], bool] | None = None
    deadline: float | None = None
    is_over: bool = False
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


@dataclass
class Gather:
    """One gather of a rank on its way, as ``dist.Work``."""

    wire: Wire
    group: Group
    index: int
    everyone: Tensor

    def _messages(self) -> dict[int, Tensor]:
        return self.wire.messages[self.group.name, self.index]

    def is_completed(self) -> bool:
        return not self.group.is_closed and len(self._messages()) == self.group.world_size

    def _is_decided(self) -> bool:
        return self.is_completed() or self.group.is_closed or self._closed_peers()

    def _closed_peers(self) -> bool:
        missing = [rank for rank in self.wire.ranks if rank.number not in self._messages()]
        return any(rank.is_over or self.wire.end_of(rank, self.group.name).is_closed for rank in missing)

    def wait(self, timeout: timedelta | None = None) -> None:
        seconds = GROUP_TIMEOUT if timeout is None else timeout.total_seconds()
        is_in_time = self.wire.block(self._is_decided, seconds)
        if not self.is_completed():
            self.group.is_closed = True
            raise RuntimeError("Connection closed by peer" if is_in_time else "Timed out waiting")
        messages = self._messages()
        torch.stack([messages[rank] for rank in range(self.group.world_size)], out=self.everyone)


class Wire:
    """The wire and the clock of a simulated world.

    Args:
        world_size: Number of ranks.

    Attributes:
        now: The virtual time in seconds.
        messages: By name of the group and number of the gather: the message of each rank.
    """

    def __init__(self, world_size: int) -> None:
        self.now = 0.0
        self.messages: dict[tuple[str, int], dict[int, Tensor]] = {}
        self.ranks = [Rank(number) for number in range(world_size)]
        self._here = threading.local()
        self._main = threading.Semaphore(0)
        self._is_stopped = False
        for rank in self.ranks:
            own = self.end_of(rank, "handshakes")
            names = iter(["checks"])
            rank.groups = process_groups.ProcessGroups(
                own,  # type: ignore[arg-type]
                None,
                tuple(range(world_size)),
                lambda rank=rank, names=names: self.end_of(rank, next(names)),
            )

    def end_of(self, rank: Rank, name: str) -> Group:
        """Return the end of a group that a rank holds."""
        if name not in rank.ends:
            rank.ends[name] = Group(name, rank.number, len(self.ranks))
        return rank.ends[name]

    # ------------------------------------------------------------------ what the package calls

    @property
    def here(self) -> Rank:
        """The rank whose code runs."""
        rank: Rank = self._here.rank
        return rank

    def start_gather(self, own: Tensor, *, group: Group) -> tuple[Tensor, Gather]:
        index = group.sent
        group.sent += 1
        messages = self.messages.setdefault((group.name, index), {})
        if not group.is_closed:
            if any(len(other) != len(own) for other in messages.values()):
                raise WireFault(f"gather {index} of {group.name}: sizes differ")
            messages[group.own_rank] = own.clone()
        everyone = torch.empty(group.world_size, len(own), dtype=own.dtype)
        return everyone, Gather(self, group, index, everyone)

    def block(self, is_decided: Callable[[], bool], seconds: float) -> bool:
        """Wait in virtual time. Return whether it came before the time-out."""
        if self._is_stopped:
            raise WireFault("stopped")
        rank = self.here
        rank.waits_for, rank.deadline = is_decided, self.now + seconds
        self._main.release()
        rank.turn.acquire()
        if self._is_stopped:
            raise WireFault("stopped")
        rank.waits_for = None
        return is_decided()

    @contextmanager
    def _in_place_of_torch(self) -> Iterator[None]:
        wire = mock.patch.multiple(
            handshake, start_gather=self.start_gather, wait=lambda work, timeout=None: work.wait(timeout)
        )
        ranks = mock.patch.multiple(
            process_groups,
            world_size=lambda group=None: len(self.ranks),
            rank=lambda group=None: self.here.number,
            internal_groups=lambda group=None: self.here.groups,
        )
        with wire, ranks:
            yield

    def stand_still(self) -> None:
        """Keep the rank whose code runs from going on, longer than any other waits."""
        self.block(lambda: False, 1e9)

    # ------------------------------------------------------------------ the run

    def run(self, program: Callable[[int], Any], *, order: Sequence[int] | None = None) -> list[Any]:
        """Run a program on each rank, and return what each returned.

        Args:
            program: What a rank runs.
            order: Which rank runs first, if several can. The results must not depend on it.

        Raises:
            WireFault: when processes would have ended.
        """
        results: list[Any] = [None] * len(self.ranks)
        faults: list[BaseException] = []

        def body(rank: Rank) -> None:
            self._here.rank = rank
            rank.turn.acquire()
            try:
                results[rank.number] = program(rank.number)
            except BaseException as error:  # raised where the run was started
                faults.append(error)
            rank.is_over = True
            self._main.release()

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in self.ranks]
        for thread in threads:
            thread.start()
        with self._in_place_of_torch():
            while not faults and not all(rank.is_over for rank in self.ranks):
                self._go_on(self._next_rank(order or range(len(self.ranks))))
            self._is_stopped = bool(faults)
            for rank in self.ranks:
                if not rank.is_over:
                    self._go_on(rank)
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]
        return results

    def _go_on(self, rank: Rank) -> None:
        rank.turn.release()
        self._main.acquire()

    def _next_rank(self, order: Sequence[int]) -> Rank:
        """Return the first rank that can go on. If there is none, time passes until one has waited too long."""
        left = [self.ranks[number] for number in order if not self.ranks[number].is_over]
        for rank in left:
            if rank.waits_for is None or rank.waits_for():
                return rank
        first = min(left, key=lambda rank: rank.deadline or 0.0)
        self.now = first.deadline or self.now
        return first
