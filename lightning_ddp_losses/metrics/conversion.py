"""`differentiable` and `synced`: convert an existing metric to one that can be trained on, or that is synced in one exchange.

A class is converted to a subclass of the same name on top of ``DifferentiableMetric`` or ``SyncedMetric``, which is created once. An
instance is copied, and the copy is assigned that class. ``isinstance`` of the original class therefore holds, and names in results and
plots stay the same.

``WITHOUT_GRADIENT`` lists the metrics that cannot be trained on, with the reason. torchmetrics itself marks metrics of labels as
differentiable (1.9, measured 2026). For a metric that is not listed, torchmetrics' ``is_differentiable`` is used. If its first value still
does not have a gradient, an error is raised.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import warnings
from abc import ABCMeta
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, MetricTracker
from torchmetrics.metric import CompositionalMetric
from torchmetrics.retrieval.base import RetrievalMetric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean
from torchmetrics.utilities.distributed import gather_all_tensors
from torchmetrics.wrappers import ClasswiseWrapper, Running
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_ddp_losses.core import inputs
from lightning_ddp_losses.core.configuration import Configuration
from lightning_ddp_losses.distributed.messages import Instance
from lightning_ddp_losses.errors import ConfigurationError, expect, expect_option
from lightning_ddp_losses.metrics.attributes import set_by_update
from lightning_ddp_losses.metrics.composites import COMPOSITES, Classwise, Composite, Members, Windowed
from lightning_ddp_losses.metrics.exchange import Packet, Received
from lightning_ddp_losses.metrics.metric import DifferentiableMetric, check_on_step
from lightning_ddp_losses.metrics.states import ExchangingMetric, Gather, States, is_correlation, torchmetrics_names

AnyMetric: TypeAlias = (
    "Metric | MetricCollection | MetricTracker | type[Metric] | type[MetricCollection] | type[MetricTracker]"
)
M = TypeVar("M", bound=AnyMetric)
Conversion = Literal["refuse", "keep", "synced"]
"""Purpose of a conversion: ``differentiable`` with its ``without_gradient``, or ``synced``."""
_KINDS = (Metric, MetricCollection, MetricTracker)

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
"""Metrics that torchmetrics marks as differentiable although they do not have a gradient, not even in one process."""


def differentiable(
    metric: M,
    *,
    gather: Gather = "auto",
    keep_graph: bool = False,
    without_gradient: Literal["refuse", "keep"] = "refuse",
) -> M:
    """Return a differentiable form of a metric: its value over all ranks, with the gradient of one process.

    Args:
        metric: An instance (copied with configuration, states, device and dtype, and with shared parameters), a class, a
            ``MetricCollection``, a composition (``a + b``, ``2 * a``) or a wrapper (``MinMaxMetric``, ``MultioutputWrapper``,
            ``ClasswiseWrapper``, ``Running``, ``MultitaskWrapper``, input transformers).
        gather: As in ``DifferentiableMetric``.
        keep_graph: As in ``DifferentiableMetric``.
        without_gradient: ``"refuse"`` rejects a metric that does not have a gradient in one process either. ``"keep"`` keeps it for
            logging, with its value synced in the same way. If passed with a class, it applies to all metrics that the class creates.

    Returns:
        An instance for an instance, a class for a class. It is also an instance, or a subclass, of the original class.

    ``MinMaxMetric`` differs from torchmetrics' own (1.9) in one respect. In torchmetrics, ``forward`` leaves only its own batch in the
    states, so that a following ``compute`` returns the value of the last batch. After the conversion it returns the value of everything
    since ``reset``, like any other metric. Before the first update both return the value without data: NaN or an error, depending on the
    wrapped metric.

    Communication: as ``DifferentiableMetric``. The members of a collection, composition or wrapper share one exchange.

    Raises:
        ConfigurationError: for a metric that cannot be differentiated, with its name and the reason.

    Example:
        >>> import torch
        >>> from torchmetrics import PearsonCorrCoef
        >>> loss = 1 - differentiable(PearsonCorrCoef())
        >>> loss(torch.tensor([0.1, 0.2, 0.9], requires_grad=True), torch.tensor([0.0, 0.5, 1.0])).backward()
    """
    expect_option("differentiable: without_gradient", without_gradient, ("refuse", "keep"))
    _expect_metric("differentiable", metric, (Metric, MetricCollection), "a metric or a collection")
    if isinstance(metric, type):
        _refuse_class(metric, without_gradient)
        return _class_of(metric, without_gradient)  # type: ignore[return-value]
    for part in _metrics_inside(metric):
        _refuse_class(type(part), without_gradient)
    # in an instance, dist_sync_on_step=False is torchmetrics' default and was not necessarily chosen by the user
    expects_gradient = without_gradient == "refuse"
    options = {"gather": gather, "keep_graph": keep_graph, "on_step": True, "expects_gradient": expects_gradient}
    return _converted(metric, without_gradient, options)  # type: ignore[no-any-return]


def synced(metric: M) -> M:
    """Return the same metric for evaluation, with all its states synced over the ranks in one exchange.

    torchmetrics' ``compute`` hangs, or is wrong, if ranks hold different numbers of list states: three updates on one rank, one on another,
    none on a third. After the conversion this is supported, and the value is the value of a process that made the updates of all ranks.

    Args:
        metric: An instance (copied with its states and shared parameters), a class, a ``MetricCollection``, a ``MetricTracker``, a
            wrapper, or a composition (``a + b``).

    Returns:
        An instance for an instance, a class for a class. Class for ``isinstance``, state dict, arguments and all methods are
        torchmetrics': ``sync_on_compute``, ``dist_sync_on_step``, ``process_group``, ``sync``, ``unsync``, ``merge_state``, the cache of
        ``compute``. A metric with a ``dist_sync_fn`` syncs with that function, as in torchmetrics.

    States are joined by their own reduction, lists by update first, by rank second. A state reduced by "mean" is weighted by each rank's
    number of updates, as in torchmetrics' ``forward``. It is therefore equal to one process if every update has the same number of rows.
    ``Running`` keeps a window on each rank, and ``BootStrapper`` draws on each: their value is computed from the joined states.

    ``compute`` keeps its value until the next update, as in torchmetrics. If only some ranks update before the next ``compute``, without
    ``reset``, construct the metric with ``compute_with_cache=False``.

    Communication: ``compute`` (and ``forward`` with ``dist_sync_on_step=True``) one handshake that contains the states, or one more
        collective for many of them. All members of a collection or wrapper share it, per process group. Members of a compute group send
        their shared states once.

    Raises:
        ConfigurationError: for a state that is only stacked (a tensor with ``dist_reduce_fx=None``), unless the metric is known to join it.
        RankMismatchError: on every rank, for states or metrics that differ, naming them, and for several metrics of one class that ranks
            compute in a different order.

    Example:
        >>> import torch
        >>> from torchmetrics.retrieval import RetrievalMAP
        >>> metric = synced(RetrievalMAP())
        >>> metric.update(torch.tensor([0.2, 0.9]), torch.tensor([True, False]), indexes=torch.tensor([0, 0]))
        >>> metric.compute()
        tensor(0.5000)
    """
    _expect_metric("synced", metric, _KINDS, "a metric, collection or tracker")
    if isinstance(metric, type):
        return _class_of(metric, "synced")  # type: ignore[return-value]
    return _converted(metric, "synced", {})  # type: ignore[no-any-return]


for _function in (differentiable, synced):  # the command line learns from these annotations that both return metrics
    _function.__annotations__.update({"metric": "Metric | MetricCollection | type", "return": "Metric"})


# ---------------------------------------------------------------------- metrics that are synced in one exchange


class SyncedMetric(ExchangingMetric):
    """A metric of torchmetrics that syncs its states in one exchange, and is unchanged otherwise.

    torchmetrics gathers state by state, and a list without concatenation item by item: ranks with different numbers of updates wait for
    each other (its issue 3336). This class sends all states together with their lengths.
    """

    _configuration: Configuration
    _instance: Instance
    _has_warned = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._set_up()

    def _set_up(self) -> None:
        """Record the configuration before the first update, and reject states that cannot be joined."""
        self._refuse_own_sync(f"synced {type(self).__name__}")
        self._refuse_states()
        self._configuration = Configuration()
        self._configuration.read(self)
        self._sets_attributes = bool(set_by_update(self))
        self._instance = Instance(self._title())

    def _refuse_states(self) -> None:
        """Reject tensors that are only stacked (``compute`` of NormalizedRootMeanSquaredError fails on them, torchmetrics 1.9)."""
        if is_correlation(type(self)):
            return
        for name, reduce in self._reductions.items():
            if reduce is None and isinstance(getattr(self, name), Tensor):
                raise ConfigurationError(
                    f"synced {type(self).__name__}: state `{name}`",
                    expected="a list, or a tensor with a reduction",
                    got="a tensor with dist_reduce_fx=None: how to join those of all ranks is not known",
                    fix="Give add_state a reduction, or dist_reduce_fx=lambda stacked: stacked if compute joins them itself.",
                )

    def packet(self) -> Packet:
        """Return the states of everything since ``reset``, to be exchanged."""
        self._refuse_states()
        untouched = self._update_count == 0
        found = self._to_send(self._update_count, untouched)
        if untouched:  # states may have been loaded or merged without an update
            for index, (name, reduce) in enumerate(self._reductions.items()):
                if reduce is dim_zero_mean:
                    is_default = torch.equal(getattr(self, name), self._defaults[name])  # type: ignore[arg-type]
                    found[index] = found[index]._replace(weight=float(not is_default))
        configuration = self._configuration.read(self)
        return Packet(
            found,
            self.process_group,
            configuration,
            self.sync_on_compute,
            instance=self._instance,
            metric=self if self._sets_attributes else None,
        )

    def _sync_dist(
        self, dist_sync_fn: Callable[..., Any] | None = gather_all_tensors, process_group: Any | None = None
    ) -> None:
        if dist_sync_fn not in (None, gather_all_tensors):  # the user's gather
            super()._sync_dist(dist_sync_fn, process_group=process_group)
            return
        self._exchange_states(self._title("compute"), process_group or self.process_group)

    def _receive(self, received: Received) -> States:
        own = list(self.indexes) if isinstance(self, RetrievalMetric) else []
        reduced = super()._receive(received)
        if own and not self._has_warned:
            self._has_warned = _warn_of_shared_queries(self._title(), own, reduced["indexes"])
        for name, reduce in self._reductions.items():
            if reduce is dim_zero_cat and isinstance(reduced[name], list):  # all ranks are without rows
                setattr(self, name, torch.tensor([], device=self.device, dtype=self.dtype))
        return reduced

    @property
    def _waits(self) -> bool:
        return super()._waits and self.dist_sync_fn is None


def _warn_of_shared_queries(title: str, own: list[Tensor], everyone: list[Tensor]) -> bool:
    """Warn if rows of this rank's queries are also on other ranks, and return whether this is the case.

    Args:
        title: Name of the metric.
        own: Query number of each row of this rank, in pieces.
        everyone: The same for all ranks.
    """
    numbers = torch.cat(own)
    of_own_queries = torch.isin(torch.cat(everyone), numbers)
    elsewhere = int(of_own_queries.sum()) - len(numbers)
    if not elsewhere:
        return False
    warnings.warn(
        f"{title}: {elsewhere} rows of this rank's queries are on other ranks (equal numbers in `indexes`). That is right if candidates "
        "of a query are spread over ranks. If each rank has its own queries, number them apart: indexes + first_query_of_this_rank. "
        "If each rank updates with all rows, update with its own only, or each row counts once for each rank. "
        "More: ddp-losses explain retrieval",
        stacklevel=2,
    )
    return True


class SyncedTracker(Members):
    """A metric for each increment. ``compute`` returns the last one's value, and ``compute_all`` syncs all of them in one exchange."""

    def compute(self) -> Any:
        """Return the value of the last increment."""
        return super(Members, self).compute()  # type: ignore[misc]

    def compute_all(self) -> Any:
        """Return the values of all increments."""
        with self._in_one_exchange():
            return super().compute_all()  # type: ignore[misc]

    def _leaves(self) -> list[ExchangingMetric]:
        base = {id(leaf) for leaf in self._base_metric.modules()}  # type: ignore[attr-defined]
        return [leaf for leaf in super()._leaves() if id(leaf) not in base]


