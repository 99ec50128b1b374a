"""Makes metrics that are made of metrics differentiable: compositions, wrappers and collections, whose members share one exchange.

Each runs the coroutines of its members side by side (``together``) and does with their values what torchmetrics does. Its own
members are differentiable themselves. A new wrapper of torchmetrics gets a subclass of ``Composite`` here and a line in
``COMPOSITES``.

Measured (torchmetrics 1.9, 2026): the forward of its own ``MinMaxMetric`` cuts the graph; a wrapper's ``compute`` syncs its members
one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.metric import CompositionalMetric
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric, MultioutputWrapper, MultitaskWrapper, Running
from torchmetrics.wrappers.transformations import MetricInputTransformer

from lightning_ddp_losses.core import nests
from lightning_ddp_losses.core.forward_patch import eager_recursive
from lightning_ddp_losses.errors import ConfigurationError, InputError
from lightning_ddp_losses.metrics.coroutines import Call, Coroutine, reply, run, together
from lightning_ddp_losses.metrics.metric import DifferentiableMetric
from lightning_ddp_losses.metrics.states import detached

_LONGEST_NAMES = 60  # characters of the members' names in a title


class Composite:
    """What all of them share: a forward as a coroutine, and one exchange before ``compute``."""

    __jit_unused_properties__: ClassVar[list[str]] = [*Metric.__jit_unused_properties__, "_has_peers", "process_group"]
    sees_global_batch = True
    _members_first = True  # compute only calls the compute of its members, which may be synced before

    @property
    def process_group(self) -> Any:
        """The group of the first member; members of other groups have exchanges of their own."""
        return next((leaf.process_group for leaf in self._leaves()), None)

    @process_group.setter
    def process_group(self, group: Any) -> None:
        """Torchmetrics sets it on every metric; a wrapper has nothing to exchange itself."""

    @property
    def _has_peers(self) -> bool:
        return any(leaf._has_peers for leaf in self._leaves())

    @eager_recursive
    @torch.jit.unused
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the value of the global batch, with its gradient; accumulate this batch for ``compute``."""
        return run(self, f"{self._title()}, forward", self._forward_coroutine, args, kwargs)

    @eager_recursive
    def compute(self) -> Any:
        """Return the value of everything since ``reset``, over all ranks: one exchange for all members."""
        synced = self._sync_members() if self._members_first else []
        try:
            return super().compute()  # type: ignore[misc]
        finally:
            for leaf in synced:
                leaf._to_sync = leaf.sync_on_compute
                leaf.unsync(should_unsync=leaf._is_synced)

    def _forward_coroutine(self, *args: Any, **kwargs: Any) -> Coroutine:
        raise NotImplementedError

    def _leaves(self) -> list[DifferentiableMetric]:
        """Return the metrics that hold states, each once."""
        assert isinstance(self, nn.Module)
        return [m for m in nn.Module.modules(self) if isinstance(m, DifferentiableMetric)]

    def _parts(self) -> Iterable[Composite]:
        assert isinstance(self, nn.Module)
        return (m for m in nn.Module.modules(self) if isinstance(m, Composite))

    def _title(self) -> str:
        names = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in self._leaves()))
        if len(names) >= _LONGEST_NAMES:
            names = names[:_LONGEST_NAMES] + " ..."
        return f"{type(self).__name__}({names})"

    def _sync_members(self) -> list[DifferentiableMetric]:
        """Sync the states of all members in one exchange; return those that ``compute`` would have synced one by one."""
        unsynced = [leaf for leaf in self._leaves() if leaf._to_sync and leaf._computed is None and not leaf._is_synced]
        waiting = [leaf for leaf in unsynced if leaf._record.gather == "states"]
        # decided before asking which members have peers: groups of one rank may stand beside larger ones
        if len(waiting) < 2 or any(not part._members_first for part in self._parts()):
            return []
        waiting = [leaf for leaf in waiting if leaf._has_peers]
        replies = reply(f"{self._title()}, compute", [leaf.request() for leaf in waiting])
        for leaf, values in zip(waiting, replies, strict=True):
            leaf._cache = detached(leaf._states())
            leaf._receive(values)
            leaf._is_synced, leaf._to_sync = True, False
        return waiting


class _DifferentiableComposition(Composite):
    """``a + b``, ``2 * a``, ``abs(a)``."""

    if TYPE_CHECKING:  # TorchScript reads annotations
        metric_a: Any
        metric_b: Any

    def _forward_coroutine(self, *args: Any, **kwargs: Any) -> Coroutine:
        parts = [self.metric_a, self.metric_b]
        indices = [index for index, part in enumerate(parts) if isinstance(part, Metric)]
        values = yield from together([_call_of(parts[index], args, kwargs) for index in indices])
        # numbers and tensors stay what they are
        for index, value in zip(indices, values, strict=True):
            parts[index] = value
        if self.metric_b is None:
            parts.pop()
        value = self.op(*parts)  # type: ignore[attr-defined]
        self._forward_cache = nests.map_tensors(Tensor.detach, value)
        return value


