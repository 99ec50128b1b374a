"""Two hosts under `torchrun`: the training of four local ranks; a cable that is pulled; a node whose agent is replaced.

Where this machine makes no namespaces, two agents on the loopback stand for two hosts, and no cable can be pulled; what did not run is
said (`pytest -rs`).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.faults.hosts import Host, permitted, two_hosts
from tests.oracle import assert_close
from tests.processes import ROOT, free_port, run_python

SECONDS = 240
FAST_AGENT = "timeout=60,read_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1"


class Loopback(Host):  # this machine itself, where there are no namespaces
    def within(self, *command: str) -> list[str]:
        return list(command)


@contextlib.contextmanager
def hosts() -> Iterator[Sequence[Host]]:
    if permitted():
        here = Loopback(0, "127.0.0.1", "lo")
        try:
            yield [here, here]
        finally:
            here.end()
    else:
        with two_hosts() as both:
            yield both


def torchrun(port: int, address: str, node: int, *script: str, ranks: int = 2, restarts: int = 0) -> list[str]:
    """The arguments of python that start the agent of one of two nodes, which meet at an address of the first."""
    # an agent knows its own host by name, and these have none
    configuration = f"is_host={int(node == 0)},{FAST_AGENT}"
    options = ["--nnodes=2", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--rdzv-id=two-hosts"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{port}", f"--rdzv-conf={configuration}"]
    return ["-m", "torch.distributed.run", *options, *meeting, "--monitor-interval", "0.1", *script]


def start_nodes(pair: Sequence[Host], folder: Path, *script: str, **environment: str) -> list[subprocess.Popen[bytes]]:
    port = free_port()
    return [start_node(pair, node, port, folder, *script, **environment) for node in (0, 1)]


def start_node(
    pair: Sequence[Host],
    node: int,
    port: int,
    folder: Path,
    *script: str,
    ranks: int = 2,
    restarts: int = 0,
    **environment: str,
) -> subprocess.Popen[bytes]:
    host, address = pair[node], ("--local-addr", pair[node].address)
    arguments = torchrun(port, pair[0].address, node, *address, *script, ranks=ranks, restarts=restarts)
    output = folder / f"node-{node}-{len(list(folder.glob('node-*')))}.log"
    return host.start(*arguments, folder=folder, output=output, GLOO_SOCKET_IFNAME=host.interface, **environment)


def told(folder: Path) -> list[str]:
    """What each node said, in the order in which they were started."""
    logs = sorted(folder.glob("node-*.log"), key=lambda path: int(path.stem.rpartition("-")[2]))
    return [log.read_text(errors="replace") for log in logs]


def end(agents: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Wait for agents, and leave nothing of their sessions behind; None for one that did not end by itself."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and any(agent.poll() is None for agent in agents):
        time.sleep(0.05)
    codes = [agent.poll() for agent in agents]
    for agent in agents:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
    return codes


def keep_up(start: Callable[[int], subprocess.Popen[bytes]], folder: Path) -> list[int]:
    """Start two nodes, and each anew that does not end well, as Kubernetes does; return which were."""
    agents, again = [start(0), start(1)], []
    deadline = time.monotonic() + SECONDS
    while [agent.poll() for agent in agents] != [0, 0]:
        for node, agent in enumerate(agents):
            if agent.poll() not in (None, 0):
                again.append(node)
                agents[node] = start(node)
        assert len(again) < 8, told(folder)
        assert time.monotonic() < deadline, told(folder)
        time.sleep(0.05)
    return again


def processes_with(marker: str) -> list[str]:
    """The command lines of living processes whose environment holds a marker."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and marker.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " "))
    return found