SYNCED_COMPOSITES: dict[type, type[Members]] = {
    MetricTracker: SyncedTracker,
    Running: Windowed,
    ClasswiseWrapper: Classwise,
    WrapperMetric: Members,
    CompositionalMetric: Members,
    MetricCollection: Members,
}
"""For each class of torchmetrics that is composed of metrics, the class that syncs its members. The first match is used."""


# ---------------------------------------------------------------------- refusals


def _expect_metric(what: str, metric: object, kinds: tuple[type, ...], described: str) -> None:
    """Reject an object that is neither a metric nor a class of metrics."""
    is_metric = issubclass(metric, kinds) if isinstance(metric, type) else isinstance(metric, kinds)
    expected = f"{described} of torchmetrics, or a class of them"
    got = getattr(metric, "__name__", type(metric).__name__)
    expect(is_metric, what, expected=expected, got=got, fix="Give it the metric that is inside.")


def _refuse_class(cls: type, conversion: Conversion) -> None:
    """Reject a class without a gradient, or with an unsupported forward."""
    if issubclass(cls, (DifferentiableMetric, Composite)) or _base_for(cls, conversion) is not DifferentiableMetric:
        return
    reasons = [WITHOUT_GRADIENT[name] for name in torchmetrics_names(cls) if name in WITHOUT_GRADIENT]
    if cls.is_differentiable is False:  # type: ignore[attr-defined]
        reasons.append("torchmetrics says is_differentiable=False: it counts, ranks or decides")
    what, got = f"differentiable: {cls.__name__}", f"none, in one process either: {' '.join(reasons[:1])}"
    fix = (
        "To log it next to others: differentiable(metric, without_gradient='keep'). To train on it: GlobalBatchLoss(module) of a soft form "
        "(Dice, IoU), or a DifferentiableMetric of your own. Both are exact."
    )
    expect(not reasons or conversion == "keep", what, expected="a metric with a gradient", got=got, fix=fix)
    own = next((c for c in cls.__mro__ if "forward" in vars(c)), Metric)
    expected = "torchmetrics' own forward, or a wrapper that is known here"
    fix = "Make the metric inside differentiable, or subclass DifferentiableMetric."
    expect(own is Metric, what, expected=expected, got=f"the forward of {own.__name__}", fix=fix)


