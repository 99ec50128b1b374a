"""The four ways to evaluate a loss over the global batch, each an object with ``run(call)``; ``global_batch`` chooses one per call.

| evaluation | this rank computes | ranks exchange |
|---|---|---|
| ``Elements`` | the element losses of its own rows | their sums and divisors |
| ``Rows`` | PML's formula on its own anchors against all rows (``row_chunks``) | their sums and divisors |
| ``Tiled`` | the same in tiles of our own (``tiled``) | sums, divisors and, where symmetric, one statistic per row |
| ``Replicated`` | the full loss on all rows | nothing more |

All give the same value and gradient. What ranks exchange opens with a handshake, so that ranks that disagree get the same error.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_ddp_losses.core import autograd_graph
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import own_slices_with_grad
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.distributed.raw_collectives import (
    all_gather_rows,
    gather_stacked,
    travels_on_device,
)
from lightning_ddp_losses.losses.gathered_call import PMLCall, TensorCall, same_draws
from lightning_ddp_losses.losses.partial_sums import (
    ONE_ELEMENT,
    DeviceStats,
    GlobalStats,
    PartialSum,
    element_losses,
    exchange_partials,
    global_loss,
    number_of,
    partial_sums_of,
    scale_factors,
    value_with_grad,
)
from lightning_ddp_losses.losses.pml_registry import facts_of, is_pml_loss
from lightning_ddp_losses.losses.products import ProductForm
from lightning_ddp_losses.losses.recorded_stats import collects_counts, record_counts, record_norms, record_sub_loss
from lightning_ddp_losses.losses.row_chunks import RowChunks, chunks_of
from lightning_ddp_losses.losses.tiled import TileCompiler, TiledEvaluator, TiledPlan
from lightning_ddp_losses.losses.torch_losses import torch_partial_sum


@dataclass(frozen=True)
class StatsExchange:
    """How the ranks exchange what they computed in one call.

    Attributes:
        title: How messages name the loss.
        must_match: For a tensor of the call, what must be equal on all ranks.
        group: Process group.
    """

    title: str
    must_match: Callable[[Tensor], dict[str, object]]
    group: Group

    @property
    def world(self) -> int:
        """Number of ranks."""
        return process_groups.world_size(self.group)

    def all_gather(self, like: Tensor, payload: bytes, handshake_bytes: int | None = None) -> list[bytes]:
        """Return all ranks' payloads."""
        must_match = self.must_match(like)
        return handshake.all_gather(self.title, must_match, payload, handshake_bytes=handshake_bytes, group=self.group)

    def stays_on_device(self, loss: Any, like: Tensor) -> bool:
        """Say whether numbers travel without the host: the same on all ranks."""
        return not collects_counts(loss) and travels_on_device(like, self.group)

    def reduce_partials(self, loss: Any, partials: list[PartialSum], like: Tensor) -> GlobalStats:
        """Return all ranks' numbers of the sub-losses, and record them on the loss as PML does."""
        stats_by_rank = exchange_partials(
            partials, like, partial(self.all_gather, like), group=self.group, on_host=collects_counts(loss)
        )
        record_counts(loss, [partial.name for partial in partials], stats_by_rank)
        return stats_by_rank


@dataclass(frozen=True)
class LocalCall:
    """A call's arguments on this rank; nothing is gathered.

    Attributes:
        args: By position; none for PML's losses, whose arguments all have names.
        kwargs: By name.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Elements:
    """A loss that is a sum over samples: each rank its own rows."""

    loss: Any
    exchange: StatsExchange

    def run(self, call: LocalCall) -> Tensor:
        """Return the global loss, from this rank's rows alone."""
        # sums and divisors of this rank's elements
        if is_pml_loss(self.loss):
            rows, empty = call.kwargs["embeddings"], 0.0
            partials = self._pml_partials(rows, call.kwargs.get("labels"))
        else:
            rows = next(value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor))
            empty = math.nan  # torch's mean over nothing
            partials = [torch_partial_sum(self.loss, call.args, call.kwargs, self.exchange.world)]
        # those of all ranks, and what they make of this rank's
        stats_by_rank = self.exchange.reduce_partials(self.loss, partials, rows)
        value = global_loss(partials, stats_by_rank, empty=empty, window_source=(self.loss, self.exchange.title))
        # a rank without rows may come with a plain ``torch.zeros(0, D)``, and takes part in backward all the same
        return autograd_graph.match_requires_grad(value, wanted=rows.shape[0] == 0)

    def _pml_partials(self, embeddings: Tensor, labels: Tensor | None) -> list[PartialSum]:
        # without rows, the terms that do not depend on them still count, once
        losses = {}
        if embeddings.shape[0] or labels is not None:
            losses = element_losses(self.loss, embeddings, labels)
        return partial_sums_of(self.loss.reducer, losses, embeddings, labels, self.exchange.world)


@dataclass(frozen=True)
class Rows:
    """A loss that is a sum over anchors, by PML's formula: each rank its own anchors.

    Attributes:
        loss: PML's.
        exchange: How ranks exchange.
        chunk_bytes: The most that a chunk of anchors may take, roughly; None: a default.
    """

    loss: Any
    exchange: StatsExchange
    chunk_bytes: int | None = None

    def run(self, call: PMLCall) -> Tensor:
        """Return the global loss."""
        rows = call.given["embeddings"]
        # sums and divisors of this rank's anchors
        chunks = RowChunks(self.loss, call, chunks_of(self.loss, call, self.chunk_bytes), self.exchange.world)
        partials = chunks.partial_sums()
        record_norms(getattr(self.loss, "distance", None), call.arguments["embeddings"], call.references)
        # the embedding regulariser, which every rank computes in full
        regularizer = None
        if _regularizes_embeddings(self.loss):
            regularizer = _embedding_term(self.loss, call.arguments["embeddings"])
            full = PartialSum(regularizer, 1.0, full=True, name="embedding_reg_loss", counts=ONE_ELEMENT)
            partials = [*partials, full]
        # sums and divisors of all ranks
        stats_by_rank = self.exchange.reduce_partials(self.loss, partials, rows)
        if not chunks.recomputes:
            return global_loss(partials, stats_by_rank)
        # the number now, the gradient chunk by chunk in backward
        value, factors = scale_factors(stats_by_rank)
        if regularizer is None:
            return chunks.value(factors, value)
        return value_with_grad(value, chunks.value(factors[:-1], value) + regularizer)


