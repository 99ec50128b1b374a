"""The result of a run: a `RankRecord` for each rank, and a folder with its tensors as raw bytes.

Tensors are written to files one at a time and read in pieces, so that neither writing nor comparing requires a second copy of the
parameters. A file is named after the digest of its content, so ranks and steps with the same bits share a file. Tensors that are divided
over the ranks (``fully_shard``) are gathered first, one at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_ddp_losses.audit.loss_verdicts import LossVerdict
from lightning_ddp_losses.audit.targets import CountedTargets
from lightning_ddp_losses.distributed.raw_collectives import as_bytes
from lightning_ddp_losses.distributed.shard import ClassShard

PIECE = 1 << 18
"""Number of elements that are in memory at a time when tensors are compared."""

# ---------------------------------------------------------------------- the record of a rank

Kind = Literal["initial", "gradient", "forward buffer", "parameter", "buffer"]
"""Kinds of stored tensors. A buffer is stored after forward (before the optimizer's step) and after the step."""

RowCount = int | None
"""Number of samples in a batch, or None if the batch does not contain rows."""

LoaderRows = RowCount | list["LoaderRows"]
"""Number of samples, or a list with the number for each loader of a ``CombinedLoader``, if a batch contains one batch from each loader."""


def rows_by_loader(rows: LoaderRows) -> list[int]:
    """List the samples of each loader."""
    if isinstance(rows, list):
        return list(chain.from_iterable(map(rows_by_loader, rows)))
    return [rows or 0]


@dataclass
class BatchRecord:
    """One batch that a rank trained on.

    Attributes:
        epoch: Lightning's epoch.
        step: Optimizer step that the batch belongs to, from 1.
        rows: Number of samples in the batch, None if there are none, a list for several loaders.
        file: Path of the file with the batch. Empty in a replay.
        digest: Digest of its tensors and values. Empty in a replay.
    """

    epoch: int
    step: int
    rows: LoaderRows = None
    file: str = ""
    digest: str = ""

    @property
    def total_rows(self) -> int:
        """Number of samples, of all loaders together."""
        return sum(rows_by_loader(self.rows))


@dataclass
class ModuleCall:
    """One call of a module in a traced step, with projections of each row of its output and of the output's gradient, if any."""

    name: str
    kind: str
    output: list[list[float]]
    gradient: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class ModuleInfo:
    """Description of the module and its trainer when training starts. It does not change during a run.

    Attributes:
        owners: ``"encoder"``, ``"unregistered"``, or the loss that a parameter belongs to, by parameter.
        aliases: Path under which an unregistered parameter was found, by its name in the optimizer.
        unoptimized: Trainable parameters that are not in any optimizer.
        shards: This rank's block, for parameters that are divided over the ranks by design.
        caches: Buffers that are not saved in a checkpoint. They may differ between ranks.
        module_types: Full class name of each submodule.
        pair_losses: Losses that are known to compare the rows of a batch with each other, but do not gather them.
        dropout: Active dropout layers.
        automatic: True in automatic optimisation.
        accumulate: Number of batches per optimizer step.
        clip: Lightning's ``gradient_clip_val``.
        precision: Lightning's name of the precision.
        unit: Largest relative rounding error of one operation.
        products: Options ``products=`` of the losses that are less exact than float32.
        sync_batchnorm: True if the trainer's option to synchronise batch norm is set.
        optimizers: Class names.
        repeated_rows: Number of rows that each validation loader repeats, over all ranks.
        reshuffled: Finding and fix if Lightning shuffled a sampler whose order matters, otherwise empty.
        foreign_loader: Class of a training loader that is not a DataLoader, otherwise empty.
    """

    owners: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    unoptimized: list[str] = field(default_factory=list)
    shards: dict[str, ClassShard] = field(default_factory=dict)
    caches: list[str] = field(default_factory=list)
    module_types: dict[str, str] = field(default_factory=dict)
    pair_losses: list[str] = field(default_factory=list)
    dropout: list[str] = field(default_factory=list)
    automatic: bool = True
    accumulate: int = 1
    clip: float | None = None
    precision: str = ""
    unit: float = 0.0
    products: Sequence[str] = field(default_factory=list)
    sync_batchnorm: bool = False
    optimizers: list[str] = field(default_factory=list)
    repeated_rows: list[int] = field(default_factory=list)
    reshuffled: str = ""
    foreign_loader: str = ""


@dataclass
class RankRecord:
    """Record of one rank of a run. The recorder fills it, rules read it.

    Attributes:
        steps: Optimizer steps that were made.
        batches: One entry for each batch.
        losses: Loss of each batch, None if it was not a tensor.
        learning_rates: Learning rates of the parameter groups, at each step.
        loss_scales: The GradScaler's scale at each step, None without a scaler.
        used_rng: For each batch, whether random numbers were drawn.
        parameter_order: Names in DDP's order.
        parameter_count: Number of elements of all parameters.
        norms_at_wrap: Class of each batch norm when DDP was built.
        norms_in_training: Class of each batch norm at the first batch.
        foreign_backwards: Number of calls of ``Tensor.backward`` that bypassed Lightning's strategy.
        metric_losses: Metrics of torchmetrics that returned a value with gradient.
        stages: Digests of the gradients before each step, by stage and name, on ranks only. ``"backward"`` is after backward,
            when DDP has reduced its gradients. ``"reduced"`` is after the strategy's whole backward, when this package has reduced its
            gradients, or before a loop clips. ``"hooked"`` is after the module's ``on_before_optimizer_step``, ``"used"`` after the step.
        parameter_events: First event of a parameter after the wrap (``"replaced after the wrap"``), by name.
        trace: Calls of the modules in the traced step, in forward order.
        called_parameters: Trainable parameters of modules whose forward was called.
        cut_lines: The user's lines in the traced step that cut the graph of the loss between ranks, each with its kind of collective.
        counted_targets: Cross entropies of the traced step with consecutive targets.
        terms: The user's line of each term of the losses, in a traced run or a run with some terms switched off. Empty for unknown lines.
        verdicts: Certificates of the losses, recorded in the one process.
        module_info: The module and its trainer when training started.
        tensors: Stored tensors by step (0: before the first) and kind, then by name in the module's order.
    """

    steps: int = 0
    batches: list[BatchRecord] = field(default_factory=list)
    losses: list[float | None] = field(default_factory=list)
    learning_rates: list[list[float]] = field(default_factory=list)
    loss_scales: list[float | None] = field(default_factory=list)
    used_rng: list[bool] = field(default_factory=list)
    parameter_order: list[str] = field(default_factory=list)
    parameter_count: int = 0
    norms_at_wrap: dict[str, str] = field(default_factory=dict)
    norms_in_training: dict[str, str] = field(default_factory=dict)
    foreign_backwards: int = 0
    metric_losses: list[str] = field(default_factory=list)
    stages: list[dict[str, dict[str, str]]] = field(default_factory=list)
    parameter_events: dict[str, str] = field(default_factory=dict)
    trace: list[ModuleCall] = field(default_factory=list)
    called_parameters: list[str] = field(default_factory=list)
    cut_lines: list[list[str]] = field(default_factory=list)
    counted_targets: list[CountedTargets] = field(default_factory=list)
    terms: list[str] = field(default_factory=list)
    verdicts: list[LossVerdict] = field(default_factory=list)
    module_info: ModuleInfo = field(default_factory=ModuleInfo)
    tensors: dict[tuple[int, Kind], dict[str, Entry]] = field(default_factory=dict)


# ---------------------------------------------------------------------- tensors in files


@dataclass(frozen=True)
class Entry:
    """One tensor at one step: its dtype, shape, digest, and the file that contains it (empty if there was no tensor)."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    file: str

    @property
    def exists(self) -> bool:
        """Whether there was a tensor. False for a parameter without gradient."""
        return bool(self.file)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def pieces(self, size: int = PIECE) -> Iterator[Tensor]:
        """Read the elements as real numbers, flat and in order, at most ``size`` at a time. A complex element is read as two numbers."""
        for piece in self._stored(size):
            yield torch.view_as_real(piece).flatten() if piece.is_complex() else piece

    def _stored(self, size: int) -> Iterator[Tensor]:
        """Read the elements in the dtype they were stored in."""
        dtype = getattr(torch, self.dtype)
        with open(self.file, "rb") as file:
            while read := file.read(size * dtype.itemsize):
                yield torch.frombuffer(bytearray(read), dtype=dtype)

    def tensor(self) -> Tensor:
        """Read the whole tensor."""
        if self.numel == 0:
            return torch.empty(self.shape, dtype=getattr(torch, self.dtype))
        (flat,) = self._stored(self.numel)
        return flat.reshape(self.shape)


NO_TENSOR = Entry("", (), "", "")
"""Entry of a gradient that is None."""


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes, without a copy if it is contiguous on the CPU. A sparse tensor is converted to a dense one."""
    # a conjugated tensor shares the memory of the original
    dense = tensor.detach().resolve_conj().resolve_neg()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    return as_bytes(dense.cpu()).numpy().data


def tensor_digest(tensor: Tensor) -> str:
    """Digest dtype, shape and every bit."""
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=12)
    found.update(_bytes_of(tensor))
    return found.hexdigest()


