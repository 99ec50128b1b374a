"""``use_global_sampler=True``: the batches of one process for training loaders that have no sampler of their own.

Lightning gives such a loader a ``DistributedSampler``: it shuffles also what the loader did not shuffle, pads the epoch with rows that
are seen twice, deals rows by turns, so that another number of ranks has other batches, and starts the epoch again when training
resumes. Here they get the batches of ``GlobalBatchSampler.shuffled``, cut over the ranks: each row once, the same global batches on any
number of ranks with the same global batch, and a place that is saved.

Legend: ``W`` ranks, ``G`` rows of a global batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.random_state import NUMPY_SEEDS
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.samplers.global_batch import GlobalBatches, batches_in_place, draw_of

_TITLE = "use_global_sampler=True"


class GlobalSamplerOption:
    """Replaces the samplers of a fit's training loaders, where the option is on.

    Args:
        enabled: The option.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._undo: Callable[[], object] | None = None
        self._is_said = False

    def install(self, trainer: pl.Trainer | None) -> None:
        """See the training loaders of a fit before Lightning does."""
        if not self._enabled or self._undo is not None or trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return
        self._undo = compat.replace_training_loaders(trainer, lambda loader: self._replacement(trainer, loader))

    def remove(self) -> None:
        """Leave the trainer as it came."""
        if self._undo is not None:
            self._undo()
        self._undo = None

    def _replacement(self, trainer: pl.Trainer, dataloader: object) -> object | None:
        """Return the loader with our batches; None where the user chose them.

        Raises:
            ConfigurationError: on every rank, for what cannot be sampled.
        """
        try:
            if _has_own_batches(dataloader):
                return None
            loader = _checked(trainer, dataloader)
        except Exception as error:
            handshake.raise_on_all_ranks(error, "train_dataloader")
        batches = _batches_for(loader)
        self._say_once(loader, batches)
        twin: object = compat.with_batch_sampler(loader, batches)
        return twin

    def _say_once(self, loader: DataLoader[Any], batches: GlobalBatches) -> None:
        if self._is_said:
            return
        self._is_said = True
        G = (loader.batch_size or 0) * process_groups.world_size()
        order = "rows are shuffled by a permutation of its own"
        if isinstance(loader.sampler, SequentialSampler):
            order = "rows come in their order, as the loader says"
        rank_zero_info(
            f"{_TITLE}: each step trains on the next {G} rows of one process's epoch ({order}, seed {batches.sampler.seed or 0}); "
            "this is another order than that of strategy='ddp'."
        )


def _has_own_batches(dataloader: object) -> bool:
    """Say whether the user, or a library, chose the batches of a loader: Lightning's way, or ``GlobalBatchSampler``'s, is left as it is."""
    if not isinstance(dataloader, DataLoader) or isinstance(dataloader.dataset, IterableDataset):
        return False
    if draw_of(dataloader) is not None:
        return True
    # 1. what torch makes of batch_size= (without one it makes no batches) and shuffle=
    sampler, data = dataloader.sampler, dataloader.dataset
    is_torchs = dataloader.batch_sampler is None or type(dataloader.batch_sampler) is BatchSampler
    is_torchs &= type(sampler) in (SequentialSampler, RandomSampler) and getattr(sampler, "data_source", None) is data
    if is_torchs and isinstance(sampler, RandomSampler):
        is_torchs = not sampler.replacement and len(sampler) == len(sampler.data_source)
    # 2. anything else
    if not is_torchs:
        batches = dataloader.batch_sampler
        is_plain = batches is None or type(batches) is BatchSampler
        name = type(sampler).__name__ if is_plain else type(batches).__name__
        rank_zero_warn(
            f"{_TITLE} leaves a training loader with a {name} of its own as it is. To cut its batches over the ranks, write "
            "DataLoader(..., batch_sampler=GlobalBatchSampler.batches(sampler, global_batch_size))."
        )
    return not is_torchs


def _checked(trainer: pl.Trainer, dataloader: object) -> DataLoader[Any]:
    """Return a loader whose rows can be drawn by number.

    Raises:
        ConfigurationError: naming what it is instead.
    """
    if not isinstance(dataloader, DataLoader):
        raise ConfigurationError(
            f"training loader under {_TITLE}",
            expected="torch's DataLoader",
            got=type(dataloader).__name__,
            fix="Leave use_global_sampler out: what makes its own batches has no sampler.",
        )
    if isinstance(dataloader.dataset, IterableDataset):
        raise ConfigurationError(
            f"data set under {_TITLE}",
            expected="one whose rows have numbers",
            got=f"{type(dataloader.dataset).__name__}, which is an IterableDataset",
            fix="Leave use_global_sampler out and let the data set yield each rank its own rows.",
        )
    if dataloader.batch_size is None:
        raise ConfigurationError(
            f"DataLoader under {_TITLE}",
            expected="a batch_size",
            got="batch_size=None",
            fix="Give the rows of one rank.",
        )
    if not compat.injects_distributed_sampler(trainer):
        raise ConfigurationError(
            _TITLE,
            expected="a Trainer that gives loaders a sampler",
            got="Trainer(use_distributed_sampler=False)",
            fix="Leave one of the two options out.",
        )
    return dataloader


def _batches_for(loader: DataLoader[Any]) -> GlobalBatches:
    assert loader.batch_size is not None
    # where Lightning's DistributedSampler has it from
    seed = os.environ.get("PL_GLOBAL_SEED")
    return batches_in_place(
        len(loader.dataset),  # type: ignore[arg-type]
        loader.batch_size,
        shuffled=isinstance(loader.sampler, RandomSampler),
        drop_last=loader.drop_last,
        seed=None if seed is None else int(seed) % NUMPY_SEEDS,
        title=_TITLE,
    )
