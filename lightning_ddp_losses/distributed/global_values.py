"""Values over the rows of all ranks, and what becomes of their gradients.

**Which are global.** The last few are remembered, so that reducing one once more can be called waste.

**How the model's gradients are reduced**: a mean over ranks, a sum, or a sum divided by the user's number. Gradients end as
``c * sum over R of g_r``. An exact value is made for a mean, ``c = 1 / |R|``. For any other ``c`` its gradient is
multiplied by ``1 / (c |R|)``, once, at the value. So losses, metrics and ``global_mean`` follow in the same way, over any ranks.

| what reduces | c | times |
|---|---|---|
| DistributedDataParallel, ``fully_shard``, a comm hook of torch | ``1 / |R|`` | 1 |
| a sum | 1 | ``1 / |R|`` |
| ``set_gradient_divide_factor(f)`` of FSDP2 | ``1 / f`` | ``f / |R|`` |

The reduction of the strategy's module comes first, then that of an accumulation window's model.

**Which accumulation window is open** around a call. ``accumulation`` opens and closes it.

**Whether all ranks weigh a value equally.** Every rank computes the whole loss or metric, or its share of it, on the assumption that they
do. A rank that multiplies it by another factor would get a wrong gradient without a word. So the upstream gradient is noted in
backward, and compared in the handshake of the value's next call (``UpstreamGradWatch.take``). A strategy compares earlier: its
``UpstreamGradRecorder`` collects the upstream gradients of the current backward, so that no wrong gradient is reduced or reaches an
optimizer.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses.core import compat, inputs
from lightning_ddp_losses.core.host_copy import HostCopy
from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.distributed import other_reductions, process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.window_graph import TITLE
from lightning_ddp_losses.distributed.window_parts import WindowCall, WindowPart, is_window_part
from lightning_ddp_losses.errors import ConfigurationError, expect, listed

_recent: deque[Tensor] = deque(maxlen=8)


def remember_global_value(value: object, title: str = "") -> None:
    """Remember a value that is global already. With a title, errors of an accumulation window name the loss by it."""
    if isinstance(value, Tensor) and value.ndim == 0:
        _recent.append(value.detach())
    if title:
        name_value(value, title)


def recent_global_values() -> list[Tensor]:
    """Return the last few values that were global when they were made."""
    return list(_recent)


# ---------------------------------------------------------------------- the reduction of the model


@dataclass(frozen=True)
class GradientReduction:
    """How gradients end.

    Attributes:
        divisor: The sum over the ranks is divided by it. None: unknown.
        ranks: The ranks R, of the world.
        source: Name of the reduction in messages.
    """

    divisor: float | None
    ranks: tuple[int, ...]
    source: str

    @property
    def scale(self) -> float:
        """Factor of the gradient of a value that is made for a mean. 1 if the divisor is unknown."""
        return 1.0 if self.divisor is None else self.divisor / len(self.ranks)

    def __str__(self) -> str:
        divided = "a comm hook" if self.divisor is None else f"a sum divided by {self.divisor:g}"
        return f"{divided} over {len(self.ranks)} ranks ({self.source})"


def _unknown() -> GradientReduction | None:
    """Stand for the reduction of a loop without a strategy and without a window."""
    return None


_current: ContextVar[Callable[[], GradientReduction | None]] = ContextVar("reduction", default=_unknown)
other_reductions.watch_setters()


def current_reduction() -> GradientReduction | None:
    """Return how the strategy's module, or the window's model, is reduced. None if that is unknown."""
    return _current.get()()


@contextlib.contextmanager
def reduced_by(reduction: Callable[[], GradientReduction | None]) -> Iterator[None]:
    """Let the gradients of exact values inside the block make up for a reduction. Each value asks for it."""
    before = _current.set(reduction)
    try:
        yield
    finally:
        _current.reset(before)


def with_scaled_gradient(value: Tensor, scale: float | None = None) -> Tensor:
    """Return the same value. Its gradient is multiplied.

    Args:
        value: Value made for a mean over ranks.
        scale: Factor. None: that of the current reduction.

    Raises:
        ConfigurationError: without a factor, where the reduction is unknown and some module of the process is not reduced by a mean. All
            ranks raise it, as they have compared ``reduction_to_match``.
    """
    if scale is None:
        if value.requires_grad and other_reductions.noted:
            _refuse_guess(reduction_to_match().get(_UNDECLARED, ""))
        scale = getattr(current_reduction(), "scale", 1.0)
    if scale == 1.0 or not value.requires_grad:
        return value
    passed = value.view_as(value)
    passed.register_hook(lambda grad: grad * scale)  # type: ignore[no-untyped-call]
    return passed


def gradient_reduction_of(modules: Iterable[tuple[str, nn.Module]]) -> GradientReduction | None:
    """Return how modules are reduced. None if neither DistributedDataParallel nor ``fully_shard`` is among them.

    Args:
        modules: Modules by path, as ``named_modules`` gives them.

    Raises:
        ConfigurationError: for modules that are reduced differently, or by what this backend cannot.
    """
    found: dict[str, GradientReduction] = {}
    for path, module in modules:
        if isinstance(module, DistributedDataParallel):
            ranks = process_groups.members(module.process_group)
            hook = next(iter(compat.foreign_comm_hooks(module)), None)
            divisor = float(len(ranks)) if hook is None else None
            source = "DistributedDataParallel" if hook is None else f"comm hook {hook} of DistributedDataParallel"
            found[path] = GradientReduction(divisor, ranks, source)
        elif isinstance(module, FSDPModule):
            for each in _of_sharded(module, path):
                found[path] = each
    first = next(iter(found.values()), None)
    if len({each.scale for each in found.values()}) > 1:
        shown = [f"`{path}` by {each.divisor:g}" for path, each in found.items() if each.divisor is not None]
        raise ConfigurationError(
            "gradients of the model",
            expected="one divisor for all parameters under an exact loss",
            got=listed(shown),
            fix="Call set_gradient_divide_factor with the same number on every module that fully_shard divides: it does not reach the "
            "modules inside.",
        )
    return first


def _of_sharded(module: FSDPModule, path: str) -> Iterator[GradientReduction]:
    """Yield how ``fully_shard`` reduces the parameters of one module."""
    for factor, forces_sum, mesh, own_ranks in compat.sharded_reductions(module):
        ranks = process_groups.mesh_ranks(mesh)
        if factor is None:
            yield GradientReduction(float(len(ranks)), ranks, "fully_shard")
            continue
        call = f"set_gradient_divide_factor({factor:g})"
        if mesh.device_type == "cpu" and not forces_sum and factor != own_ranks:
            raise ConfigurationError(
                f"{call} of `{path}`",
                expected="a sum on the wire: gloo multiplies nothing",
                got="without set_force_sum_reduction_for_comms(True)",
                fix=f"Call set_force_sum_reduction_for_comms(True) on each module beside {call}.",
            )
        yield GradientReduction(float(factor), ranks, call)


def chosen_reduction(
    reduces: str | float, module: nn.Module | None, group: Group, *, exact_ranks: bool, has_graph: bool
) -> GradientReduction | None:
    """Return how a value's gradient will be reduced. None is a mean.

    Args:
        reduces: ``"auto"``, ``"mean"``, ``"sum"``, or the divisor of the sum.
        module: Model to ask if there is neither a strategy nor a window.
        group: Ranks with different rows.
        exact_ranks: The model must be reduced over all of them.
        has_graph: Whether the value has a gradient.

    Raises:
        ConfigurationError: for what cannot be read, for another reduction than the model's, and without a model if some module of the
            process is not reduced by a mean.
    """
    if reduces not in ("auto", "mean", "sum"):
        is_divisor = not isinstance(reduces, (str, bool)) and math.isfinite(reduces) and reduces > 0
        expect(is_divisor, "reduces", expected='"auto", "mean", "sum", or a number above 0', got=repr(reduces))
    model = current_reduction()
    if model is None and module is not None:
        model = gradient_reduction_of(module.named_modules())
    if model is None and reduces == "auto":
        if has_graph and module is None and other_reductions.noted:
            _refuse_guess(reduction_to_match().get(_UNDECLARED, ""))
        return None
    ranks = process_groups.members(group)
    if model is not None and exact_ranks and not set(ranks) <= set(model.ranks):
        raise ConfigurationError(
            "mesh",
            expected=f"ranks over which the model is reduced, {list(model.ranks)} ({model.source})",
            got=f"{list(ranks)}",
            fix="Hand in the dimensions of the mesh over which rows differ; the model must be reduced over all of them.",
        )
    if reduces == "auto":
        if model is not None and model.divisor is None:
            raise ConfigurationError(
                "reduces",
                expected='"mean", "sum", or a number',
                got=f'"auto" with {model.source}, whose result nobody knows',
                fix='Say what the hook returns: reduces="mean" for the mean over ranks.',
            )
        return model
    over = ranks if model is None else model.ranks
    divisor = {"mean": float(len(over)), "sum": 1.0}.get(reduces, reduces) if isinstance(reduces, str) else reduces
    chosen = GradientReduction(float(divisor), over, f"reduces={reduces!r}")
    is_models = model is None or model.divisor is None or model.divisor == chosen.divisor
    expect(is_models, "reduces", expected=f"that of the model: {model}", got=str(chosen), fix='Take "auto".')
    return chosen


_UNDECLARED = "gradients of a module of this process"


def reduction_to_match() -> dict[str, str]:
    """Return a reduction that is no mean, of a module of this process, for the handshake of a loss to compare. Empty if all is known."""
    if not other_reductions.noted or _current.get() is not _unknown or not torch.is_grad_enabled():
        return {}
    other = other_reductions.other_reduction()
    return {_UNDECLARED: other} if other else {}


def _refuse_guess(other: str) -> None:
    """Refuse a gradient that is made for a mean, if some module of this process is reduced in another way."""
    expect(
        not other,
        "reduces",
        expected='the model, as module=, or its reduction: "mean", "sum", or a number',
        got=f'"auto" without them, next to {other}',
        fix="Hand in the model whose gradients the value has: global_mean(..., module=model), or say how they are reduced: reduces='mean'. "
        "Around losses and metrics open accumulation_window(model, loss), or let the model's gradients end as their mean. A comm hook of "
        "your own that returns the mean says so: hook.reduces = 'mean'.",
    )


# ---------------------------------------------------------------------- the accumulation window


class OpenWindow(Protocol):
    """A window as the calls inside it see it (``accumulation.AccumulationWindow``)."""

    number: int | None
    expected_micro_batches: int
    compares_ranks: bool

    @property
    def averages(self) -> int:
        """Number of micro-batches over whose losses the program takes the mean."""

    @property
    def is_single(self) -> bool:
        """Whether the window is one micro-batch."""

    @property
    def gives_shares(self) -> bool:
        """Whether the value of a loss is its share of the window's loss."""

    def enter(self, source: object, title: str, parts: Sequence[WindowPart], ranks: Sequence[int]) -> WindowCall:
        """Return a call of a loss in this micro-batch."""


