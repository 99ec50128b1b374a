"""Splits the batches that one process would draw over the ranks, in rank order.

Lightning replaces the shuffling of a custom training sampler under DDP: batches with M rows per class are silently destroyed, and
a sampler that draws at random draws differently on each rank (rows drawn twice, rows never drawn). There are two cases that it does not
modify, and therefore two forms:

* A ``DistributedSampler`` passed as ``sampler=`` is not replaced. It yields indices and the DataLoader splits them into
  batches of a fixed size, so all full batches are divided evenly: G is W times the DataLoader's batch size.
* A ``BatchSampler`` passed as ``batch_sampler=`` makes the batches itself, of any size, but is *rebuilt* as
  ``type(b)(sampler, batch_size=b.batch_size, drop_last=...)`` around a sampler of Lightning's, in prediction always. Ours
  stores the draw in its ``batch_size``, the only argument that every way of rebuilding keeps, and ignores the other arguments.

One class cannot be both: a ``DistributedSampler`` yields indices, a ``BatchSampler`` lists.

An order that is derived only from the seed (`ShuffledDraw`) is not exchanged, because every rank computes it. The permutation of epoch
``e`` is ``torch.randperm`` from ``seed + e``. It is stored as a tensor (4 bytes per row), and each batch is converted to a list when it is
read. A resumed epoch starts directly at its position.

Legend: ``n`` rows of the dataset, ``W`` ranks, ``G`` rows of a global batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler

from lightning_ddp_losses.core.random_state import NUMPY_SEEDS
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.fingerprint import hash_bytes
from lightning_ddp_losses.distributed.raw_collectives import host_memory
from lightning_ddp_losses.errors import ConfigurationError, expect, expect_count
from lightning_ddp_losses.samplers.global_draw import GlobalDraw, share


class GlobalBatchSampler(DistributedSampler[Any]):
    """Distributes the batches of one process over the ranks: rank r gets the r-th contiguous part of each.

    Equivalent to: ``DataLoader(data, batch_size=W * local_batch_size, sampler=sampler)`` in one process. Its k-th batch
    is the concatenation over ranks of their k-th batches. In epoch ``e`` a random sampler draws the rows that it draws in
    one process after ``seed_everything(seed + e)``, for any W.

    Pass an instance to ``DataLoader(sampler=...)``. If a batch may not be divisible by the number of ranks, or if the sampler
    makes the batches, use ``GlobalBatchSampler.batches`` as ``DataLoader(batch_sampler=...)``. Lightning does not modify either,
    with ``use_distributed_sampler`` True or False, in fit, validate, test and predict.

    For a sampler with M rows per class, M grows with the ranks if ``local_batch_size`` is constant: M x labels must be at least
    ``W * local_batch_size``, which is the ``batch_size`` to pass to the sampler, and must be divisible by M.

    Every generator (torch, numpy, Python, generators held by the sampler) is seeded for the draw and restored afterwards:
    sampling does not change the random numbers of training, and does not depend on them. Lists and arrays that the sampler
    shuffles in place are restored too: an epoch that is set again has the same order. Lightning calls ``set_epoch``.
    Otherwise, an epoch that was read to its end is followed by the next. Before torch.distributed is initialised the
    world is one process, also for ``len``.

    Args:
        sampler: Sampler that one process would use, over the whole dataset, equal on every rank: a sampler of torch or
            pytorch-metric-learning, or any iterable over indices that has a length.
        local_batch_size: ``batch_size`` of the DataLoader. The two must be equal (``DDPLossStrategy`` rejects other values).
        drop_last: Whether to drop a last global batch that is not full. Otherwise its rows are distributed as evenly as possible. Set it
            here and not on the DataLoader, which may drop a batch on some ranks only.
        seed: 0 to 2**32 - 1. If None, ``torch.initial_seed()`` of rank 0, which ``seed_everything`` sets, or the seed of a loaded state.

    A run that is resumed under ``DDPLossStrategy`` continues with the next global batch, including in the middle of an epoch, with
    workers, and on another number of ranks (also ``devices=1``) with the same global batch. Inside an accumulation window it continues
    with the window's first micro-batch. Random numbers of training (dropout) also continue, on the same number of ranks. Random numbers of
    workers (augmentation) do not continue in the middle of an epoch.

    Communication: two handshakes per epoch, at its first batch. All ranks must iterate together.

    Raises:
        ConfigurationError: for a missing sampler, one without length or already divided by rank, or sizes that do not match.
        InputError: for a batch with fewer rows than ranks, or batches in place of indices.
        RankMismatchError: on every rank, if the ranks' samplers drew different indices.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from pytorch_metric_learning.samplers import MPerClassSampler
        >>> from lightning_ddp_losses.samplers import GlobalBatchSampler
        >>> labels = torch.arange(48) % 6
        >>> data = TensorDataset(torch.randn(48, 8), labels)
        >>> four_per_class = MPerClassSampler(labels, m=4, batch_size=12, length_before_new_iter=48)
        >>> loader = DataLoader(data, batch_sampler=GlobalBatchSampler.batches(four_per_class, 12))
        >>> [sorted(torch.bincount(y, minlength=6).tolist()) for _, y in loader]
        [[0, 0, 0, 4, 4, 4], [0, 0, 0, 4, 4, 4], [0, 0, 0, 4, 4, 4], [0, 0, 0, 4, 4, 4]]
        >>> weighted = torch.utils.data.WeightedRandomSampler(torch.ones(48), 48)
        >>> len(DataLoader(data, batch_size=8, sampler=GlobalBatchSampler(weighted, 8)))
        6
    """

    def __init__(
        self, sampler: Any, local_batch_size: int, *, drop_last: bool = False, seed: int | None = None
    ) -> None:
        is_indices, got = not isinstance(sampler, BatchSampler), type(sampler).__name__
        fix = "Write DataLoader(batch_sampler=GlobalBatchSampler.batches(sampler))."
        expect(is_indices, "GlobalBatchSampler as sampler=", expected="a sampler of indices", got=got, fix=fix)
        self.local_batch_size = local_batch_size
        self.draw = GlobalDraw(sampler, local_batch_size=local_batch_size or 0, drop_last=drop_last, seed=seed)
        # rank and world size are placeholders for the base class, and are read again on each use
        super().__init__(sampler, num_replicas=1, rank=0, shuffle=False, seed=seed or 0, drop_last=drop_last)
        self._read_ranks()

    @property
    def epoch(self) -> int:
        """The epoch that is drawn next."""
        return self.draw.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.draw.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        self._read_ranks()
        return iter(self.draw)

    def __len__(self) -> int:
        self._read_ranks()
        return self.draw.rows()

    def latest_batches(self) -> list[list[Any]]:
        """Return this rank's part of each batch of the most recently drawn epoch, empty before the first."""
        return self.draw.latest_batches()

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the position of training, the same on every rank that trained. Save rank 0's. ``batches`` has this method too.

        Args:
            batches: Number of trained batches of this epoch. If None, the batches that were handed out, which is correct without workers.
                A DataLoader with workers has drawn more.

        Returns:
            ``epoch``, ``seed`` and ``rows`` (of this epoch, over all ranks), and entries that are compared on loading: ``sampler``,
            ``length``, ``global_batch_size``, ``drop_last``, ``digest``. Only numbers and texts.
        """
        return self.draw.state_dict(batches)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the batch after the saved position, on any number of ranks with the same global batch.

        Load it on every rank, before a DataLoader creates its iterator. The epoch is drawn again from its seed and skipped forward, at
        the cost of one draw. ``len`` remains the length of the whole epoch. ``DDPLossStrategy`` saves and loads it in its checkpoints.

        Args:
            state: Result of ``state_dict``.

        Raises:
            InputError: for a sampler, length, seed or global batch that differs from the saved one, naming both.
        """
        self.draw.load_state_dict(state)

    def _read_ranks(self) -> None:
        self.num_replicas, self.rank = process_groups.world_size(), process_groups.rank()

    @staticmethod
    def batches(
        sampler: Any,
        global_batch_size: int | None = None,
        *,
        drop_last: bool = False,
        seed: int | None = None,
    ) -> BatchSampler:
        """Return the form for ``DataLoader(batch_sampler=...)``: batches of any size, divided as evenly as possible.

        Args:
            sampler: A sampler of indices together with ``global_batch_size``, or a sampler of batches without it.
            global_batch_size: Rows of a global batch, G, the same for any number of ranks.
            drop_last: Whether to drop a last batch of fewer than G rows. In prediction it is always kept, as by Lightning in one
                process.
            seed: Seed, as above.

        Returns:
            A ``BatchSampler`` over this rank's parts. Its ``batch_size`` is G, its length the number of batches, the same
            on every rank and before torch.distributed is initialised.
        """
        if type(sampler) is BatchSampler:
            expect(
                global_batch_size is None and not drop_last,
                "GlobalBatchSampler.batches of a BatchSampler",
                expected="no global_batch_size or drop_last in addition to its own",
                got=f"global_batch_size={global_batch_size}, drop_last={drop_last}",
                fix="Set them on one of the two.",
            )
            sampler, global_batch_size, drop_last = sampler.sampler, sampler.batch_size, sampler.drop_last
        is_known, what = global_batch_size is not None or not drop_last, "drop_last of GlobalBatchSampler.batches"
        expected = "False if the sampler makes the batches"
        expect(is_known, what, expected=expected, got=True, fix="Leave it to the sampler.")
        draw = GlobalDraw(sampler, global_batch_size=global_batch_size, drop_last=drop_last, seed=seed)
        return GlobalBatches.of(draw)

    @staticmethod
    def shuffled(length: int, global_batch_size: int, *, seed: int, drop_last: bool = False) -> BatchSampler:
        """Shuffle each epoch for ``DataLoader(batch_sampler=...)``, with 4 bytes per row. A resumed epoch starts at its position.

        Every rank computes the same permutation of the rows, ``torch.randperm`` from ``seed + epoch``, so indices are not exchanged.

        Args:
            length: Rows of the dataset.
            global_batch_size: Rows of a global batch, G, the same for any number of ranks.
            seed: 0 to 2**32 - 1. Each epoch has a different order.
            drop_last: Whether to drop a last batch of fewer than G rows.

        Returns:
            A ``BatchSampler``, as ``batches``.

        Communication: one handshake per epoch.
        """
        title = "GlobalBatchSampler.shuffled"
        expect_count(f"{title}: length", length)
        expect_count(f"{title}: global_batch_size", global_batch_size)
        expect(
            seed is not None,
            f"{title}: seed",
            expected="a whole number",
            got=seed,
            fix="Give a seed, the same on every rank.",
        )
        order = Permutation(length)
        draw = ShuffledDraw(order, global_batch_size=global_batch_size, drop_last=drop_last, seed=seed, title=title)
        return GlobalBatches.of(draw)


