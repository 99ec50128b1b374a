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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import autograd_graph, inputs, precision
from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import BackwardExchange
from lightning_ddp_losses.distributed.fingerprint import WeightFingerprints
from lightning_ddp_losses.distributed.gathered_batch import aligned, gather_batch
from lightning_ddp_losses.distributed.global_values import UpstreamGradWatch, remember_global_value
from lightning_ddp_losses.distributed.process_groups import Group, WithProcessGroup
from lightning_ddp_losses.distributed.raw_collectives import (
    NARROW_DTYPES,
    NarrowRows,
    TravellingRows,
    as_bytes,
    ring_round_trip,
)
from lightning_ddp_losses.errors import InputError, expect, expect_count, expect_option
from lightning_ddp_losses.losses.partial_sums import global_quotient
from lightning_ddp_losses.losses.products import (
    DEVICE_BYTES,
    TOWER_BYTES,
    GradTerms,
    Operand,
    ProductChoice,
    ProductForm,
    add_factors_,
    add_to_left_,
    add_to_right_,
    aligned_columns,
    choose_form,
    dot_rows,
    pieces_of,
    product,
    refuse_products,
    split,
    splits,
    tile_budget,
    warn_of_tf32,
)
from lightning_ddp_losses.losses.tile_compiler import TileCompiler, rehearsed_tile

_HOST_TILE_BYTES = 2 << 20

# own parameters that the caller may give instead, and the option that makes them
_OPTION_OF = {"logit_scale": "init_temperature", "logit_bias": "init_bias"}
# our arguments at a position that another library's losses use for a number
_PLACES_OF_NUMBERS = {"extra_texts": "logit_scale", "queue": "logit_bias"}


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


