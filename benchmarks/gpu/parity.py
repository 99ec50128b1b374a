"""Part a: one process on the device beside the formula itself on the CPU, value and every gradient, mostly in float64."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

from benchmarks.records import Row
from tests.devices import Device
from tests.pretend_runs import Found, runs_of

EXACT = 1e-7  # relative; float64, through roots and logarithms of near equals


def rows_of(device: Device, every: int = 1) -> Iterator[Row]:
    """Run everything that the suite runs on one process; one row a kind, and one for each run that is not exact."""
    chosen: dict[str, dict[str, Callable[[], Found]]] = {}
    seen = Counter[str]()
    for name, run in runs_of(device).items():
        kind = name.partition(";")[0]
        # of each kind the first, and every n-th after it
        if seen[kind] % every == 0:
            chosen.setdefault(kind, {})[name] = run
        seen[kind] += 1
    for kind, runs in chosen.items():
        results = {name: run() for name, run in runs.items()}
        # one that failed is worse than any difference
        off = {name: math.inf if result.error else result.difference for name, result in results.items()}
        worst = max(off, key=lambda name: off[name])
        wrong = [name for name in off if not off[name] < EXACT]
        table = "gpu a: one process beside the CPU's"
        yield {
            "table": table,
            "loss": kind,
            "runs": len(results),
            "not_exact": len(wrong),
            "largest_difference": off[worst] if math.isfinite(off[worst]) else None,
            "of": worst,
            "verdict": "WRONG" if wrong else "exact",
        }
        for name in wrong:
            why = results[name].error or f"off by {off[name]:.1e}"
            yield {"table": f"{table}: not exact", "loss": name, "why": why, "verdict": "WRONG"}
