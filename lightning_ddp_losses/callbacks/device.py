"""`DeviceCheck`: every rank has a device of its own and works on it; metrics and losses are where their inputs are."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.check_stage import Moment
from lightning_ddp_losses.callbacks.findings import Finding
from lightning_ddp_losses.callbacks.local_findings import LocalFacts
from lightning_ddp_losses.callbacks.metric_states import metrics_of
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.fingerprint import hash_text


def device_identity(device: torch.device) -> str:
    """What tells devices of one type apart, over all nodes; empty for the CPU, which ranks share."""
    if device.type == "cpu":
        return ""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "") if device.type == "cuda" else ""
    return f"{socket.gethostname()} {uuid or device}"


def visible_devices() -> int:
    """Accelerators that this process may use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class DeviceCheck(RankCheck):
    """Each rank has its own device and uses it.

    Covers F50 and F73. Reports batches, seconds and peak memory of every rank as figures.

    Args:
        **options: As ``RankCheck``.

    Communication: a few numbers at the start and the end of training.
    """

    moments = (Moment.TRAIN_START, Moment.TRAIN_END)
    faults = ("F50", "F73", "IDLE")
    needs_peers = False

    def __init__(self, *, every_n_steps: int = 1, action: Mapping[str, str] | None = None) -> None:
        super().__init__(every_n_steps=every_n_steps, action=action)
        self._facts = LocalFacts(self.faults)
        self._batches, self._begun = 0, 0.0
        self._use: list[tuple[float, float, float]] = []

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Begin to count."""
        self._facts = LocalFacts(self.faults)
        self._batches, self._begun, self._use = 0, time.perf_counter(), []

    def see_batch(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Count it."""
        self._batches += 1

    def measure(self, trainer: pl.Trainer, module: pl.LightningModule, moment: Moment) -> list[int] | list[float]:
        """Which device this is and what is not on it; at the end, what it did."""
        device = trainer.strategy.root_device
        if moment == Moment.TRAIN_END:
            peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
            seconds = time.perf_counter() - self._begun
            return [self._batches, seconds, peak]
        self._facts.found = []
        self._find_parallel(module)
        self._find_elsewhere(trainer, module, device)
        self._find_idle(trainer, device)
        identity = device_identity(device)
        return [*self._facts.row(), hash_text(identity) if identity else 0]

    def _find_parallel(self, module: nn.Module) -> None:
        held = [*module.named_modules(), *((k, v) for k, v in vars(module).items() if isinstance(v, nn.Module))]
        for name, inner in held:
            if isinstance(inner, nn.DataParallel):
                what = f"`{name}` is an nn.DataParallel: threads of one process, beside the ranks"
                self._facts.found.append(
                    Finding("F73", what, name=name, fix="Remove it; the strategy divides the work.")
                )

    def _find_elsewhere(self, trainer: pl.Trainer, module: pl.LightningModule, device: torch.device) -> None:
        for name, inner in _judges(module).items():
            tensors = [*inner.parameters(), *inner.buffers()]
            places = {t.device for t in tensors} | {inner.device for inner in metrics_of(inner).values()}
            wrong = {str(place) for place in places if place.type != device.type or _other_index(place, device)}
            if wrong:
                fix = f"Register it as an attribute or in nn.ModuleList, which moves it, or call .to({device})."
                what = f"`{name}` is on {', '.join(sorted(wrong))}"
                self._facts.found.append(Finding("F50", what, f"{device}, where its inputs are", name=name, fix=fix))
        for name, metric in metrics_of(module).items():
            if getattr(metric, "compute_on_cpu", False) and device.type != "cpu" and _only_nccl():
                what = f"`{name}` keeps its states on the CPU, which the process group cannot gather"
                fix = 'Initialise with backend "cpu:gloo,cuda:nccl", or set compute_on_cpu=False.'
                self._facts.found.append(Finding("F50", what, name=name, fix=fix))

    def _find_idle(self, trainer: pl.Trainer, device: torch.device) -> None:
        visible = visible_devices()
        here = process_groups.world_size() // max(trainer.num_nodes, 1)
        if visible > here:
            what = f"{visible} accelerators are visible, {here} of them in use"
            name = f"{device.type} devices"
            self._facts.found.append(
                Finding("IDLE", what, name=name, fix="Set Trainer(devices=...) where more were meant.")
            )

    def judge(
        self, table: list[list[Any]], trainer: pl.Trainer, module: pl.LightningModule, moment: Moment
    ) -> list[Finding]:
        """Look for devices that ranks share; keep the figures."""
        if moment == Moment.TRAIN_END:
            self._use = [tuple(row) for row in table]
            return []
        found = self._facts.judge(table)
        identities = [row[2] for row in table]
        shared = tuple(r for r, i in enumerate(identities) if i and identities.count(i) > 1)
        if shared:
            fix = "Give each rank its own: devices=N in the Trainer, and no .to('cuda:0') or CUDA_VISIBLE_DEVICES of one device."
            found.append(Finding("F73", "ranks share one device", "a device for each rank", shared, "devices", fix=fix))
        return found

    def describe(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
        """What this rank found by itself."""
        return self._facts.describe(finding)

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        """What all ranks found by themselves."""
        return self._facts.explain(finding, texts)

    def figures(self) -> dict[str, float]:
        """Batches, seconds and peak memory of every rank."""
        found: dict[str, float] = {}
        for rank, (batches, seconds, peak) in enumerate(self._use):
            found |= {f"rank_{rank}_batches": batches, f"rank_{rank}_seconds": seconds}
            if peak:
                found[f"rank_{rank}_peak_bytes"] = peak
        return found


def _judges(module: nn.Module) -> dict[str, nn.Module]:
    """Losses and metrics: registered ones, and those in attributes, lists and dicts of the module."""
    found = {name: inner for name, inner in module.named_modules() if name and _is_judge(inner)}
    for key, value in vars(module).items():
        if not key.startswith("_"):
            entries = (
                value.items()
                if isinstance(value, dict)
                else enumerate(value)
                if isinstance(value, (list, tuple))
                else ()
            )
            held = [(f"self.{key}[{i!r}]", item) for i, item in entries] or [(f"self.{key}", value)]
            found |= {path: item for path, item in held if isinstance(item, nn.Module) and _is_judge(item)}
    return found


def _is_judge(module: nn.Module) -> bool:
    return any(cls.__name__.endswith(("Loss", "Metric", "_Loss")) for cls in type(module).__mro__)


def _other_index(place: torch.device, device: torch.device) -> bool:
    return place.index is not None and device.index is not None and place.index != device.index


def _only_nccl() -> bool:
    return process_groups.is_distributed() and torch.distributed.get_backend() == "nccl"
