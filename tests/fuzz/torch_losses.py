"""`GlobalBatchLoss` over torch.nn's losses: divisors (class weights, ignored targets, smoothing), reductions, layouts, one row, none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_ddp_losses import GlobalBatchLoss
from tests.fuzz.calls import WAYS, call_and_differentiate
from tests.fuzz.data import DTYPES, Rows, cut, global_rows, own, rows_strategy
from tests.fuzz.engine import Domain, Found, NotDefined, leaf

__all__ = ["DOMAIN"]

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
class Case:
    rows: Rows
    loss: str
    weighted: bool
    ignored: bool
    smoothing: float
    reduction: str
    mode: int
    without_graph: bool
    way: str
    dtype: str

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.rows.ranks


@st.composite
def cases(draw: Any) -> Case:
    return Case(
        rows=draw(rows_strategy()),
        loss=draw(st.sampled_from(NAMES)),
        weighted=draw(st.booleans()),
        ignored=draw(st.booleans()),
        smoothing=draw(st.sampled_from([0.0, 0.2])),
        reduction=draw(st.sampled_from(["mean", "mean", "sum"])),
        mode=draw(st.integers(0, 2)),
        without_graph=draw(st.sampled_from([False, False, True])),
        way=draw(st.sampled_from(WAYS)),
        dtype=draw(st.sampled_from(["float64", "float64", "float32"])),
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


def evaluate(case: Case, loss: nn.Module, x: Tensor, other: Tensor, labels: Tensor) -> Tensor:
    def call(x: Tensor) -> Tensor:
        value: Tensor = loss(*arguments(case, x, other, labels))
        return value

    return call_and_differentiate(case.way, call, [x])


def alone(case: Case) -> dict[str, Any]:
    data = global_rows(case.rows, DTYPES[case.dtype], views=2)
    x = leaf(data["view 0"])
    value = evaluate(case, make_loss(case), x, data["view 1"], data["labels"])
    if not value.isfinite() or not x.grad.isfinite().all():
        raise NotDefined
    return {"value v": value, "rank x": cut(case.rows, x.grad)}


def on_rank(case: Case) -> Found:
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = make_loss(case)
    allowed = GlobalBatchLoss(plain).exact_modes()
    loss = GlobalBatchLoss(plain, mode=allowed[case.mode % len(allowed)])
    data = global_rows(case.rows, DTYPES[case.dtype], views=2)
    x, other = (own(case.rows, data[f"view {view}"], rank) for view in range(2))
    if not (
        case.without_graph and case.ranks[rank] == 0
    ):  # a rank without rows may come with a plain torch.zeros(0, D)
        x.requires_grad_()
    value = evaluate(case, loss, x, other, own(case.rows, data["labels"], rank))
    return {"value v": value, "rank x": torch.zeros_like(x) if x.grad is None else x.grad / world}


DOMAIN = Domain("torch losses", cases(), on_rank, alone)
