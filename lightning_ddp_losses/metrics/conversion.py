"""`differentiable` and `synced`: a metric that exists already, as one that can be trained on, or as one that is synced in one exchange.

A class gets a subclass of the same name that stands on ``DifferentiableMetric`` or ``SyncedMetric``, made once; an instance is copied and
the copy becomes of that class. So ``isinstance`` of the original class holds, and names in results and plots stay.

What cannot be trained on, and why, is in ``WITHOUT_GRADIENT``. The names are torchmetrics' own, which marks metrics of labels as
differentiable too (1.9, measured 2026). A metric that is not listed is taken as it says of itself, and found out at its first value
if it has no gradient after all.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
from abc import ABCMeta
from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

from torch import nn
from torchmetrics import Metric, MetricCollection, MetricTracker

from lightning_ddp_losses.core import nests
from lightning_ddp_losses.errors import ConfigurationError, expect, expect_option
from lightning_ddp_losses.metrics.composites import COMPOSITES, Composite, Members
from lightning_ddp_losses.metrics.metric import DifferentiableMetric, check_on_step, check_options
from lightning_ddp_losses.metrics.states import ExchangingMetric, Gather, torchmetrics_names
from lightning_ddp_losses.metrics.synced import SYNCED_COMPOSITES, SyncedMetric

M = TypeVar("M", bound="Metric | MetricCollection")
C = TypeVar("C", bound="type[Metric] | type[MetricCollection]")
S = TypeVar("S", bound="Metric | MetricCollection | MetricTracker")
T = TypeVar("T", bound="type[Metric] | type[MetricCollection] | type[MetricTracker]")
WithoutGradient = Literal["refuse", "keep"]
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
"""torchmetrics marks these as differentiable; there is no gradient, in one process either."""


@overload
def differentiable(
    metric: M, *, gather: Gather = ..., keep_graph: bool = ..., without_gradient: WithoutGradient = ...
) -> M: ...
@overload
def differentiable(metric: C, *, without_gradient: WithoutGradient = ...) -> C: ...
def differentiable(  # type: ignore[misc]
    metric: Metric | MetricCollection | type[Metric] | type[MetricCollection],
    *,
    gather: Gather = "auto",
    keep_graph: bool = False,
    without_gradient: WithoutGradient = "refuse",
) -> Metric:  # what it was given; a command line reads here that it makes metrics
    """Return a differentiable form of a metric: its value over all ranks, with the gradient of one process.

    Args:
        metric: An instance (copied with configuration, states, device and dtype; parameters are shared), a class, a
            ``MetricCollection``, a composition (``a + b``, ``2 * a``) or a wrapper (``MinMaxMetric``, ``MultioutputWrapper``,
            ``ClasswiseWrapper``, ``Running``, ``MultitaskWrapper``, input transformers).
        gather: As in ``DifferentiableMetric``.
        keep_graph: As in ``DifferentiableMetric``.
        without_gradient: ``"refuse"`` a metric that has no gradient in one process either; ``"keep"`` it, to be logged: its
            value is synced like the others'. Given with a class, it holds for all metrics that the class makes.

    Returns:
        An instance for an instance, a class for a class; also an instance of the class that it was.

    ``MinMaxMetric`` differs from torchmetrics' own (1.9) in one thing: there ``forward`` leaves only its own batch behind, so that
    ``compute`` after it gives the value of the last batch. Here it gives that of everything since ``reset``, as of any other metric.
    Before the first update both give the value of nothing: NaN or an error, by the metric inside.

    Communication: as ``DifferentiableMetric``; the members of a collection, composition or wrapper share one exchange.

    Raises:
        ConfigurationError: a metric that cannot be differentiated, by name and with the reason.

    Example:
        >>> import torch
        >>> from torchmetrics import PearsonCorrCoef
        >>> loss = 1 - differentiable(PearsonCorrCoef())
        >>> loss(torch.tensor([0.1, 0.2, 0.9], requires_grad=True), torch.tensor([0.0, 0.5, 1.0])).backward()
    """
    expect_option("differentiable: without_gradient", without_gradient, ("refuse", "keep"))
    keep = without_gradient == "keep"

    # a class: a differentiable subclass
    if isinstance(metric, type) and issubclass(metric, (Metric, MetricCollection)):
        _refuse_class(metric, keep)
        return _class_of(metric, keep)  # type: ignore[return-value]
    if not isinstance(metric, (Metric, MetricCollection)):
        raise ConfigurationError(
            "differentiable",
            expected="a metric or a collection of torchmetrics, or a class of them",
            got=type(metric).__name__,
            fix="Give it the metric that is inside.",
        )

    # an instance: a copy, and each metric inside it made one of such a class
    for part in _metrics_inside(metric):
        _refuse_class(type(part), keep)
    copied = _copy_of(metric)
    for part in _metrics_inside(copied):
        _convert_(part, gather=gather, keep_graph=keep_graph, keep=keep)
    return copied  # type: ignore[no-any-return]


@overload
def synced(metric: S) -> S: ...
@overload
def synced(metric: T) -> T: ...
def synced(metric: Any) -> Any:
    """Return the same metric for evaluation, but that all its states are synced over the ranks in one exchange.

    torchmetrics' ``compute`` hangs, or is wrong, if ranks hold other numbers of list states: three updates on one rank, one on another,
    none on a third. With this they may, and the value is that of one process that made the updates of all ranks.

    Args:
        metric: An instance (copied with its states; parameters are shared), a class, a ``MetricCollection``, a ``MetricTracker``, a
            wrapper, or a composition (``a + b``).

    Returns:
        An instance for an instance, a class for a class. Class for ``isinstance``, state dict, arguments and all methods are
        torchmetrics': ``sync_on_compute``, ``dist_sync_on_step``, ``process_group``, ``sync``, ``unsync``, ``merge_state``, the cache of
        ``compute``. One with a ``dist_sync_fn`` syncs by that, as in torchmetrics.

    States are joined by their own reduction; lists by update first, by rank second. A state reduced by "mean" is weighted by each rank's
    number of updates, as ``forward`` of torchmetrics does; so it is that of one process if every update has as many rows.
    ``Running`` keeps a window for each rank, and ``BootStrapper`` draws on each: their value is that of the joined states.

    ``compute`` keeps its value until the next update, as in torchmetrics. If you update some ranks only and compute again without
    ``reset``, make the metric with ``compute_with_cache=False``.

    Communication: ``compute`` (and ``forward`` with ``dist_sync_on_step=True``) one handshake with the states in it, or one more
        collective for many of them; so do all members of a collection or wrapper together, per process group.

    Raises:
        ConfigurationError: for a state that only stacks (a tensor with ``dist_reduce_fx=None``) if it is not known what joins the stack.
        RankMismatchError: on every rank, for states or metrics that differ, naming them.

    Example:
        >>> import torch
        >>> from torchmetrics.retrieval import RetrievalMAP
        >>> metric = synced(RetrievalMAP())
        >>> metric.update(torch.tensor([0.2, 0.9]), torch.tensor([True, False]), indexes=torch.tensor([0, 0]))
        >>> metric.compute()
        tensor(0.5000)
    """
    if isinstance(metric, type) and issubclass(metric, _KINDS):
        return _synced_class(metric)
    expect(
        isinstance(metric, _KINDS),
        "synced",
        expected="a metric, collection or tracker of torchmetrics, or a class of them",
        got=getattr(metric, "__name__", type(metric).__name__),
        fix="Give it the metric that is inside.",
    )
    copied = _copy_of(metric)
    for part in _metrics_inside(copied):
        if isinstance(part, (ExchangingMetric, Members)):
            continue
        _rebind_(part, _synced_class(type(part)))
        if isinstance(part, SyncedMetric):
            part._set_up()
    return copied


def _metrics_inside(metric: nn.Module) -> list[nn.Module]:
    """Return the metric and all that it holds, each once; a collection's own ``modules`` may leave some out."""
    return [m for m in nn.Module.modules(metric) if isinstance(m, _KINDS)]


