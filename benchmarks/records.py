"""Rows of a benchmark: written to ``results/<name>.jsonl`` with the machine they come from, and shown as tables."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["Row", "machine", "show", "write"]

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"


def machine() -> Row:
    """Where a figure was measured."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "lightning": version("lightning"),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write(name: str, rows: Sequence[Row]) -> Path:
    """Replace ``results/<name>.jsonl``; nothing half-written stays behind."""
    RESULTS.mkdir(exist_ok=True)
    target, draft = RESULTS / f"{name}.jsonl", RESULTS / f"{name}.jsonl.tmp"
    where = machine()
    draft.write_text("".join(json.dumps({**row, **where}) + "\n" for row in rows))
    draft.replace(target)
    return target


def show(rows: Sequence[Row]) -> None:
    """One table per value of ``table``, columns in the order of the first row's keys."""
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
