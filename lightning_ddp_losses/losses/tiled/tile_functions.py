"""The elementwise part of a tile, one pure function per loss and direction, with masks in place of lists.

A list of positives has a length, and to learn it the host would have to wait for the device. A mask has none: whether an entry is a
positive follows from the labels of its row and column. So nothing here waits, everything is a function of its arguments, and
``torch.compile`` can fuse each function into one or two kernels (``tile_compiler``). On the CPU lists are several times faster
(``pair_losses``, ``margin_losses``, whose formulas these are).

Every ``*_rows`` returns numbers of the tile's rows, (T,) each; ``before`` are those of other columns, None: these are the first.
Every ``*_grad`` returns the gradient of the tile's entries, (T, C), of the transposed ones too where ``of_columns`` are given: what
``of_rows`` are of the tile's rows, (T,) each, of its columns, (C,) each.

Each operator on a tile is a launch, and a pass over it: what does not count is overwritten once, with a number whose exponential is 0,
and not weighed; both softmaxes of an entry, of its row and of its column, are one exponential. A softmax is one launch: what it makes of a
row's largest entry is 1 over the sum of exponentials.

Legend: ``T`` rows of a tile, ``C`` columns, ``k`` statistics of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Numbers = tuple[Tensor, ...]
Limits = tuple[float | None, float | None]
"""What an element must be larger and smaller than to pass; None in place of both: all pass."""


class PairKeys(NamedTuple):
    """What tells positives from negatives.

    Attributes:
        row_labels: (T,).
        column_labels: (C,).
        row_ids: (T,), the number of each row's sample over all ranks; None: rows and columns are different samples.
        column_ids: (C,), likewise.
    """

    row_labels: Tensor
    column_labels: Tensor
    row_ids: Tensor | None
    column_ids: Tensor | None


class PairMasks:
    """Masks of a tile's entries, (T, C) each, made when they are first asked for.

    Args:
        row_labels: (T,).
        column_labels: (C,).
        itself: Rows and columns of the tile whose diagonal is the rows with themselves; None: ``ids`` tell them.
        ids: (T,) and (C,), numbers of the samples; None in place of both: rows and columns are different samples.
        lowest: Returns the lowest number of the tile's dtype, 0-dim, which to make anew would be a launch; None: nobody has it.
    """

    def __init__(
        self,
        row_labels: Tensor,
        column_labels: Tensor,
        itself: tuple[slice, slice] | None,
        ids: tuple[Tensor, Tensor] | None = None,
        lowest: Callable[[], Tensor] | None = None,
    ) -> None:
        self._row_labels, self._column_labels = row_labels.unsqueeze(1), column_labels
        self._itself, self._ids, self._lowest = itself, ids, lowest
        self._same: Tensor | None = None
        self._differ: Tensor | None = None
        self._positives: Tensor | None = None

    @property
    def are_one_batch(self) -> bool:
        """Whether rows and columns are the same samples."""
        return self._itself is not None or self._ids is not None

    @property
    def same(self) -> Tensor:
        """Entries of the same label, rows with themselves too."""
        if self._same is None:
            self._same = self._row_labels == self._column_labels
        return self._same

    @property
    def differ(self) -> Tensor:
        """Entries of different labels."""
        if self._differ is None:
            self._differ = self._row_labels != self._column_labels
        return self._differ

    @property
    def positives(self) -> Tensor:
        """Entries of the same label, but for rows with themselves; in the memory of ``same``, which is made anew if it is wanted again."""
        if self._positives is None:
            self._positives, self._same = self.fill_itself(self.same, False), None
        return self._positives

    @property
    def alike(self) -> Tensor:
        """``same`` or ``positives``, whichever there is: for whoever overwrites what is of rows with themselves."""
        return self.same if self._positives is None else self._positives

    def lowest_but(self, mask: Tensor, values: Tensor) -> Tensor:
        """Copies (T, C) values with the lowest number where a mask is not."""
        if self._lowest is None:
            return torch.where(mask, values, _lowest(values))
        return torch.where(mask, values, self._lowest())

    def fill_itself(self, values: Tensor, fill: float) -> Tensor:
        """Returns (T, C) values with ``fill`` for rows with themselves: in their memory, or (of ids) in new memory."""
        if self._itself is not None:
            if self._itself[0].start < self._itself[0].stop:
                values[self._itself].diagonal().fill_(fill)
            return values
        if self._ids is None:
            return values
        row_ids, column_ids = self._ids
        return values.masked_fill(row_ids.unsqueeze(1) == column_ids, fill)


Keys = PairKeys | PairMasks
"""What tells positives from negatives; of labels a function makes its own masks, which ``torch.compile`` then fuses with the rest."""


def _masks(keys: Keys) -> PairMasks:
    if isinstance(keys, PairMasks):
        return keys
    ids = None
    if keys.row_ids is not None and keys.column_ids is not None:
        ids = (keys.row_ids, keys.column_ids)
    return PairMasks(keys.row_labels, keys.column_labels, None, ids)


def _lowest(matrix: Tensor) -> float:
    """Returns what stands for an entry that does not count in a log-sum-exp: finite, so that a row without entries has a maximum."""
    return torch.finfo(matrix.dtype).min


# ---------------------------------------------------------------------- running sums


def _maximum_and_softmax(values: Tensor, before: Numbers | None) -> Numbers:
    """Computes the maximum of rows and its softmax, (T,) each, which is 1 over the sum of ``exp(entry - maximum)``.

    Args:
        values: (T, C), the lowest number for what does not count: the softmax of a row without entries means nothing, and counts nothing
            beside a higher maximum.
        before: Both of the entries before.
    """
    maximum, softmax = values.amax(1), values.softmax(1).amax(1)
    if before is None:
        return maximum, softmax
    highest = torch.maximum(maximum, before[0])
    sum_exp = (maximum - highest).exp() / softmax + (before[0] - highest).exp() / before[1]
    return highest, sum_exp.reciprocal()


def _log_sum_exp(values: Tensor, before: Numbers | None) -> Tensor:
    """Computes (T,), the log-sum-exp of rows; values and what is before as for ``_maximum_and_softmax``, but for one number."""
    lse = values.amax(1) - values.log_softmax(1).amax(1)
    return lse if before is None else torch.logaddexp(lse, before[0])


def _passing(losses: Tensor, mask: Tensor, limits: Limits | None) -> Tensor:
    """Tells which pairs of a mask pass the reducer's limits."""
    low, high = limits or (None, None)
    if low is not None:
        mask = mask & (losses > low)
    if high is not None:
        mask = mask & (losses < high)
    return mask


