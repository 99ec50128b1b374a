"""What looks out for faults (peers that are gone, signals, checkpoints, restarts) takes next to nothing of a step in which none comes."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback

from lightning_ddp_losses.testing import RankPool
from tests.lightning_ranks import make_trainer
from tests.strategies.jobs import Job, loader

WATCHING = {"liveness", "interruptions", "rendezvous", "roll_call", "resume"}


class CountCalls(Callback):  # counts Python's calls by file, from the end of the second batch to that of the fourth
    def __init__(self) -> None:
        self.by_file: Counter[str] = Counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 1:
            sys.setprofile(self._count)
        if index == 3:
            sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self.by_file[Path(frame.f_code.co_filename).stem] += 1


def calls_by_file() -> Counter[str]:
    count = CountCalls()
    make_trainer("ddp_losses", callbacks=[count]).fit(Job(), loader())
    return count.by_file


def test_a_step_without_faults_pays_less_than_a_hundredth_for_them(pool: RankPool) -> None:
    """In calls, of a step of a few milliseconds; no message of their own goes to any rank."""
    for calls in pool.run(2, calls_by_file):
        watching = sum(calls[name] for name in WATCHING)
        assert 0 < watching <= sum(calls.values()) / 100, calls.most_common(20)
