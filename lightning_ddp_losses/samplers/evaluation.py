"""Distributes each row of an evaluation exactly once.

No padding (`EvaluationSampler`): torch's ``DistributedSampler`` repeats rows until their number is divisible by the ranks, and every metric
counts repeated rows twice. Without padding ranks may have different numbers of batches, and a collective in the step (a global loss, a
logged value, DDP's buffers) hangs. Both problems are avoided by splitting the order of one process into *global batches*. Every rank
receives a contiguous part of each:

* Step ``k`` covers the rows ``k W B`` to ``(k + 1) W B``, rank after rank, like one process in a batch of ``W B`` rows.
* The rows that remain for the last step are shared as evenly as possible.
* If there are fewer of them than ranks, they are supplemented with rows from the previous batch. A rank's batch then has one row less.
* Only if that batch cannot provide any (``B = 1``), the ranks ``rest`` and above have one batch less.

The inverse is ``samplers/predictions``.

Legend: ``W`` ranks, ``B`` rows of a rank's batch, ``N`` rows of the dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import ConfigurationError, InputError, expect
from lightning_ddp_losses.samplers.global_batch import GlobalBatchSampler
from lightning_ddp_losses.samplers.global_draw import share
from lightning_ddp_losses.samplers.seeded_draw import draw_digest, draw_seeded


class EvaluationSampler(DistributedSampler[Any]):
    """This rank's rows of another sampler's draw, with each row on one rank.

    The order is the sampler's order. A random sampler draws epoch ``e`` from ``seed + e``, so that all ranks draw the same.
    (Rank and world size are read when this object is constructed.)

    Args:
        sampler: Sampler that one process would use, with a length.
        batch_size: Rows of a rank's batch, B. None if the loader does not make batches.
        drop_last: Whether to drop a last global batch of fewer than ``W B`` rows.
        seed: Seed, as in ``DistributedSampler``.

    Raises:
        ConfigurationError: for a sampler without a length.
        InputError: if the sampler draws a number of rows that differs from its length.

    Communication: none.
    """

    def __init__(self, sampler: Any, batch_size: int | None, *, drop_last: bool = False, seed: int = 0) -> None:
        rows = len_of(sampler)
        W, rank = process_groups.world_size(), process_groups.rank()
        super().__init__(sampler, num_replicas=W, rank=rank, shuffle=False, seed=seed, drop_last=drop_last)
        self.source, self.batch_size, self.global_rows = sampler, batch_size or 1, rows
        self.num_samples, self.total_size = len(self), rows
        if drop_last:
            self.total_size = self._steps * W * self.batch_size
        self._drawn: tuple[int, Sequence[Any]] | None = None  # the most recently drawn epoch, and its order

    # ------------------------------------------------------------------ numbers

    @property
    def counts(self) -> list[int]:
        """Number of batches of each rank."""
        rows_of_last = self._global_batch(self._steps - 1)[1] if self._steps else 0
        return [self._steps - (0 < rows_of_last <= rank) for rank in range(self.num_replicas)]

    def __len__(self) -> int:
        # only the last two global batches may have different sizes
        first = max(0, self._steps - 2)
        sizes = [len(self._local_part(*self._global_batch(step))) for step in range(first, self._steps)]
        return first * self.batch_size + sum(sizes)

    @property
    def _steps(self) -> int:
        """Return the number of global batches."""
        full, rest = divmod(self.global_rows, self.num_replicas * self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def _global_batch(self, step: int) -> tuple[int, int]:
        """Return the first row of a global batch, and its number of rows."""
        W, size = self.num_replicas, self.num_replicas * self.batch_size
        full, rest = divmod(self.global_rows, size)
        start, rows = step * size, size
        if step == full:
            rows = rest
        # too few rows for the last step: each rank gets one of these, or of the preceding rows
        if 0 < rest < W and full and self.batch_size > 1 and not self.drop_last:
            lent = W - rest
            if step == full - 1:
                rows -= lent
            elif step == full:
                start, rows = start - lent, rows + lent
        return start, rows

    def _local_part(self, start: int, rows: int) -> range:
        """Return the positions of this rank's part of a global batch in the order of all rows."""
        return range(start, start + rows)[share(rows, self.num_replicas, self.rank)]

    # ------------------------------------------------------------------ rows

    @property
    def is_sequential(self) -> bool:
        """Whether rows are in the order of the dataset, so that random numbers are not needed."""
        return type(self.source) is SequentialSampler

    def order(self) -> Sequence[Any]:
        """Return the draw of one process in this epoch, the same on every rank."""
        if self.is_sequential:
            return range(self.global_rows)
        if self._drawn is None or self._drawn[0] != self.epoch:
            drawn = draw_seeded(self.source, self.seed + self.epoch)
            what = f"rows that {type(self.source).__name__} drew for an evaluation"
            expected = f"{self.global_rows}, its length when the loader was set up"
            is_whole, fix = len(drawn) == self.global_rows, "Let its __len__ return the rows of every epoch."
            expect(is_whole, what, expected=expected, got=len(drawn), fix=fix, error=InputError)
            self._drawn = (self.epoch, drawn)
        return self._drawn[1]

    def digest(self) -> str:
        """Return a hash of this epoch's order: ranks that draw differently would repeat some rows and skip others."""
        return draw_digest([list(self.order())]).hex()

    def batches(self) -> Iterator[list[Any]]:
        """Yield this rank's batches."""
        order = self.order()
        for step in range(self.counts[self.rank]):
            yield [order[place] for place in self._local_part(*self._global_batch(step))]

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches():
            yield from batch


def len_of(sampler: Any) -> int:
    """Return the number of rows that a sampler draws.

    Raises:
        ConfigurationError: for a sampler without a length.
    """
    try:
        return len(sampler)
    except TypeError:
        what = f"{type(sampler).__name__} in an evaluation that counts each row once"
        fix = "Give it __len__, or set evaluation='padded'."
        raise ConfigurationError(what, expected="a sampler with a length", got="none", fix=fix) from None


class EvaluationBatches(BatchSampler):
    """The batches of an ``EvaluationSampler``, for a DataLoader.

    Args:
        sampler: The sampler.
    """

    def __init__(self, sampler: EvaluationSampler) -> None:
        super().__init__(sampler, sampler.batch_size, sampler.drop_last)
        self.sampler: EvaluationSampler = sampler  # Lightning calls its set_epoch

    def __iter__(self) -> Iterator[list[Any]]:
        return self.sampler.batches()

    def __len__(self) -> int:
        return self.sampler.counts[self.sampler.rank]


def repeated_rows(loader: DataLoader[Any]) -> int:
    """Return the number of rows that a padding sampler repeats, over all ranks."""
    # Lightning builds the user's batch sampler around its own sampler
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    is_exact = isinstance(sampler, (EvaluationSampler, GlobalBatchSampler))  # ranks may have different numbers of rows
    if is_exact or not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return 0
    try:
        rows = len(sampler.dataset)  # type: ignore[arg-type]
    except TypeError:
        return 0
    return max(0, len(sampler) * sampler.num_replicas - rows)
