"""What this rank's training data hold: batches (rows, labels, a short hash of each row), and DataLoaders (sizes, samplers, epochs).

`BatchReader` reads each batch once for all checks. Batches on the host are read in every step (up to 64 rows, whole or, of wide ones, 32
numbers); those on an accelerator only now and then, and but for the first of an epoch one batch later, when a copy that nobody waited for
has arrived. From a DataLoader only that is taken which can be had without drawing from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_ddp_losses.callbacks.runner import CheckRunner
from lightning_ddp_losses.core import compat
from lightning_ddp_losses.core.host_copy import HostCopy
from lightning_ddp_losses.distributed import fingerprint

BUCKETS = 16  # of labels
_MAX_LABELS = 1024  # rows whose labels are counted
_FIRST, _EVERY = 16, 50  # batches of an epoch that are read on an accelerator
_COUNT_NAMES = ("num_graphs", "batch_size")
_LABEL_NAMES = ("labels", "label", "targets", "target", "y")
_MASK = (1 << 63) - 1
_MAX_INDICES = 1 << 16  # of an order
_MAX_DEPTH = 3  # samplers inside samplers
_MAX_ATTRIBUTES = 64


# ---------------------------------------------------------------------- batches


class _LateBatch(NamedTuple):
    """What is hashed and counted of a batch, on its way from an accelerator.

    Attributes:
        step: Optimizer steps before it.
        rows: How many are hashed.
        tables: Of each tensor.
        labels: Of its rows; None where there are none.
    """

    step: int
    rows: int
    tables: list[HostCopy]
    labels: HostCopy | None


class EpochRecord(NamedTuple):
    """Record of an epoch in a checkpoint, by which a resumed run sees that it draws the epoch from its start again.

    Attributes:
        epoch: The epoch.
        first: Content of rank 0's first batch in it.
        latest: Content of its latest batch; equal to ``first`` if batches do not change.
    """

    epoch: int
    first: int
    latest: int


class BatchReader:
    """Remembers what was read of the batches; one for all checks of a fit (``runner.shared(BatchReader)``).

    Attributes:
        rows: Rows of the latest batch: of its first tensor.
        samples: What it has of what the user counts: its rows, of graphs the graphs and not their nodes; 0 where that is not known.
        content: Hash of it, on an accelerator of the one before; 0 if that was not read.
        distinct: Different rows in that.
        read_step: Optimizer steps before that.
        first: Content of the first batch, by epoch.
        total_rows: Rows of the fit.
        number: Batches of the fit.
    """

    def __init__(self, runner: CheckRunner) -> None:
        self._runner = runner
        self._last: tuple[int, int] | None = None
        self.rows = self.samples = self.total_rows = self.number = 0
        self.content = self.distinct = self.read_step = 0
        self.first: dict[int, int] = {}
        self._epoch = -1
        self._latest = 0  # content of the latest batch that was read
        self._late: _LateBatch | None = None
        self._counts = [0] * BUCKETS

    def see(self, batch: Any, index: int) -> None:
        """Read a batch, once."""
        epoch = self._runner.trainer.current_epoch
        if self._last == (epoch, index):
            return
        self._last = (epoch, index)
        self.content = self.distinct = 0
        self._read_late()
        is_first = epoch != self._epoch
        if is_first:
            self._epoch, self._counts = epoch, [0] * BUCKETS
        # rows are those of the first tensor
        tensors = [leaf for leaf in fingerprint.batch_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
        self.rows = tensors[0].shape[0] if tensors else 0
        self.samples = self.rows
        if any(tensor.shape[0] != self.rows for tensor in tensors) or not tensors:
            self.samples = sample_count(batch, tensors)
        self.total_rows += self.rows
        self.number += 1
        on_host = all(tensor.device.type == "cpu" for tensor in tensors)
        if self.rows and (on_host or is_first or index < _FIRST or index % _EVERY == 0):
            self._read(batch, tensors)
            if on_host or is_first:
                self._read_late()
        self.first.setdefault(epoch, self.content)

    def _read(self, batch: Any, tensors: list[Tensor]) -> None:
        """Ask for what is hashed and counted of a batch."""
        number = min(self.rows, fingerprint.MAX_ROWS)
        labels = labels_of(batch, self.rows)
        tables = [HostCopy(table) for table in fingerprint.row_tables(tensors, self.rows, number)]
        sent = None if labels is None else HostCopy(labels[:_MAX_LABELS])
        self._late = _LateBatch(self._runner.step, number, tables, sent)

    def _read_late(self) -> None:
        late, self._late = self._late, None
        if late is None:
            return
        # a hash of each row, and one of all of them
        hashes = fingerprint.hash_tables([table.read() for table in late.tables], late.rows)
        self.distinct, self.read_step = len(set(hashes)), late.step
        self.content = self._latest = fingerprint.combine(hashes) & _MASK or 1
        # labels by bucket
        if late.labels is None:
            return
        for label in late.labels.read().tolist():
            # neighbouring classes go to different buckets, and class 0 and 16 to the same
            self._counts[label % BUCKETS] += 1

    @property
    def counts(self) -> list[int]:
        """Labels of this epoch by bucket, of the first rows of each batch."""
        self._read_late()
        return self._counts

    def epoch_record(self) -> EpochRecord | None:
        """Return the record of this epoch; None before its first batch."""
        self._read_late()
        if self._epoch < 0:
            return None
        return EpochRecord(self._epoch, self.first[self._epoch], self._latest)

    def batch_end(self) -> None:
        """Do nothing: batches are counted as they come."""

    def close(self) -> None:
        """Do nothing: there is nothing to leave."""


def sample_count(batch: Any, tensors: Sequence[Tensor]) -> int:
    """Return the samples of a batch whose tensors have different numbers of rows; 0 where that cannot be known.

    Graphs are batched as one: nodes of all of them below each other, edges as pairs of nodes, and something per graph.
    """
    # what the batch says of itself (PyTorch Geometric, DGL, TensorDict)
    parts = [batch]
    if isinstance(batch, (tuple, list)):
        parts += batch
    for part in parts:
        for name in _COUNT_NAMES:
            count = getattr(part, name, None)
            if isinstance(count, tuple) and count:
                count = count[0]
            if isinstance(count, int) and not isinstance(part, Tensor):
                return count
    if not tensors:
        return 0
    # not a graph: the first tensor has the rows
    rows = tensors[0].shape[0]
    named: Mapping[Any, Any] = batch if isinstance(batch, Mapping) else {}
    # edges are integers (2, E)
    edges = [tensor for tensor in tensors[1:] if _is_integer(tensor) and tensor.ndim == 2 and tensor.shape[0] == 2]
    if isinstance(named.get("edge_index"), Tensor):
        edges = [named["edge_index"]]
    if not edges:
        return rows
    # a graph: by its labels, else by the one number that is neither of nodes nor of edges
    labels = _named_labels(named)
    if isinstance(labels, Tensor) and labels.ndim:
        return labels.shape[0]
    others = {tensor.shape[0] for tensor in tensors if tensor is not edges[0]}
    others -= {rows, edges[0].shape[1]}
    if len(others) == 1:
        return others.pop()
    return 0


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def _named_labels(batch: Mapping[Any, Any]) -> Any:
    return next((batch[name] for name in _LABEL_NAMES if name in batch), None)


def labels_of(batch: Any, rows: int) -> Tensor | None:
    """Return the class labels of a batch: a named entry, or the second of a tuple; one integer per row."""
    found: Any = None
    if isinstance(batch, Mapping):
        found = _named_labels(batch)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        found = batch[1]
    if not isinstance(found, Tensor) or found.ndim != 1 or found.shape[0] != rows or not _is_integer(found):
        return None
    return torch.Tensor.detach(found)


def label_imbalance(counts_by_rank: Sequence[Sequence[float]]) -> float:
    """Return the largest total variation between a rank's labels and those of all ranks: 0 is alike, 1 has nothing in common."""
    counts = torch.tensor(counts_by_rank, dtype=torch.float64)
    known = counts[counts.sum(1) > 0]
    if not len(known):
        return 0.0
    distances = known / known.sum(1, keepdim=True) - counts.sum(0) / counts.sum()
    return float(distances.abs().sum(1).max()) / 2


