"""The recordings of an audit. Each is made once, on request, in separate processes.

There is a recording of the ranks on the user's data, one process on the joined batches of the ranks, the same process perturbed by one
rounding unit (which measures tolerances), and counterfactual runs that rules request. The error of a failed run names the process, the
cause and a fix.

Processes are awaited within a time limit and are always terminated at the end. They are forked, so that a model from ``__main__``, a
notebook or a closure does not have to be pickled, every process starts with the same weights and the same random state, and CPU tensors
are not shared between processes as with ``spawn``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_ddp_losses import errors
from lightning_ddp_losses.audit.compare import COARSE, Tolerances, measure_tolerances
from lightning_ddp_losses.audit.rank_record import RankRecord, Recording, join_blocks_
from lightning_ddp_losses.audit.replay import Perturbation, Run, Target, plan_replay
from lightning_ddp_losses.core.faults import FAULTS

# ---------------------------------------------------------------------- processes

GRACE_SECONDS = 3.0
"""Time limit for the other processes after one process has failed."""

_POLL_SECONDS = 0.5  # interval at which processes are checked
_TAIL = 4000  # number of characters of a process's output that an error shows


@dataclass(frozen=True)
class Failure:
    """How a process failed.

    Attributes:
        type: Class name of the error. Empty if the process died or took too long.
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
        """Read the output of the process."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def receive(self) -> Any:
        """Receive the answer of the process, or a ``Failure`` if it died without sending one."""
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
        """Return the end of the output of the process."""
        lines = [line for line in self.output().splitlines() if not line.startswith("Extension modules:")]
        return "\n".join(lines)[-_TAIL:].strip()


def run_processes(work: Callable[[int], Any], logs: Sequence[Path], *, seconds: float) -> list[Any]:
    """Call ``work(number)`` in new processes and wait for all of them.

    Args:
        work: Function of the number of a process. Its result must be picklable.
        logs: File for the output of each process.
        seconds: Time limit for all processes together.

    Returns:
        Result or ``Failure`` of each process.
    """
    expected = "a system whose processes can fork (Linux, macOS)"
    errors.expect(hasattr(os, "fork"), "audit", expected=expected, got=sys.platform, fix="Use WSL on Windows.")
    errors.expect(
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
        seconds: Time limit for all workers together.
        grace: Time limit in seconds for the other workers after a ``Failure``.

    Returns:
        Answers by the worker's number, with a ``Failure`` for a worker that died. Workers that did not answer are omitted.
    """
    answers: dict[int, Any] = {}
    waiting = {worker.pipe: number for number, worker in enumerate(workers)}
    deadline = time.monotonic() + seconds
    while waiting and time.monotonic() < deadline:
        left = max(0.0, min(deadline - time.monotonic(), _POLL_SECONDS))
        ready = set(multiprocessing.connection.wait(list(waiting), timeout=left))
        # the pipe of a dead process remains open if a child process inherited it
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
        warnings.simplefilter("ignore", DeprecationWarning)  # the child runs no threads of the parent
        process.start()
    sending.close()
    return Worker(process, receiving, log)


