"""Ranking losses of sentence-transformers over all ranks: losses that compare local anchors, and losses that are masked by a guide."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import sentence_transformers.sentence_transformer.losses as theirs
import torch
from sentence_transformers.base.losses.merged_forward import column_merging_disabled
from sentence_transformers.util import cos_sim
from torch import Tensor, nn

from lightning_ddp_losses.core import precision
from lightning_ddp_losses.core.autograd_graph import inside_global_batch
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.integrations.sentence_transformers.evaluations import (
    Columns,
    Features,
    OverAllRanks,
    back_propagated,
    finished,
    note_evaluation,
    own_rows,
)
from lightning_ddp_losses.losses.partial_sums import global_mean


class Ranking(OverAllRanks):
    """Evaluates a ranking loss: each rank its own anchors if anchors are independent, otherwise every rank all anchors."""

    model: nn.Module
    directions: tuple[str, ...]
    hardness_mode: str | None

    def _over_all_ranks(self, columns: Columns, formula: Callable[[Columns], Tensor]) -> Tensor:
        """Return the library's loss over the rows of all ranks.

        Args:
            columns: (B, D) each: anchors, positives and negatives of this rank.
            formula: The library's mean over the anchors in the first column. The positive of anchor i is row i of the second column.

        Communication: one handshake, one gather. If anchors are independent, another handshake, and one exchange in backward.
        """
        note_evaluation()
        dtype = precision.compute_dtype(columns)
        columns = [column.to(dtype) for column in own_rows(columns)]
        names = [f"column {number}" for number in range(len(columns))]
        devices = {column.device.type for column in columns}
        with precision.without_autocast(devices), handshake.raising_on_all_ranks(type(self).__name__):
            if self.directions != ("query_to_doc",) or self.hardness_mode is not None:
                gathered = self._gather(dict(zip(names, columns, strict=True)), backward="own_slice")
                with inside_global_batch():
                    return self._shared(formula(gathered.tensors))
            # 1. the documents of all ranks, starting with this rank's: row i belongs to anchor i
            anchors, *documents = columns
            gathered = self._gather(dict(zip(names[1:], documents, strict=True)))
            start = sum(gathered.counts[0][: process_groups.rank(None)])
            rolled = [rows.roll(-start, 0) for rows in gathered.tensors]
            # 2. the sum over the anchors of this rank
            if len(anchors):
                total = formula([anchors, *rolled]) * len(anchors)
            else:
                total = torch.stack([rows.sum() for rows in (anchors, *rolled)]).sum() * 0
            # 3. the mean over the anchors of all ranks
            # the library's Trainer averages over ranks. A model that fully_shard reduces in another way is an error
            return global_mean(total, len(anchors), name=type(self).__name__, reduces="mean", module=self.model)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """Return the global loss of this rank's columns, (B, D) each."""
        formula: Any = super().compute_loss_from_embeddings  # type: ignore[misc]
        return self._over_all_ranks(embeddings, lambda columns: formula(list(columns), labels))


class CachedRanking(Ranking):
    """Evaluates a ranking loss with a gradient cache."""

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Return the global loss of this rank's mini-batches of each column, after its backward if ``with_backward``."""
        formula = functools.partial(back_propagated, super().calculate_loss)  # type: ignore[misc]
        return finished(self._over_all_ranks([torch.cat(pieces) for pieces in reps], formula), with_backward)


class MultipleNegativesRankingLoss(Ranking, theirs.MultipleNegativesRankingLoss):  # type: ignore[misc]  # no types there
    """Compare each anchor with the positives and negatives of all ranks, with the arguments and formula of sentence-transformers.

    Equivalent to: ``sentence_transformers.losses.MultipleNegativesRankingLoss`` in one process on the rows of all ranks.

    Returns:
        From ``forward``: the global loss, 0-dim, equal on every rank.

    Gradient: after DDP's mean over ranks, the gradient of one process, for any numbers of rows per rank.

    Raises:
        RankMismatchError: on every rank, if options, columns or embedding sizes differ between ranks.
    """


class MultipleNegativesSymmetricRankingLoss(MultipleNegativesRankingLoss):
    """Rank anchors by positives and positives by anchors, over all ranks, and average both losses.

    Equivalent to: ``sentence_transformers.losses.MultipleNegativesSymmetricRankingLoss`` in one process on the rows of all ranks.
    Arguments, value and gradient are as in ``MultipleNegativesRankingLoss``.
    """

    def __init__(
        self,
        model: Any,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        gather_across_devices: bool = False,
    ) -> None:
        both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
        super().__init__(model, scale, similarity_fct, gather_across_devices, **both)


class CachedMultipleNegativesRankingLoss(CachedRanking, theirs.CachedMultipleNegativesRankingLoss):  # type: ignore[misc]
    """Compute ``MultipleNegativesRankingLoss`` with the activations of one mini-batch in memory at a time.

    Equivalent to: ``sentence_transformers.losses.CachedMultipleNegativesRankingLoss`` in one process on the rows of all ranks. Ranks may
    have different numbers of mini-batches. The gradients of the model's DDP are reduced once per step.
    """


# ---------------------------------------------------------------------- guided


class Guided(OverAllRanks):
    """Evaluates on every rank a loss that a guide model masks."""

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """Return the global loss of this rank's columns."""

        def gathering(name: str) -> _ChangedModel:
            numbers = itertools.count()

            def on_all_rows(embeddings: Tensor) -> Tensor:
                own = own_rows(embeddings)
                wide = own.to(precision.compute_dtype([own]))
                return self._gather({f"column {next(numbers)} of {name}": wide}, backward="own_slice").tensors[0]

            return _ChangedModel(getattr(self, name), on_all_rows)

        note_evaluation()
        # a copy of this loss whose models return the rows of all ranks
        twin: Any = copy.copy(self)
        models = {name: gathering(name) for name in ("model", "guide")}
        others = {name: module for name, module in self.named_children() if name not in models}  # type: ignore[attr-defined]
        twin.__dict__.update(models, _modules=others)
        # merged columns would be gathered rank by rank
        with column_merging_disabled(), inside_global_batch():
            theirs_on: Any = super(Guided, twin).forward  # type: ignore[misc]
            value = theirs_on(sentence_features, labels)
        return self._shared(value)


class GISTEmbedLoss(Guided, theirs.GISTEmbedLoss):  # type: ignore[misc]
    """Compare each anchor with the rows of all ranks except those that a guide model finds closer than the positive.

    Equivalent to: ``sentence_transformers.losses.GISTEmbedLoss`` in one process on the rows of all ranks. Arguments, value and gradient
    are the same as for that class.

    Communication: one handshake and one gather per column and model, none in backward.
    """


class _ChangedModel:
    """Acts as a model whose embeddings are changed."""

    def __init__(self, model: Any, change: Callable[[Tensor], Tensor]) -> None:
        self._model, self._change = model, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, features: Features, **kwargs: Any) -> Features:
        output = self._model(features, **kwargs)
        return {**output, "sentence_embedding": self._change(output["sentence_embedding"])}
