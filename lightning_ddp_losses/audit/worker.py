"""One process's part of a run: a Trainer on ranks that exist already, or in a process of its own, with the recorder in it."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import logging
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
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.strategies import ParallelStrategy, Strategy, StrategyRegistry
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_losses.audit import ablations
from lightning_ddp_losses.audit.recorder import LEFT_OUT, Recorder
from lightning_ddp_losses.audit.replay import Plan, Run, Subject
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import ConfigurationError, InputError

OURS = frozenset({
    "max_epochs", "min_epochs", "max_steps", "min_steps", "max_time", "logger", "enable_checkpointing", "fast_dev_run",
    "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps", "limit_val_batches", "val_check_interval",
    "check_val_every_n_epoch", "devices", "num_nodes", "strategy", "profiler", "barebones", "default_root_dir",
    "log_every_n_steps", "detect_anomaly",
})  # fmt: skip
"""Options of the Trainer that the audit sets itself."""

_DATA = ("limit_train_batches", "overfit_batches", "reload_dataloaders_every_n_epochs", "use_distributed_sampler")
_SPLIT = ("FSDP", "DeepSpeed", "ModelParallel", "XLA")


class _Ranks(ClusterEnvironment):
    """Ranks as torch.distributed has them; the processes are there, so Lightning starts none."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0  # nobody asks: the group exists

    @staticmethod
    def detect() -> bool:
        """Never found by itself."""
        return False

    def world_size(self) -> int:
        """Number of ranks."""
        return process_groups.world_size()

    def set_world_size(self, size: int) -> None:
        """Known already."""

    def global_rank(self) -> int:
        """This rank."""
        return process_groups.rank()

    def set_global_rank(self, rank: int) -> None:
        """Known already."""

    def local_rank(self) -> int:
        """This rank: all are on one machine."""
        return process_groups.rank()

    def node_rank(self) -> int:
        """The only machine."""
        return 0


class _Replayed(Dataset[Any]):
    def __init__(self, plan: list[Any], unit: float | None, seed: int | None) -> None:
        self.plan, self.unit, self.seed = plan, unit, seed

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> Any:
        batch = self.plan[index].load()
        if self.unit is None or self.seed is None:
            return batch
        return ablations.perturb_batch(batch, self.unit, self.seed * 1000 + index)


class _Replay(LightningDataModule):
    """The recorded batches, epoch by epoch."""

    def __init__(self, plan: Plan, run: Run, model: Any) -> None:
        super().__init__()
        self.plan, self.run, self.model = plan, run, model

    def train_dataloader(self) -> DataLoader[Any]:
        """The batches of the trainer's epoch."""
        trainer = self.trainer
        assert trainer is not None
        seed = self.run.perturb
        unit = None if seed is None else ablations.unit_roundoff(self.model, str(trainer.precision))
        batches = self.plan[min(trainer.current_epoch, len(self.plan) - 1)]
        return DataLoader(_Replayed(batches, unit, seed), batch_size=None)


def perform(subject: Subject, run: Run, folder: Path, rank: int) -> None:
    """Do one process's part of ``run`` in a process of its own: join the ranks, fit, leave."""
    world = run.ranks or int(run.group)
    if world:
        accelerator = subject.options.get("accelerator")
        timeout = timedelta(seconds=subject.seconds)
        backend = "gloo" if accelerator == "cpu" else "cpu:gloo,cuda:nccl"
        process_groups.join(str(folder / "ranks"), rank, world, backend=backend, timeout=timeout)
    try:
        fit(subject, run, folder, rank)
    finally:
        process_groups.close(world=True)


