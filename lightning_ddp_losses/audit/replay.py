"""Plans of runs: the ranks' batches for another run, which are joined, split, or used in turn.

A batch is a nest of dicts, lists, tuples, named tuples and dataclasses of tensors. Rows are counted along the first dimension and joined in
rank order. Parts that are not rows (a string, a number, None, a tensor of another length that is equal on all ranks) are passed unchanged.
Any other part raises an error that names it.
"""

from __future__ import annotations

import abc
import hashlib
import io
import logging
import operator
import os
import pickle
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain, groupby
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.audit import rank_record
from lightning_ddp_losses.core.inputs import children_of, is_array, leaves, rebuild_nest
from lightning_ddp_losses.core.random_state import derived_seed
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.randomness.step import PlannedRows

# ---------------------------------------------------------------------- runs


@dataclass
class Target(abc.ABC):
    """A training that is run on ranks and in one process. It does not have to be picklable, because processes are forked.

    Attributes:
        strategy: Name of the strategy or wrapper, or Lightning's object.
        seconds: Time limit for each run and for collectives.
        randomness: With ``"global"``, ranks draw the random numbers that one process draws, also in the user's run.
    """

    strategy: Any
    seconds: float
    randomness: str

    backend: ClassVar[str] = "gloo"
    by_trainer: ClassVar[bool] = True
    """Whether the runs are fits of a LightningModule, not loops."""

    @property
    def draws_by_window(self) -> bool:
        """Whether the rows of all micro-batches of a step can share a draw."""
        return True

    @abc.abstractmethod
    def train(self, run: Run, folder: Path, rank: int) -> rank_record.RankRecord:
        """Run one process's part of a run and return its record. The process group, if any, has already been created."""

    def perform(self, run: Run, folder: Path, rank: int) -> rank_record.RankRecord:
        """Create the process group if the run has one, train, and destroy the group. Warnings of the run are not shown."""
        world = run.ranks or int(run.group)
        if world:
            timeout = timedelta(seconds=self.seconds)
            process_groups.join(str(folder / "ranks"), rank, world, backend=self.backend, timeout=timeout)
        # hide Lightning's messages and warnings, which are about the training and not about the audit
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        try:
            return self.train(run, folder, rank)
        finally:
            process_groups.close(world=True)


Choice = Callable[[list[int]], list[int]]
"""Maps the number of rows in each recorded batch to the selected indices of the joined rows."""


@dataclass(frozen=True)
class ReplayBatch:
    """One batch of a replay: recorded batches joined in this order, or some of the joined rows.

    Attributes:
        records: The recorded batches.
        choose: Selects rows, for each loader separately. If None, all rows are used.
        whole: All batches whose rows share a draw, in the order of one process.
        number: Number of that draw.
    """

    records: Sequence[rank_record.BatchRecord]
    choose: Choice | None = None
    whole: Sequence[rank_record.BatchRecord] = ()
    number: int = 0

    def load(self) -> Any:
        """Read the recorded batches, and return the batch that is replayed."""
        batches = [load_batch(record.file) for record in self.records]
        return join_batches(batches, [record.rows for record in self.records], self.choose)

    @property
    def row_count(self) -> rank_record.LoaderRows:
        """Number of samples in the batch, computed from the recorded batches."""
        return self._count([record.rows for record in self.records])

    def rows_of_draw(self) -> PlannedRows:
        """Return the rows of the joint draw that this batch uses.

        Raises:
            InputError: if loaders have different numbers of rows.
        """
        starts: dict[int, int] = {}
        total = 0
        for record in self.whole:
            starts[id(record)] = total
            total += _single_count(record)
        order: list[int] = []
        for record in self.records:
            start = starts[id(record)]
            order += range(start, start + _single_count(record))
        if self.choose is not None:
            places = self.choose([_single_count(record) for record in self.records])
            order = [order[place] for place in places]
        return PlannedRows(tuple(order), total, derived_seed(self.number))

    def _count(self, rows: Sequence[rank_record.LoaderRows]) -> rank_record.LoaderRows:
        """Count the selected rows for each loader."""
        lists = [each for each in rows if isinstance(each, list)]
        if len(lists) == len(rows) and len(set(map(len, lists))) == 1:
            return [self._count(of_loader) for of_loader in zip(*lists, strict=True)]
        counts = [sum(rank_record.rows_by_loader(each)) for each in rows]
        return sum(counts) if self.choose is None else len(self.choose(counts))


