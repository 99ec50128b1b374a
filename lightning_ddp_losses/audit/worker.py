"""Processes that do a run: started, awaited within a time limit, and gone at the end.

They are forked: a model from ``__main__``, a notebook or a closure needs no pickling, every process starts with the same
weights and the same random state, and unlike with ``spawn`` no CPU tensor is shared between them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_ddp_losses.errors import expect

GRACE_SECONDS = 3.0
"""Time that the others get once one process has failed."""

_POLL_SECONDS = 0.5  # how often a silent process is looked at
_TAIL = 4000  # characters of a process's output that an error shows


@dataclass(frozen=True)
class Failure:
    """How a process failed.

    Attributes:
        type: Class name of the error, empty if the process died or took too long.
        message: Text of the error.
        traceback: Stack of the error, or the end of the process's output.
    """

    type: str
    message: str
    traceback: str


@dataclass
class Worker:
    """A process, the pipe through which it answers, and the file of its output."""

    process: Any
    pipe: Any
    log: Path

    def output(self) -> str:
        """Read its output."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def receive(self) -> Any:
        """Receive its answer, a ``Failure`` if it has died without one."""
        with contextlib.suppress(EOFError, OSError):
            if self.pipe.poll():
                return self.pipe.recv()
        self.process.join(GRACE_SECONDS)
        code = self.process.exitcode
        end = f"exit code {code}"
        if code is not None and code < 0:
            end = f"signal {signal.Signals(-code).name}"
        return Failure("", f"died with {end}", self.tail())

    def tail(self) -> str:
        """Return the end of its output."""
        lines = [line for line in self.output().splitlines() if not line.startswith("Extension modules:")]
        return "\n".join(lines)[-_TAIL:].strip()


def run_processes(work: Callable[[int], Any], logs: Sequence[Path], *, seconds: float) -> list[Any]:
    """Call ``work(number)`` in new processes and wait for all of them.

    Args:
        work: Function of the number of a process. Its result must be picklable.
        logs: File of each process's output.
        seconds: Time limit for all of them together.

    Returns:
        Result or ``Failure`` of each process.
    """
    expected = "a system whose processes can fork (Linux, macOS)"
    expect(hasattr(os, "fork"), "audit", expected=expected, got=sys.platform)
    expect(
        not torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
        "audit",
        expected="a process that has not used CUDA yet (a forked process cannot)",
        got="CUDA initialised",
        fix="Audit at the start of a fresh script, before anything is moved to a GPU, or use `ddp-losses audit`.",
    )
    workers: list[Worker] = []
    answers: dict[int, Any] = {}
    try:
        for number, log in enumerate(logs):
            workers.append(_start_process(number, work, log))
        answers = collect_answers(workers, seconds, GRACE_SECONDS)
        waited = f"took more than {seconds:.0f} s"
        if any(isinstance(answer, Failure) for answer in answers.values()):
            waited = "was still waiting for the others"
        silent = [worker for number, worker in enumerate(workers) if number not in answers]
        failures = iter([Failure("", waited, _stacks(worker)) for worker in silent])
        return [answers[number] if number in answers else next(failures) for number in range(len(workers))]
    finally:
        for number, worker in enumerate(workers):
            worker.pipe.close()
            _end_process(worker.process, at_once=number not in answers)


def collect_answers(workers: Sequence[Worker], seconds: float, grace: float) -> dict[int, Any]:
    """Receive an answer from each worker within a time limit.

    Args:
        workers: Workers that will answer.
        seconds: Time limit for all of them together.
        grace: Seconds that the others get after a ``Failure``.

    Returns:
        Answers by the worker's number, a ``Failure`` for one that died. A silent worker has no entry.
    """
    answers: dict[int, Any] = {}
    waiting = {worker.pipe: number for number, worker in enumerate(workers)}
    deadline = time.monotonic() + seconds
    while waiting and time.monotonic() < deadline:
        left = max(0.0, min(deadline - time.monotonic(), _POLL_SECONDS))
        ready = set(multiprocessing.connection.wait(list(waiting), timeout=left))
        # the pipe of a dead process stays open if a process that it started holds it too
        ready |= {pipe for pipe, number in waiting.items() if workers[number].process.exitcode is not None}
        for pipe in ready:
            number = waiting.pop(pipe)
            answers[number] = workers[number].receive()
            if isinstance(answers[number], Failure):
                deadline = min(deadline, time.monotonic() + grace)
    return answers


def _start_process(number: int, work: Callable[[int], Any], log: Path) -> Worker:
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_process_main, args=(number, sending, log, work))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the child runs none of theirs
        process.start()
    sending.close()
    return Worker(process, receiving, log)


def _process_main(number: int, pipe: Any, log: Path, work: Callable[[int], Any]) -> None:
    """Do the work in a new process. Its output goes to a file, its result or failure through the pipe."""
    gc.freeze()  # the collector leaves inherited objects alone: each one that it looked at would be a page of memory to copy
    # a new session, output to a file, signals as in a fresh process
    os.setsid()  # so that its children end with it
    redirect_output(log)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115 - until the end
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)
    # SIGUSR1 asks where this process is
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    torch.set_num_threads(1)  # the parent's pool of threads did not come along
    try:
        answer = work(number)
    except BaseException as error:
        story = "".join(traceback.format_exception(error))[-_TAIL:]
        answer = Failure(type(error).__name__, str(error), story)
    with contextlib.suppress(OSError):
        pipe.send(answer)
        pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()


def redirect_output(log: Path) -> None:
    """Send the output of this process to a file, and its stack if it dies."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(file=2)


def _stacks(worker: Worker) -> str:
    """Ask a silent process where each of its threads is."""
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
    text = worker.output()
    start = re.search(r"(Current thread|Thread) 0x", text)
    return text[start.start() if start else 0 :][:_TAIL]


def _end_process(process: Any, *, at_once: bool) -> None:
    if not at_once:
        process.join(GRACE_SECONDS)  # it has answered and is on its way out
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # the process, and workers that it may have left
    if process.is_alive():
        process.kill()
    process.join()
