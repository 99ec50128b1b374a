"""Every loss of pytorch-metric-learning (PML), configured for the small global batch of `harness`.

A test fails when PML exports a class that is neither in `PML` nor explained in `NOT_LOSSES`: write one row here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners, reducers
from torch import Tensor, nn

from tests.losses.harness import CLASSES, DIM, ROWS, Arguments, Case, Net, Rows

NOT_LOSSES = {
    "BaseLossWrapper": "abstract",
    "BaseMetricLossFunction": "abstract",
    "EmbeddingRegularizerMixin": "mix-in",
    "GenericPairLoss": "base of pair losses: its formula comes from the subclass",
    "WeightRegularizerMixin": "mix-in",
}
ELEMENTS, ROW_WISE, REPLICATED = ("elements", "replicated"), ("rows", "replicated"), ("replicated",)
classes: Any = {"num_classes": CLASSES, "embedding_size": DIM}


def two_views(net: Net, rows: Rows) -> Arguments:
    """Two views of each row, no labels: each row is its own class."""
    return (net(rows["features"]),), {"ref_emb": net(rows["views"])}


def two_views_alone(net: Net, rows: Rows, sizes: list[int]) -> Arguments:
    labels = torch.arange(ROWS)
    return (net(rows["features"]), labels), {"ref_emb": net(rows["views"]), "ref_labels": labels.clone()}


def both_views(net: Net, rows: Rows) -> Arguments:
    return (net(rows["features"]), net(rows["views"])), {}


class Swapped(pml.SelfSupervisedLoss):
    """A user's: it may do with its views what it likes."""

    def __init__(self) -> None:
        super().__init__(pml.NTXentLoss(), symmetric=False)

    def forward(self, embeddings: Tensor, ref_emb: Tensor) -> Any:
        return super().forward(ref_emb, embeddings.flip(1))


def meta_classes(net: Net, rows: Rows) -> Arguments:
    return (net(rows["features"]),), {"indices_tuple": rows["labels"] % 3}


def embeddings_only(net: Net, rows: Rows) -> Arguments:
    return (net(rows["features"]),), {}


