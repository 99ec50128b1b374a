"""The evaluation of a loss over pairs in tiles: which losses have one, and one call, there and back.

Forward adds each row up, tile by tile, and keeps ``k`` numbers of it; one handshake gives every rank all ranks' sums and these numbers.
Backward computes each tile once more and turns it into its gradient. What is alive at a time: the embeddings, two or three tiles, k
numbers a row. Matrix products in all: three where the matrix is symmetric, four else; one less where a single tile takes it all, and
where a tile's gradient follows from the tile alone.

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` columns over all ranks, ``D`` embedding size, ``T`` rows of a tile, ``k`` statistics
of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.core.autograd_graph import match_requires_grad
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.losses.element_losses import collects_counts, no_loss
from lightning_ddp_losses.losses.gathered_call import PMLCall
from lightning_ddp_losses.losses.partial_sums import (
    SUM_BYTES,
    GlobalSums,
    PartialSum,
    host_number,
    value_with_grad,
)
from lightning_ddp_losses.losses.pml_registry import facts_of
from lightning_ddp_losses.losses.products import ProductForm, tile_budget
from lightning_ddp_losses.losses.tiled.distances import Prepared, tile_distance
from lightning_ddp_losses.losses.tiled.pair_losses import PairLoss
from lightning_ddp_losses.losses.tiled.plan import TiledPlan
from lightning_ddp_losses.losses.tiled.tile_compiler import TileCompiler
from lightning_ddp_losses.losses.tiled.tile_functions import Numbers
from lightning_ddp_losses.losses.tiled.tiles import (
    LabelPairs,
    MaskedPairs,
    MaskedTile,
    PairList,
    Pairs,
    Tile,
    TripletTuples,
    TuplePairs,
)

# Few rows have few classes, hence few columns with positives; too few read the columns too often, and small tiles are all overhead.
_FEWEST_ROWS, _HOST_BYTES = 64, 512 << 10
MASKED_BYTES = 64 << 20
"""Largest matrix of pairs that an accelerator computes with masks in place of lists of pairs; SupCon has no limit.

A list has a length that the host waits for, which costs the launches of everything that could have been queued meanwhile, about a
millisecond. Masks cost bytes. Bytes read and written by a tile's elements, in both directions, as multiples of the tile's own bytes; lists
of one positive a row:

| | SupCon | NTXent | MultiSimilarity | Contrastive |
|---|---|---|---|---|
| masks | 20 | 40 | 35 | 35 |
| lists | 14 | 14 | 14 | 22 |