# ---------------------------------------------------------------------- refusals


def _refuse_class(cls: type, keep: bool) -> None:
    """Refuse a class that has no gradient, or that does things of its own that are not known here."""
    if issubclass(cls, (DifferentiableMetric, Composite)) or _base_for(cls) is not DifferentiableMetric:
        return
    reason = _reason_against(cls)  # type: ignore[arg-type]
    what, got = f"differentiable: {cls.__name__}", f"none, in one process either: {reason}"
    fix = (
        "To log it next to others: differentiable(metric, without_gradient='keep'). To train on it: GlobalBatchLoss(module) of a soft form "
        "(Dice, IoU), or a DifferentiableMetric of your own. Both are exact."
    )
    expect(reason is None or keep, what, expected="a metric with a gradient", got=got, fix=fix)
    own = next((c for c in cls.__mro__ if "forward" in vars(c)), Metric)
    expected = "torchmetrics' own forward, or a wrapper that is known here"
    fix = "Make the metric inside differentiable, or subclass DifferentiableMetric."
    expect(own is Metric, what, expected=expected, got=f"the forward of {own.__name__}", fix=fix)


def _reason_against(cls: type[Metric]) -> str | None:
    """Return why metrics of a class have no gradient, None if nothing is known against them."""
    known = [WITHOUT_GRADIENT[name] for name in torchmetrics_names(cls) if name in WITHOUT_GRADIENT]
    if known:
        return known[0]
    if cls.is_differentiable is False:
        return "torchmetrics says is_differentiable=False: it counts, ranks or decides"
    return None


