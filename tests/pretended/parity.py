"""Every case of the losses on three ranks whose collectives carry the device's tensors, as NCCL does, beside the same ranks on the CPU.

Rows are uneven, and once a rank has none. What the CPU's ranks find, other tests compare with one process.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

from tests.doors import evaluator
from tests.losses import test_tiled
from tests.pretended.devices import Device
from tests.pretended.forks import on_forked_ranks
from tests.pretended.runs import CLASS_SHARDED, LOSSES, TOWERS, Found, _class_sharded, _loss, _tiled, _two_towers

WORLD = 3
SPLITS = [[1, 4, 7], [5, 0, 7]]
TILED_SPLITS = [[11, 30, 19], [0, 25, 35]]  # of other rows

Runs = Iterator[tuple[str, Callable[[], Found]]]


def _in_bands(run: Callable[[], Found]) -> Found:
    with mock.patch.object(evaluator, "MASKED_BYTES", 0):
        return run()


def _runs(device: Device) -> Runs:
    """Names the runs of a rank, the same on all."""
    for sizes in SPLITS:
        for name in LOSSES:
            yield f"{name}; {sizes}", partial(_loss, device, name, sizes)
        for name in CLASS_SHARDED:
            yield f"{name}; {sizes}", partial(_class_sharded, device, name, sizes)
        for gather in ("all", "ring"):
            for name in TOWERS:
                yield f"{name}, {gather}; {sizes}", partial(_two_towers, device, name, sizes, gather)
    for sizes in TILED_SPLITS:
        for name in test_tiled.CASES:
            yield f"tiles; {name}; {sizes}", partial(_tiled, device, name, sizes)
        # pairs in a band of columns, as in large matrices
        for name in test_tiled.SYMMETRIC:
            yield f"bands; {name}; {sizes}", partial(_in_bands, partial(_tiled, device, name, sizes))


def _as_rank(device: Device, rank: int) -> dict[str, tuple[float, str]]:
    """Returns of each run the difference, and the error where there was one."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, run in _runs(device):
            result = run()
            found[name] = result.difference, result.error
    return found


def main(device: Device, path: Path) -> None:
    """Runs everything; writes what each rank found."""
    folder = path.parent / "ranks"
    folder.mkdir()
    path.write_text(json.dumps(on_forked_ranks(partial(_as_rank, device), WORLD, folder, carries=True)))
