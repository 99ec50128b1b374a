"""The plan of a run: on how many processes, on which recorded batches, without what."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import operator
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.audit.rank_record import Recording, digest_of
from lightning_ddp_losses.errors import InputError


@dataclass(frozen=True)
class Micro:
    """One batch of a replay: recorded batches joined in this order, or a part of what they make.

    Attributes:
        files: The recorded batches.
        hints: Rows in each, as the data loader meant.
        part: (start, stop, W): equal parts ``start`` to ``stop`` of W; what does not divide is left out. None: all rows.
    """

    files: tuple[str, ...]
    hints: tuple[int | None, ...]
    part: tuple[int, int, int] | None = None

    def load(self) -> Any:
        """The batch."""
        whole = concatenate([load(file) for file in self.files], self.hints)
        if self.part is None:
            return whole
        start, stop, W = self.part
        rows = rows_of(whole, sum(h or 0 for h in self.hints)) or 0
        return take(whole, slice(rows // W * start, rows // W * stop), rows)


Plan = list[list[Micro]]
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
        without: What is switched off (``SWITCHES``).
        perturb: Seed of a perturbation by one rounding unit; None: none.
        seed: Random numbers from this seed; None: from the state that the process was forked with.
        trace: Also follow activations and their gradients at this step; 0: at none.
        group: Give the one process a group of its own, for a module that asks for one.
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

    @property
    def processes(self) -> int:
        """How many processes."""
        return max(1, self.ranks)


@dataclass
class Subject:
    """What is audited: the same in every process, since processes are forked.

    Attributes:
        model: The LightningModule.
        data: Data module, data loaders, or None for the module's own.
        strategy: Lightning's name or object.
        options: Further options of the Trainer.
        deterministic: Ask torch for deterministic algorithms.
        ckpt_path: A checkpoint to start from.
        scratch: A folder that goes when the audit ends.
        seconds: How long a rank waits for another.
    """

    model: Any
    data: Any
    strategy: Any
    options: dict[str, Any]
    deterministic: bool
    scratch: Path
    seconds: float
    ckpt_path: Any = None


Logged = dict[str, Any]
"""What the recorder notes of a batch: epoch, step, file, hint, rows."""


def _micro(logged: Sequence[Logged], part: tuple[int, int, int] | None = None) -> Micro:
    return Micro(tuple(each["file"] for each in logged), tuple(each["hint"] for each in logged), part)


_DEALS: dict[str, Callable[[list[Logged], int], list[list[Micro]]]] = {
    "same": lambda column, _: [[_micro([each])] for each in column],
    "joined": lambda column, _: [[_micro(column)]],
    "reversed": lambda column, _: [[_micro(column[::-1])]],
    "local": lambda column, _: [[_micro([each]) for each in column]],
    "even": lambda column, _: [[_micro(column, (r, r + 1, len(column)))] for r in range(len(column))],
    "even joined": lambda column, _: [[_micro(column, (0, len(column), len(column)))]],
    "one rank": lambda column, rank: [[_micro([column[rank]])]],
}


def plan_of(recording: Recording, deal: str, *, steps: int, rank: int = 0) -> tuple[Plan, ...]:
    """Batches of a replay from those that the ranks had, one plan for each process.

    Args:
        recording: Of the ranks.
        deal: ``"same"``: each rank its own. ``"joined"``: one process, in rank order. ``"reversed"``: the other way round.
            ``"local"``: one process, the ranks' batches one after the other. ``"even"``: joined rows, dealt evenly.
            ``"even joined"``: those rows for one process. ``"one rank"``: the batches of ``rank`` alone. ``"whole"``: one
            process, all batches of an optimizer step joined.
        steps: Only the batches of the first so many optimizer steps.
        rank: For ``"one rank"``.
    """
    logs: list[list[Logged]] = [page["batches"] for page in recording.facts]
    columns = [list(column) for column in zip(*logs, strict=False) if column[0]["step"] <= steps]
    if deal == "whole":  # the batches of a step as one column, as if there were more ranks
        groups = groupby(columns, key=lambda column: column[0]["step"])
        columns, deal = [[each for column in group for each in column] for _, group in groups], "joined"
    epochs = [list(group) for _, group in groupby(columns, key=lambda column: column[0]["epoch"])]
    dealt = [[_DEALS[deal](column, rank) for column in epoch] for epoch in epochs]
    processes = len(dealt[0][0]) if dealt else 1
    return tuple([[micro for column in epoch for micro in column[p]] for epoch in dealt] for p in range(processes))


# ----------------------------------------------------------------------

Rows = int | None


def leaves(tree: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """What is in a nest, by path; a list of plain values (a column of strings) is one leaf."""
    children = _children(tree)
    if children is None:
        yield path, tree
        return
    for key, child in children:
        yield from leaves(child, f"{path}{key}")


def map_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same nest with its tensors changed."""
    children = _children(tree)
    if children is not None:
        return _rebuild(tree, [map_tensors(child, change) for _, child in children])
    return change(tree) if isinstance(tree, Tensor) else tree