@dataclass(frozen=True)
class Tiled:
    """A loss that is a sum over anchors, in tiles of our own: each rank its own anchors.

    Attributes:
        loss: PML's.
        exchange: How ranks exchange.
        plan: Its tiled evaluation.
        symmetric: Whether ``plan.is_symmetric``; the gathered rows then get no gradient.
        tile_bytes: The most that a tile may take; None: a default.
        compiler: Compiles what is elementwise in a tile; None: nothing is compiled.
        products: How rows are multiplied.
    """

    loss: Any
    exchange: StatsExchange
    plan: TiledPlan
    symmetric: bool
    tile_bytes: int | None = None
    compiler: TileCompiler | None = None
    products: ProductForm = "float32"

    def run(self, call: PMLCall) -> Tensor:
        """Return the global loss."""
        exchange, rows = self.exchange, call.given["embeddings"]
        on_device = exchange.stays_on_device(self.loss, rows)
        tiled = TiledEvaluator(
            self.loss,
            self.plan,
            call,
            symmetric=self.symmetric,
            world=exchange.world,
            tile_bytes=self.tile_bytes,
            on_device=on_device,
            compiler=self.compiler,
            products=self.products,
        )
        tiled.rehearse(exchange.title, exchange.group)
        # this rank's sums, divisors and statistics; peers wait for as many bytes if it fails
        handshake_bytes = handshake.HANDSHAKE_BYTES + tiled.payload_capacity()
        try:
            tiled.forward()
            payload = b"" if on_device else tiled.pack()
        except Exception as error:
            handshake.raise_on_all_ranks(error, exchange.title, handshake_bytes=handshake_bytes, group=exchange.group)
        # those of all ranks: the number now, the gradient tile by tile in backward
        payloads = exchange.all_gather(rows, payload, handshake_bytes)
        table: GlobalStats
        if on_device:
            table, column_stats = self._gather_on_device(tiled, call)
        else:
            table, column_stats = tiled.unpack(payloads)
        graph, value = tiled.value(table, column_stats)
        record_counts(self.loss, self.plan.pair_loss.sub_losses, table)
        record_norms(self.loss.distance, call.arguments["embeddings"], call.references)
        # the embedding regulariser, which every rank computes in full
        if not _regularizes_embeddings(self.loss):
            return graph
        regularizer = _embedding_term(self.loss, self._rows_with_grad(call))
        record_sub_loss(self.loss, "embedding_reg_loss", ONE_ELEMENT)
        return value_with_grad(value + number_of(regularizer.detach()), graph + regularizer)

    def _gather_on_device(self, tiled: TiledEvaluator, call: PMLCall) -> tuple[DeviceStats, Tensor | None]:
        """Return sums and statistics of all ranks. Communication: two gathers, one where no statistics are needed."""
        table, row_stats = tiled.device_stats()
        names = self.plan.pair_loss.sub_losses
        stats = DeviceStats(gather_stacked(table, self.exchange.group), tuple(False for _ in names))
        if not self.symmetric:
            return stats, None
        if self.exchange.world > 1:
            row_stats = all_gather_rows(row_stats, call.counts["embeddings"], self.exchange.group)
        return stats, tiled.in_column_order(row_stats)

    def _rows_with_grad(self, call: PMLCall) -> Tensor:
        """Return all ranks' rows in the graph of this rank's; symmetric tiles leave the gathered ones without."""
        everywhere: Tensor = call.arguments["embeddings"]
        if not self.symmetric:
            return everywhere
        local = call.given["embeddings"]
        place = (0, call.bound[0], local.shape[0])
        (everywhere,) = own_slices_with_grad([everywhere.detach()], [local], [place], group=self.exchange.group)
        return everywhere


@dataclass(frozen=True)
class Replicated:
    """Any loss that is deterministic given its inputs: every rank computes the full loss."""

    loss: nn.Module

    def run(self, call: PMLCall | TensorCall) -> Any:
        """Return the loss itself, on the rows of all ranks; random numbers are rank 0's on every rank."""
        with (
            autograd_graph.inside_global_batch(),
            same_draws(self.loss, call.seed, call.batches),
            _copied_distances(self.loss),
        ):
            return self.loss(*call.args, **call.kwargs)


@contextlib.contextmanager
def _copied_distances(loss: nn.Module) -> Iterator[None]:
    """Give a loss that writes into its distances a copy to write into, so that backward finds what it needs."""
    if not facts_of(loss).writes_distances:
        yield
        return
    distance: Any = loss.distance
    handle = distance.register_forward_hook(lambda module, args, distances: distances.clone())
    try:
        yield
    finally:
        handle.remove()


def _regularizes_embeddings(loss: Any) -> bool:
    return getattr(loss, "embedding_regularizer", None) is not None


def _embedding_term(loss: Any, embeddings: Tensor) -> Tensor:
    return loss.embedding_regularization_loss(embeddings)["losses"]  # type: ignore[no-any-return]
