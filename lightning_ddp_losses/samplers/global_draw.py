"""Draws the batches of one process on every rank, distributes them to the ranks, and resumes in the middle of an epoch.

Every rank draws all indices of an epoch from the same seed, which is cheap compared to loading. The ranks compare them in a handshake, and
each keeps its contiguous part of every batch.

The position in an epoch counts rows that were trained on, over all ranks. It therefore has the same meaning for any number of ranks, and
rows that the workers of a DataLoader had already drawn are drawn again. The other entries of a saved state are compared: another sampler,
seed, dataset or global batch would silently result in other batches.

Legend: ``n`` rows of the dataset, ``W`` ranks, ``G`` rows of a global batch.
"""

from __future__ import annotations

import copy
import math
import operator
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_ddp_losses.core import lightning_compat
from lightning_ddp_losses.core.random_state import NUMPY_SEEDS
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.errors import (
    ConfigurationError,
    InputError,
    RankMismatchError,
    expect,
    expect_count,
    is_whole,
)
from lightning_ddp_losses.samplers.seeded_draw import draw_digest, draw_seeded, nested_samplers

_OFFER = struct.Struct("<Q16s")  # seed, and digest of the draw that this rank still has
_NONE = bytes(16)


class EpochPlace(NamedTuple):
    """Position in an epoch from which training continues.

    Attributes:
        epoch: The epoch of the drawn order.
        rows: Trained rows of that epoch, over all ranks.
        digest: Digest of its draw (hexadecimal), empty if unknown.
        announced: Epoch that can be passed to ``set_epoch`` without resetting this position.
    """

    epoch: int
    rows: int
    digest: str
    announced: int


