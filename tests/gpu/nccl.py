"""Part e: NCCL, in a world of one and in a world of two on the one device, and what only a real device can refuse.

NCCL refuses two ranks on one device of one host. Each rank has another ``NCCL_HOSTID`` here, so that they talk through sockets.
If a release of NCCL refuses that too, the rows of two ranks say so.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytorch_metric_learning.losses as pml
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn

from benchmarks.records import Row
from lightning_ddp_losses import (
    ClassShardedLoss,
    ClipLoss,
    DDPLossError,
    DDPLossStrategy,
    GlobalBatchLoss,
    SigLipLoss,
)
from tests.fits import QUIET, weights_of
from tests.gpu.several_ranks import (
    FIT_EXACT,
    FITS,
    ROUNDED,
    OneNodePerRank,
    accelerator,
    fit_difference,
    largest_difference,
    row_of,
)
from tests.pretended.devices import Device
from tests.pretended.ranks import run_jobs
from tests.strategies.fsdp_jobs import fit_kind_alone, make_job
from tests.strategies.jobs import Job, fit_alone, loader

HALF = 2.0  # distance of a fit in float16 from float64, over that of Lightning's own
COMPILED = 1e-5  # relative, float32 whose sums have another order
COMPILED_BF16 = 2.0**-16  # gradients of products are rounded by 2^-17, not always to the same side
FREED_SECONDS = 30.0  # a stuck device is noticed after 10 s
_TABLE = "gpu e: NCCL"
_NOT_RUN = "not run"


class GlobalTriplets(Job):
    """A loss whose numbers of triplets are cumulated, which CUDA does not do deterministically for floats."""

    def build(self, loss: str) -> None:
        """Make the loss."""
        self.loss = GlobalBatchLoss(pml.TripletMarginLoss())


class AloneTriplets(Job):
    """The same in one process."""

    def build(self, loss: str) -> None:
        """Make the loss."""
        self.loss = pml.TripletMarginLoss()


class FailsNextToAKernel(Job):
    """A step fails on rank 0, whose device waits for a collective that rank 1 does not join."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
        """Fail at the second step."""
        if index == 1 and dist.get_rank() == 0:
            if self.device.type == "cuda":  # gloo would pair it with another collective
                dist.all_reduce(torch.ones(1, device=self.device), async_op=True).wait()
            raise ArithmeticError("a step that fails")
        return super().training_step(batch, index)


def rows_of(device: Device, every: int = 1) -> Iterator[Row]:
    """Run the jobs of one rank, or of two."""
    # read at the first communicator, and at the first product: ranks count as different hosts, products can be deterministic
    os.environ["NCCL_HOSTID"] = f"rank {dist.get_rank()}"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if dist.get_world_size() == 1:
        jobs = {
            "fit, ArcFace": (lambda: fit_difference(device, Job, Job), FIT_EXACT),
            "fit, deterministic=True, TripletMargin": (lambda: _deterministic_fit(device), FIT_EXACT),
            "fit, 16-true, over Lightning's own": (lambda: _half_fit(device), HALF),
            "fit, fsdp2_ddp_losses": (lambda: _sharded_fit(device), FIT_EXACT),
            "compile_tiles, SigLIP": (lambda: _compiled(device, SigLipLoss), COMPILED),
            "compile_tiles, CLIP": (lambda: _compiled(device, ClipLoss), COMPILED),
            "compile_tiles, ArcFace, class shards": (lambda: _compiled(device, _class_shards), COMPILED),
            "compile_tiles, ArcFace, class shards, bf16": (
                lambda: _compiled(device, partial(_class_shards, products="bf16")),
                COMPILED_BF16,
            ),
        }
        for name, (job, limit) in jobs.items():
            yield _row(name, job, limit)
        return
    limit = ROUNDED[device.name.partition(":")[0]]
    for name, off in run_jobs(device).items():
        yield _row(name, lambda off=off: off, limit)
    for name, (job, truth) in FITS.items():
        yield _row(name, lambda job=job, truth=truth: fit_difference(device, job, truth), FIT_EXACT)
    yield _row("fit, hf_loss under FSDP2, accumulation 4", lambda: _hf_fit(device), FIT_EXACT)
    # last: afterwards this world is of no use
    yield _row(
        "seconds from a failing step next to a waiting kernel to the end of the fit",
        lambda: _freed(device),
        FREED_SECONDS,
    )


