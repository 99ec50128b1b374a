"""Metrics made of metrics: compositions, wrappers and collections, whose members meet in one exchange.

Each runs the stages of its members side by side (`stages`) and does with their values what torchmetrics does. Its own
members are differentiable themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.metric import CompositionalMetric
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric, MultioutputWrapper, MultitaskWrapper, Running
from torchmetrics.wrappers.transformations import MetricInputTransformer

from lightning_ddp_losses.core import precision
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.metrics.coroutines import Call, Request, Stages, answer, run, together
from lightning_ddp_losses.metrics.metric import DifferentiableMetric


class Composite:
    """What all of them share: a forward in stages, and one exchange before ``compute``."""

    sees_global_batch = True
    _members_first = True  # compute only calls the compute of its members, which may be synced before

    @property
    def process_group(self) -> Any:
        """That of the first member; members of other groups meet in exchanges of their own."""
        return next((leaf.process_group for leaf in self._leaves()), None)

    @process_group.setter
    def process_group(self, group: Any) -> None:
        """Torchmetrics sets it on every metric; a wrapper has nothing to exchange itself."""

    @property
    def _meets(self) -> bool:
        return any(leaf._meets for leaf in self._leaves())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The value of the global batch, with its gradient; accumulates this batch for ``compute``."""
        return run(self, f"{self._title()}, forward", self._stages, args, kwargs)

    def compute(self) -> Any:
        """The value of everything since ``reset``, over all ranks: one exchange for all members."""
        synced = self._sync_members() if self._members_first else []
        try:
            return super().compute()  # type: ignore[misc]
        finally:
            for leaf in synced:
                leaf._to_sync = leaf.sync_on_compute
                leaf.unsync(should_unsync=leaf._is_synced)

    def _stages(self, *args: Any, **kwargs: Any) -> Stages:
        raise NotImplementedError

    def _leaves(self) -> list[DifferentiableMetric]:
        """The metrics that hold states, each once."""
        assert isinstance(self, nn.Module)
        return [m for m in nn.Module.modules(self) if isinstance(m, DifferentiableMetric)]

    def _title(self) -> str:
        names = ", ".join(dict.fromkeys(type(leaf).__name__ for leaf in self._leaves()))
        return f"{type(self).__name__}({names if len(names) < 60 else names[:60] + ' ...'})"

    def _sync_members(self) -> list[DifferentiableMetric]:
        """Sync the states of all members in one exchange; those that ``compute`` would sync one by one."""
        waiting = [
            leaf
            for leaf in self._leaves()
            if leaf._to_sync and leaf._computed is None and not leaf._is_synced
            if leaf._shared.gather == "states"
        ]
        if len(waiting) < 2 or any(not part._members_first for part in self._parts()):
            return []  # decided before asking who meets whom: groups of one rank may stand beside larger ones
        waiting = [leaf for leaf in waiting if leaf._meets]
        requests = [Request(leaf, leaf._outgoing(leaf._shared.rows)) for leaf in waiting]
        replies = answer(f"{self._title()}, compute", requests)
        for leaf, values in zip(waiting, replies, strict=True):
            leaf._cache = {n: precision.map_tensors(Tensor.detach, v) for n, v in leaf._states().items()}
            leaf._put(dict(zip(leaf._defaults, values, strict=True)))
            leaf._is_synced, leaf._to_sync = True, False
        return waiting

    def _parts(self) -> Iterable[Composite]:
        assert isinstance(self, nn.Module)
        return (m for m in nn.Module.modules(self) if isinstance(m, Composite))


class _Composition(Composite):
    """``a + b``, ``2 * a``, ``abs(a)``."""

    metric_a: Any
    metric_b: Any

    def _stages(self, *args: Any, **kwargs: Any) -> Stages:
        parts = [self.metric_a, self.metric_b]
        calls = [_call(part, args, kwargs) for part in parts if isinstance(part, Metric)]
        found = iter((yield from together(calls)))
        a, b = (next(found) if isinstance(part, Metric) else part for part in parts)
        if a is None or (b is None and isinstance(self.metric_b, Metric)):
            return None
        value = self.op(a) if b is None else self.op(a, b)  # type: ignore[attr-defined]
        self._forward_cache = precision.map_tensors(Tensor.detach, value)
        return value


class _MinMax(Composite):
    """The value, and the smallest and largest that there was."""

    def _stages(self, *args: Any, **kwargs: Any) -> Stages:
        (value,) = yield from together([(self._base_metric, args, kwargs)])  # type: ignore[attr-defined]
        return self._noted(value)

    def compute(self) -> Any:
        """The value of everything since ``reset``, with the smallest and largest value so far."""
        return self._noted(self._base_metric.compute())  # type: ignore[attr-defined]

    def _noted(self, value: Any) -> dict[str, Any]:
        if not self._is_suitable_val(value):  # type: ignore[attr-defined]
            raise RuntimeError(f"Returned value from base metric should be a float or scalar tensor, but got {value}.")
        value = torch.as_tensor(value)
        high = torch.where(value > self.max_val.to(value.device), value, self.max_val.to(value))  # type: ignore[has-type]
        low = torch.where(value < self.min_val.to(value.device), value, self.min_val.to(value))  # type: ignore[has-type]
        self.max_val, self.min_val = high.detach(), low.detach()
        answer = {"raw": value, "max": high, "min": low}
        self._forward_cache = precision.map_tensors(Tensor.detach, answer)
        return answer


