"""Losses of sentence-transformers over the rows of all ranks: ``over_all_ranks(loss)``, and four classes under their original names.

The library's formulas run unchanged on exactly gathered rows: any number of rows per rank, including none, and the gradient of one process
after DDP's mean over ranks. In a world of one rank each loss is the library's. Most losses in the library embed the columns of a batch and
pass them to a method (``compute_loss_from_embeddings``, or ``calculate_loss`` for those with a gradient cache): this method is called with
the rows of all ranks.

| losses | evaluation | memory with k documents per row |
|---|---|---|
| ``MultipleNegativesRankingLoss`` and its kinds, one direction, no hardness weights (the default) | each rank its anchors | B x kG |
| the same with other options | every rank all anchors | G x kG |
| ``GISTEmbedLoss`` | every rank all anchors | G x kG x D |
| ``ContrastiveLoss``, ``CosineSimilarityLoss``, ``TripletLoss``, ``FlopsLoss`` | rows stay on their rank (``global_rows``) | B x D |
| all other losses with one of the two methods | every rank the whole loss | memory of the library's loss for G rows |
| of ``MultiVectorEncoder``: ranking | each rank its own queries, in tiles of documents | the vectors of all documents |
| of ``MultiVectorEncoder``: distilled scores, margins | each rank its own rows | memory of the library's loss for B rows |
| ``MatryoshkaLoss``, ``AdaptiveLayerLoss``, ``SpladeLoss``, ``CSRLoss`` | their inner losses | memory of the inner losses |

Losses with a gradient cache embed in mini-batches like the library's. ``CachedMultipleNegativesRankingLoss`` holds ``mini_batch_size`` rows
of the scores. The library's ``MultipleNegativesRankingLoss`` does not mask duplicates, so this one does not either. ``GISTEmbedLoss``
masks, over the rows of all ranks, the rows that its guide finds closer than the positive.

Legend: ``B`` rows on this rank, ``G`` over all ranks, ``D`` embedding size. A column is one input of a row, in the library's terms: anchor,
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
"""Evaluation by class, including subclasses. The first match applies. Other losses with ``compute_loss_from_embeddings``: replicated."""

_INNER = ("loss", "document_regularizer", "query_regularizer", "reconstruction_loss")


@overload
def over_all_ranks(loss: Loss, *, name: str | None = None) -> Loss: ...


@overload
def over_all_ranks(loss: dict[str, nn.Module], *, name: str | None = None) -> dict[str, nn.Module]: ...


def over_all_ranks(loss: Any, *, name: str | None = None) -> Any:
    """Evaluate a loss of sentence-transformers over the rows of all ranks.

    Equivalent to: the loss in one process on the rows of all ranks.

    Args:
        loss: A loss with ``compute_loss_from_embeddings``, which most losses have and a custom loss may have; one with a gradient cache;
            one around such losses (Matryoshka, AdaptiveLayer, Splade, CSR), including its inner losses. It is changed in place: its class
            is replaced by a subclass with the same name, options, card and ``get_config_dict``. For a dict by the name of the dataset,
            each of its losses.
        name: Name in messages, of a dataset for example. Equal on all ranks.

    Returns:
        The same loss, or a dict of the same losses. Its value is the global loss (of several losses a dict), equal on every rank.

    Gradient:
        After DDP's mean over ranks, the gradient of one process, for any numbers of rows per rank, including none. A parameter of the loss
        itself (a projection), which DDP does not reduce, receives that gradient on every rank.

    Communication: one handshake and one gather per loss and step; see ``Ranking`` and ``Layers`` for theirs.

    Raises:
        ConfigurationError: for a loss without these methods (``SoftmaxLoss``), and for one with ``gather_across_devices=True``, which would
            gather once more. On every rank, for a ``forward`` that does not call the method. (Terms that it adds to the method's result
            are specific to the rank, and are not detected.)
        RankMismatchError: on every rank, if options, columns, embedding sizes, or the dataset differ between ranks.

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
    # the library's Trainer only replaces `model` by the DDP module
    if "sentence_embedder" in loss._modules:
        loss._modules["model"] = loss._modules.pop("sentence_embedder")
    loss.__class__ = _class_over_all_ranks(evaluation, kind)
    loss._instance = Instance(kind.__name__, name)
    # a MatryoshkaLoss has wrapped the previous method in a function
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
        # unpickled from its components, because its name belongs to the library's class
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


# ---------------------------------------------------------------------- replacing the library's losses


def patch_sentence_transformers() -> list[str]:
    """Replace losses in ``sentence_transformers.losses`` by the losses of this module.

    Call it before the losses are imported from that module. With ``LIGHTNING_DDP_LOSSES_DISABLE=1`` in the environment, nothing is
    replaced.

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
