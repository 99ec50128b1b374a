"""Who is missing: a rank whose peers lose the connection, or wait in vain, learns which rank is gone, and on which host.

gloo and NCCL say that a connection was closed or that time is over, not by whom. So each rank of a world that our strategy has started
writes into the world's store which process it is (host, process id, when it started). At an incident every rank that is left looks which
processes of its own host are no more, says in the store that it is here itself, and reads what the others say. What is named then is

* a rank that has failed and could say so, with its error,
* a rank whose process has ended, as a rank of the same host has seen,
* else the ranks that say nothing for some seconds: they stand still, or nothing reaches their host.

The same store ends a rank that stands still (in a data set, in somebody else's collective) after another one has failed: a thread looks
there twice a second, and ends its process where the main thread has not come to an end of its own some seconds later.

Legend: ``W`` ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lightning_ddp_losses.errors import DDPLossError, PeerError

SILENCE_SECONDS = 3.0  # after which a rank that says nothing is called silent
GRACE_SECONDS = 5.0  # how long a rank may go on after another one has failed, before its process ends
STORE_GRACE_SECONDS = 60.0  # and after the store has gone: rank 0 may have come to its end, and this rank be about to
_HEARD_SECONDS = 2.0  # how long a rank that holds the store stays for the others to hear that it fails
_POLL_SECONDS = 0.05
_PREFIX = "lightning_ddp_losses/liveness"
_LISTEN_SECONDS = 0.5
_FILE_CLOCK_SECONDS = 1.0  # files are stamped by a coarser clock
_SHOWN_RANKS = 8

# what an error says whose cause is a peer that has gone, or did not come
_CONNECTION = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|socket|timed out|timeout|process group", re.IGNORECASE
)


class ProcessInfo(NamedTuple):
    """Which process a rank is.

    Attributes:
        host: Its name.
        machine: What tells machines, and containers with processes of their own, apart.
        pid: Of the process, there.
        started: When it began, in the kernel's words; tells it from a later process of the same id.
    """

    host: str
    machine: str
    pid: int
    started: str

    @classmethod
    def own(cls) -> ProcessInfo:
        """Return this process's."""
        return cls(socket.gethostname(), _machine(), os.getpid(), _state_of(os.getpid())[1])

    def has_ended(self) -> bool:
        """Say whether the process, which must be of this machine, is no more."""
        state, started = _state_of(self.pid)
        return state in ("", "Z", "X") or started != self.started


