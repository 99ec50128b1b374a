"""Where a loss's parameters are in its graph is remembered, and never believed without a look."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import autograd_graph
from lightning_ddp_losses.core.autograd_graph import ParameterPaths, run_full_precision

ROWS = torch.linspace(-1, 1, 12).reshape(4, 3)


class TwoWeights(nn.Module):
    """A loss that leaves its second weight out where it is told to, as a loss without pairs does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.uses_second = True

    def forward(self, rows: Tensor) -> Tensor:
        """The same mathematics either way, but for the second weight."""
        second = self.second if self.uses_second else torch.ones(3)
        return (rows * self.first).exp().mean() + (rows * second).sin().sum()


def grads(loss: TwoWeights, paths: ParameterPaths | None) -> tuple[list[Tensor | None], int]:
    """The gradients of both weights, and how many nodes were visited before backward."""
    num_visited = 0
    walk = autograd_graph.walk_graph

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_visited
        for pair in walk(*args, **kwargs):
            num_visited += 1
            yield pair

    with mock.patch.object(autograd_graph, "walk_graph", counting):
        value = run_full_precision(loss, loss.forward, (ROWS.clone().requires_grad_(),), {}, paths=paths)
    found = torch.autograd.grad(value, [loss.first, loss.second], allow_unused=True)
    return list(found), num_visited


def test_a_graph_of_the_same_form_is_not_walked_again() -> None:
    loss, paths = TwoWeights(), ParameterPaths()
    expected, _ = grads(loss, None)
    assert grads(loss, paths)[1], "walked and learnt"
    again, num_visited = grads(loss, paths)
    assert num_visited == 0
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))  # type: ignore[arg-type]


def test_a_weight_that_a_call_leaves_out_or_another_holds_its_place_is_noticed() -> None:
    loss, paths = TwoWeights(), ParameterPaths()
    for _ in range(2):
        grads(loss, paths)
    # 1. left out: a zero gradient, and not none
    loss.uses_second = False
    (first, second), _ = grads(loss, paths)
    assert first is not None
    assert second is not None
    assert not second.any()
    # 2. back again
    loss.uses_second = True
    assert all(grad is not None and grad.any() for grad in grads(loss, paths)[0])
    # 3. another parameter in its place, of which nothing depends on the former one
    loss.second = nn.Parameter(torch.full((3,), 2.0))
    (_, second), _ = grads(loss, paths)
    assert second is not None
    assert torch.allclose(second, (ROWS * (2 * ROWS).cos()).sum(0))


def test_a_graph_that_changes_with_each_call_is_learnt_a_few_times_only() -> None:
    loss, paths = TwoWeights(), ParameterPaths()
    learnt = 0
    for call in range(40):
        # the way to the weights is longer each time
        def forward(rows: Tensor, length: int = call) -> Tensor:
            value = loss(rows)
            for _ in range(length):
                value = value * 1.0
            return value

        before = list(map(list, paths._paths))
        rows = ROWS.clone().requires_grad_()
        value = run_full_precision(loss, forward, (rows,), {}, paths=paths)
        assert all(grad is not None for grad in torch.autograd.grad(value, [loss.first, loss.second]))
        learnt += paths._paths != before
    assert learnt == 8
