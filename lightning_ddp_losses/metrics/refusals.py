"""What cannot be trained on, and why; which metrics look at the whole batch; options that do not go with a loss.

The names are torchmetrics' own, which marks metrics of labels as differentiable too. A metric that is not listed is taken as
it says of itself, and found out at its first value if it has no gradient after all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchmetrics import Metric

from lightning_ddp_losses.errors import ConfigurationError

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
