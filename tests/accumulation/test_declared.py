"""Programs that a window once took for others: with declared micro-batches each is one process, or one error on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics as tm
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_ddp_losses import (
    GlobalBatchLoss,
    accumulation_window,
    differentiable,
    global_mean,
    ssl,
)
from lightning_ddp_losses.testing import RankPool
from tests.accumulation.jobs import Batch, Rows, train
from tests.answers import as_one_process, assert_all_close, assert_errors, one_error
from tests.fits import Trained, grads_of, mean_over_ranks

ROWS = Rows({2: ((1, 4), (5, 1), (2, 3)), 3: ((1, 4, 2), (5, 1, 0), (2, 3, 6))})
WORLDS = [2, 3]
Body = Callable[[Any, "Net", list[Batch]], Any]


class Net(nn.Module):  # three rows of logits, and a number that no module holds
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3).double()
        self.scale = [torch.tensor(0.5, dtype=torch.float64, requires_grad=True)]

    def forward(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.layer(rows)
        return logits


def mean_loss(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return global_mean(cross_entropy(logits, labels, reduction="sum"), len(labels), **options)


def gradients(net: Net) -> dict[str, Tensor]:
    """All gradients, also those that are missing."""
    found = dict(net.named_parameters()) | {"scale": net.scale[0]}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in found.items()}


def truth_of(
    loss: Callable[..., Tensor], world: int = 2, left_out: Sequence[tuple[int, int]] = ()
) -> dict[str, Tensor]:
    """The gradients of one process on the rows of all ranks and micro-batches but those left out."""
    net = Net()
    loss(net, *ROWS.whole(world, left_out=left_out)).backward()
    return gradients(net)


# ---------------------------------------------------------------------- what is exact


def new_instance(window: Any, net: Net, batches: list[Batch]) -> None:
    for rows, labels in batches:
        with window.micro_batch():
            GlobalBatchLoss(nn.CrossEntropyLoss())(net(rows), labels).backward()


def new_metric(window: Any, net: Net, batches: list[Batch]) -> None:
    for rows, _ in batches:
        with window.micro_batch():
            differentiable(tm.MeanSquaredError())(net(rows), torch.zeros_like(rows)).backward()


def forwards(window: Any, net: Net, batches: list[Batch]) -> list[Tensor]:
    values = []
    for rows, labels in batches:
        with window.micro_batch():
            values.append(mean_loss(net(rows), labels))
    return values


def one_backward(window: Any, net: Net, batches: list[Batch]) -> None:
    sum(forwards(window, net, batches)).backward()  # type: ignore[union-attr]


def stacked(window: Any, net: Net, batches: list[Batch]) -> None:
    torch.stack(forwards(window, net, batches)).mean().mul(3).backward()


def two_backwards(window: Any, net: Net, batches: list[Batch]) -> None:
    for rows, labels in batches:
        with window.micro_batch():
            logits = net(rows)
            first, second = mean_loss(logits, labels), mean_loss(-logits, labels)
        first.backward(retain_graph=True)
        second.backward()


def twice(window: Any, net: Net, batches: list[Batch]) -> None:
    for value in forwards(window, net, batches):
        value.backward(retain_graph=True)
        value.backward()


def other_orders(window: Any, net: Net, batches: list[Batch]) -> None:
    values = forwards(window, net, batches)
    for i in ((0, 1, 2), (1, 0, 2), (2, 1, 0))[dist.get_rank()]:
        values[i].backward()


LEFT_OUT = [(0, 0), (1, 1), (2, 2)]  # micro-batch and rank


def skipping(window: Any, net: Net, batches: list[Batch]) -> None:
    for i, value in enumerate(forwards(window, net, batches)):
        if (i, dist.get_rank()) not in LEFT_OUT:
            value.backward()


def skipping_between(window: Any, net: Net, batches: list[Batch]) -> None:
    for i, (rows, labels) in enumerate(batches):
        with window.micro_batch():
            value = GlobalBatchLoss(nn.CrossEntropyLoss())(net(rows), labels)
        if (i, dist.get_rank()) not in LEFT_OUT:
            value.backward()


def plain_tensor(window: Any, net: Net, batches: list[Batch]) -> None:
    for rows, labels in batches:
        with window.micro_batch():
            mean_loss(net(rows) * net.scale[0], labels).backward()


def outputs(window: Any, net: Net, batches: list[Batch]) -> None:
    metric = differentiable(tm.MeanSquaredError(num_outputs=3))
    for rows, _ in batches:
        with window.micro_batch():
            metric(net(rows), torch.zeros_like(rows)).sum().backward()


def scaled(window: Any, net: Net, batches: list[Batch]) -> None:
    """A scaler of half precision, which divides the gradients before the window ends."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for rows, labels in batches:
        with window.micro_batch():
            value = mean_loss(net(rows), labels)
        scaler.scale(value).backward()
    scaler.unscale_(optimizer)


