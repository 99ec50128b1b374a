"""Losses over pairs in tiles (`PairLoss`): the numbers of each row, how a reducer sums them, and the gradient of a tile.

A pair loss processes each tile of the scaled matrix twice. Forward computes a few numbers for each row. PML's reducer turns them into the
sub-losses, and ``k`` statistics are stored (a log-sum-exp, the count of the row). They are sufficient for backward to compute the gradient
of the tile. If the matrix is symmetric, the other ranks' statistics also determine the gradient of the transposed entries of the same tile,
so no gradient has to be sent. The formulas are in ``tile_functions``.

Legend: ``T`` rows of a tile, ``C`` columns, ``B`` rows on this rank, ``G`` columns over all ranks, ``k`` statistics of a row. ``s_ij`` is
the similarity of row i and column j over the temperature, ``l_i`` the log-sum-exp of row i, ``d`` a distance (a similarity negated).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_ddp_losses.losses.partial_sums import PartialSum, stack_numbers
from lightning_ddp_losses.losses.pml_registry import Reduction
from lightning_ddp_losses.losses.tiled import tile_functions as formulas
from lightning_ddp_losses.losses.tiled.distances import is_one_product
from lightning_ddp_losses.losses.tiled.reductions import limits_of, reduce_pairs, reduce_rows
from lightning_ddp_losses.losses.tiled.tiles import Keys, LabelKeys, Tile, Triplets

_LOG_COLUMNS = 25.0  # upper bound for the logarithm of the number of columns, for any memory size
_CLOSE = 0.65  # log-sum-exps within this range, in units of the largest exponent, can be exponentiated separately without loss of precision


# ---------------------------------------------------------------------- a loss on tiles


def _keys_of(tile: Tile) -> Keys:
    """Return the masks of a tile, for a loss that does not compare triplets."""
    assert not isinstance(tile.keys, Triplets)
    return tile.keys


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class PairLoss:
    """One loss on tiles.

    Args:
        loss: The loss from pytorch-metric-learning, from which parameters such as the margin are read.
        reductions: One per sub-loss.
        like: Tensor with the tiles' dtype and device.
        run: Calls a function of ``tile_functions`` in compiled form. If None, functions are not compiled.
        records: True if the counts that reducers only record are required.

    Attributes:
        sub_losses: Names of the sub-losses.
        numbers: How many numbers each row has.
        recorded: How many additional numbers there are if reducers record counts.
        symmetric: True if gradients of transposed entries follow from the statistics, and rows and columns have the same formula.
        needs_both_kinds: True if PML returns zero when there are no positives or no negatives.
        counts_pairs_once: True if a pair counts once, however often a miner selects it.
        width: k.
        scale: Factor of the distances in the tiles' matrix.
        grad_in_forward: True if a tile's gradient depends only on that tile, up to a factor per sub-loss.
        grad_signs: Factor of each sub-loss's gradient that is computed in forward.
        factor: Factor of gradients, after ``prepare_backward``. None means 1.
        grad_of: Formula of a tile's gradient.
        grad_options: Additional arguments of ``grad_of``.
        terms: Terms of ``grad_of`` for all rows and all columns, after ``prepare_backward``.
    """

    sub_losses: ClassVar[tuple[str, ...]] = ("loss",)
    numbers: ClassVar[int] = 4
    recorded: ClassVar[int] = 0
    symmetric: ClassVar[bool] = True
    needs_both_kinds: ClassVar[bool] = False
    counts_pairs_once: ClassVar[bool] = False
    grad_in_forward: bool = False
    grad_signs: tuple[float, ...] = (1.0,)
    width: int = 0
    scale: float = 1.0
    factor: Tensor | None = None
    grad_of: Callable[..., Tensor]
    grad_options: tuple[Any, ...] = ()
    terms: list[formulas.Term]

    def __init__(
        self,
        loss: Any,
        reductions: Sequence[Reduction],
        like: Tensor,
        run: Callable[..., Any] | None = None,
        *,
        records: bool = False,
    ) -> None:
        self.loss, self.reductions, self.like, self.run, self.records = loss, reductions, like, run or _call, records
        self.sign = -1.0 if loss.distance.is_inverted else 1.0  # sign times the matrix is a distance

    @classmethod
    def supports(cls, loss: Any, reductions: Sequence[Reduction]) -> bool:
        """Return whether this class implements the loss with its configuration and reducers."""
        return True

    @classmethod
    def supports_whole(cls, loss: Any, reductions: Sequence[Reduction]) -> bool:
        """Return whether the loss, with its configuration and reducers, can be evaluated without reading pairs on the host."""
        return True

    @classmethod
    def has_kernels(cls, reductions: Sequence[Reduction]) -> bool:
        """Return whether ``kernels.launches`` implements the functions, with these reducers."""
        return True

    def nothing(self, rows: int) -> formulas.Numbers:
        """Return numbers of rows without columns, (rows,) each. In this case the loss is zero, whatever the numbers are."""
        recorded = self.recorded if self.records else 0
        return tuple(self.like.new_zeros(self.numbers + recorded, rows))

    def rows(self, tile: Tile, *, with_grads: bool) -> tuple[formulas.Numbers, list[Tensor]]:
        """Compute the numbers of a tile's rows, (T,) each.

        Args:
            tile: The tile.
            with_grads: True if the derivative of each sub-loss by the entries is required, up to ``grad_signs``. Only if
                ``grad_in_forward``. Its shape is (T, C), or (T, b) for a band.
        """
        raise NotImplementedError

    def finalize(self, numbers: formulas.Numbers, labels: Tensor | None) -> tuple[list[PartialSum], Tensor]:
        """Reduce the numbers of all rows.

        Args:
            numbers: (B,) each.
            labels: (B,), in the same order.

        Returns:
            One total per sub-loss, and (B, k) statistics.
        """
        raise NotImplementedError

    def prepare_backward(self, row_stats: Tensor, column_stats: Tensor | None, factors: Sequence[Tensor]) -> None:
        """Prepare the terms of all rows and columns that ``grad`` uses.

        Args:
            row_stats: (B, k), in the tiles' order.
            column_stats: (G, k), in the columns' order. The same tensor if rows and columns are the same. If None, the gradient of the
                transposed entries is not included.
            factors: Factor of each sub-loss's sum.
        """
        raise NotImplementedError

    def grad(self, tile: Tile) -> Tensor:
        """Compute a tile's gradient, (T, C), up to ``factor``."""
        return self.grad_by(self.terms, tile)

    def grad_by(self, terms: Sequence[formulas.Term], tile: Tile) -> Tensor:
        """Compute a tile's gradient from terms of all rows and all columns."""
        of_tile: list[formulas.Term] = []
        for of_rows, *of_columns in terms:
            rows_here, columns_here = of_rows[tile.rows].unsqueeze(1), of_columns
            if tile.columns is not None:
                columns_here = [each[tile.columns] for each in of_columns]
            of_tile.append((rows_here, *columns_here))
        return self.run(self.grad_of, tile.matrix, tile.keys, *self.grad_options, *of_tile)  # type: ignore[no-any-return]


