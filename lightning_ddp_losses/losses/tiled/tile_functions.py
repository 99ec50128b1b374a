"""Formulas of losses on a tile: pure functions of its matrix and its pairs that return the numbers of rows and their gradient.

A formula is written once for all masks of pairs (``tiles``): over all columns on an accelerator, over a band of columns on the CPU, or from
pairs selected by a miner. No function here waits for a device, and ``torch.compile`` can fuse each function into one or two kernels.

Every ``*_rows`` returns numbers of the tile's rows, (T,) each. Every ``*_grad`` returns the gradient of the tile's entries, (T, C), plus
the gradient of the transposed entries if its terms contain numbers of the columns.

Each operator on a tile is a launch and a pass over memory. Entries that do not count are therefore overwritten once, with a number whose
exponential is 0, instead of being multiplied by weights. The softmax of an entry in its row and the softmax in its column share one
exponential. The sum of exponentials of a row is computed from its softmax: the softmax of the largest entry is 1 over the sum.

``tile_compiler.TileCompiler`` compiles the functions (``compile_tiles=True``). Eager execution is the reference.

Legend: ``T`` rows of a tile, ``C`` columns, ``b`` columns of the band that may contain positives.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ddp_losses.losses.pml_registry import pass_limits
from lightning_ddp_losses.losses.tiled.tiles import Keys, Masks, Triplets, masks_of

Numbers = tuple[Tensor, ...]
Limits = tuple[float | None, float | None]
"""Bounds between which an element passes a reducer. ``None`` instead of a tuple means that all elements pass."""

MOST_EXPONENT = 1e6
"""Exponents of e are computed as exponents of 2 up to this size, so that a shift is a finite whole number."""
_LINEAR_FROM = 50.0  # from here on 1 + exp(-x) rounds to 1, also in float64
_CLOSE = 0.4  # fraction of the exponent range: sums within it below the largest entry do not lose precision
_SORT_FROM = 12  # number of positives of a row from which sorting is cheaper


def _lowest(matrix: Tensor) -> float:
    """Return the value for entries that do not count in a log-sum-exp. It is finite, so that a row without entries has a maximum."""
    return torch.finfo(matrix.dtype).min


# ---------------------------------------------------------------------- softmaxes


def log_sum_exps(values: Tensor, *, both: bool) -> tuple[Tensor, Tensor | None]:
    """Return the log-sum-exp of rows (T,) and, if ``both``, of columns (C,), of values (T, C) on the CPU.

    Both use a single exponential per entry, relative to the largest entry of all, unless a row or column is so small that it would lose
    digits.
    """
    highest = float(values.amax()) if values.numel() else math.inf
    if abs(highest) < MOST_EXPONENT:  # false for NaN
        shift = whole_power(highest)
        exponentials = powers_of_e(values, values.new_tensor(-shift))
        sums = [exponentials.sum(1)]
        if both:
            sums.append(exponentials.sum(0))
        smallest = min(float(each.min()) for each in sums)
        if smallest > torch.finfo(values.dtype).tiny ** _CLOSE:  # false if any sum is NaN
            of_rows, *of_columns = (each.log2_().add_(shift).mul_(math.log(2)) for each in sums)
            return of_rows, of_columns[0] if both else None
        del exponentials
    return values.logsumexp(1), values.logsumexp(0) if both else None


def powers_of_e(values: Tensor, shift: Tensor, ratio: float = 1.0) -> Tensor:
    """Return ``exp(ratio * values) * 2 ** shift`` in one pass. On the CPU, a power of 2 takes a quarter of the time of ``torch.exp``."""
    return torch.add(shift, values, alpha=ratio / math.log(2)).exp2_()


def whole_power(exponent: float) -> float:
    """Return the next power of 2, as its exponent, for an exponent of e."""
    return float(math.ceil(exponent / math.log(2)))


def _maximum_and_softmax(values: Tensor) -> Numbers:
    """Return the maximum of rows and its softmax, (T,) each. The maximum of a row without entries is the lowest number."""
    return values.amax(1), values.softmax(1).amax(1)


Term = Sequence[Tensor]
"""Numbers of a tile's rows, (T, 1), and of its columns, (C,). Without numbers of columns, transposed entries are not included."""


