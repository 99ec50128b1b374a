"""Tiles of half of a symmetric matrix: each pair of this rank's rows is compared once, for both rows.

Columns are ordered differently from the rows of all ranks: this rank's rows come first, sorted by label in the same way as the rows,
followed by the rows of the other ranks, also sorted. The first block is symmetric, so tiles cover only its upper half, and entries above
the squares on its diagonal are counted for their rows and, transposed, for their columns. Columns of other ranks are counted only for the
rows, as in any tile.

Each row is therefore in several tiles. Their numbers are joined (``SoftmaxPairLoss.join_``) in a fixed order.

Positives of sorted rows are near the diagonal. All entries beyond them are negatives, and one exponential per entry serves its row and its
column (``SoftmaxPairLoss.far``).

Legend: ``B`` rows on this rank, ``G`` columns over all ranks, ``T`` rows and ``C`` columns of a tile.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.losses.tiled.pair_losses import SoftmaxPairLoss
from lightning_ddp_losses.losses.tiled.tile_functions import Numbers
from lightning_ddp_losses.losses.tiled.tiles import Masks, PackedMasks, Pairs, Tile

HALF_TILE_ROWS = 256
"""Maximum number of rows of a tile of half of the matrix: the inner size of the product whose results are summed into column gradients."""

_PACKED_PART = 4  # masks are packed if the positives of a row are a smaller part than 1 / 4 of the band


class Place(NamedTuple):
    """Position of a tile in the matrix.

    Attributes:
        rows: Rows of this rank.
        columns: Columns.
        mirrored: Trailing columns of the tile that are rows of this rank and whose entries also represent the transposed entries. None if
            there are no such columns.
    """

    rows: slice
    columns: slice
    mirrored: slice | None = None


class OwnFirstPairs(Pairs):
    """Pairs of all rows and columns, from labels, with this rank's rows as the first columns, for tiles of half of the matrix.

    Args:
        labels: (B,), labels of this rank's rows.
        column_labels: (G,), labels of all ranks' rows.
        first: Column of this rank's first row.

    Attributes:
        matching: As in ``SortedPairs``.
    """

    def __init__(self, labels: Tensor, column_labels: Tensor, first: int) -> None:
        count = self._count = len(labels)
        own, self.row_order = torch.sort(labels, stable=True)
        others = torch.cat([column_labels[:first], column_labels[first + count :]])
        others, order = torch.sort(others, stable=True)
        order += count * (order >= first)
        self.column_order: Tensor = torch.cat([self.row_order + first, order])
        self._labels = torch.cat([own, others])
        # for each row, the columns with its label: this rank's columns, then other ranks' columns
        self._limits = [_limits_in(own, own, 0), _limits_in(own, others, count)]
        self._bands: list[list[list[int]]] = [each.tolist() for each in self._limits]
        self.matching = int(torch.unique(column_labels, return_counts=True)[1].square().sum())

    def counts(self) -> tuple[Tensor, Tensor]:
        """Return the numbers of positives and of negatives of each row, (B,)."""
        same = torch.stack(self._limits).diff(dim=1).sum(0).squeeze(0)
        return same - 1, len(self._labels) - same

    def places(self, height: int, width: int) -> Iterator[Place]:
        """Yield tiles of at most ``height`` rows and ``width`` columns. ``width`` must be at least ``height``."""
        count, total = self._count, len(self._labels)
        for top in range(0, count, height):
            rows = slice(top, min(top + height, count))
            for left in range(top, count, width):
                columns = slice(left, min(left + width, count))
                mirrored = slice(max(left, rows.stop), columns.stop)
                yield Place(rows, columns, mirrored if mirrored.start < mirrored.stop else None)
            for left in range(count, total, width):
                yield Place(rows, slice(left, min(left + width, total)))

    def band(self, rows: slice, columns: slice) -> slice:
        """Return the range of the columns that may contain positives of the rows. It may be empty."""
        starts, stops = self._bands[columns.start >= self._count]
        start = min(max(columns.start, starts[rows.start]), columns.stop)
        return slice(start, min(max(start, stops[rows.stop - 1]), columns.stop))

    def masks_at(self, rows: slice, columns: slice, *, overwrites: bool) -> Masks:
        """Return the masks of some rows and columns. The columns either begin with these rows or contain none of them."""
        starts, stops = self._bands[columns.start >= self._count]
        band, own = self.band(rows, columns), None
        most = max(1, *map(operator.sub, stops[rows], starts[rows]))
        if _PACKED_PART * most < band.stop - band.start:
            if rows.start == columns.start:
                own = 0
            first_columns, ends = (self._limits[columns.start >= self._count][:, rows] - columns.start).unbind()
            return PackedMasks(first_columns, ends, columns.stop - columns.start, most, own, overwrites=overwrites)
        if rows.start == columns.start:
            own = rows.start - band.start
        place = slice(band.start - columns.start, band.stop - columns.start)
        return Masks(self._labels[rows], self._labels[band], own, band=place, overwrites=overwrites)


def _limits_in(labels: Tensor, columns: Tensor, first: int) -> Tensor:
    """Return where the columns with each label begin and end, (2, B), offset by ``first`` preceding columns. Both inputs are sorted."""
    starts = torch.searchsorted(columns, labels)
    stops = torch.searchsorted(columns, labels, right=True)
    return torch.stack([starts, stops]).add_(first)


class HalfNumbers:
    """The numbers of all rows of a loss with a softmax, from tiles that cover half of the matrix.

    Args:
        pair_loss: The loss on tiles.
        pairs: The pairs.
        rows: B.
    """

    def __init__(self, pair_loss: SoftmaxPairLoss, pairs: OwnFirstPairs, rows: int) -> None:
        self._pair_loss, self._pairs = pair_loss, pairs
        # allocated once, outside of the tiles (``TileResults``)
        self._numbers = pair_loss.start(rows)
        self._of_positives: Numbers = ()
        if pair_loss.positives_last:
            self._of_positives = pair_loss.nothing(rows)[len(self._numbers) :]

    @property
    def numbers(self) -> Numbers:
        """The numbers of all rows, (B,) each."""
        return *self._numbers, *self._of_positives

    def add(self, place: Place, matrix: Tensor) -> None:
        """Add the numbers of a tile.

        Args:
            place: Position of the tile.
            matrix: (T, C). Entries of rows with themselves are overwritten.
        """
        rows, columns, mirrored = place
        # the columns up to the last possible positive, and the columns after it. In columns of other ranks positives may be anywhere
        end, band = columns.start, self._pairs.band(rows, columns)
        if band.start < band.stop:
            end = columns.stop if mirrored is None else band.stop
        if end > columns.start:
            near = slice(columns.start, end)
            tile = self._tile(rows, near, matrix[:, : end - columns.start])
            self._join_(rows, self._pair_loss.part(tile))
            if mirrored is not None and mirrored.start < end:
                near = slice(mirrored.start, end)
                transposed = matrix[:, near.start - columns.start : near.stop - columns.start].T
                self._join_(near, self._pair_loss.part(self._tile(near, rows, transposed)))
        if end < columns.stop:
            far = slice(end, columns.stop)
            of_rows, of_columns = self._pair_loss.far(matrix[:, end - columns.start :], both=mirrored is not None)
            self._join_(rows, of_rows, self._pair_loss.of_far)
            if of_columns is not None:
                self._join_(far, of_columns, self._pair_loss.of_far)

    def positives_in(self, place: Place) -> Place | None:
        """Return the part of a tile with positives, if their numbers depend on all negatives, or None if nothing has to be computed."""
        band = self._pairs.band(place.rows, place.columns)
        if not self._of_positives or band.start == band.stop:
            return None
        columns, mirrored = band, place.mirrored
        if place.columns.start == place.rows.start:  # includes entries of rows with themselves
            columns = slice(place.rows.start, max(band.stop, place.rows.stop))
        if mirrored is not None:
            mirrored = slice(max(mirrored.start, columns.start), columns.stop)
            mirrored = mirrored if mirrored.start < mirrored.stop else None
        return Place(place.rows, columns, mirrored)

    def add_positives(self, place: Place, matrix: Tensor) -> None:
        """Add the numbers of positives, given the numbers of all negatives. Takes the same arguments as ``add``."""
        tiles = [self._tile(place.rows, place.columns, matrix)]
        if place.mirrored is not None:
            transposed = matrix[:, place.mirrored.start - place.columns.start :].T
            tiles.append(self._tile(place.mirrored, place.rows, transposed))
        for tile in tiles:
            found = self._pair_loss.positives(tile, tuple(each[tile.rows] for each in self._numbers))
            for stored, each in zip(self._of_positives, found, strict=True):
                stored[tile.rows] += each

    def _tile(self, rows: slice, columns: slice, matrix: Tensor) -> Tile:
        keys = self._pairs.masks_at(rows, columns, overwrites=False)
        return Tile(matrix, rows, keys, columns)

    def _join_(self, rows: slice, numbers: Numbers, which: slice = slice(None)) -> None:
        known = tuple(each[rows] for each in self._numbers[which])
        self._pair_loss.join_(known, numbers)
