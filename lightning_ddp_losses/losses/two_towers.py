"""The call of a contrastive loss between two towers: this rank's rows of one tower against all rows of the other, in tiles.

Rows of the first tower stay where they are. Only the second tower travels: its rows are gathered as columns, or they go round a ring, the
columns of one rank at a time. A loss is written once, for blocks of columns. Its result for a block is this rank's part if all columns are
here. In a ring the result travels behind the columns, joined with those of the other ranks, to the rank that owns them.

Rows travel and are multiplied as the caller gave them. Rows of bfloat16 stay so: no float32 copy of them is made (``products.Operand``).
Tiles add up sums of each row's partners. The gradients follow from these once, at the end (``TowerCall.gradients``).

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` texts of all ranks, ``M`` columns (texts and further negatives), ``D`` embedding size,
``T`` rows and ``C`` columns of a tile.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import autograd_graph, inputs, precision
from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.core.signature import Plans
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import BackwardExchange
from lightning_ddp_losses.distributed.fingerprint import WeightFingerprints
from lightning_ddp_losses.distributed.gathered_batch import GatheredBatch, aligned, gather_batch
from lightning_ddp_losses.distributed.global_values import UpstreamGradWatch, remember_global_value
from lightning_ddp_losses.distributed.process_groups import Group, WithProcessGroup
from lightning_ddp_losses.distributed.raw_collectives import (
    NARROW_DTYPES,
    NarrowRows,
    TravellingRows,
    as_bytes,
    host_bytes,
    reduce_scatter_rows,
    ring_round_trip,
)
from lightning_ddp_losses.errors import InputError, expect, expect_count, expect_option
from lightning_ddp_losses.losses.partial_sums import global_quotient
from lightning_ddp_losses.losses.plans.signatures import kind_of, signature_of
from lightning_ddp_losses.losses.plans.towers import (
    PAIRED,
    Number,
    TowerPlan,
    TowerRows,
    check_number,
    check_pairs,
    check_rows,
    described,
    kind_of_number,
    number_as_tensor,
)
from lightning_ddp_losses.losses.products import (
    GradTerms,
    Operand,
    ProductChoice,
    ProductForm,
    add_factors_,
    add_to_left_,
    add_to_right_,
    aligned_columns,
    dot_rows,
    pieces_of,
    product,
    refuse_products,
    split,
    splits,
    warn_of_tf32,
)
from lightning_ddp_losses.losses.tile_compiler import TileCompiler, rehearsed_tile

# ---------------------------------------------------------------------- products in tiles


class OwnPairs(NamedTuple):
    """The entries of a tile where an image meets its own text: rows, and as many columns in the same order."""

    rows: slice
    columns: slice

    def of(self, matrix: Tensor) -> Tensor:
        """Return these entries of a matrix (T, C), a view."""
        return matrix[self.rows, self.columns].diagonal()


class Factors(NamedTuple):
    """Factors that turn a tile of products into logits.

    Attributes:
        scale: 0-dim. None: the rows are multiplied by it already.
        of_rows: (T,). None: 1.
        of_columns: (C,). None: 1.
        own: Entries of images with their own texts. Compiled: the column of each row's own text, (T, 1), anywhere outside if it is not
            in the tile.
    """

    scale: Tensor | None
    of_rows: Tensor | None
    of_columns: Tensor | None
    own: OwnPairs | Tensor

    def logits(self, products: Tensor, plus: Tensor | None = None) -> Tensor:
        """Return products times their factors, plus a number, in the same memory unless they are compiled."""
        of_rows = self.of_rows
        if self.scale is not None:
            of_rows = self.scale.reshape(1) if of_rows is None else of_rows * self.scale
        return add_factors_(products, of_rows, self.of_columns, plus)

    def terms(self, grad: Tensor, device_splits: bool) -> GradTerms:
        """Return the gradient of logits in the form for a product with rows (``products.split``), but for the scale."""
        return split(grad, self.of_rows, self.of_columns, device_splits)

    def negate_own_(self, matrix: Tensor) -> Tensor:
        """Negate the entries of own pairs."""
        if isinstance(self.own, Tensor):
            return torch.where(self._is_own(matrix), -matrix, matrix)
        self.own.of(matrix).neg_()
        return matrix

    def put_own_(self, matrix: Tensor, values: Tensor | float) -> Tensor:
        """Overwrite the entries of own pairs, with one number or with (T,) values of the rows."""
        if isinstance(self.own, Tensor):
            return torch.where(
                self._is_own(matrix), values.unsqueeze(1) if isinstance(values, Tensor) else values, matrix
            )
        if isinstance(values, Tensor):
            self.own.of(matrix).copy_(values[self.own.rows])
        else:
            self.own.of(matrix).fill_(values)
        return matrix

    def _is_own(self, matrix: Tensor) -> Tensor:
        return torch.eq(torch.arange(matrix.shape[1], device=matrix.device), self.own)  # type: ignore[arg-type]


class ProductTile(NamedTuple):
    """Some images against some columns of a block.

    Attributes:
        rows: Rows of this rank's images.
        columns: Columns of the block.
        text_count: The number of columns of the tile, the first, that have an image on some rank.
        factors: Factors of its products.
        images: (T, D), as they are multiplied, but for the scale.
        partners: (C, D), columns as they are multiplied.
    """

    rows: slice
    columns: slice
    text_count: int
    factors: Factors
    images: Tensor
    partners: Tensor

    def add_grads_(self, terms: GradTerms, image_sums: Tensor, column_sums: Tensor | None) -> None:
        """Add the sums of both towers from the gradient of the logits, but for the scale.

        Args:
            terms: From ``Factors.terms``.
            image_sums: (B, D).
            column_sums: (n, D) of the block. None: not wanted.
        """
        add_to_left_(image_sums[self.rows], terms, self.partners)
        if column_sums is not None:
            add_to_right_(column_sums[self.columns], terms, self.images)


@dataclass(frozen=True)
class ColumnBlock:
    """Columns that are here at a time.

    Attributes:
        columns: n rows of the second tower.
        text_count: The number of them, the first, that have a paired image on some rank. The others are negatives alone.
        first_own: Column of the first text that belongs to an image of this rank. None: not in this block.
        column_stats: (text_count,), a number for each text. None: none were given.
        trained: True if the columns may need a gradient.
    """

    columns: Operand
    text_count: int
    first_own: int | None
    column_stats: Tensor | None = None
    trained: bool = True


def tile_shape(rows: int, entries: int) -> tuple[int, int]:
    """Return the largest numbers of rows and columns of tiles of at most so many entries."""
    height = max(1, min(rows, int(entries**0.5)))
    return height, max(1, aligned_columns(entries // height))


def tiles_of(rows: int, columns: int, entries: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of tiles of at most so many entries. Nearly square, columns inside rows."""
    height, width = tile_shape(rows, entries)
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            yield slice(top, min(top + height, rows)), slice(left, min(left + width, columns))


