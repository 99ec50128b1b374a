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

from lightning_ddp_losses import AuditError, AuditReport, ConfigurationError, DDPLossError, InputError, audit
from lightning_ddp_losses.errors import explained_by
from tests.audit import modules as m
from tests.audit.modules import Module, even, rows


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


FAILURES = {
    "raises": (Failing("raises"), ["ValueError: the user's own mistake", "in fail", "rank 1 of 2"]),
    "raises under ddp_losses": (Failing("raises"), ["ValueError: the user's own mistake", "rank 1 of 2"]),
    "raises in the one process": (Failing("raises", "one"), ["ValueError: the user's own mistake", "the one process"]),
    "exits": (Failing("exits"), ["exit code 3", "rank 1"]),
    "is killed": (Failing("killed"), ["SIGKILL", "rank 1"]),
    "leaves a child behind": (Failing("sleeps in a child"), ["exit code 4"]),
    "returns None": (Failing("none"), ["F35", "rank 1"]),
    "asks for a GPU": (Failing("cuda"), ["asks for a GPU"]),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_process_that_fails(name: str) -> None:
    module, expected = FAILURES[name]
    with pytest.raises(AuditError) as caught:
        audit(module, even(), strategy="ddp_losses" if "ddp_losses" in name else "ddp")
    assert "took more than" not in str(caught.value), str(caught.value)
    assert all(text in str(caught.value) for text in expected), str(caught.value)


def test_a_process_that_hangs_is_stopped_and_its_stack_is_shown() -> None:
    with pytest.raises(AuditError, match="more than 6 s") as caught:
        audit(Failing("hangs"), even(), strategy="ddp", timeout_seconds=6)
    assert "in fail" in str(caught.value)


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


NO_SAMPLER = {"use_distributed_sampler": False}
UNJOINED = {
    "width": r"batch\[2\][\s\S]*rank 0: \(4, 3\)[\s\S]*rank 1: \(4, 4\)",
    "dtype": r"batch\[2\][\s\S]*float32[\s\S]*float64",
    "key": r"batch\[2\][\s\S]*key False[\s\S]*key True",
    "value": r"batch\[2\]\['scale'\][\s\S]*rank 0: 1.0[\s\S]*rank 1: 2.0",
    "type": r"batch\[2\][\s\S]*Tensor[\s\S]*str",
    "lambda": r"batch\[2\][\s\S]*pickled[\s\S]*function",
}


@pytest.mark.parametrize("what", UNJOINED)
def test_batches_that_cannot_be_joined(what: str) -> None:
    with pytest.raises(InputError, match=UNJOINED[what]):
        audited(data=DataLoader(Shaped(what), batch_size=None), trainer_kwargs=NO_SAMPLER)


def test_two_loaders_of_which_one_cannot_be_joined() -> None:
    loaders = [even(), DataLoader(Shaped("width"), batch_size=None)]
    with pytest.raises(InputError, match=r"batch\[1\]\[2\][\s\S]*rank 0: \(4, 3\)[\s\S]*in a batch of 4 rows"):
        audited(m.TwoLoaders(), loaders, trainer_kwargs=NO_SAMPLER)


def test_no_training_step_at_all() -> None:
    few = DataLoader(rows(3), batch_size=2, drop_last=True)
    with pytest.raises((InputError, AuditError), match=r"0|none|empty"):
        audit(Module(), DataLoader(few.dataset, batch_size=8, drop_last=True), strategy="ddp")


def test_more_ranks_than_rows_pad_and_are_compared() -> None:
    report = audit(Module(), DataLoader(rows(2), batch_size=2), strategy="ddp", devices=3, steps=1)
    assert report.equal
    assert report.losses[0].rows == (1, 1, 1)


class TakesIterator(Module):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return None


# what is wrong: (how it is called, the error, words of it)
WHOLE = "whole parameters.*"
SYNCED: dict[str, Any] = {"strategy": "ddp", "trainer_kwargs": {"sync_batchnorm": True}}
TWO_NAMES = "one of data, datamodule, train_dataloaders, got data and train_data"
REFUSED: dict[str, tuple[Callable[[], Any], type[DDPLossError], str]] = {
    "devices": (partial(audited, devices=1), ConfigurationError, "devices.*2 or more, got 1"),
    "steps": (partial(audited, steps=0), ConfigurationError, "steps.*1 or more, got 0"),
    "without": (partial(audited, without=["weather"]), ConfigurationError, "without.*batch_norm.*weather"),
    "strategy": (partial(audited, strategy="nonsense"), ConfigurationError, "strategy.*'nonsense'"),
    "sharded": (partial(audited, strategy="fsdp"), ConfigurationError, f"{WHOLE}FSDP"),
    "one device": (partial(audited, strategy="single_device"), ConfigurationError, f"{WHOLE}SingleDevice"),
    "gpus": (partial(audited, trainer_kwargs={"accelerator": "gpu"}), ConfigurationError, "2 GPUs, got 0"),
    "precision": (partial(audited, trainer_kwargs={"precision": "nonsense"}), AuditError, "nonsense"),
    "data under two names": (partial(audited, train_dataloaders=even()), ConfigurationError, TWO_NAMES),
    "no LightningModule": (partial(audited, nn.Linear(2, 2)), ConfigurationError, "LightningModule, got Linear"),
    "the loader's iterator": (partial(audited, TakesIterator()), ConfigurationError, "dataloader_iter"),
    "torch's batch norm on a CPU": (
        partial(audited, m.BatchNorm(), **SYNCED),
        AuditError,
        r"plugins=\[.*SyncBatchNorm\(\)\]",
    ),
    "idle parameters": (partial(audited, m.FrozenLate()), AuditError, "F38"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_audits_that_cannot_work(name: str) -> None:
    call, error, text = REFUSED[name]
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("name", "page"), [("torch's batch norm on a CPU", "sync_batch_norm"), ("idle parameters", "F38")]
)
def test_the_page_of_an_error_is_that_of_its_cause(name: str, page: str) -> None:
    with pytest.raises(AuditError) as caught:
        REFUSED[name][0]()
    assert caught.value.__notes__ == [explained_by(page)]
