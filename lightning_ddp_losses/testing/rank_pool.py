"""Rank processes that stay alive for a whole test run: `pool.run(W, fn)` calls `fn` on W ranks of a gloo group.

Starting processes for each test costs seconds; a task for a living pool costs a millisecond. Workers come from a
forkserver that has torch and lightning loaded, meet through a file (no ports), and talk to the test through one pipe each.
A group of ranks is one *generation*: after a failure, or when W changes, the next task brings a new generation and every
rank first leaves its old group. A worker that hangs or dies is replaced, so that the next test runs. One rank, two and more of
them are three teams of workers: most tests go through 1, 2 and 3 ranks in turn, and a generation costs as much as a small fit.

This package is not preloaded: coverage can measure its import in the workers too. Each task carries the warning filters of the test that
calls it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import pickle
import re
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.testing import rank_worker
from lightning_ddp_losses.testing.rank_worker import RankError, Reply, Task

# more than the time after which a group gives up: a peer's time-out is an error, not a hang
TASK_SECONDS = 30.0 + rank_worker.GROUP_TIMEOUT.total_seconds()
PRELOAD = ["torch", "torch.distributed", "pytest", "lightning", "pytorch_metric_learning.losses", "torchmetrics"]


class RankFailure(AssertionError):  # noqa: N818 - a test that fails, not an error
    """A task that did not do on every rank what the test asked for; the message holds each rank's account."""


@dataclass
class _Worker:
    process: Any
    pipe: multiprocessing.connection.Connection
    stack_pipe: multiprocessing.connection.Connection
    log: Path

    def ask_for_stack(self) -> None:
        """Have the worker write where each of its threads is to its log."""
        with contextlib.suppress(OSError, EOFError):  # it may be no more
            self.stack_pipe.send_bytes(b"")
            if self.stack_pipe.poll(5.0):
                self.stack_pipe.recv_bytes()

    def tail(self, characters: int = 3000) -> str:
        """Return the end of its output."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        lines = [line for line in text.splitlines() if not line.startswith("Extension modules:")]
        return "\n".join(lines)[-characters:].strip()


@dataclass
class _Team:
    """Workers that meet in one group; worker i is always rank i."""

    workers: list[_Worker | None] = field(default_factory=list)
    key: int | None = None  # ranks of the living generation, 0 without a group; None: the next task needs a new one
    generation: int = 0

    def pids(self) -> list[int | None]:
        """Return the process id of each worker."""
        return [worker.process.pid if worker else None for worker in self.workers]


class RankPool:
    """Worker processes, started when first needed."""

    def __init__(self, grace_seconds: float = 4.0) -> None:
        """Start nothing yet.

        Args:
            grace_seconds: Time for the other ranks once one rank of a `run` has failed.
        """
        self._grace_seconds = grace_seconds
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._folder = Path(tempfile.mkdtemp(prefix="rank-pool-"))
        self._teams = {ranks: _Team() for ranks in (1, 2, 3)}
        self._started = 0
        self._generation = 0

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        distributed: bool = True,
        fresh: bool = False,
        seconds: float = TASK_SECONDS,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on each rank and return the results in rank order.

        Args:
            world_size: Number of ranks.
            fn: A function at module level; it asks torch.distributed for its rank.
            *args: Its arguments.
            distributed: False (one rank only): without a process group.
            fresh: Start from a new process group even when the living one would do.
            seconds: A rank that takes longer fails the test.
            **kwargs: Arguments of `fn` by name.
        """
        __tracebackhide__ = True  # the ranks' own tracebacks say where it happened
        replies = self._ask(world_size, fn, args, kwargs, distributed, fresh, seconds, patient=False)
        failed = [rank for rank, reply in enumerate(replies) if isinstance(reply, (RankError, str))]
        if failed:
            self._team(world_size).key = None
            raise RankFailure(_account(f"{fn.__qualname__} failed on rank(s) {failed} of {world_size}", replies))
        return [reply.value for reply in replies if isinstance(reply, Reply)]

    def errors(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        distributed: bool = True,
        fresh: bool = False,
        seconds: float = TASK_SECONDS,
        **kwargs: Any,
    ) -> list[RankError]:
        """Call `fn` on each rank and return what each rank raised, in rank order; a rank that returned fails the test."""
        __tracebackhide__ = True
        replies = self._ask(world_size, fn, args, kwargs, distributed, fresh, seconds, patient=True)
        self._team(world_size).key = None  # what an error leaves behind in a group is not the next test's business
        odd = [rank for rank, reply in enumerate(replies) if not isinstance(reply, RankError)]
        if odd:
            raise RankFailure(_account(f"{fn.__qualname__} did not raise on rank(s) {odd} of {world_size}", replies))
        return [reply for reply in replies if isinstance(reply, RankError)]

    def pids(self, world_size: int) -> list[int | None]:
        """Process id of each worker that takes part where there are so many ranks, None where one has died."""
        return self._team(world_size).pids()

    def close(self) -> None:
        """End the workers (they leave their groups and save their coverage) and remove their files."""
        living = [worker for team in self._teams.values() for worker in team.workers if worker]
        for worker in living:
            worker.pipe.close()  # a worker that finds its pipe closed ends
        for worker in living:
            worker.process.join(10)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._teams.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(
        self,
        world_size: int,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        distributed: bool,
        fresh: bool,
        seconds: float,
        patient: bool,
    ) -> list[Reply | RankError | str]:
        assert distributed or world_size == 1, "several ranks without a process group are not a world"
        team, key = self._team(world_size), world_size if distributed else 0
        if fresh or key != team.key:
            self._generation += 1
            team.key, team.generation = key, self._generation
        store = str(self._folder / f"store-{team.generation}")
        task = Task(team.generation, key, store, _sendable(fn, args, kwargs), _portable_filters())
        workers = [self._worker(team, rank) for rank in range(world_size)]
        for worker in workers:
            worker.pipe.send_bytes(pickle.dumps(task))
        replies = _collect(workers, seconds, seconds if patient else self._grace_seconds)
        lost = [rank for rank in range(world_size) if replies[rank] is None or isinstance(replies[rank], str)]
        # where all of them stand, before the end of one moves another
        for rank in lost:
            if replies[rank] is None:
                workers[rank].ask_for_stack()
        for rank in lost:
            replies[rank] = self._replace(team, rank, hung=replies[rank] is None, seconds=seconds)
        return [reply for reply in replies if reply is not None]

    def _team(self, world_size: int) -> _Team:
        return self._teams[min(world_size, max(self._teams))]

    def _worker(self, team: _Team, rank: int) -> _Worker:
        while len(team.workers) <= rank:
            team.workers.append(None)
        worker = team.workers[rank]
        if worker is None:
            self._started += 1
            home = self._folder / f"rank-{rank}-{self._started}"
            home.mkdir()
            ours, theirs = self._context.Pipe()
            stack_ours, stack_theirs = self._context.Pipe()
            arguments = (rank, theirs, stack_theirs, str(home))
            process = self._context.Process(target=rank_worker.main, args=arguments, daemon=False)
            process.start()
            theirs.close()
            stack_theirs.close()
            worker = team.workers[rank] = _Worker(process, ours, stack_ours, home / "log")
        return worker

    def _replace(self, team: _Team, rank: int, *, hung: bool, seconds: float) -> str:
        """End a lost worker and tell what is known of it; the next task starts another."""
        worker = team.workers[rank]
        assert worker is not None
        team.key = None
        if hung:
            worker.process.kill()
        worker.process.join(5)
        worker.pipe.close()
        worker.stack_pipe.close()
        team.workers[rank] = None
        code = worker.process.exitcode
        end = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        story = f"no answer within {seconds:.0f} s or the grace after a failure" if hung else f"died with {end}"
        return f"{story}; its output ends with\n{worker.tail()}"


