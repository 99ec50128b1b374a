"""What ``import lightning_ddp_losses`` takes, over ``import lightning.pytorch``: seconds of the CPU, in processes of their own, in turns.

At most 1.1 (with bytecode at hand, which the first process writes). The rounds are pairs of neighbours; the ratio is their median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.records import Row

__all__ = ["main"]

LIMIT = 1.1
PROGRAM = "import {}, os, sys; used = os.times(); print(used.user + used.system, len(sys.modules))"


def main(arguments: list[str]) -> list[Row]:
    """Import in turns."""
    parser = argparse.ArgumentParser("python -m benchmarks import_time", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    measure("lightning_ddp_losses")  # its bytecode is there from now on
    pairs = [(measure("lightning.pytorch"), measure("lightning_ddp_losses")) for _ in range(options.rounds)]
    ratio = statistics.median(ours[0] / lightnings[0] for lightnings, ours in pairs)
    return [
        {
            "table": "import, CPU seconds",
            "lightning_s": statistics.median(lightnings[0] for lightnings, _ in pairs),
            "ours_s": statistics.median(ours[0] for _, ours in pairs),
            "ratio": ratio,
            "lightning_modules": pairs[0][0][1],
            "ours_modules": pairs[0][1][1],
            "verdict": "ok" if ratio <= LIMIT else "slower",
        }
    ]


def measure(module: str) -> tuple[float, int]:
    """Return CPU seconds, and the number of modules that are loaded, of a process that imports a module."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module)], env=environment, capture_output=True, text=True, check=True
    )
    seconds, modules = done.stdout.split()
    return float(seconds), int(modules)
