"""Triton kernels for the operations between the products of a tile, each in one pass over memory.

Each program computes a block of a tile. Sums and maxima of rows and columns are partial results of the blocks, stored at separate positions
and joined afterwards in order, without atomic operations, so that every run yields the same numbers. All computations are in float32.
Offsets have 64 bits, since a tile may have more than 2^31 entries. An argument that is None is left out when the kernel is compiled.

This file requires triton, so it is imported only if triton is installed (``launches``).

Arguments that several kernels share:

| argument | what |
|---|---|
| ``products`` | (T, C), of any floating dtype and strides |
| ``of_rows``, ``of_columns``, ``scale`` | (T,), (C,) and one number, factors that make logits of products |
| ``plus`` | (C,), added to the logits |
| ``own``, ``own_columns``, ``has_own`` | an entry of each row: column ``row + own``, or ``own_columns`` (T,) where ``has_own`` (T,) |
| ``values`` | (T,), numbers of the own entries |
| ``row_labels``, ``column_labels`` | (T,) and (C,). Entries of equal labels are positives, but for the own ones. All others are negatives |
| ``base``, ``ratio`` | two numbers, of MultiSimilarity: exponents of positives are ``(entry - base) * ratio`` |
| ``log_tiny`` | logarithm of the number that PML adds to NTXent's ratios, if it has an effect |
| ``high``, ``low``, ``lowest`` | (T, C), the gradient: ``high - low + lowest``, ``TERMS`` of them. If 0, it overwrites the products |
| ``logit_sums`` | (Q, T), sums of rows of the logits times their gradient, without the factors of the gradient |

Legend: ``T`` rows and ``C`` columns of a tile, ``P`` and ``Q`` its blocks of rows and of columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

# what changes from tile to tile, of which no kernel of its own is worth it: sizes, and the alignment of numbers of rows and columns
_SIZES = ["rows", "own", "text_count"]
_NUMBERS = [
    *(
        "of_rows",
        "of_columns",
        "scale",
        "bias",
        "plus",
        "own_columns",
        "has_own",
        "values",
        "row_labels",
        "column_labels",
    ),
    *("row_losses", "row_grads", "row_maxima", "row_sums", "column_maxima", "column_sums", "positive_maxima"),
    *("positive_sums", "positive_counts", "row_shares", "column_shares", "row_counts", "column_counts", "row_lse"),
    *("column_lse", "grad_of_rows", "grad_of_columns", "logit_sums", "own_logits", "near_sums", "near_numbers"),
    *("near_pulls", "far_sums", "far_numbers", "near_of_rows", "near_of_columns", "far_of_rows", "far_of_columns"),
]


@triton.jit
def _places(rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Return the blocks of a program, its rows and columns, and which of these are inside of the tile."""
    column_blocks = tl.cdiv(columns, BLOCK_COLUMNS)
    row_block = (tl.program_id(0) // column_blocks).to(tl.int64)
    column_block = (tl.program_id(0) % column_blocks).to(tl.int64)
    row = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = column_block * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    return row_block, column_block, row, column, row < rows, column < columns


@triton.jit
def _numbers(of, place, inside):
    """Return numbers of rows or columns, in float32. 0 outside of the tile."""
    return tl.load(of + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _logits(products, at, of_rows, of_columns, scale, plus, row, column, row_inside, column_inside):
    """Return products times their factors, plus numbers of their columns, in float32."""
    logits = _numbers(products, at, row_inside[:, None] & column_inside[None, :])
    if of_rows is not None:
        factors = _numbers(of_rows, row, row_inside)
        if scale is not None:
            factors = factors * tl.load(scale).to(tl.float32)
        logits = logits * factors[:, None]
    elif scale is not None:
        logits = logits * tl.load(scale).to(tl.float32)
    if of_columns is not None:
        logits = logits * _numbers(of_columns, column, column_inside)[None, :]
    if plus is not None:
        logits = logits + _numbers(plus, column, column_inside)[None, :]
    return logits


@triton.jit
def _are_own(own, own_columns, has_own, row, column, row_inside):
    """Return which entries of a block are own ones."""
    if own_columns is None:
        own_column = row + own
    else:
        own_column = tl.load(own_columns + row, mask=row_inside, other=-1).to(tl.int64)
        if has_own is not None:
            own_column = tl.where(tl.load(has_own + row, mask=row_inside, other=0) != 0, own_column, -1)
    return own_column[:, None] == column[None, :]


@triton.jit
def _are_same(row_labels, column_labels, row, column, row_inside, column_inside):
    """Return which entries of a block have equal labels."""
    of_rows = tl.load(row_labels + row, mask=row_inside, other=0)
    of_columns = tl.load(column_labels + column, mask=column_inside, other=0)
    return (of_rows[:, None] == of_columns[None, :]) & row_inside[:, None] & column_inside[None, :]


@triton.jit
def _store_terms(grad, products, at, high, low, lowest, row, column, inside, columns, TERMS: tl.constexpr):
    """Write the gradient of a block."""
    if TERMS == 0:
        tl.store(products + at, grad.to(products.dtype.element_ty), mask=inside)
    else:
        place = row[:, None] * columns + column[None, :]
        rounded = grad.to(high.dtype.element_ty)
        tl.store(high + place, rounded, mask=inside)
        if TERMS > 1:
            rest = rounded.to(tl.float32) - grad
            rounded = rest.to(low.dtype.element_ty)
            tl.store(low + place, rounded, mask=inside)
            if TERMS == 3:
                tl.store(lowest + place, (rounded.to(tl.float32) - rest).to(lowest.dtype.element_ty), mask=inside)


@triton.jit
def _log1p(small):
    """Return ``log(1 + x)`` for x from 0 to 1, with all digits of a small x: 2 artanh(x / (2 + x)), a series to 1e-8."""
    ratio = small / (small + 2.0)
    square = ratio * ratio
    series = 1.0 / 13.0 * square + 1.0 / 11.0
    series = series * square + 1.0 / 9.0
    series = series * square + 1.0 / 7.0
    series = series * square + 1.0 / 5.0
    series = series * square + 1.0 / 3.0
    return 2.0 * ratio * (series * square + 1.0)


@triton.jit
def _softplus(x):
    """Return ``log(1 + exp(x))`` and its derivative."""
    # use the smaller one of exp(x) and exp(-x), which does not overflow
    small = tl.exp(-tl.abs(x))
    return tl.where(x > 0, x, 0.0) + _log1p(small), tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def _ntxent_pair(below, log_tiny):
    """Return ``-log(r + tiny)`` of ratios ``r = sigmoid(-below)``, and the derivative by ``below``."""
    losses, pulls = _softplus(below)
    if log_tiny is not None:
        # in logarithms, because a GPU may round ratios below tiny to 0
        beyond = losses + log_tiny
        added, _ = _softplus(-tl.abs(beyond))
        _, share = _softplus(-beyond)
        losses = tl.minimum(losses, -log_tiny) - added
        pulls = pulls * share
    return losses, pulls


@triton.jit
def _pulls(entries, shares, counts, place, inside, ratio, log_tiny, PULLS: tl.constexpr, AXIS: tl.constexpr):
    """Return what is subtracted from the gradient of positives, given numbers of their rows (axis 1) or of their columns (axis 0)."""
    pulls = tl.expand_dims(_numbers(shares, place, inside), AXIS)
    if PULLS == "ntxent":
        _, pulls = _ntxent_pair(pulls - entries, log_tiny)
    elif PULLS == "softmax":
        pulls = tl.exp(ratio * entries + pulls)
    if counts is not None:
        pulls = pulls * tl.expand_dims(_numbers(counts, place, inside), AXIS)
    return pulls


@triton.jit
def _of_both(of_rows, of_columns, row, column, row_inside, column_inside):
    """Return the sum of numbers of rows and, if there are any, of columns."""
    numbers = _numbers(of_rows, row, row_inside)[:, None]
    if of_columns is not None:
        numbers = numbers + _numbers(of_columns, column, column_inside)[None, :]
    return numbers


@triton.jit
def _passing(pairs, losses, low, high):
    """Return which pairs have losses between two limits. Losses that are not numbers pass, so that they are not lost."""
    if low is not None:
        pairs = pairs & ((losses <= low) == 0)
    if high is not None:
        pairs = pairs & ((losses >= high) == 0)
    return pairs


@triton.jit
def _store_sums(values, pairs, to, place, row_inside):
    """Write the sums of a block's rows over pairs."""
    if to is not None:
        tl.store(to + place, tl.sum(tl.where(pairs, values, 0.0), 1), mask=row_inside)


@triton.jit
def _margin_pairs(violations, pairs, low, high, sums, numbers, place, row_inside):
    """Write the sum and the number of losses that pass, and return the derivative by ``violations``."""
    losses = tl.where(violations <= 0, 0.0, violations)
    passing = _passing(pairs, losses, low, high)
    _store_sums(losses, passing, sums, place, row_inside)
    _store_sums(1.0, passing, numbers, place, row_inside)
    return tl.where(passing & (losses > 0), 1.0, 0.0)


# the arguments of kernels are grouped by topic, one group per line
# fmt: off


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_NUMBERS)
def siglip_kernel(
    products, rows, columns, row_stride, column_stride,
    of_rows=None, of_columns=None, scale=None, bias=None, own=0,
    row_losses=None, row_grads=None, logit_sums=None, high=None, low=None, lowest=None,
    TERMS: tl.constexpr = 0, BLOCK_ROWS: tl.constexpr = 64, BLOCK_COLUMNS: tl.constexpr = 128,
):
    """Compute ``softplus(-t z)`` and its derivative. ``row_losses``, ``row_grads``: (Q, T), sums of rows of both."""
    _, column_block, row, column, row_inside, column_inside = _places(rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    at = row[:, None] * row_stride + column[None, :] * column_stride
    inside = row_inside[:, None] & column_inside[None, :]
    logits = _logits(products, at, of_rows, of_columns, scale, None, row, column, row_inside, column_inside)
    logits = logits + tl.load(bias).to(tl.float32)
    is_own = _are_own(own, None, None, row, column, row_inside)
    opposed = tl.where(is_own, -logits, logits)
    losses, sigmoid = _softplus(opposed)
    place = column_block * rows + row
    _store_sums(losses, inside, row_losses, place, row_inside)
    if row_grads is not None:
        grad = tl.where(is_own, -sigmoid, sigmoid)
        _store_sums(grad, inside, row_grads, place, row_inside)
        # two signs cancel
        _store_sums(opposed * sigmoid, inside, logit_sums, place, row_inside)
        if of_rows is not None:
            grad = grad * _numbers(of_rows, row, row_inside)[:, None]
        if of_columns is not None:
            grad = grad * _numbers(of_columns, column, column_inside)[None, :]
        _store_terms(grad, products, at, high, low, lowest, row, column, inside, columns, TERMS)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_NUMBERS)
def softmax_stats_kernel(
    products, rows, columns, row_stride, column_stride,
    of_rows=None, of_columns=None, scale=None, plus=None,
    own=0, own_columns=None, has_own=None, values=None, row_labels=None, column_labels=None,
    row_maxima=None, row_sums=None, column_maxima=None, column_sums=None, text_count=0,
    positive_maxima=None, positive_sums=None, positive_counts=None, base=None, ratio=None,
    OWN: tl.constexpr = "none", LOWEST: tl.constexpr = 0.0, KEEPS: tl.constexpr = False,
    BLOCK_ROWS: tl.constexpr = 64, BLOCK_COLUMNS: tl.constexpr = 128,
):
    """Compute the maximum of rows and columns and the sum of exponentials relative to it, (Q, T) and (P, text_count).

    ``OWN``: with ``"lowest"``, own entries are excluded. With ``"same"``, all entries of equal labels are excluded. With ``"put"``, own
    entries are replaced by ``values``. With ``"take"``, they are stored in ``values``. ``positive_sums``: sum of the positives relative to
    the maximum, with their number, or sum of their exponentials relative to ``positive_maxima``, (Q, T). If ``KEEPS``, logits overwrite the
    products.
    """
    row_block, column_block, row, column, row_inside, column_inside = _places(rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    at = row[:, None] * row_stride + column[None, :] * column_stride
    inside = row_inside[:, None] & column_inside[None, :]
    logits = _logits(products, at, of_rows, of_columns, scale, plus, row, column, row_inside, column_inside)
    is_own = _are_own(own, own_columns, has_own, row, column, row_inside)
    place = column_block * rows + row
    if row_labels is not None:
        same = _are_same(row_labels, column_labels, row, column, row_inside, column_inside)
        positives = same & (is_own == 0)
        if positive_maxima is not None:
            exponents = tl.where(positives, (logits - base) * ratio, LOWEST)
            maximum = tl.max(exponents, 1)
            tl.store(positive_maxima + place, maximum, mask=row_inside)
            _store_sums(tl.exp(exponents - maximum[:, None]), positives, positive_sums, place, row_inside)
    if OWN == "lowest":
        logits = tl.where(is_own, LOWEST, logits)
    elif OWN == "same":
        logits = tl.where(same, LOWEST, logits)
    elif OWN == "put":
        logits = tl.where(is_own, _numbers(values, row, row_inside)[:, None], logits)
    elif OWN == "take":
        places = tl.broadcast_to(row[:, None], (BLOCK_ROWS, BLOCK_COLUMNS))
        tl.store(values + places, logits.to(values.dtype.element_ty), mask=inside & is_own)
    if KEEPS:
        tl.store(products + at, logits.to(products.dtype.element_ty), mask=inside)
    known = tl.where(inside, logits, LOWEST)
    maximum = tl.max(known, 1)
    tl.store(row_maxima + place, maximum, mask=row_inside)
    differences = known - maximum[:, None]
    _store_sums(tl.exp(differences), inside, row_sums, place, row_inside)
    if positive_counts is not None:
        _store_sums(differences, positives, positive_sums, place, row_inside)
        _store_sums(1.0, positives, positive_counts, place, row_inside)
    if column_maxima is not None:
        maximum = tl.max(known, 0)
        place = row_block * text_count + column
        tl.store(column_maxima + place, maximum, mask=column < text_count)
        exponentials = tl.where(inside, tl.exp(known - maximum[None, :]), 0.0)
        tl.store(column_sums + place, tl.sum(exponentials, 0), mask=column < text_count)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_NUMBERS)
def softmax_terms_kernel(
    products, rows, columns, row_stride, column_stride,
    of_rows=None, of_columns=None, scale=None, plus=None,
    own=0, own_columns=None, has_own=None, values=None, row_labels=None, column_labels=None,
    row_shares=None, column_shares=None, row_counts=None, column_counts=None, ratio=None, log_tiny=None,
    row_lse=None, column_lse=None,
    grad_of_rows=None, grad_of_columns=None, logit_sums=None, own_logits=None, high=None, low=None, lowest=None,
    OWN: tl.constexpr = "none", PULLS: tl.constexpr = "shares", SIGN: tl.constexpr = 1, TERMS: tl.constexpr = 0,
    BLOCK_ROWS: tl.constexpr = 64, BLOCK_COLUMNS: tl.constexpr = 128,
):
    """Compute the softmax of the rows plus the softmax of the columns, times factors ``grad_of_rows`` and ``grad_of_columns``.

    ``row_lse``, ``column_lse``: log-sum-exps of rows and columns, times ``SIGN``. ``OWN``: with ``"put"``, own entries of the gradient are
    ``values``. With ``"zero"``, they are 0. With ``"subtract"``, 1 is subtracted. ``logit_sums`` count ``own_logits`` (T,) for own
    entries, where they are given. If there are labels, numbers of rows and of columns are subtracted from the positives. ``PULLS``: with
    ``"shares"``, ``row_shares`` and ``column_shares``. Otherwise the softmax of positives is 0, and the numbers are: with ``"ntxent"``,
    the derivative of NTXent's ratio, where the log-sum-exps of the negatives are the shares, times ``row_counts`` and ``column_counts``.
    With ``"softmax"``, ``exp(ratio * entry + share)``.
    """
    _, column_block, row, column, row_inside, column_inside = _places(rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    at = row[:, None] * row_stride + column[None, :] * column_stride
    inside = row_inside[:, None] & column_inside[None, :]
    logits = _logits(products, at, of_rows, of_columns, scale, plus, row, column, row_inside, column_inside)
    is_own = _are_own(own, own_columns, has_own, row, column, row_inside)
    grad = tl.exp(logits - SIGN * _numbers(row_lse, row, row_inside)[:, None])
    if column_lse is not None:
        grad = grad + tl.exp(logits - SIGN * _numbers(column_lse, column, column_inside)[None, :])
    if row_labels is not None:
        same = _are_same(row_labels, column_labels, row, column, row_inside, column_inside)
        if PULLS != "shares":
            grad = tl.where(same, 0.0, grad)
        pulls = _pulls(logits, row_shares, row_counts, row, row_inside, ratio, log_tiny, PULLS, 1)
        if column_shares is not None:
            pulls += _pulls(logits, column_shares, column_counts, column, column_inside, ratio, log_tiny, PULLS, 0)
        grad = tl.where(same, grad - pulls, grad)
    if OWN == "put":
        grad = tl.where(is_own, _numbers(values, row, row_inside)[:, None], grad)
    elif OWN == "zero":
        grad = tl.where(is_own, 0.0, grad)
    elif OWN == "subtract":
        grad = tl.where(is_own, grad - 1.0, grad)
    if logit_sums is not None:
        if own_logits is not None:
            logits = tl.where(is_own, _numbers(own_logits, row, row_inside)[:, None], logits)
        counted = tl.where(inside, logits * grad, 0.0)
        tl.store(logit_sums + column_block * rows + row, tl.sum(counted, 1), mask=row_inside)
    if grad_of_rows is not None:
        grad = grad * _numbers(grad_of_rows, row, row_inside)[:, None]
    if grad_of_columns is not None:
        grad = grad * _numbers(grad_of_columns, column, column_inside)[None, :]
    _store_terms(grad, products, at, high, low, lowest, row, column, inside, columns, TERMS)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_NUMBERS)
def pair_losses_kernel(
    products, rows, columns, row_stride, column_stride,
    own=0, own_columns=None, row_labels=None, column_labels=None,
    row_lse=None, log_tiny=None, near=None, far=None, near_low=None, near_high=None, far_low=None, far_high=None,
    near_sums=None, near_numbers=None, near_pulls=None, far_sums=None, far_numbers=None,
    near_of_rows=None, near_of_columns=None, far_of_rows=None, far_of_columns=None, near_grads=None, far_grads=None,
    SIGN: tl.constexpr = 1, BLOCK_ROWS: tl.constexpr = 64, BLOCK_COLUMNS: tl.constexpr = 128,
):
    """Compute losses of single pairs, their derivatives, and sums of rows over pairs whose loss is between limits.

    ``row_lse``: (T,), log-sum-exps of the negatives of NTXent. ``near_sums``, ``near_numbers``, ``near_pulls``: (Q, T), losses of the
    positives, their number, and the sum of their derivatives. Without ``row_lse``: losses of positives farther than ``near``, and of
    negatives nearer than ``far`` (``far_sums``, ``far_numbers``), where ``SIGN`` times an entry is a distance. ``near_grads``,
    ``far_grads``: (T, C), 1 for a loss that passes. With ``near_of_rows`` and further factors (T,) and (C,), ``near_grads`` is the signed
    gradient of both.
    """
    _, column_block, row, column, row_inside, column_inside = _places(rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    at = row[:, None] * row_stride + column[None, :] * column_stride
    inside = row_inside[:, None] & column_inside[None, :]
    entries = _numbers(products, at, inside)
    is_own = _are_own(own, own_columns, None, row, column, row_inside)
    same = _are_same(row_labels, column_labels, row, column, row_inside, column_inside)
    positives, place = same & (is_own == 0), column_block * rows + row
    if row_lse is not None:
        losses, pulls = _ntxent_pair(_numbers(row_lse, row, row_inside)[:, None] - entries, log_tiny)
        _store_sums(losses, positives, near_sums, place, row_inside)
        _store_sums(1.0, positives, near_numbers, place, row_inside)
        _store_sums(pulls, positives, near_pulls, place, row_inside)
    else:
        negatives = inside & (same == 0)
        near_grad = _margin_pairs(
            SIGN * (entries - near), positives, near_low, near_high, near_sums, near_numbers, place, row_inside
        )
        far_grad = _margin_pairs(
            SIGN * (far - entries), negatives, far_low, far_high, far_sums, far_numbers, place, row_inside
        )
        if near_of_rows is not None:
            near_counts = _of_both(near_of_rows, near_of_columns, row, column, row_inside, column_inside)
            far_counts = _of_both(far_of_rows, far_of_columns, row, column, row_inside, column_inside)
            near_grad = SIGN * (near_grad * near_counts - far_grad * far_counts)
        else:
            _store_terms(far_grad, products, at, far_grads, None, None, row, column, inside, columns, 1)
        _store_terms(near_grad, products, at, near_grads, None, None, row, column, inside, columns, 1)
