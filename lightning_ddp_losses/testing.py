"""Tests on several ranks, for pytest: rank processes that live for a whole test run, and `parity` as an assertion.

A conftest has to request the plugin, because importing this package in every run of pytest would take seconds::

    pytest_plugins = ["lightning_ddp_losses.testing"]

Then::

    def test_my_loop(ddp_ranks):
        ddp_ranks(3).assert_parity(build, step, batches)

    def test_my_collective(ddp_ranks):
        assert ddp_ranks(2).run(torch.distributed.get_rank) == [0, 1]

A fit runs on these ranks with ``Trainer(plugins=[RankEnvironment()], devices=W, ...)``, and `CountCollectives` counts what a piece of code
sends.

Both fixtures are based on the `RankPool`: ``pool.run(W, fn)`` calls ``fn`` on W ranks of a gloo group. Starting processes for each test
takes seconds, whereas a task for a running pool takes a millisecond. Workers are forked from a forkserver that has torch and lightning
loaded, find each other through a file (no ports), and communicate with the test through one pipe each. A group of ranks is one
*generation*: after a failure, or when W changes, the next task starts a new generation and every rank first leaves its old group. A worker
that hangs or dies is replaced, so that the next test runs. One rank, two ranks, and more ranks are three teams of workers: most tests use
1, 2 and 3 ranks in turn, and starting a generation takes as long as a small fit.

This package is not preloaded, so that coverage can measure its import in the workers too. Each task contains the warning filters of the
test that calls it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from torch import Tensor

from lightning_ddp_losses.audit import AuditReport, parity
from lightning_ddp_losses.audit.replay import can_pickle
from lightning_ddp_losses.audit.runs import Failure, Worker, collect_answers, redirect_output
from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import ConfigurationError

__all__ = ["CountCollectives", "RankEnvironment", "RankError", "RankFailure", "RankPool", "Ranks"]

GROUP_TIMEOUT = timedelta(seconds=120)  # generous, because a passing test never waits for it, even on a busy machine
# longer than the group's timeout, so that a peer's timeout is an error and not a hang
TASK_SECONDS = 30.0 + GROUP_TIMEOUT.total_seconds()
PRELOAD = ["torch", "torch.distributed", "pytest", "lightning", "pytorch_metric_learning.losses", "torchmetrics"]


@dataclass(frozen=True)
class Task:
    """One call for all ranks."""

    generation: int
    world_size: int  # 0 without a process group
    store: str
    call: bytes  # the pickled (fn, args, kwargs), unpickled by the worker so that an import error is also an answer
    filters: list[tuple[str, str, type[Warning], str, int]]


@dataclass(frozen=True)
class RankError(Failure):
    """The error raised by a rank's call.

    Attributes:
        rank: The rank.
        bases: Names of the class and its bases, `module.Class`.
        seconds: Seconds from the start of the call to the error.
    """

    rank: int
    bases: tuple[str, ...]
    seconds: float

    def is_a(self, name: str) -> bool:
        """Return whether the error belongs to a class with this name, or to a subclass of it."""
        return any(base.rpartition(".")[2] == name for base in self.bases)

    @property
    def timed_out(self) -> bool:
        """Return whether the rank raised its error only after the group's timeout."""
        return self.seconds >= GROUP_TIMEOUT.total_seconds()


# ---------------------------------------------------------------------- the pool


class RankFailure(AssertionError):  # noqa: N818 - a test that fails, not an error
    """A task that failed on some rank. The message contains each rank's report."""


@dataclass
class _PoolWorker(Worker):
    stack_pipe: Connection

    def ask_for_stack(self) -> None:
        """Make the worker write the stack of each of its threads to its log."""
        with contextlib.suppress(OSError, EOFError):  # it may have exited
            self.stack_pipe.send_bytes(b"")
            if self.stack_pipe.poll(5.0):
                self.stack_pipe.recv_bytes()


@dataclass
class _Team:
    """Workers that form one group. Worker i is always rank i."""

    workers: list[_PoolWorker | None] = field(default_factory=list)
    key: int | None = None  # ranks of the current generation, 0 without a group, None if the next task needs a new one
    generation: int = 0


