"""`GlobalBatchLoss(SelfSupervisedLoss(x))`: every loss that can be inside, both ways and one way, one reference view or two.

The truth is pytorch-metric-learning's own class in one process, on the rows of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from pytorch_metric_learning.losses import SelfSupervisedLoss
from torch import Tensor, nn

from tests.fuzz import pml_losses
from tests.fuzz.calls import call_and_differentiate
from tests.fuzz.data import DTYPES, cut, global_rows, own
from tests.fuzz.engine import Domain, Found, NotDefined, leaf

__all__ = ["DOMAIN"]


@dataclass(frozen=True)
class Case(pml_losses.Case):
    """Two views of each sample.

    Attributes:
        symmetric: Whether the rows of both views are anchors.
        others: Views that the first one is compared with, one by one.
        frozen: The view that gets no gradient; -1: all get one.
    """

    symmetric: bool
    others: int
    frozen: int


@st.composite
def cases(draw: Any) -> Case:
    name = draw(st.sampled_from(SelfSupervisedLoss.supported_losses()))
    # beyond 25 rows `torch.cdist` is a matrix product, where equal rows are 1e-8 apart
    fields = pml_losses.draw_fields(draw, name, most=3)
    fields.update(miner="", references="none", symmetric=draw(st.sampled_from([True, True, False])))
    if fields["reducer"] == "ClassWeighted":  # identities are no classes that could have weights
        fields["reducer"] = "Mean"
    return Case(**fields, others=draw(st.sampled_from([1, 1, 1, 2])), frozen=draw(st.sampled_from([-1, -1, 0, 1])))


def evaluate(case: Case, loss: nn.Module, encoder: nn.Module, views: list[Tensor]) -> Tensor:
    def call(first: Tensor, *others: Tensor) -> Tensor:
        rows = encoder(first)
        values = [loss(rows, encoder(other)) for other in others]
        return torch.stack(values).sum()

    return call_and_differentiate(case.way, call, views)


def grad_of(view: Tensor) -> Tensor:
    return torch.zeros_like(view) if view.grad is None else view.grad


def alone(case: Case) -> dict[str, Any]:
    inside, encoder = pml_losses.make_loss(case), pml_losses.make_encoder(case)
    loss = SelfSupervisedLoss(inside, symmetric=case.symmetric)
    data = global_rows(case.rows, DTYPES[case.dtype], views=1 + case.others)
    views = [leaf(data[f"view {v}"]).requires_grad_(v != case.frozen) for v in range(1 + case.others)]
    try:
        value = evaluate(case, loss, encoder, views)
    except Exception as error:
        raise NotDefined from error
    found: dict[str, Any] = dict(pml_losses.results(value, encoder, inside))
    found["value v"] = found.pop("value")
    if any(not tensor.isfinite().all() for tensor in (*found.values(), *map(grad_of, views))):
        raise NotDefined
    for index, view in enumerate(views):
        found[f"rank view {index}"] = cut(case.rows, grad_of(view))
    return found


def on_rank(case: Case) -> Found:
    rank, world = dist.get_rank(), dist.get_world_size()
    inside, encoder = pml_losses.make_loss(case), pml_losses.make_encoder(case, case.rows.layout)
    loss = pml_losses.make_global(case, SelfSupervisedLoss(inside, symmetric=case.symmetric))
    data = global_rows(case.rows, DTYPES[case.dtype], views=1 + case.others)
    views = [own(case.rows, data[f"view {v}"], rank).requires_grad_(v != case.frozen) for v in range(1 + case.others)]
    value = evaluate(case, loss, encoder, views)
    found = pml_losses.results(value, encoder, inside)
    found["value v"] = found.pop("value")
    for index, view in enumerate(views):
        found[f"rank view {index}"] = grad_of(view) / world
    return found


DOMAIN = Domain("two views", cases(), on_rank, alone)
