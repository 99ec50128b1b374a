"""The elementwise part of a tile, one pure function per loss and direction, with masks in place of lists.

A list of positives has a length, and to learn it the host would have to wait for the device. A mask has none: whether an entry is a
positive follows from the labels of its row and column. So nothing here waits, everything is a function of its arguments, and
``torch.compile`` can fuse each function into one or two kernels (``tile_compiler``). On the CPU lists are several times faster
(``pair_losses``, ``margin_losses``, whose formulas these are).

Every ``*_rows`` returns numbers of the tile's rows, (T,) each; ``before`` are those of the rows' other columns, None: there are none.
Every ``*_grad`` returns the gradient of the tile's entries, (T, C), of the transposed ones too where ``column_stats`` are given.

Legend: ``T`` rows of a tile, ``C`` columns, ``k`` statistics of a row.
"""

from __future__ import annotations

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
        keys: Of the tile.
    """

    def __init__(self, keys: PairKeys) -> None:
        self._keys = keys
        self._same: Tensor | None = None
        self._itself: Tensor | None = None
        self._positives: Tensor | None = None
        self._others: Tensor | None = None

    @property
    def same(self) -> Tensor:
        """Entries of the same label."""
        if self._same is None:
            self._same = self._keys.row_labels.unsqueeze(1) == self._keys.column_labels
        return self._same

    @property
    def itself(self) -> Tensor | None:
        """Entries of a row with itself; None: there are none."""
        row_ids, column_ids = self._keys.row_ids, self._keys.column_ids
        if self._itself is None and row_ids is not None and column_ids is not None:
            self._itself = row_ids.unsqueeze(1) == column_ids
        return self._itself

    @property
    def positives(self) -> Tensor:
        """Entries of the same label, but for rows with themselves."""
        if self._positives is None:
            itself = self.itself
            self._positives = self.same if itself is None else self.same ^ itself
        return self._positives

    @property
    def others(self) -> Tensor:
        """All but the positives."""
        if self._others is None:
            itself = self.itself
            self._others = ~self.same if itself is None else self.same == itself
        return self._others


Keys = PairKeys | PairMasks
"""What tells positives from negatives; of labels a function makes its own masks, which ``torch.compile`` then fuses with the rest."""


def _masks(keys: Keys) -> PairMasks:
    return keys if isinstance(keys, PairMasks) else PairMasks(keys)


def _without(matrix: Tensor, mask: Tensor | None) -> Tensor:
    """Copies a matrix with -inf where the mask is set."""
    return matrix if mask is None else matrix.masked_fill(mask, -torch.inf)


# ---------------------------------------------------------------------- running sums


def _log_sum_exp(values: Tensor, before: Numbers | None, first: float | None = None) -> Numbers:
    """Computes the maximum and the sum of ``exp(entry - maximum)`` of rows, (T,) each.

    Args:
        values: (T, C), -inf for what does not count.
        before: Both of the entries before.
        first: Without ``before``: an entry that every row has; None: rows without entries have the smallest number as their maximum.
    """
    if before is not None:
        maximum = torch.maximum(values.amax(1), before[0])
        rescaled = before[1] * (before[0] - maximum).exp()
        return maximum, rescaled + (values - maximum.unsqueeze(1)).exp().sum(1)
    lowest = torch.finfo(values.dtype).min if first is None else first
    maximum = values.amax(1).clamp_min(lowest)
    sum_exp = (values - maximum.unsqueeze(1)).exp().sum(1)
    return (maximum, sum_exp) if first is None else (maximum, sum_exp + (first - maximum).exp())


def _passing(losses: Tensor, mask: Tensor, limits: Limits | None) -> Tensor:
    """Tells which pairs of a mask pass the reducer's limits."""
    low, high = limits or (None, None)
    if low is not None:
        mask = mask & (losses > low)
    if high is not None:
        mask = mask & (losses < high)
    return mask


def _pair_sums(losses: Tensor, pairs: Tensor, passing: Tensor, before: Numbers | None) -> Numbers:
    """Adds up pairs by row, (T,) each: number, sum of the losses that pass, their number."""
    number = pairs.sum(1, dtype=losses.dtype)
    passed = number if passing is pairs else passing.sum(1, dtype=losses.dtype)
    found = (number, (losses * passing).sum(1), passed)
    return found if before is None else tuple(old + new for old, new in zip(before, found, strict=True))


def _softmax_grad(values: Tensor, row_stats: Tensor, column_stats: Tensor | None) -> Tensor:
    """Computes ``c_i exp(m_ij - l_i)``, plus ``c_j exp(m_ij - l_j)``; l and c are the first two statistics."""
    grad = (values - row_stats[:, :1]).exp_().mul_(row_stats[:, 1:2])
    if column_stats is None:
        return grad
    return (values - column_stats[:, 0]).exp_().mul_(column_stats[:, 1]).add_(grad)


def _of_rows_and_columns(row_stats: Tensor, column_stats: Tensor | None, number: int) -> Tensor:
    """Adds one statistic of each entry's row to that of its column, (T, C) or (T, 1)."""
    of_rows = row_stats[:, number : number + 1]
    return of_rows if column_stats is None else of_rows + column_stats[:, number]


