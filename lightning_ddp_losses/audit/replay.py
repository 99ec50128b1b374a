"""What a run is, and how the batches that the ranks had are given to another run: joined, cut, or one after the other.

A batch is a nest: dicts, lists, tuples, named tuples and dataclasses of tensors. Rows are counted along the first dimension and
joined in rank order. What is not rows (a string, a number, None, a tensor that is the same on every rank and has another
length) passes through; what is rows on no reading is an error that names it.
"""

from __future__ import annotations

import hashlib
import io
import operator
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.audit.rank_record import BatchRecord, LoaderRows, Recording, RowCount, sum_rows, tensor_digest
from lightning_ddp_losses.core.nests import children_of, is_array, leaves, rebuild_nest
from lightning_ddp_losses.errors import InputError, expect

# ---------------------------------------------------------------------- runs


@dataclass
class AuditTarget:
    """What is audited: the same in every process, since processes are forked.

    Attributes:
        model: The LightningModule.
        data: Data module, data loaders, or None for the module's own.
        strategy: Lightning's name or object.
        options: Further options of the Trainer.
        deterministic: Ask torch for deterministic algorithms.
        scratch: A folder that goes when the audit ends.
        seconds: How long a rank waits for another.
        ckpt_path: A checkpoint to start from.
    """

    model: Any
    data: Any
    strategy: Any
    options: dict[str, Any]
    deterministic: bool
    scratch: Path
    seconds: float
    ckpt_path: Any = None


Choice = Callable[[list[int]], list[int]]
"""From the number of rows in each recorded batch to the places that are taken, of all their rows joined."""


@dataclass(frozen=True)
class ReplayBatch:
    """One batch of a replay: recorded batches joined in this order, or some of the rows that they make.

    Attributes:
        files: The recorded batches.
        rows: Rows in each.
        choose: Chooses rows, of each loader by itself; None: all rows.
    """

    files: tuple[str, ...]
    rows: tuple[LoaderRows, ...]
    choose: Choice | None = None

    def load(self) -> Any:
        """Read the recorded batches and make the one that is replayed."""
        return join_batches([load_batch(file) for file in self.files], self.rows, self.choose)

    @property
    def row_count(self) -> LoaderRows:
        """Samples in the batch, as far as the recorded ones tell."""
        return self._count(self.rows)

    def _count(self, rows: Sequence[LoaderRows]) -> LoaderRows:
        """Count the rows that are taken, loader by loader."""
        lists = [each for each in rows if isinstance(each, list)]
        if len(lists) == len(rows) and len(set(map(len, lists))) == 1:
            return [self._count(of_loader) for of_loader in zip(*lists, strict=True)]
        counts = list(map(sum_rows, rows))
        return sum(counts) if self.choose is None else len(self.choose(counts))


Plan = list[list[ReplayBatch]]
"""Batches by epoch."""


@dataclass(frozen=True, eq=False)
class Run:
    """What one run is.

    Attributes:
        name: Its folder.
        ranks: Number of processes with a process group; 0 is one process without.
        plans: Batches for each process; empty: the user's own data.
        start: Folder of the run whose rank 0 gives the initial weights; empty: the module as it is.
        steps: Optimizer steps.
        accumulate: Multiple of the user's own accumulation; 0: none at all.
        without: What is switched off (``ABLATIONS``).
        perturb: Seed of a perturbation by one rounding unit; None: none.
        seed: Random numbers from this seed; None: from the state that the process was forked with.
        trace: Also follow activations and their gradients at this step; 0: at none.
        group: Give the one process a group of its own, for a module that asks for one.
        validates: Whether the user's fit has validations; the audit makes none, but looks at what they would read.
    """

    name: str
    ranks: int
    plans: tuple[Plan, ...] = ()
    start: str = ""
    steps: int = 3
    accumulate: int = 1
    without: frozenset[str] = frozenset()
    perturb: int | None = None
    seed: int | None = None
    trace: int = 0
    group: bool = False
    validates: bool = False

    @property
    def processes(self) -> int:
        """How many processes."""
        return max(1, self.ranks)


