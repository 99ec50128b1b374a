"""The second tower's rows of all ranks, as one rank gets to see them: gathered, or a rank's at a time as they go round a ring.

A two-tower loss is written once, for blocks of columns. What it finds out about the columns of a block is this rank's part where the
columns of all ranks are here; where they travel, it travels behind them, joined with what the other ranks found, to the rank they are of.

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` texts of all ranks, ``M`` columns (texts and further negatives), ``D`` embedding size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.backward_exchange import BackwardExchange
from lightning_ddp_losses.distributed.gathered_batch import aligned
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import (
    NarrowRows,
    RowsOfARing,
    as_bytes,
    ring_round_trip,
    ring_rows,
)
from lightning_ddp_losses.losses.products import Operand, ProductForm, as_operand, product, product_grad_, scaled


@dataclass(frozen=True)
class ProductTile:
    """Some images against some columns of a block.

    Attributes:
        rows: Of this rank's images.
        columns: Of the block.
        texts: Those of the columns that have an image on some rank; they come first.
        own_rows: Rows of the tile whose own text is among its columns.
        own_columns: Where these texts are, in the same order.
    """

    rows: slice
    columns: slice
    texts: slice
    own_rows: slice
    own_columns: slice

    @property
    def text_count(self) -> int:
        """How many columns of the tile, the first, are texts with an image."""
        count: int = self.texts.stop - self.texts.start
        return count

    @property
    def has_own_pairs(self) -> bool:
        """Whether an image of the tile meets its own text."""
        return bool(self.own_rows.start < self.own_rows.stop)

    def own_pairs(self, matrix: Tensor) -> Tensor:
        """Returns the entries of a matrix of the tile where an image meets its own text, a view."""
        return matrix[self.own_rows, self.own_columns].diagonal()


@dataclass(frozen=True)
class ColumnBlock:
    """Columns that are here at a time.

    Attributes:
        columns: (n, D), or one number more a row (``RowForm``).
        text_count: How many of them, the first, have an image of their own on some rank; the others are negatives alone.
        first_own: Column of the first text that belongs to an image of this rank; None: not in this block.
        column_stats: (text_count,), a number for each text; empty where none were given.
        trained: Whether the columns may need a gradient.
    """

    columns: Tensor
    text_count: int
    first_own: int | None
    column_stats: Tensor
    trained: bool = True

    def tiles(self, images: Tensor, tile_bytes: int) -> Iterator[ProductTile]:
        """Yields images and columns whose products fit ``tile_bytes``; nearly square, columns inside rows."""
        entries = tile_bytes // images.element_size()
        side = max(1, int(entries**0.5))
        for top in range(0, len(images), side):
            rows = slice(top, min(top + side, len(images)))
            width = max(1, entries // (rows.stop - top))
            for left in range(0, len(self.columns), width):
                columns = slice(left, min(left + width, len(self.columns)))
                texts = slice(left, max(left, min(columns.stop, self.text_count)))
                yield ProductTile(rows, columns, texts, *self._own_pairs_in(rows, columns))

    def _own_pairs_in(self, rows: slice, columns: slice) -> tuple[slice, slice]:
        shift = self.first_own
        if shift is None:
            return slice(0, 0), slice(0, 0)
        low = max(rows.start + shift, columns.start)
        high = max(low, min(rows.stop + shift, columns.stop))
        own_rows = slice(low - shift - rows.start, high - shift - rows.start)
        return own_rows, slice(low - columns.start, high - columns.start)


@dataclass(frozen=True)
class RowForm:
    """How the rows of a call are multiplied.

    Attributes:
        form: As ``products`` has it.
        image_lengths: (B,), what this rank's images were divided by; columns then bring theirs along, as one number more a row. None:
            no one's length is needed.
    """

    form: ProductForm
    image_lengths: Tensor | None = None

    def rows(self, columns: Tensor) -> Tensor:
        """Return the rows themselves, (n, D), of columns or of their gradient; a view."""
        return columns if self.image_lengths is None else columns[:, :-1]

    def lengths(self, columns: Tensor) -> Tensor | None:
        """Return what the columns were divided by, (n,)."""
        return None if self.image_lengths is None else columns[:, -1]


class Products:
    """Products of images and columns, a tile at a time; where a single tile is all there is, backward need not compute it again.

    Args:
        width: M.
        form: How they are multiplied.
    """

    def __init__(self, width: int, form: RowForm) -> None:
        self._width, self._form = width, form
        self._kept: Tensor | None = None

    def with_block(self, images: Tensor, scale: Tensor, block: ColumnBlock) -> BlockProducts:
        """Prepare the rows on both sides of a block's tiles."""
        form, rows = self._form, self._form.rows
        left = as_operand(images, form.form, form.image_lengths)
        right = as_operand(rows(block.columns), form.form, form.lengths(block.columns))
        return BlockProducts(self, left, right, scale)

    def keep(self, tile: Tensor, rows: int) -> bool:
        """Note a tile of forward, where it is all there is; tells whether that is so, and nobody may overwrite it."""
        is_all = tile.shape == (rows, self._width)
        if is_all:
            self._kept = tile
        return is_all

    def take_kept(self) -> Tensor | None:
        """Return the tile that forward has kept, once: a second backward computes it anew."""
        kept, self._kept = self._kept, None
        return kept


