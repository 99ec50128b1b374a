"""Rows of a benchmark: written to ``results/<name>.jsonl`` with the machine they come from, and shown as tables."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Row", "Rows", "machine", "read", "show", "write"]

Row = dict[str, Any]
JOB = (
    "table",
    "loss",
    "mode",
    "module",
    "metric",
    "strategy",
    "parameters",
    "fit",
    "who",
    "ours",
    "size",
    "global_batch",
    "ranks",
    "W",
    "payload_bytes",
    "classes",
    "limit",
    "rank",
    "device",
)
"""Which columns say what a row measures, where rows are added to recorded ones."""
RESULTS = Path(__file__).parent / "results"


class Rows(list[Row]):
    """Rows of a benchmark that says itself how they are recorded.

    Args:
        rows: The rows.
        recorded: False: they are shown only.
        added: Recorded rows of other jobs stay.
        failed: Some could not be measured, as was said.
    """

    def __init__(self, rows: Sequence[Row], *, recorded: bool, added: bool, failed: bool = False) -> None:
        super().__init__(rows)
        self.recorded, self.added, self.failed = recorded, added, failed


def machine() -> Row:
    """Where a figure was measured."""
    # of the modules themselves: a folder of sources has no metadata
    import lightning
    import torch

    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }


def _job(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in JOB)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def read(name: str) -> list[Row]:
    """Recorded rows."""
    target = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in target.read_text().splitlines()] if target.exists() else []


def write(name: str, rows: Sequence[Row], *, add: bool = False) -> Path:
    """Replace ``results/<name>.jsonl``; nothing half-written stays behind.

    Args:
        name: The benchmark.
        rows: What it measured.
        add: Keep recorded rows of other jobs than these.
    """
    RESULTS.mkdir(exist_ok=True)
    target, draft = RESULTS / f"{name}.jsonl", RESULTS / f"{name}.jsonl.tmp"
    where = machine()
    everything = [{**row, **where} for row in rows]
    if add:
        measured = {_job(row) for row in everything}
        everything = [*(row for row in read(name) if _job(row) not in measured), *everything]
    draft.write_text("".join(json.dumps(row) + "\n" for row in everything))
    draft.replace(target)
    return target


def show(rows: Sequence[Row]) -> None:
    """One table per value of ``table``, columns in the order of the first row's keys."""
    # where it is missing, a benchmark says so before it measures
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 210)
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()))
    for title in dict.fromkeys(row["table"] for row in rows):
        mine = [row for row in rows if row["table"] == title]
        table = Table(title=title, title_justify="left")
        names = [key for key in mine[0] if key != "table"]
        for name in names:
            number = isinstance(mine[0][name], (int, float)) and not isinstance(mine[0][name], bool)
            table.add_column(name.replace("_", " "), justify="right" if number else "left")
        for row in mine:
            table.add_row(*(_text(row.get(name)) for name in names))
        console.print(table)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if value.is_integer():
            return f"{value:.0f}"
        return f"{value:.3f}" if 1e-3 < abs(value) < 10 else f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return " to ".join(_text(v) for v in value)
    return str(value)