def store_tensor(tensor: Tensor | None, folder: Path) -> Entry:
    """Store a tensor in a file that is named after its digest, unless that file exists.

    Communication: one gather if the tensor is divided over the ranks. Only one such tensor is assembled at a time.
    """
    if tensor is None:
        return NO_TENSOR
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    digest = tensor_digest(tensor)
    path = folder / f"{digest}.bin"
    with contextlib.suppress(FileExistsError), path.open("xb") as file:
        file.write(_bytes_of(tensor))
    return Entry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest, str(path))


# ---------------------------------------------------------------------- a run, read


@dataclass
class Recording:
    """A run that has ended.

    Attributes:
        folder: Folder of its tensors.
        records: Record of each process.
    """

    folder: Path
    records: Sequence[RankRecord]

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return len(self.records)

    @property
    def steps(self) -> int:
        """Optimizer steps that every rank made."""
        return min(record.steps for record in self.records)

    def entries(self, rank: int, step: int, kind: Kind) -> dict[str, Entry]:
        """Return the tensors of one rank at one step (from 1, ``initial`` is step 0), by name, in the module's order."""
        return self.records[rank].tensors.get((step, kind), {})

    def entry(self, rank: int, step: int, kind: Kind, name: str) -> Entry:
        """Return one tensor of one rank, or ``NO_TENSOR`` if the rank does not have a tensor of that name."""
        return self.entries(rank, step, kind).get(name, NO_TENSOR)

    def entries_of(self, step: int, kind: Kind, name: str) -> list[Entry]:
        """Return one tensor of each rank."""
        return [self.entry(rank, step, kind, name) for rank in range(self.ranks)]

    def names(self, step: int, kind: Kind) -> list[str]:
        """List the names on any rank, in order."""
        return list(dict.fromkeys(chain.from_iterable(self.entries(rank, step, kind) for rank in range(self.ranks))))

    def ranks_agree(self, step: int, kind: Kind, name: str) -> bool:
        """Return whether all ranks have the tensor with the same bits, or none has it."""
        return len({entry.digest for entry in self.entries_of(step, kind, name)}) == 1