class _DifferentiableMinMax(Composite):
    """The value, and the smallest and largest that there was."""

    def _forward_coroutine(self, *args: Any, **kwargs: Any) -> Coroutine:
        (value,) = yield from together([(self._base_metric, args, kwargs)])  # type: ignore[attr-defined]
        return self._with_extremes(value)

    def compute(self) -> Any:
        """Return the value of everything since ``reset``, with the smallest and largest value so far."""
        return self._with_extremes(self._base_metric.compute())  # type: ignore[attr-defined]

    def _with_extremes(self, value: Any) -> dict[str, Any]:
        if not self._is_suitable_val(value):  # type: ignore[attr-defined]
            raise RuntimeError(f"Returned value from base metric should be a float or scalar tensor, but got {value}.")
        value = torch.as_tensor(value)
        high = torch.where(value > self.max_val.to(value.device), value, self.max_val.to(value))  # type: ignore[has-type]
        low = torch.where(value < self.min_val.to(value.device), value, self.min_val.to(value))  # type: ignore[has-type]
        self.max_val, self.min_val = high.detach(), low.detach()
        found = {"raw": value, "max": high, "min": low}
        self._forward_cache = nests.map_tensors(Tensor.detach, found)
        return found


class _DifferentiableMultioutput(Composite):
    """A metric for each output."""

    def _forward_coroutine(self, *args: Any, **kwargs: Any) -> Coroutine:
        by_output = self._get_args_kwargs_by_output(*args, **kwargs)  # type: ignore[attr-defined]
        calls: list[Call] = []
        for metric, (own_args, own_kwargs) in zip(self.metrics, by_output, strict=True):  # type: ignore[attr-defined]
            calls.append((metric, tuple(own_args), dict(own_kwargs)))
        values = yield from together(calls)
        value = torch.stack(values, 0)
        self._forward_cache = value.detach()
        return value


class _DifferentiableClasswise(Composite):
    """A value for each class, by name."""

    def __getattr__(self, name: str) -> Any:
        # torchmetrics asks the member for what the wrapper lacks; asked so for ``__deepcopy__``, it would copy the member alone
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return super().__getattr__(name)  # type: ignore[misc]

    def _forward_coroutine(self, *args: Any, **kwargs: Any) -> Coroutine:
        (value,) = yield from together([(self.metric, args, kwargs)])
        return self._convert_output(value)


class _DifferentiableRunning(Composite):
    """A window of batches; ``compute`` puts the window into its metric first, which then syncs it."""

    _members_first = False

    def _forward_coroutine(self, *args: Any, **kwargs: Any) -> Coroutine:
        base = self.base_metric  # type: ignore[attr-defined]
        (value,) = yield from together([(base, args, kwargs)])
        self._move_into_window(base)
        return value

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

    def _forward_coroutine(self, task_preds: dict[str, Any], task_targets: dict[str, Any]) -> Coroutine:
        tasks = self.task_metrics  # type: ignore[attr-defined]
        if not tasks.keys() == task_preds.keys() == task_targets.keys():
            raise InputError(
                f"{type(self).__name__}: tasks",
                expected=f"predictions and targets of {sorted(tasks.keys())}",
                got=f"predictions of {sorted(task_preds)} and targets of {sorted(task_targets)}",
                fix="Give every task its predictions and targets in every call.",
            )
        calls: list[Call] = [(metric, (task_preds[n], task_targets[n]), {}) for n, metric in tasks.items()]
        values = yield from together(calls)
        return self._convert_output(dict(zip(tasks.keys(), values, strict=True)))  # type: ignore[attr-defined]


class _DifferentiableTransformed(Composite):
    """A metric of inputs that are changed first."""

    def _forward_coroutine(self, *args: Any, **kwargs: Any) -> Coroutine:
        args = self._wrap_transform(*args)  # type: ignore[attr-defined]
        (value,) = yield from together([(self.wrapped_metric, args, kwargs)])  # type: ignore[attr-defined]
        return value


class DifferentiableCollection(Composite):
    """A collection: all states of all members in one exchange."""

    def _forward_coroutine(self, *args: Any, **kwargs: Any) -> Coroutine:
        assert isinstance(self, MetricCollection)
        members = dict(self.items(keep_base=True, copy_state=False))
        self._refuse_plain(members)
        values = yield from together([_call_of(member, args, kwargs) for member in members.values()])
        return self._named_values(members, values)

    def _named_values(self, members: dict[str, Any], values: Sequence[Any]) -> dict[str, Any]:
        """Return the values under torchmetrics' own names: it asks each member for its forward."""
        assert isinstance(self, MetricCollection)
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

    def _refuse_plain(self, members: dict[str, Any]) -> None:
        for name, member in members.items():
            if not isinstance(member, (DifferentiableMetric, Composite)):
                raise ConfigurationError(
                    f"{type(self).__name__}: `{name}`",
                    expected="a differentiable metric",
                    got=f"a plain {type(member).__name__}, added later",
                    fix="Add differentiable(metric).",
                )


def _call_of(metric: Metric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return metric, args, metric._filter_kwargs(**kwargs)


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
"""For each class of torchmetrics that is made of metrics, what makes it differentiable."""
