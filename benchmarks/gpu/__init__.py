"""On a GPU: the numbers of the CPU, several ranks on one device, launches and waits, time and memory. Not run without a name.

Five parts, each in processes of its own and in less than ten minutes:

* ``a``: every loss, miner, metric, two-tower and class-sharded loss and batch norm of the suite, next to the formula itself in float64;
* ``b``: 2 and 3 ranks on the one device, over gloo: losses, collectives, the reduction, a Trainer's fit;
* ``c``: launches and waits of the host, against the suite's table;
* ``d``: milliseconds and memory of SigLIP, CLIP, SupCon and ArcFace at full size, gradients compared with float64 first;
* ``e``: NCCL with one rank and with two: fits (``16-true``, ``deterministic=True``, ``fsdp2_ddp_losses``), compiled tiles, and a step that
  fails next to a kernel that waits for its peer.

``--device pretend`` runs the same on the CPU, on the suite's pretended accelerator and in small sizes, and records nothing. Needs no
network and no writable home. Each row is written to ``--output`` as soon as it is known, so a run that is killed keeps what it has
measured. A run of one part leaves the recorded rows of the others. Where this was run and what it found stands in ``README.md`` beside
this folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks import gpu
from benchmarks.gpu import worker
from benchmarks.ranks import run_ranks
from benchmarks.records import Row, Rows

__all__ = ["main"]

PART_SECONDS = 580.0
# of this package and of the suite, whose cases run here
_PACKAGES = (
    *("lightning", "torchmetrics", "pytorch_metric_learning", "numpy", "tqdm", "xxhash", "packaging", "pytest", "rich"),
)
_PRETEND_RELEASE = "2.13."


def main(arguments: list[str]) -> Rows:
    """Run the parts; rows are recorded where the device is a real one."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks gpu", description=gpu.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=list("abcde"), action="append", help="one part (repeatable); all without it")
    parser.add_argument("--device", choices=["cuda", "pretend"], default="cuda", help="pretend: on the CPU")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of part a every N-th run of each kind")
    parser.add_argument("--ranks", type=int, choices=[2, 3], action="append", help="of part b; 2 and then 3 without it")
    parser.add_argument(
        "--output", metavar="FOLDER", help="rows as they come, a file for each part and rank; else a temporary folder"
    )
    options = parser.parse_args(arguments)
    _refuse_missing_packages()
    _refuse_missing_device(options.device)
    folder = options.output or tempfile.mkdtemp(prefix="benchmarks_gpu_")
    Path(folder).mkdir(parents=True, exist_ok=True)
    print(f"rows as they come: {folder}", flush=True)
    rows: list[Row] = []
    failed = False
    for part in options.part or "abcde":
        worlds = {"b": options.ranks or [2, 3], "e": [1, 2]}.get(part, [1])
        for world_size in worlds:
            # rows that a part has measured are kept if it fails or runs out of time
            try:
                run_part(part, options.device, options.every, folder, world_size, PART_SECONDS / len(worlds))
            except RuntimeError as error:
                failed = True
                print(f"part {part} with {world_size} rank(s) failed: {error}", file=sys.stderr)
            found = rows_in(folder, part, world_size)
            rows += [{**row, "device": _name_of(options.device)} for row in found]
    return Rows(rows, recorded=options.device == "cuda", added=True, failed=failed)


def run_part(part: str, device: str, every: int, folder: str, world_size: int, seconds: float) -> None:
    """Run one part in fresh processes, which write their rows into a folder."""
    for rank in range(world_size):
        worker.file_of(folder, part, world_size, rank).unlink(missing_ok=True)
    backend = "cpu:gloo,cuda:nccl" if part == "e" and device == "cuda" else "gloo"
    run_ranks(worker.run, part, device, every, folder, world_size=world_size, seconds=seconds, backend=backend)


def rows_in(folder: str, part: str, world_size: int) -> list[Row]:
    """Return the rows of a part, with the rank if there are several."""
    rows: list[Row] = []
    for rank in range(world_size):
        file = worker.file_of(folder, part, world_size, rank)
        lines = file.read_text().splitlines() if file.exists() else []
        rows += [{**json.loads(line), **({"rank": rank} if world_size > 1 else {})} for line in lines]
    return rows


def _refuse_missing_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"python -m benchmarks gpu: {', '.join(missing)} cannot be imported by {sys.executable}. Install the project's dependencies "
            "and the group `test` of pyproject.toml; a machine without a network takes them as wheels (`pip download`)."
        )


def _refuse_missing_device(device: str) -> None:
    if device == "pretend" and not torch.__version__.startswith(_PRETEND_RELEASE):
        sys.exit(
            f"python -m benchmarks gpu --device pretend: needs torch {_PRETEND_RELEASE}x, whose private names the pretended device "
            f"stands on, and this is {torch.__version__}."
        )
    if device == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda or "nothing"
        sys.exit(
            f"python -m benchmarks gpu: no CUDA device can be used here (torch {torch.__version__}, built for {built}; "
            "CUDA_VISIBLE_DEVICES and nvidia-smi say more). `--device pretend` runs the same on the CPU, in small sizes."
        )


def _name_of(device: str) -> str:
    if device == "pretend":
        return f"pretended, on {platform.machine()}"
    return torch.cuda.get_device_name()
