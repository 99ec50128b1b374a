"""Liveness of the ranks of a run, tracked through a store: which ranks failed, stalled or exited.

gloo and NCCL report a closed connection or a timeout, but not which rank caused it. A store of torch.distributed provides that
information:

* `Watch`: one run. A rank that fails writes its error to the store, which a thread on each rank reads twice a second. The main thread
  raises the error as a `PeerError` at the next of our hooks, or when its collective fails. A main thread blocked in another
  collective cannot be interrupted: after a short grace period its process prints where it is blocked and exits. The same thread reports a
  rank that does not make progress.
* `World`: the processes of a world that our strategy has started (host, process id, start time). At an incident every remaining rank
  looks for ended processes on its host, records that it is alive, and reads the entries of the other ranks. The error names

  1. a failed rank that reported its error,
  2. a rank whose process has ended, as observed by a rank on the same host,
  3. otherwise the ranks that are silent for some seconds: they are stalled, or their host is unreachable.

Legend: ``W`` ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.distributed.user_line import ProgramCall, call_on_stack, collective_of
from lightning_ddp_losses.errors import DDPLossError, PeerError, format_error, listed

SILENCE_SECONDS = 3.0  # after this time a rank without an entry is reported as silent
GRACE_SECONDS = 5.0  # how long a rank may continue after another rank has failed, before its process ends
STORE_GRACE_SECONDS = 60.0  # the same after the store is lost: rank 0 may have finished, and this rank may follow
TEARDOWN_SECONDS = 600.0  # how long a rank whose run is over may take to save and clean up, before its process ends
RECEIPT_SECONDS = 3.0  # how long a failed rank waits until its peers have read its error
_HEARD_SECONDS = 2.0  # how long rank 0, whose process may hold the store, waits after the end of a run for any reason
_POLL_SECONDS = 0.05
_LISTEN_SECONDS = 0.5
_ALL_HERE = "all ranks say that they are here"
_PREFIX = "lightning_ddp_losses/liveness"
_FILE_CLOCK_SECONDS = 1.0  # file timestamps use a coarser clock
_log = logging.getLogger(__name__)

_TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)
# errors caused by a peer that exited or did not take part
_CONNECTION = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|socket|timed out|timeout|process group", re.IGNORECASE
)
T = TypeVar("T")


class ReportedFailure(NamedTuple):
    """A rank's report that its run has ended.

    Attributes:
        rank: The rank.
        place: Last place of its main thread.
        text: Type and message of its error.
    """

    rank: int
    place: str
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed, last seen at {self.place}:\n{self.text}"


class Waiting(Protocol):
    """A handshake in which a main thread waits.

    Attributes:
        number: Its number in the sequence of handshakes that this rank has sent.
    """

    number: int

    @property
    def call(self) -> ProgramCall:
        """The operation, with the user's source line if it is a call of the program."""


