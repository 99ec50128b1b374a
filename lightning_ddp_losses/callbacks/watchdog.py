"""One rank fails, all learn of it: which rank, at which step, its message, in seconds and not after the group's time-out.

The failing rank writes to the store of torch.distributed and waits until its peers have read it. On each rank a thread looks
there twice a second. A peer that comes by one of our hooks, or whose collective breaks, raises a ``PeerError``. A peer whose
main thread sits in a collective of somebody else's cannot be woken: after a short grace it says what happened, shows where it
waited, and ends its process.

The same thread notices a rank that stands still, and tells where each of them is.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import re
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import PeerError, format_error

_CONNECTION = re.compile(r"gloo|nccl|connection|socket|timed out|timeout|process group", re.IGNORECASE)
POLL_SECONDS = 0.5
HEARD_SECONDS = 3.0  # how long a failing rank waits for its peers to have read
GRACE_SECONDS = 5.0  # how long a peer may go on before its process ends
_log = logging.getLogger(__name__)
_sessions: dict[int, int] = {}  # fits by process group: each has its own keys


class Alarm:
    """Tells the peers of this rank's failure, and this rank of theirs.

    Args:
        stall_seconds: A rank whose main thread stays at one place for longer is reported.
    """

    def __init__(self, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._rank, self._world = process_groups.rank(), process_groups.world_size()
        self._place: tuple[str, float] = ("start", time.monotonic())
        self._peer: dict[str, Any] | None = None
        self._told_of: tuple[str, float] | None = None
        self._ended = threading.Event()
        self._store: Any = _own_store() if self._world > 1 else None
        self._thread: threading.Thread | None = None
        if self._store is not None:
            self._thread = threading.Thread(target=self._watch, name="ddp-checks", daemon=True)
            self._thread.start()

    def at(self, place: str) -> None:
        """The main thread is there now.

        Raises:
            PeerError: when another rank has failed.
        """
        self._place = place, time.monotonic()
        self.look()

    def look(self) -> None:
        """The main thread waits.

        Raises:
            PeerError: when another rank has failed.
        """
        if self._peer is not None:
            raise self._error()

    def failed(self, exception: BaseException) -> PeerError | None:
        """This rank ends with an exception; tell the peers, unless one of them ended first.

        Returns:
            What to raise in its place: the failure of the peer that took this rank along.
        """
        if self._store is None or not isinstance(exception, Exception):
            return None
        with contextlib.suppress(Exception):  # the store may have gone with the rank that kept it
            self._look()
        if self._peer is not None:
            return self._error() if _CONNECTION.search(str(exception)) else None
        if getattr(exception, "collective", False):
            return None
        text = f"{type(exception).__name__}: {exception}"
        report = {"rank": self._rank, "place": self._place[0], "text": text[:4000]}
        with contextlib.suppress(Exception):
            if self._store.add("failures", 1) == 1:  # the first to fail is the one to name
                self._store.set("failure", json.dumps(report))
                self._wait_until_heard()
            else:
                self._store.set(f"heard/{self._rank}", "yes")
        return None

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(POLL_SECONDS * 4)

    # ------------------------------------------------------------------

    def _wait_until_heard(self) -> None:
        until = time.monotonic() + HEARD_SECONDS
        others = [f"heard/{rank}" for rank in range(self._world) if rank != self._rank]
        while time.monotonic() < until and not all(self._store.check([key]) for key in others):
            time.sleep(0.05)

    def _watch(self) -> None:
        with contextlib.suppress(Exception):  # the store may go before this thread does
            while not self._ended.wait(POLL_SECONDS):
                self._look()
                if self._peer is not None:
                    if not self._ended.wait(GRACE_SECONDS):
                        self._give_up()
                    return
                self._look_for_stall()

    def _look(self) -> None:
        if self._peer is not None or self._store is None or not self._store.check(["failure"]):
            return
        report = json.loads(self._store.get("failure"))
        if report["rank"] != self._rank:
            self._store.set(f"heard/{self._rank}", "yes")
            self._peer = report

    def _error(self) -> PeerError:
        assert self._peer is not None
        rank, place = self._peer["rank"], self._peer["place"]
        return PeerError(f"rank {rank} failed, last seen at {place}:\n{self._peer['text']}", collective=True)

    def _give_up(self) -> None:
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(file=2, all_threads=True)
        text = f"rank {self._rank} stops, after it waited as shown above: {self._error()}"
        print(text, file=sys.stderr, flush=True)
        os._exit(1)

    def _look_for_stall(self) -> None:
        place, since = self._place
        seconds = time.monotonic() - since
        if seconds < self._stall_seconds / 2 or place == "end":
            return
        self._store.set(f"place/{self._rank}", json.dumps([place, round(seconds)]))
        if self._rank == 0 and seconds >= self._stall_seconds and self._told_of != self._place:
            self._told_of = self._place
            ranks = []
            for rank in range(self._world):
                known = self._store.check([f"place/{rank}"])
                where, long = json.loads(self._store.get(f"place/{rank}")) if known else ("somewhere else", 0)
                ranks.append(f"{where}, for {long} s" if long else where)
            fix = "A rank that is behind the others is slow (data, disk), or runs a collective that they do not."
            _log.warning(format_error(f"no progress for {seconds:.0f} s", ranks=ranks, fix=fix))


def _own_store() -> Any:
    """A part of the default store that only this fit uses; None where torch does not show it."""
    try:
        store = dist.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None
    with contextlib.suppress(Exception):
        store = store.clone()  # type: ignore[attr-defined] # so that a wait of the main thread does not keep this one
    world = id(dist.group.WORLD)
    _sessions[world] = _sessions.get(world, 0) + 1
    return dist.distributed_c10d.PrefixStore(f"ddp_checks/{_sessions[world]}", store)
