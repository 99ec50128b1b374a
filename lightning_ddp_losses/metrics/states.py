"""Holds a metric's states: taken, put, widened, added up, sent and copied, with nothing of a graph left behind.

Which metrics must see the rows of all ranks in one update, because their states do not add up over ranks, is said here too
(``needs_whole_batch``), and what their states lack where ranks have few rows (``ExchangingMetric._receive``).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean

from lightning_ddp_losses.core import inputs, nests, precision
from lightning_ddp_losses.core.configuration import configuration
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.upstream_grad import UpstreamGradWatch
from lightning_ddp_losses.metrics.exchange import Packet, State

Gather = Literal["auto", "states", "inputs"]
States = dict[str, Any]
# modules whose classes do nothing of their own in `reset`
_PLAIN_RESET = ("torchmetrics.metric", "lightning_ddp_losses", "torch.", "abc", "builtins")


class Seen(NamedTuple):
    """Updates since the last reset.

    Attributes:
        rows: Number of their rows.
        skipped: Number of updates that had no rows and counted for nothing.
        ends: For each tensor that grows by "cat", its length after each update.
    """

    rows: int = 0
    skipped: int = 0
    ends: Mapping[str, list[int]] = {}  # never changed


@dataclass
class MetricRecord:
    """State of a differentiable metric next to torchmetrics' own attributes.

    Attributes:
        gather: ``"states"`` or ``"inputs"``.
        keep_graph: Whether ``update`` keeps its graph for ``compute``.
        expects_gradient: Whether a value without a graph is an error.
        upstream_grads: Gradients that came back into its values.
        configuration: As text; made once, before the first update.
        seen: Updates since the last reset.
        in_forward: A forward is under way: calls of ``update`` and ``compute`` are its own.
        inputs_without_rows: Inputs of skipped updates that ask for a gradient, if ``update`` keeps its graph.
    """

    gather: Gather = "states"
    keep_graph: bool = False
    expects_gradient: bool = True
    upstream_grads: UpstreamGradWatch = field(default_factory=UpstreamGradWatch)
    configuration: str = ""
    seen: Seen = field(default_factory=Seen)
    in_forward: bool = False
    inputs_without_rows: list[Tensor] = field(default_factory=list)


class Progress(NamedTuple):
    """Everything that a metric has accumulated since the last reset."""

    states: States
    update_count: int
    seen: Seen


class ExchangingMetric(Metric):
    """torchmetrics' base, for metrics whose states travel in one exchange, alone or with those of other metrics."""

    # a module that holds a metric can be scripted: TorchScript reads annotations and properties, and cannot compile these
    __jit_unused_properties__: ClassVar[list[str]] = [*Metric.__jit_unused_properties__, "_has_peers", "_waits"]

    def packet(self) -> Packet:
        """Return the states of everything since ``reset``, to be exchanged."""
        raise NotImplementedError

    def _receive(self, values: Sequence[Any]) -> States:
        """Put the states of all ranks, in the order of the packet, in the place of this rank's."""
        reduced = dict(zip(self._reductions, values, strict=True))
        if _is_correlation(type(self)):
            _widen_scales_(reduced)
        self._assign(reduced)
        return reduced

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
        """Return the states by name; lists are copied, tensors are not."""
        found = {}
        for name in self._defaults:
            value = getattr(self, name)
            found[name] = list(value) if isinstance(value, list) else value
        return found

    def _assign(self, values: dict[str, Any]) -> None:
        """Set attributes, past torch.nn.Module, which takes ten times as long."""
        self.__dict__.update(values)

    def _title(self, where: str = "") -> str:
        title = f"metric {type(self).__name__}"
        if where:
            title += f", {where}"
        return title

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self.process_group)] = self.process_group  # a group of processes has no copy
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied


class MetricStates(ExchangingMetric):
    """The handling of states that a differentiable metric needs."""

    __jit_unused_properties__: ClassVar[list[str]] = [*ExchangingMetric.__jit_unused_properties__, "_adds_up"]
    if TYPE_CHECKING:
        _record: MetricRecord

    # ------------------------------------------------------------------ take and put

    def _progress(self) -> Progress:
        """Return all that is accumulated, to be put back later."""
        return Progress(self._states(), self._update_count, self._record.seen)

    def _put_back(self, progress: Progress) -> None:
        self._assign({**progress.states, "_update_count": progress.update_count})
        self._record.seen = progress.seen

    def _clear(self) -> None:
        """Reset, without emptying lists that others hold (members of a collection share theirs)."""
        self._assign({name: [] for name, default in self._defaults.items() if isinstance(default, list)})
        if not _has_plain_reset(type(self)):
            self.reset()
            return
        tensors = {name: value for name, value in self._defaults.items() if isinstance(value, Tensor)}
        self._assign({name: value.detach().clone() for name, value in tensors.items()})
        self._assign({"_update_count": 0, "_computed": None, "_cache": None, "_is_synced": False})

    def _prepare(self, given: list[Tensor]) -> None:
        """Refuse rows on another device, note the configuration, and widen states that are narrower than the inputs or than float32."""
        record = self._record
        arguments = {f"tensor {place} of the call": tensor for place, tensor in enumerate(given)}
        held = {name: getattr(self, name) for name in self._defaults}
        states = {name: value for name, value in held.items() if isinstance(value, Tensor)}
        inputs.check_devices(f"metric {type(self).__name__}", arguments, precision.parameters_of(self), states=states)
        record.configuration = record.configuration or configuration(self)
        dtype = precision.compute_dtype([*precision.parameters_of(self), *given])
        for name, default in self._defaults.items():
            if isinstance(default, Tensor) and default.is_floating_point():
                wide = torch.promote_types(dtype, default.dtype)
                if wide != default.dtype:
                    self._defaults[name] = default.to(wide)
                    setattr(self, name, getattr(self, name).to(wide))
                    self._dtype = wide

    # ------------------------------------------------------------------ send and receive

    def _states_to_send(self, seen: Seen) -> list[State]:
        """Return the states of some updates with all that the other ranks must know of them."""
        title, untouched = type(self).__name__, self._update_count == seen.skipped
        reductions: dict[str, Any] = self._reductions  # functions by now, also where add_state was given a name
        found = []
        for name, reduce in reductions.items():
            value = self._split_by_update(name)
            found.append(State(f"{title}.{name}", value, self.device, reduce, float(seen.rows), untouched))
        return found

    def _split_by_update(self, name: str) -> Any:
        """Return a state; a tensor that grew by "cat" in the pieces that it grew by, so that they can be put in order."""
        value, ends = getattr(self, name), self._record.seen.ends.get(name, [0])
        grew = isinstance(value, Tensor) and len(ends) > 1 and ends[-1] == len(value)
        if self._record.in_forward or not grew:
            return value
        sizes = [after - before for before, after in pairwise([0, *ends])]
        return list(torch.split(value, sizes))

    def _seen_after(self, seen: Seen, rows: int, is_skipped: bool, states: States) -> Seen:
        """Return ``seen`` with one more update, with the lengths that tensors reduced by "cat" have now."""
        ends = {}
        for name, value in states.items():
            if self._reductions[name] is dim_zero_cat and isinstance(value, Tensor) and value.ndim:
                ends[name] = [*seen.ends.get(name, ()), len(value)]
        return Seen(seen.rows + rows, seen.skipped + is_skipped, ends)

    # ------------------------------------------------------------------ add up

    @property
    def _adds_up(self) -> bool:
        """Whether the states after two batches follow from those of each, so that one update is enough."""
        for name, reduce in self._reductions.items():  # torchmetrics would stack these
            if isinstance(self._defaults[name], Tensor) and reduce is None:
                return False
            if isinstance(self._defaults[name], list) and reduce not in (None, dim_zero_cat):
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
        """Update; where it may be skipped, one that fails for want of rows counts for nothing.

        Returns:
            Whether it counted.
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

    def _states_after(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, may_skip: bool) -> States:
        """Return the states after one more update, for a metric whose states do not just add up."""
        self._enable_grad = False
        # copies, as update may change them in place
        own = {}
        for name, value in self._states().items():
            own[name] = value if isinstance(value, list) else value.clone()
        self._assign(own)
        before = {id(tensor) for tensor in nests.tensors_in(self._states())}
        self._update_rows(args, kwargs, may_skip=may_skip)
        return nests.map_tensors(lambda t: t if id(t) in before else t.detach(), self._states())  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ graphs and copies

    def _drop_graphs(self) -> None:
        """Detach what a metric keeps beside its states; no graph may grow with the steps."""
        for name, value in self.__dict__.items():
            if isinstance(value, Tensor) and value.grad_fn is not None and name not in self._defaults:
                self.__dict__[name] = value.detach()

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied: nothing with a graph."""
        state = super().__getstate__()
        for name in (*self._defaults, "_forward_cache", "_computed"):
            state[name] = nests.map_tensors(lambda t: t if t.is_leaf else t.detach(), state[name])
        return state


