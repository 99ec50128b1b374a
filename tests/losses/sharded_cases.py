"""The eight losses that `ClassShardedLoss` divides, with their options, and one process as their judge.

Classes are 7: no number of ranks divides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from pytorch_metric_learning import distances, miners, reducers, regularizers
from pytorch_metric_learning import losses as pml
from torch import Tensor

from lightning_ddp_losses import ClassShardedLoss
from lightning_ddp_losses.testing import RankPool
from tests.losses.harness import SPLITS, Net
from tests.losses.harness import global_rows as harness_rows
from tests.oracle import CLASS_LOSSES, Found, Place, own, parity

CLASSES, DIM = 7, 6
Rows = dict[str, Tensor]
_WEIGHTS = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """One configured loss.

    Attributes:
        name: Of the class in pytorch-metric-learning.
        options: Of the loss.
        sharded: Of ``ClassShardedLoss``.
        mine: Tuples from embeddings and labels of some rows.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    sharded: Mapping[str, Any] = field(default_factory=dict)
    mine: Callable[[Tensor, Tensor], Any] | None = None


def pairs(embeddings: Tensor, labels: Tensor) -> Any:
    """Tuples that do not depend on other ranks' rows: each row with the one after it, when both are on one rank."""
    first = torch.arange(max(len(labels) - 1, 0))
    return first, first + 1, first[:1], first[:1]


def hard(embeddings: Tensor, labels: Tensor) -> Any:
    """Hard triplets; a rank with few rows has none."""
    if len(labels) < 2:
        return (torch.empty(0, dtype=torch.long),) * 3
    return miners.BatchHardMiner()(embeddings, labels)


CASES: dict[str, Case] = {
    **{name: Case(name) for name in CLASS_LOSSES},
    **{f"{name}, chunks of 2": Case(name, sharded={"chunk_size": 2}) for name in CLASS_LOSSES},
    **{
        f"{name}, Lp regulariser": Case(name, {"weight_regularizer": regularizers.LpRegularizer(power=2)})
        for name in ("ArcFaceLoss", "ProxyNCALoss", "SoftTripleLoss")
    },
    "ArcFaceLoss, margin and scale": Case("ArcFaceLoss", {"margin": 40.0, "scale": 20.0}),
    "ArcFaceLoss, beyond the margin": Case("ArcFaceLoss", {"margin": 120.0, "scale": 4.0}),
    "ArcFaceLoss, sum": Case("ArcFaceLoss", {"reducer": reducers.SumReducer()}),
    "ArcFaceLoss, threshold": Case("ArcFaceLoss", {"reducer": reducers.ThresholdReducer(low=30.0)}),
    "CosFaceLoss, non-zero": Case("CosFaceLoss", {"reducer": reducers.AvgNonZeroReducer()}),
    "CosFaceLoss, class weights": Case("CosFaceLoss", {"reducer": reducers.ClassWeightedReducer(_WEIGHTS)}),
    "CosFaceLoss, per anchor": Case("CosFaceLoss", {"reducer": reducers.PerAnchorReducer()}),
    "CosFaceLoss, power": Case("CosFaceLoss", {"distance": distances.CosineSimilarity(power=3), "scale": 8}),
    "SphereFaceLoss, power": Case("SphereFaceLoss", {"distance": distances.CosineSimilarity(power=3)}),
    "LargeMarginSoftmaxLoss, margin 2": Case("LargeMarginSoftmaxLoss", {"margin": 2, "scale": 3}),
    "NormalizedSoftmaxLoss, not normalised": Case(
        "NormalizedSoftmaxLoss", {"distance": distances.DotProductSimilarity(normalize_embeddings=False)}
    ),
    "NormalizedSoftmaxLoss, Lp": Case("NormalizedSoftmaxLoss", {"distance": distances.LpDistance(p=2)}),
    "ProxyNCALoss, cosine": Case("ProxyNCALoss", {"distance": distances.CosineSimilarity(), "softmax_scale": 6}),
    "ProxyNCALoss, Lp": Case("ProxyNCALoss", {"distance": distances.LpDistance(p=2, normalize_embeddings=False)}),
    # the probability of some rows rounds to zero: they have no loss
    "ProxyNCALoss, improbable rows": Case("ProxyNCALoss", {"softmax_scale": 500}),
    "ProxyNCALoss, improbable rows, threshold": Case(
        "ProxyNCALoss", {"softmax_scale": 500, "reducer": reducers.ThresholdReducer(low=100.0)}
    ),
    "ProxyNCALoss, improbable rows, class weights": Case(
        "ProxyNCALoss", {"softmax_scale": 500, "reducer": reducers.ClassWeightedReducer(_WEIGHTS)}
    ),
    "SubCenterArcFaceLoss, 2": Case("SubCenterArcFaceLoss", {"sub_centers": 2}),
    "SoftTripleLoss, 1 center": Case("SoftTripleLoss", {"centers_per_class": 1}),
    "SoftTripleLoss, sparse centers": Case(
        "SoftTripleLoss",
        {
            "centers_per_class": 3,
            "weight_regularizer": regularizers.SparseCentersRegularizer(CLASSES, 3),
            "weight_reg_weight": 0.3,
        },
    ),
    "ArcFaceLoss, sum of norms": Case(
        "ArcFaceLoss", {"weight_regularizer": regularizers.LpRegularizer(p=3, reducer=reducers.SumReducer())}
    ),
    "ArcFaceLoss, some norms": Case(
        "ArcFaceLoss", {"weight_regularizer": regularizers.LpRegularizer(reducer=reducers.ThresholdReducer(low=2.0))}
    ),
    "ArcFaceLoss, zero mean": Case("ArcFaceLoss", {"weight_regularizer": regularizers.ZeroMeanRegularizer()}),
    "CosFaceLoss, embeddings": Case(
        "CosFaceLoss", {"embedding_regularizer": regularizers.LpRegularizer(), "embedding_reg_weight": 2.0}
    ),
    "ArcFaceLoss, mined": Case("ArcFaceLoss", mine=pairs),
    "ProxyNCALoss, mined": Case("ProxyNCALoss", mine=pairs),
    "ArcFaceLoss, hard triplets": Case("ArcFaceLoss", mine=hard),
}
# the probability of all rows does: their mean is none
NOT_A_NUMBER: dict[str, Case] = {"ProxyNCALoss, all rows improbable": Case("ProxyNCALoss", {"softmax_scale": 1e5})}


