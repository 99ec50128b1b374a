"""`ClassShardedLoss`: eight losses x options x reducers x regularisers x chunks, on more or fewer classes than ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import regularizers
from torch import Tensor, nn

from lightning_ddp_losses import ClassShardedLoss
from lightning_ddp_losses.sharding import ClassShard
from tests.fuzz.data import DTYPES, Rows, cut, global_rows, options, own, rows_strategy
from tests.fuzz.engine import Domain, Found, NotDefined, leaf
from tests.fuzz.pml_losses import LOSSES, make_distance, make_reducer

__all__ = ["DOMAIN"]

NAMES = [
    "ArcFaceLoss",
    "CosFaceLoss",
    "LargeMarginSoftmaxLoss",
    "NormalizedSoftmaxLoss",
    "ProxyNCALoss",
    "SoftTripleLoss",
    "SphereFaceLoss",
    "SubCenterArcFaceLoss",
]
ANY_DISTANCE = ("NormalizedSoftmaxLoss", "ProxyNCALoss")


@dataclass(frozen=True)
class Case:
    rows: Rows
    loss: str
    loss_options: tuple[tuple[str, Any], ...]
    reducer: str
    distance: str
    regularizer: str
    chunk_size: int | None
    steps: int
    dtype: str

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.rows.ranks


@st.composite
def cases(draw: Any) -> Case:
    name = draw(st.sampled_from(NAMES))
    distance = draw(st.sampled_from(["", "", "Cosine", "Dot", "L2", "squared"]))
    rows = draw(rows_strategy().filter(lambda rows: rows.classes >= len(rows.ranks)))
    return Case(
        rows=rows,
        loss=name,
        loss_options=tuple(sorted(options(draw, LOSSES[name]).items())),
        reducer=draw(st.sampled_from(["", "", "Mean", "Sum", "AvgNonZero", "Threshold", "PerAnchor", "ClassWeighted"])),
        distance=distance if name in ANY_DISTANCE else "",
        regularizer=draw(st.sampled_from(["", "", "Lp", "ZeroMean"])),
        chunk_size=draw(st.sampled_from([None, 1, 2])),
        steps=draw(st.integers(1, 2)),
        dtype=draw(st.sampled_from(["float64", "float64", "float32"])),
    )


def make_loss(case: Case) -> nn.Module:
    dtype = DTYPES[case.dtype]
    given: dict[str, Any] = dict(case.loss_options)
    given.update(num_classes=case.rows.classes, embedding_size=case.rows.dim)
    if case.reducer:
        given["reducer"] = make_reducer(case.reducer, case.rows.classes, dtype)
    if case.distance:
        given["distance"] = make_distance(case.distance)
    if case.regularizer:
        given["weight_regularizer"] = getattr(regularizers, f"{case.regularizer}Regularizer")()
    torch.manual_seed(3)
    try:
        return getattr(pml, case.loss)(**given).to(dtype)  # type: ignore[no-any-return]
    except (TypeError, AssertionError, ValueError) as error:
        raise NotDefined from error


def class_dim(case: Case) -> int:
    return 0 if case.loss == "ProxyNCALoss" else 1


def alone(case: Case) -> dict[str, Any]:
    loss = make_loss(case)
    weight = next(iter(loss.parameters()))
    data = global_rows(case.rows, DTYPES[case.dtype])
    x = leaf(data["view 0"])
    try:
        for _ in range(case.steps):
            value = loss(x, data["labels"])
            value.backward()
    except Exception as error:
        raise NotDefined from error
    if not value.isfinite() or not x.grad.isfinite().all() or weight.grad is None or not weight.grad.isfinite().all():
        raise NotDefined
    per_class = weight.shape[class_dim(case)] // case.rows.classes
    world = len(case.ranks)
    parts = []
    for rank in range(world):
        shard = ClassShard.of_rank(case.rows.classes, world, rank)
        parts.append(
            weight.grad.narrow(class_dim(case), shard.start * per_class, (shard.stop - shard.start) * per_class)
        )
    return {"value v": value.detach(), "rank x": cut(case.rows, x.grad), "rank weight": parts}


def on_rank(case: Case) -> Found:
    rank, world = dist.get_rank(), dist.get_world_size()
    loss = ClassShardedLoss(make_loss(case), chunk_size=case.chunk_size)
    data = global_rows(case.rows, DTYPES[case.dtype])
    x = own(case.rows, data["view 0"], rank).requires_grad_()
    labels = own(case.rows, data["labels"], rank)
    for _ in range(case.steps):
        value = loss(x, labels)
        value.backward()
    grad: Tensor | None = loss.weight.grad
    return {
        "value v": value.detach(),
        "rank x": torch.zeros_like(x) if x.grad is None else x.grad / world,
        "rank weight": torch.zeros_like(loss.weight) if grad is None else grad,
    }


DOMAIN = Domain("class shards", cases(), on_rank, alone)