class Watch:
    """Reports this rank's failure to its peers, and their failures to this rank, for one run.

    Args:
        store: Store of the run, with keys that are not used by another run.
        rank: Rank of this process.
        world_size: W.

    Attributes:
        store: The same.
        waits_in: Handshake of the losses in which the main thread waits, or None if it does not wait.
        rank: The same.
        world_size: The same.
        stall_seconds: A rank is reported if its main thread stays at one place for longer. If None, no rank is reported.
        is_over: True once it has been stopped.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self.store = store
        self.stall_seconds: float | None = None
        self.waits_in: Waiting | None = None
        self._waited_in: Waiting | None = None  # value of `waits_in` at the listening thread's previous iteration
        self._main_thread = threading.get_ident()
        self.rank, self.world_size = rank, world_size
        self._place, self._reported_stall = ("start", time.monotonic()), ("", 0.0)
        self._peer_failure: ReportedFailure | None = None
        self._over, self._ended = threading.Event(), threading.Event()
        threading.Thread(target=self._listen, name="ddp-losses-liveness", daemon=True).start()

    # ------------------------------------------------------------------ called by the main thread

    @property
    def is_over(self) -> bool:
        """Whether the run has ended on this rank."""
        return self._over.is_set()

    def enter(self, place: str) -> None:
        """Record the place of the main thread.

        Raises:
            PeerError: when another rank has failed.
        """
        self._place = place, time.monotonic()
        if self._peer_failure is not None:
            self.check_peers()

    def check_peers(self) -> None:
        """Raise an error in the main thread, which may be waiting, when another rank has failed.

        Raises:
            PeerError: when another rank has failed.
        """
        if self._peer_failure is not None:
            raise PeerError(str(self._peer_failure), collective=True)

    def report_failure(self, exception: BaseException) -> PeerError | None:
        """Report that this rank ends with an exception, unless a peer failed first or all ranks raise the same exception.

        Returns:
            The failure of the peer that caused this rank's exception, to be raised in its place.
        """
        if not isinstance(exception, Exception):
            return None
        # a peer failed first: its failure is the cause of a broken connection
        within(RECEIPT_SECONDS, self._read_failure)
        if self._peer_failure is not None:
            if _CONNECTION.search(str(exception)):
                return PeerError(str(self._peer_failure), collective=True)
            return None
        if not getattr(exception, "collective", False):
            self.report(f"{type(exception).__name__}: {exception}", is_own=True, patience=RECEIPT_SECONDS)
        return None

    def report(self, text: str, *, is_own: bool, patience: float = 0.0) -> None:
        """Report that this rank's run is over.

        Args:
            text: Type and message of the error.
            is_own: True for a failure of this rank, which its peers then name. False for a failure of a peer.
            patience: Seconds to wait until all ranks have read it.
        """
        if self.rank == 0:  # the store may be lost when this process ends
            patience = max(patience, _HEARD_SECONDS)
        within(patience + SILENCE_SECONDS, lambda: self._report(text, is_own, patience))

    def _report(self, text: str, is_own: bool, patience: float) -> None:
        self.store.set(f"here/{self.rank}", "")
        self.store.set(f"heard/{self.rank}", "")
        is_first = False
        for key in ("failure", "over") if is_own else ("over",):
            if self.store.add(f"{key}/count", 1) == 1:  # only the first rank to fail is named
                self.store.set(key, json.dumps(ReportedFailure(self.rank, self._place[0], text[:4000])))
                is_first = True
        end, heard = time.monotonic() + patience, [f"heard/{rank}" for rank in range(self.world_size)]
        while (is_first or self.rank == 0) and time.monotonic() < end and not self.store.check(heard):
            time.sleep(_POLL_SECONDS)

    def clean_up(self) -> None:
        """Allow this rank ``TEARDOWN_SECONDS`` to clean up after an error. Its process ends after that unless ``stop`` is called."""
        self._over.set()

    def stop(self) -> None:
        """Stop watching: this rank's run and its cleanup are over."""
        self._ended.set()
        self._over.set()

    # ------------------------------------------------------------------ the listening thread

    def _listen(self) -> None:
        while not self._over.wait(_LISTEN_SECONDS):
            try:
                over = self.read("over")
                self._read_failure()
                self._publish_wait()
                if over is None or over.rank == self.rank:
                    self._report_stall()
                    continue
                self.store.set(f"heard/{self.rank}", "")
                self.store.set(f"place/{self.rank}", self._place[0])
                grace, reason = GRACE_SECONDS, str(self._peer_failure or over)
            except Exception:  # rank 0 or its agent has exited, and the store is lost
                grace, reason = STORE_GRACE_SECONDS, "the store of the world has gone, with rank 0 or its agent"
            if not self._over.wait(grace):
                self._end_process(reason)
        if not self._ended.wait(TEARDOWN_SECONDS):
            self._end_process(f"the run is over, and this rank has not cleaned up for {TEARDOWN_SECONDS:g} s")

    def read(self, key: str) -> ReportedFailure | None:
        """Return the first report under ``failure`` (a rank failed) or ``over`` (a run ended for any reason), or None if there is none."""
        return ReportedFailure(*json.loads(self.store.get(key))) if self.store.check([key]) else None

    def place_of(self, rank: int) -> str:
        """Return where a rank's main thread was when its listening thread noticed an end or a stall, or an empty text if unknown."""
        key = f"place/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def is_any_peer_at(self, place: str) -> bool:
        """Return whether the last stall of another rank that its listening thread published was at a place."""
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        return any(self.place_of(rank).partition(",")[0] == place for rank in peers)

    def _read_failure(self) -> None:
        """Read a peer's failure and acknowledge it."""
        failure = self._peer_failure or self.read("failure")
        if failure is not None and failure.rank != self.rank:
            # store the reason first: after the acknowledgement the failed rank continues and may close its connections
            self._peer_failure = failure
            self.store.set(f"heard/{self.rank}", "")

    def _end_process(self, reason: str) -> None:
        """End the process if its main thread is blocked although the run is over, and print where it is blocked."""
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(file=2, all_threads=True)
        print(f"rank {self.rank} stops, after it waited as shown above: {reason}", file=sys.stderr, flush=True)
        os._exit(1)

    def _publish_wait(self) -> None:
        """Publish the handshake in which this rank waits, if it is the same as in the previous iteration."""
        waits_in, before = self.waits_in, self._waited_in
        self._waited_in = waits_in
        if waits_in is not None and waits_in is before:
            self.store.set(f"wait/{self.rank}", json.dumps([waits_in.number, *waits_in.call]))

    def waits_of_peers(self, after: int) -> dict[int, ProgramCall]:
        """Return, by rank, the handshakes in which peers wait and which this rank has not sent yet.

        Args:
            after: Number of handshakes of losses that this rank has sent.
        """
        waits: dict[int, ProgramCall] = {}
        for rank in range(self.world_size):
            if rank == self.rank or not self.store.check([f"wait/{rank}"]):
                continue
            number, operation, line = json.loads(self.store.get(f"wait/{rank}"))
            if number > after:
                waits[rank] = ProgramCall(operation, line)
        return waits

    def _report_stall(self) -> None:
        """Publish where this rank is stalled. Rank 0 logs the places of all ranks, once for each stall."""
        place, since = self._place
        seconds = time.monotonic() - since
        if self.stall_seconds is None or seconds < self.stall_seconds / 2 or place == "end":
            return
        shown = f"{place}, for {seconds:.0f} s"
        call = call_on_stack(torch_compat.frame_of_thread(self._main_thread))
        if call is not None:
            shown = f"{shown}, in {call}"
        self.store.set(f"place/{self.rank}", shown)
        if self.rank != 0 or seconds < self.stall_seconds or self._reported_stall == (place, since):
            return
        self._reported_stall = place, since
        ranks = [self.place_of(rank) or "somewhere else" for rank in range(self.world_size)]
        fix = "A rank that is behind the others is slow (data, disk), or runs a collective that they do not."
        if call is not None:
            fix = f"{fix} {call.advice}"
        _log.warning(format_error(f"no progress for {seconds:.0f} s", ranks=ranks, fix=fix))


