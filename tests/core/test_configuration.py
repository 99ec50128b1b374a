"""The configuration of a module: what was set from outside since the last call is read again, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.doors import Configuration, configuration


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.margin = 0.1
        self.sizes = [1, 2]
        self.table = {"low": 0.5}
        self.weights = torch.ones(3)
        self.inner = nn.Linear(2, 2)
        self.calls = 0


def add(module: Configured) -> None:
    module.extra = 3  # type: ignore[assignment]


def remove(module: Configured) -> None:
    del module.margin


def rename(module: Configured) -> None:
    del module.margin
    module.extra = 0.1  # type: ignore[assignment]


def replace_module(module: Configured) -> None:
    module.inner = nn.Linear(2, 2, bias=False)


CHANGES: dict[str, Callable[[Configured], Any]] = {
    "a number": lambda module: setattr(module, "margin", 0.2),
    "an item": lambda module: module.sizes.append(3),
    "a value of a dict": lambda module: module.table.update(low=0.6),
    "a tensor": lambda module: module.weights.mul_(2),
    "the training mode": lambda module: module.eval(),
    "an attribute of a module inside": lambda module: setattr(module.inner, "in_features", 5),
    "a new attribute": add,
    "an attribute less": remove,
    "another name": rename,
    "another module": replace_module,
    "no parameter": lambda module: setattr(module.inner, "bias", None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_changed_from_outside_is_read_as_a_fresh_module_is(change: Callable[[Configured], Any]) -> None:
    module, read = Configured(), Configuration()
    before = read.read(module)
    assert read.read(module) is before
    changes = read.changes
    change(module)
    assert read.read(module) != before
    assert read.read(module) == Configuration().read(module)
    assert read.changes == changes + 1
    parameters, _ = read.weights()
    assert [*map(id, parameters)] == [*map(id, module.parameters())]


def test_what_forward_changes_is_state() -> None:
    module, read = Configured(), Configuration()
    before = read.read(module)
    module.calls += 1
    module.sizes.append(3)
    read.follow(module)
    assert read.read(module) is before


def test_of_many_options_only_the_one_that_changed_is_read() -> None:
    module, read = Configured(), Configuration()
    module.sizes, module.table, module.weights = (1, 2), {}, None  # type: ignore[assignment]
    read.read(module)
    module.margin = 0.2
    with mock.patch.object(configuration, "read_value", wraps=configuration.read_value) as read_value:
        read.read(module)
    assert 0.2 in [each.args[0] for each in read_value.call_args_list]
    assert 0.1 not in [each.args[0] for each in read_value.call_args_list]
    assert len(read_value.call_args_list) < 8