class RankPool:
    """Worker processes, started when first needed."""

    def __init__(self, grace_seconds: float = 4.0) -> None:
        """Prepare the pool. Workers start with the first task.

        Args:
            grace_seconds: Time that the other ranks have after one rank of a `run` has failed.
        """
        self._grace_seconds = grace_seconds
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._folder = Path(tempfile.mkdtemp(prefix="rank-pool-"))
        self._teams = {ranks: _Team() for ranks in (1, 2, 3)}
        self._started = 0
        self._generation = 0

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Call ``fn(*args, **options)`` on each rank and return the results in rank order.

        Args:
            world_size: Number of ranks.
            fn: A function at module level, which can query torch.distributed for its rank.
            *args: Its arguments.
            **options: Its arguments by name, and options of the pool: ``distributed`` (False, with one rank only: no process group),
                ``fresh`` (True: a process group that no other call uses, because errors on some ranks leave remains in it), ``seconds``
                (time limit of a rank).
        """
        __tracebackhide__ = True  # the ranks' tracebacks show the place
        replies = self._ask(world_size, self._grace_seconds, fn, *args, **options)
        failed = [rank for rank, reply in enumerate(replies) if isinstance(reply, Failure)]
        if failed:
            self._team(world_size).key = None
            raise RankFailure(_account(f"{fn.__qualname__} failed on rank(s) {failed} of {world_size}", replies))
        return replies

    def errors(self, world_size: int, fn: Callable[..., Any], *args: Any, **options: Any) -> list[RankError]:
        """Call a function like ``run`` and return each rank's error, in rank order. A rank that returns fails the test."""
        __tracebackhide__ = True
        replies = self._ask(world_size, options.get("seconds", TASK_SECONDS), fn, *args, **options)
        self._team(world_size).key = None  # the next test needs a group without remains of an error
        odd = [rank for rank, reply in enumerate(replies) if not isinstance(reply, RankError)]
        if odd:
            raise RankFailure(_account(f"{fn.__qualname__} did not raise on rank(s) {odd} of {world_size}", replies))
        return [reply for reply in replies if isinstance(reply, RankError)]

    def pids(self, world_size: int) -> list[int | None]:
        """Return the process id of each worker that serves this number of ranks, or None for one that has died."""
        return [worker.process.pid if worker else None for worker in self._team(world_size).workers]

    def close(self) -> None:
        """End the workers (they leave their groups and save their coverage) and remove their files."""
        living = [worker for team in self._teams.values() for worker in team.workers if worker]
        for worker in living:
            worker.pipe.close()  # a worker exits when its pipe is closed
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
        grace: float,
        fn: Callable[..., Any],
        /,
        *args: Any,
        distributed: bool = True,
        fresh: bool = False,
        seconds: float = TASK_SECONDS,
        **kwargs: Any,
    ) -> list[Any]:
        """Call a function on each rank, and return each rank's result or a ``Failure``."""
        assert distributed or world_size == 1, "several ranks without a process group are not a world"
        team, key = self._team(world_size), world_size if distributed else 0
        if fresh or key != team.key:
            self._generation += 1
            team.key, team.generation = key, self._generation
        if fresh:
            team.key = None
        store = str(self._folder / f"store-{team.generation}")
        task = Task(team.generation, key, store, _sendable(fn, args, kwargs), _portable_filters())
        workers = [self._worker(team, rank) for rank in range(world_size)]
        for worker in workers:
            worker.pipe.send_bytes(pickle.dumps(task))
        answers = collect_answers(workers, seconds, grace)
        # record the stacks of all silent workers before ending one affects another
        for rank, worker in enumerate(workers):
            if rank not in answers:
                worker.ask_for_stack()
        silence = Failure("", f"no answer within {seconds:.0f} s or the grace after a failure", "")
        replies = [answers.get(rank, silence) for rank in range(world_size)]
        for rank, reply in enumerate(replies):
            if isinstance(reply, Failure) and not isinstance(reply, RankError):
                replies[rank] = self._end(team, rank, reply)
        return replies

    def _team(self, world_size: int) -> _Team:
        return self._teams[min(world_size, max(self._teams))]

    def _worker(self, team: _Team, rank: int) -> _PoolWorker:
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
            process = self._context.Process(target=serve, args=arguments, daemon=False)
            process.start()
            theirs.close()
            stack_theirs.close()
            worker = team.workers[rank] = _PoolWorker(process, ours, home / "log", stack_ours)
        return worker

    def _end(self, team: _Team, rank: int, failure: Failure) -> Failure:
        """End a lost worker and return its failure with its log. The next task starts a new worker."""
        worker = team.workers[rank]
        assert worker is not None
        team.key, team.workers[rank] = None, None
        worker.process.kill()
        worker.process.join(5)
        worker.pipe.close()
        worker.stack_pipe.close()
        return Failure("", f"{failure.message}; its output ends with", worker.tail())


