"""What a loss has to say about one tile (`PairLoss`), and the losses whose rows are sums of exponentials.

A pair loss reads tiles of the scaled matrix twice. In forward it adds up rows and keeps ``k`` numbers of each (a log-sum-exp, how
much the row counts). In backward these are enough to turn a tile into its gradient; where the matrix is symmetric, the other ranks'
numbers turn the same tile into the gradient of the transposed entries too, so no gradient has to travel.

The softmax family is here (NT-Xent, supervised contrastive, multi-similarity), losses with a margin are in ``margin_losses``.

Legend: ``T`` rows of a tile, ``C`` columns, ``n`` listed positives, ``B`` rows on this rank, ``G`` columns over all ranks, ``k``
statistics of a row; ``s_ij`` the similarity of row i and column j over the temperature, ``l_i`` the log-sum-exp of row i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_ddp_losses.losses.log_sum_exp import RunningLogSumExp
from lightning_ddp_losses.losses.partial_sums import PartialSum, host_number, wide_float
from lightning_ddp_losses.losses.pml_registry import Reduction
from lightning_ddp_losses.losses.tiled.accumulators import PairSums, reduce_rows
from lightning_ddp_losses.losses.tiled.distances import is_one_product
from lightning_ddp_losses.losses.tiled.tile_functions import (
    Numbers,
    multi_similarity_grad,
    multi_similarity_rows,
    ntxent_grad,
    ntxent_negatives,
    ntxent_pair_,
    ntxent_positives,
    ntxent_rows,
    supcon_grad,
    supcon_rows,
)
from lightning_ddp_losses.losses.tiled.tiles import MaskedTile, PairList, Tile

_LOG_COLUMNS = 25.0  # of more than fit any memory


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class PairLoss:
    """One loss on tiles.

    Args:
        loss: pytorch-metric-learning's, for its numbers.
        reductions: One per sub-loss.
        rows: B.
        like: Gives dtype and device.
        run: Calls a function of ``tile_functions``; None: they are not compiled.

    Attributes:
        sub_losses: Their names.
        width: k.
        scale: By which the distances come multiplied.
        needs_second_pass: The positives are needed once more, once all columns have been added up.
        symmetric: Gradients of transposed entries follow from the statistics.
        needs_both_kinds: PML returns a zero where there are no positives, or no negatives.
        counts_pairs_once: A pair counts once, however often a miner names it.
        masks_any_size: Pairs are masks on an accelerator however large the matrix is (``evaluator.MASKED_BYTES``).
        grad_in_forward: A tile's gradient follows from the tile alone, but for one factor per sub-loss; it can be had in forward.
        masked_grad_in_forward: A masked tile's, likewise.
        grad_signs: What each sub-loss's gradient is still to be multiplied with, where it is had in forward.
        run: Calls a function of ``tile_functions`` with its arguments.
        factor: After ``prepare_masked_backward``: what masked gradients are still to be multiplied with; None: nothing.
    """

    sub_losses: ClassVar[tuple[str, ...]] = ("loss",)
    needs_second_pass: ClassVar[bool] = False
    symmetric: ClassVar[bool] = True
    needs_both_kinds: ClassVar[bool] = False
    counts_pairs_once: ClassVar[bool] = False
    masks_any_size: ClassVar[bool] = False
    grad_in_forward: bool = False
    masked_grad_in_forward: bool = False
    grad_signs: tuple[float, ...] = (1.0,)
    width: int = 0
    scale: float = 1.0
    factor: Tensor | None = None

    def __init__(
        self,
        loss: Any,
        reductions: Sequence[Reduction],
        rows: int,
        like: Tensor,
        run: Callable[..., Any] | None = None,
    ) -> None:
        self.loss, self.reductions, self.rows, self.like, self.run = loss, reductions, rows, like, run or _call
        self.sign = -1.0 if loss.distance.is_inverted else 1.0  # of a distance: large is far

    def allocate_(self) -> None:
        """Makes the numbers of rows without entries, which tiles add to."""
        raise NotImplementedError

    @classmethod
    def supports(cls, loss: Any) -> bool:
        """Tells whether the loss, as configured, is this pair loss."""
        return True

    @classmethod
    def supports_reduction(cls, reduction: Reduction) -> bool:
        """Tells whether a sub-loss may be reduced so."""
        return True

    @classmethod
    def supports_masks(cls, loss: Any, reductions: Sequence[Reduction]) -> bool:
        """Tells whether the loss takes masked tiles, as it is configured and reduced."""
        return True

    def accumulate_(self, tile: Tile) -> None:
        """Adds up the rows of a tile; overwrites its matrix."""
        raise NotImplementedError

    def accumulate_with_grads_(self, tile: Tile, buffer: Tensor) -> list[tuple[slice, Tensor]]:
        """Does what ``accumulate_`` does, where ``grad_in_forward``; leaves the tile's matrix as it is.

        Args:
            tile: The tile.
            buffer: Like the tile's matrix; overwritten.

        Returns:
            For each sub-loss the columns of the tile that have a gradient, and the derivative of the sub-loss's sum by them, but for
            ``grad_signs``.
        """
        raise NotImplementedError

    def accumulate_positives_(self, rows: slice, positives: PairList, entries: Tensor) -> None:
        """Adds up what needs complete rows.

        Args:
            rows: Which rows.
            positives: Their positives.
            entries: (n,) of the matrix.
        """

    def finalize(self, labels: Tensor | None) -> tuple[list[PartialSum], Tensor]:
        """Reduces what was added up.

        Args:
            labels: (B,), in the tiles' order.

        Returns:
            One total per sub-loss, and (B, k) statistics.
        """
        raise NotImplementedError

    def prepare_backward(self, row_stats: Tensor, column_stats: Tensor | None, factors: Sequence[Tensor]) -> None:
        """Takes in what ``grad_`` needs of all rows and columns.

        Args:
            row_stats: (B, k), in the tiles' order.
            column_stats: (G, k), in the columns' order; None: only this rank's own entries are wanted.
            factors: What each sub-loss's sum is multiplied with.
        """
        raise NotImplementedError

    def grad_(self, tile: Tile) -> None:
        """Overwrites a tile's matrix with its gradient (of the transposed entries too, after ``prepare_backward`` with both)."""
        raise NotImplementedError

    # masks in place of lists

    def take_numbers(self, numbers: Numbers) -> None:
        """Takes what masked tiles have found out about all rows, (B,) each, in place of what listed ones would have added up."""
        raise NotImplementedError

    def masked_numbers(self, tile: MaskedTile, before: Numbers | None, *, complete: bool) -> Numbers:
        """Computes the numbers of a tile's rows.

        Args:
            tile: The tile.
            before: The numbers from other columns; None: these are the first.
            complete: They are all.
        """
        raise NotImplementedError

    def masked_numbers_with_grads(self, tile: MaskedTile, before: Numbers | None) -> tuple[Numbers, list[Tensor]]:
        """Computes the same where ``masked_grad_in_forward``, and each sub-loss's derivative by the entries, but for its sign."""
        raise NotImplementedError

    def masked_second_numbers(self, tile: MaskedTile, before: Numbers) -> Numbers:
        """Computes what needs complete rows, where ``needs_second_pass`` and a tile has not all columns."""
        raise NotImplementedError

    def prepare_masked_backward(
        self, row_stats: Tensor, column_stats: Tensor | None, factors: Sequence[Tensor]
    ) -> None:
        """Takes in what ``masked_grad`` needs; arguments as of ``prepare_backward``, on one rank the same tensor twice."""
        self.factor = factors[0]
        self._of_rows = self._masked_terms(row_stats)
        self._of_columns: Numbers | None = self._of_rows
        if column_stats is not row_stats:
            self._of_columns = None if column_stats is None else self._masked_terms(column_stats)

    def _masked_terms(self, stats: Tensor) -> Numbers:
        """Makes what ``masked_grad`` needs of rows or columns, (n,) each, of their (n, k) statistics."""
        raise NotImplementedError

    def masked_grad(self, tile: MaskedTile) -> Tensor:
        """Computes a tile's gradient, (T, C), but for ``factor``."""
        raise NotImplementedError

    def _terms_of(self, tile: MaskedTile) -> tuple[Numbers, Numbers | None]:
        """Takes what ``prepare_masked_backward`` has made of a tile's rows and columns."""
        of_rows = tuple(term[tile.rows] for term in self._of_rows)
        if self._of_columns is None:
            return of_rows, None
        return of_rows, tuple(term[tile.columns] for term in self._of_columns)


