"""Rows that a resumed run sees again in the epoch in which it was saved, or never.

Lightning restores the number of batches of an epoch, and most samplers begin the epoch again: the run trains on its first rows once more
and ends before its last. A checkpoint keeps a sketch of the rows that were seen (the smallest of their hashes, of all ranks together); it
is compared with the rows after the resume when the epoch is over.

A run that skips rows (a loader that goes on by itself around a sampler that does so too) repeats none. Both parts of its epoch together
are compared with a whole epoch: the latest one before it, else the one after it. Rows that are missing there tell, as long as hardly any
come instead of them: else epochs have rows of their own (augmentation, drawing with replacement, batches of which a part is read).

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
_FIX_SKIPPED = (
    "Let one of loader, sampler and data set go on at its place: two that do skip rows twice. DDPLossStrategy saves the place of "
    "GlobalBatchSampler, and the state of loaders and of iterable data sets, by the batch that was trained on."
)
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
        self._whole: SeenRows | None = None  # the latest whole epoch
        self._parts: tuple[SeenRows, str] | None = None  # both parts of a resumed epoch, and where it was resumed

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
            whole = [] if self._whole is None else self._whole.sketch
            checkpoint[KEY] = {**seen._replace(epoch=epoch, batches=batches)._asdict(), "whole": whole}

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Read what a checkpoint says."""
        saved = checkpoint.get(KEY)
        self._before = None if saved is None else SeenRows(*(saved[field] for field in SeenRows._fields))
        if saved is not None and saved.get("whole"):
            self._whole = SeenRows(saved["epoch"] - 1, 0, 0, saved["whole"])

    def see_batch(self, epoch: int, batch_idx: int) -> None:
        """Note where the run goes on."""
        if self._before is not None and self._first_batch < 0:
            self._first_batch = batch_idx
            # a new epoch begins, or this one does from its start: its rows are to come again
            if epoch != self._before.epoch or batch_idx == 0:
                self._before = None

    def judge(self, sketches: Sequence[Sequence[int]], batches: int, *, is_whole: bool) -> list[Finding]:
        """Look at an epoch that is over; called with nothing read where training is only about to begin.

        Args:
            sketches: By rank: rows read in it, or after the resume in it, and the smallest of their hashes, padded with zeros.
            batches: The batches that have ended in this epoch, those before the resume too.
            is_whole: Whether it ended by itself, with its last batch.
        """
        before, self._before = self._before, None
        after = merged_sketch(sketches)
        if not after.rows:
            self._before = before
            return []
        if before is None or self._first_batch < 0:
            return self._judge_whole(after) if is_whole else []
        found = self._repeated(before, after, batches)
        if found or not is_whole:
            return found
        both = merged_sketch([*sketches, [before.rows, *before.sketch]])
        place = f"at batch {self._first_batch} of epoch {before.epoch}"
        if self._whole is not None:
            return _skipped(both, self._whole, place)
        self._parts = both, place
        return []

    def _judge_whole(self, seen: SeenRows) -> list[Finding]:
        """Remember an epoch without a resume, and compare the parts of one with it."""
        self._whole, parts, self._parts = seen, self._parts, None
        return [] if parts is None else _skipped(parts[0], seen, parts[1])

    def _repeated(self, before: SeenRows, after: SeenRows, batches: int) -> list[Finding]:
        """Find rows that came before the resume and after it."""
        # 1. up to this hash both sketches are complete
        counts_before, counts_after, edge = _complete_counts(before, after)
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


def _skipped(both: SeenRows, whole: SeenRows, place: str) -> list[Finding]:
    """Find rows of a whole epoch that came in neither part of a resumed one."""
    counts, counts_whole, edge = _complete_counts(both, whole)
    seen = {value for value in counts if value <= edge}
    expected = {value for value in counts_whole if value <= edge}
    missing, others = expected - seen, seen - expected
    if len(missing) < _MIN_REPEATED_ROWS + _MIN_SHARE * len(expected) or 4 * len(others) > len(missing):
        return []
    share = round(100 * len(missing) / len(expected))
    return [
        Finding(
            "F83",
            f"about {share}% of the rows of an epoch came neither before the resume, {place}, nor after it",
            "each row once in an epoch",
            name="resumed epoch",
            fix=_FIX_SKIPPED,
        )
    ]


def _complete_counts(first: SeenRows, second: SeenRows) -> tuple[dict[int, int], dict[int, int], int]:
    """Return how often each row came in two parts, and the hash up to which both sketches are complete."""
    counts = _counts(first.sketch), _counts(second.sketch)
    edge = min((max(each) for each in counts if len(each) == SKETCH), default=1 << 62)
    return *counts, edge


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
