"""Makes compositions, wrappers and collections of metrics differentiable. Their members share one exchange.

A ``Composite`` lists its members, selects the inputs for each of them, and joins their values as torchmetrics does. Its members are
differentiable too. A new wrapper of torchmetrics requires a subclass of ``Composite`` in this module and a line in ``COMPOSITES``.

Measured (torchmetrics 1.9, 2026): the forward of torchmetrics' ``MinMaxMetric`` cuts the graph. A wrapper's ``compute`` syncs its members
one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.metric import CompositionalMetric
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric, MultioutputWrapper, MultitaskWrapper, Running
from torchmetrics.wrappers.transformations import MetricInputTransformer

from lightning_ddp_losses.core import inputs
from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.errors import ConfigurationError, InputError, expect
from lightning_ddp_losses.metrics.exchange import Received, exchange, naming_caches, plans_of
from lightning_ddp_losses.metrics.metric import DifferentiableMetric, ForwardCall, run_forward
from lightning_ddp_losses.metrics.states import ExchangingMetric, detached

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
_LONGEST_NAMES = 60  # limit for the members' names in a title, in characters


class Members:
    """A metric composed of metrics, with one exchange for the states of all members before ``compute``."""

    @eager_recursive
    def compute(self) -> Any:
        """Return the value of everything since ``reset``, over all ranks, with one exchange for all members."""
        with self._in_one_exchange():
            return super().compute()  # type: ignore[misc]

    @contextlib.contextmanager
    def _in_one_exchange(self) -> Iterator[None]:
        """Sync the states of all members that ``compute`` would sync one by one, and restore their own states afterwards."""
        assert isinstance(self, nn.Module)
        for part in nn.Module.modules(self):
            if isinstance(part, MetricCollection):
                part.items(keep_base=True, copy_state=False)  # members of a compute group then share tensors
            elif isinstance(part, Members):
                part._fill_members()
        waiting = [leaf for leaf in self._leaves() if leaf._waits]
        # decided before checking which members have peers, because some groups may consist of one rank only
        waiting = [leaf for leaf in waiting if leaf._has_peers] if len(waiting) > 1 else []
        exchanged: list[Received] = []
        if waiting:
            title = f"{self._title()}, compute"
            with naming_caches(), handshake.raising_on_all_ranks(title, group=waiting[0].process_group):
                exchanged = exchange(title, [leaf.packet() for leaf in waiting], plans_of(self))
        for leaf, received in zip(waiting, exchanged, strict=True):
            leaf._cache = detached(leaf._states())
            leaf._receive(received)
            leaf._is_synced, leaf._to_sync = True, False
        try:
            yield
        finally:
            for leaf in waiting:
                leaf._to_sync = True
                leaf.unsync(should_unsync=leaf._is_synced and leaf._should_unsync)

    def _fill_members(self) -> None:
        """Set the states of the members that ``compute`` would set."""

    def _leaves(self) -> list[ExchangingMetric]:
        """Return the metrics that hold states, each once."""
        assert isinstance(self, nn.Module)
        return [m for m in nn.Module.modules(self) if isinstance(m, ExchangingMetric)]

    def _title(self) -> str:
        names = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in self._leaves()))
        if len(names) >= _LONGEST_NAMES:
            names = names[:_LONGEST_NAMES] + " ..."
        return f"{type(self).__name__}({names})"


class Composite(Members):
    """A differentiable metric composed of metrics, with one exchange for the forwards of all members, too."""

    __jit_unused_properties__: ClassVar[list[str]] = [*Metric.__jit_unused_properties__, "_has_peers", "process_group"]
    sees_global_batch = True
    _only_member = ""  # the attribute that contains a wrapper's metric

    @property
    def process_group(self) -> Any:
        """The group of the first member that has peers. Members of other groups have separate exchanges."""
        leaves = self._leaves()
        with_peers = [leaf for leaf in leaves if leaf._has_peers]
        return next((leaf.process_group for leaf in (*with_peers, *leaves)), None)

    @process_group.setter
    def process_group(self, group: Any) -> None:
        """Ignore the group: torchmetrics sets it on every metric, but a wrapper does not exchange anything itself."""

    @property
    def _has_peers(self) -> bool:
        return any(leaf._has_peers for leaf in self._leaves())

    @eager_recursive
    @torch.jit.unused
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the value of the global batch with its gradient, and accumulate this batch for ``compute``."""
        return run_forward(self, f"{self._title()}, forward", args, kwargs)

    def _members(self) -> list[Any]:
        """Return the metrics that the forward calls, in order."""
        return [getattr(self, self._only_member)]

    def _arguments(self, members: list[Any], /, *args: Any, **kwargs: Any) -> list[Arguments]:
        """Return the arguments of each member."""
        return [(args, kwargs)] * len(members)

    def _joined(self, values: list[Any]) -> Any:
        """Return the value computed from the values of the members."""
        (value,) = values
        return value

    def _forward_calls(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ForwardCall]:
        calls, members = [], self._members()
        for member, given in zip(members, self._arguments(members, *args, **kwargs), strict=True):
            calls += member._forward_calls(*given)
        return calls

    def _value_of(self, calls: Iterator[ForwardCall]) -> Any:
        return self._joined([member._value_of(calls) for member in self._members()])


