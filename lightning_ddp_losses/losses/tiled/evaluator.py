"""The evaluation of a loss over pairs in tiles: which losses support it, and one call, forward and backward.

A tile holds the distances of a few of this rank's rows to all columns. Forward computes a few numbers of each row and stores ``k``
statistics per row. One handshake distributes the sums and statistics of all ranks. Backward recomputes each tile and overwrites it with its
gradient. Memory at any time holds the embeddings, two or three tiles, and the statistics. A call takes three matrix products if the matrix
is symmetric, otherwise four. It takes one fewer if there is a single tile, and if the gradient of a tile depends only on that tile. On the
CPU it takes two if the matrix is symmetric, because tiles cover half of this rank's block of it (``half_tiles``), and one and a half if
these tiles fit into ``KEPT_BYTES``, in which they are kept until backward.

Legend: ``W`` ranks, ``B`` rows on this rank, ``G`` columns over all ranks, ``D`` embedding size, ``T`` rows of a tile, ``k`` statistics
of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.collectives import own_slices_with_grad
from lightning_ddp_losses.distributed.raw_collectives import travels_on_device
from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.losses import element_losses, partial_sums
from lightning_ddp_losses.losses.gathered_call import PMLCall
from lightning_ddp_losses.losses.partial_sums import GlobalSums, PartialSum, SumExchange
from lightning_ddp_losses.losses.pml_registry import (
    DISTANCES,
    Reduction,
    collects_counts,
    facts_of,
    pair_loss_of,
    reduction_of,
)
from lightning_ddp_losses.losses.products.forms import ProductForm, warn_of_tf32
from lightning_ddp_losses.losses.tile_compiler import TileCompiler, rehearsed_tile
from lightning_ddp_losses.losses.tile_results import TileResults
from lightning_ddp_losses.losses.tiled import call_tiles
from lightning_ddp_losses.losses.tiled.call_tiles import CallTiles, GradSums, in_order, rows_of_a_tile, undo_order
from lightning_ddp_losses.losses.tiled.distances import is_one_product, tile_distance
from lightning_ddp_losses.losses.tiled.half_margins import HalfMargins
from lightning_ddp_losses.losses.tiled.half_tiles import HALF_TILE_ROWS, HalfNumbers, OwnFirstPairs
from lightning_ddp_losses.losses.tiled.pair_losses import Contrastive, PairLoss, SoftmaxPairLoss
from lightning_ddp_losses.losses.tiled.tiles import (
    NamedPairs,
    NamedTriplets,
    Pairs,
    SortedPairs,
    Tile,
    WholePairs,
)

MASKED_BYTES = 64 << 20
"""Largest matrix of pairs for which an accelerator builds masks of all columns, instead of a band whose limits the host must read.

