"""The only module that queries torch.distributed for ranks, and the owner of the package's process groups.

Our collectives are kept apart from the model's: each user group (or the world) gets separate internal groups. The group for handshakes is
created on the first call, and each further group on its first use, which follows a handshake that all ranks have reached. Without
torch.distributed the world is a single process of rank 0.

Tensors on an accelerator are sent on the user's own group. If two ranks launch kernels of two NCCL communicators in different orders, the
kernels wait for each other forever. Kernels of one communicator run in launch order, and that order is the same on all ranks: forward
and the reductions after backward launch from the user's thread, each after a handshake that all ranks have reached. Backward launches from
autograd's device thread, both DDP's buckets, which are sent in a fixed order, and our exchanges, which follow the order of the graph. Both
orders follow from the forward that the ranks have agreed on.

gloo connects each rank of a group with every other rank when the group is created. A group therefore opens W - 1 files per rank in
addition to the world's, and a handshake is one exchange among all ranks. A handshake group with fewer connections (ranks per node +
nodes) would require a tree of groups, in which each message passes through several ranks in sequence. The number of groups cannot be
smaller than the number of their uses: a rank that failed sends its error in a handshake while its peers wait in a payload or a check, and
mismatched sizes within one group end the process. ``ulimit -n`` must allow for:

| our open files per rank | groups | W = 64 | W = 1024 |
|---|---|---|---|
| accelerators, without checks | handshakes | 63 | 1,023 |
| accelerators, with ``DDPChecks`` | and checks | 126 | 2,046 |
| CPU, few bytes | handshakes | 63 | 1,023 |
| CPU, payloads of any size | and host, and gradients if losses have some | 189 | 3,069 |
| CPU, with ``DDPChecks`` | and checks | 252 | 4,092 |

Measured (torch 2.13, 2026): ``new_group`` does not inherit the world's timeout. The name of a group that only its members create is
derived from the number of groups that each member already has, so members of overlapping parts may never find each other. gloo's
threads can abort an interpreter that exits before they do.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import itertools
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.distributed import liveness, rendezvous
from lightning_ddp_losses.distributed.messages import Instance
from lightning_ddp_losses.errors import ConfigurationError, expect

Group: TypeAlias = dist.ProcessGroup | None
"""A process group of torch.distributed. None is the world."""


class WithProcessGroup:
    """Make a module that holds a process group, ``_group``, copyable: the copy shares the group, which cannot be copied."""

    def set_group(self, group: Group, kind: str, name: str | None) -> None:
        """Set the module's process group and its identity (``Instance``) among modules of the same kind in that group."""
        self._group, self._instance = group, Instance(kind, name)

    def create_internal_groups(self) -> None:
        """Create the internal groups over the module's ranks now instead of on first use. Communication: as ``internal_groups``."""
        internal_groups(self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo.update((id(value), value) for value in vars(self).values() if isinstance(value, dist.ProcessGroup))
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(vars(self), memo))
        return copied


