"""A window costs no collective per micro-batch beside plain accumulation; in a hand-written loop one when it ends."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses import DDPLossStrategy, accumulation_window
from lightning_ddp_losses.testing import RankPool
from tests.accumulation.jobs import Job, loader, own_batches
from tests.accumulation.test_hand_written import Step
from tests.counting import CountCollectives, StepCollectives
from tests.lightning_ranks import make_trainer

CASES = ["cross entropy, ignored", "ArcFace, non-zero, regularised", "global_mean", "class shards", "MeanSquaredError"]
WINDOW, COUNT = 3, 9


def fit_counted(case: str, accumulation: Any) -> list[int]:
    """Collectives of each micro-batch of a fit, from its start to its end."""
    job, counter = Job(case, window=WINDOW), StepCollectives()
    job.batches = own_batches(job.global_batches(COUNT, WINDOW))
    strategy = DDPLossStrategy(accumulation=accumulation)
    trainer = make_trainer(strategy, accumulate_grad_batches=WINDOW, callbacks=[counter])
    trainer.fit(job, loader(job.batches))
    return [len(names) for names in counter.steps]


@pytest.mark.parametrize("case", CASES)
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
            with accumulation_window(model) if windowed else contextlib.nullcontext():
                for i, batch in enumerate(batches):
                    with model.no_sync() if i + 1 < WINDOW else contextlib.nullcontext():
                        model(*batch).backward()
            counts.append(len(counter.names))
    return counts[2:]


@pytest.mark.parametrize("case", ["cross entropy, ignored", "global_mean"])
def test_one_more_in_a_hand_written_loop(pool: RankPool, case: str) -> None:
    for plain, window in pool.run(2, loop_counted, case):
        assert window == plain + 1
