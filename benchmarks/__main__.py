"""``python -m benchmarks [name ...] [options]``: run benchmarks (without a name all but ``gpu``; options go to each).

``--add`` keeps what is recorded of other rows than those measured now. Pictures are drawn from what is recorded; ``figures`` only draws.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time

import benchmarks
from benchmarks import records

BY_NAME_ONLY = {"gpu"}  # needs a device
HELPERS = {"__main__", "device_parts", "figures", "interleave", "memory", "ranks", "records", "runner", "trainers"}


def names() -> list[str]:
    """Benchmarks that exist."""
    return sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name not in HELPERS)


def draw_pictures(chosen: list[str]) -> None:
    """Draw what is recorded, where a benchmark with pictures ran."""
    if chosen and set(chosen) <= BY_NAME_ONLY:
        return
    # imports what it draws of, which a process of `gpu` must not have done yet
    from benchmarks import figures

    if not chosen or {"figures", *figures.SOURCES} & set(chosen):
        figures.draw()


def main(arguments: list[str]) -> int:
    """Run the named benchmarks; 1 when a count, an equality or a memory limit did not hold (times only report)."""
    first_option = next((i for i, a in enumerate(arguments) if a.startswith("-")), len(arguments))
    chosen, options = arguments[:first_option], arguments[first_option:]
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, epilog=f"benchmarks: {', '.join(names())}"
    )
    parser.add_argument("name", nargs="*", choices=[[], "figures", *names()], metavar="name")
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument("--add", action="store_true", help="keep the recorded rows that this run does not measure")
    if not chosen and ("-h" in options or "--help" in options):
        parser.parse_args(options)
    parser.parse_args(chosen)
    add, options = "--add" in options, [option for option in options if option != "--add"]
    failed = False
    wanted = chosen or [name for name in names() if name not in BY_NAME_ONLY]
    for name in names():
        if "--list" in options:
            print(f"{name}: {(importlib.import_module(f'benchmarks.{name}').__doc__ or '').splitlines()[0]}")
        elif name in wanted:
            started = time.perf_counter()
            rows = importlib.import_module(f"benchmarks.{name}").main(options)
            records.show(rows)
            where = "not recorded"
            if getattr(rows, "recorded", True):
                target = records.write(name, rows, add=add or getattr(rows, "added", False))
                where = str(target.relative_to(records.RESULTS.parent.parent))
            print(f"{name}: {time.perf_counter() - started:.0f} s, {where}\n")
            failed |= getattr(rows, "failed", False)
            failed |= any(row.get("verdict") == "WRONG" for row in rows)
    if "--list" not in options:
        draw_pictures(chosen)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
