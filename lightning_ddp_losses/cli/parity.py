"""`ddp-losses parity my_module:build my_module:step my_module:batches`: any training loop on N ranks against one process.

Exit status 0 equal, 1 different, 2 could not run, as `ddp-losses audit`, which shows its report in the same way.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lightning_ddp_losses.audit import AuditReport, parity
from lightning_ddp_losses.errors import DDPLossError, expect

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "none": None}


def run_parity(arguments: Sequence[str]) -> int:
    """Compare a loop's ranks with one process, show the report and return the exit status.

    Args:
        arguments: Those that follow ``ddp-losses parity``.
    """
    given = vars(_parser().parse_args(arguments))
    sys.path.insert(0, os.getcwd())  # the console script does not look there
    output = given.pop("output")
    try:
        report = parity(**_options(given))
    except DDPLossError as error:
        sys.stderr.write(f"ddp-losses: {type(error).__name__}: {error}\n")
        return 2
    except Exception:
        traceback.print_exc()
        return 2
    show_report(report, None if output is None else Path(output))
    return int(not report.equal)


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``parity``, read and imported."""
    form = "loop" if given.pop("loop") else "step"
    function = named(given.pop("function"))
    options = given | {"build": named(given["build"]), form: function}
    batches = named(given["batches"])
    if callable(batches):
        parameters = inspect.signature(batches).parameters.values()
        if all(parameter.default is not parameter.empty for parameter in parameters):  # it needs no rank
            batches = batches()
    options |= {name: _DTYPES[given[name]] for name in ("dtype", "precision")}
    if given["splits"] not in ("even", "uneven"):
        options["splits"] = [int(part) for part in given["splits"].split(",")]
    if ":" in given["wrap"]:
        options["wrap"] = named(given["wrap"])
    elif given["wrap"] == "none":
        options["wrap"] = None
    return options | {"batches": batches}


def named(place: str) -> Any:
    """Return the object that ``my_module:name`` names.

    Raises:
        ConfigurationError: Another form.
    """
    module, colon, name = place.partition(":")
    expect(bool(colon and module and name), "ddp-losses parity", expected="my_module:name", got=place)
    return attrgetter(name)(importlib.import_module(module))


def show_report(report: AuditReport, folder: Path | None) -> None:
    """Print a report, and write it down as report.html, report.json and ratios.png.

    Args:
        report: Report of an audit.
        folder: Folder of the files. None: write no files.
    """
    console = Console()
    console.print(report, highlight=False)
    if folder is None:
        return
    report.to_json(folder / "report.json")
    report.to_html(folder / "report.html")
    written = ["report.html", "report.json"]
    try:
        report.plot(folder / "ratios.png")
        written.append("ratios.png")
    except ImportError:
        console.print("no picture: pip install 'lightning-ddp-losses[demo]'", markup=False)
    sentence = f"\nWritten to {folder}: {', '.join(written)} ({report.settings['seconds']} s)"
    console.print(sentence, soft_wrap=True, highlight=False, markup=False)


def _parser() -> argparse.ArgumentParser:
    text = "N ranks of a training loop against one process; status 0 equal, 1 different, 2 could not run."
    parser = argparse.ArgumentParser(prog="ddp-losses parity", description=text)
    parser.add_argument("build", help="my_module:build makes the model, or the model and its optimizer's maker")
    parser.add_argument("function", help="my_module:step, from model and batch to the loss; or a loop")
    parser.add_argument("batches", help="my_module:batches: global batches, or a function that gives them")
    parser.add_argument("--loop", action="store_true", help="the function is a whole optimizer step")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--wrap", default="ddp", help="ddp, fully_shard, none, or my_module:wrap")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches to an optimizer step")
    parser.add_argument("--splits", default="even", help="even, uneven, or rows of each rank: 5,3")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps")
    parser.add_argument("--dtype", choices=_DTYPES, default="float64", help="none: as model and batches are")
    parser.add_argument("--precision", choices=_DTYPES, default="none", help="of autocast")
    parser.add_argument("--timeout-seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--output", help="folder for report.html, report.json and ratios.png")
    return parser