def _process_main(number: int, pipe: Any, log: Path, work: Callable[[int], Any]) -> None:
    """Run the work in a new process. Output is written to a file, and the result or failure is sent through the pipe."""
    gc.freeze()  # keeps the collector from touching inherited objects, which would copy pages of memory
    # start a new session, redirect output, and restore the default signal handlers
    os.setsid()  # child processes can be terminated together with this one
    redirect_output(log)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115 - until the end
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)
    # SIGUSR1 makes this process print the stacks of its threads
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    torch.set_num_threads(1)  # the parent's thread pool does not exist after a fork
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
    """Redirect the output of this process to a file, including its stack if it crashes."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(file=2)


def _stacks(worker: Worker) -> str:
    """Return the stacks of all threads of a process that has not answered."""
    text, start, quiet = "", None, 0
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.kill(worker.process.pid, signal.SIGUSR1)
        # on a busy machine stacks are written in pieces. Wait until nothing is written for a second, at most ten seconds
        for _ in range(100):
            time.sleep(0.1)
            before, text = text, worker.output()
            start = re.search(r"(Current thread|Thread) 0x", text)
            quiet = quiet + 1 if start and text == before else 0
            if quiet == 10:
                break
    return text[start.start() if start else 0 :][:_TAIL]


def _end_process(process: Any, *, at_once: bool) -> None:
    if not at_once:
        process.join(GRACE_SECONDS)  # it has answered and is about to exit
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # kills the process, and remaining child processes
    if process.is_alive():
        process.kill()
    process.join()


# ---------------------------------------------------------------------- recordings

_PERTURBATIONS = (Perturbation(1), Perturbation(2))
# 16-bit runs also use small perturbations, which change the direction in which numbers are rounded and have almost the same spread
_SMALL_PERTURBATIONS = (Perturbation(3, 1 / 16), Perturbation(4, 1 / 16))
_FLOAT64_TOLERANCE = 1e-9  # tensors with a smaller difference in float64 are equal
_OF_WINDOWS = ("joined", "reversed")  # assignments that can join the micro-batches of a window
# assignments of the same rows, divided evenly
_EVENLY: dict[str | int, str | int] = {"same": "even", "joined": "even joined"}


class Runs:
    """Makes and stores the recordings of one audit.

    Args:
        target: Training that is audited.
        scratch: Folder of all runs.
        devices: Number of ranks.
        steps: Number of optimizer steps.
        tolerance: The user's tolerance. If None, it is estimated.

    Attributes:
        needs_group: True if the one process has a process group, because the module requires one.
    """

    def __init__(self, target: Target, scratch: Path, devices: int, steps: int, tolerance: float | None) -> None:
        self.target, self.scratch = target, scratch
        self.devices, self.steps, self.tolerance = devices, steps, tolerance
        self.needs_group = False
        self._draws: dict[str, Any] = {
            "exact_draws": target.randomness != "rank",
            "by_row": target.randomness == "by_row",
        }
        self._made: dict[str, Recording] = {}

    # ------------------------------------------------------------------ making a recording

    def record(self, *runs: Run) -> list[Recording]:
        """Return the recordings of the runs. Runs that have not been recorded yet are executed concurrently."""
        new = [run for run in runs if run.name not in self._made]
        # create an empty folder for each run, which also contains the output of its processes
        for folder in map(self._folder_of, new):
            shutil.rmtree(folder, ignore_errors=True)  # left by an earlier run that failed
            folder.mkdir(mode=0o700)  # regardless of the umask, because batches are read only from this user's folders

        # one process for each rank of each run
        parts = [(run, rank) for run in new for rank in range(run.processes)]

        def work(index: int) -> RankRecord:
            run, rank = parts[index]
            return self.target.perform(run, self._folder_of(run), rank)

        logs = [self._folder_of(run) / f"output-{rank}.txt" for run, rank in parts]
        answers = run_processes(work, logs, seconds=self.target.seconds)
        failures = {part: answer for part, answer in zip(parts, answers, strict=True) if isinstance(answer, Failure)}
        if failures:
            raise _error_of(failures)
        for run in new:
            records = [answer for (of_run, _), answer in zip(parts, answers, strict=True) if of_run is run]
            self._made[run.name] = Recording(self._folder_of(run), records)
            join_blocks_(self._made[run.name])
        return [self._made[run.name] for run in runs]

    def _folder_of(self, run: Run) -> Path:
        return self.scratch / run.name.replace(" ", "-").replace(",", "")

    def replays(self, off: frozenset[str], *assignments: str | int, **options: Any) -> list[Recording]:
        """Record replays of the ranks' batches, which run concurrently.

        Args:
            off: Names in ``ABLATIONS`` that are switched off.
            *assignments: Batches of each process, for each replay.
            **options: Options of the runs, and ``whole_windows``.
        """
        return self.record(*(self._replay(off, assignment, **options) for assignment in assignments))

    def _replay(
        self, off: frozenset[str], assignment: str | int, *, whole_windows: bool | None = None, **options: Any
    ) -> Run:
        """Plan a run on the batches of the ranks, starting from their initial weights.

        Args:
            off: Names that are switched off.
            assignment: Key of ``plan_replay`` for the batches of each process.
            whole_windows: Whether the one process joins the micro-batches of a step to one batch. If None, as the strategy does.
            **options: Options of the run.
        """
        original = self.user_run
        if "uneven" in off:
            assignment = _EVENLY.get(assignment, assignment)
        title = f"rank {assignment}" if isinstance(assignment, int) else assignment
        given = {"whole_windows": whole_windows} | options
        shown = [f"{name} {value}" for name, value in given.items() if value is not None]
        name = ", ".join([title, *shown, *(f"no {each}" for each in sorted(off))])
        if whole_windows is None:
            whole_windows = assignment in _OF_WINDOWS and self.joins_windows
        options.setdefault("steps", self.steps)
        if whole_windows:
            options["accumulate"] = 0
        steps, by_window = options["steps"], self.target.draws_by_window
        plans = plan_replay(original, assignment, steps=steps, whole_windows=whole_windows, draws_by_window=by_window)
        ranks = self.devices if len(plans) > 1 else 0
        group = self.needs_group and not ranks
        return Run(name, ranks, plans, original, group=group, without=off, **self._draws, **options)

    # ------------------------------------------------------------------ ranks and one process

    @functools.cached_property
    def user_run(self) -> Recording:
        """The recording of the ranks on the user's data."""
        return self.record(Run("ranks", self.devices, steps=self.steps, **self._draws))[0]

    @functools.cached_property
    def _one(self) -> tuple[Recording, ...]:
        """One process on the joined batches, followed by perturbed runs of it unless the tolerance is given.

        If a module runs on the ranks but fails in a plain process, it may call torch.distributed. In this case the run is repeated with a
        process group of one rank.
        """
        assert self.user_run  # if it fails, the run in one process is not tried
        try:
            return self._record_one()
        except errors.AuditError as error:
            self.needs_group = True
            try:
                return self._record_one()
            except errors.AuditError:
                raise error from None

    def _record_one(self) -> tuple[Recording, ...]:
        moves: list[Perturbation | None] = [None]
        if self.tolerance is None:
            moves += _PERTURBATIONS
            if self.unit > COARSE:
                moves += _SMALL_PERTURBATIONS
        return tuple(self.record(*(self._replay(frozenset(), "joined", perturb=move) for move in moves)))

    def pair(self, off: frozenset[str]) -> tuple[Recording, Recording]:
        """Record ranks and one process without ``off``, on the same batches."""
        one = self._one[0]  # tolerances are measured with nothing switched off
        if not off:
            return self.user_run, one
        one, ranks = self.replays(off, "joined", "same")
        return ranks, one

    @functools.cached_property
    def unit(self) -> float:
        """The rounding unit of the runs."""
        return self.user_run.records[0].module_info.unit

    @functools.cached_property
    def _measured(self) -> Tolerances:
        one, *perturbed = self._one
        return measure_tolerances(one, perturbed, self.unit, self.tolerance)

    def allowed(self, off: frozenset[str]) -> Tolerances:
        """Return the allowed errors in runs without ``off``."""
        return Tolerances(_FLOAT64_TOLERANCE) if "precision" in off else self._measured

    # ------------------------------------------------------------------ counterfactual runs

    @property
    def joins_windows(self) -> bool:
        """Whether the one process joins all rows of a window to one batch."""
        return joins_windows(self.target.strategy) and self.user_run.records[0].module_info.automatic


