"""Part b: ranks that share the one device, over gloo, beside the same ranks on the CPU; and a fit of Lightning's beside one process.

Lightning wants the ids of a node's devices to differ, so each rank is a node of one device.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytorch_metric_learning.losses as pml
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from benchmarks.records import Row
from lightning_ddp_losses import DDPLossStrategy, GlobalBatchLoss
from tests.devices import Device
from tests.lightning_ranks import QUIET, RankEnvironment
from tests.pretend_ranks import run_jobs
from tests.strategies.jobs import Job, fit_alone, loader

ROUNDED = {"pretend": 5e-7, "cuda": 1e-5}  # relative, float32 whose sums have another order
FIT_EXACT = 1e-9  # relative, float64


class OneNodePerRank(RankEnvironment):
    """Ranks that exist already, each the only one of its node."""

    def local_rank(self) -> int:
        """Return 0."""
        return 0

    def node_rank(self) -> int:
        """Return the rank."""
        return dist.get_rank()


class AlonePairs(Job):
    """A loss that compares samples, as one process calls it."""

    def build(self, loss: str) -> None:
        """Make the loss."""
        self.loss = pml.ContrastiveLoss()


class GlobalPairs(Job):
    """The same over the rows of all ranks."""

    def build(self, loss: str) -> None:
        """Make the loss."""
        self.loss = GlobalBatchLoss(pml.ContrastiveLoss())


FITS: dict[str, tuple[type[Job], type[Job]]] = {
    "fit, ArcFace": (Job, Job),
    "fit, Contrastive over all rows": (GlobalPairs, AlonePairs),
}


def rows_of(device: Device, every: int = 1) -> list[Row]:
    """Run all jobs and fits as a rank; every rank comes here."""
    # importing Lightning has set this anew
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    size, limit = f"{dist.get_world_size()} ranks", ROUNDED[device.name.partition(":")[0]]
    found: dict[str, float | str] = run_jobs(device)
    rows = [_row(name, size, off, limit) for name, off in found.items()]
    for name, (job, alone) in FITS.items():
        off: float | str
        try:
            off = fit_difference(device, job, alone)
        except Exception as error:  # the jobs before it are told all the same
            off = f"{type(error).__name__}: {error}"[:1500]
        rows.append(_row(name, size, off, FIT_EXACT))
    return rows


def fit_difference(device: Device, job: type[Job], alone: type[Job]) -> float:
    """Train on all ranks; return the largest relative difference of a parameter to one process on the CPU."""
    # Lightning does not know the pretended device
    accelerator: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
    if device.name.startswith("cuda"):
        accelerator = {"accelerator": "gpu", "devices": [torch.cuda.current_device()]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = job()
        strategy = DDPLossStrategy(process_group_backend="gloo")
        nodes = dist.get_world_size()
        trainer = Trainer(**accelerator, num_nodes=nodes, strategy=strategy, plugins=[OneNodePerRank()], **QUIET)
        trainer.fit(module, loader(nodes, dist.get_rank()))
        truth = fit_alone(alone)
    off = [0.0]
    for name, value in module.state_dict().items():
        expected = truth[name.replace("loss.loss.", "loss.")]
        off.append(float((value.cpu() - expected).norm() / expected.norm().clamp(min=1e-12)))
    return max(off)


def _row(name: str, size: str, off: float | str, limit: float) -> Row:
    is_right = isinstance(off, float) and off < limit
    return {
        "table": "gpu b: ranks on one device beside the CPU's",
        "loss": name,
        "size": size,
        "difference": off,
        "limit": limit,
        "verdict": "exact" if is_right else "WRONG",
    }
