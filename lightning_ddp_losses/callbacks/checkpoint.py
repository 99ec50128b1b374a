"""`CheckpointCheck`: what is trained is in the checkpoint, what is in it comes back, and for the same number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.batch_reader import Batches
from lightning_ddp_losses.callbacks.check_stage import Moment
from lightning_ddp_losses.callbacks.findings import Finding
from lightning_ddp_losses.callbacks.local_findings import LocalFacts
from lightning_ddp_losses.callbacks.queues import is_unplaced, memories
from lightning_ddp_losses.callbacks.replicated_parameters import optimised
from lightning_ddp_losses.distributed import process_groups

_UNEVEN = 0.1  # a last batch, or ranks with different numbers of rows
KEY = "ddp_checks"
"""Under which a checkpoint says how it was trained."""


class CheckpointCheck(RankCheck):
    """Checkpoints hold every trained parameter, under the module's own names, and say for how many ranks they were made.

    Covers F65, F75 and F76.

    Args:
        **options: As ``RankCheck``.

    Communication: 16 bytes before backward, and when a checkpoint is saved or loaded.
    """

    moments = (Moment.LOAD, Moment.BEFORE_BACKWARD, Moment.SAVE)
    faults = ("F65", "F75", "F76")
    needs_peers = False

    def __init__(self, *, every_n_steps: int = 1, action: Mapping[str, str] | None = None) -> None:
        super().__init__(every_n_steps=every_n_steps, action=action)
        self._facts = LocalFacts(self.faults)
        self._made_by: dict[str, Any] | None = None

    def see_batch(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Count its rows."""
        self.session.shared(Batches).see(batch, batch_idx)

    def measure(self, trainer: pl.Trainer, module: pl.LightningModule, moment: Moment) -> list[int]:
        """What this rank finds in the checkpoint."""
        self._facts.found = []
        checkpoint = self.session.checkpoint or {}
        if moment == Moment.SAVE:
            checkpoint[KEY] = self._description(trainer)
            self._find_missing(trainer, module, checkpoint.get("state_dict", {}))
            self._find_prefixes(module)
        elif moment == Moment.BEFORE_BACKWARD:
            self._find_other_world(trainer)
        else:
            self._made_by = checkpoint.get(KEY)
            self._find_unread(module, checkpoint.get("state_dict", {}))
            self._find_unplaced(module)
        return self._facts.row()

    def _say(self, fault: str, what: str, name: str, fix: str, expected: str = "") -> None:
        self._facts.found.append(Finding(fault, what, expected, name=name, fix=fix))

    def _description(self, trainer: pl.Trainer) -> dict[str, Any]:
        rows = self.session.shared(Batches).rows
        return {
            "world_size": process_groups.world_size(),
            "rows_per_rank": rows,
            "accumulate": trainer.accumulate_grad_batches,
        }

    def _find_missing(self, trainer: pl.Trainer, module: nn.Module, state: Mapping[str, Any]) -> None:
        stored = {_place(value) for value in state.values() if isinstance(value, Tensor)}
        names = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
        for where, parameter in optimised(trainer):
            name = names.get(id(parameter))
            kept = name in state or _place(parameter) in stored
            if parameter.requires_grad and not kept and type(parameter.data) is Tensor:
                shown = name or where
                what = f"the checkpoint leaves out `{shown}`, which is trained"
                self._say("F75", what, shown, "Register its module on the LightningModule and keep it in state_dict.")

    def _find_prefixes(self, module: nn.Module) -> None:
        for name, inner in module.named_modules():
            if isinstance(inner, (DistributedDataParallel, nn.DataParallel)):
                what = f"`{name}` is wrapped, so its keys in the checkpoint are `{name}.module.*`, which a plain module cannot load"
                self._say(
                    "F75",
                    what,
                    name,
                    'Keep the plain module as the attribute; strategy="ddp_losses" wraps losses beside it.',
                )

    def _find_other_world(self, trainer: pl.Trainer) -> None:
        made_by, self._made_by = self._made_by, None
        if made_by is None:
            return
        own = self._description(trainer)
        old, new = (math.prod(map(int, each.values())) for each in (made_by, own))
        if made_by["world_size"] != own["world_size"] and abs(old - new) > _UNEVEN * old:
            self._say(
                "F76",
                f"resumed by {own['world_size']} ranks, saved by {made_by['world_size']}: an optimizer step sees {new} rows, not {old}",
                "world size",
                "Keep the global batch (rows per rank times ranks times accumulation), or scale the learning rate with it.",
                "the same global batch",
            )

    def _find_unread(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        own = dict(module.named_parameters())
        for key in state:
            plain = key.removeprefix("module.").replace(".module.", ".")
            if key not in own and plain in own and plain not in state:
                what = f"`{key}` in the checkpoint was not loaded into `{plain}`"
                self._say("F75", what, plain, "Rename the keys: the checkpoint was written by a wrapped module.")
                return

    def _find_unplaced(self, module: nn.Module) -> None:
        for name, memory in memories(module).items():
            if is_unplaced(memory):
                what = f"the queue of `{name}` came back without its position: its rows will be ignored and overwritten"
                fix = "Use GlobalBatchLoss(CrossBatchMemory(...)), which saves it, or save queue_idx and has_been_filled yourself."
                self._say("F65", what, name or type(memory).__name__, fix)

    def judge(
        self, table: list[list[int]], trainer: pl.Trainer, module: pl.LightningModule, moment: Moment
    ) -> list[Finding]:
        """Bring together what the ranks found."""
        return self._facts.judge(table)

    def describe(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
        """What this rank found by itself."""
        return self._facts.describe(finding)

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        """What all ranks found by themselves."""
        return self._facts.explain(finding, texts)


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()