def _sendable(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call.

    Raises:
        ConfigurationError: A part that cannot be sent to a process.
    """
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        parts = {"the function": fn} | {f"argument {i}": arg for i, arg in enumerate(args)} | kwargs
        odd = next((f"{name}, {part!r}" for name, part in parts.items() if not can_pickle(part)), "the call")
        fix = "Write the function at the top of a module, and give it what can be pickled."
        raise ConfigurationError("ranks", expected="what can be sent to a process", got=odd, fix=fix) from error


def _account(title: str, replies: Sequence[Any]) -> str:
    lines = [title]
    shown: dict[str, int] = {}
    for rank, reply in enumerate(replies):
        if isinstance(reply, RankError):
            first = shown.setdefault(reply.traceback, rank)
            story = reply.traceback if first == rank else f"as on rank {first}"
            lines.append(f"--- rank {rank}: {reply.type} after {reply.seconds:.1f} s\n{story}")
        elif isinstance(reply, Failure):
            lines.append(f"--- rank {rank}: {reply.message}\n{reply.traceback}")
        else:
            lines.append(f"--- rank {rank}: returned {reply!r}"[:500])
    return "\n".join(lines)


def _portable_filters() -> list[tuple[str, str, Any, str, int]]:
    """Return the warning filters of the calling test, including marks, as arguments of `warnings.filterwarnings`."""

    def pattern(entry: Any) -> str:
        if entry is None:
            return ""
        return re.escape(entry) + r"\Z" if isinstance(entry, str) else entry.pattern

    return [
        (action, pattern(message), category, pattern(module), line)
        for action, message, category, module, line in warnings.filters
    ]


# ---------------------------------------------------------------------- a rank process


def serve(rank: int, pipe: Connection, stack_pipe: Connection, home: str) -> None:
    """Process one task after the other until the pool closes the pipe."""
    redirect_output(Path(home) / "log")
    threading.Thread(target=_write_stacks, args=(stack_pipe,), name="stacks", daemon=True).start()
    sys.dont_write_bytecode = False  # otherwise each of a dozen processes would compile every test file again
    os.chdir(home)  # files in the working directory are deleted with the pool
    multiprocessing.set_start_method(None, force=True)  # the platform's default instead of the pool's method
    sys.argv = ["rank"]  # do not pass pytest's arguments on to the test
    torch.set_num_threads(1)
    look_for_plugins_once()
    seed_no_absent_devices()
    gc.freeze()  # objects of torch and Lightning live forever, so the collector can skip them
    generation = 0
    while True:
        try:
            task: Task = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the pool has closed our pipe, or has exited
            break
        os.ftruncate(2, 0)  # the log holds one task
        if task.generation != generation:
            # a rank that fails at this point exits, because torch would number its later groups differently from its peers
            _leave_group()
            if task.world_size:
                process_groups.join(task.store, rank, task.world_size, backend="gloo", timeout=GROUP_TIMEOUT)
            generation = task.generation
        started = time.monotonic()
        try:
            message = pickle.dumps(_run_task(task))
        except BaseException as error:  # evaluated by the test, including SystemExit
            message = pickle.dumps(_describe(error, rank, time.monotonic() - started))
        pipe.send_bytes(message)
    _leave_group()


def look_for_plugins_once() -> None:
    """Make Lightning scan the installed packages once per process. Each Trainer does this, which is half the time of a small fit.

    Plugins are loaded immediately, because the processes of an audit are forks and each would load them again.
    """
    from lightning.fabric.utilities import registry as lightning_registry

    registry: Any = lightning_registry

    registry.entry_points = functools.cache(registry.entry_points)
    for group in ("lightning.fabric.callbacks_factory", "lightning.pytorch.callbacks_factory"):
        registry.entry_points(group=group)


def seed_no_absent_devices() -> None:
    """Make `torch.manual_seed` skip kinds of devices that are not available.

    For each of them it stores a stack trace, in case the device is used later, which takes a hundred times as long as the seeding.
    """
    devices: tuple[Any, ...] = (torch.cuda, torch.xpu, torch.mtia)
    for device in devices:
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


def _write_stacks(asked: Connection) -> None:
    """Write each thread's stack to the log whenever the pool requests it, and on Linux the number of the main thread's system call.

    A signal cannot be used: when a fit ends, Lightning removes every handler that Python did not register, including faulthandler's.
    """
    with contextlib.suppress(EOFError, OSError):
        while True:
            asked.recv_bytes()
            faulthandler.dump_traceback(file=2, all_threads=True)
            # Python's stack does not show whether torch waits for a lock, a connection or a file
            if (syscall := Path("/proc/self/syscall")).exists():
                print(f"The main thread is in system call {syscall.read_text()}", file=sys.stderr, flush=True)
            asked.send_bytes(b"")


def _leave_group() -> None:
    if process_groups.is_distributed():
        process_groups.close(world=True)  # including all groups that were created under it
        # collect now, while all ranks leave: a group with an unmatched message waits until its peers have exited
        gc.collect()
        gc.freeze()  # the remaining objects are modules, which the next collection can skip
        # DTensor's cache of meshes refers to groups of this world
        if "torch.distributed.tensor" in sys.modules:
            from torch.distributed.tensor import debug

            getattr(debug, "_clear_sharding_prop_cache", lambda: None)()  # not in every release


def _run_task(task: Task) -> Any:
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    random.seed(0)
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.resetwarnings()
            for action, message, category, module, line in reversed(task.filters):
                warnings.filterwarnings(action, message, category, module, line)  # type: ignore[arg-type]
            fn, args, kwargs = pickle.loads(task.call)
            return fn(*args, **kwargs)
    finally:
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)


def _describe(error: BaseException, rank: int, seconds: float) -> RankError:
    print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
    return RankError(
        rank=rank,
        type=type(error).__name__,
        bases=tuple(f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__),
        message=str(error),
        seconds=seconds,
        traceback="".join(traceback.format_exception(error))[-6000:],
    )


# ---------------------------------------------------------------------- for tests


class Ranks:
    """A number of ranks, for one test.

    Args:
        pool: The processes.
        count: Number of ranks.
    """

    def __init__(self, pool: RankPool, count: int) -> None:
        self._pool, self.count = pool, count

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on each rank of a gloo group and return the results in rank order.

        Args:
            fn: A function of a module, because it is sent to processes.
            *args: Its arguments.
            **kwargs: Its arguments by name.

        Raises:
            RankFailure: a rank raised, died or hangs. The text contains each rank's report.
        """
        __tracebackhide__ = True
        return self._pool.run(self.count, fn, *args, **kwargs)

    def assert_parity(
        self, build: Callable[[], Any], step: Callable[..., Any] | None = None, batches: Any = None, **options: Any
    ) -> AuditReport:
        """Fail the test if a loop on these ranks is not equal to one process. The arguments are the same as for ``parity``.

        Raises:
            AssertionError: with the report as its text.
        """
        __tracebackhide__ = True
        report = parity(build, step, batches, ranks=self.count, **options)
        report.raise_if_different()
        return report


class RankEnvironment(ClusterEnvironment):
    """Lets a Lightning Trainer run on ranks that exist already: it starts no process, and uses the running process group.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> def fit(module, loader):  # ddp_ranks(2).run(fit, module, loader)
        ...     trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_losses", plugins=[RankEnvironment()])
        ...     trainer.fit(module, loader)
    """

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning starts no processes."""
        return True

    @property
    def main_address(self) -> str:
        """This machine."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """The group exists, so a port is not needed."""
        raise RuntimeError("the process group exists: nobody should need a port")

    @staticmethod
    def detect() -> bool:
        """Return False, because the environment is only used if it is passed to a Trainer."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks of the process group."""
        return process_groups.world_size()

    def set_world_size(self, size: int) -> None:
        """Accept the size of the process group only."""
        assert size == process_groups.world_size()

    def global_rank(self) -> int:
        """Return this process's rank."""
        return process_groups.rank()

    def set_global_rank(self, rank: int) -> None:
        """Accept this process's rank only."""
        assert rank == process_groups.rank()

    def local_rank(self) -> int:
        """Return the rank, because all ranks are on one node."""
        return process_groups.rank()

    def node_rank(self) -> int:
        """Return 0."""
        return 0


class CountCollectives(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the collectives that a block runs in this thread, forward and backward, in order.

    Attributes:
        names: Names of torch's operators, such as ``"allreduce_"``.
        num_bytes: Bytes of the larger of input and output of each, added up.

    Example:
        >>> with CountCollectives() as collectives:
        ...     total = torch.ones(3).sum()
        >>> collectives.names
        []
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operation of torch.distributed, and run it."""
        if func.namespace == "c10d":
            self.names.append(func.name().partition("::")[2].partition(".")[0])
            self.num_bytes += max(map(_tensor_bytes, args), default=0)
        return func(*args, **(kwargs or {}))

    def take(self) -> list[str]:
        """Return the names since the last call."""
        names, self.names = self.names, []
        return names


def _tensor_bytes(argument: Any) -> int:
    """Return the bytes of the tensors in an argument of an operation."""
    if isinstance(argument, Tensor):
        return argument.nbytes
    return sum(map(_tensor_bytes, argument)) if isinstance(argument, (list, tuple)) else 0


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Provide the rank processes of this test run."""
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture
def ddp_ranks(pool: RankPool) -> Callable[[int], Ranks]:
    """Provide a function that returns ``Ranks`` for a number of ranks."""
    return lambda count: Ranks(pool, count)
