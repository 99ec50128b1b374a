"""Numbers and gradients of a contrastive loss from tiles that cover half of the matrix (``half_tiles``).

A pair has a loss only if it is on the wrong side of a margin, so few entries of a tile have a gradient. Positives are computed from their
few entries, for the rows of the tile and for its mirrored columns separately, and their gradients are sums of a few rows. Negatives are
computed only if one of them is inside the margin, and only then are the numbers of the tile finished to distances: before that, a square is
compared with the square of the margin.

Legend: ``B`` rows on this rank, ``T`` rows and ``C`` columns of a tile, ``b`` entries of a row that may be positives.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.losses.pml_registry import pass_limits
from lightning_ddp_losses.losses.tiled.distances import TileDistance
from lightning_ddp_losses.losses.tiled.half_tiles import OwnFirstPairs, Place
from lightning_ddp_losses.losses.tiled.pair_losses import Contrastive
from lightning_ddp_losses.losses.tiled.tile_functions import Numbers, lower_limit
from lightning_ddp_losses.losses.tiled.tiles import Masks, Tile

_POSITIVES, _NEGATIVES = 0, 1  # indices of the sub-losses


class TileGrad(NamedTuple):
    """Gradient of a tile.

    Attributes:
        kind: Index of the sub-loss.
        tile: The tile.
        grad: Gradient of its matrix, up to the sign of the sub-loss.
        mirrored: As in ``Place``.
    """

    kind: int
    tile: Tile
    grad: Tensor
    mirrored: slice | None = None


class HalfMargins:
    """The numbers of all rows of a contrastive loss, from tiles that cover half of the matrix.

    Args:
        pair_loss: The loss on tiles.
        pairs: The pairs.
        distance: Distances of the tiles.
        rows: B.
        with_grads: True if gradients are required, up to ``PairLoss.grad_signs``.
    """

    def __init__(
        self, pair_loss: Contrastive, pairs: OwnFirstPairs, distance: TileDistance, rows: int, *, with_grads: bool
    ) -> None:
        self._pairs, self._distance, self._with_grads = pairs, distance, with_grads
        self._margins, self._sign, self._limits = pair_loss.grad_options
        # allocated once, outside of the tiles (``TileResults``)
        numbers = pair_loss.nothing(rows)
        each = len(numbers) // 2
        self._of_kinds = numbers[:each], numbers[each:]
        # for positives and negatives, the limit above which losses count, or None if pairs without a loss may count too
        self._lows = [None if pair_loss.records else lower_limit(limits) for limits in self._limits]

    @property
    def numbers(self) -> Numbers:
        """The numbers of all rows, (B,) each."""
        found: Numbers = ()
        for of_kind, limits, count in zip(self._of_kinds, self._limits, self._pairs.counts(), strict=True):
            total, number, *recorded = of_kind
            if limits is None:  # all pairs count
                number = count.to(total.dtype)
            found = (*found, total, number, *recorded)
        return found

    def add(self, place: Place, matrix: Tensor) -> list[TileGrad]:
        """Add the numbers of a tile, and return its gradients, without parts that are known to be 0.

        Args:
            place: Position of the tile.
            matrix: (T, C). If ``with_grads``, the result of ``TileDistance.start``, which is overwritten. Otherwise distances.
        """
        rows, columns, mirrored = place
        band, found = self._pairs.band(rows, columns), list[TileGrad]()
        masks = self._pairs.masks_at(rows, columns, overwrites=False)
        if band.start < band.stop:
            found.append(self._add_positives(rows, columns, matrix, masks))
        if mirrored is not None and mirrored.start < band.stop:
            near = slice(mirrored.start, band.stop)
            transposed = matrix[:, near.start - columns.start : near.stop - columns.start].T
            near_masks = self._pairs.masks_at(near, rows, overwrites=False)
            found.append(self._add_positives(near, rows, transposed, near_masks))
        hidden = masks.hide_(matrix, self._sign * math.inf)
        if self._may_pass(matrix):
            found.append(self._add_negatives(place, matrix, masks))
        if not self._with_grads:
            masks.restore_(matrix, hidden)
        return found if self._with_grads else []

    def _add_positives(self, rows: slice, columns: slice, matrix: Tensor, masks: Masks) -> TileGrad:
        """Add the numbers of the positives of some rows among some columns."""
        entries = masks.in_band(matrix).clone()
        if self._with_grads:
            entries = self._distance.finish_(entries, 1)
        margin = self._margins[_POSITIVES]
        losses = entries - margin if self._sign > 0 else margin - entries
        positives = masks.positives
        passing = self._add_losses(_POSITIVES, losses.mul_(positives), positives, Place(rows, columns))
        if masks.places is None:
            columns = self._pairs.band(rows, columns)
        return TileGrad(_POSITIVES, Tile(entries, rows, masks, columns, masks.places), passing)

    def _may_pass(self, matrix: Tensor) -> bool:
        """Return whether an entry that is not hidden may have a loss as a negative, or counts without one."""
        margin = self._margins[_NEGATIVES]
        if self._lows[_NEGATIVES] is None:
            return True
        # comparisons with NaN are false
        if self._sign < 0:
            return not float(matrix.amax()) <= margin
        if self._with_grads:
            margin = self._distance.started(margin, matrix.dtype)
        return not float(matrix.amin()) >= margin

    def _add_negatives(self, place: Place, matrix: Tensor, masks: Masks) -> TileGrad:
        """Add the numbers of a tile's negatives, for its rows and its mirrored columns. Entries with equal labels are hidden."""
        if self._with_grads:
            matrix = self._distance.finish_(matrix, 1)
        margin = self._margins[_NEGATIVES]
        losses = margin - matrix if self._sign > 0 else matrix - margin
        are_negative: Tensor | None = None
        if self._lows[_NEGATIVES] is None:
            are_negative = masks.weigh_negatives_(torch.ones_like(losses))
        passing = self._add_losses(_NEGATIVES, losses, are_negative, place)
        return TileGrad(_NEGATIVES, Tile(matrix, place.rows, masks, place.columns), passing, place.mirrored)

    def _add_losses(self, kind: int, losses: Tensor, weights: Tensor | None, place: Place) -> Tensor:
        """Add the numbers of pairs of one kind, and return how often each has a passing loss.

        Args:
            kind: Index of the sub-loss.
            losses: (T, n), by how much each pair violates the margin, not above 0 for other pairs. Overwritten.
            weights: (T, n), which pairs are of this kind. Not used if pairs without a loss do not count.
            place: Their rows and, if any column is mirrored, their columns.
        """
        limits, low, of_kind = self._limits[kind], self._lows[kind], self._of_kinds[kind]
        if low is not None:
            kept = torch.threshold_(losses, low, 0)
            _add_sums_(of_kind[0], kept, place)
            passing = kept.sign_()
            if limits is not None:
                _add_sums_(of_kind[1], passing, place)
            return passing
        assert weights is not None
        losses.clamp_min_(0)
        passing = above = weights
        if limits is not None:
            passing, above = weights * pass_limits(losses, *limits), weights * pass_limits(losses, limits[0], None)
        # the last two only if counts are recorded
        for stored, values in zip(of_kind, (losses * passing, passing, weights, above), strict=False):
            _add_sums_(stored, values, place)
        return losses.sign_().mul_(passing)


def _add_sums_(stored: Tensor, values: Tensor, place: Place) -> None:
    """Add the sums of rows and of mirrored columns of values (T, n) to numbers of all rows (B,)."""
    stored[place.rows].add_(values.sum(1))
    if place.mirrored is not None:
        stored[place.mirrored].add_(values[:, place.mirrored.start - place.columns.start :].sum(0))