class SoftmaxPairLoss(PairLoss):
    """A loss with a softmax per row.

    Attributes:
        rows_of: Formula of the numbers of rows.
        row_options: Additional arguments of ``rows_of``.
        opposite_terms: Like ``terms``, for rows with counts below 0. The resulting gradient is subtracted.
        positives_last: True if numbers of positives depend on all negatives of their rows.
        of_far: The numbers of rows that ``far`` computes. The others do not depend on negatives.
    """

    positives_last: ClassVar[bool] = False
    of_far: ClassVar[slice] = slice(None)
    width = 3
    rows_of: Callable[..., formulas.Numbers]
    row_options: tuple[Any, ...] = ()
    opposite_terms: Sequence[formulas.Term] = ()

    def rows(self, tile: Tile, *, with_grads: bool) -> tuple[formulas.Numbers, list[Tensor]]:
        return self.run(self.rows_of, tile.matrix, tile.keys, *self.row_options), []

    # numbers of rows that are split over several tiles (``half_tiles``)

    def start(self, rows: int) -> formulas.Numbers:
        """Return initial numbers of rows, (rows,) each. If ``positives_last``, the numbers of positives are left out."""
        return self.of_negatives(self.like.new_full((rows,), torch.finfo(self.like.dtype).min))

    def part(self, tile: Tile) -> formulas.Numbers:
        """Compute ``rows`` for some of the columns. If ``positives_last``, the numbers of positives are left out."""
        return self.rows(tile, with_grads=False)[0]

    def far(self, matrix: Tensor, *, both: bool) -> tuple[formulas.Numbers, formulas.Numbers | None]:
        """Compute ``part`` for a matrix (T, C) whose entries are all negatives, but only the numbers ``of_far``.

        If ``both``, the second result has the numbers of its columns.
        """
        of_rows, of_columns = formulas.log_sum_exps(matrix, both=both)
        return self.of_negatives(of_rows), None if of_columns is None else self.of_negatives(of_columns)

    def of_negatives(self, lse: Tensor) -> formulas.Numbers:
        """Return the numbers of rows that have only negatives, given their log-sum-exps (n,)."""
        raise NotImplementedError

    def join_(self, known: formulas.Numbers, added: formulas.Numbers) -> None:
        """Join numbers of the same rows over other columns, all or those ``of_far``, with the known numbers, in their memory."""
        raise NotImplementedError

    def positives(self, tile: Tile, known: formulas.Numbers) -> formulas.Numbers:
        """Compute the numbers of positives in some columns, given all other numbers of the rows, if ``positives_last``. They are summed."""
        raise NotImplementedError

    def prepare_backward(self, row_stats: Tensor, column_stats: Tensor | None, factors: Sequence[Tensor]) -> None:
        self.factor = factors[0]
        stats, weights = [each for each in (row_stats, column_stats) if each is not None], self.reductions[0].weights
        if weights is None or not bool((weights < 0).any()):
            self.terms = self.terms_of(stats)
            return
        # counts are used as logarithms, so the gradient of rows with negative counts is computed with the opposite counts and subtracted
        self.terms = self.terms_of([_counts_above_0(each, 1) for each in stats])
        self.opposite_terms = self.terms_of([_counts_above_0(each, -1) for each in stats])

    def grad(self, tile: Tile) -> Tensor:
        if not self.opposite_terms:
            return super().grad(tile)
        matrix = tile.matrix.clone()
        grad = self.grad_by(self.terms, tile)
        return grad.sub_(self.grad_by(self.opposite_terms, tile._replace(matrix=matrix)))

    def terms_of(self, stats: Sequence[Tensor]) -> list[formulas.Term]:
        """Return the terms of ``grad_of``, given (n, k) statistics of rows and, if present, of columns. The softmax is the first term."""
        raise NotImplementedError

    def softmax_of(self, stats: Sequence[Tensor], lse: int) -> formulas.Term:
        """Return the term of ``softmax_grad``.

        Args:
            stats: (n, k) statistics of rows and, if present, of columns. Index 1 is the count of the row or column.
            lse: Index of the log-sum-exp among them.
        """
        lses, counts = _column(stats, lse), _column(stats, 1)
        if len(stats) == 2 and self.like.device.type == "cpu" and self.run is _call:
            # no entry is larger than the log-sum-exp of its row or of its column
            lowest, highest = torch.cat(lses).aminmax()
            are_close = highest - lowest < _CLOSE * math.log(torch.finfo(lowest.dtype).max)
            if are_close and abs(highest) < formulas.MOST_EXPONENT:
                shift = formulas.whole_power(float(highest))
                shifts = highest.new_full((len(lses[1]),), -shift)
                factors = [
                    count * formulas.powers_of_e(each, -shifts[:1], -1)
                    for each, count in zip(lses, counts, strict=True)
                ]
                return *factors, shifts
        offsets = [counts[0].log() - lses[0]]
        if len(stats) == 2:
            offsets.append(offsets[0] if stats[1] is stats[0] else counts[1].log() - lses[1])
        return offsets