class World:
    """The processes of one world, as its store knows them.

    Args:
        store: Of the world.
        rank: This process's.
        world_size: W.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.began = rank, world_size, time.time()
        self._store = PrefixStore(_PREFIX, store)
        self._processes: list[ProcessInfo] = []
        self._explanation: str | None = None
        self._incident: Store = self._store
        self._ended, self._runs = threading.Event(), 0
        self._ended.set()
        self._store.set(f"process/{rank}", json.dumps(ProcessInfo.own()))

    def start(self) -> None:
        """Read who the others are, once all are here, and begin to listen for the first failure. Communication: the store's."""
        keys = [f"process/{rank}" for rank in range(self.world_size)]
        values = self._store.multi_get(keys)
        self._processes = [ProcessInfo(*json.loads(value)) for value in values]
        self.new_run()

    def new_run(self) -> None:
        """Begin to listen, anew after a run that has failed: its failures are not this one's. Every rank comes here."""
        if not self._ended.is_set():
            return
        self._ended, self._explanation = threading.Event(), None
        self._runs += 1
        arguments = PrefixStore(f"run/{self._runs}", self._store), self._ended
        threading.Thread(target=self._listen, args=arguments, name="ddp-losses-liveness", daemon=True).start()
        self._incident = arguments[0]

    def stop(self) -> None:
        """Stop ending this process for what happens to others: it has come to an end of its own."""
        self._ended.set()

    # ------------------------------------------------------------------ at an incident

    def report(self, text: str, *, is_own: bool) -> None:
        """Say in the store that this rank's run is over.

        Args:
            text: Why.
            is_own: It is a failure of this rank, which the others shall name; not that of a peer.
        """
        _within(_HEARD_SECONDS + SILENCE_SECONDS, lambda: self._report(text, is_own))

    def _report(self, text: str, is_own: bool) -> None:
        self._say_here([])
        self._incident.set(f"heard/{self.rank}", "")
        for key in ("failure", "over") if is_own else ("over",):
            if self._incident.add(f"{key}/count", 1) == 1:  # the first to fail is the one to name
                self._incident.set(key, json.dumps([self.rank, text[:2000]]))
        if self.rank == 0:  # the store may go with this process
            self._wait_until_heard()

    def _wait_until_heard(self) -> None:
        end, keys = time.monotonic() + _HEARD_SECONDS, [f"heard/{rank}" for rank in range(self.world_size)]
        while time.monotonic() < end and not self._incident.check(keys):
            time.sleep(_POLL_SECONDS)

    def explain(self) -> str:
        """Return which ranks are gone or silent, and why as far as anybody knows; waits some seconds for the others' word, once."""
        if self._explanation is None:
            self._explanation = _within(2 * SILENCE_SECONDS, self._explain) or self._store_lost()
        return self._explanation

    def _store_lost(self) -> str:
        return f"the store of the world, of {self._named([0])} or its agent, cannot be reached"

    def _explain(self) -> str:
        end, silent = time.monotonic() + SILENCE_SECONDS, list(range(self.world_size))
        own_machine = self._processes[self.rank].machine
        neighbours = [r for r, p in enumerate(self._processes) if p.machine == own_machine and r != self.rank]
        is_store_lost = False
        while True:
            # 1. which processes of this machine are no more
            ended = [rank for rank in neighbours if self._processes[rank].has_ended()]
            # 2. tell the others, hear what they have seen
            try:
                self._say_here(ended)
                failure = self._failure()
                if failure is not None and failure[0] != self.rank:
                    return f"rank {failure[0]} ({self._place(failure[0])}) has failed:\n{failure[1]}"
                ended = [r for r in range(self.world_size) if r in ended or self._incident.check([f"ended/{r}"])]
                silent = [r for r in range(self.world_size) if not self._incident.check([f"here/{r}"])]
                # who could say that it is here was left over, as this rank is, and may have come to its end since
                ended = [r for r in ended if r in silent]
            except RuntimeError:
                is_store_lost = True
            if ended:
                return f"{self._named(ended)} {_has_or_have(ended)} ended: killed, out of memory, or after an error of its own"
            if time.monotonic() > end:
                break
            time.sleep(_POLL_SECONDS)
        # 3. no process is known to have ended
        if is_store_lost:
            return self._store_lost()
        if silent:
            return f"{self._named(silent)} {_has_or_have(silent)} said nothing for {SILENCE_SECONDS:g} s: standing still, or out of reach"
        return "all ranks say that they are here"

    def _say_here(self, ended: list[int]) -> None:
        self._incident.set(f"here/{self.rank}", "")
        for rank in ended:
            self._incident.set(f"ended/{rank}", "")

    def _failure(self) -> tuple[int, str] | None:
        if not self._incident.check(["failure"]):
            return None
        rank, text = json.loads(self._incident.get("failure"))
        return rank, text

    def _place(self, rank: int) -> str:
        process = self._processes[rank]
        return f"process {process.pid} on {process.host}"

    def _named(self, ranks: list[int]) -> str:
        shown = [f"rank {rank} ({self._place(rank)})" for rank in ranks[:_SHOWN_RANKS]]
        more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
        return f"{', '.join(shown)}{more}"

    # ------------------------------------------------------------------ the listening thread

    def _listen(self, incident: Store, ended: threading.Event) -> None:
        while not ended.wait(_LISTEN_SECONDS):
            try:
                if not incident.check(["over"]):
                    continue
                rank, text = json.loads(incident.get("over"))
                incident.set(f"heard/{self.rank}", "")
                grace, reason = GRACE_SECONDS, f"rank {rank} has ended with: {text}"
            except Exception:  # rank 0, or its agent, has gone, and the store with it
                grace, reason = STORE_GRACE_SECONDS, "the store of the world has gone, with rank 0 or its agent"
            if not ended.wait(grace):
                self._end_process(f"{grace:g} s after {reason}")

    def _end_process(self, reason: str) -> None:
        """End a process whose main thread stands somewhere although the run is over, and show where."""
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(file=2, all_threads=True)
        said = f"rank {self.rank} stops where it stood (shown above), {reason}"
        print(said, file=sys.stderr, flush=True)
        os._exit(1)


