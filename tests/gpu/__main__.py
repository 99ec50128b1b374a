"""Run the parts, show their rows, and record them where the device is a real one."""

from __future__ import annotations

import sys

from benchmarks import records
from tests import gpu

if __name__ == "__main__":
    rows = gpu.main(sys.argv[1:])
    records.show(rows)
    where = "not recorded"
    if rows.recorded:
        where = str(records.write("gpu", rows, add=True))
    print(f"gpu: {where}")
    sys.exit(rows.failed or any(row.get("verdict") == "WRONG" for row in rows))
