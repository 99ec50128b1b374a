"""The processes of a run: started, awaited within a time limit, and gone at the end; in each a Trainer with the recorder.

They are forked: a model from ``__main__``, a notebook or a closure needs no pickling, every process starts with the same
weights and the same random state, and unlike with ``spawn`` no CPU tensor is shared between them.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import functools
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from torch.utils.data import DataLoader

from lightning_ddp_losses.audit import ablations
from lightning_ddp_losses.audit.recorder import LEFT_OUT, Recorder
from lightning_ddp_losses.audit.replay import AuditTarget, Plan, ReplayBatch, Run
from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.strategies import ModelParallelLossStrategy

# ---------------------------------------------------------------------- processes

GRACE_SECONDS = 3.0
"""What the others get once one process has failed."""

_POLL_SECONDS = 0.5  # how often a silent process is looked at
_TAIL = 4000  # characters of a process's output that an error shows


@dataclass(frozen=True)
class Failure:
    """How a process failed.

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
    expected = "a system whose processes can fork (Linux, macOS)"
    expect(hasattr(os, "fork"), "audit", expected=expected, got=sys.platform)
    expect(
        not torch.cuda.is_initialized(),  # type: ignore[no-untyped-call]
        "audit",
        expected="a process that has not used CUDA yet (a forked process cannot)",
        got="CUDA initialised",
        fix="Audit at the start of a fresh script, before anything is moved to a GPU, or use `ddp-losses audit`.",
    )
    logs = [folder / f"output-{rank}.txt" for rank in range(count)]
    processes: list[Any] = []
    silent: dict[Any, int] = {}  # pipes of processes that have not answered, and their ranks
    failures: dict[int, Failure] = {}
    finished = False
    try:
        for rank in range(count):
            pipe, process = _start_process(rank, work, logs[rank], f"{title}, rank {rank}")
            processes.append(process)
            silent[pipe] = rank

        # answers, until all are there or the time is over; after a failure the others get a moment to report theirs
        deadline = time.monotonic() + seconds
        while silent and time.monotonic() < deadline:
            for pipe in _ready_pipes(silent, processes, deadline - time.monotonic()):
                rank = silent.pop(pipe)
                failure = _receive_failure(pipe, processes[rank], logs[rank])
                pipe.close()
                if failure is not None:
                    failures[rank] = failure
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)

        # who has not answered
        waited = f"took more than {seconds:.0f} s"
        if failures:
            waited = "was still waiting for the others"
        for pipe, rank in silent.items():
            failures[rank] = Failure("", waited, _stacks(processes[rank], logs[rank]))
            pipe.close()
        finished = True
        return failures
    finally:
        for rank, process in enumerate(processes):
            _end_process(process, at_once=not finished or rank in silent.values())


