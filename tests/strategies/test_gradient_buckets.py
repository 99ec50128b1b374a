"""What `EarlyGradients` knows of gradients that changed after it looked at them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_ddp_losses.strategies.gradient_buckets import EarlyGradients


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3)) for _ in range(3)]


def look(parameters: list[nn.Parameter]) -> EarlyGradients:
    return EarlyGradients(parameters, torch.float32, is_inline=True, is_small=[True] * len(parameters))


def test_written_replaced_removed_and_new_gradients_have_grown(parameters: list[nn.Parameter]) -> None:
    written, replaced, untouched = parameters
    absent, removed = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    for parameter in (written, replaced, untouched, removed):
        parameter.grad = torch.ones(3)
    early = look([written, replaced, untouched, absent, removed])
    assert early.find_grown() == []
    written.grad.add_(1)  # type: ignore[union-attr]
    replaced.grad, absent.grad, removed.grad = torch.ones(3), torch.ones(3), None
    assert early.find_grown() == [0, 1, 3, 4]


def test_a_gradient_replaced_again_and_again_has_grown_though_ids_come_back(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    early = look(parameters)
    # each one that goes leaves its place in memory to the next
    for number in range(10):
        parameters[1].grad = torch.full((3,), float(number))
        assert early.find_grown() == [1]
