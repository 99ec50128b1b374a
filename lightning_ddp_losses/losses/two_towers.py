"""The call of a contrastive loss between two towers: this rank's rows of one tower against all rows of the other, in tiles.

Rows of the first tower stay where they are. Only the second tower travels: its rows are gathered as columns, or go round a ring, those of
one rank at a time. A loss is written once, for blocks of columns. Its result for a block is this rank's part if all columns are here. In a
ring it travels behind the columns, joined with those of the other ranks, to the rank that owns them.

A tile of products serves both directions and, unless it is the only one, is computed again in backward.

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` texts of all ranks, ``M`` columns (texts and further negatives), ``D`` embedding size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import autograd_graph, inputs, precision
from lightning_ddp_losses.core.forward_patch import eager_recursive, refuse_capture
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.accumulation import name_value
from lightning_ddp_losses.distributed.collectives import BackwardExchange
from lightning_ddp_losses.distributed.fingerprint import WeightFingerprints
from lightning_ddp_losses.distributed.gathered_batch import aligned, gather_batch
from lightning_ddp_losses.distributed.process_groups import Group, WithProcessGroup
from lightning_ddp_losses.distributed.raw_collectives import NarrowRows, RowsOfARing, as_bytes, ring_round_trip
from lightning_ddp_losses.distributed.upstream_grad import UpstreamGradWatch
from lightning_ddp_losses.errors import DDPLossError, InputError, expect, expect_count, expect_option
from lightning_ddp_losses.losses.partial_sums import global_quotient
from lightning_ddp_losses.losses.products import (
    ProductChoice,
    ProductForm,
    as_operand,
    choose_form,
    product,
    product_grad_,
    refuse_products,
    scaled,
    tile_budget,
    unit_rows,
)

_HOST_TILE_BYTES = 2 << 20

# own parameters that the caller may give instead, and the option that makes them
_OPTION_OF = {"logit_scale": "init_temperature", "logit_bias": "init_bias"}
# our arguments at whose position another library's losses take a number
_PLACES_OF_NUMBERS = {"extra_texts": "logit_scale", "queue": "logit_bias"}


# ---------------------------------------------------------------------- columns in blocks, products in tiles


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

    def products(self, block: ColumnBlock, images: Tensor, scale: Tensor) -> BlockProducts:
        """Prepare the products of this rank's images with the columns of a block."""
        return BlockProducts(self, block, images, scale)

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

    def mean_over_images(self, title: str, share: Tensor) -> Tensor:
        """Return the sum of all ranks' shares, divided by the number of images of all ranks.

        Communication: one handshake.
        """

        def agree(payload: bytes) -> list[bytes]:
            return handshake.all_gather(f"{title}: sum", {}, payload, group=self.group)

        return global_quotient(share, self.total, agree, group=self.group)

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


# ---------------------------------------------------------------------- the call


