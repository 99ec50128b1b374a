"""A rank that fails in a loss where its peers only wait for the device: their hosts go on, and learn of it in their next handshake.

Collectives carry the device's tensors. Those of the peers never run from the failure on, as they would wait for the rank that failed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_losses import ClassShardedLoss, ClipLoss, SigLipLoss
from tests.doors import LocalClasses, TowerCall
from tests.fits import QUIET
from tests.pretended import forks
from tests.pretended.devices import HOST, Device
from tests.pretended.fits import OneNodePerRank, PretendAccelerator, PretendStrategy
from tests.pretended.forks import write_found

WIDTH, CLASSES = 6, 8
BAD_CALL, CALLS = 1, 3
FAILED, WORDS = 1, "rank 1 alone"  # the rank that fails, and with what
LOSSES: dict[str, Callable[[], nn.Module]] = {
    "SigLIP": SigLipLoss,
    "CLIP": ClipLoss,
    "ArcFace, class shards": lambda: ClassShardedLoss(pml.ArcFaceLoss(CLASSES, WIDTH)),
}
RUNS = ("backward", "no_grad", "validate", "fit")


@contextlib.contextmanager
def _failing_tiles() -> Iterator[None]:
    """Lets tiles fail on one rank; where the others compute theirs, their device stands still until the end of the block."""
    with contextlib.ExitStack() as patches:
        for owner, method in ((TowerCall, "tiles"), (LocalClasses, "chunks")):
            patches.enter_context(mock.patch.object(owner, method, _failing(getattr(owner, method))))
        patches.callback(forks.get_stuck, stuck=False)
        yield


def _failing(original: Callable[..., Any]) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == FAILED:
            raise torch.OutOfMemoryError(WORDS)
        forks.get_stuck(stuck=True)
        return original(*args, **kwargs)

    return method


class Lossy(pl.LightningModule):
    """A linear model and a loss, which fails in one batch on one rank."""

    def __init__(self, name: str, *, fails: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.loss = nn.Linear(WIDTH, WIDTH), LOSSES[name]()
        self.fails = fails

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        rows, labels = batch
        images = self.layer(rows)
        others = labels if isinstance(self.loss, ClassShardedLoss) else self.layer(rows.flip(1))
        with _failing_tiles() if self.fails and batch_idx == BAD_CALL else contextlib.nullcontext():
            value: Tensor = self.loss(images, others)
        return value

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _batches() -> list[tuple[Tensor, Tensor]]:
    """The batches of this rank, of another size on each."""
    rank, found = dist.get_rank(), []
    for call in range(CALLS):
        generator = torch.Generator().manual_seed(10 * call + rank)
        rows = torch.randn(3 + rank, WIDTH, generator=generator)
        found.append((rows, torch.randint(CLASSES, (len(rows),), generator=generator)))
    return found


def _run(device: Device, name: str, run: str, *, fails: bool) -> list[Tensor]:
    """Calls a loss in each batch, by hand or under a Trainer; returns the parameters, or their gradients."""
    module = Lossy(name, fails=fails)
    if run in ("validate", "fit"):
        trainer = pl.Trainer(
            accelerator=PretendAccelerator(),
            devices=1,
            num_nodes=dist.get_world_size(),
            strategy=PretendStrategy(),
            plugins=[OneNodePerRank()],
            inference_mode=False,  # the pretended device has no such tensors
            **QUIET,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader = DataLoader(_batches(), batch_size=None)  # type: ignore[arg-type]
            getattr(trainer, run)(module, loader, **({"verbose": False} if run == "validate" else {}))
        return []
    module.to(device.name)
    for call, batch in enumerate(_batches()):
        module.zero_grad()
        with torch.set_grad_enabled(run == "backward"):
            value = module.training_step([device.to_device(tensor) for tensor in batch], call)
        if run == "backward":
            value.backward()
        device.catch_up()
    return [device.to_host(p.grad) for p in module.parameters() if p.grad is not None]


def _error(device: Device, name: str, run: str) -> str:
    try:
        _run(device, name, run, fails=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
    return "no error"


def _as_rank(device: Device, rank: int) -> dict[str, Any]:
    """Returns the error of each run, and how far the same loss is from the CPU's afterwards."""
    found: dict[str, Any] = {"errors": {}, "off": {}}
    for name in LOSSES:
        for run in RUNS:
            found["errors"][f"{name}, {run}"] = _error(device, name, run)
        ours, expected = (_run(place, name, "backward", fails=False) for place in (device, HOST))
        found["off"][name] = max(float((a - b).norm() / b.norm()) for a, b in zip(ours, expected, strict=True))
    return found


def main(device: Device, path: Path) -> None:
    """Runs everything on two ranks and on three; writes what each rank found."""
    write_found(path, partial(_as_rank, device), {"2": (2, True), "3": (3, True)})