class GlobalDraw:
    """The batches of one process, distributed to the ranks. Rank and world size are read on each use.

    Args:
        sampler: Sampler that yields indices, or batches if no size is given.
        local_batch_size: Rows of a rank's batch. G is W times this.
        global_batch_size: Rows of a global batch, G.
        drop_last: Whether to drop a last batch of fewer than G rows.
        seed: Seed of epoch 0. Epoch ``e`` is drawn from ``seed + e``. If None, rank 0's ``torch.initial_seed()``.
        title: Name in errors.

    Attributes:
        local_name: The user's name for the rows of one rank.
        seed_fix: Advice if the seed differs from the saved one.
    """

    _place: EpochPlace | None = None  # position from which the next epoch continues
    _announced: EpochPlace | None = None  # first position of an epoch whose iterator precedes ``set_epoch``
    _sizes: Sequence[int] = ()  # rows of each global batch of the stored epoch
    _begun = (0, 0)  # the epoch that is being read, and the number of its batches that were handed out
    local_name = "local_batch_size"
    seed_fix = "Give it seed={seed}, or leave seed out, which takes over the saved one."

    def __init__(
        self,
        sampler: Any,
        *,
        local_batch_size: int | None = None,
        global_batch_size: int | None = None,
        drop_last: bool,
        seed: int | None,
        title: str | None = None,
    ) -> None:
        _refuse_other_sampler(sampler)
        self.source = sampler
        self.title = title or f"GlobalBatchSampler({type(sampler).__name__})"
        self.local_batch_size, self.global_batch_size = local_batch_size, global_batch_size
        for name in ("local_batch_size", "global_batch_size"):
            if getattr(self, name) is not None:
                expect_count(f"{self.title}: {name}", getattr(self, name))
        is_seed = is_whole(seed) and 0 <= seed < NUMPY_SEEDS
        expected = f"a whole number from 0 to {NUMPY_SEEDS - 1}"
        expect(seed is None or is_seed, f"{self.title}: seed", expected=expected, got=repr(seed))
        self.drop_last, self.seed, self.epoch = drop_last, seed, 0
        self._own_seed: int | None = None  # this rank's proposed seed, stored so that all epochs start from one seed
        self._turn = 0  # number of changes of the epoch
        self._kept: tuple[tuple[int, int, int], bytes, Sequence[list[Any]]] | None = None

    @property
    def read_epoch(self) -> int:
        """The epoch that is being read. ``epoch`` is the next one as soon as it was read to its end."""
        return self._begun[0]

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch, as Lightning does. A loaded position in that epoch is kept."""
        if any(place is not None and epoch == place.announced for place in (self._place, self._announced)):
            return
        self._place = self._announced = None
        # Lightning may set the current epoch again, while workers read ahead
        if epoch != self.epoch:
            self.epoch = epoch
            self._turn += 1
        if epoch != self._begun[0]:
            self._begun = (epoch, 0)

    def announce_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iterators. ``set_epoch`` is called with it later, when workers may have read it to its end."""
        self._announce(EpochPlace(epoch, 0, "", epoch))

    def go_back(self) -> None:
        """Make the next iterator begin at the first position of the announced epoch's iterator, which it replaces."""
        if self._announced is not None:
            self._announce(self._announced)

    def _announce(self, place: EpochPlace) -> None:
        self._place = self._announced = place
        self.epoch, self._begun = place.epoch, (place.epoch, 0)
        self._turn += 1

    def keeping_last(self) -> GlobalDraw:
        """Return a copy that keeps the last batch."""
        twin = copy.copy(self)
        twin.drop_last, twin._kept = False, None
        twin.forget_place()
        return twin

    # ------------------------------------------------------------------ saving and resuming

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the position of training, as ``GlobalBatchSampler.state_dict``."""
        epoch, handed_out = self._begun
        place = self._place
        if place is not None and handed_out == 0 and not batches:  # no batch was drawn after loading a state
            return self._state(place.epoch, place.rows, place.digest)
        trained = handed_out if batches is None else batches
        if trained and trained >= (len(self._sizes) if self._global_rows() is None else self.count()):
            epoch, trained = epoch + 1, 0
        return self.state_at(epoch, trained)

    def state_at(self, epoch: int, batches: int) -> dict[str, Any]:
        """Return the state of a run that has trained on some batches of an epoch.

        Args:
            epoch: Number of the epoch.
            batches: Number of its trained batches.
        """
        G = self._global_rows()
        is_kept = self._kept is not None and self._kept[0][0] == epoch
        if G is None:
            what = f"{self.title}: rows of {batches} batches of epoch {epoch}"
            expected, fix = "the epoch that it drew last", "Ask for the state before the next epoch is drawn."
            is_known = batches == 0 or is_kept
            expect(is_known, what, expected=expected, got="another epoch", fix=fix, error=InputError)
            rows = sum(self._sizes[:batches])
        else:
            full, rest = self._cut(G)
            rows = min(batches * G, full * G + rest)
        # with the digest, a different order after a resume is an error
        digest = self._kept[1].hex() if rows and is_kept and self._kept else ""
        return self._state(epoch, rows, digest)

    def _state(self, epoch: int, rows: int, digest: str) -> dict[str, Any]:
        return {"epoch": epoch, "seed": self._offer(), "rows": rows, **self._compared(), "digest": digest}

    def _compared(self) -> dict[str, Any]:
        """Return the properties that must be equal for a position in one sampler to be valid in another."""
        return {
            "sampler": type(self.source).__name__,
            "length": len(self.source),
            "global_batch_size": self._global_rows(),
            "drop_last": self.drop_last,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, announced: int | None = None) -> None:
        """Continue from a saved position, as ``GlobalBatchSampler.load_state_dict``.

        Args:
            state: Result of ``state_dict``.
            announced: Number that ``set_epoch`` will pass for this epoch, after its iterator is created. If None, the epoch's own number,
                passed before.
        """
        with handshake.raising_on_all_ranks(f"{self.title}, load_state_dict"):
            place = self._read_place(state)
        self._own_seed, self._kept = state["seed"], None
        self._announce(place if announced is None else place._replace(announced=announced))
        if announced is None:
            self._announced = None

    def forget_place(self) -> None:
        """Start the next epoch at its beginning, even if a state was loaded."""
        self._place = self._announced = None

    def _read_place(self, state: Mapping[str, Any]) -> EpochPlace:
        """Return the position in a saved state. Reject a state of another sampler, naming both."""
        what, expected = f"state that {self.title} loads", "the result of its state_dict()"
        is_mapping = isinstance(state, Mapping)
        counts = [state.get(name) if is_mapping else None for name in ("epoch", "seed", "rows")]
        is_state = all(isinstance(count, int) and count >= 0 for count in counts)
        got = dict(state) if is_mapping else type(state).__name__
        expect(is_state, what, expected=expected, got=got, error=InputError)
        # 1. the seed, which determines the order of every epoch
        seed, fix = state["seed"], self.seed_fix.format(seed=state["seed"])
        is_known = self.seed is None or self.seed == seed
        expect(is_known, f"{what}: seed", expected=seed, got=self.seed, fix=fix, error=InputError)
        # 2. sampler, dataset and global batch
        for name, own in self._compared().items():
            saved, got = state.get(name, own), own
            fix = "Build the sampler as it was when the state was saved."
            if name == "length":
                fix = "Resume on the data it was trained on, or start a new epoch: load no state."
            if name == "global_batch_size":
                got, fix = self._meaning_of(own), self._fix_of_global_batch(saved)
            what_differs, expected = f"{what}: {name.replace('_', ' ')}", f"{saved}, as saved"
            expect(saved == own, what_differs, expected=expected, got=got, fix=fix, error=InputError)
        return EpochPlace(state["epoch"], state["rows"], state.get("digest", ""), state["epoch"])

    def _fix_of_global_batch(self, saved: int | None) -> str:
        W = process_groups.world_size()
        if self.local_batch_size is None:
            return f"Give it {saved}: the number of ranks may change, the global batch may not."
        if saved is not None and saved % W == 0:
            return f"On {W} ranks give {self.local_name}={saved // W}."
        return f"Use GlobalBatchSampler.batches(sampler, {saved}), which any number of ranks can divide."

    # ------------------------------------------------------------------ sizes, without drawing

    def count(self) -> int:
        """Return the number of batches, the same on every rank."""
        G = self._global_rows()
        if G is None:
            return len(self.source)
        full, rest = self._cut(G)
        return full + bool(rest)

    def rows(self) -> int:
        """Return this rank's number of indices in an epoch, if a batch size is given."""
        G = self._global_rows()
        assert G is not None
        full, rest = self._cut(G)
        W, rank = process_groups.world_size(), process_groups.rank()
        of_full, of_rest = (len(range(size)[share(size, W, rank)]) for size in (G, rest))
        return full * of_full + of_rest

    def _cut(self, G: int) -> tuple[int, int]:
        """Return the number of full batches, and the rows of the smaller one that follows, or 0 if it is dropped."""
        full, rest = divmod(len(self.source), G)
        if self.drop_last:
            return full, 0
        if rest:
            self._refuse_small(rest, full)
        return full, rest

    def _global_rows(self) -> int | None:
        """Return the current G, or None if the sampler makes the batches."""
        W = process_groups.world_size()
        G = self.global_batch_size if self.local_batch_size is None else W * self.local_batch_size
        declared = getattr(self.source, "batch_size", None)
        if G is not None and declared is not None and declared != G and hasattr(self.source, "m_per_class"):
            fix = f"Give it batch_size={G}{_larger_m(self.source, G)}"
            if self.local_batch_size is not None:
                fix += f", or keep its batches of {declared}: batch_sampler=GlobalBatchSampler.batches(sampler, {declared})"
                fix += " cuts them unevenly if the number of ranks does not divide them" if declared % W else ""
            what = f"batch_size of the {type(self.source).__name__}"
            raise ConfigurationError(what, expected=self._meaning_of(G), got=declared, fix=f"{fix}.")
        return G

    def _meaning_of(self, G: int | None) -> str:
        """Return G as text, with its factors."""
        if self.local_batch_size is None:
            return f"{G} (global_batch_size)"
        return f"{G} ({process_groups.world_size()} ranks * {self.local_name} {self.local_batch_size})"

    def _refuse_small(self, rows: int, batch: int, *, collective: bool = False) -> None:
        W = process_groups.world_size()
        if rows >= W:
            return
        fix = "Set drop_last=True to leave them out, or choose another batch size."
        if self.global_batch_size is None and self.local_batch_size is None:
            fix = "Make all batches larger."
        what, expected = f"{self.title}: rows of batch {batch}", f"at least one for each of {W} ranks"
        raise InputError(what, expected=expected, got=rows, fix=fix, collective=collective)

    # ------------------------------------------------------------------ drawing

    def latest_batches(self) -> list[list[Any]]:
        """Return this rank's part of each batch of the most recently drawn epoch, empty before the first."""
        return [] if self._kept is None else list(self._kept[2])

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[Any]]:
        """Yield this rank's part of each batch of the epoch.

        An epoch that was read to its end is followed by the next one, unless ``set_epoch`` sets another.

        Communication: two handshakes at the first batch, or one if the epoch was drawn before.
        """
        place, turn = self._place, self._turn
        if place is None and not self._begun[1]:
            self._warn_of_unread_place()
        epoch = self.epoch if place is None else place.epoch
        with handshake.raising_on_all_ranks(f"{self.title}, epoch {epoch}"):
            own = self._draw_together(epoch)
            start = self._first_batch(place)
        for number in range(start, len(own)):
            self._begun = (epoch, number + 1)
            yield own[number]
        # the epoch is over, and so is the position in it
        if self._place is place:
            self._place = None
        if turn == self._turn:
            self.epoch = epoch + 1

    def _warn_of_unread_place(self) -> None:
        """Warn in a fit that was resumed inside an epoch by a strategy that does not restore samplers."""
        trainer = lightning_compat.fitting_trainer()
        if trainer is None or not trainer.ckpt_path or process_groups.rank():
            return
        progress = trainer.fit_loop.epoch_loop.batch_progress
        trained = progress.current.ready
        if trained and not progress.is_last_batch:
            warnings.warn(
                f"This fit goes on after {trained} batches of an epoch, but {self.title} has not read its place from "
                f"{trainer.ckpt_path}: it begins the epoch again. Use DDPLossStrategy, which restores the place, also with devices=1, or "
                "call its load_state_dict before fit.",
                stacklevel=2,
            )

    def _first_batch(self, place: EpochPlace | None) -> int:
        """Return the first batch to train on in the epoch that was just drawn.

        Raises:
            InputError: on every rank, if the order differs from the order before the checkpoint, or the position is not the end of a batch.
        """
        if place is None:
            return 0
        assert self._kept is not None
        digest = self._kept[1].hex()
        if place.digest and place.digest != digest:
            what = f"indices that {self.title} drew in epoch {place.epoch}"
            expected = f"those it drew when its state was saved (digest {place.digest[:8]})"
            fix = "Resume with the same labels, weights and lengths, and the same releases of torch, numpy and the sampler's library."
            raise InputError(what, expected=expected, got=f"digest {digest[:8]}", fix=fix, collective=True)
        ends = list(accumulate(self._sizes, initial=0))
        if place.rows not in ends:
            what = f"{self.title}: place in epoch {place.epoch}"
            batches = f"{len(self._sizes)} batches of {ends[-1]} rows (length {len(self.source)})"
            expected = f"the end of one of its {batches}"
            fix = "Resume with the sampler and the global batch that were saved."
            raise InputError(what, expected=expected, got=f"row {place.rows}", fix=fix, collective=True)
        return ends.index(place.rows)

    def _draw_together(self, epoch: int) -> Sequence[list[Any]]:
        """Draw an epoch, compare it with the other ranks, and return this rank's part of each batch."""
        W, rank = process_groups.world_size(), process_groups.rank()
        place = (epoch, W, rank)
        kept = self._kept if self._kept and self._kept[0] == place else (place, _NONE, [])
        payloads = handshake.all_gather(self.title, self._must_match(epoch), _OFFER.pack(self._offer(), kept[1]))
        seeds, digests = zip(*map(_OFFER.unpack, payloads), strict=True)
        self._own_seed = seeds[0]
        if set(digests) == {kept[1]} and kept[1] != _NONE:
            # second read: a sampler that shuffles in place would not draw the same again
            return kept[2]
        everything = self._draw(seeds[0] + epoch, epoch)
        digest = draw_digest(everything)
        drawn = handshake.all_gather(f"{self.title}: indices", {"epoch": epoch}, digest)
        if len(set(drawn)) > 1:
            raise RankMismatchError(
                f"indices that {self.title} drew in epoch {epoch}",
                expected="the same on every rank",
                ranks=[f"digest {of_rank.hex()[:8]}" for of_rank in drawn],
                fix="Build the sampler from the same labels, weights and lengths on every rank, and let it draw from "
                "torch's, numpy's or Python's global generator, or from one that is an attribute of the sampler.",
                collective=True,
            )
        for number, batch in enumerate(everything):
            self._refuse_small(len(batch), number, collective=True)
        own = [batch[share(len(batch), W, rank)] for batch in everything]
        self._kept, self._sizes = (place, digest, own), [len(batch) for batch in everything]
        return own

    def _must_match(self, epoch: int) -> dict[str, object]:
        """Return the properties that must be equal on all ranks to draw together."""
        rows = 0 if self._place is None else self._place.rows
        return {"epoch": epoch, "seed": self.seed, **self._compared(), "rows trained on": rows}

    def _offer(self) -> int:
        """Return the seed of epoch 0 that this rank proposes."""
        if self._own_seed is None:
            self._own_seed = self._first_seed() if self.seed is None else self.seed
        return self._own_seed

    def _first_seed(self) -> int:
        return torch.initial_seed() % NUMPY_SEEDS

    def _draw(self, seed: int, epoch: int) -> list[list[Any]]:
        for sampler in nested_samplers(self.source):
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        drawn = draw_seeded(self.source, seed)
        G = self._global_rows()
        # batches of the sampler
        if G is None:
            fix = "Give it the size of a batch: GlobalBatchSampler.batches(sampler, global_batch_size)."
            what, is_batches = f"{self.title} without a batch size", all(map(_is_batch, drawn))
            expect(is_batches, what, expected="batches", got="indices", fix=fix, error=InputError)
            return [list(map(_plain, items)) for items in drawn]
        # batches of G indices
        fix = "Leave global_batch_size out: batch_sampler=GlobalBatchSampler.batches(sampler)."
        what, is_batches = f"{self.title} with a batch size", any(isinstance(item, list) for item in drawn)
        expect(not is_batches, what, expected="indices", got="batches", fix=fix, error=InputError)
        indices = list(map(_plain, drawn))
        stop = len(indices) - len(indices) % G * self.drop_last
        return [indices[start : start + G] for start in range(0, stop, G)]


