"""The only place that asks torch.distributed for ranks, and the owner of our process groups.

Ours never meet the model's collectives: a user's group (or the world) gets its own groups. That of handshakes is made when ranks first
ask for it, each other one where it is first used: after a handshake, which all ranks have reached. Without
torch.distributed the world is one process of rank 0.

What lies on an accelerator travels on the user's own group. Kernels of two communicators of NCCL that two ranks launch in another order
wait for each other for ever. Those of one communicator run in the order of their launches. That order is one on all ranks: forward and
the reductions after backward launch from the user's thread, each after a handshake that all ranks have
reached. Backward launches from autograd's thread of the device, one for DDP's buckets, which leave in their fixed order, and for ours,
which leave in the order of the graph. Both orders follow from the forward that the ranks have agreed on.

gloo connects each rank of a group with every other one when the group is made, so a group is W - 1 open files per rank next to the world's
own, and a handshake is one exchange between all of them. Fewer than one group of handshakes, as ranks per node + nodes would be, could be
had with a tree of groups only, where a message of each handshake passes several ranks one after the other. The groups cannot be fewer than
their uses: a rank that failed sends its error in a handshake while its peers stand in a payload or a check, and sizes that differ in one
group end the process. ``ulimit -n`` must allow for:

| our open files per rank | groups | W = 64 | W = 1024 |
|---|---|---|---|
| accelerators, without checks | handshakes | 63 | 1,023 |
| accelerators, with ``DDPChecks`` | and checks | 126 | 2,046 |
| CPU, few bytes | handshakes | 63 | 1,023 |
| CPU, payloads of any size | and host, and gradients if losses have some | 189 | 3,069 |
| CPU, with ``DDPChecks`` | and checks | 252 | 4,092 |

Measured (torch 2.13, 2026): ``new_group`` does not inherit the world's time-out. A group made by its members alone is named by how
many groups each of them knows, so members of parts that overlap may never meet. gloo's threads can abort an interpreter that ends
before they do.
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

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.distributed import liveness, rendezvous
from lightning_ddp_losses.distributed.messages import Instance
from lightning_ddp_losses.errors import ConfigurationError, expect

Group: TypeAlias = dist.ProcessGroup | None
"""A process group of torch.distributed. None is the world."""


class WithProcessGroup:
    """Lets a module over a process group, ``_group``, be copied: the copy is over the same group, which cannot be copied itself."""

    def set_group(self, group: Group, kind: str, name: str | None) -> None:
        """Set the ranks of the module, and its identity among others of its kind there (``Instance``)."""
        self._group, self._instance = group, Instance(kind, name)

    def create_internal_groups(self) -> None:
        """Make our groups over the module's ranks now and not at first use. Communication: as ``internal_groups``."""
        internal_groups(self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo.update((id(value), value) for value in vars(self).values() if isinstance(value, dist.ProcessGroup))
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(vars(self), memo))
        return copied