def joins_windows(strategy: Any) -> bool:
    """Return whether this strategy treats the micro-batches of a window as one batch."""
    return getattr(strategy, "accumulation", "mean") == "window"


# ---------------------------------------------------------------------- runs that failed


class Hint(NamedTuple):
    """Advice for a common error of DDP.

    Attributes:
        pattern: Regular expression, searched for in the error and its traceback.
        fix: A fault of the table, or a sentence.
        page: Topic of ``ddp-losses explain``. If empty, the topic of ``AuditError``.
    """

    pattern: str
    fix: str
    page: str = ""


HINTS = (
    Hint(r"[Ee]xpected to have finished reduction|were not used in producing the loss", "F38", "F38"),
    Hint(r"returning None in distributed training", "F35", "F35"),
    Hint(
        r"SyncBatchNorm expected input tensor to be on|SyncBatchNorm layers only work with GPU",
        "torch's SyncBatchNorm does not run on the CPU: take plugins=[lightning_ddp_losses.SyncBatchNorm()] in place of "
        "sync_batchnorm=True, or audit on GPUs (trainer_kwargs=dict(accelerator='gpu')).",
        "sync_batch_norm",
    ),
    Hint(
        r"No CUDA|CUDA driver|not compiled with CUDA|NVIDIA driver|Torch not compiled with|CUDA in forked",
        "The model asks for a GPU and this process has none: use self.device in the module, or audit where there is one.",
    ),
    Hint(
        r"must have the same dtype|expected scalar type|same dtype, but got",
        "A part of the loop stays in another dtype than its model: parity(dtype=None) leaves all as they are.",
    ),
    Hint(
        r"Timed out|timed out|Connection (closed|reset)|took more than",
        "A rank waits for another: do all ranks run the same collectives, and have the same number of batches?",
    ),
)
"""Hints in order. The first one that matches is shown."""

