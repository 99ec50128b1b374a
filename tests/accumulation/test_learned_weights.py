"""Weights of losses that are learned in a window with counts: each value is its share of the window's loss, as its gradient is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics as tm
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_ddp_losses import GlobalBatchLoss, accumulation_window, differentiable, global_mean
from lightning_ddp_losses.testing import RankPool
from tests.accumulation.jobs import Batch, Rows, train
from tests.answers import as_one_process, assert_all_close, one_error
from tests.fits import Trained, grads_of, mean_over_ranks

WORLDS = [1, 2, 3]
# ranks without rows, and a micro-batch without any
ROWS = Rows(
    {
        1: ((3,), (0,), (4,), (2,), (5,)),
        2: ((1, 4), (0, 0), (0, 3), (2, 1), (3, 3)),
        3: ((1, 4, 2), (0, 0, 0), (5, 0, 1), (2, 3, 0), (0, 4, 2)),
    }
)
ALL = range(5)
Losses = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3).double()
        self.scales = nn.Parameter(torch.tensor([0.4, -0.3], dtype=torch.float64))
        self.labelled = GlobalBatchLoss(nn.CrossEntropyLoss())
        self.error = differentiable(tm.MeanSquaredError())

    def losses(self, rows: Tensor, labels: Tensor) -> Losses:
        """The exact losses of this rank's rows."""
        logits = self.layer(rows)
        return {
            "labelled": self.labelled(logits, labels),
            "size": global_mean(logits.abs().sum(), len(rows), name="size"),
        }

    def losses_alone(self, rows: Tensor, labels: Tensor) -> Losses:
        logits = self.layer(rows)
        return {"labelled": cross_entropy(logits, labels), "size": logits.abs().sum() / len(rows)}


def counts_of(batches: list[Batch], prefix: str = "") -> dict[str, int]:
    number = sum(len(labels) for _, labels in batches)
    return {f"{prefix}labelled": number, "size": number}


# ---------------------------------------------------------------------- what is exact

# losses, weights, and the part of a term without rows -> what is back-propagated
WEIGHED: dict[str, Callable[[Losses, Tensor, float], Tensor]] = {
    "uncertainty": lambda found, s, part: (
        found["labelled"] * torch.exp(-s[0]) + found["size"] * torch.exp(-s[1]) + s.sum() * part
    ),
    "variances": lambda found, s, part: (
        found["labelled"] / (2 * s[0].square()) + found["size"] / s[1].square() + s.square().log().sum() * part
    ),
    "a vector": lambda found, s, part: (torch.stack([*found.values()]) * s.softmax(0)).sum() * 3,
    "a dot product": lambda found, s, part: torch.dot(torch.stack([*found.values()]), s.exp()) + s.prod() * part,
    "one weight of two": lambda found, s, part: (
        s[0].sigmoid() * (found["labelled"] + 0.5 * found["size"]) - s[1] * part
    ),
    "a weight of a weight": lambda found, s, part: s[0] * (found["size"] + s[1] * (found["labelled"] - found["size"])),
    "a number beside it": lambda found, s, part: found["labelled"] * s.exp().sum() + 2 * found["size"],
}


def truth_of(name: str, world: int, window: range = ALL) -> dict[str, Tensor]:
    """The gradients of one process on all rows of the window."""
    net = Net()
    WEIGHED[name](net.losses_alone(*ROWS.whole(world, window)), net.scales, 1.0).backward()
    return grads_of(net)


def by_hand(name: str, order: str = "each", is_declared: bool = True) -> dict[str, Tensor]:
    net, batches = Net(), ROWS.own()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    values = []
    with accumulation_window(net, micro_batches=len(batches), counts=counts_of(batches)) as window:
        for rows, labels in batches:
            with window.micro_batch() if is_declared else contextlib.nullcontext():
                found = net.losses(rows, labels)
            values.append(WEIGHED[name](found, net.scales, 1 / len(batches)))
            if order == "each":
                scaler.scale(values[-1]).backward()
        if order == "all at once":
            scaler.scale(torch.stack(values).sum()).backward()
        if order == "backwards":
            for value in values[::-1]:
                scaler.scale(value).backward()
    return {name: grad / 8 for name, grad in mean_over_ranks(grads_of(net)).items()}


