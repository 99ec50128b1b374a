"""pytorch-metric-learning's losses on part of the anchors: the element losses before their reducer.

Legend: ``B`` rows on this rank, starting at global row ``offset``; ``G`` rows over all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning import distances, reducers
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses.losses.partial_sums import can_split
from lightning_ddp_losses.losses.pml_registry import Mode

Indices = tuple[Tensor, ...]

_TRIPLET_LOSSES = (pml.TripletMarginLoss, pml.MarginLoss)
# element losses of shape (n, 1)
_COLUMNS = (
    pml.AngularLoss,
    pml.CircleLoss,
    pml.GeneralizedLiftedStructureLoss,
    pml.MultiSimilarityLoss,
    pml.TupletMarginLoss,
)
_ROW_DISTANCES = (
    distances.CosineSimilarity,
    distances.DotProductSimilarity,
    distances.LpDistance,
    distances.SNRDistance,
)


def rows_are_exact(loss: nn.Module, mode: Mode) -> bool:
    """Whether this instance, of a class that allows ``mode``, is a sum that ``split`` can take apart."""
    if mode == "elements" and getattr(loss, "embedding_regularizer", None) is not None:
        return False  # a regulariser may look at the whole batch (zero mean)
    own = vars(loss)  # getattr of what a module has not is slow
    if own.get("triplets_per_anchor", "all") != "all":
        return False  # random: all ranks must draw the same
    if own.get("swap", False):
        return False  # looks up the distance of a positive, which may lie on another rank
    distance = getattr(loss, "distance", None)
    if distance is not None and type(distance) not in _ROW_DISTANCES:
        return False  # a user's distance may look at the whole batch
    reducer = getattr(loss, "reducer", None)
    if type(loss) in _COLUMNS and isinstance(reducer, nn.Module):
        # PML 2.9 multiplies these losses' column of elements by a row of class weights: a product of two means
        weighted = any(isinstance(inner, reducers.ClassWeightedReducer) for inner in reducer.modules())
        return not weighted and can_split(reducer)
    return can_split(reducer)


def elements(loss: Any, embeddings: Tensor, labels: Tensor | None) -> dict[str, Any]:
    """Element losses of this rank's rows of a loss that is a sum over samples."""
    loss.reset_stats()
    return loss.compute_loss(embeddings, labels, None, embeddings, labels)  # type: ignore[no-any-return]


def row_elements(
    loss: Any, embeddings: Tensor, labels: Tensor | None, tuples: Indices, ref_emb: Tensor, ref_labels: Tensor | None
) -> dict[str, Any]:
    """Element losses of this rank's anchors against all rows.

    Args:
        loss: A loss that is a sum over anchors.
        embeddings: (B, D), the anchors.
        labels: (B,).
        tuples: From ``anchor_tuples``: local anchors, global others.
        ref_emb: (G, D).
        ref_labels: (G,).
    """
    loss.reset_stats()
    return loss.compute_loss(embeddings, labels, tuples, ref_emb, ref_labels)  # type: ignore[no-any-return]


def anchor_tuples(
    loss: nn.Module, labels: Tensor, ref_labels: Tensor, bound: tuple[int, int], given: Indices | None, *, same: bool
) -> Indices:
    """The pairs or triplets whose anchor is one of the global rows from ``bound[0]`` up to ``bound[1]``.

    Args:
        loss: Decides between triplets and pairs.
        labels: (G,) labels of all anchors.
        ref_labels: (G',) labels of all references.
        bound: First anchor, one past the last anchor.
        given: Global tuples from a miner; None: all pairs or triplets.
        same: Anchors and references are the same rows, so a row is not its own partner.

    Returns:
        (anchor, positive, negative), or (anchor, positive, anchor, negative), anchors counted from ``bound[0]``.
    """
    start, stop = bound
    if given is not None:
        return _of_anchors(given, start, stop)
    matches = labels[start:stop].unsqueeze(1) == ref_labels.unsqueeze(0)
    differ = ~matches
    if same:
        own = torch.arange(stop - start, device=labels.device)
        matches[own, own + start] = False
    if isinstance(loss, _TRIPLET_LOSSES):
        return _joined(matches, differ)
    return (*torch.where(matches), *torch.where(differ))


def _joined(matches: Tensor, differ: Tensor) -> Indices:
    """Each positive of an anchor with each of its negatives, in the order of ``torch.where`` on the (B, G, G) cube, without the cube."""
    anchors, positives = torch.where(matches)
    negatives, per_row = torch.where(differ)[1], differ.sum(1)
    times = per_row[anchors]
    before = (times.cumsum(0) - times).repeat_interleave(times)
    first = (per_row.cumsum(0) - per_row)[anchors].repeat_interleave(times)
    places = first + torch.arange(len(before), device=before.device) - before
    return anchors.repeat_interleave(times), positives.repeat_interleave(times), negatives[places]


def tuples_suffice(
    labels: Tensor, ref_labels: Tensor, bounds: list[tuple[int, int]], given: Indices | None, *, same: bool
) -> bool:
    """Whether every rank's anchors form ordinary input: with too few pairs PML returns a zero for the whole batch.

    Each rank computes this from what all ranks hold, so all decide alike.
    """
    if given is not None:
        parts = [_of_anchors(given, *bound) for bound in bounds]
        return all(min(len(index) for index in part) > 1 for part in parts)
    near = partner_counts(labels, ref_labels)
    for start, stop in bounds:
        p, n = near[start:stop] - int(same), len(ref_labels) - near[start:stop]
        if int(p.sum()) < 2 or int(n.sum()) < 2 or not bool(((p > 0) & (n > 0)).any()):
            return False
    return True


def partner_counts(labels: Tensor, ref_labels: Tensor) -> Tensor:
    """(G,) how many references have each anchor's label."""
    _, kind = torch.unique(torch.cat([labels, ref_labels]), return_inverse=True)
    return torch.bincount(kind[len(labels) :], minlength=len(kind))[kind[: len(labels)]]


def _of_anchors(given: Indices, start: int, stop: int) -> Indices:
    def own(anchors: Tensor, *others: Tensor) -> Indices:
        mine = (anchors >= start) & (anchors < stop)
        return (anchors[mine] - start, *(other[mine] for other in others))

    if len(given) == 3:
        return own(*given)
    return (*own(*given[:2]), *own(*given[2:]))
