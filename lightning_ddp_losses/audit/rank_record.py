"""What a run leaves behind: a folder of gradients and parameters as raw bytes, and a `RankRecord` for each rank.

Tensors go to files one at a time and come back in pieces, so that neither writing nor comparing holds a second copy of the
parameters. A rank whose tensor equals rank 0's bit for bit does not store it again. What ranks hold in parts (``fully_shard``) is gathered
one tensor at a time.

Layout: ``rank-<r>/record.json``; ``rank-<r>/<step>.<kind>.json`` (name -> dtype, shape, digest, file); ``rank-<r>/<number>.bin``.
Kinds are ``initial`` (step 0), ``gradient``, ``parameter`` and ``buffer``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_ddp_losses.errors import DDPLossError, expect

PIECE = 1 << 18
"""Elements that are in memory at a time when tensors are compared."""

_RANK_0_SECONDS = 20.0  # how long a rank waits to learn whether rank 0 has the same tensors; then it stores its own
_RANK_0_SECONDS_OF_PARTS = 600.0  # the same where it cannot store its own, having but parts of some
_BYTES = 1 << 24  # written and digested at a time

# ---------------------------------------------------------------------- what a rank did

RowCount = int | None
"""Samples in a batch; None where nothing has any."""

LoaderRows = RowCount | list["LoaderRows"]
"""The same for each loader of a ``CombinedLoader``, in its order, where a batch is a nest of one batch for each."""


def sum_rows(rows: LoaderRows) -> int:
    """Add up the samples of all loaders."""
    if isinstance(rows, list):
        return sum(map(sum_rows, rows))
    return rows or 0


def fewest_rows(rows: LoaderRows) -> int:
    """Return the samples of the loader that has the fewest."""
    if isinstance(rows, list):
        return min(map(fewest_rows, rows), default=0)
    return rows or 0


@dataclass
class BatchRecord:
    """One batch that a rank trained on.

    Attributes:
        epoch: Lightning's epoch.
        step: Optimizer step that the batch belongs to, from 1.
        rows: Samples in it; None where nothing has any, a list where it comes from several loaders.
        file: Where it is stored; empty in a replay.
        digest: Of its tensors and values; empty in a replay.
    """

    epoch: int
    step: int
    rows: LoaderRows = None
    file: str = ""
    digest: str = ""

    @property
    def total_rows(self) -> int:
        """Number of samples, of all loaders together."""
        return sum_rows(self.rows)


@dataclass
class ModuleCall:
    """One call of a module in a traced step: projections of each row of its output, and of that output's gradient if it has one."""

    name: str
    kind: str
    output: list[list[float]]
    gradient: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class ModuleInfo:
    """What does not change during a run: the module and its trainer when training starts.

    Attributes:
        owners: ``"encoder"``, ``"unregistered"``, or the loss that a parameter belongs to, by parameter.
        aliases: Path under which an unregistered parameter was found, by its name in the optimizer.
        unoptimized: Trainable parameters that no optimizer holds.
        shards: First class and dimension of this rank's block, for parameters that ranks hold in blocks by design.
        module_types: Full class name of each submodule.
        pair_losses: Losses known to compare the rows of a batch with each other, that do not gather them.
        dropout: Submodules that drop.
        automatic: Whether Lightning steps the optimizers itself.
        accumulate: Batches to an optimizer step.
        clip: Lightning's ``gradient_clip_val``.
        precision: Lightning's name of the precision.
        sync_batchnorm: Whether the trainer was asked to synchronise batch norm.
        optimizers: Class names.
        repeated_rows: Rows that each validation loader hands out twice, all ranks together.
        reshuffled: How Lightning shuffled a sampler that meant its order, and what to do; empty where it did not.
    """

    owners: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    unoptimized: list[str] = field(default_factory=list)
    shards: dict[str, list[int]] = field(default_factory=dict)
    module_types: dict[str, str] = field(default_factory=dict)
    pair_losses: list[str] = field(default_factory=list)
    dropout: list[str] = field(default_factory=list)
    automatic: bool = True
    accumulate: int = 1
    clip: float | None = None
    precision: str = ""
    sync_batchnorm: bool = False
    optimizers: list[str] = field(default_factory=list)
    repeated_rows: list[int] = field(default_factory=list)
    reshuffled: str = ""


