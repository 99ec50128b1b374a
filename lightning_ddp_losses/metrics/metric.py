"""`DifferentiableMetric`: torchmetrics' base class, with a value over all ranks and the gradient of one process.

A forward is a ``ForwardCall``: it updates on this batch only, exchanges states, computes the value, and adds the batch to the accumulated
states. The calls of several metrics (a collection, a composition, a wrapper) share one exchange: ``run_forward``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric
from torchmetrics.utilities.data import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.utilities.exceptions import TorchMetricsUserError

from lightning_ddp_losses.core import autograd_graph, inputs, precision, torch_compat
from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.core.signature import Plans, modes_of_torch
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.global_values import current_window, name_value, remember_global_value
from lightning_ddp_losses.distributed.messages import Instance
from lightning_ddp_losses.distributed.window_parts import WindowPart
from lightning_ddp_losses.errors import ConfigurationError, InputError, expect, expect_option
from lightning_ddp_losses.metrics.attributes import set_by_update
from lightning_ddp_losses.metrics.exchange import Packet, Received, State, exchange, plans_of
from lightning_ddp_losses.metrics.states import (
    ExchangingMetric,
    Gather,
    MetricRecord,
    MetricStates,
    Progress,
    Seen,
    States,
    detached,
    needs_whole_batch,
)

# means over rows whose state ``total`` counts the rows
_WINDOW_METRICS = (MeanSquaredError, MeanAbsoluteError)


def _class_before_conversion(metric: Metric) -> type:
    """Return the class that ``differentiable`` converted, or the metric's own class, which may compute something else."""
    cls = type(metric)
    while "_original" in cls.__dict__:
        cls = cls.__dict__["_original"]
    return cls


