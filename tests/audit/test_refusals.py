"""What cannot be audited is named, in time, and nothing is left behind: no process, no file."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_losses import AuditError, AuditReport, ConfigurationError, DDPLossStrategy, InputError, audit, parity
from lightning_ddp_losses.audit import replay
from lightning_ddp_losses.errors import explained_by
from tests.audit import modules as m
from tests.audit.modules import Module, even, rows
from tests.audit.test_draws import STEP_STRATEGY, step
from tests.randomness.models import batches, make
from tests.refusals import Mistake, refusals_of_one_process


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    before = {child.pid for child in multiprocessing.active_children()}
    yield
    left = [path for path in tmp_path.iterdir() if path.name.startswith("ddp-losses")]
    assert not left, "temporary files"
    assert {child.pid for child in multiprocessing.active_children()} <= before
    if (tmp_path / "pids").exists():
        for pid in (tmp_path / "pids").read_text().split():
            assert not Path(f"/proc/{pid}").exists(), "a process that still runs"


def audited(module: Any = None, data: Any = None, strategy: str = "ddp", **options: Any) -> AuditReport:
    return audit(module or Module(), even() if data is None else data, strategy=strategy, **options)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)


class Failing(Module):  # fails in one way, at the second step, on rank 1 or in the one process
    def __init__(self, how: str, where: str = "rank") -> None:
        super().__init__()
        self.how, self.where = how, where

    def training_step(self, batch: Any, index: int) -> Any:
        with open(os.environ["PIDS"], "a") as file:
            file.write(f"{os.getpid()}\n")
        if index == 1 and (m.rank() == 1 if self.where == "rank" else m.world() == 1):
            return self.fail(batch)
        return super().training_step(batch, index)

    def fail(self, batch: Any) -> Any:
        if self.how == "raises":
            raise ValueError("the user's own mistake")
        if self.how == "exits":
            os._exit(3)
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "hangs":
            time.sleep(600)
        if self.how == "sleeps in a child":
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
            os._exit(4)
        if self.how == "cuda":
            return super().training_step((batch[0].cuda(), batch[1]), 0)
        assert self.how == "none"
        return None


def failing(how: str, where: str = "rank", **options: Any) -> Callable[[], AuditReport]:
    return partial(audited, Failing(how, where), **options)


GOT, OWN = "on rank 1 of 2: expected 3 optimizer steps, got ", "ValueError: the user's own mistake"
FAILURES: dict[str, Mistake] = {
    "raises": (failing("raises"), (f"{GOT}{OWN}", "in fail")),
    "raises under ddp_losses": (failing("raises", strategy="ddp_losses"), f"{GOT}{OWN}"),
    "raises in the one process": (failing("raises", "one"), ("the one process: expected 3 optimizer steps, got ", OWN)),
    "exits": (failing("exits"), f"{GOT}died with exit code 3"),
    "is killed": (failing("killed"), f"{GOT}died with signal SIGKILL"),
    "leaves a child behind": (failing("sleeps in a child"), f"{GOT}died with exit code 4"),
    "returns None": (failing("none"), (f"{GOT}RuntimeError", "F35")),
    "asks for a GPU": (failing("cuda"), (f"{GOT}AssertionError", "asks for a GPU")),
    "hangs, so that it is stopped and its stack is shown": (
        failing("hangs", timeout_seconds=6),
        ("got took more than 6 s", "in fail"),
    ),
}
test_a_process_that_fails = refusals_of_one_process(FAILURES, AuditError)


class Shaped(Dataset[Any]):  # rows whose second dimension, dtype, keys or plain values differ by rank
    def __init__(self, what: str) -> None:
        self.what = what

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        odd = m.rank() == 1
        x, y = torch.randn(4, m.FEATURES), torch.zeros(4, dtype=torch.long)
        extra = {
            "width": torch.zeros(4, 3 + odd),
            "dtype": torch.zeros(4, 1, dtype=torch.float64 if odd else torch.float32),
            "key": {f"key {odd}": torch.zeros(4)},
            "value": {"scale": 2.0 if odd else 1.0},
            "type": "text" if odd else torch.zeros(4),
            "lambda": lambda: None,
        }[self.what]
        return x, y, extra


def shaped(what: str, module: Any = None) -> Callable[[], AuditReport]:
    data: Any = DataLoader(Shaped(what), batch_size=None)
    if module is not None:
        data = [even(), data]
    return partial(audited, module, data, trainer_kwargs={"use_distributed_sampler": False})


BATCHES: dict[str, Mistake] = {
    "width": (shaped("width"), ("batch[2]", "rank 0: (4, 3)", "rank 1: (4, 4)")),
    "dtype": (shaped("dtype"), ("batch[2]", "float32", "float64")),
    "key": (shaped("key"), ("batch[2]", "key False", "key True")),
    "value": (shaped("value"), ("batch[2]['scale']", "rank 0: 1.0", "rank 1: 2.0")),
    "type": (shaped("type"), ("batch[2]", "Tensor", "str")),
    "lambda": (shaped("lambda"), ("batch[2]", "pickled", "function")),
    "two loaders, width": (
        shaped("width", m.TwoLoaders()),
        ("batch[1][2]", "rank 0: (4, 3)", "in a batch of 4 rows"),
    ),
    "no training step at all": (
        partial(audited, data=DataLoader(rows(3), batch_size=8, drop_last=True)),
        ("training steps: expected 3 optimizer steps, got none", "empty"),
    ),
    "rows on no reading": (
        lambda: replay.join_batches([{"a": [torch.zeros(2), {"b": torch.zeros(n, 3)}]} for n in (5, 6)], [2, 2]),
        ("batch['a'][1]['b']", "rank 1: (6, 3)"),
    ),
    "nested tensors": (lambda: replay.join_batches([{"a": nested()}] * 2, [2, 2]), "nested"),
}
test_batches_that_cannot_be_joined = refusals_of_one_process(BATCHES, InputError)


def test_more_ranks_than_rows_pad_and_are_compared() -> None:
    report = audit(Module(), DataLoader(rows(2), batch_size=2), strategy="ddp", devices=3, steps=1)
    assert report.equal
    assert report.losses[0].rows == (1, 1, 1)


class TakesIterator(Module):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


def other_draws(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A step in which rank 1 draws once more."""
    if m.rank() == 1:
        torch.rand_like(x)
    return step(model, x)


