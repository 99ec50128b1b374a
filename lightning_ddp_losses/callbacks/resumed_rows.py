"""Rows that a resumed run sees again in the epoch in which it was saved, and others that it therefore never sees.

Lightning restores the number of batches of an epoch, and most samplers begin the epoch again: the run trains on its first rows once more
and ends before its last. A checkpoint keeps a sketch of the rows that were seen (the smallest of their hashes, of all ranks together); it
is compared with the rows after the resume when the epoch is over.

Drawing with replacement, and data that hold the same row twice, repeat rows within each part as often as between the two. Rows of batches
that the run does again (an accumulation window that had not stepped) are expected a second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_ddp_losses.callbacks.batch_reader import SKETCH
from lightning_ddp_losses.callbacks.findings import Finding

KEY = "batch_check"
"""Key of a checkpoint under which the sketch is."""

_COUNT_BITS = 3  # the low bits of a hash hold how often it came
_MIN_REPEATED_ROWS = 4
_MIN_SHARE = 0.1  # of the rows after the resume
_FIX = (
    "Take a sampler that resumes at its place, GlobalBatchSampler or DDPLossStrategy(use_global_sampler=True), or save at the end of "
    "epochs."
)


class SeenRows(NamedTuple):
    """Holds what all ranks have read of an epoch.

    Attributes:
        epoch: The epoch.
        batches: How many of its batches ended before this.
        rows: Rows that were read.
        sketch: The smallest of their hashes, each with how often it came in the low two bits.
    """

    epoch: int
    batches: int
    rows: int
    sketch: list[int]


class ResumedRows:
    """Compares the rows before and after a resume, in the epoch that was saved in the middle."""

    def __init__(self) -> None:
        self._before: SeenRows | None = None  # what the checkpoint says; None: nothing was loaded, or it was judged
        self._first_batch = -1  # the first after the resume

    def save_(self, checkpoint: dict[str, Any], epoch: int, batches: int, sketches: Sequence[Sequence[int]]) -> None:
        """Write what was seen of an epoch into a checkpoint.

        Args:
            checkpoint: What will be saved.
            epoch: The epoch.
            batches: How many of its batches have ended.
            sketches: By rank, as for ``judge``.
        """
        parts = list(sketches)
        # a run that was resumed in this epoch has seen what came before, too
        if self._before is not None and self._before.epoch == epoch:
            parts.append([self._before.rows, *self._before.sketch])
        seen = merged_sketch(parts)
        if seen.rows:
            checkpoint[KEY] = seen._replace(epoch=epoch, batches=batches)._asdict()

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Read what a checkpoint says."""
        saved = checkpoint.get(KEY)
        self._before = None if saved is None else SeenRows(**saved)

    def see_batch(self, epoch: int, batch_idx: int) -> None:
        """Note where the run goes on."""
        if self._before is not None and self._first_batch < 0:
            self._first_batch = batch_idx
            # a new epoch begins, or this one does from its start: its rows are to come again
            if epoch != self._before.epoch or batch_idx == 0:
                self._before = None

    def judge(self, sketches: Sequence[Sequence[int]], batches: int) -> list[Finding]:
        """Compare the two parts of an epoch that is over; called with nothing read where training is only about to begin.

        Args:
            sketches: By rank: rows read after the resume, and the smallest of their hashes, padded with zeros.
            batches: The batches that have ended in this epoch, those before the resume too.
        """
        before = self._before
        after = merged_sketch(sketches)
        if before is None or self._first_batch < 0 or not after.rows:
            return []
        self._before = None
        # 1. up to this hash both sketches are complete
        counts_before, counts_after = _counts(before.sketch), _counts(after.sketch)
        edge = 1 << 62
        for counts in (counts_before, counts_after):
            if len(counts) == SKETCH:
                edge = min(edge, max(counts))
        late = {value for value in counts_after if value <= edge}
        repeated = late & counts_before.keys()
        within = [v for counts in (counts_before, counts_after) for v, n in counts.items() if v <= edge and n > 1]
        # 2. batches that are done again on purpose
        again = max(0, before.batches - self._first_batch)
        expected = min(1.0, again / max(1, batches - self._first_batch))
        limit = _MIN_REPEATED_ROWS - 1 + (_MIN_SHARE + 1.5 * expected) * len(late)
        if len(repeated) <= limit or len(repeated) <= 4 * len(within):
            return []
        share = round(100 * len(repeated) / len(late))
        return [
            Finding(
                "F83",
                f"about {share}% of the rows after the resume, at batch {self._first_batch} of epoch {before.epoch}, were trained on "
                "before it in this epoch; as many others come in none of its batches",
                "each row once in an epoch",
                name="resumed epoch",
                fix=_FIX,
            )
        ]


def merged_sketch(sketches: Sequence[Sequence[int]]) -> SeenRows:
    """Return the sketch of all ranks' rows together; epoch and batches are left open."""
    counts: dict[int, int] = {}
    edge = 1 << 62  # up to this hash every rank's list is complete
    for sketch in sketches:
        own = _counts(sketch[1:])
        if len(own) == SKETCH:
            edge = min(edge, max(own))
        for value, count in own.items():
            counts[value] = counts.get(value, 0) + count
    smallest = sorted(value for value in counts if value <= edge)[:SKETCH]
    rows = sum(sketch[0] for sketch in sketches if sketch)
    return SeenRows(0, 0, rows, [value | min(counts[value], _COUNT_BITS) for value in smallest])


def _counts(hashes: Sequence[int]) -> dict[int, int]:
    """Return how often each row came, by its hash."""
    return {value & ~_COUNT_BITS: value & _COUNT_BITS for value in hashes if value}