# ---------------------------------------------------------------------- classes


class _Generated(ABCMeta):
    """The metaclass of generated classes, which are pickled by their original class."""


def _reduce_class(cls: type) -> Any:
    # a user's subclass is found by its name, like any class
    return cls.__dict__.get("_remade_by", cls.__qualname__)


copyreg.pickle(_Generated, _reduce_class)
_class_by_original: dict[tuple[type, Conversion], type] = {}


def _class_of(original: type, conversion: Conversion) -> type:
    """Return the converted subclass of a class, created once. A class that is already converted is returned unchanged.

    Args:
        original: The class.
        conversion: Conversion, also for the metrics that its instances hold, and for other classes that calling it instantiates.
    """
    base = _base_for(original, conversion)
    bases: tuple[type, ...] = (base, original)
    if _is_converted(original, conversion):
        if conversion != "keep" or getattr(original, "_keep", False):
            return original
        if "_original" in original.__dict__:
            return _class_of(original.__dict__["_original"], conversion)
        bases = (original,)  # defined by the user: only ``_keep`` changes
    if (original, conversion) not in _class_by_original:
        convert = synced if conversion == "synced" else functools.partial(differentiable, without_gradient=conversion)
        names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        namespace = {**names, "_original": original, "_keep": conversion == "keep"}
        namespace["_remade_by"] = (_class_of, (original, conversion))
        if issubclass(base, Members):
            namespace["__init__"] = _init_of_converted(original, convert)
        if conversion == "synced" and issubclass(original, MetricCollection):
            namespace["add_metrics"] = _add_of_converted(original, convert)
        if _makes_other_classes(original):
            namespace["__new__"] = _new_of_converted(original, convert)
        _class_by_original[original, conversion] = _Generated(original.__name__, bases, namespace)
    return _class_by_original[original, conversion]