class DifferentiableMetric(MetricStates):
    """A metric over all ranks with a value that can be trained on.

    Subclass it exactly like ``torchmetrics.Metric``, or convert an existing metric with ``differentiable``. ``forward`` returns the
    metric of the global batch, the same on every rank. ``compute`` returns the metric of everything since ``reset``, as in one process.

    Equivalent to: the metric called in one process on the inputs of all ranks, concatenated in rank order.

    Args:
        *args: Arguments of the metric.
        gather: ``"states"``: each rank updates on its own rows and the states are reduced over ranks, by the reductions of ``add_state``.
            ``"inputs"``: the rows are gathered first, and every rank updates on all of them, for an update that depends on the whole
            batch. ``"auto"``: ``"inputs"`` for the metrics of torchmetrics that need it, otherwise ``"states"``.
        keep_graph: Whether ``update`` keeps its graph, so that ``compute`` after several updates has a gradient. ``compute`` then detaches
            the accumulated states. If False, only ``forward`` has a gradient.
        **kwargs: Options of ``torchmetrics.Metric``, including ``process_group``.

    torchmetrics' ``dist_sync_fn`` is rejected, because a user's gather does not have the gradient of one process. A class also rejects
    ``dist_sync_on_step=False``, including for members of wrappers, because the value of one rank has a different gradient. ``synced``
    accepts both options.

    States reduced by "mean": ``forward`` of a metric with ``full_state_update = False`` accumulates the mean over the rows of all
    ranks. After ``update`` (or ``forward`` of another metric) each rank has the mean of its rows, and ``compute`` weights these by the
    ranks' rows since ``reset``. The result is equal to one process if each rank's share of the rows is the same in every update, and close
    to it otherwise.

    A rank without rows is not counted, even if the metric's update fails without rows.

    Gradient: after DDP's mean over ranks, the gradient of one process. Multiply the value by the same factor on every rank (a
        factor that differs is an error in the next call).

    Communication: ``forward`` and ``compute`` one handshake that contains the states, or one more collective for many of them.
        There is no barrier, and none in backward. ``update`` none. With ``gather="inputs"`` ``update`` is as ``forward``, and ``compute``
        none.

    Raises:
        ConfigurationError: for unsupported options, or for a value without gradient although an input requires one.
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
    _keep = False  # whether the class was created with without_gradient="keep"

    def __init__(self, *args: Any, gather: Gather = "auto", keep_graph: bool = False, **kwargs: Any) -> None:
        on_step = kwargs.pop("dist_sync_on_step", True)
        super().__init__(*args, **kwargs)
        self._set_up(gather=gather, keep_graph=keep_graph, on_step=on_step, expects_gradient=not self._keep)

    def _set_up(
        self, *, gather: Gather, keep_graph: bool, on_step: object = True, expects_gradient: bool = True
    ) -> None:
        """Add the record of this package to a metric that torchmetrics has initialised."""
        check_options(self, gather, on_step)
        if gather == "auto":
            gather = "inputs" if needs_whole_batch(self) else "states"
        self.dist_sync_on_step = True
        expects_gradient = expects_gradient and type(self).is_differentiable is not False
        self._record = MetricRecord(gather, keep_graph, expects_gradient, bool(set_by_update(self)))
        self._instance = Instance(self._title())

    # ------------------------------------------------------------------ forward

    @eager_recursive
    @torch.jit.unused
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the metric of the global batch with its gradient, and accumulate this batch for ``compute``.

        Args:
            *args: Arguments of ``update``: this rank's rows.
            **kwargs: Keyword arguments of ``update``.

        Returns:
            The value, as returned by ``compute``, equal on every rank.
        """
        if self._is_synced:
            raise TorchMetricsUserError(
                "The Metric shouldn't be synced when performing ``forward``. HINT: Did you forget to call ``unsync`` ?."
            )
        return run_forward(self, self._title("forward"), args, kwargs)

    def _forward_calls(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ForwardCall]:
        return [ForwardCall(self, args, kwargs)]

    def _value_of(self, calls: Iterator[ForwardCall]) -> Any:
        return next(calls).value

    # ------------------------------------------------------------------ update, compute, sync

    def _wrap_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        plain = super()._wrap_update(update)

        @functools.wraps(update)
        def wrapped(*args: Any, **kwargs: Any) -> None:
            if self._record.in_forward:
                plain(*args, **kwargs)
                return
            with in_full_precision(self, self._title("update"), args, kwargs) as (cast_args, cast_kwargs, tensors):
                self._update_own(cast_args, cast_kwargs, tensors.parameters)

        return eager_recursive(wrapped)

    def _update_own(self, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Add a batch to the accumulated states, with a graph only if it is kept."""
        record = self._record
        given = inputs.tensors_in((args, kwargs))
        self._prepare(given, parameters)
        if record.gather == "inputs" and self._has_peers:
            packet = self._packet(_input_states(self, args, kwargs))
            (rows_of_all,) = exchange(self._title("update"), [packet], plans_of(self))
            args, kwargs = _with_rows(rows_of_all.states, args, kwargs)
        rows = inputs.num_rows(args, kwargs)
        may_skip = rows == 0 and self._may_skip(args, kwargs)
        self._enable_grad = record.keep_graph and torch.is_grad_enabled()
        record.in_forward = True  # the wrapped update then calls the plain one
        try:
            is_skipped = not self._update_rows(args, kwargs, may_skip=may_skip)
        finally:
            self._enable_grad, record.in_forward = False, False
        record.seen = self._seen_after(record.seen, rows, is_skipped, self._states())
        if rows == 0 and record.keep_graph:  # some metrics ignore an update without rows themselves
            record.inputs_without_rows += [tensor for tensor in given if tensor.requires_grad]
        if not record.keep_graph:  # items of a list may have their own graph
            self._assign(detached(self._states()))
            self._drop_graphs()

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        plain = super()._wrap_compute(compute)

        @functools.wraps(compute)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            has_value = self._computed is not None
            if self._record.in_forward or has_value:
                return plain(*args, **kwargs)
            is_shared = self._has_peers and self._to_sync
            dtype = precision.compute_dtype(inputs.tensors_in(self._states()))
            with precision.full_precision(dtype, [self.device.type]):
                value = plain(*args, **kwargs)
            if self._record.keep_graph:
                # the graph ends here, and accumulated states continue without it
                self._assign(detached(self._states()))
                value = autograd_graph.attach_zero_grad(value, self._record.inputs_without_rows, [])
                self._record.inputs_without_rows = []
                if is_shared:
                    value = self._record.upstream_grads.watch(value, group=self.process_group)
                self._computed = value if self.compute_with_cache else None
            return value

        return eager_recursive(wrapped)

    def _copy_state_dict(self) -> dict[str, Any]:
        """Return the states that ``unsync`` restores: this rank's own states, not copied."""
        return detached(self._states())

    def _sync_dist(
        self, dist_sync_fn: Callable[..., Any] | None = gather_all_tensors, process_group: Any | None = None
    ) -> None:
        """Replace the states by the states of all ranks. A list that is empty on all ranks stays an empty list, as in one process.

        Communication: one handshake, or one more collective.
        """
        if dist_sync_fn is not gather_all_tensors:
            _refuse_sync_fn(self, dist_sync_fn)
        group = process_group or self.process_group
        if process_groups.world_size(group) == 1 or self._record.gather == "inputs":
            return  # every rank already has the states of all rows
        self._exchange_states(self._title("compute"), group)

    def reset(self) -> None:
        """Reset the states to their defaults."""
        super().reset()
        if "_record" in self.__dict__:
            self._record.seen, self._record.inputs_without_rows = Seen(), []

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add the states of another metric of the same kind, differentiable or not, or a dict of them."""
        kind = next(cls for cls in type(self).__mro__ if not issubclass(cls, ExchangingMetric))
        if kind is Metric:
            kind = type(self)
        if isinstance(incoming_state, DifferentiableMetric):
            seen = self._record.seen
            self._record.seen = seen._replace(rows=seen.rows + incoming_state._record.seen.rows)
        if isinstance(incoming_state, Metric) and isinstance(incoming_state, kind):
            incoming_state = incoming_state.metric_state
        self.dist_sync_on_step = False  # torchmetrics checks it, but accumulated states are not synced by a merge
        try:
            super().merge_state(incoming_state)
        finally:
            self.dist_sync_on_step = True

    # ------------------------------------------------------------------ as a member of an exchange

    @property
    def _waits(self) -> bool:
        return super()._waits and self._record.gather == "states"

    def packet(self) -> Packet:
        """Return the states of everything since ``reset``, to be exchanged."""
        seen = self._record.seen
        untouched = self._update_count == seen.skipped
        return self._packet(self._to_send(seen.rows, untouched, self._split_by_update()))

    def _packet(self, states: Sequence[State]) -> Packet:
        record = self._record
        return Packet(
            states,
            self.process_group,
            record.configuration.read(self),
            self.sync_on_compute,
            record.upstream_grads.take(),
            self._instance,
            self if record.sets_attributes else None,
        )

    def _may_skip(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether an update is without rows while other ranks may have some."""
        batches = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim]
        is_empty = bool(batches) and all(batch.numel() == 0 for batch in batches)
        return is_empty and self._has_peers and self._record.gather == "states"


