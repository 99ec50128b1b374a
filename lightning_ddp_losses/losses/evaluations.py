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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_ddp_losses.core import autograd_graph
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.collectives import own_slices_with_grad
from lightning_ddp_losses.losses.element_losses import (
    collects_counts,
    element_losses,
    partial_sums_of,
    record_norms,
    record_sub_loss,
    torch_partial_sum,
)
from lightning_ddp_losses.losses.gathered_call import PMLCall, TensorCall, same_draws
from lightning_ddp_losses.losses.partial_sums import (
    ONE_ELEMENT,
    GlobalSums,
    PartialSum,
    SumExchange,
    global_loss,
    value_with_grad,
)
from lightning_ddp_losses.losses.pml_registry import facts_of, is_pml_loss
from lightning_ddp_losses.losses.row_chunks import RowChunks, chunks_of
from lightning_ddp_losses.losses.tiled import TiledCall


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
    exchange: SumExchange

    def run(self, call: LocalCall) -> Tensor:
        """Return the global loss, from this rank's rows alone."""
        # sums and divisors of this rank's elements
        if is_pml_loss(self.loss):
            rows, empty = call.kwargs["embeddings"], 0.0
            partials = self._pml_partials(rows, call.kwargs.get("labels"))
        else:
            rows = next(value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Tensor))
            empty = math.nan  # torch's mean over nothing
            partials = [torch_partial_sum(self.loss, call.args, call.kwargs)]
        # the global loss, from those of all ranks
        sums = _gather_sums(self.loss, self.exchange, partials, rows)
        value = global_loss(sums, empty=empty, window_source=(self.loss, self.exchange.title))
        # a rank without rows may come with a plain ``torch.zeros(0, D)``, and takes part in backward all the same
        return autograd_graph.match_requires_grad(value, wanted=rows.shape[0] == 0)

    def _pml_partials(self, embeddings: Tensor, labels: Tensor | None) -> list[PartialSum]:
        # without rows, the terms that do not depend on them still count, once
        losses = {}
        if embeddings.shape[0] or labels is not None:
            losses = element_losses(self.loss, embeddings, labels)
        return partial_sums_of(self.loss.reducer, losses, embeddings, labels)


@dataclass(frozen=True)
class Rows:
    """A loss that is a sum over anchors, by PML's formula: each rank its own anchors.

    Attributes:
        loss: PML's.
        exchange: How ranks exchange.
        chunk_bytes: The most that a chunk of anchors may take, roughly; None: a default.
    """

    loss: Any
    exchange: SumExchange
    chunk_bytes: int | None = None

    def run(self, call: PMLCall) -> Tensor:
        """Return the global loss."""
        rows = call.given["embeddings"]
        # sums and divisors of this rank's anchors
        chunks = RowChunks(self.loss, call, chunks_of(self.loss, call, self.chunk_bytes))
        partials = chunks.partial_sums()
        record_norms(getattr(self.loss, "distance", None), call.arguments["embeddings"], call.references)
        # the embedding regulariser, which every rank computes in full
        regularizer = None
        if _regularizes_embeddings(self.loss):
            regularizer = _embedding_term(self.loss, call.arguments["embeddings"])
            full = PartialSum(regularizer, full=True, name="embedding_reg_loss", counts=ONE_ELEMENT)
            partials = [*partials, full]
        # sums and divisors of all ranks
        sums = _gather_sums(self.loss, self.exchange, partials, rows)
        if not chunks.recomputes:
            return global_loss(sums)
        # the number now, the gradient chunk by chunk in backward
        value, factors = sums.reduce()
        if regularizer is None:
            return chunks.value(factors, value)
        return value_with_grad(value, chunks.value(factors[:-1], value) + regularizer)


@dataclass(frozen=True)
class Tiled:
    """A loss that is a sum over anchors, in tiles of our own: each rank its own anchors.

    Attributes:
        tiled: The call and its options.
        exchange: How ranks exchange.
    """

    tiled: TiledCall
    exchange: SumExchange

    def run(self, call: PMLCall) -> Tensor:
        """Return the global loss."""
        tiled, exchange, loss, rows = self.tiled, self.exchange, self.tiled.loss, call.given["embeddings"]
        tiled.rehearse(exchange.title)
        # this rank's sums, divisors and statistics; peers wait for as many bytes if it fails
        handshake_bytes = handshake.HANDSHAKE_BYTES + tiled.payload_capacity()
        try:
            forward = tiled.forward()
            partials, present = forward.partial_sums(), forward.is_no_zero()
        except Exception as error:
            handshake.raise_on_all_ranks(error, exchange.title, handshake_bytes=handshake_bytes, group=exchange.group)
        # those of all ranks: the number now, the gradient tile by tile in backward
        sums, row_stats = exchange.gather(
            partials,
            rows,
            with_counts=tiled.records,
            present=present,
            row_stats=forward.row_stats if tiled.symmetric else None,
            rows_by_rank=call.counts["embeddings"],
            handshake_bytes=handshake_bytes,
        )
        graph, value = forward.value(sums, row_stats)
        if tiled.records:
            _record_counts(loss, sums)
        record_norms(loss.distance, call.arguments["embeddings"], call.references)
        # the embedding regulariser, which every rank computes in full
        if not _regularizes_embeddings(loss):
            return graph
        regularizer = _embedding_term(loss, self._rows_with_grad(call))
        record_sub_loss(loss, "embedding_reg_loss", ONE_ELEMENT)
        return value_with_grad(value + regularizer.detach(), graph + regularizer)

    def _rows_with_grad(self, call: PMLCall) -> Tensor:
        """Return all ranks' rows in the graph of this rank's; symmetric tiles leave the gathered ones without."""
        everywhere: Tensor = call.arguments["embeddings"]
        if not self.tiled.symmetric:
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


def _gather_sums(loss: Any, exchange: SumExchange, partials: list[PartialSum], like: Tensor) -> GlobalSums:
    """Return the sums of all ranks, and record their counts on a loss that collects statistics."""
    with_counts = collects_counts(loss)
    sums, _ = exchange.gather(partials, like, with_counts=with_counts)
    if with_counts:
        _record_counts(loss, sums)
    return sums


def _record_counts(loss: Any, sums: GlobalSums) -> None:
    for each, counts in zip(sums.partials, sums.counts(), strict=True):
        record_sub_loss(loss, each.name, counts)


def _regularizes_embeddings(loss: Any) -> bool:
    return getattr(loss, "embedding_regularizer", None) is not None


def _embedding_term(loss: Any, embeddings: Tensor) -> Tensor:
    return loss.embedding_regularization_loss(embeddings)["losses"]  # type: ignore[no-any-return]
