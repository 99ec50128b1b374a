"""Several ranks on one accelerator, over gloo: tensors travel through host memory. Each rank is a process with that device.

Every job runs twice on these ranks, on the CPU (which other tests compare with one process) and on the device, and is compared.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torchmetrics
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses import (
    ClassShardedLoss,
    ClipLoss,
    GlobalBatchLoss,
    RankMismatchError,
    SigLipLoss,
    SyncBatchNorm,
    differentiable,
)
from lightning_ddp_losses.collectives import all_gather_with_grad, reduce_scatter_with_grad
from tests.doors import LossReducer, ReducedParameters, raw_collectives
from tests.pretended.devices import HOST, Device

WIDTH = 6
SIZES = {2: [5, 8], 3: [5, 1, 8]}  # rows per rank, by ranks
LARGE = 700  # squared: a gradient that travels by itself


class Pair(nn.Module):
    """A loss on rows and labels, of which a job uses what it needs."""

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict(modules)
        self.function = function

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        return self.function(rows, labels, **self.inner)


def loss(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Pair(lambda rows, labels, loss: loss(rows, labels), loss=make())


def towers(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Pair(lambda rows, labels, loss: loss(rows, rows.flip(1)), loss=make())


def batch_norm() -> nn.Module:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH))
    SyncBatchNorm().apply(model)
    return Pair(lambda rows, labels, model: model(rows).square().sum(1).mean(), model=model)


def reduced() -> nn.Module:
    """The strategy's reduction of a loss's gradients, a large one and small ones; its value is what became of them."""
    module = nn.ParameterDict({"large": torch.ones(LARGE, LARGE), "small": torch.ones(3), "other": torch.ones(2, 2)})

    def run(rows: Tensor, labels: Tensor, module: nn.Module) -> Tensor:
        parameters = dict(module.named_parameters())
        raw_collectives.broadcast_(list(parameters.values()))
        for number, parameter in enumerate(parameters.values()):
            parameter.grad = (rows.detach().sum() * (number + 1)).expand(parameter.shape).clone()
        LossReducer(ReducedParameters(module, [])).reduce()
        total = torch.stack([p.grad.mean() for p in parameters.values()]).sum()
        module.zero_grad()
        return total + rows.sum()

    return Pair(run, module=module)


JOBS: dict[str, Callable[[], nn.Module]] = {
    "tiles, symmetric": loss(lambda: GlobalBatchLoss(pml.SupConLoss(), mode="rows")),
    "tiles, two log-sum-exps": loss(lambda: GlobalBatchLoss(pml.NTXentLoss(), mode="rows")),
    "tiles, gradients travel": loss(lambda: GlobalBatchLoss(pml.TripletMarginLoss(), mode="rows")),
    "replicated": loss(lambda: GlobalBatchLoss(pml.NCALoss(), backward="sum")),
    "elements": loss(lambda: GlobalBatchLoss(pml.ArcFaceLoss(4, WIDTH))),
    "class-sharded": loss(lambda: ClassShardedLoss(pml.ArcFaceLoss(4, WIDTH))),
    "CLIP": towers(ClipLoss),
    "SigLIP, a ring": towers(lambda: SigLipLoss(gather="ring")),
    "metric": loss(lambda: differentiable(torchmetrics.MeanSquaredError())),
    "gather": lambda: Pair(lambda rows, labels: all_gather_with_grad(rows).square().sum()),
    "reduce-scatter": lambda: Pair(
        lambda rows, labels: reduce_scatter_with_grad(all_gather_with_grad(rows), len(rows)).square().sum()
    ),
    "batch norm": batch_norm,
    "reduction": reduced,
}


def difference(device: Device, make: Callable[[], nn.Module], rows: Tensor, labels: Tensor) -> float:
    """Runs a job on the CPU and on the device; returns the largest relative difference."""
    found = []
    for place in (HOST, device):
        torch.manual_seed(3)
        module = make().to(place.name)
        leaf, target = place.to_device(rows).requires_grad_(), place.to_device(labels)
        for _ in range(2):
            leaf.grad = None
            module.zero_grad()
            value = module(leaf, target)
            value.backward()
            place.catch_up()
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        found.append([place.to_host(tensor) for tensor in (value, leaf.grad, *grads)])
    assert len(found[0]) == len(found[1]), "gradients of other parameters"
    off = [float((a - b).norm() / a.norm().clamp(min=1e-9)) for a, b in zip(*found, strict=True)]
    return max(off)


def refused_broadcast(device: Device, rows: Tensor, labels: Tensor) -> float | str:
    """Broadcasts class shards between two calls; 0.0: the call after that was an error, which says so."""
    loss = ClassShardedLoss(pml.ArcFaceLoss(6, WIDTH)).to(device.name)
    given = device.to_device(rows), device.to_device(labels)
    loss(*given)
    raw_collectives.broadcast_([loss.weight.detach()])
    try:
        # a device may be heard at the next call only
        for _ in range(2):
            loss(*given)
            device.catch_up()
    except RankMismatchError as error:
        return 0.0 if "Something broadcast the shards" in str(error) else str(error)
    return "no error"


def run_jobs(device: Device) -> dict[str, float | str]:
    """Runs all jobs as a rank of the world; returns for each its difference, or an error."""
    rank, sizes = dist.get_rank(), SIZES[dist.get_world_size()]
    rows = torch.randn(sum(sizes), WIDTH, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(sum(sizes)) % 4
    stop = sum(sizes[: rank + 1])
    part = slice(stop - sizes[rank], stop)
    found: dict[str, float | str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, make in JOBS.items():
            target = rows[part].flip(0) if name == "metric" else labels[part]
            try:
                found[name] = difference(device, make, rows[part], target)
            except Exception:
                found[name] = traceback.format_exc()[-1500:]
        found["broadcast class shards"] = refused_broadcast(device, rows[part], labels[part])
    return found
