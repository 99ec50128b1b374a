"""A row after a step is judged one step later, the first and the last at once; its findings name its own step.

Waits for a device are counted on the pretended one (``tests/test_pretend_device.py``).
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ddp_losses import (
    DDPChecks,
    DDPLossError,
    GradientFlowCheck,
    OptimizerCheck,
    ParameterSyncCheck,
    RankCheck,
)
from lightning_ddp_losses.callbacks.findings import CheckStage, Finding
from lightning_ddp_losses.callbacks.row_exchange import Row
from tests.callbacks.harness import BATCHES, Case, Outcome, Subject, run
from tests.lightning_ranks import make_trainer
from tests.rank_pool import RankPool

LAST = BATCHES - 1


class AtTheEnd(Subject):
    """Rank 1 changes in its last step what is left of it; ``what`` says what."""

    what = ""

    def build(self) -> None:
        self.register_buffer("queue", torch.zeros(4, 2, dtype=torch.float64))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if not self.odd or args[1] != LAST:
            return
        if self.what == "parameter":
            with torch.no_grad():
                self.head.weight[0, 0] += 1e-6
        if self.what == "buffer":
            self.queue[0, 0] = 1.0

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.odd and self.what == "gradient" and self.trainer.global_step == LAST:
            self.encoder.weight.grad *= 2


class WrongParameter(AtTheEnd):
    what = "parameter"


class WrongBuffer(AtTheEnd):
    what = "buffer"


class WrongGradient(AtTheEnd):
    what = "gradient"


AT_THE_END = {
    "ParameterSyncCheck, SYNC": WrongParameter,
    "BufferSyncCheck, F64": WrongBuffer,
    "GradientFlowCheck, F13": WrongGradient,
}


def run_to_the_end() -> dict[str, Outcome]:
    found = {}
    for name, subject in AT_THE_END.items():
        found[name] = run(Case(subject, "", ""), sick=True)
    return found


def test_the_last_step_is_judged_at_the_end(pool: RankPool) -> None:
    first, second = pool.run(2, run_to_the_end)
    for name, outcome in first.items():
        assert f"{name}, after the optimizer step of step {LAST}: " in outcome.text
        assert second[name].text == outcome.text


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
    trainer = make_trainer("ddp", callbacks=[DDPChecks([check], summary=False, file=False)])
    trainer.fit(Subject(sick=False))
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
    make_trainer("ddp", callbacks=[DDPChecks(checks, summary=False, file=False)]).fit(Subject(sick=False))
    return all(type(pickle.loads(pickle.dumps(check))) is type(check) for check in checks)


def test_a_check_lets_go_of_its_fit(pool: RankPool) -> None:
    assert pool.run(2, picklable_after_a_fit) == [True, True]


class WrongAtStepOne(Subject):
    """Rank 1 changes a parameter in its second step."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.odd and args[1] == 1:
            with torch.no_grad():
                self.head.weight[0, 0] += 1e-6


def saved_steps(folder: str) -> tuple[str, list[str]]:
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    checks = DDPChecks([ParameterSyncCheck()], summary=False, file=False)
    try:
        make_trainer("ddp", callbacks=[checks, save], enable_checkpointing=True).fit(WrongAtStepOne(True))
    except DDPLossError as error:
        return str(error), sorted(path.name for path in Path(folder).iterdir())
    return "", []


def test_a_step_is_judged_before_its_checkpoint_is_written(pool: RankPool, tmp_path: Path) -> None:
    for text, names in pool.run(2, saved_steps, str(tmp_path)):
        assert "after the optimizer step of step 1" in text
        assert names == ["step=1.ckpt"]