def make(case: Case) -> Any:
    """The plain loss; the same on every rank."""
    torch.manual_seed(2)
    return getattr(pml, case.name)(num_classes=CLASSES, embedding_size=DIM, **case.options).double()


def global_rows(sizes: list[int] | None = None, rank: int | None = None) -> Rows:
    """The global batch, or one rank's slice of it, with labels from all classes but one."""
    rows = harness_rows() | {"labels": torch.tensor([0, 6, 2, 2, 5, 1, 0, 6, 4, 1, 5, 0])}
    return {name: tensor if sizes is None else tensor[own(sizes, rank)] for name, tensor in rows.items()}


def net() -> Net:
    torch.manual_seed(1)
    return Net().double()


def play(place: Place, case: Case, **options: Any) -> Found:
    """Value and gradients, on ranks with the weight divided; each rank mines its own rows. Options are of ``ClassShardedLoss``."""
    encoder, plain, rows = net(), make(case), {name: place.own(tensor) for name, tensor in global_rows().items()}
    embeddings, tuples = encoder(rows["features"]), None
    if case.mine is not None:
        parts = [own(place.sizes, rank) for rank in range(len(place.sizes))] if place.alone else [slice(0, None)]
        mined = [[i + part.start for i in case.mine(embeddings[part], rows["labels"][part])] for part in parts]
        tuples = tuple(torch.cat(column) for column in zip(*mined, strict=True))
    loss = plain if place.alone else ClassShardedLoss(plain, **case.sharded, **options)
    value = loss(embeddings, rows["labels"], tuples)
    found = place.graded(value, net=encoder, weight=next(iter(loss.parameters())))
    assert not place.alone or found["weight"].any() or value.isnan(), "the case tests nothing: no gradient"
    return found


def judge(case: Case, sizes: list[int]) -> Found:
    """Value and gradients of one process."""
    return play(Place(sizes), case)


def call(case: Case, sizes: list[int], **options: Any) -> Found:
    """Value and gradients on this rank."""
    return play(Place(sizes, dist.get_rank()), case, **options)


def class_dim(name: str) -> int:
    """The dimension of a loss's weight along which classes lie."""
    return 0 if name == "ProxyNCALoss" else 1


def whole(parts: list[Tensor], name: str) -> Tensor:
    """The ranks' blocks of a weight or its gradient as one."""
    return torch.cat(parts, class_dim(name))


def step_rows(optimizer: torch.optim.Optimizer, weight: Tensor, rows: Tensor, dim: int, **start: float) -> None:
    """A step of one process that leaves all other rows of a weight, and of its state, as they are.

    Args:
        optimizer: Of the whole weight.
        weight: The only parameter of it that is looked at.
        rows: Which of the rows are stepped.
        dim: The dimension of the rows.
        **start: What the state of a row starts from, by its name. The others start from zero.
    """

    def tensors() -> dict[str, Tensor]:
        state = optimizer.state.get(weight, {})
        return {"": weight.detach()} | {k: t for k, t in state.items() if getattr(t, "shape", None) == weight.shape}

    before = {name: tensor.clone() for name, tensor in tensors().items()}
    optimizer.step()
    is_resting = torch.ones(weight.shape[dim], dtype=torch.bool)
    is_resting[rows] = False
    resting = is_resting.nonzero().squeeze(1)
    for name, tensor in tensors().items():
        old = before.get(name, torch.full_like(tensor, start.get(name, 0.0)))
        tensor.index_copy_(dim, resting, old.index_select(dim, resting))


def assert_as_one_process(
    pool: RankPool, world_size: int, names: Iterable[str], play: Callable[[Place, Case], Found] = play, **options: Any
) -> None:
    """Fail unless ranks find what one process finds, for each split of the rows. Options are of the pool."""
    cases = [CASES[name] for name in names]
    for sizes in SPLITS[world_size].values():
        parity(pool, play, sizes, cases=cases, shards=lambda case: {"weight": class_dim(case.name)}, **options)