def penalised_input(window: Any, net: Net, batches: list[Batch]) -> None:
    """A penalty on the gradient of each row, whose input needs a gradient."""
    for given, labels in batches:
        rows = given.clone().requires_grad_()
        with window.micro_batch():
            mean_loss(net(rows) + _penalty(net, rows)[:, None], labels).backward()


def _penalty(net: Net, rows: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(net(rows).square().sum(), rows, create_graph=True)
    return grad.square().sum(1)


def _cross_entropy(net: Net, rows: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(net(rows), labels)


EXACT: dict[str, tuple[Body, Callable[[Net, Tensor, Tensor], Tensor], Sequence[tuple[int, int]]]] = {
    "a new loss in each micro-batch": (new_instance, _cross_entropy, ()),
    "a new metric in each micro-batch": (new_metric, lambda net, rows, _: net(rows).square().mean(), ()),
    "one backward over all": (one_backward, _cross_entropy, ()),
    "one backward of a mean": (stacked, _cross_entropy, ()),
    "two backwards": (
        two_backwards,
        lambda net, rows, labels: cross_entropy(net(rows), labels) + cross_entropy(-net(rows), labels),
        (),
    ),
    "one loss twice": (twice, lambda *given: 2 * _cross_entropy(*given), ()),
    "other orders on each rank": (other_orders, _cross_entropy, ()),
    "ranks skip others": (skipping, _cross_entropy, LEFT_OUT),
    "ranks skip others between forwards": (skipping_between, _cross_entropy, LEFT_OUT),
    "a plain tensor": (plain_tensor, lambda net, rows, y: cross_entropy(net(rows) * net.scale[0], y), ()),
    "a metric of several outputs": (outputs, lambda net, rows, _: net(rows).square().mean(0).sum(), ()),
    "a scaler": (scaled, _cross_entropy, ()),
    "a penalty on the input": (
        penalised_input,
        lambda net, rows, y: cross_entropy(net(rows) + _penalty(net, rows.requires_grad_())[:, None], y),
        (),
    ),
}


def by_hand(name: str) -> dict[str, Tensor]:
    net = Net()
    with accumulation_window(net, micro_batches=3) as window:
        EXACT[name][0](window, net, ROWS.own())
    return mean_over_ranks(gradients(net))


def truth_of_row(name: str, world: int) -> dict[str, Tensor]:
    _, loss, left_out = EXACT[name]
    return truth_of(loss, world, left_out)


test_one_process = as_one_process(by_hand, truth_of_row, EXACT, WORLDS)


# ---------------------------------------------------------------------- what is an error


class LogMSE(tm.MeanSquaredError):
    def compute(self) -> Tensor:
        return super().compute().log()


def each(step: Callable[[Net, int, Tensor, Tensor], Any]) -> Body:
    """A body that declares each micro-batch."""

    def body(window: Any, net: Net, batches: list[Batch]) -> None:
        for i, (rows, labels) in enumerate(batches):
            with window.micro_batch():
                step(net, i, rows, labels)

    return body


def dropped(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    mean_loss(net(rows), labels).backward()
    if i == 0:
        net.zero_grad()


def dropped_at_the_end(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    mean_loss(net(rows), labels).backward()
    if i == 2 and dist.get_rank() == 1:
        net.zero_grad(set_to_none=False)


def failing(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    logits = net(rows)
    if i == 0 and dist.get_rank() == 1:
        logits.register_hook(lambda grad: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        mean_loss(logits, labels).backward()


def reduced_inside(window: Any, net: Net, batches: list[Batch]) -> None:
    other_orders(window, net, batches)
    for parameter in net.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def clipped(window: Any, net: Net, batches: list[Batch]) -> None:
    one_backward(window, net, batches)
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)


def undeclared(window: Any, net: Net, batches: list[Batch]) -> None:
    for rows, labels in batches:
        mean_loss(net(rows), labels).backward()


def undeclared_on_one(window: Any, net: Net, batches: list[Batch]) -> None:
    with window.micro_batch() if dist.get_rank() else contextlib.nullcontext():
        mean_loss(net(batches[0][0]), batches[0][1]).backward()


def nested(window: Any, net: Net, batches: list[Batch]) -> None:
    with window.micro_batch():
        if dist.get_rank() == 1:
            forwards(window, net, batches)


def fewer_on_one(window: Any, net: Net, batches: list[Batch]) -> None:
    one_backward(window, net, batches)
    if dist.get_rank() == 1:
        with window.micro_batch():
            pass


def other_lines(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    total, number = cross_entropy(net(rows), labels, reduction="sum"), len(labels)
    if i == 1:
        global_mean(total, number).backward()
    else:
        global_mean(total, number).backward()


def other_lines_on_one_rank(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    total, number = cross_entropy(net(rows), labels, reduction="sum"), len(labels)
    if dist.get_rank() == 1:
        global_mean(total, number).backward()
    else:
        global_mean(total, number).backward()


def metric_skipped(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    value = differentiable(tm.MeanSquaredError())(net(rows), torch.zeros_like(rows))
    if i != dist.get_rank():
        value.backward()


def learned_weight(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    (torch.exp(-net.scale[0]) * mean_loss(net(rows), labels) + net.scale[0]).backward()


def normalised(net: Net, i: int, rows: Tensor, labels: Tensor) -> None:
    value = mean_loss(net(rows), labels)
    (value / value.detach()).backward()


REFUSED: dict[str, tuple[Body, list[str]]] = {
    "zero_grad": (each(dropped), ["gradients since its last backward", "layer.weight`", "do not call backward"]),
    "zero_grad of one rank": (each(dropped_at_the_end), ["gradients since its last backward", "layer.weight`"]),
    "a backward that fails": (each(failing), ["a backward inside it", "ZeroDivisionError"]),
    "gradients reduced inside": (reduced_inside, ["gradients since its last backward", "layer.weight`"]),
    "clipped inside": (clipped, ["gradients since its last backward", "layer.weight`"]),
    "a metric of one's own": (
        each(lambda net, i, rows, _: differentiable(LogMSE())(net(rows), torch.zeros_like(rows)).backward()),
        ["LogMSE", "which reaches", "microbatched"],
    ),
    "koleo": (
        each(lambda net, i, rows, _: ssl.koleo(net(rows)).backward()),
        ["koleo", "which reaches", "microbatched"],
    ),
    "undeclared": (
        undeclared,
        [
            "global_mean at test_declared.py:",
            "with accumulation_window(model) as window:",
            "with window.micro_batch():",
        ],
    ),
    "undeclared on one rank": (undeclared_on_one, ["micro-batch of the accumulation window", "not declared"]),
    "a micro-batch inside one": (nested, ["no micro-batch around it", "micro-batch 1"]),
    "other numbers": (fewer_on_one, ["micro-batches"]),
    "other lines": (each(other_lines), ["losses without a name", "the same in each micro-batch", "name="]),
    "other lines on one rank": (
        each(other_lines_on_one_rank),
        ["losses without a name", "the same on each rank", "name="],
    ),
    "a metric that ranks skip differently": (
        each(metric_skipped),
        ["MeanSquaredError", "backward in the same micro-batches on every rank"],
    ),
    "a learned weight": (each(learned_weight), ["what is back-propagated"]),
    "a loss over its value": (each(normalised), ["with the same weights in every micro-batch"]),
    "some inputs": (
        each(lambda net, i, rows, y: mean_loss(net(rows), y).backward(inputs=[net.layer.weight])),
        ["backward(inputs=...)"],
    ),
}


def refused(name: str) -> None:
    net = Net()
    try:
        with accumulation_window(net, micro_batches=3) as window:
            REFUSED[name][0](window, net, ROWS.own())
    finally:
        assert all(parameter.grad is None for parameter in net.parameters()), "gradients that nobody corrected"


test_one_error_on_every_rank = one_error(refused, REFUSED, WORLDS)


def other_sizes_on_ranks() -> None:
    """Ranks divide by other estimates, and DDP averages their gradients inside the window."""
    net = Net()
    with accumulation_window(net, micro_batches=3 + dist.get_rank()) as window:
        new_instance(window, net, ROWS.own())


def of_an_earlier_window() -> None:
    net = Net()
    rows, labels = ROWS.own()[0]
    with accumulation_window(net) as first, first.micro_batch():
        late = mean_loss(net(rows), labels)
    with accumulation_window(net) as second:
        new_instance(second, net, ROWS.own()[1:])
        late.backward()


def again_after_the_window() -> None:
    net = Net()
    rows, labels = ROWS.own()[0]
    with accumulation_window(net, micro_batches=2) as window:
        for _ in range(2):
            with window.micro_batch():
                loss = mean_loss(net(rows), labels)
            loss.backward(retain_graph=True)
    loss.backward()


class TwoTasks(Net):  # two global losses around one criterion
    def __init__(self) -> None:
        super().__init__()
        criterion = nn.CrossEntropyLoss()
        self.of_a = GlobalBatchLoss(criterion)
        self.of_b = GlobalBatchLoss(criterion)


def shared_criterion() -> None:
    net = TwoTasks()
    with accumulation_window(net) as window:
        for i, (rows, labels) in enumerate(ROWS.own()):
            with window.micro_batch():
                loss = (net.of_a, net.of_b)[i % 2](net(rows), labels)
            loss.backward()


def in_another_thread() -> None:
    """A thread has no window, and the loss is divided by its micro-batch alone."""
    net, batches = Net(), ROWS.own()
    with (
        accumulation_window(net, micro_batches=3, counts=sum(len(labels) for _, labels in batches)),
        ThreadPoolExecutor(1) as threads,
    ):
        for rows, labels in batches:
            threads.submit(mean_loss, net(rows), labels).result().backward()


def from_before_the_window() -> None:
    net, batches = Net(), ROWS.own()
    early = mean_loss(net(batches[0][0]), batches[0][1])
    with accumulation_window(net, micro_batches=2, counts=sum(len(labels) for _, labels in batches[1:])):
        for rows, labels in batches[1:]:
            mean_loss(net(rows), labels).backward()
        early.backward()


def after_an_error() -> dict[str, Tensor]:
    net = Net()
    with contextlib.suppress(Exception), accumulation_window(net) as window:
        new_instance(window, net, ROWS.own()[:1])
        raise ArithmeticError
    with accumulation_window(net) as window:
        new_instance(window, net, ROWS.own())
    return mean_over_ranks(gradients(net))


def test_the_window_after_an_error(pool: RankPool) -> None:
    assert_all_close(pool.run(2, after_an_error), truth_of(_cross_entropy))


def without_counts() -> dict[str, Tensor]:
    """No row counts on any rank: the gradient is zero."""
    net = Net()
    with accumulation_window(net, micro_batches=2) as window:
        for _ in range(2):
            with window.micro_batch():
                global_mean(net(torch.ones(2, 3, dtype=torch.float64)).sum(), 0).backward()
    return mean_over_ranks(gradients(net))


def test_a_window_of_zero_counts(pool: RankPool) -> None:
    assert_all_close(pool.run(2, without_counts), gradients(Net()))


def with_counts() -> dict[str, Tensor]:
    """Counts that are known before: no micro-batch is declared, and another term may be added."""
    net, batches = Net(), ROWS.own()
    with accumulation_window(net, micro_batches=3, counts=sum(len(labels) for _, labels in batches)):
        for rows, labels in batches:
            (mean_loss(net(rows), labels) + net.layer.weight.square().sum() / 3).backward()
    return mean_over_ranks(gradients(net))


def test_counts_without_micro_batches(pool: RankPool) -> None:
    truth = truth_of(lambda net, rows, y: cross_entropy(net(rows), y) + net.layer.weight.square().sum())
    assert_all_close(pool.run(2, with_counts), truth)


# ---------------------------------------------------------------------- under the strategy


class Module(Trained):  # trains on this rank's rows, in one window
    def __init__(self, name: str) -> None:
        super().__init__()
        self.net, self.name = Net(), name

    def training_step(self, batch: Batch, index: int) -> Tensor:
        return STEPS[self.name][0](self.net, *batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = {name: grad.clone() for name, grad in grads_of(self.net).items()}


def two_terms(net: Net, rows: Tensor, labels: Tensor) -> Tensor:
    logits = net(rows)
    return mean_loss(logits, labels) + mean_loss(-logits, labels)


# the loss of a micro-batch, and the loss of one process or words of the error
STEPS: dict[str, tuple[Callable[[Net, Tensor, Tensor], Tensor], Any]] = {
    "a new loss": (lambda net, rows, y: GlobalBatchLoss(nn.CrossEntropyLoss())(net(rows), y), _cross_entropy),
    "two unnamed terms": (two_terms, EXACT["two backwards"][1]),
    "a new metric of several outputs": (
        lambda net, rows, _: differentiable(tm.MeanSquaredError(num_outputs=3))(
            net(rows), torch.zeros_like(rows)
        ).sum(),
        EXACT["a metric of several outputs"][1],
    ),
    "a metric of one's own": (
        lambda net, rows, _: differentiable(LogMSE())(net(rows), torch.zeros_like(rows)),
        REFUSED["a metric of one's own"][1],
    ),
    "koleo": (lambda net, rows, _: ssl.koleo(net(torch.cat([rows, rows + 1]))), REFUSED["koleo"][1]),
    "a learned weight": (
        lambda net, rows, y: torch.exp(-net.scale[0]) * mean_loss(net(rows), y) + net.scale[0],
        ["what is back-propagated"],
    ),
}


def fit_step(name: str, make: type[Module] = Module) -> dict[str, Tensor]:
    module = make(name)
    train(module, ROWS.own(), accumulate_grad_batches=3)
    return module.gradients


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", STEPS)
def test_training_steps(pool: RankPool, name: str, world: int) -> None:
    answer = STEPS[name][1]
    if isinstance(answer, list):
        assert_errors(pool.errors(world, fit_step, name), *answer)
        return
    truth = truth_of(answer, world)
    del truth["scale"]
    assert_all_close(pool.run(world, fit_step, name), truth)


class Changing(Module):  # changes gradients after a backward that is not the last
    def on_after_backward(self) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_idx == 0 and dist.get_rank() == 1:
            nn.utils.clip_grad_norm_(self.parameters(), 0.01)


class Manual(Module):  # a window in manual optimisation
    by_hand = True

    def training_step(self, batch: list[Batch], index: int) -> None:  # type: ignore[override]
        strategy: Any = self.trainer.strategy
        body = (EXACT | REFUSED)[self.name][0]
        with strategy.window(len(batch)) as window, strategy.block_backward_sync():
            body(window, self.net, batch)
        self.gradients = mean_over_ranks(gradients(self.net))


def fit_manual(name: str) -> dict[str, Tensor]:
    module = Manual(name)
    train(module, [ROWS.own()])
    return module.gradients


test_manual_optimisation = as_one_process(fit_manual, truth_of_row, EXACT, WORLDS)
test_errors_in_manual_optimisation = one_error(fit_manual, REFUSED, WORLDS)