def _start_process(rank: int, work: Callable[[int], None], log: Path, name: str) -> tuple[Any, Any]:
    """Fork a process; returns the pipe that it will answer through, and the process."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_process_main, args=(rank, sending, log, work), name=name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the child runs none of theirs
        process.start()
    sending.close()
    return receiving, process


def _ready_pipes(silent: dict[Any, int], processes: list[Any], left: float) -> list[Any]:
    """Wait a moment for answers; also returns the pipes of processes that are gone without one."""
    timeout = max(0.0, min(left, _POLL_SECONDS))
    ready: list[Any] = list(multiprocessing.connection.wait(list(silent), timeout=timeout))
    # the pipe of a dead process stays open where a process that it started holds it too
    for pipe, rank in silent.items():
        if pipe not in ready and processes[rank].exitcode is not None:
            ready.append(pipe)
    return ready


def _process_main(rank: int, pipe: Any, log: Path, work: Callable[[int], None]) -> None:
    """Do the work in a new process; its output goes to a file, its failure through the pipe."""
    gc.freeze()  # the collector leaves what was inherited alone: each object that it looked at would be a page of memory to copy
    # a session of its own, output to a file, signals as a fresh process has them
    os.setsid()  # so that what this process starts ends with it
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115 - until the end
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    # SIGUSR1 asks where this process is
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    torch.set_num_threads(1)  # the parent's pool of threads did not come along
    answer: tuple[str, str, str] | None = None
    try:
        work(rank)
    except BaseException as error:
        story = "".join(traceback.format_exception(error))[-_TAIL:]
        answer = (type(error).__name__, str(error), story)
    with contextlib.suppress(OSError):
        pipe.send(answer)
        pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()


def _receive_failure(pipe: Any, process: Any, log: Path) -> Failure | None:
    """Receive what a process answered; None where all went well."""
    with contextlib.suppress(EOFError, OSError):
        if pipe.poll():
            answer = pipe.recv()
            return None if answer is None else Failure(*answer)
    # it is gone without an answer
    process.join(GRACE_SECONDS)
    code = process.exitcode
    end = f"exit code {code}"
    if code is not None and code < 0:
        end = f"signal {signal.Signals(-code).name}"
    lines = [line for line in _read_log(log).splitlines() if not line.startswith("Extension modules:")]
    return Failure("", f"died with {end}", "\n".join(lines)[-_TAIL:].strip())


def _read_log(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def _stacks(process: Any, log: Path) -> str:
    """Ask a silent process where each of its threads is."""
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3)
    text = _read_log(log)
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


# ---------------------------------------------------------------------- one process's part of a run


class _ExistingRanks(LightningEnvironment):
    """Ranks as torch.distributed has them; the processes are there, so Lightning starts none."""

    creates_processes_externally = True

    def local_rank(self) -> int:
        """This rank: all are on one machine."""
        return process_groups.rank()

    def world_size(self) -> int:
        """Number of ranks."""
        return process_groups.world_size()

    def global_rank(self) -> int:
        """This rank."""
        return process_groups.rank()


class _ReplayData(LightningDataModule):
    """The recorded batches, epoch by epoch; moved by one rounding unit if the run asks for that."""

    def __init__(self, plan: Plan, run: Run, model: Any) -> None:
        super().__init__()
        self.plan, self.run, self.model = plan, run, model

    def train_dataloader(self) -> DataLoader[Any]:
        """Load the batches of the trainer's epoch."""
        trainer = self.trainer
        assert trainer is not None
        unit = ablations.unit_roundoff(self.model, str(trainer.precision))
        batches = self.plan[min(trainer.current_epoch, len(self.plan) - 1)]
        load = functools.partial(_load, unit=unit, seed=self.run.perturb)
        indexed: Any = list(enumerate(batches))
        return DataLoader(indexed, batch_size=None, collate_fn=load)


def _load(indexed: tuple[int, ReplayBatch], *, unit: float, seed: int | None) -> Any:
    """Load one batch of an epoch."""
    index, planned = indexed
    batch = planned.load()
    return batch if seed is None else ablations.perturb_batch(batch, unit, seed * 1000 + index)


@contextlib.contextmanager
def joined_ranks(target: AuditTarget, run: Run, folder: Path, rank: int) -> Iterator[None]:
    """Be a rank of ``run`` for the length of the context, if the run has ranks; its warnings are not shown."""
    world = run.ranks or int(run.group)
    if world:
        backend = "gloo" if target.options.get("accelerator") == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=target.seconds)
        process_groups.join(str(folder / "ranks"), rank, world, backend=backend, timeout=timeout)
    # Lightning's account of devices, its advice, and warnings of the run are the fit's business, not the audit's
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    try:
        yield
    finally:
        process_groups.close(world=True)


def perform(target: AuditTarget, run: Run, folder: Path, rank: int) -> None:
    """Do one process's part of ``run`` in a process of its own: join the ranks, fit, leave."""
    with joined_ranks(target, run, folder, rank):
        _fit(target, run, folder, rank)


def _fit(target: AuditTarget, run: Run, folder: Path, rank: int) -> None:
    """Train ``run.steps`` optimizer steps and record them; the process group, if the run has one, is there."""
    recorder = Recorder(run, folder, rank)
    trainer = Trainer(**_trainer_options(target, run, recorder))
    data: dict[str, Any] = {"train_dataloaders": target.data}
    if run.plans:
        data = {"datamodule": _ReplayData(run.plans[rank], run, target.model)}
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            target.model.__dict__[hook] = _as_recorded  # the recorded batch has been through them
    elif isinstance(target.data, LightningDataModule):
        data = {"datamodule": target.data}
    try:
        trainer.fit(target.model, ckpt_path=target.ckpt_path, **data)
    finally:
        recorder.close()
    expect(
        recorder.record.steps,
        "training steps",
        expected=f"{run.steps} optimizer steps",
        got="none",
        fix="Is the training data empty on this rank (fewer rows than ranks, drop_last), or does no optimizer ever step?",
        error=InputError,
    )


