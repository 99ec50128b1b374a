"""Part c: what one call costs a GPU, forward and backward, from the third call on, against the suite's table of bounds.

The table counts operators. A GPU may start several kernels for one, so more kernels than operators are reported and not judged. Waits
for which a line of ours asks are judged. Those of PML and torchmetrics are reported, and those of the backward of their formulas (a
boolean index waits there too).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from benchmarks.records import Row
from tests.pretended.devices import Device, waits_in
from tests.pretended.runs import BOUNDS, bounded_run


def rows_of(device: Device, every: int = 1) -> Iterator[Row]:
    """Count launches, waits and uploads of every row of the table."""
    for name, bound in BOUNDS.items():
        found = bounded_run(device, name)
        launches = sum(counts.get("launches", 0) for counts in (found.forward, found.backward))
        uploads = sum(counts.get("uploads", 0) for counts in (found.forward, found.backward))
        places = Counter(waits_in(found.forward)) + Counter(waits_in(found.backward))
        own = sum(counts.get("own waits", 0) for counts in (found.forward, found.backward))
        yield {
            "table": "gpu c: launches and waits of a call, 512 rows x 32",
            "loss": name,
            "launches": launches,
            "launches_bound": bound.launches,
            "waits": places.total(),
            "own_waits": own,
            "own_waits_bound": bound.own_waits,
            "uploads": uploads,
            "where": ", ".join(f"{place.removeprefix('wait ')} x {number}" for place, number in places.items()),
            "error": found.error or None,
            "verdict": "WRONG" if found.error or own > bound.own_waits else "within",
        }
