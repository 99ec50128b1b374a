"""Reads this rank's training data: batches (rows, labels, a short hash of each row), and DataLoaders (sizes, samplers, epochs).

`BatchReader` reads each batch once for all checks. Batches on the host are read in every step: up to 64 rows, and 32 numbers of a wide row.
Batches on an accelerator are read at intervals. Except for the first batch of an epoch, their copies are read one batch later, when they
have arrived. DataLoaders are read without drawing from them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

from lightning_ddp_losses.callbacks.runner import CheckRunner
from lightning_ddp_losses.core import lightning_compat
from lightning_ddp_losses.core.host_copy import HostCopy
from lightning_ddp_losses.distributed import fingerprint
from lightning_ddp_losses.samplers.global_batch import draw_of

BUCKETS = 16  # number of buckets for labels
_MAX_LABELS = 1024  # largest number of labels counted in a batch
_FIRST, _EVERY = 16, 50  # on an accelerator, the first 16 batches of an epoch and every 50th batch are read
_COUNT_NAMES = ("num_graphs", "batch_size")
_LABEL_NAMES = ("labels", "label", "targets", "target", "y")
_MASK = (1 << 63) - 1
_MAX_INDICES = 1 << 16  # largest number of indices hashed in an order
_MAX_DEPTH = 3  # depth of nested samplers that are searched
_MAX_ATTRIBUTES = 64


# ---------------------------------------------------------------------- batches


class EpochRecord(NamedTuple):
    """Record of an epoch in a checkpoint, from which a resumed run detects that it draws the epoch from the start again.

    Attributes:
        epoch: Number of the epoch.
        first: Content of rank 0's first batch in the epoch.
        latest: Content of rank 0's latest batch. Equal to ``first`` if batches do not change.
    """

    epoch: int
    first: int
    latest: int


class BatchReader:
    """Reads batches and stores their hashes. All checks of a fit share one reader.

    Attributes:
        rows: Number of rows in the latest batch (in its first tensor).
        samples: Number of samples in the latest batch: its rows, or its graphs (not their nodes). 0 if it is not known.
        content: Hash of the latest batch, or of the previous batch on an accelerator. 0 if no batch was read.
        distinct: Number of different rows in the hashed batch.
        read_step: Number of optimizer steps before the hashed batch.
        first: Content of the first batch, by epoch.
        total_rows: Number of rows in the fit.
        number: Number of batches in the fit.
    """

    def __init__(self, runner: CheckRunner) -> None:
        self._runner = runner
        self.rows = self.samples = self.total_rows = self.number = 0
        self.content = self.distinct = self.read_step = 0
        self.first: dict[int, int] = {}
        self._epoch = -1
        self._latest = 0  # content of the latest batch that was read
        self._late: Callable[[], None] | None = None  # reads the batch that is being copied
        self._counts = [0] * BUCKETS

    def see_batch(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        """Read a batch."""
        epoch = trainer.current_epoch
        self.content = self.distinct = 0
        self._read_late()
        is_first = epoch != self._epoch
        if is_first:
            self._epoch, self._counts = epoch, [0] * BUCKETS
        # the first tensor determines the number of rows
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
        """Start to copy the contents of a batch that are hashed and counted."""
        number, step = min(self.rows, fingerprint.MAX_ROWS), self._runner.step
        labels = labels_of(batch, self.rows)
        tables = [HostCopy(table) for table in fingerprint.row_tables(tensors, self.rows, number)]
        sent = None if labels is None else HostCopy(labels[:_MAX_LABELS])

        def read() -> None:
            # hash each row, and combine the hashes
            hashes = fingerprint.hash_tables([table.read() for table in tables], number)
            self.distinct, self.read_step = len(set(hashes)), step
            self.content = self._latest = fingerprint.combine(hashes) & _MASK or 1
            # count labels by bucket: adjacent classes are in different buckets, classes 0 and 16 in the same one
            for label in [] if sent is None else sent.read().tolist():
                self._counts[label % BUCKETS] += 1

        self._late = read

    def _read_late(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            late()

    @property
    def counts(self) -> list[int]:
        """Number of labels in this epoch by bucket, among the first rows of each batch that was read."""
        self._read_late()
        return self._counts

    def epoch_record(self) -> EpochRecord | None:
        """Return the record of this epoch. None before its first batch."""
        self._read_late()
        if self._epoch < 0:
            return None
        return EpochRecord(self._epoch, self.first[self._epoch], self._latest)


def sample_count(batch: Any, tensors: Sequence[Tensor]) -> int:
    """Return the number of samples in a batch of tensors with different numbers of rows, or 0 if it cannot be determined.

    Graphs are batched into one graph, with concatenated nodes, edges as pairs of nodes, and one entry per graph in other tensors.
    """
    # read an attribute of the batch (PyTorch Geometric, DGL, TensorDict)
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
    # if the batch is not a graph, the first tensor determines the number of rows
    rows = tensors[0].shape[0]
    named: Mapping[Any, Any] = batch if isinstance(batch, Mapping) else {}
    # edges are an integer tensor (2, E)
    edges = [tensor for tensor in tensors[1:] if _is_integer(tensor) and tensor.ndim == 2 and tensor.shape[0] == 2]
    if isinstance(named.get("edge_index"), Tensor):
        edges = [named["edge_index"]]
    if not edges:
        return rows
    # the number of graphs is the number of labels, or else the only size that is not a number of nodes or edges
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
    """Return the class labels of a batch, one integer per row, from a named entry or the second element of a tuple."""
    found: Any = None
    if isinstance(batch, Mapping):
        found = _named_labels(batch)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        found = batch[1]
    if not isinstance(found, Tensor) or found.ndim != 1 or found.shape[0] != rows or not _is_integer(found):
        return None
    return torch.Tensor.detach(found)


# ---------------------------------------------------------------------- DataLoaders


def data_loaders(trainer: Trainer, *, validation: bool = False) -> list[DataLoader[Any]]:
    """Return the DataLoaders that are in use, with Lightning's samplers."""
    combined = lightning_compat.combined_loader(
        lightning_compat.validation_loop(trainer) if validation else trainer.fit_loop
    )
    if combined is None:
        return []
    return [loader for loader in combined.flattened if isinstance(loader, DataLoader)]