def _column(stats: Sequence[Tensor], index: int) -> list[Tensor]:
    """Return one statistic of rows and, if present, of columns."""
    return [each[:, index] for each in stats]


def _counts_above_0(stats: Tensor, sign: int) -> Tensor:
    """Return statistics (n, 3) with numbers proportional to the row's count multiplied by ``sign`` and clamped at 0; log-sum-exps stay."""
    return torch.cat([stats[:, :1], (stats[:, 1:] * sign).clamp_min_(0)], 1)


class NTXent(SoftmaxPairLoss):
    """``-log r_ip`` over the positive pairs, ``r_ip = exp(s_ip) / (exp(s_ip) + sum over the negatives of exp(s_in))``.

    Statistics of a row: l over its negatives, the sum over its positives of their weights in the negatives' gradient, the count of a pair.
    """

    recorded = 2
    positives_last = True
    rows_of = staticmethod(formulas.ntxent_rows)
    grad_of = staticmethod(formulas.ntxent_grad)

    def __init__(self, loss: Any, reductions: Sequence[Reduction], *args: Any, **options: Any) -> None:
        super().__init__(loss, reductions, *args, **options)
        self.scale = -self.sign / loss.temperature
        self.grad_options = limits_of(reductions[0]), self._tiny_that_counts()
        self.row_options = (*self.grad_options, self.records)

    @classmethod
    def has_kernels(cls, reductions: Sequence[Reduction]) -> bool:
        # rounding decides whether a loss passes a limit, so that a kernel would not have the same numbers
        return limits_of(reductions[0]) is None

    def of_negatives(self, lse: Tensor) -> formulas.Numbers:
        return (lse,)

    def part(self, tile: Tile) -> formulas.Numbers:
        return (formulas.ntxent_negatives(tile.matrix, _keys_of(tile)),)

    def join_(self, known: formulas.Numbers, added: formulas.Numbers) -> None:
        for stored, each in zip(known, added, strict=True):
            torch.logaddexp(stored, each, out=stored)

    def positives(self, tile: Tile, known: formulas.Numbers) -> formulas.Numbers:
        return formulas.ntxent_positives(tile.matrix, _keys_of(tile), *self.row_options, *known)

    def finalize(self, numbers: formulas.Numbers, labels: Tensor | None) -> tuple[list[PartialSum], Tensor]:
        lse, pull, *sums = numbers
        total, counts = reduce_pairs(self.reductions[0], sums, labels)
        if counts is None:
            counts = torch.ones_like(pull)
        else:
            pull = pull * counts
        return [total], torch.stack([lse, pull, counts], 1)

    def terms_of(self, stats: Sequence[Tensor]) -> list[formulas.Term]:
        found = [self.softmax_of(stats, 0), _column(stats, 0)]
        # without class weights and per-anchor averages, pairs of all rows have equal counts
        is_uniform = self.reductions[0].weights is None and not self.reductions[0].per_anchor
        return found if is_uniform else [*found, _column(stats, 2)]

    def _tiny_that_counts(self) -> float:
        """Return the number that PML adds to each ratio, or 0 if it has no effect because ratios of unit-length rows are large enough."""
        distance, limits = self.loss.distance, torch.finfo(self.like.dtype)
        are_cosines = is_one_product(distance) and distance.normalize_embeddings and distance.p == 2
        # for cosines, -log r < 2 / temperature + log(number of columns + 1)
        most, counting = 2 * abs(self.scale) + _LOG_COLUMNS, math.log(limits.eps) - math.log(limits.tiny)
        return 0.0 if are_cosines and most < counting else float(limits.tiny)


