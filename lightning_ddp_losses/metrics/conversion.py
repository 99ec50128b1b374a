"""`differentiable`: a metric that exists already, as one that can be trained on.

A class gets a subclass of the same name that stands on ``DifferentiableMetric``, made once; an instance is copied and the
copy becomes of that class. So ``isinstance`` of the original class holds, and names in results and plots stay.

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
from typing import Any, Literal, TypeVar, overload

from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_ddp_losses.core import nests
from lightning_ddp_losses.errors import ConfigurationError, expect, expect_option
from lightning_ddp_losses.metrics.composites import COMPOSITES, Composite
from lightning_ddp_losses.metrics.metric import DifferentiableMetric, check_on_step, check_options
from lightning_ddp_losses.metrics.states import Gather, torchmetrics_names

M = TypeVar("M", bound="Metric | MetricCollection")
C = TypeVar("C", bound="type[Metric] | type[MetricCollection]")
WithoutGradient = Literal["refuse", "keep"]

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


def _metrics_inside(metric: nn.Module) -> list[nn.Module]:
    """Return the metric and all that it holds, each once; a collection's own ``modules`` may leave some out."""
    return [m for m in nn.Module.modules(metric) if isinstance(m, (Metric, MetricCollection))]


# ---------------------------------------------------------------------- refusals


def _refuse_class(cls: type, keep: bool) -> None:
    """Refuse a class that has no gradient, or that does things of its own that are not known here."""
    if issubclass(cls, (DifferentiableMetric, Composite)) or _base_for(cls) is not DifferentiableMetric:
        return
    reason = _reason_against(cls)  # type: ignore[arg-type]
    what, got = f"differentiable: {cls.__name__}", f"none, in one process either: {reason}"
    fix = "To log it next to others: differentiable(metric, without_gradient='keep')."
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
    if "_original" in cls.__dict__:
        return _class_of, (cls.__dict__["_original"], cls.__dict__["_keep"])
    return cls.__qualname__  # a subclass of the user's is found by its name, as any class


copyreg.pickle(_Generated, _reduce_class)
_class_by_original: dict[tuple[type, bool], type] = {}


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
        namespace = {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "_original": original,
            "_keep": keep,
        }
        if issubclass(base, Composite):
            namespace["__init__"] = _composite_init(original, keep)
        if _makes_other_classes(original):
            namespace["__new__"] = _new_of_made(original, keep)
        _class_by_original[original, keep] = _Generated(original.__name__, bases, namespace)
    return _class_by_original[original, keep]


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


def _word_for(keep: bool) -> WithoutGradient:
    return "keep" if keep else "refuse"


def _base_for(original: type) -> type:
    found = (composite for kind, composite in COMPOSITES.items() if issubclass(original, kind))
    return next(found, DifferentiableMetric)


def _composite_init(original: type, keep: bool) -> Any:
    """Return an ``__init__`` that makes the metrics among its arguments differentiable."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        args, kwargs = _differentiable_inside((args, kwargs), keep)
        original.__init__(self, *args, **kwargs)  # type: ignore[misc]

    init.__signature__ = inspect.signature(original.__init__)  # type: ignore[attr-defined, misc]
    return init


def _differentiable_inside(tree: Any, keep: bool) -> Any:
    """Return the same nest, its metrics differentiable."""
    if isinstance(tree, (Metric, MetricCollection)):
        return differentiable(tree, without_gradient=_word_for(keep))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_differentiable_inside(item, keep) for item in tree)
    if isinstance(tree, dict):
        return {key: _differentiable_inside(item, keep) for key, item in tree.items()}
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
    part.__class__ = _class_of(type(part))
    if isinstance(part, DifferentiableMetric):
        # dist_sync_on_step=False is torchmetrics' default there, not the user's wish
        part._set_up(gather=gather, keep_graph=keep_graph, on_step=True, expects_gradient=not keep)
    if isinstance(part, Metric):
        # torchmetrics wrapped the methods of the class that it was
        for name in ("update", "compute"):
            part.__dict__.pop(name, None)
        part.update = part._wrap_update(part.update)  # type: ignore[method-assign]
        part.compute = part._wrap_compute(part.compute)  # type: ignore[method-assign]
