"""What an audit finds and costs: PML's own wrapper around ArcFace on the digits, with its picture; seconds; memory.

The command on ``configs/digits_arcface.yaml`` (2 ranks, 3 steps) must end within 60 s, imports included. Memory is the largest size of
any process, above what Python and torch held before, over the size of 100 million parameters in one tensor: at most 3.

`parity` of a small model on 2 ranks takes at most 8 s in a fresh process, imports included, and at most 2 s once they are loaded.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from pytorch_metric_learning.losses import ArcFaceLoss
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.records import RESULTS, Row
from lightning_ddp_losses import audit
from lightning_ddp_losses.cli import DigitsDataModule, DigitsEncoder, EmbeddingModule

__all__ = ["main"]

PARAMETERS = 100_000_000
SECONDS, TIMES = 60.0, 3.1  # limits; a process holds a few MiB more than it counts
COLD_SECONDS, WARM_SECONDS = 8.0, 2.0
CONFIG = Path(__file__).parents[1] / "configs" / "digits_arcface.yaml"


def main(arguments: list[str]) -> list[Row]:
    """Audit, draw, measure."""
    parser = argparse.ArgumentParser("python -m benchmarks audit", description=__doc__)
    parser.add_argument("--parameters", type=int, default=PARAMETERS, help="of the memory case")
    options = parser.parse_args(arguments)
    return [wrapper(), command(), loop(), memory(options.parameters)]


def wrapper() -> Row:
    """PML's own wrapper: the encoder exact, the loss's weight W times."""
    torch.manual_seed(0)
    loss = DistributedLossWrapper(ArcFaceLoss(num_classes=10, embedding_size=32))
    module = EmbeddingModule(DigitsEncoder(embedding_size=32), loss)
    report = audit(module, DigitsDataModule(batch_size=64), strategy="ddp")
    report.plot(RESULTS / "audit_pml_wrapper.png")
    print(report)
    rows = [row for row in report.rows if row.step == 1]
    encoder = max((row for row in rows if row.owner == "encoder"), key=lambda row: row.error)
    (weight,) = [row for row in rows if row.owner != "encoder"]
    right = encoder.exact and abs(weight.ratio - 2) < 1e-3 and report.diagnoses[0].fault == "F24"
    return {
        "table": "DistributedLossWrapper(ArcFace) on the digits, 2 ranks",
        "encoder_error": encoder.error,
        "weight_ratio": weight.ratio,
        "weight_cosine": weight.cosine,
        "diagnosis": report.diagnoses[0].fault,
        "seconds": report.settings["seconds"],
        "verdict": "ok" if right else "WRONG",
    }


def command() -> Row:
    """The command in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, "-m", "lightning_ddp_losses", "audit", "--config", str(CONFIG)]
        path = os.pathsep.join([str(CONFIG.parents[1]), os.environ.get("PYTHONPATH", "")])
        started = time.monotonic()
        done = subprocess.run(line, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, check=False)
    seconds = time.monotonic() - started
    return {
        "table": "ddp-losses audit --config configs/digits_arcface.yaml",
        "seconds": round(seconds, 1),
        "limit_seconds": SECONDS,
        "exit_status": done.returncode,
        "verdict": "ok" if done.returncode == 0 and seconds < SECONDS else "WRONG",
    }


LOOP = """
import torch
from lightning_ddp_losses import parity

def step(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()

batches = [{"x": torch.randn(16, 8), "y": torch.randn(16, 1)}]
report = parity(lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)), step, batches)
"""


def loop() -> Row:
    """`parity` of a small model, cold and warm."""
    started = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(CONFIG.parents[1])}
    done = subprocess.run([sys.executable, "-c", LOOP], env=environment, capture_output=True, check=False)
    cold = time.monotonic() - started
    names: dict[str, Any] = {}
    for _ in range(2):  # the second one is warm
        started = time.monotonic()
        exec(LOOP, names)
        warm = time.monotonic() - started
    right = done.returncode == 0 and names["report"].equal and cold < COLD_SECONDS and warm < WARM_SECONDS
    return {
        "table": "parity of a small model, 2 ranks",
        "cold_seconds": round(cold, 1),
        "cold_limit_seconds": COLD_SECONDS,
        "warm_seconds": round(warm, 2),
        "warm_limit_seconds": WARM_SECONDS,
        "verdict": "ok" if right else "WRONG",
    }


class _Large(LightningModule):
    def __init__(self, size: int, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.table = nn.Parameter(torch.ones(size // 1000, 1000))

    def training_step(self, batch: Any, index: int) -> Any:
        return (self.table[0] * batch[0].mean()).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_fit_end(self) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        (self.folder / str(os.getpid())).write_text(str(peak))


def memory(size: int) -> Row:
    """The largest process of an audit of one large tensor."""
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        module = _Large(size, Path(folder))
        report = audit(module, DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2), strategy="ddp", steps=1)
        peaks = [int(path.read_text()) - before for path in Path(folder).iterdir()]
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    times = max(*peaks, own) / (4 * size)
    return {
        "table": "Largest process over the parameters' size, SGD, 2 ranks",
        "parameters": size,
        "times": round(times, 2),
        "comparing_process": round(own / (4 * size), 2),
        "limit": TIMES,
        "seconds": round(time.monotonic() - started, 1),
        "verdict": "ok" if report.equal and times <= TIMES else "WRONG",
    }
