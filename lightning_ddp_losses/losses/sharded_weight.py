"""A class weight that is divided over the ranks by classes: sharded, drawn, loaded and compared.

Ranks hold consecutive blocks of ``ceil(C / W)`` classes. An instance's weight is copied from the group's rank 0 and sliced. A weight that
no rank holds in full is drawn in blocks of ``BLOCK`` classes, each from a separate seed, so that any number of ranks draws the
same. A rank draws the blocks that overlap its classes and keeps its part.

The second part of the file says which of these classes a call looks at (``LocalClasses``), and where the targets of its rows are among them
(``LocalTargets``). On an accelerator the host never waits for the length of a tensor: targets of other ranks are masked.
On the CPU they are left out. A rank with all classes does not mask.

Legend: ``W`` ranks, ``G`` rows over all ranks, ``D`` embedding size, ``C`` classes, ``c`` classes on this rank, ``K`` weight rows per class
(sub-centers), ``n`` rows with their class on this rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.core.host_copy import HostCopy
from lightning_ddp_losses.core.random_state import preserve_random_state
from lightning_ddp_losses.distributed import handshake, process_groups, raw_collectives
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.shard import ClassShard, tag_shard
from lightning_ddp_losses.errors import ConfigurationError, InputError, RankMismatchError, expect
from lightning_ddp_losses.losses.class_heads import Head

BLOCK = 4096  # classes. Another number gives other weights for a seed


class ShardedWeight:
    """Knows which classes of a weight this rank holds. The parameter itself belongs to the loss, under PML's name for it.

    Args:
        title: Name of the loss in messages.
        head: Knows the layout of the weight.
        full_shape: Shape of the weight over all ranks, in the loss's layout.
        seed: Seed of the initial weight, if it is not sliced from an instance.

    Attributes:
        name: Name of the parameter.
        full_shape: Shape of the weight over all ranks.
        num_classes: C.
        embedding_size: D.
        shard: The classes on this rank.
        world_size: Ranks over which the weight is sharded. 0: not yet.
    """

    def __init__(self, title: str, head: Head, full_shape: Sequence[int], *, seed: int | None) -> None:
        self.name = head.weight_name
        self.full_shape = tuple(full_shape)
        self.num_classes = self.full_shape[head.class_dim] // head.per_class
        self.embedding_size = self.full_shape[1 - head.class_dim]
        self.world_size = 0
        # before there are ranks: all classes of an instance, none of a weight that is still to be drawn
        classes = self.num_classes if seed is None else 0
        self.shard = ClassShard(0, classes, self.num_classes, head.class_dim, head.per_class)
        self._title = title
        self._seed = seed
        self._late_row: HostCopy | None = None  # the first class at the last call, on its way to the host

    def parameter(self, weight: Tensor) -> nn.Parameter:
        """Return the parameter for this rank's classes, tagged as a shard."""
        made = nn.Parameter(_rows_contiguous(weight, self.shard.dim))
        tag_shard(made, self.shard)
        return made

    def rows(self, parameter: Tensor) -> Tensor:
        """Return this rank's weight rows (c * K, D), a view."""
        return parameter.t() if self.shard.dim else parameter

    # ------------------------------------------------------------------ sharding

    def agree_on_seed(self, configuration: str, group: Group) -> int:
        """Refuse losses that differ, and one that is sharded over another number of ranks, and return rank 0's seed.

        Args:
            configuration: Configuration of the loss, as text.
            group: Process group over which the classes are sharded.

        Raises:
            ConfigurationError: for a loss that is sharded already, and on every rank for more ranks than classes.
            RankMismatchError: on every rank, when losses differ.

        Communication: one handshake.
        """
        world = process_groups.world_size(group)
        is_sharded = self.world_size > 1 or (self.world_size == 1 and self.shard.classes < self.num_classes)
        expect(
            not is_sharded,
            f"{self._title}: ranks",
            expected=f"the {self.world_size} that its classes were divided over",
            got=world,
            fix="Save a checkpoint with the strategy, which holds the whole weight, and load it into a new loss.",
        )
        must_match = {"classes": self.num_classes, "built": self._seed is not None, "configuration": configuration}
        local_seed = (self._seed or 0).to_bytes(8, "little")
        seeds = handshake.all_gather(f"{self._title} divides its classes", must_match, local_seed, group=group)
        if self.num_classes < world:
            raise ConfigurationError(
                f"{self._title}: classes",
                expected=f"at least one for each of {world} ranks",
                got=self.num_classes,
                collective=True,
                fix="Train on fewer ranks, or keep the whole weight on each rank: GlobalBatchLoss(loss).",
            )
        return int.from_bytes(seeds[0], "little")

    def shard_(self, parameter: nn.Parameter, init: Callable[[Tensor], Any], seed: int, group: Group) -> None:
        """Leave this rank's classes in ``parameter``: its slice of the full weight, or their draw.

        Args:
            parameter: The loss's, with all classes, or with none if they are still to be drawn.
            init: Initialises a tensor of the loss's layout in place.
            seed: The same on every rank.
            group: Process group over which the classes are sharded.

        Communication: a broadcast of the full weight, if there is one.
        """
        world, rank = process_groups.world_size(group), process_groups.rank(group)
        dim, per_class = self.shard.dim, self.shard.per_class
        shard = self._shard_of_rank(rank, world)
        if self.shard.classes == self.num_classes:
            full = parameter.data
            raw_collectives.broadcast_([full], group=group)
            if world > 1:
                _set_data_(parameter, _rows_contiguous(shard.own_part(full), dim))
        else:
            shape = list(self.full_shape)
            shape[dim] = shard.classes * per_class
            _set_data_(parameter, _rows_contiguous(parameter.data.new_empty(shape), dim))
            with torch.no_grad():
                draw_(parameter.data, shard, init, seed, self.full_shape)
        self.shard, self.world_size = shard, world
        tag_shard(parameter, shard)
        parameter.grad = None

    def classes_per_rank(self) -> list[int]:
        """Return how many classes each rank of the group holds."""
        return [self._shard_of_rank(rank, self.world_size).classes for rank in range(self.world_size)]

    def __getstate__(self) -> dict[str, Any]:
        # a copy on its way from a device cannot be pickled
        return {**vars(self), "_late_row": None}

    def _shard_of_rank(self, rank: int, world_size: int) -> ClassShard:
        like = self.shard
        return ClassShard.of_rank(self.num_classes, world_size, rank, dim=like.dim, per_class=like.per_class)

    # ------------------------------------------------------------------ loading, comparing

    def local_part(self, given: Tensor, key: str, shape: torch.Size, held: Sequence[int] | None = None) -> Tensor:
        """Return this rank's part of a weight to load, which may be that part already.

        Args:
            given: Saved weight.
            key: Its name, for the message.
            shape: Shape of this rank's parameter.
            held: First class, last class and number of classes in the state dict's metadata, or None.

        Raises:
            InputError: for a weight of other classes or another width, or the part of another rank.
        """
        if given.shape == shape:
            own = (self.shard.start, self.shard.stop, self.num_classes)
            first, last, classes = own if held is None else held
            expect(
                (first, last, classes) == own,
                f"{self._title}: {key} to load",
                expected=f"the whole, or classes {own[0]} to {own[1]} of {own[2]}, which this rank holds",
                got=f"classes {first} to {last} of {classes}",
                fix="Load what this rank saved, or a checkpoint of the strategy, which holds the whole.",
                error=InputError,
            )
            return given
        expect(
            tuple(given.shape) == self.full_shape,
            f"{self._title}: {key} to load",
            expected=f"{self.full_shape} of all classes, or the part that this rank holds",
            got=tuple(given.shape),
            fix="Load a checkpoint of a loss with the same classes and embedding size.",
            error=InputError,
        )
        return self.shard.own_part(given)

    def fingerprint(self, parameter: Tensor, *, at_once: bool = False) -> bytes:
        """Return a fingerprint of this rank's first class. It is empty for a row without evidence.

        On an accelerator, from the second call on, it is the previous call's value, so that the host does not wait, unless ``at_once``.
        """
        if not self.shard.classes or self.world_size == 1:
            return b""
        row = parameter.detach().select(self.shard.dim, 0)
        if parameter.device.type != "cpu":
            late, self._late_row = self._late_row, HostCopy(row)
            copy = self._late_row if late is None or at_once else late
            row = copy.read()
        # a constant start is the same everywhere, and so is NaN, which is not below anything
        lowest, highest = torch.aminmax(row)
        if not bool(lowest < highest):
            return b""
        return hashlib.blake2b(raw_collectives.host_bytes(row), digest_size=8).digest()

    def refuse_equal_shards(self, fingerprints: Sequence[bytes]) -> None:
        """Refuse shards that are equal on all ranks that gave a fingerprint.

        Raises:
            RankMismatchError: on every rank.
        """
        given = [fingerprint for fingerprint in fingerprints if fingerprint]
        if len(given) > 1 and len(set(given)) == 1:
            raise RankMismatchError(
                f"{self._title}: weight",
                expected="other rows on every rank",
                got="the same on all of them",
                fix="Something broadcast the shards, as strategy='ddp' does. Use strategy='ddp_losses', or keep the loss out of "
                "DistributedDataParallel.",
                collective=True,
                page="F16",
            )


