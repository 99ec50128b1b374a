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

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import PeerError, format_error

# what an error says whose cause is a peer that has gone
_CONNECTION = re.compile(r"gloo|nccl|connection|socket|timed out|timeout|process group", re.IGNORECASE)
POLL_SECONDS = 0.5
RECEIPT_SECONDS = 3.0  # how long a failing rank waits for its peers to have read
GRACE_SECONDS = 5.0  # how long a peer may go on before its process ends
_log = logging.getLogger(__name__)


class Watchdog:
    """Tells the peers of this rank's failure, and this rank of theirs.

    Args:
        stall_seconds: A rank whose main thread stays at one place for longer is reported.
    """

    def __init__(self, stall_seconds: float) -> None:
        self._stall_seconds = stall_seconds
        self._rank, self._world = process_groups.rank(), process_groups.world_size()
        self._place: tuple[str, float] = ("start", time.monotonic())
        self._peer_failure: dict[str, Any] | None = None
        self._reported_stall: tuple[str, float] | None = None
        self._stopped = threading.Event()
        self._store: Any = None
        self._thread: threading.Thread | None = None
        if self._world > 1:
            self._store = _own_store()
        if self._store is not None:
            self._thread = threading.Thread(target=self._watch, name="ddp-checks", daemon=True)
            self._thread.start()

    # ------------------------------------------------------------------ called by the main thread

    def enter(self, place: str) -> None:
        """Note where the main thread is now.

        Raises:
            PeerError: when another rank has failed.
        """
        self._place = place, time.monotonic()
        self.check_peers()

    def check_peers(self) -> None:
        """Stop the main thread, which may be waiting, when another rank has failed.

        Raises:
            PeerError: when another rank has failed.
        """
        if self._peer_failure is not None:
            raise self._peer_error()

    def report_failure(self, exception: BaseException) -> PeerError | None:
        """Tell the peers that this rank ends with an exception, unless one of them ended first.

        Returns:
            What to raise in its place: the failure of the peer that took this rank along.
        """
        if self._store is None or not isinstance(exception, Exception):
            return None
        # a peer failed first: its failure is the cause where the exception is a broken connection
        with contextlib.suppress(Exception):  # the store may have gone with the rank that kept it
            self._read_failure()
        if self._peer_failure is not None:
            if _CONNECTION.search(str(exception)):
                return self._peer_error()
            return None
        # every rank raises the same: nobody needs to be told
        if getattr(exception, "collective", False):
            return None
        text = f"{type(exception).__name__}: {exception}"
        failure = {"rank": self._rank, "place": self._place[0], "text": text[:4000]}
        with contextlib.suppress(Exception):
            if self._store.add("failures", 1) == 1:  # the first to fail is the one to name
                self._store.set("failure", json.dumps(failure))
                self._wait_for_receipts()
            else:
                self._store.set(f"received/{self._rank}", "yes")
        return None

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(POLL_SECONDS * 4)

    def _wait_for_receipts(self) -> None:
        until = time.monotonic() + RECEIPT_SECONDS
        receipts = [f"received/{rank}" for rank in range(self._world) if rank != self._rank]
        while time.monotonic() < until and not all(self._store.check([key]) for key in receipts):
            time.sleep(0.05)

    def _peer_error(self) -> PeerError:
        assert self._peer_failure is not None
        rank, place = self._peer_failure["rank"], self._peer_failure["place"]
        text = f"rank {rank} failed, last seen at {place}:\n{self._peer_failure['text']}"
        return PeerError(text, collective=True)

    # ------------------------------------------------------------------ the watching thread

    def _watch(self) -> None:
        with contextlib.suppress(Exception):  # the store may go before this thread does
            while not self._stopped.wait(POLL_SECONDS):
                self._read_failure()
                if self._peer_failure is not None:
                    if not self._stopped.wait(GRACE_SECONDS):
                        self._end_process()
                    return
                self._report_stall()

    def _read_failure(self) -> None:
        """Read from the store whether a peer has failed, and acknowledge it."""
        if self._peer_failure is not None or self._store is None or not self._store.check(["failure"]):
            return
        failure = json.loads(self._store.get("failure"))
        if failure["rank"] != self._rank:
            self._store.set(f"received/{self._rank}", "yes")
            self._peer_failure = failure

    def _end_process(self) -> None:
        """End a process whose main thread waits for a rank that has gone, and show where it waits."""
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(file=2, all_threads=True)
        text = f"rank {self._rank} stops, after it waited as shown above: {self._peer_error()}"
        print(text, file=sys.stderr, flush=True)
        os._exit(1)

    def _report_stall(self) -> None:
        """Publish where this rank stands still; rank 0 logs where all ranks are, once for each stall."""
        place, since = self._place
        seconds = time.monotonic() - since
        if seconds < self._stall_seconds / 2 or place == "end":
            return
        self._store.set(f"place/{self._rank}", json.dumps([place, round(seconds)]))
        if self._rank != 0 or seconds < self._stall_seconds or self._reported_stall == self._place:
            return
        self._reported_stall = self._place
        ranks = [self._place_of(rank) for rank in range(self._world)]
        fix = "A rank that is behind the others is slow (data, disk), or runs a collective that they do not."
        _log.warning(format_error(f"no progress for {seconds:.0f} s", ranks=ranks, fix=fix))

    def _place_of(self, rank: int) -> str:
        """Say where a rank stands still, and for how long, as it published."""
        key = f"place/{rank}"
        if not self._store.check([key]):
            return "somewhere else"
        place, seconds = json.loads(self._store.get(key))
        if not seconds:
            return str(place)
        return f"{place}, for {seconds} s"


def _own_store() -> Any:
    """Return a part of the default store that only this fit uses; None where torch does not show it."""
    store = compat.default_store()
    if store is None:
        return None
    with contextlib.suppress(Exception):
        store = store.clone()  # so that a wait of the main thread does not keep this one
    # counted in the store, which lives as long as the group: an object's id can come back, and not on every rank
    fit = store.add(f"ddp_checks/fits_of_rank/{process_groups.rank()}", 1)
    return dist.distributed_c10d.PrefixStore(f"ddp_checks/fit/{fit}", store)