# ---------------------------------------------------------------------- supervised contrastive


def supcon_rows(matrix: Tensor, keys: Keys, before: Numbers | None) -> Numbers:
    """Computes maximum, sum of exponentials, sum of the positives less the maximum, number of positives."""
    masks = _masks(keys)
    positives = masks.positives
    maximum, sum_exp = _log_sum_exp(_without(matrix, masks.itself), before)
    # relative to the row's largest entry, so that a positive which outweighs all others gives a loss of exactly 0
    total = ((matrix - maximum.unsqueeze(1)) * positives).sum(1)
    number = positives.sum(1, dtype=matrix.dtype)
    if before is not None:
        old_maximum, _, old_total, old_number = before
        total = total + old_total + torch.where(old_number > 0, (old_maximum - maximum) * old_number, 0)
        number = number + old_number
    return maximum, sum_exp, total, number


def supcon_grad(matrix: Tensor, keys: Keys, row_stats: Tensor, column_stats: Tensor | None) -> Tensor:
    """Computes the softmax of the row, less the row's count spread over its positives."""
    masks = _masks(keys)
    grad = _softmax_grad(_without(matrix, masks.itself), row_stats, column_stats)
    return grad.addcmul_(_of_rows_and_columns(row_stats, column_stats, 2), masks.positives, value=-1)


# ---------------------------------------------------------------------- NT-Xent


def ntxent_negatives(matrix: Tensor, keys: Keys, before: Numbers | None) -> Numbers:
    """Computes maximum and sum of exponentials of the negatives."""
    return _log_sum_exp(_without(matrix, _masks(keys).same), before)


def ntxent_positives(
    matrix: Tensor, keys: Keys, negatives: Numbers, before: Numbers | None, limits: Limits | None
) -> Numbers:
    """Computes sums of the positives: number, losses, number of those that pass, what they give to the negatives' gradient."""
    return _ntxent_sums(matrix, _masks(keys).positives, negatives, before, limits)


def ntxent_rows(matrix: Tensor, keys: Keys, limits: Limits | None) -> Numbers:
    """Computes both, where the tile has all columns."""
    masks = _masks(keys)
    negatives = _log_sum_exp(_without(matrix, masks.same), None)
    return (*negatives, *_ntxent_sums(matrix, masks.positives, negatives, None, limits))


def _ntxent_sums(
    matrix: Tensor, positives: Tensor, negatives: Numbers, before: Numbers | None, limits: Limits | None
) -> Numbers:
    maximum, sum_exp = negatives
    losses, pulls = ntxent_pair(matrix, (maximum + sum_exp.log()).unsqueeze(1))
    passing = _passing(losses, positives, limits)
    # each positive compares itself with all negatives of its row
    weight = pulls.mul_(passing).sum(1)
    if before is None:
        return (*_pair_sums(losses, positives, passing, None), weight)
    return (*_pair_sums(losses, positives, passing, before[:3]), before[3] + weight)


def ntxent_grad(
    matrix: Tensor, keys: Keys, row_stats: Tensor, column_stats: Tensor | None, limits: Limits | None
) -> Tensor:
    """Computes the softmax over the row's negatives times the row's weight, and each positive's own derivative."""
    masks = _masks(keys)
    grad = _softmax_grad(_without(matrix, masks.same), row_stats, column_stats)
    for stats, dim in ((row_stats, 1), (column_stats, 0)):
        if stats is not None:
            lifted, pulls = _ntxent_ratio(matrix, stats[:, 0].unsqueeze(dim))
            passing = masks.positives
            if limits is not None:
                passing = _passing(lifted.log_().neg_(), passing, limits)
            grad = grad.addcmul_(pulls.mul_(passing), stats[:, 2].unsqueeze(dim), value=-1)
    return grad


