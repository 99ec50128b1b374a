"""Configurations that change what a loss is a sum of: reducers, regularisers, distances, views, tuples, users' losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from pytorch_metric_learning import distances, miners, reducers, regularizers
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses.losses import GlobalBatchMiner
from tests.losses.cases import classes, two_views, two_views_alone
from tests.losses.harness import CLASSES, DIM, Arguments, Case, Net, Rows, by_labels

Make = Callable[..., nn.Module]
ELEMENTS, ROW_WISE, REPLICATED = ("elements", "replicated"), ("rows", "replicated"), ("replicated",)

REGULARIZERS: dict[str, Make] = {
    "LpRegularizer": regularizers.LpRegularizer,
    "LpRegularizer, sum": lambda: regularizers.LpRegularizer(reducer=reducers.SumReducer()),
    "ZeroMeanRegularizer": regularizers.ZeroMeanRegularizer,
    "CenterInvariantRegularizer": regularizers.CenterInvariantRegularizer,
    "RegularFaceRegularizer": regularizers.RegularFaceRegularizer,
    "SparseCentersRegularizer": lambda: regularizers.SparseCentersRegularizer(CLASSES, 10),
}
MINERS: dict[str, Make] = {
    "AngularMiner": miners.AngularMiner,
    "BatchEasyHardMiner": miners.BatchEasyHardMiner,
    "BatchHardMiner": miners.BatchHardMiner,
    "DistanceWeightedMiner": miners.DistanceWeightedMiner,
    "EmbeddingsAlreadyPackagedAsTriplets": miners.EmbeddingsAlreadyPackagedAsTriplets,
    "HDCMiner": miners.HDCMiner,
    "MultiSimilarityMiner": miners.MultiSimilarityMiner,
    "PairMarginMiner": miners.PairMarginMiner,
    "TripletMarginMiner": miners.TripletMarginMiner,
    "UniformHistogramMiner": partial(miners.UniformHistogramMiner, num_bins=4, pos_per_bin=3, neg_per_bin=2),
}


class WholeBatch(distances.BaseDistance):
    """A user's distance that looks at the whole batch: centred on the references' mean."""

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return torch.cdist(query_emb - ref_emb.mean(0), ref_emb + query_emb.mean(0))

    def pairwise_distance(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return torch.linalg.vector_norm(query_emb - ref_emb, dim=1)


DISTANCES: dict[str, Make] = {
    "CosineSimilarity": distances.CosineSimilarity,
    "DotProductSimilarity": partial(distances.DotProductSimilarity, normalize_embeddings=False),
    "LpDistance": partial(distances.LpDistance, p=1, power=2),
    "SNRDistance": distances.SNRDistance,
    "a user's distance": WholeBatch,
}


class Tempered(nn.Module):
    """A user's loss over the batch, with a temperature that lives elsewhere and a weight of its own."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, DIM))
        self.dropout = nn.Dropout(dropout)

    def forward(self, a: Tensor, b: Tensor, scale: Tensor, *, weight: Tensor | None = None) -> Tensor:
        logits = scale.exp() * self.dropout(a * self.weight) @ b.T
        each = nn.functional.cross_entropy(logits, torch.arange(len(a)), reduction="none")
        return each.mean() if weight is None else (each * weight).sum() / weight.sum()


def tempered(net: Net, rows: Rows) -> Arguments:
    return (net(rows["features"]), net(rows["views"]), net.logit_scale), {"weight": rows["bits"][:, 0] + 0.1}


def transposed(net: Net, rows: Rows) -> Arguments:
    return (net(rows["features"]).T, net(rows["views"]).T, net.logit_scale, torch.linspace(0, 1, DIM).double()), {}