class BlockProducts:
    """Products of images and the columns of one block.

    Args:
        products: Of all blocks.
        left: The images.
        right: The columns.
        scale: What multiplies them, 0-dim.
    """

    def __init__(self, products: Products, left: Operand, right: Operand, scale: Tensor) -> None:
        self.products, self.left, self.right, self.scale = products, left, right, scale
        self._scaled_rows: slice | None = None  # the images of the last tile, which are those of its neighbours
        self._scaled = left

    def compute(self, tile: ProductTile) -> Tensor:
        """Computes ``scale`` times the products of a tile; the caller may overwrite them."""
        if self._scaled_rows != tile.rows:
            self._scaled_rows, self._scaled = tile.rows, scaled(self.left.part(tile.rows), self.scale)
        return product(self._scaled, self.right.part(tile.columns))

    def keep(self, tile: Tensor) -> bool:
        """Notes what forward made of a tile for backward, where it is all there is; tells whether it did: it is not overwritten then."""
        return self.products.keep(tile, len(self.left.rows))

    def add_grads_(self, grad: Tensor, tile: ProductTile, d_images: Tensor, d_columns: Tensor | None) -> None:
        """Adds what the gradient of a tile's logits gives back to both towers, but for the scale.

        Args:
            grad: (rows, columns) of the tile; overwritten.
            tile: Which rows and columns.
            d_images: (B, D).
            d_columns: (n, D) of the block; None: not wanted.
        """
        parts = product_grad_(grad, self.left.part(tile.rows), self.right.part(tile.columns))
        parts.add_to_left_(d_images[tile.rows])
        if d_columns is not None:
            parts.add_to_right_(d_columns[tile.columns])


Visit = Callable[[ColumnBlock], Tensor]
Join = Callable[[Tensor, Tensor], Tensor]


class ColumnBlocks(ABC):
    """How many columns there are on each rank, and the ways to go through them; it holds none but the queue.

    Args:
        text_counts: Rows of each rank, each with an image of its own.
        extra_counts: Rows of each rank that are negatives alone.
        queue: (q, D), further negatives that every rank holds, without gradient; None: none.
        group: Process group.

    Attributes:
        total: G.
        width: M.
        first: Where this rank's texts begin among those whose numbers ``column_stats`` holds.
    """

    first = 0

    def __init__(
        self, text_counts: Sequence[int], extra_counts: Sequence[int], queue: Tensor | None, group: Group
    ) -> None:
        self.total = sum(text_counts)
        self.width = self.total + sum(extra_counts)
        if queue is not None:
            self.width += len(queue)
        self.group = group
        self._text_counts, self._extra_counts, self._queue = text_counts, extra_counts, queue

    def blocks(self, columns: Tensor, column_stats: Tensor | None = None) -> Iterator[ColumnBlock]:
        """Yields all columns, once.

        Args:
            columns: (m, D): of all ranks if ``GatheredColumns``, this rank's own if ``RingColumns``; texts first.
            column_stats: (t,), a number for each text among them.
        """
        yield from self._rank_blocks(columns, column_stats)
        yield from self._queue_blocks(columns)

    def collect_stats(self, visit: Visit, columns: Tensor, join: Join) -> Tensor:
        """Collects what is found out about texts, (t, k): if gathered by this rank about all, in a ring by all ranks about its own.

        Args:
            visit: Block -> what this rank finds out about its texts, (texts, k).
            columns: As for ``blocks``.
            join: What two ranks found about the same texts -> both.
        """
        return self._collect(visit, columns, None, join, self._text_counts)

    def collect_grad(
        self, visit: Visit, columns: Tensor, column_stats: Tensor | None = None, *, wanted: bool
    ) -> Tensor | None:
        """Collects the gradient of the columns, (m, D): if gathered this rank's part for all, in a ring the full one of its own.

        Args:
            visit: Block -> this rank's part of the gradient of its columns, (n, D).
            columns: As for ``blocks``.
            column_stats: As for ``blocks``.
            wanted: Whether the gradient is; the same on all ranks.
        """
        if wanted:
            counts = [texts + extras for texts, extras in zip(self._text_counts, self._extra_counts, strict=True)]
            return self._collect(visit, columns, column_stats, Tensor.add_, counts)
        for block in self.blocks(columns, column_stats):
            visit(block)
        return None

    def _collect(
        self, visit: Visit, columns: Tensor, column_stats: Tensor | None, join: Join, counts: Sequence[int]
    ) -> Tensor:
        found = self._collect_from_ranks(visit, columns, column_stats, join, counts)
        for block in self._queue_blocks(columns):
            visit(block)
        return found

    def _queue_blocks(self, like: Tensor) -> Iterator[ColumnBlock]:
        if self._queue is not None:
            yield ColumnBlock(self._queue, 0, None, like.new_empty(0), trained=False)

    @abstractmethod
    def _rank_blocks(self, columns: Tensor, column_stats: Tensor | None) -> Iterator[ColumnBlock]:
        """Yields what does not lie in the queue."""

    @abstractmethod
    def _collect_from_ranks(
        self, visit: Visit, columns: Tensor, column_stats: Tensor | None, join: Join, counts: Sequence[int]
    ) -> Tensor:
        """Collects what is found out about it; ``counts``: for how many columns of each rank."""


