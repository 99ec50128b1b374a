"""The tag on a parameter that holds different rows on each rank: this rank's classes of a larger weight.

A class-sharded loss sets it. The strategy reads it (such a parameter is neither averaged over ranks nor broadcast initially), and so do
the checks (ranks are expected to differ). This module is below both, because they share it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.errors import ConfigurationError, InputError


def mesh_of_shards(title: str, mesh: DeviceMesh | None, device_type: str, group: Group) -> DeviceMesh:
    """Return the mesh that divides classes over its last dimension, creating it if none is given.

    Args:
        title: Name of the loss in messages.
        mesh: Mesh of the ranks of ``group``, in their order. An additional first dimension contains its replicas.
        device_type: Device type of a created mesh.
        group: Group over which the classes are divided.

    Raises:
        ConfigurationError: without a process group.
        InputError: on every rank, for a mesh of different ranks.

    Communication: one handshake of the world.
    """
    if not process_groups.is_distributed():
        raise ConfigurationError(
            f"{title} as a DTensor",
            expected="a process group",
            got="none in this process",
            fix="Call init_process_group first.",
        )
    problem = "" if mesh is None else _problem(mesh, process_groups.members(group))
    problems = [told.decode() for told in handshake.all_gather(f"{title} as a DTensor", {}, problem.encode())]
    if any(problems):
        raise InputError(
            f"{title}: mesh",
            expected="the ranks over which the classes are divided, in their order (and their replicas along a first dimension)",
            ranks=[told or "that" for told in problems],
            fix='Take a mesh of one dimension, as device_mesh["data_parallel"], or none: then one is made.',
            collective=True,
        )
    if mesh is None:
        own_group = group if group is not None else torch.distributed.group.WORLD
        assert own_group is not None
        mesh = DeviceMesh.from_group(own_group, device_type)
    return mesh


def _problem(mesh: DeviceMesh, members: tuple[int, ...]) -> str:
    """Return the problem of a mesh, or an empty text if its last dimension is this rank's part of the world."""
    place = mesh.get_coordinate()
    if place is None:
        return f"a mesh without this rank: {mesh.mesh.tolist()}"
    own_part = tuple(mesh.mesh[tuple(place[:-1])].tolist())
    has_only_replicas = mesh.ndim == 1 or (mesh.ndim == 2 and mesh.size() == process_groups.world_size())
    if own_part == members and has_only_replicas:
        return ""
    return f"{mesh.mesh.tolist()} for classes over ranks {list(members)}"