WHOLE = "whole parameters"
PERMUTED = ("randperm", " at modules.py:", "order of rows")
BY_ROW = DDPLossStrategy(randomness="by_row")
OPTIONS: dict[str, Mistake] = {
    "devices": (partial(audited, devices=1), ("devices", "2 or more, got 1")),
    "steps": (partial(audited, steps=0), ("steps", "1 or more, got 0")),
    "without": (partial(audited, without=["weather"]), ("without", "batch_norm", "weather")),
    "strategy": (partial(audited, strategy="nonsense"), ("strategy", "'nonsense'")),
    "sharded": (partial(audited, strategy="fsdp"), (WHOLE, "FSDP")),
    "one device": (partial(audited, strategy="single_device"), (WHOLE, "SingleDevice")),
    "gpus": (partial(audited, trainer_kwargs={"accelerator": "gpu"}), "2 GPUs, got 0"),
    "data under two names": (
        partial(audited, train_dataloaders=even()),
        "one of data, datamodule, train_dataloaders, got data and train_data",
    ),
    "no LightningModule": (partial(audited, nn.Linear(2, 2)), "LightningModule, got Linear"),
    "the loader's iterator": (partial(audited, TakesIterator()), "dataloader_iter"),
    "windows cut evenly": (
        partial(audited, strategy=DDPLossStrategy(accumulation="window"), without=("uneven",)),
        "accumulation='mean', whose micro-batches",
    ),
    # draws
    "an order of rows": (partial(audited, m.Permuted(), steps=1, randomness="global"), PERMUTED),
    "an order of rows, the strategy's draws": (
        partial(audited, m.Permuted(), strategy=STEP_STRATEGY, steps=1),
        "randperm",
    ),
    "draws and without them": (
        partial(audited, m.Dropout(), strategy="ddp_losses", without=("randomness",)),
        "randomness='global'",
    ),
    "other draws than the strategy's": (
        partial(audited, m.Dropout(), strategy=STEP_STRATEGY, randomness="rank"),
        "what the strategy does",
    ),
    "other draws than the strategy's by row": (
        partial(audited, m.Dropout(), strategy=BY_ROW, randomness="global", steps=2, tolerance=1e-5),
        "what the strategy does",
    ),
    "draws of parity": (lambda: parity(lambda: make("gan"), step, batches([8]), randomness="all"), "randomness"),  # type: ignore[arg-type]
}
test_options = refusals_of_one_process(OPTIONS, ConfigurationError)

# what is seen when the model runs
SYNCED: dict[str, Any] = {"trainer_kwargs": {"sync_batchnorm": True}}
RUNS: dict[str, Mistake] = {
    "precision": (partial(audited, trainer_kwargs={"precision": "nonsense"}), "nonsense"),
    "torch's batch norm on a CPU": (partial(audited, m.BatchNorm(), **SYNCED), ("plugins=[", "SyncBatchNorm()]")),
    "idle parameters": (partial(audited, m.FrozenLate()), "F38"),
    "a rank that draws once more": (
        lambda: parity(lambda: make("mc dropout"), other_draws, batches([8]), randomness="global"),
        "draw 1 of the step",
    ),
}
test_runs = refusals_of_one_process(RUNS, AuditError)


@pytest.mark.parametrize(
    ("name", "page"), [("torch's batch norm on a CPU", "sync_batch_norm"), ("idle parameters", "F38")]
)
def test_the_page_of_an_error_is_that_of_its_cause(name: str, page: str) -> None:
    with pytest.raises(AuditError) as caught:
        RUNS[name][0]()
    assert caught.value.__notes__ == [explained_by(page)]