def _sendable(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call.

    Raises:
        ConfigurationError: What cannot be sent to a process.
    """
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        parts = {"the function": fn} | {f"argument {i}": arg for i, arg in enumerate(args)} | kwargs
        odd = next((f"{name}, {part!r}" for name, part in parts.items() if not _can_pickle(part)), "the call")
        fix = "Write the function at the top of a module, and give it what can be pickled."
        raise ConfigurationError("ranks", expected="what can be sent to a process", got=odd, fix=fix) from error


def _can_pickle(part: Any) -> bool:
    try:
        pickle.dumps(part)
    except Exception:
        return False
    return True


def _collect(workers: list[_Worker], seconds: float, grace: float) -> list[Reply | RankError | str | None]:
    """One answer per rank: a reply, an error, a text for a rank that died, None for a rank that did not answer in time."""
    replies: list[Reply | RankError | str | None] = [None] * len(workers)
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + seconds
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            try:
                replies[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except (EOFError, ConnectionError):
                replies[rank] = "died"
            if not isinstance(replies[rank], Reply):
                deadline = min(deadline, time.monotonic() + grace)
    return replies


def _account(title: str, replies: Sequence[Reply | RankError | str]) -> str:
    lines = [title]
    told: dict[str, int] = {}
    for rank, reply in enumerate(replies):
        if isinstance(reply, Reply):
            lines.append(f"--- rank {rank}: returned {reply.value!r}"[:500])
        elif isinstance(reply, RankError):
            first = told.setdefault(reply.traceback, rank)
            story = reply.traceback if first == rank else f"as on rank {first}"
            lines.append(f"--- rank {rank}: {reply.type} after {reply.seconds:.1f} s\n{story}")
        else:
            lines.append(f"--- rank {rank}: {reply}")
    return "\n".join(lines)


def _portable_filters() -> list[tuple[str, str, Any, str, int]]:
    """The warning filters of the calling test, marks included, as arguments of `warnings.filterwarnings`."""

    def pattern(entry: Any) -> str:
        if entry is None:
            return ""
        return re.escape(entry) + r"\Z" if isinstance(entry, str) else entry.pattern

    return [
        (action, pattern(message), category, pattern(module), line)
        for action, message, category, module, line in warnings.filters
    ]