class ProcessGroups:
    """Our groups over the ranks of one user group.

    Args:
        handshakes: Carries handshakes.
        device: User's group, if it carries tensors on an accelerator. None: ``host`` carries them.
        ranks: The global ranks of the members, in group order.
        new: Makes one more group, or returns the one that serves for everything. Communication: every member comes.

    Attributes:
        handshakes: gloo on the CPU, for metadata on the host: every collective of losses, metrics and the strategy opens here.
        ranks: The global ranks of the members, in group order.
        notes: Values that modules keep as long as these groups live, each under a separate key.
        failures: Number of errors that all members have received in a handshake. What a rank noted before is not compared after it, as
            the failed call has taken the notes of some ranks only.
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
        # the world of our strategy has been asked when it started
        is_asked = device is None or liveness.has_begun()
        self._may_share_devices = not is_asked and "nccl" in str(dist.get_backend(device))
        self._made: dict[str, dist.ProcessGroup] = {"handshakes": handshakes}

    @property
    def device(self) -> dist.ProcessGroup:
        """The user's own group, for tensors on an accelerator. ``host`` if that is gloo."""
        return self._device or self.get("host")

    @property
    def are_devices_staged(self) -> bool:
        """Whether tensors on an accelerator travel through host memory, because gloo carries them. No group is made for the answer."""
        return self._device is None or dist.get_backend(self._device) == dist.Backend.GLOO

    def get(self, name: str) -> dist.ProcessGroup:
        """Return one of them by name: a group of gloo, made at first use.

        ``host`` carries tensors on the CPU that follow a handshake, ``gradients`` the losses' gradients on the CPU alone, which may travel
        while others run, and ``checks`` the checks alone, which so never meet a loss.

        Communication: at first use a rendezvous of all members through the store. Users of a group follow a handshake.
        """
        if name not in self._made:
            self._made[name] = self._new()
        return self._made[name]

    def has(self, name: str) -> bool:
        """Return whether this one has been made."""
        return name in self._made

    def made(self) -> set[dist.ProcessGroup]:
        """Return those that there are."""
        return set(self._made.values())

    def warm_up(self, device: torch.device) -> None:
        """Let all members meet on the group that carries tensors of this device, before some of them send messages to each other.

        A group is made by all of its members, and NCCL wants every rank of a group in the group's first call, even if that is a batch
        of messages. A rank without rows sends none.

        Communication: at first use the making of the group, and on an accelerator one all-reduce of one element. Every member must
            take part.
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
            ConfigurationError: on every rank, at the first tensor on an accelerator, for two ranks of NCCL on one device.

        Communication: at that tensor one gather of small objects on the host.
        """
        if tensor.device.type == "cpu":
            return self.get("host")
        if self._may_share_devices:
            _refuse_shared_device(self.handshakes, tensor.device)
            self._may_share_devices = False
        return self.device


STUCK_SECONDS = 10.0  # of a device whose run has failed, after which its communicators are aborted
_VALUE_BYTES = 1024
_NAMES = ("handshakes", "host", "gradients", "checks")
_groups_by_ranks: dict[tuple[int, ...], ProcessGroups] = {}
_groups_by_group: dict[Group, ProcessGroups] = {}
_replica_groups: dict[tuple[int, ...], Group] = {}
_part_groups: dict[tuple[int, ...], Group] = {}
_world: dist.ProcessGroup | None = None  # the default group that _groups_by_ranks belong to
_timeout: timedelta | None = None
_close_registered = False


def is_distributed() -> bool:
    """Return whether a default process group exists in this process."""
    return dist.group.WORLD is not None


def rank(group: Group = None) -> int:
    """Return this process's rank in ``group`` (None: the world). 0 without torch.distributed."""
    world = dist.group.WORLD  # torch's own functions take longer, and a step asks many times
    if world is None:
        return 0
    return world.rank() if group is None else dist.get_rank(group)


def world_size(group: Group = None) -> int:
    """Return the number of processes in ``group`` (None: the world). 1 without torch.distributed."""
    world = dist.group.WORLD
    if world is None:
        _refuse_foreign_group(group)
        return 1
    return world.size() if group is None else dist.get_world_size(group)


def is_world(group: Group) -> bool:
    """Return whether a group is that of all processes."""
    return group is None or group is dist.group.WORLD