def rows_of_classes(classes: Tensor, per_class: int) -> Tensor:
    """Return the indices (n * K,) of the weight rows of n classes."""
    if per_class == 1:
        return classes
    centers = torch.arange(per_class, device=classes.device)
    return (classes.unsqueeze(1) * per_class + centers).view(-1)


def _set_data_(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter data of another shape, even if a graph of an earlier call is still alive.

    Such a graph keeps the node that accumulates the gradient, and the node keeps the former shape. Torch gives the parameter a new one when
    its dtype changes, not when its shape does.
    """
    other_dtype = torch.float32 if data.dtype == torch.float16 else torch.float16
    parameter.data = data.new_empty(0, dtype=other_dtype)
    parameter.data = data


def _rows_contiguous(weight: Tensor, class_dim: int) -> Tensor:
    """Return a copy with each weight row in one piece of memory, in any layout."""
    if class_dim == 0:
        return weight.clone(memory_format=torch.contiguous_format)
    return weight.t().clone(memory_format=torch.contiguous_format).t()


# ---------------------------------------------------------------------- the initial weight


class _ClassBlock(torch.Tensor):
    """Some classes of a weight. ``size()`` answers for all of them, because fan-in decides how some of torch's functions draw."""

    __torch_function__ = torch_compat.DISABLED_TORCH_FUNCTION
    full_shape: tuple[int, ...]

    def size(self, dim: int | None = None) -> Any:
        if dim is None:
            return torch.Size(self.full_shape)
        return self.full_shape[dim]


def draw_(
    weight: Tensor, shard: ClassShard, init: Callable[[Tensor], Any], seed: int, full_shape: tuple[int, ...]
) -> None:
    """Draw the classes of ``shard`` into ``weight``.

    Args:
        weight: This rank's classes, in the layout of the loss.
        shard: Which classes.
        init: Initialises a tensor of the layout in place, from torch's CPU generator.
        seed: The same on every rank.
        full_shape: Shape of the weight over all ranks.
    """
    per_class, dim = shard.per_class, shard.dim
    first_block, stop_block = shard.start // BLOCK, -(-shard.stop // BLOCK)
    with preserve_random_state([torch.default_generator]):
        for number in range(first_block, stop_block):
            # the block in full, from its own seed
            start, stop = number * BLOCK, min((number + 1) * BLOCK, shard.num_classes)
            shape = list(full_shape)
            shape[dim] = (stop - start) * per_class
            block = torch.empty(shape, dtype=torch.float32).as_subclass(_ClassBlock)
            block.full_shape = full_shape
            digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest, "little") >> 1)
            init(block)
            # this rank's classes of it
            low, high = max(start, shard.start), min(stop, shard.stop)
            rows = (high - low) * per_class
            local = block.as_subclass(Tensor).narrow(dim, (low - start) * per_class, rows)
            weight.narrow(dim, (low - shard.start) * per_class, rows).copy_(local)


