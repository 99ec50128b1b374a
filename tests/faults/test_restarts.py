"""Restarts under `torchrun`: each new world meets, whatever the dead ones have left in the agent's store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import ROOT, free_port, run_python

SECONDS = 240


def worlds(folder: Path, ranks: int) -> list[tuple[list[int], list[str]]]:
    """Of each world: how often each rank's agent said that it had restarted, and what each rank gathered."""
    found = []
    while (folder / f"world-{len(found)}-rank-0").exists():
        texts = [(folder / f"world-{len(found)}-rank-{rank}").read_text().split(" ", 1) for rank in range(ranks)]
        found.append(([int(count) for count, _ in texts], [seen for _, seen in texts]))
    return found


def test_twenty_restarts_in_a_row(tmp_path: Path) -> None:
    done = run_python(
        *("-m", "tests.faults.agent", "groups", "--ranks", "3", "--kills", "20", "--folder", str(tmp_path)),
        seconds=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = worlds(tmp_path, 3)
    assert len(found) == 21
    assert {seen for _, ranks in found for seen in ranks} == {"[0.0, 1.0, 2.0]"}
    assert [counts for counts, _ in found] == [[number] * 3 for number in range(21)]


def start_agent(folder: Path, port: int, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.faults.agent", "groups", "--nodes", "2", "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--folder", str(folder), *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def test_ranks_of_either_node_die_and_both_nodes_start_again(tmp_path: Path) -> None:
    port = free_port()
    agents = [start_agent(tmp_path, port, "--ranks", "2", "--kills", "4") for _ in range(2)]
    try:
        outputs = [agent.communicate(timeout=SECONDS)[1] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], [output[-2000:] for output in outputs]
    found = worlds(tmp_path, 4)
    assert len(found) == 5
    assert {seen for _, ranks in found for seen in ranks} == {"[0.0, 1.0, 2.0, 3.0]"}
    # the value that the ranks agree on cannot be made of this: the nodes count their own dead
    assert any(len(set(counts)) > 1 for counts, _ in found)


TRAINING = """
import os, signal, sys
from datetime import timedelta
import torch
from torch import nn
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from pytorch_metric_learning.losses import ArcFaceLoss
from lightning_ddp_losses import DDPLossStrategy

folder, how = sys.argv[1:]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def is_killed(rank, step):
    if how == "killed, and saves nothing":
        return step == 1 and attempt < 2 and rank == attempt
    return how == "killed" and attempt == 0 and rank == 1 and step == 4

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.3), nn.Linear(6, 4))
        self.loss = ArcFaceLoss(5, 4)

    def training_step(self, batch, number):
        if is_killed(self.global_rank, self.global_step):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.loss(self.encoder(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)

torch.manual_seed(3)
module = Module()
data = torch.utils.data.TensorDataset(torch.arange(96.0).sin().view(12, 8), torch.arange(12) % 5)
torch.manual_seed(7 + int(os.environ["RANK"]))  # ranks draw different masks
saves = how != "killed, and saves nothing"
saving = [ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)] if saves else []
trainer = Trainer(
    accelerator="cpu", devices=2, max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=saving, enable_checkpointing=saves, strategy=DDPLossStrategy(use_global_sampler=True, timeout=timedelta(seconds=240)),
)
began = []
module.on_train_start = lambda: began.append(trainer.global_step)
trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2, shuffle=True), ckpt_path="last" if saves else None)
torch.save(module.state_dict(), f"{folder}/state-{trainer.global_rank}")
sys.stdout.write(" ".join(map(str, ("done", attempt, trainer.global_rank, *began, trainer.global_step))) + "\\n")
"""


def train(folder: Path, how: str, *where: str, restarts: int = 1) -> list[str]:
    """What the ranks say in the end, under an agent that starts them again when one dies."""
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(TRAINING)
    done = run_python(
        *("-m", "torch.distributed.run", *(where or ["--standalone"]), "--nproc-per-node", "2"),
        *("--max-restarts", str(restarts), "--monitor-interval", "0.1", str(script), str(folder), how),
        seconds=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return sorted(line for line in done.stdout.splitlines() if line.startswith("done"))


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_fit_of_the_strategy_is_restarted_by_torchrun(tmp_path: Path, backend: str) -> None:
    where = ["--master-port", str(free_port())] if backend == "static" else []
    said = train(tmp_path / "run", "killed, and saves nothing", *where, restarts=2)
    assert said == ["done 2 0 0 6", "done 2 1 0 6"]


def test_a_fit_that_is_restarted_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    assert train(tmp_path / "killed", "killed") == ["done 1 0 4 6", "done 1 1 4 6"]
    assert train(tmp_path / "undisturbed", "not") == ["done 0 0 0 6", "done 0 1 0 6"]
    for rank in (0, 1):
        states = [torch.load(tmp_path / how / f"state-{rank}", weights_only=True) for how in ("killed", "undisturbed")]
        assert all(torch.equal(states[0][name], value) for name, value in states[1].items())
