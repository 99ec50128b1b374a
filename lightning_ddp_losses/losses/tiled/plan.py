"""Which losses of pytorch-metric-learning (PML) have a tiled evaluation of their own, as they are configured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytorch_metric_learning import distances
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses.losses.tiled.accumulators import Reduction, reduction_of
from lightning_ddp_losses.losses.tiled.contrastive import Contrastive
from lightning_ddp_losses.losses.tiled.formula import Formula
from lightning_ddp_losses.losses.tiled.pair_losses import MultiSimilarity, NTXent, SupCon
from lightning_ddp_losses.losses.tiled.triplets import Triplets

TILED: dict[type[nn.Module], type[Formula]] = {
    pml.ContrastiveLoss: Contrastive,
    pml.MultiSimilarityLoss: MultiSimilarity,
    pml.NTXentLoss: NTXent,
    pml.SignalToNoiseRatioContrastiveLoss: Contrastive,
    pml.SupConLoss: SupCon,
    pml.TripletMarginLoss: Triplets,
}
_DISTANCES = (
    distances.CosineSimilarity,
    distances.DotProductSimilarity,
    distances.LpDistance,
    distances.SNRDistance,
)


@dataclass(frozen=True)
class Plan:
    """A tiled evaluation.

    Attributes:
        formula: The loss on tiles.
        reductions: One per sub-loss.
        symmetric: Between rows of one batch, the slope of transposed entries needs no gradient from other ranks.
    """

    formula: type[Formula]
    reductions: tuple[Reduction, ...]
    symmetric: bool

    def is_symmetric(self, given: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments compares the rows of one batch with each other."""
        own = isinstance(given.get("embeddings"), Tensor) and isinstance(given.get("labels"), Tensor)
        same = all(given.get(ref, given[name]) is given[name] for ref, name in _REFERENCES) if own else False
        return self.symmetric and same and "indices_tuple" not in given


_REFERENCES = (("ref_emb", "embeddings"), ("ref_labels", "labels"))


def plan_of(loss: Any) -> Plan | None:
    """How tiles evaluate a loss; None: they do not."""
    formula = TILED.get(type(loss))
    if formula is None or type(loss.distance) not in _DISTANCES or _learns(loss) or not formula.takes(loss):
        return None
    reductions = [reduction_of(loss.reducer, name) for name in formula.sub_losses]
    known = tuple(r for r in reductions if r is not None)
    if len(known) < len(reductions) or any(not formula.reduces(r) for r in known):
        return None
    return Plan(formula, known, formula.symmetric and type(loss.distance) is not distances.SNRDistance)


def _learns(loss: Any) -> bool:
    """A temperature or margin that someone made a tensor may want a gradient; the formulas take numbers."""
    held = [*loss.parameters(), *vars(loss).values(), *vars(loss.distance).values()]
    return any(isinstance(value, Tensor) for value in held)