class _DifferentiableComposition(Composite):
    """``a + b``, ``2 * a``, ``abs(a)``."""

    def _parts(self) -> list[Any]:
        """Return the operands: metrics, numbers and tensors. An operator with one operand does not have a second part."""
        return [part for part in (self.metric_a, self.metric_b) if part is not None]  # type: ignore[attr-defined]

    def _members(self) -> list[Any]:
        return [part for part in self._parts() if isinstance(part, Metric)]

    def _arguments(self, members: list[Any], /, *args: Any, **kwargs: Any) -> list[Arguments]:
        return [(args, member._filter_kwargs(**kwargs)) for member in members]

    def _joined(self, values: list[Any]) -> Any:
        remaining = iter(values)
        operands = [next(remaining) if isinstance(part, Metric) else part for part in self._parts()]
        value = self.op(*operands)  # type: ignore[attr-defined]
        self._forward_cache = inputs.map_tensors(Tensor.detach, value)
        return value


class _DifferentiableMinMax(Composite):
    """The value, and the smallest and largest value so far."""

    _only_member = "_base_metric"

    def compute(self) -> Any:
        """Return the value of everything since ``reset``, with the smallest and largest value so far."""
        return self._joined([self._base_metric.compute()])  # type: ignore[attr-defined]

    def _joined(self, values: list[Any]) -> dict[str, Any]:
        (value,) = values
        if not self._is_suitable_val(value):  # type: ignore[attr-defined]
            raise RuntimeError(f"Returned value from base metric should be a float or scalar tensor, but got {value}.")
        value = torch.as_tensor(value)
        high = torch.where(value > self.max_val.to(value.device), value, self.max_val.to(value))  # type: ignore[has-type]
        low = torch.where(value < self.min_val.to(value.device), value, self.min_val.to(value))  # type: ignore[has-type]
        self.max_val, self.min_val = high.detach(), low.detach()
        found = {"raw": value, "max": high, "min": low}
        self._forward_cache = inputs.map_tensors(Tensor.detach, found)
        return found


class _DifferentiableMultioutput(Composite):
    """A metric for each output."""

    def _members(self) -> list[Any]:
        return list(self.metrics)  # type: ignore[attr-defined]

    def _arguments(self, members: list[Any], /, *args: Any, **kwargs: Any) -> list[Arguments]:
        by_output = self._get_args_kwargs_by_output(*args, **kwargs)  # type: ignore[attr-defined]
        return [(tuple(own_args), dict(own_kwargs)) for own_args, own_kwargs in by_output]

    def _joined(self, values: list[Any]) -> Any:
        value = torch.stack(values, 0)
        self._forward_cache = value.detach()
        return value


class Classwise(Members):
    """A value for each class, by name."""

    def __getattr__(self, name: str) -> Any:
        # torchmetrics looks up missing attributes in the member. With the member's ``__deepcopy__`` only the member would be copied
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return super().__getattr__(name)  # type: ignore[misc]


class _DifferentiableClasswise(Classwise, Composite):
    """A differentiable value for each class, by name."""

    _only_member = "metric"

    def _joined(self, values: list[Any]) -> Any:
        return self._convert_output(*values)


class Windowed(Members):
    """A window of batches for each rank. ``compute`` loads it into the inner metric."""

    _is_filled = False

    def _fill_members(self) -> None:
        base: Any = self.base_metric  # type: ignore[attr-defined]
        for index in range(0 if self._is_filled else self.window):  # type: ignore[attr-defined]
            base._reduce_states({name: getattr(self, f"{name}_{index}") for name in base._defaults})
        base._update_count = self._num_vals_seen  # type: ignore[attr-defined]
        self._is_filled = True

    def compute(self) -> Any:
        """Return the value of the windows of all ranks."""
        self._fill_members()
        try:
            return self.base_metric.compute()  # type: ignore[attr-defined]
        finally:
            self.base_metric.reset()  # type: ignore[attr-defined]
            self._is_filled = False