# ---------------------------------------------------------------------- DataLoaders


def data_loaders(trainer: Trainer, *, validation: bool = False) -> list[DataLoader[Any]]:
    """Return the DataLoaders as they run, with Lightning's samplers."""
    loop: Any = trainer.fit_loop
    if validation:
        loop = loop.epoch_loop.val_loop
    combined = compat.combined_loader(loop)
    if combined is None:
        return []
    return [loader for loader in combined.flattened if isinstance(loader, DataLoader)]


def is_iterable(loader: DataLoader[Any]) -> bool:
    """Say whether no sampler decides which rows a rank gets."""
    return isinstance(loader.dataset, IterableDataset)


def batch_sizes(loader: DataLoader[Any]) -> tuple[int, int]:
    """Return the rows of this rank's full batches and of its last one; zeros where they cannot be known."""
    # only torch's own BatchSampler cuts a known number of rows
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler or is_iterable(loader):
        return 0, 0
    try:
        rows = len(batches.sampler)  # type: ignore[arg-type]
    except TypeError:
        return 0, 0
    size = batches.batch_size
    rest = 0 if batches.drop_last else rows % size
    return size, rest or size


def sampler_shuffled_by_lightning(loader: DataLoader[Any]) -> str:
    """Return the class of a sampler that makes batches which belong together, and that Lightning shuffles all the same.

    Known by a batch size or a number of rows per class of its own; torch's samplers have none.
    """
    sampler = loader.sampler
    if not isinstance(sampler, DistributedSamplerWrapper) or not sampler.shuffle:
        return ""
    inner = compat.wrapped_sampler(sampler.dataset)
    is_structured = any(hasattr(inner, name) for name in ("m_per_class", "batch_size", "samples_per_class"))
    if not is_structured or type(inner).__module__.startswith("torch."):
        return ""
    return type(inner).__name__


