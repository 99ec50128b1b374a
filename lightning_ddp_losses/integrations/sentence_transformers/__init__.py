"""Losses of sentence-transformers over the rows of all ranks: ``over_all_ranks(loss)``, and four classes under their own names.

Their formulas run unchanged on rows that were gathered exactly: any number of rows per rank, also none, and the gradient of one process
after DDP's mean over ranks. Without ranks each loss is theirs. Most losses there embed the columns of a batch and give them to a method
(``compute_loss_from_embeddings``, ``calculate_loss`` of those with a gradient cache): that method gets the rows of all ranks.

| losses | evaluation | memory with k documents per row |
|---|---|---|
| ``MultipleNegativesRankingLoss`` and its kinds, one direction, no hardness weights (their default) | each rank its own anchors | B x kG |
| the same with other options | every rank all anchors | G x kG |
| ``GISTEmbedLoss`` | every rank all anchors | G x kG x D |
| ``ContrastiveLoss``, ``CosineSimilarityLoss``, ``TripletLoss``, ``FlopsLoss`` | rows stay on their rank (``global_rows``) | B x D |
| all others with one of the two methods | every rank the whole loss | what theirs takes for G rows |
| of ``MultiVectorEncoder``: ranking | each rank its own queries, in tiles of documents | the vectors of all documents |
| of ``MultiVectorEncoder``: distilled scores, margins | each rank its own rows | what theirs takes for B rows |
| ``MatryoshkaLoss``, ``AdaptiveLayerLoss``, ``SpladeLoss``, ``CSRLoss`` | their inner losses | that of the inner losses |

Losses with a gradient cache embed in mini-batches as theirs do. ``CachedMultipleNegativesRankingLoss`` holds ``mini_batch_size`` rows of
the scores. Their ``MultipleNegativesRankingLoss`` masks no duplicates, so this one does not either. ``GISTEmbedLoss`` masks, over the rows
of all ranks, what its guide finds closer than the positive.

Legend: ``B`` rows on this rank, ``G`` over all ranks, ``D`` embedding size. A column is one input of a row, in the host's words: anchor,
positive, negatives.
"""

from __future__ import annotations

import os
from types import MethodType
from typing import Any, TypeVar, overload

import sentence_transformers.sentence_transformer.losses as theirs
import sentence_transformers.sparse_encoder.losses as sparse
from sentence_transformers.multi_vector_encoder import losses as late
from torch import nn

from lightning_ddp_losses.distributed.messages import Instance
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.integrations import warn_untested
from lightning_ddp_losses.integrations.sentence_transformers.around import Drawing, Layers
from lightning_ddp_losses.integrations.sentence_transformers.evaluations import (
    ByRows,
    CachedReplicated,
    OverAllRanks,
    Reconstruction,
    Replicated,
)
from lightning_ddp_losses.integrations.sentence_transformers.multi_vector import (
    CachedLateRanking,
    LateRanking,
    RowMeans,
)
from lightning_ddp_losses.integrations.sentence_transformers.ranking import (
    CachedMultipleNegativesRankingLoss,
    CachedRanking,
    GISTEmbedLoss,
    Guided,
    MultipleNegativesRankingLoss,
    MultipleNegativesSymmetricRankingLoss,
    Ranking,
)

__all__ = [
    "CachedMultipleNegativesRankingLoss",
    "GISTEmbedLoss",
    "MultipleNegativesRankingLoss",
    "MultipleNegativesSymmetricRankingLoss",
    "over_all_ranks",
    "patch_sentence_transformers",
]

warn_untested("sentence-transformers", "Compare one step on two ranks with one process: ddp-losses explain parity.")

Loss = TypeVar("Loss", bound=nn.Module)

_EVALUATIONS: tuple[tuple[type[nn.Module], type[OverAllRanks]], ...] = (
    (late.CachedMultiVectorMultipleNegativesRankingLoss, CachedLateRanking),
    (late.MultiVectorMultipleNegativesRankingLoss, LateRanking),
    (late.MultiVectorDistillKLDivLoss, RowMeans),
    (late.MultiVectorMarginMSELoss, RowMeans),
    (theirs.CachedMultipleNegativesRankingLoss, CachedRanking),
    (theirs.MultipleNegativesRankingLoss, Ranking),
    (theirs.GISTEmbedLoss, Guided),
    (theirs.CachedGISTEmbedLoss, CachedReplicated),
    (theirs.MegaBatchMarginLoss, CachedReplicated),
    (theirs.ContrastiveLoss, ByRows),
    (theirs.CosineSimilarityLoss, ByRows),
    (theirs.TripletLoss, ByRows),
    (sparse.FlopsLoss, ByRows),
    (sparse.CSRReconstructionLoss, Reconstruction),
    (theirs.AdaptiveLayerLoss, Layers),
    (theirs.MatryoshkaLoss, Drawing),
    (sparse.SpladeLoss, OverAllRanks),
    (sparse.CSRLoss, OverAllRanks),
)
"""How a class is evaluated, and those derived from it. The first that fits; any other with ``compute_loss_from_embeddings``: replicated."""