def as_dtensor(rows: Tensor, shard: ClassShard, mesh: DeviceMesh) -> DTensor:
    """Return a rank's weight rows as its part of the whole weight, without a copy.

    Args:
        rows: (c * K, D), a view of the weight or of its gradient.
        shard: Classes of these rows.
        mesh: Mesh of ``mesh_of_shards``.

    Returns:
        (C, D), or (C, K, D) for K above 1.

    Communication: none.
    """
    tail = list(rows.shape[1:])
    if shard.per_class > 1:
        tail = [shard.per_class, *tail]
    held = rows.detach().view(shard.classes, *tail)
    # the whole tensor does not exist on any rank: only its layout is passed
    whole = torch.empty(shard.num_classes, *tail, device="meta")
    replicates: list[Placement] = [Replicate()] * (mesh.ndim - 1)
    return DTensor.from_local(
        held, mesh, [*replicates, Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


_ATTRIBUTE = "_ddp_losses_shard"


@dataclass(frozen=True)
class ClassShard:
    """The block of classes of a parameter that this rank holds.

    Attributes:
        start: First class held, counted over all ranks.
        stop: One past the last class held.
        num_classes: Number of classes over all ranks.
        dim: Dimension of the parameter that counts classes.
        per_class: Number of entries along this dimension for each class (sub-centers).

    Example:
        >>> ClassShard.of_rank(10, world=4, rank=3)
        ClassShard(start=9, stop=10, num_classes=10, dim=0, per_class=1)
    """

    start: int
    stop: int
    num_classes: int
    dim: int = 0
    per_class: int = 1

    @classmethod
    def of_rank(cls, num_classes: int, world: int, rank: int, *, dim: int = 0, per_class: int = 1) -> ClassShard:
        """Return the block of one rank, out of consecutive blocks of equally many classes, the last ones smaller or empty."""
        size = -(-num_classes // world)
        start = min(rank * size, num_classes)
        stop = min(start + size, num_classes)
        return cls(start, stop, num_classes, dim, per_class)

    @property
    def classes(self) -> int:
        """Number of classes held."""
        return self.stop - self.start

    def whole_shape(self, held: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole weight of which ``held`` is this block."""
        shape = list(held.shape)
        shape[self.dim] = self.num_classes * self.per_class
        return tuple(shape)

    def offsets(self, held: Tensor) -> torch.Size:
        """Return the offset of ``held`` in the whole weight, along each dimension."""
        offsets = [0] * held.ndim
        offsets[self.dim] = self.start * self.per_class
        return torch.Size(offsets)

    def own_part(self, whole: Tensor) -> Tensor:
        """Return this block of the whole weight as a view."""
        return whole.narrow(self.dim, self.start * self.per_class, self.classes * self.per_class)

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.num_classes:
            raise ValueError(
                f"ClassShard: expected 0 <= start <= stop <= num_classes, "
                f"got start={self.start}, stop={self.stop}, num_classes={self.num_classes}"
            )


@runtime_checkable
class Shardable(Protocol):
    """A module that can shard its parameters over the ranks once the process group exists."""

    def shard_classes(self) -> None:
        """Shard the parameters unless already done, keeping the parameter objects. Collective: every rank of the group must call this."""

    def attach(self, optimizer: Any) -> None:
        """Make the optimizer step only the rows that a step has touched."""

    def refuse_equal_shards(self) -> None:
        """Reject shards that became equal on all ranks since the last call. Collective: every rank of the group must call this."""


class _ShardParameter(nn.Parameter):
    """A parameter that keeps its tag in copies: an untagged copy of a shard would be averaged over ranks."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _ShardParameter:
        copied: _ShardParameter = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        setattr(copied, _ATTRIBUTE, shard_of(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self.data, self.requires_grad, shard_of(self))


def _rebuild(data: Tensor, requires_grad: bool, shard: ClassShard) -> _ShardParameter:
    parameter = _ShardParameter(data, requires_grad)
    setattr(parameter, _ATTRIBUTE, shard)
    return parameter


def first_holders(shards: Sequence[ClassShard]) -> list[int] | None:
    """Return one rank for each block of a parameter, in the order of the classes.

    Args:
        shards: Shard of each rank, in rank order. Several ranks may hold the same block (``group`` is a part of the ranks), and some may
            not hold any classes.

    Returns:
        The first rank that holds each block. None if blocks do not cover all classes, overlap, or have different numbers of copies.
    """
    holders: dict[tuple[int, int], list[int]] = {}
    for rank, shard in enumerate(shards):
        if shard.classes:
            holders.setdefault((shard.start, shard.stop), []).append(rank)
    # each block must end at the beginning of the next
    blocks = sorted(holders)
    ends = [0, *(stop for _, stop in blocks)]
    begins = [*(start for start, _ in blocks), shards[0].num_classes]
    # all blocks must have the same number of copies and belong to the same whole
    copies = {len(ranks) for ranks in holders.values()}
    wholes = {(shard.num_classes, shard.dim, shard.per_class) for shard in shards}
    if begins != ends or len(copies) > 1 or len(wholes) > 1:
        return None
    return [holders[block][0] for block in blocks]


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor: the local part of a ``DTensor``, in the same memory, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tag_shard(parameter: nn.Parameter, shard: ClassShard) -> None:
    """Mark ``parameter`` as this rank's block of a larger one. Copies and pickles of it keep the mark."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = _ShardParameter
    setattr(parameter, _ATTRIBUTE, shard)


def shard_of(parameter: Tensor) -> ClassShard | None:
    """Return the block that ``parameter`` represents, or None if all ranks hold the whole parameter."""
    shard = getattr(parameter, _ATTRIBUTE, None)
    assert shard is None or isinstance(shard, ClassShard)
    return shard


@contextlib.contextmanager
def tags_kept(module: nn.Module) -> Iterator[None]:
    """Restore the tags of a module's parameters after the block, which moves the module.

    Moving it to an accelerator with another tensor type replaces the parameters by new ones, and so does any move under
    ``torch.__future__.set_overwrite_module_params_on_conversion``. Names stay the same.
    """
    tagged = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shard = shard_of(parameter)
        if shard is not None:
            tagged[name] = shard
    yield
    if tagged:
        moved = dict(module.named_parameters(remove_duplicate=False))
        for name in tagged.keys() & moved.keys():
            tag_shard(moved[name], tagged[name])
