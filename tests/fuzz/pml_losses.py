"""`GlobalBatchLoss` over pytorch-metric-learning: every loss x reducer x distance x regulariser x miner x option x way of calling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from pytorch_metric_learning import distances, miners, reducers, regularizers
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses import GlobalBatchLoss, GlobalBatchMiner
from tests.fuzz import forms
from tests.fuzz.calls import WAYS, call_and_differentiate
from tests.fuzz.data import DTYPES, RowsCase, lay_out, options, rows_strategy
from tests.fuzz.engine import Domain, Found, NotDefined, Place, zero_or

# options by loss; None: the loss's own default
LOSSES: dict[str, dict[str, list[Any]]] = {
    "ArcFaceLoss": {"margin": [None, 5.0, 80.0], "scale": [None, 1.0, 16.0]},
    "CosFaceLoss": {"margin": [None, 0.1], "scale": [None, 2.0]},
    "LargeMarginSoftmaxLoss": {"margin": [None, 2, 3], "scale": [None, 2]},
    "NormalizedSoftmaxLoss": {"temperature": [None, 0.5]},
    "ProxyNCALoss": {"softmax_scale": [None, 4]},
    "SoftTripleLoss": {"centers_per_class": [1, 2, 3], "la": [None, 2.0], "gamma": [None, 1.0], "margin": [None, 0.3]},
    "SphereFaceLoss": {"margin": [None, 2], "scale": [None, 3]},
    "SubCenterArcFaceLoss": {"margin": [None, 10.0], "scale": [None, 4.0], "sub_centers": [1, 2, 3]},
    "AngularLoss": {"alpha": [None, 30]},
    "CircleLoss": {"m": [None, 0.1], "gamma": [None, 4]},
    "ContrastiveLoss": {"pos_margin": [None, 0.2, 0.9], "neg_margin": [None, 0.1, 2.0]},
    "GeneralizedLiftedStructureLoss": {"neg_margin": [None, 0.3], "pos_margin": [None, 0.2]},
    "MarginLoss": {"margin": [None, 1.0], "nu": [None, 0.2], "beta": [None, 0.4], "learn_beta": [None, True]},
    "MultiSimilarityLoss": {"alpha": [None, 1], "beta": [None, 5], "base": [None, 0.1]},
    "NTXentLoss": {"temperature": [None, 0.5, 1.0]},
    "SignalToNoiseRatioContrastiveLoss": {"pos_margin": [None, 0.3], "neg_margin": [None, 3.0]},
    "SupConLoss": {"temperature": [None, 0.5]},
    "TripletMarginLoss": {"margin": [None, 1.0], "swap": [None, True], "smooth_loss": [None, True]},
    "TupletMarginLoss": {"margin": [None, 20.0], "scale": [None, 4]},
    "DynamicSoftMarginLoss": {},
    "FastAPLoss": {"num_bins": [4, 10]},
    "HistogramLoss": {"n_bins": [5, 20]},
    "InstanceLoss": {"gamma": [None, 2]},
    "IntraPairVarianceLoss": {},
    "LiftedStructureLoss": {"neg_margin": [None, 0.3]},
    "NCALoss": {"softmax_scale": [None, 3]},
    "NPairsLoss": {},
    "P2SGradLoss": {},
    "PNPLoss": {"variant": ["Ds", "Dq", "Iu", "Ib", "O"]},
    "ProxyAnchorLoss": {"margin": [None, 0.5], "alpha": [None, 4]},
    "RankedListLoss": {"margin": [0.4, 1.0], "Tn": [1, 5]},
    "SmoothAPLoss": {"temperature": [0.1]},
    "ThresholdConsistentMarginLoss": {},
    "VICRegLoss": {},
}
WITH_CLASSES = {
    "ArcFaceLoss",
    "CosFaceLoss",
    "LargeMarginSoftmaxLoss",
    "NormalizedSoftmaxLoss",
    "P2SGradLoss",
    "ProxyAnchorLoss",
    "ProxyNCALoss",
    "SoftTripleLoss",
    "SphereFaceLoss",
    "SubCenterArcFaceLoss",
}
# what pytorch-metric-learning 2.9 takes, as measured: other combinations are errors in one process
COSINE_ONLY = {
    "ArcFaceLoss",
    "CircleLoss",
    "CosFaceLoss",
    "HistogramLoss",
    "InstanceLoss",
    "LargeMarginSoftmaxLoss",
    "PNPLoss",
    "SmoothAPLoss",
    "SphereFaceLoss",
    "SubCenterArcFaceLoss",
    "ThresholdConsistentMarginLoss",
    "TupletMarginLoss",
}
OWN_DISTANCE = {
    "AngularLoss",
    "DynamicSoftMarginLoss",
    "FastAPLoss",
    "SignalToNoiseRatioContrastiveLoss",
    "SoftTripleLoss",
    "VICRegLoss",
}
NO_REFERENCES = WITH_CLASSES | {
    "DynamicSoftMarginLoss",
    "FastAPLoss",
    "HistogramLoss",
    "InstanceLoss",
    "NPairsLoss",
    "PNPLoss",
    "RankedListLoss",
    "SmoothAPLoss",
}
NO_TUPLES = {"InstanceLoss", "P2SGradLoss", "PNPLoss", "RankedListLoss", "VICRegLoss"}
NOT_PER_ANCHOR = {"AngularLoss", "LiftedStructureLoss", "MarginLoss", "TripletMarginLoss", "TupletMarginLoss"}
REDUCERS = ["", "", "", "Mean", "Sum", "AvgNonZero", "Threshold", "PerAnchor", "ClassWeighted", "Divisor"]
DISTANCES = ["", "", "", "Cosine", "Dot", "L2", "L1", "squared", "SNR"]
MINERS: dict[str, Callable[[], Any]] = {
    "MultiSimilarity": miners.MultiSimilarityMiner,
    "BatchHard": miners.BatchHardMiner,
    "PairMargin": miners.PairMarginMiner,
    "TripletMargin": miners.TripletMarginMiner,
    "TripletMargin, semihard": partial(miners.TripletMarginMiner, type_of_triplets="semihard"),
    "Angular": miners.AngularMiner,
    "BatchEasyHard": miners.BatchEasyHardMiner,
    "BatchEasyHard, semihard": partial(miners.BatchEasyHardMiner, neg_strategy="semihard"),
    "HDC": miners.HDCMiner,
}
REGULARIZERS = ["", "", "", "", "Lp", "ZeroMean", "CenterInvariant"]
WEIGHT_REGULARIZERS = ["", "", "", "Lp", "ZeroMean", "CenterInvariant", "RegularFace"]
# losses in tiles, by the distances that are products of rows; "": the loss's own
PRODUCTS = {
    "ContrastiveLoss": ("Cosine", "Dot"),
    "MultiSimilarityLoss": ("", "Cosine", "Dot"),
    "NTXentLoss": ("", "Cosine", "Dot"),
    "SupConLoss": ("", "Cosine", "Dot"),
    "TripletMarginLoss": ("Cosine", "Dot"),
}
CHOICES: dict[str, list[Any]] = {
    "reducer": REDUCERS,
    "distance": DISTANCES,
    "miner": ["", "", "", *MINERS],
    "regularizer": REGULARIZERS,
    "weight_regularizer": WEIGHT_REGULARIZERS,
    "mode": [0, 0, 1, 2],
    "tile_bytes": [None, None, 300, 1000],
    "references": ["none", "none", "none", "same labels", "other labels"],
    "way": WAYS,
    "dtype": ["float64", "float64", "float64", "float32"],
}


@dataclass(frozen=True)
class Case(RowsCase):
    loss: str
    loss_options: tuple[tuple[str, Any], ...]
    reducer: str
    distance: str
    miner: str
    regularizer: str
    weight_regularizer: str
    mode: int
    tile_bytes: int | None
    references: str
    way: str
    dtype: str
    products: str = field(default="auto", kw_only=True)


def draw_fields(draw: Any, name: str, most: int = 6) -> dict[str, Any]:
    """Draw a case of one loss, as far as pytorch-metric-learning takes it, with so many rows of a rank at most."""
    pick = {key: draw(st.sampled_from(values)) for key, values in CHOICES.items()}
    if name in OWN_DISTANCE or (name in COSINE_ONLY and pick["distance"] != "Cosine"):
        pick["distance"] = ""
    if name in NO_REFERENCES:
        pick["references"] = "none"
    if name in NO_TUPLES:
        pick["miner"] = ""
    if name not in WITH_CLASSES:
        pick["weight_regularizer"] = ""
    if (name in NOT_PER_ANCHOR and pick["reducer"] == "PerAnchor") or (
        name != "MarginLoss" and pick["reducer"] == "Divisor"
    ):
        pick["reducer"] = "AvgNonZero"
    if name == "VICRegLoss":
        pick["regularizer"], pick["reducer"] = "", ""
    if pick["distance"] in PRODUCTS.get(name, ()):
        pick.update(forms.draw_form(draw))
    rows = draw(rows_strategy(most))
    if name == "TupletMarginLoss":  # the arc cosine of 1 has no digits: equal rows are off by 1e-8 in one process, too
        rows = replace(rows, duplicates=0, layout="plain" if rows.layout == "expanded" else rows.layout)
    return {"rows": rows, "loss": name, "loss_options": tuple(sorted(options(draw, LOSSES[name]).items())), **pick}


@st.composite
def cases(draw: Any) -> Case:
    return Case(**draw_fields(draw, draw(st.sampled_from(sorted(LOSSES)))))


def make_distance(name: str) -> Any:
    return {
        "Cosine": distances.CosineSimilarity,
        "Dot": lambda: distances.DotProductSimilarity(normalize_embeddings=False),
        "L2": lambda: distances.LpDistance(normalize_embeddings=False),
        "L1": lambda: distances.LpDistance(p=1),
        "squared": lambda: distances.LpDistance(power=2),
        "SNR": distances.SNRDistance,
    }[name]()


def make_reducer(name: str, classes: int, dtype: torch.dtype) -> Any:
    return {
        "Mean": reducers.MeanReducer,
        "Sum": reducers.SumReducer,
        "AvgNonZero": reducers.AvgNonZeroReducer,
        "Threshold": lambda: reducers.ThresholdReducer(low=0.1, high=5.0),
        "PerAnchor": reducers.PerAnchorReducer,
        "ClassWeighted": lambda: reducers.ClassWeightedReducer(torch.linspace(0.5, 2.0, classes, dtype=dtype)),
        "Divisor": reducers.DivisorReducer,
    }[name]()


def build(name: str, dtype: str, options: tuple[tuple[str, Any], ...], **given: Any) -> nn.Module:
    """A plain loss, the same in every process; `NotDefined` where it refuses its own options."""
    torch.manual_seed(3)
    try:
        return getattr(pml, name)(**dict(options), **given).to(DTYPES[dtype])  # type: ignore[no-any-return]
    except (TypeError, AssertionError, ValueError, NotImplementedError) as error:
        raise NotDefined from error


def parts_of(case: Any, **kinds: str) -> dict[str, Any]:
    """Reducer, distance, and regularisers by name, as far as a case has them."""
    found = {name: getattr(regularizers, f"{kind}Regularizer")() for name, kind in kinds.items() if kind}
    if case.reducer:
        found["reducer"] = make_reducer(case.reducer, case.rows.classes, DTYPES[case.dtype])
    return found | ({"distance": make_distance(case.distance)} if case.distance else {})


def make_loss(case: Case) -> nn.Module:
    given = parts_of(case, embedding_regularizer=case.regularizer, weight_regularizer=case.weight_regularizer)
    if case.loss in WITH_CLASSES:
        width = "descriptors_dim" if case.loss == "P2SGradLoss" else "embedding_size"
        given |= {"num_classes": case.rows.classes, width: case.rows.dim}
    return build(case.loss, case.dtype, case.loss_options, **given)


class Encoder(nn.Module):
    """Scales and shifts each number by itself: equal rows stay equal to the last bit, on whatever rank they are."""

    def __init__(self, dim: int, layout: str, *, rounds: bool = False) -> None:
        super().__init__()
        self.layout, self.rounds = layout, rounds
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, dim))
        self.bias = nn.Parameter(torch.linspace(-0.2, 0.3, dim))

    def forward(self, x: Tensor) -> Tensor:
        rows = x * self.weight + self.bias
        return lay_out(forms.rounded(rows) if self.rounds else rows, self.layout)


def make_encoder(case: Case, place: Place) -> nn.Module:
    layout = "plain" if place.alone else case.rows.layout
    return Encoder(case.rows.dim, layout, rounds=forms.rounds_rows(case)).to(DTYPES[case.dtype])


def reference_labels(case: Case, labels: Tensor) -> Tensor:
    return labels if case.references == "same labels" else (labels * 2 + 1) % case.rows.classes


def call(case: Case, loss: Any, miner: Any, encoder: nn.Module, views: list[Tensor], labels: Tensor) -> Tensor:
    """One evaluation; with references every label is given, as pytorch-metric-learning asks."""
    embeddings = encoder(views[0])
    more: dict[str, Tensor] = {}
    if case.loss == "VICRegLoss":
        return loss(embeddings, ref_emb=encoder(views[1]))  # type: ignore[no-any-return]
    if case.references != "none":
        more = {"ref_emb": encoder(views[1]), "ref_labels": reference_labels(case, labels)}
    tuples = miner(embeddings, labels, **more) if miner is not None else None
    return loss(embeddings, labels, tuples, **more)  # type: ignore[no-any-return]


def results(value: Tensor, encoder: nn.Module, loss: nn.Module) -> Found:
    found = {"value v": value.detach()}
    found |= {f"encoder {name}": zero_or(parameter) for name, parameter in encoder.named_parameters()}
    return found | {f"loss {name}": zero_or(parameter) for name, parameter in loss.named_parameters()}


def make_global(case: Case, plain: nn.Module) -> GlobalBatchLoss:
    """The drawn mode and tiles."""
    allowed = GlobalBatchLoss(plain).exact_modes()
    mode = allowed[case.mode % len(allowed)]
    if mode != "rows":
        return GlobalBatchLoss(plain, mode=mode)
    return GlobalBatchLoss(plain, mode=mode, tile_bytes=case.tile_bytes, products=case.products)


def play(case: Case, place: Place) -> Found:
    """The drawn way of calling; the gradient of all of it lies in the leaves afterwards."""
    plain, encoder = make_loss(case), make_encoder(case, place)
    miner = MINERS[case.miner]() if case.miner else None
    loss = plain if place.alone else make_global(case, plain)
    if miner is not None and not place.alone:
        miner = GlobalBatchMiner(miner)
    data = place.data(views=2)
    labels = place.own(data["labels"])
    views = [place.leaf(f"view {view}", data[f"view {view}"]) for view in range(2)]

    def once(*leaves: Tensor) -> Tensor:
        return call(case, loss, miner, encoder, list(leaves), labels)

    value = call_and_differentiate(case.way, once, views)
    if value.ndim:
        raise NotDefined
    return results(value, encoder, plain)


DOMAIN = Domain.of("pml losses", cases(), play)
