"""Seven kinds of programs for which a window was once silently wrong, each in three variants: one process, or one error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses import accumulation_window, global_mean
from lightning_ddp_losses.testing import RankPool
from tests.accumulation.test_declared import ROWS, WORLDS, Body, Net, each, forwards, gradients, mean_loss, truth_of
from tests.answers import assert_all_close, assert_errors
from tests.fits import mean_over_ranks

Loss = Callable[[Net, Tensor, Tensor], Tensor]
ORIGINAL = torch.autograd.backward  # from before any window


def plain(net: Net, rows: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(net(rows), labels)


# ---------------------------------------------------------------------- steps of a micro-batch


def detached(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    (mean_loss(net(rows), labels) + mean_loss(-net(rows), labels, name="logged").detach()).backward()


def forwards_first(window: Any, net: Net, batches: list[Any]) -> None:
    for value in reversed(forwards(window, net, batches)):
        value.backward()


def forward_twice(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    """The first of two forwards is thrown away."""
    for name in ("first", "second"):
        value = mean_loss(net(rows), labels, name=name)
    value.backward()


def product(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    logits = net(rows)
    (mean_loss(logits, labels) * mean_loss(-logits, labels, name="other")).backward()


class Spare(nn.Module):  # a layer that no window was given
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(3, 3).double()


def swapped(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    layer = net.layer if i == 0 else Spare().own
    mean_loss(layer(rows), labels).backward()


def adapted(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    mean_loss(net(rows) * weight, labels).backward()


def in_half(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    logits = torch.cat([net(rows[:1]), Spare().own(rows[1:])])
    mean_loss(logits, labels).backward()


def weighs_rows(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    inner = mean_loss(-net(rows), labels, name="inner")
    mean_loss(net(rows) * inner, labels, name="outer").backward()


def adds_inside(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    inner = mean_loss(-net(rows), labels, name="inner")
    total = cross_entropy(net(rows), labels, reduction="sum") + inner * len(rows)
    global_mean(total, len(rows), name="outer").backward()


def weighs_without_gradient(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    """The value of another mean, as a number: its size is that of the micro-batch."""
    inner = mean_loss(-net(rows), labels, name="inner").detach()
    (mean_loss(net(rows), labels) * inner).backward()


def by_hand(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    parameters = [*net.parameters()]
    for parameter, grad in zip(parameters, torch.autograd.grad(mean_loss(net(rows), labels), parameters), strict=True):
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def tied(net: Net, rows: Tensor) -> Tensor:
    return net(net(rows))


def recomputed(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    given = rows.clone().requires_grad_()
    mean_loss(checkpoint(net.layer, given, use_reentrant=True), labels).backward()


def recomputed_loss(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    given = rows.clone().requires_grad_()
    checkpoint(lambda given: mean_loss(net(given), labels), given, use_reentrant=True).backward()


NOT_LINEAR = ["what is back-propagated", "a weighted sum of losses"]
WEIGHTS = [*NOT_LINEAR, "the same weights in every micro-batch", "upstream gradients are"]
UNKNOWN = ["accumulation window: global_mean", "hand in the module that holds it"]
INSIDE = ["a loss of rows", "depends on global_mean `inner`"]
# by kind: what is run, and the loss of one process or words of the error
KINDS: dict[str, dict[str, tuple[Body, Loss | list[str]]]] = {
    "what is not back-propagated does not count": {
        "a value that is detached": (each(detached), plain),
        "forwards first": (forwards_first, plain),
        "a forward that is thrown away": (each(forward_twice), plain),
    },
    "weights that change between micro-batches": {
        "a number": (each(lambda net, i, rows, y: (mean_loss(net(rows), y) * (1 + i)).backward()), WEIGHTS),
        "a tensor": (
            each(lambda net, i, rows, y: (mean_loss(net(rows), y) / torch.tensor(2.0 + i)).backward()),
            WEIGHTS,
        ),
        "a gradient": (
            each(lambda net, i, rows, y: mean_loss(net(rows), y).backward(torch.tensor(1.0 + i).double())),
            WEIGHTS,
        ),
    },
    "functions of a mean": {
        "a root": (each(lambda net, i, rows, y: mean_loss(net(rows), y).sqrt().backward()), NOT_LINEAR),
        "a product": (each(product), NOT_LINEAR),
        "the largest": (
            each(lambda net, i, rows, y: mean_loss(net(rows), y).clamp(min=0.1).backward()),
            NOT_LINEAR,
        ),
    },
    "modules that the window does not know": {
        "one in a later micro-batch": (each(swapped), UNKNOWN),
        "a parameter of no module": (each(adapted), UNKNOWN),
        "one for some rows": (each(in_half), UNKNOWN),
    },
    "losses inside a loss": {
        "a factor of rows": (each(weighs_rows), INSIDE),
        "a term of a sum": (each(adds_inside), INSIDE),
        "a number without a gradient": (each(weighs_without_gradient), WEIGHTS),
    },
    "other ways to a gradient": {
        "autograd.grad": (each(by_hand), ["torch.autograd.grad"]),
        "torch's function from before": (
            each(lambda net, i, rows, y: ORIGINAL(mean_loss(net(rows), y))),
            ["another way to back-propagate it"],
        ),
        "of some parameters": (
            each(lambda net, i, rows, y: mean_loss(net(rows), y).backward(inputs=[net.layer.bias])),
            ["backward(inputs=...)"],
        ),
    },
    "parameters with several uses": {
        "two uses in a forward": (
            each(lambda net, i, rows, y: mean_loss(tied(net, rows), y).backward()),
            lambda net, rows, y: cross_entropy(tied(net, rows), y),
        ),
        "layers that are computed again": (each(recomputed), plain),
        "a loss that is computed again": (each(recomputed_loss), ["a re-entrant checkpoint"]),
    },
}
VARIANTS = [(kind, variant) for kind, variants in KINDS.items() for variant in variants]


def run(kind: str, variant: str) -> dict[str, Tensor]:
    net = Net()
    again = nn.Module()
    again.layer = net.layer  # each parameter has two names
    with accumulation_window(net, again, micro_batches=3) as window:
        KINDS[kind][variant][0](window, net, ROWS.own())
    return mean_over_ranks(gradients(net))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("kind", "variant"), VARIANTS)
def test_one_process_or_one_error(pool: RankPool, kind: str, variant: str, world: int) -> None:
    answer = KINDS[kind][variant][1]
    if isinstance(answer, list):
        assert_errors(pool.errors(world, run, kind, variant), *answer)
    else:
        assert_all_close(pool.run(world, run, kind, variant), truth_of(answer, world))