test_one_process = as_one_process(by_hand, truth_of, WEIGHED, WORLDS)


@pytest.mark.parametrize(("order", "is_declared"), [("each", False), ("backwards", False), ("all at once", True)])
def test_other_orders(pool: RankPool, order: str, is_declared: bool) -> None:
    assert_all_close(pool.run(3, by_hand, "uncertainty", order, is_declared), truth_of("uncertainty", 3))


def values_by_hand() -> list[dict[str, float]]:
    net, batches = Net(), ROWS.own()
    with accumulation_window(net, micro_batches=len(batches), counts=counts_of(batches)):
        found = [net.losses(*batch) for batch in batches]
        sum(sum(losses.values()) for losses in found).backward()
    return [{name: value.item() for name, value in losses.items()} for losses in found]


@pytest.mark.parametrize("world", WORLDS)
def test_values_add_up_to_those_of_the_window(pool: RankPool, world: int) -> None:
    truth = Net().losses_alone(*ROWS.whole(world))
    for found in pool.run(world, values_by_hand):
        assert found[1] == {"labelled": 0.0, "size": 0.0}
        for name, value in truth.items():
            assert sum(losses[name] for losses in found) == pytest.approx(value.item(), rel=1e-9)


def of_a_metric() -> dict[str, Tensor]:
    net, batches = Net(), ROWS.own()
    count = sum(rows.numel() for rows, _ in batches)
    with accumulation_window(net, micro_batches=len(batches), counts={"error": count}) as window:
        for rows, _ in batches:
            with window.micro_batch():
                value = net.error(net.layer(rows), torch.ones_like(rows))
            (value * net.scales[0].exp() + net.scales[1] / len(batches)).backward()
    return mean_over_ranks(grads_of(net))


def test_a_differentiable_metric(pool: RankPool) -> None:
    net = Net()
    ((net.layer(ROWS.whole(2)[0]) - 1).square().mean() * net.scales[0].exp() + net.scales[1]).backward()
    assert_all_close(pool.run(2, of_a_metric), grads_of(net))


# ---------------------------------------------------------------------- under the strategy


class Module(Trained):  # windows of three micro-batches, of which the last one of an epoch is shorter
    lr = 0.0

    def __init__(self, name: str, how: str) -> None:
        super().__init__()
        self.net = Net()
        self.example, self.how = name, how
        self.automatic_optimization = how != "by hand"
        self.logged: list[dict[str, float]] = []
        self.gradients: list[dict[str, Tensor]] = []

    def training_step(self, batch: Any, index: int) -> Tensor | None:
        if not self.automatic_optimization:
            self.one_window(batch)
            return None
        if self.how == "expected" and index % 3 == 0:
            self.trainer.strategy.expect_counts(counts_of(ROWS.own()[index : index + 3], "net."))  # type: ignore[attr-defined]
        found = self.net.losses(*batch)
        self.logged.append({name: value.item() for name, value in found.items()})
        return WEIGHED[self.example](found, self.net.scales, 1.0)

    def one_window(self, batches: list[Batch]) -> None:
        strategy: Any = self.trainer.strategy
        strategy.expect_counts(counts_of(batches, "net."))
        with strategy.window(len(batches)), strategy.block_backward_sync():
            for batch in batches:
                value = WEIGHED[self.example](self.net.losses(*batch), self.net.scales, 1 / len(batches))
                value.backward()
        self.gradients.append(mean_over_ranks(grads_of(self.net)))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append({name: grad.clone() for name, grad in grads_of(self.net).items()})


class Counting(Module):
    def loss_counts(self, batch: Batch) -> dict[str, int]:
        return counts_of([batch], "net.")


