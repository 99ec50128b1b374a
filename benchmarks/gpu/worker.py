"""A process of a part: it opens its device, then imports what runs there.

In this order, since the pretended device replaces names of torch that others import.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import torch
import torch.distributed as dist

from tests.pretended import devices

__all__ = ["file_of", "run"]

_FILES = {"a": "parity", "b": "several_ranks", "c": "costs", "d": "speed", "e": "nccl"}


def file_of(folder: str, part: str, world_size: int, rank: int) -> Path:
    """Return the file of one rank's rows, which has a line as soon as a row is known."""
    return Path(folder) / f"gpu_{part}_rank_{rank}_of_{world_size}.jsonl"


def run(part: str, device: str, every: int, folder: str) -> None:
    """Run one part as a rank of the world, and write its rows as they come.

    Args:
        part: Its letter.
        device: ``"cuda"`` or ``"pretend"``.
        every: Of part a every n-th run.
        folder: Folder of the rows.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    opened = devices.pretended() if device == "pretend" else devices.cuda(counts=part == "c")
    if device == "cuda":
        torch.cuda.set_device(0)
    with file_of(folder, part, world_size, rank).open("w") as file:
        for row in importlib.import_module(f"benchmarks.gpu.{_FILES[part]}").rows_of(opened, every):
            file.write(json.dumps(row) + "\n")
            file.flush()
