"""The loaders that a user gives for training: loaders that are refused, loaders that are replaced, and data that are not divided.

* Samplers: under DDP, Lightning wraps any training sampler in a ``DistributedSamplerWrapper`` that shuffles, and builds a custom batch
  sampler again around a shuffling ``DistributedSampler``. Batches with M rows per class are lost without a message. `GivenLoaders` warns.
  (Lightning 2.6.6, 2026)
* ``use_global_sampler=True``: the batches of one process for training loaders without a custom sampler. Lightning gives such a
  loader a ``DistributedSampler``: it shuffles even if the loader did not shuffle, pads the epoch with rows that are seen twice, deals
  rows by turns, so that another number of ranks has other batches, and starts the epoch again when training resumes. `GlobalSamplers`
  gives them the batches of ``GlobalBatchSampler.shuffled``, cut over the ranks: each row once, the same global batches on any number of
  ranks with the same global batch, and a place that is saved.
* Iterable data sets that every rank reads as a whole: each row is then used W times. Samplers divide indices, which these data sets lack:
  unless the data set divides itself by rank, all ranks get the same rows. `UndividedData` hashes the first batches of an epoch. The hashes
  are compared in an existing handshake (backward's, or the one at the end of an evaluation). Equal batches are evidence only if
  they change: two of them in a row, with 8 different rows in total. A constant batch (a toy, a benchmark, overfitting on purpose) is no
  evidence, and neither are rows that a rank augments for itself. If a check that looks for it (F71) is at work, that check decides.

Legend: ``W`` ranks, ``G`` rows of a global batch.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils import data

from lightning_ddp_losses.core import lightning_compat
from lightning_ddp_losses.core.faults import FAULTS
from lightning_ddp_losses.core.random_state import NUMPY_SEEDS
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.fingerprint import MAX_ROWS, batch_leaves, combine, row_hashes
from lightning_ddp_losses.errors import ConfigurationError, InputError, expect, format_error
from lightning_ddp_losses.samplers.global_batch import GlobalBatches, GlobalBatchSampler, batches_in_place, draw_of
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart

_TITLE = "use_global_sampler=True"
_FAULT = "F71"
_MIN_SAME_BATCHES, _MIN_SAME_ROWS = 2, 8
_LOOKED_AT = 4  # batches of an epoch
_SEEN = struct.Struct("<QI")  # content of a batch, its different rows


# ---------------------------------------------------------------------- loaders that the user passed


class GivenLoaders(FitPart):
    """Warns of samplers that Lightning replaced, and refuses batches that differ from their global sampler's."""

    def process_dataloader(self, dataloader: object) -> object:
        """Inspect a loader. It is not changed."""
        text = describe_reshuffle(dataloader, injecting=lightning_compat.injects_distributed_sampler(self.fit.trainer))
        if text is not None:
            rank_zero_warn(text)
        refuse_other_batches(dataloader)
        return dataloader


def foreign_loader(trainer: pl.Trainer) -> str:
    """Return the class of the first training loader that is not a DataLoader, else an empty text. Lightning leaves it undivided."""
    combined = lightning_compat.combined_loader(trainer.fit_loop)
    loaders = [] if combined is None else combined.flattened
    return next((type(loader).__name__ for loader in loaders if not isinstance(loader, data.DataLoader)), "")


