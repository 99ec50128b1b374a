"""What one process would draw in an epoch, cut into this rank's part of every batch.

Every rank draws all indices of the epoch from the same seed, the ranks compare what they drew in a handshake, and each keeps
its contiguous part of every batch. Drawing is cheap beside loading; what may not happen is that ranks draw differently. So
every generator that a sampler may use is seeded for the draw and put back afterwards: seeding them for training instead would
give all ranks the same dropout.

Legend: ``W`` ranks, ``G`` rows of a global batch.
"""

from __future__ import annotations

import contextlib
import copy
import math
import operator
import struct
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from lightning_ddp_losses.core.random_state import NUMPY_SEEDS, global_generators, preserve_random_state
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.fingerprint import fingerprint, hash_bytes
from lightning_ddp_losses.errors import ConfigurationError, InputError, RankMismatchError, expect
from lightning_ddp_losses.samplers.epoch_place import EpochPlace, batches_behind, compare_draws, read_place

Batches = list[list[Any]]

_OFFER = struct.Struct("<Q16s")  # seed, digest of the draw that this rank still has
_NONE = bytes(16)


def share(rows: int, world_size: int, rank: int) -> slice:
    """The rank's contiguous part of ``rows``; sizes differ by one at most, the larger parts first."""
    each, extra = divmod(rows, world_size)
    start = rank * each + min(rank, extra)
    return slice(start, start + each + (rank < extra))


