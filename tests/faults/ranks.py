"""Ranks as a scheduler starts them: processes with the environment of a rank, whose output is kept, and which nobody ends or restarts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ddp_losses.testing import PRELOAD
from tests.processes import free_port


@dataclass
class Ended:
    """How ranks have ended.

    Attributes:
        codes: Exit code of each rank; None for one that had to be ended from outside.
        outputs: What each wrote.
        seconds: From the start until each had ended.
    """

    codes: list[int | None]
    outputs: list[str]
    seconds: list[float]

    def __str__(self) -> str:
        told = zip(self.codes, self.seconds, self.outputs, strict=True)
        return "\n".join(f"--- rank {r}: exit {c} after {s:.1f} s\n{o[-3000:]}" for r, (c, s, o) in enumerate(told))


def run_ranks(
    world_size: int, job: Callable[..., None], *args: Any, folder: Path, seconds: float = 60.0, **environment: str
) -> Ended:
    """Run a job on ranks that start together, until all have ended or the time is over.

    Args:
        world_size: How many.
        job: A function at module level.
        args: Its arguments.
        folder: Where their output goes.
        seconds: Then what is left is killed, and counts as a rank that has not ended.
        environment: Further variables.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port, began = free_port(), time.monotonic()
    logs = [folder / f"output-{rank}-{port}" for rank in range(world_size)]
    processes = []
    for rank, log in enumerate(logs):
        own = _environment(rank, world_size, port) | environment
        process = context.Process(target=_main, args=(own, str(log), job, args))  # type: ignore[attr-defined]
        process.start()
        processes.append(process)
    codes: list[int | None] = []
    ends = {}
    while len(ends) < world_size and time.monotonic() < began + seconds:
        for rank, process in enumerate(processes):
            if rank not in ends and not process.is_alive():
                ends[rank] = time.monotonic() - began
        time.sleep(0.02)
    for rank, process in enumerate(processes):
        codes.append(process.exitcode if rank in ends else None)
        process.kill()
        process.join()
    outputs = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
    return Ended(codes, outputs, [ends.get(rank, seconds) for rank in range(world_size)])


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def _main(environment: dict[str, str], log: str, job: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.setsid()  # whatever it starts is of its session
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    Path(log).with_name(f"session-{os.getpid()}").touch()
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    import torch

    torch.set_num_threads(1)
    job(*args)


def processes_of(folder: Path) -> list[int]:
    """Return the processes that live in the sessions of ranks whose output is in a folder."""
    sessions = {found.name.removeprefix("session-") for found in folder.glob("session-*")}
    living = []
    for found in Path("/proc").iterdir():
        if found.name.isdigit():
            try:
                fields = (found / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[3] in sessions and fields[0] not in "ZX":
                living.append(int(found.name))
    return living
