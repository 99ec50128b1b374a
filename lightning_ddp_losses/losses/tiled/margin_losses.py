"""Pair losses with a margin on tiles: the contrastive loss and the triplet margin loss.

Contrastive: two sums over pairs, whose gradient needs nothing of the rest of the row. Where pairs of all rows count alike, a tile's
gradient is known in forward but for one factor per sum: backward only multiplies.

Triplets: positives one after the other against a whole row of negatives, or all at once where the row is sorted.

Legend: ``T`` rows of a tile, ``C`` columns, ``n`` listed positives, ``K`` most positives of a row. ``d`` is the distance (a similarity
negated): a triplet's violation is ``d_ap - d_an + margin``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.losses.partial_sums import PartialSum
from lightning_ddp_losses.losses.pml_registry import Reduction
from lightning_ddp_losses.losses.tiled.accumulators import PairSums
from lightning_ddp_losses.losses.tiled.pair_losses import PairLoss, add_transposed, as_row
from lightning_ddp_losses.losses.tiled.tile_functions import (
    Numbers,
    contrastive_grad,
    contrastive_rows,
    contrastive_rows_and_grads,
    triplet_grad,
    triplet_rows,
    triplet_rows_and_grads,
)
from lightning_ddp_losses.losses.tiled.tiles import MaskedTile, Tile

_SORT_FROM = 12  # positives of a row, from which sorting it is cheaper


class Contrastive(PairLoss):
    """``relu(m_ip - pos_margin)`` over positive pairs and ``relu(neg_margin - m_in)`` over negative ones (similarities: negated).

    Statistics of a row, unless all rows count alike: how much a positive and a negative pair count.
    """

    sub_losses = ("pos_loss", "neg_loss")

    def __init__(self, loss: Any, reductions: Sequence[Reduction], *args: Any) -> None:
        super().__init__(loss, reductions, *args)
        self._positives, self._negatives = (PairSums(reduction) for reduction in reductions)
        # pairs of every row count alike, unless ...
        self._uniform = not any(r.per_anchor or r.weights is not None for r in reductions)
        self.width = 0 if self._uniform else 2
        self.grad_in_forward = self.masked_grad_in_forward = self._uniform
        self.grad_signs = (self.sign, -self.sign)

    def allocate_(self) -> None:
        self._positives.allocate_(self.rows, self.like)
        self._negatives.allocate_(self.rows, self.like)

    def accumulate_(self, tile: Tile) -> None:
        self._accumulate_both_(tile, tile.matrix)

    def accumulate_with_grads_(self, tile: Tile, buffer: Tensor) -> list[tuple[slice, Tensor]]:
        positive_counts, negative_counts = self._accumulate_both_(tile, buffer)
        grads = [(tile.positive_columns, tile.scatter_positives(positive_counts))]
        if negative_counts is not None:
            grads.append((slice(None), negative_counts))
        return grads

    def _accumulate_both_(self, tile: Tile, buffer: Tensor) -> tuple[Tensor, Tensor | None]:
        """Adds up both sums; returns how often each positive counts, (n,), and each negative, (T, C) in ``buffer``.

        None in place of the latter: no negative has a loss.
        """
        losses = self._positive_losses(tile.positive_entries())
        passing = self._positives.accumulate_listed_(tile.rows, tile.positives.rows, losses)
        positive_counts = passing.mul_(losses.sign_())
        negative_losses = tile.keep_negatives_(self._negative_losses_(tile.matrix, buffer), 0)
        if not self._negatives.accumulate_negatives_(tile, negative_losses):
            return positive_counts, None
        return positive_counts, negative_losses  # which are counts by now

    def finalize(self, labels: Tensor | None) -> tuple[list[PartialSum], Tensor]:
        positive_total, positive_counts = self._positives.finalize(labels)
        negative_total, negative_counts = self._negatives.finalize(labels)
        totals = [positive_total, negative_total]
        if self._uniform:
            return totals, self.like.new_empty((self.rows, 0))
        ones = self.like.new_ones(self.rows)
        columns = [ones if counts is None else counts for counts in (positive_counts, negative_counts)]
        return totals, torch.stack(columns, 1)

    def prepare_backward(self, row_stats: Tensor, column_stats: Tensor | None, factors: Sequence[Tensor]) -> None:
        self._factors, self._column_stats = factors, column_stats
        self._row_stats = row_stats
        if self._uniform:
            self._row_stats = row_stats.new_ones((self.rows, 2))

    def grad_(self, tile: Tile) -> None:
        positive_losses = self._positive_losses(tile.positive_entries())
        # negatives: 1 where they have a loss that passes, times how much a pair of their row (and of their column's) counts
        losses = tile.keep_negatives_(self._negative_losses_(tile.matrix, tile.matrix), 0)
        grads = self._negatives.indicate_passing_(losses)
        counts = self._row_stats[tile.rows, 1:]
        if self._column_stats is not None:
            counts = counts + self._column_stats[tile.columns, 1]
        grads.mul_(counts * (-self.sign * self._factors[1]))
        if tile.negative_counts is not None:
            grads.mul_(tile.negative_counts)

        # positives: the same, of the opposite sign
        def positive_grad(counts: Tensor, _: Tensor) -> Tensor:
            return self._positives.passing_weights(positive_losses, positive_losses.sign()).mul(counts)

        positive_grads = add_transposed(positive_grad, tile, self._row_stats, self._column_stats)
        tile.add_at_positives_(positive_grads.mul_(self.sign * self._factors[0]))

    def take_numbers(self, numbers: Numbers) -> None:
        self._positives.take(*numbers[:2])
        self._negatives.take(*numbers[2:])

    def masked_numbers(self, tile: MaskedTile, before: Numbers | None, *, complete: bool) -> Numbers:
        return self.run(contrastive_rows, tile.matrix, tile.keys, before, *self._function_options())  # type: ignore[no-any-return]

    def masked_numbers_with_grads(self, tile: MaskedTile, before: Numbers | None) -> tuple[Numbers, list[Tensor]]:
        function, options = contrastive_rows_and_grads, self._function_options()
        return self.run(function, tile.matrix, tile.keys, before, *options)  # type: ignore[no-any-return]

    def prepare_masked_backward(
        self, row_stats: Tensor, column_stats: Tensor | None, factors: Sequence[Tensor]
    ) -> None:
        both = as_row(factors, row_stats)
        if self._uniform:
            # a sub-loss's transposed entries count like its own
            times = 1.0 if column_stats is None else 2.0
            row_stats, column_stats = (both * times).expand(self.rows, 2), None
        else:
            row_stats = row_stats * both
            column_stats = None if column_stats is None else column_stats * both
        self._of_rows = row_stats.unbind(1)
        self._of_columns = None if column_stats is None else column_stats.unbind(1)

    def masked_grad(self, tile: MaskedTile) -> Tensor:
        function, options = contrastive_grad, self._function_options()
        return self.run(function, tile.matrix, tile.keys, *self._terms_of(tile), *options)  # type: ignore[no-any-return]

    def _function_options(self) -> tuple[Any, ...]:
        """Lists margins, sign and limits, as the functions of tiles take them."""
        margins = (self.loss.pos_margin, self.loss.neg_margin)
        return margins, self.sign, (self._positives.limits, self._negatives.limits)

    def _positive_losses(self, entries: Tensor) -> Tensor:
        return entries.sub(self.loss.pos_margin).mul_(self.sign).clamp_min_(0)

    def _negative_losses_(self, matrix: Tensor, out: Tensor) -> Tensor:
        """Writes the losses of all pairs as negatives to ``out``; returns it."""
        if self.sign < 0:
            return torch.sub(matrix, self.loss.neg_margin, out=out).clamp_min_(0)
        margin = matrix.new_full((), self.loss.neg_margin)
        return torch.sub(margin, matrix, out=out).clamp_min_(0)


class Triplets(PairLoss):
    """``relu`` (or ``softplus``) of the violation over all triplets of each row."""

    symmetric = False

    def __init__(self, loss: Any, reductions: Sequence[Reduction], *args: Any) -> None:
        super().__init__(loss, reductions, *args)
        self.scale = self.sign
        self._sums = PairSums(reductions[0])
        self._can_sort = _can_sort(loss, reductions)
        self.masked_grad_in_forward = reductions[0].weights is None

    def allocate_(self) -> None:
        self._sums.allocate_(self.rows, self.like)

    @classmethod
    def supports(cls, loss: Any) -> bool:
        return not loss.swap and loss.triplets_per_anchor == "all"

    @classmethod
    def supports_reduction(cls, reduction: Reduction) -> bool:
        return not reduction.per_anchor  # nor does PML

    @classmethod
    def supports_masks(cls, loss: Any, reductions: Sequence[Reduction]) -> bool:
        # else one positive of each row at a time: the host has to know how many times
        return _can_sort(loss, reductions)

    def accumulate_(self, tile: Tile) -> None:
        if tile.triplets is not None:
            positives, negatives, anchors = self._named_entries(tile)
            losses = self._losses_(positives - negatives + self.loss.margin)
            self._sums.accumulate_listed_(tile.rows, anchors, losses)
            return
        positives, weights, _ = _positives_by_row(tile)
        if self._by_sorting(tile, positives):
            self._sums.accumulate_counted_(tile.rows, *self._sorted_sums(tile, positives, weights))
            return
        # one positive of each row at a time against all its negatives
        allowed = tile.weight_negatives_(torch.ones_like(tile.matrix))
        for column, weight in _one_at_a_time(positives, weights):
            losses = self._losses_(column - tile.matrix + self.loss.margin)
            self._sums.accumulate_(tile.rows, losses, allowed * weight)

    def finalize(self, labels: Tensor | None) -> tuple[list[PartialSum], Tensor]:
        total, counts = self._sums.finalize(labels)
        self._counts = counts
        return [total], self.like.new_empty((self.rows, 0))

    def prepare_backward(self, row_stats: Tensor, column_stats: Tensor | None, factors: Sequence[Tensor]) -> None:
        if self._counts is not None:
            self._row_counts = self._counts * factors[0]
        else:
            self._row_counts = as_row(factors[:1], self.like)[0].expand(self.rows)

    def grad_(self, tile: Tile) -> None:
        counts = self._row_counts[tile.rows].unsqueeze(1)
        if tile.triplets is not None:
            self._named_grad_(tile, counts)
            return
        positives, weights, places = _positives_by_row(tile)
        if self._by_sorting(tile, positives):
            negative_sums, positive_sums = self._sorted_grads(tile, positives, weights)
        else:
            negative_sums, positive_sums = self._grads_one_at_a_time(tile, positives, weights)
        # each triplet pulls its positive closer and pushes its negative away
        torch.mul(negative_sums, -counts, out=tile.matrix)
        tile.add_at_positives_((positive_sums * counts).view(-1)[places])

    def take_numbers(self, numbers: Numbers) -> None:
        negated, number = numbers
        self._sums.take(-negated, number)

    def masked_numbers(self, tile: MaskedTile, before: Numbers | None, *, complete: bool) -> Numbers:
        return self.run(triplet_rows, tile.matrix, tile.keys, self.loss.margin, self._sums.limits)  # type: ignore[no-any-return]

    def masked_numbers_with_grads(self, tile: MaskedTile, before: Numbers | None) -> tuple[Numbers, list[Tensor]]:
        function, options = triplet_rows_and_grads, (self.loss.margin, self._sums.limits)
        return self.run(function, tile.matrix, tile.keys, *options)  # type: ignore[no-any-return]

    def prepare_masked_backward(
        self, row_stats: Tensor, column_stats: Tensor | None, factors: Sequence[Tensor]
    ) -> None:
        self.prepare_backward(row_stats, column_stats, factors)

    def masked_grad(self, tile: MaskedTile) -> Tensor:
        return self.run(triplet_grad, tile.matrix, tile.keys, self._row_counts[tile.rows], self.loss.margin)  # type: ignore[no-any-return]

    def _named_grad_(self, tile: Tile, counts: Tensor) -> None:
        """Does what ``grad_`` does, for triplets that a miner names."""
        assert tile.triplets is not None
        anchors, positives, negatives = tile.triplets
        positive_entries, negative_entries, _ = self._named_entries(tile)
        violations = positive_entries - negative_entries + self.loss.margin
        grads = self._weighted_grads_(violations, torch.ones_like(violations)) * counts[anchors, 0]
        tile.matrix.zero_().index_put_((anchors, positives), grads, accumulate=True)
        tile.matrix.index_put_((anchors, negatives), -grads, accumulate=True)

    def _grads_one_at_a_time(self, tile: Tile, positives: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Sums the triplets' derivatives: (T, C) over each negative's positives, (T, K) over each positive's negatives."""
        allowed, negative_sums = tile.weight_negatives_(torch.ones_like(tile.matrix)), torch.zeros_like(tile.matrix)
        positive_sums = []
        for column, weight in _one_at_a_time(positives, weights):
            grads = self._weighted_grads_(column - tile.matrix + self.loss.margin, allowed * weight)
            positive_sums.append(grads.sum(1))
            negative_sums += grads
        if not positive_sums:
            return negative_sums, positives
        return negative_sums, torch.stack(positive_sums, 1)

    def _losses_(self, violations: Tensor) -> Tensor:
        """Computes the losses, in the memory of the violations where that is possible."""
        return torch.nn.functional.softplus(violations) if self.loss.smooth_loss else violations.clamp_min_(0)

    def _weighted_grads_(self, violations: Tensor, weights: Tensor) -> Tensor:
        """Computes the derivative of the losses by the violations, times the weights of those that pass; overwrites the violations."""
        grads = violations.sigmoid() if self.loss.smooth_loss else (violations > 0).to(violations.dtype)
        return grads.mul_(self._sums.passing_weights(self._losses_(violations), weights))

    def _named_entries(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
        assert tile.triplets is not None
        anchors, positives, negatives = tile.triplets
        return tile.matrix[anchors, positives], tile.matrix[anchors, negatives], anchors

    def _by_sorting(self, tile: Tile, positives: Tensor) -> bool:
        """Tells whether rows are sorted: where that is exact and the cheaper way."""
        return self._can_sort and positives.shape[1] >= _SORT_FROM and not tile.repeats_negatives

    def _sorted_sums(self, tile: Tile, positives: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes (T,) each: sum, number of violated and number of all triplets."""
        negatives, _ = tile.keep_negatives_(tile.matrix.clone(), torch.inf).sort(1)
        # how many negatives violate each positive, and by how much in all, from cumulated sums
        limits = positives + self.loss.margin
        violating = torch.searchsorted(negatives, limits)
        finite = negatives.masked_fill(negatives == torch.inf, 0)
        sums = torch.nn.functional.pad(finite.double().cumsum(1), (1, 0))
        losses = limits * violating - sums.gather(1, violating)
        number = (violating * weights).sum(1)
        return (losses * weights).sum(1).to(positives.dtype), number, tile.number_of_negatives() * weights.sum(1)

    def _sorted_grads(self, tile: Tile, positives: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Counts what ``_grads_one_at_a_time`` sums: derivatives are 1 where violated, else 0."""
        negatives = tile.keep_negatives_(tile.matrix.clone(), torch.inf)
        limits = (positives + self.loss.margin).masked_fill(weights == 0, -torch.inf)
        # positives that each negative violates
        sorted_limits, order = limits.sort(1)
        cumulated = torch.nn.functional.pad(weights.gather(1, order).cumsum(1), (1, 0))
        not_above = torch.searchsorted(sorted_limits, negatives, right=True)
        violated = cumulated[:, -1:] - cumulated.gather(1, not_above)
        # negatives that violate each positive
        violating = torch.searchsorted(negatives.sort(1).values, limits)
        return violated.to(positives.dtype), violating * weights


def _can_sort(loss: Any, reductions: Sequence[Reduction]) -> bool:
    """Tells whether sorted rows say enough: only the sum of losses above 0 is known, and their number."""
    return not loss.smooth_loss and (not reductions[0].selects or reductions[0].selects_positive)


def _positives_by_row(tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """Makes (T, K) each: entries of the positives, their weights (0 where a row has fewer); (n,) places in there of the tile's list."""
    owners, rows, width = tile.positives.rows, tile.matrix.shape[0], tile.most_positives
    # each row's begin where they are listed, in ascending order of rows
    starts = torch.searchsorted(owners, torch.arange(rows, device=owners.device))
    places = owners * width + torch.arange(len(owners), device=owners.device) - starts[owners]
    entries, weights = tile.matrix.new_zeros(2, rows, width)
    entries.view(-1)[places] = tile.positive_entries()
    weights.view(-1)[places] = 1
    return entries, weights, places


def _one_at_a_time(positives: Tensor, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for k in range(positives.shape[1]):
        yield positives[:, k : k + 1], weights[:, k : k + 1]