def _added(found: Numbers, before: Numbers | None) -> Numbers:
    return found if before is None else tuple(old + new for old, new in zip(before, found, strict=True))


def _exponents(matrix: Tensor, of_rows: Tensor, of_columns: Tensor | None, ratio: float = 1.0) -> Tensor:
    """Computes ``ratio m_ij + log(exp(a_i) + exp(b_j))``, whose exponential is that of two softmaxes: a is ``log(count) - l``."""
    if of_columns is None:
        return torch.add(of_rows.unsqueeze(1), matrix, alpha=ratio)
    return torch.logaddexp(of_rows.unsqueeze(1), of_columns).add_(matrix, alpha=ratio)


def _of_both(of_rows: Tensor, of_columns: Tensor | None) -> Tensor:
    """Adds a number of each entry's row to that of its column, (T, C) or (T, 1)."""
    return of_rows.unsqueeze(1) if of_columns is None else of_rows.unsqueeze(1) + of_columns


def _each(of_columns: Numbers | None, count: int) -> Numbers | tuple[None, ...]:
    return (None,) * count if of_columns is None else of_columns


# ---------------------------------------------------------------------- supervised contrastive


def supcon_rows(matrix: Tensor, keys: Keys, before: Numbers | None) -> Numbers:
    """Computes maximum, sum of exponentials, sum of the positives less the maximum, number of positives."""
    masks = _masks(keys)
    matrix = masks.fill_itself(matrix, _lowest(matrix))
    maximum = matrix.amax(1)
    if before is not None:
        maximum = torch.maximum(maximum, before[0])
    # relative to the row's largest entry, so that a positive which outweighs all others gives a loss of exactly 0
    entries = matrix - maximum.unsqueeze(1)
    sum_exp = entries.exp().sum(1)
    total = entries.mul_(masks.positives).sum(1)
    number = masks.positives.sum(1, dtype=matrix.dtype)
    if before is None:
        return maximum, sum_exp, total, number
    old_maximum, old_sum_exp, old_total, old_number = before
    raised = old_maximum - maximum
    total = total + old_total + torch.where(old_number > 0, raised * old_number, 0)
    return maximum, sum_exp + old_sum_exp * raised.exp(), total, number + old_number