def _as_recorded(batch: Any, dataloader_idx: int) -> Any:
    return batch


OURS = frozenset({
    "max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "logger", "enable_checkpointing", "fast_dev_run",
    "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps", "limit_val_batches", "val_check_interval",
    "check_val_every_n_epoch", "devices", "num_nodes", "strategy", "profiler", "barebones", "default_root_dir",
    "log_every_n_steps", "detect_anomaly",
})  # fmt: skip
"""Options of the Trainer that the audit sets itself."""

# options that speak of the user's data, which a replay does not have
_DATA_OPTIONS = frozenset({
    "limit_train_batches", "overfit_batches", "reload_dataloaders_every_n_epochs", "use_distributed_sampler"
})  # fmt: skip
_SPLIT_PARAMETERS = ("FSDP", "DeepSpeed", "ModelParallel", "XLA")  # strategies whose ranks hold no whole parameters


def _trainer_options(target: AuditTarget, run: Run, recorder: Recorder) -> dict[str, Any]:
    """Build the Trainer's options for one run: the user's, but what the audit decides."""
    # the user's, but what the audit decides or a replay does not have
    left_out = OURS | _DATA_OPTIONS if run.plans else OURS
    options = {name: value for name, value in target.options.items() if name not in left_out}
    # callbacks, plugins and accumulation
    given = options.pop("callbacks", None) or []
    if isinstance(given, Callback):
        given = [given]
    callbacks = [callback for callback in given if not isinstance(callback, LEFT_OUT)]
    plugins = _plugins(options.pop("plugins", None), run)
    accumulate = options.pop("accumulate_grad_batches", 1) * run.accumulate
    if not run.accumulate:
        callbacks = [callback for callback in callbacks if not isinstance(callback, GradientAccumulationScheduler)]
    # what the run is without, and what a replay cannot have
    if "precision" in run.without:
        options["precision"] = "64-true"
    if not run.ranks:
        options.pop("sync_batchnorm", None)
    if run.plans:
        options["use_distributed_sampler"] = False
        options["reload_dataloaders_every_n_epochs"] = 1
    return options | {
        "strategy": _strategy_of(target) if run.ranks else "auto",
        "devices": run.processes,
        "plugins": plugins,
        "callbacks": [recorder, *callbacks],
        "accumulate_grad_batches": max(1, accumulate),
        "max_steps": run.steps,
        "max_epochs": -1,
        "logger": DummyLogger(),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "default_root_dir": str(target.scratch),
        "deterministic": options.get("deterministic", target.deterministic or None),
    }


def _plugins(given: Any, run: Run) -> list[Any]:
    """Choose the user's plugins that a run can have, and the ranks that exist."""
    if not isinstance(given, (list, tuple)):
        given = [given]
    plugins = [plugin for plugin in given if plugin is not None and not isinstance(plugin, ClusterEnvironment)]
    if not run.ranks:  # one process has nobody to share statistics with
        plugins = [plugin for plugin in plugins if not isinstance(plugin, LayerSync)]
    if "precision" in run.without:  # a precision plugin would contradict float64
        plugins = [plugin for plugin in plugins if isinstance(plugin, LayerSync)]
    if run.ranks or run.group:
        plugins.append(_ExistingRanks())
    return plugins


def _strategy_of(target: AuditTarget) -> Any:
    """Build a strategy object that starts no processes; a name with its options becomes one."""
    strategy = target.strategy
    if isinstance(strategy, str):
        known = strategy in StrategyRegistry
        expect(known, "strategy", expected="a strategy that Lightning knows", got=repr(strategy))
        entry = StrategyRegistry[strategy]
        strategy = entry["strategy"](**entry["init_params"])
    else:
        strategy = copy.copy(strategy)
    name = type(strategy).__name__
    is_split = any(word in name for word in _SPLIT_PARAMETERS) and not isinstance(strategy, ModelParallelLossStrategy)
    expected = (
        "one that keeps whole parameters on every rank ('ddp', 'ddp_losses', DDPStrategy(...)), or 'fsdp2_ddp_losses'"
    )
    expect(isinstance(strategy, ParallelStrategy) and not is_split, "strategy", expected=expected, got=name)
    compat.use_existing_processes_(strategy, timedelta(seconds=target.seconds))
    return strategy
