"""Pairs and triplets of rows that pytorch-metric-learning (PML) compares: from labels, or from a miner.

A miner's are counted over the rows of all ranks, refused if they are malformed, or taken as weights of rows.

Legend: ``G`` rows over all ranks, ``G'`` references over all ranks (the rows themselves by default), ``n`` tuples. ``bounds``
are the first anchor and one past the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_ddp_losses.errors import InputError

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
    """Return the pairs or triplets with an anchor among the global rows from ``bounds[0]`` up to ``bounds[1]``.

    Args:
        labels: (G,) labels of all anchors.
        ref_labels: (G',) labels of all references.
        bounds: First anchor, one past the last anchor.
        mined: Global tuples from a miner. If None, all pairs or triplets.
        triplets: Make triplets, not pairs, if ``mined`` is None.
        same: Anchors and references are the same rows, so a row is not its own partner.
        positives: (n,), number of positives of each of these anchors, on the host, which then does not wait. May be None.

    Returns:
        (anchor, positive, negative), or (anchor, positive, anchor, negative), anchors counted from ``bounds[0]``.
    """
    start, stop = bounds
    if mined is not None:
        # a selection would wait for its size
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
    # the same lists, of known lengths
    negatives = len(ref_labels) - int(same) - positives
    if triplets:
        return _triplets(matches, differ, positives, negatives)
    return (*_listed(matches, int(positives.sum())), *_listed(differ, int(negatives.sum())))


def are_ordinary(
    matching: Tensor | None, references: int, bounds_by_rank: list[Bounds], mined: Indices | None, *, same: bool
) -> bool:
    """Return whether every rank's anchors form ordinary input: with too few pairs PML returns a zero for the full batch.

    Each rank computes this from values that all ranks hold, so all decide the same.

    Args:
        matching: From ``same_label_counts``. None if tuples are given.
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
    """Return whether anchors with these numbers of positives and negatives are ordinary input for PML.

    Args:
        positives: (n,) of each anchor.
        negatives: (n,) of each anchor.
        mined: The tuples are from a miner. PML then does not require an anchor with both.
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
    # labels as small numbers, for a histogram
    _, kinds = torch.unique(torch.cat([labels, ref_labels]), return_inverse=True)
    kinds_of_anchors, kinds_of_references = kinds[: len(labels)], kinds[len(labels) :]
    return torch.bincount(kinds_of_references, minlength=len(kinds))[kinds_of_anchors]


def _listed(mask: Tensor, number: int) -> Indices:
    """List row and column of each entry that is set. ``torch.where`` does the same, but its host waits for their number."""
    flat = mask.view(-1)
    # place of each entry. Those that are not set share one before the list
    places = flat.cumsum(0).mul_(flat)
    entries = torch.arange(flat.numel(), device=mask.device)
    listed = entries.new_empty(number + 1).scatter_(0, places, entries)[1:]
    return listed // mask.shape[1], listed % mask.shape[1]


def _triplets(
    matches: Tensor, differ: Tensor, positive_counts: Tensor | None = None, negative_counts: Tensor | None = None
) -> Indices:
    """Join each positive of an anchor with each of its negatives.

    The order equals ``torch.where`` on the (B, G, G) cube, without the cube. Counts of the rows are on the host if they are known
    on the host.
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
    # the first triplet of each positive, and the first negative of its anchor
    owners = torch.arange(len(times), device=times.device).repeat_interleave(times, output_size=number)
    first_of_positive = (times.cumsum(0) - times)[owners]
    first_of_anchor = (negatives_per_row.cumsum(0) - negatives_per_row)[anchors][owners]
    within = torch.arange(len(owners), device=matches.device) - first_of_positive
    return anchors[owners], positives[owners], negatives[first_of_anchor + within]


def named_anchors(mined: Indices) -> Indices:
    """Return the anchors of pairs, of positives and of negatives, or of triplets."""
    return mined[0::2] if len(mined) == 4 else mined[:1]


def count_indices(index: Tensor, rows: int) -> Tensor:
    """Return, (rows,) of int64, how often each row is named. The host would wait for ``torch.bincount``."""
    counts = torch.zeros(rows, dtype=torch.int64, device=index.device)
    return counts.index_add_(0, index, torch.ones_like(index, dtype=torch.int64))


def _fewest_of_a_rank(mined: Indices, bounds_by_rank: list[Bounds]) -> int:
    """Return how many positives, negatives or triplets the rank with the fewest has. The host waits for an accelerator once."""
    ends = torch.tensor([stop for _, stop in bounds_by_rank]).to(mined[0].device, non_blocking=True)
    counts = []
    for anchors in named_anchors(mined):
        ranks = torch.bucketize(anchors, ends, right=True)
        counts.append(count_indices(ranks, len(ends)))
    return int(torch.stack(counts).min())


def _of_anchors(mined: Indices, start: int, stop: int) -> Indices:
    """Select the mined tuples of some anchors. Their indices then count from ``start``."""
    found: Indices = ()
    for anchors, *others in [mined] if len(mined) == 3 else [mined[:2], mined[2:]]:
        local = ((anchors >= start) & (anchors < stop)).nonzero().squeeze(1)
        found += (anchors[local] - start, *(other[local] for other in others))
    return found


# ---------------------------------------------------------------------- tuples that a miner returned


class GlobalTuples(tuple[Tensor, ...]):
    """A miner's tuples over the global batch, the same on every rank: indices count rows of all ranks.

    Attributes:
        rows_of_ranks: Number of those rows by global rank, in their order.
        references: Number of rows that positives and negatives count: the same ones, or others that the miner was given.
    """

    rows_of_ranks: dict[int, int]
    references: int

    @classmethod
    def of(cls, tuples: Iterable[Tensor], rows_of_ranks: dict[int, int], references: int) -> GlobalTuples:
        """Make them from tuples that count the rows of some ranks, in this order, and their references."""
        made = cls(tuples)
        made.rows_of_ranks, made.references = rows_of_ranks, references
        return made

    @property
    def rows(self) -> int:
        """How many rows they count."""
        return sum(self.rows_of_ranks.values())

    def counts_of(self, counts: Tensor, rows_of_ranks: dict[int, int], title: str) -> Tensor:
        """Take the numbers of the rows of some ranks, in their order.

        Args:
            counts: (G,), a number for each row that the tuples count.
            rows_of_ranks: The rows that a loss gets, by global rank.
            title: Name of the call in messages.

        Raises:
            InputError: for tuples of another batch, or of other ranks.
        """
        missing = [rank for rank, rows in rows_of_ranks.items() if self.rows_of_ranks.get(rank) != rows]
        if missing:
            expected = ", ".join(f"rank {rank}: {rows_of_ranks[rank]}" for rank in missing)
            got = ", ".join(f"rank {rank}: {self.rows_of_ranks.get(rank)}" for rank in missing)
            raise InputError(
                f"{title}: indices_tuple of GlobalBatchMiner",
                expected=f"of the rows that the loss gets ({expected})",
                got=f"of other rows ({got})",
                fix="Mine the embeddings that the loss gets, over all ranks or over the group of the loss.",
            )
        parts = torch.split(counts, list(self.rows_of_ranks.values()))
        by_rank = dict(zip(self.rows_of_ranks, parts, strict=True))
        return torch.cat([by_rank[rank] for rank in rows_of_ranks])

    def check(self, title: str, rows: int, references: int | None) -> None:
        """Refuse tuples of another batch, or of another group's.

        Args:
            title: Name of the call in messages.
            rows: Rows that the loss gets, over its ranks.
            references: References that the loss gets, over its ranks. None if it has its own.

        Raises:
            InputError: naming both numbers of rows.
        """
        if self.rows != rows:
            kind, wanted, got = "rows", rows, self.rows
            fix = "Mine the embeddings that the loss gets, over the same process group."
        elif references is not None and self.references > references:
            kind, wanted, got = "references", references, self.references
            fix = "Give the loss the ref_emb that the miner got."
        else:
            return
        expected = f"of the {wanted} {kind} that the loss gets"
        raise InputError(
            f"{title}: indices_tuple of GlobalBatchMiner", expected=expected, got=f"of {got} {kind}", fix=fix
        )


def refuse_malformed_tuples(what: str, tuples: Sequence[Tensor]) -> None:
    """Refuse a miner's tuples that name no rows, or that torch would match with each other by broadcasting or as masks.

    Raises:
        InputError: for such tuples, with their dtypes and shapes.
    """
    expected, fix = "3 or 4 tensors of row numbers (torch.int64), (n,) each", "Pass what a miner returns."
    if not all(isinstance(index, Tensor) for index in tuples):
        raise InputError(what, expected=expected, got=", ".join(type(index).__name__ for index in tuples), fix=fix)
    # bool and uint8 are masks
    are_numbers = all(index.dtype in (torch.int64, torch.int32, torch.int16) for index in tuples)
    if len(tuples) not in (3, 4) or not are_numbers or any(index.ndim != 1 for index in tuples):
        got = ", ".join(f"{index.dtype} {tuple(index.shape)}" for index in tuples)
        raise InputError(what, expected=expected, got=f"{len(tuples)}: {got}", fix=fix)
    lengths = [len(index) for index in tuples]
    matched = [lengths[:2], lengths[2:]] if len(tuples) == 4 else [lengths]
    if any(len(set(each)) > 1 for each in matched):
        expected = "as many anchors as positives, and as negatives"
        raise InputError(what, expected=expected, got=f"lengths {', '.join(map(str, lengths))}", fix=fix)


def miner_counts(indices_tuple: Sequence[Tensor], rows: int, *, only_anchors: bool, title: str) -> Tensor:
    """Return how often each of ``rows`` rows is named, int64.

    Args:
        indices_tuple: Triplets (anchor, positive, negative), or pairs (anchor, positive, anchor, negative).
        rows: Number of rows that the indices count.
        only_anchors: Count only anchors.
        title: Name of the call in messages.

    Raises:
        InputError: for an index beyond the rows, or another number of index tensors.
    """
    if len(indices_tuple) not in (3, 4):
        raise InputError(
            f"{title}: indices_tuple",
            expected="3 or 4 index tensors",
            got=len(indices_tuple),
            fix="Pass (anchors, positives, negatives), or (anchors, positives, anchors, negatives).",
        )
    counted = named_anchors(tuple(indices_tuple)) if only_anchors else indices_tuple
    index = torch.cat([part.reshape(-1) for part in counted])
    # ours are in range. To look at others waits for an accelerator once, as their miner did
    are_in_range = isinstance(indices_tuple, GlobalTuples) and (only_anchors or indices_tuple.references <= rows)
    if index.numel() and not are_in_range:
        low, high = torch.stack(torch.aminmax(index)).tolist()
        if low < 0 or high >= rows:
            raise InputError(
                f"{title}: indices_tuple",
                expected=f"0 to {rows - 1}, the rows of this call",
                got=f"{low} to {high}",
                fix="Mine the embeddings that the loss gets.",
            )
    return count_indices(index, rows)


def miner_weights(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the (G,) weights of PML's classification losses: a row's count over the highest one. Without tuples all rows weigh 1."""
    highest = counts.max()
    return torch.where(highest > 0, counts.to(dtype) / highest.clamp(min=1), torch.ones((), dtype=dtype))
