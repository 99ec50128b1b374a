"""Is a global value back-propagated with the same upstream gradient on every rank? Noted in backward, compared in the next handshake.

Every rank computes the whole loss or metric, or its share of it, on the assumption that all of them weigh it alike. A rank that
multiplies it by something of its own would get a wrong gradient without a word.

The next handshake is that of the value's next call (``UpstreamGradWatch.take``). A strategy compares earlier: its
``UpstreamGradRecorder`` collects what came back in the backward that runs, so that nothing is reduced and no optimizer steps with a
wrong gradient.
"""

from __future__ import annotations

import itertools
import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.core import nests
from lightning_ddp_losses.core.forward_patch import eager_recursive
from lightning_ddp_losses.core.host_copy import HostCopy
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.process_groups import Group

_GLOBAL = "lightning_ddp_losses: global value"  # a key of a graph node's metadata


def is_global_value(node: Any) -> bool:
    """Say whether a graph node made a value over the rows of all ranks."""
    return _GLOBAL in node.metadata


class _PendingValue:
    """A value over all ranks that may still be back-propagated; lives as long as the value's graph."""

    recorder: UpstreamGradRecorder | None = None


class _WorldNotes:
    """What the world still has to compare; lives as long as its groups.

    Attributes:
        pending: Values that no recorder follows yet.
        noted: Watches that have noted something since training began.
    """

    def __init__(self) -> None:
        self.pending: weakref.WeakSet[_PendingValue] = weakref.WeakSet()
        self.noted: weakref.WeakSet[UpstreamGradWatch] = weakref.WeakSet()

    @classmethod
    def of_world(cls) -> _WorldNotes | None:
        """Return those of this world; None in a world of one, which compares nothing."""
        if process_groups.world_size() == 1:
            return None
        notes = process_groups.internal_groups(None).notes
        if cls not in notes:
            notes[cls] = cls()
        found: _WorldNotes = notes[cls]
        return found


_note_numbers = itertools.count()


class _NotedGrad(NamedTuple):
    """What came back into one value.

    Attributes:
        value: The upstream gradient; on an accelerator one that nobody has waited for.
        copy: That, on its way to the host; None on the CPU.
        number: Notes of all watches count up.
    """

    value: Tensor
    copy: HostCopy | None
    number: int

    def text(self) -> str:
        return _text(self.value if self.copy is None else self.copy.read())


class UpstreamGradRecorder:
    """Collects what comes back in one backward into values over all ranks, on the CPU (to read it elsewhere waits for the device)."""

    def __init__(self) -> None:
        self._noted: list[tuple[UpstreamGradWatch, Tensor]] = []

    def start(self) -> None:
        """Forget what an earlier backward left, and follow the values that were made since."""
        self._noted.clear()
        notes = _WorldNotes.of_world()
        if notes is not None and len(notes.pending):  # to go through an empty WeakSet takes longer than to ask
            for value in notes.pending:
                value.recorder = self
            notes.pending.clear()

    def add(self, watch: UpstreamGradWatch, upstream_grad: Tensor) -> None:
        """Note what came back into a value of ``watch``."""
        self._noted.append((watch, upstream_grad))

    def take(self) -> str:
        """Return what came back so far and no watch has reported yet, as text for a handshake; no watch will report it again."""
        noted = [value for watch, value in self._noted if watch.forget(value)]
        self._noted.clear()
        return ", ".join(map(_text, noted)) or "none"


