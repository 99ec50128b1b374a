"""`BatchCheck`: every rank trains on separate rows, in as many batches as its peers, in a new order each epoch.

Batches are compared by short hashes, samplers by their plain attributes (``batch_reader.py``). This file first classifies losses that
compare samples, into losses on the rows of this rank and losses that gather. The check follows. It also finds calls of a loss without a
positive pair.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ddp_losses.callbacks import batch_reader
from lightning_ddp_losses.callbacks.base import RankCheck
from lightning_ddp_losses.callbacks.batch_reader import BatchReader, EpochRecord, LoadersOfEpoch
from lightning_ddp_losses.callbacks.facts.fact import Columns, Fact, Numbers
from lightning_ddp_losses.callbacks.facts.row_noise import RANDOM_STEPS, RowNoise, state_of_draws
from lightning_ddp_losses.callbacks.facts.rules import compare_batches, compare_sizes, label_imbalance
from lightning_ddp_losses.callbacks.findings import CheckStage, Finding
from lightning_ddp_losses.callbacks.loss_reader import is_divided
from lightning_ddp_losses.core import lightning_compat
from lightning_ddp_losses.core.transparent import wrapped_module
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.fingerprint import hash_text
from lightning_ddp_losses.losses.pml_registry import compares_rows
from lightning_ddp_losses.samplers.evaluation import repeated_rows
from lightning_ddp_losses.samplers.global_draw import GlobalDraw
from lightning_ddp_losses.strategies.epoch_ends import batches_until_max_steps
from lightning_ddp_losses.strategies.training_data import SameRows, foreign_loader

KEY = "batch_check"
"""Key of a checkpoint that holds the record of the epoch."""
_STEPS_WITHOUT_PAIRS = 3  # in a row
_GATHERS = {"GlobalBatchLoss", "DistributedLossWrapper", "CrossBatchMemory"}
_CALLS_ON_DEVICE = 20
_ARGUMENTS = ("embeddings", "labels", "indices_tuple", "ref_emb")


# ---------------------------------------------------------------------- losses that compare samples


def contrastive_losses(module: nn.Module) -> tuple[dict[str, nn.Module], list[str]]:
    """Return losses that compare only rows of this rank, by path, and the paths of losses that compare the rows of all ranks.

    Local losses are the tuple losses of pytorch-metric-learning that neither gather nor are contained in a loss that gathers. Global losses
    are two-tower losses, and gathering wrappers around a tuple loss.
    """
    local: dict[str, nn.Module] = {}
    of_all_ranks: list[str] = []
    covered: tuple[str, ...] = ()  # paths whose submodules are skipped
    for name, inner in module.named_modules():
        if name.startswith(covered):
            continue
        class_names = {cls.__name__ for cls in type(inner).__mro__}
        is_gathering = not class_names.isdisjoint(_GATHERS)
        if is_gathering:
            # a CrossBatchMemory compares with stored rows of earlier batches
            wrapped = wrapped_module(inner)
            compared = inner.children() if wrapped is None else [wrapped]
            compares = any(contrastive_losses(child)[0] for child in compared)
            of_all_ranks += [name] * (compares and "CrossBatchMemory" not in class_names)
        elif "TwoTowerLoss" in class_names:
            of_all_ranks.append(name)
        elif compares_rows(inner):
            local[name] = inner
        if name and (is_gathering or name in local or name in of_all_ranks):
            covered += (f"{name}.",)
    return local, of_all_ranks


def pml_gather(module: nn.Module) -> str:
    """Return the path of a wrapper that requires equal numbers of rows on all ranks. Empty if there is none."""
    for name, inner in module.named_modules():
        if any(cls.__module__ == "pytorch_metric_learning.utils.distributed" for cls in type(inner).__mro__):
            return name or type(inner).__name__
    return ""


# ---------------------------------------------------------------------- the check


class BatchCheck(RankCheck, default=True):
    """Checks the data of each rank: different rows, equal numbers of batches, a common order, positive pairs, and full windows.

    Covers F28, F29, F31, F33, F36, F54, F62, F67-F72, F83, F84, F85.

    Batches on the host are read in every step (up to 64 rows, and 32 numbers of a wide row). On an accelerator the first 16 batches of an
    epoch and every 50th batch are read, one batch later. Findings require evidence: batches are reported as *the same* after two of them
    with 8 different rows in total. A resumed epoch *begins again* if rank 0 draws the first batch of that epoch a second time.

    Args:
        **options: Same as in ``RankCheck``.

    Communication: 104 bytes in the handshake before backward, and 0.2 KiB at the start of an epoch and at the end of training.

    Example:
        >>> checks = DDPChecks([BatchCheck(every_n_steps=10)])
    """

    needs_peers = False
    shares = (("_batches", BatchReader),)
    _batches: BatchReader
    faults = (
        *("F28", "F29", "F31", "F33", "F36", "F54", "F62"),
        *("F67", "F68", "F69", "F70", "F71", "F72", "F83", "F84", "F85"),
    )

    def _forget(self) -> None:
        self._has_no_pairs: dict[str, bool] = {}  # latest call of each loss
        self._calls = 0
        self._saved: EpochRecord | None = None  # record in a checkpoint that was loaded before training started
        self._early_samplers: list[Any] = []
        self._late_epochs: list[tuple[object, str, int, int]] = []
        # this rank's data
        self._sampler_epochs: dict[int, dict[str, int]] = {}
        self._steps_without_pairs: dict[str, int] = {}
        self._loaders = LoadersOfEpoch(-1, is_iterable=False, order=0)
        self._resumed_at = 0, 0  # batch and epoch
        self._began_again = False
        # all ranks' data
        self._same = SameRows()
        self._noise = RowNoise()
        self._imbalance = 0.0
        self._global_rows: tuple[int, ...] = ()
        self._accumulated = 1

    # ------------------------------------------------------------------ observe

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Register hooks on losses that compare local rows, and find samplers that have already drawn their order."""
        for name, loss in contrastive_losses(module)[0].items():
            self.runner.before_forward(self, loss, partial(self._see_call, name))
        self._early_samplers = batch_reader.early_samplers(trainer)
        for sampler in self._early_samplers:
            self._watch_epoch(trainer, sampler)

    def _see_call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record whether all labels in a call of a loss are different, so that the rows do not contain a positive pair."""
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        # with these arguments, pairs are formed by a miner or with other rows
        if given.get("indices_tuple") is not None or given.get("ref_emb") is not None:
            return
        labels = given.get("labels")
        if not torch.is_grad_enabled() or not isinstance(labels, Tensor) or labels.ndim != 1:
            return
        self._calls += 1
        if labels.device.type == "cpu" or self._calls <= _CALLS_ON_DEVICE:  # reading waits for a device
            self._has_no_pairs[name] = len(labels) > 1 and len(torch.unique(labels)) == len(labels)

    def _watch_epoch(self, trainer: Trainer, sampler: Any) -> None:
        """Record the first epoch that Lightning sets on a sampler, and the iterator that exists at that time."""

        def set_epoch(epoch: int) -> None:
            # workers that have read a short epoch to its end leave our sampler at the next one
            drawn = int(sampler.read_epoch if isinstance(sampler, GlobalDraw) else sampler.epoch)
            if epoch != drawn:
                self._late_epochs.append((_iterator_of(trainer), type(sampler).__name__, drawn, epoch))
            del sampler.set_epoch
            sampler.set_epoch(epoch)

        sampler.set_epoch = set_epoch

    def stop(self, trainer: Trainer, module: LightningModule) -> None:
        """Remove the hooks."""
        for sampler in self._early_samplers:
            vars(sampler).pop("set_epoch", None)
        self._saved, self._early_samplers = None, []
        self._noise.end(must_leave=True)

    def see_batch(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Compare the batch with the checkpoint, and look for noise."""
        read = self._batches
        # the first batch after resuming in the middle of an epoch
        saved, self._saved = self._saved, None
        if saved is not None and saved.epoch == trainer.current_epoch and batch_idx:
            self._resumed_at = batch_idx, saved.epoch
            self._began_again = read.first[saved.epoch] == saved.first != saved.latest
            read.first[saved.epoch] = saved.first
        self._noise.begin(read.rows)

    def see_batch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Stop to look for noise."""
        self._noise.end()
        if self._noise.error is not None:
            raise self._noise.error
        if self._saved is None and self._noise.is_finished(self.runner.step):
            self.runner.stop_observing(self, "see_batch", "see_batch_end")

    # ------------------------------------------------------------------ facts

    def _read_start(self) -> Numbers:
        """Find losses that compare the rows of this rank only."""
        self._find_local_losses(self.runner.trainer, self.runner.module)
        return {}

    def _read_validation(self) -> Numbers:
        """Find rows of validation or test data that are repeated as padding."""
        trainer = self.runner.trainer
        kind = "test" if trainer.testing else "validation"
        for index, loader in enumerate(batch_reader.data_loaders(trainer, validation=True)):
            rows = repeated_rows(loader)
            if rows:
                self.add("F54", name=f"{kind} loader {index}", rows=rows)
        return {}

    def _read_loaded(self) -> Numbers:
        """Read the record of the epoch from the checkpoint."""
        saved = (self.runner.checkpoint or {}).get(KEY, {})
        self._saved = EpochRecord(saved["epoch"], saved["first"], saved["latest"]) if "latest" in saved else None
        return {}

    def _read_saved(self) -> Numbers:
        """Add the record of the epoch to the checkpoint."""
        record = self._batches.epoch_record()
        if record is not None and self.runner.checkpoint is not None:
            self.runner.checkpoint[KEY] = record._asdict()
        return {}

    def _read_batch(self) -> Numbers:
        """Look for findings of this rank in a step, and return the numbers that describe its batch.

        ``rows`` are rows of the batch (graphs, if it is made of graphs), 0 if their number is not known. ``content`` is a hash of the
        batch, 0 if it was not read, ``distinct`` the different rows in it, and ``read_step`` the optimizer steps before it. ``order`` is
        the number of the order that ranks divide, 0 if it is not known, ``random_state`` a hash of torch's state in the first steps, and
        ``noise`` one of a draw with rows.
        """
        trainer = self.runner.trainer
        # loaders and samplers are read once per epoch
        batch_idx = trainer.fit_loop.batch_idx
        if self._loaders.epoch != trainer.current_epoch:
            self._loaders = LoadersOfEpoch.of(trainer, is_at_start=batch_idx == 0)
            if batch_idx == 0:
                self._find_stale_samplers(trainer, batch_reader.data_loaders(trainer))
        if self._late_epochs:
            self._find_replayed_order(trainer)
        if self._has_no_pairs:
            self._find_missing_pairs()
        random_state = 0
        if self.runner.step < RANDOM_STEPS and getattr(trainer.strategy, "randomness", "rank") == "rank":
            random_state = state_of_draws()
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if is_last:
            self._find_short_window(trainer, batch_idx + 1)
        began_again, self._began_again = self._began_again, False
        read = self._batches
        self._accumulated = trainer.accumulate_grad_batches
        return {
            "batch": batch_idx,
            "is_last": bool(is_last),
            "compares_ends": batches_until_max_steps(trainer) > self._accumulated,
            "rows": read.samples,
            "content": read.content,
            "distinct": read.distinct,
            "is_iterable": self._loaders.is_iterable,
            "read_step": read.read_step,
            "order": self._loaders.order,
            "random_state": random_state,
            "noise": self._noise.content,
            "began_again": began_again,
            "resumed_batch": self._resumed_at[0],
            "resumed_epoch": self._resumed_at[1],
        }

    def _see_batch(self, columns: Columns) -> None:
        """Store the rows, and add columns with evidence of earlier steps: ranks with the same batches, and random states."""
        self._global_rows = tuple(columns["rows"])
        same = self._same.see(columns["content"], columns["distinct"])
        columns["is_same"] = [rank in same for rank in range(len(self._global_rows))]
        if any(columns["random_state"]):
            self._noise.see_states(columns)

    def _read_epoch(self) -> Numbers:
        """Look for batches that Lightning shuffles and for a short window, and return the labels of the last epoch and sizes of this one.

        ``batches`` is -1 if an epoch is endless, ``full_size`` and ``last_size`` are 0 if they cannot be determined, and ``gathers`` is a
        hash of the path of a loss that requires equal numbers of rows on all ranks, 0 if there is no such loss.
        """
        trainer, module = self.runner.trainer, self.runner.module
        for loader in batch_reader.data_loaders(trainer):
            name = batch_reader.sampler_shuffled_by_lightning(loader)
            if name:
                self.add("F68", name=name)
        batches, until_max_steps = trainer.num_training_batches, batches_until_max_steps(trainer)
        if batches <= until_max_steps and math.isfinite(batches):
            self._find_short_window(trainer, int(batches))
        number, full_size, last_size = _sizes(trainer)
        path = pml_gather(module)
        return {
            "batches": number,
            "full_size": full_size,
            "last_size": last_size,
            "gathers": hash_text(path) if path else 0,
            "until_max_steps": float(until_max_steps),
            "has_batch_norm": any(type(inner) is nn.BatchNorm1d for inner in module.modules()),
            "labels": self._batches.counts,
        }

    def _read_labels(self) -> Numbers:
        """Return the labels of the last epoch by bucket."""
        return {"labels": self._batches.counts}

    def _see_labels(self, columns: Columns) -> None:
        self._imbalance = label_imbalance(columns["labels"])

    facts = (
        Fact("losses on rows of one rank", CheckStage.TRAIN_START, _read_start),
        Fact("sizes and labels", CheckStage.EPOCH_START, _read_epoch, compare_sizes, _see_labels),
        Fact(
            *("batch", CheckStage.BEFORE_BACKWARD, _read_batch, compare_batches, _see_batch),
            equal=("is_last", "order"),
            zero=("is_same", "began_again", "random_state", "noise"),
        ),
        Fact("rows of validation", CheckStage.VALIDATION_START, _read_validation),
        Fact("epoch of a checkpoint", CheckStage.SAVE, _read_saved),
        Fact("epoch of a checkpoint", CheckStage.LOAD, _read_loaded),
        Fact("labels", CheckStage.TRAIN_END, _read_labels, see=_see_labels),
    )

    # ------------------------------------------------------------------ findings of this rank

    def _find_short_window(self, trainer: Trainer, batches: int) -> None:
        """Look for a last window with fewer batches, whose losses Lightning divides by the number of batches in a full window."""
        full = trainer.accumulate_grad_batches
        if batches % full and trainer.lightning_module.automatic_optimization and is_divided(trainer):
            self.add("F84", name="last window", number=batches % full, full=full)

    def _find_replayed_order(self, trainer: Trainer) -> None:
        """Look, once, for an order that workers drew before Lightning set the epoch of a resumed run."""
        late, self._late_epochs = self._late_epochs, []
        for iterator, name, drawn, epoch in late:
            if iterator is _iterator_of(trainer):  # a new iterator would have drawn the order again
                self.add("F85", name=name, epoch=epoch, drawn=drawn)

    def _find_stale_samplers(self, trainer: Trainer, loaders: list[DataLoader[Any]]) -> None:
        """Look for samplers that shuffle by epoch but whose epoch has not changed."""
        epoch = trainer.current_epoch
        samplers: dict[str, Any] = {}
        for loader in loaders:
            samplers |= batch_reader.shuffling_samplers(loader)
        self._sampler_epochs[epoch] = {path: int(sampler.epoch) for path, sampler in samplers.items()}
        # as further evidence, compare the first batches of this and the previous epoch
        before = self._sampler_epochs.get(epoch - 1, {})
        first = self._batches.first
        has_same_first = bool(first.get(epoch)) and first.get(epoch) == first.get(epoch - 1)
        for path, sampler in samplers.items():
            is_stale = before.get(path) == int(sampler.epoch)
            if is_stale and (has_same_first or isinstance(sampler, DistributedSampler)):
                self.add("F70", name=path, sampler=type(sampler).__name__)
                return

    def _find_missing_pairs(self) -> None:
        """Look for losses that were called without a positive pair in several consecutive steps."""
        for name, without in self._has_no_pairs.items():
            steps = self._steps_without_pairs.get(name, 0) + 1 if without else 0
            self._steps_without_pairs[name] = steps
            if steps == _STEPS_WITHOUT_PAIRS:
                self.add("F31", "labels", name=name, steps=steps)

    def _find_local_losses(self, trainer: Trainer, module: LightningModule) -> None:
        """Find losses that only compare rows of this rank, and accumulation, which does not increase their number of negatives."""
        if process_groups.world_size() == 1:
            return
        of_one_rank, of_all_ranks = contrastive_losses(module)
        names = ", ".join(f"`{name}`" for name in of_one_rank)
        if names:
            self.add("F29", name=names)
        # a loss over all ranks also compares only the rows of one batch at a time
        names = ", ".join(f"`{name}`" for name in dict.fromkeys([*of_one_rank, *of_all_ranks]))
        if names and trainer.accumulate_grad_batches > 1:
            self.add("F33", name=names, batches=trainer.accumulate_grad_batches)

    # ------------------------------------------------------------------ explain

    def describe(self, finding: Finding, trainer: Trainer, module: LightningModule) -> str | None:
        """Return the class of a foreign loader, the path of a loss that gathers, or a draw with rows."""
        found = {"F67": foreign_loader(trainer), "F28": pml_gather(module), "F72": self._noise.text}
        return found.get(finding.fault)

    def explain(self, finding: Finding, texts: list[Any]) -> list[Finding]:
        """Name the loader, the loss or the draw, which is the same on every rank."""
        name = texts[0]
        if finding.fault == "F72":
            is_noise = finding.name == "noise"
            return [Finding.of("F72", "noise", name="noise", draw=name, graded="warning") if is_noise else finding]
        if finding.fault == "F28":
            return [Finding.of("F28", name=name, values=finding.values)]
        if not name:
            return [finding]
        whose = "all ranks" if len(finding.ranks) == len(texts) else "some ranks"
        return [Finding.of("F67", "loader", ranks=finding.ranks, name=finding.name, whose=whose, loader=name)]

    def figures(self) -> dict[str, float]:
        """Return the rows of the latest step, and how far class shares per rank differ from the shares over all ranks."""
        rows = self._global_rows
        if not rows or not all(rows):
            return {}
        return {"rows_min": float(min(rows)), "rows_max": float(max(rows)), "class_imbalance": self._imbalance}

    def remarks(self) -> list[str]:
        """Return the rows of an optimizer step and the difference of class shares as text."""
        rows = self._global_rows
        if not rows or not all(rows):
            return []
        per_rank = " to ".join(map(str, sorted({min(rows), max(rows)})))
        remark = f"{self._accumulated * sum(rows)} rows in an optimizer step ({self._accumulated} x {sum(rows)}, {per_rank} per rank)"
        if self._imbalance:
            remark += f"; class shares of a rank differ by up to {self._imbalance:.0%} from those of all ranks"
        return [remark]


def _iterator_of(trainer: Trainer) -> object:
    return lightning_compat.mode_iterator(lightning_compat.combined_loader(trainer.fit_loop))


def _sizes(trainer: Trainer) -> tuple[int, int, int]:
    """Return the number of batches in this rank's epoch, and the numbers of rows in a full batch and in the last batch."""
    batches = int(trainer.num_training_batches) if math.isfinite(trainer.num_training_batches) else -1
    full_size = last_size = 0
    loaders = batch_reader.data_loaders(trainer)
    if len(loaders) == 1:
        full_size, last_size = batch_reader.batch_sizes(loaders[0])
        if full_size and batches < len(loaders[0]):
            last_size = full_size  # the epoch ends before the loader's last batch
    return batches, full_size, last_size