class SupCon(SoftmaxPairLoss):
    """``l_i`` minus the mean of ``s_ip`` over the positives of each row, with l over all its partners.

    Statistics of a row: l, the count of the row, and the count divided by the row's number of positives.
    """

    counts_pairs_once = True
    needs_both_kinds = True
    rows_of = staticmethod(formulas.supcon_rows)
    grad_of = staticmethod(formulas.supcon_grad)

    def __init__(self, loss: Any, reductions: Sequence[Reduction], *args: Any, **options: Any) -> None:
        super().__init__(loss, reductions, *args, **options)
        self.scale = -self.sign / loss.temperature

    def of_negatives(self, lse: Tensor) -> formulas.Numbers:
        none = torch.zeros_like(lse)
        return lse, torch.ones_like(lse), none, none.clone()

    def join_(self, known: formulas.Numbers, added: formulas.Numbers) -> None:
        maximum = torch.maximum(known[0], added[0])
        sums = []
        for own_maximum, sum_exp, total, number in (known, added):
            # stays finite for rows without entries
            shift = (own_maximum - maximum).clamp_min_(torch.finfo(maximum.dtype).min)
            sums.append((sum_exp * shift.exp(), total + number * shift, number))
        known[0].copy_(maximum)
        for stored, *each in zip(known[1:], *sums, strict=True):
            torch.add(*each, out=stored)

    def finalize(self, numbers: formulas.Numbers, labels: Tensor | None) -> tuple[list[PartialSum], Tensor]:
        maximum, sum_exp, positive_sum, number = numbers
        above, has_none = sum_exp.log(), number == 0
        number = number.clamp(min=1)
        losses = (above - positive_sum / number).masked_fill_(has_none, 0)
        total, counts = reduce_rows(self.reductions[0], losses, labels)
        if counts is None:
            counts = torch.ones_like(losses)
        counts = counts.masked_fill(has_none, 0)
        return [total], torch.stack([maximum + above, counts, counts / number], 1)

    def terms_of(self, stats: Sequence[Tensor]) -> list[formulas.Term]:
        return [self.softmax_of(stats, 0), _column(stats, 2)]