class GlobalDraw:
    """The batches of one process, dealt to the ranks; asks for rank and world size each time.

    Args:
        sampler: Yields indices, or batches where no size is given.
        local_batch_size: G is W times this.
        global_batch_size: G.
        drop_last: Leave out a last batch of fewer than G rows.
        seed: Epoch ``e`` is drawn from ``seed + e``; None: from rank 0's ``torch.initial_seed()``.
    """

    # at the start, and for what an earlier release pickled
    _place: EpochPlace | None = None  # where the epoch goes on that is drawn next
    _sizes: Sequence[int] = ()  # rows of each global batch of the epoch that is kept
    _begun = (0, 0)  # the epoch that is being read, and how many of its batches were handed out
    local_name = "local_batch_size"
    """How the user calls the rows of one rank."""
    seed_fix = "Give it seed={seed}, or leave seed out, which takes over the saved one."
    """What to do about another seed than was saved."""

    def __init__(
        self,
        sampler: Any,
        *,
        local_batch_size: int | None = None,
        global_batch_size: int | None = None,
        drop_last: bool,
        seed: int | None,
    ) -> None:
        self.source = checked_sampler(sampler)
        self.title = f"GlobalBatchSampler({type(sampler).__name__})"
        self.local_batch_size = local_batch_size
        self.global_batch_size = global_batch_size
        check_rows(f"{self.title}: local_batch_size", local_batch_size)
        check_rows(f"{self.title}: global_batch_size", global_batch_size)
        check_seed(f"{self.title}: seed", seed)
        self.drop_last = drop_last
        self.seed = seed
        self.epoch = 0
        self._own_seed: int | None = None  # this rank's offer, kept so that all epochs start from one seed
        self._turn = 0  # how often set_epoch was called
        self._kept: tuple[tuple[int, int, int], bytes, Sequence[list[Any]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next (Lightning does); a place that was loaded stays where it is in that epoch."""
        if self._place is not None and epoch == self._place.announced:
            return
        self._place = None
        # the epoch that is being read may be named once more, while workers read ahead
        if epoch != self.epoch:
            self.epoch = epoch
            self._turn += 1
        if epoch != self._begun[0]:
            self._begun = (epoch, 0)

    def keeping_last(self) -> GlobalDraw:
        """A twin that keeps the last batch."""
        twin = copy.copy(self)
        twin.drop_last, twin._kept, twin._place = False, None, None
        return twin

    # ------------------------------------------------------------------ saving and resuming

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return where training stands; see ``GlobalBatchSampler.state_dict``."""
        epoch, handed_out = self._begun
        place = self._place
        if place is not None and handed_out == 0 and not batches:
            # nothing was asked for since a state was loaded
            return self._state(place.epoch, place.rows, place.digest)
        trained = handed_out if batches is None else batches
        if trained and trained >= (len(self._sizes) if self._global_rows() is None else self.count()):
            epoch, trained = epoch + 1, 0
        return self.state_at(epoch, trained)

    def state_at(self, epoch: int, batches: int) -> dict[str, Any]:
        """Return the state of a run that has trained on some batches of an epoch.

        Args:
            epoch: The epoch.
            batches: Batches of it that were trained on.
        """
        G = self._global_rows()
        is_kept = self._kept is not None and self._kept[0][0] == epoch
        if G is not None:
            rows = min(batches * G, self._epoch_rows(G))
        elif batches == 0 or is_kept:
            rows = sum(self._sizes[:batches])
        else:
            raise InputError(
                f"{self.title}: rows of {batches} batches of epoch {epoch}",
                expected="the epoch that it drew last",
                got="another epoch",
                fix="Ask for the state before the next epoch is drawn.",
            )
        # a draw that can be compared: another order after a resume is an error, not other batches
        digest = self._kept[1].hex() if rows and is_kept and self._kept else ""
        return self._state(epoch, rows, digest)

    def _state(self, epoch: int, rows: int, digest: str) -> dict[str, Any]:
        facts = self._facts()
        compared = {name: facts[name] for name in ("sampler", "length", "global_batch_size", "drop_last")}
        return {"epoch": epoch, "seed": self._offer(), "rows": rows, **compared, "digest": digest}

    def load_state_dict(self, state: Mapping[str, Any], *, announced: int | None = None) -> None:
        """Go on where training stood; see ``GlobalBatchSampler.load_state_dict``.

        Args:
            state: What ``state_dict`` returned.
            announced: What ``set_epoch`` will call this epoch; None: what it is.
        """
        try:
            place = read_place(self.title, state, self._facts(), seed=self.seed)
        except Exception as error:
            handshake.raise_on_all_ranks(error, f"{self.title}, load_state_dict")
        self._own_seed = state["seed"]
        self._place = place if announced is None else place._replace(announced=announced)
        self.epoch = place.epoch
        self._turn += 1
        self._kept, self._begun = None, (place.epoch, 0)

    def forget_place(self) -> None:
        """Start the next epoch at its beginning, whatever was loaded."""
        self._place = None

    def _facts(self) -> dict[str, Any]:
        """Return what two samplers must have in common for a place in one to be a place in the other."""
        W, G = process_groups.world_size(), self._global_rows()
        meaning = ""
        if self.local_batch_size is not None:
            meaning = f" ({W} ranks * {self.local_name} {self.local_batch_size})"
        return {
            "sampler": type(self.source).__name__,
            "length": len(self.source),
            "global_batch_size": G,
            "drop_last": self.drop_last,
            "meaning": meaning,
            "seed_fix": self.seed_fix,
            "local": None if self.local_batch_size is None else self.local_name,
            "world_size": W,
        }

    def _epoch_rows(self, G: int) -> int:
        """Return the rows of an epoch, all ranks together."""
        full, rest = self._cut(G)
        return full * G + rest

    # ------------------------------------------------------------------ sizes, without drawing

    def count(self) -> int:
        """Number of batches, the same on every rank."""
        G = self._global_rows()
        if G is None:
            return len(self.source)
        full, rest = self._cut(G)
        return full + bool(rest)

    def rows(self) -> int:
        """This rank's number of indices in an epoch (where a batch size is given)."""
        G = self._global_rows()
        assert G is not None
        full, rest = self._cut(G)
        W, rank = process_groups.world_size(), process_groups.rank()
        of_full, of_rest = (len(range(size)[share(size, W, rank)]) for size in (G, rest))
        return full * of_full + of_rest

    def _cut(self, G: int) -> tuple[int, int]:
        """Return the number of full batches, and the rows of the smaller one that follows; 0 where it is left out."""
        full, rest = divmod(len(self.source), G)
        if self.drop_last:
            return full, 0
        if rest:
            self._refuse_small(rest, full)
        return full, rest

    def _global_rows(self) -> int | None:
        """G now; None where the sampler makes the batches."""
        W = process_groups.world_size()
        if self.local_batch_size is None:
            G, meaning = self.global_batch_size, "global_batch_size"
        else:
            G, meaning = W * self.local_batch_size, f"{W} ranks * {self.local_name} {self.local_batch_size}"
        declared = getattr(self.source, "batch_size", None)
        if G is not None and declared is not None and declared != G and hasattr(self.source, "m_per_class"):
            fix = f"Give it batch_size={G}{_larger_m(self.source, G)}"
            if self.local_batch_size is not None:
                fix += f", or keep its batches of {declared}: batch_sampler=GlobalBatchSampler.batches(sampler, {declared})"
                fix += " cuts them unevenly where the number of ranks does not divide them" if declared % W else ""
            raise ConfigurationError(
                f"batch_size of the {type(self.source).__name__}",
                expected=f"{G} ({meaning})",
                got=declared,
                fix=f"{fix}.",
            )
        return G

    def _refuse_small(self, rows: int, batch: int, *, collective: bool = False) -> None:
        W = process_groups.world_size()
        if rows < W:
            fix = "Set drop_last=True to leave them out, or choose another batch size."
            if self.global_batch_size is None and self.local_batch_size is None:
                fix = "Make all batches larger."
            raise InputError(
                f"{self.title}: rows of batch {batch}",
                expected=f"at least one for each of {W} ranks",
                got=rows,
                fix=fix,
                collective=collective,
            )

    # ------------------------------------------------------------------ drawing

    def latest_batches(self) -> Batches:
        """Return this rank's part of each batch of the epoch that was drawn last; empty before the first."""
        return [] if self._kept is None else list(self._kept[2])

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[Any]]:
        """This rank's part of each batch of the epoch.

        An epoch that was read to its end is followed by the next one, unless ``set_epoch`` says otherwise.

        Communication: two handshakes when the first batch is asked for; one where the epoch was drawn before.
        """
        place, turn = self._place, self._turn
        epoch = self.epoch if place is None else place.epoch
        try:
            own = self._meet(epoch)
            start = self._first_batch(place)
        except Exception as error:
            handshake.raise_on_all_ranks(error, f"{self.title}, epoch {epoch}")
        for number in range(start, len(own)):
            self._begun = (epoch, number + 1)
            yield own[number]
        # the epoch is over, and the place in it
        if self._place is place:
            self._place = None
        if turn == self._turn:
            self.epoch = epoch + 1

    def _first_batch(self, place: EpochPlace | None) -> int:
        """Return the batch at which the epoch goes on that was drawn just now."""
        if place is None:
            return 0
        assert self._kept is not None
        compare_draws(self.title, place, self._kept[1])
        return batches_behind(self.title, place, self._sizes, length=len(self.source))

    def _meet(self, epoch: int) -> Sequence[list[Any]]:
        W, rank = process_groups.world_size(), process_groups.rank()
        place = (epoch, W, rank)
        kept = self._kept if self._kept and self._kept[0] == place else (place, _NONE, [])
        payloads = handshake.all_gather(self.title, self._must_match(epoch), _OFFER.pack(self._offer(), kept[1]))
        seeds, digests = zip(*map(_OFFER.unpack, payloads), strict=True)
        self._own_seed = seeds[0]
        if set(digests) == {kept[1]} and kept[1] != _NONE:
            # a second look at the same epoch: a sampler that shuffles in place would not draw the same again
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
        """Return what ranks that draw together have in common."""
        return {
            "epoch": epoch,
            "seed": self.seed,
            "global_batch_size": self._global_rows(),
            "drop_last": self.drop_last,
            "len": len(self.source),
            "rows trained on": 0 if self._place is None else self._place.rows,
        }

    def _offer(self) -> int:
        if self._own_seed is None:
            self._own_seed = torch.initial_seed() % NUMPY_SEEDS if self.seed is None else self.seed
        return self._own_seed

    def _draw(self, seed: int, epoch: int) -> Batches:
        for sampler in nested_samplers(self.source):
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        generators = [*global_generators(), *generators_of(self.source)]
        with preserve_random_state(generators, seed=seed % NUMPY_SEEDS), preserve_shuffled(self.source):
            drawn = list(self.source)
        G = self._global_rows()
        if G is None:
            return [self._batch(items) for items in drawn]
        indices = [self._index(item) for item in drawn]
        batches = [indices[start : start + G] for start in range(0, len(indices), G)]
        if self.drop_last and batches and len(batches[-1]) < G:
            batches.pop()
        return batches

    def _index(self, item: Any) -> Any:
        if isinstance(item, list):
            fix = "Leave global_batch_size out: batch_sampler=GlobalBatchSampler.batches(sampler)."
            raise InputError(f"{self.title} with a batch size", expected="indices", got="batches", fix=fix)
        return _plain(item)

    def _batch(self, items: Any) -> list[Any]:
        if isinstance(items, (str, bytes)) or not isinstance(items, Iterable) or getattr(items, "shape", None) == ():
            fix = "Say how many indices make a batch: GlobalBatchSampler.batches(sampler, global_batch_size)."
            raise InputError(f"{self.title} without a batch size", expected="batches", got="indices", fix=fix)
        return [_plain(item) for item in items]


def _larger_m(source: Any, G: int) -> str:
    """Return what else to give an M-per-class sampler whose batches grow with the ranks: it needs m x labels >= batch size."""
    m, labels = source.m_per_class, len(getattr(source, "labels", ()))
    if not labels or (m * labels >= G and G % m == 0):
        return ""
    fitting = [rows for rows in range(-(-G // labels), G + 1) if G % rows == 0]
    return f" and m={fitting[0]} (m x {labels} labels must be at least {G}, and m divide it: m grows with the ranks)"


def _plain(index: Any) -> Any:
    try:
        return operator.index(index)  # numpy's integers and 0-d tensors
    except TypeError:
        return index  # a key of a data set that is no sequence


def draw_digest(batches: Batches) -> bytes:
    """Return a hash of what was drawn."""
    seen = blake2b(digest_size=16)
    for batch in batches:
        try:
            data = array("q", batch).tobytes()
        except (TypeError, OverflowError):
            data = repr(batch).encode()
        seen.update(len(data).to_bytes(8, "little") + data)
    return seen.digest()


# ---------------------------------------------------------------------- what a sampler draws from

PML = "pytorch_metric_learning.utils.common_functions"
_CONTAINERS = (list, dict, set, deque, array, tuple, Tensor)  # and numpy's array
_PLAIN = {int, float, str, bool, type(None)}
_MAX_COPIED = 256 << 20  # bytes of an array


def nested_samplers(sampler: object) -> list[object]:
    """Return ``sampler`` and the samplers that it holds, outermost first."""
    found = [sampler]
    for outer in found:
        for value in getattr(outer, "__dict__", {}).values():
            if isinstance(value, Sampler) and all(value is not other for other in found):
                found.append(value)
    return found


def generators_of(sampler: object) -> list[Any]:
    """Return whatever a sampler may draw from beside the global generators: PML's own, and all attributes of it and of those inside it."""
    generators = [getattr(sys.modules.get(PML), "NUMPY_RANDOM", None)]
    for owner in nested_samplers(sampler):
        generators += getattr(owner, "__dict__", {}).values()
    return generators


@contextlib.contextmanager
def preserve_shuffled(sampler: object) -> Iterator[None]:
    """Undo what samplers do to their own lists and arrays while they draw: an epoch is the same whether or not others were drawn before it.

    Restores lists, dicts, sets, arrays and tensors in their attributes, also inside each other, and which of them an attribute names.

    Raises:
        ConfigurationError: an array that is too large to be copied was changed.
    """
    attributes: list[tuple[dict[str, Any], str, Any]] = []
    for owner in nested_samplers(sampler):
        for name, value in getattr(owner, "__dict__", {}).items():
            if _is_container(value):
                attributes.append((owner.__dict__, name, value))
    # what lies inside them may be shuffled too
    containers = _containers_in([value for _, _, value in attributes])
    kept = [(own, _copied(own)) for own in containers]
    try:
        yield
    finally:
        for own, before in kept:
            _restore_(own, before, type(sampler).__name__)
        for slots, name, value in attributes:
            slots[name] = value


def _containers_in(values: Sequence[Any]) -> list[Any]:
    """Return what can be shuffled among values and inside them, each once."""
    found: list[Any] = []
    seen: set[int] = set()
    queue = list(values)
    while queue:
        value = queue.pop()
        if not _is_container(value) or id(value) in seen:
            continue
        seen.add(id(value))
        if not isinstance(value, tuple):
            found.append(value)
        # numbers and texts hold nothing; most lists are of them
        if isinstance(value, dict):
            queue += value.values()
        elif isinstance(value, (list, tuple, deque)) and not all(map(_PLAIN.__contains__, map(type, value))):
            queue += value
    return found


def _is_numpy_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_container(value: object) -> bool:
    return isinstance(value, _CONTAINERS) or _is_numpy_array(value)


def _copied(own: Any) -> Any:
    """Return a shallow copy, or a hash of what is too large for one; None of what nobody can write to."""
    is_numpy = _is_numpy_array(own)
    is_fixed = is_numpy and not own.flags.writeable
    if isinstance(own, Tensor):
        is_fixed = own.layout != torch.strided or own.is_meta
    if is_fixed:
        return None
    if not is_numpy and not isinstance(own, Tensor):
        return copy.copy(own)
    # arrays: also a view gets memory of its own
    is_large = own.nbytes > _MAX_COPIED
    if isinstance(own, Tensor):
        return fingerprint(own) if is_large else own.detach().clone()
    return hash_bytes(own.tobytes()) if is_large and own.dtype != object else own.copy()


def _restore_(own: Any, before: Any, name: str) -> None:
    """Give a container back what it held."""
    if before is None:
        return
    if isinstance(own, (dict, set)):
        own.clear()
        own.update(before)
    elif isinstance(own, (list, deque)):
        own.clear()
        own.extend(before)
    elif isinstance(before, int):
        if _copied(own) != before:
            what = f"{name}, an array of {own.nbytes >> 20} MiB"
            fix = "Let it shuffle a list of indices, or a copy."
            raise ConfigurationError(what, expected="unchanged by drawing", got="another order", fix=fix)
    else:  # an array or a tensor, which may have no dimension
        with torch.no_grad():
            own[...] = before


# ---------------------------------------------------------------------- what it can be built from


def check_rows(what: str, size: object) -> None:
    """Refuse a batch size that is given and is no positive number."""
    is_valid = size is None or (isinstance(size, int) and not isinstance(size, bool) and size > 0)
    expect(is_valid, what, expected="a positive number of rows", got=repr(size))


def check_seed(what: str, seed: object) -> None:
    """Refuse a seed that is given and that not every generator takes."""
    is_valid = seed is None or (isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < NUMPY_SEEDS)
    expect(is_valid, what, expected=f"a whole number from 0 to {NUMPY_SEEDS - 1}", got=repr(seed))


def checked_sampler(sampler: Any) -> Any:
    """``sampler``, if it is one over the whole data set and knows its length."""

    def refuse(got: str, fix: str) -> ConfigurationError:
        return ConfigurationError("GlobalBatchSampler", expected="a sampler with a length", got=got, fix=fix)

    name = type(sampler).__name__
    if not isinstance(sampler, Iterable) or isinstance(sampler, (Dataset, DataLoader, str, bytes, dict)):
        raise refuse(name, "Give it what you would give to DataLoader(sampler=...) or DataLoader(batch_sampler=...).")
    for inner in nested_samplers(sampler):
        if isinstance(inner, DistributedSampler) or hasattr(getattr(inner, "batch_size", None), "draw"):
            cut = name if inner is sampler else f"{name} around a {type(inner).__name__}"
            fix = "Give it the sampler that one process would use, over the whole data set."
            raise refuse(f"{cut}, which is cut by rank already", fix)
    try:
        length = len(sampler) if isinstance(sampler, Sized) else None
    except (TypeError, NotImplementedError):
        length = None
    if length is None or math.isinf(length):
        raise refuse(f"{name} without one", "Give the sampler a finite __len__.")
    return sampler