def rows_of(tree: Any, hint: Rows = None) -> Rows:
    """Number of samples; None where nothing has any.

    Args:
        tree: A batch.
        hint: The data loader's batch size: taken where something in the batch has that length.
    """
    lengths = [leaf.shape[0] for _, leaf in leaves(tree) if _is_array(leaf) and leaf.ndim]
    lists = _list_lengths(tree)
    if hint is not None and hint in (*lengths, *lists):
        return hint
    found = lists if lists and len(set(lengths)) != 1 else lengths  # tensors of many lengths: samples of their own size
    return Counter(found).most_common(1)[0][0] if found else None


def digest(tree: Any) -> str:
    """A digest of all tensors and plain values."""
    found = hashlib.blake2b(digest_size=12)
    for path, leaf in leaves(tree):
        found.update(f"{path} {digest_of(leaf) if isinstance(leaf, Tensor) else repr(leaf)}".encode())
    return found.hexdigest()


def concatenate(batches: Sequence[Any], hints: Sequence[Rows] | None = None) -> Any:
    """One batch of the rows of all, in the order given.

    Args:
        batches: One for each rank, alike in structure.
        hints: How many rows each has, where that is known.

    Raises:
        InputError: naming the path of what cannot be joined, with what each rank has there.
    """
    if len(batches) == 1:
        return batches[0]
    rows = [rows_of(batch, hint) for batch, hint in zip(batches, hints or [None] * len(batches), strict=True)]
    ragged = any(_is_ragged(batch, n) for batch, n in zip(batches, rows, strict=True))
    return _join(list(batches), _Rows(rows, ragged), "batch")


def take(batch: Any, part: slice, hint: Rows = None) -> Any:
    """The rows of ``part``; what is not rows stays."""
    rows = rows_of(batch, hint)
    ragged = _is_ragged(batch, rows)

    def cut(tree: Any) -> Any:
        if isinstance(tree, list) and len(tree) == rows and (ragged or not _has_arrays(tree)):
            return tree[part]
        if _is_array(tree):
            return tree[part] if tree.ndim and tree.shape[0] == rows else tree
        children = _children(tree)
        return tree if children is None else _rebuild(tree, [cut(child) for _, child in children])

    return cut(batch)


# ---------------------------------------------------------------------- joining


@dataclasses.dataclass(frozen=True)
class _Rows:
    """How many rows each rank's batch has, and whether its lists hold one sample each."""

    counts: list[Rows]
    ragged: bool


def _join(items: list[Any], rows: _Rows, path: str) -> Any:
    first = items[0]
    if any(type(item) is not type(first) for item in items):
        raise _cannot(path, "the same type on every rank", [type(item).__name__ for item in items])
    if isinstance(first, Tensor):
        return _join_tensors(items, rows, path)
    if _is_array(first):
        try:
            return _join_tensors([torch.as_tensor(item) for item in items], rows, path).numpy()
        except TypeError as error:
            raise _cannot(path, "an array of numbers", [str(item.dtype) for item in items]) from error
    if (
        isinstance(first, list)
        and [len(item) for item in items] == rows.counts
        and (rows.ragged or not _has_arrays(first))
    ):
        return [element for item in items for element in item]
    nests = [_children(item) for item in items]
    if nests[0] is None:
        if all(_same(item, first) for item in items):
            return first
        raise _cannot(path, "a value that is the same on every rank, or tensors", [repr(item)[:60] for item in items])
    keys = [[key for key, _ in nest or ()] for nest in nests]
    if any(key != keys[0] for key in keys):
        raise _cannot(path, "the same keys on every rank", [" ".join(key) or "nothing" for key in keys])
    columns = zip(*([child for _, child in nest or ()] for nest in nests), strict=True)
    return _rebuild(
        first, [_join(list(column), rows, f"{path}{key}") for key, column in zip(keys[0], columns, strict=True)]
    )


def _join_tensors(items: list[Tensor], rows: _Rows, path: str) -> Tensor:
    first = items[0]
    if any(item.is_nested for item in items):
        raise _cannot(path, "plain tensors", ["a nested tensor" if item.is_nested else "a tensor" for item in items])
    shaped = all(item.ndim and item.shape[1:] == first.shape[1:] and item.dtype == first.dtype for item in items)
    if shaped and all(item.shape[0] == n for item, n in zip(items, rows.counts, strict=True)):
        return torch.cat(items)
    if all(item.shape == first.shape and item.dtype == first.dtype and _same(item, first) for item in items):
        return first  # no rows, and the same everywhere: class weights, a temperature
    raise _cannot(
        path,
        "rows along the first dimension, the other dimensions and the dtype alike on every rank",
        [
            f"{tuple(item.shape)} {item.dtype}, in a batch of {n} rows"
            for item, n in zip(items, rows.counts, strict=True)
        ],
    )


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) or type(leaf).__name__ == "ndarray"


