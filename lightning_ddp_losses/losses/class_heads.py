"""Logits of pytorch-metric-learning's (PML's) class-weight losses on a block of classes, and their weight regulariser.

All eight losses are ``logsumexp_j z_ij - z_iy`` for logits z that depend on one row and one class. They differ in the product of row and
class, its scale, and the target's logit. ``pml_registry`` maps each loss to its head. Margins, distances and norms are computed by PML's
functions (as of PML 2.9), so that fixes in PML also apply here.

To add a loss, name its head in its row of ``pml_registry.LOSSES``, and write a subclass of ``Head`` if its logits differ.

Legend: ``G`` rows, ``D`` embedding size, ``c`` classes of a block, ``K`` weight rows per class (sub-centers), ``n`` targets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.errors import ConfigurationError, expect
from lightning_ddp_losses.losses import pml_registry
from lightning_ddp_losses.losses.element_losses import partial_sums_of
from lightning_ddp_losses.losses.products.operands import SMALLEST_LENGTH, unit_rows

# these distances do not create D numbers for each pair of a row and a class
_DISTANCES = [cls for cls, facts in pml_registry.DISTANCES.items() if facts.form != "differences"]


class Head:
    """Computes the logits of one loss, without a margin.

    Args:
        loss: An instance of a class that has a head. Its weight is not read.

    Attributes:
        weight_name: Name of the class weight in the loss.
        class_dim: Dimension of the classes in the weight.
        counts_only_anchors: True if a miner determines only the weights of anchors, and not of positives and negatives.
        has_row_scale: True if logits are proportional to the length of the row, which ``prepare`` does not normalize.
        drops_improbable_rows: True if a row does not have a loss when its probability rounds to zero.
        has_margin: True if the target's logit is a separate function (``targets``). Otherwise it is the usual logit plus ``target_offset``.
        per_class: K.
        is_cosine: True if logits are one number times products of rows with weight rows of length one.
    """

    weight_name = "W"
    class_dim = 1
    counts_only_anchors = False
    has_row_scale = False
    drops_improbable_rows = False
    has_margin = False
    _centers_option = "sub_centers"
    _always_normalizes = False
    _norm_of_weight_counts = False
    _may_scale_rows = True
    _shows_products = False  # ``get_logits`` of the loss shows distances or similarities without their scale

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self.per_class = int(getattr(loss, self._centers_option, 1))
        distance = loss.distance
        is_dot_product = pml_registry.DISTANCES[type(distance)].form == "product" and distance.power == 1
        self._scales_rows = is_dot_product and self._may_scale_rows  # rows are fewer than logits
        has_unit_rows = distance.p == 2 and (distance.normalize_embeddings or self._always_normalizes)
        is_plain = self.per_class == 1 and not self._norm_of_weight_counts
        self.is_cosine = self._scales_rows and has_unit_rows and is_plain

    @property
    def is_one_product(self) -> bool:
        """Whether logits are one number times cosines, which can run on tensor cores."""
        return self.is_cosine and not self.has_row_scale

    @property
    def scale(self) -> float:
        """Factor of the logits of all rows."""
        return float(self._loss.scale)

    @property
    def target_offset(self) -> float:
        """Number added to the target's logit."""
        return 0.0

    @property
    def output_scale(self) -> float:
        """Ratio of the result of the loss's ``get_logits`` to the logits of the softmax."""
        return 1 / self.scale if self._shows_products else 1.0

    def prepare(self, embeddings: Tensor) -> Tensor:
        """Return the rows in the form used in the product, (G, D)."""
        distance = self._loss.distance
        if distance.normalize_embeddings and distance.p == 2:
            return unit_rows(embeddings)
        return distance.maybe_normalize(embeddings)  # type: ignore[no-any-return]

    def logits(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Compute the logits of a block of classes, without a margin.

        No step may save its result for backward, because the caller overwrites it.

        Args:
            rows: (G, D) from ``prepare``.
            weight: (c * K, D).

        Returns:
            (G, c).
        """
        distance, scale = self._loss.distance, self.scale
        if self._scales_rows:
            rows = rows * scale
        product: Tensor = distance.compute_mat(rows, self.normalized(weight))
        if distance.power != 1:
            product = product**distance.power
        product = self.over_centers(product)
        if not self._scales_rows:
            product = product * scale
        return product

    def normalized(self, weight: Tensor) -> Tensor:
        """Return weight rows in the form used in the product."""
        return self._loss.distance.maybe_normalize(weight)  # type: ignore[no-any-return]

    def over_centers(self, product: Tensor) -> Tensor:
        """Reduce products (G, c * K) with weight rows to the product (G, c) with the best center of each class."""
        if self.per_class == 1:
            return product
        return product.view(len(product), product.shape[1] // self.per_class, self.per_class).max(2).values

    def targets(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Compute the logits of the target classes: the margin applied to the best center's cosine, times the scale.

        Args:
            rows: (n, D) from ``prepare``.
            weight: (n, K, D), the rows of each target class.

        Returns:
            (n,).
        """
        return self.with_margin(self.cosines(rows, weight)) * self.scale

    def cosines(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Compute the largest cosine (n,) of each row with the centers of its target class."""
        flat = self.normalized(weight.reshape(-1, weight.shape[2]))
        cosine = (rows.unsqueeze(1) * flat.view_as(weight)).sum(2)
        if self._loss.distance.power != 1:
            cosine = cosine**self._loss.distance.power
        return cosine.squeeze(1) if self.per_class == 1 else cosine.max(1).values

    def with_margin(self, cosines: Tensor) -> Tensor:
        """Apply the margin to (n,) cosines of rows with their target classes, for heads with a margin."""
        raise NotImplementedError

    @property
    def collects_angles(self) -> bool:
        """Whether PML stores the mean angle of the rows in the last call of ``targets``."""
        return bool(self._loss.collect_stats)

    def angle_sum(self, count: int) -> float:
        """Return the sum of the angles, in degrees, between ``count`` rows and their targets. 0 unless the loss collects statistics."""
        if not self._loss.collect_stats or not count:
            return 0.0
        # PML stores the mean over the last call of ``with_margin``
        return count * float(self._loss.avg_angle)


class MarginHead(Head):
    """ArcFace, CosFace, SubCenterArcFace: PML applies a margin between a row and its class."""

    has_margin = True

    def with_margin(self, cosines: Tensor) -> Tensor:
        """Apply PML's margin to cosines."""
        # coefficients of the multiple-angle formula, which PML casts together with its weight
        for name in ("n_range", "margin_choose_n", "cos_powers", "alternating"):
            value = getattr(self._loss, name, None)
            if isinstance(value, Tensor):
                setattr(self._loss, name, value.to(cosines))
        return self._loss.modify_cosine_of_target_classes(cosines)  # type: ignore[no-any-return]


class SphereFaceHead(MarginHead):
    """Logits depend on the length of the row but not on the length of the weight row."""

    has_row_scale = True

    def prepare(self, embeddings: Tensor) -> Tensor:
        """Return rows with a length such that the distance's power of it, a factor of their products, is the embedding's length."""
        lengths, power = self.row_norms(embeddings), self._loss.distance.power
        if power != 1:
            lengths = lengths.clamp_min(SMALLEST_LENGTH) ** (1 / power)
        return super().prepare(embeddings) * lengths.unsqueeze(1)

    def targets(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Apply the margin between rows of length one and the weight rows, and multiply by the lengths of the embeddings."""
        distance = self._loss.distance
        lengths: Tensor = distance.get_norm(rows)
        if distance.power != 1:
            lengths = lengths**distance.power
        return super().targets(super().prepare(rows), weight) * lengths

    def row_norms(self, embeddings: Tensor) -> Tensor:
        """Return the lengths (G,)."""
        return torch.norm(embeddings, p=2, dim=1)  # type: ignore[no-any-return]


class LargeMarginHead(SphereFaceHead):
    """Logits depend on the lengths of both rows and weight rows."""

    _norm_of_weight_counts = True

    def row_norms(self, embeddings: Tensor) -> Tensor:
        """Return the lengths (G,), computed by the loss's distance."""
        return self._loss.distance.get_norm(embeddings)  # type: ignore[no-any-return]

    def logits(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply by the lengths of the weight rows."""
        return super().logits(rows, weight) * self._loss.distance.get_norm(weight)  # type: ignore[no-any-return]

    def targets(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply by the lengths of the weight rows."""
        return super().targets(rows, weight) * self._loss.distance.get_norm(weight[:, 0])  # type: ignore[no-any-return]


class NormalizedSoftmaxHead(Head):
    """A temperature instead of a scale. Weight rows have length one for any distance."""

    _always_normalizes = True

    @property
    def scale(self) -> float:
        """One over the temperature."""
        return _sign(self._loss.distance) / float(self._loss.temperature)

    def normalized(self, weight: Tensor) -> Tensor:
        """Return weight rows of length one."""
        return self._loss.distance.normalize(weight)  # type: ignore[no-any-return]


class ProxyHead(Head):
    """ProxyNCA: one proxy per class, stored as rows. PML's ``get_logits`` returns products without the scale."""

    weight_name = "proxies"
    class_dim = 0
    counts_only_anchors = True
    drops_improbable_rows = True
    _shows_products = True

    @property
    def scale(self) -> float:
        """PML's ``softmax_scale``."""
        return _sign(self._loss.distance) * float(self._loss.softmax_scale)


class SoftTripleHead(Head):
    """Several centers per class, averaged with softmax weights, and a constant margin."""

    weight_name = "fc"
    _centers_option = "centers_per_class"
    _may_scale_rows = False  # the softmax over centers uses products without the scale
    _shows_products = True

    @property
    def scale(self) -> float:
        """PML's ``la``."""
        return float(self._loss.la)

    @property
    def target_offset(self) -> float:
        """The margin, in units of the logits."""
        return -float(self._loss.la * self._loss.margin)

    def over_centers(self, product: Tensor) -> Tensor:
        """Return the mean over a class's centers, weighted by their softmax."""
        product = product.view(len(product), product.shape[1] // self.per_class, self.per_class)
        share = torch.softmax(product * self._loss.gamma, dim=2)
        return (share * product).sum(2)


def head_of(loss: Any) -> Head:
    """Return the head of a loss.

    Raises:
        ConfigurationError: for an unsupported class or distance (including subclasses, which may compute something else).
    """
    head: type[Head] | None = pml_registry.head_class_of(loss)
    if head is None:
        known = sorted(kind.__name__ for kind, facts in pml_registry.LOSSES.items() if facts.head is not None)
        raise ConfigurationError(
            "ClassShardedLoss: loss",
            expected=f"one of {', '.join(known)}",
            got=type(loss).__name__,
            fix="Other losses run over the global batch in GlobalBatchLoss, with the whole weight on every rank.",
        )
    expect(
        type(loss.distance) in _DISTANCES,
        f"ClassShardedLoss({type(loss).__name__}): distance",
        expected=f"one of {', '.join(d.__name__ for d in _DISTANCES)}",
        got=type(loss.distance).__name__,
        fix="Pass `distance=` when you build the loss, or leave it out.",
    )
    return head(loss)


def _sign(distance: Any) -> float:
    """Return 1 for a similarity, -1 for a distance."""
    return 1.0 if distance.is_inverted else -1.0


# ---------------------------------------------------------------------- regularisers of the weight


def penalty_of(loss: Any, per_class: int) -> ClassPenalty | None:
    """Return the weight regularizer of a loss, or None if it does not have one.

    Raises:
        ConfigurationError: for a regularizer that compares classes with each other, which are on different ranks.
    """
    regularizer = loss.weight_regularizer
    if not regularizer:
        return None
    reducer, allowed = regularizer.reducer, pml_registry.CLASS_REGULARIZERS
    is_sum_over_classes = pml_registry.can_split(reducer) and not pml_registry.has_per_anchor(reducer)
    expect(
        is_sum_over_classes and type(regularizer) in allowed,
        f"ClassShardedLoss({type(loss).__name__}): weight_regularizer",
        expected=f"a sum over classes ({', '.join(cls.__name__ for cls in allowed)}) with a reducer that can be split",
        got=f"{type(regularizer).__name__} with {type(reducer).__name__}",
        fix="A regulariser that compares classes needs them all in one place: GlobalBatchLoss keeps the weight whole.",
    )
    return ClassPenalty(regularizer, float(loss.weight_reg_weight), per_class)


class ClassPenalty:
    """Evaluates a regularizer that is a sum over classes, block by block.

    Args:
        regularizer: The regularizer from PML.
        weight: Its factor in the loss.
        per_class: K.
    """

    def __init__(self, regularizer: Any, weight: float, per_class: int) -> None:
        self._regularizer, self._weight, self._per_class = regularizer, weight, per_class

    def __call__(self, block: Tensor) -> tuple[Tensor, float | Tensor]:
        """Return the sum of the terms of (c * K, D) weight rows, and their part of the divisor."""
        is_of_centers = pml_registry.CLASS_REGULARIZERS[type(self._regularizer)] == "centers"
        evaluate = self._between_centers if is_of_centers else self._regularizer.compute_loss
        elements = evaluate(block)
        part = partial_sums_of(self._regularizer.reducer, elements, block, None)[0]
        divisor = part.share_of(1)
        if isinstance(divisor, Tensor) and divisor.device.type == "cpu":
            divisor = divisor.item()
        return part.total, divisor

    def value(self, terms: Tensor, divisor: Tensor) -> Tensor:
        """Return the sub-loss, given the terms and divisors of all blocks of all ranks."""
        reduction = pml_registry.reduction_of(self._regularizer.reducer)
        if reduction is not None and reduction.plain_sum:
            return terms * self._weight
        return terms / divisor.clamp(min=1) * self._weight

    def _between_centers(self, block: Tensor) -> dict[str, Any]:
        """Compare centers of the same class, without PML's mask over all pairs of centers."""
        distance = self._regularizer.distance
        # cosines of all pairs of centers in a class
        unit = distance.maybe_normalize(block).view(-1, self._per_class, block.shape[1])
        first, second = torch.triu_indices(self._per_class, self._per_class, offset=1, device=block.device)
        cosine = (unit @ unit.transpose(1, 2))[:, first, second].reshape(-1) ** distance.power
        # distances, as computed by PML
        terms = torch.sqrt(2.0 + torch.finfo(block.dtype).tiny - torch.clamp(2.0 * cosine, max=2))
        index = torch.arange(len(terms), device=block.device)
        info = {"losses": terms, "indices": index, "reduction_type": "element", "divisor": 2 * len(terms)}
        return {"loss": info}


# ---------------------------------------------------------------------- options that cannot work


def refuse_options(num_classes: int, chunk_size: int | None, sample_rate: float, *, is_regularized: bool) -> None:
    """Reject an invalid chunk size or sample rate.

    Raises:
        ConfigurationError: with the name of the option.
    """
    is_whole = isinstance(chunk_size, int) and not isinstance(chunk_size, bool)
    is_chunk = chunk_size is None or (is_whole and 1 <= chunk_size <= num_classes)
    expected = f"1 to {num_classes} classes, or None"
    expect(is_chunk, "ClassShardedLoss: chunk_size", expected=expected, got=repr(chunk_size))
    expect(0 < sample_rate <= 1, "ClassShardedLoss: sample_rate", expected="above 0 and at most 1", got=sample_rate)
    expect(
        sample_rate == 1 or not is_regularized,
        "ClassShardedLoss: weight_regularizer",
        expected="none together with sample_rate below 1",
        got=f"one, and sample_rate={sample_rate}",
        fix="It would see the sampled classes only; use the optimizer's weight_decay, which the sampled rows get.",
    )


def refuse_with_replicas(title: str, loss: Any, sampler: Any) -> None:
    """Reject options with which subgroups would compute different results, if each subgroup holds all classes.

    Raises:
        ConfigurationError: on every rank.
    """
    regularizer, fix = getattr(loss, "embedding_regularizer", None), "Divide the classes over all ranks (group=None)."
    # with sampling, subgroups would draw different classes and step different rows of the same weights
    for option, unfit, allowed, got in (
        ("embedding_regularizer", regularizer, "none", type(regularizer).__name__),
        ("sample_rate", sampler, "1", getattr(sampler, "rate", 1)),
    ):
        expected = f"{allowed} where group= is a part of the ranks"
        expect(unfit is None, f"{title}: {option}", expected=expected, got=got, fix=fix)