class GatheredColumns(ColumnBlocks):
    """All columns are here: the texts of all ranks in rank order, then their further negatives."""

    def __init__(
        self, text_counts: Sequence[int], extra_counts: Sequence[int], queue: Tensor | None, group: Group
    ) -> None:
        super().__init__(text_counts, extra_counts, queue, group)
        self.first = sum(text_counts[: process_groups.rank(group)])

    def _rank_blocks(self, columns: Tensor, column_stats: Tensor | None) -> Iterator[ColumnBlock]:
        if column_stats is None:
            column_stats = columns.new_empty(0)
        yield ColumnBlock(columns, self.total, self.first, column_stats)

    def _collect_from_ranks(
        self, visit: Visit, columns: Tensor, column_stats: Tensor | None, join: Join, counts: Sequence[int]
    ) -> Tensor:
        (block,) = self._rank_blocks(columns, column_stats)
        return visit(block)


class RingColumns(ColumnBlocks):
    """Own columns are here, texts and then further negatives; the others' come by in turn, with their ``column_stats``.

    A message is bytes: the rows, in the dtype in which they travel, and the stats in that of the columns.

    Args:
        text_counts: As ``ColumnBlocks`` has them.
        extra_counts: Likewise.
        queue: Likewise.
        group: Process group.
        exchange: Meets the peers in backward.
        narrow: What columns are made of, texts and then further negatives of this rank.
        dtypes: By rank, in which these travel; None: columns themselves do.
    """

    def __init__(
        self,
        text_counts: Sequence[int],
        extra_counts: Sequence[int],
        queue: Tensor | None,
        group: Group,
        exchange: BackwardExchange,
        narrow: NarrowRows,
        dtypes: Sequence[torch.dtype | None],
    ) -> None:
        super().__init__(text_counts, extra_counts, queue, group)
        self._exchange, self._narrow, self._dtypes = exchange, narrow, dtypes

    def collect_grad(
        self, visit: Visit, columns: Tensor, column_stats: Tensor | None = None, *, wanted: bool
    ) -> Tensor | None:
        """As ``ColumnBlocks.collect_grad``, once all ranks have met in this backward."""
        self._exchange.open()
        return super().collect_grad(visit, columns, column_stats, wanted=wanted)

    def _rank_blocks(self, columns: Tensor, column_stats: Tensor | None) -> Iterator[ColumnBlock]:
        rows = self._rows_of_a_ring(columns)
        message, sizes = self._message(rows, column_stats)
        for source, received in ring_rows(message, sizes, self.group):
            yield self._received_block(source, received, rows)

    def _collect_from_ranks(
        self, visit: Visit, columns: Tensor, column_stats: Tensor | None, join: Join, counts: Sequence[int]
    ) -> Tensor:
        rows = self._rows_of_a_ring(columns)

        def visit_received(source: int, received: Tensor) -> Tensor:
            return visit(self._received_block(source, received, rows))

        message, sizes = self._message(rows, column_stats)
        return ring_round_trip(message, sizes, visit_received, join, counts, self.group)

    def _rows_of_a_ring(self, columns: Tensor) -> RowsOfARing:
        counts = [texts + extras for texts, extras in zip(self._text_counts, self._extra_counts, strict=True)]
        return RowsOfARing(columns.detach(), self._narrow, self._dtypes, counts, self.group)

    def _message(self, rows: RowsOfARing, column_stats: Tensor | None) -> tuple[Tensor, list[int]]:
        """Packs columns and their stats as bytes; returns them and how many there are of each rank."""
        message, row_sizes = rows.message(), rows.sizes()
        if column_stats is None:
            return message, row_sizes
        # the stats at a place from which they can be read
        starts = [aligned(size) for size in row_sizes]
        own_start = starts[process_groups.rank(self.group)]
        gap = message.new_zeros(own_start - len(message))
        stats_bytes = [texts * column_stats.element_size() for texts in self._text_counts]
        sizes = [start + size for start, size in zip(starts, stats_bytes, strict=True)]
        return torch.cat([message, gap, as_bytes(column_stats)]), sizes

    def _received_block(self, source: int, message: Tensor, rows: RowsOfARing) -> ColumnBlock:
        """Unpacks a rank's message."""
        size = rows.sizes()[source]
        stats = rows.own.new_empty(0)
        if len(message) > size:
            stats = message[aligned(size) :].view(rows.own.dtype)
        first_own = 0 if source == process_groups.rank(self.group) else None
        return ColumnBlock(rows.received(source, message[:size]), self._text_counts[source], first_own, stats)
