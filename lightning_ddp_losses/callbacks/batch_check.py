"""`BatchCheck`: every rank trains on rows of its own, as many batches as its peers, in another order each epoch.

Rows are compared by short hashes (``batches.py``), samplers by what can be read off them (``loaders.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DistributedSampler

from lightning_ddp_losses.callbacks import loaders, own_data
from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.batch_reader import BUCKETS, SKETCH, Batches
from lightning_ddp_losses.callbacks.check_stage import Moment
from lightning_ddp_losses.callbacks.data_verdicts import (
    SameBatches,
    different_ends,
    different_orders,
    imbalance,
    overlap,
)
from lightning_ddp_losses.callbacks.findings import Finding
from lightning_ddp_losses.callbacks.local_findings import LocalFacts
from lightning_ddp_losses.callbacks.loss_observations import PositivePairs, local_contrastive, uses_foreign_gather
from lightning_ddp_losses.distributed.fingerprint import hash_text

_UNBOUNDED = 1 << 40
_WITHOUT_PAIRS = 3  # steps in a row


class BatchCheck(RankCheck):
    """The data of each rank: different rows, equal numbers of batches, batches that belong together, positive pairs.

    Covers F18, F28, F29, F31, F33, F36, F54, F62, F67-F72.

    Batches on the host are looked at in every step (up to 64 rows, of wide ones 32 numbers); those on an accelerator in the first 16
    of an epoch and in every 50th. A finding needs evidence: batches are *the same* after two of them with 8 different rows
    in all, rows *overlap* where ranks share many and no rank repeats its own.

    Args:
        **options: As ``RankCheck``.

    Communication: 64 bytes in the frame before backward; at the start of an epoch and at the end 0.7 KiB.
    """

    moments = (
        Moment.TRAIN_START,
        Moment.EPOCH_START,
        Moment.BEFORE_BACKWARD,
        Moment.VALIDATION_START,
        Moment.TRAIN_END,
    )
    needs_peers = False
    faults = ("F18", "F28", "F29", "F31", "F33", "F36", "F54", "F62", "F67", "F68", "F69", "F70", "F71", "F72")

    def __init__(self, *, every_n_steps: int = 1, action: Mapping[str, str] | None = None) -> None:
        super().__init__(every_n_steps=every_n_steps, action=action)
        self._pairs: PositivePairs | None = None
        self._norms: list[Any] = []
        self._begin()

    def _begin(self) -> None:
        self._facts = LocalFacts(self.faults)
        self._same = SameBatches()
        self._index = 0
        self._epochs: dict[int, dict[str, int]] = {}
        self._unpaired: dict[str, int] = {}
        self._order = 0
        self._random: list[tuple[int, ...]] = []
        self._flat_norm = False
        self._imbalance = 0.0
        self._rows: tuple[int, ...] = ()

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Watch the losses that compare samples, and batch norm's input in the first step."""
        self._begin()
        self._pairs = PositivePairs(local_contrastive(module))
        flat = [norm for norm in module.modules() if type(norm) is nn.BatchNorm1d]

        # a function and no method: a copy of the module (the scale probe makes one) must not copy the check along
        def see(norm: nn.Module, args: tuple[Any, ...]) -> None:
            self._flat_norm |= norm.training and bool(args) and args[0].ndim == 2

        self._norms = [norm.register_forward_pre_hook(see) for norm in flat]

    def stop(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Leave no hook behind."""
        if self._pairs is not None:
            self._pairs.remove()
        for handle in self._norms:
            handle.remove()

    def see_batch(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Read the batch."""
        self._index = batch_idx
        self._batches.see(batch, batch_idx)

    @property
    def _batches(self) -> Batches:
        return self.session.shared(Batches)

    # ------------------------------------------------------------------ measure

    def measure(self, trainer: pl.Trainer, module: pl.LightningModule, moment: Moment) -> list[int]:
        """What this rank's data are at this moment."""
        self._facts.found = []
        if moment == Moment.TRAIN_START:
            self._facts.found += own_data.local_losses(trainer, module)
            return self._facts.row()
        if moment == Moment.VALIDATION_START:
            self._facts.found += own_data.repeated(trainer)
            return self._facts.row()
        if moment == Moment.BEFORE_BACKWARD:
            return self._step_row(trainer)
        sizes = (0, 0)
        if moment == Moment.EPOCH_START:
            self._facts.found += own_data.reshuffled(trainer)
            sizes = own_data.sizes(trainer)
        batches = trainer.num_training_batches
        number = int(batches) if math.isfinite(batches) else -1
        gathers = hash_text(uses_foreign_gather(module)) if uses_foreign_gather(module) else 0
        row = [*self._facts.row(), number, *sizes, gathers, *self._batches.counts]
        # always of one length: the frame has its size before the first step
        return [*row, *(self._batches.sketch() + [0] * (SKETCH + 1))[: SKETCH + 1]]

    def _step_row(self, trainer: pl.Trainer) -> list[int]:
        first = self._index == 0
        found = loaders.loaders(trainer)
        if first:
            self._order = loaders.drawn_order(found[0]) if found else 0
            self._find_stale(trainer, found)
        self._find_without_pairs()
        if self.session.step == 0 and self._flat_norm:
            self._facts.found += own_data.lonely_rows(trainer)
        last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        iterable = any(loaders.is_iterable(loader) for loader in found)
        state = hash_text(repr(torch.get_rng_state().tolist())) if self.session.step < 2 else 0
        batches = self._batches
        return [
            *self._facts.row(),
            self._index << 1 | bool(last),
            batches.rows,
            batches.content,
            batches.distinct << 1 | iterable,
            state,
            self._order,
        ]

    # ------------------------------------------------------------------ what one rank finds by itself

    def _say(self, fault: str, what: str, name: str, fix: str, expected: str = "") -> None:
        self._facts.found.append(Finding(fault, what, expected, name=name, fix=fix))

    def _find_stale(self, trainer: pl.Trainer, found: list[Any]) -> None:
        epoch = trainer.current_epoch
        samplers = {path: s for loader in found for path, s in loaders.shuffling_samplers(loader).items()}
        self._epochs[epoch] = {path: int(sampler.epoch) for path, sampler in samplers.items()}
        before = self._epochs.get(epoch - 1, {})
        first = self._batches.first
        same = bool(first.get(epoch)) and first.get(epoch) == first.get(epoch - 1)
        for path, sampler in samplers.items():
            if before.get(path) == int(sampler.epoch) and (same or isinstance(sampler, DistributedSampler)):
                self._say(
                    "F70",
                    f"{type(sampler).__name__} of the training loader has the same order in every epoch",
                    path,
                    "Lightning calls set_epoch of `sampler` and `batch_sampler.sampler` only: keep it under one of these names, or "
                    "call set_epoch(trainer.current_epoch) in on_train_epoch_start.",
                )
                return

    def _find_without_pairs(self) -> None:
        for name, alone in (self._pairs.without if self._pairs else {}).items():
            self._unpaired[name] = self._unpaired.get(name, 0) + 1 if alone else 0
            if self._unpaired[name] == _WITHOUT_PAIRS:
                self._say(
                    "F31",
                    f"`{name}` met no positive pair in {_WITHOUT_PAIRS} steps: all labels of this rank's batch differ",
                    name,
                    "Give each rank several rows of a class (GlobalBatchSampler.batches(MPerClassSampler(...))), or compare over all "
                    "ranks with GlobalBatchLoss.",
                )

    # ------------------------------------------------------------------ judge

    def judge(
        self, table: list[list[int]], trainer: pl.Trainer, module: pl.LightningModule, moment: Moment
    ) -> list[Finding]:
        """Compare the ranks' data."""
        found = self._facts.judge(table)
        if moment == Moment.BEFORE_BACKWARD:
            return found + self._judge_step(table, trainer)
        if moment in (Moment.TRAIN_START, Moment.VALIDATION_START):
            return found
        found += overlap([row[6 + BUCKETS :] for row in table])
        self._imbalance = imbalance([row[6 : 6 + BUCKETS] for row in table])
        if moment == Moment.EPOCH_START:
            numbers = [row[2] for row in table]
            if min(numbers) >= 0 and len(set(numbers)) > 1 and min(numbers) < _wanted(trainer):
                found.append(different_ends([f"{n} batches" for n in numbers], numbers))
            sizes = [tuple(row[3:5]) for row in table]
            if len(set(sizes)) > 1 and len({row[5] for row in table}) == 1 and table[0][5]:
                name = uses_foreign_gather(module)
                found.append(
                    Finding(
                        "F28",
                        f"rows of the ranks' batches, which `{name}` gathers",
                        "the same number on every rank",
                        name=name,
                        values=tuple(f"batches of {size}, the last of {last}" for size, last in sizes),
                        fix="Use GlobalBatchLoss, which takes uneven batches, or drop_last=True and equal parts of the data.",
                    )
                )
        return found

    def _judge_step(self, rows: list[list[int]], trainer: pl.Trainer) -> list[Finding]:
        found: list[Finding] = []
        ends = [row[2] for row in rows]
        lasting = _wanted(trainer) > trainer.accumulate_grad_batches  # else the fit ends here anyway
        if len({end & 1 for end in ends}) > 1 and lasting:
            texts = [f"batch {end >> 1}{', its last' if end & 1 else ''}" for end in ends]
            found.append(different_ends(texts, [end & 1 for end in ends]))
        self._rows = tuple(row[3] for row in rows)
        contents = [row[4] for row in rows]
        found += self._same.judge(contents, [row[5] >> 1 for row in rows], iterable=any(row[5] & 1 for row in rows))
        found += different_orders([row[7] for row in rows])
        if self.session.step == 0 and len(rows) * trainer.accumulate_grad_batches > 1:
            found.append(self._meaning(trainer))
        if self.session.step < 2 and len(rows) > 1:
            found += self._same_noise(tuple(row[6] for row in rows))
        return found

    def _same_noise(self, states: tuple[int, ...]) -> list[Finding]:
        self._random.append(states)
        equal = all(len(set(step)) == 1 for step in self._random)
        if len(self._random) != 2 or not equal or self._random[0] == self._random[1]:
            return []
        what = "all ranks draw the same random numbers (dropout, noise, augmentation on the device)"
        fix = "Where that is not meant, add the rank to the seed once the model is built."
        return [Finding("F72", what, name="random numbers", fix=fix)]

    def _meaning(self, trainer: pl.Trainer) -> Finding:
        accumulated, total = trainer.accumulate_grad_batches, sum(self._rows)
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        rate = float(rates[0]) if rates else 0.0
        own = max(self._rows)
        factor = total * accumulated / max(own, 1)
        what = f"an optimizer step sees {total * accumulated} rows ({accumulated} x {total}, {own} per rank)"
        fix = f"A rate of {rate:g} tuned on {own} rows would be {rate * factor:g} by linear scaling."
        return Finding("F18", what, name="global batch", fix=fix)

    def describe(self, finding: Finding, trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
        """What this rank found by itself."""
        return self._facts.describe(finding)

    def explain(self, finding: Finding, texts: list[str]) -> list[Finding]:
        """What all ranks found by themselves."""
        return self._facts.explain(finding, texts)

    def figures(self) -> dict[str, float]:
        """Rows of the latest step, and how far the ranks' classes are from those of all ranks."""
        if not self._rows:
            return {}
        return {
            "rows_min": float(min(self._rows)),
            "rows_max": float(max(self._rows)),
            "class_imbalance": self._imbalance,
        }


def _wanted(trainer: pl.Trainer) -> int:
    """Batches until the fit ends by its number of steps; equal on every rank."""
    if trainer.max_steps is None or trainer.max_steps < 0:
        return _UNBOUNDED
    return (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