def _single_count(record: rank_record.BatchRecord) -> int:
    """Return the number of rows of a batch, which must be equal for all loaders."""
    counts = set(rank_record.rows_by_loader(record.rows))
    is_one = len(counts) == 1
    expect(
        is_one,
        "batch",
        expected="as many rows in each loader",
        got=sorted(counts),
        error=InputError,
        fix="Give loaders of equal batch sizes.",
    )
    return counts.pop()


Plan = list[list[ReplayBatch]]
"""Batches by epoch."""


class Perturbation(NamedTuple):
    """A random perturbation of parameters and inputs.

    Attributes:
        seed: Seed of the directions.
        share: Size in rounding units.
    """

    seed: int
    share: float = 1.0

    def __str__(self) -> str:
        return f"{self.seed} by {self.share:g}"


@dataclass(frozen=True, eq=False)
class Run:
    """Plan of one run.

    Attributes:
        name: Name of the run and its folder.
        ranks: Number of processes with a process group, or 0 for one process without a group.
        plans: Batches for each process. If empty, the user's data is used.
        start: Recording with the initial weights. If None, the module's weights are used.
        steps: Number of optimizer steps.
        accumulate: Multiple of the user's accumulation, or 0 for no accumulation.
        without: Names in ``ABLATIONS`` that are switched off.
        perturb: Perturbation of parameters and inputs by rounding units, or None.
        trace: Step at which activations and their gradients are recorded, or 0.
        group: Create a process group for the one process, if the module requires one.
        exact_draws: Training steps draw the numbers that one process draws, from separate generators.
        by_row: They are those of ``randomness="by_row"``, in one process too.
    """

    name: str
    ranks: int
    plans: tuple[Plan, ...] = ()
    start: rank_record.Recording | None = None
    steps: int = 3
    accumulate: int = 1
    without: frozenset[str] = frozenset()
    perturb: Perturbation | None = None
    trace: int = 0
    group: bool = False
    exact_draws: bool = False
    by_row: bool = False

    @property
    def processes(self) -> int:
        """Number of processes."""
        return max(1, self.ranks)


# ---------------------------------------------------------------------- assignment of batches to processes

Column = list[rank_record.BatchRecord]  # simultaneous batches of all ranks, in rank order
Assignment = Callable[[Column], list[list[ReplayBatch]]]  # column -> batches for each process


def even_rows(start: int, stop: int | None = None) -> Choice:
    """Return a choice of shares ``start`` to ``stop`` of the joined rows, divided into one equal share per batch. Drops the remainder."""

    def choose(counts: list[int]) -> list[int]:
        share = sum(counts) // len(counts)
        last = len(counts) if stop is None else stop
        return list(range(share * start, share * last))

    return choose


def exchanged_rows(counts: list[int]) -> list[int]:
    """Select the rows of the first batch, with every second row that exists in all batches replaced by the second batch's row."""
    own = counts[0]
    places = list(range(own))
    for place in range(1, min(counts), 2):
        places[place] = own + place
    return places


_ASSIGNMENTS: dict[str, Assignment] = {
    "same": lambda column: [[ReplayBatch([record])] for record in column],
    "joined": lambda column: [[ReplayBatch(column)]],
    "reversed": lambda column: [[ReplayBatch(column[::-1])]],
    "local": lambda column: [[ReplayBatch([record]) for record in column]],
    "even": lambda column: [[ReplayBatch(column, even_rows(r, r + 1))] for r in range(len(column))],
    "even joined": lambda column: [[ReplayBatch(column, even_rows(0))]],
    "exchanged": lambda column: [[ReplayBatch(column[r:] + column[:r], exchanged_rows)] for r in range(len(column))],
}


