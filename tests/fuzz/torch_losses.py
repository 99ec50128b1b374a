"""`GlobalBatchLoss` over torch.nn's losses: divisors (class weights, ignored targets, smoothing), reductions, layouts, one row, none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_ddp_losses import GlobalBatchLoss
from tests.fuzz.calls import WAYS, call_and_differentiate
from tests.fuzz.data import DTYPES, RowsCase, rows_strategy
from tests.fuzz.engine import Domain, Found, Place

NAMES = [
    "CrossEntropy",
    "NLL",
    "BCEWithLogits",
    "MSE",
    "L1",
    "SmoothL1",
    "Huber",
    "KLDiv",
    "TripletMargin",
    "CosineEmbedding",
    "MultiMargin",
]


@dataclass(frozen=True)
class Case(RowsCase):
    loss: str
    weighted: bool
    ignored: bool
    smoothing: float
    reduction: str
    mode: int
    without_graph: bool
    way: str
    dtype: str


CASES = st.builds(
    Case,
    rows=rows_strategy(),
    loss=st.sampled_from(NAMES),
    weighted=st.booleans(),
    ignored=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.2]),
    reduction=st.sampled_from(["mean", "mean", "sum"]),
    mode=st.integers(0, 2),
    without_graph=st.sampled_from([False, False, True]),
    way=st.sampled_from(WAYS),
    dtype=st.sampled_from(["float64", "float64", "float32"]),
)


def make_loss(case: Case) -> nn.Module:
    dtype = DTYPES[case.dtype]
    weight = torch.linspace(0.3, 2, case.rows.dim, dtype=dtype) if case.weighted else None
    ignore = 1 if case.ignored else -100
    how = case.reduction
    made: dict[str, Any] = {
        "CrossEntropy": lambda: nn.CrossEntropyLoss(
            weight, ignore_index=ignore, reduction=how, label_smoothing=case.smoothing
        ),
        "NLL": lambda: nn.NLLLoss(weight, ignore_index=ignore, reduction=how),
        "BCEWithLogits": lambda: nn.BCEWithLogitsLoss(pos_weight=weight, reduction=how),
        "MSE": lambda: nn.MSELoss(reduction=how),
        "L1": lambda: nn.L1Loss(reduction=how),
        "SmoothL1": lambda: nn.SmoothL1Loss(reduction=how, beta=0.5),
        "Huber": lambda: nn.HuberLoss(reduction=how, delta=0.5),
        "KLDiv": lambda: nn.KLDivLoss(reduction="batchmean" if how == "mean" else how),
        "TripletMargin": lambda: nn.TripletMarginLoss(reduction=how, swap=case.weighted),
        "CosineEmbedding": lambda: nn.CosineEmbeddingLoss(margin=0.2, reduction=how),
        "MultiMargin": lambda: nn.MultiMarginLoss(p=2, weight=weight, reduction=how),
    }
    return made[case.loss]()  # type: ignore[no-any-return]


def arguments(case: Case, x: Tensor, other: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    classes = labels % case.rows.dim
    return {
        "CrossEntropy": lambda: (x, classes),
        "NLL": lambda: (x.log_softmax(1), classes),
        "BCEWithLogits": lambda: (x, (other > 0).to(x.dtype)),
        "KLDiv": lambda: (x.log_softmax(1), other.softmax(1)),
        "TripletMargin": lambda: (x, other, other.flip(1)),
        "CosineEmbedding": lambda: (x, other, (labels % 2) * 2 - 1),
        "MultiMargin": lambda: (x, classes),
    }.get(case.loss, lambda: (x, other))()


def play(case: Case, place: Place) -> Found:
    data, loss = place.data(views=2), make_loss(case)
    trained = True
    if not place.alone:
        allowed = GlobalBatchLoss(loss).exact_modes()
        loss = GlobalBatchLoss(loss, mode=allowed[case.mode % len(allowed)])
        # a rank without rows may come with a plain torch.zeros(0, D)
        trained = not case.without_graph or case.ranks[place.rank] > 0
    x = place.leaf("x", data["view 0"], trained=trained)
    other, labels = place.own(data["view 1"]), place.own(data["labels"])

    def call(x: Tensor) -> Tensor:
        return loss(*arguments(case, x, other, labels))

    return {"value v": call_and_differentiate(case.way, call, [x])}


DOMAIN = Domain.of("torch losses", CASES, play)
