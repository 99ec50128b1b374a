"""Part a: one process on the device beside the formula itself on the CPU, value and every gradient, mostly in float64.

Where distances are equal, or a row lies on a margin, rounding decides which pair counts, and two devices may decide differently. A run
is a tie, and not wrong, only if the CPU finds what the device found once the inputs are moved by one rounding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

from benchmarks.records import Row
from tests.pretended.devices import Device
from tests.pretended.runs import EXACT, EXACT_IN_FLOAT32, IN_FLOAT32, Found, runs_of


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
        inexact = [name for name in off if not off[name] < _limit_of(name)]
        ties = [name for name in inexact if results[name].is_a_tie]
        table = "gpu a: one process beside the CPU's"
        yield {
            "table": table,
            "loss": kind,
            "runs": len(results),
            "not_exact": len(inexact),
            "ties": len(ties),
            "largest_difference": off[worst] if math.isfinite(off[worst]) else None,
            "of": worst,
            "verdict": "WRONG" if len(ties) < len(inexact) else "ties" if ties else "exact",
        }
        for name in inexact:
            why, verdict = results[name].error or f"off by {off[name]:.1e}", "WRONG"
            if name in ties:
                why, verdict = f"{why}; the CPU finds the same after one rounding of its inputs", "ties"
            yield {"table": f"{table}: not exact", "loss": name, "why": why, "verdict": verdict}


def _limit_of(name: str) -> float:
    return EXACT_IN_FLOAT32 if any(formula in name for formula in IN_FLOAT32) else EXACT