open_window: ContextVar[OpenWindow | None] = ContextVar("accumulation_window", default=None)
"""The window around this. ``accumulation.active`` sets it."""


def current_window() -> OpenWindow | None:
    """Return the window of the current micro-batch. None outside of one, without gradients, and in a window of one micro-batch."""
    window = open_window.get()
    if window is None or window.is_single or not torch.is_grad_enabled():
        return None
    return window


def micro_batch_to_match() -> dict[str, object]:
    """Return the values of the current window that the handshake of a loss compares."""
    window = current_window()
    if window is None:
        return {}
    return {
        "micro-batch of the accumulation window": window.number or "not declared",
        # the size of gradients, which may be reduced before the window ends
        "micro_batches of the accumulation window": window.expected_micro_batches,
        "micro-batches of its counts": window.averages,
    }


@contextlib.contextmanager
def outside_window() -> Iterator[None]:
    """Let the means inside the block count in no window: they compare rows, so they are no sums over the rows of several micro-batches."""
    before = open_window.set(None)
    try:
        yield
    finally:
        open_window.reset(before)


def name_value(value: object, title: str) -> None:
    """Let errors of the window name a loss that compares rows, by its value."""
    if open_window.get() is not None and isinstance(value, Tensor) and value.grad_fn is not None:
        notes: Any = value.grad_fn.metadata
        notes[TITLE] = title


