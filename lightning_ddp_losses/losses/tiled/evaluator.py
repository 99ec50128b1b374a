"""Passes over the tiles of a batch: forward adds rows up, backward computes each tile once more and pulls its slope back.

Legend: ``B`` rows on this rank, ``G`` columns over all ranks, ``T`` rows of a tile, ``k`` statistics of a row. What is alive at a time: the
embeddings, two or three tiles, k numbers per row. Three matrix products in all where the matrix is symmetric, four else; one less where
a single tile takes it all, and where a tile's slope follows from the tile alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.distributed.collectives import once_differentiable_strict
from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.losses.tiled.accumulators import Total
from lightning_ddp_losses.losses.tiled.formula import Formula
from lightning_ddp_losses.losses.tiled.geometry import Euclid, Geometry
from lightning_ddp_losses.losses.tiled.tile import Listed, Tile
from lightning_ddp_losses.losses.tiled.tiles import Pairs

_HOST_ROWS, _HOST_BYTES = 64, 512 << 10
_DEVICE_BYTES, _DEVICE_TILES = 256 << 20, 8


@dataclass(frozen=True)
class Block:
    """Columns that are here at a time.

    Attributes:
        columns: As the geometry keeps them, in the order of ``pairs``.
        pairs: Of this rank's rows and these columns.
        start: The first of them in the order of all columns.
        whole: They are all there are.
    """

    columns: Tensor
    pairs: Pairs
    start: int = 0
    whole: bool = False


def rows_of_a_tile(device: torch.device, row_bytes: int, rows: int) -> int:
    """How many rows a tile takes where nobody says.

    Few rows have few classes, hence a narrow band; too few read the columns too often, and small tiles are all overhead. On a GPU tiles
    must be large to be worth a launch.
    """
    if device.type == "cpu":
        return max(_HOST_ROWS, _HOST_BYTES // row_bytes)
    return max(_HOST_ROWS, min(_DEVICE_BYTES // row_bytes, -(-rows // _DEVICE_TILES)))


class Passes:
    """One evaluation of a loss.

    Args:
        formula: The loss.
        geometry: Its distance.
        rows: (B, D), prepared, without graph.
        blocks: Goes through the columns once.
        order: (B,) in which tiles take the rows; None: as they are.
        tile_bytes: The most that a tile may take; None: a default.
    """

    def __init__(
        self,
        formula: Formula,
        geometry: Geometry,
        rows: Tensor,
        blocks: Callable[[], Iterator[Block]],
        order: Tensor | None,
        tile_bytes: int | None,
    ) -> None:
        self._formula, self._geometry, self._blocks, self._order = formula, geometry, blocks, order
        self._rows = rows if order is None else rows[order]
        self._tile_bytes = tile_bytes
        self._buffers: list[Tensor] = []
        self._slopes: list[Tensor] = []
        self._kept: Tile | None = None

    @torch.no_grad()
    def forward(self, labels: Tensor | None, *, backward_comes: bool, rows_only: bool) -> tuple[list[Total], Tensor]:
        """Totals of the sub-losses, and (B, k) statistics in the order of this rank's rows.

        Args:
            labels: (B,) of this rank's rows.
            backward_comes: What helps it may be kept or, where it is ``immediate``, computed now.
            rows_only: It will ask for the gradient of the rows alone.
        """
        formula = self._formula
        if formula.immediate and backward_comes and rows_only:
            self._slopes = [torch.zeros_like(self._rows) for _ in formula.sub_losses]
        complete = False
        for block in self._blocks():
            self._look(block, keep=backward_comes)
            complete = block.whole
        if formula.revisits and not complete:
            self._look_again()
        if labels is not None and self._order is not None:
            labels = labels[self._order]
        totals, stats = formula.close(labels)
        return totals, self._unsorted(stats)

    @torch.no_grad()
    def backward(
        self, stats: Tensor, others: Tensor | None, factors: Sequence[float], to_columns: Tensor | None
    ) -> Tensor:
        """Gradient of the rows, (B, D).

        Args:
            stats: (B, k) as ``forward`` gave them.
            others: (G, k) in the order of the columns; None: the gradient of this rank's share only.
            factors: One per sub-loss.
            to_columns: (G, D), to which the gradient of the columns is added, in their order; None: not wanted.
        """
        formula, geometry = self._formula, self._geometry
        if self._slopes:  # transposed entries have the same slope
            grad = torch.zeros_like(self._rows)
            for slope, factor in zip(self._slopes, factors, strict=True):
                grad.add_(slope, alpha=2 * factor)
            return self._unsorted(grad)
        formula.ready(stats if self._order is None else stats[self._order], others, factors)
        grad = torch.zeros_like(self._rows)
        for block in self._blocks():
            for part in self._parts(block):
                tile, self._kept = self._kept or self._tile(block, part), None
                matrix = tile.matrix
                if isinstance(geometry, Euclid):  # its slope divides by the distance
                    matrix = self._buffer(1, tile.matrix.shape).copy_(tile.matrix)
                formula.slope(tile)
                into = None if to_columns is None else to_columns[tile.columns]
                grad[part] += geometry.pull(self._rows[part], block.columns, formula.scale, matrix, tile.matrix, into)
        self._buffers.clear()
        return self._unsorted(grad)

    def _look(self, block: Block, *, keep: bool) -> None:
        """Let the formula see each tile once; rows are complete at once where there is no other block."""
        formula, parts = self._formula, list(self._parts(block))
        for part in parts:
            tile = self._tile(block, part)
            if self._slopes:
                self._look_with_slopes(block, tile)
                continue
            if keep and block.whole and len(parts) == 1:  # so small a batch need not be computed twice
                self._kept = tile._replace(matrix=tile.matrix.clone())
            values = tile.positives()
            formula.look(tile)
            if formula.revisits and block.whole:
                formula.look_again(tile.rows, tile.near, values)

    def _look_again(self) -> None:
        """Go through the positives once more, now that rows are complete."""
        for block in self._blocks():
            for part in self._parts(block):
                tile = self._tile(block, part, block.pairs.band(part))
                self._formula.look_again(tile.rows, tile.near, tile.positives())

    def _look_with_slopes(self, block: Block, tile: Tile) -> None:
        rows, scale = self._rows[tile.rows], self._formula.scale
        slopes = self._formula.look_with_slopes(tile, self._buffer(1, tile.matrix.shape))
        for grad, (span, slope) in zip(self._slopes, slopes, strict=False):
            matrix = tile.matrix[:, span]
            grad[tile.rows] += self._geometry.pull(rows, block.columns[span], scale, matrix, slope, None)

    def release(self) -> None:
        """Free the tiles between forward and backward."""
        self._buffers.clear()

    def _parts(self, block: Block) -> Iterator[slice]:
        total = self._rows.shape[0]
        if block.columns.shape[0] == 0:
            return
        row_bytes = self._geometry.row_bytes(block.columns)
        size = rows_of_a_tile(self._rows.device, row_bytes, total)
        if self._tile_bytes is not None:
            size = self._tile_bytes // row_bytes
            if size == 0:
                raise InputError(
                    "tile_bytes",
                    expected=f"room for one row against {block.columns.shape[0]} columns ({row_bytes} bytes)",
                    got=self._tile_bytes,
                    fix="Raise tile_bytes, or leave it out.",
                )
        size = -(-total // -(-total // size)) if total else size  # parts of one size
        for start in range(0, total, size):
            yield slice(start, min(start + size, total))

    def _tile(self, block: Block, part: slice, span: slice | None = None) -> Tile:
        """A tile of all columns of a block, or of those in ``span``, among which all positives must be."""
        pairs, start = block.pairs, 0 if span is None else span.start
        columns = block.columns if span is None else block.columns[span]
        width = columns.shape[0]
        out = self._buffer(0, torch.Size((part.stop - part.start, width)))
        matrix = self._geometry.matrix(self._rows[part], columns, self._formula.scale, out)
        (owners, near), selves, band = pairs.near(part), pairs.selves(part), pairs.band(part)
        near = near - start
        if selves is not None:
            selves = torch.arange(0, len(selves) * width, width, device=selves.device).add_(selves - start)
        return Tile(
            matrix,
            part,
            slice(block.start + start, block.start + start + width),
            Listed(owners, near, owners * width + near),
            selves,
            pairs.far(part),
            slice(band.start - start, band.stop - start),
            pairs.triplets(part),
        )

    def _buffer(self, index: int, shape: torch.Size) -> Tensor:
        while len(self._buffers) <= index:
            self._buffers.append(self._rows.new_empty(0))
        if self._buffers[index].numel() < shape.numel():
            self._buffers[index] = self._rows.new_empty(shape.numel())
        return self._buffers[index][: shape.numel()].view(shape)

    def _unsorted(self, values: Tensor) -> Tensor:
        if self._order is None:
            return values
        return torch.empty_like(values).index_copy_(0, self._order, values)


def tiled_value(
    rows: Tensor,
    columns: Tensor | None,
    backward: Callable[[bool, bool], tuple[Tensor | None, Tensor | None]],
    value: float,
) -> Tensor:
    """A number with a gradient of its own.

    Args:
        rows: (B, D), with their graph.
        columns: (G, D), with their graph; None: they need none.
        backward: Whether rows and columns want a gradient -> their gradients.
        value: The number.
    """
    return _Value.apply(rows, columns, backward, value)  # type: ignore[no-untyped-call, no-any-return]


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, columns: Tensor | None, backward: Any, value: float) -> Tensor:
        ctx.pull = backward
        ctx.save_for_backward(rows, columns)
        return rows.new_full((), value)

    @staticmethod
    @once_differentiable_strict("GlobalBatchLoss")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        wanted = ctx.needs_input_grad[:2]
        own, others = ctx.pull(*wanted)
        return None if own is None else own * grad, None if others is None else others * grad, None, None