class _CarriedSize(int):
    """A batch size that keeps its draw when Lightning rebuilds the batch sampler."""

    draw: GlobalDraw


class GlobalBatches(BatchSampler):
    """Batches of this rank, from ``GlobalBatchSampler.batches``.

    Args:
        sampler: Ignored: Lightning passes a sampler of its own, which would divide the rows a second time.
        batch_size: The size that carries the draw.
        drop_last: False keeps a last batch that was to be dropped (Lightning in prediction).
    """

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        draw = getattr(batch_size, "draw", None)
        if not isinstance(draw, GlobalDraw):
            raise ConfigurationError(
                "batch_size of GlobalBatches",
                expected="the size that GlobalBatchSampler.batches gave it",
                got=repr(batch_size),
                fix="Write GlobalBatchSampler.batches(sampler, global_batch_size).",
            )
        if draw.drop_last and not drop_last:
            draw = draw.keeping_last()
        super().__init__(draw, batch_size, draw.drop_last)
        self.sampler: GlobalDraw = draw  # Lightning calls its set_epoch

    @classmethod
    def of(cls, draw: GlobalDraw) -> GlobalBatches:
        """Return the batches of a draw."""
        declared = getattr(draw.source, "batch_size", None)
        size = _CarriedSize(draw.global_batch_size or (declared if isinstance(declared, int) and declared > 0 else 1))
        size.draw = draw
        return cls(draw, batch_size=size, drop_last=draw.drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch, as Lightning does."""
        self.sampler.set_epoch(epoch)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the position of training, as ``GlobalBatchSampler.state_dict``."""
        return self.sampler.state_dict(batches)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position, as ``GlobalBatchSampler.load_state_dict``."""
        self.sampler.load_state_dict(state)

    def __iter__(self) -> Iterator[list[Any]]:
        return self.sampler.batches()

    def __len__(self) -> int:
        return self.sampler.count()


def batches_in_place(loader: DataLoader[Any], *, seed: int | None, title: str) -> GlobalBatches:
    """Return the batches over all ranks for a DataLoader without a custom sampler, whose ``batch_size`` counts the rows of one rank.

    Args:
        loader: The DataLoader, which determines whether each epoch is shuffled.
        seed: Seed of ``seed_everything``. None if it was not called.
        title: Name in errors.
    """
    kind = Permutation if isinstance(loader.sampler, RandomSampler) else NaturalOrder
    order, rows, drop_last = kind(len(loader.dataset)), loader.batch_size, loader.drop_last  # type: ignore[arg-type]
    draw = ShuffledDraw(order, title=title, local_batch_size=rows, drop_last=drop_last, seed=seed)
    # the name that the user passed
    draw.local_name = "batch_size"
    draw.seed_fix = "Call seed_everything({seed}), or leave it out, which takes over the saved seed."
    return GlobalBatches.of(draw)


def draw_of(dataloader: object) -> GlobalDraw | None:
    """Return the draw of a loader's global sampler, or None if it does not use one."""
    batch_sampler, sampler = getattr(dataloader, "batch_sampler", None), getattr(dataloader, "sampler", None)
    if isinstance(batch_sampler, GlobalBatches):
        return batch_sampler.sampler
    return sampler.draw if isinstance(sampler, GlobalBatchSampler) else None


# ---------------------------------------------------------------------- orders derived from the seed


class Permutation(Sampler[int]):
    """The numbers 0 to n - 1, in a different order for each seed.

    Args:
        length: Number of rows, n.

    Attributes:
        dtype: The smallest integer dtype for a row number.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.dtype = torch.int32 if length < (1 << 31) else torch.int64

    def __len__(self) -> int:
        return self.length

    def order(self, seed: int) -> Tensor:
        """Return the order for a seed.

        Returns:
            (n,), int32 if the numbers fit.
        """
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(self.length, generator=generator, dtype=self.dtype)


class NaturalOrder(Permutation):
    """The numbers 0 to n - 1 in ascending order, for every seed."""

    def order(self, seed: int) -> Tensor:
        """Return the numbers in ascending order."""
        return torch.arange(self.length, dtype=self.dtype)


@dataclass(frozen=True)
class LocalBatches(Sequence[list[int]]):
    """This rank's part of each batch of an epoch. A batch is created when it is read.

    Attributes:
        order: Row numbers of the epoch, over all ranks.
        global_batch_size: Rows of a global batch, G. The last batch may have fewer.
        world_size: Number of ranks.
        rank: Number of this rank.
    """

    order: Tensor
    global_batch_size: int
    world_size: int
    rank: int

    def __len__(self) -> int:
        return math.ceil(len(self.order) / self.global_batch_size)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = number * self.global_batch_size
        batch = self.order[start : start + self.global_batch_size]
        return batch[share(len(batch), self.world_size, self.rank)].tolist()


class ShuffledDraw(GlobalDraw):
    """The batches of an order that is derived only from the seed.

    Args:
        sampler: Order of the rows.
        global_batch_size: Rows of a global batch, G.
        local_batch_size: Rows of a rank's batch. G is W times this.
        drop_last: Whether to drop a last batch of fewer than G rows.
        seed: Seed of epoch 0. Epoch ``e`` has ``seed + e``. If None, 0, or the seed of a loaded state.
        title: Name in errors.
    """

    source: Permutation

    def _first_seed(self) -> int:
        return 0  # the ranks do not exchange a seed

    def _draw_together(self, epoch: int) -> Sequence[list[Any]]:
        W, rank = process_groups.world_size(), process_groups.rank()
        place, G = (epoch, W, rank), self._global_rows()
        assert G is not None
        if self._kept is None or self._kept[0] != place:
            full, rest = self._cut(G)
            order = self.source.order((self._offer() + epoch) % NUMPY_SEEDS)[: full * G + rest]
            digest = hash_bytes(host_memory(order)).to_bytes(8, "little", signed=True)
            self._kept = (place, digest, LocalBatches(order, G, W, rank))
            self._sizes = [G] * full + [rest] * bool(rest)
        _, digest, batches = self._kept
        # seed and length determine the order. Its hash detects ranks with other releases of torch
        handshake.all_gather(self.title, {**self._must_match(epoch), "order": digest.hex()})
        return batches
