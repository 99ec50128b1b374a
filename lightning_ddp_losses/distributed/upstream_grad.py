"""Is a global value back-propagated with the same upstream gradient on every rank? Noted in backward, compared in the next handshake.

Every rank computes the whole loss or metric, or its share of it, on the assumption that all of them weigh it equally. A rank that
multiplies it by another factor would get a wrong gradient without a word.

The next handshake is that of the value's next call (``UpstreamGradWatch.take``). A strategy compares earlier: its
``UpstreamGradRecorder`` collects the upstream gradients of the current backward, so that no wrong gradient is
reduced or reaches an optimizer.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.core import nests
from lightning_ddp_losses.core.forward_patch import eager_recursive
from lightning_ddp_losses.core.host_copy import HostCopy
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.reduction import with_scaled_gradient

_GLOBAL = "lightning_ddp_losses: global value"  # a key of a graph node's metadata


def is_global_value(node: Any) -> bool:
    """Return whether a graph node made a value over the rows of all ranks."""
    return _GLOBAL in node.metadata


def _world_watches() -> weakref.WeakSet[UpstreamGradWatch] | None:
    """Return the watches with notes since training began. None in a world of one, which does not compare.

    They are kept for as long as the world's groups live.
    """
    if process_groups.world_size() == 1:
        return None
    found: weakref.WeakSet[UpstreamGradWatch]
    found = process_groups.internal_groups(None).notes.setdefault(_NotedGrad, weakref.WeakSet())
    return found


_note_numbers = itertools.count()


class _NotedGrad(NamedTuple):
    """What came back into one value.

    Attributes:
        copy: Upstream gradient on its way to the host.
        is_late: It is on an accelerator and may still be computed.
        number: Notes of all watches count up.
    """

    copy: HostCopy
    is_late: bool
    number: int

    def text(self) -> str:
        return " and ".join(map(repr, self.copy.read().reshape(-1).tolist()))


class UpstreamGradRecorder:
    """Collects what comes back in one backward into values over all ranks, on the CPU (to read it elsewhere waits for the device)."""

    def __init__(self) -> None:
        self._first = 0

    def start(self) -> None:
        """Leave what an earlier backward noted to the next calls."""
        self._first = next(_note_numbers)

    def take(self) -> str:
        """Return the upstream gradients that no watch has reported yet, as text for a handshake. They are not reported again."""
        return _take_notes(lambda note: not note.is_late and note.number > self._first)


class UpstreamGradWatch:
    """Notes what comes back into a value that all ranks share."""

    def __init__(self) -> None:
        self._noted: list[_NotedGrad] = []
        self._last_take = 0  # number that a note of that moment would have had
        self._everywhere = False

    @classmethod
    def of(cls, title: str, group: Group) -> UpstreamGradWatch:
        """Return the watch of a function's values, which lives as long as the group. A world of one does not compare."""
        if process_groups.world_size(group) == 1:
            return cls()
        watches: dict[str, UpstreamGradWatch] = process_groups.internal_groups(group).notes.setdefault(cls, {})
        return watches.setdefault(title, cls())

    def watch(self, value: Any, *, group: Group = None, scale: float | None = None) -> Any:
        """Return the same value, or nest of values, scaled for the model's reduction. The upstream gradient of each tensor is noted.

        Args:
            value: Value over the ranks of ``group``.
            group: Ranks that weigh it equally. Subgroups of the world may differ.
            scale: Factor, as in ``with_scaled_gradient``.
        """
        self._everywhere = group is None or process_groups.world_size(group) == process_groups.world_size()
        return nests.map_tensors(lambda tensor: self._watch(with_scaled_gradient(tensor, scale)), value)

    def _watch(self, value: Tensor) -> Tensor:
        if not value.requires_grad:
            return value
        if value.is_leaf:  # a hook would stay on a parameter
            value = value.view_as(value)
        if not self._everywhere or process_groups.world_size() > 1:  # a world of one does not compare
            value.register_hook(self.note)  # type: ignore[no-untyped-call]
        if self._everywhere:
            metadata: Any = value.grad_fn.metadata  # type: ignore[union-attr]
            metadata[_GLOBAL] = True
        return value

    def take(self) -> str:
        """Return the notes since the last call, as text for a handshake.

        Those of an accelerator are a call older. So a value that is used twice in a step does not wait for the backward in between.
        """
        before, self._last_take = self._last_take, next(_note_numbers)
        noted = self.take_some(lambda note: not note.is_late or note.number < before)
        return ", ".join(note.text() for note in noted) or "none yet"

    def take_some(self, wanted: Callable[[_NotedGrad], bool]) -> list[_NotedGrad]:
        """Return some of the notes. They are not reported again."""
        taken = [note for note in self._noted if wanted(note)]
        self._noted = [note for note in self._noted if not wanted(note)]
        return taken

    @eager_recursive  # a hook in backward, which a compiled step would trace
    def note(self, grad: Tensor) -> None:
        """Remember an upstream gradient without waiting for the device. One with dimensions is noted by its sum and sum of squares."""
        # of a value over a part of the world, its ranks alone are here
        if self._everywhere:
            watches = _world_watches()
            if watches is None:
                return
            watches.add(self)
        if grad.ndim:
            grad = torch.stack([grad.sum(), grad.square().sum()])
        self._noted.append(_NotedGrad(HostCopy(grad), grad.device.type != "cpu", next(_note_numbers)))

    def __reduce__(self) -> tuple[Any, ...]:
        return UpstreamGradWatch, ()


def forget_late_notes() -> None:
    """Leave the notes so far to the next calls. Call it when training begins."""
    watches = _world_watches()
    if watches is not None:
        watches.clear()


def take_late_notes() -> str:
    """Return what came back into values and was not compared since, as text for a handshake of the world: when training ends."""
    late = _take_notes(lambda note: True)
    forget_late_notes()
    return late


def _take_notes(wanted: Callable[[_NotedGrad], bool]) -> str:
    """Return some notes of the world, in the order of backward, which is the same on all ranks."""
    found = [watch.take_some(wanted) for watch in _world_watches() or ()]
    notes = sorted(itertools.chain.from_iterable(found), key=lambda note: note.number)
    return ", ".join(note.text() for note in notes) or "none"
