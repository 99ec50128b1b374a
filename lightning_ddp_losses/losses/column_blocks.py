"""The second tower's rows of all ranks, as one rank gets to see them: gathered, or a rank's at a time as they go round a ring.

A two-tower loss is written once, for blocks of columns. What it finds out about the columns of a block is this rank's part where the
columns of all ranks are here; where they travel, it goes home behind them, joined with what the other ranks found.

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` texts of all ranks, ``M`` columns (texts and further negatives), ``D`` embedding size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ddp_losses.distributed import process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import ring_round_trip, ring_rows


@dataclass(frozen=True)
class Tile:
    """Some images against some columns of a block.

    Attributes:
        rows: Of this rank's images.
        columns: Of the block.
        texts: Those of the columns that have an image on some rank; they come first.
        own: Where in the tile an image meets its own text: rows and columns of the tile.
    """

    rows: slice
    columns: slice
    texts: slice
    own: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Block:
    """Columns that are here at a time.

    Attributes:
        columns: (n, D).
        texts: How many of them, the first, have an image of their own on some rank; the others are negatives alone.
        own: Column of the first text that belongs to an image of this rank; None: not in this block.
        beside: (texts,), a number for each text; empty where none were given.
        trained: Whether the columns may need a gradient.
    """

    columns: Tensor
    texts: int
    own: int | None
    beside: Tensor
    trained: bool = True

    def tiles(self, images: Tensor, tile_bytes: int) -> Iterator[Tile]:
        """Images and columns whose products fit ``tile_bytes``; nearly square, columns inside rows."""
        room = tile_bytes // images.element_size()
        side = max(1, int(room**0.5))
        for top in range(0, len(images), side):
            rows = slice(top, min(top + side, len(images)))
            wide = max(1, room // (rows.stop - top))
            for left in range(0, len(self.columns), wide):
                columns = slice(left, min(left + wide, len(self.columns)))
                texts = slice(left, max(left, min(columns.stop, self.texts)))
                yield Tile(rows, columns, texts, self._own_in(rows, columns))

    def _own_in(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        low = high = shift = self.own or 0
        if self.own is not None:
            low = max(rows.start + shift, columns.start)
            high = max(low, min(rows.stop + shift, columns.stop))
        index = torch.arange(low, high, device=self.columns.device)
        return index - shift - rows.start, index - columns.start


class Products:
    """Products of images and columns, a tile at a time; where a single tile is all there is, backward need not compute it again.

    Args:
        width: M.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._kept: Tensor | None = None

    def once(self, images: Tensor, scale: Tensor, block: Block, tile: Tile) -> Tensor:
        """``scale`` times the products of a tile, in forward; may be overwritten."""
        products = _products(images, scale, block, tile)
        if products.shape == (len(images), self._width):
            self._kept = products.clone()
        return products

    def again(self, images: Tensor, scale: Tensor, block: Block, tile: Tile) -> Tensor:
        """The same in backward."""
        kept, self._kept = self._kept, None
        return _products(images, scale, block, tile) if kept is None else kept


def _products(images: Tensor, scale: Tensor, block: Block, tile: Tile) -> Tensor:
    return (images[tile.rows] * scale) @ block.columns[tile.columns].t()


