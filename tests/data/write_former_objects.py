"""Writes `former_objects.tar.xz`: whole objects, state dicts and a checkpoint as the package pickled them before its modules moved.

Run it with the package of that time on the path, in this folder's parent:

    git worktree add /tmp/before d7f575c
    PYTHONPATH=/tmp/before python tests/data/write_former_objects.py tests/data/former_objects.tar.xz

Each member `<name>.pt` is `torch.save(object)`; `values.pt` holds by name what the object was called with and what came of it;
`names.json` lists every global of the package that the pickles name.
"""

from __future__ import annotations

import importlib
import io
import json
import pickletools
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytorch_metric_learning.losses as pml
import torch
import torchmetrics
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.miners import MultiSimilarityMiner
from pytorch_metric_learning.regularizers import LpRegularizer
from pytorch_metric_learning.samplers import MPerClassSampler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp_losses as ddl

ROWS, DIM, CLASSES = 8, 4, 4


def embeddings() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, DIM, generator=generator)


def labels() -> Tensor:
    return torch.arange(ROWS) % CLASSES


def losses() -> dict[str, nn.Module]:
    """Losses called with embeddings and labels."""
    made: dict[str, nn.Module] = {
        "SupCon": pml.SupConLoss(),
        "SupCon in tiles": ddl.GlobalBatchLoss(pml.SupConLoss(), tile_bytes=1 << 16, gather="ring"),
        "NTXent": pml.NTXentLoss(distance=CosineSimilarity()),
        "TripletMargin": pml.TripletMarginLoss(),
        "Contrastive": pml.ContrastiveLoss(),
        "MultiSimilarity": pml.MultiSimilarityLoss(),
        "ArcFace": pml.ArcFaceLoss(CLASSES, DIM, weight_regularizer=LpRegularizer()),
        "ProxyAnchor": pml.ProxyAnchorLoss(CLASSES, DIM),
        "FastAP": pml.FastAPLoss(),
        "memory": pml.CrossBatchMemory(pml.ContrastiveLoss(), DIM, memory_size=16),
        "CrossEntropy": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0, 0.5])),
    }
    made = {
        f"GlobalBatchLoss {name}": loss if isinstance(loss, ddl.GlobalBatchLoss) else ddl.GlobalBatchLoss(loss)
        for name, loss in made.items()
    }
    made["ClassShardedLoss ArcFace"] = ddl.ClassShardedLoss(pml.ArcFaceLoss(CLASSES, DIM))
    made["ClassShardedLoss SubCenterArcFace"] = ddl.ClassShardedLoss(
        pml.SubCenterArcFaceLoss(num_classes=CLASSES, embedding_size=DIM)
    )
    made["ClassShardedLoss sampled"] = ddl.ClassShardedLoss.build(
        pml.CosFaceLoss, num_classes=CLASSES, embedding_size=DIM, sample_rate=0.5, seed=1
    )
    return made


def metrics() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    pair = (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.5, 2.0, 1.0]))
    collection = torchmetrics.MetricCollection(
        {"mse": torchmetrics.MeanSquaredError(), "mean": torchmetrics.MeanMetric()}
    )
    return {
        "metric subclass": (ddl.differentiable(torchmetrics.MeanSquaredError)(), pair),
        "metric instance": (ddl.differentiable(torchmetrics.MeanSquaredError()), pair),
        "metric states in lists": (ddl.differentiable(torchmetrics.PearsonCorrCoef()), pair),
        "metric collection": (
            ddl.differentiable(
                torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()])
            ),
            pair,
        ),
        "metric composition": (
            ddl.differentiable(torchmetrics.MeanSquaredError()) + ddl.differentiable(torchmetrics.MeanAbsoluteError()),
            pair,
        ),
        "metric of one argument": (ddl.differentiable(collection["mean"]), pair[:1]),
        "metric wrapper": (ddl.differentiable(torchmetrics.MinMaxMetric(torchmetrics.MeanSquaredError())), pair),
    }


