"""Rank processes for benchmarks: W fresh processes of one thread each in a gloo group."""

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

__all__ = ["run_ranks"]

GROUP_TIMEOUT = timedelta(seconds=60)


def run_ranks(
    function: Callable[..., Any], *arguments: Any, world_size: int = 2, seconds: float = 300.0, backend: str = "gloo"
) -> list[Any]:
    """Call ``function(*arguments)`` on each rank of a new gloo group in fresh processes.

    Args:
        function: Importable; its arguments and its result can be pickled.
        *arguments: Equal on every rank.
        world_size: Number of processes.
        seconds: Until all must have answered.
        backend: Backend of the group.

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
                target=_rank_main, args=(theirs, rank, world_size, store, backend, function, arguments), daemon=True
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
    pipe: Connection,
    rank: int,
    world_size: int,
    store: str,
    backend: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    warnings.simplefilter("ignore")  # Lightning's advice about workers and loggers is not for benchmarks
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
        )
        pipe.send((function(*arguments), None))
        dist.destroy_process_group()
    except BaseException:  # whatever it was, the parent reports it
        pipe.send((None, traceback.format_exc()))
