"""Under torch.compile, where the first call is the compiled one: values and gradients of the plain call, for everything public.

Groups and handshakes are no business of a compiler's: it goes round them (one break of its graph each), in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners
from torch import Tensor, nn

from lightning_ddp_losses import (
    ClassShardedLoss,
    ClipLoss,
    GlobalBatchLoss,
    GlobalBatchMiner,
    SigLipLoss,
    SyncBatchNorm,
    differentiable,
    microbatched,
)
from lightning_ddp_losses.collectives import all_gather_with_grad, all_reduce_with_grad, reduce_scatter_with_grad
from lightning_ddp_losses.testing import RankPool
from tests.doors import process_groups
from tests.oracle import assert_close

SIZES = [6, 8]
FEATURES, DIM, CLASSES = 5, 6, 4
HOW = ("model", "step", "loss")  # what is compiled; a step is forward and backward


Objective = Callable[["Model", Tensor, Tensor], Tensor]


class Model(nn.Module):  # an encoder, and a loss over all ranks behind it
    def __init__(self, objective: Objective, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder, self.norm = nn.Linear(FEATURES, DIM), nn.Identity()
        self.loss, self.objective = make(), objective
        if objective is normalised:
            self.norm = nn.BatchNorm1d(DIM)
            SyncBatchNorm().apply(self)
        self.miner = GlobalBatchMiner(miners.MultiSimilarityMiner())
        self.pieces = microbatched(nn.Sequential(nn.Linear(DIM, DIM)).double(), chunk_size=2)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        embeddings = self.encoder(rows).sin()
        return self.objective(self, embeddings, labels) * 2


def labelled(model: Model, embeddings: Tensor, labels: Tensor) -> Tensor:
    return model.loss(embeddings, labels)  # type: ignore[no-any-return]


def normalised(model: Model, embeddings: Tensor, labels: Tensor) -> Tensor:
    return model.loss(model.norm(embeddings), labels)  # type: ignore[no-any-return]


def towers(model: Model, embeddings: Tensor, labels: Tensor) -> Tensor:
    """Two embeddings of each row: two towers, predictions and targets; of several metrics, which share one exchange, the sum."""
    found = model.loss(embeddings, embeddings.flip(1).cos())
    return found if isinstance(found, Tensor) else sum(found.values(), torch.zeros(()))


def accumulated(model: Model, embeddings: Tensor, labels: Tensor) -> Tensor:
    model.loss.reset()
    model.loss.update(embeddings, embeddings.flip(1).cos())
    return model.loss.compute() + embeddings.mean()  # type: ignore[no-any-return]


def several_accumulated(model: Model, embeddings: Tensor, labels: Tensor) -> Tensor:
    """The same for several."""
    model.loss.reset()
    model.loss.update(embeddings.detach(), embeddings.flip(1).cos())
    return sum(model.loss.compute().values(), torch.zeros(())) + embeddings.mean()


def mined(model: Model, embeddings: Tensor, labels: Tensor) -> Tensor:
    return model.loss(embeddings, labels, model.miner(embeddings, labels))  # type: ignore[no-any-return]


def in_pieces(model: Model, embeddings: Tensor, labels: Tensor) -> Tensor:
    return model.loss(model.pieces(embeddings), labels)  # type: ignore[no-any-return]


def collectives(model: Model, embeddings: Tensor, labels: Tensor) -> Tensor:
    everywhere = all_gather_with_grad(embeddings)
    kept = reduce_scatter_with_grad(everywhere.sin(), rows=len(embeddings))
    return all_reduce_with_grad(kept.square().sum())


def class_head() -> nn.Module:
    torch.manual_seed(2)
    return pml.ArcFaceLoss(CLASSES, DIM)


def collection() -> nn.Module:
    return differentiable(torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.R2Score()]))


CASES: dict[str, tuple[Objective, Callable[[], nn.Module]]] = {
    "tiles": (labelled, lambda: GlobalBatchLoss(pml.SupConLoss(), mode="rows")),
    "a ring": (towers, lambda: ClipLoss(gather="ring")),
    "tiles with an exchange in backward": (labelled, lambda: GlobalBatchLoss(pml.TripletMarginLoss(), mode="rows")),
    "replicated": (labelled, lambda: GlobalBatchLoss(pml.ProxyAnchorLoss(CLASSES, DIM))),
    "elements": (labelled, lambda: GlobalBatchLoss(class_head())),
    "a loss of torch": (labelled, lambda: GlobalBatchLoss(nn.CrossEntropyLoss(weight=torch.linspace(1, 2, DIM)))),
    "a miner": (mined, lambda: GlobalBatchLoss(pml.SupConLoss(), mode="rows")),
    "class shards": (labelled, lambda: ClassShardedLoss(class_head())),
    "CLIP": (towers, ClipLoss),
    "SigLIP": (towers, SigLipLoss),
    "a metric": (towers, lambda: differentiable(torchmetrics.MeanSquaredError())),
    "a metric, accumulated": (accumulated, lambda: differentiable(torchmetrics.MeanSquaredError())),
    "a composition of metrics": (towers, lambda: 2 * differentiable(torchmetrics.MeanSquaredError())),
    "a collection of metrics": (towers, collection),
    "a collection, accumulated": (several_accumulated, collection),
    "batch norm": (normalised, nn.CrossEntropyLoss),
    "pieces": (in_pieces, lambda: GlobalBatchLoss(pml.SupConLoss(), mode="rows")),
    "collectives": (collectives, nn.Identity),
}


def rows_of(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SIZES[rank], FEATURES, generator=generator).double(), torch.arange(SIZES[rank]) % CLASSES


def step(name: str, how: str) -> dict[str, Tensor]:
    process_groups.close()  # so that the first call makes our groups
    torch.compiler.reset()
    model = Model(*CASES[name]).double()
    rows, labels = rows_of(dist.get_rank())

    call = torch.compile(model, backend="eager") if how == "model" else model

    def whole_step(rows: Tensor, labels: Tensor) -> Tensor:
        value = call(rows, labels)
        value.backward()
        return value.detach()

    run: Callable[..., Any] = torch.compile(whole_step, backend="eager") if how == "step" else whole_step
    if how == "loss":
        model.loss.compile(backend="eager")  # type: ignore[no-untyped-call]
    values = [run(rows, labels), run(rows.flip(1), labels)]
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"values": torch.stack(values), **grads}


def steps(name: str) -> dict[str, dict[str, Tensor]]:
    return {how: step(name, how) for how in ("plain", *HOW)}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's compiler
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_first_call_is_the_plain_one(pool: RankPool, name: str) -> None:
    for found in pool.run(2, steps, name):
        for how in HOW:
            assert_close(found[how], found["plain"])
