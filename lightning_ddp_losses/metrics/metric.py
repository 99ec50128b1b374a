"""`DifferentiableMetric`: torchmetrics' base class, with a value over all ranks whose gradient is that of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric
from torchmetrics.utilities.exceptions import TorchMetricsUserError

from lightning_ddp_losses.core import autograd_graph, inputs, nests, precision
from lightning_ddp_losses.core.configuration import configuration
from lightning_ddp_losses.core.forward_patch import eager_recursive
from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.accumulation import WindowPart, current_window, name_value
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.metrics.coroutines import Coroutine, Request, gather_inputs, reply, run, wants_gradient
from lightning_ddp_losses.metrics.states import (
    Gather,
    MetricRecord,
    MetricStates,
    detached,
    has_no_rows,
    needs_whole_batch,
)

# modules whose `_sync_dist` is torchmetrics' own or ours
_KNOWN_SYNC = ("torchmetrics.metric", "lightning_ddp_losses")
# means over rows, whose state ``total`` counts them
_WINDOW_METRICS = (MeanSquaredError, MeanAbsoluteError)


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

    A rank without rows counts for nothing, also where the metric's update fails on none.

    Gradient: after DDP's mean over ranks, that of one process. Multiply the value by the same factor on every rank (one
        that differs is an error at the next call).

    Communication: ``forward`` and ``compute`` one handshake with the states in it, or one more collective for many of them;
        no barrier, none in backward. ``update`` none; with ``gather="inputs"`` as ``forward``, and ``compute`` none.

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
    _keep = False  # whether the class was made with without_gradient="keep"

    def __init__(self, *args: Any, gather: Gather = "auto", keep_graph: bool = False, **kwargs: Any) -> None:
        on_step = kwargs.pop("dist_sync_on_step", True)
        super().__init__(*args, **kwargs)
        self._set_up(gather=gather, keep_graph=keep_graph, on_step=on_step, expects_gradient=not self._keep)

    def _set_up(
        self, *, gather: Gather, keep_graph: bool, on_step: object = True, expects_gradient: bool = True
    ) -> None:
        """Set up what is ours, on a metric that torchmetrics has set up."""
        check_options(self, gather, on_step=on_step)
        if gather == "auto":
            gather = "inputs" if needs_whole_batch(self) else "states"
        self.dist_sync_on_step = True
        expects_gradient = expects_gradient and type(self).is_differentiable is not False
        self._record = MetricRecord(gather, keep_graph, expects_gradient)

    # ------------------------------------------------------------------ forward

    @eager_recursive
    @torch.jit.unused
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the metric of the global batch, with its gradient; accumulate this batch for ``compute``.

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
        return run(self, self._title("forward"), self._forward_coroutine, args, kwargs)

    def _forward_coroutine(self, *args: Any, **kwargs: Any) -> Coroutine:
        """Update on the batch alone, exchange, compute, and only then add the batch to what was there."""
        record = self._record
        given = nests.tensors_in((args, kwargs))
        wanted = wants_gradient(given)
        self._prepare(given)

        # inputs of all ranks, for a metric whose update looks at the whole batch
        has_peers = self._has_peers
        if has_peers and record.gather == "inputs":
            args, kwargs = yield from gather_inputs(self, self._title(), args, kwargs)

        # put what is accumulated aside; it comes back if anything fails
        states, count, update_ends = self._states(), self._update_count, dict(record.update_ends)
        rows, rows_before = inputs.num_rows(args, kwargs), record.rows
        grad_enabled = torch.is_grad_enabled()
        may_skip = rows == 0 and self._may_skip(args, kwargs)
        skipped_before = record.skipped_updates
        record.in_forward = True
        try:
            # states that do not add up need a second update, on what is accumulated
            accumulated = None if self._adds_up else self._states_after(args, kwargs, may_skip=may_skip)

            # update from the defaults, on this batch alone
            self._clear()
            self._enable_grad = grad_enabled
            is_skipped = not self._update_rows(args, kwargs, may_skip=may_skip)
            batch = self._states()

            # exchange: the states of all ranks, with this rank's graph
            if has_peers and record.gather == "states":
                (values,) = yield [Request(self, self._states_to_send(rows, skipped_updates=int(is_skipped)))]
                reduced = self._receive(values)
                if self.sync_on_compute:  # a rank's share of the rows may be another in every step
                    batch |= {name: reduced[name] for name in self._means()}

            # compute the value of the global batch
            self._assign({"_to_sync": False, "_should_unsync": False})
            value = self.compute()
            if wanted:
                value = self._count_in_window(value, given)

            # add the batch to what was there
            self._update_count = count + 1
            if accumulated is None:
                self._assign(detached(batch))
                self._reduce_states(states)
                accumulated = self._states()
            states, count, rows_before = accumulated, count + 1, rows_before + rows
            update_ends = self._ends_after_update(update_ends, states)
            skipped_before += is_skipped
        finally:
            self._assign(states)
            record.rows, record.update_ends, record.in_forward = rows_before, update_ends, False
            record.skipped_updates = skipped_before
            self._assign({"_update_count": count, "_to_sync": self.sync_on_compute, "_should_unsync": True})
            self._assign({"_enable_grad": False, "_is_synced": False, "_computed": None})
            self._drop_graphs()

        if wanted and rows == 0 and record.expects_gradient:  # without rows, and in backward all the same, as its peers
            value = autograd_graph.attach_zero_grad(value, [t for t in given if t.requires_grad], [])
        if wanted:
            self._check_gradient(value)
        return self._shared_value(value, has_peers=has_peers)

    def _count_in_window(self, value: Any, given: Sequence[Tensor]) -> Any:
        """Return the value as a part of what the micro-batches of an accumulation window make, where it is a mean over rows."""
        window = current_window()
        if window is None or not isinstance(value, Tensor):
            return value
        title = self._title()
        if isinstance(self, _WINDOW_METRICS) and getattr(self, "squared", True):
            total = float(self.total)
            if not total:  # a mean over nothing, whose gradient would be no number
                return autograd_graph.attach_zero_grad(value.detach(), [t for t in given if t.requires_grad], [])
            call = window.enter(self, title, [WindowPart("mean", total)])
            return call.mark(value, *call.weights)
        name_value(value, title)
        return value

    def _check_gradient(self, value: Any) -> None:
        """Refuse a value without a graph where an input asks for a gradient."""
        if self._record.expects_gradient and not any(t.requires_grad for t in nests.tensors_in(value)):
            raise ConfigurationError(
                f"{self._title()}: value",
                expected="a gradient, as an input asks for one",
                got="none, in one process either: it is computed from ranks, counts or decisions",
                fix="Log it without gradient: differentiable(metric, without_gradient='keep').",
            )

    def _shared_value(self, value: Any, *, has_peers: bool) -> Any:
        """Remember a value that is about to leave, and watch what comes back into it where other ranks have it too."""
        self._forward_cache = nests.map_tensors(Tensor.detach, value)
        if not has_peers:
            return value
        for tensor in nests.tensors_in(value):
            autograd_graph.remember_global_value(tensor)
        return self._record.upstream_grads.watch(value, group=self.process_group)

    # ------------------------------------------------------------------ update, compute, sync

    def _wrap_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        plain = super()._wrap_update(update)

        @functools.wraps(update)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            if self._record.in_forward:
                plain(*args, **kwargs)
            else:
                run(self, self._title("update"), self._update_coroutine, args, kwargs)

        return eager_recursive(wrapped)

    def _update_coroutine(self, *args: Any, **kwargs: Any) -> Coroutine:
        """Add a batch to what was there; with a graph only where it is to be kept."""
        record = self._record
        given = nests.tensors_in((args, kwargs))
        self._prepare(given)
        if record.gather == "inputs" and self._has_peers:
            args, kwargs = yield from gather_inputs(self, self._title(), args, kwargs)
        rows = inputs.num_rows(args, kwargs)
        may_skip = rows == 0 and self._may_skip(args, kwargs)
        self._enable_grad = record.keep_graph and torch.is_grad_enabled()
        record.in_forward = True  # so that update is the plain one
        try:
            is_skipped = not self._update_rows(args, kwargs, may_skip=may_skip)
        finally:
            self._enable_grad, record.in_forward = False, False
        record.rows += rows
        record.skipped_updates += is_skipped
        if is_skipped and record.keep_graph:
            record.inputs_without_rows += [tensor for tensor in given if tensor.requires_grad]
        record.update_ends = self._ends_after_update(record.update_ends, self._states())
        if not record.keep_graph:  # what is appended to a list brings its own
            self._assign(detached(self._states()))
            self._drop_graphs()

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        plain = super()._wrap_compute(compute)

        @functools.wraps(compute)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._record.in_forward or self._computed is not None:
                return plain(*args, **kwargs)
            is_shared = self._has_peers and self._to_sync
            dtype = precision.compute_dtype(nests.tensors_in(self._states()))
            with precision.full_precision(dtype, [self.device.type]):
                value = plain(*args, **kwargs)
            if self._record.keep_graph:
                # the graph ends here: what was accumulated goes on without it
                self._assign(detached(self._states()))
                value = autograd_graph.attach_zero_grad(value, self._record.inputs_without_rows, [])
                self._record.inputs_without_rows = []
                if is_shared:
                    value = self._record.upstream_grads.watch(value, group=self.process_group)
                self._computed = value if self.compute_with_cache else None
            return value

        return eager_recursive(wrapped)

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

        Communication: one handshake, or one more collective.
        """
        if self._is_synced and should_sync:
            raise TorchMetricsUserError("The Metric has already been synced.")
        available = distributed_available or self.distributed_available_fn
        if not should_sync or not callable(available) or not available():
            return
        check_options(self, self._record.gather, dist_sync_fn=dist_sync_fn)
        self._cache = detached(self._states())
        is_alone = process_groups.world_size(process_group or self.process_group) == 1
        if not is_alone and self._record.gather == "states":  # else every rank has them already
            self._sync_dist(process_group=process_group)
        self._is_synced = True

    def _sync_dist(self, dist_sync_fn: Callable[..., Any] | None = None, process_group: Any | None = None) -> None:
        own, self.process_group = self.process_group, process_group or self.process_group
        try:
            (values,) = reply(self._title("compute"), [self.request()])
        finally:
            self.process_group = own
        self._receive(values)

    def reset(self) -> None:
        """Go back to the defaults."""
        super().reset()
        if "_record" in self.__dict__:
            self._record.rows, self._record.update_ends = 0, {}
            self._record.skipped_updates, self._record.inputs_without_rows = 0, []

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add the states of another metric of the same kind, differentiable or not, or a dict of them."""
        kind = next(cls for cls in type(self).__mro__ if not issubclass(cls, MetricStates))
        if kind is Metric:
            kind = type(self)
        if isinstance(incoming_state, DifferentiableMetric):
            self._record.rows += incoming_state._record.rows
        if isinstance(incoming_state, Metric) and isinstance(incoming_state, kind):
            incoming_state = incoming_state.metric_state
        self.dist_sync_on_step = False  # torchmetrics asks; what is accumulated here is not synced
        try:
            super().merge_state(incoming_state)
        finally:
            self.dist_sync_on_step = True

    # ------------------------------------------------------------------ as a member of an exchange

    @property
    def _has_peers(self) -> bool:
        """Whether there are other ranks to exchange states with."""
        available = self.distributed_available_fn
        return bool(available is None or available()) and process_groups.world_size(self.process_group) > 1

    def request(self) -> Request:
        """Return the states of everything since ``reset``, to be exchanged."""
        record = self._record
        return Request(self, self._states_to_send(record.rows, skipped_updates=record.skipped_updates))

    def _may_skip(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an update has no rows while other ranks may have some."""
        return self._has_peers and self._record.gather == "states" and has_no_rows(args, kwargs)

    def take_upstream_grads(self) -> str:
        """Return what came back into its values in backward since this was last asked, as text."""
        return self._record.upstream_grads.take()

    def description(self) -> str:
        """Return its configuration as text, to compare between ranks."""
        self._record.configuration = self._record.configuration or configuration(self)
        return self._record.configuration

    def _title(self, where: str = "") -> str:
        title = f"metric {type(self).__name__}"
        if where:
            title += f", {where}"
        return title


