"""The suite on a GPU: the numbers of the CPU, several ranks on one device, launches and waits, NCCL. ``python -m tests.gpu``.

Four parts, each in processes of its own and in less than ten minutes:

* ``a``: every loss, miner, metric, two-tower and class-sharded loss and batch norm of the suite, next to the formula itself in float64;
* ``b``: 2 and 3 ranks on the one device, over gloo: losses, collectives, the reduction, a Trainer's fit;
* ``c``: launches and waits of the host, against the suite's table;
* ``e``: NCCL with one rank and with two: fits (``16-true``, ``deterministic=True``, ``fsdp2_ddp_losses``), compiled tiles, and a step that
  fails next to a kernel that waits for its peer.

``--device pretend`` runs the same on the CPU, on the pretended accelerator, and records nothing. Times are part ``d``:
``python -m benchmarks gpu``. A run of one part leaves the recorded rows of the others (``benchmarks/results/gpu.jsonl``).
"""

from __future__ import annotations

import dataclasses
import platform
import sys
from typing import Any

import torch

from benchmarks.device_parts import Part, Program, options_of, run_parts
from benchmarks.records import Rows

PRETENDED_RELEASE = "2.13."


def open_device(device: str, letter: str) -> Any:
    """Return the device, which a pretended one installs first."""
    from tests.pretended import devices

    return devices.pretended() if device == "pretend" else devices.cuda(counts=letter == "c")


def name_of(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"pretended, on {platform.machine()}"


PROGRAM = Program(
    "python -m tests.gpu",
    {
        "a": Part("tests.gpu.parity"),
        "b": Part("tests.gpu.several_ranks", worlds=(2, 3)),
        "c": Part("tests.gpu.costs"),
        "e": Part("tests.gpu.nccl", worlds=(1, 2), uses_nccl=True),
    },
    open_device,
    name_of,
    # of this package and of the suite, whose cases run here
    (
        *("lightning", "torchmetrics", "pytorch_metric_learning", "numpy", "tqdm"),
        *("xxhash", "packaging", "pytest", "rich"),
    ),
    without_cuda="pretend",
)


def main(arguments: list[str]) -> Rows:
    parser = options_of(PROGRAM, __doc__)
    parser.add_argument("--part", choices=list(PROGRAM.parts), action="append", help="one part (repeatable)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of part a every N-th run of each kind")
    parser.add_argument("--ranks", type=int, choices=[2, 3], action="append", help="of part b; 2 and then 3 without it")
    options = parser.parse_args(arguments)
    if options.device == "pretend" and not torch.__version__.startswith(PRETENDED_RELEASE):
        sys.exit(
            f"{PROGRAM.command} --device pretend: needs torch {PRETENDED_RELEASE}x, whose private names the pretended device stands "
            f"on, and this is {torch.__version__}."
        )
    chosen = {letter: PROGRAM.parts[letter] for letter in options.part or PROGRAM.parts}
    if options.ranks and "b" in chosen:
        chosen["b"] = dataclasses.replace(chosen["b"], worlds=options.ranks)
    return run_parts(PROGRAM, options, chosen, options.every)