def ntxent_pair(entries: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the loss of each pair, and minus its derivative by s_ip."""
    lifted, pulls = _ntxent_ratio(entries, lse)
    return lifted.log_().neg_(), pulls


def _ntxent_ratio(entries: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Computes r_ip plus the tiny number that PML adds, and minus the derivative of the pair's loss by s_ip."""
    above = entries - lse
    # r = sigmoid(above); not torch.sigmoid: it ends where exp(-x) overflows, before r + tiny is tiny
    ratio = torch.nn.functional.logsigmoid(above).exp_()
    lifted = ratio + torch.finfo(entries.dtype).tiny
    # the loss is -log(r + tiny), its derivative (1 - r) r / (r + tiny)
    return lifted, above.neg_().sigmoid_().mul_(ratio).div_(lifted)


# ---------------------------------------------------------------------- multi-similarity


def multi_similarity_rows(matrix: Tensor, keys: Keys, before: Numbers | None, base: float, ratio: float) -> Numbers:
    """Computes maximum and sum of exponentials of the negatives, then of the positives' exponents ``(entry - base) ratio``."""
    masks = _masks(keys)
    exponents = ((matrix - base) * ratio).masked_fill_(masks.others, -torch.inf)
    of_negatives, of_positives = (None, None) if before is None else (before[:2], before[2:])
    # the 1 of the formula is a first entry: exp(0), and exp(s - base) = 1 at s = base
    return (
        *_log_sum_exp(_without(matrix, masks.same), of_negatives, base),
        *_log_sum_exp(exponents, of_positives, 0.0),
    )


def multi_similarity_grad(
    matrix: Tensor,
    keys: Keys,
    row_stats: Tensor,
    column_stats: Tensor | None,
    base: float,
    ratio: float,
) -> Tensor:
    """Computes the softmax of the negatives, and that of the positives of the opposite sign."""
    masks = _masks(keys)
    grad = _softmax_grad(_without(matrix, masks.same), row_stats, column_stats)
    exponents = ((matrix - base) * ratio).masked_fill_(masks.others, -torch.inf)
    for stats, dim in ((row_stats, 1), (column_stats, 0)):
        if stats is not None:
            pulls = (exponents - stats[:, 2].unsqueeze(dim)).exp_()
            grad = grad.addcmul_(pulls, stats[:, 1].unsqueeze(dim), value=-1)
    return grad


# ---------------------------------------------------------------------- contrastive


def contrastive_rows(
    matrix: Tensor,
    keys: Keys,
    before: Numbers | None,
    margins: tuple[float, float],
    sign: float,
    limits: tuple[Limits | None, Limits | None],
) -> Numbers:
    """Computes number, sum and number of what passes, of the positives and then of the negatives."""
    numbers: Numbers = ()
    for kind, (pairs, losses) in enumerate(_contrastive_losses(matrix, keys, margins, sign)):
        old = None if before is None else before[3 * kind : 3 * kind + 3]
        numbers = (*numbers, *_pair_sums(losses, pairs, _passing(losses, pairs, limits[kind]), old))
    return numbers


def contrastive_grad(
    matrix: Tensor,
    keys: Keys,
    row_counts: Tensor,
    column_counts: Tensor | None,
    margins: tuple[float, float],
    sign: float,
    limits: tuple[Limits | None, Limits | None],
) -> Tensor:
    """Computes 1 where a pair has a loss that passes, with its sign, times how much a pair of its row and column counts.

    Args:
        matrix: (T, C).
        keys: Of the tile.
        row_counts: (T, 2) or (1, 2), how much a positive and a negative pair count.
        column_counts: (C, 2), likewise.
        margins: Of positives and negatives.
        sign: 1 for a distance, -1 for a similarity.
        limits: Of positives and negatives.
    """
    grads = []
    for kind, (pairs, losses) in enumerate(_contrastive_losses(matrix, keys, margins, sign)):
        # only what has a loss has a gradient, whatever the limits
        low, high = limits[kind] or (None, None)
        passing = _passing(losses, pairs, (0.0 if low is None else max(low, 0.0), high))
        grads.append(passing * _of_rows_and_columns(row_counts, column_counts, kind))
    return grads[0].sub_(grads[1]) if sign > 0 else grads[1].sub_(grads[0])


def _contrastive_losses(
    matrix: Tensor, keys: Keys, margins: tuple[float, float], sign: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Computes pairs and losses, of positives and negatives."""
    masks, (near, far) = _masks(keys), margins
    if sign > 0:
        above, below = matrix - near, far - matrix
    else:
        above, below = near - matrix, matrix - far
    return (masks.positives, above.clamp_min_(0)), (~masks.same, below.clamp_min_(0))


# ---------------------------------------------------------------------- triplets


def triplet_rows(matrix: Tensor, keys: Keys, margin: float) -> Numbers:
    """Computes number of triplets, sum of their losses and number of those above 0, where the tile has all columns."""
    masks = _masks(keys)
    same, others = masks.same, masks.others
    negatives = matrix.masked_fill(same, torch.inf).sort(1).values
    limits = matrix + margin
    # how many negatives violate each positive, and by how much in all, from cumulated sums
    violating = torch.searchsorted(negatives, limits.masked_fill(others, -torch.inf))
    finite = negatives.masked_fill(negatives == torch.inf, 0)
    sums = torch.nn.functional.pad(finite.double().cumsum(1), (1, 0))
    losses = limits.double() * violating - sums.gather(1, violating)
    number = (matrix.shape[1] - others.sum(1)) * (matrix.shape[1] - same.sum(1))
    dtype = matrix.dtype
    return number.to(dtype), losses.sum(1).to(dtype), violating.sum(1).to(dtype)


def triplet_grad(matrix: Tensor, keys: Keys, row_counts: Tensor, margin: float) -> Tensor:
    """Computes how many negatives violate each positive, less how many positives each negative violates, times the row's count."""
    masks = _masks(keys)
    negatives = matrix.masked_fill(masks.same, torch.inf)
    limits = (matrix + margin).masked_fill_(masks.others, -torch.inf)
    violating = torch.searchsorted(negatives.sort(1).values, limits)
    violated = matrix.shape[1] - torch.searchsorted(limits.sort(1).values, negatives, right=True)
    return (violating - violated) * row_counts.unsqueeze(1)