def is_iterable(loader: DataLoader[Any]) -> bool:
    """Return whether the loader reads an iterable dataset, without a sampler."""
    return isinstance(loader.dataset, IterableDataset)


class LoadersOfEpoch(NamedTuple):
    """Properties of the loaders of an epoch, which do not change between its steps.

    Attributes:
        epoch: Number of the epoch.
        is_iterable: Whether one of the loaders reads an iterable dataset.
        order: Hash of the order that ranks divide. 0 if it is not known.
    """

    epoch: int
    is_iterable: bool
    order: int

    @classmethod
    def of(cls, trainer: Trainer, *, is_at_start: bool) -> LoadersOfEpoch:
        """Read the current loaders. The order is known only at the start of an epoch."""
        loaders = data_loaders(trainer)
        order = drawn_order(loaders[0]) if loaders and is_at_start else 0
        return cls(trainer.current_epoch, any(map(is_iterable, loaders)), order)


def batch_sizes(loader: DataLoader[Any]) -> tuple[int, int]:
    """Return the numbers of rows in this rank's full batches and in its last batch, or zeros if they cannot be determined."""
    # only the batch sizes of torch's BatchSampler are known
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
    """Return the class of a sampler of structured batches that Lightning shuffles. Empty if there is none.

    Such a sampler has a batch size or a number of rows per class. torch's samplers do not have these attributes.
    """
    sampler = loader.sampler
    if not isinstance(sampler, DistributedSamplerWrapper) or not sampler.shuffle:
        return ""
    inner = lightning_compat.wrapped_sampler(sampler.dataset)
    is_structured = any(hasattr(inner, name) for name in ("m_per_class", "batch_size", "samples_per_class"))
    if not is_structured or type(inner).__module__.startswith("torch."):
        return ""
    return type(inner).__name__


def drawn_order(loader: DataLoader[Any]) -> int:
    """Return a hash that must be equal on all ranks, because they divide one order, or 0 if the order is not known."""
    sampler = loader.sampler
    if isinstance(sampler, DistributedSamplerWrapper):
        # Lightning draws the order once, and all ranks divide it
        head = lightning_compat.drawn_indices(sampler.dataset)[:_MAX_INDICES]
        if head and all(isinstance(index, int) for index in head) and len(set(head)) == len(head):
            return fingerprint.hash_text(repr(head), 62)
        return 0  # with replacement, ranks may draw different rows
    if type(sampler) is DistributedSampler and sampler.shuffle:
        return fingerprint.hash_text(f"{sampler.seed} {sampler.epoch}", 62)
    return 0


def early_samplers(trainer: Trainer) -> list[Any]:
    """Return samplers that shuffle by epoch and draw their order when the iterator is created (with workers, or without batches)."""
    found: list[Any] = []
    for loader in data_loaders(trainer):
        if loader.num_workers or loader.batch_sampler is None:
            found += shuffling_samplers(loader).values()
            draw = draw_of(loader)
            found += [] if draw is None or isinstance(draw.source, SequentialSampler) else [draw]
    return found


def shuffling_samplers(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the samplers that shuffle by epoch, by path, including samplers inside other samplers."""
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
