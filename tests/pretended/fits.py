"""Whole fits of a Lightning Trainer on the pretended accelerator, with all checks and clipped gradients: the parameters of the CPU's fit.

One rank; two over gloo, whose tensors travel through the host; two whose collectives carry the device's tensors, as NCCL does. torch's own
DDP runs there as it is, but that Lightning would open a CUDA stream to wrap a module on a device (``PretendStrategy``).

Each fit on the device ends after its first epoch, saves, and is resumed; that on the CPU is not.
"""

from __future__ import annotations

import json
import traceback
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_losses import (
    ClassShardedLoss,
    DDPChecks,
    DDPLossError,
    DDPLossStrategy,
    DeviceCheck,
    GlobalBatchLoss,
    LossCheck,
    RankCheck,
    SyncBatchNorm,
    differentiable,
)
from lightning_ddp_losses.testing import RankEnvironment
from tests.doors import DEFAULT_CHECKS, handshake
from tests.fits import QUIET, listed
from tests.pretended.devices import HOST, Device
from tests.pretended.forks import on_forked_ranks
from tests.pretended.runs import Bound, Found

WIDTH, ROWS = 6, 8
BATCHES, ACCUMULATED, EPOCHS = 6, 2, 2


class PretendAccelerator(Accelerator):
    """The pretended device as Lightning sees one."""

    def setup_device(self, device: torch.device) -> None:
        assert device.type == self.name()

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device(PretendAccelerator.name(), 0)] * devices

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "pretend"


class PretendStrategy(DDPLossStrategy):
    """Wraps the model in torch's DDP without the CUDA stream that Lightning opens for a device with an index."""

    def determine_ddp_device_ids(self) -> None:
        return None


class OneNodePerRank(RankEnvironment):
    """Ranks that exist already, each the only one of its node: all have the same device."""

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return dist.get_rank()