@dataclass
class RankRecord:
    """What one rank did during a run; the recorder fills it, rules read it.

    Attributes:
        steps: Optimizer steps that were made.
        batches: One entry for each batch.
        losses: What ``training_step`` returned for each batch; None where that was no tensor.
        learning_rates: Of the parameter groups, at each step.
        loss_scales: The GradScaler's scale at each step; None without one.
        used_rng: Whether random numbers were drawn, for each batch.
        parameter_order: Names in the order in which DDP saw them.
        parameter_count: Elements of all parameters.
        norms_at_wrap: Class of each batch norm when DDP was built.
        norms_in_training: The same at the first batch.
        lightning_backwards: Backward calls that went through Lightning's strategy.
        tensor_backwards: All calls of ``Tensor.backward``.
        metric_losses: Metrics of torchmetrics that returned a value with gradient.
        fingerprints: Of the gradients on their way to each step, by stage and name; on ranks only. ``"backward"``: as backward leaves
            them, which is when DDP has reduced its own; ``"reduced"``: after the strategy's whole backward, which is when this package's
            has reduced its own; ``"hooked"``: after the module's ``on_before_optimizer_step``; ``"used"``: as the step used them.
        parameter_events: What happened to a parameter after the wrap (``"replaced after the wrap"``), by name.
        trace: Calls of the modules in the traced step, in forward order.
        cut_lines: The user's lines of that step that cut the graph of the loss between ranks, each with its kind of collective.
        module_info: The module and its trainer when training started.
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
    lightning_backwards: int = 0
    tensor_backwards: int = 0
    metric_losses: list[str] = field(default_factory=list)
    fingerprints: list[dict[str, dict[str, int]]] = field(default_factory=list)
    parameter_events: dict[str, str] = field(default_factory=dict)
    trace: list[ModuleCall] = field(default_factory=list)
    cut_lines: list[list[str]] = field(default_factory=list)
    module_info: ModuleInfo = field(default_factory=ModuleInfo)

    def to_json(self) -> str:
        """Write the record as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankRecord:
        """Read what ``to_json`` wrote."""
        found = json.loads(text)
        found["batches"] = [BatchRecord(**each) for each in found["batches"]]
        found["trace"] = [ModuleCall(**each) for each in found["trace"]]
        found["module_info"] = ModuleInfo(**found["module_info"])
        return cls(**found)

    def rows_at(self, step: int) -> int:
        """Count the samples of an optimizer step."""
        return sum(batch.total_rows for batch in self.batches if batch.step == step)

    def loss_of(self, batch: int) -> float | None:
        """Return the loss of a batch, None where none was recorded."""
        return self.losses[batch] if batch < len(self.losses) else None


# ---------------------------------------------------------------------- tensors in files


@dataclass(frozen=True)
class Entry:
    """One tensor at one step: its dtype, shape, digest, and the file that holds it (empty: there was no tensor)."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    file: str

    @property
    def exists(self) -> bool:
        """Say whether there was a tensor; False for a parameter without gradient."""
        return bool(self.file)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def pieces(self, size: int = PIECE) -> Iterator[Tensor]:
        """Read the elements, flat and in order, at most ``size`` at a time, in the dtype they were stored in."""
        dtype = getattr(torch, self.dtype)
        with open(self.file, "rb") as file:
            while read := file.read(size * dtype.itemsize):
                yield torch.frombuffer(bytearray(read), dtype=dtype)

    def tensor(self) -> Tensor:
        """Read the whole tensor."""
        if self.numel == 0:
            return torch.empty(self.shape, dtype=getattr(torch, self.dtype))
        (flat,) = self.pieces(self.numel)
        return flat.reshape(self.shape)


NO_TENSOR = Entry("", (), "", "")
"""What stands for a gradient that is None."""


def _byte_pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Read a tensor's bytes in pieces, without a copy where it is contiguous on the CPU."""
    # sparse gradients as dense ones; then bytes, whatever the dtype (numpy has no bfloat16)
    dense = tensor.detach()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    flat = dense.cpu().contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _BYTES):
        yield flat[start : start + _BYTES].numpy().data