def add_transposed(term: Callable[..., Tensor], tile: Tile, row_stats: Tensor, column_stats: Tensor | None) -> Tensor:
    """Computes (n,): ``term`` of the positives' rows, plus that of their columns, whose rows contain the transposed entries.

    Args:
        term: Takes k statistics, (n,) each.
        tile: The tile.
        row_stats: (B, k).
        column_stats: (G, k); None: the rows' terms only.
    """
    positives = tile.positives
    total = term(*row_stats[tile.rows][positives.rows].unbind(1))
    if column_stats is None:
        return total
    return total + term(*column_stats[tile.columns][positives.columns].unbind(1))


class SoftmaxPairLoss(PairLoss):
    """A loss whose rows are softmaxes: the first of its statistics is a row's log-sum-exp, the second how much the row counts."""

    width = 3

    @classmethod
    def supports_masks(cls, loss: Any, reductions: Sequence[Reduction]) -> bool:
        return _have_logarithms(reductions)

    def prepare_backward(self, row_stats: Tensor, column_stats: Tensor | None, factors: Sequence[Tensor]) -> None:
        factor = as_row(self._stat_factors(factors[0]), row_stats)
        self._row_stats = row_stats * factor
        self._column_stats = None if column_stats is None else column_stats * factor
        have_logarithms = _have_logarithms(self.reductions)
        self._softmax_grad = SoftmaxGrad(self._row_stats, self._column_stats, have_logarithms=have_logarithms)

    def _stat_factors(self, factor: Tensor) -> list[Tensor]:
        """Lists what each statistic is multiplied with: those that are weights, by the factor of the sum."""
        return [host_number(1.0), factor, factor]