# ---------------------------------------------------------------------- classes


class _Generated(ABCMeta):
    """The class of generated classes: they are pickled as what they were made of."""


def _reduce_class(cls: type) -> Any:
    # a subclass of the user's is found by its name, as any class
    return cls.__dict__.get("_remade_by", cls.__qualname__)


copyreg.pickle(_Generated, _reduce_class)
_class_by_original: dict[tuple[type, bool | Literal["synced"]], type] = {}


def _class_of(original: type, keep: bool = False) -> type:
    """Return the differentiable subclass of a class, made once; one that is differentiable itself stays.

    Args:
        original: The class.
        keep: Whether metrics of it may have no gradient, also those that they hold and those of other classes that calling it makes.
    """
    base = _base_for(original)
    bases: tuple[type, ...] = (base, original)
    if issubclass(original, (DifferentiableMetric, Composite)):
        if not keep or getattr(original, "_keep", False):
            return original
        if "_original" in original.__dict__:
            return _class_of(original.__dict__["_original"], keep)
        bases = (original,)  # one that the user wrote: all that changes is what it promises
    if (original, keep) not in _class_by_original:
        namespace = {"_original": original, "_keep": keep, "_remade_by": (_class_of, (original, keep))}
        if issubclass(base, Composite):
            convert = functools.partial(differentiable, without_gradient=_word_for(keep))
            namespace["__init__"] = _composite_init(original, convert)
        if _makes_other_classes(original):
            namespace["__new__"] = _new_of_made(original, keep)
        _class_by_original[original, keep] = _generated(original, bases, namespace)
    return _class_by_original[original, keep]


def _synced_class(original: type) -> type:
    """Return the subclass of a class whose states are synced in one exchange, made once; one that has an exchange stays."""
    if issubclass(original, (ExchangingMetric, Members)):
        return original
    if (original, "synced") not in _class_by_original:
        bases = (base for kind, base in SYNCED_COMPOSITES.items() if issubclass(original, kind))
        base: type = next(bases, SyncedMetric)
        namespace: dict[str, Any] = {"_remade_by": (_synced_class, (original,))}
        if issubclass(base, Members):
            namespace["__init__"] = _composite_init(original, synced)
        if issubclass(original, MetricCollection):
            namespace["add_metrics"] = _synced_add(original)
        if _makes_other_classes(original):
            namespace["__new__"] = _new_of_synced(original)
        _class_by_original[original, "synced"] = _generated(original, (base, original), namespace)
    return _class_by_original[original, "synced"]