def fit(subject: Subject, run: Run, folder: Path, rank: int) -> None:
    """Train ``run.steps`` optimizer steps and record them; the process group, if the run has one, is there."""
    recorder = Recorder(run, folder, rank)
    model = subject.model
    options = _options(subject, run, rank, recorder)
    with _quiet():
        trainer = Trainer(**options)
        try:
            if run.plans:
                data: dict[str, Any] = {"datamodule": _Replay(run.plans[rank], run, model)}
                for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
                    model.__dict__[hook] = _as_it_is  # the recorded batch has been through them
            elif isinstance(subject.data, LightningDataModule) or subject.data is None:
                data = {"datamodule": subject.data}
            else:
                data = {"train_dataloaders": subject.data}
            trainer.fit(model, ckpt_path=subject.ckpt_path, **data)
        finally:
            for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
                model.__dict__.pop(hook, None)
            recorder.close(model)
    if not recorder.page["steps"]:
        raise InputError(
            "training steps",
            expected=f"{run.steps} optimizer steps",
            got="none",
            fix="Is the training data empty on this rank (fewer rows than ranks, drop_last), or does no optimizer ever step?",
        )


def _as_it_is(batch: Any, dataloader_idx: int) -> Any:
    return batch


def _options(subject: Subject, run: Run, rank: int, recorder: Recorder) -> dict[str, Any]:
    options = {k: v for k, v in subject.options.items() if k not in OURS and (k not in _DATA or not run.plans)}
    callbacks = options.pop("callbacks", None) or []
    callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    plugins = options.pop("plugins", None) or []
    plugins = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
    plugins = [plugin for plugin in plugins if not isinstance(plugin, ClusterEnvironment)]
    if run.ranks or run.group:
        plugins.append(_Ranks())
    if not run.ranks:
        options.pop("sync_batchnorm", None)  # one process has nobody to share statistics with
        plugins = [plugin for plugin in plugins if not isinstance(plugin, LayerSync)]
    if "precision" in run.without:
        options["precision"] = "64-true"
        plugins = [plugin for plugin in plugins if isinstance(plugin, (ClusterEnvironment, LayerSync))]
    accumulate = max(1, options.pop("accumulate_grad_batches", 1) * run.accumulate)
    return options | {
        "strategy": _strategy(subject) if run.ranks else "auto",
        "devices": run.processes,
        "plugins": plugins,
        "callbacks": [recorder, *(each for each in callbacks if not isinstance(each, LEFT_OUT))],
        "accumulate_grad_batches": accumulate,
        "max_steps": run.steps,
        "max_epochs": -1,
        "logger": DummyLogger(),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "default_root_dir": str(subject.scratch),
        "deterministic": options.get("deterministic", subject.deterministic or None),
        **({"use_distributed_sampler": False, "reload_dataloaders_every_n_epochs": 1} if run.plans else {}),
    }


def _strategy(subject: Subject) -> Strategy:
    """A strategy object that starts no processes; a name with its options becomes one."""
    strategy = subject.strategy
    if isinstance(strategy, str):
        if strategy not in StrategyRegistry:
            raise ConfigurationError("strategy", expected="a strategy that Lightning knows", got=repr(strategy))
        entry = StrategyRegistry[strategy]
        strategy = entry["strategy"](**entry["init_params"])
    else:
        strategy = copy.copy(strategy)
    if not isinstance(strategy, ParallelStrategy) or any(word in type(strategy).__name__ for word in _SPLIT):
        raise ConfigurationError(
            "strategy",
            expected="one that keeps whole parameters on every rank ('ddp', 'ddp_losses', DDPStrategy(...))",
            got=type(strategy).__name__,
        )
    if hasattr(strategy, "_start_method"):
        strategy._start_method = "popen"  # the one that leaves existing processes alone
    if hasattr(strategy, "_timeout"):
        strategy._timeout = timedelta(seconds=subject.seconds)
    return strategy


@contextlib.contextmanager
def _quiet() -> Any:
    """Without Lightning's account of devices and its advice; warnings of the run are the fit's business, not the audit's."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        torch.use_deterministic_algorithms(False)


# ----------------------------------------------------------------------

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