def _have_logarithms(reductions: Sequence[Reduction]) -> bool:
    """Tells whether how much rows count has a logarithm: none counts less than nothing."""
    return all(reduction.weights is None or not bool((reduction.weights < 0).any()) for reduction in reductions)


class NTXent(SoftmaxPairLoss):
    """``-log r_ip`` over the positive pairs, ``r_ip = exp(s_ip) / (exp(s_ip) + sum over the negatives of exp(s_in))``.

    Statistics of a row: l over its negatives, the sum over its positives of what they give to the negatives' gradient, how much a pair
    counts.
    """

    needs_second_pass = True

    def __init__(self, loss: Any, reductions: Sequence[Reduction], *args: Any) -> None:
        super().__init__(loss, reductions, *args)
        self.scale = -self.sign / loss.temperature
        self._pairs = PairSums(reductions[0])
        self._tiny = self._tiny_that_counts()
        self._uniform = reductions[0].weights is None and not reductions[0].per_anchor
        self._lse: Tensor | None = None  # of the negatives, where masked tiles have found it

    def allocate_(self) -> None:
        self._negatives = RunningLogSumExp.empty(self.rows, self.like)
        self._pairs.allocate_(self.rows, self.like)
        self._softmax_weight = self.like.new_zeros(self.rows)

    def accumulate_(self, tile: Tile) -> None:
        negatives = tile.keep_negatives_(tile.matrix, -torch.inf)
        self._negatives.accumulate_(negatives, rows=tile.rows, weights=tile.negative_counts)

    def accumulate_positives_(self, rows: slice, positives: PairList, entries: Tensor) -> None:
        lse = self._negatives.finalize(rows)[positives.rows]
        losses, grads = ntxent_pair_(lse - entries, self._tiny)
        passing = self._pairs.accumulate_listed_(rows, positives.rows, losses)
        # each positive compares itself with all negatives of its row
        self._softmax_weight[rows].index_add_(0, positives.rows, grads.mul_(passing))

    def finalize(self, labels: Tensor | None) -> tuple[list[PartialSum], Tensor]:
        total, counts = self._pairs.finalize(labels)
        softmax_weight = self._softmax_weight
        if counts is None:
            counts = torch.ones_like(softmax_weight)
        else:
            softmax_weight = softmax_weight * counts
        lse = self._negatives.finalize() if self._lse is None else self._lse
        return [total], torch.stack([lse, softmax_weight, counts], 1)

    def take_numbers(self, numbers: Numbers) -> None:
        self._lse, total, number, self._softmax_weight = numbers
        self._pairs.take(total, number)

    def masked_numbers(self, tile: MaskedTile, before: Numbers | None, *, complete: bool) -> Numbers:
        if complete:
            return self.run(ntxent_rows, tile.matrix, tile.keys, self._pairs.limits, self._tiny)  # type: ignore[no-any-return]
        return self.run(ntxent_negatives, tile.matrix, tile.keys, before)  # type: ignore[no-any-return]

    def masked_second_numbers(self, tile: MaskedTile, before: Numbers) -> Numbers:
        lse, *sums = before
        options = (tuple(sums) or None, self._pairs.limits, self._tiny)
        return (lse, *self.run(ntxent_positives, tile.matrix, tile.keys, lse, *options))

    def _masked_terms(self, stats: Tensor) -> Numbers:
        lse, weight, count = stats.unbind(1)
        terms = (weight.log() - lse, lse)
        return terms if self._uniform else (*terms, count)

    def masked_grad(self, tile: MaskedTile) -> Tensor:
        options = (self._pairs.limits, self._tiny)
        return self.run(ntxent_grad, tile.matrix, tile.keys, *self._terms_of(tile), *options)  # type: ignore[no-any-return]

    def _tiny_that_counts(self) -> float:
        """Returns what PML adds to each ratio, or 0: between rows of unit length a ratio may never be so small that it counts."""
        distance, limits = self.loss.distance, torch.finfo(self.like.dtype)
        are_cosines = is_one_product(distance) and distance.normalize_embeddings and distance.p == 2
        # of cosines, -log r < 2 / temperature + log(number of columns + 1)
        most, counting = 2 * abs(self.scale) + _LOG_COLUMNS, math.log(limits.eps) - math.log(limits.tiny)
        return 0.0 if are_cosines and most < counting else float(limits.tiny)

    def grad_(self, tile: Tile) -> None:
        entries = tile.positive_entries()

        def positive_grad(lse: Tensor, _: Tensor, count: Tensor) -> Tensor:
            losses, grads = ntxent_pair_(lse - entries, self._tiny)
            return self._pairs.passing_weights(losses, grads).mul(-count)

        # negatives: the softmax over the row's negatives, times the row's weight
        tile.keep_negatives_(tile.matrix, -torch.inf)
        self._softmax_grad.apply_(tile)
        if tile.negative_counts is not None:
            tile.matrix.mul_(tile.negative_counts)
        # positives: each its own pair's
        tile.add_at_positives_(add_transposed(positive_grad, tile, self._row_stats, self._column_stats))