# ---------------------------------------------------------------------- who gets which batches

Column = list[BatchRecord]  # the batches that the ranks had at the same time, in rank order
Assignment = Callable[[Column, int], list[list[ReplayBatch]]]  # a column, a rank -> batches for each process


def _replay_batch(records: Sequence[BatchRecord], choose: Choice | None = None) -> ReplayBatch:
    return ReplayBatch(tuple(record.file for record in records), tuple(record.rows for record in records), choose)


def even_rows(start: int, stop: int | None = None) -> Choice:
    """Choose the equal shares ``start`` to ``stop`` of as many as there are batches; rows that do not divide are left out."""

    def choose(counts: list[int]) -> list[int]:
        share = sum(counts) // len(counts)
        last = len(counts) if stop is None else stop
        return list(range(share * start, share * last))

    return choose


def exchanged_rows(counts: list[int]) -> list[int]:
    """Choose the first batch's rows, but the second one's row at every second place that all batches have."""
    own = counts[0]
    places = list(range(own))
    for place in range(1, min(counts), 2):
        places[place] = own + place
    return places


_ASSIGNMENTS: dict[str, Assignment] = {
    "same": lambda column, _: [[_replay_batch([record])] for record in column],
    "joined": lambda column, _: [[_replay_batch(column)]],
    "reversed": lambda column, _: [[_replay_batch(column[::-1])]],
    "local": lambda column, _: [[_replay_batch([record]) for record in column]],
    "even": lambda column, _: [[_replay_batch(column, even_rows(r, r + 1))] for r in range(len(column))],
    "even joined": lambda column, _: [[_replay_batch(column, even_rows(0))]],
    "one rank": lambda column, rank: [[_replay_batch([column[rank]])]],
    "exchanged": lambda column, _: [
        [_replay_batch(column[r:] + column[:r], exchanged_rows)] for r in range(len(column))
    ],
}


def plan_replay(
    recording: Recording, assignment: str, *, steps: int, rank: int, whole_windows: bool
) -> tuple[Plan, ...]:
    """Plan a replay of the batches that the ranks had, one plan for each process.

    Args:
        recording: Of the ranks.
        assignment: ``"same"``: each rank its own. ``"exchanged"``: the same with the next rank's row at every second place, so
            that no row changes its place in a batch. ``"joined"``: one process, in rank order. ``"reversed"``: the other way
            round. ``"local"``: one process, the ranks' batches one after the other. ``"even"``: joined rows, divided evenly.
            ``"even joined"``: those rows for one process. ``"one rank"``: the batches of ``rank`` alone.
        steps: Only the batches of the first so many optimizer steps.
        rank: For ``"one rank"``.
        whole_windows: Join all batches of an optimizer step, for ``"joined"`` and ``"reversed"``.
    """
    # what the ranks had at the same time; a rank that had more batches than another is cut
    of_ranks = [record.batches for record in recording.records]
    columns = [list(column) for column in zip(*of_ranks, strict=False) if column[0].step <= steps]
    if whole_windows:  # the batches of a step as one column, as if there were more ranks
        columns = [list(chain.from_iterable(group)) for _, group in groupby(columns, key=lambda column: column[0].step)]
    # each column for each process, then each process's columns
    assign = _ASSIGNMENTS[assignment]
    assigned = [(column[0].epoch, assign(column, rank)) for column in columns]
    processes = len(assigned[0][1]) if assigned else 1
    return tuple(_plan_of_process(assigned, process) for process in range(processes))


def _plan_of_process(assigned: Sequence[tuple[int, list[list[ReplayBatch]]]], process: int) -> Plan:
    """Collect one process's batches by epoch, out of (epoch, batches for each process)."""
    plan: dict[int, list[ReplayBatch]] = {}
    for epoch, of_processes in assigned:
        plan.setdefault(epoch, []).extend(of_processes[process])
    return list(plan.values())


# ---------------------------------------------------------------------- nests