class ProcessGroups:
    """The internal groups over the ranks of one user group.

    Args:
        handshakes: Group for handshakes.
        device: User's group, if it carries tensors on an accelerator. If None, ``host`` carries them.
        ranks: The global ranks of the members, in group order.
        new: Creates a further group, or returns the one that serves all purposes. Communication: every member must call it.

    Attributes:
        handshakes: gloo group on the CPU for metadata. Every collective of losses, metrics and the strategy begins with a handshake on it.
        ranks: The global ranks of the members, in group order.
        notes: Values that modules store for the lifetime of these groups, each under a separate key.
        failures: Number of errors that all members have received in a handshake. Notes made before an error are not compared after it,
            because the failed call consumed the notes of only some ranks.
    """

    def __init__(
        self,
        handshakes: dist.ProcessGroup,
        device: dist.ProcessGroup | None,
        ranks: tuple[int, ...],
        new: Callable[[], dist.ProcessGroup],
    ) -> None:
        self.handshakes, self.ranks = handshakes, ranks
        self.notes: dict[Any, Any] = {}
        self.failures = 0
        self._device, self._new = device, new
        # a world started by our strategy has been checked at its start
        is_asked = device is None or liveness.has_begun()
        self._may_share_devices = not is_asked and "nccl" in str(dist.get_backend(device))
        self._made: dict[str, dist.ProcessGroup] = {"handshakes": handshakes}

    @property
    def device(self) -> dist.ProcessGroup:
        """The user's own group, for tensors on an accelerator. ``host`` if the user's group is gloo."""
        return self._device or self.get("host")

    @property
    def are_devices_staged(self) -> bool:
        """Whether tensors on an accelerator are sent through host memory because gloo carries them. This creates no group."""
        return self._device is None or dist.get_backend(self._device) == dist.Backend.GLOO

    def get(self, name: str) -> dist.ProcessGroup:
        """Return the gloo group with this name, creating it on first use.

        ``host`` carries tensors on the CPU that follow a handshake. ``gradients`` carries only the losses' gradients on the CPU, which may
        be sent while other collectives run. ``checks`` carries only the checks, so that they cannot be matched with a loss.

        Communication: a rendezvous of all members through the store on first use. A group is used after a handshake.
        """
        if name not in self._made:
            self._made[name] = self._new()
        return self._made[name]

    def has(self, name: str) -> bool:
        """Return whether the group with this name has been created."""
        return name in self._made

    def made(self) -> set[dist.ProcessGroup]:
        """Return the groups created so far."""
        return set(self._made.values())

    def warm_up(self, device: torch.device) -> None:
        """Initialise the group that carries tensors of this device on all members, before some of them exchange messages.

        All members must create a group together, and NCCL requires every rank of a group in the group's first call, even if that call is
        a batch of point-to-point messages. A rank without rows does not send any.

        Communication: creation of the group on first use, and one all-reduce of one element on an accelerator. Every member must take
            part.
        """
        key = "warm", device
        if device.type == "cpu":
            self.get("host")
        elif key not in self.notes:
            self.notes[key] = True
            one = torch.zeros(1, device=device)
            dist.all_reduce(one, group=self.for_tensor(one))

    def for_tensor(self, tensor: Tensor) -> dist.ProcessGroup:
        """Return the group that carries ``tensor``.

        Raises:
            ConfigurationError: on every rank, at the first tensor on an accelerator, if two NCCL ranks share a device.

        Communication: one gather of small objects on the host, at the first tensor on an accelerator.
        """
        if tensor.device.type == "cpu":
            return self.get("host")
        if self._may_share_devices:
            _refuse_shared_device(self.handshakes, tensor.device)
            self._may_share_devices = False
        return self.device


STUCK_SECONDS = 10.0  # time for a device to complete its work after a failed run, before its communicators are aborted
_VALUE_BYTES = 1024
_NAMES = ("handshakes", "host", "gradients", "checks")
_groups_by_ranks: dict[tuple[int, ...], ProcessGroups] = {}
_groups_by_group: dict[Group, ProcessGroups] = {}
_replica_groups: dict[tuple[int, ...], Group] = {}
_part_groups: dict[tuple[int, ...], Group] = {}
_world: dist.ProcessGroup | None = None  # the default group to which _groups_by_ranks belongs
_timeout: timedelta | None = None
_close_registered = False


def is_distributed() -> bool:
    """Return whether a default process group exists in this process."""
    return dist.group.WORLD is not None


def rank(group: Group = None) -> int:
    """Return this process's rank in ``group``, or in the world if None. Returns 0 without torch.distributed."""
    world = dist.group.WORLD  # faster than torch's own functions: a step makes many such calls
    if world is None:
        return 0
    return world.rank() if group is None else dist.get_rank(group)


def world_size(group: Group = None) -> int:
    """Return the number of processes in ``group``, or in the world if None. Returns 1 without torch.distributed."""
    world = dist.group.WORLD
    if world is None:
        _refuse_foreign_group(group)
        return 1
    return world.size() if group is None else dist.get_world_size(group)


def is_world(group: Group) -> bool:
    """Return whether a group is the default group of all processes."""
    return group is None or group is dist.group.WORLD