class SupCon(SoftmaxPairLoss):
    """``l_i`` minus the mean of ``s_ip`` over the positives of each row; l over all its partners.

    Statistics of a row: l, how much the row counts, the same over its number of positives.
    """

    counts_pairs_once = True
    needs_both_kinds = True
    masks_any_size = True

    def __init__(self, loss: Any, reductions: Sequence[Reduction], *args: Any) -> None:
        super().__init__(loss, reductions, *args)
        self.scale = -self.sign / loss.temperature

    def allocate_(self) -> None:
        rows, like = self.rows, self.like
        self._partners = RunningLogSumExp.empty(rows, like)
        self._positive_sum, self._number = like.new_zeros(rows), like.new_zeros(rows)

    def accumulate_(self, tile: Tile) -> None:
        rows, owners, entries = tile.rows, tile.positives.rows, tile.positive_entries()
        old_maximum = self._partners.maximum_of(rows).clone()
        # log-sum-exp over all partners
        self._partners.accumulate_(tile.keep_partners_(tile.matrix, -torch.inf), rows=rows)
        # sum of the positives relative to the row's largest entry, so that one which outweighs all others gives a loss of exactly 0
        maximum, number = self._partners.maximum_of(rows), self._number[rows]
        shifted = torch.where(number > 0, (old_maximum - maximum) * number, 0).add_(self._positive_sum[rows])
        self._positive_sum[rows] = shifted.index_add_(0, owners, entries - maximum[owners])
        # number of positives
        number.index_add_(0, owners, torch.ones_like(entries))

    def finalize(self, labels: Tensor | None) -> tuple[list[PartialSum], Tensor]:
        number, above = self._number.clamp(min=1), self._partners.above_maximum()
        has_none = self._number == 0
        losses = (above - self._positive_sum / number).masked_fill_(has_none, 0)
        total, counts = reduce_rows(self.reductions[0], losses, labels)
        if counts is None:
            counts = torch.ones_like(losses)
        counts = counts.masked_fill(has_none, 0)
        return [total], torch.stack([self._partners.maximum + above, counts, counts / number], 1)

    def take_numbers(self, numbers: Numbers) -> None:
        maximum, sum_exp, self._positive_sum, self._number = numbers
        self._partners = RunningLogSumExp(maximum, sum_exp)

    def masked_numbers(self, tile: MaskedTile, before: Numbers | None, *, complete: bool) -> Numbers:
        return self.run(supcon_rows, tile.matrix, tile.keys, before)  # type: ignore[no-any-return]

    def _masked_terms(self, stats: Tensor) -> Numbers:
        lse, count, share = stats.unbind(1)
        return count.log() - lse, share

    def masked_grad(self, tile: MaskedTile) -> Tensor:
        return self.run(supcon_grad, tile.matrix, tile.keys, *self._terms_of(tile))  # type: ignore[no-any-return]

    def grad_(self, tile: Tile) -> None:
        # all partners: the softmax of the row, times how much the row counts
        tile.keep_partners_(tile.matrix, -torch.inf)
        self._softmax_grad.apply_(tile)
        # positives: less the row's count, spread over its positives
        grads = add_transposed(lambda lse, count, share: -share, tile, self._row_stats, self._column_stats)
        tile.add_at_positives_(grads)


