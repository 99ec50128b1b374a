"""The batches of an accumulation window, read before its first step, and what the module's ``loss_counts`` counts in them.

A window whose counts are known divides by the right number from its first backward on. They are sums over all its batches, so
these are read when the window opens. A buffer around the fit's loader keeps them, and Lightning's fetcher gets them one by one. What the
classes inside the buffer note when a batch is read (states of loaders, ends of epochs) is by the number of the batch, or moves with it.

Legend: ``A`` is ``accumulate_grad_batches``. A window has A batches, or what is left of the epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from lightning_ddp_losses.core import lightning_compat, torch_compat
from lightning_ddp_losses.distributed.window_terms import Counts, add_counts
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.strategies.fit_part import Fit

LOSS_COUNTS = "loss_counts"
"""Name of the method of a module: a batch -> the counts of its losses."""

_TRAINED_OR_PREFETCHED = 2  # batches that Lightning has got and that are not trained on yet


def counts_first(fit: Fit) -> bool:
    """Return whether the counts of windows are known before: the class of the module has the method, and Lightning runs the steps."""
    return callable(getattr(type(fit.module), LOSS_COUNTS, None)) and fit.module.automatic_optimization


class _Batch(NamedTuple):
    """A batch that was read.

    Attributes:
        fetched: The batch and its numbers, as the combined loader gives them.
        counts: What ``loss_counts`` returned for it.
        versions: How often its tensors were written to.
        lacks_rows: Whether some rank lacks rows in it. None if this is not needed.
    """

    fetched: Any
    counts: object
    versions: list[int]
    lacks_rows: bool | None


def _versions_in(fetched: Any) -> list[int]:
    tensors = [leaf for leaf in torch_compat.tree_leaves(fetched) if isinstance(leaf, Tensor)]
    return [torch_compat.tensor_version(tensor) for tensor in tensors if not tensor.is_inference()]


class WindowLoader(CombinedLoader):
    """A fit's combined loader that reads the batches of a window ahead. ``as_combined`` adds this class to the loader's own class.

    Attributes:
        fit: The fit.
    """

    fit: Fit
    _ahead: deque[_Batch]  # Lightning's fetcher has not got them
    _handed_over: deque[_Batch]  # the latest ones
    _has_ended = False

    def __iter__(self) -> Any:
        self._ahead = deque()
        self._handed_over = deque(maxlen=_TRAINED_OR_PREFETCHED)
        self._has_ended = False
        return super().__iter__()

    def __next__(self) -> Any:
        if not self._ahead and not self._read_one():
            raise StopIteration
        batch = self._ahead.popleft()
        self._refuse_overwritten([batch])
        self._handed_over.append(batch)
        if batch.lacks_rows is not None:
            self._lacking().append(batch.lacks_rows)
        return batch.fetched

    def _read_one(self) -> bool:
        """Read a batch and count in it, before Lightning's hooks change it. Return whether there was one."""
        if self._has_ended:
            return False
        try:
            fetched = super().__next__()
        except StopIteration:
            self._has_ended = True
            return False
        counts = None
        with self.fit.raise_on_all_ranks(LOSS_COUNTS):
            if fetched[0] is not None:  # fetched ahead by a fit that ends before it is used
                counts = getattr(self.fit.module, LOSS_COUNTS)(fetched[0])
        lacking = self._lacking()
        lacks_rows = lacking.pop() if lacking else None
        self._ahead.append(_Batch(fetched, counts, _versions_in(fetched), lacks_rows))
        return True

    def _lacking(self) -> Any:
        """Return what ``CommonEnds`` notes of the latest batches."""
        return getattr(self, "lacks_rows", ())

    def _refuse_overwritten(self, batches: Iterable[_Batch]) -> None:
        """Refuse a loader that writes the next batch into the memory of one that is still to be trained on."""
        with self.fit.raise_on_all_ranks("a training loader"):
            expect(
                all(batch.versions == _versions_in(batch.fetched) for batch in batches),
                "a batch of an accumulation window, whose batches are read ahead",
                expected="memory of its own",
                got="tensors that the loader has written to again",
                fix="Let the data set make new tensors for each batch, or leave out loss_counts.",
                error=InputError,
            )

    def counts_of_window(self, batches: float) -> tuple[Counts, int]:
        """Return this rank's counts in the batch that is trained on and the next ones, and how many these are.

        Args:
            batches: Largest number of batches in the window. The epoch may end earlier.

        Raises:
            InputError: on every rank, as ``add_counts``, and for a loader that reuses memory.

        Communication: only the communication of reading the batches.
        """
        # 1. the batch that is trained on, and one that Lightning has fetched ahead. Its hooks may have written to them
        number = 1 + lightning_compat.prefetched_batches(self.fit.trainer.fit_loop)
        handed_over = list(self._handed_over)[-number:]
        handed_over = [batch._replace(versions=_versions_in(batch.fetched)) for batch in handed_over]
        # 2. the remaining batches of the window
        while number + len(self._ahead) < batches and self._read_one():
            pass
        self._refuse_overwritten(handed_over)
        # 3. their counts
        read = [*handed_over, *self._ahead]
        by_batch = [batch.counts for index, batch in enumerate(read) if index < batches]
        with self.fit.raise_on_all_ranks(LOSS_COUNTS):
            return add_counts(LOSS_COUNTS, by_batch), len(by_batch)
