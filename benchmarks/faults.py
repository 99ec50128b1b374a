"""Faults: seconds from what befalls a rank to the end of the last one, and from a relaunch to the first step; nothing else is compared.

Three ranks of the tests' own fit (``tests/faults/training.py``), whose groups wait four seconds; limit: fifteen seconds. A relaunch starts
from a process that has torch and Lightning loaded: what Python's imports cost is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.records import Row
from tests.faults.ranks import run_ranks
from tests.faults.training import GROUP_SECONDS, Strike, fit

__all__ = ["main"]

W, LIMIT = 3, 15.0
FAULTS = {
    "killed in forward": Strike("killed in forward"),
    "killed in backward": Strike("killed in backward"),
    "killed in a ring": Strike("killed in a ring"),
    "rank 0 killed while saving": Strike("killed while saving", rank=0),
    "raises in the step": Strike("raises"),
    "raises in a callback": Strike("raises in a callback"),
    "stands still": Strike("stalls"),
    "SIGTERM to one": Strike("SIGTERM"),
    "SIGTERM to all": Strike("SIGTERM", rank=-1),
}


def measure(strike: Strike) -> tuple[float, float]:
    """Return the seconds until the last rank has ended, and those from a relaunch until all ranks train."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.time()
        ended = run_ranks(W, fit, strike, folder, folder=folder)
        struck = min(mark.stat().st_mtime for mark in folder.glob("struck-*"))
        to_end = began + max(ended.seconds) - struck
        again = time.time()
        run_ranks(W, fit, strike, folder, folder=folder)
        to_train = max(mark.stat().st_mtime for mark in folder.glob("began-*")) - again
    return to_end, to_train


def main(options: list[str]) -> list[Row]:
    """Measure each fault several times."""
    parser = argparse.ArgumentParser("python -m benchmarks faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    given, _ = parser.parse_known_args(options)
    rows: list[Row] = []
    for fault, strike in FAULTS.items():
        ends, resumes = zip(*(measure(strike) for _ in range(given.rounds)), strict=True)
        rows.append(
            {
                "table": f"Faults: {W} ranks, groups that wait {GROUP_SECONDS:g} s",
                "job": fault,
                "seconds_to_the_end_of_the_last_rank": statistics.median(ends),
                "longest": max(ends),
                "limit": LIMIT,
                "seconds_to_train_again": statistics.median(resumes),
                "rounds": given.rounds,
                "verdict": "met" if max(ends) < LIMIT else "missed",
            }
        )
    return rows
