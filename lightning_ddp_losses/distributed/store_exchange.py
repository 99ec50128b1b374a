"""`StoreExchange`: exchange bytes between all ranks through the store of a run, after an error.

After an error collectives cannot be used: peers wait in another collective, connections are closed, and a group may contain a message that
was sent but not received. The store of the run is still available. Each rank writes its bytes to it and reads the bytes of all ranks,
until a deadline that all exchanges share. A rank whose main thread waits in another library's collective does not take part, but its
listening thread has written where it is (``liveness.Watch``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from lightning_ddp_losses.distributed.liveness import SILENCE_SECONDS, Watch, within

_POLL_SECONDS = 0.05


class StoreExchange:
    """Exchanges bytes between the ranks of a run in a sequence of exchanges that is the same on every rank.

    Args:
        watch: Watch of the run, with its store.
        seconds: Limit for the total waiting time.
    """

    def __init__(self, watch: Watch, seconds: float) -> None:
        self._watch = watch
        self._deadline = time.monotonic() + seconds
        self._number = 0

    def post(self, payload: bytes) -> None:
        """Write this rank's bytes for the next exchange. An unresponsive store is detected only in ``collect``."""
        key = self._keys()[self._watch.rank]
        within(SILENCE_SECONDS, lambda: self._watch.store.set(key, payload))  # type: ignore[arg-type]  # takes bytes too

    def collect(self) -> list[bytes]:
        """Return the bytes of all ranks, in rank order, and start the next exchange.

        Raises:
            TimeoutError: on this rank, with the positions of the ranks that did not write their bytes before the deadline.
        """
        keys = self._keys()
        self._number += 1
        seconds = max(0.0, self._deadline - time.monotonic())
        payloads = within(seconds + SILENCE_SECONDS, lambda: self._wait_for(keys, seconds))
        if payloads is None:
            raise TimeoutError("the store of the run does not answer")
        absent = [rank for rank, payload in enumerate(payloads) if payload is None]
        if absent:
            raise TimeoutError("; ".join(map(self._where, absent)))
        return [payload for payload in payloads if payload is not None]

    def _keys(self) -> list[str]:
        return [f"exchange/{self._number}/{rank}" for rank in range(self._watch.world_size)]

    def _wait_for(self, keys: Sequence[str], seconds: float) -> list[bytes | None]:
        """Return the value of each key, or None for a key that does not exist after the given number of seconds."""
        store, end = self._watch.store, time.monotonic() + seconds
        while not store.check([*keys]) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        payloads: list[bytes | None] = []
        for key in keys:
            is_there = store.check([key])
            payloads.append(store.get(key) if is_there else None)
        return payloads

    def _where(self, rank: int) -> str:
        """Return the position of a missing rank, as written by its listening thread."""
        place = within(SILENCE_SECONDS, lambda: self._watch.place_of(rank))
        if not place:
            return f"rank {rank} does not answer"
        return f"rank {rank} is in {place}"
