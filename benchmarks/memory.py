"""What a step needs: the resident set of this process, sampled while it runs."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["MIB", "Resident", "peak_of", "return_freed_blocks"]

MIB = 1 << 20
_MMAP_THRESHOLD = -3  # of mallopt, in glibc's malloc.h


class Resident:
    """Samples this process's resident set from a thread, and keeps the highest value since ``reset``."""

    def __init__(self) -> None:
        self._peak, self._stop = 0, False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @staticmethod
    def now() -> int:
        """Bytes resident now."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def reset(self) -> None:
        """Forget the peak so far."""
        with self._lock:
            self._peak = self.now()

    @property
    def peak(self) -> int:
        """Highest value since ``reset``."""
        return max(self._peak, self.now())

    def close(self) -> None:
        """End the thread."""
        self._stop = True
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop:
            with self._lock:  # or a reset between reading and writing is lost
                self._peak = max(self._peak, self.now())
            time.sleep(5e-4)


def peak_of(step: Callable[[], object]) -> int:
    """Bytes that the resident set grows by, at most, while ``step`` runs; what it reads must be there already.

    The kernel keeps the maximum, and the allocator has its defaults: memory that the heap has free does not count, and holes that are too
    small do.
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the maximum begins anew
    before = Resident.now()
    step()
    rows = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines())
    return int(rows["VmHWM"].split()[0]) * 1024 - before


def return_freed_blocks() -> None:
    """From now on, blocks of 128 KiB or more go back to the system when they are freed.

    By itself glibc raises that size as it goes, and keeps what is freed in its heap.
    """
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 128 << 10)