def map_batch_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Build the same nest with its tensors changed."""
    children = children_of(tree)
    if children is not None:
        return rebuild_nest(tree, [map_batch_tensors(child, change) for _, child in children])
    return change(tree) if isinstance(tree, Tensor) else tree


def count_rows(tree: Any, hint: RowCount = None) -> RowCount:
    """Count the samples of a batch; None where nothing has any.

    Args:
        tree: A batch.
        hint: The data loader's batch size: taken where something in the batch has that length.
    """
    lengths = [leaf.shape[0] for _, leaf in leaves(tree) if is_array(leaf) and leaf.ndim]
    lists = _list_lengths(tree)
    if hint is not None and hint in (*lengths, *lists):
        return hint
    # tensors of many lengths: samples of their own size, so the lists tell
    found = lengths
    if lists and len(set(lengths)) != 1:
        found = lists
    if not found:
        return None
    ((most_common, _),) = Counter(found).most_common(1)
    return int(most_common)


def count_loader_rows(batch: Any, hints: LoaderRows) -> LoaderRows:
    """Count the samples of a batch loader by loader, as far as its nest is that of the loaders' ``hints``."""
    if not isinstance(hints, list):
        return count_rows(batch, hints)
    of_loaders = _loader_batches(batch, hints)
    if not of_loaders:  # a hook of the module has made something else of it
        return count_rows(batch)
    return [count_loader_rows(child, hint) for (_, child), hint in zip(of_loaders, hints, strict=True)]


def _loader_batches(batch: Any, rows: LoaderRows) -> list[tuple[str, Any]]:
    """List the batches of the loaders by key; none if ``rows`` counts those of one loader, or of others than the batch has."""
    if not isinstance(rows, list) or not isinstance(batch, (Mapping, list, tuple)) or len(batch) != len(rows):
        return []
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return [(f"[{key!r}]", child) for key, child in items]


def batch_digest(tree: Any) -> str:
    """Digest all tensors and plain values."""
    found = hashlib.blake2b(digest_size=12)
    for path, leaf in leaves(tree):
        content = tensor_digest(leaf) if isinstance(leaf, Tensor) else repr(leaf)
        found.update(f"{path} {content}".encode())
    return found.hexdigest()


def row_digests(batch: Any, rows: int) -> list[str]:
    """Digest each row of a batch; none if its rows hold no more than one number that is not whole."""
    parts = [leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == rows]
    if not any(part.is_floating_point() and part[0].numel() > 1 for part in parts if rows):
        return []
    return [batch_digest([part[row] for part in parts]) for row in range(rows)]


def _has_arrays(tree: Any) -> bool:
    return any(is_array(leaf) for _, leaf in leaves(tree))


def _list_lengths(tree: Any, *, root: bool = True) -> list[int]:
    """Collect the lengths of all lists inside a batch, but not of the batch itself."""
    found = []
    if isinstance(tree, list) and not root:
        found.append(len(tree))
    for _, child in children_of(tree) or ():
        found += _list_lengths(child, root=False)
    return found


def _has_sample_lists(tree: Any, rows: RowCount) -> bool:
    """Say whether some list holds one sample of its own size for each row (images of a detector, boxes)."""
    if isinstance(tree, list) and len(tree) == rows and len(set(map(type, tree))) == 1:
        arrays = [leaf for _, leaf in leaves(tree) if is_array(leaf)]
        if any(leaf.ndim == 0 or leaf.shape[0] != rows for leaf in arrays):
            return True
    return any(_has_sample_lists(child, rows) for _, child in children_of(tree) or ())


def _are_rows(tree: Any, rows: RowCount, sample_lists: bool) -> bool:
    """Say whether a list has one element for each row, and not tensors that hold all rows each (two views)."""
    return isinstance(tree, list) and len(tree) == rows and (sample_lists or not _has_arrays(tree))


# ---------------------------------------------------------------------- joining and cutting


