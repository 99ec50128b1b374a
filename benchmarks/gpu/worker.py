"""What a process of a part does: it opens its device, then imports what runs there.

In this order, since the pretended device replaces names of torch that others import.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tests import devices

__all__ = ["run"]

_FILES = {"a": "parity", "b": "several_ranks", "c": "costs", "d": "speed"}


def run(part: str, device: str, every: int) -> list[dict[str, Any]]:
    """Run one part as a rank of the world; returns its rows.

    Args:
        part: Its letter.
        device: ``"cuda"`` or ``"pretend"``.
        every: Of part a every n-th run.
    """
    opened = devices.pretended() if device == "pretend" else devices.cuda(counts=part == "c")
    if device == "cuda":
        torch.cuda.set_device(0)
    rows: list[dict[str, Any]] = importlib.import_module(f"benchmarks.gpu.{_FILES[part]}").rows_of(opened, every)
    return rows