# ---------------------------------------------------------------------- upstream gradients


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
    notes = process_groups.internal_groups(None).notes
    found: weakref.WeakSet[UpstreamGradWatch] | None = notes.get(_NotedGrad)
    if found is None:
        found = notes[_NotedGrad] = weakref.WeakSet()
    return found


_note_numbers = itertools.count()


class _NotedGrad(NamedTuple):
    """What came back into one value.

    Attributes:
        grad: Numbers of the upstream gradient. Those of an accelerator are on their way to the host and may still be computed.
        number: Notes of all watches count up.
        failures: Number of errors of the value's group before it.
    """

    grad: list[float] | HostCopy
    number: int
    failures: int

    def text(self) -> str:
        values = self.grad.read().reshape(-1).tolist() if isinstance(self.grad, HostCopy) else self.grad
        return " and ".join(map(repr, values))


class UpstreamGradRecorder:
    """Collects what comes back in one backward into values over all ranks, on the CPU (to read it elsewhere waits for the device)."""

    def __init__(self) -> None:
        self._first = 0

    def start(self) -> None:
        """Leave what an earlier backward noted to the next calls."""
        self._first = next(_note_numbers)

    def take(self) -> str:
        """Return the upstream gradients that no watch has reported yet, as text for a handshake. They are not reported again."""
        return _take_notes(after=self._first, late_before=0)


