"""`ddp-losses doctor`: what a bug report needs, and whether the installation works: two ranks against one process, for a second.

`ddp-losses --version` is one line of it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import logging
import os
import platform
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.pytorch.strategies import StrategyRegistry
from packaging.requirements import Requirement
from pytorch_metric_learning.losses import SupConLoss
from rich.console import Console
from rich.table import Table

from lightning_ddp_losses import __version__
from lightning_ddp_losses.distributed.process_groups import connections
from lightning_ddp_losses.losses import GlobalBatchLoss

_DISTRIBUTION = "lightning-ddp-losses"
_ALSO = ("pytorch-lightning", "numpy", "matplotlib", "scikit-learn")  # whose version says something, if they are there
# what changes how ranks find each other and what they say
_VARIABLES = (
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"),
    *("TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
    *("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_NNODES"),
)
_TIMEOUT = timedelta(seconds=60)
_LARGEST_ERROR = 1e-9  # relative, in float64


class ReportLine(NamedTuple):
    """Holds one line of the report: what, its value, and whether that is a fault."""

    what: str
    value: str
    is_fault: bool = False


class TwoRanks(NamedTuple):
    """Holds what two ranks found: the largest relative error of a gradient against one process, and the seconds it took them."""

    error: float
    seconds: float


def run_doctor(arguments: Sequence[str], console: Console | None = None) -> int:
    """Show the report; return the exit status: 1 where something does not work.

    Args:
        arguments: What follows ``ddp-losses doctor``.
        console: Where it is shown; None: standard output.
    """
    parser = argparse.ArgumentParser(
        prog="ddp-losses doctor", description="Versions, and two ranks against one process."
    )
    parser.parse_args(arguments)
    variables = [
        f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ
    ]  # before our ranks set theirs
    environment = ReportLine("environment", " ".join(variables) or "nothing that ranks read")
    # the ranks first: what looks at a GPU may come after a fork only
    ranks = two_ranks_entry()
    entries = [*version_entries(), *machine_entries(), environment, ranks]
    table = Table(show_header=False)
    for entry in entries:
        table.add_row(entry.what, entry.value, style="red" if entry.is_fault else "")
    console = console or Console()
    console.print(table, highlight=False)
    faults = [entry.what for entry in entries if entry.is_fault]
    verdict = "Everything works."
    if faults:
        verdict = f"Look at: {', '.join(faults)}."
    console.print(verdict, highlight=False)
    return int(bool(faults))


def version_line() -> str:
    """Return our version and those of what we stand on, in one line."""
    names = ("torch", "lightning", "torchmetrics", "pytorch-metric-learning")
    others = ", ".join(f"{name} {_installed_version(name)}" for name in names)
    return f"ddp-losses {__version__} ({others}, Python {platform.python_version()})"


def version_entries() -> list[ReportLine]:
    """Return the versions of this package and of all that it asks for, with what it asks for where that is not met."""
    entries = [
        ReportLine("ddp-losses", __version__),
        ReportLine("Python", f"{platform.python_version()}, {platform.platform()}"),
    ]
    for text in importlib.metadata.requires(_DISTRIBUTION) or ():
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        version = _installed_version(wanted.name)
        is_met = version != "" and wanted.specifier.contains(version, prereleases=True)
        if is_met:
            entries.append(ReportLine(wanted.name, version))
        else:
            entries.append(ReportLine(wanted.name, f"{version or 'missing'}, needs {wanted.specifier}", is_fault=True))
    entries += [ReportLine(name, version) for name in _ALSO if (version := _installed_version(name))]
    return entries


def _installed_version(distribution: str) -> str:
    """Return the version of an installed distribution; empty where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def machine_entries() -> list[ReportLine]:
    """Return devices, backends, how this host is called on the network, and the names of our strategies."""
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_backend_available(name)]
    strategies = [name for name in StrategyRegistry if "ddp_losses" in name and "find" not in name]
    return [
        ReportLine("processor", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"),
        ReportLine("accelerators", ", ".join(_accelerators()) or "none"),
        ReportLine("backends", ", ".join(backends) or "none", is_fault=not backends),
        ReportLine("network", _network()),
        ReportLine("open files", _open_files()),
        ReportLine("strategies", ", ".join(sorted(strategies))),
    ]


def _accelerators() -> list[str]:
    """Return the name of each accelerator, of whatever kind."""
    accelerator = getattr(torch, "accelerator", None)  # torch 2.6 or newer
    if accelerator is None or not accelerator.is_available():
        return []
    kind = accelerator.current_accelerator().type
    name_of = getattr(torch.get_device_module(kind), "get_device_name", None)
    found = []
    for index in range(accelerator.device_count()):
        name = f"{kind}:{index}"
        if name_of:
            name += f" {name_of(index)}"
        found.append(name)
    return found


def _network() -> str:
    """Return the host's name and address, by which ranks of other hosts find it, and its interfaces."""
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "no address: set GLOO_SOCKET_IFNAME to an interface"
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    return f"{host} is {address}; interfaces {interfaces}"


def _open_files() -> str:
    """Return how many files a process may open, and how many the connections of our groups are on large worlds."""
    allowed = "no limit known"
    with contextlib.suppress(ImportError):  # Windows
        import resource

        allowed = f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,} per process"
    needs = [f"{connections(world):,} at {world:,} ranks" for world in (64, 1024)]
    return f"{allowed}; our groups keep at most {', '.join(needs)}"


def two_ranks_entry() -> ReportLine:
    """Start two ranks, and say whether their gradient is that of one process."""
    try:
        found = run_two_ranks()
    except Exception as error:  # whatever the installation does not have
        return ReportLine("two ranks", f"failed: {type(error).__name__}: {str(error).strip()[-400:]}", is_fault=True)
    is_fault = not found.error <= _LARGEST_ERROR
    verdict = "not the gradient of one process" if is_fault else "the gradient of one process"
    return ReportLine(
        "two ranks", f"{verdict}, error {found.error:.1e}, gloo, {found.seconds:.1f} s", is_fault=is_fault
    )


def run_two_ranks() -> TwoRanks:
    """Start two processes under gloo and compare a loss over all rows with one process, in float64."""
    start = time.monotonic()
    logging.getLogger("lightning.fabric.utilities.rank_zero").setLevel(
        logging.WARNING
    )  # who has started, and what devices there are
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo", timeout=_TIMEOUT)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    error = fabric.launch(_largest_error)
    return TwoRanks(float(error), time.monotonic() - start)


def _largest_error(fabric: Fabric) -> float:
    """Return the relative error of this rank's gradient, with three rows on one rank and five on the other."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    labels = torch.arange(8) % 3
    encoder = torch.nn.Linear(6, 4).double()
    # one process
    torch.nn.init.orthogonal_(encoder.weight, generator=generator)
    SupConLoss()(encoder(rows), labels).backward()
    assert encoder.weight.grad is not None
    expected = encoder.weight.grad.clone()
    encoder.zero_grad()
    # this rank
    own = slice(0, 3) if fabric.global_rank == 0 else slice(3, 8)
    model = fabric.setup_module(encoder)
    fabric.backward(GlobalBatchLoss(SupConLoss())(model(rows[own]), labels[own]))
    return float((encoder.weight.grad - expected).norm() / expected.norm())
