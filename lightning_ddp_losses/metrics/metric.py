"""`DifferentiableMetric`: torchmetrics' base class, with a value over all ranks whose gradient is that of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.exceptions import TorchMetricsUserError

from lightning_ddp_losses.core import autograd_graph, inputs, precision
from lightning_ddp_losses.core.configuration import configuration
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.metrics.coroutines import Request, Stages, answer, gather_inputs, gradient_is_wanted, run
from lightning_ddp_losses.metrics.states import (
    Gather,
    MetricStates,
    Shared,
    detached,
    looks_at_whole_batch,
    refuse_options,
)


class DifferentiableMetric(MetricStates):
    """A metric over all ranks, whose value can be trained on.

    Subclass it exactly as ``torchmetrics.Metric``; ``differentiable`` turns metrics that exist into it. ``forward`` returns the
    metric of the global batch, on every rank the same; ``compute`` that of everything since ``reset``, as in one process.

    Equivalent to: the metric called in one process on the inputs of all ranks, concatenated in rank order.

    Args:
        *args: What the metric takes.
        gather: ``"states"``: each rank updates on its own rows and the states are reduced over ranks, as ``add_state`` says.
            ``"inputs"``: the rows are gathered first, and every rank updates on all of them; for a metric whose update
            looks at the whole batch. ``"auto"``: states, but inputs for the metrics of torchmetrics that need it.
        keep_graph: ``update`` keeps its graph, so that ``compute`` after several updates has a gradient. It ends there: what was
            accumulated is detached by ``compute``. Without it only ``forward`` has one.
        **kwargs: What ``torchmetrics.Metric`` takes, ``process_group`` among them.

    States reduced by "mean": ``forward`` of a metric with ``full_state_update = False`` accumulates the mean over the rows of all
    ranks. After ``update`` (or ``forward`` of another metric) each rank has that of its own rows, and ``compute`` weighs them by the
    ranks' rows since ``reset``: that of one process where each rank's share of the rows is the same at every update, else near it.

    Gradient: after DDP's mean over ranks, that of one process. Multiply the value by the same factor on every rank (one
        that differs is an error at the next call).

    Communication: ``forward`` and ``compute`` one frame with the states in it, or one more collective for many of them; no
        barrier, none in backward. ``update`` none; with ``gather="inputs"`` as ``forward``, and ``compute`` none.

    Raises:
        ConfigurationError: options that cannot work; a value without gradient although an input asks for one.
        RankMismatchError: on every rank, for states that differ in shape or dtype, naming the state.

    Example:
        >>> import torch
        >>> class MeanError(DifferentiableMetric):
        ...     full_state_update = False
        ...
        ...     def __init__(self, **kwargs):
        ...         super().__init__(**kwargs)
        ...         self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        ...         self.add_state("rows", torch.tensor(0), dist_reduce_fx="sum")
        ...
        ...     def update(self, preds, target):
        ...         self.total = self.total + (preds - target).abs().sum()
        ...         self.rows = self.rows + len(preds)
        ...
        ...     def compute(self):
        ...         return self.total / self.rows
        >>> preds = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> MeanError()(preds, torch.tensor([0.0, 0.0])).backward()
    """

    sees_global_batch = True

    def __init__(self, *args: Any, gather: Gather = "auto", keep_graph: bool = False, **kwargs: Any) -> None:
        on_step = kwargs.pop("dist_sync_on_step", True)
        super().__init__(*args, **kwargs)
        self._become(gather=gather, keep_graph=keep_graph, on_step=on_step)

    def _become(self, *, gather: Gather, keep_graph: bool, on_step: bool = True, expects_gradient: bool = True) -> None:
        """Set up what is ours, on a metric that torchmetrics has set up."""
        title = type(self).__name__
        refuse_options(self, title, gather, on_step=on_step)
        if gather == "auto":
            gather = "inputs" if looks_at_whole_batch(self) else "states"
        self.dist_sync_on_step = True
        self._shared = Shared(gather, keep_graph, expects_gradient and type(self).is_differentiable is not False)

    # ------------------------------------------------------------------ forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The metric of the global batch, with its gradient; accumulates this batch for ``compute``.

        Args:
            *args: What ``update`` takes: this rank's rows.
            **kwargs: Likewise.

        Returns:
            What ``compute`` returns, equal on every rank.
        """
        if self._is_synced:
            raise TorchMetricsUserError(
                "The Metric shouldn't be synced when performing ``forward``. HINT: Did you forget to call ``unsync`` ?."
            )
        return run(self, self._title("forward"), self._stages, args, kwargs)

    def _stages(self, *args: Any, **kwargs: Any) -> Stages:
        """One forward: update on the batch alone, meet, compute, and only then add the batch to what was there."""
        shared, given = self._shared, precision.tensors_in((args, kwargs))
        self._prepare(given)
        meets = self._meets
        if meets and shared.gather == "inputs":
            args, kwargs = yield from gather_inputs(self, self._title(), args, kwargs)
        wanted, rows, rows_before = gradient_is_wanted(given), inputs.num_rows(args, kwargs), shared.rows
        before, count, grad, ends = self._states(), self._update_count, torch.is_grad_enabled(), dict(shared.ends)
        shared.inside = True
        try:
            after = None if self._adds_up else self._accumulated(args, kwargs)
            self._clear()
            self._enable_grad = grad
            self.update(*args, **kwargs)
            batch = self._states()
            if meets and shared.gather == "states":
                (values,) = yield [Request(self, self._outgoing(rows))]
                together = dict(zip(self._defaults, values, strict=True))
                self._put(together)
                if self.sync_on_compute:  # a rank's share of the rows may be another in every step
                    batch |= {name: together[name] for name in self._means()}
            self._put({"_to_sync": False, "_should_unsync": False})
            value = self.compute()
            self._update_count = count + 1
            if after is None:
                self._put(detached(batch))
                self._reduce_states(before)
                after = self._states()
            before, count, rows_before = after, count + 1, rows_before + rows
            ends = self._longer(ends, after)
        finally:  # with what there was before, if anything failed
            self._put(before)
            shared.rows, shared.ends, shared.inside = rows_before, ends, False
            self._put({"_update_count": count, "_to_sync": self.sync_on_compute, "_should_unsync": True})
            self._put({"_enable_grad": False, "_is_synced": False, "_computed": None})
            self._drop_graphs()
        return self._returned(value, wanted=wanted, meets=meets)

    def _returned(self, value: Any, *, wanted: bool, meets: bool) -> Any:
        """Check, watch and note a value that is about to leave."""
        shared = self._shared
        if wanted and shared.expects_gradient and not any(t.requires_grad for t in precision.tensors_in(value)):
            raise ConfigurationError(
                f"{self._title()}: value",
                expected="a gradient, as an input asks for one",
                got="none, in one process either: it is computed from ranks, counts or decisions",
                fix="Log it without gradient: differentiable(metric, without_gradient='keep').",
            )
        self._forward_cache = precision.map_tensors(Tensor.detach, value)
        if meets:
            for tensor in precision.tensors_in(value):
                autograd_graph.remember_global_value(tensor)
            value = shared.coefficients.watch(value, group=self.process_group)
        return value

    # ------------------------------------------------------------------ update, compute, sync

    def _wrap_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        plain = super()._wrap_update(update)

        @functools.wraps(update)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            if self._shared.inside:
                plain(*args, **kwargs)
            else:
                run(self, self._title("update"), self._update_stages, args, kwargs)

        self.__dict__["_plain_update"] = plain
        return wrapped

    def _update_stages(self, *args: Any, **kwargs: Any) -> Stages:
        shared = self._shared
        self._prepare(precision.tensors_in((args, kwargs)))
        if shared.gather == "inputs" and self._meets:
            args, kwargs = yield from gather_inputs(self, self._title(), args, kwargs)
        self._enable_grad = shared.keep_graph and torch.is_grad_enabled()
        try:
            self.__dict__["_plain_update"](*args, **kwargs)
        finally:
            self._enable_grad = False
        shared.rows += inputs.num_rows(args, kwargs)
        shared.ends = self._longer(shared.ends, self._states())
        if not shared.keep_graph:  # what is appended to a list brings its own
            self._put(detached(self._states()))
            self._drop_graphs()

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        plain = super()._wrap_compute(compute)

        @functools.wraps(compute)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._shared.inside or self._computed is not None:
                return plain(*args, **kwargs)
            meets = self._meets and self._to_sync
            dtype = precision.compute_dtype(precision.tensors_in(self._states()))
            with precision.full_precision(dtype, [self.device.type]):
                value = plain(*args, **kwargs)
            if self._shared.keep_graph:
                self._put(detached(self._states()))
                value = self._shared.coefficients.watch(value, group=self.process_group) if meets else value
                self._computed = value if self.compute_with_cache else None
            return value

        return wrapped

    def sync(
        self,
        dist_sync_fn: Callable[..., Any] | None = None,
        process_group: Any | None = None,
        should_sync: bool = True,
        distributed_available: Callable[[], bool] | None = None,
    ) -> None:
        """Replace the states by those of all ranks, until ``unsync``; this rank's own are kept, not copied.

        Args:
            dist_sync_fn: None; a gather of one's own would not be fused.
            process_group: Instead of the metric's.
            should_sync: False: do nothing.
            distributed_available: Whether there are other ranks.

        Communication: one frame, or one more collective.
        """
        if self._is_synced and should_sync:
            raise TorchMetricsUserError("The Metric has already been synced.")
        available = distributed_available or self.distributed_available_fn
        if not should_sync or not (available() if callable(available) else False):
            return
        refuse_options(self, type(self).__name__, self._shared.gather, dist_sync_fn=dist_sync_fn)
        self._cache = detached(self._states())
        alone = process_groups.world_size(process_group or self.process_group) == 1
        if not alone and self._shared.gather == "states":  # else every rank has them already
            self._sync_dist(process_group=process_group)
        self._is_synced = True

    def _sync_dist(self, dist_sync_fn: Callable[..., Any] | None = None, process_group: Any | None = None) -> None:
        own, self.process_group = self.process_group, process_group or self.process_group
        try:
            request = Request(self, self._outgoing(self._shared.rows))
            (values,) = answer(self._title("compute"), [request])
        finally:
            self.process_group = own
        self._put(dict(zip(self._defaults, values, strict=True)))

    def reset(self) -> None:
        """Back to the defaults."""
        super().reset()
        if "_shared" in self.__dict__:
            self._shared.rows, self._shared.ends = 0, {}

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add the states of another metric of the same kind, differentiable or not, or a dict of them."""
        kind = next(cls for cls in type(self).__mro__ if not issubclass(cls, MetricStates))
        if isinstance(incoming_state, DifferentiableMetric):
            self._shared.rows += incoming_state._shared.rows
        if isinstance(incoming_state, Metric) and isinstance(incoming_state, type(self) if kind is Metric else kind):
            incoming_state = incoming_state.metric_state
        self.dist_sync_on_step = False  # torchmetrics asks; what is accumulated here is not synced
        try:
            super().merge_state(incoming_state)
        finally:
            self.dist_sync_on_step = True

    # ------------------------------------------------------------------ help

    @property
    def _meets(self) -> bool:
        """Whether there are other ranks to meet."""
        available = self.distributed_available_fn
        return bool(available is None or available()) and process_groups.world_size(self.process_group) > 1

    def told(self) -> str:
        """What came back into its values in backward since it was last asked, as text."""
        return self._shared.coefficients.take()

    def description(self) -> str:
        """Its configuration as text, to compare between ranks."""
        self._shared.configuration = self._shared.configuration or configuration(self)
        return self._shared.configuration

    def _title(self, where: str = "") -> str:
        return f"metric {type(self).__name__}{f', {where}' if where else ''}"
