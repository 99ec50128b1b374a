"""Which losses are evaluated in tiles, as they are configured, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_ddp_losses.losses.pml_registry import DISTANCES, Reduction, pair_loss_of, reduction_of
from lightning_ddp_losses.losses.tiled.pair_losses import PairLoss

_REFERENCES = (("ref_emb", "embeddings"), ("ref_labels", "labels"))


@dataclass(frozen=True)
class TiledPlan:
    """How a loss is evaluated in tiles.

    Attributes:
        pair_loss: The loss on tiles.
        reductions: One per sub-loss.
        symmetric: Between rows of one batch, the gradient of transposed entries needs no gradient from other ranks.
    """

    pair_loss: type[PairLoss]
    reductions: tuple[Reduction, ...]
    symmetric: bool

    def is_symmetric(self, given: Mapping[str, Any], *, two_views: bool) -> bool:
        """Tells whether a call with these arguments compares the rows of one batch with each other.

        Args:
            given: The arguments by name.
            two_views: The embeddings are both views of each sample, which need no labels.
        """
        if two_views:
            return self.symmetric
        if not self.symmetric or "indices_tuple" in given:
            return False
        if not isinstance(given.get("embeddings"), Tensor) or not isinstance(given.get("labels"), Tensor):
            return False
        return all(given.get(reference, given[own]) is given[own] for reference, own in _REFERENCES)


def tiled_plan(loss: Any) -> TiledPlan | None:
    """Plans how tiles evaluate a loss as it is configured; None: they do not."""
    pair_loss: type[PairLoss] | None = pair_loss_of(loss)
    if pair_loss is None or type(loss.distance) not in DISTANCES or _learns(loss) or not pair_loss.supports(loss):
        return None
    reductions = []
    for name in pair_loss.sub_losses:
        reduction = reduction_of(loss.reducer, name)
        if reduction is None or reduction.given_divisor or not pair_loss.supports_reduction(reduction):
            return None
        reductions.append(reduction)
    symmetric = pair_loss.symmetric and DISTANCES[type(loss.distance)].symmetric
    return TiledPlan(pair_loss, tuple(reductions), symmetric)


def _learns(loss: Any) -> bool:
    """Tells whether someone made a temperature or margin a tensor, which may want a gradient; pair losses take numbers."""
    held = [*loss.parameters(), *vars(loss).values(), *vars(loss.distance).values()]
    return any(isinstance(value, Tensor) for value in held)
