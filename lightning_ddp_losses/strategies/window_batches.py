"""The batches of an accumulation window, read before its first step, and what the module's ``loss_counts`` counts in them.

A window whose counts are known divides by the right number from its first backward on. The counts are those of all its batches, so these
are read when the window opens. They wait in a buffer around the fit's loader, and Lightning's fetcher gets them one by one. What the
classes inside the buffer note when a batch is read (states of loaders, ends of epochs) is by the number of the batch, or moves with it.

Legend: ``A`` is ``accumulate_grad_batches``. A window has A batches, or what is left of the epoch.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from lightning.pytorch.utilities import CombinedLoader

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed.window_terms import Counts, add_counts
from lightning_ddp_losses.strategies.fit_part import Fit

LOSS_COUNTS = "loss_counts"
"""Name of the method of a module: a batch -> the counts of its losses."""


def counts_first(fit: Fit) -> bool:
    """Return whether the counts of windows are known before: the class of the module has the method, and Lightning runs the steps."""
    return callable(getattr(type(fit.module), LOSS_COUNTS, None)) and fit.module.automatic_optimization


class WindowLoader(CombinedLoader):
    """A fit's combined loader that reads the batches of a window ahead. ``as_combined`` adds this class to the loader's own class.

    Attributes:
        fit: The fit.
    """

    fit: Fit
    _ahead: deque[
        tuple[Any, bool | None]
    ]  # batches that the fetcher has not got, and whether some rank lacks rows in them
    _counts: dict[int, Any]  # by the number of a batch of this iterator, from the one that trains on
    _read = 0  # batches of this iterator
    _has_ended = False

    def __iter__(self) -> Any:
        self._ahead = deque()
        self._counts = {}
        self._read = 0
        self._has_ended = False
        return super().__iter__()

    def __next__(self) -> Any:
        if not self._ahead and not self._read_one():
            raise StopIteration
        batch, lacks_rows = self._ahead.popleft()
        if lacks_rows is not None:
            self._lacking().append(lacks_rows)
        return batch

    def _read_one(self) -> bool:
        """Read a batch and count in it, before Lightning's hooks change it. Return whether there was one."""
        if self._has_ended:
            return False
        try:
            fetched = super().__next__()
        except StopIteration:
            self._has_ended = True
            return False
        lacking = self._lacking()
        self._ahead.append((fetched, lacking.pop() if lacking else None))
        batch = fetched[0]
        with self.fit.raise_on_all_ranks(LOSS_COUNTS):
            # None was fetched ahead by a fit that ends before
            self._counts[self._read] = None if batch is None else getattr(self.fit.module, LOSS_COUNTS)(batch)
        self._read += 1
        return True

    def _lacking(self) -> Any:
        """Return what ``CommonEnds`` notes of the latest batches."""
        return getattr(self, "lacks_rows", ())

    def counts_of_window(self, batches: float) -> Counts:
        """Return this rank's counts in the batch that is trained on and the next ones.

        Args:
            batches: The most that the window can have. The epoch may end before.

        Raises:
            InputError: on every rank, as ``add_counts``.

        Communication: that of reading the batches.
        """
        # 1. the batch that is trained on, of those that were read
        first = self._read - len(self._ahead) - compat.prefetched_batches(self.fit.trainer.fit_loop) - 1
        # 2. the other batches of the window
        while self._read < first + batches and self._read_one():
            pass
        # 3. their counts. Those of a former window are not needed any more
        numbers = [number for number in sorted(self._counts) if first <= number < first + batches]
        by_batch = [self._counts[number] for number in numbers]
        self._counts = {number: counts for number, counts in self._counts.items() if number >= first + batches}
        with self.fit.raise_on_all_ranks(LOSS_COUNTS):
            return add_counts(LOSS_COUNTS, by_batch)