def _row(name: str, job: Callable[[], float | str], limit: float) -> Row:
    off: float | str
    try:
        off = job()
    except Exception as error:  # the others are run all the same
        off = f"{type(error).__name__}: {error}"[:1500]
    row = row_of(_TABLE, name, f"{dist.get_world_size()} ranks, {dist.get_backend()}", off, limit)
    return {**row, "verdict": _NOT_RUN} if isinstance(off, str) and off.startswith(_NOT_RUN) else row


def _deterministic_fit(device: Device) -> float:
    try:
        return fit_difference(device, GlobalTriplets, AloneTriplets, deterministic=True)
    finally:
        torch.use_deterministic_algorithms(False)


def _half_fit(device: Device) -> float:
    """Return how far a fit in float16 ends from one in float64, over the same of one process under Lightning alone."""
    theirs = largest_difference(fit_alone(Job, precision="16-true"), fit_alone(Job))
    return fit_difference(device, Job, Job, precision="16-true") / theirs


def _sharded_fit(device: Device) -> float:
    """Train an encoder that FSDP2 divides into one part."""
    truth = fit_kind_alone("arcface")
    module = make_job("arcface")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(**accelerator(device), strategy="fsdp2_ddp_losses", plugins=[OneNodePerRank()], **QUIET).fit(
            module, loader(1, 0)
        )
    return largest_difference(weights_of(module), truth)


def _hf_fit(device: Device) -> float | str:
    """Train with Hugging Face's Trainer and FSDP2. accelerate has no FSDP on CPUs."""
    missing = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if missing or not device.name.startswith("cuda"):
        return f"{_NOT_RUN}: needs CUDA, transformers and accelerate"
    from lightning_ddp_losses.integrations.hf_trainer import hf_loss
    from tests.integrations import test_hf_trainer as hf

    truth, _, _ = hf.fit_kind_alone(dist.get_world_size(), 4)
    loss = hf_loss(hf.token_sum)
    options = {"use_cpu": False, "ddp_backend": "nccl", "fsdp": True, "fsdp_config": {"auto_wrap_policy": "NO_WRAP"}}
    # both ranks have the one device
    one_device = mock.patch.dict(os.environ, {"LOCAL_RANK": "0"})
    with tempfile.TemporaryDirectory() as folder, hf.ranks_of_accelerate(), one_device:
        trainer = hf.trainer_of(folder, loss, 4, **options)
        trainer.train()
    return largest_difference(weights_of(trainer.model), truth)


def _class_shards(**options: Any) -> nn.Module:
    return ClassShardedLoss(pml.ArcFaceLoss(300, 64), **options)


def _compiled(device: Device, make: Callable[..., nn.Module]) -> float:
    """Compare a compiled loss of two towers, or of rows and labels, with the same one uncompiled, value and gradients."""
    place = device.name if device.name.startswith("cuda") else "cpu"
    found = []
    for compile_tiles in (False, True):
        torch.manual_seed(0)
        left, right = torch.randn(2, 512, 64, device=place, requires_grad=True).unbind()
        loss = make(compile_tiles=compile_tiles).to(place)
        leaves = [left, *loss.parameters()]
        if isinstance(loss, ClassShardedLoss):
            right = torch.arange(512, device=place) % loss.num_classes
        else:
            leaves.append(right)
        value = loss(left, right)
        found.append([value.detach(), *torch.autograd.grad(value, leaves)])
    eager, compiled = (dict(enumerate(tensors)) for tensors in found)
    return largest_difference(compiled, eager)


def _freed(device: Device) -> float:
    """Return the seconds until every rank has its error and has its module on the host again."""
    module = FailsNextToAKernel()
    trainer = Trainer(
        **accelerator(device), num_nodes=2, strategy=DDPLossStrategy(), plugins=[OneNodePerRank()], **QUIET
    )
    began = time.monotonic()
    with warnings.catch_warnings(), contextlib.suppress(ArithmeticError, DDPLossError):
        warnings.simplefilter("ignore")
        trainer.fit(module, loader(2, dist.get_rank()))
        raise RuntimeError("the fit came to its end")
    module.cpu()
    return time.monotonic() - began
