"""The recipes that start something are run, as far as one machine can: the Kubernetes job's command in two pods, SLURM by its variables."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch.callbacks import Callback

from lightning_ddp_losses.cli import manual
from tests.faults.test_hosts import FAST_AGENT, end, fit_digits, hosts, told
from tests.oracle import assert_close
from tests.processes import ROOT, free_port


def block(page: str, language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", manual.recipes()[page], re.DOTALL)[number]


def options_of(command: list[str]) -> dict[str, str]:
    """The options of a command line, whether it says `--name=value` or `--name value`."""
    text = re.sub(r" (--[\w.-]+)[ =]([^ -]\S*)", r" \1=\2", " ".join(command))
    return dict(word.lstrip("-").split("=", 1) for word in text.split() if "=" in word)


def test_the_kubernetes_job_runs(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all(block("kubernetes", "yaml"))
    # 1. what Kubernetes takes from other parts of the page
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    command: list[str] = container["command"]
    given = options_of(command)
    assert spec["completions"] == spec["parallelism"] == int(given["nnodes"]) == int(given["trainer.num_nodes"])
    assert given["nproc-per-node"] == given["trainer.devices"]
    first_pod = f"{job['metadata']['name']}-0.{service['metadata']['name']}:29500"
    assert given["rdzv-endpoint"] == first_pod
    # 2. the same as on machines
    (on_machines,) = [line for line in block("torchrun", "bash").replace("\\\n", "").splitlines() if "torchrun" in line]
    same = {**options_of(shlex.split(on_machines)), "rdzv-endpoint": first_pod, "rdzv-id": given["rdzv-id"]}
    assert given == same
    # 3. it runs, of smaller size
    assert command[0] == "torchrun"
    port, small = (
        free_port(),
        {"--nproc-per-node=4": "--nproc-per-node=1", "--trainer.devices=4": "--trainer.devices=1"},
    )
    with hosts() as pair:
        agents = []
        for node, host in enumerate(pair):
            mine = [small.get(word, word).replace(first_pod, f"{pair[0].address}:{port}") for word in command[1:]]
            place = mine.index("-m")
            mine[place:place] = ["--local-addr", host.address, "--rdzv-conf", f"is_host={int(node == 0)},{FAST_AGENT}"]
            mine[mine.index("--config=my.yaml") :] = fit_digits(2, 1, tmp_path)[3:]
            variables = {row["name"]: row["value"].replace("eth0", host.interface) for row in container["env"]}
            output = tmp_path / f"node-{node}-{node}.log"
            arguments = ["-m", "torch.distributed.run", *mine]
            agents.append(host.start(*arguments, folder=tmp_path, output=output, **variables))
        assert end(agents) == [0, 0], told(tmp_path)
    assert list(tmp_path.rglob("*.ckpt"))


class TakesSignal(Callback):
    """What SLURM does before a job's time is over, here to one rank, at batch 2 of the first start."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 2 and trainer.global_rank == 1 and os.environ["SLURM_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGUSR1)


def srun(folder: Path, restarts: int) -> None:
    """Run the page's command as `srun` does, in two tasks."""
    (line,) = [line for line in block("slurm", "bash").splitlines() if line.startswith("srun")]
    words = shlex.split(line)
    assert words[:3] == ["srun", "ddp-losses", "fit"]
    assert options_of(words).keys() == {"config", "trainer.num_nodes", "trainer.devices"}
    command = [sys.executable, *fit_digits(1, 2, folder), f"--trainer.callbacks+={__name__}.TakesSignal"]
    common = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NODEID": "0",
        "SLURM_RESTART_COUNT": str(restarts),
        "MASTER_PORT": str(free_port()),
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    tasks = []
    for rank in range(2):
        own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        with (folder / f"node-{rank}-{2 * restarts + rank}.log").open("wb") as said:
            tasks.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **common, **own},
                    cwd=folder,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    assert end(tasks) == [0, 0], told(folder)


def test_a_slurm_job_saves_is_queued_again_and_goes_on(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/queued"\n')
    scontrol.chmod(0o755)
    # the signal's step is not the last: here nobody ends the job, which trains to its end; then it starts again
    for restarts in (0, 1):
        srun(tmp_path, restarts)
    assert (tmp_path / "queued").read_text().splitlines() == ["requeue 4711"]
    (saved,) = tmp_path.glob("hpc_ckpt_*.ckpt")
    assert torch.load(saved, weights_only=False)["global_step"] == 3
    assert "The signal to requeue reached rank 1" in told(tmp_path)[0]
    assert str(saved) in "".join(told(tmp_path)[2:]), "the second start goes on from it"
    whole, resumed = sorted((tmp_path / "checkpoints").glob("*.ckpt"))
    states = [torch.load(path, weights_only=True)["state_dict"] for path in (whole, resumed)]
    assert_close(states[1], states[0], rtol=0)