The longer the lists, the more they cost: with ten classes as much as SupCon's masks. At 64 MiB and 3 TB/s 26 times the bytes are 0.6 ms,
less than the wait. For larger matrices, in tiles of 256 MiB, neither the wait of a call nor the 65 launches of a listed tile bound the
time. Triplets with masks are sorted twice. With few positives a row that is many times the cost of lists.
"""
_MOST_STATS = 3  # the largest k of any pair loss
_FEWEST_PAIRS = 6  # from which on there are two of one kind, whatever the labels


@dataclass(frozen=True)
class Block:
    """Columns that are here at a time: those of all ranks, or of one.

    Attributes:
        columns: As the distance keeps them, in the order of ``pairs``.
        pairs: Of this rank's rows and these columns.
        start: The first of them in the order of all columns.
        complete: They are all there are.
    """

    columns: Tensor
    pairs: Pairs | MaskedPairs
    start: int = 0
    complete: bool = False


def rows_of_a_tile(row_bytes: int, columns: int, device: torch.device, tile_bytes: int | None) -> int:
    """Computes how many rows fit a tile.

    Args:
        row_bytes: Of one row.
        columns: C.
        device: Where the tile lies.
        tile_bytes: The most that a tile may take; None: what is fast on the device.

    Raises:
        InputError: where not even one row fits.
    """
    if tile_bytes is None:
        return max(_FEWEST_ROWS, tile_budget(device, _HOST_BYTES) // row_bytes)
    size = tile_bytes // row_bytes
    if size == 0:
        raise InputError(
            "tile_bytes",
            expected=f"room for one row against {columns} columns ({row_bytes} bytes)",
            got=tile_bytes,
            fix="Raise tile_bytes, or leave it out.",
        )
    return size


class TiledEvaluator:
    """One call of a loss on tiles, from gathered rows to its value and gradient.

    Args:
        loss: pytorch-metric-learning's.
        plan: Its tiled evaluation.
        call: The arguments over all ranks.
        symmetric: Whether ``plan.is_symmetric``; the gathered rows then get no gradient.
        tile_bytes: The most that a tile may take; None: a default.
        on_device: What ranks exchange stays on the device, which nobody waits for.
        compiler: Compiles what is elementwise; pairs are then masks on every device. None: nothing is compiled.
        products: How rows are multiplied, where the distance is a product.
    """

    def __init__(
        self,
        loss: Any,
        plan: TiledPlan,
        call: PMLCall,
        *,
        symmetric: bool,
        tile_bytes: int | None,
        on_device: bool,
        compiler: TileCompiler | None,
        products: ProductForm,
    ) -> None:
        self._products = products
        self._loss, self._plan, self._call, self._symmetric = loss, plan, call, symmetric
        self._tile_bytes = tile_bytes
        self._on_device, self._compiler, self._masked = on_device, compiler, False
        self._references: Tensor | None = None  # with their graph, where they want a gradient
        self._prepared_references: Prepared | None = None
        self._rows_are_columns = False  # and get their gradient with these
        self._buffers: list[Tensor] = []
        self._kept_tile: Tile | None = None
        self._kept_masked_tile: MaskedTile | None = None
        # what each sub-loss gives back to rows and columns, where forward has it already
        self._sub_loss_sums: list[tuple[Tensor, Tensor | None]] = []
        self._global_pairs: tuple[int, int] | None = None  # positive, negative; None: not known yet

    def payload_capacity(self) -> int:
        """Computes bytes that any rank's payload fits in; the same on all ranks."""
        totals = SUM_BYTES * len(self._plan.pair_loss.sub_losses)
        if not self._symmetric:
            return totals
        item: int = self._call.given["embeddings"].element_size()
        return totals + max(self._call.counts["embeddings"]) * _MOST_STATS * item

    # ------------------------------------------------------------------ there

    def forward(self) -> None:
        """Goes over the tiles; the other ranks then need ``partial_sums`` and, if symmetric, ``row_stats``."""
        loss, call = self._loss, self._call
        # this rank's rows, and all columns that are here, as the distance compares them
        embeddings, references = call.given["embeddings"], call.references
        self._embeddings = match_requires_grad(embeddings, call.arguments["embeddings"].requires_grad)
        self._distance = tile_distance(loss.distance, references.shape[0], self._products)
        columns = self._distance.prepare(references)
        self._masked = self._fits_masks()
        self._prepared = self._prepared_rows(columns)
        self._rows = self._prepared.rows
        self._pair_loss = self._new_pair_loss(embeddings.shape[0], self._rows)
        # in which order tiles take both
        self._set_gathered_columns(columns)
        del columns  # sorted ones take their place
        self._kept_rows = self._distance.kept_rows(_sorted(self._rows, self._row_order))
        # sums over each row's entries
        backward_comes = self._embeddings.requires_grad or self._references is not None
        backward_comes = backward_comes and torch.is_grad_enabled()
        self._totals, self.row_stats = self._accumulate_tiles(backward_comes=backward_comes)
        self._buffers.clear()  # no tile is alive between forward and backward

    @torch.no_grad()
    def rehearse(self, title: str, group: Group) -> None:
        """Lets the ranks compile together what ``forward`` and backward will call, where that is new."""
        compiler, call = self._compiler, self._call
        if compiler is None or not self._may_mask():
            return
        rows, labels = call.given["embeddings"], call.local_labels
        assert labels is not None
        has_ids = call.ref_labels is call.arguments["labels"]
        kind = (str(rows.dtype), rows.device.type, str(labels.dtype), self._symmetric, has_ids)

        def rehearsal(run: Callable[..., Any]) -> None:
            # a tile of a few rows and columns, which takes the same branches
            like = torch.linspace(-1, 1, 15, dtype=rows.dtype, device=rows.device).view(3, 5)
            pair_loss = self._new_pair_loss(3, like, run)
            column_labels = torch.tensor([0, 1, 0, 1, 1], device=rows.device).to(labels.dtype)
            first = 0 if has_ids else None
            keys = MaskedPairs(column_labels[:3], column_labels, first, like, compiled=True).keys(slice(0, 3))
            tile = MaskedTile(like, slice(0, 3), slice(0, 5), keys)
            if pair_loss.masked_grad_in_forward:
                pair_loss.masked_numbers_with_grads(tile, None)
            numbers = pair_loss.masked_numbers(tile, None, complete=True)
            pair_loss.take_numbers(numbers)
            pair_loss.finalize(torch.zeros_like(column_labels[:3]))
            stats, column_stats = like.new_ones(3, pair_loss.width), None
            if self._symmetric:
                column_stats = like.new_ones(5, pair_loss.width)
            pair_loss.prepare_masked_backward(stats, column_stats, [host_number(1.0)] * len(pair_loss.sub_losses))
            pair_loss.masked_grad(tile)

        compiler.rehearse(title, kind, rehearsal, group)

    def value(self, sums: GlobalSums, row_stats: Tensor | None) -> tuple[Tensor, Tensor]:
        """Computes the loss from the numbers of all ranks.

        Args:
            sums: All ranks' sub-losses.
            row_stats: (G, k), statistics of all ranks' rows, if ``symmetric``.

        Returns:
            The loss with its graph, and as a number.
        """
        value, factors = sums.reduce()
        column_stats = None if row_stats is None else _sorted(row_stats, self._column_order)

        def vjp(wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
            references, prepared, distance = self._references, self._prepared_references, self._distance
            wants_columns = wanted[-1] and references is not None
            rows_grad, columns_grad = self._backward_tiles(column_stats, factors, wants_columns=wants_columns)
            if columns_grad is not None:
                assert references is not None
                assert prepared is not None
                if self._rows_are_columns:
                    columns_grad[slice(*self._call.bound)] += rows_grad
                columns_grad = distance.prepare_vjp(references, prepared, columns_grad)
            if self._rows_are_columns:
                return (columns_grad,)
            if wanted[0]:
                return distance.prepare_vjp(self._embeddings, self._prepared, rows_grad), columns_grad
            return None, columns_grad

        if self._rows_are_columns:
            return value_with_grad(value, self._references, vjp=vjp), value
        return value_with_grad(value, self._embeddings, self._references, vjp=vjp), value

    @torch.no_grad()
    def _accumulate_tiles(self, *, backward_comes: bool) -> tuple[list[PartialSum], Tensor]:
        """Lets the pair loss see each tile once; returns the sub-losses' totals, and (B, k) statistics in the order of the rows."""
        pair_loss = self._pair_loss
        if self._masked:
            return self._accumulate_masked_tiles(backward_comes=backward_comes)
        pair_loss.allocate_()
        if pair_loss.grad_in_forward and backward_comes and self._symmetric:
            self._sub_loss_sums = [(torch.zeros_like(self._kept_rows), None) for _ in pair_loss.sub_losses]
        complete = False
        for block in self._blocks():
            complete = block.complete
            for part in self._parts:
                tile = self._tile(block, part)
                if self._sub_loss_sums:
                    self._accumulate_with_grads_(block, tile)
                    continue
                if backward_comes and complete and len(self._parts) == 1:
                    # so small a batch need not be computed twice
                    self._kept_tile = tile._replace(matrix=tile.matrix.clone())
                if pair_loss.needs_second_pass and complete:
                    # the tile's rows are complete at once, and its positives still here
                    entries = tile.positive_entries()
                    pair_loss.accumulate_(tile)
                    pair_loss.accumulate_positives_(tile.rows, tile.positives, entries)
                else:
                    pair_loss.accumulate_(tile)
        if pair_loss.needs_second_pass and not complete:
            self._accumulate_positives_()
        return self._reduced_rows()

    def _reduced_rows(self) -> tuple[list[PartialSum], Tensor]:
        """Reduces the rows; returns what ``_accumulate_tiles`` returns."""
        labels = self._call.local_labels
        if labels is not None:
            labels = _sorted(labels, self._row_order)
        totals, stats = self._pair_loss.finalize(labels)
        return totals, _unsorted(stats, self._row_order)

    def _accumulate_masked_tiles(self, *, backward_comes: bool) -> tuple[list[PartialSum], Tensor]:
        """Does what ``_accumulate_tiles`` does, with masks in place of lists."""
        pair_loss, complete = self._pair_loss, False
        # (elsewhere a sub-loss would keep a gradient of all columns until backward)
        has_one_gradient = self._symmetric or not pair_loss.symmetric
        if pair_loss.masked_grad_in_forward and has_one_gradient and backward_comes:
            self._sub_loss_sums = self._empty_sums()
        numbers: list[Numbers | None] = [None] * len(self._parts)
        for block in self._blocks():
            complete = block.complete
            for index, part in enumerate(self._parts):
                tile = self._masked_tile(block, part)
                if self._sub_loss_sums:
                    numbers[index] = self._masked_numbers_with_grads_(block, tile, numbers[index])
                    continue
                numbers[index] = pair_loss.masked_numbers(tile, numbers[index], complete=complete)
                if backward_comes and complete and len(self._parts) == 1:
                    self._kept_masked_tile = tile
        if pair_loss.needs_second_pass and not complete:
            for block in self._blocks():
                for index, part in enumerate(self._parts):
                    before = numbers[index]
                    assert before is not None
                    numbers[index] = pair_loss.masked_second_numbers(self._masked_tile(block, part), before)
        pair_loss.take_numbers(_of_all_rows(numbers))
        return self._reduced_rows()

    def _empty_sums(self) -> list[tuple[Tensor, Tensor | None]]:
        """Makes sums of nothing for the gradients of rows and, where it is wanted, of columns: of each sub-loss."""
        sums: list[tuple[Tensor, Tensor | None]] = []
        for _ in self._pair_loss.sub_losses:
            of_columns = None if self._references is None else torch.zeros_like(self._gathered_columns)
            sums.append((torch.zeros_like(self._kept_rows), of_columns))
        return sums

    def _masked_numbers_with_grads_(self, block: Block, tile: MaskedTile, before: Numbers | None) -> Numbers:
        """Computes the numbers of a tile's rows, and adds up what it gives back, where that needs no other tile."""
        numbers, matrix_grads = self._pair_loss.masked_numbers_with_grads(tile, before)
        for sums, matrix_grad in zip(self._sub_loss_sums, matrix_grads, strict=True):
            self._add_vjp_(block, tile, matrix_grad, *sums)
        return numbers

    def _add_vjp_(
        self, block: Block, tile: Tile | MaskedTile, matrix_grad: Tensor, row_sums: Tensor, column_sums: Tensor | None
    ) -> None:
        """Adds what the gradient of a masked tile's matrix gives back."""
        rows, of_columns = tile.rows, None if column_sums is None else column_sums[tile.columns]
        self._distance.vjp_(
            self._kept_rows[rows],
            block.columns,
            self._pair_loss.scale,
            tile.matrix,
            matrix_grad,
            row_sums[rows],
            of_columns,
        )

    def _accumulate_with_grads_(self, block: Block, tile: Tile) -> None:
        """Adds up a tile and the rows' gradient from it, where that needs no other tile."""
        rows, scale = self._kept_rows[tile.rows], self._pair_loss.scale
        matrix_grads = self._pair_loss.accumulate_with_grads_(tile, self._buffer(1, tile.matrix.shape))
        # a sub-loss without negatives that count has no second gradient
        for (row_sums, _), (span, matrix_grad) in zip(self._sub_loss_sums, matrix_grads, strict=False):
            matrix, columns = tile.matrix[:, span], block.columns[span]
            self._distance.vjp_(rows, columns, scale, matrix, matrix_grad, row_sums[tile.rows], None)

    def _accumulate_positives_(self) -> None:
        """Goes through the positives once more, now that rows are complete."""
        for block in self._blocks():
            for part in self._parts:
                assert not isinstance(block.pairs, MaskedPairs)
                tile = self._tile(block, part, block.pairs.positive_columns(part))
                self._pair_loss.accumulate_positives_(tile.rows, tile.positives, tile.positive_entries())

    # ------------------------------------------------------------------ and back

    @torch.no_grad()
    def _backward_tiles(
        self, column_stats: Tensor | None, factors: Sequence[Tensor], *, wants_columns: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the gradients of the prepared rows, (B, D), and columns, (C, D).

        Args:
            column_stats: (G, k) in the order of the columns; None: the gradient of this rank's share only.
            factors: One per sub-loss.
            wants_columns: Else there is None of these.
        """
        row_sums, column_sums = torch.zeros_like(self._kept_rows), None
        if wants_columns:
            column_sums = torch.zeros_like(self._gathered_columns)
        if self._sub_loss_sums:
            self._weigh_sums_(factors, row_sums, column_sums)
        elif self._masked:
            self._add_masked_tiles_(column_stats, factors, row_sums, column_sums)
        else:
            self._add_listed_tiles_(column_stats, factors, row_sums, column_sums)
        self._buffers.clear()
        rows_grad = _unsorted(self._distance.rows_grad_(self._kept_rows, row_sums), self._row_order)
        if column_sums is None:
            return rows_grad, None
        columns_grad = self._distance.columns_grad_(self._gathered_columns, column_sums)
        return rows_grad, _unsorted(columns_grad, self._column_order)

    def _weigh_sums_(self, factors: Sequence[Tensor], row_sums: Tensor, column_sums: Tensor | None) -> None:
        """Adds up the sub-losses: what they give back is known since forward, but for the factors."""
        # transposed entries have the same gradient
        times = 2.0 if self._symmetric else 1.0
        for (of_rows, of_columns), factor, sign in zip(
            self._sub_loss_sums, factors, self._pair_loss.grad_signs, strict=True
        ):
            for total, sums in ((row_sums, of_rows), (column_sums, of_columns)):
                if total is None or sums is None:
                    continue
                if factor.device.type == "cpu":
                    total.add_(sums, alpha=times * sign * factor.item())
                else:
                    total.addcmul_(sums, factor.to(sums.dtype), value=times * sign)

    def _add_listed_tiles_(
        self, column_stats: Tensor | None, factors: Sequence[Tensor], row_sums: Tensor, column_sums: Tensor | None
    ) -> None:
        """Adds what tiles give back whose positives are listed; arguments as of ``_backward_tiles``."""
        pair_loss, distance = self._pair_loss, self._distance
        pair_loss.prepare_backward(_sorted(self.row_stats, self._row_order), column_stats, factors)
        for block in self._blocks():
            for part in self._parts:
                # distances, unless forward has kept its only tile
                tile, self._kept_tile = self._kept_tile, None
                if tile is None:
                    tile = self._tile(block, part)
                matrix_grad = tile.matrix
                if distance.needs_matrix_in_vjp:
                    tile = tile._replace(matrix=self._buffer(1, matrix_grad.shape).copy_(matrix_grad))
                # from distances to their gradient, in place
                pair_loss.grad_(tile._replace(matrix=matrix_grad))
                # from distances to embeddings
                self._add_vjp_(block, tile, matrix_grad, row_sums, column_sums)

    def _add_masked_tiles_(
        self, column_stats: Tensor | None, factors: Sequence[Tensor], row_sums: Tensor, column_sums: Tensor | None
    ) -> None:
        """Does the same with masks in place of lists."""
        pair_loss = self._pair_loss
        pair_loss.prepare_masked_backward(self.row_stats, column_stats, factors)
        for block in self._blocks():
            for part in self._parts:
                tile, self._kept_masked_tile = self._kept_masked_tile, None
                if tile is None:
                    tile = self._masked_tile(block, part)
                self._add_vjp_(block, tile, pair_loss.masked_grad(tile), row_sums, column_sums)
        if pair_loss.factor is not None:
            for sums in (row_sums, column_sums):
                if sums is not None:
                    sums.mul_(pair_loss.factor)

    # ------------------------------------------------------------------ columns

    def _new_pair_loss(self, rows: int, like: Tensor, run: Callable[..., Any] | None = None) -> PairLoss:
        """Makes the loss on tiles of ``rows`` rows, which calls the functions of tiles by ``run``; None: as the call does."""
        plan = self._plan
        return plan.pair_loss(self._loss, plan.reductions, rows, like, run or self._compiler)

    def _may_mask(self) -> bool:
        """Tells whether pairs can be masks; the same on all ranks."""
        call, plan = self._call, self._plan
        if "indices_tuple" in call.arguments or not plan.pair_loss.supports_masks(self._loss, plan.reductions):
            return False
        # masks count what passes, and not what is only recorded
        if collects_counts(self._loss):
            return False
        # of two rows or so PML makes a zero, which depends on their labels
        return call.total_rows * call.total_references > _FEWEST_PAIRS

    def _fits_masks(self) -> bool:
        """Tells whether pairs are masks: where to list them would wait for the device and cost more, or masks are compiled."""
        rows = self._call.given["embeddings"]
        if not len(rows) or not self._may_mask():
            return False
        if self._compiler is not None:
            return True
        if not self._on_device:
            return False
        matrix_bytes = len(rows) * self._call.total_references * rows.element_size()
        return self._plan.pair_loss.masks_any_size or matrix_bytes <= MASKED_BYTES

    def _prepared_rows(self, columns: Prepared) -> Prepared:
        """Prepare this rank's rows; if they are among the columns, they are those."""
        call = self._call
        if call.references is not call.arguments["embeddings"]:
            return self._distance.prepare(self._embeddings)
        # lists take columns sorted: views would keep the unsorted ones alive
        return columns.part(*call.bound, copy=not self._masked)

    def _set_gathered_columns(self, prepared: Prepared) -> None:
        """Takes all columns as one block."""
        references, distance = self._call.references, self._distance
        columns = prepared.rows
        pairs = self._masked_pairs() if self._masked else self._named_or_labelled_pairs(columns.shape[0])
        self._row_order, self._column_order = pairs.row_order, pairs.column_order
        if references.requires_grad and not self._symmetric:
            self._references, self._prepared_references = references, prepared
            self._rows_are_columns = references is self._call.arguments["embeddings"]
        columns = distance.kept_columns(_sorted(columns, self._column_order))
        self._gathered_columns = columns
        blocks = [Block(columns, pairs, complete=True)] if len(columns) else []
        self._blocks: Callable[[], Iterator[Block]] = lambda: iter(blocks)
        self._parts = self._row_slices(len(columns))

    def _masked_pairs(self, columns: slice = slice(None)) -> MaskedPairs:
        """Makes masks of this rank's rows and some columns."""
        call = self._call
        labels, reference_labels = call.local_labels, call.ref_labels
        assert labels is not None
        assert reference_labels is not None
        # a row is not its own partner, where rows and columns are the same samples
        first = None
        if reference_labels is call.arguments["labels"]:
            first = call.bound[0] - (columns.start or 0)
        compiled = self._compiler is not None
        return MaskedPairs(labels, reference_labels[columns], first, self._rows, compiled=compiled)

    def _named_or_labelled_pairs(self, columns: int) -> Pairs:
        """Makes the pairs of this rank's rows and all columns: those of a miner, else those of the labels."""
        call, once = self._call, self._plan.pair_loss.counts_pairs_once
        labels, reference_labels = call.local_labels, call.ref_labels
        assert labels is not None
        assert reference_labels is not None
        if "indices_tuple" not in call.arguments:
            kind = torch.promote_types(labels.dtype, reference_labels.dtype)
            all_labels, first = call.arguments["labels"], None
            if reference_labels is all_labels:
                first = call.bound[0]
            label_pairs = LabelPairs(labels.to(kind), reference_labels.to(kind), first, all_labels.to(kind))
            # the rows themselves match too
            itself = len(all_labels) * (first is not None)
            total = len(all_labels) * len(reference_labels)
            self._global_pairs = label_pairs.matching - itself, total - label_pairs.matching
            return label_pairs
        tuples = call.local_tuples()
        if len(tuples) == 3 and facts_of(self._loss).compares_triplets:
            return TripletTuples(tuples, labels.shape[0])
        pairs = TuplePairs(tuples, labels.shape[0], columns, self._rows.dtype, once=once)
        if pairs.contradict:
            raise InputError(
                f"{type(self._loss).__name__}: indices_tuple",
                expected="each pair to be either positive or negative",
                got="a pair that is both",
            )
        return pairs

    # ------------------------------------------------------------------ tiles

    def _row_slices(self, columns: int) -> list[slice]:
        """Cuts this rank's rows into tiles of one size against so many columns."""
        total = len(self._rows)
        if not columns:
            return []
        row_bytes = self._distance.row_bytes(columns, self._rows)
        size = rows_of_a_tile(row_bytes, columns, self._rows.device, self._tile_bytes)
        if not total:
            return []
        size = -(-total // -(-total // size))
        return [slice(start, min(start + size, total)) for start in range(0, total, size)]

    def _tile(self, block: Block, part: slice, span: slice | None = None) -> Tile:
        """Computes a tile of all columns of a block, or of those in ``span``, among which all positives must be."""
        pairs, columns, start = block.pairs, block.columns, 0
        assert not isinstance(pairs, MaskedPairs)
        if span is not None:
            columns, start = columns[span], span.start
        width = columns.shape[0]
        out = self._buffer(0, torch.Size((part.stop - part.start, width)))
        matrix = self._distance.matrix(self._kept_rows[part], columns, self._pair_loss.scale, out)
        owners, positives = pairs.positives(part)
        # rows with themselves, as places in the flattened tile
        self_pairs = pairs.self_pairs(part)
        if self_pairs is not None:
            row_starts = torch.arange(-start, len(self_pairs) * width - start, width, device=self_pairs.device)
            self_pairs = row_starts.add_(self_pairs)
        if start:
            positives = positives - start
        positive_columns = pairs.positive_columns(part)
        return Tile(
            matrix,
            part,
            slice(block.start + start, block.start + start + width),
            PairList(owners, positives, owners * width + positives),
            self_pairs,
            pairs.negative_counts(part),
            slice(positive_columns.start - start, positive_columns.stop - start),
            pairs.triplets(part),
            pairs.most_positives(part),
            pairs.repeats_negatives,
        )

    def _masked_tile(self, block: Block, part: slice) -> MaskedTile:
        """Computes a tile of all columns of a block."""
        assert isinstance(block.pairs, MaskedPairs)
        width = block.columns.shape[0]
        out = self._buffer(0, torch.Size((part.stop - part.start, width)))
        matrix = self._distance.matrix(self._kept_rows[part], block.columns, self._pair_loss.scale, out)
        return MaskedTile(matrix, part, slice(block.start, block.start + width), block.pairs.keys(part))

    def _buffer(self, index: int, shape: torch.Size) -> Tensor:
        """Hands out memory that all tiles of a pass share."""
        while len(self._buffers) <= index:
            self._buffers.append(self._rows.new_empty(0))
        if self._buffers[index].numel() < shape.numel():
            self._buffers[index] = self._rows.new_empty(shape.numel())
        return self._buffers[index][: shape.numel()].view(shape)

    # ------------------------------------------------------------------ numbers of this rank

    def partial_sums(self) -> list[PartialSum]:
        """Lists this rank's sub-losses, without graph."""
        names = self._plan.pair_loss.sub_losses
        counts_on_device = self._masked and self._on_device
        if not counts_on_device and self._is_zero_loss():
            return [PartialSum(self._no_loss(), host_number(0.0), name=name) for name in names]
        found = []
        for name, each in zip(names, self._totals, strict=True):
            total = each.total
            # a NaN passes no limit of a list: where nothing passes it would be lost
            if not self._masked and each.may_count_nothing:
                total = total + self._no_loss()
            found.append(replace(each, total=total, name=name))
        return found

    def is_no_zero(self) -> Tensor | None:
        """Returns 0 if PML returns a zero for want of pairs, else 1; None where ``partial_sums`` knows that."""
        return self._has_both_kinds() if self._masked and self._on_device else None

    def _no_loss(self) -> Tensor:
        return no_loss(self._embeddings.detach())

    def _is_zero_loss(self) -> bool:
        """Tells whether PML returns a zero at once, for want of pairs; the same on all ranks."""
        if facts_of(self._loss).compares_triplets:
            return False  # without triplets all totals are 0
        tuples = self._call.arguments.get("indices_tuple")
        if tuples is None:
            positive, negative = self._global_pairs or self._call.global_pair_counts()
        else:
            positive, negative = len(tuples[1]), len(tuples[-1])
        if self._plan.pair_loss.needs_both_kinds and not (positive and negative):
            return True
        return max(positive, negative) <= 1

    def _has_both_kinds(self) -> Tensor | None:
        """Tells whether PML returns no zero at once, for want of negatives; None: it never does. (Without positives the loss is 0.)"""
        if not self._plan.pair_loss.needs_both_kinds:
            return None
        labels, reference_labels = self._call.arguments["labels"], self._call.ref_labels
        assert reference_labels is not None
        differ: Tensor = reference_labels != labels[0]
        if reference_labels is not labels:
            differ = torch.cat([differ, labels != labels[0]])
        return differ.any()


def _of_all_rows(parts: Sequence[Numbers | None]) -> Numbers:
    """Concatenates the numbers of the rows of all tiles."""
    numbers = [part for part in parts if part is not None]
    if len(numbers) == 1:
        return numbers[0]
    return tuple(torch.cat(each) for each in zip(*numbers, strict=True))


def _sorted(values: Tensor, order: Tensor | None) -> Tensor:
    """Takes values in ``order``; None: as they are."""
    return values if order is None else values[order]


def _unsorted(values: Tensor, order: Tensor | None) -> Tensor:
    """Puts values back that were taken in ``order``; None: as they are."""
    if order is None:
        return values
    return torch.empty_like(values).index_copy_(0, order, values)
