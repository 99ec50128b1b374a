"""Faults: seconds from what befalls a rank to the end of the last one, and from a relaunch to the first step; nothing else is compared.

Three ranks of a small fit that resumes from its last checkpoint. Their groups wait four seconds for one that stalls; limit: fifteen
seconds. A relaunch starts from a process that has torch and Lightning loaded: what Python's imports cost is not in it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_metric_learning.losses as pml
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.records import Row
from benchmarks.trainers import QUIET
from lightning_ddp_losses import ClassShardedLoss, ClipLoss, DDPLossStrategy
from lightning_ddp_losses.distributed import raw_collectives
from lightning_ddp_losses.testing import PRELOAD

__all__ = ["main"]

W, LIMIT, GROUP_SECONDS = 3, 15.0, 4.0
ROWS, DIM, STEPS, STRUCK = 30, 4, 10, 4
FAULTS = {
    "killed in forward": ("killed in forward", 1),
    "killed in backward": ("killed in backward", 1),
    "killed in a ring": ("killed in a ring", 1),
    "rank 0 killed while saving": ("killed while saving", 0),
    "raises in the step": ("raises", 1),
    "raises in a callback": ("raises in a callback", 1),
    "stands still": ("stalls", 1),
    "SIGTERM to one": ("SIGTERM", 1),
    "SIGTERM to all": ("SIGTERM", -1),
}


def _kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Strike:
    """What happens once, in step ``STRUCK``. A relaunched run finds the mark that it has happened.

    Attributes:
        kind: What.
        rank: To which rank; -1: to all.
        folder: Where marks are.
    """

    kind: str
    rank: int
    folder: Path

    def happens(self, module: LightningModule, kind: str) -> bool:
        """Return whether it happens here and now."""
        mark = self.folder / f"struck-{module.global_rank}"
        is_here = self.kind == kind and self.rank in (-1, module.global_rank) and module.global_step == STRUCK
        if not is_here or mark.exists():
            return False
        mark.touch()
        return True


class Model(LightningModule):
    """Two encoders, a ring between them, and class shards."""

    def __init__(self, strike: Strike) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.strike = strike
        self.left, self.right = nn.Linear(6, DIM), nn.Linear(6, DIM)
        self.classes = ClassShardedLoss(pml.ArcFaceLoss(5, DIM))
        self.pairs = ClipLoss(gather="ring")

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The sum of both losses, and what befalls this rank."""
        features, labels = batch
        happens = partial(self.strike.happens, self)
        if happens("killed in forward"):
            _kill()
        if happens("raises"):
            raise ZeroDivisionError("the user's own")
        if happens("stalls"):
            threading.Event().wait()
        if happens("SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
        if happens("killed in a ring"):
            raw_collectives.Ring.send = _kill  # type: ignore[assignment]
        rows = self.left(features)
        value = self.pairs(rows, self.right(features)) + self.classes(rows, labels)
        if happens("killed in backward"):
            rows.register_hook(_kill)
        return value

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam, whose state a checkpoint holds."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Saves(Callback):
    """Saves after every step, and leaves a mark when training begins."""

    def __init__(self, strike: Strike) -> None:
        self.strike = strike

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the mark."""
        (self.strike.folder / f"began-{trainer.global_rank}").touch()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save to one name."""
        if self.strike.happens(pl_module, "raises in a callback"):
            raise ZeroDivisionError("of a callback")
        really_sync = os.fsync
        if self.strike.happens(pl_module, "killed while saving"):
            os.fsync = _kill  # the file is written, and is not renamed yet
        trainer.save_checkpoint(self.strike.folder / "last.ckpt")
        os.fsync = really_sync


def fit(strike: Strike) -> None:
    """Train from the last checkpoint on, or from the start."""
    last = strike.folder / "last.ckpt"
    # ranks start at different times on a busy machine
    waits_long = strike.kind != "stalls" or any(strike.folder.glob("struck-*"))
    seconds = 60.0 if waits_long else GROUP_SECONDS
    trainer = Trainer(
        accelerator="cpu",
        devices=W,
        strategy=DDPLossStrategy(use_global_sampler=True, timeout=timedelta(seconds=seconds)),
        plugins=[LightningEnvironment()],
        callbacks=[Saves(strike), OnExceptionCheckpoint(strike.folder)],
        **(
            QUIET
            | {"max_epochs": -1, "max_steps": STEPS, "enable_checkpointing": True, "use_distributed_sampler": True}
        ),
    )
    rows = torch.arange(6.0 * ROWS).mul(0.7).sin().reshape(ROWS, 6)
    loader = DataLoader(TensorDataset(rows, torch.arange(ROWS) % 5), batch_size=2, shuffle=True)
    trainer.fit(Model(strike), loader, ckpt_path=str(last) if last.exists() else None)


def _start(environment: dict[str, str], log: str, job: Callable[[], None]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    job()


def run_to_the_end(strike: Strike, seconds: float = 60.0) -> float:
    """Start the ranks together, as a scheduler does. Return the time at which the last one has ended.

    Raises:
        RuntimeError: if one has not ended in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(W), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    processes = []
    for rank in range(W):
        own = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        log = str(strike.folder / f"output-{rank}")
        process = context.Process(target=_start, args=(own, log, partial(fit, strike)), daemon=True)
        process.start()
        processes.append(process)
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    ended = time.time()
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    if late:
        tail = (strike.folder / f"output-{late[0]}").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{strike.kind}: rank(s) {late} had not ended after {seconds:g} s\n{tail}")
    return ended


def measure(kind: str, rank: int) -> tuple[float, float]:
    """Return the seconds until the last rank has ended, and those from a relaunch until all ranks train."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        strike = Strike(kind, rank, folder)
        ended = run_to_the_end(strike)
        to_end = ended - min(mark.stat().st_mtime for mark in folder.glob("struck-*"))
        for mark in folder.glob("began-*"):
            mark.unlink()
        again = time.time()
        run_to_the_end(strike)
        began = [mark.stat().st_mtime for mark in folder.glob("began-*")]
        if len(began) != W:
            raise RuntimeError(f"{kind}: {len(began)} of {W} ranks trained again")
        to_train = max(began) - again
    return to_end, to_train


def main(options: list[str]) -> list[Row]:
    """Measure each fault several times."""
    parser = argparse.ArgumentParser("python -m benchmarks faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), help="faults to measure")
    given = parser.parse_args(options)
    rows: list[Row] = []
    for fault in given.only or FAULTS:
        measured = [measure(*FAULTS[fault]) for _ in range(given.rounds)]
        ends, resumes = zip(*measured, strict=True)
        rows.append(
            {
                "table": f"Faults: {W} ranks, groups that wait {GROUP_SECONDS:g} s for one that stalls",
                "job": fault,
                "seconds_to_the_end_of_the_last_rank": statistics.median(ends),
                "longest": max(ends),
                "limit": LIMIT,
                "seconds_to_train_again": statistics.median(resumes),
                "rounds": given.rounds,
                "verdict": "met" if max(ends) < LIMIT else "missed",
            }
        )
    return rows
