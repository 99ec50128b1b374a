"""Four losses of sentence-transformers over the rows of all ranks, under their own names and with their own arguments.

Their formulas run unchanged on rows that were gathered exactly: any number of rows per rank, also none, and the gradient of one process
after DDP's mean over ranks. Without ranks each loss is theirs.

| evaluation | when | memory of the scores, with k documents per row |
|---|---|---|
| each rank its own anchors | ``directions=("query_to_doc",)`` without hardness weights, which is the default | B x kG |
| every rank all anchors | all other options, ``GISTEmbedLoss`` | G x kG, for ``GISTEmbedLoss`` times D |

``CachedMultipleNegativesRankingLoss`` holds ``mini_batch_size`` rows of the scores. It embeds in mini-batches with their
gradient cache. The gradients of a DDP are reduced once per step.

Their ``MultipleNegativesRankingLoss`` masks no duplicates, so this one does not either. ``GISTEmbedLoss`` masks, over the rows of all
ranks, what its guide finds closer than the positive.

Legend: ``B`` rows on this rank, ``G`` over all ranks, ``D`` embedding size. A column is one input of a row, in the host's words: anchor,
positive, negatives.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import sentence_transformers.sentence_transformer.losses as theirs
import torch
from sentence_transformers.base.losses.merged_forward import column_merging_disabled, embed_columns
from sentence_transformers.util import cos_sim
from torch import Tensor, nn

from lightning_ddp_losses.core import precision
from lightning_ddp_losses.core.autograd_graph import inside_global_batch
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.gathered_batch import GatheredBatch, gather_batch
from lightning_ddp_losses.distributed.global_values import UpstreamGradWatch, reduction_to_match, remember_global_value
from lightning_ddp_losses.integrations import warn_untested
from lightning_ddp_losses.losses.partial_sums import global_mean, value_with_grad

Features = dict[str, Any]
"""The features of one column, as the tokenizer of the host makes them."""

Columns = Sequence[Tensor]
"""The embeddings of each column, (B, D) or (G, D) each."""

warn_untested("sentence-transformers", "Compare one step on two ranks with one process: ddp-losses explain parity.")


class _OverAllRanks:
    """Evaluates a loss of theirs over the rows of all ranks.

    Their ``gather_across_devices`` has no effect: the rows of all ranks are compared in any case.
    """

    get_config_dict: Callable[[], dict[str, Any]]
    gather_across_devices = property(lambda self: False, lambda self, value: None)

    def _gather(self, columns: dict[str, Tensor], **how: Any) -> GatheredBatch:
        """Gather columns of all ranks. Options that differ between ranks are an error on all of them."""
        options = {name: value for name, value in self.get_config_dict().items() if not isinstance(value, nn.Module)}
        watch = UpstreamGradWatch.of(type(self).__name__, None)
        must_match = {"options": options, "coefficient of the last backward": watch.take(), **reduction_to_match()}
        return gather_batch(type(self).__name__, columns, must_match, **how)

    def _shared(self, value: Tensor) -> Tensor:
        """Return a loss that every rank has computed. Its coefficient in backward is compared at the next call."""
        remember_global_value(value)
        return UpstreamGradWatch.of(type(self).__name__, None).watch(value)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------- ranking losses


class _Ranking(_OverAllRanks):
    """Evaluates a ranking loss: each rank its own anchors if anchors are independent, else every rank all of them."""

    model: nn.Module
    directions: tuple[str, ...]
    hardness_mode: str | None

    def _over_all_ranks(self, columns: Columns, formula: Callable[[Columns], Tensor]) -> Tensor:
        """Return their loss over the rows of all ranks.

        Args:
            columns: (B, D) each: anchors, positives and negatives of this rank.
            formula: Their mean over the anchors in the first column. The positive of anchor i is row i of the second column.

        Communication: one handshake, one gather. If anchors are independent, another handshake, and one exchange in backward.
        """
        dtype = precision.compute_dtype(columns)
        columns = [column.to(dtype) for column in columns]
        names = [f"column {number}" for number in range(len(columns))]
        devices = {column.device.type for column in columns}
        with precision.without_autocast(devices), handshake.raising_on_all_ranks(type(self).__name__):
            if self.directions != ("query_to_doc",) or self.hardness_mode is not None:
                gathered = self._gather(dict(zip(names, columns, strict=True)), backward="own_slice")
                with inside_global_batch():
                    return self._shared(formula(gathered.tensors))
            # 1. the documents of all ranks, those of this rank first: row i belongs to anchor i
            anchors, *documents = columns
            gathered = self._gather(dict(zip(names[1:], documents, strict=True)))
            start = sum(gathered.counts[0][: process_groups.rank(None)])
            rolled = [rows.roll(-start, 0) for rows in gathered.tensors]
            # 2. the sum over the anchors of this rank
            if len(anchors):
                total = formula([anchors, *rolled]) * len(anchors)
            else:
                total = torch.stack([rows.sum() for rows in (anchors, *rolled)]).sum() * 0
            # 3. the mean over those of all ranks
            # their Trainer averages over ranks. A model that fully_shard reduces in another way is an error
            return global_mean(total, len(anchors), name=type(self).__name__, reduces="mean", module=self.model)


class MultipleNegativesRankingLoss(_Ranking, theirs.MultipleNegativesRankingLoss):  # type: ignore[misc]  # no types there
    """Compare each anchor with the positives and negatives of all ranks. Arguments and formula are those of sentence-transformers.

    Equivalent to: ``sentence_transformers.losses.MultipleNegativesRankingLoss`` in one process on the rows of all ranks.

    Returns:
        From ``forward``: the global loss, 0-dim, equal on every rank.

    Gradient: after DDP's mean over ranks that of one process, for any numbers of rows per rank.

    Raises:
        RankMismatchError: on every rank, for other options, columns or embedding sizes on some ranks.
    """

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """Return the global loss of this rank's columns."""
        features = list(sentence_features)
        embeddings = embed_columns(self.model, map(_filled, features))
        if any(map(_is_empty, features)):
            embeddings = [rows[:0] for rows in embeddings]
        return self.compute_loss_from_embeddings(embeddings, labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None) -> Tensor:
        """Return the global loss of this rank's columns, (B, D) each."""
        formula = super().compute_loss_from_embeddings
        return self._over_all_ranks(embeddings, lambda columns: formula(list(columns), labels))


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