class ProcessInfo(NamedTuple):
    """The process of a rank.

    Attributes:
        host: Name of its host.
        machine: Identity of the machine, or of a container with separate processes.
        pid: Id of the process on that machine.
        started: Start time in the kernel's units, which distinguishes it from a later process with the same id.
    """

    host: str
    machine: str
    pid: int
    started: str

    @classmethod
    def own(cls) -> ProcessInfo:
        """Return the information for this process."""
        return cls(socket.gethostname(), _machine(), os.getpid(), _state_of_process(os.getpid())[1])

    def has_ended(self) -> bool:
        """Return whether the process, which must belong to this machine, has ended."""
        state, started = _state_of_process(self.pid)
        return state in ("", "Z", "X") or started != self.started


class World:
    """The processes of one world.

    Args:
        store: Store of the world.
        rank: Rank of this process.
        processes: Process of each rank.

    Attributes:
        group: Default process group of this world.
        watch: Watch of the current run.
    """

    def __init__(self, store: Store, rank: int, processes: Sequence[ProcessInfo]) -> None:
        self.group, self.rank, self.began = dist.group.WORLD, rank, time.time()
        self._store, self._processes = PrefixStore(_PREFIX, store), [*processes]
        self._explanation: str | None = None
        self._runs = 1
        self.watch = self._new_watch()

    def _new_watch(self) -> Watch:
        return Watch(PrefixStore(f"run/{self._runs}", self._store), self.rank, len(self._processes))

    def new_run(self) -> None:
        """Start watching a new run, without the failures of former runs. Collective: every rank must call this."""
        if self.watch.is_over:
            self.watch.stop()
            self._runs += 1
            self.watch, self._explanation = self._new_watch(), None

    # ------------------------------------------------------------------ at an incident

    def explain(self) -> str:
        """Return which ranks exited or are silent, and why if known. Waits a few seconds for the other ranks on the first call."""
        if self._explanation is None:
            self._explanation = within(2 * SILENCE_SECONDS, self._explain) or self._store_lost()
        return self._explanation

    def _store_lost(self) -> str:
        return f"the store of the world, of {self._named([0])} or its agent, cannot be reached"

    def _explain(self) -> str:
        store, ranks = self.watch.store, range(len(self._processes))
        own_machine = self._processes[self.rank].machine
        neighbours = [r for r, p in enumerate(self._processes) if p.machine == own_machine and r != self.rank]
        end, silent, is_store_lost = time.monotonic() + SILENCE_SECONDS, list(ranks), False
        while True:
            # 1. ended processes of this machine
            ended = [rank for rank in neighbours if self._processes[rank].has_ended()]
            # 2. ended processes of other machines, as reported by ranks on those machines
            try:
                for key in (f"here/{self.rank}", *(f"ended/{rank}" for rank in ended)):
                    store.set(key, "")
                failure = self.watch.read("failure")
                if failure is not None and failure.rank != self.rank:
                    return f"rank {failure.rank} ({self._place(failure.rank)}) has failed:\n{failure.text}"
                silent = [rank for rank in ranks if not store.check([f"here/{rank}"])]
                # a rank that was alive had lost its peers like this rank, and may have ended in the meantime
                ended = [rank for rank in silent if rank in ended or store.check([f"ended/{rank}"])]
            except RuntimeError:
                is_store_lost = True
            if ended:
                return f"{self._named(ended)} {_has_or_have(ended)} ended: killed, out of memory, or after an error of its own"
            if time.monotonic() > end:
                break
            time.sleep(_POLL_SECONDS)
        # 3. no ended process was found
        if is_store_lost:
            return self._store_lost()
        if silent:
            return f"{self._named(silent)} {_has_or_have(silent)} said nothing for {SILENCE_SECONDS:g} s: standing still, or out of reach"
        return _ALL_HERE

    def _place(self, rank: int) -> str:
        process = self._processes[rank]
        return f"process {process.pid} on {process.host}"

    def _named(self, ranks: list[int]) -> str:
        return listed([f"rank {rank} ({self._place(rank)})" for rank in ranks], 8)