def tensor_digest(tensor: Tensor) -> str:
    """Digest dtype, shape and every bit."""
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=12)
    for piece in _byte_pieces(tensor):
        found.update(piece)
    return found.hexdigest()


def _described(tensor: Tensor, digest: str = "", file: str = "") -> Entry:
    return Entry(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest or tensor_digest(tensor), file)


class Writer:
    """Stores what one rank of a run does.

    Args:
        folder: Of the run.
        rank: This process's.
        prefix: How its files' names begin.
    """

    def __init__(self, folder: Path, rank: int, prefix: str = "") -> None:
        self.home, self.rank, self.prefix = folder / f"rank-{rank}", rank, prefix
        self._rank_0_home = folder / "rank-0"
        self._files = 0
        self.home.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, kind: str, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
        """Store the tensors of one step under a kind; None is a tensor that is not there.

        Raises:
            DDPLossError: for a tensor in parts that rank 0 has not stored.

        Communication: a gather for each tensor of which ranks hold parts; no rank has more than one of them whole.
        """
        # digests first: rank 0 writes its index meanwhile
        given = dict(tensors)
        own = {name: self._entry(tensor) for name, tensor in given.items()}
        stored: dict[str, Entry] = {}
        if self.rank:
            has_parts = any(isinstance(tensor, DTensor) for tensor in given.values())
            seconds = _RANK_0_SECONDS_OF_PARTS if has_parts else _RANK_0_SECONDS
            stored = self._rank_0_entries(f"{step}.{kind}.json", seconds)
        # then a file for each, if none serves already
        index: dict[str, Entry] = {}
        for name, entry in own.items():
            tensor, known = given[name], stored.get(name, NO_TENSOR)
            index[name] = entry
            if known.exists and known.digest == entry.digest:
                index[name] = known  # the same bits: rank 0's file serves both
                if entry.exists:
                    Path(entry.file).unlink()
            elif tensor is not None and not entry.exists:
                expected, got = "the bits that rank 0 gathered", "other bits, or nothing"
                expect(
                    not isinstance(tensor, DTensor), f"audit: {name}", expected=expected, got=got, error=DDPLossError
                )
                index[name] = self.write_tensor(tensor, entry.digest)
        _write_atomically(self.home / f"{step}.{kind}.json", json.dumps(_index_to_json(index)))

    def _entry(self, tensor: Tensor | None) -> Entry:
        """Describe a tensor; one of which ranks hold parts is stored too, as it is not kept whole.

        Rank 0 stores it once. Parts that have replicas, which may differ, are stored by every rank.
        """
        if tensor is None:
            return NO_TENSOR
        if not isinstance(tensor, DTensor):
            return _described(tensor)
        whole = tensor.full_tensor()
        if self.rank == 0 or any(placement.is_replicate() for placement in tensor.placements):
            return self.write_tensor(whole)
        return _described(whole)

    def write_record(self, record: RankRecord) -> None:
        """Store the record; it is the last thing a run writes."""
        _write_atomically(self.home / "record.json", record.to_json())

    def write_tensor(self, tensor: Tensor, digest: str = "") -> Entry:
        """Store one tensor by itself; its digest is computed unless it is given."""
        self._files += 1
        path = self.home / f"{self.prefix}{self._files}.bin"
        with path.open("wb") as file:
            for piece in _byte_pieces(tensor):
                file.write(piece)
        return _described(tensor, digest, str(path))

    def _rank_0_entries(self, name: str, seconds: float) -> dict[str, Entry]:
        """Wait for rank 0's index of the same step and kind; empty where it does not come."""
        deadline = time.monotonic() + seconds
        path, record = self._rank_0_home / name, self._rank_0_home / "record.json"
        while not path.exists():
            if time.monotonic() > deadline or record.exists():
                return {}  # rank 0 is somewhere else in the program
            time.sleep(0.001)
        return _index_from_json(path.read_text())