class CachedMultipleNegativesRankingLoss(_Ranking, theirs.CachedMultipleNegativesRankingLoss):  # type: ignore[misc]
    """Compute ``MultipleNegativesRankingLoss`` with the activations of one mini-batch at a time.

    Equivalent to: ``sentence_transformers.losses.CachedMultipleNegativesRankingLoss`` in one process on the rows of all ranks. Ranks may
    have different numbers of mini-batches. The gradients of the model's DDP are reduced once per step.
    """

    def embed_minibatch_iter(
        self, sentence_feature: Features, *args: Any, ranges: list[tuple[int, int]] | None = None, **kwargs: Any
    ) -> Iterator[tuple[Tensor, Any]]:
        """Embed the mini-batches of a column. A rank without rows embeds one row and drops it, so that its DDP takes part."""
        is_empty = _is_empty(sentence_feature)
        if is_empty:
            sentence_feature, ranges = _filled(sentence_feature), [(0, 1)]
        for embeddings, state in super().embed_minibatch_iter(sentence_feature, *args, ranges=ranges, **kwargs):
            yield embeddings[:0] if is_empty else embeddings, state

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Return the global loss of this rank's mini-batches of each column, after its backward if ``with_backward``."""
        formula = super().calculate_loss

        def in_pieces(columns: Columns) -> Tensor:
            if not torch.is_grad_enabled():
                return formula([[column] for column in columns])  # type: ignore[no-any-return]
            # each piece of the scores is back-propagated by itself
            leaves = [column.detach().requires_grad_() for column in columns]
            value = formula([[leaf] for leaf in leaves], with_backward=True)
            gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
            return value_with_grad(value, *columns, factors=gradients)

        value = self._over_all_ranks([torch.cat(pieces) for pieces in reps], in_pieces)
        if with_backward:
            value.backward()  # type: ignore[no-untyped-call]
            value = value.detach()
        return value