def join_blocks_(recording: Recording) -> None:
    """Replace the ranks' blocks of a parameter that is divided over the ranks by the whole parameter, on each rank."""
    of_ranks = [record.module_info.shards for record in recording.records]
    for name in set(of_ranks[0]).intersection(*of_ranks):
        shards = [of_rank[name] for of_rank in of_ranks]
        for step, kind in recording.records[0].tensors:
            entries = recording.entries_of(step, kind, name)
            if not all(entry.exists for entry in entries):
                continue
            # use each block once, although several ranks may store it, and skip ranks without classes
            by_start: dict[int, Entry] = {}
            for shard, entry in zip(shards, entries, strict=True):
                if shard.classes:
                    by_start.setdefault(shard.start, entry)
            # blocks are joined in the order of their classes, which may differ from the order of the ranks
            blocks = [by_start[start].tensor() for start in sorted(by_start)]
            whole = store_tensor(torch.cat(blocks, dim=shards[0].dim), recording.folder)
            for record in recording.records:
                record.tensors[step, kind][name] = whole


def mean_of_gradients(parts: Sequence[Recording]) -> Recording:
    """Return a recording of one process whose gradients at step 1 are the means of those in several runs of one process."""
    means = {}
    for name in parts[0].names(1, "gradient"):
        entries = [part.entry(0, 1, "gradient", name) for part in parts]
        mean = None
        if len({(entry.exists, entry.shape) for entry in entries}) == 1 and entries[0].exists:
            tensors = [entry.tensor() for entry in entries]
            mean = torch.stack(tensors).to(torch.promote_types(tensors[0].dtype, torch.float64)).mean(0)
        means[name] = store_tensor(mean, parts[0].folder)
    return Recording(parts[0].folder, [RankRecord(steps=1, tensors={(1, "gradient"): means})])