def plan_replay(
    recording: rank_record.Recording,
    assignment: str | int,
    *,
    steps: int,
    whole_windows: bool,
    draws_by_window: bool = True,
) -> tuple[Plan, ...]:
    """Plan a replay of the ranks' batches, with one plan for each process.

    Args:
        recording: Recording of the ranks.
        assignment: ``"same"``: each rank uses its own batches. ``"exchanged"``: the same, with every second row replaced by the row of the
            next rank at the same position. ``"joined"``: one process with the batches joined in rank order. ``"reversed"``: joined in
            reverse order. ``"local"``: one process with the ranks' batches in turn. ``"even"``: joined rows, divided evenly. ``"even
            joined"``: the same rows for one process. A number: the batches of that rank for one process.
        steps: Number of optimizer steps whose batches are used.
        whole_windows: Join all batches of an optimizer step, for ``"joined"`` and ``"reversed"``.
        draws_by_window: With draws of one process, whether the rows of all batches of an optimizer step share a draw. Otherwise only the
            rows of simultaneous batches share a draw.
    """
    # combine simultaneous batches of all ranks. Additional batches of some ranks are dropped
    of_ranks = [record.batches for record in recording.records]
    columns = [list(column) for column in zip(*of_ranks, strict=False) if column[0].step <= steps]
    windows = {
        step: list(chain.from_iterable(group)) for step, group in groupby(columns, key=lambda each: each[0].step)
    }
    if whole_windows:  # combine the batches of a step in one column, as if there were more ranks
        columns = [*windows.values()]
    # assign each column to processes, by epoch
    plans: dict[int, dict[int, list[ReplayBatch]]] = {0: {}}
    for number, column in enumerate(columns):
        whole, draw = column, number
        if draws_by_window:
            whole, draw = windows[column[0].step], column[0].step
        own = [column[assignment]] if isinstance(assignment, int) else column
        assign = _ASSIGNMENTS["joined" if isinstance(assignment, int) else assignment]
        for process, given in enumerate(assign(own)):
            batches = [replace(batch, whole=whole, number=draw) for batch in given]
            plans.setdefault(process, {}).setdefault(column[0].epoch, []).extend(batches)
    return tuple(list(plan.values()) for plan in plans.values())


# ---------------------------------------------------------------------- nests


def map_batch_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return the same nest with ``change`` applied to its tensors."""
    children = children_of(tree)
    if children is not None:
        return rebuild_nest(tree, [map_batch_tensors(child, change) for _, child in children])
    return change(tree) if isinstance(tree, Tensor) else tree


def count_rows(tree: Any, hint: rank_record.RowCount = None) -> rank_record.RowCount:
    """Count the samples of a batch. Return None if there are none.

    Args:
        tree: A batch.
        hint: The data loader's batch size, which is returned if some part of the batch has that length.
    """
    lengths = [leaf.shape[0] for _, leaf in leaves(tree) if is_array(leaf) and leaf.ndim]
    lists = _list_lengths(tree)
    if hint is not None and hint in (*lengths, *lists):
        return hint
    # if tensors have different lengths, samples have different sizes, and lists contain one element per sample
    found = lengths
    if lists and len(set(lengths)) != 1:
        found = lists
    if not found:
        return None
    ((most_common, _),) = Counter(found).most_common(1)
    return int(most_common)


def count_loader_rows(batch: Any, hints: rank_record.LoaderRows) -> rank_record.LoaderRows:
    """Count the samples of a batch for each loader, if its structure matches the loaders' ``hints``."""
    if not isinstance(hints, list):
        return count_rows(batch, hints)
    of_loaders = _loader_batches(batch, hints)
    if not of_loaders:  # a hook of the module has changed the structure
        return count_rows(batch)
    return [count_loader_rows(child, hint) for _, child, hint in of_loaders]


def _loader_batches(batch: Any, rows: rank_record.LoaderRows) -> list[tuple[str, Any, rank_record.LoaderRows]]:
    """List key, batch and rows of each loader, or nothing if ``rows`` is a single number or does not match the batch."""
    if not isinstance(rows, list) or not isinstance(batch, (Mapping, list, tuple)) or len(batch) != len(rows):
        return []
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return [(f"[{key!r}]", child, count) for (key, child), count in zip(items, rows, strict=True)]