class Fitted(LightningModule):
    """Batch norm, a loss in tiles, one whose classes are divided, and a metric as a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, WIDTH))
        self.tiled = GlobalBatchLoss(pml.SupConLoss(), mode="rows")
        self.divided = ClassShardedLoss(pml.ArcFaceLoss(4, WIDTH))
        self.metric = differentiable(torchmetrics.MeanSquaredError())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        rows, labels = batch
        embeddings = self.encoder(rows)
        value: Tensor = self.tiled(embeddings, labels) + self.divided(embeddings, labels)
        return value / 2 + self.metric(embeddings, rows)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Poisoned(Fitted):
    """Its loss is not a number in one batch."""

    def __init__(self, batch_idx: int) -> None:
        super().__init__()
        self.batch_idx = batch_idx

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        value = super().training_step(batch, batch_idx)
        return value * torch.nan if batch_idx == self.batch_idx else value


def handshakes() -> int:
    """Handshakes of this rank so far, of losses, strategy and checks."""
    if dist.get_world_size() == 1:
        return 0
    names: tuple[handshake.ChannelName, ...] = ("handshakes", "checks")
    return sum(handshake.Channel.of(None, name).opened for name in names)


class CountedBatches(Callback):
    """Counts what each batch costs, from its start to the start of the next one; the device catches up between them."""

    def __init__(self, device: Device, file: Path | None = None) -> None:
        self.device, self.file, self.by_batch = device, file, list[Counter[str]]()
        self._open: Any = None
        self._handshakes = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.end()
        self._handshakes = handshakes()
        self.device.catch_up()
        self._open = self.device.counting()
        self.by_batch.append(self._open.__enter__())

    def end(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
            self.by_batch[-1]["handshakes"] = handshakes() - self._handshakes

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self.end()
        if (
            self.file is not None
        ):  # while parameters are where optimizers have them: a move to this device makes new ones
            trainer.save_checkpoint(self.file)


def _loader() -> DataLoader[Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = torch.randn(BATCHES * ROWS * world, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.arange(len(rows)) % 4
    own = list(zip(rows[rank::world].clone().split(ROWS), labels[rank::world].split(ROWS), strict=True))
    return listed(own)


def _trainer(
    device: Device, counted: CountedBatches, folder: Path, checks: Sequence[RankCheck] = (), **options: Any
) -> Trainer:
    """Makes a trainer of this rank, with all checks unless some are given; that ranks share the device is meant."""
    checks = checks or [DeviceCheck(action="log") if kind is DeviceCheck else kind() for kind in DEFAULT_CHECKS]
    on_host = device is HOST
    strategy = (DDPLossStrategy if on_host else PretendStrategy)(process_group_backend="gloo")
    return Trainer(
        accelerator="cpu" if on_host else PretendAccelerator(),
        devices=1,
        num_nodes=dist.get_world_size(),
        strategy=strategy,
        plugins=[OneNodePerRank(), SyncBatchNorm()],
        callbacks=[counted, DDPChecks(checks, summary=False)],
        default_root_dir=folder,
        **(QUIET | {"accumulate_grad_batches": ACCUMULATED, "gradient_clip_val": 1.0} | options),
    )


def fit(device: Device, folder: Path) -> Found:
    """Trains on the CPU at a stretch, then on the device with a restart; every rank comes here."""
    torch.manual_seed(5)
    expected = Fitted().double()
    state = {name: tensor.clone() for name, tensor in expected.state_dict().items()}
    _trainer(HOST, CountedBatches(HOST), folder, max_epochs=EPOCHS).fit(expected, _loader())
    # on the device, an epoch and from there
    counted = CountedBatches(device, folder / "first.ckpt")
    module = Fitted().double()
    module.load_state_dict(state)
    trainer = _trainer(device, counted, folder)
    trainer.fit(module, _loader())
    counted.file = None
    module = Fitted().double()
    trainer = _trainer(device, counted, folder, max_epochs=EPOCHS)
    trainer.fit(module, _loader(), ckpt_path=folder / "first.ckpt", weights_only=False)
    # the second window of each epoch: in the first one checks try things out, in the last one the end of the epoch is judged
    found = Found(forward={})
    for first in (ACCUMULATED, BATCHES + ACCUMULATED):
        costs: Counter[str] = sum(counted.by_batch[first : first + ACCUMULATED], Counter())
        found.forward = {name: max(found.forward.get(name, 0), costs[name]) for name in {*found.forward, *costs}}
    truth, got = expected.state_dict(), module.state_dict()
    assert truth.keys() == got.keys()
    assert len(counted.by_batch) == EPOCHS * BATCHES
    for name, tensor in got.items():
        off = (device.to_host(tensor).double() - truth[name].double()).norm() / truth[name].double().norm().clamp(
            min=1e-9
        )
        found.difference = max(found.difference, float(off))
    return found


def late_error(device: Device, folder: Path, batch_idx: int) -> str:
    """Trains with a loss that is not a number in one batch; returns what ended the fit."""
    try:
        trainer = _trainer(device, CountedBatches(device), folder, [LossCheck()])
        trainer.fit(Poisoned(batch_idx).double(), _loader())
    except DDPLossError as error:
        return str(error)
    return "no error"


# what a window of two batches costs at most on rank 0, from the second window on. Ours wait over gloo alone, through which all travels by
# the host. Not ours: Lightning's news of a signal in each batch, and torch's DDP
FITS: dict[str, Bound] = {
    "fit, 1 rank": Bound(Fitted, tuple, 760, 2, 12),
    "fit, 2 ranks over gloo": Bound(Fitted, tuple, 1350, 39, 30, own_waits=35),
    "fit, 2 ranks": Bound(Fitted, tuple, 1030, 2, 14),
}
# handshakes of a window of two batches at most: three losses, batch norm, the strategy, and one of all checks
HANDSHAKES = {"fit, 1 rank": 0, "fit, 2 ranks over gloo": 18, "fit, 2 ranks": 18}
_RANKS = {"fit, 1 rank": 1, "fit, 2 ranks over gloo": 2, "fit, 2 ranks": 2}


def _as_rank(device: Device, name: str, folder: Path, rank: int) -> dict[str, Any]:
    """Runs a fit as one rank of its world; returns what it found."""
    try:
        found = fit(device, folder)
        if _RANKS[name] == 1:
            (folder / "late.json").write_text(json.dumps(late_error(device, folder, BATCHES - 1)))
    except Exception:
        found = Found(error=traceback.format_exc()[-3000:])
    return vars(found)


def main(device: Device, path: Path) -> None:
    """Runs all fits, each rank a fork of this process; writes what rank 0 found, by name, or any rank's error."""
    results = {}
    for number, (name, world) in enumerate(_RANKS.items()):
        folder = path.parent / f"fit_{number}"
        folder.mkdir()
        found = on_forked_ranks(partial(_as_rank, device, name, folder), world, folder, carries="gloo" not in name)
        results[name] = found[0] | {"error": "\n".join(each["error"] for each in found).strip()}
        results[name]["difference"] = max(each["difference"] for each in found)
    results["late"] = json.loads((path.parent / "fit_0" / "late.json").read_text())
    path.write_text(json.dumps(results))
