"""A parameter that a loss leaves out of its graph is attached with a zero gradient, whatever former calls did."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core.autograd_graph import run_full_precision

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