def until(path: Path, agents: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for a file, or fail with what the nodes said."""
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        ended = [agent.returncode for agent in agents if agent.poll() is not None]
        assert not ended, told(path.parent)
        assert time.monotonic() < deadline, told(path.parent)
        time.sleep(0.05)


def fit_digits(nodes: int, devices: int, folder: Path) -> list[str]:
    options = {
        "num_nodes": nodes,
        "devices": devices,
        "precision": "64-true",
        "max_epochs": 1,
        "limit_train_batches": 6,
        "limit_val_batches": 1,
        "logger": "false",
        "enable_progress_bar": "false",
        "default_root_dir": folder,
    }
    given = [f"--trainer.{name}={value}" for name, value in options.items()]
    config = str(ROOT / "configs" / "digits_arcface.yaml")
    return ["-m", "lightning_ddp_losses", "fit", "--config", config, *given]


def script_and_folders(folder: Path) -> tuple[str, Path, Path]:
    """The script of the training, and where it runs undisturbed and disturbed."""
    script, undisturbed, disturbed = folder / "train.py", folder / "undisturbed", folder / "disturbed"
    script.write_text(TRAINING)
    undisturbed.mkdir()
    disturbed.mkdir()
    return script, undisturbed, disturbed


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.rglob("*.ckpt")
    state: dict[str, torch.Tensor] = torch.load(file, weights_only=True)["state_dict"]
    return state


def test_two_hosts_train_the_digits_as_four_local_ranks(tmp_path: Path) -> None:
    here, there = tmp_path / "one", tmp_path / "two"
    there.mkdir()
    local = run_python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", *fit_digits(1, 4, here)),
        folder=tmp_path,
        seconds=SECONDS,
    )
    assert local.returncode == 0, local.stderr[-4000:]
    with hosts() as pair:
        agents = start_nodes(pair, there, *fit_digits(2, 2, there))
        assert end(agents) == [0, 0], told(there)
    assert_close(weights(there), weights(here))


# ---------------------------------------------------------------------- a cable, a machine

TRAINING = """
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch
from torch import nn
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from pytorch_metric_learning.losses import ArcFaceLoss
from lightning_ddp_losses import DDPLossStrategy

folder, pulled = Path(sys.argv[1]), sys.argv[2] == "pulled"
ends = os.environ.get("NODE") == "1" and not (folder / "ended").exists()

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.loss = nn.Linear(8, 4).double(), ArcFaceLoss(5, 4).double()

    def training_step(self, batch, number):
        if pulled and self.global_step == 3:
            (folder / f"reached-{self.global_rank}").touch()
            while not (folder / "pulled").exists():
                time.sleep(0.02)
        if ends and self.global_step == 3:
            (folder / "ended").touch()
            for process in (os.getppid(), os.getpid()):
                os.kill(process, signal.SIGKILL)
        return self.loss(self.encoder(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

rows = torch.randn(48, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
data = torch.utils.data.TensorDataset(rows, torch.arange(48) % 5)
last = folder / "checkpoints" / "last.ckpt"
trainer = Trainer(
    accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=1)],
    strategy=DDPLossStrategy(timeout=timedelta(seconds=40), use_global_sampler=True),
)
module = Module()
trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2), ckpt_path=last if last.exists() else None)
sys.stdout.write(f"done {trainer.global_rank} {trainer.global_step}\\n")  # one piece: ranks share the pipe
if trainer.global_rank == 0:
    torch.save(module.state_dict(), folder / "weights.pt")
"""


@pytest.mark.skipif(bool(permitted()), reason=f"did not run: a cable that is pulled ({permitted()})")
def test_a_cable_that_is_pulled_ends_every_rank_and_a_relaunch_goes_on(tmp_path: Path) -> None:
    script, undisturbed, folder = script_and_folders(tmp_path)
    marker = f"TEST_OF={uuid.uuid4()}"
    environment = dict([marker.split("=")])
    with two_hosts() as pair:
        assert end(start_nodes(pair, undisturbed, script, str(undisturbed), "whole")) == [0, 0], told(undisturbed)
        # 1. the cable is pulled while all ranks are in step 3, and stays so until they wait for each other
        agents = start_nodes(pair, folder, script, str(folder), "pulled", **environment)
        for rank in range(4):
            until(folder / f"reached-{rank}", agents)
        pair[1].cable("down")
        (folder / "pulled").touch()
        # 2. every rank and both agents end
        codes = end(agents)
        assert not {None, 0} & set(codes), (codes, told(folder))
        assert not processes_with(marker)
        # 3. plugged in again, the same command goes on where the last checkpoint is
        pair[1].cable("up")
        assert end(start_nodes(pair, folder, script, str(folder), "whole")) == [0, 0], told(folder)
    said = told(folder)
    # 4. each node has named a rank of the other one: the silent ones, or the one that ended first, as the hosts share this machine
    for output, of_other in zip(said[:2], (r"rank [23] \(", r"rank [01] \("), strict=True):
        errors = [line for line in output.splitlines() if "PeerError" in line]
        assert errors, said
        assert all(re.search(of_other, line.split("got", 1)[1]) for line in errors), "\n".join(errors)
    assert torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 6
    assert_close(torch.load(folder / "weights.pt"), torch.load(undisturbed / "weights.pt"), rtol=0)


def test_an_agent_that_is_killed_with_its_rank_is_replaced_and_training_goes_on(tmp_path: Path) -> None:
    script, undisturbed, folder = script_and_folders(tmp_path)
    local = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_python(*local, script, str(undisturbed), "whole", seconds=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    with hosts() as pair:
        port, command = free_port(), (script, str(folder), "whole")

        def start(node: int) -> subprocess.Popen[bytes]:
            return start_node(pair, node, port, folder, *command, ranks=1, restarts=3, NODE=str(node))

        started_again = keep_up(start, folder)
    # of the second machine nothing was left; torch's agent of the first one may have waited for its word, and ended too
    assert 1 in started_again
    assert re.search(r"PeerError: .* got rank 1 \(process \d+ on \S+\) has ended", told(folder)[0]), told(folder)[0]
    last = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 12
    assert_close(torch.load(folder / "weights.pt"), torch.load(undisturbed / "weights.pt"), rtol=0)