def batch_digest(tree: Any) -> str:
    """Digest all tensors and plain values."""
    found = hashlib.blake2b(digest_size=12)
    for path, leaf in leaves(tree):
        content = rank_record.tensor_digest(leaf) if isinstance(leaf, Tensor) else repr(leaf)
        found.update(f"{path} {content}".encode())
    return found.hexdigest()


def row_digests(batch: Any, rows: int) -> list[str]:
    """Digest each row of a batch. The list is empty unless rows have several floating-point numbers in one tensor."""
    parts = [leaf for _, leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == rows]
    if not any(part.is_floating_point() and part[0].numel() > 1 for part in parts if rows):
        return []
    return [batch_digest([part[row] for part in parts]) for row in range(rows)]


def _list_lengths(tree: Any, *, root: bool = True) -> list[int]:
    """Collect the lengths of all lists inside a batch, excluding the batch itself."""
    found = []
    if isinstance(tree, list) and not root:
        found.append(len(tree))
    for _, child in children_of(tree) or ():
        found += _list_lengths(child, root=False)
    return found


def _has_sample_lists(tree: Any, rows: rank_record.RowCount) -> bool:
    """Return whether some list contains one sample of any size for each row (images of a detector, boxes)."""
    if isinstance(tree, list) and len(tree) == rows and len(set(map(type, tree))) == 1:
        arrays = [leaf for _, leaf in leaves(tree) if is_array(leaf)]
        if any(leaf.ndim == 0 or leaf.shape[0] != rows for leaf in arrays):
            return True
    return any(_has_sample_lists(child, rows) for _, child in children_of(tree) or ())


def _are_rows(tree: Any, rows: rank_record.RowCount, sample_lists: bool) -> bool:
    """Return whether a list has one element for each row, as opposed to tensors with all rows (two views)."""
    if not isinstance(tree, list) or len(tree) != rows:
        return False
    return sample_lists or not any(is_array(leaf) for _, leaf in leaves(tree))


# ---------------------------------------------------------------------- joining and cutting


def join_batches(
    batches: Sequence[Any],
    hints: Sequence[rank_record.LoaderRows] | None = None,
    choose: Choice | None = None,
    path: str = "batch",
) -> Any:
    """Join the rows of all batches to one batch in order. Batches from several loaders are joined separately for each loader.

    Args:
        batches: One batch for each rank, with equal structures.
        hints: Number of rows in each batch, if known.
        choose: Selects rows of the joined batch. If None, all rows are used.
        path: Name of the batch in errors.

    Raises:
        InputError: for a part that cannot be joined, with its path and the part of each rank.
    """
    known = hints or [None] * len(batches)
    # join batches from several loaders recursively
    of_ranks = [_loader_batches(batch, rows) for batch, rows in zip(batches, known, strict=True)]
    if all(of_ranks) and len({len(of_rank) for of_rank in of_ranks}) == 1:
        children = []
        for column in zip(*of_ranks, strict=True):
            keys, parts, rows_of_loader = zip(*column, strict=True)
            children.append(join_batches(parts, rows_of_loader, choose, path + keys[0]))
        return rebuild_nest(batches[0], children)
    # one loader
    if len(batches) == 1 and choose is None:
        return batches[0]
    pairs = zip(batches, known, strict=True)
    counts = [count_rows(batch, None if isinstance(rows, list) else rows) for batch, rows in pairs]
    return _Join(batches, counts, choose).join(batches, path)


def take_rows(batch: Any, places: Sequence[int]) -> Any:
    """Select the rows at ``places``. Parts that are not rows are unchanged."""
    return join_batches([batch], choose=lambda _: list(places))


