"""Pairs and triplets of some anchors against all rows: what pytorch-metric-learning (PML) makes of labels or of a miner's tuples.

Legend: ``G`` rows over all ranks, ``G'`` references (the rows themselves where there are no others). ``bounds`` are the first anchor and
one past the last.
"""

from __future__ import annotations

import torch
from torch import Tensor

Indices = tuple[Tensor, ...]
Bounds = tuple[int, int]


def anchor_tuples(
    labels: Tensor, ref_labels: Tensor, bounds: Bounds, mined: Indices | None, *, triplets: bool, same: bool
) -> Indices:
    """Return the pairs or triplets whose anchor is one of the global rows from ``bounds[0]`` up to ``bounds[1]``.

    Args:
        labels: (G,) labels of all anchors.
        ref_labels: (G',) labels of all references.
        bounds: First anchor, one past the last anchor.
        mined: Global tuples from a miner; None: all pairs or triplets.
        triplets: Make triplets, not pairs, where nothing was mined.
        same: Anchors and references are the same rows, so a row is not its own partner.

    Returns:
        (anchor, positive, negative), or (anchor, positive, anchor, negative), anchors counted from ``bounds[0]``.
    """
    start, stop = bounds
    if mined is not None:
        return _of_anchors(mined, start, stop)
    # (n, G') which references have an anchor's label
    matches = labels[start:stop].unsqueeze(1) == ref_labels.unsqueeze(0)
    differ = ~matches
    if same:
        anchors = torch.arange(stop - start, device=labels.device)
        matches[anchors, anchors + start] = False
    if triplets:
        return _triplets(matches, differ)
    return (*torch.where(matches), *torch.where(differ))


def are_ordinary(
    labels: Tensor, ref_labels: Tensor, bounds_by_rank: list[Bounds], mined: Indices | None, *, same: bool
) -> bool:
    """Say whether every rank's anchors form ordinary input: with too few pairs PML returns a zero for the full batch.

    Each rank computes this from what all ranks hold, so all decide alike.
    """
    if mined is not None:
        return all(_shortest(_of_anchors(mined, start, stop)) > 1 for start, stop in bounds_by_rank)
    matching = same_label_counts(labels, ref_labels)
    for start, stop in bounds_by_rank:
        positives = matching[start:stop] - int(same)
        negatives = len(ref_labels) - matching[start:stop]
        if not enough_pairs(positives, negatives):
            return False
    return True


def enough_pairs(positives: Tensor, negatives: Tensor, *, mined: bool = False) -> bool:
    """Say whether anchors with these numbers of positives and negatives are ordinary input for PML.

    Args:
        positives: (n,) of each anchor.
        negatives: (n,) of each anchor.
        mined: The tuples come from a miner; PML then does not ask for an anchor that has both.
    """
    if int(positives.sum()) < 2 or int(negatives.sum()) < 2:
        return False
    return mined or bool(((positives > 0) & (negatives > 0)).any())


def same_label_counts(labels: Tensor, ref_labels: Tensor) -> Tensor:
    """Return, (G,), how many references have each anchor's label."""
    # labels as small numbers, of which a histogram can be made
    _, kinds = torch.unique(torch.cat([labels, ref_labels]), return_inverse=True)
    kinds_of_anchors, kinds_of_references = kinds[: len(labels)], kinds[len(labels) :]
    return torch.bincount(kinds_of_references, minlength=len(kinds))[kinds_of_anchors]


def _triplets(matches: Tensor, differ: Tensor) -> Indices:
    """Join each positive of an anchor with each of its negatives.

    The order is that of ``torch.where`` on the (B, G, G) cube, without the cube.
    """
    anchors, positives = torch.where(matches)
    negatives, negatives_per_row = torch.where(differ)[1], differ.sum(1)
    # each positive is repeated once for each negative of its anchor
    times = negatives_per_row[anchors]
    # where a positive's triplets begin, and where its anchor's negatives do
    first_of_positive = (times.cumsum(0) - times).repeat_interleave(times)
    first_of_anchor = (negatives_per_row.cumsum(0) - negatives_per_row)[anchors].repeat_interleave(times)
    within = torch.arange(len(first_of_positive), device=matches.device) - first_of_positive
    return anchors.repeat_interleave(times), positives.repeat_interleave(times), negatives[first_of_anchor + within]


def _shortest(tuples: Indices) -> int:
    return min(len(index) for index in tuples)


def _of_anchors(mined: Indices, start: int, stop: int) -> Indices:
    """Select the mined tuples of some anchors, whose indices then count from ``start``."""
    if len(mined) == 3:
        return _select(mined, start, stop)
    return (*_select(mined[:2], start, stop), *_select(mined[2:], start, stop))


def _select(tuples: Indices, start: int, stop: int) -> Indices:
    anchors, *others = tuples
    local = (anchors >= start) & (anchors < stop)
    return (anchors[local] - start, *(other[local] for other in others))