def describe_reshuffle(dataloader: object, *, injecting: bool) -> str | None:
    """Return Lightning's change to the order of a structured sampler, as an error text. None if the order is unchanged.

    Args:
        dataloader: When Lightning has resolved samplers.
        injecting: Lightning's ``use_distributed_sampler``. Without it, a shuffle around a batch sampler is the user's own.
    """
    if not isinstance(dataloader, data.DataLoader):
        return None
    sampler, batch_sampler = dataloader.sampler, dataloader.batch_sampler
    held = getattr(batch_sampler, "__dict__", {}).values()
    # a custom sampler in Lightning's wrapper, or a custom batch sampler around Lightning's sampler
    if isinstance(sampler, DistributedSamplerWrapper) and sampler.shuffle:
        inner = lightning_compat.wrapped_sampler(sampler.dataset)
        name = type(sampler if inner is None else inner).__name__
        arguments, got = f"{name}(...), global_batch_size", "shuffled over all its batches"
    elif not injecting or batch_sampler is None or type(batch_sampler) is data.BatchSampler:
        return None
    elif any(isinstance(value, data.DistributedSampler) and value.shuffle for value in held):
        name = type(batch_sampler).__name__
        arguments, got = f"{name}(...)", "built anew around a shuffling DistributedSampler"
    else:
        return None
    return format_error(
        f"{name} under DDP",
        expected="its own order",
        got=f"{got} by Lightning, which destroys batches that belong together (M per class, hierarchical, weighted)",
        fix=f"Write DataLoader(..., batch_sampler=GlobalBatchSampler.batches({arguments})), or set "
        "Trainer(use_distributed_sampler=False) where the sampler itself gives each rank its own rows.",
    )


def refuse_other_batches(dataloader: object) -> None:
    """Refuse a DataLoader whose batches differ from its global sampler's. The sampler cannot find out how its indices are used.

    Args:
        dataloader: Argument of ``Strategy.process_dataloader``.

    Raises:
        ConfigurationError: another batch size, or ``drop_last`` on the DataLoader, which can leave ranks with different
            numbers of batches.
    """
    if not isinstance(dataloader, data.DataLoader):
        return
    # under a custom batch sampler, dataloader.sampler is torch's placeholder. In prediction the sampler is inside
    sampler = getattr(dataloader.batch_sampler, "sampler", dataloader.sampler)
    if not isinstance(sampler, GlobalBatchSampler):
        return
    name, expected = type(sampler).__name__, sampler.local_batch_size
    size = getattr(dataloader.batch_sampler, "batch_size", None)
    expect(
        size == expected,
        f"batch_size of the DataLoader around {name}",
        expected=f"{expected}, as in {name}(sampler, local_batch_size={expected})",
        got=repr(size),
        fix="Give both the same number of rows per rank.",
    )
    expect(
        sampler.drop_last or not getattr(dataloader.batch_sampler, "drop_last", False),
        f"drop_last of the DataLoader around {name}",
        expected=f"drop_last=True on the {name}, which leaves out the same batch on every rank",
        got="drop_last=True on the DataLoader alone",
        fix=f"Write {name}(sampler, {expected}, drop_last=True).",
    )


# ---------------------------------------------------------------------- use_global_sampler=True


class GlobalSamplers(FitPart):
    """Replaces the samplers of a fit's training loaders. A part with ``use_global_sampler=True`` only."""

    needs = ("use_global_sampler", True)

    _has_logged = False

    def setup_environment(self) -> None:
        """See the training loaders of a fit before Lightning does."""
        if self.fit.is_fitting:
            self.undo.callback(lightning_compat.replace_training_loaders(self.fit.trainer, self._replacement))

    def _replacement(self, dataloader: object) -> object | None:
        """Return the loader with our batches. None if the user chose them.

        Raises:
            ConfigurationError: on every rank, for what cannot be sampled.
        """
        with self.fit.raise_on_all_ranks("train_dataloader"):
            if _has_own_batches(dataloader):
                return None
            loader = _checked(self.fit.trainer, dataloader)
        # the source of the seed of Lightning's DistributedSampler
        seed = os.environ.get("PL_GLOBAL_SEED")
        batches = batches_in_place(loader, seed=None if seed is None else int(seed) % NUMPY_SEEDS, title=_TITLE)
        if not self._has_logged:
            self._has_logged = True
            _log(loader, batches)
        twin: object = lightning_compat.with_batch_sampler(loader, batches)
        return twin


def _log(loader: data.DataLoader[Any], batches: GlobalBatches) -> None:
    G = (loader.batch_size or 0) * process_groups.world_size()
    order = "rows are shuffled by a permutation of its own"
    if isinstance(loader.sampler, data.SequentialSampler):
        order = "rows come in their order, as the loader says"
    rank_zero_info(
        f"{_TITLE}: each step trains on the next {G} rows of one process's epoch ({order}, seed {batches.sampler.seed or 0}); "
        "this is another order than that of strategy='ddp'."
    )