@functools.cache
def _has_plain_reset(cls: type) -> bool:
    """Whether ``reset`` of a class does no more than torchmetrics' own."""
    foreign = [base for base in cls.__mro__ if not base.__module__.startswith(_PLAIN_RESET)]
    return not any("reset" in vars(base) for base in foreign)


def detached(states: States) -> States:
    """Return the states without their graph, in the same memory."""
    return {name: nests.map_tensors(Tensor.detach, value) for name, value in states.items()}


def has_no_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether all arguments that are tensors with dimensions are empty; not without such arguments."""
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim]
    return bool(batches) and all(batch.numel() == 0 for batch in batches)


# ---------------------------------------------------------------------- correlations


@functools.cache
def _is_correlation(cls: type) -> bool:
    return "PearsonCorrCoef" in torchmetrics_names(cls)  # ConcordanceCorrCoef is one


def _widen_scales_(states: States) -> None:
    """Let the largest deviations of a correlation reach from each rank's mean to that of all ranks.

    A correlation divides its variances by the square of the largest deviation from the mean, against underflow. Each rank's is from the
    mean of its own rows: 0 for one row, or for rows that do not vary within a rank (sorted data), and the value is then 0/0
    (torchmetrics 1.9, measured 2026). No deviation gets larger than the largest from the mean of all ranks. It cancels, so it needs no
    gradient. (Releases up to 1.7 divide by none.)

    Args:
        states: Of all ranks, (W, outputs) each.
    """
    if "max_abs_dev_x" not in states:
        return
    rows = states["n_total"]
    with torch.no_grad():
        means = torch.stack([states["mean_x"], states["mean_y"]])
        shares = rows / rows.sum(0).clamp(min=1)
        distances = (means - (shares * means).sum(1, keepdim=True)).abs()
        # the mean of a rank without rows is not one
        distances = distances * (rows > 0)
        scales = torch.stack([states["max_abs_dev_x"], states["max_abs_dev_y"]])
        states["max_abs_dev_x"], states["max_abs_dev_y"] = torch.maximum(scales, distances)


# ---------------------------------------------------------------------- metrics that look at the whole batch


def _always(_: Any) -> bool:
    return True


def _without_range(metric: Any) -> bool:
    # with images among its values, compute refuses the rows of all ranks in one tensor
    images = getattr(metric, "return_full_image", False) or getattr(metric, "return_contrast_sensitivity", False)
    return images or metric.data_range is None


# update takes something of the whole batch that states do not carry, or the states of several ranks do not add up
_WHOLE_BATCH: dict[str, Callable[[Any], bool]] = {
    "MultiScaleStructuralSimilarityIndexMeasure": _without_range,
    "NormalizedRootMeanSquaredError": _always,
    "PeakSignalNoiseRatioWithBlockedEffect": _always,
    "StructuralSimilarityIndexMeasure": _without_range,
}


def needs_whole_batch(metric: Metric) -> bool:
    """Whether the metric is only right when its update sees the rows of all ranks."""
    return any(name in _WHOLE_BATCH and _WHOLE_BATCH[name](metric) for name in torchmetrics_names(type(metric)))


def torchmetrics_names(cls: type) -> list[str]:
    """Return the class and its bases of torchmetrics, by name; subclasses of the user's keep what they inherit."""
    return [base.__name__.lstrip("_") for base in cls.__mro__ if base.__module__.startswith("torchmetrics.")]