Reading the bands makes the host wait for the device, and no kernels can be queued in the meantime: about one millisecond. Masks of all
columns cost memory traffic instead. Forward and backward together move 20 (SupCon) to 40 (NTXent) times the bytes of a tile, compared to 14
times with a band of a few columns. At 64 MiB and 3 TB/s the difference is 0.6 ms. On an H200, bands take 0.95 (SupCon) and 0.81 (NTXent)
of the time of masks of all columns for 16,384 rows, and 0.84 and 0.67 for 65,536 rows.
"""
_MOST_STATS = 3  # the largest k of any pair loss
_FEWEST_PAIRS = 6  # with more pairs, at least two are of the same kind, whatever the labels


# ---------------------------------------------------------------------- which losses


@dataclass(frozen=True)
class TiledPlan:
    """The tiled evaluation of a loss.

    Attributes:
        pair_loss: The loss on tiles.
        reductions: One per sub-loss.
        symmetric: True if, between rows of one batch, the gradient of transposed entries can be computed without other ranks' gradients.
        supports_whole: True if the loss can be evaluated without reading on the host which pairs exist.
        has_kernels: True if hand-written kernels implement the loss.
        compares_triplets: True if the loss compares triplets, which a miner may select.
        is_product: True if the distance is a single product of rows with rows.
    """

    pair_loss: type[PairLoss]
    reductions: tuple[Reduction, ...]
    symmetric: bool
    supports_whole: bool
    has_kernels: bool
    compares_triplets: bool
    is_product: bool


def tiled_plan(loss: Any) -> TiledPlan | None:
    """Plan the tiled evaluation of a loss in its current configuration, or return None if it cannot be evaluated in tiles."""
    pair_loss: type[PairLoss] | None = pair_loss_of(loss)
    if pair_loss is None or type(loss.distance) not in DISTANCES:
        return None
    # pair losses expect Python numbers. A temperature or margin that is a tensor may require a gradient
    held = [*loss.parameters(), *vars(loss).values(), *vars(loss.distance).values()]
    if any(isinstance(value, Tensor) for value in held):
        return None
    found = [reduction_of(loss.reducer, name) for name in pair_loss.sub_losses]
    reductions = tuple(each for each in found if each is not None and not each.given_divisor)
    if len(reductions) < len(found) or not pair_loss.supports(loss, reductions):
        return None
    symmetric = pair_loss.symmetric and DISTANCES[type(loss.distance)].symmetric
    whole, has_kernels = pair_loss.supports_whole(loss, reductions), pair_loss.has_kernels(reductions)
    triplets, is_product = facts_of(loss).compares_triplets, is_one_product(loss.distance)
    return TiledPlan(pair_loss, reductions, symmetric, whole, has_kernels, triplets, is_product)


# ---------------------------------------------------------------------- one call


@dataclass(frozen=True)
class TiledCall:
    """One call of a loss that is a sum over anchors, in our own tiles: each rank evaluates its own anchors. ``run`` evaluates it.

    Attributes:
        loss: The loss from pytorch-metric-learning.
        plan: Its tiled evaluation.
        call: The arguments over all ranks.
        exchange: Exchange of sums between the ranks.
        tile_bytes: Maximum size of a tile in bytes. If None, a default.
        compiler: Compiles the tile functions, or provides kernels for them. Pairs are then ``WholePairs`` on every device. If None, the
            functions are not compiled.
        products: Form of the products of rows, if the distance is a product.
    """

    loss: Any
    plan: TiledPlan
    call: PMLCall
    exchange: SumExchange
    tile_bytes: int | None = None
    compiler: TileCompiler | None = None
    products: ProductForm = "float32"

    def run(self) -> Tensor:
        """Return the global loss."""
        call, exchange, rows = self.call, self.exchange, self.call.given["embeddings"]
        if self.compiler is not None:
            self._rehearse(self.compiler)
            if self.compiler.has_failed:
                return replace(self, compiler=None).run()
        # this rank's sums, divisors and statistics. If this fails, the error is sent with the size that peers expect
        handshake_bytes = handshake.HANDSHAKE_BYTES + self._payload_capacity()
        with handshake.raising_on_all_ranks(exchange.title, handshake_bytes=handshake_bytes, group=exchange.group):
            forward = self._forward()
            partials, present = forward.local_sums(), forward.is_no_zero()
        # sums of all ranks: the value is computed now, the gradient tile by tile in backward
        sums, row_stats = exchange.gather(
            partials,
            rows,
            with_counts=self.records,
            present=present,
            row_stats=forward.row_stats if self.symmetric else None,
            rows_by_rank=call.counts["embeddings"],
            handshake_bytes=handshake_bytes,
        )
        graph, value = forward.value(sums, row_stats)
        if self.records:
            element_losses.record_counts(self.loss, sums)
        if self.loss.distance.collect_stats:
            element_losses.record_norms(self.loss.distance, call.arguments["embeddings"], call.references)
        # embedding regularizer, computed in full on every rank
        if getattr(self.loss, "embedding_regularizer", None) is None:
            return graph
        regularizer = element_losses.embedding_term(self.loss, self._rows_with_grad())
        element_losses.record_sub_loss(self.loss, "embedding_reg_loss", partial_sums.ONE_ELEMENT)
        return partial_sums.value_with_grad(value + regularizer.detach(), graph + regularizer)

    def _rows_with_grad(self) -> Tensor:
        """Return the rows of all ranks, attached to the graph of this rank's rows (with symmetric tiles, gathered rows have no graph)."""
        everywhere, local = self.call.arguments["embeddings"], self.call.given["embeddings"]
        if self.symmetric:
            place = (0, self.call.bound[0], local.shape[0])
            (everywhere,) = own_slices_with_grad([everywhere.detach()], [local], [place], group=self.exchange.group)
        return everywhere  # type: ignore[no-any-return]

    @cached_property
    def symmetric(self) -> bool:
        """Whether rows of one batch are compared without index tuples, so that gathered rows receive no gradient. Equal on all ranks."""
        call, given = self.call, self.call.arguments
        is_one_batch = call.references is given["embeddings"] and call.ref_labels is given["labels"]
        return self.plan.symmetric and is_one_batch and "indices_tuple" not in given

    @cached_property
    def records(self) -> bool:
        """Whether reducers record how many elements they average."""
        return collects_counts(self.loss)

    @cached_property
    def on_device(self) -> bool:
        """Whether exchanged numbers stay on the device, so that the host does not synchronize with it."""
        return not self.records and travels_on_device(self.call.given["embeddings"], self.exchange.group)

    def _payload_capacity(self) -> int:
        """Return a size in bytes that is sufficient for any rank's payload, equal on all ranks."""
        totals = partial_sums.SUM_BYTES * len(self.plan.pair_loss.sub_losses)
        if not self.symmetric or self.on_device:  # statistics are not needed, or are sent separately from the handshake
            return totals
        item: int = self.call.given["embeddings"].element_size()
        return totals + max(self.call.counts["embeddings"]) * _MOST_STATS * item

    @torch.no_grad()
    def _rehearse(self, compiler: TileCompiler) -> None:
        """Compile the functions of forward and backward that have not been compiled yet. Collective."""
        call = self.call
        if not self._may_be_whole():
            return
        rows, labels = call.given["embeddings"], call.local_labels
        assert labels is not None
        is_one_batch = call.ref_labels is call.arguments["labels"]
        kind = (str(rows.dtype), rows.device.type, str(labels.dtype), self.symmetric, is_one_batch)

        def rehearsal(run: Callable[..., Any]) -> None:
            # a tile for which the functions take the same branches
            like = rehearsed_tile(rows)
            (height, columns), pair_loss = like.shape, self.new_pair_loss(like, run)
            column_labels = (torch.arange(columns, device=rows.device) % 2).to(labels.dtype)
            first, part = 0 if is_one_batch else None, slice(0, height)
            keys = WholePairs(column_labels[part], column_labels, first, like, compiled=True)
            tile = Tile(like, part, keys.masks(part, overwrites=False))
            numbers, _ = pair_loss.rows(tile, with_grads=pair_loss.grad_in_forward)
            pair_loss.finalize(numbers, torch.zeros_like(column_labels[part]))
            stats, column_stats = like.new_ones(height, pair_loss.width), None
            if self.symmetric:
                column_stats = like.new_ones(columns, pair_loss.width)
            pair_loss.prepare_backward(stats, column_stats, [like.new_ones(())] * len(pair_loss.sub_losses))
            pair_loss.grad(tile)

        compiler.rehearse(self.exchange.title, kind, rehearsal, self.exchange.group)

    def _forward(self) -> TiledForward:
        """Evaluate the tiles."""
        like = self.call.given["embeddings"].detach()
        if self.plan.is_product:
            warn_of_tf32(f"GlobalBatchLoss({type(self.loss).__name__})", self.products, like)
        if self._is_whole():
            pairs: Pairs = WholePairs(*self._labels(), like, compiled=self.compiler is not None)
            pair_loss = self.new_pair_loss(like, self.compiler)
        else:
            pairs, pair_loss = self._known_pairs(like), self.new_pair_loss(like, None)
        tiles = CallTiles(
            self.call,
            self.loss.distance,
            self.products,
            pairs,
            pair_loss.scale,
            symmetric=self.symmetric,
            tile_bytes=self.tile_bytes,
        )
        return TiledForward(self, tiles, pair_loss)

    def new_pair_loss(self, like: Tensor, run: Callable[..., Any] | None) -> PairLoss:
        """Return the loss on tiles with dtype and device of ``like``. It calls the tile functions through ``run``."""
        plan = self.plan
        return plan.pair_loss(self.loss, plan.reductions, like, run, records=self.records)

    def _may_be_whole(self) -> bool:
        """Return whether the call can be evaluated without reading the pairs on the host. Equal on all ranks."""
        call = self.call
        if self.records or "indices_tuple" in call.arguments:  # both need numbers on the host
            return False
        if not self.plan.supports_whole:
            return False
        # for a batch of about two rows PML may return zero, depending on the labels
        return call.total_rows * call.total_references > _FEWEST_PAIRS

    def _is_whole(self) -> bool:
        """Return whether pairs are ``WholePairs``: if waiting for bands would take longer, or if functions are compiled."""
        if self.compiler is None and not self.on_device:
            return False
        rows = self.call.given["embeddings"]
        if not len(rows) or not self._may_be_whole():
            return False
        if self.compiler is not None:
            return True
        matrix_bytes: int = len(rows) * self.call.total_references * rows.element_size()
        return matrix_bytes <= MASKED_BYTES

    def _takes_halves(self) -> bool:
        """Return whether tiles cover half of the pairs of this rank's rows: on the CPU, if there is more than one tile.

        On an accelerator each tile costs kernel launches, and a symmetric tile costs more of them.
        """
        rows, width = self.call.given["embeddings"], self.call.total_references
        if not (self.symmetric and rows.is_cpu and len(rows)):
            return False
        if self.tile_bytes is None and len(rows) <= 2 * HALF_TILE_ROWS:  # tiles would mostly be squares on the diagonal
            return False
        row_bytes = tile_distance(self.loss.distance, width, self.products).row_bytes(width, rows)
        return len(rows) > rows_of_a_tile(row_bytes, width, rows.device, self.tile_bytes)

    def _known_pairs(self, like: Tensor) -> Pairs:
        """Return the pairs of this rank's rows and all columns: a miner's pairs if there are any, otherwise pairs from labels."""
        call = self.call
        labels, reference_labels, first = self._labels()
        if self._takes_halves():
            return OwnFirstPairs(labels, reference_labels, call.bound[0])
        if "indices_tuple" not in call.arguments:
            kind = torch.promote_types(labels.dtype, reference_labels.dtype)
            return SortedPairs(labels.to(kind), reference_labels.to(kind), first, call.arguments["labels"].to(kind))
        tuples = call.local_tuples()
        if len(tuples) == 3 and self.plan.compares_triplets:
            return NamedTriplets(tuples, len(labels))
        once = self.plan.pair_loss.counts_pairs_once
        pairs = NamedPairs(tuples, len(labels), call.total_references, like.dtype, once=once)
        if pairs.contradict:
            raise InputError(
                f"{type(self.loss).__name__}: indices_tuple",
                expected="each pair to be either positive or negative",
                got="a pair that is both",
                fix="Remove it from the positive or from the negative indices.",
            )
        return pairs

    def _labels(self) -> tuple[Tensor, Tensor, int | None]:
        """Return the labels of this rank's rows, the labels of the columns, and the column of the first row if rows are also columns."""
        call = self.call
        labels, reference_labels = call.local_labels, call.ref_labels
        assert labels is not None
        assert reference_labels is not None
        return labels, reference_labels, call.bound[0] if reference_labels is call.arguments["labels"] else None