class Columns(ABC):
    """How many columns there are on each rank, and the ways to go through them; it holds none but the queue.

    Args:
        texts: Rows of each rank, each with an image of its own.
        further: Rows of each rank that are negatives alone.
        queue: (q, D), further negatives that every rank holds, without gradient; None: none.
        group: Process group.

    Attributes:
        total: G.
        width: M.
        first: Where this rank's texts begin among those whose numbers ``beside`` holds.
    """

    first = 0

    def __init__(self, texts: Sequence[int], further: Sequence[int], queue: Tensor | None, group: Group) -> None:
        self.total = sum(texts)
        self.width = self.total + sum(further) + (0 if queue is None else len(queue))
        self.group = group
        self._texts, self._further, self._queue = texts, further, queue

    def blocks(self, columns: Tensor, beside: Tensor | None = None) -> Iterator[Block]:
        """All columns, once.

        Args:
            columns: (m, D): of all ranks if ``Gathered``, this rank's own if ``Ring``; texts first.
            beside: (t,), a number for each text among them.
        """
        yield from self._visiting(columns, beside)
        yield from self._queued(columns)

    def find(self, visit: Visit, columns: Tensor, beside: Tensor, join: Join) -> Tensor:
        """What is found out about texts, (t, k): if ``Gathered`` by this rank about all, if ``Ring`` by all ranks about its own.

        Args:
            visit: Block -> what this rank finds out about its texts, (texts, k).
            columns: As for ``blocks``.
            beside: As for ``blocks``.
            join: What two ranks found about the same texts -> both.
        """
        return self._collect(visit, columns, beside, join, self._texts)

    def pull(self, visit: Visit, columns: Tensor, beside: Tensor | None = None, *, wanted: bool) -> Tensor | None:
        """Gradient of the columns, (m, D): if ``Gathered`` this rank's part for all, if ``Ring`` the whole one of its own.

        Args:
            visit: Block -> this rank's part of the gradient of its columns, (n, D).
            columns: As for ``blocks``.
            beside: As for ``blocks``.
            wanted: Whether the gradient is; the same on all ranks.
        """
        if wanted:
            counts = [own + more for own, more in zip(self._texts, self._further, strict=True)]
            return self._collect(visit, columns, beside, Tensor.add_, counts)
        for block in self.blocks(columns, beside):
            visit(block)
        return None

    def _collect(
        self, visit: Visit, columns: Tensor, beside: Tensor | None, join: Join, counts: Sequence[int]
    ) -> Tensor:
        found = self._collected(visit, columns, beside, join, counts)
        for block in self._queued(columns):
            visit(block)
        return found

    def _queued(self, like: Tensor) -> Iterator[Block]:
        if self._queue is not None:
            yield Block(self._queue, 0, None, like.new_empty(0), trained=False)

    @abstractmethod
    def _visiting(self, columns: Tensor, beside: Tensor | None) -> Iterator[Block]:
        """What does not lie in the queue."""

    @abstractmethod
    def _collected(
        self, visit: Visit, columns: Tensor, beside: Tensor | None, join: Join, counts: Sequence[int]
    ) -> Tensor:
        """What is found out about it; ``counts``: for how many columns of each rank."""


Visit = Callable[[Block], Tensor]
Join = Callable[[Tensor, Tensor], Tensor]


class Gathered(Columns):
    """All columns are here: the texts of all ranks in rank order, then their further negatives."""

    def __init__(self, texts: Sequence[int], further: Sequence[int], queue: Tensor | None, group: Group) -> None:
        super().__init__(texts, further, queue, group)
        self.first = sum(texts[: process_groups.rank(group)])

    def _visiting(self, columns: Tensor, beside: Tensor | None) -> Iterator[Block]:
        yield Block(columns, self.total, self.first, columns.new_empty(0) if beside is None else beside)

    def _collected(
        self, visit: Visit, columns: Tensor, beside: Tensor | None, join: Join, counts: Sequence[int]
    ) -> Tensor:
        (block,) = self._visiting(columns, beside)
        return visit(block)


class Ring(Columns):
    """Own columns are here, texts and then further negatives; the others' come by in turn, with the numbers beside them."""

    def _visiting(self, columns: Tensor, beside: Tensor | None) -> Iterator[Block]:
        message, sizes = self._message(columns, beside)
        for source, here in ring_rows(message, sizes, self.group):
            yield self._block(source, here, columns.shape[1])

    def _collected(
        self, visit: Visit, columns: Tensor, beside: Tensor | None, join: Join, counts: Sequence[int]
    ) -> Tensor:
        def arrived(source: int, here: Tensor) -> Tensor:
            return visit(self._block(source, here, columns.shape[1]))

        message, sizes = self._message(columns, beside)
        return ring_round_trip(message, sizes, arrived, join, counts, self.group)

    def _message(self, columns: Tensor, beside: Tensor | None) -> tuple[Tensor, list[int]]:
        """Columns and the numbers beside them as one, and its length for each rank."""
        flat, width = columns.reshape(-1), columns.shape[1]
        sizes = [(own + more) * width for own, more in zip(self._texts, self._further, strict=True)]
        if beside is None:
            return flat, sizes
        return torch.cat([flat, beside]), [size + own for size, own in zip(sizes, self._texts, strict=True)]

    def _block(self, source: int, message: Tensor, width: int) -> Block:
        texts = self._texts[source]
        end = (texts + self._further[source]) * width
        own = 0 if source == process_groups.rank(self.group) else None
        return Block(message[:end].view(-1, width), texts, own, message[end:])