# matches texts of errors that follow from another rank's failure
_FOLLOWS = re.compile(r"gloo|NCCL|Connection (closed|reset)|[Tt]imed out|[Tt]imeout")


def _error_of(failures: dict[tuple[Run, int], Failure]) -> Exception:
    """Return the error of the process that failed first for its own reason, not because another process failed."""
    (run, rank), failure = min(failures.items(), key=_blame)
    known = errors.error_class(failure.type)
    if known.__name__ == failure.type and known in (errors.ConfigurationError, errors.InputError):
        return known(failure.message)  # the text already contains a fix
    # place, cause and fix
    where = f"rank {rank} of {run.ranks}" if run.ranks else "the one process"
    said = f"{failure.type}: {failure.message}" if failure.type else failure.message
    seen = f"{said}\n{failure.traceback}"
    hint = next((hint for hint in HINTS if re.search(hint.pattern, seen)), Hint("", ""))
    fix = hint.fix
    if fix in FAULTS:
        fix = f"{fix}: {FAULTS[fix].title}. {FAULTS[fix].fix} {errors.explained_by(fix)}"
    what = f"audit, run `{run.name}` on {where}"
    text = errors.format_error(what, expected=f"{run.steps} optimizer steps", got=said, fix=fix)
    stories = [failure.traceback]
    if failure.message.startswith("took more"):  # one rank hangs, and other ranks wait for it
        stories = [f"rank {r} was here:\n{each.traceback}" for (_, r), each in failures.items()]
    return errors.AuditError("\n\n".join([text, *stories]), page=hint.page)


def _blame(item: tuple[tuple[Run, int], Failure]) -> tuple[bool, bool, int]:
    """Return a sort key: whether a process only waited, whether its error follows from another rank's failure, and the rank."""
    (_, rank), failure = item
    waited = failure.message.startswith("was still waiting")
    follows = failure.type == "PeerError" or bool(_FOLLOWS.search(failure.message))
    return waited, follows, rank
