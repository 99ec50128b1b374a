"""Values over the rows of all ranks, and the reduction of their gradients.

**Which values are global.** The last few are stored, so that a check can report that reducing one again is redundant.

**How the model's gradients are reduced**: a mean over ranks, a sum, or a sum divided by the user's number. The final gradients are
``c * sum over R of g_r``. An exact value is computed for a mean, ``c = 1 / |R|``. For any other ``c`` its gradient is
multiplied once, at the value, by ``1 / (c |R|)``. Losses, metrics and ``global_mean`` all do this in the same way, over any ranks.

| what reduces | c | times |
|---|---|---|
| DistributedDataParallel, ``fully_shard``, a comm hook of torch | ``1 / |R|`` | 1 |
| a sum | 1 | ``1 / |R|`` |
| ``set_gradient_divide_factor(f)`` of FSDP2 | ``1 / f`` | ``f / |R|`` |

The reduction of the strategy's module takes precedence over the reduction of an accumulation window's model.

**Which accumulation window is open** around a call. ``accumulation`` opens and closes it.

**Whether all ranks weigh a value equally.** Every rank computes the whole loss or metric, or its share of it, on this assumption. A rank
that multiplies it by a different factor would silently receive a wrong gradient. Therefore the upstream gradient is recorded in
backward, and compared in the handshake of the value's next call (``UpstreamGradWatch.take``). A strategy compares earlier: its
``UpstreamGradRecorder`` collects the upstream gradients of the current backward, so that a wrong gradient is neither reduced nor passed to
an optimizer.
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

from lightning_ddp_losses.core import inputs, torch_compat
from lightning_ddp_losses.core.host_copy import HostCopy
from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.distributed import other_reductions, process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.window_graph import TITLE
from lightning_ddp_losses.distributed.window_parts import WindowCall, WindowPart, is_window_part
from lightning_ddp_losses.errors import ConfigurationError, expect, listed

_recent: deque[Tensor] = deque(maxlen=8)


def remember_global_value(value: object, title: str = "") -> None:
    """Store a value that is already global. With a title, errors of an accumulation window use it as the name of the loss."""
    if isinstance(value, Tensor) and value.ndim == 0:
        _recent.append(value.detach())
    if title:
        name_value(value, title)


def recent_global_values() -> list[Tensor]:
    """Return the last few values that were global when they were computed."""
    return list(_recent)


# ---------------------------------------------------------------------- the reduction of the model


@dataclass(frozen=True)
class GradientReduction:
    """How the gradients of a model are reduced.

    Attributes:
        divisor: Number by which the sum over the ranks is divided. None if unknown.
        ranks: The ranks R, as ranks of the world.
        source: Name of the reduction in messages.
    """

    divisor: float | None
    ranks: tuple[int, ...]
    source: str

    @property
    def scale(self) -> float:
        """Factor of the gradient of a value that is computed for a mean. 1 if the divisor is unknown."""
        return 1.0 if self.divisor is None else self.divisor / len(self.ranks)

    def __str__(self) -> str:
        divided = "a comm hook" if self.divisor is None else f"a sum divided by {self.divisor:g}"
        return f"{divided} over {len(self.ranks)} ranks ({self.source})"


_current: ContextVar[Callable[[], GradientReduction | None] | None] = ContextVar("reduction", default=None)
"""Finds the reduction. None in a loop without a strategy and without a window."""

other_reductions.watch_setters()


def current_reduction() -> GradientReduction | None:
    """Return how the strategy's module, or the window's model, is reduced. None if unknown."""
    find = _current.get()
    return None if find is None else find()


@contextlib.contextmanager
def reduced_by(reduction: Callable[[], GradientReduction | None]) -> Iterator[None]:
    """Make the gradients of exact values inside the block compensate for a reduction, which is determined for each value."""
    before = _current.set(reduction)
    try:
        yield
    finally:
        _current.reset(before)


def with_scaled_gradient(value: Tensor, scale: float | None = None) -> Tensor:
    """Return the same value with a multiplied gradient.

    Args:
        value: Value computed for a mean over ranks.
        scale: Factor. If None, the scale of the current reduction.

    Raises:
        ConfigurationError: without a factor, if the reduction is unknown and some module of the process is not reduced by a mean. All
            ranks raise it, because they have compared ``reduction_to_match``.
    """
    if scale is None:
        if value.requires_grad and other_reductions.noted:
            _refuse_guess()
        scale = getattr(current_reduction(), "scale", 1.0)
    if scale == 1.0 or not value.requires_grad:
        return value
    passed = value.view_as(value)
    passed.register_hook(lambda grad: grad * scale)  # type: ignore[no-untyped-call]
    return passed


def gradient_reduction_of(modules: Iterable[tuple[str, nn.Module]]) -> GradientReduction | None:
    """Return how modules are reduced, or None if neither DistributedDataParallel nor ``fully_shard`` is among them.

    Args:
        modules: Modules by path, as returned by ``named_modules``.

    Raises:
        ConfigurationError: for modules with different reductions, or a reduction that the backend does not support.
    """
    found: dict[str, GradientReduction] = {}
    for path, module in modules:
        if isinstance(module, DistributedDataParallel):
            ranks = process_groups.members(module.process_group)
            hook = torch_compat.foreign_comm_hook(module)
            divisor = None if hook else float(len(ranks))
            found[path] = GradientReduction(divisor, ranks, hook or "DistributedDataParallel")
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
    for factor, forces_sum, mesh, own_ranks in torch_compat.sharded_reductions(module):
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
    """Return how a value's gradient will be reduced. None means a mean.

    Args:
        reduces: ``"auto"``, ``"mean"``, ``"sum"``, or the divisor of the sum.
        module: Model to inspect if there is neither a strategy nor a window.
        group: Ranks with different rows.
        exact_ranks: Whether the model must be reduced over all of them.
        has_graph: Whether the value has a gradient.

    Raises:
        ConfigurationError: for an invalid ``reduces``, for a reduction that differs from the model's, and without a model if some module of
            the process is not reduced by a mean.
    """
    if reduces not in ("auto", "mean", "sum"):
        is_divisor = not isinstance(reduces, (str, bool)) and math.isfinite(reduces) and reduces > 0
        expect(is_divisor, "reduces", expected='"auto", "mean", "sum", or a number above 0', got=repr(reduces))
    model = current_reduction()
    if model is None and module is not None:
        model = gradient_reduction_of(module.named_modules())
    if model is None and reduces == "auto":
        if has_graph and module is None and other_reductions.noted:
            _refuse_guess()
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
    """Return the non-mean reductions of modules of this process, for a loss's handshake to compare. Empty if nothing is unknown."""
    if not other_reductions.noted or _current.get() is not None or not torch.is_grad_enabled():
        return {}
    other = other_reductions.other_reduction()
    return {_UNDECLARED: other} if other else {}


