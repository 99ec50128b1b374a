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


def _masks(keys: PairKeys) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tells, (T, C) each: positives, entries of the same label, entries of a row with itself (None: there are none)."""
    same = keys.row_labels.unsqueeze(1) == keys.column_labels
    if keys.row_ids is None or keys.column_ids is None:
        return same, same, None
    itself: Tensor = keys.row_ids.unsqueeze(1) == keys.column_ids
    return same ^ itself, same, itself


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


def supcon_rows(matrix: Tensor, keys: PairKeys, before: Numbers | None) -> Numbers:
    """Computes maximum, sum of exponentials, sum of the positives less the maximum, number of positives."""
    positives, _, itself = _masks(keys)
    maximum, sum_exp = _log_sum_exp(_without(matrix, itself), before)
    # relative to the row's largest entry, so that a positive which outweighs all others gives a loss of exactly 0
    total = ((matrix - maximum.unsqueeze(1)) * positives).sum(1)
    number = positives.sum(1, dtype=matrix.dtype)
    if before is not None:
        old_maximum, _, old_total, old_number = before
        total = total + old_total + torch.where(old_number > 0, (old_maximum - maximum) * old_number, 0)
        number = number + old_number
    return maximum, sum_exp, total, number


def supcon_grad(matrix: Tensor, keys: PairKeys, row_stats: Tensor, column_stats: Tensor | None) -> Tensor:
    """Computes the softmax of the row, less the row's count spread over its positives."""
    positives, _, itself = _masks(keys)
    grad = _softmax_grad(_without(matrix, itself), row_stats, column_stats)
    return grad.sub_(_of_rows_and_columns(row_stats, column_stats, 2) * positives)


# ---------------------------------------------------------------------- NT-Xent


def ntxent_negatives(matrix: Tensor, keys: PairKeys, before: Numbers | None) -> Numbers:
    """Computes maximum and sum of exponentials of the negatives."""
    _, same, _ = _masks(keys)
    return _log_sum_exp(_without(matrix, same), before)


def ntxent_positives(
    matrix: Tensor, keys: PairKeys, negatives: Numbers, before: Numbers | None, limits: Limits | None
) -> Numbers:
    """Computes sums of the positives: number, losses, number of those that pass, what they give to the negatives' gradient."""
    positives, _, _ = _masks(keys)
    return _ntxent_sums(matrix, positives, negatives, before, limits)


def ntxent_rows(matrix: Tensor, keys: PairKeys, limits: Limits | None) -> Numbers:
    """Computes both, where the tile has all columns."""
    positives, same, _ = _masks(keys)
    negatives = _log_sum_exp(_without(matrix, same), None)
    return (*negatives, *_ntxent_sums(matrix, positives, negatives, None, limits))


def _ntxent_sums(
    matrix: Tensor, positives: Tensor, negatives: Numbers, before: Numbers | None, limits: Limits | None
) -> Numbers:
    maximum, sum_exp = negatives
    losses, grads = ntxent_pair(matrix, (maximum + sum_exp.log()).unsqueeze(1))
    passing = _passing(losses, positives, limits)
    # each positive compares itself with all negatives of its row
    weight = (grads * passing).sum(1)
    if before is None:
        return (*_pair_sums(losses, positives, passing, None), weight)
    return (*_pair_sums(losses, positives, passing, before[:3]), before[3] + weight)


def ntxent_grad(
    matrix: Tensor, keys: PairKeys, row_stats: Tensor, column_stats: Tensor | None, limits: Limits | None
) -> Tensor:
    """Computes the softmax over the row's negatives times the row's weight, and each positive's own derivative."""
    positives, same, _ = _masks(keys)
    grad = _softmax_grad(_without(matrix, same), row_stats, column_stats)
    for stats, dim in ((row_stats, 1), (column_stats, 0)):
        if stats is not None:
            losses, pulls = ntxent_pair(matrix, stats[:, 0].unsqueeze(dim))
            grad = grad.sub_(pulls.mul_(_passing(losses, positives, limits)).mul_(stats[:, 2].unsqueeze(dim)))
    return grad