class UpstreamGradWatch:
    """Notes what comes back into a value that all ranks share."""

    def __init__(self) -> None:
        self._noted: list[_NotedGrad] = []
        self._group: Group = None
        self._last_take = 0  # number that a note of that moment would have had
        self._everywhere = False

    @classmethod
    def of(cls, title: str, group: Group) -> UpstreamGradWatch:
        """Return the watch of a function's values, which lives as long as the group. A world of one does not compare."""
        if process_groups.world_size(group) == 1:
            return cls()
        watches: dict[str, UpstreamGradWatch] = process_groups.internal_groups(group).notes.setdefault(cls, {})
        if title not in watches:
            watches[title] = cls()
        return watches[title]

    def watch(self, value: Any, *, group: Group = None, scale: float | None = None) -> Any:
        """Return the same value, or nest of values, scaled for the model's reduction. The upstream gradient of each tensor is noted.

        Args:
            value: Value over the ranks of ``group``.
            group: Ranks that weigh it equally. Subgroups of the world may differ.
            scale: Factor, as in ``with_scaled_gradient``.
        """
        self._group = group
        self._everywhere = group is None or process_groups.world_size(group) == process_groups.world_size()
        if isinstance(value, Tensor):
            return self._watch(value, scale)
        return inputs.map_tensors(lambda tensor: self._watch(tensor, scale), value)

    def _watch(self, value: Tensor, scale: float | None) -> Tensor:
        value = with_scaled_gradient(value, scale)
        if not value.requires_grad:
            return value
        if value.is_leaf:  # a hook would stay on a parameter
            value = value.view_as(value)
        window = open_window.get()
        if window is not None and window.compares_ranks and is_window_part(value):
            pass  # at its end: ranks may leave out different micro-batches
        elif not self._everywhere or process_groups.world_size() > 1:  # a world of one does not compare
            value.register_hook(self.note)  # type: ignore[no-untyped-call]
        if self._everywhere:
            metadata: Any = value.grad_fn.metadata  # type: ignore[union-attr]
            metadata[_GLOBAL] = True
        return value

    def take(self) -> str:
        """Return the notes since the last call, as text for a handshake.

        Those of an accelerator are a call older. So a value that is used twice in a step does not wait for the backward in between.
        """
        before = self._last_take
        self._last_take = next(_note_numbers)
        noted = self.take_some(late_before=before)
        return ", ".join([note.text() for note in noted]) or "none yet"

    def take_some(self, *, after: float = -1, late_before: float = math.inf) -> list[_NotedGrad]:
        """Return some of the notes. They are not reported again.

        Args:
            after: Notes with a higher number are returned.
            late_before: Of an accelerator's notes, those with a lower number are returned.
        """
        if not self._noted:
            return []
        # a call that has failed took the notes of some ranks only
        failures = process_groups.failures(self._group)
        wanted: list[_NotedGrad] = []
        left: list[_NotedGrad] = []
        for note in self._noted:
            if note.failures != failures:
                continue
            is_late = isinstance(note.grad, HostCopy)
            if note.number > after and (not is_late or note.number < late_before):
                wanted.append(note)
            else:
                left.append(note)
        self._noted = left
        return wanted

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
        noted = grad.reshape(-1).tolist() if grad.is_cpu else HostCopy(grad)
        failures = process_groups.failures(self._group)
        self._noted.append(_NotedGrad(noted, next(_note_numbers), failures))

    def __reduce__(self) -> tuple[Any, ...]:
        return UpstreamGradWatch, ()


def forget_late_notes() -> None:
    """Leave the notes so far to the next calls. Call it when training begins."""
    watches = _world_watches()
    if watches is not None:
        watches.clear()


def take_late_notes() -> str:
    """Return what came back into values and was not compared since, as text for a handshake of the world: when training ends."""
    late = _take_notes()
    forget_late_notes()
    return late


def _take_notes(*, after: float = -1, late_before: float = math.inf) -> str:
    """Return some notes of the world (``UpstreamGradWatch.take_some``), in the order of backward, which is the same on all ranks."""
    found = [watch.take_some(after=after, late_before=late_before) for watch in _world_watches() or ()]
    notes = sorted(itertools.chain.from_iterable(found), key=lambda note: note.number)
    return ", ".join(note.text() for note in notes) or "none"
