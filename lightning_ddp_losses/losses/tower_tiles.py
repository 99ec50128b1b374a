"""The products of two towers in tiles: this rank's rows of one tower against all rows of the other.

Rows of the first tower stay on their rank. Only the second tower is exchanged: its rows are gathered as columns, or sent around a ring, one
rank's columns at a time. A loss is written once, for blocks of columns. If all columns have been gathered, its result for a block is this
rank's part. In a ring, the result is sent on after the columns, joined with the results of the other ranks, to the rank that owns them.

Tiles accumulate sums over each row's partners. The gradients are computed from these sums once, at the end (``TowerCall.gradients``).

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` texts of all ranks, ``M`` columns (texts and further negatives), ``D`` embedding size,
``T`` rows and ``C`` columns of a tile.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import BackwardExchange, sums_of_own_rows
from lightning_ddp_losses.distributed.gathered_batch import aligned
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import (
    TravellingRows,
    as_bytes,
    host_bytes,
    reduce_scatter_rows,
    ring_round_trip,
    tensor_of_bytes,
)
from lightning_ddp_losses.losses.partial_sums import global_quotient
from lightning_ddp_losses.losses.plans.towers import TowerPlan
from lightning_ddp_losses.losses.products.forms import ProductForm, aligned_columns, grad_terms_of
from lightning_ddp_losses.losses.products.operands import (
    GradTerms,
    Operand,
    add_factors_,
    add_to_left_,
    add_to_right_,
    part_of,
    product,
    split,
)
from lightning_ddp_losses.losses.tile_compiler import TileCompiler

# ---------------------------------------------------------------------- products in tiles


class Factors(NamedTuple):
    """Factors that turn a tile of products into logits.

    Attributes:
        scale: 0-dim. If None, the rows are already multiplied by the scale.
        of_rows: (T,). If None, 1.
        of_columns: (C,). If None, 1.
        own: Offset of the diagonal with the products of images and their own texts, which is outside of a tile that does not contain them.
            With masks, the column of each row's own text, (T, 1), out of range if it is not in the tile.
    """

    scale: Tensor | None
    of_rows: Tensor | None
    of_columns: Tensor | None
    own: int | Tensor

    def logits(self, products: Tensor, plus: Tensor | None = None) -> Tensor:
        """Return products times their factors, plus a number, in the same memory unless the function is compiled."""
        of_rows = self.of_rows
        if self.scale is not None:
            of_rows = self.scale.reshape(1) if of_rows is None else of_rows * self.scale
        return add_factors_(products, of_rows, self.of_columns, plus)

    def terms(self, grad: Tensor, term_count: int) -> GradTerms:
        """Return the gradient of logits in the form for a product with rows (``operands.split``), not multiplied by the scale."""
        return split(grad, self.of_rows, self.of_columns, term_count)

    def negate_own_(self, matrix: Tensor) -> Tensor:
        """Negate the entries of own pairs."""
        if isinstance(self.own, Tensor):
            return torch.where(self._is_own(matrix), -matrix, matrix)
        matrix.diagonal(self.own).neg_()
        return matrix

    def put_own_(self, matrix: Tensor, values: Tensor | float) -> Tensor:
        """Overwrite the entries of own pairs with one number or with (T,) values of the rows."""
        if isinstance(self.own, Tensor):
            column = values.unsqueeze(1) if isinstance(values, Tensor) else values
            return torch.where(self._is_own(matrix), column, matrix)
        entries = matrix.diagonal(self.own)
        if isinstance(values, Tensor):
            first = max(0, -self.own)
            entries.copy_(part_of(values, slice(first, first + entries.shape[0])))
        else:
            entries.fill_(values)
        return matrix

    def _is_own(self, matrix: Tensor) -> Tensor:
        return torch.eq(torch.arange(matrix.shape[1], device=matrix.device), self.own)


class ProductTile(NamedTuple):
    """Some images against some columns of a block.

    Attributes:
        rows: Rows of this rank's images.
        columns: Columns of the block.
        text_count: The number of leading columns of the tile that have an image on some rank.
        factors: Factors of its products.
        images: T images, in the form in which they are multiplied, without the scale.
        partners: C columns in the form in which they are multiplied.
    """

    rows: slice
    columns: slice
    text_count: int
    factors: Factors
    images: Operand
    partners: Operand

    def add_grads_(self, terms: GradTerms, image_sums: Tensor, column_sums: Tensor | None) -> None:
        """Add the tile's contribution to the sums of both towers, not multiplied by the scale, from the gradient of the logits.

        Args:
            terms: From ``Factors.terms``.
            image_sums: (B, D).
            column_sums: (n, D), sums of the block. None if they are not required.
        """
        add_to_left_(part_of(image_sums, self.rows), terms, self.partners)
        if column_sums is not None:
            add_to_right_(part_of(column_sums, self.columns), terms, self.images)


class ColumnBlock(NamedTuple):
    """Columns that are available on this rank at the same time.

    Attributes:
        columns: n rows of the second tower.
        text_count: The number of leading columns that have a paired image on some rank. The remaining columns are only negatives.
        first_own: Column of the first text that belongs to an image of this rank. None if the block does not contain it.
        column_stats: (text_count,), a number for each text. None if there are no statistics.
        trained: True if the columns may need a gradient.
    """

    columns: Operand
    text_count: int
    first_own: int | None
    column_stats: Tensor | None = None
    trained: bool = True


def tile_shape(rows: int, entries: int) -> tuple[int, int]:
    """Return the maximum numbers of rows and columns of tiles with at most ``entries`` entries."""
    height = max(1, min(rows, int(entries**0.5)))
    return height, max(1, aligned_columns(entries // height))


def tiles_of(rows: int, columns: int, entries: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of nearly square tiles with at most ``entries`` entries. Columns are the inner loop."""
    height, width = tile_shape(rows, entries)
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            yield slice(top, min(top + height, rows)), slice(left, min(left + width, columns))