def named(cls: type[nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return partial(cls, **options)


def every(modes: tuple[str, ...], losses: list[type[nn.Module]], **options: Any) -> dict[str, Case]:
    return {cls.__name__: Case(partial(cls, **options), modes=modes) for cls in losses}


PML: dict[str, Case] = {
    **every(
        ELEMENTS,
        [
            pml.ArcFaceLoss,
            pml.CosFaceLoss,
            pml.LargeMarginSoftmaxLoss,
            pml.NormalizedSoftmaxLoss,
            pml.ProxyNCALoss,
            pml.SoftTripleLoss,
            pml.SphereFaceLoss,
            pml.SubCenterArcFaceLoss,
        ],
        **classes,
    ),
    **every(
        ROW_WISE,
        [
            pml.AngularLoss,
            pml.CircleLoss,
            pml.ContrastiveLoss,
            pml.GeneralizedLiftedStructureLoss,
            pml.MarginLoss,
            pml.MultiSimilarityLoss,
            pml.NTXentLoss,
            pml.SignalToNoiseRatioContrastiveLoss,
            pml.SupConLoss,
            pml.TripletMarginLoss,
            pml.TupletMarginLoss,
        ],
    ),
    **every(
        REPLICATED,
        [
            pml.DynamicSoftMarginLoss,
            pml.InstanceLoss,
            pml.IntraPairVarianceLoss,
            pml.LiftedStructureLoss,
            pml.NCALoss,
            pml.NPairsLoss,
            pml.PNPLoss,
            pml.SmoothAPLoss,
            pml.ThresholdConsistentMarginLoss,
        ],
    ),
    "FastAPLoss": Case(named(pml.FastAPLoss, num_bins=5), modes=REPLICATED),
    "HistogramLoss": Case(named(pml.HistogramLoss, n_bins=10), modes=REPLICATED),
    "P2SGradLoss": Case(named(pml.P2SGradLoss, descriptors_dim=DIM, num_classes=CLASSES), modes=REPLICATED),
    "ProxyAnchorLoss": Case(named(pml.ProxyAnchorLoss, **classes), modes=REPLICATED),
    "RankedListLoss": Case(named(pml.RankedListLoss, margin=1, Tn=1), modes=REPLICATED),
    "VICRegLoss": Case(pml.VICRegLoss, lambda net, rows: ((net(rows["features"]),), {"ref_emb": net(rows["views"])})),
    "ManifoldLoss": Case(named(pml.ManifoldLoss, l=DIM, K=3), embeddings_only, modes=REPLICATED, random=True),
    "ManifoldLoss with its classes": Case(named(pml.ManifoldLoss, l=DIM, K=3), meta_classes, modes=REPLICATED),
    "ManifoldLoss without a context": Case(
        named(pml.ManifoldLoss, l=DIM, K=3, lambdaC=0.0), embeddings_only, random=True
    ),
    "MarginLoss, one learnt beta": Case(named(pml.MarginLoss, learn_beta=True, nu=0.1), modes=ROW_WISE),
    "MarginLoss, learnt betas": Case(
        named(pml.MarginLoss, learn_beta=True, nu=0.1, num_classes=CLASSES), modes=ROW_WISE
    ),
    "MarginLoss, 2 triplets per anchor": Case(
        named(pml.MarginLoss, triplets_per_anchor=2), modes=REPLICATED, random=True
    ),
    "TripletMarginLoss, 2 triplets per anchor": Case(
        named(pml.TripletMarginLoss, triplets_per_anchor=2), modes=REPLICATED, random=True
    ),
    "TripletMarginLoss, swap": Case(named(pml.TripletMarginLoss, swap=True), modes=REPLICATED),
    "TripletMarginLoss, smooth": Case(named(pml.TripletMarginLoss, smooth_loss=True), modes=ROW_WISE),
    "ProxyNCALoss, smooth": Case(named(pml.ProxyNCALoss, softmax_scale=3, **classes), modes=ELEMENTS),
    "CrossBatchMemory": Case(
        lambda: pml.CrossBatchMemory(pml.ContrastiveLoss(), DIM, memory_size=30, miner=miners.MultiSimilarityMiner()),
        modes=REPLICATED,
    ),
    "MultipleLosses": Case(
        lambda: pml.MultipleLosses(
            [pml.ArcFaceLoss(**classes), pml.SupConLoss(), pml.TripletMarginLoss()],
            miners=[None, miners.MultiSimilarityMiner(), miners.BatchHardMiner()],
            weights=[0.5, 2.0, 0.25],
        ),
        modes=REPLICATED,
    ),
    "MultipleLosses, by name": Case(
        lambda: pml.MultipleLosses(
            {"a": pml.NTXentLoss(), "b": pml.ProxyAnchorLoss(**classes), "c": pml.ContrastiveLoss()},
            miners={"c": miners.PairMarginMiner()},
            weights={"a": 1.0, "b": 0.1, "c": 3.0},
        ),
        modes=REPLICATED,
    ),
    "SelfSupervisedLoss": Case(lambda: pml.SelfSupervisedLoss(pml.NTXentLoss()), both_views, modes=ROW_WISE),
    "SelfSupervisedLoss, one way": Case(
        lambda: pml.SelfSupervisedLoss(pml.MultiSimilarityLoss(), symmetric=False), both_views, modes=ROW_WISE
    ),
    "SelfSupervisedLoss, random": Case(
        lambda: pml.SelfSupervisedLoss(pml.TripletMarginLoss(triplets_per_anchor=2)), both_views, random=True
    ),
    "SelfSupervisedLoss, a subclass": Case(Swapped, both_views, modes=REPLICATED),
}
# by how large losses are
REDUCERS: dict[str, Callable[[float], nn.Module]] = {
    "MeanReducer": lambda _: reducers.MeanReducer(),
    "SumReducer": lambda _: reducers.SumReducer(),
    "AvgNonZeroReducer": lambda _: reducers.AvgNonZeroReducer(),
    "ThresholdReducer, low": lambda size: reducers.ThresholdReducer(low=0.3 * size),
    "ThresholdReducer, high": lambda size: reducers.ThresholdReducer(high=1.0 * size),
    "ThresholdReducer, both": lambda size: reducers.ThresholdReducer(low=0.1 * size, high=1.2 * size),
    "PerAnchorReducer": lambda _: reducers.PerAnchorReducer(),
    "PerAnchorReducer, AvgNonZero": lambda _: reducers.PerAnchorReducer(reducers.AvgNonZeroReducer()),
    "PerAnchorReducer, Threshold": lambda size: reducers.PerAnchorReducer(
        reducers.ThresholdReducer(low=0.1 * size, high=1.5 * size)
    ),
    "ClassWeightedReducer": lambda _: reducers.ClassWeightedReducer(torch.linspace(0.1, 2, 7)),
    "ClassWeightedReducer, below 0": lambda _: reducers.ClassWeightedReducer(torch.linspace(-1, 2, 7)),
    "MultipleReducers": lambda _: reducers.MultipleReducers(
        {"pos_loss": reducers.SumReducer(), "neg_loss": reducers.ThresholdReducer(low=0.2)}
    ),
}
