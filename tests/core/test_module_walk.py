"""What is in a module is looked up in every step, so that nothing that was replaced, added or removed is missed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn

from tests.doors import ModuleContents, has_buffers, modules, modules_of, narrow_buffers, parameters_of


def nested() -> nn.Sequential:
    shared = nn.Linear(2, 2)
    return nn.Sequential(nn.Sequential(shared, nn.BatchNorm1d(2)), nn.ModuleList([shared, nn.Identity()]))


def ids(items: Iterable[object]) -> list[int]:
    return sorted(map(id, items))


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "none": lambda m: None,
    "module added": lambda m: m.append(nn.Linear(1, 1)),
    "module removed": lambda m: m[0].__delitem__(1),
    "parameter replaced": lambda m: setattr(m[0][0], "weight", nn.Parameter(torch.zeros(2, 2))),
    "parameter removed": lambda m: setattr(m[0][0], "bias", None),
    "module replaced": lambda m: m[1].__setitem__(1, nn.Bilinear(1, 1, 1)),
    "circle": lambda m: m[0][0].register_module("parent", m),
}


@pytest.mark.parametrize("change", CHANGES)
def test_modules_and_parameters_are_those_that_torch_finds(change: str) -> None:
    module = nested()
    before = ids(parameters_of(module))
    CHANGES[change](module)
    assert ids(modules_of(module)) == ids(list(module.modules()))
    assert ids(parameters_of(module)) == ids(list(module.parameters()))
    assert (ids(parameters_of(module)) == before) == (change in ("none", "circle"))


@pytest.mark.parametrize("change", CHANGES)
def test_contents_that_are_kept_follow_the_module(change: str) -> None:
    module = nested()
    contents = ModuleContents(module)
    assert contents.refresh(), "they are looked for at the first call"
    assert not contents.refresh()
    CHANGES[change](module)
    assert contents.refresh() == (change != "none")
    assert ids(contents.modules) == ids(list(module.modules()))
    assert ids(contents.parameters) == ids(list(module.parameters()))
    assert not contents.refresh()


def test_a_copy_of_contents_is_of_the_copied_module() -> None:
    module = nested()
    kept = {"module": module, "contents": ModuleContents(module)}
    kept["contents"].refresh()
    twin = copy.deepcopy(kept)
    assert twin["contents"].refresh()
    assert ids(twin["contents"].parameters) == ids(list(twin["module"].parameters()))


class Twice(modules.MethodPatch):
    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        return 2 * self.original(*args)


class Scaled(nn.Module):  # has a forward of its own in each object
    def __init__(self) -> None:
        super().__init__()
        self.forward = self.scaled
        self.scale = 3.0

    def scaled(self, values: torch.Tensor) -> torch.Tensor:
        return self.scale * values


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_a_patched_module_has_the_method_that_was_replaced(copied: Callable[[nn.Module], nn.Module]) -> None:
    for module in (Scaled(), nn.ReLU()):
        one = torch.ones(1)
        plain = module(one)
        patch = Twice(module)
        patch.install()
        assert module(one) == 2 * plain
        twin = copied(module)
        assert twin(one) == plain
        if isinstance(twin, Scaled):
            twin.scale = 5.0
            assert twin(one) == 5 * one
        patch.remove()
        assert module(one) == plain


def test_buffers_of_what_is_left_out_do_not_count() -> None:
    module = nested()
    assert has_buffers(module, [])
    assert has_buffers(module, [module[1]])
    assert not has_buffers(module, [module[0]])
    assert not has_buffers(module, [module])
    module[1].register_buffer("late", torch.zeros(1))
    assert has_buffers(module, [module[0]])
    del module[1].late
    module[1].register_buffer("late", None)
    assert not has_buffers(module, [module[0]]), "a slot without a value"


def test_low_buffers_are_found_with_their_owner() -> None:
    module = nested().bfloat16()
    norm = module[0][1]
    found = narrow_buffers(modules_of(module), torch.float32)
    assert [(owner is norm, name) for owner, name, _ in found] == [(True, "running_mean"), (True, "running_var")]
    assert not narrow_buffers(modules_of(module), torch.bfloat16)
