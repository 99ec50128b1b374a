"""When rows are judged and how much they look at.

A row after a step is judged one step later, the first and the last at once; its findings name its own step. Each step looks at a part of
the parameters; together the parts are all of them. Waits for a device are counted on the
pretended one (``tests/pretended``).
"""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_ddp_losses import DDPLossError, GradientFlowCheck, OptimizerCheck, ParameterSyncCheck, RankCheck
from lightning_ddp_losses.callbacks import CheckStage, Finding
from lightning_ddp_losses.testing import RankPool
from tests.callbacks.harness import Subject, fit
from tests.callbacks.training_cases import Nudged
from tests.doors import Row, split_by_bytes


class LateNumber(RankCheck):
    """A check of a user: returns its numbers or a function that reads them, and fails by itself on rank 1 at one step."""

    stages = (CheckStage.AFTER_STEP,)
    needs_peers = False

    def __init__(self, fails_at: int, is_list: bool) -> None:
        super().__init__(action={"error": "log"})
        self.fails_at, self.is_list = fails_at, is_list
        self.tables: list[tuple[int, list[list[int]]]] = []

    def measure(self, trainer: Any, module: Any, stage: CheckStage) -> Row:
        step = self.runner.step
        if step == self.fails_at and trainer.global_rank == 1:
            raise ValueError("here")
        row = [step, trainer.global_rank]
        return row if self.is_list else lambda: row

    def judge(self, table: list[list[int]], trainer: Any, module: Any, stage: CheckStage) -> list[Finding]:
        self.tables.append((self.runner.step, table))
        return []


def tables_of_a_user(fails_at: int, is_list: bool = False) -> list[tuple[int, list[list[int]]]]:
    check = LateNumber(fails_at, is_list)
    fit(check, file=False)
    return check.tables


def test_one_schedule_for_all_rows(pool: RankPool) -> None:
    """The first step at once, the others one later, the last at the end; only rows of one step meet, also where a rank has none."""
    both = [(0, 0), (2, 1), (3, 2), (4, 3)]
    expected = [(at, [[step, 0], [step, 1]]) for at, step in both]
    assert pool.run(2, tables_of_a_user, -1) == [expected, expected]
    assert pool.run(2, tables_of_a_user, 1) == [[expected[0], *expected[2:]]] * 2
    assert pool.run(2, tables_of_a_user, -1, True) == [expected, expected]


def picklable_after_a_fit() -> bool:
    checks = [GradientFlowCheck(), ParameterSyncCheck(), OptimizerCheck()]
    fit(checks, file=False)
    return all(type(pickle.loads(pickle.dumps(check))) is type(check) for check in checks)


def test_a_check_lets_go_of_its_fit(pool: RankPool) -> None:
    assert pool.run(2, picklable_after_a_fit) == [True, True]


def saved_steps(folder: str) -> tuple[str, list[str]]:
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    try:
        fit(ParameterSyncCheck(), Nudged(True), callbacks=[save], enable_checkpointing=True, file=False)
    except DDPLossError as error:
        return str(error), sorted(path.name for path in Path(folder).iterdir())
    return "", []


def test_a_step_is_judged_before_its_checkpoint_is_written(pool: RankPool, tmp_path: Path) -> None:
    for text, names in pool.run(2, saved_steps, str(tmp_path)):
        assert "after the optimizer step of step 2" in text
        assert names == ["step=1.ckpt", "step=2.ckpt"]


SIZE = (1 << 20) + 5


class Big(Subject):  # a parameter of four parts; one rank changes its last element before the second step
    def build(self) -> None:
        self.big = nn.Parameter(torch.zeros(SIZE))

    def objective(self, features: Tensor, labels: Tensor, index: int) -> Tensor:
        return super().objective(features, labels, index) + 0 * self.big.sum()

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.odd and self.trainer.global_step == 1:
            with torch.no_grad():
                self.big[-1] += 0.25


def test_parts_are_the_whole() -> None:
    tensors = {
        "a": torch.zeros(3),
        "b": torch.zeros(SIZE),
        "none": torch.zeros(0),
        "c": torch.zeros(700, 900, dtype=torch.float16),
    }
    parts = split_by_bytes(tensors, 16)
    assert len(parts) == 6, "at least 1 MiB in each"
    for name, tensor in tensors.items():
        slices = [piece for part in parts for piece in part if piece.name == name]
        assert sum(piece.of(tensor).numel() for piece in slices) == tensor.numel()
        assert all(a.stop == b.start for a, b in itertools.pairwise(slices))
    sizes = [sum(piece.of(tensors[piece.name]).nbytes for piece in part) for part in parts]
    assert max(sizes) - min(sizes[:-1]) <= 4
    assert split_by_bytes({}, 16) == [[]]