def _refuse_foreign_group(group: Group) -> None:
    """Refuse a group that ``torch.distributed`` has not made, as torchft's: its ranks are unknown, and its size may change.

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
    """Return the global ranks of the members, in group order. (0,) without torch.distributed."""
    if not is_distributed():
        return (0,)
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))


def set_timeout(timeout: timedelta | None) -> None:
    """Set how long our groups made from now on wait for a peer (None: torch's own default)."""
    global _timeout  # noqa: PLW0603 - one setting per process, like the groups themselves
    _timeout = timeout


def _patience(group: Group = None) -> timedelta | None:
    """Return how long groups that are made now wait. ``new_group`` does not take it over. None: torch's default stands."""
    return _timeout or compat.group_timeout(group or dist.group.WORLD)


def subgroup_of_size(size: int) -> Group:
    """Make and return the group of this rank among: ranks 0 to size - 1, size to 2 size - 1, and so on. Size must divide the world.

    Communication: a rendezvous of the world for each group. Every rank must take part.
    """
    return _group_among(range(first, first + size) for first in range(0, world_size(), size))


def _group_among(parts: Iterable[Sequence[int]]) -> Group:
    """Make a group of each part of the world, which every rank does. Return this rank's."""
    mine: Group = None
    with _new_groups(members()):
        for part in parts:
            group = dist.new_group(list(part), timeout=_patience())
            if rank() in part:
                mine = group
    return mine


def internal_groups(group: Group = None) -> ProcessGroups:
    """Return our groups over the members of ``group``, which are made at first use.

    Communication: at first use only, a rendezvous through the store, and under NCCL a gather of small objects. Every member must take
        part. Each other group is made when it is used first. If ``torchrun``'s agent holds the store of a world that our strategy
        has not started, a roll call through it comes before each (``rendezvous``). A gloo group that is a part of the world serves for
        everything itself.
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
    """Return how many errors all members of a group have received so far. It makes no groups."""
    if dist.group.WORLD is not _world:
        return 0
    groups = _groups_by_group.get(group)
    return 0 if groups is None else groups.failures


def connections(world_size: int) -> int:
    """Return how many open files of a rank our groups over a world are, where each of them has been used."""
    return len(_NAMES) * (world_size - 1)


def replica_group(group: Group) -> Group:
    """Return the group of the ranks that stand where this one stands in their own part of the world: its replicas.

    Args:
        group: This rank's part. None is the world.

    Returns:
        Their group, or ``group`` itself if it is the whole world.

    Raises:
        ConfigurationError: on every rank, when the parts do not divide the world evenly.

    Communication: at first use, one gather of small objects and the making of as many groups as a part has ranks. Every rank of the
        world takes part.
    """
    if group is None or len(dist.get_process_group_ranks(group)) == world_size():
        return group
    _forget_former_world()  # a part of one rank has met nobody before, so nothing else has asked
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
    """Return the ranks of a ``DeviceMesh``. They are remembered: torch computes them at each question, in 130 calls."""
    if mesh not in _mesh_ranks:
        _mesh_ranks[mesh] = tuple(mesh.mesh.flatten().tolist())
    return _mesh_ranks[mesh]


def group_of_mesh(title: str, mesh: Any, copies: Any = None, group: Group = None) -> Group:
    """Return the group of the ranks in this rank's part of a device mesh. None if that is the world.

    Args:
        title: Title of the caller in messages.
        mesh: Dimensions over which rows differ.
        copies: Other dimensions.
        group: Given by the user in its place.

    Raises:
        ConfigurationError: for a mesh without this rank, dimensions that overlap, or a group and a mesh.

    Communication: for a part of the world over several dimensions, at first use, one gather of small objects and the making of its groups.
        Every rank of the world takes part.
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
    """Return the group of ranks. Every rank of the world names its part."""
    _forget_former_world()
    key = tuple(sorted(ranks))
    if key not in _part_groups:
        parts = sorted({tuple(found) for found in _gather_values(key, internal_groups().handshakes)})
        _part_groups[key] = _group_among(parts)
    return _part_groups[key]


def subgroups() -> list[dist.ProcessGroup]:
    """Return the groups that carry handshakes over the parts of the world that this rank has used so far."""
    if not is_distributed() or dist.group.WORLD is not _world:
        return []
    return [ours.handshakes for ranks, ours in sorted(_groups_by_ranks.items()) if len(ranks) < world_size()]


def _make(ranks: tuple[int, ...], group: Group) -> ProcessGroups:
    only_gloo = dist.get_backend(group) == "gloo"
    is_world = len(ranks) == dist.get_world_size()
    if only_gloo and not is_world:
        # the rest of the world is not here to make new groups, and torch names a group made by its members alone by how
        # many each of them knows: where parts of the world overlap, the names part and the members never meet
        assert group is not None
        user_group = group
        ours = ProcessGroups(group, None, ranks, lambda: user_group)
        for name in _NAMES:
            ours.get(name)  # nothing is made
        return ours

    def new() -> dist.ProcessGroup:
        with _new_groups(ranks):
            made: dist.ProcessGroup = dist.new_group(
                None if is_world else list(ranks),
                timeout=_patience(group),
                backend="gloo",
                # members of a part of the world must not wait for the rest of it
                use_local_synchronization=not is_world,
            )
        return made

    ours = ProcessGroups(new(), None if only_gloo else group or dist.group.WORLD, ranks, new)
    if not is_world:
        # torch names it by how many groups a rank knows, and later on a member of other parts might know more. A part has no
        # use for the others
        ours.get("host")
    return ours


def _gather_values(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """Return every rank's plain value in rank order. They travel as JSON, since torch's gather of objects unpickles messages of peers."""
    num_bytes = _VALUE_BYTES + 8 * world_size()  # a value may list all ranks
    data = torch.frombuffer(bytearray(json.dumps(own).encode().ljust(num_bytes)), dtype=torch.uint8)
    texts = torch.empty(group.size(), num_bytes, dtype=torch.uint8)
    dist.all_gather(list(texts), data, group=group)
    return [json.loads(bytes(text.tolist())) for text in texts]


def _refuse_shared_device(handshakes: dist.ProcessGroup, device: torch.device) -> None:
    """Refuse two ranks of NCCL on one device: NCCL fails on those ranks, and the others wait.

    Args:
        handshakes: Group of gloo.
        device: Device of this rank's tensors. The current device may be another one.

    Raises:
        ConfigurationError: on every rank, naming them.

    Communication: one gather of small objects on the host.
    """
    error = rendezvous.shared_device_error(_gather_values(rendezvous.nccl_device("nccl", device), handshakes))
    if error is not None:
        error.collective = True
        raise error


@contextlib.contextmanager
def _new_groups(ranks: Sequence[int]) -> Iterator[None]:
    """Surround the making of groups by all of these ranks: separate keys, and errors that say what to do."""
    with rendezvous.own_keys(rank(), ranks, _patience()), rendezvous.group_errors(rank()):
        yield


def join(file: str, rank: int, world_size: int, *, backend: str, timeout: timedelta) -> None:
    """Enter a world of processes on this machine that meet through a file: no port, no environment variable.

    Args:
        file: A path that all of them can write. It must not exist before.
        rank: Rank of this process.
        world_size: Number of processes that come.
        backend: Backend of the world.
        timeout: Time to wait for a peer, here and in every collective.
    """
    store = dist.FileStore(file, world_size)  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def close(*, world: bool = False) -> None:
    """Destroy our process groups, and with ``world`` the default group. A second call, or one at exit, is safe.

    gloo's threads may abort the interpreter if they are still alive when it ends.
    """
    global _world  # noqa: PLW0603 - the cache goes with the groups
    if is_distributed() and dist.group.WORLD is _world:
        for ours in _groups_by_ranks.values():
            if ours.has("host") and ours.get("host") is ours.handshakes:
                continue  # a gloo group that serves for everything is the user's own
            for group in ours.made():
                # a peer that died before us has taken its side of the connection along
                with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                    dist.destroy_process_group(group)
    _forget()
    _world = None
    if world and is_distributed():
        liveness.stop()
        dist.destroy_process_group()


def abort_stuck(device: torch.device) -> bool:
    """Abort the communicators of an accelerator that does not complete its work. Return whether that was so.

    A kernel of NCCL waits for a peer that has failed as long as the group's time-out. Until then a copy from the device, ``module.cpu()``
    and the end of the process wait, too. After an abort those kernels end, and their results are undefined. The groups carry nothing more
    on the device. Groups of gloo stay.

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
    return compat.abort_communicators(device) > 0


def _forget_former_world() -> None:
    """Forget the groups of a world that is no more: torch.distributed was initialised again, and they ended with it."""
    global _world  # noqa: PLW0603 - the cache belongs to the process's default group
    if dist.group.WORLD is not _world:
        _forget()
        _world = dist.group.WORLD


def _forget() -> None:
    for known in (_groups_by_ranks, _groups_by_group, _replica_groups, _part_groups):
        known.clear()
