"""What each of pytorch-metric-learning's class-weight losses does with a block of classes: the logits before the softmax.

All eight are ``logsumexp_j z_ij - z_iy`` for logits z that depend on one row and one class. They differ in the product of row and
class, its scale, and what happens to the target's logit. The margin, the distance and the norms are PML's own functions.

Legend: ``G`` rows, ``D`` embedding size, ``c`` classes of a block, ``K`` weight rows per class (sub-centers), ``n`` targets.
"""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning import distances, reducers, regularizers
from pytorch_metric_learning import losses as pml
from torch import Tensor

from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.losses.partial_sums import can_split, split

_MARGIN = (
    pml.ArcFaceLoss,
    pml.CosFaceLoss,
    pml.LargeMarginSoftmaxLoss,
    pml.SphereFaceLoss,
    pml.SubCenterArcFaceLoss,
)
_SUPPORTED = (*_MARGIN, pml.NormalizedSoftmaxLoss, pml.ProxyNCALoss, pml.SoftTripleLoss)
_DISTANCES = (
    distances.CosineSimilarity,
    distances.DotProductSimilarity,
    distances.LpDistance,
)


def supported() -> list[str]:
    """Names of the losses that have a head."""
    return sorted(cls.__name__ for cls in _SUPPORTED)


def head_of(loss: Any) -> Head:
    """The head of a loss.

    Raises:
        ConfigurationError: for a class or a distance that has none (a subclass may compute something else).
    """
    if type(loss) not in _SUPPORTED:
        raise ConfigurationError(
            "ClassShardedLoss: loss",
            expected=f"one of {', '.join(supported())}",
            got=type(loss).__name__,
            fix="Other losses run over the global batch in GlobalBatchLoss, with the whole weight on every rank.",
        )
    if type(loss.distance) not in _DISTANCES:
        raise ConfigurationError(
            f"ClassShardedLoss({type(loss).__name__}): distance",
            expected=f"one of {', '.join(d.__name__ for d in _DISTANCES)}",
            got=type(loss.distance).__name__,
        )
    return Head(loss)


class Head:
    """The logits of one loss.

    Args:
        loss: An instance of a supported class; its weight is not looked at.

    Attributes:
        weight_name: Name of the class weight in the loss.
        class_dim: Dimension of it that counts classes.
        per_class: K.
        has_margin: The target's logit is a function of its own, else the others' plus ``target_offset``.
        target_offset: Added to the target's logit.
        is_cosine: Logits are products of scaled rows with weight rows of length one.
        shown: What ``get_logits`` of the loss gives, over the logits of the softmax.
    """

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        cls = type(loss)
        self.weight_name = {pml.SoftTripleLoss: "fc", pml.ProxyNCALoss: "proxies"}.get(cls, "W")
        self.class_dim = 0 if cls is pml.ProxyNCALoss else 1
        self.per_class = int(getattr(loss, {pml.SoftTripleLoss: "centers_per_class"}.get(cls, "sub_centers"), 1))
        self.has_margin = cls in _MARGIN
        self.target_offset = -float(loss.la * loss.margin) if cls is pml.SoftTripleLoss else 0.0
        self._norms_count = cls is pml.LargeMarginSoftmaxLoss
        self.shown = 1 / self._constant() if cls in (pml.SoftTripleLoss, pml.ProxyNCALoss) else 1.0
        dot = isinstance(loss.distance, distances.DotProductSimilarity) and loss.distance.power == 1
        self._linear = dot and cls is not pml.SoftTripleLoss  # the scale may go to the rows, which are fewer
        unit = loss.distance.p == 2 and (loss.distance.normalize_embeddings or cls is pml.NormalizedSoftmaxLoss)
        self.is_cosine = self._linear and unit and self.per_class == 1 and not self._norms_count

    def prepare(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Rows as they enter the product, (G, D), and what multiplies their logits, (G, 1) or (1, 1)."""
        loss = self._loss
        rows = loss.distance.maybe_normalize(embeddings)
        if type(loss) is pml.SphereFaceLoss:
            return rows, torch.norm(embeddings, p=2, dim=1, keepdim=True) * loss.scale
        if self._norms_count:
            return rows, loss.distance.get_norm(embeddings).unsqueeze(1) * loss.scale
        return rows, rows.new_full((1, 1), self._constant())

    def _constant(self) -> float:
        loss = self._loss
        sign = 1.0 if loss.distance.is_inverted else -1.0
        if type(loss) is pml.NormalizedSoftmaxLoss:
            return sign / float(loss.temperature)
        if type(loss) is pml.ProxyNCALoss:
            return sign * float(loss.softmax_scale)
        return float(loss.la if type(loss) is pml.SoftTripleLoss else loss.scale)

    def logits(self, rows: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        """Logits of a block of classes, no margin in them.

        Args:
            rows: (G, D) from ``prepare``.
            scale: (G, 1) or (1, 1) from ``prepare``.
            weight: (c * K, D).

        Returns:
            (G, c).
        """
        distance = self._loss.distance
        product = distance.compute_mat(rows * scale if self._linear else rows, self._normalised(weight))
        if distance.power != 1:
            product = product**distance.power
        if self.per_class > 1 or type(self._loss) is pml.SoftTripleLoss:
            product = self._over_centers(product.view(len(rows), -1, self.per_class))
        if self._norms_count:
            product = product * distance.get_norm(weight).unsqueeze(0)
        logits: Tensor = product if self._linear else product * scale
        return logits

    def targets(self, rows: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        """Logits of the target classes, with their margin.

        Args:
            rows: (n, D) from ``prepare``.
            scale: (n, 1) or (1, 1).
            weight: (n, K, D), the rows of each target class.

        Returns:
            (n,).
        """
        loss = self._loss
        flat = self._normalised(weight.reshape(-1, weight.shape[2])).view_as(weight)
        cosine = (rows.unsqueeze(1) * flat).sum(2)
        if loss.distance.power != 1:
            cosine = cosine**loss.distance.power
        cosine = cosine.max(1).values
        self._cast_constants(cosine)
        logit = loss.modify_cosine_of_target_classes(cosine)
        if self._norms_count:
            logit = logit * loss.distance.get_norm(weight[:, 0])
        scaled: Tensor = logit * scale.squeeze(1)
        return scaled

    def angles(self, own: Tensor) -> float:
        """Sum of the angles between the rows marked and their targets, in degrees, where the loss collects statistics."""
        count = int(own.sum()) if self._loss.collect_stats else 0
        return count * float(self._loss.avg_angle) if count else 0.0

    def _normalised(self, weight: Tensor) -> Tensor:
        distance = self._loss.distance
        unit = distance.normalize if type(self._loss) is pml.NormalizedSoftmaxLoss else distance.maybe_normalize
        return unit(weight)  # type: ignore[no-any-return]

    def _over_centers(self, product: Tensor) -> Tensor:
        if type(self._loss) is pml.SoftTripleLoss:
            return (torch.softmax(product * self._loss.gamma, dim=2) * product).sum(2)
        return product.max(2).values

    def _cast_constants(self, like: Tensor) -> None:
        # coefficients of the multiple-angle formula, which PML casts where it casts its weight
        for name in ("n_range", "margin_choose_n", "cos_powers", "alternating"):
            value = getattr(self._loss, name, None)
            if isinstance(value, Tensor):
                setattr(self._loss, name, value.to(like))


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