_INNER = ("loss", "document_regularizer", "query_regularizer", "reconstruction_loss")


@overload
def over_all_ranks(loss: Loss, *, name: str | None = None) -> Loss: ...


@overload
def over_all_ranks(loss: dict[str, nn.Module], *, name: str | None = None) -> dict[str, nn.Module]: ...


def over_all_ranks(loss: Any, *, name: str | None = None) -> Any:
    """Let a loss of sentence-transformers see the rows of all ranks.

    Equivalent to: the loss in one process on the rows of all ranks.

    Args:
        loss: A loss with ``compute_loss_from_embeddings``, as most have and one of your own may have; one with a gradient cache; one around
            such losses (Matryoshka, AdaptiveLayer, Splade, CSR), with its inner losses. It is changed in place: its class becomes one
            derived from it, with the same name, options, card and ``get_config_dict``. A dict by the name of the data set: each of them.
        name: Name in messages, of a data set for example. Equal on all ranks.

    Returns:
        The same loss, or a dict of the same losses. Its value is the global loss (of several losses a dict), equal on every rank.

    Gradient:
        After DDP's mean over ranks that of one process, for any numbers of rows per rank, also none. A parameter of the loss itself
        (a projection), which DDP does not reduce, gets that gradient on every rank.

    Communication: one handshake and one gather a loss and step; ``Ranking`` and ``Layers`` say theirs.

    Raises:
        ConfigurationError: for a loss without these methods (``SoftmaxLoss``), and for one with ``gather_across_devices=True``, which would
            gather once more. On every rank, for a ``forward`` that does not call the method. (What it adds to the method's result is the
            rank's own, and is not found.)
        RankMismatchError: on every rank, for other options, columns, embedding sizes, or another data set on some ranks.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from sentence_transformers.sentence_transformer.losses import CoSENTLoss
        >>> loss = over_all_ranks(CoSENTLoss(SentenceTransformer("all-MiniLM-L6-v2")))  # doctest: +SKIP
    """
    if isinstance(loss, dict):
        return {key: over_all_ranks(inner, name=key) for key, inner in loss.items()}
    if os.environ.get("LIGHTNING_DDP_LOSSES_DISABLE") == "1" or isinstance(loss, OverAllRanks):
        return loss
    kind = type(loss)
    evaluation = _evaluation_of(loss)
    if getattr(loss, "gather_across_devices", False):
        raise ConfigurationError(
            f"{kind.__name__}: gather_across_devices",
            expected=False,
            got=True,
            fix="Leave it out: the rows of all ranks are compared in any case.",
        )
    for part in _INNER:
        inner = getattr(loss, part, None)
        if isinstance(inner, nn.Module) and evaluation in (OverAllRanks, Drawing, Layers):
            over_all_ranks(inner, name=name)
    # their Trainer puts the DDP module in place of `model`, and of nothing else
    if "sentence_embedder" in loss._modules:
        loss._modules["model"] = loss._modules.pop("sentence_embedder")
    loss.__class__ = _class_over_all_ranks(evaluation, kind)
    loss._instance = Instance(kind.__name__, name)
    # a MatryoshkaLoss has put a function around the method of before
    around = vars(loss).get("calculate_loss")
    if around is not None:
        around.fn = MethodType(type(loss).calculate_loss, loss)
    return loss


def _evaluation_of(loss: nn.Module) -> type[OverAllRanks]:
    """Return how a loss is evaluated over all ranks."""
    for kind, evaluation in _EVALUATIONS:
        if isinstance(loss, kind):
            return evaluation
    if hasattr(loss, "compute_loss_from_embeddings"):
        return Replicated
    raise ConfigurationError(
        f"over_all_ranks: {type(loss).__name__}",
        expected="a loss of sentence-transformers with the method compute_loss_from_embeddings, or around one",
        got=f"one without it, from {type(loss).__module__}",
        fix="Embed in a loss of your own that has the method: ddp-losses explain migrate sentence_transformers.",
    )


_classes: dict[tuple[type, type], type[nn.Module]] = {}


def _class_over_all_ranks(evaluation: type[OverAllRanks], kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of the same name that evaluates a loss over all ranks."""
    if (evaluation, kind) in _classes:
        return _classes[evaluation, kind]
    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        # unpickled by what it is made of, as its name is that of theirs
        "__reduce_ex__": lambda self, protocol: (_empty_loss, (evaluation, kind), vars(self)),
    }
    if issubclass(kind, (theirs.BatchAllTripletLoss, theirs.BatchHardTripletLoss, theirs.BatchSemiHardTripletLoss)):
        members["sentence_embedder"] = property(lambda self: self.model)
    made = _classes[evaluation, kind] = type(kind.__name__, (evaluation, kind), members)
    return made


def _empty_loss(evaluation: type[OverAllRanks], kind: type[nn.Module]) -> nn.Module:
    """Return a loss without its state."""
    made = _class_over_all_ranks(evaluation, kind)
    return made.__new__(made)


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