def supcon_grad(matrix: Tensor, keys: Keys, of_rows: Numbers, of_columns: Numbers | None) -> Tensor:
    """Computes the softmax of the row, less the row's count spread over its positives.

    Args:
        matrix: (T, C).
        keys: Of the tile.
        of_rows: The logarithm of the row's count less its log-sum-exp; its count over its number of positives.
        of_columns: Likewise.
    """
    masks = _masks(keys)
    offsets, shares = _each(of_columns, 2)
    grad = _exponents(matrix, of_rows[0], offsets).exp_()
    return masks.fill_itself(grad.addcmul_(_of_both(of_rows[1], shares), masks.alike, value=-1), 0)


# ---------------------------------------------------------------------- NT-Xent


def ntxent_negatives(matrix: Tensor, keys: Keys, before: Numbers | None) -> Numbers:
    """Computes the log-sum-exp of the negatives."""
    return (_log_sum_exp(_negatives(matrix, _masks(keys).same), before),)


def ntxent_positives(
    matrix: Tensor, keys: Keys, lse: Tensor, before: Numbers | None, limits: Limits | None, tiny: float
) -> Numbers:
    """Computes sums of the positives: losses that pass, their number, what they give to the negatives' gradient.

    Args:
        matrix: (T, C).
        keys: Of the tile.
        lse: (T,), of the rows' negatives.
        before: Sums of the columns before.
        limits: What passes.
        tiny: What PML adds to a ratio.
    """
    masks = _masks(keys)
    positives = masks.positives
    # so far below an entry that is no positive, that it has no loss and gives nothing
    below = masks.lowest_but(positives, lse.unsqueeze(1) - matrix)
    losses, pulls = ntxent_pair_(below, tiny)
    passing = _passing(losses, positives, limits)
    if limits is not None:
        losses, pulls = losses.mul_(passing), pulls.mul_(passing)
    number = passing.sum(1, dtype=matrix.dtype)
    # each positive compares itself with all negatives of its row
    return _added((losses.sum(1), number, pulls.sum(1)), before)


def ntxent_rows(matrix: Tensor, keys: Keys, limits: Limits | None, tiny: float) -> Numbers:
    """Computes both, where the tile has all columns."""
    masks = _masks(keys)
    lse = _log_sum_exp(_negatives(matrix, masks.same), None)
    return (lse, *ntxent_positives(matrix, masks, lse, None, limits, tiny))


def ntxent_grad(
    matrix: Tensor, keys: Keys, of_rows: Numbers, of_columns: Numbers | None, limits: Limits | None, tiny: float
) -> Tensor:
    """Computes the softmax over the row's negatives times the row's weight, and each positive's own derivative.

    Args:
        matrix: (T, C).
        keys: Of the tile.
        of_rows: The logarithm of the row's weight less its log-sum-exp; that log-sum-exp; if pairs of different rows count differently,
            how much.
        of_columns: Likewise.
        limits: What passes.
        tiny: What PML adds to a ratio.
    """
    masks = _masks(keys)
    offsets = None if of_columns is None else of_columns[0]
    grad = _exponents(_negatives(matrix, masks.alike), of_rows[0], offsets).exp_()
    total: Tensor | None = None
    for numbers, dim in ((of_rows, 1), (of_columns, 0)):
        if numbers is None:
            continue
        _, lse, *counts = (number.unsqueeze(dim) for number in numbers)
        losses, pulls = ntxent_pair_(lse - matrix, tiny, wants_loss=limits is not None)
        if limits is not None:
            pulls.mul_(_passing(losses, masks.alike, limits))
        for count in counts:
            pulls.mul_(count)
        total = pulls if total is None else total.add_(pulls)
    assert total is not None
    return masks.fill_itself(grad.addcmul_(total, masks.alike, value=-1), 0)


def _negatives(matrix: Tensor, others: Tensor) -> Tensor:
    """Copies a matrix with the lowest number for what is no negative, by the mask of that."""
    return matrix.masked_fill(others, _lowest(matrix))


def ntxent_pair_(below: Tensor, tiny: float, *, wants_loss: bool = True) -> tuple[Tensor, Tensor]:
    """Computes the loss of each pair (rubbish unless it is wanted), and minus its derivative by s_ip.

    Args:
        below: l_i - s_ip; overwritten.
        tiny: What PML adds to r_ip; 0 where no ratio is so small that it counts.
        wants_loss: Else only the derivative is.
    """
    if not tiny:
        # r = sigmoid(-below), the loss -log(r), its derivative 1 - r
        losses = below
        if wants_loss:
            losses = torch.nn.functional.softplus(below, threshold=_LINEAR_FROM)
        return losses, below.sigmoid_()
    # r = sigmoid(-below); not torch.sigmoid: it ends where exp(-x) overflows, before r + tiny is tiny
    ratio = torch.nn.functional.logsigmoid(-below).exp_()
    lifted = ratio + tiny
    # the loss is -log(r + tiny), its derivative (1 - r) r / (r + tiny)
    pulls = below.sigmoid_().mul_(ratio).div_(lifted)
    return lifted.log_().neg_(), pulls