def _has_arrays(tree: Any) -> bool:
    return any(_is_array(leaf) for _, leaf in leaves(tree))


def _list_lengths(tree: Any, *, root: bool = True) -> list[int]:
    """Lengths of all lists inside a batch."""
    children = _children(tree)
    own = [] if root or not isinstance(tree, list) else [len(tree)]
    return own + [n for _, child in children or () for n in _list_lengths(child, root=False)]


def _is_ragged(tree: Any, rows: Rows) -> bool:
    """Whether some list holds one sample of its own size for each row (images of a detector, boxes)."""
    children = _children(tree)
    if isinstance(tree, list) and len(tree) == rows and len({type(each) for each in tree}) == 1:
        arrays = [leaf for _, leaf in leaves(tree) if _is_array(leaf)]
        if any(leaf.ndim == 0 or leaf.shape[0] != rows for leaf in arrays):
            return True
    return any(_is_ragged(child, rows) for _, child in children or ())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return digest_of(one) == digest_of(other)
    try:
        return bool(one == other)
    except Exception:
        return one is other


def _cannot(path: str, expected: str, ranks: list[str]) -> InputError:
    return InputError(
        f"{path}, to be joined into the batch of one process",
        expected=expected,
        ranks=ranks,
        fix="Have the data's collate_fn return rows (a tensor or a list with one element for each sample) or equal values there.",
    )


# ---------------------------------------------------------------------- nests


def _children(tree: Any) -> list[tuple[str, Any]] | None:
    """Children by key; None for a leaf."""
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", child) for key, child in tree.items()]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", child) for name, child in zip(tree._fields, tree, strict=True)]
    if isinstance(tree, tuple) or (
        isinstance(tree, list) and any(_children(c) is not None or isinstance(c, Tensor) for c in tree)
    ):
        return [(f"[{index}]", child) for index, child in enumerate(tree)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{f.name}", getattr(tree, f.name)) for f in dataclasses.fields(tree)]
    return None


def _rebuild(tree: Any, children: Sequence[Any]) -> Any:
    """A nest like ``tree`` with other children."""
    if isinstance(tree, Mapping):
        changed = dict(zip(tree, children, strict=True))
        return changed if type(tree) is dict else type(tree)(changed)  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*children)
    if isinstance(tree, (tuple, list)):
        return type(tree)(children)
    copied = object.__new__(type(tree))
    for each, child in zip(dataclasses.fields(tree), children, strict=True):
        object.__setattr__(copied, each.name, child)
    return copied


# ---------------------------------------------------------------------- files


class _Pickler(pickle.Pickler):
    """Pickles classes that cannot be imported (of a closure) by name: the reader was forked from the same process."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, type):
            return NotImplemented
        try:
            importable = operator.attrgetter(obj.__qualname__)(sys.modules[obj.__module__]) is obj
        except (AttributeError, KeyError):
            importable = False
        return NotImplemented if importable else (_find_class, (obj.__module__, obj.__qualname__))


def _find_class(module: str, qualname: str) -> type:
    queue: list[type[Any]] = [object]
    seen: set[type[Any]] = {object}
    for cls in queue:
        if cls.__qualname__ == qualname and cls.__module__ == module:
            return cls
        new: list[type[Any]] = [sub for sub in type.__subclasses__(cls) if sub not in seen]
        seen.update(new)
        queue += new
    raise InputError(f"{module}.{qualname}: the class of something in a batch does not exist in the auditing process")


def save(batch: Any, path: Path) -> None:
    """Store a batch, its tensors moved to the CPU.

    Raises:
        InputError: naming what cannot be stored.
    """
    stored = map_tensors(batch, lambda tensor: tensor.detach().cpu().clone())
    try:
        with path.open("wb") as file:
            _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(stored)
    except Exception as error:
        odd = next(((where, leaf) for where, leaf in leaves(stored) if not _can_pickle(leaf)), None)
        if odd is None:
            raise
        raise _cannot(odd[0], "something that can be pickled", [type(odd[1]).__name__]) from error


def _can_pickle(leaf: Any) -> bool:
    try:
        _Pickler(io.BytesIO()).dump(leaf)
    except Exception:
        return False
    return True


def load(path: Path | str) -> Any:
    """A batch that ``save`` stored."""
    with open(path, "rb") as file:
        return pickle.load(file)
