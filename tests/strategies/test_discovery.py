"""Which submodules are losses: by type, by name, by regular expression; outermost first, each once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from pytorch_metric_learning import losses as pml
from torch import nn

from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.strategies import register_loss_type
from tests.doors import find_losses
from tests.oracle import CLASS_LOSSES
from tests.strategies.jobs import make_loss


def tree(**children: nn.Module) -> nn.Module:
    root = nn.Module()
    for name, child in children.items():
        root.add_module(name, child)
    return root


def learnable(root: nn.Module, losses: Any = "auto") -> list[str]:
    return [found.name for found in find_losses(root, losses) if found.learnable]


@pytest.mark.parametrize("name", [*CLASS_LOSSES, "ProxyAnchorLoss"])
def test_learnable_losses_of_pml_are_found_by_type(name: str) -> None:
    assert learnable(tree(encoder=nn.Linear(2, 2), loss=make_loss(name))) == ["loss"]


def test_losses_are_found_anywhere_outermost_first() -> None:
    inner = tree(head=tree(arc=make_loss()), list=nn.ModuleList([nn.Linear(2, 2), make_loss()]))
    multiple = pml.MultipleLosses([make_loss(seed=1), make_loss(seed=2)])
    root = tree(a=inner, b=multiple, c=nn.ModuleDict({"x": make_loss(seed=3)}))
    assert learnable(root) == ["a.head.arc", "a.list.1", "b", "c.x"]


def test_other_types_of_loss() -> None:
    adaptive = nn.AdaptiveLogSoftmaxWithLoss(4, 10, [3])
    assert learnable(tree(x=adaptive)) == ["x"]
    assert learnable(tree(x=nn.CrossEntropyLoss(), y=pml.TripletMarginLoss(), z=nn.Linear(2, 2))) == []


def test_metrics_with_trainable_parameters_are_losses() -> None:
    class Learned(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def update(self) -> None: ...

        def compute(self) -> None: ...

    assert learnable(tree(metric=Learned(), other=torchmetrics.MeanSquaredError())) == ["metric"]


def test_a_shared_module_is_found_once() -> None:
    loss = make_loss()
    assert len(learnable(tree(a=loss, b=nn.ModuleList([loss])))) == 1


def test_registered_types_are_losses() -> None:
    class Center(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centers = nn.Parameter(torch.zeros(2, 2))

    class Derived(Center):
        pass

    assert learnable(tree(x=Center())) == []
    assert register_loss_type(Center) is Center
    assert learnable(tree(x=Center(), y=Derived())) == ["x", "y"]
    for wrong in (Center(), int, "Center"):
        with pytest.raises(ConfigurationError):
            register_loss_type(wrong)  # type: ignore[type-var]


def test_a_compiled_loss_is_found() -> None:
    assert learnable(tree(loss=torch.compile(make_loss(), backend="eager"))) == ["loss"]


def test_explicit_names_and_regular_expressions() -> None:
    root = tree(body=nn.Linear(2, 2), heads=nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), loss=make_loss())
    assert learnable(root, ["heads.1"]) == ["heads.1"]
    assert learnable(root, ["loss", "heads.0"]) == ["heads.0", "loss"]
    assert learnable(root, ["heads", "heads.0"]) == ["heads"]
    assert learnable(root, r"heads\.\d") == ["heads.0", "heads.1"]
    assert learnable(root, "loss|body") == ["body", "loss"]
    assert find_losses(root, []) == []


@pytest.mark.parametrize("losses", [["missing"], "missing", ["loss", "missing"], ["los"], "los", [""]], ids=str)
def test_a_name_that_matches_nothing_lists_what_exists(losses: Any) -> None:
    root = tree(body=nn.Linear(2, 2), heads=nn.ModuleDict({"arc": make_loss()}), loss=make_loss())
    with pytest.raises(ConfigurationError) as caught:
        find_losses(root, losses)
    assert all(word in str(caught.value) for word in ("heads.arc", "loss", "ArcFaceLoss"))


@pytest.mark.parametrize(
    ("losses", "found"), [(["plain"], ["plain"]), (["loss", "plain"], ["plain", "loss"]), ("pl.*", ["plain"])], ids=str
)
def test_a_named_loss_without_parameters_is_found_all_the_same(losses: Any, found: list[str]) -> None:
    root = tree(plain=nn.CrossEntropyLoss(), loss=make_loss(), place=nn.ReLU())
    assert [each.name for each in find_losses(root, losses)] == found
    assert learnable(root, losses) == [name for name in found if name == "loss"]


def test_who_owns_a_shared_parameter() -> None:
    loss, head, twin = make_loss(), nn.Module(), make_loss()
    head.weight = loss.W
    assert [found.owned for found in find_losses(tree(loss=loss, head=head))] == [False]
    twin.W = loss.W
    assert [found.owned for found in find_losses(tree(a=loss, b=twin))] == [True, True]