class MultiSimilarity(SoftmaxPairLoss):
    """``log(1 + sum exp(alpha (base - s_ip))) / alpha + log(1 + sum exp(beta (s_in - base))) / beta`` over positives and negatives.

    The matrix comes times beta. Statistics of a row: the negatives' logarithm, how much the row counts, the positives' logarithm.
    """

    counts_pairs_once = True

    def __init__(self, loss: Any, reductions: Sequence[Reduction], *args: Any) -> None:
        super().__init__(loss, reductions, *args)
        self.scale = -self.sign * loss.beta
        self._base = -self.sign * loss.beta * loss.base
        self._ratio = -loss.alpha / loss.beta

    def allocate_(self) -> None:
        # the 1 of the formula is a first entry: exp(0), and exp(s - base) = 1 at s = base
        self._positives = RunningLogSumExp.of_one(self.rows, self.like, 0.0)
        self._negatives = RunningLogSumExp.of_one(self.rows, self.like, self._base)

    @classmethod
    def supports(cls, loss: Any) -> bool:
        return bool(loss.alpha > 0 and loss.beta > 0)

    def accumulate_(self, tile: Tile) -> None:
        exponents = self._exponents_(tile.positive_entries())
        self._positives.accumulate_listed_(tile.positives.rows, exponents, rows=tile.rows)
        self._negatives.accumulate_(tile.keep_negatives_(tile.matrix, -torch.inf), rows=tile.rows)

    def finalize(self, labels: Tensor | None) -> tuple[list[PartialSum], Tensor]:
        positive_lse = self._positives.finalize()
        maximum, above = self._negatives.maximum, self._negatives.above_maximum()
        losses = positive_lse / self.loss.alpha + (maximum - self._base + above) / self.loss.beta
        total, counts = reduce_rows(self.reductions[0], losses, labels)
        if counts is None:
            counts = torch.ones_like(losses)
        return [total], torch.stack([maximum + above, counts, positive_lse], 1)

    def take_numbers(self, numbers: Numbers) -> None:
        maximum, softmax, highest, positive_softmax = numbers
        self._negatives = RunningLogSumExp(maximum, softmax.reciprocal())
        self._positives = RunningLogSumExp(highest, positive_softmax.reciprocal())

    def masked_numbers(self, tile: MaskedTile, before: Numbers | None, *, complete: bool) -> Numbers:
        function = multi_similarity_rows
        return self.run(function, tile.matrix, tile.keys, before, self._base, self._ratio)  # type: ignore[no-any-return]

    def prepare_masked_backward(
        self, row_stats: Tensor, column_stats: Tensor | None, factors: Sequence[Tensor]
    ) -> None:
        super().prepare_masked_backward(row_stats, column_stats, [factors[0] / self.loss.beta])

    def _masked_terms(self, stats: Tensor) -> Numbers:
        lse, count, positive_lse = stats.unbind(1)
        logs = count.log()
        return logs - (lse - self._base), logs - positive_lse

    def masked_grad(self, tile: MaskedTile) -> Tensor:
        function = multi_similarity_grad
        return self.run(function, tile.matrix, tile.keys, *self._terms_of(tile), self._base, self._ratio)  # type: ignore[no-any-return]

    def grad_(self, tile: Tile) -> None:
        exponents = self._exponents_(tile.positive_entries())

        def positive_grad(_: Tensor, count: Tensor, positive_lse: Tensor) -> Tensor:
            return (exponents - positive_lse).exp_().mul_(-count)

        # negatives: their softmax; positives: theirs, of the opposite sign
        tile.keep_negatives_(tile.matrix, -torch.inf)
        self._softmax_grad.apply_(tile)
        tile.add_at_positives_(add_transposed(positive_grad, tile, self._row_stats, self._column_stats))

    def _stat_factors(self, factor: Tensor) -> list[Tensor]:
        return [host_number(1.0), factor / self.loss.beta, host_number(1.0)]

    def _exponents_(self, entries: Tensor) -> Tensor:
        """Overwrites entries of the matrix with ``alpha (base - s)``; returns them."""
        return entries.sub_(self._base).mul_(self._ratio)