def join_batches(
    batches: Sequence[Any],
    hints: Sequence[LoaderRows] | None = None,
    choose: Choice | None = None,
    path: str = "batch",
) -> Any:
    """Join the rows of all batches to one batch, in the order given; batches of several loaders loader by loader.

    Args:
        batches: One for each rank, alike in structure.
        hints: Number of rows in each, if that is known.
        choose: Chooses rows of the joined batch; None: all rows.
        path: Name of the batch in errors.

    Raises:
        InputError: A part that cannot be joined, by its path, with what each rank has there.
    """
    known = hints or [None] * len(batches)
    # batches of several loaders: the same for each of them
    of_ranks = [_loader_batches(batch, rows) for batch, rows in zip(batches, known, strict=True)]
    if all(of_ranks) and len({len(of_rank) for of_rank in of_ranks}) == 1:
        children = []
        for index, (key, _) in enumerate(of_ranks[0]):
            column = [of_rank[index][1] for of_rank in of_ranks]
            rows_of_loader = [rows[index] for rows in known if isinstance(rows, list)]
            children.append(join_batches(column, rows_of_loader, choose, path + key))
        return rebuild_nest(batches[0], children)
    # one loader
    pairs = zip(batches, known, strict=True)
    counts = [count_rows(batch, None if isinstance(rows, list) else rows) for batch, rows in pairs]
    joined = batches[0] if len(batches) == 1 else _Join(batches, counts).join(batches, path)
    if choose is None:
        return joined
    numbers = [count or 0 for count in counts]
    return take_rows(joined, choose(numbers), sum(numbers))


def take_rows(batch: Any, places: Sequence[int], hint: RowCount = None) -> Any:
    """Take the rows at ``places``; parts that are not rows stay."""
    rows = count_rows(batch, hint)
    sample_lists = _has_sample_lists(batch, rows)

    def cut(tree: Any) -> Any:
        if _are_rows(tree, rows, sample_lists):
            return [tree[place] for place in places]
        if is_array(tree) and tree.ndim and tree.shape[0] == rows:
            return tree[list(places)]
        children = children_of(tree)
        if children is None:
            return tree
        return rebuild_nest(tree, [cut(child) for _, child in children])

    return cut(batch)


class _Join:
    """Joins the ranks' batches of one loader, place by place.

    Args:
        batches: One for each rank.
        counts: Rows in each.
    """

    def __init__(self, batches: Sequence[Any], counts: list[RowCount]) -> None:
        self.counts = counts
        pairs = zip(batches, counts, strict=True)
        self.sample_lists = any(_has_sample_lists(batch, count) for batch, count in pairs)

    def join(self, items: Sequence[Any], path: str) -> Any:
        """Join what the ranks have at one place of the nest."""
        first = items[0]
        if any(type(item) is not type(first) for item in items):
            raise _cannot_join(path, "the same type on every rank", [type(item).__name__ for item in items])
        # tensors and arrays
        if isinstance(first, Tensor):
            return self._join_tensors(items, path)
        if is_array(first):
            try:
                return self._join_tensors([torch.as_tensor(item) for item in items], path).numpy()
            except TypeError as error:
                raise _cannot_join(path, "an array of numbers", [str(item.dtype) for item in items]) from error
        # lists of one element for each row
        lengths_fit = isinstance(first, list) and [len(item) for item in items] == self.counts
        if lengths_fit and _are_rows(first, self.counts[0], self.sample_lists):
            return list(chain.from_iterable(items))
        # plain values
        if children_of(first) is None:
            if all(_is_same(item, first) for item in items):
                return first
            shown = [repr(item)[:60] for item in items]
            raise _cannot_join(path, "a value that is the same on every rank, or tensors", shown)
        # nests, child by child
        nests = [dict(children_of(item) or ()) for item in items]
        if any(list(nest) != list(nests[0]) for nest in nests):
            shown = [" ".join(nest) or "nothing" for nest in nests]
            raise _cannot_join(path, "the same keys on every rank", shown)
        children = [self.join([nest[key] for nest in nests], f"{path}{key}") for key in nests[0]]
        return rebuild_nest(first, children)

    def _join_tensors(self, items: Sequence[Tensor], path: str) -> Tensor:
        first = items[0]
        if any(item.is_nested for item in items):
            shown = ["a nested tensor" if item.is_nested else "a tensor" for item in items]
            raise _cannot_join(path, "plain tensors", shown)
        # rows: alike in all but the first dimension, and as many as the batch has
        alike = all(item.ndim and item.shape[1:] == first.shape[1:] and item.dtype == first.dtype for item in items)
        if alike and [item.shape[0] for item in items] == self.counts:
            return torch.cat(list(items))
        # no rows, and the same everywhere: class weights, a temperature
        if all(_is_same(item, first) for item in items):
            return first
        pairs = zip(items, self.counts, strict=True)
        shown = [f"{tuple(item.shape)} {item.dtype}, in a batch of {count} rows" for item, count in pairs]
        expected = "rows along the first dimension, the other dimensions and the dtype alike on every rank"
        raise _cannot_join(path, expected, shown)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return tensor_digest(one) == tensor_digest(other)
    try:
        return bool(one == other)
    except Exception:  # what cannot be compared is the same only if it is the same object
        return one is other


