"""Through the launchers that users have: Lightning's own (`strategy="ddp_losses"`, by name) and torchrun."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from tests.oracle import assert_close
from tests.processes import TORCHRUN, run_python
from tests.strategies.jobs import Job, fit_alone

SCRIPT = """
import os, sys
import torch
from lightning.pytorch import Trainer
import lightning_ddp_losses
from tests.strategies.jobs import Job, loader
from tests.strategies.test_refusals import Spoiled

if __name__ == "__main__":
    folder, bad = sys.argv[1], len(sys.argv) > 2
    torch.set_num_threads(1)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp_losses", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, default_root_dir=folder,
    )
    module = Spoiled("NaN", (1,), 1) if bad else Job()
    trainer.fit(module, loader(2, trainer.global_rank))
    torch.save(module.state_dict(), os.path.join(folder, f"rank-{trainer.global_rank}.pt"))
"""
LAUNCHERS: dict[str, list[str]] = {"lightning": [], "torchrun": TORCHRUN}


def launch(launcher: str, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return run_python(*LAUNCHERS[launcher], str(script), str(folder), *args, folder=folder)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks_equal_one_process(tmp_path: Path, launcher: str) -> None:
    done = launch(launcher, tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    expected = fit_alone(Job)
    for rank in range(2):
        assert_close(torch.load(tmp_path / f"rank-{rank}.pt"), expected)
    # a quiet end: no abort of gloo's threads, no warning about groups left behind
    assert "terminate called" not in done.stderr
    assert "destroy_process_group" not in done.stderr


def test_an_error_on_one_rank_ends_the_job_with_its_text(tmp_path: Path) -> None:
    done = launch("lightning", tmp_path, "bad")
    assert done.returncode != 0
    assert "NaN" in done.stderr
    assert "InputError" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"], "nothing half-written"