def as_row(numbers: Sequence[Tensor], like: Tensor) -> Tensor:
    """Makes (1, n) of 0-dim numbers; those of a device stay there."""
    parts = []
    for number in numbers:
        # stacked in the widest dtype of them
        if number.device == like.device:
            parts.append(number)
        else:
            parts.append(like.new_full((), number.item(), dtype=wide_float(like.device)))
    return torch.stack(parts).unsqueeze(0).to(like.dtype)


class SoftmaxGrad:
    """Gradient of rows of log-sum-exps: ``c_i exp(m_ij - l_i)``, plus ``c_j exp(m_ij - l_j)`` for the transposed entries.

    Args:
        row_stats: (B, 2 or more), l and c of the rows; where c is 0 or l is -inf (no entries), the term is 0.
        column_stats: (G, 2 or more), of the columns; None: the rows' own term only.
        have_logarithms: No c is less than 0.
    """

    def __init__(self, row_stats: Tensor, column_stats: Tensor | None, *, have_logarithms: bool) -> None:
        lse, count = row_stats[:, 0], row_stats[:, 1]
        self._row_lse, self._row_count = _without_silent_rows(lse, count), count
        self._column_lse: Tensor | None = None
        self._buffer: Tensor | None = None
        self._shift: float | None = None
        self._row_offset: Tensor | None = None
        on_device = lse.device.type != "cpu"
        # One exponential instead of two. On an accelerator exp(m - shift + log(exp(log c_i + shift - l_i) + exp(log c_j + shift - l_j))):
        # fewer passes over memory, which are what costs there; smaller numbers round less.
        if on_device and have_logarithms:
            self._offset_shift = torch.where(lse.isfinite(), lse, 0).amax() if len(lse) else 0.0
            self._row_offset = count.log() + (self._offset_shift - self._row_lse)
        if column_stats is None:
            return
        column_lse, column_count = column_stats[:, 0], column_stats[:, 1]
        self._column_lse, self._column_count = _without_silent_rows(column_lse, column_count), column_count
        if self._row_offset is not None:
            self._column_offset = column_count.log() + (self._offset_shift - self._column_lse)
        # On the CPU exp(m - shift) (c_i exp(shift - l_i) + c_j exp(shift - l_j)), where the log-sum-exps lie close enough for it: fewer
        # exponentials. No entry is larger than the log-sum-exps of its row and of its column.
        # (To know that an accelerator would have to be waited for.)
        if on_device:
            return
        extremes = torch.cat([lse, column_lse, self._row_lse.neg(), self._column_lse.neg()])
        if not extremes.numel():
            highest = lowest = 0.0
        else:
            highest, lowest = (float(part.max()) for part in extremes.view(2, -1))
        if math.isfinite(highest) and highest + lowest < 0.65 * math.log(torch.finfo(extremes.dtype).max):
            self._shift = highest
            self._row_factor = count * (highest - self._row_lse).exp_()
            self._column_factor = column_count * (highest - self._column_lse).exp_()

    def apply_(self, tile: Tile) -> None:
        """Overwrites the tile's matrix with its gradient; -inf becomes 0."""
        matrix, rows, columns = tile.matrix, tile.rows, tile.columns
        if self._row_offset is not None:
            offset = self._row_offset[rows, None]
            if self._column_lse is not None:
                offset = torch.logaddexp(offset, self._column_offset[columns], out=self._buffer_like(matrix))
            matrix.sub_(self._offset_shift).add_(offset).exp_()
        elif self._column_lse is None:
            matrix.sub_(self._row_lse[rows, None]).exp_().mul_(self._row_count[rows, None])
        elif self._shift is not None:
            buffer = self._buffer_like(matrix)
            factor = torch.add(self._row_factor[rows, None], self._column_factor[columns], out=buffer)
            matrix.sub_(self._shift).exp_().mul_(factor)
        else:
            transposed = torch.sub(matrix, self._column_lse[columns], out=self._buffer_like(matrix))
            transposed.exp_().mul_(self._column_count[columns])
            matrix.sub_(self._row_lse[rows, None]).exp_().mul_(self._row_count[rows, None]).add_(transposed)

    def _buffer_like(self, matrix: Tensor) -> Tensor:
        if self._buffer is None or self._buffer.numel() < matrix.numel():
            self._buffer = torch.empty_like(matrix)
        return self._buffer.view(-1)[: matrix.numel()].view(matrix.shape)


def _without_silent_rows(lse: Tensor, count: Tensor) -> Tensor:
    """Makes inf of the log-sum-exp of rows that give no gradient: exp(m - inf) = 0."""
    return lse.masked_fill((count == 0) | (lse == -torch.inf), torch.inf)