class _DifferentiableRunning(Windowed, Composite):
    """A differentiable window of batches."""

    _only_member = "base_metric"

    def _joined(self, values: list[Any]) -> Any:
        self._move_into_window(self.base_metric)  # type: ignore[attr-defined]
        return super()._joined(values)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update the metric and move its states into the window."""
        self.base_metric.update(*args, **kwargs)  # type: ignore[attr-defined]
        self._move_into_window(self.base_metric)  # type: ignore[attr-defined]

    def _move_into_window(self, base: DifferentiableMetric) -> None:
        index = self._num_vals_seen % self.window  # type: ignore[attr-defined]
        for name, value in base._states().items():
            setattr(self, f"{name}_{index}", value)
        base._clear()
        self._num_vals_seen += 1  # type: ignore[attr-defined]
        self._computed = None


class _DifferentiableMultitask(Composite):
    """A metric for each task."""

    def _members(self) -> list[Any]:
        return list(self.task_metrics.values())  # type: ignore[attr-defined]

    def _arguments(
        self, members: list[Any], /, task_preds: dict[str, Any], task_targets: dict[str, Any]
    ) -> list[Arguments]:
        tasks = self.task_metrics.keys()  # type: ignore[attr-defined]
        expect(
            tasks == task_preds.keys() == task_targets.keys(),
            f"{type(self).__name__}: tasks",
            expected=f"predictions and targets of {sorted(tasks)}",
            got=f"predictions of {sorted(task_preds)} and targets of {sorted(task_targets)}",
            fix="Give every task its predictions and targets in every call.",
            error=InputError,
        )
        return [((task_preds[name], task_targets[name]), {}) for name in tasks]

    def _joined(self, values: list[Any]) -> Any:
        return self._convert_output(dict(zip(self.task_metrics, values, strict=True)))  # type: ignore[attr-defined]


class _DifferentiableTransformed(Composite):
    """A metric of transformed inputs."""

    _only_member = "wrapped_metric"

    def _arguments(self, members: list[Any], /, *args: Any, **kwargs: Any) -> list[Arguments]:
        return [(self._wrap_transform(*args), kwargs)]  # type: ignore[attr-defined]


class DifferentiableCollection(Composite):
    """A collection, with all states of all members in one exchange."""

    def _members(self) -> list[Any]:
        assert isinstance(self, MetricCollection)
        return list(nn.ModuleDict.values(self))

    def _arguments(self, members: list[Any], /, *args: Any, **kwargs: Any) -> list[Arguments]:
        assert isinstance(self, MetricCollection)
        self.items(keep_base=True, copy_state=False)  # copy states within compute groups
        for name, member in nn.ModuleDict.items(self):
            if not isinstance(member, (DifferentiableMetric, Composite)):
                raise ConfigurationError(
                    f"{type(self).__name__}: `{name}`",
                    expected="a differentiable metric",
                    got=f"a plain {type(member).__name__}, added later",
                    fix="Add differentiable(metric).",
                )
        return [(args, member._filter_kwargs(**kwargs)) for member in members]

    def _joined(self, values: list[Any]) -> Any:
        """Return the values under torchmetrics' names, for which torchmetrics calls each member's forward."""
        assert isinstance(self, MetricCollection)
        members = dict(nn.ModuleDict.items(self))
        plain = {name: member.__dict__.get("forward") for name, member in members.items()}
        try:
            for member, value in zip(members.values(), values, strict=True):
                member.__dict__["forward"] = lambda *_, _value=value, **__: _value
            return self._compute_and_reduce("forward")
        finally:
            for name, member in members.items():
                if plain[name] is None:
                    del member.__dict__["forward"]
                else:
                    member.__dict__["forward"] = plain[name]


COMPOSITES: dict[type, type[Composite]] = {
    CompositionalMetric: _DifferentiableComposition,
    MinMaxMetric: _DifferentiableMinMax,
    MultioutputWrapper: _DifferentiableMultioutput,
    ClasswiseWrapper: _DifferentiableClasswise,
    Running: _DifferentiableRunning,
    MultitaskWrapper: _DifferentiableMultitask,
    MetricInputTransformer: _DifferentiableTransformed,
    MetricCollection: DifferentiableCollection,
}
"""For each class of torchmetrics that is composed of metrics, the class that makes it differentiable."""