def _has_own_batches(dataloader: object) -> bool:
    """Return whether the user, or a library, chose the batches of a loader, which is then not changed."""
    if not isinstance(dataloader, data.DataLoader) or isinstance(dataloader.dataset, data.IterableDataset):
        return False
    if draw_of(dataloader) is not None:
        return True
    # 1. the samplers that torch makes from batch_size= (without it, there are no batches) and shuffle=
    sampler, batches, rows = dataloader.sampler, dataloader.batch_sampler, dataloader.dataset
    is_plain = batches is None or type(batches) is data.BatchSampler
    is_torchs = type(sampler) in (data.SequentialSampler, data.RandomSampler)
    is_torchs = is_torchs and getattr(sampler, "data_source", None) is rows
    if is_torchs and isinstance(sampler, data.RandomSampler):
        is_torchs = not sampler.replacement and len(sampler) == len(sampler.data_source)
    if is_plain and is_torchs:
        return False
    # 2. all other samplers
    name = type(sampler if is_plain else batches).__name__
    rank_zero_warn(
        f"{_TITLE} leaves a training loader with a {name} of its own as it is. To cut its batches over the ranks, write "
        "DataLoader(..., batch_sampler=GlobalBatchSampler.batches(sampler, global_batch_size))."
    )
    return True


def _checked(trainer: pl.Trainer, dataloader: object) -> data.DataLoader[Any]:
    """Return a loader with rows that can be drawn by number.

    Raises:
        ConfigurationError: naming its type.
    """
    leave_out, kind = "Leave use_global_sampler out", type(dataloader).__name__
    if not isinstance(dataloader, data.DataLoader):
        what, expected, got = f"training loader under {_TITLE}", "torch's DataLoader", kind
        fix = f"{leave_out}: a loader with batches of its own has no sampler."
    elif isinstance(dataloader.dataset, data.IterableDataset):
        what, expected = f"data set under {_TITLE}", "one whose rows have numbers"
        got = f"{type(dataloader.dataset).__name__}, which is an IterableDataset"
        fix = f"{leave_out} and let the data set yield each rank its own rows."
    elif dataloader.batch_size is None:
        what, expected, got = f"DataLoader under {_TITLE}", "a batch_size", "batch_size=None"
        fix = "Give the rows of one rank."
    elif not lightning_compat.injects_distributed_sampler(trainer):
        what, expected = _TITLE, "a Trainer that gives loaders a sampler"
        got, fix = "Trainer(use_distributed_sampler=False)", "Leave one of the two options out."
    else:
        return dataloader
    raise ConfigurationError(what, expected=expected, got=got, fix=fix)


# ---------------------------------------------------------------------- iterable data sets


class SameRows:
    """Counts how long pairs of ranks have been given the same batches.

    Batches that do not change from step to step are not evidence (a toy example, or overfitting on purpose).
    """

    def __init__(self) -> None:
        self._evidence: dict[tuple[int, int], tuple[int, int]] = {}  # by pair of ranks: batches and rows in a row
        self._contents_before: list[int] = []

    def see(self, contents: Sequence[int], distinct: Sequence[int]) -> list[int]:
        """Compare the contents of this step's batches by rank.

        Args:
            contents: Hash of each rank's batch. 0 if it was not read.
            distinct: Number of different rows in each batch.

        Returns:
            The ranks that certainly have the same batches as another by now.
        """
        if 0 in contents:
            return []
        evidence: dict[tuple[int, int], tuple[int, int]] = {}
        first_rank_with: dict[int, int] = {}
        ranks_involved: set[int] = set()
        for rank, content in enumerate(contents):
            first = first_rank_with.setdefault(content, rank)
            if first == rank:
                continue
            # new evidence only if the batch is another one than before
            batches, rows = self._evidence.get((first, rank), (0, 0))
            if not self._contents_before or self._contents_before[rank] != content:
                batches, rows = batches + 1, rows + distinct[rank]
            evidence[first, rank] = batches, rows
            if batches >= _MIN_SAME_BATCHES and rows >= _MIN_SAME_ROWS:
                ranks_involved |= {first, rank}
        self._evidence, self._contents_before = evidence, list(contents)
        return sorted(ranks_involved)


