"""Which loss allows which way of evaluating it over the ranks. Data, with the two calls that extend it.

``replicated`` is exact for every deterministic loss and needs no entry. ``rows``: the loss is a sum over anchors.
``elements``: the loss is a sum over samples. Measured on pytorch-metric-learning (PML) 2.9 in float64: sums and counts of
two unequal halves against the whole.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import pytorch_metric_learning.losses as pml
from torch import nn
from torch.nn.modules.loss import _Loss

from lightning_ddp_losses.errors import ConfigurationError

Mode = Literal["replicated", "rows", "elements"]
MODES: tuple[Mode, ...] = ("elements", "rows", "replicated")  # cheapest first

T = TypeVar("T", bound=type[nn.Module])

_ELEMENTS: set[type] = {
    pml.ArcFaceLoss,
    pml.CosFaceLoss,
    pml.LargeMarginSoftmaxLoss,
    pml.NormalizedSoftmaxLoss,
    pml.ProxyNCALoss,
    pml.SoftTripleLoss,
    pml.SphereFaceLoss,
    pml.SubCenterArcFaceLoss,
}
_ROWS: set[type] = {
    pml.AngularLoss,
    pml.CircleLoss,
    pml.ContrastiveLoss,
    pml.GeneralizedLiftedStructureLoss,
    pml.MarginLoss,
    pml.MultiSimilarityLoss,
    pml.NTXentLoss,
    pml.SignalToNoiseRatioContrastiveLoss,
    pml.SupConLoss,
    pml.TripletMarginLoss,
    pml.TupletMarginLoss,
}
_FEW = 256
# what PML computes for every pair of pairs, or for every triplet, is sooner worth sharing
_FEW_OF: dict[type, int] = {
    pml.AngularLoss: 128,
    pml.ContrastiveLoss: 192,
    pml.MarginLoss: 64,
    pml.MultiSimilarityLoss: 192,
    pml.NTXentLoss: 32,
    pml.SupConLoss: 192,
    pml.TripletMarginLoss: 64,
    pml.TupletMarginLoss: 32,
}
# torch losses whose mean is not a sum over elements divided by a count or a weight
_TORCH_REPLICATED: set[type] = {nn.CTCLoss}


def register_element_wise(cls: T) -> T:
    """Declare that a loss is a sum over samples: its rows need no other rank's rows (usable as a decorator).

    The class must offer PML's ``compute_loss`` with a reducer, or torch's ``reduction`` attribute. Verify the claim with
    ``check_separable``.
    """
    _ELEMENTS.add(_checked(cls, "register_element_wise"))
    return cls


def register_row_separable(cls: T) -> T:
    """Declare that a PML-style loss is a sum over anchors, each of which may look at all rows (usable as a decorator).

    The class must accept ``ref_emb`` and ``ref_labels`` in ``compute_loss``. Verify the claim with ``check_separable``.
    """
    _ROWS.add(_checked(cls, "register_row_separable"))
    return cls


def allowed_modes(loss: nn.Module) -> tuple[Mode, ...]:
    """Exact modes of a loss by its class, cheapest first. A subclass with a different formula has no entry of its own."""
    cls = type(loss)
    if cls in _ELEMENTS or (
        issubclass(cls, _Loss) and cls.__module__.startswith("torch.") and cls not in _TORCH_REPLICATED
    ):
        return ("elements", "replicated")
    if cls in _ROWS:
        return ("rows", "replicated")
    return ("replicated",)


def few_rows(loss: nn.Module) -> int:
    """Global rows up to which every rank computes the whole loss faster than it meets the others once more (measured, W = 2)."""
    return _FEW_OF.get(type(loss), _FEW)


def _checked(cls: T, what: str) -> T:
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigurationError(what, expected="a subclass of torch.nn.Module", got=repr(cls))
    return cls