def fit(name: str, how: str) -> tuple[list[dict[str, Tensor]], list[dict[str, float]]]:
    module = (Counting if how == "loss_counts" else Module)(name, how)
    if how == "by hand":
        train(module, [ROWS.own()])
    else:
        train(module, ROWS.own(), accumulate_grad_batches=3)
    return module.gradients, module.logged


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("name", "how"), [("uncertainty", "loss_counts"), ("variances", "loss_counts"), ("a vector", "expected")]
)
def test_training_steps(pool: RankPool, name: str, how: str, world: int) -> None:
    """The second window has two micro-batches of three. Lightning logs the mean of the values."""
    windows = [range(3), range(3, 5)]
    for gradients, logged in pool.run(world, fit, name, how):
        for found, window in zip(gradients, windows, strict=True):
            assert_all_close([found], truth_of(name, world, window))
            losses = Net().losses_alone(*ROWS.whole(world, window))
            means = {name: sum(logged[i][name] for i in window) / len(window) for name in losses}
            assert means == pytest.approx({name: value.item() for name, value in losses.items()}, rel=1e-9)


def test_a_window_by_hand_under_the_strategy(pool: RankPool) -> None:
    for gradients, _ in pool.run(2, fit, "uncertainty", "by hand"):
        assert_all_close(gradients, truth_of("uncertainty", 2))


# ---------------------------------------------------------------------- what is an error


def skipped_on_one_rank(net: Net, i: int, found: Losses) -> Tensor | None:
    """The counts leave it out, too. But the values are over the rows of all ranks."""
    if i == 3 and dist.get_rank() == 1:
        return None
    return WEIGHED["uncertainty"](found, net.scales, 0.2)


def weight_of_rows(net: Net, i: int, found: Losses) -> Tensor:
    return found["labelled"] * net.layer.weight.sum() * (i + 1) + found["size"]


FUNCTION = ["a weighted sum of losses", "counts and totals of the whole window"]
# what is back-propagated in a micro-batch, or None; words of the error
REFUSED: dict[str, tuple[Callable[[Net, int, Losses], Tensor | None], list[str]]] = {
    "a square": (lambda net, i, found: net.scales[0] * found["labelled"].square() + found["size"], ["PowBackward0", *FUNCTION]),
    "a product of two": (lambda net, i, found: found["labelled"] * found["size"], ["MulBackward0", *FUNCTION]),
    "a loss in a weight": (lambda net, i, found: found["labelled"] * (net.scales[0] + found["size"]), FUNCTION),
    "a loss that divides": (lambda net, i, found: net.scales[0] / found["labelled"] + found["size"], ["DivBackward0", *FUNCTION]),
    "a root beside a weight": (
        lambda net, i, found: net.scales[0] * found["labelled"] + found["size"].sqrt(),
        ["SqrtBackward0 of global_mean `size`", *FUNCTION],
    ),
    "ranks that skip others": (skipped_on_one_rank, ["the same micro-batches on every rank", "value is over the rows of all"]),
    "a weight of each micro-batch": (weight_of_rows, ["upstream gradients", "the same weights in every micro-batch"]),
}  # fmt: skip


def refused(name: str) -> None:
    net, batches = Net(), ROWS.own()
    is_short = name == "ranks that skip others" and dist.get_rank() == 1
    counts = counts_of([batch for i, batch in enumerate(batches) if not (is_short and i == 3)])
    with accumulation_window(net, micro_batches=len(batches), counts=counts) as window:
        for i, batch in enumerate(batches):
            with window.micro_batch():
                value = REFUSED[name][0](net, i, net.losses(*batch))
            if value is not None:
                value.backward()


test_one_error_on_every_rank = one_error(refused, REFUSED, [2, 3])


def with_totals() -> None:
    """A value that is the mean of the whole window, in each micro-batch, has no share of a learned weight."""
    net, batches = Net(), ROWS.own()
    counts = {"size": counts_of(batches)["size"]}
    totals = {"size": sum(net.layer(rows).abs().sum().item() for rows, _ in batches)}
    with accumulation_window(net, counts=counts, totals=totals) as window:
        for rows, _ in batches:
            with window.micro_batch():
                value = global_mean(net.layer(rows).abs().sum(), len(rows), name="size")
            (value * net.scales.exp().sum()).backward()


def without_counts() -> None:
    net = Net()
    with accumulation_window(net) as window:
        for batch in ROWS.own():
            with window.micro_batch():
                value = WEIGHED["uncertainty"](net.losses(*batch), net.scales, 0.2)
            value.backward()
