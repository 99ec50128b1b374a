"""What a metric holds: its states, taken, put, widened, added up, sent and copied, with nothing of a graph left behind."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean

from lightning_ddp_losses.core import precision
from lightning_ddp_losses.core.configuration import configuration
from lightning_ddp_losses.distributed.upstream_grad import UpstreamGradWatch
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.metrics.exchange import State

Gather = Literal["auto", "states", "inputs"]
States = dict[str, Any]
_OURS = ("torchmetrics.metric", "lightning_ddp_losses.metrics", "torch.", "abc", "builtins")


@dataclass
class Shared:
    """What a metric keeps beside torchmetrics' own attributes.

    Attributes:
        gather: ``"states"`` or ``"inputs"``.
        keep_graph: Whether ``update`` keeps its graph for ``compute``.
        expects_gradient: Whether a value without a graph is an error.
        coefficients: What came back into its values.
        configuration: As text; made once, before the first update.
        rows: Seen since the last reset.
        ends: Of each tensor that grows by "cat", its length after each update.
        inside: A forward is under way: calls of ``update`` and ``compute`` are its own.
    """

    gather: Gather = "states"
    keep_graph: bool = False
    expects_gradient: bool = True
    coefficients: UpstreamGradWatch = field(default_factory=UpstreamGradWatch)
    configuration: str = ""
    rows: int = 0
    ends: dict[str, list[int]] = field(default_factory=dict)
    inside: bool = False


class MetricStates(Metric):
    """torchmetrics' base, with the handling of states that a differentiable metric needs."""

    _shared: Shared

    @property
    def _adds_up(self) -> bool:
        """Whether the states after two batches follow from those of each, so that one update is enough."""
        for name, reduce in self._reductions.items():  # torchmetrics would stack these
            if isinstance(self._defaults[name], Tensor) and reduce is None:
                return False
            if isinstance(self._defaults[name], list) and reduce not in (None, dim_zero_cat):
                return False
        return self.full_state_update is False

    def _prepare(self, given: list[Tensor]) -> None:
        """Note the configuration, and widen states that are narrower than the inputs or than float32."""
        shared = self._shared
        shared.configuration = shared.configuration or configuration(self)
        own = self.parameters() if self._parameters or self._modules else ()
        dtype = precision.compute_dtype([*own, *given])
        for name, default in self._defaults.items():
            if isinstance(default, Tensor) and default.is_floating_point():
                wide = torch.promote_types(dtype, default.dtype)
                if wide != default.dtype:
                    self._defaults[name] = default.to(wide)
                    setattr(self, name, getattr(self, name).to(wide))
                    self._dtype = wide

    def _states(self) -> States:
        return {name: _own(getattr(self, name)) for name in self._defaults}

    def _put(self, values: States) -> None:
        self.__dict__.update(values)  # plain attributes, which torch.nn.Module sets ten times as slowly

    def _clear(self) -> None:
        """Reset, without emptying lists that others hold (members of a collection share theirs)."""
        self._put({name: [] for name, default in self._defaults.items() if isinstance(default, list)})
        if _resets_states_only(type(self)):
            self._put({n: d.detach().clone() for n, d in self._defaults.items() if isinstance(d, Tensor)})
            self._put({"_update_count": 0, "_computed": None, "_cache": None, "_is_synced": False})
        else:
            self.reset()

    def _outgoing(self, rows: int) -> list[State]:
        title, fresh = type(self).__name__, self._update_count == 0
        reductions: dict[str, Any] = self._reductions  # functions by now, also where add_state was given a name
        return [
            State(f"{title}.{name}", self._by_update(name), self.device, reduce, float(rows), fresh)
            for name, reduce in reductions.items()
        ]

    def _longer(self, ends: dict[str, list[int]], states: States) -> dict[str, list[int]]:
        return {
            name: [*ends.get(name, ()), len(value)]
            for name, value in states.items()
            if self._reductions[name] is dim_zero_cat and isinstance(value, Tensor) and value.ndim
        }

    def _by_update(self, name: str) -> Any:
        """A state; a tensor that grew by "cat" in the pieces that it grew by, so that they can be put in order."""
        value, ends = getattr(self, name), self._shared.ends.get(name, [0])
        if self._shared.inside or not isinstance(value, Tensor) or len(ends) < 2 or ends[-1] != len(value):
            return value
        return list(torch.split(value, [after - before for before, after in pairwise([0, *ends])]))

    def _accumulated(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> States:
        """The states after one more update, for a metric whose states do not just add up."""
        self._enable_grad = False
        # of its own: they are changed in place
        own = {name: list(v) if isinstance(v, list) else v.clone() for name, v in self._states().items()}
        self._put(own)
        before = {id(t) for t in precision.tensors_in(self._states())}
        self.update(*args, **kwargs)
        return precision.map_tensors(lambda t: t if id(t) in before else t.detach(), self._states())  # type: ignore[no-any-return]

    def _reduce_states(self, incoming_state: dict[str, Any]) -> None:
        means = {name: getattr(self, name) for name in self._means()}
        super()._reduce_states(incoming_state)
        n = self._update_count
        for name, local in means.items():  # torchmetrics rounds these to float32
            setattr(self, name, ((n - 1) * incoming_state[name] + local) / n)

    def _means(self) -> list[str]:
        """States reduced by "mean"."""
        return [name for name, reduce in self._reductions.items() if reduce is dim_zero_mean]

    def _drop_graphs(self) -> None:
        """A metric may keep tensors beside its states; no graph may grow with the steps."""
        for name, value in self.__dict__.items():
            if isinstance(value, Tensor) and value.grad_fn is not None and name not in self._defaults:
                self.__dict__[name] = value.detach()

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled and copied: nothing with a graph."""
        state = super().__getstate__()
        state.pop("_plain_update", None)
        for name in (*self._defaults, "_forward_cache", "_computed"):
            state[name] = precision.map_tensors(lambda t: t if t.is_leaf else t.detach(), state[name])
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self.process_group)] = self.process_group  # a group of processes has no copy
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied


@functools.cache
def _resets_states_only(cls: type) -> bool:
    return not any("reset" in vars(base) for base in cls.__mro__ if not base.__module__.startswith(_OURS))


def _own(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def detached(states: States) -> States:
    """The states without their graph, in the same memory."""
    return {name: precision.map_tensors(Tensor.detach, value) for name, value in states.items()}


# ---------- from refusals.py: What cannot be trained on, and why; which metrics look at the whole batch; options that do not go with a loss.

_OWN = ("torchmetrics.metric", "lightning_ddp_losses.metrics")
_IN_PLACE = "torchmetrics changes in place what backward needs, which fails"
_LABELS = "it compares cluster labels, which are integers"

WITHOUT_GRADIENT = {
    "AdjustedMutualInfoScore": _LABELS,
    "AdjustedRandScore": _LABELS,
    "CompletenessScore": _LABELS,
    "DaviesBouldinScore": _IN_PLACE,
    "FowlkesMallowsIndex": _LABELS,
    "HomogeneityScore": _LABELS,
    "MutualInfoScore": _LABELS,
    "NormalizedMutualInfoScore": _LABELS,
    "RandScore": _LABELS,
    "VMeasureScore": _LABELS,
    "VisualInformationFidelity": _IN_PLACE,
    "HausdorffDistance": "it measures between masks, which are integers",
}
"""torchmetrics marks these as differentiable; there is no gradient, in one process either."""


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


def looks_at_whole_batch(metric: Metric) -> bool:
    """Whether the metric is only right when its update sees the rows of all ranks."""
    return any(name in _WHOLE_BATCH and _WHOLE_BATCH[name](metric) for name in _names(type(metric)))


def reason_against(cls: type[Metric]) -> str | None:
    """Why metrics of a class have no gradient, None where nothing is known against them."""
    for name in _names(cls):
        if name in WITHOUT_GRADIENT:
            return WITHOUT_GRADIENT[name]
    if cls.is_differentiable is False:
        return "torchmetrics says is_differentiable=False: it counts, ranks or decides"
    return None


def _names(cls: type) -> list[str]:
    """The class and its bases of torchmetrics, by name; subclasses of the user's keep what they inherit."""
    return [base.__name__.lstrip("_") for base in cls.__mro__ if base.__module__.startswith("torchmetrics.")]


def refuse_options(
    metric: Metric, title: str, gather: str, *, on_step: bool = True, dist_sync_fn: Callable[..., Any] | None = None
) -> None:
    """Refuse options that cannot go with a value over all ranks.

    Raises:
        ConfigurationError: naming the option.
    """
    what = f"differentiable {title}"
    if gather not in ("auto", "states", "inputs"):
        raise ConfigurationError(f"{what}: gather", expected="'auto', 'states' or 'inputs'", got=repr(gather))
    if not on_step:
        raise ConfigurationError(
            f"{what}: dist_sync_on_step",
            expected="True",
            got="False, which gives the gradient of this rank's rows alone",
            fix="Leave it out; use torchmetrics' own class for a value per rank.",
        )
    if metric.compute_on_cpu:
        raise ConfigurationError(
            f"{what}: compute_on_cpu",
            expected="False, with dist_sync_on_step as a loss",
            got="True, which takes the states of each step from their device",
            fix="Leave it out, or call differentiable on a metric that is made without it.",
        )
    if metric.dist_sync_fn is not None or dist_sync_fn is not None:
        raise ConfigurationError(
            f"{what}: dist_sync_fn",
            expected="None",
            got=f"{metric.dist_sync_fn or dist_sync_fn!r}",
            fix="Leave it out: the states of all ranks travel in one exchange; process_group= says among whom.",
        )
    if any("_sync_dist" in vars(cls) and not cls.__module__.startswith(_OWN) for cls in type(metric).__mro__):
        raise ConfigurationError(
            f"{what}: _sync_dist",
            expected="torchmetrics' own",
            got="an override, whose exchange is not known here",
            fix="Declare the states with add_state and a reduction.",
        )