# ---------------------------------------------------------------------- columns in blocks

Visit = Callable[[ColumnBlock], Tensor | None]
Join = Callable[[Tensor, Tensor], Tensor]


@dataclass
class TowerCall:
    """One call: this rank's images, and the columns of all ranks block by block, all at once or a rank's at a time round a ring.

    Attributes:
        plan: Rules of the call.
        form: How rows are multiplied (``products``).
        text_counts: Rows of each rank that have a paired image.
        extra_counts: Rows of each rank that are only negatives.
        group: Process group.
        exchange: Handshake of the ranks in backward.
        images: This rank's.
        own: This rank's rows of the second tower, texts first.
        columns: Those of all ranks, the texts of all of them first. In a ring this rank's own.
        queue: Further negatives that every rank holds, without gradient. None: there are none.
        ring: This rank's rows of the second tower as they go round a ring. None: they do not.
        trained: True if anything needs a gradient, on any rank.
        columns_trained: True if the second tower does.
        compiler: Compiles the functions of tiles. None: they are not compiled.
        column_counts: Columns of each rank: both.
        total: G.
        width: M.
        own_texts: This rank's texts among those with statistics on this rank.
        splits: Whether gradients of tiles are split into two bf16 numbers.
        tile_entries: Most products at a time.
        is_one_tile: True if one tile has all products of this rank.
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
    trained: bool
    columns_trained: bool
    compiler: TileCompiler | None
    column_counts: Sequence[int] = field(init=False)
    total: int = field(init=False)
    width: int = field(init=False)
    own_texts: slice = field(init=False)
    splits: bool = field(init=False)
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
        self.splits = splits(self.form, self.images.rows.device)
        rows = self.images.rows.shape[0]
        self.tile_entries = self.plan.tile_bytes // self.plan.dtype.itemsize
        height, width = tile_shape(rows, self.tile_entries)
        is_one_block = self.ring is None and self.queue is None
        self.is_one_tile = is_one_block and 0 < rows <= height and 0 < self.width <= width

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of a tile, compiled if that is wanted."""
        return function(*args) if self.compiler is None else self.compiler(function, *args)

    def zero_sums(self, rows: Operand) -> Tensor:
        """Return sums (n, D) of rows, zeros at first."""
        dtype = torch.promote_types(rows.rows.dtype, torch.float32)
        return torch.zeros(rows.rows.shape, dtype=dtype, device=rows.rows.device)

    def column_sums(self, block: ColumnBlock) -> Tensor | None:
        """Return sums (n, D) of the columns of a block, zeros at first. None: they need no gradient."""
        return self.zero_sums(block.columns) if self.columns_trained and block.trained else None

    def tiles(
        self, block: ColumnBlock, scale: Tensor, kept: Tensor | None = None
    ) -> Iterator[tuple[ProductTile, Tensor]]:
        """Yield tiles of this rank's images and the columns of a block, with their products.

        All products use the same memory, which the caller may overwrite.

        Args:
            block: The block.
            scale: Factor of the products, 0-dim.
            kept: Logits of the only tile, in place of its products. None: products are computed.
        """
        images, columns = self.images, block.columns
        of_rows, of_columns = images.factors, columns.factors
        scale_of_tiles = None if self.form == "float32" else scale
        buffer = scale.new_empty(0)
        for rows, place in tiles_of(images.rows.shape[0], columns.rows.shape[0], self.tile_entries):
            left, right = images.rows[rows], columns.rows[place]
            if place.start == 0:  # neighbours share them
                scaled = left if scale_of_tiles is not None else left * scale
            row_factors = None if of_rows is None else of_rows[rows]
            column_factors = None if of_columns is None else of_columns[place]
            factors = Factors(scale_of_tiles, row_factors, column_factors, self._own(block.first_own, rows, place))
            products = kept
            if products is None:
                size = len(left) * len(right)
                if len(buffer) < size:
                    buffer = scale.new_empty(size)
                products = product(scaled, right, out=buffer[:size].view(len(left), len(right)))
            text_count = max(0, min(place.stop, block.text_count) - place.start)
            yield ProductTile(rows, place, text_count, factors, left, right), products

    def tile_rows(self) -> int:
        """Return the number of rows of all tiles of the call together. A row counts in each of its tiles."""
        rows = self.images.rows.shape[0]
        _, tile_width = tile_shape(rows, self.tile_entries)
        widths = [self.columns.rows.shape[0]] if self.ring is None else [*self.column_counts]
        if self.queue is not None:
            widths.append(self.queue.rows.shape[0])
        return rows * sum(math.ceil(width / tile_width) for width in widths)

    def _own(self, shift: int | None, rows: slice, columns: slice) -> OwnPairs | Tensor:
        """Return the own pairs of a tile. ``shift``: column of the first image's own text in the block."""
        count = rows.stop - rows.start
        if self.compiler is not None:
            first = -count if shift is None else rows.start + shift - columns.start
            return torch.arange(first, first + count, device=self.images.rows.device).unsqueeze(1)
        if shift is None:
            return OwnPairs(slice(0, 0), slice(0, 0))
        low = max(rows.start + shift, columns.start)
        high = max(low, min(rows.stop + shift, columns.stop))
        own_rows = slice(low - shift - rows.start, high - shift - rows.start)
        return OwnPairs(own_rows, slice(low - columns.start, high - columns.start))

    def gathered_block(self, column_stats: Tensor | None = None) -> ColumnBlock:
        """Return the columns of all ranks, which are here, with the numbers of their texts."""
        return ColumnBlock(self.columns, self.total, self.own_texts.start, column_stats)

    def collect(
        self,
        visit: Visit,
        column_stats: Tensor | None = None,
        *,
        join: Join = Tensor.add_,
        counts: Sequence[int] | None = None,
    ) -> Tensor | None:
        """Visit all blocks. Return the results, (n, k): this rank's part for all columns, in a ring of all ranks for its own columns.

        Args:
            visit: Returns this rank's result for the columns of a block, (n, k), or for its texts.
            column_stats: (t,), a number for each text.
            join: Joins the results of two ranks for the same columns.
            counts: n of each rank. None: the results are not collected.

        Communication: none. In a ring W - 1 messages of columns to the next rank, and as many of results.
        """
        if self.ring is None:
            found = visit(self.gathered_block(column_stats))
        else:
            rows, own_rank = self.ring, process_groups.rank(self.group)
            message, sizes = self._message(rows, column_stats)

            def visit_received(source: int, received: Tensor) -> Tensor | None:
                count, columns = self.column_counts[source], self.own
                size, first_own = rows.num_bytes(source, count), 0 if source == own_rank else None
                if first_own is None:
                    arrived = rows.expanded(source, rows.rows_in(received[:size], source, count))
                    columns = self.plan.operand(arrived, self.form)
                stats = None if column_stats is None else received[aligned(size) :].view(column_stats.dtype)
                return visit(ColumnBlock(columns, self.text_counts[source], first_own, stats))

            found = ring_round_trip(message, sizes, visit_received, join, counts, self.group)
        if self.queue is not None:
            visit(ColumnBlock(self.queue, 0, None, trained=False))
        return None if counts is None else found

    @property
    def exchanges_in_forward(self) -> bool:
        """Whether the sums of columns are exchanged in forward, with the sum of the loss: on the CPU, where a handshake carries both."""
        is_divided = self.ring is None and len(self.text_counts) > 1
        return is_divided and self.columns_trained and self.images.rows.is_cpu

    def exchange_sums(self, title: str, total: Tensor, column_sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return the totals of all ranks, (W,), and this rank's rows of the sums of columns over ranks.

        Args:
            title: Name of the loss in messages.
            total: This rank's, 0-dim.
            column_sums: (M, D), sums of the columns of all ranks.

        Communication: one handshake. If the sums do not fit into it, one exchange of M x D.
        """
        own = total.detach().to(torch.float64)
        if any(self.extra_counts):
            column_sums = self._by_rank(column_sums)
        is_inline = own.nbytes + column_sums.nbytes <= handshake.inline_capacity(self.group)
        payload = host_bytes(own)
        if is_inline:
            payload += host_bytes(column_sums)
        payloads = handshake.all_gather(f"{title}: sum", {}, payload, group=self.group)
        everyone = torch.frombuffer(bytearray().join(payloads), dtype=torch.uint8).view(len(payloads), -1)
        totals = everyone[:, : own.nbytes].contiguous().view(own.dtype).view(-1)
        if not is_inline:
            return totals, reduce_scatter_rows(column_sums, [*self.column_counts], self.group)
        # this rank's rows of each rank's sums, added in rank order
        rank, dtype = process_groups.rank(self.group), column_sums.dtype
        width, row_bytes = column_sums.shape[1], column_sums.shape[1] * dtype.itemsize
        start = own.nbytes + sum(self.column_counts[:rank]) * row_bytes
        stop = start + self.column_counts[rank] * row_bytes
        parts = everyone[:, start:stop].contiguous().view(dtype)
        return totals, parts.view(len(payloads), self.column_counts[rank], width).sum(0)

    def _by_rank(self, rows: Tensor) -> Tensor:
        """Return rows of all columns, each rank's texts and further negatives together."""
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
        """Return the gradients of this rank's rows of both towers, and of the scale but for the upstream gradient.

        Args:
            sums: (B, D) of the images and (m, D) of the columns, from ``ProductTile.add_grads_`` and ``collect``. The latter None if the
                second tower needs no gradient. The list is emptied, so that their memory is free as soon as they are used.
            factor: Upstream gradient times scale, 0-dim.
            images: (B, D), as the caller gave them.
            second_tower: (m, D), also.
            are_exchanged: True if the sums of the columns are those of this rank's rows over all ranks already.

        Communication: one handshake and one exchange of G x D, if the second tower needs a gradient. None in a ring, or if that was done.
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

    def mean_over_images(self, title: str, share: Tensor) -> Tensor:
        """Return the sum of all ranks' shares, divided by the number of images of all ranks.

        Communication: as ``global_quotient``.
        """

        def agree(payload: bytes) -> list[bytes]:
            return handshake.all_gather(f"{title}: sum", {}, payload, group=self.group)

        return global_quotient(share, self.total, agree, group=self.group)

    def _message(self, rows: TravellingRows, column_stats: Tensor | None) -> tuple[Tensor, list[int]]:
        """Return this rank's columns and their statistics as bytes, and the number of bytes of each rank."""
        rank = process_groups.rank(self.group)
        dtype = rows.dtypes[rank]
        message = as_bytes(rows.own if dtype is None or rows.narrow is None else rows.narrow.rows.to(dtype))
        sizes = [rows.num_bytes(sender, count) for sender, count in enumerate(self.column_counts)]
        if column_stats is None:
            return message, sizes
        # the statistics at a place from which they can be read
        starts = [aligned(size) for size in sizes]
        gap = message.new_zeros(starts[rank] - len(message))
        item = column_stats.element_size()
        sizes = [start + texts * item for start, texts in zip(starts, self.text_counts, strict=True)]
        return torch.cat([message, gap, as_bytes(column_stats)]), sizes


# ---------------------------------------------------------------------- the call


class TwoTowerLoss(WithProcessGroup, nn.Module):
    """Makes the call of a two-tower loss: checks, comparison of ranks, precision. The subclass has ``_evaluate``.

    Args:
        init_temperature: ``logit_scale`` starts at ``log(1 / init_temperature)``. None: each call gives it.
        max_scale: Upper limit of the own scale. None: none.
        normalize: Divide embeddings by their length.
        tile_bytes: Bytes of products alive at a time. None: 2 MiB, on an accelerator 64 MiB, compiled 256 MiB.
        gather: ``"all"``: every rank holds all columns. ``"ring"``: they go round a ring.
        products: Dtype of the products, as in ``products``.
        compile_tiles: Compile the functions of a tile.
        name: Identity among losses of its kind, as in ``GlobalBatchLoss``.
        check_weights: Compare its numbers between the ranks, as in ``GlobalBatchLoss``.
        group: Process group. None is the world.
    """

    sees_global_batch = True
    compares_with_own_pair = True  # each text's product with its own image is needed next to all products

    def __init__(
        self,
        init_temperature: float | None,
        max_scale: float | None,
        normalize: bool,
        tile_bytes: int | None,
        gather: Literal["all", "ring"],
        products: ProductChoice,
        compile_tiles: bool,
        name: str | None,
        check_weights: bool,
        group: Group,
    ) -> None:
        super().__init__()
        title = type(self).__name__
        for option, limit in (("init_temperature", init_temperature), ("max_scale", max_scale)):
            expect(limit is None or limit > 0, f"{title}: {option}", expected="above 0, or None", got=limit)
        if tile_bytes is not None:
            expect_count(f"{title}: tile_bytes", tile_bytes, at_least=64)
        expect_option(f"{title}: gather", gather, ("all", "ring"))
        refuse_products(title, products)
        self.products: ProductChoice = products
        self.max_scale, self.normalize, self.tile_bytes, self.gather = max_scale, normalize, tile_bytes, gather
        self._compiler = TileCompiler() if compile_tiles else None
        self.set_group(group, title, name)
        self._upstream_grads = UpstreamGradWatch()
        self._weights = WeightFingerprints(wanted=check_weights)
        self._plans: Plans[TowerPlan] = Plans()
        self.logit_scale: nn.Parameter | None = None
        if init_temperature is not None:
            self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / init_temperature)))

    @property
    def compile_tiles(self) -> bool:
        """Whether tiles are compiled."""
        return self._compiler is not None

    @eager_recursive
    def forward(
        self,
        images: Tensor,
        texts: Tensor,
        extra_texts: Tensor | None = None,
        queue: Tensor | None = None,
        *,
        logit_scale: Tensor | float | None = None,
    ) -> Tensor:
        """Compute the global loss. Row i of one tower belongs to row i of the other.

        Args:
            images: (B, D), one tower. B may differ per rank.
            texts: (B, D), the other.
            extra_texts: (m, D), further negatives for the images, those of all ranks together. The number m may differ per rank.
            queue: (q, D), further negatives that every rank holds already, the same on all of them. No gradient.
            logit_scale: One number (0-dim, the same on every rank) in place of the loss's own scale. Its exponential is taken
                already, as open_clip's losses expect it. It is not clamped, and gets its gradient.
        """
        rows = TowerRows(images, texts, extra_texts, queue)
        return self._checked_call(rows, {"logit_scale": logit_scale})

    def _checked_call(self, rows: TowerRows, numbers: dict[str, Number]) -> Tensor:
        """Compute the global loss, or raise one error on every rank.

        Args:
            rows: Rows of this rank.
            numbers: The caller's numbers in place of the loss's own parameters, by their names.
        """
        title = type(self).__name__
        with handshake.raising_on_all_ranks(title, group=self._group):
            inputs.refuse_capture(title)
            # 1. the rules of calls like this one
            parameters = precision.parameters_of(self)
            plan = self._plan_of(rows, numbers, parameters)
            # 2. values of this call
            given = {name: number_as_tensor(number, rows.images) for name, number in numbers.items()}
            must_match = self._take_must_match(plan, rows, numbers, parameters)
            # 3. the rows of all ranks, and the loss
            value = self._in_full_precision(plan, rows, must_match, given)
        remember_global_value(value, title)
        watched: Tensor = self._upstream_grads.watch(value, group=self._group)
        return watched

    def _plan_of(self, rows: TowerRows, numbers: dict[str, Number], parameters: Sequence[Tensor]) -> TowerPlan:
        """Return the rules of a call, and refuse arguments that cannot work."""
        title = type(self).__name__
        kinds = [*map(kind_of, rows), *map(kind_of_number, numbers.values())]
        options = (
            self.products,
            self.gather,
            self.normalize,
            self.tile_bytes,
            self._compiler is None,
            self.logit_scale is None,
        )
        signature = signature_of([*kinds, *options], parameters)
        plan = self._plans.get(signature)
        if plan is not None:
            check_pairs(title, rows)
            return plan
        check_rows(title, rows, numbers, parameters)
        for name, number in numbers.items():
            check_number(title, name, number, getattr(self, name))
        plan = TowerPlan.of(self, rows, numbers, parameters)
        self._plans.add(signature, plan)
        return plan

    def _take_must_match(
        self, plan: TowerPlan, rows: TowerRows, numbers: dict[str, Number], parameters: Sequence[Tensor]
    ) -> dict[str, object]:
        """Return values that must be equal on all ranks, and take the notes of the last backward."""
        must_match: dict[str, object] = {"which": self._instance, "options": self.extra_repr()}
        # a tensor's value would wait for the device
        plain = {name: number for name, number in numbers.items() if isinstance(number, (int, float))}
        must_match.update(plain)
        if rows.queue is not None:
            must_match["queue"] = described(rows.queue)
        must_match["weights"] = self._weights.take(parameters, self._group)
        must_match["coefficient of the last backward"] = self._upstream_grads.take()
        return must_match

    def _in_full_precision(
        self, plan: TowerPlan, rows: TowerRows, must_match: dict[str, object], given: dict[str, Tensor | None]
    ) -> Tensor:
        """Compute the global loss with autocast off, with every trainable parameter in its graph."""
        if not plan.is_full:
            # rows are not cast: rows of bfloat16 are multiplied unchanged
            forward = partial(self._forward, plan, rows, must_match)
            tensors = precision.CallTensors.of(self, (rows, given), {})
            result: Tensor = autograd_graph.run_full_precision(self, forward, (given,), {}, tensors=tensors)
            return result
        value = self._forward(plan, rows, must_match, given)
        if plan.unreached:
            parameters = dict(self.named_parameters())
            unreached = [parameters[name] for name in plan.unreached]
            value = autograd_graph.attach_zero_grad(value, unreached, list(rows.by_name().values()))
        return value

    def _forward(
        self, plan: TowerPlan, rows: TowerRows, must_match: dict[str, object], given: dict[str, Tensor | None]
    ) -> Tensor:
        # 1. this rank's rows in the form of products
        own_rows = rows.texts if rows.extra is None else torch.cat([rows.texts, rows.extra])
        images = plan.operand(rows.images, plan.form)
        own = plan.operand(own_rows, plan.form)
        paired = [_paired(rows, images, own, plan.dtype)] if self.compares_with_own_pair else []
        # 2. the second tower of all ranks. In a ring only its numbers of rows
        batch = self._gather(plan, rows, paired, must_match)
        if not plan.in_ring and paired:
            paired = batch.tensors[-1:]
        call = self._tower_call(plan, rows, own_rows, images, own, batch)
        del batch, images, own  # the call holds what it needs of them
        # 3. every rank takes part in a backward that any rank needs
        trained_images = autograd_graph.match_requires_grad(rows.images, call.trained)
        trained_rows = autograd_graph.match_requires_grad(own_rows, call.columns_trained)
        # 4. the loss
        numbers = [self._number(name, number) for name, number in given.items()]
        if self._compiler is not None:
            self._rehearse(self._compiler, call, numbers)
        return self._evaluate(call, trained_images, trained_rows, *paired, *numbers)

    def _gather(
        self, plan: TowerPlan, rows: TowerRows, paired: list[Tensor], must_match: dict[str, object]
    ) -> GatheredBatch:
        """Return the second tower of all ranks, and the product of each text with its own image if this rank's are given."""
        second_tower = {"texts": rows.texts}
        if rows.extra is not None:
            second_tower["extra_texts"] = rows.extra
        sent, narrow = {}, {}
        for name, tensor in second_tower.items():
            sent[name] = _to_travel(tensor, plan.dtype)
            narrow[name] = NarrowRows(tensor.detach(), _unchanged)
        if paired and not plan.in_ring:
            sent[PAIRED] = paired[0]
        return gather_batch(
            plan.layout,
            sent,
            must_match,
            extra=plan.flags,
            narrow=narrow,
            group=self._group,
        )

    def _tower_call(
        self,
        plan: TowerPlan,
        rows: TowerRows,
        own_rows: Tensor,
        images: Operand,
        own: Operand,
        batch: GatheredBatch,
    ) -> TowerCall:
        """Return the call: its columns, and how they are multiplied."""
        title = type(self).__name__
        text_counts = batch.counts[0]
        world_size = len(text_counts)
        extra_counts = batch.counts[1] if rows.extra is not None else [0] * world_size
        if sum(text_counts) == 0:
            raise InputError(f"{title}: rows", expected="at least one on some rank", got="none", collective=True)
        trained, columns_trained, all_bf16 = _joined_flags(batch.extras)
        form = plan.form
        if form == "bf16" and not all_bf16:  # float32 rows of another rank
            form = "float32"
            images, own = plan.operand(rows.images, form), plan.operand(own_rows, form)
        warn_of_tf32(title, form, images.rows)
        # the columns: gathered, or this rank's own
        columns = own
        ring = queue = None
        if plan.in_ring and world_size > 1:
            wide = _to_travel(own_rows, plan.dtype)
            ring = TravellingRows(wide, NarrowRows(own_rows.detach(), _unchanged), batch.narrow_dtypes[0])
        elif world_size > 1:
            columns = plan.operand(concatenated(batch.tensors[: 1 if rows.extra is None else 2]), form)
        if rows.queue is not None:
            queue = plan.operand(rows.queue, form)
        return TowerCall(
            plan,
            form,
            text_counts,
            extra_counts,
            self._group,
            BackwardExchange(title, self._group),
            images,
            own,
            columns,
            queue,
            ring,
            trained,
            columns_trained,
            self._compiler,
        )

    def _evaluate(self, call: TowerCall, *tensors: Any) -> Tensor:
        """Compute the global loss.

        Args:
            call: The call.
            *tensors: (B, D) images of this rank and (m, D) rows of its second tower, with their graphs. If ``compares_with_own_pair``,
                (t,) the product of each text of the columns with its own image, without graph. The scale and other numbers of the loss.
        """
        raise NotImplementedError

    def _rehearse(self, compiler: TileCompiler, call: TowerCall, numbers: list[Tensor]) -> None:
        """Let the ranks compile together the functions of forward and backward."""
        like = call.images.rows.new_empty(0, dtype=numbers[0].dtype)
        kind = (str(like.dtype), like.device.type, call.form, call.splits, call.plan.normalize, call.trained)

        def rehearsal(run: Callable[..., Any]) -> None:
            # a tile that takes the same branches
            products = rehearsed_tile(like)
            rows, columns = products.shape
            of_rows = of_columns = scale = None
            if call.form == "bf16":
                scale = products.new_ones(())
                if call.plan.normalize:
                    of_rows, of_columns = products.new_ones(rows), products.new_ones(columns)
            own = torch.arange(rows, device=like.device).unsqueeze(1)
            self._rehearse_tile(run, products, Factors(scale, of_rows, of_columns, own), call)

        with torch.no_grad():
            compiler.rehearse(type(self).__name__, kind, rehearsal, self._group)

    def _rehearse_tile(self, run: Callable[..., Any], products: Tensor, factors: Factors, call: TowerCall) -> None:
        """Call the functions of a tile by ``run``."""
        raise NotImplementedError

    def _number(self, name: str, given: Tensor | None) -> Tensor:
        """Return the caller's number as it is, or the loss's own. Its scale as 1 / temperature, clamped."""
        if given is not None:
            return given
        own: Tensor = getattr(self, name)
        if name != "logit_scale":
            return own
        if self.max_scale is not None:
            own = own.clamp(max=math.log(self.max_scale))
        return own.exp()


