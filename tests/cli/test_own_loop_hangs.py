"""What the manual says about a loop of one's own that hangs: its code shows where, and torchrun ends ranks whose peer has failed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_ddp_losses.callbacks import FAULTS
from lightning_ddp_losses.cli import manual
from tests.processes import TORCHRUN, run_python

(PAGE_CODE,) = [
    code for code in re.findall(r"```python\n(.*?)```", manual.about()["loop"], re.DOTALL) if "faulthandler" in code
]
# rank 1 comes late to the second step, so that rank 0 waits for it
LATE = """
import time
import torch
import torch.distributed as dist

loader = [0, 1]


def train(batch):
    if batch and dist.get_rank():
        time.sleep(SECONDS)  # the reason
    dist.all_reduce(torch.ones(1))
"""
FAILING = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank():
    raise ValueError("no such file")
dist.all_reduce(torch.ones(1))
"""
STOPPING = """
import os
import signal
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
device = "cpu"
loader = range(100)


def train(batch):
    if batch == 3 and dist.get_rank():
        os.kill(os.getpid(), signal.SIGTERM)  # one rank gets the signal
    dist.all_reduce(torch.ones(1))


def save():
    print(f"rank {dist.get_rank()} stops at batch {batch}", flush=True)
"""


def run(tmp_path: Path, code: str, *options: str) -> tuple[int, str]:
    script = tmp_path / "train.py"
    # without this torch may abort at the end of a process on a busy machine
    script.write_text(f"{code}\ndist.destroy_process_group()\n")
    done = run_python(*TORCHRUN, *options, str(script), folder=tmp_path, seconds=120)
    return done.returncode, done.stdout + done.stderr


def test_the_code_of_the_page_shows_where_each_rank_waits(tmp_path: Path) -> None:
    code = LATE.replace("SECONDS", "6") + PAGE_CODE.replace("dump_traceback_later(60)", "dump_traceback_later(2)")
    assert code.count("dump_traceback_later(2)") == 1
    # a file for each rank: two that write at a time mix their lines
    status, shown = run(tmp_path, code, "--redirects=3", f"--log-dir={tmp_path}")
    shown += "".join(path.read_text() for path in sorted(tmp_path.rglob("stderr.log")))
    assert status == 0, shown
    lines = (tmp_path / "train.py").read_text().splitlines()
    places = {lines[int(number) - 1].strip() for number in re.findall(r"train\.py\", line (\d+) in train", shown)}
    assert places == {"time.sleep(6)  # the reason", "dist.all_reduce(torch.ones(1))"}, shown


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    status, shown = run(tmp_path, FAILING)
    assert status == 1
    assert "ValueError: no such file" in shown
    assert "torchrun` then ends" in FAULTS["F42"].fix


def test_ranks_stop_together_at_a_signal_of_one(tmp_path: Path) -> None:
    status, shown = run(tmp_path, f"{STOPPING}\n\n{FAULTS['F43'].after}\n")
    assert status == 0, shown
    assert sorted(re.findall(r"rank \d stops at batch \d+", shown)) == [
        f"rank {rank} stops at batch 3" for rank in (0, 1)
    ]


def test_the_page_of_the_symptom_leads_to_the_section() -> None:
    assert "`ddp-losses explain loop` has a section about hangs" in manual.fault_list("hang")
    assert "\n## It hangs\n" in manual.about()["loop"]
    assert "explain loop" not in manual.fault_list("cost")


@pytest.mark.parametrize("fault", ["F36", "F42", "F43", "F44", "F45"])
def test_faults_that_hang_have_a_remedy_for_a_loop_of_ones_own(fault: str) -> None:
    assert "In a loop of your own" in FAULTS[fault].fix
    if fault != "F36":
        assert fault in manual.about()["loop"]