def _refuse_foreign_group(group: Group) -> None:
    """Reject a group not created by ``torch.distributed`` (such as torchft's): its ranks are unknown and its size may change.

    Raises:
        ConfigurationError: naming its class.
    """
    expect(
        group is None or type(group) is dist.ProcessGroup,
        "group",
        expected="a group that torch.distributed.new_group has made, whose ranks stay",
        got=type(group).__name__,
        fix="Leave group= out: the loss is then over the ranks of this replica's world, and manager.allreduce(p.grad) after backward "
        "takes the mean of the gradients over the replicas (ddp-losses explain torchrun).",
    )


def members(group: Group = None) -> tuple[int, ...]:
    """Return the global ranks of the members, in group order. Returns (0,) without torch.distributed."""
    if not is_distributed():
        return (0,)
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))


def set_timeout(timeout: timedelta | None) -> None:
    """Set the timeout of internal groups created from now on. If None, they use the timeout of the user's group."""
    global _timeout  # noqa: PLW0603 - one setting per process, like the groups themselves
    _timeout = timeout


def _patience(group: Group = None) -> timedelta | None:
    """Return the timeout for groups created now, which ``new_group`` does not inherit. If None, torch's default applies."""
    return _timeout or torch_compat.group_timeout(group or dist.group.WORLD)


def subgroup_of_size(size: int) -> Group:
    """Create groups of consecutive ranks (0 to size - 1, size to 2 size - 1, ...) and return this rank's. Size must divide the world.

    Communication: a rendezvous of the world for each group. Every rank must take part.
    """
    return _group_among(range(first, first + size) for first in range(0, world_size(), size))


def _group_among(parts: Iterable[Sequence[int]]) -> Group:
    """Create a group for each part of the world on every rank, and return the group that contains this rank."""
    mine: Group = None
    with _new_groups(members()):
        for part in parts:
            group = dist.new_group(list(part), timeout=_patience())
            if rank() in part:
                mine = group
    return mine


def internal_groups(group: Group = None) -> ProcessGroups:
    """Return the internal groups over the members of ``group``, creating them on first use.

    Communication: on first use only, a rendezvous through the store, and under NCCL a gather of small objects. Every member must take
        part. Each further group is created when it is first used. If ``torchrun``'s agent holds the store of a world that our strategy
        has not started, a roll call through the store precedes each creation (``rendezvous``). A gloo group over a part of the world
        serves all purposes itself.
    """
    global _close_registered  # noqa: PLW0603 - once per process
    if dist.group.WORLD is not _world:
        _forget_former_world()
    known = _groups_by_group.get(group)
    if known is not None:
        return known
    _refuse_foreign_group(group)
    ranks = tuple(dist.get_process_group_ranks(group or _world))
    if ranks not in _groups_by_ranks:
        if not _close_registered:
            atexit.register(close)
            _close_registered = True
        _groups_by_ranks[ranks] = _make(ranks, group)
    _groups_by_group[group] = _groups_by_ranks[ranks]
    return _groups_by_group[group]


def failures(group: Group = None) -> int:
    """Return how many errors all members of a group have received so far, without creating any groups."""
    if dist.group.WORLD is not _world:
        return 0
    groups = _groups_by_group.get(group)
    return 0 if groups is None else groups.failures


def connections(world_size: int) -> int:
    """Return the number of open files per rank that the internal groups of a world require once all of them are in use."""
    return len(_NAMES) * (world_size - 1)


def replica_group(group: Group) -> Group:
    """Return the group of this rank's replicas: the ranks at the same index in each part of the world.

    Args:
        group: This rank's part. If None, the world.

    Returns:
        The replicas' group, or ``group`` itself if it is the whole world.

    Raises:
        ConfigurationError: on every rank, when the parts do not divide the world evenly.

    Communication: on first use, one gather of small objects and the creation of as many groups as a part has ranks. Every rank of the
        world must take part.
    """
    if group is None or len(dist.get_process_group_ranks(group)) == world_size():
        return group
    _forget_former_world()  # a part of a single rank has not communicated before, so the former world may not have been cleared
    ranks = tuple(dist.get_process_group_ranks(group))
    if ranks not in _replica_groups:
        everyone = [tuple(found) for found in _gather_values(ranks, internal_groups().handshakes)]
        parts = sorted(set(everyone))
        members_of_parts = sorted(itertools.chain.from_iterable(parts))
        if members_of_parts != list(range(world_size())) or len({len(part) for part in parts}) > 1:
            raise ConfigurationError(
                "group",
                expected="parts of equal size that together are all ranks",
                ranks=[str(list(part)) for part in everyone],
                fix="torch.distributed.new_subgroups(group_size) makes such parts.",
                collective=True,
            )
        _replica_groups[ranks] = _group_among(zip(*parts, strict=True))
    return _replica_groups[ranks]


