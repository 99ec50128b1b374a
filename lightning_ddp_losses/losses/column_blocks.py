"""The second tower's rows of all ranks in blocks of columns, gathered or a rank's at a time as they go round a ring, and their products.

A two-tower loss is written once, for blocks of columns. Its result for the columns of a block is this rank's part if the columns of all
ranks are here. In a ring the result travels behind the columns, joined with those of the other ranks, to the rank that owns them.

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` texts of all ranks, ``M`` columns (texts and further negatives), ``D`` embedding size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.collectives import BackwardExchange
from lightning_ddp_losses.distributed.gathered_batch import aligned
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import NarrowRows, RowsOfARing, as_bytes, ring_round_trip
from lightning_ddp_losses.losses.products import ProductForm, as_operand, product, product_grad_, scaled


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
        columns: (n, D), or one number more a row (``ColumnBlocks.image_lengths``).
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


class BlockProducts:
    """Products of this rank's images and the columns of one block, a tile at a time.

    Args:
        columns: All blocks of the call.
        block: The block.
        images: (B, D), rows of this rank.
        scale: Factor of the products, 0-dim.
    """

    def __init__(self, columns: ColumnBlocks, block: ColumnBlock, images: Tensor, scale: Tensor) -> None:
        lengths = None if columns.image_lengths is None else block.columns[:, -1]
        self._left = as_operand(images, columns.form, columns.image_lengths)
        self._right = as_operand(block.columns[:, : images.shape[1]], columns.form, lengths)
        self._scale = scale
        self._scaled_rows: slice | None = None  # the images of the last tile, which its neighbours share
        self._scaled = self._left

    def compute(self, tile: ProductTile) -> Tensor:
        """Compute ``scale`` times the products of a tile; the caller may overwrite them."""
        if self._scaled_rows != tile.rows:
            self._scaled_rows, self._scaled = tile.rows, scaled(self._left.part(tile.rows), self._scale)
        return product(self._scaled, self._right.part(tile.columns))

    def add_grads_(self, grad: Tensor, tile: ProductTile, d_images: Tensor, d_columns: Tensor | None) -> None:
        """Add the gradients of both towers from that of a tile's logits, but for the scale.

        Args:
            grad: (rows, columns) of the tile; overwritten.
            tile: Place of the rows and columns.
            d_images: (B, D).
            d_columns: (n, D) of the block; None: not wanted.
        """
        parts = product_grad_(grad, self._left.part(tile.rows), self._right.part(tile.columns))
        parts.add_to_left_(d_images[tile.rows])
        if d_columns is not None:
            parts.add_to_right_(d_columns[tile.columns])


Visit = Callable[[ColumnBlock], Tensor | None]
Join = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class RingSource:
    """How a rank's columns go round the ranks.

    Attributes:
        narrow: Rows from which this rank's columns are made, texts and then further negatives.
        dtypes: Dtype in which each rank's travel; None: the columns themselves do.
        exchange: Handshake of the ranks in backward.
    """

    narrow: NarrowRows
    dtypes: Sequence[torch.dtype | None]
    exchange: BackwardExchange


@dataclass
class ColumnBlocks:
    """The columns of one call, of all ranks, block by block: all at once if they are gathered, else a rank's at a time round a ring.

    Attributes:
        form: How rows are multiplied (``products``).
        image_lengths: (B,), divisors of this rank's images. Columns then bring theirs along, as one number more a row. None: no
            length is needed.
        tile_bytes: Most bytes of products at a time.
        text_counts: Rows of each rank that have an image of their own.
        extra_counts: Rows of each rank that are only negatives.
        queue: (q, D), further negatives that every rank holds, without gradient; None: none.
        group: Process group.
        ring: The way round the ranks; None: the columns are gathered.
        kept: The only tile of forward, for one backward.
    """

    form: ProductForm
    image_lengths: Tensor | None
    tile_bytes: int
    text_counts: Sequence[int]
    extra_counts: Sequence[int]
    queue: Tensor | None
    group: Group
    ring: RingSource | None = None
    kept: Tensor | None = None

    @property
    def total(self) -> int:
        """G."""
        return sum(self.text_counts)

    @property
    def width(self) -> int:
        """M."""
        return self.total + sum(self.extra_counts) + (0 if self.queue is None else len(self.queue))

    @property
    def column_counts(self) -> list[int]:
        """Columns of each rank."""
        return [texts + extras for texts, extras in zip(self.text_counts, self.extra_counts, strict=True)]

    @property
    def own_texts(self) -> slice:
        """This rank's texts among those with statistics on this rank."""
        rank = process_groups.rank(self.group)
        first = 0 if self.ring is not None else sum(self.text_counts[:rank])
        return slice(first, first + self.text_counts[rank])

    def keep(self, tile: Tensor, images: int) -> bool:
        """Keep a tile of forward for backward if it is the only one; return whether it was kept and may not be overwritten."""
        is_all = tile.shape == (images, self.width)
        if is_all:
            self.kept = tile
        return is_all

    def take_kept(self) -> Tensor | None:
        """Return the kept tile, once: a second backward computes it again."""
        kept, self.kept = self.kept, None
        return kept

    def collect(
        self,
        visit: Visit,
        columns: Tensor,
        column_stats: Tensor | None = None,
        *,
        join: Join = Tensor.add_,
        counts: Sequence[int] | None = None,
    ) -> Tensor | None:
        """Visit all blocks; return the results, (n, k): this rank's part for all columns, in a ring of all ranks for its own columns.

        Args:
            visit: Block -> this rank's result for its columns, (n, k), or for its texts.
            columns: (m, D), texts first: of all ranks, in a ring this rank's own.
            column_stats: (t,), a number for each text among them.
            join: Results of two ranks for the same columns -> both.
            counts: n of each rank; None: the results are not collected.

        Communication: none; in a ring W - 1 messages of columns to the next rank, and as many of results.
        """
        if self.ring is None:
            stats = columns.new_empty(0) if column_stats is None else column_stats
            found = visit(ColumnBlock(columns, self.total, self.own_texts.start, stats))
        else:
            rows = RowsOfARing(columns.detach(), self.ring.narrow, self.ring.dtypes, self.column_counts, self.group)
            message, sizes = self._message(rows, column_stats)

            def visit_received(source: int, received: Tensor) -> Tensor | None:
                return visit(self._received_block(source, received, rows))

            found = ring_round_trip(message, sizes, visit_received, join, counts, self.group)
        if self.queue is not None:
            visit(ColumnBlock(self.queue, 0, None, columns.new_empty(0), trained=False))
        return None if counts is None else found

    def collect_grad(
        self, visit: Visit, columns: Tensor, column_stats: Tensor | None = None, *, wanted: bool
    ) -> Tensor | None:
        """Collect the gradient of the columns, (m, D), as ``collect`` does; ``wanted`` is the same on all ranks.

        Communication: in a ring one handshake more, before all.
        """
        if self.ring is not None:
            self.ring.exchange.open()
        return self.collect(visit, columns, column_stats, counts=self.column_counts if wanted else None)

    def _message(self, rows: RowsOfARing, column_stats: Tensor | None) -> tuple[Tensor, list[int]]:
        """Return this rank's columns and their statistics as bytes, and the number of bytes of each rank."""
        message, sizes = rows.message(), rows.sizes()
        if column_stats is None:
            return message, sizes
        # the statistics at a place from which they can be read
        starts = [aligned(size) for size in sizes]
        gap = message.new_zeros(starts[process_groups.rank(self.group)] - len(message))
        item = column_stats.element_size()
        sizes = [start + texts * item for start, texts in zip(starts, self.text_counts, strict=True)]
        return torch.cat([message, gap, as_bytes(column_stats)]), sizes

    def _received_block(self, source: int, message: Tensor, rows: RowsOfARing) -> ColumnBlock:
        """Return the columns of a rank, from its message."""
        size = rows.sizes()[source]
        stats = rows.own.new_empty(0)
        if len(message) > size:
            stats = message[aligned(size) :].view(rows.own.dtype)
        first_own = 0 if source == process_groups.rank(self.group) else None
        return ColumnBlock(rows.received(source, message[:size]), self.text_counts[source], first_own, stats)
