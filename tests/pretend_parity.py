"""Every case of the losses on three ranks whose collectives carry the device's tensors, as NCCL does, beside the same ranks on the CPU.

Rows are uneven, and once a rank has none. What the CPU's ranks find, other tests compare with one process.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from lightning_ddp_losses import ClassShardedLoss, GlobalBatchLoss
from lightning_ddp_losses.losses.tiled import evaluator, pair_losses
from tests.devices import Device
from tests.losses import harness, sharded_cases, test_tiled
from tests.losses.test_two_towers import CASES as TOWER_CASES
from tests.losses.test_two_towers import EXTRA, further
from tests.pretend_forks import on_forked_ranks
from tests.pretend_runs import LOSSES, SHARDED, Found, TwoTowers, case_of, measure

WORLD = 3
SPLITS = [[1, 4, 7], [5, 0, 7]]
TILED_SPLITS = [[11, 30, 19], [0, 25, 35]]  # of other rows

Runs = Iterator[tuple[str, Callable[[], Found]]]


def _loss(device: Device, name: str, sizes: list[int], rank: int) -> Found:
    case, mode = case_of(name), name.split("; ")[2]
    net, _ = harness.fresh(case)
    torch.manual_seed(harness.SEED + rank)  # what draws does so from rank 0's seed
    args, kwargs = case.give(net, harness.own_rows(sizes, rank))
    options: Any = {**case.options, "mode": mode}
    return measure(device, lambda: GlobalBatchLoss(case.make().double(), **options), args, kwargs=kwargs)


def _class_sharded(device: Device, name: str, sizes: list[int], rank: int) -> Found:
    case, rows = SHARDED[name], sharded_cases.global_rows(sizes, rank)
    embeddings = sharded_cases.net()(rows["features"])
    args = [embeddings, rows["labels"]]
    if case.mine is not None:
        args.append(case.mine(embeddings, rows["labels"]))
    # the second call no longer looks at the labels
    return measure(device, lambda: ClassShardedLoss(sharded_cases.make(case), **case.sharded), tuple(args), calls=2)


def _tiled(device: Device, name: str, sizes: list[int], rank: int) -> Found:
    make, give = test_tiled.CASES[name]
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    rows = {each: tensor[part].clone() for each, tensor in test_tiled.batch().items()}
    given = give(rows["embeddings"].requires_grad_(), rows, rows["views"].requires_grad_(), True)
    options: Any = {"mode": "rows", "tile_bytes": test_tiled.TILE_BYTES}
    return measure(device, lambda: GlobalBatchLoss(make().double(), **options), (), kwargs=given)


def _in_bands(run: Callable[[], Found]) -> Found:
    with (
        mock.patch.object(evaluator, "MASKED_BYTES", 0),
        mock.patch.object(pair_losses.SupCon, "masks_any_size", False),
    ):
        return run()


def _two_towers(device: Device, name: str, sizes: list[int], rank: int, *, gather: str) -> Found:
    rows, case = harness.own_rows(sizes, rank), TOWER_CASES[name]
    extra, queue = further(case)
    if extra is not None:
        start = sum(EXTRA[WORLD][:rank])
        extra = extra[start : start + EXTRA[WORLD][rank]]

    def make() -> nn.Module:
        return TwoTowers(case, gather)

    return measure(device, make, (rows["features"], rows["views"], extra, queue))


def _runs(device: Device, rank: int) -> Runs:
    """Names the runs of a rank, the same on all."""
    for sizes in SPLITS:
        for name in LOSSES:
            yield f"{name}; {sizes}", partial(_loss, device, name, sizes, rank)
        for name in SHARDED:
            yield f"class-sharded; {name}; {sizes}", partial(_class_sharded, device, name, sizes, rank)
        for gather in ("all", "ring"):
            for name in TOWER_CASES:
                found = partial(_two_towers, device, name, sizes, rank, gather=gather)
                yield f"two towers, {gather}; {name}; {sizes}", found
    for sizes in TILED_SPLITS:
        for name in test_tiled.CASES:
            yield f"tiles; {name}; {sizes}", partial(_tiled, device, name, sizes, rank)
        # pairs in a band of columns, as in large matrices
        for name in test_tiled.SYMMETRIC:
            yield f"bands; {name}; {sizes}", partial(_in_bands, partial(_tiled, device, name, sizes, rank))


def _as_rank(device: Device, rank: int) -> dict[str, tuple[float, str]]:
    """Returns of each run the difference, and the error where there was one."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, run in _runs(device, rank):
            result = run()
            found[name] = result.difference, result.error
    return found


def main(device: Device, path: Path) -> None:
    """Runs everything; writes what each rank found."""
    folder = path.parent / "ranks"
    folder.mkdir()
    path.write_text(json.dumps(on_forked_ranks(partial(_as_rank, device), WORLD, folder, carries=True)))