def _refuse_guess() -> None:
    """Reject a gradient that is computed for a mean, if some module of this process is reduced in another way."""
    other = reduction_to_match().get(_UNDECLARED)
    expect(
        other is None,
        "reduces",
        expected='the model, as module=, or its reduction: "mean", "sum", or a number',
        got=f'"auto" without them, next to {other}',
        fix="Hand in the model whose gradients the value has: global_mean(..., module=model), or say how they are reduced: reduces='mean'. "
        "Around losses and metrics open accumulation_window(model, loss), or let the model's gradients end as their mean. A comm hook of "
        "your own that returns the mean says so: hook.reduces = 'mean'.",
    )


# ---------------------------------------------------------------------- the accumulation window


class OpenWindow(Protocol):
    """The interface of a window for the calls inside it (``accumulation.AccumulationWindow``)."""

    number: int | None
    expected_micro_batches: int
    compares_ranks: bool

    @property
    def averages(self) -> int:
        """Number of micro-batches over whose losses the program takes the mean."""

    @property
    def is_single(self) -> bool:
        """Whether the window is a single micro-batch."""

    @property
    def gives_shares(self) -> bool:
        """Whether the value of a loss is its share of the window's loss."""

    def enter(self, source: object, title: str, parts: Sequence[WindowPart], ranks: Sequence[int]) -> WindowCall:
        """Return the record of a loss call in this micro-batch."""


open_window: ContextVar[OpenWindow | None] = ContextVar("accumulation_window", default=None)
"""The window around the current call. ``accumulation.active`` sets it."""


def current_window() -> OpenWindow | None:
    """Return the open window, or None without a window, with gradients disabled, or in a window of a single micro-batch."""
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
        # affects the size of gradients, which may be reduced before the window ends
        "micro_batches of the accumulation window": window.expected_micro_batches,
        "micro-batches of its counts": window.averages,
    }


@contextlib.contextmanager
def outside_window() -> Iterator[None]:
    """Exclude the means inside the block from the window: they compare rows, so they are not sums over several micro-batches."""
    before = open_window.set(None)
    try:
        yield
    finally:
        open_window.reset(before)


def name_value(value: object, title: str) -> None:
    """Attach the name of a loss that compares rows to its value, for errors of the window."""
    if open_window.get() is not None and isinstance(value, Tensor) and value.grad_fn is not None:
        notes: Any = value.grad_fn.metadata
        notes[TITLE] = title


# ---------------------------------------------------------------------- upstream gradients


_GLOBAL = "lightning_ddp_losses: global value"  # a key of a graph node's metadata


def is_global_value(node: Any) -> bool:
    """Return whether a graph node made a value over the rows of all ranks."""
    return _GLOBAL in node.metadata


def _world_watches() -> weakref.WeakSet[UpstreamGradWatch] | None:
    """Return the watches with notes since training began. None in a world of one rank, which does not compare.

    They are stored for the lifetime of the world's groups.
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
    """The upstream gradient of one value.

    Attributes:
        grad: Numbers of the upstream gradient. On an accelerator their copy to the host may still be in progress.
        number: Position of the note among those of all watches.
        failures: Number of errors of the value's group before it.
    """

    grad: list[float] | HostCopy
    number: int
    failures: int

    def text(self) -> str:
        values = self.grad.read().reshape(-1).tolist() if isinstance(self.grad, HostCopy) else self.grad
        return " and ".join(map(repr, values))


class UpstreamGradRecorder:
    """Collects the CPU upstream gradients of values over all ranks in one backward (reading others would wait for the device)."""

    def __init__(self) -> None:
        self._first = 0

    def start(self) -> None:
        """Leave the notes of an earlier backward to the next calls."""
        self._first = next(_note_numbers)

    def take(self) -> str:
        """Return, as text for a handshake, the upstream gradients that were not reported by a watch yet, and mark them as reported."""
        return _take_notes(after=self._first, late_before=0)


class UpstreamGradWatch:
    """Records the upstream gradients of a value that all ranks share."""

    def __init__(self) -> None:
        self._noted: list[_NotedGrad] = []
        self._group: Group = None
        self._last_take = 0  # number that a note at that moment would have received
        self._everywhere = False

    @classmethod
    def of(cls, title: str, group: Group) -> UpstreamGradWatch:
        """Return the watch of a function's values, with the lifetime of the group. A world of one rank does not compare."""
        if process_groups.world_size(group) == 1:
            return cls()
        watches: dict[str, UpstreamGradWatch] = process_groups.internal_groups(group).notes.setdefault(cls, {})
        if title not in watches:
            watches[title] = cls()
        return watches[title]

    def watch(self, value: Any, *, group: Group = None, scale: float | None = None) -> Any:
        """Return the same value, or nest of values, scaled for the model's reduction, and record the upstream gradient of each tensor.

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
        if value.is_leaf:  # a hook would remain on a parameter
            value = value.view_as(value)
        window = open_window.get()
        if window is not None and window.compares_ranks and is_window_part(value):
            pass  # compared at the end of the window, because ranks may skip different micro-batches
        elif not self._everywhere or process_groups.world_size() > 1:  # a world of one does not compare
            value.register_hook(self.note)  # type: ignore[no-untyped-call]
        if self._everywhere:
            metadata: Any = value.grad_fn.metadata  # type: ignore[union-attr]
            metadata[_GLOBAL] = True
        return value

    def take(self) -> str:
        """Return the notes since the last call, as text for a handshake.

        Notes of an accelerator are reported one call later, so that a value used twice in a step does not wait for the backward in
        between.
        """
        before = self._last_take
        self._last_take = next(_note_numbers)
        noted = self.take_some(late_before=before)
        return ", ".join([note.text() for note in noted]) or "none yet"

    def take_some(self, *, after: float = -1, late_before: float = math.inf) -> list[_NotedGrad]:
        """Return a selection of the notes, and mark them as reported.

        Args:
            after: Only notes with a higher number are returned.
            late_before: Of an accelerator's notes, only those with a lower number are returned.
        """
        if not self._noted:
            return []
        # a failed call consumed the notes of only some ranks
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

    @eager_recursive  # a hook in backward that a compiled step would trace
    def note(self, grad: Tensor) -> None:
        """Record an upstream gradient without waiting for the device: a scalar itself, otherwise the sum and the sum of squares."""
        # for a value over a part of the world, only the ranks of the part take part
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
    """Leave the notes so far to the next calls. Call this when training begins."""
    watches = _world_watches()
    if watches is not None:
        watches.clear()


def take_late_notes() -> str:
    """Return upstream gradients that were not compared yet, as text for a handshake of the world. Call this when training ends."""
    late = _take_notes()
    forget_late_notes()
    return late


def _take_notes(*, after: float = -1, late_before: float = math.inf) -> str:
    """Return a selection of the world's notes (``UpstreamGradWatch.take_some``) in the order of backward, the same on all ranks."""
    found = [watch.take_some(after=after, late_before=late_before) for watch in _world_watches() or ()]
    notes = sorted(itertools.chain.from_iterable(found), key=lambda note: note.number)
    return ", ".join(note.text() for note in notes) or "none"