_mesh_ranks: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()


def mesh_ranks(mesh: Any) -> tuple[int, ...]:
    """Return the ranks of a ``DeviceMesh``. They are cached, because torch recomputes them in 130 calls each time."""
    if mesh not in _mesh_ranks:
        _mesh_ranks[mesh] = tuple(mesh.mesh.flatten().tolist())
    return _mesh_ranks[mesh]


def group_of_mesh(title: str, mesh: Any, copies: Any = None, group: Group = None) -> Group:
    """Return the group of the ranks in this rank's part of a device mesh, or None for the whole world.

    Args:
        title: Title of the caller in messages.
        mesh: Dimensions over which rows differ.
        copies: Other dimensions.
        group: Group that the user passed instead of a mesh.

    Raises:
        ConfigurationError: for a mesh without this rank, overlapping dimensions, or both a group and a mesh.

    Communication: for a part of the world over several dimensions, one gather of small objects and the creation of its groups on first
        use. Every rank of the world must take part.
    """
    wrong = ""
    for each in (mesh, copies):
        if each is not None and (not hasattr(each, "get_coordinate") or each.get_coordinate() is None):
            wrong = f"{each!r}, in which this rank is not"
    if mesh is None or group is not None:
        wrong = "copies without mesh" if mesh is None else "a group, too"
    if not wrong and copies is not None:
        shared = sorted(set(mesh_ranks(mesh)) & set(mesh_ranks(copies)))
        if shared != [rank()]:
            wrong = f"copies={copies.mesh.tolist()} and mesh={mesh.mesh.tolist()}, both with ranks {shared}"
    expect(
        not wrong,
        f"{title}: mesh",
        expected='dimensions of one device mesh: mesh["dp", "cp"] over which rows differ, copies=mesh["tp"]',
        got=wrong,
        fix="Take both from the mesh that init_device_mesh has made of the ranks.",
    )
    ranks = mesh_ranks(mesh)
    if sorted(ranks) == list(range(world_size())):
        return None
    for dim in range(mesh.ndim):
        if mesh.size(dim) == len(ranks):
            own: Group = mesh.get_group(dim)
            return own
    return _group_of_part(ranks)


def _group_of_part(ranks: tuple[int, ...]) -> Group:
    """Return the group with these ranks. Collective: every rank of the world passes its own part."""
    _forget_former_world()
    key = tuple(sorted(ranks))
    if key not in _part_groups:
        parts = sorted({tuple(found) for found in _gather_values(key, internal_groups().handshakes)})
        _part_groups[key] = _group_among(parts)
    return _part_groups[key]


def subgroups() -> list[dist.ProcessGroup]:
    """Return the handshake groups over parts of the world that this rank has used so far."""
    if not is_distributed() or dist.group.WORLD is not _world:
        return []
    return [ours.handshakes for ranks, ours in sorted(_groups_by_ranks.items()) if len(ranks) < world_size()]


def _make(ranks: tuple[int, ...], group: Group) -> ProcessGroups:
    only_gloo = dist.get_backend(group) == "gloo"
    is_world = len(ranks) == dist.get_world_size()
    if only_gloo and not is_world:
        # ranks outside this part cannot help to create new groups, and torch derives the name of a group created by its members only
        # from the number of groups on each of them: with overlapping parts the names differ and the members never find each other
        assert group is not None
        user_group = group
        ours = ProcessGroups(group, None, ranks, lambda: user_group)
        for name in _NAMES:
            ours.get(name)  # returns the user's group, so no group is created
        return ours

    def new() -> dist.ProcessGroup:
        with _new_groups(ranks):
            made: dist.ProcessGroup = dist.new_group(
                None if is_world else list(ranks),
                timeout=_patience(group),
                backend="gloo",
                # members of a part must not wait for ranks outside it
                use_local_synchronization=not is_world,
            )
        return made

    ours = ProcessGroups(new(), None if only_gloo else group or dist.group.WORLD, ranks, new)
    if not is_world:
        # torch derives the group's name from the number of groups on a rank, which could later differ for a member of several parts.
        # The remaining groups are not used by a part
        ours.get("host")
    return ours


