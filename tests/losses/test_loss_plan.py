"""The plan of a loss: made once, again when something that it follows from has changed, and told in words."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_metric_learning import losses as pml
from pytorch_metric_learning import miners, reducers
from torch import Tensor, nn

from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.losses import GlobalBatchLoss, GlobalBatchMiner, register_element_wise
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


class Reading(nn.Module):
    """A loss with an attribute that no rank can compare."""

    def __init__(self) -> None:
        super().__init__()
        self.source = iter([1, 2, 3])


@each_rank(1)
def test_a_registration_makes_another_one() -> None:
    loss = GlobalBatchLoss(Squared())
    assert loss.plan.modes == ("replicated", "rows")
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
    "what is not read": (Reading, ["compared: loss: Reading(training=True)", "not read: source"]),
}


@pytest.mark.parametrize("name", TOLD)
def test_it_tells_what_runs(name: str) -> None:
    make, words = TOLD[name]
    text = str(GlobalBatchLoss(make()).plan)
    assert [word for word in words if word not in text] == [], text


# ---------------------------------------------------------------------- plans of calls


def plans_of(loss: Any) -> Any:
    return loss._plans.of_calls


@pytest.mark.parametrize("world_size", [1, 2])
@each_rank()
def test_calls_with_one_signature_have_one_plan() -> None:
    loss = GlobalBatchLoss(pml.TripletMarginLoss())
    labels = torch.arange(ROWS) // 2
    loss(torch.randn(ROWS, DIM), labels)
    loss(torch.randn(ROWS, DIM), labels)
    # other rows, and other values
    loss(torch.randn(2 * ROWS, DIM), torch.arange(2 * ROWS) // 3)
    loss.loss.margin = 0.3  # an option from which no rule follows
    loss(torch.randn(ROWS, DIM), labels)
    assert len(plans_of(loss)) == 1
    # another width, dtype, need of a gradient, mode, and arguments by name
    loss(torch.randn(ROWS, DIM + 1), labels)
    loss(torch.randn(ROWS, DIM, dtype=torch.float64), labels)
    loss(torch.randn(ROWS, DIM, requires_grad=True), labels)
    with torch.no_grad():
        loss(torch.randn(ROWS, DIM), labels)
    with torch.autocast("cpu"):
        loss(torch.randn(ROWS, DIM), labels)
    rows = torch.randn(ROWS, DIM)
    loss(embeddings=rows, labels=labels)
    loss(rows, labels, ref_emb=rows, ref_labels=labels)  # the same tensor twice
    loss(rows, labels, ref_emb=rows.clone(), ref_labels=labels)
    assert len(plans_of(loss)) == 9
    # an option from which rules follow
    loss.loss.swap = True
    loss(rows, labels)
    assert len(plans_of(loss)) == 1


@pytest.mark.parametrize("world_size", [1, 2])
@each_rank()
def test_a_weight_of_another_size_is_seen() -> None:
    loss = GlobalBatchLoss(pml.ArcFaceLoss(3, DIM), check_weights=False)
    rows, labels = torch.randn(ROWS, DIM), torch.arange(ROWS)
    with pytest.raises(InputError, match="0 to 2"):
        loss(rows, labels)
    # more classes: in place, in another parameter
    weights: list[Callable[[], None]] = [
        lambda: setattr(loss.W, "data", torch.randn(DIM, ROWS)),
        lambda: setattr(loss.loss, "W", nn.Parameter(torch.randn(DIM, 2 * ROWS))),
    ]
    for number, enlarge in enumerate(weights, 1):
        torch.manual_seed(0)
        enlarge()
        loss.loss.num_classes = number * ROWS
        value = loss(rows.clone().requires_grad_(), labels + (number - 1) * ROWS)
        assert torch.autograd.grad(value, [loss.W])[0].shape == (DIM, number * ROWS)


@each_rank(2)
def test_at_most_32_plans_are_stored() -> None:
    loss = GlobalBatchLoss(nn.MSELoss(), mode="replicated")
    for width in range(1, 41):
        rows = torch.randn(ROWS, width)
        loss(rows, rows + 1)
    assert len(plans_of(loss)) == 32


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda loss: pickle.loads(pickle.dumps(loss))])
def test_a_copy_has_no_plans_of_calls(twin_of: Callable[[Any], Any]) -> None:
    loss = GlobalBatchLoss(pml.TripletMarginLoss())
    call(loss)
    assert len(plans_of(twin_of(loss))) == 0
    assert len(plans_of(loss)) == 1


def test_a_plan_of_a_call_holds_no_module_and_no_tensor() -> None:
    loss = GlobalBatchLoss(pml.ArcFaceLoss(3, DIM))
    call(loss)
    (plan,) = plans_of(loss).values()
    assert [each for each in held_by(plan) if isinstance(each, (nn.Module, Tensor))] == []


@each_rank(2)
def test_labels_that_become_one_hot_rows_are_refused_in_a_later_call() -> None:
    loss = GlobalBatchLoss(Named())
    rows = torch.randn(ROWS, DIM)
    names = torch.randint(2, 9, (ROWS, 3))
    loss(rows, names)
    with pytest.raises(InputError, match="one-hot"):
        loss(rows, nn.functional.one_hot(torch.arange(ROWS) % 3))


class Named(pml.TripletMarginLoss):
    """A loss of the user's own, with several columns of labels, and one of pytorch-metric-learning inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = pml.TripletMarginLoss()

    def forward(self, embeddings: Tensor, labels: Tensor, *others: Any) -> Tensor:
        return embeddings.sum() * 0 + labels.sum()


@pytest.mark.parametrize("world_size", [1, 2])
@each_rank()
def test_what_a_miner_records_leaves_its_plans() -> None:
    miner = GlobalBatchMiner(miners.MultiSimilarityMiner())
    rows, labels = torch.randn(ROWS, DIM), torch.arange(ROWS) // 2
    miner(rows, labels)
    (first,) = miner._plans.values()
    for _ in range(3):
        miner(rows, labels)
        assert next(iter(miner._plans.values())) is first
    # an option
    miner.miner.epsilon = 0.5
    miner(rows, labels)
    (second,) = miner._plans.values()
    assert second is not first
