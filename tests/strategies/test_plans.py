"""What a step of bare losses decides once: the plan stays as long as what it follows from, and no longer."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses.strategies import loss_parallelism, loss_reducer
from tests.doors import FoundLoss, Gradients, LossForwardPatch, ReducedParameters, autograd_graph

ROWS, LABELS = torch.randn(4, 3), torch.tensor([0, 1, 2, 3])


def make_loss() -> pml.ArcFaceLoss:
    return pml.ArcFaceLoss(num_classes=4, embedding_size=3)


def set_data(loss: pml.ArcFaceLoss) -> None:
    loss.W.data = loss.W.data.double()


CHANGES: dict[str, Callable[[pml.ArcFaceLoss], object]] = {
    "dtype of a weight": set_data,
    "weight frozen": lambda loss: loss.W.requires_grad_(False),
    "weight replaced": lambda loss: setattr(loss, "W", nn.Parameter(torch.randn(3, 4))),
    "parameter added": lambda loss: setattr(loss, "extra", nn.Parameter(torch.ones(2))),
    "module replaced": lambda loss: setattr(loss, "reducer", type(loss.reducer)()),
}


def count_plans(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[object]:
    """Return a list that grows with each plan."""
    made: list[object] = []
    original = getattr(owner, name)

    def counted(*args: object) -> object:
        made.append(args)
        return original(*args)

    monkeypatch.setattr(owner, name, staticmethod(counted) if name == "of" else counted)
    return made


@pytest.mark.parametrize("change", CHANGES)
def test_calls_of_a_loss_share_a_plan_until_something_changes(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    made = count_plans(monkeypatch, autograd_graph.FullPrecisionPlan, "of")
    loss = make_loss()
    twin = make_loss()
    twin.load_state_dict(loss.state_dict())
    patch = LossForwardPatch(FoundLoss("loss", loss, learnable=True, owned=True), refuse_nan=True)
    patch.install()
    for _ in range(3):
        loss(ROWS, LABELS)
    assert len(made) == 1
    CHANGES[change](loss)
    for name, parameter in loss.named_parameters():
        setattr(twin, name, nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))
    value = loss(ROWS, LABELS)
    assert len(made) == 2
    dtype = loss.W.dtype
    torch.testing.assert_close(value, twin(ROWS.to(dtype), LABELS).to(value.dtype))
    assert value.requires_grad == any(parameter.requires_grad for parameter in loss.parameters())


@pytest.mark.parametrize(
    "rows", [ROWS.double(), ROWS.bfloat16(), ROWS.clone().requires_grad_()], ids=["wide", "low", "trained"]
)
def test_inputs_of_another_kind_have_another_plan(monkeypatch: pytest.MonkeyPatch, rows: Tensor) -> None:
    made = count_plans(monkeypatch, autograd_graph.FullPrecisionPlan, "of")
    loss = make_loss()
    LossForwardPatch(FoundLoss("loss", loss, learnable=True, owned=True), refuse_nan=True).install()
    loss(ROWS, LABELS)
    value = loss(rows, LABELS)
    assert len(made) == 2
    assert value.dtype == torch.promote_types(rows.dtype, torch.float32)
    assert loss.W.dtype == torch.float32


def test_autocast_is_off_also_after_calls_without_it() -> None:
    loss = make_loss()
    LossForwardPatch(FoundLoss("loss", loss, learnable=True, owned=True), refuse_nan=True).install()
    plain = loss(ROWS, LABELS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss(ROWS, LABELS), plain)
    assert torch.equal(loss(ROWS, LABELS), plain)


@pytest.mark.parametrize("change", CHANGES)
def test_backwards_share_a_plan_until_something_changes(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    module = nn.ModuleDict({"encoder": nn.Linear(2, 2), "loss": make_loss()})
    parameters = ReducedParameters(module, list(module["encoder"].parameters()))
    parameters.watch(["loss"])
    made = count_plans(monkeypatch, loss_reducer.ReductionPlan, "__init__")
    plan = parameters.plan()
    assert [(p.name, p.owner) for p in plan.reduced] == [("loss.W", 0)]
    for _ in range(3):
        module["loss"].W.grad = torch.ones(3, 4)
        assert parameters.plan() is plan
        module["loss"].W.grad = None
    assert len(made) == 1
    CHANGES[change](module["loss"])
    other = parameters.plan()
    # a module without parameters, as FSDP's hooks and a loss's distance are, changes nothing about them
    assert (other is plan) == (change == "module replaced")
    trained = [name for name, parameter in module["loss"].named_parameters() if parameter.requires_grad]
    assert [p.name for p in other.reduced] == [f"loss.{name}" for name in sorted(trained)]
    # what appeared after the wrap is compared before it counts as equal on all ranks
    new = {"weight replaced": ["loss.W"], "parameter added": ["loss.extra"]}
    assert [p.name for p in other.new] == new.get(change, [])
    assert parameters.plan() is other


def test_a_frozen_parameter_is_reduced_while_it_holds_a_gradient() -> None:
    module = nn.ModuleDict({"loss": make_loss()})
    parameters = ReducedParameters(module, [])
    parameters.watch(["loss"])
    module["loss"].W.requires_grad_(False)
    assert parameters.plan().reduced == []
    module["loss"].W.grad = torch.ones(3, 4)
    assert [p.name for p in parameters.plan().reduced] == ["loss.W"]


def test_a_gradient_has_changed_when_it_was_replaced_or_written_to() -> None:
    module = nn.ParameterDict({name: torch.ones(2) for name in ("none", "kept", "written", "replaced", "gone", "made")})
    parameters = ReducedParameters(module, [])
    plan = parameters.plan()
    for name in ("kept", "written", "replaced", "gone"):
        module[name].grad = torch.ones(2)
    before = Gradients(plan)
    module["written"].grad.add_(1)
    module["replaced"].grad = torch.ones(2)
    module["gone"].grad = None
    module["made"].grad = torch.ones(2)
    after = Gradients(plan)
    changed = after.changed_since(before)
    names = {p.name for p, has_changed in zip(plan.reduced, changed, strict=True) if has_changed}
    assert names == {"written", "replaced", "gone", "made"}
    assert [p.name for p, flag in zip(plan.reduced, after.flags, strict=True) if not flag] == ["gone", "none"]


def test_builds_and_other_libraries_are_a_note() -> None:
    notes = [{"python": "3.12.1", "torch": "2.13.0+cpu"}] * 9 + [{"python": "3.12.1", "torch": "2.13.0+cu130"}]
    words = r"torch: 2.13.0\+cpu on rank 0, .* 7 and 1 more, 2.13.0\+cu130 on rank 9\.$"
    with pytest.warns(UserWarning, match=words) as said:
        loss_parallelism.note_differences([json.dumps(note).encode() for note in notes])
    assert "python" not in str(said[0].message)
    loss_parallelism.note_differences([loss_parallelism.pack_notes()] * 3)


def test_the_facts_of_a_set_up_fit_into_a_handshake() -> None:
    assert len(loss_parallelism.pack_notes()) < 400
