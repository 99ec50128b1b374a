"""Regularisers of a class weight that lies on different ranks: those that are a sum over classes.

Legend: ``c`` classes of a block, ``K`` weight rows per class, ``D`` embedding size.
"""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning import reducers, regularizers
from torch import Tensor

from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.losses.partial_sums import can_split, split

_BY_ROW = (regularizers.LpRegularizer, regularizers.ZeroMeanRegularizer)


def penalty_of(loss: Any, per_class: int) -> ClassPenalty | None:
    """The weight regulariser of a loss; None without one.

    Raises:
        ConfigurationError: for one that compares classes with each other, which lie on different ranks.
    """
    regularizer = loss.weight_regularizer
    if not regularizer:
        return None
    known = type(regularizer) in (*_BY_ROW, regularizers.SparseCentersRegularizer)
    if not known or not can_split(regularizer.reducer) or isinstance(regularizer.reducer, reducers.PerAnchorReducer):
        names = ", ".join(cls.__name__ for cls in (*_BY_ROW, regularizers.SparseCentersRegularizer))
        raise ConfigurationError(
            f"ClassShardedLoss({type(loss).__name__}): weight_regularizer",
            expected=f"a sum over classes ({names}) with a reducer that can be split",
            got=f"{type(regularizer).__name__} with {type(regularizer.reducer).__name__}",
            fix="A regulariser that compares classes needs them all in one place: GlobalBatchLoss keeps the weight whole.",
        )
    return ClassPenalty(regularizer, float(loss.weight_reg_weight), per_class)


class ClassPenalty:
    """A regulariser on blocks of classes."""

    def __init__(self, regularizer: Any, weight: float, per_class: int) -> None:
        self._regularizer, self._weight, self._per_class = regularizer, weight, per_class

    def __call__(self, block: Tensor) -> tuple[Tensor, float]:
        """Summed terms of (c * K, D), and what they add to the divisor."""
        if type(self._regularizer) is regularizers.SparseCentersRegularizer:
            found = self._between_centers(block)
        else:
            found = self._regularizer.compute_loss(block)
        share = split(self._regularizer.reducer, found, block, None, 1)[0]
        return share.total, share.divisor

    def value(self, terms: Tensor, divisor: Tensor) -> Tensor:
        """The sub-loss, from the terms and divisors of all blocks of all ranks."""
        if type(self._regularizer.reducer) is reducers.SumReducer:
            return terms * self._weight
        return terms / divisor.clamp(min=1) * self._weight

    def _between_centers(self, block: Tensor) -> dict[str, Any]:
        """Pairs of centers of the same class, without PML's mask over all pairs of centers."""
        unit = self._regularizer.distance.maybe_normalize(block).view(-1, self._per_class, block.shape[1])
        pairs = torch.triu_indices(self._per_class, self._per_class, offset=1, device=block.device)
        cosine = (unit @ unit.transpose(1, 2))[:, pairs[0], pairs[1]].reshape(-1) ** self._regularizer.distance.power
        terms = torch.sqrt(2.0 + torch.finfo(block.dtype).tiny - torch.clamp(2.0 * cosine, max=2))
        index = torch.arange(len(terms), device=block.device)
        info = {"losses": terms, "indices": index, "reduction_type": "element", "divisor": 2 * len(terms)}
        return {"loss": info}