class UndividedData:
    """Looks at the first batches of the iterable loaders of one stage.

    Args:
        stage: Its name.

    Attributes:
        is_looking: False after the first batches of an epoch, and if they are not of iterable data sets.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self.begin()

    def begin(self) -> None:
        """Begin an epoch."""
        self._seen: list[bytes] = []  # of the batches that have yet to travel
        self._looked_at, self.is_looking, self._name = 0, True, ""
        self._rows = SameRows()

    def see(self, loaders: Sequence[Any], batch: Any) -> None:
        """Read a batch, if it is one of the first, and all of its sources are iterable. Communication: none."""
        if not self.is_looking or not loaders:
            return
        if process_groups.world_size() == 1 or not all(_is_iterable(loader) for loader in loaders):
            self.is_looking = False
            return
        self._looked_at += 1
        self.is_looking = self._looked_at < _LOOKED_AT
        self._name = ", ".join(type(loader.dataset).__name__ for loader in loaders)
        self._seen.append(_SEEN.pack(*_hash_of(batch)))

    def take(self) -> bytes:
        """Return what has yet to travel."""
        seen, self._seen = b"".join(self._seen), []
        return seen

    def judge(self, trainer: pl.Trainer, payloads: Sequence[bytes]) -> None:
        """Compare the batches of all ranks, in rank order.

        Raises:
            InputError: on every rank.
        """
        by_rank = [list(_SEEN.iter_unpack(payload)) for payload in payloads]
        for step in zip(*by_rank, strict=False):
            contents, distinct = zip(*step, strict=True)
            ranks = self._rows.see(contents, distinct)
            if ranks and not _is_checked(trainer):
                whose = "all ranks" if len(ranks) == len(payloads) else f"ranks {', '.join(map(str, ranks))}"
                raise InputError(
                    f"batches of {self._name} in {self._stage} ({_FAULT})",
                    expected="rows of its own for each rank",
                    got=f"the same on {whose}, which count them so many times",
                    fix=FAULTS[_FAULT].cases["check"]["fix"],
                    collective=True,
                )


class TrainingRows(FitPart):
    """Compares the first training batches of iterable data sets between ranks. A part with ``check_calls`` only."""

    needs = ("check_calls", True)

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self._data = UndividedData("training")

    def on_model_ready(self) -> None:
        """Let the hashes travel in the call check."""
        self.fit.strategy.attach_payload(self._data.take, self._judge, name="rows of iterable data sets")

    def _judge(self, payloads: list[bytes]) -> None:
        self._data.judge(self.fit.trainer, payloads)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Look at the first batches of an epoch."""
        if batch_idx == 0:
            self._data.begin()
        if self._data.is_looking:
            self._data.see(lightning_compat.combined_loader(self.fit.trainer.fit_loop).flattened, batch)


def _is_iterable(loader: Any) -> bool:
    return isinstance(loader, data.DataLoader) and isinstance(loader.dataset, data.IterableDataset)


def _hash_of(batch: Any) -> tuple[int, int]:
    """Return a hash of a batch and its number of different rows. Zeros if it has none that can be read."""
    tensors = [leaf for leaf in batch_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    rows = tensors[0].shape[0] if tensors else 0
    if not rows:
        return 0, 0
    hashes = row_hashes(tensors, rows, MAX_ROWS)
    return combine(hashes) & ((1 << 63) - 1) or 1, len(set(hashes))


def _is_checked(trainer: pl.Trainer) -> bool:
    """Return whether a check for the same fault, or the audit, is active."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        checks = callback.checks_to_run() if hasattr(callback, "checks_to_run") else [callback]
        if any(_FAULT in getattr(check, "faults", ()) for check in checks):
            return True
    return False