_LINEAR_FROM = 50.0  # where exp(-x) is nothing beside 1, in float64 too


# ---------------------------------------------------------------------- multi-similarity


def multi_similarity_rows(matrix: Tensor, keys: Keys, before: Numbers | None, base: float, ratio: float) -> Numbers:
    """Computes the maximum of the negatives and its softmax, and those of the positives' exponents, ``(entry - base) ratio``."""
    masks = _masks(keys)
    # the 1 of the formula is a first entry, exp(0), at s = base: in the place of the row with itself, else before all others
    of_negatives = of_positives = None
    if before is not None:
        of_negatives, of_positives = before[:2], before[2:]
    elif not masks.are_one_batch:
        one = matrix.new_ones(len(matrix))
        of_negatives, of_positives = (one * base, one), (one * 0, one)
    negatives = masks.fill_itself(_negatives(matrix, masks.same), base)
    exponents = (matrix - base).mul_(ratio)
    exponents = masks.fill_itself(masks.lowest_but(masks.same, exponents), 0)
    return (*_maximum_and_softmax(negatives, of_negatives), *_maximum_and_softmax(exponents, of_positives))


def multi_similarity_grad(
    matrix: Tensor, keys: Keys, of_rows: Numbers, of_columns: Numbers | None, base: float, ratio: float
) -> Tensor:
    """Computes the softmax of the negatives, and that of the positives of the opposite sign.

    Args:
        matrix: (T, C).
        keys: Of the tile.
        of_rows: The logarithm of the row's count less the log-sum-exp of the negatives' entries less the base, and of the positives'.
        of_columns: Likewise.
        base: An entry that all count from.
        ratio: Of the positives' exponents to the entries.
    """
    masks = _masks(keys)
    of_negatives, of_positives = _each(of_columns, 2)
    entries = matrix - base  # smaller numbers, which round less
    negatives = _exponents(entries, of_rows[0], of_negatives)
    positives = _exponents(entries, of_rows[1], of_positives, ratio)
    grad = torch.where(masks.same, positives, negatives).exp_()
    # minus the positives
    return masks.fill_itself(grad.addcmul_(grad, masks.same, value=-2), 0)


# ---------------------------------------------------------------------- contrastive


def contrastive_rows(
    matrix: Tensor,
    keys: Keys,
    before: Numbers | None,
    margins: tuple[float, float],
    sign: float,
    limits: tuple[Limits | None, Limits | None],
) -> Numbers:
    """Computes the sum of what passes and its number, of the positives and then of the negatives."""
    numbers: Numbers = ()
    for losses, number in _contrastive_losses(matrix, keys, margins, sign, limits):
        numbers = (*numbers, losses.sum(1), number)
    return _added(numbers, before)


def contrastive_rows_and_grads(
    matrix: Tensor,
    keys: Keys,
    before: Numbers | None,
    margins: tuple[float, float],
    sign: float,
    limits: tuple[Limits | None, Limits | None],
) -> tuple[Numbers, list[Tensor]]:
    """Computes the same, and of each kind (T, C) 1 where a pair has a loss that passes, else 0."""
    numbers: Numbers = ()
    grads = []
    for losses, number in _contrastive_losses(matrix, keys, margins, sign, limits):
        numbers = (*numbers, losses.sum(1), number)
        grads.append(losses.sign_())
    return _added(numbers, before), grads


def contrastive_grad(
    matrix: Tensor,
    keys: Keys,
    of_rows: Numbers,
    of_columns: Numbers | None,
    margins: tuple[float, float],
    sign: float,
    limits: tuple[Limits | None, Limits | None],
) -> Tensor:
    """Computes 1 where a pair has a loss that passes, with its sign, times how much a pair of its row and column counts.

    Args:
        matrix: (T, C).
        keys: Of the tile.
        of_rows: How much a positive and a negative pair count, (T,) or (1,) each.
        of_columns: Likewise.
        margins: Of positives and negatives.
        sign: 1 for a distance, -1 for a similarity.
        limits: Of positives and negatives.
    """
    grads = []
    losses = _contrastive_losses(matrix, keys, margins, sign, limits)
    for (each, _), counts, column_counts in zip(losses, of_rows, _each(of_columns, 2), strict=True):
        grads.append(each.sign_().mul_(_of_both(counts, column_counts)))
    return grads[0].sub_(grads[1]) if sign > 0 else grads[1].sub_(grads[0])