class _Multioutput(Composite):
    """A metric for each output."""

    def _stages(self, *args: Any, **kwargs: Any) -> Stages:
        given = self._get_args_kwargs_by_output(*args, **kwargs)  # type: ignore[attr-defined]
        calls = [(m, tuple(a), dict(k)) for m, (a, k) in zip(self.metrics, given, strict=True)]  # type: ignore[attr-defined]
        values = yield from together(calls)
        self._forward_cache = None if values[0] is None else torch.stack([v.detach() for v in values], 0)
        return None if values[0] is None else torch.stack(values, 0)


class _Classwise(Composite):
    """A value for each class, by name."""

    def _stages(self, *args: Any, **kwargs: Any) -> Stages:
        (value,) = yield from together([(self.metric, args, kwargs)])  # type: ignore[attr-defined]
        return self._convert_output(value)  # type: ignore[attr-defined]


class _Running(Composite):
    """A window of batches; ``compute`` puts the window into its metric first, which then syncs it."""

    _members_first = False

    def _stages(self, *args: Any, **kwargs: Any) -> Stages:
        base = self.base_metric  # type: ignore[attr-defined]
        (value,) = yield from together([(base, args, kwargs)])
        self._keep(base)
        return value

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update the metric and move its states into the window."""
        self.base_metric.update(*args, **kwargs)  # type: ignore[attr-defined]
        self._keep(self.base_metric)  # type: ignore[attr-defined]

    def _keep(self, base: DifferentiableMetric) -> None:
        place = self._num_vals_seen % self.window  # type: ignore[attr-defined]
        for name, value in base._states().items():
            setattr(self, f"{name}_{place}", value)
        base._clear()
        self._num_vals_seen += 1  # type: ignore[attr-defined]
        self._computed = None


class _Multitask(Composite):
    """A metric for each task."""

    def _stages(self, task_preds: dict[str, Any], task_targets: dict[str, Any]) -> Stages:
        names = self.task_metrics.keys()  # type: ignore[attr-defined]
        if not names == task_preds.keys() == task_targets.keys():
            raise ValueError(f"Expected predictions and targets of the tasks {sorted(names)}")
        calls: list[Call] = [(m, (task_preds[n], task_targets[n]), {}) for n, m in self.task_metrics.items()]  # type: ignore[attr-defined]
        values = yield from together(calls)
        return self._convert_output(dict(zip(names, values, strict=True)))  # type: ignore[attr-defined]


class _Transformed(Composite):
    """A metric of inputs that are changed first."""

    def _stages(self, *args: Any, **kwargs: Any) -> Stages:
        args = self._wrap_transform(*args)  # type: ignore[attr-defined]
        (value,) = yield from together([(self.wrapped_metric, args, kwargs)])  # type: ignore[attr-defined]
        return value


class DifferentiableCollection(Composite):
    """A collection: all states of all members in one exchange."""

    def _stages(self, *args: Any, **kwargs: Any) -> Stages:
        assert isinstance(self, MetricCollection)
        members = dict(self.items(keep_base=True, copy_state=False))
        self._require(members)
        values = yield from together([_call(member, args, kwargs) for member in members.values()])
        return self._named(members, values)

    def _named(self, members: dict[str, Any], values: Sequence[Any]) -> dict[str, Any]:
        """Torchmetrics' own names for the values: it asks each member for its forward."""
        assert isinstance(self, MetricCollection)
        answers = dict(zip(members, values, strict=True))
        plain = {name: member.__dict__.get("forward") for name, member in members.items()}
        try:
            for name, member in members.items():
                member.__dict__["forward"] = lambda *_, _value=answers[name], **__: _value
            return self._compute_and_reduce("forward")
        finally:
            for name, member in members.items():
                if plain[name] is None:
                    del member.__dict__["forward"]
                else:
                    member.__dict__["forward"] = plain[name]

    def _require(self, members: dict[str, Any]) -> None:
        for name, member in members.items():
            if not isinstance(member, (DifferentiableMetric, Composite)):
                raise ConfigurationError(
                    f"{type(self).__name__}: `{name}`",
                    expected="a differentiable metric",
                    got=f"a plain {type(member).__name__}, added later",
                    fix="Add differentiable(metric).",
                )


def _call(metric: Metric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return metric, args, metric._filter_kwargs(**kwargs)


COMPOSITES: dict[type, type[Composite]] = {
    CompositionalMetric: _Composition,
    MinMaxMetric: _MinMax,
    MultioutputWrapper: _Multioutput,
    ClasswiseWrapper: _Classwise,
    Running: _Running,
    MultitaskWrapper: _Multitask,
    MetricInputTransformer: _Transformed,
    MetricCollection: DifferentiableCollection,
}
"""For each class of torchmetrics that is made of metrics, what makes it differentiable."""
