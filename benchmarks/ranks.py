"""Rank processes for benchmarks: W fresh processes of one thread each in a gloo group, and Lightning trainers on them."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import ClusterEnvironment

__all__ = ["RankEnvironment", "make_trainer", "run_ranks"]

GROUP_TIMEOUT = timedelta(seconds=60)


def run_ranks(function: Callable[..., Any], *arguments: Any, world_size: int = 2, seconds: float = 300.0) -> list[Any]:
    """Call ``function(*arguments)`` on each rank of a new gloo group in fresh processes.

    Args:
        function: Importable; its arguments and its result can be pickled.
        *arguments: Equal on every rank.
        world_size: Number of processes.
        seconds: Until all must have answered.

    Returns:
        The results in rank order.

    Raises:
        RuntimeError: with the traceback of the rank that failed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, _settings():
        pipes, processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            store = os.path.join(folder, "store")
            process = context.Process(
                target=_rank_main, args=(theirs, rank, world_size, store, function, arguments), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            results = _answers(pipes, time.monotonic() + seconds)
            for process in processes:
                process.join(timeout=10)
            return results
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
                    process.join()


def _answers(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"no answer in time from rank(s) {sorted(set(range(len(pipes))) - set(results))}")
        for pipe in ready:
            rank = next(i for i, p in enumerate(pipes) if p is pipe)
            try:
                result, error = pipes[rank].recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} ended without an answer") from None
            if error is not None:
                raise RuntimeError(f"rank {rank} failed:\n{error}")
            results[rank] = result
    return [results[rank] for rank in range(len(pipes))]


@contextmanager
def _settings() -> Iterator[None]:
    """Processes started inside have one thread per operation, also in Python threads of theirs, and a quiet profiler."""
    settings = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _rank_main(
    pipe: Connection, rank: int, world_size: int, store: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    warnings.simplefilter("ignore")  # Lightning's advice about workers and loggers is not for benchmarks
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
        )
        pipe.send((function(*arguments), None))
        dist.destroy_process_group()
    except BaseException:  # whatever it was, the parent reports it
        pipe.send((None, traceback.format_exc()))


class RankEnvironment(ClusterEnvironment):
    """Ranks and world size as torch.distributed has them: Lightning starts no process."""

    @property
    def creates_processes_externally(self) -> bool:
        """The ranks run already."""
        return True

    @property
    def main_address(self) -> str:
        """Asked for, never used: the group exists."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Nobody may need one."""
        raise RuntimeError("the process group exists already")

    @staticmethod
    def detect() -> bool:
        """Only by being passed."""
        return False

    def world_size(self) -> int:
        """Of the running group."""
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        """It is what it is."""

    def global_rank(self) -> int:
        """Of this process."""
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        """It is what it is."""

    def local_rank(self) -> int:
        """One machine."""
        return dist.get_rank()

    def node_rank(self) -> int:
        """One machine."""
        return 0


def make_trainer(strategy: Any, **options: Any) -> Trainer:
    """A CPU trainer over all ranks of the running group that does nothing but train."""
    quiet: dict[str, Any] = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    return Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        plugins=[RankEnvironment()],
        **{**quiet, **options},
    )
