"""What an accumulation window cannot make exact is an error on every rank, which names the term and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses import GlobalBatchLoss, SigLipLoss, global_mean
from lightning_ddp_losses.testing import RankPool
from tests.accumulation.jobs import CLASSES, DIM, Job, cross_entropy_of, own_batches, train
from tests.accumulation.test_parity import ByHand
from tests.answers import one_error
from tests.refusals import Refused, refusals

Objective = Callable[[Any, Tensor, Tensor], Tensor]


class Written(Job):  # a net and an objective of the test's own
    def __init__(self, name: str) -> None:
        super().__init__("cross entropy, ignored")
        self.objective = OBJECTIVES[name][0]
        self.pairs = GlobalBatchLoss(pml.SupConLoss(), mode="rows")
        self.towers = SigLipLoss().double()
        self.proxies = GlobalBatchLoss(pml.ProxyNCALoss(CLASSES, DIM).double())

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.objective(self, *batch)


def _with_penalty(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy_of(job, rows, labels) + 0.1 * job.net.head.weight.square().sum()


def _plain(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(job.net.head(job.net(rows)), labels.clamp(min=0))


def _norm(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
    return global_mean(job.net(rows).square().sum(), len(rows), name="norm")


def _nested(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
    return global_mean(_norm(job, rows, labels) * len(rows), len(rows), name="outer")


def _expecting(batch: int, count: Callable[[], int]) -> Objective:
    """Counts that are announced at one batch."""

    def objective(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
        if job.trainer.fit_loop.epoch_loop.batch_idx == batch:
            job.trainer.strategy.expect_counts({"norm": count()})
        return _norm(job, rows, labels)

    return objective


OBJECTIVES: dict[str, tuple[Objective, list[str]]] = {
    "a hand-written regulariser": (_with_penalty, ["PowBackward0", "`net.head.weight`", "global_mean(total, count)"]),
    "a loss of this rank's rows": (_plain, ["NllLossBackward0", "GlobalBatchLoss"]),
    "a loss that compares rows": (
        lambda job, rows, labels: job.pairs(job.net(rows), labels),
        ["GlobalBatchLoss(SupConLoss), which reaches", "microbatched"],
    ),
    "two towers": (
        lambda job, rows, _: job.towers(job.net(rows), job.net(rows + 1)),
        ["SigLipLoss, which reaches", "microbatched"],
    ),
    "two divisors": (
        lambda *batch: cross_entropy_of(*batch) + _norm(*batch),
        ["losses with different divisors", "GlobalBatchLoss(CrossEntropyLoss)", "global_mean `norm`", "expect_counts"],
    ),
    "a mean of a mean": (_nested, ["global_mean `outer`", "depends on global_mean `norm`"]),
    "a root of a loss": (
        lambda *batch: 2 * cross_entropy_of(*batch).sqrt(),
        ["a weighted sum of losses", "SqrtBackward0 of GlobalBatchLoss(CrossEntropyLoss)"],
    ),
    "a product of losses": (
        lambda *batch: cross_entropy_of(*batch) * _norm(*batch),
        ["a weighted sum of losses", "MulBackward0"],
    ),
    "a number over a loss": (
        lambda *batch: 1.0 / _norm(*batch) * 3,
        ["a weighted sum of losses", "ReciprocalBackward0"],
    ),
    "a tensor over a loss": (
        lambda job, rows, labels: torch.ones((), dtype=rows.dtype) / _norm(job, rows, labels),
        ["a weighted sum of losses", "DivBackward0"],
    ),
    "counts that were not so": (_expecting(0, lambda: 5), ["expect_counts of global_mean `norm`", "10 over all ranks"]),
    "a negative count": (
        _expecting(0, lambda: -1 if dist.get_rank() else 3),
        ["expect_counts", "finite counts, not negative", "-1"],
    ),
    "counts that come late": (_expecting(1, lambda: 5), ["before the first loss", "micro-batch 2"]),
}


def fit(job: Job, every: int = 2, rows: int = 2, **options: Any) -> None:
    strategy = {"find_unused_parameters": isinstance(job, Written)}
    train(job, own_batches(job.global_batches(rows, 2)), strategy, accumulate_grad_batches=every, **options)


def fit_written(name: str) -> None:
    fit(Written(name), rows=4)


test_what_cannot_be_exact = one_error(fit_written, OBJECTIVES)


def test_windows_of_one_micro_batch_take_any_loss(pool: RankPool) -> None:
    pool.run(2, fit_single)


def fit_single() -> None:
    for name in ("a hand-written regulariser", "a loss that compares rows", "two divisors"):
        fit(Written(name), every=4, rows=1, max_epochs=2)  # windows longer than an epoch


def fit_uneven() -> None:
    job = ByHand("cross entropy, ignored", True)
    batches = own_batches(job.global_batches(4, 2))
    train(job, [batches[: 3 + dist.get_rank()]])


class StepsInside(ByHand):
    def training_step(self, window: Any, index: int) -> None:
        strategy: Any = self.trainer.strategy
        optimizer: Any = self.optimizers()
        with strategy.window() as open_window:
            for batch in window:
                with open_window.micro_batch():
                    self.manual_backward(self.case.value(self, *batch))
                optimizer.step()


def fit_and_step_inside() -> None:
    job = StepsInside("cross entropy, ignored", False)
    train(job, [own_batches(job.global_batches(2, 2))])


class Twice(Job):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


class KeepsGradients(Job):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Leave what the last step had."""


class Skips(Job):
    def training_step(self, batch: Any, index: int) -> Any:
        return None if index == 1 else super().training_step(batch, index)


def fit_job(make: Callable[[str], Job], rows: int = 2) -> None:
    fit(make("cross entropy, ignored"), rows=rows)


REFUSED = {
    "steps inside": Refused(lambda _: fit_and_step_inside(), "step of SGD", "ConfigurationError", same=False),
    "evaluates twice": Refused(
        lambda _: fit_job(Twice), "an optimizer that evaluates each batch once", "ConfigurationError", same=False
    ),
    "has gradients from before": Refused(
        lambda _: fit_job(KeepsGradients, rows=4), "gradients before it", "ConfigurationError", same=False
    ),
}
test_optimizers_that_do_not_wait = refusals(__name__, "REFUSED")
