"""Validation, test and prediction: each row once (`EvaluationLoaders`), and one meeting of all ranks at the end (`EvaluationEnds`).

With ``evaluation="exact"`` each row is seen once, although Lightning would pad the ranks' rows.
Lightning replaces the sampler of a DataLoader when it is set up, before the strategy gets the loader. So while an evaluation is set up,
Lightning is made to leave the loader unchanged, and the strategy puts ``EvaluationSampler`` into a copy. Loaders that Lightning would not
have changed (``use_distributed_sampler=False``, a user's ``DistributedSampler``, iterable data sets) are not changed either.
A user's batch samplers are handled by Lightning, and may treat rows differently.

If ranks have different numbers of batches (a batch size of one), a step that exchanges something would wait for ever in the last
batch. That is seen in the first batch, which all ranks have.

A step of validation, test or prediction does not use collectives. If a rank fails, its peers would wait in the next collective (epoch
values of metrics, the next training step). So all ranks exchange a handshake after their last batch, before any of these. It also carries
the hashes of iterable data sets (``UndividedData``). (Epoch values of several sequential loaders are reduced after each loader. The
handshake follows the last one.)

Legend: ``W`` ranks, ``N`` rows of the data set.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_ddp_losses.core import lightning_compat, metrics_compat, torch_compat
from lightning_ddp_losses.core.random_state import NUMPY_SEEDS
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.ledger import read_sized, sized
from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.samplers.evaluation import EvaluationBatches, EvaluationSampler, len_of
from lightning_ddp_losses.samplers.global_batch import GlobalBatches
from lightning_ddp_losses.samplers.predictions import current_loaders
from lightning_ddp_losses.strategies.fit_part import Fit, FitPart
from lightning_ddp_losses.strategies.training_data import UndividedData

_PADDED = "evaluation='padded' repeats rows so that all ranks have as many"


class EvaluationEnds(FitPart):
    """Exchanges a handshake at the end of each evaluation of one run of a trainer."""

    def __init__(self, fit: Fit) -> None:
        super().__init__(fit)
        self._is_inside = False  # the peers will listen at the end of this evaluation
        self._data: dict[int, UndividedData] = {}  # by loader

    def setup(self) -> None:
        """Meet at the ends from now on."""
        if process_groups.world_size() > 1:
            self.undo.callback(lightning_compat.around_evaluations(self.fit.trainer, self._begin, self._end))

    @contextlib.contextmanager
    def evaluation_step(self, args: tuple[Any, ...]) -> Iterator[None]:
        """Run a step inside the block. Its error is raised on every rank, on the peers at the end of their evaluation."""
        if not self._is_inside:
            yield
            return
        try:
            index, loaders = _loaders_of(self.fit.trainer, args)
            if index not in self._data:
                self._data[index] = UndividedData(_name(self.fit.trainer))
            self._data[index].see(loaders, args[0])
            yield
        except Exception as error:
            self.on_exception(error)

    def on_exception(self, exception: Exception) -> None:
        """Raise an error of this rank on every rank."""
        if self._is_inside:
            self._is_inside = False
            handshake.raise_in_all_groups(exception, f"{_name(self.fit.trainer)} step")

    def _begin(self, _loop: object) -> None:
        self._is_inside, self._data = True, {}

    def _end(self, _loop: object) -> None:
        """Find out whether a rank has failed. Communication: one handshake.

        Raises:
            InputError: on every rank, for an iterable data set that is not divided.
            PeerError: if a peer failed.
        """
        self._is_inside = False
        trainer, indices = self.fit.trainer, sorted(self._data)
        # a few bytes for each loader. Their number differs by rank
        own = b"".join(sized(self._data[index].take()) for index in indices)
        everyone = handshake.all_gather_between_steps(f"the end of {_name(trainer)}", {}, own)
        by_rank = [read_sized(payload) for payload in everyone]
        for index, of_ranks in zip(indices, zip(*by_rank, strict=False), strict=False):
            self._data[index].judge(trainer, of_ranks)


class EvaluationLoaders(FitPart):
    """Gives the evaluation loaders of one run exact parts of the rows. A part with ``evaluation="exact"`` only."""

    needs = ("evaluation", "exact")

    _warned = False

    def setup(self) -> None:
        """Keep Lightning's samplers out of evaluation loaders, before any loader is set up."""
        trainer = self.fit.trainer
        self.undo.callback(
            lightning_compat.without_injected_sampler(trainer, lambda loader: _needs_no_sampler(trainer, loader))
        )

    # ------------------------------------------------------------------ loaders

    def process_dataloader(self, dataloader: object) -> object:
        """Return an evaluation loader with this rank's rows, and any other loader unchanged. Errors are raised on every rank."""
        trainer = self.fit.trainer
        is_dealt = not trainer.training and process_groups.world_size() > 1
        if not is_dealt or not lightning_compat.injects_distributed_sampler(trainer):
            return dataloader
        with self.fit.raise_on_all_ranks("evaluation loader"):
            return self._process(f"{_name(trainer)} loader", dataloader)

    def _process(self, what: str, dataloader: Any) -> Any:
        """Return an evaluation loader that gives this rank its rows.

        Raises:
            InputError: on every rank, for fewer rows than ranks.
            RankMismatchError: on every rank, for loaders that differ between ranks, or that draw differently.

        Communication: one handshake. Two for a sampler that draws.
        """
        if not _is_served(dataloader):
            handshake.all_gather(what, {"sampler": "the user's own"})
            return dataloader
        # 1. the sampler, made from the sampler of one process
        batches = torch_compat.inner_batch_sampler(dataloader)
        source, size, drop_last = dataloader.sampler, None, False
        if batches is not None:
            source, size, drop_last = batches.sampler, batches.batch_size, batches.drop_last
        # 2. common values of all ranks, so that their parts make the whole. Rank 0's seed, which others may have changed by rank
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) % NUMPY_SEEDS
        facts = {"sampler": type(source).__name__, "rows": len_of(source), "batch_size": size, "drop_last": drop_last}
        seeds = handshake.all_gather(what, facts, seed.to_bytes(8, "little"))
        sampler = EvaluationSampler(source, size, drop_last=drop_last, seed=int.from_bytes(seeds[0], "little"))
        if not sampler.is_sequential:
            handshake.all_gather(f"{what}: rows that its {facts['sampler']} drew", {"digest": sampler.digest()})
        self._refuse_few_rows(sampler, what)
        # 3. a copy with this sampler. Workers, collate function and other options are unchanged
        own = copy.copy(dataloader)
        torch_compat.set_samplers_(own, sampler, None if batches is None else EvaluationBatches(sampler))
        return own

    def _refuse_few_rows(self, sampler: EvaluationSampler, what: str) -> None:
        counts = sampler.counts
        limited = [_limited(self.fit.trainer, count) for count in counts]
        if min(counts) > 0 and max(limited) > 0 and min(limited) == 0:
            raise InputError(
                f"batches of the {what} within the Trainer's limit",
                expected="at least one on every rank",
                ranks=[f"{few} of {count}" for few, count in zip(limited, counts, strict=True)],
                fix=f"Raise the limit, or take more rows or batches of two rows or more ({_PADDED}).",
                collective=True,
            )
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
    def evaluation_step(self, args: tuple[Any, ...]) -> Iterator[None]:
        """Refuse a step with collectives in the first batches of a loader, if some ranks have fewer batches.

        Raises:
            InputError: on every rank.

        Communication: none.
        """
        trainer, strategy = self.fit.trainer, self.fit.strategy
        sampler = self._uneven_sampler(trainer, args)
        if sampler is None:
            yield
            return
        # DDP's broadcast of buffers, once in an evaluation, is in a batch that all ranks have
        ddp, step = strategy.wrapped_model, f"{_name(trainer)} step"
        broadcasts = ddp is not None and ddp.will_sync_module_buffers()
        before = (handshake.number_opened(), 0 if broadcasts else torch_compat.collectives_started())
        expected, grown, is_local = "as many batches on every rank", list[str](), False
        if not strategy.exchanges_in_forward:
            lengths = _list_lengths(trainer.lightning_module)
            yield
            is_local = before == (handshake.number_opened(), 0 if broadcasts else torch_compat.collectives_started())
            after = _list_lengths(trainer.lightning_module)
            grown = [name for name, length in after.items() if length > lengths.get(name, 0)]
        # 1. a metric that torchmetrics would gather item by item, from a different number of batches on each rank
        if grown:
            what = f"{step}, which adds items to the list states {', '.join(grown)}"
            expected += ", because torchmetrics gathers them item by item"
            fix = f"Wrap the metric in lightning_ddp_losses.synced, or take batches of two rows or more ({_PADDED})."
        # 2. a collective, or a handshake
        elif not is_local:
            what = f"{step}, which exchanges something between ranks"
            fix = f"Take batches of two rows or more, drop_last=True, or a number of rows that the ranks divide ({_PADDED})."
        else:
            return
        ranks = [f"{count} batches" for count in sampler.counts]
        raise InputError(what, expected=expected, ranks=ranks, fix=fix, collective=True)

    def _uneven_sampler(self, trainer: pl.Trainer, args: tuple[Any, ...]) -> EvaluationSampler | None:
        """Return the sampler of the loader that a batch is from, if ranks have different numbers of its batches."""
        if len(args) < 2:
            return None
        for loader in _loaders_of(trainer, args)[1]:
            sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
            if isinstance(sampler, EvaluationSampler):
                counts = [_limited(trainer, count) for count in sampler.counts]
                # all ranks have this batch, and so raise the same error
                if args[1] < min(counts) < max(counts):
                    return sampler
        return None


