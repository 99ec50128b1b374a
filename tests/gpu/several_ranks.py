"""Part b: ranks that share the one device, over gloo, beside the same ranks on the CPU; and a fit of Lightning's beside one process.

Lightning wants the ids of a node's devices to differ, so each rank is a node of one device.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytorch_metric_learning.losses as pml
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from benchmarks.records import Row
from lightning_ddp_losses import DDPLossStrategy, GlobalBatchLoss
from lightning_ddp_losses.testing import RankEnvironment
from tests.fits import QUIET
from tests.pretended.devices import Device
from tests.pretended.ranks import run_jobs
from tests.strategies.jobs import Job, fit_alone, loader

ROUNDED = {"pretend": 5e-7, "cuda": 1e-5}  # relative, float32 whose sums have another order
FIT_EXACT = 1e-9  # relative, float64
_TABLE = "gpu b: ranks on one device beside the CPU's"


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


def rows_of(device: Device, every: int = 1) -> Iterator[Row]:
    """Run all jobs and fits as a rank; every rank comes here."""
    # importing Lightning has set this anew
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    size, limit = f"{dist.get_world_size()} ranks", ROUNDED[device.name.partition(":")[0]]
    found: dict[str, float | str] = run_jobs(device)
    for name, off in found.items():
        yield row_of(_TABLE, name, size, off, limit)
    for name, (job, alone) in FITS.items():
        off: float | str
        try:
            off = fit_difference(device, job, alone)
        except Exception as error:  # the jobs before it are reported all the same
            off = f"{type(error).__name__}: {error}"[:1500]
        yield row_of(_TABLE, name, size, off, FIT_EXACT)


def accelerator(device: Device) -> dict[str, Any]:
    """Return a trainer's options for one device of this node. Lightning does not know the pretended one."""
    if device.name.startswith("cuda"):
        return {"accelerator": "gpu", "devices": [torch.cuda.current_device()]}
    return {"accelerator": "cpu", "devices": 1}


def fit_difference(device: Device, job: type[Job], alone: type[Job], **options: Any) -> float:
    """Train on all ranks; return the largest relative difference of a parameter to one process on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = job()
        nodes = dist.get_world_size()
        options = {**QUIET, **accelerator(device), **options}
        trainer = Trainer(num_nodes=nodes, strategy=DDPLossStrategy(), plugins=[OneNodePerRank()], **options)
        trainer.fit(module, loader(nodes, dist.get_rank()))
        truth = fit_alone(alone)
    return largest_difference(module.state_dict(), truth)


def largest_difference(found: Mapping[Any, Tensor], truth: Mapping[Any, Tensor]) -> float:
    """Return the largest relative difference of two sets of tensors, by norms."""
    off = [0.0]
    for name, value in found.items():
        expected = truth[name].cpu().double()
        off.append(float((value.cpu().double() - expected).norm() / expected.norm().clamp(min=1e-12)))
    return max(off)


def row_of(table: str, name: str, size: str, off: float | str, limit: float) -> Row:
    """Return the row of a job that was off by so much, or that failed with this text."""
    is_right = isinstance(off, float) and off < limit
    return {
        "table": table,
        "loss": name,
        "size": size,
        "difference": off,
        "limit": limit,
        "verdict": "exact" if is_right else "WRONG",
    }