class MultiSimilarity(SoftmaxPairLoss):
    """``log(1 + sum exp(alpha (base - s_ip))) / alpha + log(1 + sum exp(beta (s_in - base))) / beta`` over positives and negatives.

    The matrix is multiplied by beta. Statistics of a row: the negatives' log-sum-exp, the count of the row, the positives' log-sum-exp.
    """

    counts_pairs_once = True
    of_far = slice(2)
    rows_of = staticmethod(formulas.multi_similarity_rows)
    grad_of = staticmethod(formulas.multi_similarity_grad)

    def __init__(self, loss: Any, reductions: Sequence[Reduction], *args: Any, **options: Any) -> None:
        super().__init__(loss, reductions, *args, **options)
        self.scale = -self.sign * loss.beta
        self._base, self._ratio = -self.sign * loss.beta * loss.base, -loss.alpha / loss.beta
        distance = loss.distance
        are_cosines = is_one_product(distance) and distance.normalize_embeddings and distance.p == 2
        may_overflow = not are_cosines or 4 * loss.alpha > math.log(torch.finfo(self.like.dtype).max)
        self.row_options, self.grad_options = (self._base, self._ratio), (self._ratio, may_overflow)

    @classmethod
    def supports(cls, loss: Any, reductions: Sequence[Reduction]) -> bool:
        return bool(loss.alpha > 0 and loss.beta > 0)

    def start(self, rows: int) -> formulas.Numbers:
        # the constant 1 of the formula is one more entry
        one = self.like.new_ones(rows)
        return one * self._base, one, one * 0, one.clone()

    def of_negatives(self, lse: Tensor) -> formulas.Numbers:
        return lse, torch.ones_like(lse)

    def part(self, tile: Tile) -> formulas.Numbers:
        base, ratio = self.row_options
        return formulas.multi_similarity_rows(tile.matrix, _keys_of(tile), base, ratio, with_one=False)

    def join_(self, known: formulas.Numbers, added: formulas.Numbers) -> None:
        for place in range(0, len(known), 2):  # the largest entry and its softmax, for negatives and for positives
            maximum = torch.maximum(known[place], added[place])
            sums = [(each[place] - maximum).exp_().div_(each[place + 1]) for each in (known, added)]
            known[place].copy_(maximum)
            torch.add(*sums, out=known[place + 1]).reciprocal_()

    def finalize(self, numbers: formulas.Numbers, labels: Tensor | None) -> tuple[list[PartialSum], Tensor]:
        maximum, softmax, highest, positive_softmax = numbers
        above = softmax.reciprocal().log()
        positive_lse = highest + positive_softmax.reciprocal().log()
        losses = positive_lse / self.loss.alpha + (maximum - self._base + above) / self.loss.beta
        total, counts = reduce_rows(self.reductions[0], losses, labels)
        if counts is None:
            counts = torch.ones_like(losses)
        # the third statistic is shifted so that it applies to entries without the base
        return [total], torch.stack([maximum + above, counts, positive_lse + self._base * self._ratio], 1)

    def prepare_backward(self, row_stats: Tensor, column_stats: Tensor | None, factors: Sequence[Tensor]) -> None:
        super().prepare_backward(row_stats, column_stats, factors)
        self.factor = factors[0] / self.loss.beta

    def terms_of(self, stats: Sequence[Tensor]) -> list[formulas.Term]:
        return [self.softmax_of(stats, 0), self.softmax_of(stats, 2)]