def _name(trainer: pl.Trainer) -> str:
    stage = trainer.state.stage
    return "evaluation" if stage is None else str(stage.dataloader_prefix or stage.value).replace("val", "validation")


def _loaders_of(trainer: pl.Trainer, args: tuple[Any, ...]) -> tuple[int, list[Any]]:
    """Return the index and the loader of a step's batch. Index 0 and all loaders if their batches are combined."""
    loaders = current_loaders(trainer)
    if len(args) > 2 and isinstance(args[2], int):
        return args[2], loaders[args[2] : args[2] + 1]
    return 0, loaders


def _list_lengths(module: Any) -> dict[str, int]:
    """Return the lengths of list states that torchmetrics gathers item by item, by path."""
    found = {}
    for path, metric in module.named_modules():
        reductions = (
            {} if getattr(metric, "gathers_lists_at_once", False) else metrics_compat.state_reductions(metric) or {}
        )
        for name, reduction in reductions.items():
            value = getattr(metric, name, None)
            if isinstance(value, list) and getattr(reduction, "__name__", "") != "dim_zero_cat":
                found[f"{path}.{name}"] = len(value)
    return found


def _limited(trainer: pl.Trainer, count: int) -> int:
    """Return how many of a loader's batches the trainer runs."""
    limits = {"test": trainer.limit_test_batches, "predict": trainer.limit_predict_batches}
    limit = limits.get(_name(trainer), trainer.limit_val_batches)
    limited = int(count * limit) if isinstance(limit, float) else min(count, limit)
    return int(min(limited, trainer.num_sanity_val_steps)) if trainer.sanity_checking else limited


def _needs_no_sampler(trainer: pl.Trainer, loader: Any) -> bool:
    """Return whether a loader gets one of our samplers, or has one, so that Lightning adds none."""
    if trainer.training or not isinstance(loader, DataLoader):
        return False
    return _is_served(loader) or isinstance(torch_compat.inner_batch_sampler(loader), GlobalBatches)


def _is_served(loader: Any) -> bool:
    """Return whether a loader gets an ``EvaluationSampler``."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    batches = torch_compat.inner_batch_sampler(loader)
    if batches is not None and type(batches) is not BatchSampler:
        return False
    sampler = loader.sampler if batches is None else batches.sampler
    return not isinstance(sampler, DistributedSampler)
