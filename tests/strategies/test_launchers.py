"""Through the launchers that users have: Lightning's own (`strategy="ddp_losses"`, by name) and torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tests
from tests.oracle import assert_close
from tests.strategies.jobs import Job, fit_alone

SCRIPT = """
import os, sys
import torch
from lightning.pytorch import Trainer
import lightning_ddp_losses
from tests.strategies.jobs import Job, loader
from tests.strategies.test_bad_input import Spoiled

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
RENDEZVOUS = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
LAUNCHERS = {
    "lightning": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *RENDEZVOUS],
}


def launch(launcher: str, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    root = str(Path(tests.__file__).parents[1])
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*LAUNCHERS[launcher], str(script), str(folder), *args],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


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
