"""An audit that starts from a checkpoint: inside an epoch, at its end, beyond it, and of a module that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ddp_losses import audit
from lightning_ddp_losses.testing import RankPool
from tests.audit import modules as m
from tests.audit.modules import Module, even, learned
from tests.fits import make_trainer

EPOCH = 6  # steps of two ranks with batches of 4, of 48 rows
GIVEN: dict[str, Any] = {"strategy": "ddp", "tolerance": 1e-5}


def save(path: str, kind: str, steps: int, *, at_the_end: bool) -> None:
    """Train, and save after some steps or, by Lightning's callback, at the end of an epoch."""
    callbacks: list[Callback] = []
    if at_the_end:
        folder, name = Path(path).parent, Path(path).stem
        callbacks = [ModelCheckpoint(folder, name, save_on_train_epoch_end=True, enable_version_counter=False)]
    trainer = make_trainer("ddp", max_steps=steps, callbacks=callbacks, enable_checkpointing=at_the_end)
    trainer.fit(built(kind), even(4))
    if not at_the_end:
        trainer.save_checkpoint(path)


def built(kind: str) -> Module:
    return m.SquaredMean(learned()) if kind == "wrong" else Module(learned())


# the steps before the checkpoint, whether Lightning saves it at an epoch's end, and the steps of the audit
PLACES = {
    "inside an epoch": (1, False, 1),
    "from inside an epoch into the next one": (EPOCH - 1, False, 3),
    "the second epoch": (EPOCH + 1, False, 4),
    "an epoch's end": (EPOCH, True, 4),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_healthy_module_is_equal(pool: RankPool, tmp_path: Path, place: str) -> None:
    before, at_the_end, steps = PLACES[place]
    path = str(tmp_path / "run.ckpt")
    pool.run(2, save, path, "right", before, at_the_end=at_the_end)
    report = audit(built("right"), even(4), steps=steps, ckpt_path=path, **GIVEN)
    assert report.equal, str(report)
    assert {row.step for row in report.rows} <= set(range(1, steps + 1))


def test_a_wrong_module_gets_the_diagnosis_of_an_audit_from_the_start(pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "run.ckpt")
    pool.run(2, save, path, "wrong", EPOCH + 1, at_the_end=False)
    from_start = audit(built("wrong"), even(4), steps=2, **GIVEN)
    report = audit(built("wrong"), even(4), steps=3, ckpt_path=path, **GIVEN)
    assert not report.equal
    assert report.diagnoses
    assert [found.fault for found in report.diagnoses] == [found.fault for found in from_start.diagnoses]