def drawn_order(loader: DataLoader[Any]) -> int:
    """Return a number that must be equal on all ranks, which cut their parts out of one order; 0 where nothing can be said."""
    sampler = loader.sampler
    if isinstance(sampler, DistributedSamplerWrapper):
        # what Lightning drew once, for all ranks to cut from
        head = compat.drawn_indices(sampler.dataset)[:_MAX_INDICES]
        if head and all(isinstance(index, int) for index in head) and len(set(head)) == len(head):
            return fingerprint.hash_text(repr(head), 62)
        return 0  # drawn with replacement, every rank's part is as good as another
    if type(sampler) is DistributedSampler and sampler.shuffle:
        return fingerprint.hash_text(f"{sampler.seed} {sampler.epoch}", 62)
    return 0


def shuffling_samplers(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the samplers that shuffle by epoch, by path, also those inside other samplers."""
    found: dict[str, Any] = {}
    queue = [("sampler", loader.sampler, 0), ("batch_sampler", loader.batch_sampler, 0)]
    seen: set[int] = set()
    for path, candidate, depth in queue:
        if id(candidate) in seen or candidate is None:
            continue
        seen.add(id(candidate))
        shuffles = getattr(candidate, "shuffle", False) is True
        if shuffles and hasattr(candidate, "set_epoch") and hasattr(candidate, "epoch"):
            found[path] = candidate
        if depth < _MAX_DEPTH:
            attributes = getattr(candidate, "__dict__", {}).items()
            for name, value in itertools.islice(attributes, _MAX_ATTRIBUTES):
                if hasattr(value, "__iter__") and hasattr(value, "__dict__") and not isinstance(value, Dataset):
                    queue.append((f"{path}.{name}", value, depth + 1))
    return found