class _Join:
    """Joins the ranks' batches of one loader, part by part.

    Args:
        batches: One batch for each rank.
        counts: Number of rows in each batch.
        choose: Selects rows of the joined batch. If None, all rows are used.
    """

    def __init__(
        self, batches: Sequence[Any], counts: list[rank_record.RowCount], choose: Choice | None = None
    ) -> None:
        self.counts = counts
        self.places = None if choose is None else choose([count or 0 for count in counts])
        pairs = zip(batches, counts, strict=True)
        self.sample_lists = any(_has_sample_lists(batch, count) for batch, count in pairs)

    def join(self, items: Sequence[Any], path: str) -> Any:
        """Join the ranks' parts at one path of the nest."""
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
        # lists with one element for each row
        lengths_fit = isinstance(first, list) and [len(item) for item in items] == self.counts
        if lengths_fit and _are_rows(first, self.counts[0], self.sample_lists):
            rows = list(chain.from_iterable(items))
            return rows if self.places is None else [rows[place] for place in self.places]
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
        # tensors of rows have equal dimensions except the first, which is the number of rows in the batch
        alike = all(item.ndim and item.shape[1:] == first.shape[1:] and item.dtype == first.dtype for item in items)
        if alike and [item.shape[0] for item in items] == self.counts:
            joined = torch.cat(list(items))
            return joined if self.places is None else joined[self.places]
        # other tensors must be equal on all ranks: class weights, a temperature
        if all(_is_same(item, first) for item in items):
            return first
        pairs = zip(items, self.counts, strict=True)
        shown = [f"{tuple(item.shape)} {item.dtype}, in a batch of {count} rows" for item, count in pairs]
        expected = "rows along the first dimension, the other dimensions and the dtype alike on every rank"
        raise _cannot_join(path, expected, shown)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor):
        return rank_record.tensor_digest(one) == rank_record.tensor_digest(other)
    try:
        return bool(one == other)
    except Exception:  # parts that cannot be compared are equal only if they are the same object
        return False


def _cannot_join(path: str, expected: str, ranks: list[str]) -> InputError:
    return InputError(
        f"{path}, to be joined into the batch of one process",
        expected=expected,
        ranks=ranks,
        fix="Have the data's collate_fn return rows (a tensor or a list with one element for each sample) or equal values there.",
    )


# ---------------------------------------------------------------------- files


class _BatchPickler(pickle.Pickler):
    """Pickles classes that cannot be imported (from a closure) by name, because the reader was forked from the same process."""

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
    # search the subclasses of object breadth first
    queue: list[type[Any]] = [object]
    seen: set[type[Any]] = {object}
    for cls in queue:
        if cls.__qualname__ == qualname and cls.__module__ == module:
            return cls
        new: list[type[Any]] = [sub for sub in type.__subclasses__(cls) if sub not in seen]
        seen.update(new)
        queue += new
    raise InputError(
        f"{module}.{qualname}: the class of something in a batch does not exist in the auditing process",
        fix="Define the class at the top level of a module that the auditing process imports.",
    )


def save_batch(batch: Any, path: Path) -> None:
    """Store a batch with its tensors moved to the CPU.

    Raises:
        InputError: for a part that cannot be stored, with its path.
    """
    stored = map_batch_tensors(batch, lambda tensor: tensor.detach().cpu().clone())
    try:
        with path.open("wb") as file:
            _BatchPickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(stored)
    except Exception as error:
        for where, leaf in leaves(stored):
            if not can_pickle(leaf, _BatchPickler):
                raise _cannot_join(where, "something that can be pickled", [type(leaf).__name__]) from error
        raise


def can_pickle(value: Any, pickler: type[pickle.Pickler] = pickle.Pickler) -> bool:
    """Return whether a value can be pickled."""
    try:
        pickler(io.BytesIO()).dump(value)
    except Exception:
        return False
    return True


def load_batch(path: Path | str) -> Any:
    """Read a batch that ``save_batch`` stored. A batch may have any class, so the file is a pickle, which can run code when it is read.

    Raises:
        InputError: if another user could have written the file.
    """
    refuse_foreign_file(Path(path))
    with open(path, "rb") as file:
        return pickle.load(file)


def refuse_foreign_file(path: Path) -> None:
    """Reject a file unless it belongs to this user and is in a folder to which only this user can write.

    Raises:
        InputError: with the owners of the file and of its folder.
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