def _contrastive_losses(
    matrix: Tensor,
    keys: Keys,
    margins: tuple[float, float],
    sign: float,
    limits: tuple[Limits | None, Limits | None],
) -> list[tuple[Tensor, Tensor]]:
    """Computes the losses that pass, (T, C), 0 elsewhere, and their number, (T,): of positives and negatives."""
    masks, (near, far) = _masks(keys), margins
    matrix = masks.fill_itself(matrix, near)  # whose loss is 0
    if sign > 0:
        above, below = matrix - near, far - matrix
    else:
        above, below = near - matrix, matrix - far
    found = []
    for losses, are_positive, each_limits in zip((above, below), (True, False), limits, strict=True):
        low, high = each_limits or (None, None)
        if low is not None and low >= 0 and high is None:
            # 0 is what does not pass, and what is no such pair
            kept = losses.mul_(masks.same) if are_positive else losses.masked_fill_(masks.same, 0)
            kept = torch.threshold_(kept, low, 0)
            found.append((kept, torch.linalg.vector_norm(kept, 0, dim=1)))
            continue
        pairs = masks.positives if are_positive else masks.differ
        passing = _passing(losses.clamp_min_(0), pairs, each_limits)
        found.append((losses.mul_(passing), passing.sum(1, dtype=matrix.dtype)))
    return found


# ---------------------------------------------------------------------- triplets


def triplet_rows(matrix: Tensor, keys: Keys, margin: float, limits: Limits | None) -> Numbers:
    """Computes minus the sum of the triplets' losses and their number, with ``limits`` of those above 0; the tile has all columns."""
    return _triplets(matrix, _masks(keys), margin, limits)[0]


def triplet_rows_and_grads(
    matrix: Tensor, keys: Keys, margin: float, limits: Limits | None
) -> tuple[Numbers, list[Tensor]]:
    """Computes the same, and (T, C) how many negatives violate each positive, less how many positives each negative violates."""
    numbers, negatives, thresholds, violating = _triplets(matrix, _masks(keys), margin, limits)
    return numbers, [_triplet_counts(negatives, thresholds, violating)]


def triplet_grad(matrix: Tensor, keys: Keys, row_counts: Tensor, margin: float) -> Tensor:
    """Computes these differences times the row's count."""
    negatives, thresholds = _triplet_entries(matrix, _masks(keys), margin)
    violating = torch.searchsorted(negatives.sort(1).values, thresholds)
    return _triplet_counts(negatives, thresholds, violating).mul_(row_counts.unsqueeze(1))


def _triplet_entries(matrix: Tensor, masks: PairMasks, margin: float) -> tuple[Tensor, Tensor]:
    """Makes the negatives' entries, inf elsewhere, and the positives' plus the margin, the lowest number elsewhere."""
    thresholds = masks.fill_itself(masks.lowest_but(masks.same, matrix + margin), _lowest(matrix))
    return matrix.masked_fill(masks.same, torch.inf), thresholds


def _triplets(
    matrix: Tensor, masks: PairMasks, margin: float, limits: Limits | None
) -> tuple[Numbers, Tensor, Tensor, Tensor]:
    """Computes the numbers of ``triplet_rows``, the entries, and how many negatives violate each positive."""
    negatives, thresholds = _triplet_entries(matrix, masks, margin)
    in_order = negatives.sort(1).values
    violating = torch.searchsorted(in_order, thresholds)
    # by how much in all, from cumulated sums
    sums = torch.nn.functional.pad(in_order.cumsum(1, dtype=torch.float64), (1, 0))
    total = sums.gather(1, violating).addcmul_(thresholds, violating, value=-1).sum(1)
    if limits is not None:
        return (total, violating.sum(1)), negatives, thresholds, violating
    number = masks.positives.sum(1) * masks.differ.sum(1)
    return (total, number), negatives, thresholds, violating


def _triplet_counts(negatives: Tensor, thresholds: Tensor, violating: Tensor) -> Tensor:
    """Computes how many negatives violate each positive, less how many positives each negative violates, in the entries' dtype."""
    not_violated = torch.searchsorted(thresholds.sort(1).values, negatives, right=True)
    return torch.sub(not_violated.add_(violating), negatives.shape[1], out=torch.empty_like(negatives))