def _index_to_json(index: dict[str, Entry]) -> dict[str, Any]:
    return {name: dataclasses.astuple(entry) for name, entry in index.items()}


def _index_from_json(text: str) -> dict[str, Entry]:
    found = json.loads(text)
    return {name: Entry(dtype, tuple(shape), digest, file) for name, (dtype, shape, digest, file) in found.items()}


def _write_atomically(path: Path, text: str) -> None:
    """Write so that a reader finds all of it or nothing."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


# ---------------------------------------------------------------------- a run, read


@dataclass
class Recording:
    """The folder of a run, read.

    Attributes:
        folder: Of the run.
        ranks: How many processes it had.
    """

    folder: Path
    ranks: int
    _cache: dict[tuple[int, int, str], dict[str, Entry]] = field(default_factory=dict, repr=False)

    @cached_property
    def records(self) -> list[RankRecord]:
        """The record of each rank."""
        paths = [self.folder / f"rank-{rank}" / "record.json" for rank in range(self.ranks)]
        return [RankRecord.from_json(path.read_text()) for path in paths]

    @property
    def steps(self) -> int:
        """Optimizer steps that every rank made."""
        return min(record.steps for record in self.records)

    def entries(self, rank: int, step: int, kind: str) -> dict[str, Entry]:
        """Read the index of one rank at one step (from 1; ``initial`` is step 0), by name, in the module's order."""
        key = (rank, step, kind)
        if key not in self._cache:
            path = self.folder / f"rank-{rank}" / f"{step}.{kind}.json"
            self._cache[key] = _index_from_json(path.read_text()) if path.exists() else {}
        return self._cache[key]

    def entries_of(self, step: int, kind: str, name: str) -> list[Entry | None]:
        """Read one tensor's entry on each rank; None where a rank does not know the name."""
        return [self.entries(rank, step, kind).get(name) for rank in range(self.ranks)]

    def names(self, step: int, kind: str) -> list[str]:
        """List the names on any rank, in order."""
        found: dict[str, None] = {}
        for rank in range(self.ranks):
            found |= dict.fromkeys(self.entries(rank, step, kind))
        return list(found)

    def shard_places(self, name: str) -> list[list[int]] | None:
        """Return first class and dimension of each rank's block; None where the ranks do not hold blocks by design."""
        found = [record.module_info.shards.get(name) for record in self.records]
        places = [place for place in found if place is not None]
        return places if len(places) == self.ranks else None

    def joined_shards(self, step: int, kind: str, name: str) -> Entry | None:
        """Join the ranks' blocks to the one tensor that they are parts of; None where they are none."""
        places = self.shard_places(name)
        if places is None:
            return None
        entries = [entry for entry in self.entries_of(step, kind, name) if entry is not None and entry.exists]
        if len(entries) != self.ranks:
            return None
        # one of the ranks that hold the same block; a rank may hold no classes
        dim = places[0][1]
        by_start: dict[int, Entry] = {}
        for (start, _), entry in zip(places, entries, strict=True):
            if entry.shape[dim]:
                by_start.setdefault(start, entry)
        # in the order of the classes, which need not be that of the ranks
        blocks = [by_start[start].tensor() for start in sorted(by_start)]
        number = hashlib.sha256(name.encode()).hexdigest()[:12]
        writer = Writer(self.folder, 0, prefix=f"joined-{step}-{kind}-{number}-")
        return writer.write_tensor(torch.cat(blocks, dim=dim))

    def ranks_agree(self, step: int, kind: str, name: str) -> bool:
        """Say whether all ranks have the tensor, with the same bits."""
        found = self.entries_of(step, kind, name)
        digests = {entry.digest for entry in found if entry is not None}
        return None not in found and len(digests) == 1