def softmax_grad(values: Tensor, softmaxes: Term, ratio: float = 1.0) -> Tensor:
    """Return the softmax of ``ratio * values`` in rows plus the softmax in columns, (T, C), each times the count of its row or column.

    Args:
        values: (T, C).
        softmaxes: Logarithms of the counts minus the log-sum-exps. If the log-sum-exps are close to each other (on the CPU, where
            logarithms are expensive), three tensors instead: factors of the exponentials for rows and for columns, and the shift (C,) of
            ``powers_of_e``.
        ratio: Factor of the values.
    """
    # one exponential serves both, which saves passes over memory (an accelerator is memory-bound)
    if len(softmaxes) == 3:
        of_rows, of_columns, shift = softmaxes
        return powers_of_e(values, shift, ratio).mul_(of_rows + of_columns)
    offset = functools.reduce(torch.logaddexp, softmaxes)
    return torch.add(offset, values, alpha=ratio).exp_()


def _of_both(term: Term) -> Tensor:
    """Return the sum of the row's number and the column's number for each entry, (T, n), or (T, 1) if there are only rows."""
    return functools.reduce(torch.add, term)


def _in_band(masks: Masks, term: Term) -> Term:
    """Return a term, restricted to the columns that may contain positives."""
    of_rows, *of_columns = term
    return of_rows, *map(masks.in_band, of_columns)


# ---------------------------------------------------------------------- limits of reducers


def _passing(losses: Tensor, weights: Tensor, limits: Limits | None) -> Tensor:
    """Return the weights of the pairs that pass, and 0 for all other pairs."""
    return weights if limits is None else weights * pass_limits(losses, *limits)


def _recorded(losses: Tensor, weights: Tensor, limits: Limits | None) -> Numbers:
    """Return the counts that a reducer only records: of all pairs, and of pairs above the lower limit."""
    above = weights
    if limits is not None:
        above = weights * pass_limits(losses, limits[0], None)
    return weights.sum(1, dtype=losses.dtype), above.sum(1, dtype=losses.dtype)


# ---------------------------------------------------------------------- supervised contrastive


def supcon_rows(matrix: Tensor, keys: Keys) -> Numbers:
    """Return the maximum, the sum of exponentials and the sum of positives relative to it, and the number of positives."""
    masks = masks_of(keys)
    matrix = masks.without_strangers(matrix, _lowest(matrix))
    maximum = matrix.amax(1)
    # relative to the row's largest entry, so that the loss is exactly 0 if one positive outweighs all other entries
    entries = matrix - maximum.unsqueeze(1)
    total = (masks.in_band(entries) * masks.positives).sum(1)
    return maximum, entries.exp_().sum(1), total, masks.number_of_positives(matrix)


def supcon_grad(matrix: Tensor, keys: Keys, softmaxes: Term, shares: Term) -> Tensor:
    """Return the softmax of the row minus the row's count distributed over its positives.

    Args:
        matrix: (T, C).
        keys: Pairs of the tile.
        softmaxes: Same as for ``softmax_grad``.
        shares: Count divided by the number of positives.
    """
    masks = masks_of(keys)
    grad = softmax_grad(matrix, softmaxes)
    return masks.subtract_at_positives_(grad, _of_both(_in_band(masks, shares)))


# ---------------------------------------------------------------------- NT-Xent


def ntxent_rows(matrix: Tensor, keys: Keys, limits: Limits | None, tiny: float, records: bool) -> Numbers:
    """Return the log-sum-exp of the negatives, and sums over the positives that pass: their pulls, their losses, and their number.

    The pull of a pair is its weight in the gradient of the negatives.

    Args:
        matrix: (T, C).
        keys: Pairs of the tile.
        limits: Limits of the reducer.
        tiny: Number that PML adds to a ratio.
        records: True if the counts that a reducer only records are also required.
    """
    masks = masks_of(keys)
    negatives, entries = masks.split(matrix, _lowest(matrix))
    lse = negatives.amax(1) - negatives.log_softmax(1).amax(1)
    return lse, *_ntxent_positives(matrix, entries, masks, limits, tiny, records, lse)


