"""What the checks say of accumulation: nothing of exact windows, and how far plain accumulation is from one where counts differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_ddp_losses import DDPChecks, DDPLossStrategy, LossCheck, global_mean
from lightning_ddp_losses.testing import RankPool
from tests.accumulation.jobs import CLASSES, IGNORED, Batch, Job, cross_entropy_of, own_batches
from tests.accumulation.test_parity import ByHand
from tests.fits import listed, make_trainer

FEATURES = 5
COUNT = 7  # micro-batches: the last window of three is shorter
SILENT = [
    "cross entropy, ignored",
    "cross entropy, sum",
    "ArcFace, non-zero, regularised",
    "class shards",
    "MeanSquaredError",
    "global_mean",
    "global_mean, two divisors",
]


def checked(job: LightningModule, batches: Sequence[Any], strategy: Any, **options: Any) -> dict[str, Any]:
    """Fit with all checks; returns what they found, and the losses that they saw before each step."""
    losses = LossCheck()
    checks = DDPChecks(action="log", summary=False, file=False)
    trainer = make_trainer(strategy, callbacks=[checks, losses], **options)
    trainer.fit(job, listed(batches))
    return {"findings": [finding.record() for finding in checks.findings], "losses": losses.history}


def fit_window(case: str, manual: bool) -> dict[str, Any]:
    strategy = DDPLossStrategy(accumulation="window")
    if manual:
        by_hand = ByHand(case, blocked=True)
        batches = own_batches(by_hand.global_batches(6, 3))
        return checked(by_hand, [batches[:3], batches[3:]], strategy)
    job = Job(case, window=3)
    job.batches = own_batches(job.global_batches(COUNT, 3))
    return checked(job, job.batches, strategy, accumulate_grad_batches=3) | {"logged": job.logged}


@pytest.mark.parametrize(
    ("case", "manual"), [*((case, False) for case in SILENT), *((case, True) for case in SILENT[:1] + SILENT[-1:])]
)
def test_exact_windows_are_silent(pool: RankPool, case: str, manual: bool) -> None:
    for of_rank in pool.run(2, fit_window, case, manual):
        assert not [f for f in of_rank["findings"] if f["severity"] != "note" or f["name"] == "accumulation"]


def test_the_loss_of_a_micro_batch_is_its_own(pool: RankPool) -> None:
    """Under "window" nothing divides it by the number of micro-batches."""
    for of_rank in pool.run(2, fit_window, "global_mean", False):
        last = [of_rank["logged"][m] for m in (2, 5, 6)]
        assert [losses[0] for _, losses in of_rank["losses"]] == pytest.approx(last, rel=1e-12)


class Plain(Job):  # the loss of this rank's rows, or of the rows of all ranks, under Lightning's accumulation
    def __init__(self, objective: str) -> None:
        super().__init__("cross entropy, ignored", window=3)
        self.objective = OBJECTIVES[objective]

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = self.objective(self, *batch)
        self.logged.append(float(loss.detach()))
        return loss


def _torchs(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(job.net.head(job.net(rows)), labels, ignore_index=IGNORED)


def _with_penalty(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
    return _torchs(job, rows, labels) + 0.1 * job.net.head.weight.square().sum()


def _elements(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
    logits = job.net.head(job.net(rows))
    return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def _by_hand(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
    return global_mean(_elements(job, rows, labels), (labels != IGNORED).sum())


def _one_of_two(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
    counted = (labels != IGNORED).sum()
    return global_mean(
        torch.stack([_elements(job, rows, labels), job.net.head(job.net(rows)).sum()]), torch.stack([counted, counted])
    )[0]


def _two_terms(job: Any, rows: Tensor, labels: Tensor) -> Tensor:
    return _torchs(job, rows, labels) + job.net(rows).square().mean()


OBJECTIVES = {
    "torch's": _torchs,
    "torch's and a penalty": _with_penalty,
    "GlobalBatchLoss": cross_entropy_of,
    "global_mean": _by_hand,
    "one of two global means": _one_of_two,
    "two divisors": _two_terms,
    "a constant divisor": lambda *batch: _elements(*batch) / 7,
}


def fit_plain(objective: str, strategy: str, sizes: Sequence[int]) -> dict[str, Any]:
    """Fit on global micro-batches of so many rows, one of them ignored on each rank."""
    generator = torch.Generator().manual_seed(50)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    job = Plain(objective)
    for rows in sizes:
        features = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
        labels = torch.arange(rows) % CLASSES
        labels[:world_size] = IGNORED
        job.batches.append((features[rank::world_size], labels[rank::world_size]))
    findings = checked(job, job.batches, strategy, accumulate_grad_batches=3)["findings"]
    counts = [int((labels != IGNORED).sum()) for _, labels in job.batches]
    return {
        "found": [f for f in findings if f["fault"] == "F30" and f["name"] == "accumulation"],
        "other": [f for f in findings if f["severity"] != "note"],
        "losses": job.logged[:3],
        "counts": counts[:3],
    }


UNEVEN = [8, 16, 10, 12, 8, 8]


@pytest.mark.parametrize("strategy", ["ddp", "ddp_losses"])
@pytest.mark.parametrize("objective", ["torch's", "torch's and a penalty", "GlobalBatchLoss", "global_mean"])
def test_plain_accumulation_of_unequal_counts_is_a_note(pool: RankPool, objective: str, strategy: str) -> None:
    by_rank = pool.run(2, fit_plain, objective, strategy, UNEVEN)
    # what the finding should say, from losses and counts of the first window
    losses = [[of_rank["losses"][m] for of_rank in by_rank] for m in range(3)]
    counts = [[of_rank["counts"][m] for of_rank in by_rank] for m in range(3)]
    totals = [sum(v * n for v, n in zip(*pair, strict=True)) for pair in zip(losses, counts, strict=True)]
    divisors = [sum(of_ranks) for of_ranks in counts]
    of_means = sum(total / n for total, n in zip(totals, divisors, strict=True)) / 3
    of_rows = sum(totals) / sum(divisors)
    for of_rank in by_rank:
        (found,) = of_rank["found"]  # once, though both windows are uneven
        assert found["severity"] == "note"
        assert found["step"] == 0
        assert f"divided by {', '.join(map(str, divisors))}: " in found["what"]
        assert f"mean of their means is {of_means:.6g}, " in found["what"]
        assert f"over all their rows {of_rows:.6g}, {abs(of_means / of_rows - 1):.2%} apart" in found["what"]
        assert 'accumulation="window"' in found["fix"]
        assert "global_mean" in found["fix"]
        assert not of_rank["other"], of_rank["other"]


def test_several_means(pool: RankPool) -> None:
    for of_rank in pool.run(2, fit_plain, "one of two global means", "ddp", UNEVEN):
        assert "divided by 6, 14, 8: " in of_rank["found"][0]["what"]
    # divisors that are not in proportion have no common mean over all rows
    for of_rank in pool.run(2, fit_plain, "two divisors", "ddp", UNEVEN):
        assert of_rank["found"][0]["what"].endswith(" and are divided by 6, 14, 8")


def test_windows_that_are_one_mean_are_silent(pool: RankPool) -> None:
    for objective, sizes in (("torch's", [12] * 6), ("GlobalBatchLoss", [20, 21, 20]), ("a constant divisor", UNEVEN)):
        for of_rank in pool.run(2, fit_plain, objective, "ddp", sizes):
            assert not of_rank["found"], (objective, of_rank)