# ---------------------------------------------------------------------- which classes a call looks at, and where targets are among them


class LocalClasses(NamedTuple):
    """Classes of this rank that a call looks at, and their rows in the weight.

    Attributes:
        labels: (G,) each row's class as a position among the classes looked at. Negative or beyond the last if another rank has it.
        number: Number of classes looked at.
        chunk: Number of classes with logits alive at a time.
        per_class: K.
        sampled: (c',) the classes in use, as positions among this rank's, ascending. None means all of them.
        log_weight: (c',) added to each class's logit in the sum, 0 for a target. None means 0.
        has_all: True if this rank has all classes, and so the class of every row.
    """

    labels: Tensor
    number: int
    chunk: int
    per_class: int
    sampled: Tensor | None = None
    log_weight: Tensor | None = None
    has_all: bool = False

    def chunks(self, weight: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the first and one past the last class of each chunk, and their weight rows (classes * K, D)."""
        for start in range(0, self.number, self.chunk):
            stop = min(start + self.chunk, self.number)
            yield start, stop, weight[self.weight_rows(start, stop)]

    def weight_rows(self, start: int, stop: int) -> Any:
        """Return the place of the weight rows of some of the classes looked at: a slice, or an index."""
        if self.sampled is None:
            return slice(start * self.per_class, stop * self.per_class)
        return rows_of_classes(self.sampled[start:stop], self.per_class)

    def local_targets(self, *, listed: bool) -> LocalTargets:
        """Find the rows with their class on this rank. If ``listed``, list them, so that only these rows are computed."""
        if self.has_all:
            return LocalTargets(self, Targets(None, self.labels.unsqueeze(1)), None)
        # targets of other ranks are moved by the clamp
        columns = self.labels.clamp(0, max(self.number - 1, 0))
        is_inside = columns == self.labels
        rows = None
        # a rank without classes (7 over 4 ranks) does not have a column to use for masked rows
        if not self.number:
            rows = torch.empty(0, dtype=torch.int64, device=self.labels.device)
        elif listed or not waits_to_list(self.labels):
            rows = is_inside.nonzero().squeeze(1)
        return LocalTargets(self, Targets(is_inside, columns.unsqueeze(1)), rows)


class Targets(NamedTuple):
    """The targets among some classes. Each row of their logits has one entry or none.

    Attributes:
        is_inside: (G,), whether a row's target is among them. None means every row's.
        columns: (G, 1), its column. For rows without a target it is arbitrary.
    """

    is_inside: Tensor | None
    columns: Tensor

    def entries(self, logits: Tensor) -> Tensor:
        """Return each row's entry, (G,)."""
        return logits.gather(1, self.columns).squeeze(1)

    def entries_or(self, other: Tensor, logits: Tensor) -> Tensor:
        """Return each row's entry if its target is on this rank, otherwise the other value, (G,)."""
        entries = self.entries(logits)
        return entries if self.is_inside is None else torch.where(self.is_inside, entries, other)

    def put_(self, logits: Tensor, values: Tensor) -> None:
        """Write (G,) values to the targets."""
        if torch.compiler.is_compiling():  # a scatter would be a pass of its own
            logits.copy_(torch.where(self._mask(logits), values.unsqueeze(1), logits))
            return
        if self.is_inside is not None:
            values = torch.where(self.is_inside, values, self.entries(logits))
        logits.scatter_(1, self.columns, values.unsqueeze(1))

    def add_(self, logits: Tensor, value: float) -> None:
        """Add a number to the targets."""
        if not value:
            return
        if torch.compiler.is_compiling():
            logits.add_(self._mask(logits).to(logits.dtype), alpha=value)
            return
        if self.is_inside is None:
            added = logits.new_full(self.columns.shape, value)
        else:
            added = self.is_inside.to(logits.dtype).mul_(value).unsqueeze(1)
        logits.scatter_add_(1, self.columns, added)

    def _mask(self, logits: Tensor) -> Tensor:
        """Return which logits are targets', (G, C)."""
        mask = torch.arange(logits.shape[1], device=logits.device) == self.columns
        return mask if self.is_inside is None else mask & self.is_inside.unsqueeze(1)


@dataclass(frozen=True)
class LocalTargets:
    """The rows with their class on this rank.

    Attributes:
        classes: Among which.
        targets: Places of the targets of all rows.
        listed: (n,), places of these rows. If None, all G rows are computed, and rows of other ranks are multiplied by 0.
    """

    classes: LocalClasses
    targets: Targets
    listed: Tensor | None

    @property
    def are_none(self) -> bool:
        """Whether the list is empty. False if the host would have to wait for its length."""
        return self.listed is not None and not len(self.listed)

    @property
    def rows(self) -> int:
        """How many rows are computed."""
        return len(self.targets.columns) if self.listed is None else len(self.listed)

    def count(self) -> Tensor | int:
        """Return how many there are."""
        if self.listed is not None or self.targets.is_inside is None:
            return self.rows
        return self.targets.is_inside.sum()

    def in_chunk(self, start: int, stop: int) -> Targets:
        """Return the targets in a chunk of the classes."""
        if stop - start == self.classes.number:
            return self.targets
        is_inside, columns = self._places
        if stop - start < self.classes.chunk:  # the last chunk is shorter, and columns of other ranks may exceed it
            columns = columns.clamp_max(stop - start - 1)
        return Targets(is_inside[start // self.classes.chunk], columns)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Return for each chunk whether a row's target is in it, (chunks, G), and its column, (G, 1)."""
        labels, are_here = self.classes.labels, self.targets.is_inside
        chunks = labels.div(self.classes.chunk, rounding_mode="floor")
        if are_here is not None:
            chunks = torch.where(are_here, chunks, -1)
        number = -(-self.classes.number // self.classes.chunk)
        is_inside = chunks == torch.arange(number, device=chunks.device).unsqueeze(1)
        return is_inside, labels.remainder(self.classes.chunk).unsqueeze(1)

    def weight_rows(self) -> Tensor:
        """Return the index (n * K,) of the weight rows of these targets' classes."""
        labels = self.of(self.targets.columns.squeeze(1))
        if self.classes.sampled is not None:
            labels = self.classes.sampled[labels]
        return rows_of_classes(labels, self.classes.per_class)

    def of(self, values: Tensor) -> Tensor:
        """Take these rows of (G, ...) values."""
        return values if self.listed is None else values[self.listed]

    def spread(self, values: Tensor) -> Tensor:
        """Return (G, ...) values, with 0 for rows that are not listed."""
        if self.listed is None:
            return self.silence(values)
        whole = values.new_zeros(len(self.targets.columns), *values.shape[1:])
        return whole.index_add_(0, self.listed, values)

    def add_to_(self, whole: Tensor, values: Tensor) -> Tensor:
        """Add these rows' values to (G, ...), and return it."""
        if self.listed is None:
            return whole.add_(self.silence(values))
        return whole.index_add_(0, self.listed, values)

    def silence(self, values: Tensor) -> Tensor:
        """Return these rows' values, with 0 for rows of other ranks."""
        is_inside = self.targets.is_inside
        if self.listed is not None or is_inside is None:
            return values
        return torch.where(is_inside.view(-1, *[1] * (values.ndim - 1)), values, 0)


def waits_to_list(labels: Tensor) -> bool:
    """Return whether the host would have to wait for the number of rows."""
    return labels.device.type != "cpu"