class TwoTowerLoss(WithProcessGroup, nn.Module):
    """Makes the call of a two-tower loss: checks, comparison of ranks, precision. The subclass has ``_evaluate``.

    Args:
        init_temperature: ``logit_scale`` starts at ``log(1 / init_temperature)``; None: each call gives it.
        max_scale: Upper limit of the own scale; None: none.
        normalize: Divide embeddings by their length.
        tile_bytes: Bytes of products alive at a time; None: 2 MiB, on an accelerator 256 MiB.
        gather: Whether every rank holds all columns, or they go round a ring.
        products: How rows are multiplied (``products``).
        name: Tells it from others of its kind, as in ``GlobalBatchLoss``.
        check_weights: Compare its numbers between the ranks, as in ``GlobalBatchLoss``.
        group: Process group; None is the world.
    """

    sees_global_batch = True
    compares_with_own_pair = True  # each text's product with its own image is needed next to all products
    _given_dtype: torch.dtype | None = None  # of the rows of this call, if narrow

    def __init__(
        self,
        init_temperature: float | None,
        max_scale: float | None,
        normalize: bool,
        tile_bytes: int | None,
        gather: Literal["all", "ring"],
        products: ProductChoice,
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
        """Compute the global loss; row i of one tower belongs to row i of the other.

        Args:
            images: (B, D), one tower; B may differ per rank.
            texts: (B, D), the other.
            extra_texts: (m, D), further negatives for the images, those of all ranks together; m may differ per rank.
            queue: (q, D), further negatives that every rank holds already, the same on all of them; no gradient.
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
        try:
            refuse_capture(title)
            self._check_rows(*rows)
            given = {name: self._given_number(name, number, rows[0]) for name, number in numbers.items()}
            form = choose_form(title, self.products, [tensor for tensor in rows if tensor is not None])
        except DDPLossError as error:
            handshake.raise_on_all_ranks(error, title, group=self._group)
        # parameters of float64 make all of it float64
        if any(parameter.dtype == torch.float64 for parameter in self.parameters()):
            form = "float32"
        self._given_dtype = precision.narrow_dtype(rows[:3])
        kinds = {name: _kind_of_number(number) for name, number in numbers.items()}
        weights = self._weights.take(self.parameters(), self._group)
        kinds |= {"weights": weights, "products": form, "queue": "none" if rows[3] is None else _described(rows[3])}
        value: Tensor = autograd_graph.run_full_precision(self, self._forward, ([*rows], given, form, kinds), {})
        autograd_graph.remember_global_value(value)
        name_value(value, title)
        watched: Tensor = self._upstream_grads.watch(value, group=self._group)
        return watched

    def _forward(
        self,
        rows: list[Tensor | None],
        given: dict[str, Tensor | None],
        form: ProductForm,
        kinds: dict[str, object],
    ) -> Tensor:
        images, texts, extra, queue = rows
        rows.clear()  # wide copies of narrow rows are freed once they are of unit length
        assert images is not None
        assert texts is not None
        # 1. rows of unit length; bf16 products need the lengths too
        lengths = None
        if self.normalize:
            images, divisors = unit_rows(images)
            lengths = divisors.squeeze(1) if form == "bf16" else None
        with_lengths = lengths is not None
        second_tower = {"texts": texts} if extra is None else {"texts": texts, "extra_texts": extra}
        narrow = {name: self._narrow_columns(tensor, with_lengths) for name, tensor in second_tower.items()}
        second_tower = {name: self._columns_of(tensor, with_lengths) for name, tensor in second_tower.items()}
        del texts, extra
        if queue is not None:
            queue = self._columns_of(queue, with_lengths).detach()
        # 2. each image's product with its own text, which rows and columns are compared with
        gathered_rows, paired = dict(second_tower), []
        if self.compares_with_own_pair:
            own_texts = second_tower["texts"][:, : images.shape[1]]
            paired = [(images.detach() * own_texts.detach()).sum(1)]
        # 3. all texts; in a ring only how many there are on each rank
        in_ring, needs_grad = self.gather == "ring", b""
        if in_ring:
            trained = [images, *second_tower.values(), *self.parameters(), *given.values()]
            is_trained = any(tensor is not None and tensor.requires_grad for tensor in trained)
            needs_grad = bytes([torch.is_grad_enabled() and is_trained])
        elif paired:
            gathered_rows["products with their own text"] = paired[0]
        must_match = {
            "which": self._instance,
            "gather": self.gather,
            "options": self.extra_repr(),
            **kinds,
            "coefficient of the last backward": self._upstream_grads.take(),
        }
        batch = gather_batch(
            type(self).__name__,
            gathered_rows,
            must_match,
            extra=needs_grad,
            counted=second_tower if in_ring else (),
            narrow=narrow,
            group=self._group,
        )
        text_counts = batch.counts[0]
        extra_counts = batch.counts[1] if "extra_texts" in second_tower else [0] * len(text_counts)
        if sum(text_counts) == 0:
            title = f"{type(self).__name__}: rows"
            raise InputError(title, expected="at least one on some rank", got="none", collective=True)
        tile_bytes = self.tile_bytes or tile_budget(images.device, _HOST_TILE_BYTES)
        columns = ColumnBlocks(form, lengths, tile_bytes, text_counts, extra_counts, queue, self._group)
        found = batch.tensors[: len(second_tower)]
        # 4. the columns: gathered, or this rank's own, of which every rank takes part in a backward that any rank needs
        if in_ring:
            travelling = NarrowRows(_concatenated([rows.rows for rows in narrow.values()]), narrow["texts"].expand)
            exchange = BackwardExchange(type(self).__name__, self._group)
            columns.ring = RingSource(travelling, batch.narrow_dtypes[0], exchange)
            images = autograd_graph.match_requires_grad(images, any(flag[0] for flag in batch.extras))
            own_columns = _concatenated(list(second_tower.values()))
            second = autograd_graph.match_requires_grad(own_columns, any(t.requires_grad for t in found))
        else:
            second, paired = _concatenated(found), batch.tensors[len(second_tower) :]
        del narrow, second_tower, gathered_rows
        # 5. the loss
        numbers = [self._number(name, number) for name, number in given.items()]
        return self._evaluate(columns, images, second, *paired, *numbers)

    def _evaluate(self, columns: ColumnBlocks, *tensors: Any) -> Tensor:
        """Compute the global loss.

        Args:
            columns: The ways to go through the second tower.
            *tensors: (B, D) images of this rank; (m, D) rows of the second tower as ``columns`` needs them; if
                ``compares_with_own_pair``, (t,) the product of each text among them with its own image, without graph; the scale
                and other numbers of the loss.
        """
        raise NotImplementedError

    def _number(self, name: str, given: Tensor | None) -> Tensor:
        """Return the caller's number as it is, or the loss's own; its scale as 1 / temperature, clamped."""
        if given is not None:
            return given
        own: Tensor = getattr(self, name)
        if name != "logit_scale":
            return own
        if self.max_scale is not None:
            own = own.clamp(max=math.log(self.max_scale))
        return own.exp()

    def _columns_of(self, rows: Tensor, with_lengths: bool) -> Tensor:
        """Make columns from rows of the second tower: of unit length, each followed by its former length if that is needed."""
        if not self.normalize:
            return rows
        unit = unit_rows(rows)
        return torch.cat(unit, 1) if with_lengths else unit.rows

    def _narrow_columns(self, rows: Tensor, with_lengths: bool) -> NarrowRows:
        """Return the rows that may travel in place of the columns made from them."""
        given, dtype = rows.detach(), rows.dtype
        if self._given_dtype is not None:
            given = given.to(self._given_dtype)
        return NarrowRows(given, lambda sent: self._columns_of(sent.to(dtype), with_lengths))

    # ------------------------------------------------------------------ refused inputs

    def _check_rows(self, images: Tensor, texts: Tensor, extra: Tensor | None, queue: Tensor | None) -> None:
        title, given = type(self).__name__, {"images": images, "texts": texts}
        # optional ones
        if extra is not None:
            given["extra_texts"] = extra
        if queue is not None:
            given["queue"] = queue
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
        """Check one number that the caller gives in place of an own parameter; return it as a 0-dim tensor."""
        title = f"{type(self).__name__}: {name}"
        if number is None:
            if getattr(self, name) is None:
                fix = f"Give `{name}=` in the call, or make the loss without `{_OPTION_OF[name]}=None`."
                raise InputError(title, expected="one number, since the loss has none of its own", got=None, fix=fix)
            return None
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            return images.new_full((), number)
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


def _concatenated(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]