def modules() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Everything that is called with tensors: the object and its arguments."""
    texts = embeddings().flip(0)
    norm = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))
    encoder = nn.Sequential(nn.Linear(DIM, 3), nn.Tanh())
    found: dict[str, tuple[Any, tuple[Any, ...]]] = {
        name: (loss, (embeddings(), labels())) for name, loss in losses().items()
    }
    found["GlobalBatchLoss MSE"] = (ddl.GlobalBatchLoss(nn.MSELoss()), (embeddings(), texts))
    found["GlobalBatchMiner"] = (ddl.GlobalBatchMiner(MultiSimilarityMiner()), (embeddings(), labels()))
    found["ClipLoss"] = (ddl.ClipLoss(), (embeddings(), texts))
    found["ClipLoss ring"] = (ddl.ClipLoss(gather="ring"), (embeddings(), texts))
    found["SigLipLoss"] = (ddl.SigLipLoss(), (embeddings(), texts))
    found["SyncBatchNorm module"] = (ddl.SyncBatchNorm().apply(norm), (embeddings(),))
    found["microbatched"] = (ddl.microbatched(encoder, 3), (embeddings(),))
    return found | metrics()


def samplers() -> dict[str, Any]:
    of_classes = MPerClassSampler(labels().repeat(3), m=2, batch_size=4, length_before_new_iter=24)
    weighted = torch.utils.data.WeightedRandomSampler(torch.ones(24), 24)
    return {
        "GlobalBatchSampler": ddl.GlobalBatchSampler(weighted, 4, seed=5),
        "GlobalBatchSampler.batches": ddl.GlobalBatchSampler.batches(of_classes, 4, seed=5),
    }


def former(module: str, name: str) -> Any:
    """A private class of the package of that time."""
    return getattr(importlib.import_module(f"lightning_ddp_losses.{module}"), name)


def report() -> ddl.AuditReport:
    row = former("audit.rows", "Row")(
        1, "encoder.weight", "encoder", "gradient", 0.5, 1.0, 0.5, 0.5, 1e-6, True, 0, "half"
    )
    diagnosis = former("audit.case", "Diagnosis")(
        "F20", "a gather without gradients", "half of it", "Gather with gradients."
    )
    loss = former("audit.report", "StepLoss")(1, (1.0, 2.0), 1.5, 1.4, (4, 4))
    return ddl.AuditReport(False, [row], [], [loss], [diagnosis], [], {"devices": 2})


def shard() -> nn.Parameter:
    parameter = nn.Parameter(torch.arange(6.0).view(3, 2))
    former("sharding", "tag_shard")(parameter, former("sharding", "ClassShard")(2, 5, 8))
    return parameter


def others() -> dict[str, Any]:
    """What is loaded, and not called."""
    return {
        "DDPLossStrategy": ddl.DDPLossStrategy(losses=["loss"], adopt=False),
        "DDPChecks": ddl.DDPChecks(),
        **{
            f"check {cls.__name__}": cls()
            for cls in (
                ddl.BatchCheck,
                ddl.BufferSyncCheck,
                ddl.CheckpointCheck,
                ddl.CommunicationMonitor,
                ddl.DeviceCheck,
                ddl.GradientFlowCheck,
                ddl.LossCheck,
                ddl.OptimizerCheck,
                ddl.ParameterSyncCheck,
            )
        },
        "check with options": ddl.GradientFlowCheck(action={"error": "warn"}, parts=4),
        "SyncBatchNorm": ddl.SyncBatchNorm(),
        "AuditReport": report(),
        "shard": shard(),
        "error": ddl.InputError("text", findings=["found"], collective=True),
    }


class Model(pl.LightningModule):
    """A module with a learnable global loss, as a user writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(DIM, DIM)
        self.loss = ddl.GlobalBatchLoss(pml.ArcFaceLoss(CLASSES, DIM))
        self.tiled = ddl.GlobalBatchLoss(pml.SupConLoss())
        self.error = ddl.differentiable(torchmetrics.MeanSquaredError())

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        found = self.encoder(batch[0])
        loss: Tensor = self.loss(found, batch[1]) + self.tiled(found, batch[1]) + self.error(found, batch[0])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def checkpoint(module: pl.LightningModule) -> bytes:
    """What a fit of two steps saves."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_steps=2,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[ddl.DDPChecks()],
            enable_checkpointing=False,
        )
        trainer.fit(module, DataLoader(TensorDataset(embeddings(), labels()), batch_size=4))
        trainer.save_checkpoint(f"{folder}/last.ckpt")
        return Path(folder, "last.ckpt").read_bytes()


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def names_in(data: bytes) -> set[tuple[str, str]]:
    """The globals of the package that a file of torch.save names."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    found, texts = set(), []
    for code, argument, _ in pickletools.genops(pickled):
        if code.name == "GLOBAL":
            found.add(tuple(argument.split(" ", 1)))
        elif code.name == "STACK_GLOBAL":
            found.add((texts[-2], texts[-1]))
        if isinstance(argument, str):
            texts.append(argument)
    return {name for name in found if name[0].startswith("lightning_ddp_losses")}


def flat(value: Any) -> Any:
    """What came of a call, as tensors in lists and dicts."""
    if isinstance(value, dict):
        return {str(key): flat(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [flat(item) for item in value]
    return value.detach() if isinstance(value, Tensor) else value


def main(path: str) -> None:
    members: dict[str, bytes] = {}
    values: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for name, (made, arguments) in modules().items():
        torch.manual_seed(0)
        members[name] = saved(made)  # as it was made
        if isinstance(made, nn.Module):
            states[name] = {key: value.clone() for key, value in made.state_dict().items()}
        if name == "ClassShardedLoss sampled":
            continue  # it takes part in a step with an optimizer only
        value = made(*arguments)
        values[name] = {"arguments": list(arguments), "value": flat(value)}
        if isinstance(value, Tensor) and value.requires_grad and value.ndim == 0:
            value.backward()
        members[f"{name}, used"] = saved(made)
    for name, sampler in samplers().items():
        members[name] = saved(sampler)
        values[name] = {"value": [list(batch) if isinstance(batch, list) else int(batch) for batch in sampler]}
        members[f"{name}, used"] = saved(sampler)
    for name, made in others().items():
        members[name] = saved(made)
    torch.manual_seed(0)
    model = Model()
    members["checkpoint"] = checkpoint(model)
    names = sorted(set().union(*(names_in(data) for data in members.values())))
    members["states"], members["values"] = saved(states), saved(values)
    files = {f"{name}.pt": data for name, data in sorted(members.items())} | {"names.json": json.dumps(names).encode()}
    with tarfile.open(path, "w:xz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    print(len(members), "members,", Path(path).stat().st_size, "bytes,", len(names), "names")
    print(*names, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1])
