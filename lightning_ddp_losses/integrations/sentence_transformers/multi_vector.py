"""Losses of sentence-transformers that compare texts of several vectors (late interaction), over all ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from sentence_transformers.base.losses.merged_forward import embed_columns_padded
from sentence_transformers.multi_vector_encoder import scoring
from sentence_transformers.util.tensor import cat_padded_token_embeddings
from torch import Tensor

from lightning_ddp_losses.integrations.sentence_transformers.evaluations import (
    Features,
    OverAllRanks,
    finished,
    note_evaluation,
    own_rows,
    rows_in,
    stands_in,
)
from lightning_ddp_losses.losses.late_interaction.max_sim import max_sim, ranking_of_all_ranks
from lightning_ddp_losses.losses.partial_sums import global_mean

_BY_DOCUMENT = (scoring.colbert_scores, scoring.mean_colbert_scores, max_sim)
"""Scores of a document that do not depend on the other documents, so that they can be computed in tiles."""

Texts = tuple[Tensor, Tensor]
"""(B, T, D) vectors and the mask (B, T) of valid ones."""


class LateRanking(OverAllRanks):
    """Ranks this rank's queries among the documents of all ranks. Only valid vectors are sent."""

    model: Any
    scale: float
    similarity_fct: Any
    mini_batch_size: int | None

    def forward(self, sentence_features: Sequence[Features], labels: Tensor | None = None) -> Tensor:
        """Return the global loss of this rank's columns: queries, documents, further negatives."""
        query, *documents = map(dict, sentence_features)
        output = self.model(query, task=query.get("task", "query"))
        columns, masks = embed_columns_padded(self.model, documents, self.mini_batch_size, task_default="document")
        queries = output["token_embeddings"], output["attention_mask"].bool()
        return self._ranked(queries, list(zip(columns, masks, strict=True)))

    def _ranked(self, queries: Texts, documents: Sequence[Texts]) -> Tensor:
        """Return the global loss of this rank's texts."""
        note_evaluation()
        inner = self.similarity_fct
        while isinstance(inner, functools.partial):
            inner = inner.func
        return ranking_of_all_ranks(
            type(self).__name__,
            own_rows(queries),
            own_rows(list(documents)),
            self.similarity_fct,
            scale=self.scale,
            is_tiled=inner in _BY_DOCUMENT,
            must_match={"which of several": self._instance, "scale": self.scale},
            module=self.model,
        )


class CachedLateRanking(LateRanking):
    """The same ranking loss with a gradient cache."""

    def forward(self, sentence_features: Sequence[Features], labels: Tensor | None = None) -> Tensor:
        """Return the global loss of this rank's columns."""
        theirs_on: Any = super(LateRanking, self).forward  # type: ignore[misc]
        return theirs_on(sentence_features, labels)  # type: ignore[no-any-return]

    def calculate_loss(
        self, reps: list[list[Tensor]], masks_chunks: list[list[Tensor]], *, with_backward: bool = False
    ) -> Tensor:
        """Return the global loss of this rank's mini-batches of each column, after its backward if ``with_backward``."""
        queries, *documents = map(cat_padded_token_embeddings, reps, masks_chunks)
        return finished(self._ranked(queries, documents), with_backward)


class RowMeans(OverAllRanks):
    """Weights a loss that is a mean over independent rows by the number of this rank's rows."""

    model: Any

    def forward(self, sentence_features: Sequence[Features], labels: Tensor) -> Tensor:
        """Return the global loss of this rank's columns.

        Communication: one handshake, none in backward.
        """
        note_evaluation()
        rows = rows_in(sentence_features[0])
        if stands_in.get():
            labels = labels.new_ones(rows, *labels.shape[1:])
        theirs_on: Any = super().forward  # type: ignore[misc]
        value = theirs_on(sentence_features, labels)
        if stands_in.get():
            rows = 0
        return global_mean(value * rows, rows, name=type(self).__name__, reduces="mean", module=self.model)