def _cannot_join(path: str, expected: str, ranks: list[str]) -> InputError:
    return InputError(
        f"{path}, to be joined into the batch of one process",
        expected=expected,
        ranks=ranks,
        fix="Have the data's collate_fn return rows (a tensor or a list with one element for each sample) or equal values there.",
    )


# ---------------------------------------------------------------------- files


class _BatchPickler(pickle.Pickler):
    """Pickles classes that cannot be imported (of a closure) by name: the reader was forked from the same process."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, type):
            return NotImplemented
        try:
            importable = operator.attrgetter(obj.__qualname__)(sys.modules[obj.__module__]) is obj
        except (AttributeError, KeyError):
            importable = False
        if importable:
            return NotImplemented
        return _find_class, (obj.__module__, obj.__qualname__)


def _find_class(module: str, qualname: str) -> type:
    """Find a class among all that exist in this process."""
    # breadth first through the subclasses of object
    queue: list[type[Any]] = [object]
    seen: set[type[Any]] = {object}
    for cls in queue:
        if cls.__qualname__ == qualname and cls.__module__ == module:
            return cls
        new: list[type[Any]] = [sub for sub in type.__subclasses__(cls) if sub not in seen]
        seen.update(new)
        queue += new
    raise InputError(f"{module}.{qualname}: the class of something in a batch does not exist in the auditing process")


def save_batch(batch: Any, path: Path) -> None:
    """Store a batch, its tensors moved to the CPU.

    Raises:
        InputError: naming what cannot be stored.
    """
    stored = map_batch_tensors(batch, lambda tensor: tensor.detach().cpu().clone())
    try:
        with path.open("wb") as file:
            _BatchPickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(stored)
    except Exception as error:
        for where, leaf in leaves(stored):
            if not _can_pickle(leaf):
                raise _cannot_join(where, "something that can be pickled", [type(leaf).__name__]) from error
        raise


def _can_pickle(leaf: Any) -> bool:
    try:
        _BatchPickler(io.BytesIO()).dump(leaf)
    except Exception:
        return False
    return True


def load_batch(path: Path | str) -> Any:
    """Read a batch that ``save_batch`` stored. It may be of any class, so it is a pickle, which can run anything when it is read.

    Raises:
        InputError: where another user could have written it.
    """
    refuse_foreign_file(Path(path))
    with open(path, "rb") as file:
        return pickle.load(file)


def refuse_foreign_file(path: Path) -> None:
    """Refuse a file that is not this user's, in a folder into which this user alone writes.

    Raises:
        InputError: The owner of the file and of its folder.
    """
    if not hasattr(os, "getuid"):
        return
    file, folder, user = path.stat(), path.absolute().parent.stat(), os.getuid()
    expect(
        file.st_uid == user and folder.st_uid == user and not folder.st_mode & 0o022,
        f"{path}",
        expected=f"a file of user {user} in a folder that nobody else can write to",
        got=f"a file of user {file.st_uid}, in a folder of user {folder.st_uid} with mode {folder.st_mode & 0o777:o}",
        fix="Set TMPDIR to a folder of your own.",
        error=InputError,
    )
