"""Every loss of torch.nn, with the divisors that a mean of means gets wrong: class weights, ignored targets, smoothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.losses.harness import DIM, Arguments, Case, Net, Rows

ALIASES = {"NLLLoss2d": "NLLLoss under a deprecated name"}
ELEMENTS, REPLICATED = ("elements", "replicated", "rows"), ("replicated", "rows")
Give = Callable[[Net, Rows], Arguments]


def against(target: Callable[[Rows], Tensor], transform: Callable[[Tensor], Tensor] = lambda e: e) -> Give:
    """`loss(transform(embeddings), target)`."""
    return lambda net, rows: ((transform(net(rows["features"])), target(rows)), {})


def labels(rows: Rows) -> Tensor:
    """Class indices; 1 is to be ignored: how many count differs by rank."""
    return rows["labels"]


def pixels(net: Net, rows: Rows) -> Arguments:
    """A segmentation: (n, C, 2) scores and (n, 2) targets."""
    scores = torch.stack([net(rows["features"]), net(rows["views"])], 2)
    return (scores, torch.stack([rows["labels"], rows["labels"] * 3 % 5], 1)), {}


def three(net: Net, rows: Rows) -> Arguments:
    return (net(rows["features"]), net(rows["views"]), net(rows["third"])), {}


def two_and_sign(net: Net, rows: Rows) -> Arguments:
    return (net(rows["features"]), net(rows["views"]), rows["signs"]), {}


def ranking(net: Net, rows: Rows) -> Arguments:
    return (net(rows["features"])[:, 0], net(rows["views"])[:, 0], rows["signs"]), {}


def variance(net: Net, rows: Rows) -> Arguments:
    return (net(rows["features"]), rows["targets"], net(rows["views"]).exp()), {}


def speech(net: Net, rows: Rows) -> Arguments:
    """(T, n, C) log-probabilities: the batch is dimension 1."""
    frames = torch.stack([net(rows[name]) for name in ("features", "views", "third")] * 2).log_softmax(2)
    count = rows["labels"].shape[0]
    lengths = torch.full((count,), 6), torch.full((count,), 2) - (rows["labels"] == 0).long()
    return (frames, torch.stack([rows["labels"] + 1, rows["labels"] % 2 + 1], 1), *lengths), {}


def probabilities(rows: Rows) -> Tensor:
    return rows["targets"].softmax(1)


def weights() -> Tensor:
    return torch.linspace(0.2, 3, DIM, dtype=torch.float64)


def by_keyword(net: Net, rows: Rows) -> Arguments:
    return (), {"input": net(rows["features"]), "target": rows["labels"]}


def several_labels(rows: Rows) -> Tensor:
    """For multi-label margin: class indices, then -1."""
    end = torch.full_like(rows["labels"], -1)
    return torch.stack([rows["labels"], (rows["labels"] + 1) % DIM, *[end] * (DIM - 2)], 1)


def case(cls: type[nn.Module], give: Give, modes: tuple[str, ...] | None = ELEMENTS, **options: Any) -> Case:
    return Case(partial(cls, **options), give, modes=modes)


TORCH: dict[str, Case] = {
    "nn.L1Loss": case(nn.L1Loss, against(lambda r: r["targets"])),
    "nn.MSELoss": case(nn.MSELoss, against(lambda r: r["targets"])),
    "nn.MSELoss, sum": case(nn.MSELoss, against(lambda r: r["targets"]), reduction="sum"),
    "nn.SmoothL1Loss": case(nn.SmoothL1Loss, against(lambda r: r["targets"])),
    "nn.HuberLoss": case(nn.HuberLoss, against(lambda r: r["targets"])),
    "nn.PoissonNLLLoss": case(nn.PoissonNLLLoss, against(lambda r: r["bits"]), full=True),
    "nn.GaussianNLLLoss": case(nn.GaussianNLLLoss, variance),
    "nn.KLDivLoss": case(nn.KLDivLoss, against(probabilities, lambda e: e.log_softmax(1))),
    "nn.KLDivLoss, batchmean": case(
        nn.KLDivLoss, against(probabilities, lambda e: e.log_softmax(1)), reduction="batchmean"
    ),
    "nn.KLDivLoss, sum": case(nn.KLDivLoss, against(probabilities, lambda e: e.log_softmax(1)), reduction="sum"),
    "nn.BCELoss": case(nn.BCELoss, against(lambda r: r["bits"], torch.sigmoid)),
    "nn.BCEWithLogitsLoss": case(nn.BCEWithLogitsLoss, against(lambda r: r["bits"]), weight=weights()),
    "nn.BCEWithLogitsLoss, positives": case(nn.BCEWithLogitsLoss, against(lambda r: r["bits"]), pos_weight=weights()),
    "nn.HingeEmbeddingLoss": case(nn.HingeEmbeddingLoss, against(lambda r: r["bits"] * 2 - 1)),
    "nn.MultiLabelMarginLoss": case(nn.MultiLabelMarginLoss, against(several_labels)),
    "nn.MultiLabelSoftMarginLoss": case(nn.MultiLabelSoftMarginLoss, against(lambda r: r["bits"]), weight=weights()),
    "nn.MultiMarginLoss": case(nn.MultiMarginLoss, against(labels), weight=weights()),
    "nn.SoftMarginLoss": case(nn.SoftMarginLoss, against(lambda r: r["bits"] * 2 - 1)),
    "nn.CosineEmbeddingLoss": case(nn.CosineEmbeddingLoss, two_and_sign, margin=0.1),
    "nn.MarginRankingLoss": case(nn.MarginRankingLoss, ranking, margin=0.3),
    "nn.TripletMarginLoss": case(nn.TripletMarginLoss, three, swap=True),
    "nn.TripletMarginWithDistanceLoss": case(
        nn.TripletMarginWithDistanceLoss, three, distance_function=lambda a, b: 1 - F.cosine_similarity(a, b)
    ),
    "nn.NLLLoss": case(nn.NLLLoss, against(labels, lambda e: e.log_softmax(1)), weight=weights(), ignore_index=1),
    "nn.NLLLoss, sum": case(nn.NLLLoss, against(labels, lambda e: e.log_softmax(1)), weight=weights(), reduction="sum"),
    "nn.CrossEntropyLoss": case(nn.CrossEntropyLoss, against(labels)),
    "nn.CrossEntropyLoss, weighted": case(nn.CrossEntropyLoss, against(labels), weight=weights()),
    "nn.CrossEntropyLoss, ignored": case(nn.CrossEntropyLoss, against(labels), ignore_index=1),
    "nn.CrossEntropyLoss, smoothed": case(nn.CrossEntropyLoss, against(labels), label_smoothing=0.1),
    "nn.CrossEntropyLoss, all three": case(
        nn.CrossEntropyLoss, against(labels), weight=weights(), ignore_index=2, label_smoothing=0.2
    ),
    "nn.CrossEntropyLoss, by keyword": case(nn.CrossEntropyLoss, by_keyword, weight=weights(), ignore_index=0),
    "nn.CrossEntropyLoss, sum": case(nn.CrossEntropyLoss, against(labels), weight=weights(), reduction="sum"),
    "nn.CrossEntropyLoss, probabilities": case(
        nn.CrossEntropyLoss, against(probabilities), weight=weights(), label_smoothing=0.1
    ),
    "nn.CrossEntropyLoss, pixels": case(nn.CrossEntropyLoss, pixels, weight=weights(), ignore_index=3),
    "nn.CTCLoss": Case(nn.CTCLoss, speech, modes=REPLICATED, options={"batch_dims": {0: 1}}),
}
# of torch 2.13
if hasattr(nn, "LinearCrossEntropyLoss"):
    TORCH |= {
        "nn.LinearCrossEntropyLoss": case(
            nn.LinearCrossEntropyLoss, against(labels), None, in_features=DIM, num_classes=5, bias=True
        ),
        "nn.LinearCrossEntropyLoss, weighted": case(
            nn.LinearCrossEntropyLoss,
            against(labels),
            None,
            in_features=DIM,
            num_classes=5,
            weight=weights()[:5],
            ignore_index=1,
            label_smoothing=0.1,
        ),
    }