# ---------------------------------------------------------------------- a forward


class ForwardCall:
    """One forward of one metric: ``begin`` before the exchange, ``finish`` after it.

    Between the two calls the metric only holds this batch. ``end`` restores the accumulated states: including the batch if the forward
    succeeded, unchanged if it failed.

    Args:
        metric: The metric.
        args: Arguments of its update.
        kwargs: Keyword arguments of its update.

    Attributes:
        packet: Tensors to exchange. None without other ranks.
        value: The value, after ``finish``.
    """

    def __init__(self, metric: DifferentiableMetric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.metric = metric
        self.packet: Packet | None = None
        self.value: Any = None
        self._args, self._kwargs = args, kwargs
        self._given = inputs.tensors_in((args, kwargs))
        self._wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self._given)
        self._aside: Progress | None = None
        self._batch: States = {}
        self._accumulated: States | None = None
        self._rows, self._is_skipped = 0, False
        self._has_peers = False

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Update on this batch only. A metric that depends on the whole batch updates after the exchange of its inputs.

        Args:
            parameters: Parameters of all metrics of the call.
        """
        metric = self.metric
        metric._prepare(self._given, parameters)
        self._has_peers = metric._has_peers
        if self._has_peers and metric._record.gather == "inputs":
            self.packet = metric._packet(_input_states(metric, self._args, self._kwargs))
            return
        self._update()
        if self._has_peers:
            untouched = metric._update_count == int(self._is_skipped)
            self.packet = metric._packet(metric._to_send(self._rows, untouched))

    def _update(self) -> None:
        """Set the accumulated states aside, and update from the defaults."""
        metric, args, kwargs = self.metric, self._args, self._kwargs
        self._rows = inputs.num_rows(args, kwargs)
        may_skip = self._rows == 0 and metric._may_skip(args, kwargs)
        grad_enabled = torch.is_grad_enabled()
        before = metric._states()
        self._aside = Progress(before, metric._update_count, metric._record.seen)
        metric._record.in_forward = True
        # states that do not add up require a second update, on the accumulated states
        if not metric._adds_up():
            self._accumulated = metric._states_after(before, args, kwargs, may_skip=may_skip)
        metric._clear()
        metric._enable_grad = grad_enabled
        self._is_skipped = not metric._update_rows(args, kwargs, may_skip=may_skip)
        if self._accumulated is None:
            self._batch = metric._states()

    def finish(self, received: Received) -> None:
        """Compute the value of the global batch, and add the batch to the accumulated states.

        Args:
            received: Tensors of the packet from all ranks. Empty without a packet.
        """
        metric = self.metric
        record = metric._record
        # the rows or the states of all ranks, with this rank's graph
        if self.packet is not None and record.gather == "inputs":
            self._args, self._kwargs = _with_rows(received.states, self._args, self._kwargs)
            self._update()
        elif self.packet is not None:
            reduced = metric._receive(received)
            # a rank's share of the rows may differ between steps
            if metric.sync_on_compute and self._accumulated is None:
                for name in metric._means():
                    self._batch[name] = reduced[name]
        # the value of the global batch
        metric._assign({"_to_sync": False, "_should_unsync": False})
        value = metric.compute()
        if self._wants_gradient:
            value = self._count_in_window(value)
        self._accumulate()
        self.end()
        # its gradient
        expects_gradient = record.expects_gradient
        if self._wants_gradient and self._rows == 0 and expects_gradient:  # takes part in backward, like its peers
            value = self._with_zero_grad(value)
        tensors = inputs.tensors_in(value)
        has_gradient = any(tensor.requires_grad for tensor in tensors)
        if self._wants_gradient and expects_gradient and not has_gradient:
            raise ConfigurationError(
                f"{metric._title()}: value",
                expected="a gradient, as an input asks for one",
                got="none, in one process either: it is computed from ranks, counts or decisions",
                fix="Log it without gradient: differentiable(metric, without_gradient='keep').",
            )
        # other ranks have the same value: watch its upstream gradient
        metric._forward_cache = inputs.map_tensors(Tensor.detach, value)
        if self._has_peers:
            for tensor in tensors:
                remember_global_value(tensor)
            value = record.upstream_grads.watch(value, group=metric.process_group)
        self.value = value

    def _accumulate(self) -> None:
        """Add the batch to the states that were set aside."""
        metric, aside, states = self.metric, self._aside, self._accumulated
        assert aside is not None  # by _update
        metric._update_count = aside.update_count + 1
        if states is None:
            metric._assign(detached(self._batch))
            metric._reduce_states(aside.states)
            states = metric._states()
        seen = metric._seen_after(aside.seen, self._rows, self._is_skipped, states)
        self._aside = Progress(states, aside.update_count + 1, seen)

    def end(self) -> None:
        """Restore the accumulated states. A second call has no effect."""
        metric, aside, self._aside = self.metric, self._aside, None
        if aside is None:
            return
        flags = {"_to_sync": metric.sync_on_compute, "_should_unsync": True, "_enable_grad": False, "_is_synced": False}
        metric._assign({**aside.states, **flags, "_update_count": aside.update_count, "_computed": None})
        metric._put_back_attributes()
        metric._record.seen, metric._record.in_forward = aside.seen, False
        metric._drop_graphs()

    def _count_in_window(self, value: Any) -> Any:
        """Register a mean over rows as a part of an accumulation window's value."""
        window, metric = current_window(), self.metric
        if window is None or not isinstance(value, Tensor):
            return value
        title = metric._title()
        if _class_before_conversion(metric) in _WINDOW_METRICS and getattr(metric, "squared", True):
            counted = metric.total
            assert isinstance(counted, Tensor)
            total = float(counted)
            if not total:  # a mean without rows does not have a gradient
                value = value.detach()
                return self._with_zero_grad(torch.zeros_like(value) if window.gives_shares else value)
            # one mean for each output
            parts = [WindowPart("mean", total)] * value.numel()
            return window.enter(metric, title, parts, process_groups.members(metric.process_group)).mark(value)
        name_value(value, title)
        return value

    def _with_zero_grad(self, value: Any) -> Any:
        return autograd_graph.attach_zero_grad(value, [t for t in self._given if t.requires_grad], [])