def _is_batch(items: Any) -> bool:
    return isinstance(items, Iterable) and not isinstance(items, (str, bytes)) and getattr(items, "shape", None) != ()


def _larger_m(source: Any, G: int) -> str:
    """Return advice on the larger m that an M-per-class sampler needs if its batches grow with the ranks: m x labels >= batch size."""
    m, labels = source.m_per_class, len(getattr(source, "labels", ()))
    if not labels or (m * labels >= G and G % m == 0):
        return ""
    fitting = [rows for rows in range(-(-G // labels), G + 1) if G % rows == 0]
    return f" and m={fitting[0]} (m x {labels} labels must be at least {G}, and m divide it: m grows with the ranks)"


def _plain(index: Any) -> Any:
    try:
        return operator.index(index)  # numpy's integers and 0-d tensors
    except TypeError:
        return index  # a key of a dataset that is not a sequence


def _refuse_other_sampler(sampler: Any) -> None:
    """Reject anything except a sampler over the whole dataset that has a length."""
    name, what, expected = type(sampler).__name__, "GlobalBatchSampler", "a sampler with a length"
    is_sampler = isinstance(sampler, Iterable) and not isinstance(sampler, (Dataset, DataLoader, str, bytes, dict))
    fix = "Give it the sampler that you would give to DataLoader(sampler=...) or DataLoader(batch_sampler=...)."
    expect(is_sampler, what, expected=expected, got=name, fix=fix)
    fix = "Give it the sampler that one process would use, over the whole data set."
    for inner in nested_samplers(sampler):
        is_cut = isinstance(inner, DistributedSampler) or hasattr(getattr(inner, "batch_size", None), "draw")
        cut = name if inner is sampler else f"{name} around a {type(inner).__name__}"
        expect(not is_cut, what, expected=expected, got=f"{cut}, which is cut by rank already", fix=fix)
    try:
        length: float = len(sampler)
    except (TypeError, NotImplementedError):
        length = math.inf
    is_finite, fix = not math.isinf(length), "Give the sampler a finite __len__."
    expect(is_finite, what, expected=expected, got=f"{name} without one", fix=fix)


def share(rows: int, world_size: int, rank: int) -> slice:
    """Return the rank's contiguous part of ``rows``. Sizes differ by at most one, with the larger parts first."""
    each, extra = divmod(rows, world_size)
    start = rank * each + min(rank, extra)
    return slice(start, start + each + (rank < extra))