def _generated(original: type, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return _Generated(original.__name__, bases, names | namespace)


def _makes_other_classes(original: type) -> bool:
    """Whether calling a class may make an instance of another: ``torchmetrics.HingeLoss`` and all that take a ``task``."""
    return any("__new__" in vars(base) for base in original.__mro__ if base is not object)


def _new_of_made(original: type, keep: bool) -> Any:
    """Return a ``__new__`` that makes what the class makes, and that differentiable."""

    @functools.wraps(original.__new__)
    def new(cls: type, *args: Any, gather: Gather = "auto", keep_graph: bool = False, **kwargs: Any) -> Any:
        check_on_step(original, kwargs.get("dist_sync_on_step", True))
        made = original.__new__(original, *args, **kwargs)
        if isinstance(made, original):  # of the class itself after all: __init__ follows
            return object.__new__(cls)
        check_options(made, gather)
        return differentiable(made, gather=gather, keep_graph=keep_graph, without_gradient=_word_for(keep))

    return new


def _new_of_synced(original: type) -> Any:
    """Return a ``__new__`` that makes what the class makes, and that synced."""

    @functools.wraps(original.__new__)
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        made = original.__new__(original, *args, **kwargs)
        # of the class itself after all: __init__ follows
        return object.__new__(cls) if isinstance(made, original) else synced(made)

    return new


def _synced_add(original: type[MetricCollection]) -> Any:
    """Return an ``add_metrics`` that syncs what is added."""

    @functools.wraps(original.add_metrics)
    def add_metrics(self: Any, metrics: Any, *additional_metrics: Metric) -> None:
        original.add_metrics(self, *_converted_inside((metrics, *additional_metrics), synced))

    return add_metrics


def _word_for(keep: bool) -> WithoutGradient:
    return "keep" if keep else "refuse"


def _base_for(original: type) -> type:
    found = (composite for kind, composite in COMPOSITES.items() if issubclass(original, kind))
    return next(found, DifferentiableMetric)


def _composite_init(original: type, convert: Callable[[Any], Any]) -> Any:
    """Return an ``__init__`` that converts the metrics among its arguments."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        args, kwargs = _converted_inside((args, kwargs), convert)
        original.__init__(self, *args, **kwargs)  # type: ignore[misc]

    init.__signature__ = inspect.signature(original.__init__)  # type: ignore[attr-defined, misc]
    return init


def _converted_inside(tree: Any, convert: Callable[[Any], Any]) -> Any:
    """Return the same nest, its metrics converted."""
    if isinstance(tree, _KINDS):
        return convert(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(_converted_inside(item, convert) for item in tree)
    if isinstance(tree, dict):
        return {key: _converted_inside(item, convert) for key, item in tree.items()}
    return tree


# ---------------------------------------------------------------------- instances


def _copy_of(metric: Any) -> Any:
    """Return a copy with its own states and the same parameters; what holds a graph is cut from it."""
    memo: dict[int, Any] = {id(p): p for p in metric.parameters()}
    for part in _metrics_inside(metric):
        attributes = vars(part)
        for tensor in nests.tensors_in(list(attributes.values())):
            if not tensor.is_leaf:
                memo[id(tensor)] = tensor.detach()
        group = attributes.get("process_group")
        memo[id(group)] = group  # a group of processes has no copy
    return copy.deepcopy(metric, memo)


def _convert_(part: nn.Module, *, gather: Gather, keep_graph: bool, keep: bool) -> None:
    """Make an instance one of the differentiable subclass of its class, in place."""
    if isinstance(part, DifferentiableMetric) and keep:  # a copy, made differentiable before or by its class
        part._record.expects_gradient = False
    if isinstance(part, (DifferentiableMetric, Composite)):
        return
    _rebind_(part, _class_of(type(part)))
    if isinstance(part, DifferentiableMetric):
        # dist_sync_on_step=False is torchmetrics' default there, not the user's wish
        part._set_up(gather=gather, keep_graph=keep_graph, on_step=True, expects_gradient=not keep)


def _rebind_(part: nn.Module, cls: type) -> None:
    """Make an instance one of a subclass of its class, in place."""
    part.__class__ = cls
    if isinstance(part, Metric):
        # torchmetrics wrapped the methods of the class that it was
        for name in ("update", "compute"):
            part.__dict__.pop(name, None)
        part.update = part._wrap_update(part.update)  # type: ignore[method-assign]
        part.compute = part._wrap_compute(part.compute)  # type: ignore[method-assign]