class UpstreamGradWatch:
    """Notes what comes back into a value that all ranks share."""

    def __init__(self) -> None:
        self._noted: list[_NotedGrad] = []
        self._everywhere = False

    @classmethod
    def of(cls, title: str, group: Group) -> UpstreamGradWatch:
        """Return the watch of a function's values, which lives as long as the group. A world of one compares nothing."""
        if process_groups.world_size(group) == 1:
            return cls()
        watches: dict[str, UpstreamGradWatch] = process_groups.internal_groups(group).notes.setdefault(cls, {})
        return watches.setdefault(title, cls())

    def watch(self, value: Any, *, group: Group = None) -> Any:
        """Return the same value, or nest of values; the upstream gradient of each tensor will be noted.

        Args:
            value: Over the ranks of ``group``.
            group: Ranks of which one weighs it as the other; subgroups of the world may differ.
        """
        self._everywhere = group is None or process_groups.world_size(group) == process_groups.world_size()
        return nests.map_tensors(self._watch, value)

    def _watch(self, value: Tensor) -> Tensor:
        if not value.requires_grad:
            return value
        pending, notes = None, self._world_notes()
        if notes is not None and value.device.type == "cpu":
            pending = _PendingValue()
            notes.pending.add(pending)
        if value.is_leaf:  # a parameter, on which a hook would stay
            value = _Note.apply(value, self, pending)  # type: ignore[no-untyped-call]
        elif notes is not None or not self._everywhere:  # a world of one compares nothing
            value.register_hook(partial(self.note, pending=pending))  # type: ignore[no-untyped-call]
        if self._everywhere:
            metadata: Any = value.grad_fn.metadata  # type: ignore[union-attr]
            metadata[_GLOBAL] = True
        return value

    def _world_notes(self) -> _WorldNotes | None:
        """Return those of the world, unless the value is one of a subgroup: its ranks alone are here."""
        return _WorldNotes.of_world() if self._everywhere else None

    def take(self) -> str:
        """Return what was noted since the last call, as text for a handshake."""
        noted, self._noted = self._noted, []
        return ", ".join(note.text() for note in noted) or "none yet"

    def take_late(self) -> list[_NotedGrad]:
        """Return what was noted since the last call, where the world weighs the value alike; none of it is reported again."""
        if not self._everywhere:
            return []
        late, self._noted = self._noted, []
        return late

    def forget(self, value: Tensor) -> bool:
        """Say whether this was noted and not taken yet; from now on it counts as taken."""
        left = [note for note in self._noted if note.value is not value]
        known = len(left) < len(self._noted)
        self._noted = left
        return known

    @eager_recursive  # a hook in backward, which a compiled step would trace
    def note(self, grad: Tensor, pending: _PendingValue | None) -> None:
        """Remember an upstream gradient without waiting for the device; of one with dimensions its sum and sum of squares."""
        notes = self._world_notes()
        if notes is not None:
            notes.noted.add(self)
        elif self._everywhere:
            return
        if grad.ndim:
            grad = torch.stack([grad.sum(), grad.square().sum()])
        if grad.device.type != "cpu":
            self._noted.append(_NotedGrad(grad, HostCopy(grad), next(_note_numbers)))
            return
        value = grad.detach().clone()
        self._noted.append(_NotedGrad(value, None, next(_note_numbers)))
        if pending is not None and pending.recorder is not None:
            pending.recorder.add(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> UpstreamGradWatch:
        return UpstreamGradWatch()

    def __reduce__(self) -> tuple[Any, ...]:
        return UpstreamGradWatch, ()


def forget_late_notes() -> None:
    """Leave what was noted until now to the next calls: to be called when training begins."""
    world = _WorldNotes.of_world()
    if world is not None:
        world.noted.clear()


def take_late_notes() -> str:
    """Return what came back into values and was not compared since, as text for a handshake of the world: when training ends."""
    world = _WorldNotes.of_world()
    if world is None:
        return "none"
    watches = list(world.noted)
    world.noted.clear()
    notes: list[_NotedGrad] = []
    for watch in watches:
        notes += watch.take_late()
    # in the order of backward, which is the same on all ranks
    notes.sort(key=lambda note: note.number)
    return ", ".join(note.text() for note in notes) or "none"


class _Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, watch: UpstreamGradWatch, pending: _PendingValue | None) -> Tensor:
        ctx.watch, ctx.pending = watch, pending
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.watch.note(grad, ctx.pending)
        return grad, None, None


def _text(value: Tensor) -> str:
    return " and ".join(map(repr, value.reshape(-1).tolist()))
