"""The loop of a rank process: wait for a task, join its group, call it, answer, leave no trace."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from lightning_ddp_losses.audit.worker import redirect_output
from lightning_ddp_losses.distributed import process_groups

GROUP_TIMEOUT = timedelta(seconds=120)  # generous: no test that passes waits for it, however busy the machine is


@dataclass(frozen=True)
class Task:
    """One call for all ranks."""

    generation: int
    world_size: int  # 0: no process group
    store: str
    call: bytes  # the pickled (fn, args, kwargs): unpickled by the worker so that an import error is an answer too
    filters: list[tuple[str, str, type[Warning], str, int]]


@dataclass(frozen=True)
class Reply:
    """The result of a rank's call."""

    value: Any


@dataclass(frozen=True)
class RankError:
    """The error of a rank.

    Attributes:
        type: Name of the class.
        bases: Names of the class and its bases, `module.Class`.
        message: The error's text.
        seconds: Seconds from the start of the call to the error.
        traceback: Traceback, for the reader of a failed test.
    """

    rank: int
    type: str
    bases: tuple[str, ...]
    message: str
    seconds: float
    traceback: str

    def is_a(self, name: str) -> bool:
        """Return whether the error is of a class of this name, or of one derived from it."""
        return any(base.rpartition(".")[2] == name for base in self.bases)

    @property
    def timed_out(self) -> bool:
        """Return whether the rank learnt of its error no sooner than by the group's time-out."""
        return self.seconds >= GROUP_TIMEOUT.total_seconds()


def main(rank: int, pipe: Connection, stack_pipe: Connection, home: str) -> None:
    """Answer one task after the other until the pool closes the pipe."""
    redirect_output(Path(home) / "log")
    threading.Thread(target=_write_stacks, args=(stack_pipe,), name="stacks", daemon=True).start()
    sys.dont_write_bytecode = False  # else each of a dozen processes would compile every file of tests again
    os.chdir(home)  # files in the working directory go when the pool goes
    sys.argv = ["rank"]  # pytest's arguments are not the test's
    torch.set_num_threads(1)
    look_for_plugins_once()
    seed_no_absent_devices()
    gc.freeze()  # objects of torch and Lightning stay: the collector need not look at them again
    generation = 0
    while True:
        try:
            task: Task = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the pool has closed our pipe, or is gone
            break
        os.ftruncate(2, 0)  # the log holds one task
        if task.generation != generation:
            # a rank that fails here ends: torch would number its later groups otherwise than its peers do
            _leave_group()
            if task.world_size:
                process_groups.join(task.store, rank, task.world_size, backend="gloo", timeout=GROUP_TIMEOUT)
            generation = task.generation
        started = time.monotonic()
        try:
            answer: Reply | RankError = Reply(_call(task))
            message = pickle.dumps(answer)
        except BaseException as error:  # the test judges it, SystemExit too
            message = pickle.dumps(_describe(error, rank, time.monotonic() - started))
        pipe.send_bytes(message)
    _leave_group()


def look_for_plugins_once() -> None:
    """Let Lightning go through the installed packages once per process. Each Trainer does, which is half the time of a small fit.

    Plugins are loaded here, because the processes of an audit are forks and each would load them again.
    """
    from lightning.fabric.utilities import registry as lightning_registry

    registry: Any = lightning_registry

    registry.entry_points = functools.cache(registry.entry_points)
    for group in ("lightning.fabric.callbacks_factory", "lightning.pytorch.callbacks_factory"):
        registry.entry_points(group=group)


def seed_no_absent_devices() -> None:
    """Have `torch.manual_seed` pass over kinds of devices that are not here.

    For each it keeps a stack trace, in case the device is used later: that takes a hundred times as long as the seeding.
    """
    devices: tuple[Any, ...] = (torch.cuda, torch.xpu, torch.mtia)
    for device in devices:
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


def _write_stacks(asked: Connection) -> None:
    """Write where each thread is to the log whenever the pool asks.

    No signal could ask: Lightning takes every handler away that Python does not know of when a fit ends, those of faulthandler too.
    """
    with contextlib.suppress(EOFError, OSError):
        while True:
            asked.recv_bytes()
            faulthandler.dump_traceback(file=2, all_threads=True)
            asked.send_bytes(b"")


def _leave_group() -> None:
    if process_groups.is_distributed():
        process_groups.close(world=True)  # all groups that were made under it too
        # now, when all ranks leave: a group with an unmet message waits until its peers are gone
        gc.collect()
        gc.freeze()  # the rest is modules: the next group's end need not go through them again
        # DTensor's cache of meshes names groups of this world
        if "torch.distributed.tensor" in sys.modules:
            from torch.distributed.tensor import debug

            getattr(debug, "_clear_sharding_prop_cache", lambda: None)()  # not in every release


def _call(task: Task) -> Any:
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