def _base_for(original: type, conversion: Conversion) -> type:
    """Return the class of this package that a converted class is based on."""
    table: dict[type, Any] = SYNCED_COMPOSITES if conversion == "synced" else COMPOSITES
    found = (base for kind, base in table.items() if issubclass(original, kind))
    return next(found, SyncedMetric if conversion == "synced" else DifferentiableMetric)


def _is_converted(cls: type, conversion: Conversion) -> bool:
    converted = (ExchangingMetric, Members) if conversion == "synced" else (DifferentiableMetric, Composite)
    return issubclass(cls, converted)


def _makes_other_classes(original: type) -> bool:
    """Return whether calling a class may create an instance of another class, as for classes with a ``task``."""
    return any("__new__" in vars(base) for base in original.__mro__ if base is not object)


def _new_of_converted(original: type, convert: Callable[..., Any]) -> Any:
    """Return a ``__new__`` that converts the instance if the class creates one of another class."""

    @functools.wraps(original.__new__)
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        options = {}
        if convert is not synced:
            check_on_step(original, kwargs.get("dist_sync_on_step", True))
            options = {name: kwargs.pop(name) for name in ("gather", "keep_graph") if name in kwargs}
        made = original.__new__(original, *args, **kwargs)
        # __init__ follows for an instance of the class itself
        return object.__new__(cls) if isinstance(made, original) else convert(made, **options)

    return new


