"""A class shard as torch's own tools see it: its weight rows as a ``DTensor`` that is ``Shard(0)``, in the same memory.

``Shard(0)`` gives each rank ``ceil(n / W)`` entries of the first dimension, the last ranks fewer or none. Class shards divide classes so;
weight rows they do not, where a class has several. So classes are the first dimension, and the rows of a class the second.

Legend: ``C`` classes, ``c`` classes on this rank, ``K`` weight rows per class, ``D`` embedding size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.shard import ClassShard
from lightning_ddp_losses.errors import ConfigurationError, InputError


def mesh_of_shards(title: str, mesh: DeviceMesh | None, device_type: str, group: Group) -> DeviceMesh:
    """Return the mesh over whose last dimension classes are divided, made where there is none.

    Args:
        title: How messages name the loss.
        mesh: Of the ranks of ``group``, in their order; or of two dimensions, of which the last is such and the first has its replicas.
        device_type: Of a mesh that is made.
        group: Over which the classes are divided.

    Raises:
        ConfigurationError: without a process group.
        InputError: on every rank, for a mesh of other ranks.

    Communication: one handshake of the world.
    """
    if not process_groups.is_distributed():
        raise ConfigurationError(f"{title} as a DTensor", expected="a process group", got="none in this process")
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
    """Return what is wrong with a mesh; nothing where its last dimension is this rank's part of the world."""
    place = mesh.get_coordinate()
    if place is None:
        return f"a mesh without this rank: {mesh.mesh.tolist()}"
    own_part = tuple(mesh.mesh[tuple(place[:-1])].tolist())
    has_only_replicas = mesh.ndim == 1 or (mesh.ndim == 2 and mesh.size() == process_groups.world_size())
    if own_part == members and has_only_replicas:
        return ""
    return f"{mesh.mesh.tolist()} for classes over ranks {list(members)}"


def as_dtensor(rows: Tensor, shard: ClassShard, mesh: DeviceMesh) -> DTensor:
    """Return a rank's weight rows as its part of the whole, without a copy.

    Args:
        rows: (c * K, D), a view of the weight or of its gradient.
        shard: Which classes they are.
        mesh: As ``mesh_of_shards`` returns it.

    Returns:
        (C, D), or (C, K, D) for K above 1.

    Communication: none.
    """
    tail = list(rows.shape[1:])
    if shard.per_class > 1:
        tail = [shard.per_class, *tail]
    held = rows.detach().view(shard.classes, *tail)
    # the whole exists nowhere: its layout is told
    whole = torch.empty(shard.num_classes, *tail, device="meta")
    replicates: list[Placement] = [Replicate()] * (mesh.ndim - 1)
    return DTensor.from_local(
        held, mesh, [*replicates, Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )
