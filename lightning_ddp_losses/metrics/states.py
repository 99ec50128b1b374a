"""Handles a metric's states: reads, assigns, widens, adds, sends and copies them, without leaving a graph behind.

``needs_whole_batch`` lists the metrics whose update must be called with the rows of all ranks, because their states do not add up over
ranks. ``ExchangingMetric._receive`` completes states of ranks with few rows.
"""

from __future__ import annotations

import copy
import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean

from lightning_ddp_losses.core import inputs, precision, torch_compat
from lightning_ddp_losses.core.configuration import Configuration
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.global_values import UpstreamGradWatch
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.errors import ConfigurationError, expect, listed
from lightning_ddp_losses.metrics.buffer_plan import Kind
from lightning_ddp_losses.metrics.exchange import Packet, Received, State, exchange, naming_caches, plans_of

Gather = Literal["auto", "states", "inputs"]
States = dict[str, Any]
# prefixes of modules whose classes have a supported `_sync_dist`
_KNOWN_SYNC = ("torchmetrics.", "lightning_ddp_losses")
# prefixes of modules whose classes do not extend `reset`
_PLAIN_RESET = ("torchmetrics.metric", "lightning_ddp_losses", "torch.", "abc", "builtins")


_ABSENT = object()
# types of values that torch.nn.Module does not register
_PLAIN_TYPES = frozenset({Tensor, list, int, bool, type(None)})


class Seen(NamedTuple):
    """Updates since the last reset.

    Attributes:
        rows: Number of their rows.
        skipped: Number of updates without rows, which do not count.
        ends: For each tensor that grows by "cat", its length after each update.
    """

    rows: int = 0
    skipped: int = 0
    ends: Mapping[str, list[int]] = {}  # never modified


@dataclass
class MetricRecord:
    """State of a differentiable metric in addition to torchmetrics' own attributes.

    Attributes:
        gather: ``"states"`` or ``"inputs"``.
        keep_graph: Whether ``update`` keeps its graph for ``compute``.
        expects_gradient: Whether a value without a graph is an error.
        sets_attributes: Whether ``update`` may set attributes that are not states.
        upstream_grads: Upstream gradients of its values.
        configuration: Options, read before the first update and in each exchange.
        seen: Updates since the last reset.
        in_forward: Whether a forward is running, which calls ``update`` and ``compute`` itself.
        inputs_without_rows: Inputs of skipped updates that require a gradient, if ``update`` keeps its graph.
    """

    gather: Gather = "states"
    keep_graph: bool = False
    expects_gradient: bool = True
    sets_attributes: bool = False
    upstream_grads: UpstreamGradWatch = field(default_factory=UpstreamGradWatch)
    configuration: Configuration = field(default_factory=Configuration)
    seen: Seen = field(default_factory=Seen)
    in_forward: bool = False
    inputs_without_rows: list[Tensor] = field(default_factory=list)


class _Before(NamedTuple):
    """A state before ``compute``.

    Attributes:
        value: The state. For a list, its items.
        version: Number of writes to a tensor. 0 if it does not count them.
    """

    value: Any
    version: int = 0

    @classmethod
    def of(cls, state: Any) -> _Before:
        """Return the properties of a state that are compared."""
        if not isinstance(state, Tensor):
            return cls(list(state))
        return cls(state, 0 if state.is_inference() else torch_compat.tensor_version(state))

    def is_same(self, state: Any) -> bool:
        """Return whether the state is the same object and was not written to."""
        now = _Before.of(state)
        if isinstance(self.value, Tensor):
            return self.value is now.value and self.version == now.version
        return len(self.value) == len(now.value) and all(map(operator.is_, self.value, now.value))


class Progress(NamedTuple):
    """Everything that a metric has accumulated since the last reset."""

    states: States
    update_count: int
    seen: Seen


class ExchangingMetric(Metric):
    """torchmetrics' base for metrics that send their states in one exchange, individually or with other metrics."""

    gathers_lists_at_once = True
    """Whether ranks may hold lists of different lengths, which torchmetrics gathers item by item."""
    # TorchScript evaluates annotations and properties of a scripted module's metrics, and cannot compile these
    __jit_unused_properties__: ClassVar[list[str]] = [*Metric.__jit_unused_properties__, "_has_peers", "_waits"]

    _joins_stacks = False  # whether ``compute`` joins states without a reduction, as far as its defaults show

    def packet(self) -> Packet:
        """Return the states of everything since ``reset``, to be exchanged."""
        raise NotImplementedError

    def _to_send(self, rows: int, untouched: bool, split: Mapping[str, list[Tensor]] | None = None) -> list[State]:
        """Return the states in the form in which they are sent.

        Args:
            rows: Weight of means.
            untouched: Whether they are the defaults.
            split: States that are sent in several tensors.

        Raises:
            ConfigurationError: for a tensor without a reduction that ``compute`` does not join.
        """
        found = []
        title = type(self).__name__
        device = self.device
        reductions: dict[str, Any] = self._reductions  # functions, even if add_state was called with a name
        for name, reduce in reductions.items():
            value = getattr(self, name)
            kind: Kind = "stack" if isinstance(value, Tensor) else "list"
            if reduce is None and kind == "stack" and not self._joins_stacks:
                refuse_stacks(self, name)
                self._joins_stacks = True
            if reduce is dim_zero_cat:
                kind = "rows"
                value = (split or {}).get(name, value)
            reduction = getattr(reduce, "__qualname__", "none")
            found.append(State(f"{title}.{name}", kind, reduction, untouched, value, device, reduce, float(rows)))
        return found

    def _exchange_states(self, title: str, group: Group) -> None:
        """Replace the states by the states of all ranks. Communication: one handshake, or one more collective."""
        with naming_caches(), handshake.raising_on_all_ranks(title, group=group):
            (received,) = exchange(title, [self.packet()._replace(group=group)], plans_of(self))
        self._receive(received)

    def _receive(self, received: Received) -> States:
        """Replace this rank's states by the states of all ranks, in the order of the packet, and add attributes that it lacks."""
        reduced = dict(zip(self._reductions, received.states, strict=True))
        if received.attributes:
            self._own_attributes = {name: vars(self).get(name, _ABSENT) for name in received.attributes}
            self._assign(dict(received.attributes))
        if is_correlation(type(self)):
            _widen_scales_(reduced)
        self._assign(reduced)
        return reduced

    def unsync(self, should_unsync: bool = True) -> None:
        """Restore this rank's states and its own attributes."""
        super().unsync(should_unsync)
        if should_unsync:
            self._put_back_attributes()

    def _put_back_attributes(self) -> None:
        """Restore the attributes of this rank that were replaced by attributes of other ranks."""
        attributes = vars(self)
        for name, value in attributes.pop("_own_attributes", {}).items():
            if value is _ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = value

    @property
    def _has_peers(self) -> bool:
        """Whether there are other ranks to exchange states with."""
        available = self.distributed_available_fn
        return bool(available is None or available()) and process_groups.world_size(self.process_group) > 1

    @property
    def _waits(self) -> bool:
        """Whether ``compute`` will sync the states."""
        return self._to_sync and self._computed is None and not self._is_synced

    def _states(self) -> States:
        """Return the states by name. Lists are copied, tensors are not."""
        found = {}
        for name in self._defaults:
            value = getattr(self, name)
            found[name] = list(value) if isinstance(value, list) else value
        return found

    def _assign(self, values: dict[str, Any]) -> None:
        """Set attributes, bypassing torch.nn.Module, which takes ten times as long."""
        self.__dict__.update(values)

    def _title(self, where: str = "") -> str:
        return f"metric {type(self).__name__}" + (f", {where}" if where else "")

    def _refuse_own_sync(self, what: str) -> None:
        """Reject a user's class with its own ``_sync_dist``."""
        foreign = (cls for cls in type(self).__mro__ if not cls.__module__.startswith(_KNOWN_SYNC))
        override = next((cls.__name__ for cls in foreign if "_sync_dist" in vars(cls)), None)
        got = f"that of {override}, whose exchange is not known here"
        fix = "Declare the states with add_state and a reduction."
        expect(override is None, f"{what}: _sync_dist", expected="torchmetrics' own", got=got, fix=fix)

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compute)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not (self._is_synced and self._to_sync):
                return compute(*args, **kwargs)
            before = {name: _Before.of(getattr(self, name)) for name in self._defaults}
            try:
                value = compute(*args, **kwargs)
                self._refuse_written(before)
            except Exception:
                self.unsync()  # restore this rank's states, as after a successful call
                raise
            return value

        return super()._wrap_compute(checked)

    def _refuse_written(self, before: Mapping[str, _Before]) -> None:
        """Reject states of all ranks that ``compute`` has written to, because this rank's states replace them afterwards.

        Raises:
            ConfigurationError: naming the state.
        """
        written = [name for name, state in before.items() if not state.is_same(getattr(self, name))]
        expect(
            not written,
            f"{self._title('compute')}: {listed([f'state `{name}`' for name in written])}",
            expected="states that only update changes",
            got="a value that compute has set, which is lost: after compute each rank has the states of its own updates again",
            fix="Keep it in an attribute that is no state (self.last = ...), or return it.",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self.process_group)] = self.process_group  # a process group cannot be copied
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied


class MetricStates(ExchangingMetric):
    """The handling of states that a differentiable metric requires."""

    if TYPE_CHECKING:
        _record: MetricRecord

    # ------------------------------------------------------------------ reading and assigning

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. A new value of a known attribute bypasses torch.nn.Module, which takes ten times as long."""
        if name in self.__dict__ and type(value) in _PLAIN_TYPES:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def _clear(self) -> None:
        """Reset without emptying the lists, which members of a collection may share."""
        self._assign({name: [] for name, default in self._defaults.items() if isinstance(default, list)})
        if not _has_plain_reset(type(self)):
            self.reset()
            return
        fresh: dict[str, Any] = {"_update_count": 0, "_computed": None, "_cache": None, "_is_synced": False}
        for name, default in self._defaults.items():
            if isinstance(default, Tensor):
                fresh[name] = default.detach().clone()
        self._assign(fresh)

    def _prepare(self, given: list[Tensor], parameters: Sequence[Tensor]) -> None:
        """Reject rows on another device, record the configuration, and widen states to the inputs' dtype, at least float32.

        Args:
            given: Tensors among the arguments.
            parameters: Parameters of all metrics of the call, including this one.
        """
        if parameters:
            parameters = precision.parameters_of(self)
        devices = {tensor.device for tensor in (*parameters, *given)}
        dtype = precision.compute_dtype([*parameters, *given])
        others: dict[str, Tensor] = {}  # defaults in another dtype
        for name, default in self._defaults.items():
            value = getattr(self, name)
            if isinstance(value, Tensor):
                devices.add(value.device)
            if isinstance(default, Tensor) and default.dtype != dtype:
                others[name] = default
        if len(devices) > 1:
            arguments = {f"tensor {place} of the call": tensor for place, tensor in enumerate(given)}
            states = {name: value for name, value in self._states().items() if isinstance(value, Tensor)}
            inputs.check_devices(f"metric {type(self).__name__}", arguments, parameters, states=states)
        configuration = self._record.configuration
        if not configuration.is_read:
            configuration.read(self)
        for name, default in others.items():
            wide = torch.promote_types(dtype, default.dtype)
            if default.is_floating_point() and wide != default.dtype:
                self._defaults[name] = default.to(wide)
                setattr(self, name, getattr(self, name).to(wide))
                self._dtype = wide

    # ------------------------------------------------------------------ send and receive

    def _split_by_update(self) -> dict[str, list[Tensor]]:
        """Return the tensors that grew by "cat", split by update, so that the updates of all ranks can be ordered."""
        found = {}
        for name, ends in self._record.seen.ends.items():
            value = getattr(self, name)
            if isinstance(value, Tensor) and len(ends) > 1 and ends[-1] == len(value):
                found[name] = list(torch.split(value, [after - before for before, after in pairwise([0, *ends])]))
        return found

    def _seen_after(self, seen: Seen, rows: int, is_skipped: bool, states: States) -> Seen:
        """Return ``seen`` with one more update, and with the current lengths of tensors reduced by "cat"."""
        ends = {}
        for name, value in states.items():
            if self._reductions[name] is dim_zero_cat and isinstance(value, Tensor) and value.ndim:
                ends[name] = [*seen.ends.get(name, ()), len(value)]
        return Seen(seen.rows + rows, seen.skipped + is_skipped, ends)

    # ------------------------------------------------------------------ adding up

    def _adds_up(self) -> bool:
        """Return whether the states after two batches follow from the states of each batch, so that one update is enough."""
        for name, reduce in self._reductions.items():
            is_list = isinstance(self._defaults[name], list)
            if reduce not in (None, dim_zero_cat) if is_list else reduce is None:  # torchmetrics would stack these
                return False
        return self.full_state_update is False

    def _means(self) -> list[str]:
        """Return the names of the states reduced by "mean"."""
        return [name for name, reduce in self._reductions.items() if reduce is dim_zero_mean]

    def _reduce_states(self, incoming_state: dict[str, Any]) -> None:
        means = {name: getattr(self, name) for name in self._means()}
        super()._reduce_states(incoming_state)
        n = self._update_count
        for name, local in means.items():  # torchmetrics rounds these to float32
            setattr(self, name, ((n - 1) * incoming_state[name] + local) / n)

    def _update_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, may_skip: bool) -> bool:
        """Run ``update``. If it may be skipped and fails because of missing rows, the states are restored.

        Returns:
            Whether the update counts.
        """
        if not may_skip:
            self.update(*args, **kwargs)
            return True
        before = self._states()
        try:
            self.update(*args, **kwargs)
        except (IndexError, RuntimeError, ValueError):
            self._assign(before)
            return False
        return True

    def _states_after(self, states: States, args: tuple[Any, ...], kwargs: dict[str, Any], *, may_skip: bool) -> States:
        """Return the states after one more update, for a metric whose states do not add up."""
        self._enable_grad = False
        before = {}
        for name, value in states.items():
            # update may change them in place
            before[name] = value.clone() if isinstance(value, Tensor) else list(value)
        self._assign(before)
        self._update_rows(args, kwargs, may_skip=may_skip)
        return detached(self._states())

    # ------------------------------------------------------------------ graphs and copies

    def _drop_graphs(self) -> None:
        """Detach the tensors that a metric stores besides its states, so that no graph grows with the number of steps."""
        attributes = vars(self)
        for name in attributes.keys() - _OF_TORCHMETRICS - self._defaults.keys():
            value = attributes[name]
            if isinstance(value, Tensor) and value.grad_fn is not None:
                attributes[name] = value.detach()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to pickle and copy, without graphs."""
        state = super().__getstate__()
        for name in (*self._defaults, "_forward_cache", "_computed"):
            state[name] = inputs.map_tensors(lambda t: t if t.is_leaf else t.detach(), state[name])
        return state


class _Bare(Metric):
    """A metric without states."""

    def update(self) -> None:
        """Do nothing."""

    def compute(self) -> None:
        """Return nothing."""


_OF_TORCHMETRICS = frozenset(vars(_Bare())) | {"_record", "_instance", "_plans", "_precision_plans"}
"""Attributes of a metric that do not hold a graph between calls: torchmetrics' own and this package's."""


@functools.cache
def _has_plain_reset(cls: type) -> bool:
    """Return whether ``reset`` of a class is equivalent to torchmetrics' own."""
    foreign = [base for base in cls.__mro__ if not base.__module__.startswith(_PLAIN_RESET)]
    return not any("reset" in vars(base) for base in foreign)


def detached(states: States) -> States:
    """Return the states without their graph, in the same memory."""
    found = {}
    for name, value in states.items():
        found[name] = value.detach() if isinstance(value, Tensor) else inputs.map_tensors(_without_graph, value)
    return found


def _without_graph(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


# ---------------------------------------------------------------------- correlations


@functools.cache
def refuse_stacks(metric: Metric, name: str) -> None:
    """Reject a metric whose ``compute`` returns a value of another shape if its tensors without a reduction are stacked.

    Such states are stacked over the ranks, (W, ...), and ``compute`` has to join them. The default states show whether it does so: the
    shape of their value must not depend on the number of ranks. If ``compute`` fails on them, nothing is shown.

    Args:
        metric: The metric.
        name: Such a state.

    Raises:
        ConfigurationError: naming the state. The same on every rank.
    """
    alone, stacked = _shapes_of_defaults(metric, 0), _shapes_of_defaults(metric, 2)
    if alone is None or stacked is None or alone == stacked:
        return
    raise ConfigurationError(
        f"metric {type(metric).__name__}: state `{name}`",
        expected="a reduction, or a compute that joins the states of all ranks, (W, ...)",
        got=f"dist_reduce_fx=None, and a value of shape {stacked[0]} for two ranks, {alone[0]} for one",
        fix="Give add_state a reduction (dist_reduce_fx='sum', 'mean', 'min', 'max' or a function), or join the stack in compute.",
    )


def _shapes_of_defaults(metric: Metric, stacked: int) -> list[tuple[int, ...]] | None:
    """Return the shapes of the value of default states, those without a reduction stacked so many times. None if ``compute`` fails."""
    trial = type(metric).__new__(type(metric))
    vars(trial).update(vars(metric))
    for name, default in metric._defaults.items():
        value = list(default) if isinstance(default, list) else default.detach().clone()
        if stacked and isinstance(value, Tensor) and metric._reductions[name] is None:
            value = torch.stack([value] * stacked)
        vars(trial)[name] = value
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            value = type(metric).compute(trial)
        except Exception:
            return None
    return [tuple(tensor.shape) for tensor in inputs.tensors_in(value)]


def is_correlation(cls: type) -> bool:
    """Return whether a class is a correlation, whose ``compute`` joins the states itself."""
    return "PearsonCorrCoef" in torchmetrics_names(cls)  # ConcordanceCorrCoef is one


def _widen_scales_(states: States) -> None:
    """Extend the largest deviations of a correlation to the distance between each rank's mean and the mean of all ranks.

    To avoid underflow, a correlation divides its variances by the square of the largest deviation from the mean. Each rank measures the
    deviation from the mean of its rows. It is 0 for one row, or for rows that do not vary within a rank (sorted data), and the value is
    then 0/0 (torchmetrics 1.9, measured 2026). The deviations do not exceed the largest deviation from the mean of all ranks. The factor
    cancels, so it does not need a gradient. (Releases up to 1.7 do not divide.)

    Args:
        states: States of all ranks, (W, outputs) each.
    """
    if "max_abs_dev_x" not in states:
        return
    rows = states["n_total"]
    with torch.no_grad():
        means = torch.stack([states["mean_x"], states["mean_y"]])
        shares = rows / rows.sum(0).clamp(min=1)
        distances = (means - (shares * means).sum(1, keepdim=True)).abs()
        # a rank without rows does not have a mean
        distances = distances * (rows > 0)
        distances_x, distances_y = distances.unbind()
        states["max_abs_dev_x"] = torch.maximum(states["max_abs_dev_x"], distances_x)
        states["max_abs_dev_y"] = torch.maximum(states["max_abs_dev_y"], distances_y)


# ---------------------------------------------------------------------- metrics that depend on the whole batch


def _without_range(metric: Any) -> bool:
    # if compute also returns images, it rejects the rows of all ranks in one tensor
    images = getattr(metric, "return_full_image", False) or getattr(metric, "return_contrast_sensitivity", False)
    return images or metric.data_range is None


# update uses information of the whole batch that is not in the states, or the states of several ranks do not add up
_WHOLE_BATCH: dict[str, Callable[[Any], bool]] = {
    "MultiScaleStructuralSimilarityIndexMeasure": _without_range,
    "NormalizedRootMeanSquaredError": lambda metric: True,
    "PeakSignalNoiseRatioWithBlockedEffect": lambda metric: True,
    "StructuralSimilarityIndexMeasure": _without_range,
}


def needs_whole_batch(metric: Metric) -> bool:
    """Return whether the metric is only correct if its update is called with the rows of all ranks."""
    return any(name in _WHOLE_BATCH and _WHOLE_BATCH[name](metric) for name in torchmetrics_names(type(metric)))


def torchmetrics_names(cls: type) -> list[str]:
    """Return the names of the class and its bases that belong to torchmetrics. For a user's subclass, the names of its bases."""
    return [base.__name__.lstrip("_") for base in cls.__mro__ if base.__module__.startswith("torchmetrics.")]
