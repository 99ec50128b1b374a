"""`BatchCheck`: every rank trains on rows of its own, as many batches as its peers, in another order each epoch.

Rows are compared by short hashes, samplers by what can be read off them (``batch_reader.py``). The check stands first, then what one
rank finds by itself, then what the ranks' rows say together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ddp_losses.callbacks import batch_reader
from lightning_ddp_losses.callbacks.base import LocalCheck
from lightning_ddp_losses.callbacks.batch_reader import BUCKETS, SKETCH, BatchReader, label_imbalance
from lightning_ddp_losses.callbacks.check_stage import CheckStage
from lightning_ddp_losses.callbacks.ddp_state import learning_rate
from lightning_ddp_losses.callbacks.findings import Finding, LocalFindings, LocalRow, odd_ranks
from lightning_ddp_losses.callbacks.loss_observations import (
    PositivePairs,
    global_contrastive_losses,
    local_contrastive_losses,
    pml_gather,
)
from lightning_ddp_losses.callbacks.resumed_rows import ResumedRows
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.fingerprint import hash_text
from lightning_ddp_losses.samplers.evaluation import repeated_rows
from lightning_ddp_losses.strategies import undivided_data, uneven_ends
from lightning_ddp_losses.strategies.undivided_data import SameRows
from lightning_ddp_losses.strategies.uneven_ends import batches_until_max_steps

_STEPS_WITHOUT_PAIRS = 3  # in a row
_RANDOM_STEPS = 2  # steps whose random states are compared
_MIN_SHARED_ROWS = 4
_CHANCE = 1e-4  # that rows drawn with replacement look like ranks with orders of their own
_COUNT_BITS = 3  # the low bits of a hash hold how often it came


class BatchStepRow(NamedTuple):
    """What travels before backward, besides this rank's own findings.

    Attributes:
        end: The index of the batch, shifted left by one; the low bit says that it is the last of the epoch.
        rows: Rows of the batch (graphs, where it is made of graphs); 0 where that is not known.
        content: A hash of it; 0 where it was not read.
        distinct: Different rows in it, shifted left by one; the low bit says that the data set is iterable.
        random_state: A hash of torch's random state in the first steps; else 0.
        order: A number of the order that rows are cut from; 0 where it is not known.
        read_step: Optimizer steps before the batch whose hash this is.
    """

    end: int
    rows: int
    content: int
    distinct: int
    random_state: int
    order: int
    read_step: int


class BatchEpochRow(NamedTuple):
    """What travels at the start of an epoch and at the end, besides this rank's own findings; always of one length.

    Attributes:
        batches: Batches of the epoch; -1 where it is endless.
        full_size: Rows of a full batch; 0 where they cannot be known.
        last_size: Rows of the last batch, likewise.
        gathers: A hash of the path of a loss that gathers rows of equal numbers only; 0 for none.
        labels: Labels of the last epoch by bucket.
        sketch: Rows read in it, and the smallest of their hashes with how often each came in the low two bits.
    """

    batches: int
    full_size: int
    last_size: int
    gathers: int
    labels: list[int]
    sketch: list[int]

    def pack(self) -> list[int]:
        """Return the numbers as they travel."""
        padding = [0] * (SKETCH + 1 - len(self.sketch))
        return [*self[:4], *self.labels, *self.sketch, *padding]

    @classmethod
    def unpack(cls, row: Sequence[int]) -> BatchEpochRow:
        """Return what ``pack`` was given."""
        return cls(row[0], row[1], row[2], row[3], list(row[4 : 4 + BUCKETS]), list(row[4 + BUCKETS :]))


class BatchCheck(LocalCheck, default=True):
    """The data of each rank: different rows, equal numbers of batches, batches that belong together, positive pairs.

    Covers F18, F28, F29, F31, F33, F36, F54, F62, F67-F72, F83.

    Batches on the host are looked at in every step (up to 64 rows, of wide ones 32 numbers); those on an accelerator in the first 16
    of an epoch and in every 50th, one batch later. A finding needs evidence: batches are *the same* after two of them with 8 different rows
    in all, rows *overlap* where ranks share many and no rank repeats its own.

    Args:
        **options: As ``RankCheck``.

    Communication: 72 bytes in the handshake before backward; at the start of an epoch, at the end and for each checkpoint 0.7 KiB.

    Example:
        >>> checks = DDPChecks([BatchCheck(every_n_steps=10)])
    """

    stages = (
        CheckStage.TRAIN_START,
        CheckStage.EPOCH_START,
        CheckStage.BEFORE_BACKWARD,
        CheckStage.VALIDATION_START,
        CheckStage.SAVE,
        CheckStage.LOAD,
        CheckStage.TRAIN_END,
    )
    needs_peers = False
    faults = ("F18", "F28", "F29", "F31", "F33", "F36", "F54", "F62", "F67", "F68", "F69", "F70", "F71", "F72", "F83")

    def __init__(self, *, every_n_steps: int = 1, action: Mapping[str, str] | str | None = None) -> None:
        super().__init__(every_n_steps=every_n_steps, action=action)
        self._pairs: PositivePairs | None = None
        self._norm_handles: list[Any] = []
        self._resumed = ResumedRows()  # a checkpoint is loaded before training starts
        self._forget()

    def _forget(self) -> None:
        self.local = LocalFindings(self.faults)
        self._batch_idx = 0
        # what this rank remembers of its own data
        self._sampler_epochs: dict[int, dict[str, int]] = {}
        self._steps_without_pairs: dict[str, int] = {}
        self._order = 0
        self._has_flat_norm = False
        # what it remembers of all ranks' data
        self._same = SameBatches()
        self._random_states: list[tuple[int, ...]] = []
        self._imbalance = 0.0
        self._global_rows: tuple[int, ...] = ()

    # ------------------------------------------------------------------ observe

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Watch the losses that compare samples, and batch norm's input in the first step."""
        self._forget()
        guard = partial(self.runner.guarded, self)
        self._pairs = PositivePairs(local_contrastive_losses(module), guard)

        def see_input(norm: nn.Module, args: tuple[Any, ...]) -> None:
            self._has_flat_norm |= norm.training and bool(args) and args[0].ndim == 2

        self._norm_handles = []
        for norm in module.modules():
            if type(norm) is nn.BatchNorm1d:
                self._norm_handles.append(norm.register_forward_pre_hook(guard(see_input)))

    def stop(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Leave no hook behind."""
        if self._pairs is not None:
            self._pairs.remove()
        for handle in self._norm_handles:
            handle.remove()
        self._resumed = ResumedRows()

    def see_batch(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Read the batch."""
        self._batch_idx = batch_idx
        self._resumed.see_batch(trainer.current_epoch, batch_idx)
        self._batches.see(batch, batch_idx)

    @property
    def _batches(self) -> BatchReader:
        return self.runner.shared(BatchReader)

    # ------------------------------------------------------------------ measure

    def measure(self, trainer: pl.Trainer, module: pl.LightningModule, stage: CheckStage) -> list[int]:
        """Return what this rank's data are at this stage."""
        self.local.found = []
        if stage == CheckStage.TRAIN_START:
            _find_local_losses(self.local, trainer, module)
            return [*self.local.row()]
        if stage == CheckStage.VALIDATION_START:
            _find_repeated_rows(self.local, trainer)
            return [*self.local.row()]
        if stage == CheckStage.LOAD:
            self._resumed.load(self.runner.checkpoint or {})
            return [*self.local.row()]
        if stage == CheckStage.SAVE:
            return [*self.local.row(), *self._batches.sketch()]
        if stage == CheckStage.BEFORE_BACKWARD:
            step_row = self._step_row(trainer)
            return [*self.local.row(), *step_row]
        # at the start of an epoch its sizes, and there as at the end what was read of the epoch before
        full_size = last_size = 0
        if stage == CheckStage.EPOCH_START:
            _find_reshuffled(self.local, trainer)
            full_size, last_size = _batch_sizes(trainer)
        batches = -1
        if math.isfinite(trainer.num_training_batches):
            batches = int(trainer.num_training_batches)
        gathers = 0
        path = pml_gather(module)
        if path:
            gathers = hash_text(path)
        read = self._batches
        row = BatchEpochRow(batches, full_size, last_size, gathers, read.counts, read.sketch())
        return [*self.local.row(), *row.pack()]

    def _step_row(self, trainer: pl.Trainer) -> BatchStepRow:
        loaders = batch_reader.data_loaders(trainer)
        # samplers are asked once per epoch
        if self._batch_idx == 0:
            self._order = 0
            if loaders:
                self._order = batch_reader.drawn_order(loaders[0])
            self._find_stale_samplers(trainer, loaders)
        self._find_missing_pairs()
        if self.runner.step == 0 and self._has_flat_norm:
            _find_single_row(self.local, trainer)
        random_state = 0
        if self.runner.step < _RANDOM_STEPS:
            random_state = hash_text(repr(torch.get_rng_state().tolist()))
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        is_iterable = any(batch_reader.is_iterable(loader) for loader in loaders)
        read = self._batches
        return BatchStepRow(
            end=self._batch_idx << 1 | bool(is_last),
            rows=read.samples,
            content=read.content,
            distinct=read.distinct << 1 | is_iterable,
            random_state=random_state,
            order=self._order,
            read_step=read.read_step,
        )

    def _find_stale_samplers(self, trainer: pl.Trainer, loaders: list[DataLoader[Any]]) -> None:
        """Look for samplers that shuffle by epoch and were not told of this one."""
        epoch = trainer.current_epoch
        samplers: dict[str, Any] = {}
        for loader in loaders:
            samplers |= batch_reader.shuffling_samplers(loader)
        self._sampler_epochs[epoch] = {path: int(sampler.epoch) for path, sampler in samplers.items()}
        # evidence beside the number: the first batch is that of the epoch before
        before = self._sampler_epochs.get(epoch - 1, {})
        first = self._batches.first
        begins_alike = bool(first.get(epoch)) and first.get(epoch) == first.get(epoch - 1)
        for path, sampler in samplers.items():
            is_stale = before.get(path) == int(sampler.epoch)
            if is_stale and (begins_alike or isinstance(sampler, DistributedSampler)):
                self.local.add(
                    "F70",
                    f"{type(sampler).__name__} of the training loader has the same order in every epoch",
                    path,
                    "Lightning calls set_epoch of `sampler` and `batch_sampler.sampler` only: keep it under one of these names, or "
                    "call set_epoch(trainer.current_epoch) in on_train_epoch_start.",
                )
                return

    def _find_missing_pairs(self) -> None:
        """Look for losses that met no positive pair in several steps."""
        if self._pairs is None:
            return
        for name, without in self._pairs.without.items():
            steps = 0
            if without:
                steps = self._steps_without_pairs.get(name, 0) + 1
            self._steps_without_pairs[name] = steps
            if steps == _STEPS_WITHOUT_PAIRS:
                self.local.add(
                    "F31",
                    f"`{name}` met no positive pair in {_STEPS_WITHOUT_PAIRS} steps: all labels of this rank's batch differ",
                    name,
                    "Give each rank several rows of a class (GlobalBatchSampler.batches(MPerClassSampler(...))), or compare over all "
                    "ranks with GlobalBatchLoss.",
                )

    # ------------------------------------------------------------------ judge

    def judge(
        self, table: list[list[int]], trainer: pl.Trainer, module: pl.LightningModule, stage: CheckStage
    ) -> list[Finding]:
        """Compare the ranks' data."""
        local_size = len(LocalRow._fields)
        found = self.local.judge([LocalRow(*row[:local_size]) for row in table])
        if stage in (CheckStage.TRAIN_START, CheckStage.VALIDATION_START, CheckStage.LOAD):
            return found
        rest = [row[local_size:] for row in table]
        if stage == CheckStage.BEFORE_BACKWARD:
            return found + self._judge_step([BatchStepRow(*row) for row in rest], trainer)
        if stage == CheckStage.SAVE:
            checkpoint = self.runner.checkpoint
            if checkpoint is not None:
                self._resumed.save_(checkpoint, self._batches.epoch, self._batch_idx + 1, rest)
            return found
        epochs = [BatchEpochRow.unpack(row) for row in rest]
        found += find_overlap([row.sketch for row in epochs])
        is_whole = stage == CheckStage.EPOCH_START or not _is_cut_short(trainer)
        found += self._resumed.judge([row.sketch for row in epochs], self._batch_idx + 1, is_whole=is_whole)
        self._imbalance = label_imbalance([row.labels for row in epochs])
        if stage == CheckStage.EPOCH_START:
            found += _judge_sizes(epochs, trainer, module)
        return found

    def _judge_step(self, rows: Sequence[BatchStepRow], trainer: pl.Trainer) -> list[Finding]:
        found: list[Finding] = []
        self._global_rows = tuple(row.rows for row in rows)
        # an epoch that ends on some ranks only
        is_last = [row.end & 1 for row in rows]
        goes_on = batches_until_max_steps(trainer) > trainer.accumulate_grad_batches  # else the fit ends here anyway
        if len(set(is_last)) > 1 and goes_on:
            texts = []
            for row in rows:
                text = f"batch {row.end >> 1}"
                if row.end & 1:
                    text += ", its last"
                texts.append(text)
            found.append(_different_ends(texts, is_last))
        # batches and orders
        distinct = [row.distinct >> 1 for row in rows]
        is_iterable = any(row.distinct & 1 for row in rows)
        same = self._same.judge([row.content for row in rows], distinct, iterable=is_iterable)
        step, place = max(row.read_step for row in rows), CheckStage.BEFORE_BACKWARD.value
        found += [replace(each, step=step, moment=place) for each in same]
        found += _different_orders([row.order for row in rows])
        # what is worth knowing once
        if self.runner.step == 0 and len(rows) * trainer.accumulate_grad_batches > 1 and all(self._global_rows):
            found.append(self._batch_meaning(trainer))
        if self.runner.step < _RANDOM_STEPS and len(rows) > 1:
            found += self._same_random_numbers(tuple(row.random_state for row in rows))
        return found

    def _same_random_numbers(self, states: tuple[int, ...]) -> list[Finding]:
        self._random_states.append(states)
        if len(self._random_states) != _RANDOM_STEPS:
            return []
        is_equal = all(len(set(step)) == 1 for step in self._random_states)
        is_used = self._random_states[0] != self._random_states[1]
        if not is_equal or not is_used:
            return []
        what = "all ranks draw the same random numbers (dropout, noise, augmentation on the device)"
        fix = "Where that is not meant, add the rank to the seed once the model is built."
        return [Finding("F72", what, name="random numbers", fix=fix)]

    def _batch_meaning(self, trainer: pl.Trainer) -> Finding:
        """Say how many rows an optimizer step sees, and what that means for the learning rate."""
        accumulated, global_rows = trainer.accumulate_grad_batches, sum(self._global_rows)
        local_rows = max(self._global_rows)
        factor = global_rows * accumulated / max(local_rows, 1)
        rate = learning_rate(trainer)
        what = f"an optimizer step sees {global_rows * accumulated} rows ({accumulated} x {global_rows}, {local_rows} per rank)"
        fix = f"A rate of {rate:g} tuned on {local_rows} rows would be {rate * factor:g} by linear scaling."
        return Finding("F18", what, name="global batch", fix=fix)

    def figures(self) -> dict[str, float]:
        """Return the rows of the latest step, and how far the ranks' classes are from those of all ranks."""
        if not self._global_rows or not all(self._global_rows):
            return {}
        return {
            "rows_min": float(min(self._global_rows)),
            "rows_max": float(max(self._global_rows)),
            "class_imbalance": self._imbalance,
        }


def _batch_sizes(trainer: pl.Trainer) -> tuple[int, int]:
    """Return the rows of this rank's full batches and of its last one; zeros where they cannot be known, or loaders are several."""
    loaders = batch_reader.data_loaders(trainer)
    if len(loaders) != 1:
        return 0, 0
    return batch_reader.batch_sizes(loaders[0])


def _is_cut_short(trainer: pl.Trainer) -> bool:
    """Say whether the fit may have ended inside an epoch; the same on every rank."""
    has_max_steps = trainer.max_steps is not None and trainer.max_steps >= 0
    return trainer.should_stop or (has_max_steps and trainer.global_step >= trainer.max_steps)


# ---------------------------------------------------------------------- what one rank finds by itself


def _find_local_losses(local: LocalFindings, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Find losses that compare the rows of this rank only, and accumulation that does not help them."""
    if process_groups.world_size() == 1:
        return
    of_one_rank = list(local_contrastive_losses(module))
    names = ", ".join(f"`{name}`" for name in of_one_rank)
    if names:
        fix = "Wrap it in GlobalBatchLoss, which evaluates it over the rows of all ranks."
        local.add("F29", f"{names} compares the rows of one rank only", names, fix)
    # the rows of all ranks are still those of one batch
    names = ", ".join(f"`{name}`" for name in dict.fromkeys([*of_one_rank, *global_contrastive_losses(module)]))
    if names and trainer.accumulate_grad_batches > 1:
        what = f"accumulating {trainer.accumulate_grad_batches} batches gives {names} no more negatives: it sees one of them at a time"
        fix = (
            "Draw one large batch and run the encoder over it in pieces: microbatched(encoder) has a large batch's negatives at a small "
            "one's memory. GlobalBatchLoss joins the rows of all ranks, not those of several batches."
        )
        local.add("F33", what, names, fix)


def _find_repeated_rows(local: LocalFindings, trainer: pl.Trainer) -> None:
    """Find held-out rows that padding hands out twice."""
    for index, loader in enumerate(batch_reader.data_loaders(trainer, validation=True)):
        rows = repeated_rows(loader)
        if rows:
            local.add(
                "F54",
                f"{rows} held-out rows count twice in validation",
                f"validation loader {index}",
                'Use DDPLossStrategy(evaluation="exact"), which gives each row to one rank and every rank as many batches; around a '
                "batch sampler of your own, or with a DistributedSampler of your own, GlobalBatchSampler.batches(sampler).",
            )


def _find_reshuffled(local: LocalFindings, trainer: pl.Trainer) -> None:
    """Find batches that belong together and that Lightning shuffles."""
    for loader in batch_reader.data_loaders(trainer):
        name = batch_reader.sampler_shuffled_by_lightning(loader)
        if name:
            local.add(
                "F68",
                f"{name} is shuffled over all its batches by Lightning",
                name,
                f"Write DataLoader(..., batch_sampler=GlobalBatchSampler.batches({name}(...), global_batch_size)).",
                "its own order, in which the rows of a batch belong together",
            )


def _find_single_row(local: LocalFindings, trainer: pl.Trainer) -> None:
    """Find a last batch of one row."""
    loaders = batch_reader.data_loaders(trainer)
    full_size, last_size = _batch_sizes(trainer)
    if last_size == 1 < full_size and trainer.num_training_batches == len(loaders[0]):
        local.add(
            "F62",
            "the last batch of this rank has one row, of which batch norm makes no statistics",
            "last batch",
            "Set drop_last=True on the DataLoader.",
            "two rows or more",
        )


# ---------------------------------------------------------------------- what the ranks' rows say together


class SameBatches:
    """Finds pairs of ranks that have been given the same batches."""

    def __init__(self) -> None:
        self._evidence = SameRows()

    def judge(self, contents: Sequence[int], distinct: Sequence[int], *, iterable: bool) -> list[Finding]:
        """Compare the contents of this step's batches by rank (0: not read), given their numbers of different rows."""
        ranks_involved = self._evidence.see(contents, distinct)
        if not ranks_involved:
            return []
        fault = "F67"
        fix = "Let Lightning inject a DistributedSampler (use_distributed_sampler=True), or deal the batches with GlobalBatchSampler."
        if iterable:
            fault, fix = "F71", undivided_data.FIX
        whose = "some ranks"
        if len(ranks_involved) == len(contents):
            whose = "all ranks"
        what = f"{whose} train on the same batches"
        return [Finding(fault, what, "rows of its own for each rank", tuple(ranks_involved), name="batches", fix=fix)]


def find_overlap(sketches: Sequence[Sequence[int]]) -> list[Finding]:
    """Find ranks that share rows of an epoch while none repeats its own: each draws from the whole data set in an order of its own.

    Drawing with replacement, and data that hold the same row twice, repeat rows within a rank too: of the pairs of equal rows, 1 in W has
    both on one rank. Fewer than chance allows are evidence.

    Args:
        sketches: By rank: rows read, and the smallest of their hashes with how often each came in the low two bits, padded with zeros.
    """
    rows_read = sum(sketch[0] for sketch in sketches)
    counts_by_rank: list[dict[int, int]] = []
    edge = 1 << 63  # up to this hash every rank's list is complete
    for sketch in sketches:
        counts = {value & ~_COUNT_BITS: value & _COUNT_BITS for value in sketch[1:] if value}
        if not counts:
            return []
        if len(counts) == len(sketch) - 1:
            edge = min(edge, max(counts))
        counts_by_rank.append(counts)
    # on how many ranks each row was, and which a rank repeated
    ranks_with: Counter[int] = Counter()
    repeated: set[int] = set()
    for counts in counts_by_rank:
        ranks_with.update(value for value in counts if value <= edge)
        repeated.update(value for value, count in counts.items() if value <= edge and count > 1)
    shared = sum(number > 1 for number in ranks_with.values())
    padding = 2 * len(sketches) * len(ranks_with) / max(rows_read, 1)  # rows that an even division repeats
    evidence = shared - math.ceil(padding)
    if (
        evidence < _MIN_SHARED_ROWS
        or _chance_of_few(len(repeated), evidence + len(repeated), 1 / len(sketches)) > _CHANCE
    ):
        return []
    what = f"{shared} of {len(ranks_with)} rows looked at were given to more than one rank in one epoch, and others to none"
    fix = "Seed alike on every rank before the sampler is made (seed_everything), or deal the batches with GlobalBatchSampler."
    return [Finding("F69", what, "each row on one rank", name="rows", fix=fix)]


def _chance_of_few(most: int, trials: int, chance: float) -> float:
    """Return how likely ``most`` hits at most are in so many trials, by the binomial distribution."""
    likely = 0.0
    for hits in range(most + 1):
        # by logarithms: the number of ways alone is larger than a float
        ways = math.lgamma(trials + 1) - math.lgamma(hits + 1) - math.lgamma(trials - hits + 1)
        likely += math.exp(ways + hits * math.log(chance) + (trials - hits) * math.log1p(-chance))
    return likely


def _different_orders(orders: Sequence[int]) -> list[Finding]:
    """Find ranks that cut their parts out of orders which should be one."""
    if 0 in orders or len(set(orders)) == 1:
        return []
    return [
        Finding(
            "F69",
            "the order that ranks cut their rows from",
            "the same on every rank, else rows come twice and others never",
            odd_ranks(orders),
            name="order",
            fix="Seed alike on every rank (seed_everything without the rank), or deal the batches with GlobalBatchSampler.",
        )
    ]


def _judge_sizes(rows: Sequence[BatchEpochRow], trainer: pl.Trainer, module: pl.LightningModule) -> list[Finding]:
    """Compare how many batches the ranks have, and of which sizes where a loss gathers equal numbers only."""
    found = []
    numbers = [row.batches for row in rows]
    if min(numbers) >= 0 and len(set(numbers)) > 1 and min(numbers) < batches_until_max_steps(trainer):
        found.append(_different_ends([f"{number} batches" for number in numbers], numbers))
    # sizes matter where a loss gathers without looking at them
    sizes = [(row.full_size, row.last_size) for row in rows]
    gathers = [row.gathers for row in rows]
    if len(set(sizes)) > 1 and len(set(gathers)) == 1 and gathers[0]:
        name = pml_gather(module)
        found.append(
            Finding(
                "F28",
                f"rows of the ranks' batches, which `{name}` gathers",
                "the same number on every rank",
                name=name,
                values=tuple(f"batches of {full}, the last of {last}" for full, last in sizes),
                fix="Use GlobalBatchLoss, which takes uneven batches, or drop_last=True and equal parts of the data.",
            )
        )
    return found


def _different_ends(texts: Sequence[str], numbers: Sequence[int]) -> Finding:
    """Report ranks whose epochs end at different batches."""
    return Finding(
        "F36",
        uneven_ends.WHAT,
        uneven_ends.EXPECTED,
        odd_ranks(numbers),
        name="number of batches",
        values=tuple(texts),
        fix=uneven_ends.FIX,
    )
