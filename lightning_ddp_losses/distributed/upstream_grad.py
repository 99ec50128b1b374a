"""Is a global value back-propagated with the same coefficient on every rank? Noted in backward, compared in the next frame.

Every rank computes the whole loss or metric, or its share of it, on the assumption that all of them weigh it alike. A rank
that multiplies it by something of its own would get a wrong gradient without a word.

The next frame is that of the value's next call, or one that leaves in the same backward: the strategy's, which waits for the values
that are `expected` to come back and sends what was noted, so that nothing is reduced and no optimizer steps with a wrong gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.core import precision
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.process_groups import Group


class _Awaited:
    """A value whose coefficient has yet to come; it goes with the value's graph."""


_awaited: weakref.WeakSet[_Awaited] = weakref.WeakSet()
_noted_in_backward: list[tuple[weakref.ref[UpstreamGradWatch], Tensor]] = []
_listener: Callable[[], None] | None = None


def expected() -> bool:
    """Whether a value over all ranks, on the CPU, may still be back-propagated."""
    return len(_awaited) > 0


def expect_no_earlier() -> None:
    """Values made so far are no longer expected: who keeps one does not make the next backward wait for it."""
    _awaited.clear()


def on_note(listener: Callable[[], None] | None) -> None:
    """What to call whenever such a value was back-propagated, which is noted for ``take_noted`` from now on; None: no more."""
    global _listener  # noqa: PLW0603 - one backward at a time
    _listener = listener
    _noted_in_backward.clear()


def take_noted() -> str:
    """What came back so far, and no watch has told yet, as text for a frame; no watch will tell it again."""
    taken = list(_noted_in_backward)
    _noted_in_backward.clear()
    texts = []
    for reference, value in taken:
        watch = reference()
        if watch is not None and watch.forget(value):
            texts.append(_text(value))
    return ", ".join(texts) or "none"


class UpstreamGradWatch:
    """Notes what comes back into a value that all ranks share."""

    def __init__(self) -> None:
        self._noted: list[tuple[Tensor, Any]] = []

    def watch(self, value: Any, *, group: Group = None) -> Any:
        """The same value, or nest of values; the upstream gradient of each tensor will be noted.

        Args:
            value: Over the ranks of ``group``.
            group: Ranks of which one weighs it as the other; parts of the world may differ.
        """
        everywhere = group is None or process_groups.world_size(group) == process_groups.world_size()
        return precision.map_tensors(lambda tensor: self._watch(tensor, everywhere), value)

    def _watch(self, value: Tensor, everywhere: bool) -> Tensor:
        if not value.requires_grad:
            return value
        awaited = None
        if everywhere and value.device.type == "cpu":  # to read it elsewhere waits for the device
            awaited = _Awaited()
            _awaited.add(awaited)
        if value.is_leaf:  # a parameter, on which a hook would stay
            return _Note.apply(value, self, awaited)  # type: ignore[no-any-return, no-untyped-call]
        value.register_hook(partial(self.note, awaited=awaited))  # type: ignore[no-untyped-call]
        return value

    def take(self) -> str:
        """What was noted since the last call, as text for a frame."""
        noted, self._noted = self._noted, []
        for _, event in noted:
            if event is not None:
                event.synchronize()
        return ", ".join(_text(value) for value, _ in noted) or "none yet"

    def forget(self, value: Tensor) -> bool:
        """Whether this was noted and not taken yet; from now on it counts as taken."""
        left = [entry for entry in self._noted if entry[0] is not value]
        known = len(left) < len(self._noted)
        self._noted = left
        return known

    def note(self, grad: Tensor, awaited: _Awaited | None) -> None:
        """Remember a coefficient without waiting for the device; of one with dimensions its sum and sum of squares."""
        if grad.ndim:
            grad = torch.stack([grad.sum(), grad.square().sum()])
        if grad.device.type != "cuda":
            value = grad.detach().clone()
            self._noted.append((value, None))
            if awaited is not None:
                _awaited.discard(awaited)
                if _listener is not None:
                    _noted_in_backward.append((weakref.ref(self), value))
                    _listener()
            return
        copy = torch.empty(grad.shape, dtype=grad.dtype, pin_memory=True).copy_(grad.detach(), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._noted.append((copy, event))

    def __deepcopy__(self, memo: dict[int, Any]) -> UpstreamGradWatch:
        return UpstreamGradWatch()

    def __reduce__(self) -> tuple[Any, ...]:
        return UpstreamGradWatch, ()


class _Note(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, watch: UpstreamGradWatch, awaited: _Awaited | None) -> Tensor:
        ctx.watch, ctx.awaited = watch, awaited
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.watch.note(grad, ctx.awaited)
        return grad, None, None


def _text(value: Tensor) -> str:
    return " and ".join(map(repr, value.reshape(-1).tolist()))
