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
    labels: Tensor,
    ref_labels: Tensor,
    bounds: Bounds,
    mined: Indices | None,
    *,
    triplets: bool,
    same: bool,
    positives: Tensor | None = None,
) -> Indices:
    """Return the pairs or triplets whose anchor is one of the global rows from ``bounds[0]`` up to ``bounds[1]``.

    Args:
        labels: (G,) labels of all anchors.
        ref_labels: (G',) labels of all references.
        bounds: First anchor, one past the last anchor.
        mined: Global tuples from a miner; None: all pairs or triplets.
        triplets: Make triplets, not pairs, where nothing was mined.
        same: Anchors and references are the same rows, so a row is not its own partner.
        positives: (n,) how many positives each of these anchors has, on the host; then nobody waits for an accelerator. None: not known.

    Returns:
        (anchor, positive, negative), or (anchor, positive, anchor, negative), anchors counted from ``bounds[0]``.
    """
    start, stop = bounds
    if mined is not None:
        # to select them would wait for their number
        return mined if bounds == (0, len(labels)) else _of_anchors(mined, start, stop)
    # (n, G') which references have an anchor's label
    matches = labels[start:stop].unsqueeze(1) == ref_labels.unsqueeze(0)
    differ = ~matches
    if same:
        matches[:, start:stop].diagonal().fill_(False)
    if positives is None:
        if triplets:
            return _triplets(matches, differ)
        return (*torch.where(matches), *torch.where(differ))
    # the same lists, whose lengths are known
    negatives = len(ref_labels) - int(same) - positives
    if triplets:
        return _triplets(matches, differ, positives, negatives)
    return (*_listed(matches, int(positives.sum())), *_listed(differ, int(negatives.sum())))


def are_ordinary(
    matching: Tensor | None, references: int, bounds_by_rank: list[Bounds], mined: Indices | None, *, same: bool
) -> bool:
    """Say whether every rank's anchors form ordinary input: with too few pairs PML returns a zero for the full batch.

    Each rank computes this from what all ranks hold, so all decide alike.

    Args:
        matching: From ``same_label_counts``; None: not wanted, since there are tuples.
        references: G'.
        bounds_by_rank: Each rank's anchors.
        mined: Global tuples from a miner.
        same: Anchors and references are the same rows.
    """
    if mined is not None:
        return _fewest_of_a_rank(mined, bounds_by_rank) > 1
    assert matching is not None
    for start, stop in bounds_by_rank:
        positives = matching[start:stop] - int(same)
        negatives = references - matching[start:stop]
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
    """Return, (G,), how many references have each anchor's label, on the host: an accelerator is waited for once."""
    if labels.device.type != "cpu":
        kind = torch.promote_types(labels.dtype, ref_labels.dtype)
        if kind == torch.bool:  # which torch does not search
            kind = torch.uint8
        labels, ref_labels = labels.to(kind), ref_labels.to(kind).sort().values
        stops = torch.searchsorted(ref_labels, labels, right=True)
        return (stops - torch.searchsorted(ref_labels, labels)).cpu()
    # labels as small numbers, of which a histogram can be made
    _, kinds = torch.unique(torch.cat([labels, ref_labels]), return_inverse=True)
    kinds_of_anchors, kinds_of_references = kinds[: len(labels)], kinds[len(labels) :]
    return torch.bincount(kinds_of_references, minlength=len(kinds))[kinds_of_anchors]


def _listed(mask: Tensor, number: int) -> Indices:
    """List row and column of each entry that is set, as ``torch.where`` does, whose host waits for their number."""
    flat = mask.view(-1)
    # where each entry goes; those that are not set share a place before the list
    places = flat.cumsum(0).mul_(flat)
    entries = torch.arange(flat.numel(), device=mask.device)
    listed = entries.new_empty(number + 1).scatter_(0, places, entries)[1:]
    return listed // mask.shape[1], listed % mask.shape[1]


def _triplets(
    matches: Tensor, differ: Tensor, positive_counts: Tensor | None = None, negative_counts: Tensor | None = None
) -> Indices:
    """Join each positive of an anchor with each of its negatives.

    The order is that of ``torch.where`` on the (B, G, G) cube, without the cube. Counts are of the rows, on the host, where they are
    known.
    """
    number: int | None = None
    negatives_per_row = differ.sum(1)
    if positive_counts is None or negative_counts is None:
        anchors, positives = torch.where(matches)
        negatives = torch.where(differ)[1]
    else:
        anchors, positives = _listed(matches, int(positive_counts.sum()))
        negatives = _listed(differ, int(negative_counts.sum()))[1]
        number = int((positive_counts * negative_counts).sum())
    # each positive is repeated once for each negative of its anchor
    times = negatives_per_row[anchors]
    # where a positive's triplets begin, and where its anchor's negatives do
    owners = torch.arange(len(times), device=times.device).repeat_interleave(times, output_size=number)
    first_of_positive = (times.cumsum(0) - times)[owners]
    first_of_anchor = (negatives_per_row.cumsum(0) - negatives_per_row)[anchors][owners]
    within = torch.arange(len(owners), device=matches.device) - first_of_positive
    return anchors[owners], positives[owners], negatives[first_of_anchor + within]


def named_anchors(mined: Indices) -> Indices:
    """Return the anchors of pairs, of positives and of negatives, or of triplets."""
    return mined[0::2] if len(mined) == 4 else mined[:1]


def count_indices(index: Tensor, rows: int) -> Tensor:
    """Return, (rows,) of int64, how often each row is named; as ``torch.bincount``, for which the host waits."""
    counts = torch.zeros(rows, dtype=torch.int64, device=index.device)
    return counts.index_add_(0, index, torch.ones_like(index, dtype=torch.int64))


def _fewest_of_a_rank(mined: Indices, bounds_by_rank: list[Bounds]) -> int:
    """Return how many positives, negatives or triplets the rank with the fewest has; an accelerator is waited for once."""
    ends = torch.tensor([stop for _, stop in bounds_by_rank]).to(mined[0].device, non_blocking=True)
    counts = []
    for anchors in named_anchors(mined):
        ranks = torch.bucketize(anchors, ends, right=True)
        counts.append(count_indices(ranks, len(ends)))
    return int(torch.stack(counts).min())


def _of_anchors(mined: Indices, start: int, stop: int) -> Indices:
    """Select the mined tuples of some anchors, whose indices then count from ``start``."""
    if len(mined) == 3:
        return _select(mined, start, stop)
    return (*_select(mined[:2], start, stop), *_select(mined[2:], start, stop))


def _select(tuples: Indices, start: int, stop: int) -> Indices:
    anchors, *others = tuples
    local = ((anchors >= start) & (anchors < stop)).nonzero().squeeze(1)
    return (anchors[local] - start, *(other[local] for other in others))
