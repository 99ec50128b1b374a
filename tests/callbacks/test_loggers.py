"""Figures of the checks, as a user of a logger or a progress bar sees them: counters, each rank's loss, a table, collectives of a step."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.loggers import tensorboard
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_ddp_losses import CommunicationMonitor, DeviceCheck, LossCheck, RankCheck
from lightning_ddp_losses.testing import RankPool
from tests.callbacks.harness import BATCHES, CLASSES, WIDTH, Recorder, Subject, fit
from tests.doors import CollectiveWatch, LossHistory, _bytes_of, _ddp_calls, covered_seconds

Sent = dict[int, dict[str, float]]  # by step


class Logs(Subject):  # logs its loss where users do
    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
        loss = super().training_step(batch, index)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss


class Board(TensorBoardLogger):
    """Lightning's own, with a list in the place of TensorBoard's writer, which is not installed here."""

    def __init__(self, folder: str) -> None:
        tensorboard._TENSORBOARD_AVAILABLE = True
        super().__init__(folder)
        self.sent: Sent = {}

    @property
    def experiment(self) -> Any:
        if dist.get_rank():
            return None
        nothing = dict.fromkeys(("add_scalars", "add_hparams", "flush", "close"), lambda *_: None)
        return SimpleNamespace(add_scalar=self.add_scalar, **nothing)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.sent.setdefault(step, {})[name] = value


def in_csv(folder: Path) -> Sent:
    """What a logger of CSV files has written."""
    sent: Sent = {}
    for row in csv.DictReader((folder / "metrics.csv").open()):
        numbers = {name: float(text) for name, text in row.items() if text and name != "step"}
        sent.setdefault(int(row["step"]), {}).update(numbers)
    return sent


def logged(every: int) -> tuple[dict[str, Sent], list[tuple[int, tuple[float, ...]]], list[str]]:
    """Train with three loggers: what each was sent, the ranks' losses, and the files of the checks."""
    with tempfile.TemporaryDirectory() as folder:
        loggers = [CSVLogger(folder), Board(folder), Recorder()]
        losses = LossCheck()
        fit([losses, DeviceCheck()], Logs(False), log_figures=True, logger=loggers, log_every_n_steps=every)
        if dist.get_rank():
            return {}, losses.history, []
        by_logger = {"CSV": in_csv(Path(loggers[0].log_dir)), "TensorBoard": loggers[1].sent, "online": loggers[2].sent}
        return by_logger, losses.history, sorted(os.listdir(loggers[0].log_dir))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_logger_shows_counters_and_the_loss_of_each_rank(pool: RankPool, world_size: int) -> None:
    by_logger, history, files = pool.run(world_size, logged, 2)[0]
    assert len(history) == BATCHES
    for sent in by_logger.values():
        # every second step, in the row in which Lightning logs
        steps = [step for step in sorted(sent) if "ddp_checks/rank_0_loss" in sent[step]]
        assert steps == [1, 3]
        for step in steps:
            found = [sent[step][f"ddp_checks/rank_{rank}_loss"] for rank in range(world_size)]
            assert found == pytest.approx(history[step][1])
            assert sent[step]["train_loss"] == pytest.approx(sum(found) / world_size)
        # at the end
        last = sent[max(sent)]
        assert [last[f"ddp_checks/{severity}s"] for severity in ("error", "warning")] == [0, 0]
        assert [last[f"ddp_checks/rank_{rank}_batches"] for rank in range(world_size)] == [BATCHES] * world_size
    expected = {"losses_by_rank.csv"} if world_size > 1 else set()
    assert expected <= set(files)


def many_ranks(every: int) -> list[tuple[int, dict[str, float]]]:
    """What the check sends of 9 ranks, of which it looks at every third step."""
    sent: list[tuple[int, dict[str, float]]] = []
    report = SimpleNamespace(log_step=lambda trainer, figures, step: sent.append((step, figures)))
    trainer, row_exchange = SimpleNamespace(log_every_n_steps=every), SimpleNamespace(report=report)
    runner: Any = SimpleNamespace(trainer=trainer, row_exchange=row_exchange)
    history = LossHistory(file=False)
    for step in range(0, 12, 3):
        history.add(runner, step, [float(step + rank) for rank in range(9)])
    return sent


def test_of_many_ranks_the_smallest_and_largest_loss_are_sent() -> None:
    assert many_ranks(5) == [(6, {"loss_min": 6.0, "loss_max": 14.0}), (9, {"loss_min": 9.0, "loss_max": 17.0})]
    assert many_ranks(0) == []


def shown(bar: type[ProgressBar]) -> str:
    """What a fit with a progress bar prints on this rank."""
    said = io.StringIO()
    os.environ["COLUMNS"] = "200"
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        checks: list[RankCheck] = [LossCheck(), DeviceCheck()]
        fit(checks, Logs(False), callbacks=[bar()], enable_progress_bar=True, file=False, summary=True)
    return said.getvalue()


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar])
@pytest.mark.parametrize("world_size", [1, 2])
def test_progress_bars_and_the_table_of_the_checks(pool: RankPool, world_size: int, bar: type[ProgressBar]) -> None:
    text, *others = pool.run(world_size, shown, bar)
    assert others == [""] * (world_size - 1)
    assert re.search(r"Epoch 0.*4/4.*train_loss", text.replace("\r", "\n").replace("\n", " ")), text
    # one table after the bar, in which each rank's work is told once
    table = text.partition("DDPChecks: ")[2]
    for rank in range(world_size):
        assert table.count(f"rank {rank}: 4 batches") == 1
    assert "rank_0_batches" not in text


# ---------------------------------------------------------------------- collectives of a step

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