def _within(seconds: float, ask: Callable[[], str | None]) -> str | None:
    """Return what comes of asking the store; None after some seconds, or where it fails: it may have gone with the rank that holds it.

    Where a cable was pulled a question to the store has no end: nothing says that the connection is no more (torch 2.13).
    """
    answers: list[str | None] = []

    def answer() -> None:
        with contextlib.suppress(Exception):
            answers.append(ask())

    thread = threading.Thread(target=answer, name="ddp-losses-liveness-question", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


_world: World | None = None


def begin_world(store: Store, rank: int, world_size: int) -> World:
    """Write down which process this rank is; ``World.start`` follows when all ranks are in the world."""
    global _world  # noqa: PLW0603 - one default process group per process
    _world = World(store, rank, world_size)
    return _world


def stop() -> None:
    """Forget the world: it has ended."""
    global _world  # noqa: PLW0603 - as above
    if _world is not None:
        _world.stop()
    _world = None


def is_lost_connection(error: BaseException) -> bool:
    """Say whether an error looks like a peer that has gone or did not come, and nobody has said yet which."""
    return (
        isinstance(error, RuntimeError) and not isinstance(error, DDPLossError) and bool(_CONNECTION.search(str(error)))
    )


def _has_or_have(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def explain() -> str | None:
    """Return which ranks are gone or silent; None where nobody can know: the world is not of our strategy's making."""
    return None if _world is None else _world.explain()


def report(error: BaseException) -> None:
    """Let the peers know that this rank's run is over, and why; it ends by itself from here on."""
    if _world is not None:
        is_own = not isinstance(error, PeerError) and not getattr(error, "collective", False)
        _world.report(f"{type(error).__name__}: {error}", is_own=is_own)
        _world.stop()


def end_run() -> None:
    """Stop listening: the run has come to its end."""
    if _world is not None:
        _world.stop()


def new_run() -> None:
    """Listen for failures in the run that begins. Every rank comes here."""
    if _world is not None:
        _world.new_run()


def raise_lost_peer(error: Exception, where: str) -> None:
    """Raise what an error amounts to that tells of a lost connection: with the rank that is gone, where that is known.

    Raises:
        PeerError: naming it, from the library's own error.
    """
    who = explain() if is_lost_connection(error) else None
    if who is not None:
        raise lost_peer_error(where, who, error) from error


def lost_peer_error(where: str, who: str, error: BaseException) -> PeerError:
    """Return the error of a rank whose peers are gone."""
    assert _world is not None
    lines = str(error).splitlines() or [""]
    recorded = flight_record(_world.rank, since=_world.began)
    more = "" if recorded is None else f" torch's Flight Recorder says what was under way: {recorded}."
    return PeerError(
        f"rank {_world.rank} waited for its peers in {where}",
        expected="an answer of every rank",
        got=f"{who} ({lines[0][:200]})",
        fix=f"Look at the output of that rank, and at what its machine says of it (dmesg, the scheduler).{more}",
        collective=True,  # whoever is left hears of it in the same way
    )


def flight_record(rank: int, *, since: float) -> str | None:
    """Return the file in which torch's Flight Recorder has written what collectives were under way; None where it has not.

    Args:
        rank: Whose.
        since: Seconds since the epoch; what is older is of another run.
    """
    prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    path = Path(f"{prefix or Path.home() / '.cache/torch/comm_lib_trace_rank_'}{rank}")  # torch's default
    with contextlib.suppress(OSError):
        if path.stat().st_mtime >= since - _FILE_CLOCK_SECONDS:
            return str(path)
    return None


# ---------------------------------------------------------------------- processes of this machine


def _machine() -> str:
    """Return what tells machines, and containers whose processes have numbers of their own, apart."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # Linux only
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _state_of(pid: int) -> tuple[str, str]:
    """Return a process's state and when it started; empty texts for one that is no more."""
    try:
        # the name, in brackets, may hold anything
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return "", ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "", ""
    except OSError:
        return "?", ""
    return "?", ""
