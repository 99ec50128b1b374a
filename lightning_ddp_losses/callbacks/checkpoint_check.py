"""`CheckpointCheck`: a checkpoint contains all trained parameters, is restored completely, and matches the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.batch_reader import BatchReader
from lightning_ddp_losses.callbacks.facts.fact import Fact, Numbers
from lightning_ddp_losses.callbacks.findings import CheckStage
from lightning_ddp_losses.callbacks.replicas import optimizer_parameters
from lightning_ddp_losses.core.transparent import wrapped_module
from lightning_ddp_losses.distributed import process_groups

_UNEVEN = 0.1  # relative difference that a last batch, or ranks with different numbers of rows, may cause
KEY = "ddp_checks"
"""The entry of a checkpoint that describes its training."""


class CheckpointCheck(RankCheck, default=True):
    """Checks that checkpoints contain every trained parameter under its name in the module, and match the number of ranks.

    Covers F65, F75 and F76.

    Args:
        **options: Same as in ``RankCheck``.

    Communication: 8 bytes before backward, and when a checkpoint is saved or loaded.

    Example:
        >>> checks = DDPChecks([CheckpointCheck(action="warn")])
    """

    faults = ("F65", "F75", "F76")
    needs_peers = False
    shares = (("_batches", BatchReader),)
    _batches: BatchReader

    def _forget(self) -> None:
        self._made_by: dict[str, Any] | None = None

    def _description(self, trainer: Trainer) -> dict[str, Any]:
        """Return the numbers that describe this fit."""
        return {
            "world_size": process_groups.world_size(),
            "rows_per_rank": self._batches.samples,
            "accumulate": trainer.accumulate_grad_batches,
        }

    # ------------------------------------------------------------------ at saving

    def _find_missing(self, trainer: Trainer, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Find trained parameters that are missing in the checkpoint. A different key for the same memory is accepted."""
        stored = {_memory_of(value) for value in state.values() if isinstance(value, Tensor)}
        names = {id(parameter): name for name, parameter in module.named_parameters(remove_duplicate=False)}
        for place, parameter in optimizer_parameters(trainer):
            name = names.get(id(parameter))
            is_kept = name in state or _memory_of(parameter) in stored
            if parameter.requires_grad and not is_kept and type(parameter.data) is Tensor:
                self.add("F75", "left_out", name=name or place)

    def _find_prefixes(self, module: nn.Module) -> None:
        """Find wrapped modules, whose keys a plain module cannot load."""
        for name, inner in module.named_modules():
            if isinstance(inner, (DistributedDataParallel, nn.DataParallel)):
                self.add("F75", "wrapped", name=name)

    # ------------------------------------------------------------------ at loading

    def _find_unread(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        """Find a key for a parameter that has a different name in the module."""
        own = dict(module.named_parameters())
        for key in state:
            # the key without the prefixes of wrappers
            plain = key.removeprefix("module.").replace(".module.", ".")
            if key not in own and plain in own and plain not in state:
                self.add("F75", "not_loaded", name=plain, key=key)
                return

    def _find_lost_positions(self, module: nn.Module) -> None:
        """Find queues that were restored without their position."""
        for name, inner in module.named_modules():
            memory = wrapped_module(inner) or inner
            names = [cls.__name__ for cls in type(memory).__mro__]
            if "CrossBatchMemory" in names and hasattr(memory, "queue_idx") and _has_lost_position(memory):
                self.add("F65", name=name or type(memory).__name__)

    # ------------------------------------------------------------------ facts: all findings are made on single ranks

    def _read_saved(self) -> Numbers:
        """Add the description of this fit to the checkpoint, and look for parameters that are missing in it."""
        trainer, module = self.runner.trainer, self.runner.module
        checkpoint = self.runner.checkpoint or {}
        checkpoint[KEY] = self._description(trainer)
        self._find_missing(trainer, module, checkpoint.get("state_dict", {}))
        self._find_prefixes(module)
        return {}

    def _read_loaded(self) -> Numbers:
        """Look for keys that the module does not load."""
        checkpoint = self.runner.checkpoint or {}
        self._made_by = checkpoint.get(KEY)
        self._find_unread(self.runner.module, checkpoint.get("state_dict", {}))
        self._find_lost_positions(self.runner.module)
        return {}

    def _read_batch(self) -> Numbers:
        """Compare, once, the rows per optimizer step with the rows in the fit that wrote the checkpoint."""
        made_by, self._made_by = self._made_by, None
        if made_by is None:
            return {}
        now = self._description(self.runner.trainer)
        rows_before = math.prod(map(int, made_by.values()))
        rows_now = math.prod(map(int, now.values()))
        if made_by["world_size"] != now["world_size"] and abs(rows_before - rows_now) > _UNEVEN * rows_before:
            ranks = {"ranks_now": now["world_size"], "ranks_before": made_by["world_size"]}
            self.add("F76", name="world size", rows_now=rows_now, rows_before=rows_before, **ranks)
        return {}

    facts = (
        Fact("loaded checkpoint", CheckStage.LOAD, _read_loaded),
        Fact("rows of a step", CheckStage.BEFORE_BACKWARD, _read_batch),
        Fact("saved checkpoint", CheckStage.SAVE, _read_saved),
    )


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return a key that is equal for tensors with the same memory. For a lazy or sparse tensor, the key is its identity."""
    if is_lazy(tensor) or tensor.layout != torch.strided:
        return id(tensor), 0
    return tensor.data_ptr(), tensor.numel()


def _has_lost_position(memory: Any) -> bool:
    """Return whether a memory contains rows but reports that it is empty."""
    # the state_dict restores the rows but not the position, which is not a buffer (PML 2.9)
    is_filled = bool(getattr(memory, "embedding_memory", torch.zeros(0)).any())
    return is_filled and int(memory.queue_idx) == 0 and not memory.has_been_filled