def within(seconds: float, ask: Callable[[], T]) -> T | None:
    """Return the result of a call to a store, or None if it fails or takes longer: the rank that holds the store may have exited.

    If a network cable was pulled, such a call never returns, because the lost connection is not reported (torch 2.13).
    """
    answers: list[T] = []

    def answer() -> None:
        with contextlib.suppress(Exception):
            answers.append(ask())

    thread = threading.Thread(target=answer, name="ddp-losses-liveness-question", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _has_or_have(ranks: list[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


# ---------------------------------------------------------------------- the world and the run of this process

_world: World | None = None
current_watch: Watch | None = None
"""Watch of the fit whose checks run in this process. None if there is no such fit."""


def begin_world(store: Store, rank: int, processes: Sequence[ProcessInfo]) -> None:
    """Start watching the processes of a world that was just started, under separate keys. Collective: every rank must call this."""
    global _world  # noqa: PLW0603 - one default process group per process
    _world = World(store, rank, processes)


def has_begun() -> bool:
    """Return whether the default process group is a world that our strategy has started."""
    return _world is not None and _world.group is dist.group.WORLD


def watch_run(rank: int, world_size: int, stall_seconds: float) -> Watch | None:
    """Return the watch of the new run, in any world. None in a world of one rank, or if torch does not expose its store.

    Args:
        rank: Rank of this process.
        world_size: W.
        stall_seconds: Limit of a stall, as in ``Watch``.
    """
    global current_watch  # noqa: PLW0603 - one fit at a time
    if _world is not None:
        _world.new_run()
        watch = _world.watch
    elif world_size > 1 and (store := _own_store(rank)) is not None:
        watch = Watch(store, rank, world_size)
    else:
        return None
    watch.stall_seconds = stall_seconds
    current_watch = watch
    return watch


def _own_store(rank: int) -> Store | None:
    """Return a part of the default store that only this run uses, or None if torch does not expose the default store."""
    store = torch_compat.default_store()
    if store is None:
        return None
    base = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    # a wait of the main thread must not block the watching thread. A wait on a FileStore does not, and torch removes the file of a live
    # world when forked processes (workers of a DataLoader) release inherited clones
    with contextlib.suppress(Exception):
        store = store if isinstance(base, dist.FileStore) else store.clone()  # type: ignore[attr-defined]
    # counted in the store, which has the lifetime of the group: the id of an object may be reused, and not on every rank
    run = store.add(f"{_PREFIX}/runs_of_rank/{rank}", 1)
    return PrefixStore(f"{_PREFIX}/own/{run}", store)


def stop() -> None:
    """Clear the world after it has ended."""
    global _world  # noqa: PLW0603 - as above
    end_run()
    _world = None


def report(error: BaseException) -> None:
    """Report to the peers that this rank's run is over, and why. From now until ``end_run`` this rank cleans up."""
    if _world is not None:
        is_own = not isinstance(error, PeerError) and not getattr(error, "collective", False)
        _world.watch.report(f"{type(error).__name__}: {error}", is_own=is_own)
        _world.watch.clean_up()


def end_run() -> None:
    """Stop watching: the run has ended."""
    if _world is not None:
        _world.watch.stop()


def release(watch: Watch) -> None:
    """Stop a watch returned by ``watch_run``, unless it belongs to a world that our strategy has started and stops after its teardown."""
    global current_watch  # noqa: PLW0603 - as above
    current_watch = None
    if _world is None or watch is not _world.watch:
        watch.stop()


def new_run() -> None:
    """Start watching a new run. Collective: every rank must call this."""
    if _world is not None:
        _world.new_run()


def raise_lost_peer(error: Exception, where: str) -> None:
    """Raise an error of a lost connection as one that names the rank that exited, if known.

    Raises:
        PeerError: naming that rank, chained to the library's own error.
    """
    lost = lost_peer_error(error, where)
    if lost is not None:
        raise lost from error


def lost_peer_error(error: BaseException, where: str) -> PeerError | None:
    """Return an error of a lost connection as one that names the ranks that exited or are silent.

    Returns None for any other error, and in a world that our strategy has not started.
    """
    is_lost = isinstance(error, RuntimeError) and not isinstance(error, DDPLossError)
    if _world is None or not is_lost or not _CONNECTION.search(str(error)):
        return None
    who = _world.explain()
    lines = str(error).splitlines() or [""]
    recorded = flight_record(_world.rank, since=_world.began)
    more = "" if recorded is None else f" torch's Flight Recorder says what was under way: {recorded}."
    call = collective_of(error)
    if who == _ALL_HERE and call is not None:
        return PeerError(
            f"rank {_world.rank} waited in {call}",
            expected="the same call on every rank",
            got=f"no answer; {who} ({lines[0][:200]})",
            fix=f"Some ranks did not make this call. {call.advice}{more}",
            collective=True,
            page="F45",
        )
    if who == _ALL_HERE:  # no peer is the cause
        return PeerError(
            f"{lines[0][:200]} (rank {_world.rank}, in {where}; {who})",
            fix="No rank is gone. Where all ranks show this error, it is the cause itself. Otherwise ranks did different things: a branch "
            "on rank or on local data, or a dict of losses that lacks an entry on a rank without boxes. "
            f"callbacks=[DDPChecks()] names the parameters before backward.{more}",
            collective=True,
            page="F37" if _TIMED_OUT.search(str(error)) else "F42",
        )
    return PeerError(
        f"rank {_world.rank} waited for its peers in {where}",
        expected="an answer of every rank",
        got=f"{who} ({lines[0][:200]})",
        fix=f"Look at the output of that rank, and at what its machine says of it (dmesg, the scheduler).{more}",
        collective=True,  # the remaining ranks raise the same error
    )


def flight_record(rank: int, *, since: float) -> str | None:
    """Return the file of torch's Flight Recorder with the collectives in progress, or None if the file does not exist.

    Args:
        rank: Rank that wrote it.
        since: Seconds since the epoch. Older files belong to another run.
    """
    prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    path = Path(f"{prefix or Path.home() / '.cache/torch/comm_lib_trace_rank_'}{rank}")  # torch's default
    with contextlib.suppress(OSError):
        if path.stat().st_mtime >= since - _FILE_CLOCK_SECONDS:
            return str(path)
    return None


# ---------------------------------------------------------------------- processes of this machine


def _machine() -> str:
    """Return the identity of this machine, or of a container with separate process ids."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # Linux only
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _state_of_process(pid: int) -> tuple[str, str]:
    """Return a process's state and start time, both empty if it has ended."""
    try:
        # the name in parentheses may contain any characters
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