class TiledForward:
    """The evaluated tiles of a call: sums and statistics of this rank, and the loss with its gradient.

    Args:
        tiled: The call.
        tiles: Its tiles.
        pair_loss: The loss on them.

    Attributes:
        row_stats: (B, k), statistics of this rank's rows.
    """

    def __init__(self, tiled: TiledCall, tiles: CallTiles, pair_loss: PairLoss) -> None:
        self._tiled, self._tiles, self._pair_loss = tiled, tiles, pair_loss
        # the host reads neither the pairs nor the exchanged numbers
        self._is_blind = isinstance(tiles.pairs, WholePairs) and tiled.on_device
        self._kept_tile: Tile | None = None
        # gradients of rows and columns for each sub-loss, if forward already computes them
        self._grad_sums: list[GradSums] = []
        wants_grad = tiles.embeddings.requires_grad or tiles.references is not None
        self._totals, self.row_stats = self._accumulate_tiles(backward_comes=wants_grad and torch.is_grad_enabled())

    @torch.no_grad()
    def _accumulate_tiles(self, *, backward_comes: bool) -> tuple[list[PartialSum], Tensor]:
        """Compute the numbers of all rows, and return the sub-losses' totals and (B, k) statistics in the order of the rows."""
        tiles, pair_loss, call = self._tiles, self._pair_loss, self._tiled.call
        # (otherwise each sub-loss would store a gradient of all columns until backward)
        has_one_gradient = self._tiled.symmetric or not pair_loss.symmetric
        with_grads = pair_loss.grad_in_forward and has_one_gradient and backward_comes
        if with_grads:
            self._grad_sums = [tiles.zeros() for _ in pair_loss.sub_losses]
        # a batch that fits into one tile is not computed twice
        keeps = backward_comes and not with_grads and len(tiles.places) == 1
        if isinstance(tiles.pairs, OwnFirstPairs):
            if backward_comes and not with_grads and self._tiled.tile_bytes is None:
                tiles.keep(call_tiles.KEPT_BYTES)
            if isinstance(pair_loss, SoftmaxPairLoss):
                numbers = self._numbers_of_halves(tiles.pairs, pair_loss)
            else:
                assert isinstance(pair_loss, Contrastive)
                numbers = self._numbers_inside_margins(tiles.pairs, pair_loss, with_grads=with_grads)
        else:
            numbers = self._numbers_of_rows(keeps=keeps, with_grads=with_grads)
        labels = call.local_labels
        if labels is not None:
            labels = in_order(labels, tiles.pairs.row_order)
        totals, stats = pair_loss.finalize(numbers, labels)
        return totals, undo_order(stats, tiles.pairs.row_order)

    def _numbers_of_rows(self, *, keeps: bool, with_grads: bool) -> tuple[Tensor, ...]:
        """Return the numbers of all rows, each of which is in one tile. If ``keeps``, the tile is stored for backward."""
        tiles, pair_loss = self._tiles, self._pair_loss
        results: list[TileResults] = []
        for place in tiles:
            tile = tiles.tile(place, keep=keeps)
            numbers, grads = pair_loss.rows(tile, with_grads=with_grads)
            results = results or [TileResults(len(tiles.rows.rows), each) for each in numbers]
            for stored, each in zip(results, numbers, strict=True):
                stored.store_(each, place.rows.start)
            self._add_grads(tile, grads)
            if keeps:
                self._kept_tile = tile
        return tuple(stored.joined() for stored in results) or pair_loss.nothing(len(tiles.rows.rows))

    def _numbers_of_halves(self, pairs: OwnFirstPairs, pair_loss: SoftmaxPairLoss) -> tuple[Tensor, ...]:
        """Return the numbers of all rows, from tiles that cover half of the matrix."""
        tiles = self._tiles
        half = HalfNumbers(pair_loss, pairs, len(tiles.rows.rows))
        for place in tiles:
            half.add(place, tiles.matrix(place))
        for place in tiles:
            band = half.positives_in(place)
            if band is None:
                continue
            kept, first = tiles.kept(place), place.columns.start
            if kept is None:
                half.add_positives(band, tiles.matrix(band))
            else:
                half.add_positives(band, kept[:, band.columns.start - first : band.columns.stop - first])
        return half.numbers

    def _numbers_inside_margins(
        self, pairs: OwnFirstPairs, pair_loss: Contrastive, *, with_grads: bool
    ) -> tuple[Tensor, ...]:
        """Return the numbers of all rows in the same way for a loss with margins, and add its gradients."""
        tiles = self._tiles
        half = HalfMargins(pair_loss, pairs, tiles.distance, len(tiles.rows.rows), with_grads=with_grads)
        for place in tiles:
            for kind, tile, grad, mirrored in half.add(place, tiles.matrix(place, finished=not with_grads)):
                tiles.add_vjp_(tile, grad, self._grad_sums[kind], mirrored)
        return half.numbers

    def _add_grads(self, tile: Tile, grads: Sequence[Tensor]) -> None:
        """Add the gradients of rows and columns for each sub-loss, if forward computes them."""
        for sums, grad in zip(self._grad_sums, grads, strict=True):
            # on an accelerator, an additional product is cheaper than waiting for the values
            if grad.device.type != "cpu" or any(map(bool, grad.aminmax())):
                self._tiles.add_vjp_(tile, grad, sums)

    # the exchanged statistics

    def local_sums(self) -> list[PartialSum]:
        """Return this rank's share of each sub-loss, without a graph."""
        names, embeddings = self._pair_loss.sub_losses, self._tiles.embeddings.detach()
        if not self._is_blind and self._is_zero_loss():
            return [
                PartialSum(element_losses.no_loss(embeddings), partial_sums.host_number(0.0), name=name)
                for name in names
            ]
        found = []
        for name, each in zip(names, self._totals, strict=True):
            total = each.total
            # comparisons with NaN are false, so a NaN would be lost if no entry is counted
            if not self._is_blind and each.may_count_nothing:
                total = total + element_losses.no_loss(embeddings)
            found.append(replace(each, total=total, name=name))
        return found

    def _is_zero_loss(self) -> bool:
        """Return whether PML returns zero early because there are too few pairs. Equal on all ranks."""
        tiled, call, pairs = self._tiled, self._tiled.call, self._tiles.pairs
        if tiled.plan.compares_triplets:
            return False  # if there are no triplets, all totals are 0 anyway
        tuples = call.arguments.get("indices_tuple")
        if tuples is not None:
            positive, negative = len(tuples[1]), len(tuples[-1])
        elif isinstance(pairs, SortedPairs | OwnFirstPairs):
            rows, columns = call.total_rows, call.total_references
            itself = rows * (call.ref_labels is call.arguments["labels"])
            positive, negative = pairs.matching - itself, rows * columns - pairs.matching
        else:
            positive, negative = call.global_pair_counts()
        lacks_a_kind = self._pair_loss.needs_both_kinds and not (positive and negative)
        return lacks_a_kind or max(positive, negative) <= 1

    def is_no_zero(self) -> Tensor | None:
        """Return 0 if PML returns zero early because there are no negatives, else 1, or None if ``local_sums`` determines it on the host.

        If there are no positives, the loss is 0 anyway.
        """
        if not (self._is_blind and self._pair_loss.needs_both_kinds):
            return None
        labels, reference_labels = self._tiled.call.arguments["labels"], self._tiled.call.ref_labels
        assert reference_labels is not None
        differ: Tensor = reference_labels != labels[0]
        if reference_labels is not labels:
            differ = torch.cat([differ, labels != labels[0]])
        return differ.any()

    # the loss and its gradient

    def value(self, sums: GlobalSums, all_stats: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the loss with its graph, and its value.

        Args:
            sums: The sub-losses of all ranks.
            all_stats: (G, k), statistics of all ranks' rows, if ``symmetric``.
        """
        value, factors = sums.reduce()
        column_stats = None if all_stats is None else in_order(all_stats, self._tiles.pairs.column_order)
        vjp = partial(self._gradients, column_stats, factors)
        return partial_sums.value_with_grad(value, *self._tiles.with_graph(), vjp=vjp), value

    @torch.no_grad()
    def _gradients(
        self, column_stats: Tensor | None, factors: Sequence[Tensor], wanted: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of the tensors with a graph.

        Args:
            column_stats: (G, k) in the order of the columns. If None, only the gradient of this rank's share is computed.
            factors: One per sub-loss.
            wanted: True for each tensor whose gradient is required.
        """
        sums = self._tiles.zeros(columns=wanted[-1])
        if self._grad_sums:
            self._weigh_sums_(factors, sums)
        else:
            self._add_tiles_(column_stats, factors, sums)
        return self._tiles.vjp(*sums, wanted)

    def _weigh_sums_(self, factors: Sequence[Tensor], totals: GradSums) -> None:
        """Add the gradients of the sub-losses, which forward has computed except for their factors."""
        # transposed entries have the same gradient
        times = 2.0 if self._tiled.symmetric else 1.0
        for found, factor, sign in zip(self._grad_sums, factors, self._pair_loss.grad_signs, strict=True):
            for total, sums in zip(totals, found, strict=True):
                if total is not None and sums is not None:
                    total.addcmul_(sums, factor.to(sums.dtype), value=times * sign)

    def _add_tiles_(self, column_stats: Tensor | None, factors: Sequence[Tensor], totals: GradSums) -> None:
        """Add the gradients of all tiles. Arguments as for ``_gradients``."""
        tiles, pair_loss, row_stats = self._tiles, self._pair_loss, self.row_stats
        if column_stats is not row_stats:
            row_stats = in_order(row_stats, tiles.pairs.row_order)
        pair_loss.prepare_backward(row_stats, column_stats, factors)
        for place in tiles:
            # recompute the distances, unless forward has stored its only tile
            tile, self._kept_tile = self._kept_tile, None
            if tile is None:
                tile = tiles.tile(place, keep=False)
            # gradient of the distances, then of the embeddings
            tiles.add_vjp_(tile, pair_loss.grad(tile), totals, place.mirrored)
        # the gradient may have overwritten them
        tiles.release()
        if pair_loss.factor is not None:
            for sums in totals:
                if sums is not None:
                    sums.mul_(pair_loss.factor)
