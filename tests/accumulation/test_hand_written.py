"""`accumulation_window` in loops without Lightning, with torch's DDP and without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses import GlobalBatchLoss, accumulation_window, global_mean
from lightning_ddp_losses.testing import RankPool
from tests.accumulation.jobs import CASES, Job, own_batches, train
from tests.answers import assert_all_close, one_error
from tests.counting import CountCollectives, StepCollectives
from tests.fits import grads_of, mean_over_ranks

COUNT = 4  # micro-batches of the window


class Step(nn.Module):  # the encoder and loss of a job as DDP wants them: what runs is `forward`
    def __init__(self, case: str) -> None:
        super().__init__()
        self.job = Job(case)
        self.net, self.loss = self.job.net, self.job.loss

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        return self.job.case.value(self, rows, labels)


def gradients(case: str, *, wrapped: bool) -> dict[str, Tensor]:
    step = Step(case)
    model: Any = DistributedDataParallel(step) if wrapped else step
    batches = own_batches(step.job.global_batches(COUNT, COUNT))
    with accumulation_window(model) as window:
        if step.job.case.expects is not None:
            window.expect_counts(step.job.case.expects(batches))
        for i, batch in enumerate(batches):
            waits = wrapped and i + 1 < COUNT
            with model.no_sync() if waits else contextlib.nullcontext(), window.micro_batch():
                model(*batch).backward()
    return grads_of(step.job) if wrapped else mean_over_ranks(grads_of(step.job))


def gradients_alone(case: str) -> dict[str, Tensor]:
    job = Job(case, alone=True)
    rows, labels = zip(*job.global_batches(COUNT, COUNT), strict=True)
    (CASES[case].value_alone or CASES[case].value)(job, torch.cat(rows), torch.cat(labels)).backward()
    return grads_of(job)


@pytest.mark.parametrize("wrapped", [True, False], ids=["DDP", "all-reduce"])
@pytest.mark.parametrize(
    "case", ["cross entropy, ignored", "ArcFace, non-zero, regularised", "global_mean, two divisors"]
)
def test_a_loop_of_ones_own(pool: RankPool, case: str, wrapped: bool) -> None:
    alone = pool.run(1, gradients_alone, case, distributed=False)[0]
    assert_all_close(pool.run(2, gradients, case, wrapped=wrapped), alone)


def two_heads() -> dict[str, Tensor]:
    """One loss called twice in each micro-batch: two means, each with its own divisor."""
    job = Job("cross entropy, ignored")
    counts = (4, 6, 2) if dist.get_rank() else (3, 5, 1)
    with accumulation_window(job, micro_batches=3) as window:
        for n in counts:
            rows = torch.ones(n, 5, dtype=torch.float64) * n
            with window.micro_batch():
                first = job.loss(job.net.head(job.net(rows)), torch.zeros(n, dtype=torch.int64))
                second = job.loss(job.net.head(job.net(-rows)), torch.ones(n, dtype=torch.int64))
            (first + second).backward()
    return mean_over_ranks(grads_of(job))


def two_heads_alone() -> dict[str, Tensor]:
    job = Job("cross entropy, ignored", alone=True)
    rows = torch.cat([torch.ones(n, 5, dtype=torch.float64) * n for n in (4, 6, 2, 3, 5, 1)])
    zeros = torch.zeros(len(rows), dtype=torch.int64)
    (job.loss(job.net.head(job.net(rows)), zeros) + job.loss(job.net.head(job.net(-rows)), zeros + 1)).backward()
    return grads_of(job)


def test_a_loss_that_is_called_twice_has_two_divisors(pool: RankPool) -> None:
    assert_all_close(pool.run(2, two_heads), pool.run(1, two_heads_alone, distributed=False)[0])


def mean_of(model: nn.Module) -> Tensor:
    return global_mean(model(torch.ones(3, 2)).sum(), 3)


def stepping(model: nn.Linear) -> None:
    mean_of(model).backward()
    if dist.get_rank() == 1:
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def foreign(model: nn.Linear) -> None:
    other = nn.Linear(2, 1)
    global_mean((model(torch.ones(3, 2)) + other(torch.ones(3, 2))).sum(), 3).backward()


ERRORS: dict[str, tuple[Callable[[nn.Linear], Any], str]] = {
    "gradients from before": (lambda model: mean_of(model).backward(), "Call optimizer.zero_grad() before the window"),
    "a step inside": (stepping, "step of SGD"),
    "nested": (lambda model: accumulation_window(model).__enter__(), "no window around it"),
    "another model": (foreign, "hand in the module that holds it"),
    "another term": (
        lambda model: (mean_of(model) + model.weight.square().mean()).backward(),
        "which reaches `weight`",
    ),
    "other numbers": (
        lambda model: [mean_of(model).backward() for _ in range(1 + dist.get_rank())],
        "accumulation_window",
    ),
}


def in_a_window(name: str) -> None:
    model = nn.Linear(2, 1)
    if name == "gradients from before" and dist.get_rank() == 1:
        model(torch.ones(3, 2)).sum().backward()
    with accumulation_window(model) as window, window.micro_batch():
        ERRORS[name][0](model)


test_errors_on_every_rank = one_error(in_a_window, ERRORS)


def fail_inside(model: nn.Module) -> None:
    with accumulation_window(model) as window, window.micro_batch():
        mean_of(model).backward()
        raise ZeroDivisionError


def test_nothing_is_left_behind() -> None:
    """An error inside the block: torch's backward and optimizers are as before, and so are gradients."""
    model, plain = nn.Linear(2, 1), torch.autograd.backward
    with pytest.raises(ZeroDivisionError):
        fail_inside(model)
    assert torch.autograd.backward is plain
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with accumulation_window(model) as window, window.micro_batch():
        GlobalBatchLoss(nn.MSELoss())(model(torch.ones(3, 2)), torch.ones(3, 1)).backward()


