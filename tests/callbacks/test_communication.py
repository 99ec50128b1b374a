"""The monitor counts what the dispatcher sees, on the steps it looks at, and leaves the others alone."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_ddp_losses import CommunicationMonitor
from lightning_ddp_losses.callbacks.communication_monitor import CollectiveWatch, _bytes_of, _ddp_calls, covered_seconds
from tests.callbacks.harness import CLASSES, WIDTH, Recorder, Subject, fit
from tests.rank_pool import RankPool

GRADIENT_BYTES = 8 * (WIDTH * WIDTH + WIDTH + WIDTH * CLASSES + CLASSES)


def monitored(fails: bool = False) -> dict[str, Any]:
    monitor, logger = CommunicationMonitor(every_n_steps=1), Recorder()

    class Failing(Subject):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if fails and self.trainer.global_step == 2:
                raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        fit(monitor, Failing(False), log_figures=True, logger=logger, log_every_n_steps=1)
    return {
        "figures": monitor.figures(),
        "remarks": monitor.remarks(),
        "steps": [step for step, row in logger.sent.items() if "ddp_checks/comm/calls" in row],
        "modes": len(_get_current_dispatch_mode_stack()),
    }


@pytest.mark.parametrize("fails", [False, True])
def test_calls_and_bytes_of_a_step(pool: RankPool, fails: bool) -> None:
    for answer in pool.run(2, monitored, fails):
        assert answer["modes"] == 0, "no dispatch mode stays behind"
        if fails:
            continue
        figures = answer["figures"]
        assert figures["comm/allreduce/calls"] == 1
        assert figures["comm/allreduce/bytes"] == GRADIENT_BYTES
        assert figures["comm/calls"] >= 1
        assert figures["comm/allreduce/ms"] > 0
        assert 0 < figures["comm/share_of_step"] < 1
        assert "allreduce" in answer["remarks"][0]
        assert answer["steps"][:2] == [2, 3]


def test_numbers_that_autograd_saved_can_be_read_under_the_monitor() -> None:
    loss = (torch.ones(3, requires_grad=True) * 2).sum() / 4
    with CollectiveWatch():
        assert float(loss.grad_fn._saved_other) == 4.0
        assert float(loss.detach()) == 1.5


def test_buckets_of_autograds_threads_are_those_of_ddps_log() -> None:
    log = {"bucket_sizes": "1", "rebuilt_bucket_sizes": "4096, 512", "avg_backward_comm_time": 2_000_000}
    calls = _ddp_calls(log, began=10.0)
    assert [(call.kind, call.num_bytes) for call in calls] == [("allreduce", 4096), ("allreduce", 512)]
    assert [call.ended for call in calls] == [10.002, 10.0]
    assert _ddp_calls({}, began=10.0) == []


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11
def test_bytes_of_a_sparse_tensor_are_those_that_travel() -> None:
    indices, values = torch.tensor([[0, 2], [1, 0]]), torch.ones(2, dtype=torch.float64)
    entries = torch.sparse_coo_tensor(indices, values, (1000, 1000), check_invariants=True)
    assert _bytes_of(entries) == 2 * 2 * 8 + 2 * 8


def test_overlapping_intervals_count_once() -> None:
    assert covered_seconds([(1.0, 3.0), (2.0, 4.0), (6.0, 7.0), (6.2, 6.5)]) == pytest.approx(4.0)
    assert covered_seconds([]) == 0.0
