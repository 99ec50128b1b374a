"""Parts that run on a device, each in processes of its own, whose rows are in files as soon as they are known.

A process opens its device, then imports what runs there: a pretended device replaces names of torch that others import.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import run_ranks
from benchmarks.records import Row, Rows

__all__ = ["Part", "Program", "file_of", "options_of", "run_parts"]

PART_SECONDS = 580.0


@dataclass(frozen=True)
class Part:
    """What runs in processes of its own.

    Attributes:
        module: Name of the module whose ``rows_of(device, every)`` yields the rows.
        worlds: Numbers of ranks, one after the other.
        uses_nccl: Whether ranks on CUDA use NCCL.
    """

    module: str
    worlds: Sequence[int] = (1,)
    uses_nccl: bool = False


@dataclass(frozen=True)
class Program:
    """A command that runs parts.

    Attributes:
        command: As a user writes it.
        parts: Parts by letter.
        open_device: Returns a device in the process that calls it, given its name and the letter of the part. Importable.
        name_of: Returns the name of the device in rows.
        packages: What it imports beside the package.
        without_cuda: Option that runs the same on the CPU.
    """

    command: str
    parts: Mapping[str, Part]
    open_device: Callable[[str, str], Any]
    name_of: Callable[[str], str]
    packages: Sequence[str]
    without_cuda: str


def options_of(program: Program, doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that all programs have."""
    parser = argparse.ArgumentParser(
        program.command, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    devices = ["cuda", program.without_cuda]
    parser.add_argument("--device", choices=devices, default="cuda", help=f"{program.without_cuda}: on the CPU")
    parser.add_argument(
        "--output", metavar="FOLDER", help="rows as they come, a file for each part and rank; else a temporary folder"
    )
    return parser


def run_parts(program: Program, options: argparse.Namespace, chosen: Mapping[str, Part], every: int = 1) -> Rows:
    """Run parts one after the other. Rows are recorded where the device is a real one, and stay if a part fails."""
    _refuse_missing_packages(program)
    _refuse_missing_device(program, options.device)
    folder = options.output or tempfile.mkdtemp(prefix="device_parts_")
    Path(folder).mkdir(parents=True, exist_ok=True)
    print(f"rows as they come: {folder}", flush=True)
    rows: list[Row] = []
    failed = False
    for letter, part in chosen.items():
        for world_size in part.worlds:
            for rank in range(world_size):
                file_of(folder, letter, world_size, rank).unlink(missing_ok=True)
            backend = "cpu:gloo,cuda:nccl" if part.uses_nccl and options.device == "cuda" else "gloo"
            arguments = program.open_device, letter, part.module, options.device, every, folder
            limits: dict[str, Any] = {"seconds": PART_SECONDS / len(part.worlds), "backend": backend}
            try:
                run_ranks(work, *arguments, world_size=world_size, **limits)
            except RuntimeError as error:
                failed = True
                print(f"part {letter} with {world_size} rank(s) failed: {error}", file=sys.stderr)
            found = rows_in(folder, letter, world_size)
            rows += [{**row, "device": program.name_of(options.device)} for row in found]
    return Rows(rows, recorded=options.device == "cuda", added=True, failed=failed)


def work(
    open_device: Callable[[str, str], Any], letter: str, module: str, device: str, every: int, folder: str
) -> None:
    """Run one part as a rank of the world, and write its rows as they come."""
    opened = open_device(device, letter)
    if device == "cuda":
        torch.cuda.set_device(0)
    with file_of(folder, letter, dist.get_world_size(), dist.get_rank()).open("w") as file:
        for row in importlib.import_module(module).rows_of(opened, every):
            file.write(json.dumps(row) + "\n")
            file.flush()


def file_of(folder: str, letter: str, world_size: int, rank: int) -> Path:
    """Return the file of one rank's rows, which has a line as soon as a row is known."""
    return Path(folder) / f"gpu_{letter}_rank_{rank}_of_{world_size}.jsonl"


def rows_in(folder: str, letter: str, world_size: int) -> list[Row]:
    """Return the rows of a part, with the rank if there are several."""
    rows: list[Row] = []
    for rank in range(world_size):
        file = file_of(folder, letter, world_size, rank)
        lines = file.read_text().splitlines() if file.exists() else []
        of_rank = {"rank": rank} if world_size > 1 else {}
        rows += [{**json.loads(line), **of_rank} for line in lines]
    return rows


def _refuse_missing_packages(program: Program) -> None:
    missing = [name for name in program.packages if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"{program.command}: {', '.join(missing)} cannot be imported by {sys.executable}. Install the project's dependencies "
            "and the group `test` of pyproject.toml; a machine without a network takes them as wheels (`pip download`)."
        )


def _refuse_missing_device(program: Program, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda or "nothing"
        sys.exit(
            f"{program.command}: no CUDA device can be used here (torch {torch.__version__}, built for {built}; "
            f"CUDA_VISIBLE_DEVICES and nvidia-smi say more). `--device {program.without_cuda}` runs the same on the CPU, in small sizes."
        )