def _init_of_converted(original: type, convert: Callable[[Any], Any]) -> Any:
    """Return an ``__init__`` that converts the metrics among its arguments."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        args, kwargs = _converted_inside((args, kwargs), convert)
        original.__init__(self, *args, **kwargs)  # type: ignore[misc]

    init.__signature__ = inspect.signature(original.__init__)  # type: ignore[attr-defined, misc]
    return init


def _add_of_converted(original: type[MetricCollection], convert: Callable[[Any], Any]) -> Any:
    """Return an ``add_metrics`` that converts the added metrics."""

    @functools.wraps(original.add_metrics)
    def add_metrics(self: Any, metrics: Any, *additional_metrics: Metric) -> None:
        original.add_metrics(self, *_converted_inside((metrics, *additional_metrics), convert))

    return add_metrics


def _converted_inside(tree: Any, convert: Callable[[Any], Any]) -> Any:
    """Return the same nest with its metrics converted."""
    if isinstance(tree, _KINDS):
        return convert(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(_converted_inside(item, convert) for item in tree)
    if isinstance(tree, dict):
        return {key: _converted_inside(item, convert) for key, item in tree.items()}
    return tree


# ---------------------------------------------------------------------- instances


def _metrics_inside(metric: nn.Module) -> list[nn.Module]:
    """Return the metric and all metrics that it contains, each once. A collection's own ``modules`` may omit some."""
    return [m for m in nn.Module.modules(metric) if isinstance(m, _KINDS)]


def _converted(metric: Any, conversion: Conversion, options: dict[str, Any]) -> Any:
    """Return a converted copy of an instance. ``options`` are passed to the set-up of the metrics in it."""
    copied = _copy_of(metric)
    for part in _metrics_inside(copied):
        if _is_converted(type(part), conversion):
            if isinstance(part, DifferentiableMetric) and conversion == "keep":
                part._record.expects_gradient = False
            continue
        part.__class__ = _class_of(type(part), conversion)
        if isinstance(part, Metric):
            # torchmetrics wrapped the methods of the original class
            for name in ("update", "compute"):
                part.__dict__.pop(name, None)
            part.update = part._wrap_update(part.update)  # type: ignore[method-assign]
            part.compute = part._wrap_compute(part.compute)  # type: ignore[method-assign]
        if isinstance(part, (DifferentiableMetric, SyncedMetric)):
            part._set_up(**options)
    return copied


def _copy_of(metric: Any) -> Any:
    """Return a copy with separate states, shared parameters, and without a graph."""
    memo: dict[int, Any] = {id(p): p for p in metric.parameters()}
    for part in _metrics_inside(metric):
        attributes = vars(part)
        for tensor in inputs.tensors_in(list(attributes.values())):
            if not tensor.is_leaf:
                memo[id(tensor)] = tensor.detach()
        group = attributes.get("process_group")
        memo[id(group)] = group  # a process group cannot be copied
    return copy.deepcopy(metric, memo)
