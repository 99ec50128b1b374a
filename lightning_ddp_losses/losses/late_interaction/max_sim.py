"""`MaxSimLoss`: rank each query's document above the documents of all ranks, where texts are sets of vectors (late interaction).

The score of a query and a document is a sum over the query's vectors of the product with the closest vector of the document. Only unmasked
vectors are sent, and scores are computed in tiles of documents that backward recomputes, so no rank holds the products of all vectors.

Legend: ``B`` rows on this rank (may differ, may be 0), ``G`` their sum, ``T`` vectors of a text, ``D`` their size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_ddp_losses.core import inputs, precision
from lightning_ddp_losses.core.modules import eager_recursive
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import once_differentiable_strict
from lightning_ddp_losses.distributed.gathered_batch import gather_batch
from lightning_ddp_losses.distributed.global_values import name_value, outside_window
from lightning_ddp_losses.distributed.process_groups import Group, WithProcessGroup
from lightning_ddp_losses.errors import InputError, expect
from lightning_ddp_losses.losses.late_interaction.ragged import Mask, RaggedRows, checked_mask, pad
from lightning_ddp_losses.losses.partial_sums import global_mean

Score = Callable[..., Tensor]
"""``score(queries, documents, queries_mask=..., documents_mask=...)``: (B, T, D) and (g, n, t, D) -> (B, g * n)."""

TILE_ELEMENTS = 2**21  # maximum number of products of vectors in one tile


def max_sim(queries: Tensor, documents: Tensor, *, queries_mask: Tensor, documents_mask: Tensor) -> Tensor:
    """Return scores of documents for queries: the sum over a query's vectors of the largest product with a vector of the document.

    Args:
        queries: (B, T, D).
        documents: (g, n, t, D).
        queries_mask: (B, T) bool, True for valid vectors.
        documents_mask: (g, n, t) bool, with at least one valid vector in each document.

    Returns:
        (B, g * n).
    """
    documents, documents_mask = documents.flatten(0, 1), documents_mask.flatten(0, 1)
    products = torch.einsum("btd,nud->bntu", queries, documents)
    products = products.masked_fill(~documents_mask.unsqueeze(1), -torch.inf)
    closest = products.amax(3)
    return closest.masked_fill(~queries_mask.unsqueeze(1), 0.0).sum(2)


class MaxSimLoss(WithProcessGroup, nn.Module):
    """Rank the document of each query above the documents of all ranks, by late interaction (ColBERT).

    Equivalent to: ``cross_entropy(scale * scores, arange(G))`` in one process, with ``scores[i, j] = sum_t max_u q[i, t] @ d[j, u]`` over
    the unmasked vectors. Further negatives are further columns of ``scores``.

    Args:
        scale: Factor of the scores, above 0.
        similarity: A different score, which is called with all documents together. It may be a score from sentence-transformers:
            ``similarity(queries, documents, queries_mask=..., documents_mask=...)`` with (B, T, D), (G, n, t, D) and their masks ->
            (B, G * n), where each query's row is independent of other queries. If None, the sum of the largest products, in tiles.
        name: Name in messages, equal on all ranks.
        group: Process group. None is the world.

    Returns:
        From ``forward``: the global loss, 0-dim, equal on every rank.

    Gradient: after DDP's mean over ranks, the one-process gradient, for any numbers of rows and vectors per rank.

    Communication:
        In forward two handshakes, and one gather of the documents' unmasked vectors. The host waits for an accelerator. In backward one
        exchange of their gradients.

    Raises:
        ConfigurationError: for a ``scale`` that is not above 0.
        InputError: on every rank, for invalid shapes or masks, lengths above the number of vectors, a document without vectors, and
            different numbers of documents and queries on a rank.
        RankMismatchError: on every rank, if columns, sizes, dtypes or options differ between ranks.

    Source: Khattab and Zaharia 2020, arXiv:2004.12832, equation 3.

    Example:
        >>> import torch
        >>> loss = MaxSimLoss(scale=20.0)
        >>> queries, documents = (torch.nn.functional.normalize(torch.randn(4, t, 8), dim=-1) for t in (5, 12))
        >>> value = loss(queries, documents, documents_mask=torch.tensor([12, 7, 3, 9]))
    """

    sees_global_batch = True

    def __init__(
        self, scale: float = 1.0, *, similarity: Score | None = None, name: str | None = None, group: Group = None
    ) -> None:
        super().__init__()
        expect(scale > 0, "MaxSimLoss: scale", expected="above 0", got=scale)
        self.scale, self.similarity = scale, similarity
        self.set_group(group, type(self).__name__, name)

    def extra_repr(self) -> str:
        """Return the options."""
        return f"scale={self.scale}"

    @eager_recursive
    def forward(
        self,
        queries: Tensor,
        documents: Tensor | Sequence[Tensor],
        *,
        queries_mask: Mask = None,
        documents_mask: Mask | Sequence[Mask] = None,
    ) -> Tensor:
        """Return the global loss.

        Args:
            queries: (B, T, D). B may differ per rank.
            documents: (B, t, D), the document of each query. Or a list of such columns with any t: the documents, then further negatives.
            queries_mask: (B, T) bool, True for valid vectors in any positions, or (B,) lengths. If None, all vectors are valid.
            documents_mask: The mask or lengths of the documents. If there are several columns, a list with one for each column.
        """
        title = type(self).__name__
        with handshake.raising_on_all_ranks(title, group=self._group):
            inputs.refuse_capture(title)
            columns: list[Any] = [documents]
            masks: list[Any] = [documents_mask]
            if not isinstance(documents, Tensor):
                columns = list(documents)
                masks = [None] * len(columns) if documents_mask is None else list(documents_mask)
            expect(
                len(masks) == len(columns),
                "documents_mask",
                expected=f"{len(columns)}, one for each column",
                got=len(masks),
                error=InputError,
                fix="Pass a list with one mask for each column, None for a column without padding.",
            )
            must_match = {"which of several": self._instance, "scale": self.scale}
            similarity, is_tiled = (max_sim, True) if self.similarity is None else (self.similarity, False)
            return ranking_of_all_ranks(
                title,
                (queries, queries_mask),
                list(zip(columns, masks, strict=True)),
                similarity,
                scale=self.scale,
                is_tiled=is_tiled,
                must_match=must_match,
                group=self._group,
            )


def ranking_of_all_ranks(
    title: str,
    queries: tuple[Tensor, Mask],
    columns: Sequence[tuple[Tensor, Mask]],
    score: Score,
    *,
    scale: float,
    is_tiled: bool,
    must_match: Mapping[str, object],
    module: nn.Module | None = None,
    group: Group = None,
) -> Tensor:
    """Return the mean over the queries of all ranks of the cross entropy of their scores with all documents.

    Args:
        title: Name of the loss in messages.
        queries: (B, T, D) and the mask of valid vectors.
        columns: Vectors and masks of the documents and of further negatives.
        score: Score of queries and documents.
        scale: Factor of the scores.
        is_tiled: True if the score of a document does not depend on the other documents.
        must_match: Values that must be equal on all ranks.
        module: The model, in a loop without a strategy.
        group: Process group.

    Communication: as ``MaxSimLoss``.
    """
    own, mask = queries
    dtype = precision.compute_dtype([own, *(column for column, _ in columns)])
    with precision.without_autocast({own.device.type}):
        # 1. the documents of all ranks, without padding
        own, counts = own.to(dtype), checked_mask(f"{title}: queries", own, mask)
        documents, start = _gather_columns(title, columns, dtype, len(own), must_match, group)
        # 2. the scores of this rank's queries
        places = torch.arange(start, start + len(own), device=own.device)
        if not len(own):
            total = torch.stack([own.sum(), *(column.tokens.sum() for column in documents)]).sum() * 0
        elif is_tiled:
            parts = [_ScoresInTiles.apply(score, counts, column.lengths, own, column.tokens) for column in documents]  # type: ignore[no-untyped-call]
            scores = torch.cat(parts, 1)
            total = cross_entropy(scores.to(dtype) * scale, places, reduction="sum")
        else:
            stacked, stacked_counts = _stacked(documents)
            scores = score(own, stacked, queries_mask=counts, documents_mask=stacked_counts)
            total = cross_entropy(scores.to(dtype) * scale, places * len(documents), reduction="sum")
        # 3. the mean over the queries of all ranks
        with outside_window():
            value = global_mean(total, len(own), name=title, group=group, module=module)
    name_value(value, title)
    return value


def _gather_columns(
    title: str,
    columns: Sequence[tuple[Tensor, Mask]],
    dtype: torch.dtype,
    rows: int,
    must_match: Mapping[str, object],
    group: Group,
) -> tuple[list[RaggedRows], int]:
    """Return the documents of all ranks by column, and the index of this rank's first document.

    Communication: one handshake, one gather.
    """
    travelling = {}
    for number, (padded, mask) in enumerate(columns):
        what = f"documents {number}"
        ragged = RaggedRows.of(f"{title}: {what}", padded.to(dtype), mask)
        expect(
            len(ragged) == rows,
            f"{title}: {what}",
            expected=f"{rows} rows, one for each query",
            got=len(ragged),
            error=InputError,
            fix="Select the documents so that row i belongs to query i.",
        )
        travelling[what] = ragged.tokens
        travelling[f"lengths of {what}"] = torch.tensor(ragged.lengths, device=padded.device, dtype=torch.int64)
    gathered = gather_batch(title, travelling, must_match, group=group)
    found = []
    for tokens, lengths in zip(gathered.tensors[::2], gathered.tensors[1::2], strict=True):
        found.append(RaggedRows(tokens, lengths.tolist()))
    before = gathered.counts[1][: process_groups.rank(group)]
    return found, sum(before)


class _ScoresInTiles(torch.autograd.Function):
    """Scores of queries and documents, (B, M), one tile of documents at a time. Backward recomputes the products of each tile.

    Results are allocated before the first tile, so that the freed memory of tiles can be reused.
    """

    @staticmethod
    def forward(
        ctx: Any, score: Score, counts: Tensor, lengths: Sequence[int], queries: Tensor, tokens: Tensor
    ) -> Tensor:
        documents = RaggedRows(tokens, list(lengths))
        scores = queries.new_empty(len(queries), len(documents))
        for tile in documents.tiles(_tile_size(queries)):
            found = score(queries, tile.padded, queries_mask=counts, documents_mask=tile.counts)
            scores[:, tile.rows] = found
        ctx.score, ctx.lengths = score, documents.lengths
        ctx.save_for_backward(counts, queries, tokens)
        return scores

    @staticmethod
    @once_differentiable_strict("MaxSimLoss")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        counts, queries, tokens = ctx.saved_tensors
        of_queries, of_tokens = torch.zeros_like(queries), torch.empty_like(tokens)
        for tile in RaggedRows(tokens, ctx.lengths).tiles(_tile_size(queries)):
            leaves = queries.detach().requires_grad_(), tile.padded.detach().requires_grad_()
            with torch.enable_grad():
                found = ctx.score(*leaves, queries_mask=counts, documents_mask=tile.counts)
            from_queries, from_tile = torch.autograd.grad(found, leaves, grad[:, tile.rows].to(found.dtype))
            of_queries += from_queries
            of_tokens[tile.places] = from_tile[tile.counts]
        return None, None, None, of_queries, of_tokens


def _tile_size(queries: Tensor) -> int:
    """Return the maximum number of document vectors in a tile."""
    return max(TILE_ELEMENTS // max(queries.shape[:2].numel(), 1), 1)


def _stacked(documents: Sequence[RaggedRows]) -> tuple[Tensor, Tensor]:
    """Return all documents, padded to the longest one, (G, columns, T, D), and the mask of valid vectors."""
    tokens = torch.cat([column.tokens for column in documents])
    lengths = [length for column in documents for length in column.lengths]
    padded, counts = pad(tokens, lengths)
    form = (len(documents), len(documents[0]))
    return padded.view(*form, *padded.shape[1:]).transpose(0, 1), counts.view(*form, -1).transpose(0, 1)