class Columns(Tempered):
    """Samples are columns; the last argument is no batch."""

    def forward(self, a: Tensor, b: Tensor, scale: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(a.T + shift, b.T, scale)


def in_lists(net: Net, rows: Rows) -> Arguments:
    return ([net(rows["features"]), net(rows["views"])], {"scale": (net.logit_scale,)}), {}


class Lists(Tempered):
    """Takes its batches as lists, as losses of self-supervised learning do."""

    def forward(self, views: list[Tensor], more: dict[str, tuple[Tensor]]) -> Tensor:  # type: ignore[override]
        return super().forward(*views, *more["scale"])


def same_labels(net: Net, rows: Rows) -> Arguments:
    """The references' labels are the very tensor of the anchors'."""
    return (net(rows["features"]), rows["labels"]), {"ref_emb": net(rows["views"]), "ref_labels": rows["labels"]}


def other_labels(net: Net, rows: Rows) -> Arguments:
    (embeddings, labels), more = same_labels(net, rows)
    return (embeddings, labels), {**more, "ref_labels": (labels + (rows["features"][:, 0] > 0)) % CLASSES}


def with_tuples(miner: Make, net: Net, rows: Rows) -> Arguments:
    """Each rank mines its own rows; the loss counts them in the global batch."""
    (embeddings, labels), _ = by_labels(net, rows)
    empty = tuple(torch.zeros(0, dtype=torch.int64) for _ in miner()(*by_labels(net, pairs_of(rows))[0]))
    return (embeddings, labels, miner()(embeddings, labels) if len(labels) > 3 else empty), {}


def pairs_of(rows: Rows) -> Rows:
    """Some batch that any miner takes; only the form of its answer is used."""
    return {"features": torch.linspace(0, 1, 60).double().view(12, 5), "labels": torch.arange(12) % 3}


def with_tuples_alone(miner: Make, net: Net, rows: Rows, sizes: list[int]) -> Arguments:
    parts = []
    for stop, size in zip(accumulate(sizes), sizes, strict=True):
        own = {name: tensor[stop - size : stop] for name, tensor in rows.items()}
        parts.append([index + stop - size for index in with_tuples(miner, net, own)[0][2]])
    return (*by_labels(net, rows)[0], tuple(torch.cat(column) for column in zip(*parts, strict=True))), {}


def with_global_tuples(miner: Make, net: Net, rows: Rows) -> Arguments:
    (embeddings, labels), _ = by_labels(net, rows)
    return (embeddings, labels, GlobalBatchMiner(miner())(embeddings, labels)), {}


def with_references(net: Net, rows: Rows) -> Arguments:
    """Global tuples whose partners are references."""
    (embeddings, labels), more = other_labels(net, rows)
    tuples = GlobalBatchMiner(miners.PairMarginMiner())(embeddings, labels, **more)
    return (embeddings, labels, tuples), more


def against_references(net: Net, rows: Rows) -> Arguments:
    """Local tuples whose partners are references: each row with the reference in its place, or with the first."""
    (embeddings, labels), more = other_labels(net, rows)
    places = torch.arange(len(labels))
    return (embeddings, labels, (places, places, places[1:], places[1:] * 0)), more


def against_references_alone(net: Net, rows: Rows, sizes: list[int]) -> Arguments:
    (embeddings, labels), more = other_labels(net, rows)
    firsts = torch.cat([torch.full((size,), stop - size) for stop, size in zip(accumulate(sizes), sizes, strict=True)])
    places = torch.arange(len(labels))
    later = places[places > firsts]
    return (embeddings, labels, (places, places, later, firsts[places > firsts])), more


def mined(miner: str, loss: Make, modes: tuple[str, ...]) -> dict[str, Case]:
    make = MINERS[miner]
    local = Case(loss, partial(with_tuples, make), partial(with_tuples_alone, make), modes)
    # random; or: a slice may cut a package
    global_only = ("DistanceWeightedMiner", "UniformHistogramMiner", "EmbeddingsAlreadyPackagedAsTriplets")
    name = f"{miner} for {type(loss()).__name__}"
    return {name: Case(loss, partial(with_global_tuples, make), None, modes)} | (
        {} if miner in global_only else {f"{name}, local": local}
    )


def regularised(name: str, make: Make) -> dict[str, Case]:
    options: dict[str, Any] = {"num_classes": CLASSES, "embedding_size": DIM}
    if name == "SparseCentersRegularizer":
        return {
            f"SoftTripleLoss, weights {name}": Case(lambda: pml.SoftTripleLoss(weight_regularizer=make(), **options))
        }
    return {
        f"ArcFaceLoss, weights {name}": Case(lambda: pml.ArcFaceLoss(weight_regularizer=make(), **options)),
        f"ProxyAnchorLoss, weights {name}": Case(
            lambda: pml.ProxyAnchorLoss(weight_regularizer=make(), weight_reg_weight=0.3, **options)
        ),
    }


def embedding_regularised(name: str, make: Make) -> dict[str, Case]:
    return {
        f"ArcFaceLoss, embeddings {name}": Case(lambda: pml.ArcFaceLoss(embedding_regularizer=make(), **classes)),
        f"SupConLoss, embeddings {name}": Case(
            lambda: pml.SupConLoss(embedding_regularizer=make(), embedding_reg_weight=0.2)
        ),
    }


def with_distance(name: str, make: Make) -> dict[str, Case]:
    modes = REPLICATED if name == "a user's distance" else ROW_WISE
    sums = {"TripletMarginLoss": pml.TripletMarginLoss, "ContrastiveLoss": pml.ContrastiveLoss}
    if name in ("CosineSimilarity", "DotProductSimilarity"):
        sums["ContrastiveLoss"] = partial(pml.ContrastiveLoss, pos_margin=0.9, neg_margin=0.1)
    cases = {f"{loss}, {name}": Case(lambda cls=cls: cls(distance=make()), modes=modes) for loss, cls in sums.items()}
    if name in ("LpDistance", "a user's distance"):
        cases[f"NTXentLoss, {name}"] = Case(lambda: pml.NTXentLoss(distance=make()), modes=modes)
    return cases


VARIANTS: dict[str, Case] = {
    "MarginLoss, DivisorReducer": Case(
        lambda: pml.MarginLoss(learn_beta=True, nu=0.2, num_classes=CLASSES, reducer=reducers.DivisorReducer()),
        modes=ROW_WISE,
    ),
    **{k: c for name, make in REGULARIZERS.items() for k, c in regularised(name, make).items()},
    **{k: c for name in list(REGULARIZERS)[:3] for k, c in embedding_regularised(name, REGULARIZERS[name]).items()},
    **{k: c for name, make in DISTANCES.items() for k, c in with_distance(name, make).items()},
    **{
        f"{cls.__name__}, two views": Case(cls, two_views, two_views_alone, ROW_WISE)
        for cls in (pml.NTXentLoss, pml.SupConLoss, pml.TripletMarginLoss, pml.MultiSimilarityLoss)
    },
    "NTXentLoss, references share the labels": Case(pml.NTXentLoss, same_labels, modes=ROW_WISE),
    "ContrastiveLoss, references share the labels": Case(pml.ContrastiveLoss, same_labels, modes=ROW_WISE),
    "TripletMarginLoss, references of their own": Case(pml.TripletMarginLoss, other_labels, modes=ROW_WISE),
    "NCALoss, references of their own": Case(pml.NCALoss, other_labels, modes=REPLICATED),
    **{
        k: case
        for name in MINERS
        for loss, modes in [
            (pml.ContrastiveLoss, ROW_WISE),
            (pml.TripletMarginLoss, ROW_WISE),
            (partial(pml.ArcFaceLoss, **classes), ELEMENTS),
            (pml.LiftedStructureLoss, REPLICATED),
        ]
        for k, case in mined(name, loss, modes).items()
    },
    "ContrastiveLoss, mined references": Case(pml.ContrastiveLoss, with_references, modes=ROW_WISE),
    "ContrastiveLoss, tuples of references": Case(
        pml.ContrastiveLoss, against_references, against_references_alone, ROW_WISE
    ),
    "a user's loss": Case(Tempered, tempered, modes=(*REPLICATED, "rows")),
    "a user's loss, dropout": Case(partial(Tempered, 0.4), tempered, modes=(*REPLICATED, "rows"), random=True),
    "a user's loss, samples are columns": Case(
        Columns, transposed, modes=(*REPLICATED, "rows"), options={"batch_dims": {0: 1, 1: 1, 3: None}}
    ),
    "a user's loss, batches in lists": Case(Lists, in_lists, modes=(*REPLICATED, "rows")),
    "a user's loss, gradients summed": Case(Tempered, tempered, modes=REPLICATED, options={"backward": "sum"}),
}