class Contrastive(PairLoss):
    """``relu(d_ip - pos_margin)`` over positive pairs and ``relu(neg_margin - d_in)`` over negative pairs (similarities are negated).

    Statistics of a row, unless pairs of all rows have equal counts: the counts of a positive and of a negative pair.
    """

    sub_losses = ("pos_loss", "neg_loss")
    recorded = 4
    grad_of = staticmethod(formulas.contrastive_grad)

    def __init__(self, loss: Any, reductions: Sequence[Reduction], *args: Any, **options: Any) -> None:
        super().__init__(loss, reductions, *args, **options)
        self.grad_in_forward = not any(r.per_anchor or r.weights is not None for r in reductions)
        self.width = 0 if self.grad_in_forward else 2
        self.grad_signs = (self.sign, -self.sign)
        near, far = reductions
        self.grad_options = (loss.pos_margin, loss.neg_margin), self.sign, (limits_of(near), limits_of(far))

    def rows(self, tile: Tile, *, with_grads: bool) -> tuple[formulas.Numbers, list[Tensor]]:
        numbers, grads = self.run(formulas.contrastive_rows, tile.matrix, tile.keys, *self.grad_options, self.records)
        return numbers, grads if with_grads else []

    def finalize(self, numbers: formulas.Numbers, labels: Tensor | None) -> tuple[list[PartialSum], Tensor]:
        half = len(numbers) // 2
        positives, positive_counts = reduce_pairs(self.reductions[0], numbers[:half], labels)
        negatives, negative_counts = reduce_pairs(self.reductions[1], numbers[half:], labels)
        if self.grad_in_forward:
            return [positives, negatives], self.like.new_empty((len(numbers[0]), 0))
        ones = torch.ones_like(numbers[0])
        stats = [ones if counts is None else counts for counts in (positive_counts, negative_counts)]
        return [positives, negatives], torch.stack(stats, 1)

    def prepare_backward(self, row_stats: Tensor, column_stats: Tensor | None, factors: Sequence[Tensor]) -> None:
        both = stack_numbers(factors, row_stats).to(row_stats.dtype)
        if self.grad_in_forward:
            counts = [both.expand(len(row_stats), 2)]
        else:
            counts = [stats * both for stats in (row_stats, column_stats) if stats is not None]
        self.terms = [*zip(*(each.unbind(1) for each in counts), strict=True)]


class TripletMargin(PairLoss):
    """``relu`` (or ``softplus``) of the violation ``d_ap - d_an + margin`` over all triplets of each row."""

    symmetric = False
    numbers = 2
    recorded = 2

    def __init__(self, loss: Any, reductions: Sequence[Reduction], *args: Any, **options: Any) -> None:
        super().__init__(loss, reductions, *args, **options)
        self.scale, self._limits = self.sign, limits_of(reductions[0])
        self.grad_in_forward = reductions[0].weights is None
        self._can_sort = _can_sort(loss, reductions) and not self.records

    @classmethod
    def supports(cls, loss: Any, reductions: Sequence[Reduction]) -> bool:
        # PML does not average triplets per anchor either
        return not loss.swap and loss.triplets_per_anchor == "all" and not reductions[0].per_anchor

    @classmethod
    def supports_whole(cls, loss: Any, reductions: Sequence[Reduction]) -> bool:
        # otherwise positives are processed one at a time, and the host must read how many there are
        return _can_sort(loss, reductions)

    @classmethod
    def has_kernels(cls, reductions: Sequence[Reduction]) -> bool:
        # rows are sorted
        return False

    def rows(self, tile: Tile, *, with_grads: bool) -> tuple[formulas.Numbers, list[Tensor]]:
        numbers, grad = self._triplets(tile)
        return numbers, [grad] if with_grads else []

    def finalize(self, numbers: formulas.Numbers, labels: Tensor | None) -> tuple[list[PartialSum], Tensor]:
        total, counts = reduce_pairs(self.reductions[0], (-numbers[0], *numbers[1:]), labels)
        self._counts = counts
        return [total], self.like.new_empty((len(numbers[0]), 0))

    def prepare_backward(self, row_stats: Tensor, column_stats: Tensor | None, factors: Sequence[Tensor]) -> None:
        if self._counts is not None:
            self._row_counts = self._counts * factors[0]
        else:
            self._row_counts = stack_numbers(factors, self.like).to(self.like.dtype).expand(len(row_stats))

    def grad(self, tile: Tile) -> Tensor:
        _, grad = self._triplets(tile)
        return grad.mul_(self._row_counts[tile.rows].unsqueeze(1))

    def _triplets(self, tile: Tile) -> tuple[formulas.Numbers, Tensor]:
        """Return minus the sum of the losses of a tile's rows, their number, and the derivative of the sum."""
        margin, smooth = self.loss.margin, self.loss.smooth_loss
        if isinstance(tile.keys, Triplets):
            return formulas.named_triplets(tile.matrix, tile.keys, margin, self._limits, smooth, self.records)
        if self._can_sort and (isinstance(tile.keys, LabelKeys) or formulas.sorting_is_cheaper(tile.keys)):
            return self.run(formulas.sorted_triplets, tile.matrix, tile.keys, margin, self._limits)  # type: ignore[no-any-return]
        return formulas.triplets_one_by_one(tile.matrix, tile.keys, margin, self._limits, smooth, self.records)


def _can_sort(loss: Any, reductions: Sequence[Reduction]) -> bool:
    """Return whether sorting rows is sufficient: it yields the sum of the losses above 0, and their number."""
    return not loss.smooth_loss and limits_of(reductions[0]) in (None, (0, None))