# ---------------------------------------------------------------------- columns in blocks

Visit = Callable[[ColumnBlock], Tensor | None]
Join = Callable[[Tensor, Tensor], Tensor]


@dataclass
class TowerCall:
    """One call: this rank's images, and the columns of all ranks in blocks, either gathered or one rank's columns at a time in a ring.

    Attributes:
        plan: Rules of the call.
        form: How rows are multiplied (``products``).
        text_counts: Rows of each rank that have a paired image.
        extra_counts: Rows of each rank that are only negatives.
        group: Process group.
        exchange: Handshake of the ranks in backward.
        images: This rank's images.
        own: This rank's rows of the second tower, texts first.
        columns: Columns of all ranks, beginning with the texts of all ranks. In a ring, only this rank's columns.
        queue: Further negatives, equal on every rank and without a gradient. None if there are none.
        ring: Format in which rows of the second tower are sent around a ring. None if they are not.
        ring_rows: This rank's rows of the second tower in that format. None if they are not sent around a ring.
        trained: True if anything requires a gradient, on any rank.
        columns_trained: True if the second tower requires a gradient.
        compiler: Compiles the functions of tiles, or provides kernels for them. If None, they are not compiled.
        column_counts: Columns of each rank, i.e. texts and further negatives.
        total: G.
        width: M.
        own_texts: Position of this rank's texts among the texts that have statistics on this rank.
        term_count: Number of bf16 numbers that make up a gradient of a tile (``forms.grad_terms_of``).
        takes_masks: Whether functions of tiles find own pairs with masks that they create themselves.
        tile_entries: Maximum number of products in memory at a time.
        is_one_tile: True if a single tile contains all products of this rank.
    """

    plan: TowerPlan
    form: ProductForm
    text_counts: Sequence[int]
    extra_counts: Sequence[int]
    group: Group
    exchange: BackwardExchange
    images: Operand
    own: Operand
    columns: Operand
    queue: Operand | None
    ring: TravellingRows | None
    ring_rows: Tensor | None
    trained: bool
    columns_trained: bool
    compiler: TileCompiler | None
    column_counts: Sequence[int] = field(init=False)
    total: int = field(init=False)
    width: int = field(init=False)
    own_texts: slice = field(init=False)
    term_count: int = field(init=False)
    takes_masks: bool = field(init=False)
    tile_entries: int = field(init=False)
    is_one_tile: bool = field(init=False)

    def __post_init__(self) -> None:
        self.column_counts = list(map(operator.add, self.text_counts, self.extra_counts))
        self.total = sum(self.text_counts)
        self.width = sum(self.column_counts)
        if self.queue is not None:
            self.width += self.queue.rows.shape[0]
        rank = process_groups.rank(self.group)
        first = sum(self.text_counts[:rank]) if self.ring is None else 0
        self.own_texts = slice(first, first + self.text_counts[rank])
        self.term_count = grad_terms_of(self.form, self.images.rows.device)
        rows = self.images.rows.shape[0]
        self.takes_masks = self.compiler is not None and self.compiler.takes_masks
        has_kernels = self.compiler is not None and not self.takes_masks
        tile_bytes = self.plan.kernel_tile_bytes if has_kernels else self.plan.tile_bytes
        self.tile_entries = tile_bytes // self.plan.dtype.itemsize
        self.is_one_tile = self._is_one_tile(rows)

    def _is_one_tile(self, rows: int) -> bool:
        """Return whether a single tile contains all products of a rank with so many images."""
        height, width = tile_shape(rows, self.tile_entries)
        is_one_block = self.ring is None and self.queue is None
        return is_one_block and 0 < rows <= height and 0 < self.width <= width

    def kept_on_ranks(self) -> list[bool]:
        """Return whether a rank keeps its only tile: one value, or two if ranks differ. Equal on all ranks."""
        return sorted({self.trained and self._is_one_tile(rows) for rows in self.text_counts})

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of a tile, in compiled form or through its kernel if there is a compiler."""
        return function(*args) if self.compiler is None else self.compiler(function, *args)

    def zero_sums(self, rows: Operand) -> Tensor:
        """Return zeros (n, D) as initial sums of rows."""
        return torch.zeros(rows.rows.shape, dtype=self.plan.dtype, device=rows.rows.device)

    def column_sums(self, block: ColumnBlock) -> Tensor | None:
        """Return zeros (n, D) as initial sums of a block's columns, or None if they do not require a gradient."""
        return self.zero_sums(block.columns) if self.columns_trained and block.trained else None

    def tiles(
        self, block: ColumnBlock, scale: Tensor, kept: Tensor | None = None
    ) -> Iterator[tuple[ProductTile, Tensor]]:
        """Yield tiles of this rank's images and the columns of a block, with their products.

        All products share the memory of the first tile's products. The caller may overwrite it.

        Args:
            block: The block.
            scale: Factor of the products, 0-dim.
            kept: Logits of the only tile, which are yielded instead of its products. If None, products are computed.
        """
        images, columns = self.images, block.columns
        of_rows, of_columns = images.factors, columns.factors
        scale_of_tiles = None if self.form == "float32" else scale
        buffer: Tensor | None = None
        for rows, place in tiles_of(images.rows.shape[0], columns.rows.shape[0], self.tile_entries):
            left, right = images.part(rows), columns.part(place)
            if place.start == 0:  # shared by all tiles with the same rows
                scaled = left.left if scale_of_tiles is not None else left.rows * scale
            row_factors = None if of_rows is None else part_of(of_rows, rows)
            column_factors = None if of_columns is None else part_of(of_columns, place)
            factors = Factors(scale_of_tiles, row_factors, column_factors, self._own(block.first_own, rows, place))
            products = kept
            if products is None:
                shape = left.rows.shape[0], right.rows.shape[0]
                # the first tile is the largest
                out = None if buffer is None else buffer[: math.prod(shape)].view(shape)
                products = product(scaled, right.right, out=out)
                if buffer is None:
                    buffer = products.view(-1)
            text_count = max(0, min(place.stop, block.text_count) - place.start)
            yield ProductTile(rows, place, text_count, factors, left, right), products

    def tile_rows(self) -> int:
        """Return the total number of rows of all tiles of the call. A row counts once for each of its tiles."""
        return self.images.rows.shape[0] * self._tiles_of_a_row()

    def tile_count(self) -> int:
        """Return the number of tiles of the call."""
        rows = self.images.rows.shape[0]
        height, _ = tile_shape(rows, self.tile_entries)
        return math.ceil(rows / height) * self._tiles_of_a_row()

    def _tiles_of_a_row(self) -> int:
        _, tile_width = tile_shape(self.images.rows.shape[0], self.tile_entries)
        widths = [self.columns.rows.shape[0]] if self.ring is None else [*self.column_counts]
        if self.queue is not None:
            widths.append(self.queue.rows.shape[0])
        return sum(math.ceil(width / tile_width) for width in widths)

    def _own(self, shift: int | None, rows: slice, columns: slice) -> int | Tensor:
        """Return ``Factors.own`` of a tile, where ``shift`` is the column of the first image's own text in the block."""
        count = rows.stop - rows.start
        first: int = columns.stop - columns.start if shift is None else rows.start + shift - columns.start
        if not self.takes_masks:
            return first
        return torch.arange(first, first + count, device=self.images.rows.device).unsqueeze(1)

    def gathered_block(self, column_stats: Tensor | None = None) -> ColumnBlock:
        """Return the gathered columns of all ranks, with a statistic for each text."""
        return ColumnBlock(self.columns, self.total, self.own_texts.start, column_stats)

    def collect(
        self,
        visit: Visit,
        column_stats: Tensor | None = None,
        *,
        join: Join = Tensor.add_,
        counts: Sequence[int] | None = None,
    ) -> Tensor | None:
        """Visit all blocks and return the results, (n, k).

        The results are this rank's part for all columns. In a ring they are the results of all ranks for this rank's columns.

        Args:
            visit: Returns this rank's result for the columns of a block, (n, k), or for its texts.
            column_stats: (t,), a number for each text.
            join: Joins the results of two ranks for the same columns.
            counts: n of each rank. If None, the results are not collected.

        Communication: none. In a ring, W - 1 messages of columns to the next rank, and as many messages of results.
        """
        if self.ring is None:
            found = visit(self.gathered_block(column_stats))
        else:
            rows, own_rank = self.ring, process_groups.rank(self.group)
            sizes = rows.sizes(self.column_counts)
            message, message_sizes = self._message(sizes, column_stats)

            def visit_received(source: int, received: Tensor) -> Tensor | None:
                columns, is_own = self.own, source == own_rank
                if not is_own:
                    arrived = rows.rows_in(received[: sizes[source]], source, self.column_counts[source])
                    columns = self.plan.operand(arrived, self.form)
                stats = None if column_stats is None else received[aligned(sizes[source]) :].view(column_stats.dtype)
                return visit(ColumnBlock(columns, self.text_counts[source], 0 if is_own else None, stats))

            found = ring_round_trip(message, message_sizes, visit_received, join, counts, self.group)
        if self.queue is not None:
            visit(ColumnBlock(self.queue, 0, None, trained=False))
        return None if counts is None else found

    def sums_logits(self, wants_scale: bool) -> bool:
        """Return whether the gradient of the scale is summed over the logits, because sums of rounded gradients are less exact."""
        return wants_scale and self.term_count == 1

    @property
    def exchanges_in_forward(self) -> bool:
        """Whether sums of columns are exchanged in forward with the sum of the loss: on the CPU, where one handshake can carry both."""
        is_divided = self.ring is None and len(self.text_counts) > 1
        return is_divided and self.columns_trained and self.images.rows.is_cpu

    def exchange_sums(self, total: Tensor, column_sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of all ranks' totals, 0-dim float64, and this rank's rows of the sums of columns over all ranks.

        Args:
            total: This rank's total, 0-dim.
            column_sums: (M, D), this rank's sums for the columns of all ranks.

        Communication: one handshake. If the sums do not fit into it, additionally one exchange of M x D.
        """
        own = total.to(torch.float64)
        if any(self.extra_counts):
            column_sums = self._by_rank(column_sums)
        is_inline = own.nbytes + column_sums.nbytes <= handshake.inline_capacity(self.group)
        payload = host_bytes(own)
        if is_inline:
            payload += host_bytes(column_sums)
        payloads = handshake.all_gather(self.plan.sums, {}, payload, group=self.group)
        totals = tensor_of_bytes([sent[: own.nbytes] for sent in payloads]).view(own.dtype)
        counts = [*self.column_counts]
        if not is_inline:
            return totals.sum(), reduce_scatter_rows(column_sums, counts, self.group)
        rank = process_groups.rank(self.group)
        (own_sums,) = sums_of_own_rows(payloads, [column_sums], [counts], rank, start=own.nbytes)
        return totals.sum(), own_sums

    def _by_rank(self, rows: Tensor) -> Tensor:
        """Return rows of all columns reordered by rank, so that each rank's further negatives follow its texts."""
        texts = torch.split(rows[: self.total], [*self.text_counts])
        extra = torch.split(rows[self.total :], [*self.extra_counts])
        blocks = list[Tensor]()
        for pair in zip(texts, extra, strict=True):
            blocks += pair
        return torch.cat(blocks)

    def gradients(
        self,
        sums: list[Tensor | None],
        factor: Tensor,
        images: Tensor,
        second_tower: Tensor,
        *,
        are_exchanged: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the gradients of this rank's rows of both towers, and of the scale without the factor of the upstream gradient.

        Args:
            sums: Sums (B, D) of the images and (m, D) of the columns, from ``ProductTile.add_grads_`` and ``collect``. The latter are None
                if the second tower does not require a gradient. The list is emptied, so that memory is released after use.
            factor: Upstream gradient times scale, 0-dim.
            images: (B, D), as passed by the caller.
            second_tower: (m, D), as passed by the caller.
            are_exchanged: True if the sums of the columns already are the sums of this rank's rows over all ranks.

        Communication: one handshake and one exchange of G x D if the second tower requires a gradient. None in a ring, or if
            ``are_exchanged``.
        """
        image_sums = sums.pop(0)
        assert image_sums is not None
        grad_images = torch.empty_like(images)
        along = self.images.vjp(image_sums, grad_images, factor).sum()
        del image_sums
        column_sums = sums.pop()
        if column_sums is None:
            return grad_images, None, along
        if not are_exchanged and self.ring is None and len(self.text_counts) > 1:
            parts, counts = [column_sums[: self.total]], [[*self.text_counts]]
            if any(self.extra_counts):
                parts.append(column_sums[self.total :])
                counts.append([*self.extra_counts])
            column_sums = concatenated(self.exchange.reduce_scatter(parts, counts))
        grad_columns = torch.empty_like(second_tower)
        self.own.vjp(column_sums, grad_columns, factor)
        return grad_images, grad_columns, along

    def mean_over_images(self, share: Tensor) -> Tensor:
        """Return the sum of all ranks' shares, divided by the number of images of all ranks.

        Communication: as ``global_quotient``.
        """

        def agree(payload: bytes) -> list[bytes]:
            return handshake.all_gather(self.plan.sums, {}, payload, group=self.group)

        return global_quotient(share, self.total, agree, group=self.group)

    def _message(self, sizes: list[int], column_stats: Tensor | None) -> tuple[Tensor, list[int]]:
        """Return this rank's columns and their statistics as bytes, and the number of bytes of each rank.

        Args:
            sizes: Number of bytes of each rank's columns.
            column_stats: (t,), a number for each text. If None, no statistics are sent.
        """
        assert self.ring_rows is not None
        message = as_bytes(self.ring_rows)
        if column_stats is None:
            return message, sizes
        # statistics start at an aligned offset, so that they can be viewed in their dtype
        starts = list(map(aligned, sizes))
        gap = message.new_zeros(starts[process_groups.rank(self.group)] - len(message))
        item = column_stats.element_size()
        message_sizes = [start + texts * item for start, texts in zip(starts, self.text_counts, strict=True)]
        return torch.cat([message, gap, as_bytes(column_stats)]), message_sizes


def grad_of_scale(along: Tensor, logit_sum: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of the scale.

    Args:
        along: The gradient from sums of rows (``TowerCall.gradients``), which is used if the scale is 0.
        logit_sum: Sum of the logits times their gradient, 0-dim.
        scale: 0-dim.
    """
    return torch.where(scale == 0, along, logit_sum / scale)


def concatenated(parts: list[Tensor]) -> Tensor:
    """Concatenate tensors along the rows. A single tensor is not copied."""
    return torch.cat(parts) if len(parts) > 1 else parts[0]
