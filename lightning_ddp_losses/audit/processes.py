"""Start processes that already hold the model, wait for them within a time limit, and leave nothing behind.

They are forked: a model from ``__main__``, a notebook or a closure needs no pickling, every process starts with the same
weights and the same random state, and unlike with ``spawn`` no CPU tensor is shared between them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_ddp_losses.errors import ConfigurationError

GRACE_SECONDS = 3.0
"""What the others get once one process has failed."""

_GLANCE_SECONDS = 0.5  # how often a silent process is looked at
_TAIL = 4000  # characters of a process's output that an error shows


@dataclass(frozen=True)
class Failure:
    """What a process met.

    Attributes:
        kind: Class name of the error; empty where the process died or took too long.
        text: Its text.
        traceback: Where it happened, or the end of the process's output.
    """

    kind: str
    text: str
    traceback: str


def run_processes(
    count: int, work: Callable[[int], None], *, title: str, folder: Path, seconds: float
) -> dict[int, Failure]:
    """Call ``work(rank)`` in ``count`` new processes and wait for all of them.

    Args:
        count: How many.
        work: What each does; its results go through files.
        title: What this is, for messages.
        folder: Where the processes' output goes.
        seconds: The time limit for all of them together.

    Returns:
        The failures by rank; empty when all went well.
    """
    _refuse_unforkable()
    context = multiprocessing.get_context("fork")
    ours: dict[Any, int] = {}
    started: list[Any] = []
    failures: dict[int, Failure] = {}
    try:
        for rank in range(count):
            mine, theirs = context.Pipe(duplex=False)
            log = folder / f"output-{rank}.txt"
            process = context.Process(target=_child, args=(rank, theirs, log, work), name=f"{title}, rank {rank}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the child runs none of theirs
                process.start()
            theirs.close()
            ours[mine] = rank
            started.append(process)
        deadline = time.monotonic() + seconds
        while ours and time.monotonic() < deadline:
            left = deadline - time.monotonic()
            ready = multiprocessing.connection.wait(list(ours), timeout=max(0.0, min(left, _GLANCE_SECONDS)))
            # the pipe of a dead process stays open where a process that it started holds it too
            gone = [pipe for pipe, rank in ours.items() if pipe not in ready and started[rank].exitcode is not None]
            for pipe in (*ready, *gone):
                rank = ours.pop(pipe)
                failure = _read(pipe, started[rank], folder / f"output-{rank}.txt")
                pipe.close()
                if failure is not None:
                    failures[rank] = failure
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        waited = f"took more than {seconds:.0f} s" if not failures else "was still waiting for the others"
        for pipe, rank in ours.items():
            failures[rank] = Failure("", waited, _stack(started[rank], folder / f"output-{rank}.txt"))
            pipe.close()
        return failures
    finally:
        silent = set(ours.values()) if sys.exc_info()[0] is None else set(range(count))
        for rank, process in enumerate(started):
            _end(process, at_once=rank in silent)


def _refuse_unforkable() -> None:
    if not hasattr(os, "fork"):
        raise ConfigurationError("audit", expected="a system whose processes can fork (Linux, macOS)", got=sys.platform)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigurationError(
            "audit",
            expected="a process that has not used CUDA yet (a forked process cannot)",
            got="CUDA initialised",
            fix="Audit at the start of a fresh script, before anything is moved to a GPU, or use `ddp-losses audit`.",
        )


def _child(rank: int, pipe: Any, log: Path, work: Callable[[int], None]) -> None:
    os.setsid()  # so that what this process starts ends with it
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115 - until the end
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    torch.set_num_threads(1)  # the parent's pool of threads did not come along
    answer: Failure | None = None
    try:
        work(rank)
    except BaseException as error:
        cause = error
        answer = Failure(type(cause).__name__, str(cause), "".join(traceback.format_exception(error))[-_TAIL:])
    with contextlib.suppress(OSError):
        pipe.send(None if answer is None else (answer.kind, answer.text, answer.traceback))
        pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()


_DIED = "died"


def _read(pipe: Any, process: Any, log: Path) -> Failure | None:
    try:
        answer = pipe.recv() if pipe.poll() else _DIED
    except (EOFError, OSError):
        answer = _DIED
    if answer == _DIED:
        process.join(GRACE_SECONDS)
        code = process.exitcode
        end = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return Failure("", f"died with {end}", _output(log))
    return None if answer is None else Failure(*answer)


def _output(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line for line in text.splitlines() if not line.startswith("Extension modules:")]
    return "\n".join(lines)[-_TAIL:].strip()


def _stack(process: Any, log: Path) -> str:
    """Where each thread of a silent process is."""
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3)
    text = log.read_text(errors="replace") if log.exists() else ""
    at = [place for mark in ("Thread 0x", "Current thread 0x") if (place := text.find(mark)) >= 0]
    return text[min(at, default=0) :][:_TAIL]


def _end(process: Any, *, at_once: bool) -> None:
    if not at_once:
        process.join(GRACE_SECONDS)  # it has answered and is on its way out
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # the process, and workers that it may have left
    if process.is_alive():
        process.kill()
    process.join()