def _joined_flags(flags_of_ranks: Sequence[bytes]) -> tuple[bool, bool, bool]:
    """Return whether any rank trains anything, whether any trains its second tower, and whether all multiply in bf16."""
    trained, columns_trained, bf16 = zip(*flags_of_ranks, strict=True)
    return any(trained), any(columns_trained), all(bf16)


def _unchanged(rows: Tensor) -> Tensor:
    return rows


def concatenated(parts: list[Tensor]) -> Tensor:
    """Return the rows of some tensors. Those of one without a copy."""
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _to_travel(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows in the dtype of the computation, without graph. Narrow ones travel as they are, and need no such copy."""
    if rows.dtype in NARROW_DTYPES:
        return torch.empty((), dtype=dtype, device=rows.device).expand(rows.shape)
    return rows.detach().to(dtype)


def _paired(rows: TowerRows, images: Operand, own: Operand, dtype: torch.dtype) -> Tensor:
    """Return the product (B,) of each image with its own text, in the dtype of the computation.

    Args:
        rows: Rows as the caller gave them, which are not rounded here.
        images: The images as they are multiplied. Used if they are divided by their lengths already.
        own: Rows of the second tower as they are multiplied, texts first.
        dtype: Dtype of the computation.
    """
    count = rows.images.shape[0]
    left, right = rows.images.detach(), rows.texts.detach()
    if images.rows.dtype != torch.bfloat16:
        left, right = images.rows, own.rows[:count]
    products = torch.empty(count, dtype=dtype, device=left.device)
    for part in pieces_of(left):
        products[part] = dot_rows(left[part], right[part])
    for factors in (images.factors, own.factors):
        if factors is not None:
            products.mul_(factors[:count])
    return products