def test_windows_of_several_backwards_of_one_value() -> None:
    """A value that is back-propagated twice counts its rows once: its gradient is twice that of one process."""
    model = nn.Linear(2, 1).double()
    with accumulation_window(model) as window, window.micro_batch():
        value = global_mean(model(torch.ones(4, 2, dtype=torch.float64)).sum(), 4)
        value.backward(retain_graph=True)
        value.backward()
    assert model.bias.grad is not None
    assert float(model.bias.grad) == pytest.approx(2.0)


# A window costs no collective per micro-batch beside plain accumulation; in a hand-written loop one when it ends.

COUNTED = [
    "cross entropy, ignored",
    "ArcFace, non-zero, regularised",
    "global_mean",
    "class shards",
    "MeanSquaredError",
]
WINDOW, COUNT = 3, 9


def fit_counted(case: str, accumulation: Any) -> list[int]:
    """Collectives of each micro-batch of a fit, from its start to its end."""
    job, counter = Job(case, window=WINDOW), StepCollectives()
    job.batches = own_batches(job.global_batches(COUNT, WINDOW))
    train(job, job.batches, {"accumulation": accumulation}, accumulate_grad_batches=WINDOW, callbacks=[counter])
    return [len(names) for names in counter.steps]


@pytest.mark.parametrize("case", COUNTED)
def test_no_collective_more_than_plain_accumulation(pool: RankPool, case: str) -> None:
    plain, window = (pool.run(2, fit_counted, case, accumulation) for accumulation in ("mean", "window"))
    assert len(plain[0]) == COUNT
    assert window == plain


def loop_counted(case: str) -> list[int]:
    """Collectives of a window without and with ``accumulation_window``."""
    step = Step(case)
    model = DistributedDataParallel(step)
    batches = own_batches(step.job.global_batches(WINDOW, WINDOW))
    counts = []
    # the first two show DDP's own set-up
    for windowed in (False, False, False, True):
        model.zero_grad()
        with CountCollectives() as counter:
            with accumulation_window(model) if windowed else contextlib.nullcontext() as window:
                for i, batch in enumerate(batches):
                    declared = contextlib.nullcontext() if window is None else window.micro_batch()
                    with model.no_sync() if i + 1 < WINDOW else contextlib.nullcontext(), declared:
                        model(*batch).backward()
            counts.append(len(counter.names))
    return counts[2:]


@pytest.mark.parametrize("case", ["cross entropy, ignored", "global_mean"])
def test_one_more_in_a_hand_written_loop(pool: RankPool, case: str) -> None:
    for plain, window in pool.run(2, loop_counted, case):
        assert window == plain + 1