def ntxent_pair(entries: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the loss of each pair, and minus its derivative by s_ip."""
    above = entries - lse
    # r = sigmoid(above); not torch.sigmoid: it ends where exp(-x) overflows, before r + tiny is tiny
    smaller = above.abs().neg_().exp_()
    larger = 1 / (1 + smaller)
    smaller *= larger
    is_low = above < 0
    ratio = torch.where(is_low, smaller, larger)
    # the loss -log(r + tiny), as PML adds it, and (1 - r) r / (r + tiny)
    lifted = ratio + torch.finfo(entries.dtype).tiny
    return lifted.log().neg_(), torch.where(is_low, larger, smaller).mul_(ratio).div_(lifted)


# ---------------------------------------------------------------------- multi-similarity


def multi_similarity_rows(matrix: Tensor, keys: PairKeys, before: Numbers | None, base: float, ratio: float) -> Numbers:
    """Computes maximum and sum of exponentials of the negatives, then of the positives' exponents ``(entry - base) ratio``."""
    positives, same, _ = _masks(keys)
    exponents = ((matrix - base) * ratio).masked_fill(~positives, -torch.inf)
    of_negatives, of_positives = (None, None) if before is None else (before[:2], before[2:])
    # the 1 of the formula is a first entry: exp(0), and exp(s - base) = 1 at s = base
    return (
        *_log_sum_exp(_without(matrix, same), of_negatives, base),
        *_log_sum_exp(exponents, of_positives, 0.0),
    )


def multi_similarity_grad(
    matrix: Tensor,
    keys: PairKeys,
    row_stats: Tensor,
    column_stats: Tensor | None,
    base: float,
    ratio: float,
) -> Tensor:
    """Computes the softmax of the negatives, and that of the positives of the opposite sign."""
    positives, same, _ = _masks(keys)
    grad = _softmax_grad(_without(matrix, same), row_stats, column_stats)
    exponents = ((matrix - base) * ratio).masked_fill(~positives, -torch.inf)
    for stats, dim in ((row_stats, 1), (column_stats, 0)):
        if stats is not None:
            pulls = (exponents - stats[:, 2].unsqueeze(dim)).exp_()
            grad = grad.sub_(pulls.mul_(stats[:, 1].unsqueeze(dim)))
    return grad


# ---------------------------------------------------------------------- contrastive


def contrastive_rows(
    matrix: Tensor,
    keys: PairKeys,
    before: Numbers | None,
    margins: tuple[float, float],
    sign: float,
    limits: tuple[Limits | None, Limits | None],
) -> Numbers:
    """Computes number, sum and number of what passes, of the positives and then of the negatives."""
    positives, same, _ = _masks(keys)
    numbers: Numbers = ()
    for kind, (pairs, losses) in enumerate(_contrastive_losses(matrix, positives, ~same, margins, sign)):
        old = None if before is None else before[3 * kind : 3 * kind + 3]
        numbers = (*numbers, *_pair_sums(losses, pairs, _passing(losses, pairs, limits[kind]), old))
    return numbers


def contrastive_grad(
    matrix: Tensor,
    keys: PairKeys,
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
    positives, same, _ = _masks(keys)
    grads = []
    for kind, (pairs, losses) in enumerate(_contrastive_losses(matrix, positives, ~same, margins, sign)):
        passing = _passing(losses, pairs & (losses > 0), limits[kind])
        grads.append(passing * _of_rows_and_columns(row_counts, column_counts, kind))
    return grads[0].sub_(grads[1]).mul_(sign)


def _contrastive_losses(
    matrix: Tensor, positives: Tensor, negatives: Tensor, margins: tuple[float, float], sign: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Computes pairs and losses, of positives and negatives."""
    above = ((matrix - margins[0]) * sign).clamp_min_(0)
    below = ((matrix - margins[1]) * -sign).clamp_min_(0)
    return (positives, above), (negatives, below)


# ---------------------------------------------------------------------- triplets


def triplet_rows(matrix: Tensor, keys: PairKeys, margin: float) -> Numbers:
    """Computes number of triplets, sum of their losses and number of those above 0, where the tile has all columns."""
    positives, same, _ = _masks(keys)
    negatives = matrix.masked_fill(same, torch.inf).sort(1).values
    limits = matrix + margin
    # how many negatives violate each positive, and by how much in all, from cumulated sums
    violating = torch.searchsorted(negatives, limits.masked_fill(~positives, -torch.inf))
    finite = negatives.masked_fill(negatives == torch.inf, 0)
    sums = torch.nn.functional.pad(finite.double().cumsum(1), (1, 0))
    losses = limits.double() * violating - sums.gather(1, violating)
    number = positives.sum(1) * (matrix.shape[1] - same.sum(1))
    dtype = matrix.dtype
    return number.to(dtype), losses.sum(1).to(dtype), violating.sum(1).to(dtype)


def triplet_grad(matrix: Tensor, keys: PairKeys, row_counts: Tensor, margin: float) -> Tensor:
    """Computes how many negatives violate each positive, less how many positives each negative violates, times the row's count."""
    positives, same, _ = _masks(keys)
    negatives = matrix.masked_fill(same, torch.inf)
    limits = (matrix + margin).masked_fill(~positives, -torch.inf)
    violating = torch.searchsorted(negatives.sort(1).values, limits)
    violated = matrix.shape[1] - torch.searchsorted(limits.sort(1).values, negatives, right=True)
    return (violating - violated) * row_counts.unsqueeze(1)
