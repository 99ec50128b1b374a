"""The plan of a loss: made once, again when something that it follows from has changed, and told in words."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import reducers
from torch import Tensor, nn

from lightning_ddp_losses.losses import GlobalBatchLoss, register_element_wise
from tests.each_rank import each_rank

ROWS, DIM = 6, 8


def call(loss: nn.Module) -> Any:
    return loss(torch.randn(ROWS, DIM), torch.arange(ROWS) // 2)


@pytest.mark.parametrize("world_size", [1, 2])
@each_rank()
def test_it_is_the_same_object_until_something_changes() -> None:
    loss = GlobalBatchLoss(pml.TripletMarginLoss())
    call(loss)
    first = loss.plan
    assert first.modes == ("rows", "replicated")
    for _ in range(3):
        call(loss)
        assert loss.plan is first
    # an option
    loss.loss.margin = 0.3
    second = loss.plan
    assert second is not first
    assert "margin=0.3" in second.configuration
    # one that decides the evaluation
    loss.loss.swap = True
    assert loss.plan.modes == ("replicated",)
    # a module inside
    loss.loss.swap = False
    loss.loss.reducer = reducers.PerAnchorReducer()
    assert loss.plan.modes == ("rows", "replicated")
    assert loss.plan.tiles is None
    # the loss
    loss.loss = pml.NTXentLoss()
    assert loss.plan.tiles is not None
    loss.backward = "sum"
    assert loss.plan.modes == ("replicated",)


class Squared(nn.MSELoss):
    pass


@each_rank(1)
def test_a_registration_makes_another_one() -> None:
    loss = GlobalBatchLoss(Squared())
    assert loss.plan.modes == ("replicated",)
    register_element_wise(Squared)
    assert loss.plan.modes == ("elements", "replicated")


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))])
def test_a_copy_plans_for_itself(twin_of: Callable[[Any], Any]) -> None:
    loss = GlobalBatchLoss(pml.TripletMarginLoss())
    call(loss)
    plan = loss.plan
    twin = twin_of(loss)
    twin.loss.swap = True
    assert twin.plan.modes == ("replicated",)
    assert loss.plan is plan


def held_by(value: Any) -> list[Any]:
    """All objects that a plan holds."""
    if isinstance(value, (tuple, list)):
        return [inner for item in value for inner in held_by(item)]
    inside = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
    return [value, *(inner for item in inside for inner in held_by(item))]


@pytest.mark.parametrize(
    "loss", [pml.SupConLoss(), pml.ArcFaceLoss(3, DIM), pml.SelfSupervisedLoss(pml.NTXentLoss()), nn.CrossEntropyLoss()]
)
def test_it_holds_no_module_and_no_tensor(loss: nn.Module) -> None:
    assert [each for each in held_by(GlobalBatchLoss(loss).plan) if isinstance(each, (nn.Module, Tensor))] == []


TOLD: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "in tiles": (
        pml.SupConLoss,
        ["evaluation: rows", "in tiles of a symmetric matrix; up to 192 rows", "sent: all rows"],
    ),
    "row tiles": (pml.CircleLoss, ["evaluation: rows", "some anchors at a time"]),
    "elements": (lambda: pml.ArcFaceLoss(3, DIM), ["evaluation: elements", "sent: sums and divisors"]),
    "replicated": (pml.FastAPLoss, ["evaluation: replicated", "sent: all rows"]),
    "options": (lambda: pml.SupConLoss(temperature=0.3), ["compared: loss: SupConLoss", "temperature=0.3"]),
}


@pytest.mark.parametrize("name", TOLD)
def test_it_tells_what_runs(name: str) -> None:
    make, words = TOLD[name]
    text = str(GlobalBatchLoss(make()).plan)
    assert [word for word in words if word not in text] == [], text