# ---------------------------------------------------------------------- guided


class GISTEmbedLoss(_OverAllRanks, theirs.GISTEmbedLoss):  # type: ignore[misc]
    """Compare each anchor with the rows of all ranks but those that a guide model finds closer than the positive.

    Equivalent to: ``sentence_transformers.losses.GISTEmbedLoss`` in one process on the rows of all ranks. Arguments, value and gradient
    are as there.

    Communication: one handshake and one gather per column and model, none in backward.
    """

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """Return the global loss of this rank's columns."""
        features = list(sentence_features)
        is_empty = any(map(_is_empty, features))

        def gathering(name: str) -> _ChangedModel:
            numbers = itertools.count()

            def over_all_ranks(embeddings: Tensor) -> Tensor:
                own = embeddings[:0] if is_empty else embeddings
                wide = own.to(precision.compute_dtype([own]))
                return self._gather({f"column {next(numbers)} of {name}": wide}, backward="own_slice").tensors[0]

            return _ChangedModel(getattr(self, name), over_all_ranks)

        # a copy of this loss with models that return the rows of all ranks
        twin: Any = copy.copy(self)
        title = type(self).__name__
        models = {name: gathering(name) for name in ("model", "guide")}
        others = {name: module for name, module in self.named_children() if name not in models}
        twin.__dict__.update(models, _modules=others)
        # merged columns would be gathered rank by rank
        with column_merging_disabled(), inside_global_batch(), handshake.raising_on_all_ranks(title):
            value = super(GISTEmbedLoss, twin).forward([*map(_filled, features)], labels)
        return self._shared(value)


# ---------------------------------------------------------------------- models and columns


class _ChangedModel:
    """Stands for a model, and changes its embeddings."""

    def __init__(self, model: Any, change: Callable[[Tensor], Tensor]) -> None:
        self._model, self._change = model, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, features: Features, **kwargs: Any) -> Features:
        output = self._model(features, **kwargs)
        return {**output, "sentence_embedding": self._change(output["sentence_embedding"])}


def _is_empty(features: Features) -> bool:
    """Return whether a column has no rows."""
    return any(isinstance(value, Tensor) and value.ndim > 0 and not len(value) for value in features.values())


def _filled(features: Features) -> Features:
    """Return a column. One without rows gets a row of ones, as encoders of transformers take no empty batch."""
    if not _is_empty(features):
        return features
    found = dict(features)
    for name, value in features.items():
        if isinstance(value, Tensor) and value.ndim:
            found[name] = value.new_ones([max(size, 1) for size in value.shape])
    return found


# ---------------------------------------------------------------------- in place of theirs


def patch_sentence_transformers() -> list[str]:
    """Put the losses of this module in place of theirs in ``sentence_transformers.losses``.

    Call it before the losses are imported from there. With ``LIGHTNING_DDP_LOSSES_DISABLE=1`` in the environment theirs stay.

    Returns:
        The names of the replaced classes.
    """
    if os.environ.get("LIGHTNING_DDP_LOSSES_DISABLE") == "1":
        return []
    losses: list[type] = [MultipleNegativesRankingLoss, MultipleNegativesSymmetricRankingLoss]
    losses += [CachedMultipleNegativesRankingLoss, GISTEmbedLoss]
    for loss in losses:
        setattr(theirs, loss.__name__, loss)
    return [loss.__name__ for loss in losses]
