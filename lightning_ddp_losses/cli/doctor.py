"""`ddp-losses doctor`: the facts that a bug report needs, and a short training of two ranks against one process.

`ddp-losses --version` prints the versions in one line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from lightning.pytorch.strategies import StrategyRegistry
from pytorch_metric_learning.losses import SupConLoss
from rich.console import Console
from rich.table import Table

from lightning_ddp_losses import __version__, requirements
from lightning_ddp_losses.audit import parity
from lightning_ddp_losses.core import launch_variables
from lightning_ddp_losses.distributed.process_groups import connections
from lightning_ddp_losses.losses import GlobalBatchLoss

# environment variables for communication between ranks, by their prefixes. They do not contain secrets.
_VARIABLES = re.compile("MASTER_|WORLD_SIZE|RANK|LOCAL_|NODE_RANK|GLOO_|NCCL_|TORCH_|CUDA_|OMP_|SLURM_JOB_ID|SLURM_N")
ReportLine = tuple[str, str, bool]
"""A line of the report: its name, its value, and whether it is a fault."""


def run_doctor(arguments: Sequence[str], console: Console | None = None) -> int:
    """Show the report and return the exit status: 1 if something does not work.

    Args:
        arguments: Command line after ``ddp-losses doctor``.
        console: Console of the report. Default: standard output.
    """
    argparse.ArgumentParser(prog="ddp-losses doctor", description=__doc__).parse_args(arguments)
    # read the environment before our ranks change it, and start the ranks before using the accelerator, which forbids a fork
    variables = " ".join(f"{name}={value}" for name, value in os.environ.items() if _VARIABLES.match(name))
    left_over = launch_variables.left_over()
    ranks = two_ranks()
    lines = [*versions(), *machine(), ("environment", variables or "no variable that ranks read", False)]
    lines += [("left over?", f"{sentence} {launch_variables.ADVICE}", False) for sentence in left_over]
    lines.append(ranks)
    # the table, then one sentence
    table = Table(show_header=False)
    for name, value, is_fault in lines:
        table.add_row(name, value, style="red" if is_fault else "")
    faults = [name for name, _, is_fault in lines if is_fault]
    sentence = f"Look at: {', '.join(faults)}." if faults else "Everything works."
    (console or Console()).print(table, sentence, highlight=False)
    return int(bool(faults))


def version_line() -> str:
    """Return the versions of this package and of its requirements in one line."""
    (name, version, _), *others = versions()
    return f"{name} {version} ({', '.join(f'{other} {found}' for other, found, _ in others)})"


def versions() -> Iterator[ReportLine]:
    """Yield the versions of this package, of Python and of each requirement. An unmet requirement is a fault."""
    yield "ddp-losses", __version__, False
    yield "Python", f"{platform.python_version()}, {platform.platform()}", False
    rows = requirements.read()
    if rows is None:
        yield "installed", f"no, read from {Path(__file__).parents[2]}: its requirements are not known", False
        return
    for row in rows:
        value = row.version or "missing"
        if not row.is_met:
            value += f", needs {row.needs}"
        yield row.name, value, not row.is_met


def machine() -> Iterator[ReportLine]:
    """Yield processor, accelerators, backends, network, limits and the names of our strategies."""
    yield "processor", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch", False
    yield "accelerators", f"{torch.accelerator.device_count()} ({torch.accelerator.current_accelerator()})", False
    backends = filter(torch.distributed.is_backend_available, ("gloo", "nccl", "mpi", "ucc"))
    yield "backends", ", ".join(backends), False
    # ranks on other hosts find this one by its address
    address = "no address: set GLOO_SOCKET_IFNAME to an interface"
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    yield "network", f"{socket.gethostname()} is {address}; interfaces {interfaces}", False
    needs = ", ".join(f"{connections(world):,} at {world:,} ranks" for world in (64, 1024))
    yield "open files", f"{os.sysconf('SC_OPEN_MAX'):,} per process; our groups keep at most {needs}", False
    yield "strategies", ", ".join(sorted(name for name in StrategyRegistry if "ddp_losses" in name)), False


def two_ranks() -> ReportLine:
    """Start two ranks under gloo, with three and five rows, and compare their gradient with the gradient of one process."""
    torch.manual_seed(0)
    batch = {"rows": torch.randn(8, 6), "labels": torch.arange(8) % 3}
    try:
        report = parity(lambda: torch.nn.Linear(6, 4), supcon, [batch], splits=[3, 5])
    except Exception as failure:  # anything missing in the installation
        return "two ranks", f"failed: {type(failure).__name__}: {str(failure).strip()[-400:]}", True
    is_fault, error = not report.equal, max(row.error for row in report.rows)
    return "two ranks", f"{'not ' * is_fault}the gradient of one process, error {error:.1e}, gloo", is_fault


def supcon(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss over the rows of all ranks."""
    loss: torch.Tensor = GlobalBatchLoss(SupConLoss())(model(batch["rows"]), batch["labels"])
    return loss