def ntxent_negatives(matrix: Tensor, keys: Keys) -> Tensor:
    """Return the log-sum-exp of the negatives, (T,), on the CPU. Requires a band."""
    masks = masks_of(keys)
    hidden = masks.hide_(matrix, _lowest(matrix))
    lse, _ = log_sum_exps(matrix, both=False)
    masks.restore_(matrix, hidden)
    return lse


def ntxent_positives(
    matrix: Tensor, keys: Keys, limits: Limits | None, tiny: float, records: bool, lse: Tensor
) -> Numbers:
    """Return the remaining numbers of ``ntxent_rows``, given the log-sum-exp (T,) of all negatives of each row."""
    masks = masks_of(keys)
    return _ntxent_positives(matrix, masks.in_band(matrix), masks, limits, tiny, records, lse)


def _ntxent_positives(
    matrix: Tensor, entries: Tensor, masks: Masks, limits: Limits | None, tiny: float, records: bool, lse: Tensor
) -> Numbers:
    positives = masks.positives
    # for entries that are not positives, the lowest number makes loss and pull zero
    below = masks.lowest_but(positives, lse.unsqueeze(1) - entries)
    losses, pulls = _ntxent_pair_(below, tiny)
    passing = _passing(losses, positives, limits)
    recorded = _recorded(losses, positives, limits) if records else ()
    number = masks.number_of_positives(matrix) if limits is None else passing.sum(1, dtype=matrix.dtype)
    # each positive is compared with all negatives of its row
    if limits is not None or masks.counted:
        losses, pulls = losses.mul_(passing), pulls.mul_(passing)
    return pulls.sum(1), losses.sum(1), number, *recorded


def ntxent_grad(
    matrix: Tensor, keys: Keys, limits: Limits | None, tiny: float, softmaxes: Term, lses: Term, *counts: Term
) -> Tensor:
    """Return the softmax over the row's negatives times the row's pull, and the derivative of each positive.

    Args:
        matrix: (T, C).
        keys: Pairs of the tile.
        limits: Limits of the reducer.
        tiny: Number that PML adds to a ratio.
        softmaxes: Same as for ``softmax_grad``.
        lses: Log-sum-exp of the negatives.
        counts: Count of a pair, if pairs of different rows count differently.
    """
    masks = masks_of(keys)
    negatives, entries = masks.split(matrix, _lowest(matrix))
    grad = softmax_grad(negatives, softmaxes)
    found = []
    # pulls for the rows, then for the columns
    for lse, *weights in zip(*(_in_band(masks, term) for term in (lses, *counts)), strict=True):
        losses, pulls = _ntxent_pair_(lse - entries, tiny, wants_loss=limits is not None)
        if limits is not None:
            pulls.mul_(pass_limits(losses, *limits))
        for weight in weights:
            pulls.mul_(weight)
        found.append(pulls)
    return masks.subtract_at_positives_(grad, functools.reduce(Tensor.add_, found))