def check_options(
    metric: Metric, gather: str, *, on_step: object = True, dist_sync_fn: Callable[..., Any] | None = None
) -> None:
    """Refuse options that cannot go with a value over all ranks.

    Raises:
        ConfigurationError: naming the option.
    """
    what = f"differentiable {type(metric).__name__}"
    if gather not in ("auto", "states", "inputs"):
        raise ConfigurationError(f"{what}: gather", expected="'auto', 'states' or 'inputs'", got=repr(gather))
    check_on_step(type(metric), on_step)
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
            got=repr(metric.dist_sync_fn or dist_sync_fn),
            fix="Leave it out: the states of all ranks travel in one exchange; process_group= says among whom.",
        )
    foreign = [cls for cls in type(metric).__mro__ if not cls.__module__.startswith(_KNOWN_SYNC)]
    if any("_sync_dist" in vars(cls) for cls in foreign):
        raise ConfigurationError(
            f"{what}: _sync_dist",
            expected="torchmetrics' own",
            got="an override, whose exchange is not known here",
            fix="Declare the states with add_state and a reduction.",
        )


def check_on_step(cls: type, on_step: object) -> None:
    """Refuse ``dist_sync_on_step`` that is not True.

    Raises:
        ConfigurationError: quoting it.
    """
    if on_step is True:
        return
    got = repr(on_step)
    if on_step is False:
        got = "False, which gives the gradient of this rank's rows alone"
    raise ConfigurationError(
        f"differentiable {cls.__name__}: dist_sync_on_step",
        expected="True",
        got=got,
        fix="Leave it out; use torchmetrics' own class for a value per rank.",
    )
