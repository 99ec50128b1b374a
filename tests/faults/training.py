"""A small fit with all that a checkpoint has to bring back, and what may befall one of its ranks."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_losses import ClassShardedLoss, ClipLoss, DDPLossStrategy, GlobalBatchLoss
from tests.doors import raw_collectives
from tests.fits import QUIET

ROWS, G, DIM, CLASSES, EPOCHS = 30, 6, 4, 5, 2
STEPS = EPOCHS * ROWS // G
ON = ("use_distributed_sampler", "enable_checkpointing")
GROUP_SECONDS = 4.0  # where a rank is to stall; else ranks wait as long as a busy machine may need


@dataclass(frozen=True)
class Strike:
    """What happens to whom, once: a relaunched run finds the mark that it has happened.

    Attributes:
        kind: ``"none"``, or a key of ``Everything.strikes``.
        rank: To which rank; -1: to all.
        step: In which step.
    """

    kind: str = "none"
    rank: int = 1
    step: int = 4


class Everything(LightningModule):
    """Dropout, a learnable loss, class shards, a memory queue, a ring; a sampler and a scaler come from outside."""

    def __init__(self, strike: Strike, folder: Path) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.strike, self.folder = strike, folder
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, DIM)).double()
        self.other = nn.Linear(6, DIM).double()
        self.proxies = GlobalBatchLoss(pml.ProxyAnchorLoss(CLASSES, DIM).double())
        self.classes = ClassShardedLoss(pml.ArcFaceLoss(CLASSES, DIM).double())
        self.memory = GlobalBatchLoss(pml.CrossBatchMemory(pml.ContrastiveLoss(), DIM, memory_size=14).double())
        self.pairs = ClipLoss(gather="ring").double()

    def strikes(self, kind: str) -> bool:
        """Say whether it happens here and now."""
        strike, mark = self.strike, self.folder / f"struck-{self.global_rank}"
        happens = strike.kind == kind and strike.rank in (-1, self.global_rank) and self.global_step == strike.step
        if not happens or mark.exists():
            return False
        mark.touch()
        return True

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        features, labels = batch
        if self.strikes("killed in forward"):
            kill()
        if self.strikes("raises"):
            raise ZeroDivisionError("the user's own")
        if self.strikes("stalls"):
            threading.Event().wait()
        if self.strikes("SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
        embeddings, others = self.encoder(features), self.other(features)
        raw_collectives.Ring.armed = self.strikes("killed in a ring")  # type: ignore[attr-defined]
        pairs = self.pairs(embeddings, others)
        if self.strikes("killed in backward"):
            embeddings.register_hook(lambda grad: kill())
        return pairs + sum(loss(embeddings, labels) for loss in (self.proxies, self.classes, self.memory))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class ArmedRing(raw_collectives.Ring):  # its rank dies when it passes something on
    armed = False

    def send(self, tensor: Tensor, rows: int) -> Any:
        if ArmedRing.armed:
            kill()
        return super().send(tensor, rows)


class Saves(Callback):  # saves after so many steps, to one name, and leaves a mark when training begins
    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_start(self, trainer: Any, module: Any) -> None:
        (module.folder / f"began-{trainer.global_rank}").touch()

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step % self.every:
            return
        if module.strikes("raises in a callback"):
            raise ZeroDivisionError("of a callback")
        really_sync = os.fsync
        if module.strikes("killed while saving"):
            os.fsync = lambda descriptor: kill()  # the file is written, and has not its name yet
        trainer.save_checkpoint(module.folder / "last.ckpt")
        os.fsync = really_sync


def data() -> DataLoader:
    rows = torch.arange(6.0 * ROWS, dtype=torch.float64).mul(0.7).sin().reshape(ROWS, 6)
    world_size = int(os.environ["WORLD_SIZE"])
    return DataLoader(TensorDataset(rows, torch.arange(ROWS) % CLASSES), batch_size=G // world_size, shuffle=True)


def fit(strike: Strike, folder: Path, steps: int = STEPS, every: int = 1) -> None:
    """Train from the last checkpoint on, or from the start, and leave this rank's state in the folder."""
    raw_collectives.Ring = ArmedRing  # type: ignore[misc]
    world_size = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(7 + int(os.environ["RANK"]))  # ranks draw different masks
    seconds = GROUP_SECONDS if strike.kind == "stalls" and not any(folder.glob("struck-*")) else 60.0
    strategy = DDPLossStrategy(use_global_sampler=True, timeout=timedelta(seconds=seconds))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    options = QUIET | {"max_epochs": -1, "max_steps": steps} | dict.fromkeys(ON, True)
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        plugins=[LightningEnvironment(), MixedPrecision("16-mixed", "cpu", scaler)],
        callbacks=[Saves(every), OnExceptionCheckpoint(folder)],
        **options,
    )
    module = Everything(strike, folder)
    last = folder / "last.ckpt"
    trainer.fit(module, data(), ckpt_path=str(last) if last.exists() else None)
    queue = module.memory.wrapped
    state = dict(module.state_dict()) | {
        "scale": torch.tensor(scaler.get_scale()),
        "queue": torch.tensor(queue.queue_idx),  # type: ignore[arg-type]
        "random numbers": torch.get_rng_state(),
    }
    torch.save(state, folder / f"state-{trainer.global_rank}")
