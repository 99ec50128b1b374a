"""How much the resident set of a fresh process grows in one forward and backward: `python -m tests.losses.resident_growth`.

It prints MiB as JSON, by kind of step and number of ranks, for few rows and for four times as many. Each figure is of new processes, forked
before anything was computed.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_metric_learning.losses as pml
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_losses import ClipLoss, GlobalBatchLoss, SigLipLoss, microbatched

FEW, MANY = 2048, 8192
DIM = 16
PAIR_LOSSES: dict[str, Callable[[], nn.Module]] = {
    "SupCon": pml.SupConLoss,
    "NTXent": pml.NTXentLoss,
    "MultiSimilarity": pml.MultiSimilarityLoss,
    "Contrastive": pml.ContrastiveLoss,
    "TripletMargin": pml.TripletMarginLoss,
}
TOWER_LOSSES: dict[str, Callable[[], nn.Module]] = {"CLIP": ClipLoss, "SigLIP": SigLipLoss}
PIECES = "an encoder in pieces"
PIECE_ROWS, WIDTH = 64, 2048
ACTIVATION_MIB = PIECE_ROWS * WIDTH * 4 / (1 << 20)  # of a piece
KINDS = [*PAIR_LOSSES, *TOWER_LOSSES, PIECES]
WORLDS = (1, 2)


def status_mib(key: str) -> float:
    """Return a row of the kernel's account of this process: VmRSS, or VmHWM, its maximum since the last reset."""
    rows = dict(row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines())
    return int(rows[key].split()[0]) / 1024


def step_of(kind: str, rows: int) -> Callable[[], object]:
    """Return a step on this rank's part of so many rows."""
    generator = torch.Generator().manual_seed(1)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def own_rows() -> Tensor:
        return torch.randn(rows, DIM, generator=generator).chunk(world)[rank].clone().requires_grad_()

    if kind == PIECES:
        encoder = nn.Sequential(nn.Linear(DIM, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, DIM))
        in_pieces, batch = microbatched(encoder, PIECE_ROWS), own_rows().detach()
        return lambda: in_pieces(batch).sum().backward()
    if kind in TOWER_LOSSES:
        loss, given = TOWER_LOSSES[kind](), (own_rows(), own_rows())
    else:
        labels = torch.arange(rows)[torch.randperm(rows, generator=generator)] // 4
        loss = GlobalBatchLoss(PAIR_LOSSES[kind]())
        given = (own_rows(), labels.chunk(world)[rank].clone())
    return lambda: loss(*given).backward()


def rank_main(rank: int, world: int, store: str, kind: str, rows: int, results: Any) -> None:
    """Measure one step on one rank."""
    torch.set_num_threads(1)
    if world > 1:
        file_store = dist.FileStore(store, world)
        dist.init_process_group("gloo", store=file_store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    step_of(kind, 64)()  # libraries load
    step = step_of(kind, rows)
    Path("/proc/self/clear_refs").write_text("5")
    before = status_mib("VmRSS")
    step()
    results.put(status_mib("VmHWM") - before)


def growth(kind: str, rows: int, world: int) -> float:
    """Return MiB of the rank with most."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=rank_main, args=(rank, world, store, kind, rows, results)) for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            assert process.exitcode == 0
    return max(results.get() for _ in ranks)


if __name__ == "__main__":
    found = {
        f"{kind}, {world} ranks": [growth(kind, rows, world) for rows in (FEW, MANY)]
        for kind in KINDS
        for world in WORLDS
    }
    json.dump(found, sys.stdout)
