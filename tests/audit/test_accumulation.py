"""What an audit says of accumulated micro-batches: equal to one process that accumulates them, or to one on all rows of a window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn

from lightning_ddp_losses import DDPLossStrategy, GlobalBatchLoss, audit
from tests.audit.modules import Module, even, uneven

UNEVEN = [2, 3, 7, 4, 1, 2, 5, 3]  # rows of (micro-batch, rank): 5, 11, 3, 8 rows in a micro-batch
MICRO, WHOLE = "one process that accumulates the same micro-batches", "one process on all rows of each window at once"


def run(data: Any, strategy: Any, steps: int = 2, **options: Any) -> Any:
    options = {"accumulate_grad_batches": 2, "use_distributed_sampler": False} | options
    module = Module(GlobalBatchLoss(nn.CrossEntropyLoss())).double()
    return audit(module, data, strategy=strategy, steps=steps, trainer_kwargs={"precision": "64-true"} | options)


def words(report: Any) -> str:
    """The report's text without its line breaks."""
    return " ".join(str(report).split())


@pytest.mark.parametrize("is_whole", [False, True], ids=["mean", "window"])
def test_uneven_counts_equal_one_of_both(tmp_path: Path, is_whole: bool) -> None:
    report = run(uneven(UNEVEN), DDPLossStrategy(accumulation="window") if is_whole else "ddp_losses")
    assert report.equal, str(report)
    found = report.accumulation
    assert (found.micro_batches, found.equals_micro_batches, found.equals_whole_window) == (2, not is_whole, is_whole)
    errors = {MICRO: found.micro_batches_error, WHOLE: found.whole_window_error}
    same, other = (WHOLE, MICRO) if is_whole else (MICRO, WHOLE)
    assert errors[same] < 1e-12
    assert errors[other] > 1e-2
    sentence = f"the ranks equal {same}, and differ from {other} (error {errors[other]:.1e})."
    assert sentence in words(report)
    # in files too
    assert json.loads(report.to_json())["accumulation"]["equals_whole_window"] is is_whole
    report.to_html(tmp_path / "report.html")
    assert sentence in (tmp_path / "report.html").read_text()
    if is_whole:  # micro-batches have no counterpart in one process
        assert len(report.losses) == 4
        assert all(loss.one is None and loss.mean is not None for loss in report.losses)
        assert [note.fault for note in report.notes] == ["F18"], str(report)


@pytest.mark.parametrize("accumulation", ["mean", "window"])
def test_equal_counts_equal_both(accumulation: Any) -> None:
    report = run(even(4), DDPLossStrategy(accumulation=accumulation), use_distributed_sampler=True)
    assert report.equal, str(report)
    assert (report.accumulation.equals_micro_batches, report.accumulation.equals_whole_window) == (True, True)
    assert f"the ranks equal {MICRO} and {WHOLE}." in words(report)


def test_windows_that_a_callback_schedules() -> None:
    schedule = GradientAccumulationScheduler({0: 2})
    report = run(uneven(UNEVEN), "ddp_losses", 1, accumulate_grad_batches=1, callbacks=[schedule])
    assert report.equal, str(report)
    assert (report.accumulation.equals_micro_batches, report.accumulation.equals_whole_window) == (True, False)


def test_steps_of_one_batch_say_nothing() -> None:
    assert run(even(4), "ddp_losses", steps=1, accumulate_grad_batches=1).accumulation is None
