"""`GlobalBatchLoss(SelfSupervisedLoss(x))`: every loss that can be inside, both ways and one way, one reference view or two.

The truth is pytorch-metric-learning's own class in one process, on the rows of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from pytorch_metric_learning.losses import SelfSupervisedLoss
from torch import Tensor, nn

from tests.fuzz import pml_losses
from tests.fuzz.calls import call_and_differentiate
from tests.fuzz.engine import Domain, Found, Place


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


def play(case: Case, place: Place) -> Found:
    inside, encoder = pml_losses.make_loss(case), pml_losses.make_encoder(case, place)
    loss: nn.Module = SelfSupervisedLoss(inside, symmetric=case.symmetric)
    if not place.alone:
        loss = pml_losses.make_global(case, loss)
    data = place.data(views=1 + case.others)
    views = [place.leaf(name, data[name], trained=v != case.frozen) for v, name in enumerate(data) if "view" in name]

    def call(first: Tensor, *others: Tensor) -> Tensor:
        rows = encoder(first)
        values = [loss(rows, encoder(other)) for other in others]
        return torch.stack(values).sum()

    return pml_losses.results(call_and_differentiate(case.way, call, views), encoder, inside)


DOMAIN = Domain.of("two views", cases(), play)