def tiles_of(rows: int, columns: int, entries: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of tiles of at most so many entries. Nearly square, columns inside rows."""
    height = max(1, min(rows, int(entries**0.5)))
    width = max(1, aligned_columns(entries // height))
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
        form: How rows are multiplied (``products``).
        tile_bytes: Most bytes of products at a time.
        text_counts: Rows of each rank that have a paired image.
        extra_counts: Rows of each rank that are only negatives.
        column_counts: Columns of each rank: both.
        group: Process group.
        exchange: Handshake of the ranks in backward.
        images: This rank's.
        own: This rank's rows of the second tower, texts first.
        columns: Those of all ranks, the texts of all of them first. In a ring this rank's own.
        queue: Further negatives that every rank holds, without gradient. None: there are none.
        ring: This rank's rows of the second tower as they go round a ring. None: they do not.
        prepare: Prepares rows that have arrived.
        trained: True if anything needs a gradient, on any rank.
        columns_trained: True if the second tower does.
        compiler: Compiles the functions of tiles. None: they are not compiled.
    """

    form: ProductForm
    tile_bytes: int
    text_counts: Sequence[int]
    extra_counts: Sequence[int]
    column_counts: Sequence[int]
    group: Group
    exchange: BackwardExchange
    images: Operand
    own: Operand
    columns: Operand
    queue: Operand | None
    ring: TravellingRows | None
    prepare: Callable[[Tensor], Operand]
    trained: bool
    columns_trained: bool
    compiler: TileCompiler | None

    @property
    def splits(self) -> bool:
        """Whether gradients of tiles are split into two bf16 numbers."""
        return splits(self.form, self.images.rows.device)

    @property
    def total(self) -> int:
        """G."""
        return sum(self.text_counts)

    @property
    def width(self) -> int:
        """M."""
        return sum(self.column_counts) + (0 if self.queue is None else len(self.queue.rows))

    @property
    def own_texts(self) -> slice:
        """This rank's texts among those with statistics on this rank."""
        rank = process_groups.rank(self.group)
        first = sum(self.text_counts[:rank]) if self.ring is None else 0
        return slice(first, first + self.text_counts[rank])

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
        for rows, place in self._tiles_of(len(columns.rows), scale):
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

    def tile_rows(self, scale: Tensor) -> int:
        """Return the number of rows of all tiles of the call together. A row counts in each of its tiles."""
        widths = [len(self.columns.rows)] if self.ring is None else [*self.column_counts]
        if self.queue is not None:
            widths.append(len(self.queue.rows))
        return sum(rows.stop - rows.start for width in widths for rows, _ in self._tiles_of(width, scale))

    def _tiles_of(self, width: int, scale: Tensor) -> Iterator[tuple[slice, slice]]:
        """Yield rows and columns of the tiles of a block of so many columns."""
        return tiles_of(len(self.images.rows), width, self.tile_bytes // scale.element_size())

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
            found = visit(ColumnBlock(self.columns, self.total, self.own_texts.start, column_stats))
        else:
            rows, own_rank = self.ring, process_groups.rank(self.group)
            message, sizes = self._message(rows, column_stats)

            def visit_received(source: int, received: Tensor) -> Tensor | None:
                count, columns = self.column_counts[source], self.own
                size, first_own = rows.num_bytes(source, count), 0 if source == own_rank else None
                if first_own is None:
                    columns = self.prepare(rows.expanded(source, rows.rows_in(received[:size], source, count)))
                stats = None if column_stats is None else received[aligned(size) :].view(column_stats.dtype)
                return visit(ColumnBlock(columns, self.text_counts[source], first_own, stats))

            found = ring_round_trip(message, sizes, visit_received, join, counts, self.group)
        if self.queue is not None:
            visit(ColumnBlock(self.queue, 0, None, trained=False))
        return None if counts is None else found

    def gradients(
        self, sums: list[Tensor | None], factor: Tensor, images: Tensor, second_tower: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the gradients of this rank's rows of both towers, and of the scale but for the upstream gradient.

        Args:
            sums: (B, D) of the images and (m, D) of the columns, from ``ProductTile.add_grads_`` and ``collect``. The latter None if the
                second tower needs no gradient. The list is emptied, so that their memory is free as soon as they are used.
            factor: Upstream gradient times scale, 0-dim.
            images: (B, D), as the caller gave them.
            second_tower: (m, D), also.

        Communication: one handshake and one exchange of G x D, if the second tower needs a gradient. None in a ring.
        """
        image_sums = sums.pop(0)
        assert image_sums is not None
        grad_images = torch.empty_like(images)
        along = self.images.vjp(image_sums, grad_images, factor).sum()
        del image_sums
        column_sums = sums.pop()
        if column_sums is None:
            return grad_images, None, along
        if self.ring is None and process_groups.world_size(self.group) > 1:
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
        self.logit_scale: nn.Parameter | None = None
        if init_temperature is not None:
            self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / init_temperature)))

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
        return self._checked_call((images, texts, extra_texts, queue), {"logit_scale": logit_scale})

    def _checked_call(
        self, rows: tuple[Tensor, Tensor, Tensor | None, Tensor | None], numbers: dict[str, Tensor | float | None]
    ) -> Tensor:
        """Compute the global loss, or raise one error on every rank.

        Args:
            rows: Images, texts, extra texts, queue.
            numbers: The caller's numbers in place of the loss's own parameters, by their names.
        """
        title = type(self).__name__
        with handshake.raising_on_all_ranks(title, group=self._group):
            inputs.refuse_capture(title)
            self._check_rows(*rows)
            given = {name: self._given_number(name, number, rows[0]) for name, number in numbers.items()}
            form = choose_form(title, self.products, [tensor for tensor in rows if tensor is not None])
            # parameters of float64 make all of it float64
            tensors = precision.CallTensors.of(self, (rows, given), {})
            dtype = precision.compute_dtype([*tensors.parameters, *tensors.given])
            if dtype == torch.float64:
                form = "float32"
            must_match = {
                "which": self._instance,
                "gather": self.gather,
                "options": self.extra_repr(),
                **{name: _kind_of_number(number) for name, number in numbers.items()},
                "weights": self._weights.take(self.parameters(), self._group),
                "queue": "none" if rows[3] is None else _described(rows[3]),
                "coefficient of the last backward": self._upstream_grads.take(),
            }
            if self._compiler is not None:
                must_match["compile_tiles"] = True
            # rows are not cast: those of bfloat16 are multiplied as they are
            forward = partial(self._forward, rows, form, dtype, must_match)
            value: Tensor = autograd_graph.run_full_precision(self, forward, (given,), {}, tensors=tensors)
        remember_global_value(value, title)
        watched: Tensor = self._upstream_grads.watch(value, group=self._group)
        return watched

    def _forward(
        self,
        rows: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        form: ProductForm,
        dtype: torch.dtype,
        must_match: dict[str, object],
        given: dict[str, Tensor | None],
    ) -> Tensor:
        images, texts, extra, queue = rows
        second_tower = {"texts": texts} if extra is None else {"texts": texts, "extra_texts": extra}
        own_rows = concatenated(list(second_tower.values()))

        def prepare(rows: Tensor) -> Operand:
            return Operand.prepare(rows if form == "bf16" else rows.to(dtype), form, normalize=self.normalize)

        # 1. each image's product with its own text, which rows and columns are compared with
        in_ring, paired = self.gather == "ring", list[Tensor]()
        own = prepare(own_rows)
        prepared_images = prepare(images)
        if self.compares_with_own_pair:
            paired = [_paired((images, texts), (prepared_images, own.part(slice(0, len(texts)))), dtype)]
        # 2. all texts. In a ring only how many there are on each rank
        trained = [images, own_rows, *self.parameters(), *given.values()]
        is_trained = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in trained)
        flags = bytes([is_trained, torch.is_grad_enabled() and own_rows.requires_grad, form == "bf16"])
        sent = {name: _to_travel(tensor, dtype) for name, tensor in second_tower.items()}
        narrow = {name: NarrowRows(tensor.detach(), lambda rows: rows) for name, tensor in second_tower.items()}
        counted = [*sent] if in_ring else []
        if paired and not in_ring:
            sent["products with their own text"] = paired[0]
        title = type(self).__name__
        batch = gather_batch(title, sent, must_match, extra=flags, counted=counted, narrow=narrow, group=self._group)
        del sent, narrow  # copies in the dtype of the computation
        text_counts = batch.counts[0]
        extra_counts = batch.counts[1] if extra is not None else [0] * len(text_counts)
        if sum(text_counts) == 0:
            raise InputError(f"{title}: rows", expected="at least one on some rank", got="none", collective=True)
        any_trained, columns_trained = (any(flag[place] for flag in batch.extras) for place in range(2))
        if form == "bf16" and not all(flag[2] for flag in batch.extras):  # float32 rows of another rank
            form = "float32"
            own, prepared_images = prepare(own_rows), prepare(images)
        warn_of_tf32(title, form, prepared_images.rows)
        # 3. the columns: gathered, or this rank's own
        column_counts = [sum(rows) for rows in zip(text_counts, extra_counts, strict=True)]
        columns, ring = own, None
        if in_ring and len(text_counts) > 1:
            travelling = NarrowRows(own_rows.detach(), lambda rows: rows)
            wide = _to_travel(own_rows, dtype)
            ring = TravellingRows(wide, travelling, batch.narrow_dtypes[0])
        elif len(text_counts) > 1:
            columns = prepare(concatenated(batch.tensors[: len(second_tower)]))
            paired = batch.tensors[len(second_tower) :]
        tile_bytes = TOWER_BYTES if self._compiler is None else DEVICE_BYTES
        call = TowerCall(
            form,
            self.tile_bytes or tile_budget(images.device, _HOST_TILE_BYTES, tile_bytes),
            text_counts,
            extra_counts,
            column_counts,
            self._group,
            BackwardExchange(title, self._group),
            prepared_images,
            own,
            columns,
            None if queue is None else prepare(queue),
            ring,
            prepare,
            any_trained,
            columns_trained,
            self._compiler,
        )
        # 4. the loss. Every rank takes part in a backward that any rank needs
        images = autograd_graph.match_requires_grad(images, any_trained)
        own_rows = autograd_graph.match_requires_grad(own_rows, columns_trained)
        numbers = [self._number(name, number) for name, number in given.items()]
        if self._compiler is not None:
            self._rehearse(self._compiler, call, numbers)
        return self._evaluate(call, images, own_rows, *paired, *numbers)

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
        kind = (str(like.dtype), like.device.type, call.form, call.splits, self.normalize, call.trained)

        def rehearsal(run: Callable[..., Any]) -> None:
            # a tile that takes the same branches
            products = rehearsed_tile(like)
            rows, columns = products.shape
            of_rows = of_columns = scale = None
            if call.form == "bf16":
                scale = products.new_ones(())
                if self.normalize:
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

    # ------------------------------------------------------------------ refused inputs

    def _check_rows(self, images: Tensor, texts: Tensor, extra: Tensor | None, queue: Tensor | None) -> None:
        title, optional = type(self).__name__, {"extra_texts": extra, "queue": queue}
        given = {"images": images, "texts": texts, **{name: t for name, t in optional.items() if t is not None}}
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor) or tensor.ndim != 2 or not tensor.is_floating_point():
                fix, number = None, _PLACES_OF_NUMBERS.get(name)
                if number is not None and (not isinstance(tensor, Tensor) or tensor.numel() == 1):
                    fix = "Further negatives have this place."
                    if hasattr(self, number):
                        fix += f" A number of your own goes by name: `loss(images, texts, {number}=...)`."
                raise InputError(f"{title}: {name}", expected="floating (n, D)", got=_described(tensor), fix=fix)
            if tensor.shape[1] != images.shape[1]:
                raise InputError(
                    f"{title}: {name}",
                    expected=f"{images.shape[1]} columns, as the images have",
                    got=tensor.shape[1],
                    fix="Project both towers to one embedding size.",
                )
        inputs.check_devices(title, given, self.parameters())
        if len(images) != len(texts):
            raise InputError(
                f"{title}: rows",
                expected="as many texts as images",
                got=f"{len(images)} images, {len(texts)} texts",
                fix="Row i of one tower belongs to row i of the other; more negatives go to extra_texts.",
            )

    def _given_number(self, name: str, number: Tensor | float | None, images: Tensor) -> Tensor | None:
        """Check one number that the caller gives in place of an own parameter. Return it as a 0-dim tensor."""
        title = f"{type(self).__name__}: {name}"
        if number is None:
            if getattr(self, name) is None:
                fix = f"Give `{name}=` in the call, or make the loss without `{_OPTION_OF[name]}=None`."
                raise InputError(title, expected="one number, since the loss has none of its own", got=None, fix=fix)
            return None
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            return torch.full((), number, dtype=precision.compute_dtype([images]), device=images.device)
        if not isinstance(number, Tensor) or number.numel() != 1 or not number.is_floating_point():
            raise InputError(title, expected="one number, 0-dim", got=_described(number))
        return number.reshape(()).to(images.device)


def _described(value: object) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _kind_of_number(number: Tensor | float | None) -> object:
    """Return the part of a number that ranks compare: the value of a plain number, not of a tensor, which would wait for the device."""
    if number is None:
        return "its own"
    return "a tensor" if isinstance(number, Tensor) else number


def concatenated(parts: list[Tensor]) -> Tensor:
    """Return the rows of some tensors. Those of one without a copy."""
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _to_travel(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows in the dtype of the computation, without graph. Narrow ones travel as they are, and need no such copy."""
    if rows.dtype in NARROW_DTYPES:
        return torch.empty((), dtype=dtype, device=rows.device).expand(rows.shape)
    return rows.detach().to(dtype)


def _paired(rows: tuple[Tensor, Tensor], operands: tuple[Operand, Operand], dtype: torch.dtype) -> Tensor:
    """Return the product (B,) of each image with its own text, in the dtype of the computation.

    Args:
        rows: (B, D) images and texts as the caller gave them, which are not rounded here.
        operands: The same as they are multiplied. Used if they are divided by their lengths already.
        dtype: Dtype of the computation.
    """
    if operands[0].rows.dtype != torch.bfloat16:
        rows = operands[0].rows, operands[1].rows
    products = torch.empty(len(rows[0]), dtype=dtype, device=rows[0].device)
    for part in pieces_of(rows[0]):
        products[part] = dot_rows(rows[0][part].detach(), rows[1][part].detach())
    for operand in operands:
        if operand.factors is not None:
            products.mul_(operand.factors)
    return products
