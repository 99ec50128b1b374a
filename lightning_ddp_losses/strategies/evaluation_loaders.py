"""`evaluation="exact"`: validation, test and prediction see each row once, where Lightning would pad the ranks' rows.

Lightning replaces the sampler of a DataLoader when it is set up, before the strategy gets the loader. So while an evaluation is set up it
is told that the loader needs no sampler, and the strategy puts ``EvaluationSampler`` into a copy. What Lightning would have left alone
(``use_distributed_sampler=False``, a ``DistributedSampler`` of the user's, iterable data sets) is left alone here too. Batch samplers of
the user's own stay as Lightning makes them: what they do with the rows is theirs.

Where ranks have different numbers of batches (a batch size of one), a step that exchanges something would wait for ever in the last
batch. That is seen in the first batch, which all ranks have.

Legend: ``W`` ranks, ``N`` rows of the data set.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.random_state import NUMPY_SEEDS
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.errors import ConfigurationError, InputError
from lightning_ddp_losses.samplers.evaluation import EvaluationBatches, EvaluationSampler, len_of
from lightning_ddp_losses.samplers.global_batch import GlobalBatches
from lightning_ddp_losses.samplers.predictions import current_loaders

_PADDED = "evaluation='padded' repeats rows so that all ranks have as many"


class EvaluationLoaders:
    """The evaluation loaders of one run of a trainer.

    Args:
        mode: ``"exact"`` or ``"padded"``.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._undo: Callable[[], object] | None = None
        self._warned = False

    def setup(self, trainer: pl.Trainer) -> None:
        """Keep Lightning's samplers out of evaluation loaders; called before any loader is set up."""
        if self.mode == "exact" and self._undo is None:
            self._undo = compat.without_injected_sampler(trainer, lambda loader: _needs_no_sampler(trainer, loader))

    def teardown(self) -> None:
        """Let Lightning inject as before."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    # ------------------------------------------------------------------ loaders

    def process(self, trainer: pl.Trainer, dataloader: Any) -> Any:
        """Return an evaluation loader that gives this rank its rows; any other as it is.

        Raises:
            InputError: on every rank, for fewer rows than ranks.
            RankMismatchError: on every rank, for loaders that differ between ranks, or that draw differently.

        Communication: one handshake; two for a sampler that draws.
        """
        is_evaluation = self._undo is not None and not trainer.training
        if not is_evaluation or process_groups.world_size() == 1 or not compat.injects_distributed_sampler(trainer):
            return dataloader
        what = f"{_stage(trainer)} loader"
        if not _is_served(dataloader):
            handshake.all_gather(what, {"sampler": "the user's own"})
            return dataloader
        # 1. the sampler, from that of one process
        batches = compat.inner_batch_sampler(dataloader)
        source, size, drop_last = dataloader.sampler, None, False
        if batches is not None:
            source, size, drop_last = batches.sampler, batches.batch_size, batches.drop_last
        # 2. what all ranks must have in common, so that their parts make the whole; rank 0's seed, which others may have changed by rank
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) % NUMPY_SEEDS
        facts = {"sampler": type(source).__name__, "rows": len_of(source), "batch_size": size, "drop_last": drop_last}
        seeds = handshake.all_gather(what, facts, seed.to_bytes(8, "little"))
        sampler = EvaluationSampler(source, size, drop_last=drop_last, seed=int.from_bytes(seeds[0], "little"))
        if not sampler.is_sequential:
            handshake.all_gather(f"{what}: rows that its {facts['sampler']} drew", {"digest": sampler.digest()})
        self._refuse_few_rows(sampler, what)
        # 3. a copy with it: workers, collate and all else are the user's
        own = copy.copy(dataloader)
        compat.set_samplers_(own, sampler, None if batches is None else EvaluationBatches(sampler))
        return own

    def _refuse_few_rows(self, sampler: EvaluationSampler, what: str) -> None:
        counts = sampler.counts
        if max(counts) > 0 and min(counts) == 0:
            raise InputError(
                f"rows of the {what}",
                expected=f"at least one for each of {len(counts)} ranks",
                got=sampler.global_rows,
                fix=f"Use fewer ranks, or more rows ({_PADDED}).",
                collective=True,
            )
        if min(counts) != max(counts) and not self._warned:
            self._warned = True
            rank_zero_warn(
                f"The {what} has batches of one row, and {sampler.global_rows} rows that {len(counts)} ranks do not divide: some ranks "
                "have one batch less, and a step that waits for all ranks would wait for ever in the last one. Take batches of two "
                f"rows or more where it does ({_PADDED})."
            )

    # ------------------------------------------------------------------ steps

    @contextlib.contextmanager
    def step(
        self, trainer: pl.Trainer, ddp: Any, args: tuple[Any, ...], *, must_exchange: bool = False
    ) -> Iterator[None]:
        """Refuse, in the first batches of a loader of which some ranks have fewer, a step that exchanges something.

        Args:
            trainer: The trainer.
            ddp: The model's DDP, None without one.
            args: The batch, its index, and that of its loader where they are several.
            must_exchange: Whether each step does, in groups that nobody counts.

        Raises:
            InputError: on every rank.

        Communication: none.
        """
        sampler = self._uneven_sampler(trainer, args)
        if sampler is None:
            yield
            return
        if must_exchange:
            raise self._uneven_batches(trainer, sampler)
        # DDP's broadcast of buffers, once in an evaluation, is in a batch that all ranks have
        broadcasts = ddp is not None and ddp.will_sync_module_buffers()
        before = (handshake.number_opened(), 0 if broadcasts else compat.collectives_started())
        yield
        if before != (handshake.number_opened(), 0 if broadcasts else compat.collectives_started()):
            raise self._uneven_batches(trainer, sampler)

    @staticmethod
    def _uneven_batches(trainer: pl.Trainer, sampler: EvaluationSampler) -> InputError:
        return InputError(
            f"{_stage(trainer)} step, which exchanges something between ranks",
            expected="as many batches on every rank",
            ranks=[f"{count} batches" for count in sampler.counts],
            fix=f"Take batches of two rows or more, drop_last=True, or a number of rows that the ranks divide ({_PADDED}).",
            collective=True,
        )

    def _uneven_sampler(self, trainer: pl.Trainer, args: tuple[Any, ...]) -> EvaluationSampler | None:
        """Return the sampler of the loader that a batch is from, where ranks have different numbers of its batches."""
        if self._undo is None or len(args) < 2:
            return None
        loaders = current_loaders(trainer)
        if len(args) > 2 and isinstance(args[2], int):
            loaders = loaders[args[2] : args[2] + 1]
        for loader in loaders:
            sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
            if isinstance(sampler, EvaluationSampler):
                counts = [_limited(trainer, count) for count in sampler.counts]
                # a batch that all ranks have: they come to the same verdict there
                if args[1] < min(counts) < max(counts):
                    return sampler
        return None


def _stage(trainer: pl.Trainer) -> str:
    return "" if trainer.state.stage is None else trainer.state.stage.value


def _limited(trainer: pl.Trainer, count: int) -> int:
    """Return how many of a loader's batches the trainer runs."""
    limit = trainer.limit_val_batches
    if trainer.testing:
        limit = trainer.limit_test_batches
    elif trainer.predicting:
        limit = trainer.limit_predict_batches
    limited = int(count * limit) if isinstance(limit, float) else min(count, limit)
    return int(min(limited, trainer.num_sanity_val_steps)) if trainer.sanity_checking else limited


def _needs_no_sampler(trainer: pl.Trainer, loader: Any) -> bool:
    """Say of a loader for which Lightning may want a sampler that it gets one of ours, or has one."""
    if trainer.training or not isinstance(loader, DataLoader):
        return False
    return _is_served(loader) or isinstance(compat.inner_batch_sampler(loader), GlobalBatches)


def _is_served(loader: Any) -> bool:
    """Say whether a loader is one for ``EvaluationSampler``."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    batches = compat.inner_batch_sampler(loader)
    if batches is not None and type(batches) is not BatchSampler:
        return False
    sampler = loader.sampler if batches is None else batches.sampler
    return not isinstance(sampler, DistributedSampler)


def refuse_evaluation(evaluation: object) -> None:
    """Refuse a way to evaluate that is none.

    Raises:
        ConfigurationError: naming the option.
    """
    if evaluation not in ("exact", "padded"):
        raise ConfigurationError("evaluation", expected="'exact' or 'padded'", got=repr(evaluation))