def _ntxent_pair_(below: Tensor, tiny: float, *, wants_loss: bool = True) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair (undefined unless ``wants_loss``), and the negated derivative of the loss by the pair's entry.

    Args:
        below: Log-sum-exp of the row minus the entry. Overwritten.
        tiny: Number that PML adds to a ratio. 0 if no ratio is small enough for it to have an effect.
        wants_loss: True if the loss is required.
    """
    if not tiny:
        # the ratio is r = sigmoid(-below), the loss -log(r), its derivative 1 - r
        losses = below
        if wants_loss:
            losses = torch.nn.functional.softplus(below, threshold=_LINEAR_FROM)
        return losses, below.sigmoid_()
    # torch.sigmoid becomes 0 where exp(-x) overflows, before r is negligible next to tiny
    ratio = torch.nn.functional.logsigmoid(-below).exp_()
    lifted = ratio + tiny
    # the loss is -log(r + tiny), its derivative (1 - r) r / (r + tiny)
    pulls = below.sigmoid_().mul_(ratio).div_(lifted)
    return lifted.log_().neg_(), pulls


# ---------------------------------------------------------------------- multi-similarity


def multi_similarity_rows(matrix: Tensor, keys: Keys, base: float, ratio: float, with_one: bool = True) -> Numbers:
    """Return the maximum of the negatives and its softmax, and the same of the positives' exponents ``(entry - base) * ratio``.

    Args:
        matrix: (T, C).
        keys: Pairs of the tile.
        base: Base of the exponents, scaled like the entries.
        ratio: Factor of the positives' exponents.
        with_one: True if the constant 1 of the formula is counted in these columns. If False, there must be at least one column.
    """
    masks = masks_of(keys)
    negatives, entries = masks.split(matrix, _lowest(matrix))
    if not with_one:
        exponents = masks.lowest_but(masks.positives, (entries - base).mul_(ratio))
        return *_maximum_and_softmax(negatives), *_maximum_and_softmax(exponents)
    exponents = masks.lowest_but(masks.same, (entries - base).mul_(ratio))
    # the constant 1 is an additional entry, exp(0) at s = base. It replaces the entry of the row with itself if there is one
    if masks.are_one_batch:
        negatives, exponents = masks.without_strangers(negatives, base), masks.fill_itself(exponents, 0)
    else:
        one = matrix.new_ones(len(matrix), 1)
        negatives, exponents = torch.cat([negatives, one * base], 1), torch.cat([exponents, one * 0], 1)
    return *_maximum_and_softmax(negatives), *_maximum_and_softmax(exponents)


def multi_similarity_grad(
    matrix: Tensor, keys: Keys, ratio: float, may_overflow: bool, of_negatives: Term, of_positives: Term
) -> Tensor:
    """Return the softmax of the negatives and the negated softmax of the positives.

    Args:
        matrix: (T, C).
        keys: Pairs of the tile.
        ratio: Factor of the positives' exponents.
        may_overflow: True if the exponential of an entry that is not a positive may be infinite (it is later multiplied by 0).
        of_negatives: Offsets of the negatives' softmax.
        of_positives: Offsets of the softmax of ``ratio`` times the positives. They include the base.
    """
    masks = masks_of(keys)
    negatives, entries = masks.split(matrix, _lowest(matrix))
    grad = softmax_grad(negatives, of_negatives)
    positives = softmax_grad(entries, _in_band(masks, of_positives), ratio)
    if may_overflow:
        positives.clamp_max_(torch.finfo(matrix.dtype).max)
    return masks.subtract_at_positives_(grad, positives)


# ---------------------------------------------------------------------- contrastive


def contrastive_rows(
    matrix: Tensor,
    keys: Keys,
    margins: tuple[float, float],
    sign: float,
    limits: tuple[Limits | None, Limits | None],
    records: bool,
) -> tuple[Numbers, list[Tensor]]:
    """Return sums of passing losses and their number, and how often each pair has a passing loss: for positives, then for negatives.

    Args:
        matrix: (T, C).
        keys: Pairs of the tile.
        margins: Margins of positives and negatives.
        sign: 1 for a distance, -1 for a similarity.
        limits: Limits of the reducers of positives and negatives.
        records: True if the counts that a reducer only records are also required.
    """
    masks, (near, far) = masks_of(keys), margins
    # ``near`` makes the loss of a row with itself as a positive 0
    matrix = masks.without_strangers(matrix, near)
    entries = masks.in_band(matrix)
    violations = (entries - near, far - matrix) if sign > 0 else (near - entries, matrix - far)
    numbers: Numbers = ()
    counts: list[Tensor] = []
    for losses, are_positive, each_limits in zip(violations, (True, False), limits, strict=True):
        found, passing = _contrastive_kind(losses, masks, each_limits, records, are_positive=are_positive)
        numbers, counts = (*numbers, *found), [*counts, passing]
    return numbers, counts


def lower_limit(limits: Limits | None) -> float | None:
    """Return the limit above which all losses pass, at least 0, or None if losses of 0 may pass or large losses may not."""
    low, high = limits or (0.0, None)
    return low if high is None and low is not None and low >= 0 else None


def _contrastive_kind(
    losses: Tensor, masks: Masks, limits: Limits | None, records: bool, *, are_positive: bool
) -> tuple[Numbers, Tensor]:
    """Return the numbers of rows, and how often each pair passes, given the violations of positives (T, b) or negatives (T, C)."""
    low = lower_limit(limits)
    if low is not None and not masks.counted:
        # 0 marks pairs that do not pass and entries that are not pairs of this kind
        kept = losses.mul_(masks.same_or_positives) if are_positive else masks.weigh_negatives_(losses)
        kept = torch.threshold_(kept, low, 0)
        total = kept.sum(1)
        passing = kept.sign_()
        if limits is not None and not records:
            return (total, passing.sum(1)), passing
        of_kind = masks.number_of_positives if are_positive else masks.number_of_negatives
        number = of_kind(losses)
        passed = number if limits is None else passing.sum(1)
        return (total, passed, *((number, passed) if records else ())), passing
    weights = masks.positives if are_positive else masks.weigh_negatives_(torch.ones_like(losses))
    losses = losses.clamp_min_(0)
    passing = _passing(losses, weights, limits)
    recorded = _recorded(losses, weights, limits) if records else ()
    numbers = ((losses * passing).sum(1), passing.sum(1, dtype=losses.dtype), *recorded)
    return numbers, losses.sign_().mul_(passing)


def contrastive_grad(
    matrix: Tensor,
    keys: Keys,
    margins: tuple[float, float],
    sign: float,
    limits: tuple[Limits | None, Limits | None],
    near: Term,
    far: Term,
) -> Tensor:
    """Return the signed gradient, whose size is the sum of the counts of a pair's row and column if its loss passes, else 0.

    Args:
        matrix: (T, C).
        keys: Pairs of the tile.
        margins: Same as for ``contrastive_rows``.
        sign: Same as for ``contrastive_rows``.
        limits: Same as for ``contrastive_rows``.
        near: Counts of a positive pair.
        far: Counts of a negative pair.
    """
    masks = masks_of(keys)
    _, (positives, negatives) = contrastive_rows(matrix, masks, margins, sign, limits, False)
    positives.mul_(_of_both(_in_band(masks, near)))
    grad = negatives.mul_(_of_both(far)).mul_(-sign)
    masks.add_in_band_(grad, positives, sign)
    return grad


# ---------------------------------------------------------------------- triplets


def sorted_triplets(matrix: Tensor, keys: Keys, margin: float, limits: Limits | None) -> tuple[Numbers, Tensor]:
    """Return the negated sum of the triplets' losses, their number, and the derivative of the sum, for ``relu`` of violations.

    Each row is sorted twice, to count how many negatives violate each positive and how many positives each negative violates.

    Args:
        matrix: (T, C).
        keys: Pairs of the tile, each counted once.
        margin: Margin of the loss.
        limits: Limits of the reducer: None, or ``(0, None)`` for losses above 0.

    Returns:
        (T,) twice, and (T, C).
    """
    masks = masks_of(keys)
    negatives, entries = masks.split(matrix, torch.inf)
    thresholds = masks.lowest_but(masks.positives, entries + margin)
    in_order = negatives.sort(1).values
    violating = torch.searchsorted(in_order, thresholds)
    # how many thresholds are above each negative. A negative below none does not contribute (and may be infinite)
    counts = torch.searchsorted(thresholds.sort(1).values, negatives, right=True)
    violated = thresholds.shape[1] - counts
    pushed = torch.where(violated > 0, negatives, 0).double().mul_(violated).sum(1)
    total = pushed - (thresholds.double() * violating).sum(1)
    if limits is None:
        number = masks.number_of_positives(violating) * masks.number_of_negatives(matrix).to(violating.dtype)
    else:
        number = violating.sum(1)
    # each triplet pulls its positive closer and pushes its negative away
    masks.in_band(counts).add_(violating)
    return (total, number), torch.sub(counts, thresholds.shape[1], out=torch.empty_like(matrix))


def sorting_is_cheaper(keys: Keys) -> bool:
    """Return whether ``sorted_triplets`` is cheaper, or required because the host has not read how many positives there are."""
    masks = masks_of(keys)
    return not masks.counted and (masks.most_positives is None or masks.most_positives >= _SORT_FROM)


def triplets_one_by_one(
    matrix: Tensor, keys: Keys, margin: float, limits: Limits | None, smooth: bool, records: bool
) -> tuple[Numbers, Tensor]:
    """Return the negated sum of the triplets' losses that pass, their number, and the derivative of the sum.

    Each step compares one positive of every row with all negatives of the row.

    Args:
        matrix: (T, C).
        keys: Pairs of the tile, with ``most_positives`` set.
        margin: Margin of the loss.
        limits: Limits of the reducer.
        smooth: True if the loss is ``softplus`` of violations, else ``relu``.
        records: True if the counts that a reducer only records are also required.

    Returns:
        (T,) of each number, and (T, C).
    """
    masks = masks_of(keys)
    assert masks.most_positives is not None
    weights, columns = masks.positives.to(matrix.dtype).topk(masks.most_positives, 1)
    entries = masks.in_band(matrix).gather(1, columns)
    negatives, grad = masks.weigh_negatives_(torch.ones_like(matrix)), torch.zeros_like(matrix)
    numbers: list[Tensor] = [matrix.new_zeros(len(matrix)) for _ in range(4 if records else 2)]
    pulls = torch.zeros_like(entries)
    for k in range(entries.shape[1]):
        losses, derivatives = _of_violations_(entries[:, k : k + 1] - matrix + margin, smooth=smooth)
        allowed = negatives * weights[:, k : k + 1]
        passing = _passing(losses, allowed, limits)
        found = [-(losses * passing).sum(1), passing.sum(1)]
        if records:
            found += _recorded(losses, allowed, limits)
        for number, added in zip(numbers, found, strict=True):
            number.add_(added)
        # each triplet pulls its positive closer and pushes its negative away
        derivatives.mul_(passing)
        grad.sub_(derivatives)
        pulls[:, k] = derivatives.sum(1)
    masks.in_band(grad).scatter_add_(1, columns, pulls)
    return tuple(numbers), grad


def named_triplets(
    matrix: Tensor, triplets: Triplets, margin: float, limits: Limits | None, smooth: bool, records: bool
) -> tuple[Numbers, Tensor]:
    """Return the numbers and gradient of ``triplets_one_by_one`` for triplets that a miner selects."""
    anchors, positives, negatives = triplets
    violations = matrix[anchors, positives] - matrix[anchors, negatives] + margin
    losses, derivatives = _of_violations_(violations, smooth=smooth)
    ones = torch.ones_like(losses).unsqueeze(1)
    passing = _passing(losses.unsqueeze(1), ones, limits)
    each = [-losses * passing.squeeze(1), passing.squeeze(1)]
    if records:
        each += _recorded(losses.unsqueeze(1), ones, limits)
    numbers = tuple(matrix.new_zeros(len(matrix)).index_add_(0, anchors, number) for number in each)
    derivatives.mul_(passing.squeeze(1))
    grad = torch.zeros_like(matrix).index_put_((anchors, positives), derivatives, accumulate=True)
    return numbers, grad.index_put_((anchors, negatives), -derivatives, accumulate=True)


def _of_violations_(violations: Tensor, *, smooth: bool) -> tuple[Tensor, Tensor]:
    """Return the losses of triplets and their derivatives by the violations, which are overwritten."""
    if smooth:
        return torch.nn.functional.softplus(violations), violations.sigmoid_()
    losses = violations.clamp_min_(0)
    return losses, losses.sign()
