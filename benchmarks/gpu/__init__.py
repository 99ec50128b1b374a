"""On a GPU: milliseconds and memory of SigLIP, CLIP, pair losses and ArcFace at full size. Not run without a name.

Gradients are compared with float64 first. ``--device cpu`` runs the same in small sizes, and records nothing. Needs no network and no
writable home. Each row is written to ``--output`` as soon as it is known, so a run that is killed keeps what it has measured. Whether the
numbers are right on a GPU, and how often the host waits there, is tested by ``python -m tests.gpu`` of the source distribution, whose rows
(parts a, b, c and e) are recorded beside these (part d). Where this was run and what it found is in ``README.md`` of the folder above.
"""

from __future__ import annotations

import platform

import torch

from benchmarks import gpu
from benchmarks.device_parts import Part, Program, options_of, run_parts
from benchmarks.records import Rows

__all__ = ["main"]


def open_device(device: str, letter: str) -> str:
    """Return the name of the device."""
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device


def name_of(device: str) -> str:
    """Return the device's name in rows."""
    return torch.cuda.get_device_name() if device == "cuda" else f"cpu, {platform.machine()}"


PROGRAM = Program(
    "python -m benchmarks gpu",
    {"d": Part("benchmarks.gpu.speed")},
    open_device,
    name_of,
    ("lightning", "torchmetrics", "pytorch_metric_learning", "numpy", "tqdm", "xxhash", "packaging", "rich"),
    without_cuda="cpu",
)


def main(arguments: list[str]) -> Rows:
    """Run the contests. Rows are recorded where the device is a real one."""
    options = options_of(PROGRAM, gpu.__doc__).parse_args(arguments)
    print(
        "parts a, b, c and e, whether numbers are right on this device: python -m tests.gpu, in the source distribution"
    )
    return run_parts(PROGRAM, options, PROGRAM.parts)
