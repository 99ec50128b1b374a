"""The tiles of one call: its rows and columns in the order and form of the tiles, and their gradients.

Legend: ``B`` rows on this rank, ``G`` columns over all ranks, ``D`` embedding size, ``T`` rows of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_ddp_losses.core.autograd_graph import match_requires_grad
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.losses.gathered_call import PMLCall
from lightning_ddp_losses.losses.products.forms import ProductForm, tile_budget
from lightning_ddp_losses.losses.tiled.distances import Side, tile_distance
from lightning_ddp_losses.losses.tiled.half_tiles import HALF_TILE_ROWS, OwnFirstPairs, Place
from lightning_ddp_losses.losses.tiled.tiles import Pairs, Tile

# few rows have few classes and hence few columns with positives. With fewer rows the columns are read too often, and overhead dominates
_FEWEST_ROWS, _HOST_BYTES = 64, 512 << 10
HALF_TILE_BYTES = 1 << 20
"""Bytes of a tile of half of the matrix: 256 rows and 1,024 columns of float32, which fit into the cache of a core."""
KEPT_BYTES = 8 << 20
"""Bytes of tiles of half of the matrix that stay in memory until backward, which does not multiply their rows again.

They are nearly all tiles of 2,048 rows of float32. More rows keep as many bytes.
"""
GradSums: TypeAlias = tuple[Tensor, Tensor | None]  # gradients of the rows, and of the columns if they are required


def rows_of_a_tile(row_bytes: int, columns: int, device: torch.device, tile_bytes: int | None) -> int:
    """Return how many rows fit into a tile.

    Args:
        row_bytes: Bytes of one row.
        columns: C.
        device: Device of the tile.
        tile_bytes: Maximum size of a tile in bytes. If None, a size that is fast on the device.

    Raises:
        InputError: if not even one row fits.
    """
    if tile_bytes is None:
        return max(_FEWEST_ROWS, tile_budget(device, _HOST_BYTES) // row_bytes)
    expect(
        tile_bytes >= row_bytes,
        "tile_bytes",
        expected=f"room for one row against {columns} columns ({row_bytes} bytes)",
        got=tile_bytes,
        fix="Raise tile_bytes, or leave it out.",
        error=InputError,
    )
    return tile_bytes // row_bytes


class CallTiles:
    """Rows and columns of a call in the tiles' order and form, and the conversion of their gradients to the original order and form.

    Args:
        call: The arguments over all ranks.
        distance: The loss's distance.
        products: Form of the products of rows.
        pairs: Pairs of rows and columns.
        scale: Factor of the distances.
        symmetric: True if the gradient of transposed entries is computed here, so that references receive none.
        tile_bytes: Maximum size of a tile in bytes. If None, a default.

    Attributes:
        embeddings: (B, D), with their graph.
        references: (G, D), with their graph. None if they do not require a gradient.
        rows: This rank's rows in the order of the tiles, in the form that the distance stores.
        columns: All columns, in their order and form.
        places: Position of each tile in the matrix.
        distance: Distances of the tiles.
    """

    def __init__(
        self,
        call: PMLCall,
        distance: Any,
        products: ProductForm,
        pairs: Pairs,
        scale: float,
        *,
        symmetric: bool,
        tile_bytes: int | None,
    ) -> None:
        self.pairs, self._scale = pairs, scale
        embeddings, references, everyone = call.given["embeddings"], call.references, call.arguments["embeddings"]
        self.embeddings = embeddings = match_requires_grad(embeddings, everyone.requires_grad)
        # rows and columns in the form in which they are compared
        tiles = self.distance = tile_distance(distance, len(references), products)
        columns = tiles.prepare(references)
        is_one_batch = references is everyone
        if is_one_batch:
            rows = columns.part(slice(*call.bound))
            if pairs.column_order is not None:  # a view would keep the unsorted columns in memory
                rows = rows.copied()
        else:
            rows = tiles.prepare(embeddings)
        self._prepared = rows
        # gradient of the references. If rows and references are one batch, it includes the gradient of the rows
        wants_references = references.requires_grad and not symmetric
        self.references = references if wants_references else None
        self._prepared_references = columns if wants_references else None
        self._bound = slice(*call.bound) if wants_references and is_one_batch else None
        # sorted, in the distance's form
        self.rows = tiles.kept_rows(rows.multiplied(pairs.row_order))
        self.columns = tiles.kept_columns(columns.multiplied(pairs.column_order))
        self._like = embeddings.detach()
        self.places = self._place_tiles(tile_bytes)
        self._buffer = self._kept = self._like.new_empty(0)
        # where the matrix of a tile begins in the memory that is kept, by its first row and column
        self._kept_at: dict[tuple[int, int], int] = {}

    def _place_tiles(self, tile_bytes: int | None) -> list[Place]:
        """Return the positions of the tiles: as few as fit, equal in height, over all columns; nearly square for half of the matrix."""
        count, width, device = len(self._like), len(self.columns.rows), self._like.device
        if not (count and width):
            return []
        if isinstance(self.pairs, OwnFirstPairs):
            entry_bytes = self.distance.row_bytes(1, self._like)
            most = max(1, (tile_bytes or HALF_TILE_BYTES) // entry_bytes)
            height = max(1, min(HALF_TILE_ROWS, int(most**0.5)))
            return list(self.pairs.places(height, most // height))
        most = rows_of_a_tile(self.distance.row_bytes(width, self._like), width, device, tile_bytes)
        size = -(-count // -(-count // most))
        return [Place(slice(start, min(start + size, count)), slice(0, width)) for start in range(0, count, size)]

    def __iter__(self) -> Iterator[Place]:
        yield from self.places
        self._buffer = self._like.new_empty(0)  # no other tile than the kept ones is alive between forward and backward

    def keep(self, most_bytes: int) -> None:
        """Keep the matrices of the first tiles from the next pass on, in so many bytes at most."""
        most, size = most_bytes // self._like.element_size(), 0
        for place in self.places:
            end = size + math.prod(_shape(place))
            if end > most:
                break
            self._kept_at[place.rows.start, place.columns.start] = size
            size = end
        # allocated once, outside of the tiles (``TileResults``)
        self._kept = self._like.new_empty(size)

    def release(self) -> None:
        """Forget the kept matrices."""
        self._kept_at = {}
        self._kept = self._like.new_empty(0)

    def kept(self, place: Place) -> Tensor | None:
        """Return the memory of a tile's matrix, (T, C), if it is kept."""
        start, shape = self._kept_at.get((place.rows.start, place.columns.start)), _shape(place)
        return None if start is None else self._kept[start : start + math.prod(shape)].view(shape)

    def tile(self, place: Place, *, keep: bool) -> Tile:
        """Compute a tile. Its matrix must not be overwritten if the tile is kept, or if the distance needs the matrix for its gradient.

        If an earlier pass has kept the matrix, it is not computed.
        """
        matrix, overwrites = self.kept(place), not (keep or self.distance.needs_matrix_in_vjp)
        if matrix is None:
            matrix = self.matrix(place)
        if isinstance(self.pairs, OwnFirstPairs):
            masks = self.pairs.masks_at(place.rows, place.columns, overwrites=overwrites)
            return Tile(matrix, place.rows, masks, place.columns)
        return Tile(matrix, place.rows, self.pairs.masks(place.rows, overwrites=overwrites))

    def matrix(self, place: Place, *, finished: bool = True) -> Tensor:
        """Compute the scaled distances of some rows and columns, in memory that is kept or that all tiles of a pass share.

        If not ``finished``, only ``TileDistance.start`` is computed.
        """
        out, shape = self.kept(place), _shape(place)
        if out is None:
            if self._buffer.numel() < math.prod(shape):
                self._buffer = self._like.new_empty(shape).view(-1)
            out = self._buffer[: math.prod(shape)].view(shape)
        compute = self.distance.matrix if finished else self.distance.start
        return compute(self.rows.part(place.rows), self.columns.part(place.columns), self._scale, out)

    def add_vjp_(self, tile: Tile, grad: Tensor, sums: GradSums, mirrored: slice | None = None) -> None:
        """Add the gradients of rows and columns, given the gradient of a tile's matrix or of its band of columns.

        Args:
            tile: The tile.
            grad: Gradient of its matrix.
            sums: Gradients of all rows and columns.
            mirrored: Columns that are also rows, as in ``Place``.
        """
        matrix, place, (row_sums, column_sums) = tile.matrix, tile.columns, sums
        if grad.shape != matrix.shape:
            band: slice = tile.keys.band  # type: ignore[union-attr, assignment]
            matrix, first = matrix[:, band], 0 if place is None else place.start
            place = slice(first + band.start, first + band.stop)
        row_side = Side(self.rows.part(tile.rows), row_sums[tile.rows])
        column_side = Side(self.columns, column_sums)
        if place is not None:
            column_side = Side(self.columns.part(place), None if column_sums is None else column_sums[place])
        if tile.places is not None:
            self.distance.few_vjp_(row_side, column_side, self._scale, matrix, grad, tile.places)
            return
        if mirrored is not None and place is not None and mirrored.start < place.stop:
            first = max(mirrored.start, place.start)
            row_side = row_side._replace(as_columns=self.columns.part(tile.rows))
            column_side = column_side._replace(sums=row_sums[first : place.stop], first=first - place.start)
        self.distance.vjp_(row_side, column_side, self._scale, matrix, grad)

    def zeros(self, *, columns: bool = True) -> GradSums:
        """Return sums of zeros for ``add_vjp_``, for rows and, if ``columns`` and the references require a gradient, for columns."""
        dtype, column_sums = self._like.dtype, None
        if columns and self.references is not None:
            column_sums = torch.zeros_like(self.columns.rows, dtype=dtype)
        return torch.zeros_like(self.rows.rows, dtype=dtype), column_sums

    def with_graph(self) -> list[Tensor]:
        """Return the tensors that receive a gradient."""
        if self.references is None:
            return [self.embeddings]
        return [self.references] if self._bound is not None else [self.embeddings, self.references]

    def vjp(self, row_sums: Tensor, column_sums: Tensor | None, wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``with_graph``, from the sums of rows and columns."""
        distance, references, columns_grad = self.distance, self.references, None
        rows_grad = undo_order(distance.rows_grad_(self.rows, row_sums), self.pairs.row_order)
        if column_sums is not None and references is not None and self._prepared_references is not None:
            columns_grad = undo_order(distance.columns_grad_(self.columns, column_sums), self.pairs.column_order)
            if self._bound is not None:
                columns_grad[self._bound] += rows_grad
            columns_grad = distance.prepare_vjp(references, self._prepared_references, columns_grad)
        if self._bound is not None:
            return (columns_grad,)
        found = distance.prepare_vjp(self.embeddings, self._prepared, rows_grad) if wanted[0] else None
        return (found,) if references is None else (found, columns_grad)


def _shape(place: Place) -> tuple[int, int]:
    """Return how many rows and columns a tile has."""
    return place.rows.stop - place.rows.start, place.columns.stop - place.columns.start


def in_order(values: Tensor, order: Tensor | None) -> Tensor:
    """Return values in ``order``, or unchanged if ``order`` is None."""
    return values if order is None else values[order]


def undo_order(values: Tensor, order: Tensor | None) -> Tensor:
    """Undo ``in_order``: return values that are in ``order`` in their original order, or unchanged if ``order`` is None."""
    if order is None:
        return values
    return torch.empty_like(values).index_copy_(0, order, values)