def run_forward(owner: Any, title: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward of a metric, or of all members of a composite in one exchange.

    Args:
        owner: The metric, composition or collection.
        title: Name of the operation, for messages.
        args: Arguments of the forward.
        kwargs: Keyword arguments of the forward.
    """
    with in_full_precision(owner, title, args, kwargs) as (cast_args, cast_kwargs, tensors):
        forwards = owner._forward_calls(cast_args, cast_kwargs)
        for together in _rounds(forwards):
            try:
                for forward in together:
                    forward.begin(tensors.parameters)
                packets = [forward.packet for forward in together if forward.packet is not None]
                exchanged = iter(exchange(title, packets, plans_of(owner)))
                for forward in together:
                    forward.finish(Received([]) if forward.packet is None else next(exchanged))
            finally:  # restore the states of every metric, even if another metric fails
                for forward in together:
                    forward.end()
        value = owner._value_of(iter(forwards))
        trainable = [parameter for parameter in tensors.parameters if parameter.requires_grad]
        if trainable and torch.is_grad_enabled():
            value = autograd_graph.attach_zero_grad(value, trainable, tensors.given)
    return value


def _rounds(forwards: Sequence[ForwardCall]) -> list[Collection[ForwardCall]]:
    """Return the forwards that run together: a metric shared by several members takes part once in each round."""
    rounds: list[dict[int, ForwardCall]] = []
    for forward in forwards:
        key = id(forward.metric)
        free = next((of_round for of_round in rounds if key not in of_round), None)
        if free is None:
            free = {}
            rounds.append(free)
        free[key] = forward
    return [of_round.values() for of_round in rounds]


@contextlib.contextmanager
def in_full_precision(
    owner: Any, title: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], precision.CallTensors]]:
    """Compute in full precision inside the block, on the yielded arguments. An error on one rank is raised on all ranks.

    Args:
        owner: The metric, composition or collection. Its parameters and inputs determine the precision.
        title: Name of the operation, for messages.
        args: Arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    try:
        inputs.refuse_capture(title)
        tensors = precision.CallTensors.of(owner, args, kwargs)
        plan = _precision_plan(owner, tensors)
        if plan.is_full:
            yield args, kwargs, tensors
            return
        args, kwargs = precision.cast_floating((args, kwargs), plan.dtype)
        with (
            precision.full_precision(plan.dtype, plan.device_types),
            precision.cast_module(owner, plan.dtype),
        ):
            yield args, kwargs, tensors
    except Exception as error:  # an error raised equally by all ranks passes through
        if not owner._has_peers:
            raise
        handshake.raise_on_all_ranks(error, title, group=owner.process_group)


def _precision_plan(owner: Any, tensors: precision.CallTensors) -> autograd_graph.FullPrecisionPlan:
    """Return the precision plan of a call, computed once for each combination of dtypes, devices and modes of torch."""
    weights = [*tensors.parameters, *torch_compat.all_slots(tensors.modules, "buffers")]
    of_weights = [None if weight is None else weight.dtype for weight in weights]
    of_given = [(tensor.dtype, tensor.device.type) for tensor in tensors.given]
    signature = (*of_weights, *of_given, *modes_of_torch())
    plans: Plans[autograd_graph.FullPrecisionPlan] = vars(owner).setdefault("_precision_plans", Plans())
    plan = plans.get(signature)
    if plan is None:
        plan = autograd_graph.FullPrecisionPlan.of(tensors.modules, tensors.parameters, tensors.given)
        plans.add(signature, plan)
    return plan


def _input_states(metric: DifferentiableMetric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[State]:
    """Return the rows of an update as states to gather, without 0-dim tensors.

    Raises:
        InputError: for inputs that cannot be gathered.
    """
    what, got = f"{metric._title()}: inputs", "a list of str, which would stay on this rank"
    for value in (*args, *kwargs.values()):
        has_text = isinstance(value, (list, tuple)) and any(isinstance(item, str) for item in value)
        expect(not has_text, what, expected="tensors", got=got, fix="Use gather='states'.", error=InputError)
    batches = [tensor for tensor in inputs.tensors_in((args, kwargs)) if tensor.ndim]
    name = type(metric).__name__
    found = []
    for index, batch in enumerate(batches):
        found.append(State(f"{name}, input {index}", "rows", "dim_zero_cat", False, batch, batch.device, dim_zero_cat))
    return found


def _with_rows(rows: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of an update with the rows of all ranks in place of this rank's rows."""
    remaining = iter(rows)
    return inputs.map_tensors(lambda t: next(remaining) if t.ndim else t, (args, kwargs))


# ---------------------------------------------------------------------- options


def check_options(metric: DifferentiableMetric, gather: str, on_step: object) -> None:
    """Reject options that are incompatible with a value over all ranks.

    Raises:
        ConfigurationError: naming the option.
    """
    what = f"differentiable {type(metric).__name__}"
    expect_option(f"{what}: gather", gather, ("auto", "states", "inputs"))
    check_on_step(type(metric), on_step)
    expect(
        not metric.compute_on_cpu,
        f"{what}: compute_on_cpu",
        expected="False, with dist_sync_on_step as a loss",
        got="True, which takes the states of each step from their device",
        fix="Leave it out, or call differentiable on a metric that is made without it.",
    )
    _refuse_sync_fn(metric, metric.dist_sync_fn)
    metric._refuse_own_sync(what)


def _refuse_sync_fn(metric: DifferentiableMetric, dist_sync_fn: Callable[..., Any] | None) -> None:
    what, got = f"differentiable {type(metric).__name__}: dist_sync_fn", repr(dist_sync_fn)
    fix = "Leave it out: the states of all ranks travel in one exchange, among the ranks of process_group=."
    expect(dist_sync_fn is None, what, expected="None", got=got, fix=fix)


def check_on_step(cls: type, on_step: object) -> None:
    """Reject ``dist_sync_on_step`` unless it is True.

    Raises:
        ConfigurationError: quoting it.
    """
    what = f"differentiable {cls.__name__}: dist_sync_on_step"
    fix = "Leave it out, or use torchmetrics' own class for a value per rank."
    got = "False, which gives the gradient of this rank's rows alone" if on_step is False else repr(on_step)
    expect(on_step is True, what, expected="True", got=got, fix=fix)