def _gather_values(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's plain value in rank order, sent as JSON because torch's gather of objects unpickles messages of peers."""
    num_bytes = _VALUE_BYTES + 8 * world_size()  # a value may list all ranks
    data = torch.frombuffer(bytearray(json.dumps(own).encode().ljust(num_bytes)), dtype=torch.uint8)
    texts = torch.empty(group.size(), num_bytes, dtype=torch.uint8)
    dist.all_gather(list(texts), data, group=group)
    return [json.loads(bytes(text.tolist())) for text in texts]


def _refuse_shared_device(handshakes: dist.ProcessGroup, device: torch.device) -> None:
    """Reject two NCCL ranks on one device: NCCL fails on those ranks while the other ranks wait.

    Args:
        handshakes: gloo group.
        device: Device of this rank's tensors, which may differ from the current device.

    Raises:
        ConfigurationError: on every rank, naming those ranks.

    Communication: one gather of small objects on the host.
    """
    error = rendezvous.shared_device_error(_gather_values(rendezvous.nccl_device("nccl", device), handshakes))
    if error is not None:
        error.collective = True
        raise error


@contextlib.contextmanager
def _new_groups(ranks: Sequence[int]) -> Iterator[None]:
    """Wrap the creation of groups by all of these ranks with separate store keys and actionable errors."""
    with rendezvous.own_keys(rank(), ranks, _patience()), rendezvous.group_errors(rank()):
        yield


def join(file: str, rank: int, world_size: int, *, backend: str, timeout: timedelta) -> None:
    """Initialise a world of processes on this machine through a shared file, without ports or environment variables.

    Args:
        file: A path that all processes can write to. The file must not exist yet.
        rank: Rank of this process.
        world_size: Number of processes.
        backend: Backend of the world.
        timeout: Time to wait for a peer, during initialisation and in every collective.
    """
    store = dist.FileStore(file, world_size)  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def close(*, world: bool = False) -> None:
    """Destroy the internal process groups, and with ``world`` also the default group. It is safe to call this again or at exit.

    gloo's threads may abort the interpreter if they are still alive when it exits.
    """
    global _world  # noqa: PLW0603 - the cache is cleared together with the groups
    if is_distributed() and dist.group.WORLD is _world:
        for ours in _groups_by_ranks.values():
            if ours.has("host") and ours.get("host") is ours.handshakes:
                continue  # a gloo group that serves all purposes belongs to the user
            for group in ours.made():
                # if a peer exited first, its side of the connection is already closed
                with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                    dist.destroy_process_group(group)
    _forget()
    _world = None
    if world and is_distributed():
        liveness.stop()
        dist.destroy_process_group()


def abort_stuck(device: torch.device) -> bool:
    """Abort the communicators of an accelerator that does not complete its work, and return whether any were aborted.

    An NCCL kernel waits for a failed peer until the group's timeout. Until then, copies from the device, ``module.cpu()`` and process exit
    wait as well. After an abort these kernels end with undefined results, and the groups can no longer communicate on the device. gloo
    groups are not affected.

    Args:
        device: Device of this rank.

    Communication: none. Waits up to ``STUCK_SECONDS`` for the device.
    """
    if device.type == "cpu" or not is_distributed():
        return False

    def synchronize() -> bool:
        torch.accelerator.synchronize(device)
        return True

    if liveness.within(STUCK_SECONDS, synchronize):
        return False
    return torch_compat.abort_communicators(device) > 0


def _forget_former_world() -> None:
    """Clear the groups of a former world, which ended when torch.distributed was initialised again."""
    global _world  # noqa: PLW0603 - the cache belongs to the process's default group
    if dist.group.WORLD is not _world:
        _forget()
        _world = dist.group.WORLD


def _forget() -> None:
    for known in (_groups_by_ranks, _groups_by_group, _replica_groups, _part_groups):
        known.clear()
