"""`DeviceCheck`: every rank has a separate device and uses it. Metrics and losses are on the device of their inputs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.batch_reader import BatchReader
from lightning_ddp_losses.callbacks.buffer_sync import metrics_of
from lightning_ddp_losses.callbacks.facts.fact import Columns, Fact, Numbers
from lightning_ddp_losses.callbacks.facts.rules import find_shared_devices
from lightning_ddp_losses.callbacks.findings import CheckStage
from lightning_ddp_losses.callbacks.report import MOST_RANKS_ONE_BY_ONE
from lightning_ddp_losses.core.host_copy import anonymous_bytes
from lightning_ddp_losses.core.modules import unregistered_modules
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.fingerprint import hash_text
from lightning_ddp_losses.distributed.rendezvous import device_identity


class UseOfRank(NamedTuple):
    """Work of a rank in a fit.

    Attributes:
        batches: Number of training batches.
        seconds: Seconds since training started.
        peak_bytes: Peak memory on the device. On the CPU, the largest anonymous memory of the process before a backward (Linux, otherwise
            0).
    """

    batches: float
    seconds: float
    peak_bytes: float


def visible_devices() -> int:
    """Return the number of accelerators that this process may use."""
    return torch.accelerator.device_count()


class DeviceCheck(RankCheck, default=True):
    """Checks that each rank has a separate device and uses it.

    Covers F50 and F73. Reports batches, seconds and peak memory of every rank as figures.

    Args:
        **options: Same as in ``RankCheck``.

    Communication: a few numbers at the start and the end of training.

    Example:
        >>> checks = DDPChecks([DeviceCheck()], log_figures=True)  # seconds and memory of every rank go to the loggers
    """

    faults = ("F50", "F73", "IDLE")
    needs_peers = False
    shares = (("_batches", BatchReader),)
    _batches: BatchReader

    def _forget(self) -> None:
        self._began, self._host_peak_bytes = time.perf_counter(), 0
        self._use_by_rank: list[UseOfRank] = []

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def see_loss(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        """Read the memory at its peak, after forward, when all tensors saved for backward are allocated."""
        if trainer.strategy.root_device.type == "cpu":
            self._host_peak_bytes = max(self._host_peak_bytes, anonymous_bytes())

    # ------------------------------------------------------------------ facts

    def _read_start(self) -> Numbers:
        """Return a hash of the device's identity, or 0 for a device that ranks may share."""
        trainer, module = self.runner.trainer, self.runner.module
        device = trainer.strategy.root_device
        # registered modules, and unregistered modules in attributes, lists and dicts
        modules = dict(module.named_modules()) | dict(unregistered_modules(module, {}))
        del modules[""]
        self._find_elsewhere(modules, device)
        self._find_idle_devices(trainer, device)
        identity = device_identity(device)
        return {"identity": hash_text(identity) if identity else 0}

    def _read_use(self) -> Numbers:
        """Return the work of this rank."""
        device = self.runner.trainer.strategy.root_device
        peak_bytes = self._host_peak_bytes
        peak_of = getattr(torch.get_device_module(device), "max_memory_allocated", None)
        if device.type != "cpu" and peak_of is not None:
            peak_bytes = peak_of(device)
        return {"batches": self._batches.number, "seconds": time.perf_counter() - self._began, "peak_bytes": peak_bytes}

    def _see_use(self, columns: Columns) -> None:
        self._use_by_rank = [UseOfRank(*use) for use in zip(*columns.values(), strict=True)]

    facts = (
        Fact("device", CheckStage.TRAIN_START, _read_start, find_shared_devices),
        Fact("work", CheckStage.TRAIN_END, _read_use, see=_see_use),
    )

    def _find_elsewhere(self, modules: Mapping[str, nn.Module], device: torch.device) -> None:
        """Find modules that compute in threads, and losses and metrics that are not on the device of their inputs."""
        only_nccl = process_groups.is_distributed() and torch.distributed.get_backend() == "nccl"
        for name, inner in modules.items():
            if isinstance(inner, nn.DataParallel):
                self.add("F73", "threads", name=name)
            if not any(cls.__name__.endswith(("Loss", "Metric")) for cls in type(inner).__mro__):
                continue
            metrics = metrics_of(inner).values()
            used = {tensor.device for tensor in [*inner.parameters(), *inner.buffers()]}
            used |= {metric.device for metric in metrics}
            wrong = {str(other) for other in used if not _is_same(other, device)}
            if wrong:
                self.add("F50", name=name, wrong=", ".join(sorted(wrong)), device=device)
            computes_on_cpu = any(getattr(metric, "compute_on_cpu", False) for metric in metrics)
            if computes_on_cpu and device.type != "cpu" and only_nccl:
                self.add("F50", "compute_on_cpu", name=name)

    def _find_idle_devices(self, trainer: Trainer, device: torch.device) -> None:
        """Find accelerators that are not used by any rank. If the ranks are on the CPU, Lightning reports this."""
        visible = visible_devices()
        in_use = process_groups.world_size() // max(trainer.num_nodes, 1)
        if visible > in_use and device.type != "cpu":
            self.add("IDLE", name=f"{device.type} devices", visible=visible, in_use=in_use)

    def figures(self) -> dict[str, float]:
        """Return batches, seconds and peak memory of every rank."""
        found: dict[str, float] = {}
        for rank, use in enumerate(self._use_by_rank):
            # omit the memory if it is not known
            known = {name: value for name, value in use._asdict().items() if value or name != "peak_bytes"}
            found |= {f"rank_{rank}_{name}": value for name, value in known.items()}
        return found

    def remarks(self) -> list[str]:
        """Return the same figures as text, for each rank, or as ranges over all ranks if there are many."""
        if not self._use_by_rank:
            return []
        if len(self._use_by_rank) > MOST_RANKS_ONE_BY_ONE:
            batches, seconds, peaks = zip(*self._use_by_rank, strict=True)
            remark = f"{_span(batches, '.0f')} batches per rank in {_span(seconds, '.1f')} s"
            if any(peaks):
                remark += f", peak {_span([peak / 2**30 for peak in peaks], '.2f')} GiB"
            return [remark]
        remarks = []
        for rank, use in enumerate(self._use_by_rank):
            peak = f", {use.peak_bytes / 2**30:.2f} GiB" if use.peak_bytes else ""
            remarks.append(f"rank {rank}: {use.batches:.0f} batches, {use.seconds:.1f} s{peak}")
        return remarks


def _span(values: Sequence[float], form: str) -> str:
    """Return the smallest and the largest value as text, or a single value if both have the same text."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _is_same(used: torch.device, device: torch.device) -> bool:
    """Return whether two devices are equal. A device without an index equals any device of its type."""
    return used.type == device.type and (used.index == device.index or None in (used.index, device.index))
