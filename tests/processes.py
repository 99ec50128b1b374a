"""Python in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE")

# before the script: two ranks on this machine that meet at any free port
TORCHRUN = [
    *("-m", "torch.distributed.run", "--nproc-per-node=2"),
    *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
]


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_python(
    *arguments: str, folder: Path | None = None, seconds: float = 600, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Run `python *arguments` to its end, with this checkout on its path, one thread, no GPU, and nothing of a rank around it.

    Args:
        *arguments: Of the interpreter.
        folder: Where it runs; None: here.
        seconds: It may take that long.
        **environment: Further variables; None takes one away.
    """
    # bytecode of the package is kept between the processes
    kept = {"PYTHONDONTWRITEBYTECODE": None}
    given = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    merged = {**os.environ, **dict.fromkeys(_OF_A_RANK), **kept, **given, **environment}
    return subprocess.run(
        [sys.executable, *arguments],
        env={name: value for name, value in merged.items() if value is not None},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
