"""A parameter that a loss leaves out of its graph is attached with a zero gradient, whatever former calls did."""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor, nn

from tests.doors import autograd_graph, run_full_precision

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


def grads(loss: TwoWeights) -> list[Tensor]:
    """The gradients of both weights."""
    value = run_full_precision(loss, loss.forward, (ROWS.clone().requires_grad_(),), {})
    return list(torch.autograd.grad(value, [loss.first, loss.second]))


def test_a_weight_that_a_call_leaves_out_or_another_holds_its_place_is_noticed() -> None:
    loss = TwoWeights()
    grads(loss)
    # 1. left out: a zero gradient, and not none
    loss.uses_second = False
    assert not grads(loss)[1].any()
    # 2. back again
    loss.uses_second = True
    assert all(grad.any() for grad in grads(loss))
    # 3. another parameter in its place, of which nothing depends on the former one
    loss.second = nn.Parameter(torch.full((3,), 2.0))
    assert torch.allclose(grads(loss)[1], (ROWS * (2 * ROWS).cos()).sum(0))


def test_a_graph_is_walked_only_if_a_parameter_is_not_where_it_was() -> None:
    loss = TwoWeights()
    with mock.patch.object(autograd_graph, "walk_graph", wraps=autograd_graph.walk_graph) as walk:
        grads(loss)
        walks = [bool(call.args[0]) for call in walk.call_args_list]
        for uses_second in (True, False, True, True):
            walk.reset_mock()
            loss.uses_second = uses_second
            grads(loss)
            walks += [any(map(bool, (call.args[0] for call in walk.call_args_list)))]
    assert walks == [True, False, True, False, False]


def test_a_parameter_below_several_outputs_is_found_again() -> None:
    class Several(TwoWeights):
        def forward(self, rows: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            """Another weight in each."""
            return {"first": (rows * self.first).sum(), "second": (rows * self.second).sum()}

    loss = Several()
    for _ in range(3):
        values = run_full_precision(loss, loss.forward, (ROWS.clone().requires_grad_(),), {})
        found = torch.autograd.grad(sum(values.values()), [loss.first, loss.second])
        assert torch.equal(found[0], ROWS.sum(0))
        assert torch.equal(found[1], ROWS.sum(0))
