"""Losses of sentence-transformers over the rows of all ranks: ``over_all_ranks(loss)``, and four classes under their own names.

Their formulas run unchanged on rows that were gathered exactly: any number of rows per rank, also none, and the gradient of one process
after DDP's mean over ranks. Without ranks each loss is theirs. Most losses there embed the columns of a batch and give them to a method
(``compute_loss_from_embeddings``, ``calculate_loss`` of those with a gradient cache): that method gets the rows of all ranks.

| losses | evaluation | memory with k documents per row |
|---|---|---|
| ``MultipleNegativesRankingLoss`` and its kinds, one direction, no hardness weights (their default) | each rank its own anchors | B x kG |
| the same with other options | every rank all anchors | G x kG |
| ``GISTEmbedLoss`` | every rank all anchors | G x kG x D |
| ``FlopsLoss`` | rows stay on their rank (``global_rows``) | B x D |
| all others with one of the two methods | every rank the whole loss | what theirs takes for G rows |
| ``MatryoshkaLoss``, ``AdaptiveLayerLoss``, ``SpladeLoss``, ``CSRLoss`` | their inner losses | that of the inner losses |

Losses with a gradient cache embed in mini-batches as theirs do. ``CachedMultipleNegativesRankingLoss`` holds ``mini_batch_size`` rows of
the scores. Their ``MultipleNegativesRankingLoss`` masks no duplicates, so this one does not either. ``GISTEmbedLoss`` masks, over the rows
of all ranks, what its guide finds closer than the positive.

Legend: ``B`` rows on this rank, ``G`` over all ranks, ``D`` embedding size. A column is one input of a row, in the host's words: anchor,
positive, negatives.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import pickle
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MethodType
from typing import Any, TypeVar

import sentence_transformers.sentence_transformer.losses as theirs
import sentence_transformers.sparse_encoder.losses as sparse
import torch
from sentence_transformers.base.losses.gradcache import _get_batch_size as rows_in
from sentence_transformers.base.losses.merged_forward import column_merging_disabled
from sentence_transformers.util import cos_sim
from torch import Tensor, nn

from lightning_ddp_losses.core import inputs, precision
from lightning_ddp_losses.core.autograd_graph import inside_global_batch
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.collectives import all_reduce_with_grad
from lightning_ddp_losses.distributed.gathered_batch import GatheredBatch, gather_batch
from lightning_ddp_losses.distributed.global_values import UpstreamGradWatch, remember_global_value
from lightning_ddp_losses.distributed.messages import Instance
from lightning_ddp_losses.errors import ConfigurationError, InputError
from lightning_ddp_losses.integrations import warn_untested
from lightning_ddp_losses.losses.formulas.global_rows import global_rows
from lightning_ddp_losses.losses.partial_sums import global_mean, value_with_grad

Features = dict[str, Any]
"""The features of one column, as the tokenizer of the host makes them."""

Columns = Sequence[Tensor]
"""The embeddings of each column, (B, D) or (G, D) each."""

LossOrLosses = TypeVar("LossOrLosses", nn.Module, dict[str, nn.Module])

warn_untested("sentence-transformers", "Compare one step on two ranks with one process: ddp-losses explain parity.")

_stands_in: ContextVar[bool] = ContextVar("stands_in", default=False)
"""True while a rank without rows embeds a row that stands in for them, and is dropped before the loss."""


class _OverAllRanks:
    """Evaluates a loss of theirs over the rows of all ranks.

    Their ``gather_across_devices`` has no effect: the rows of all ranks are compared in any case.
    """

    _instance: Instance
    get_config_dict: Callable[[], dict[str, Any]]
    gather_across_devices = property(lambda self: False, lambda self, value: None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._instance = Instance(type(self).__name__)

    def __call__(self, sentence_features: Iterable[Features], *args: Any, **kwargs: Any) -> Any:
        """Return the global loss of this rank's columns. An error of one rank is an error on all of them."""
        features = list(sentence_features)
        is_empty = any(map(_is_empty, features))
        token = _stands_in.set(is_empty or _stands_in.get())
        try:
            with handshake.raising_on_all_ranks(type(self).__name__):
                return super().__call__([*map(_filled, features)], *args, **kwargs)  # type: ignore[misc]
        finally:
            _stands_in.reset(token)

    def _watch(self) -> UpstreamGradWatch:
        return UpstreamGradWatch.of(f"{self._instance.kind} {self._instance.number}", None)

    def _gather(self, columns: dict[str, Tensor], **how: Any) -> GatheredBatch:
        """Gather columns of all ranks. Options that differ between ranks are an error on all of them."""
        options: dict[str, object] = {}
        if hasattr(self, "get_config_dict"):
            config = self.get_config_dict()
            options = {name: value for name, value in config.items() if not isinstance(value, nn.Module)}
        must_match = {
            "which of several": self._instance,
            "options": options,
            "coefficient of the last backward": self._watch().take(),
        }
        return gather_batch(type(self).__name__, columns, must_match, **how)

    def _shared(self, value: Tensor) -> Tensor:
        """Return a loss that every rank has computed. Its coefficient in backward is compared at the next call."""
        remember_global_value(value)
        return self._watch().watch(value)  # type: ignore[no-any-return]

    def _on_all_rows(self, formula: Callable[..., Any], *arguments: Any) -> Any:
        """Return a formula of the rows of all ranks, which every rank evaluates.

        Args:
            formula: Their loss.
            arguments: Nests of tensors with rows of this rank. Those of the first one are embeddings.

        Communication: one handshake, one gather, none in backward.
        """
        first, *others = _own_rows(arguments)
        dtype = precision.compute_dtype(inputs.tensors_in(first))
        arguments = (precision.cast_floating(first, dtype), *others)
        named = [leaf for leaf in inputs.leaves(arguments, type(self).__name__) if isinstance(leaf[1], Tensor)]
        devices = {tensor.device.type for _, tensor in named}
        with precision.without_autocast(devices), handshake.raising_on_all_ranks(type(self).__name__):
            _refuse_other_rows(named)
            rows = iter(self._gather(dict(named), backward="own_slice").tensors)
            with inside_global_batch():
                value = formula(*inputs.map_tensors(lambda own: next(rows), arguments))
        return inputs.map_tensors(self._shared, value)


class _Replicated(_OverAllRanks):
    """Evaluates on every rank a loss that gets the embeddings of its columns."""

    def compute_loss_from_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Return their loss over the rows of all ranks. A parameter of the loss gets the gradient of one process on every rank."""
        formula: Any = super().compute_loss_from_embeddings  # type: ignore[misc]
        names = list(kwargs)

        def with_names(*given: Any) -> Any:
            named = dict(zip(names, given[len(args) :], strict=True))
            return formula(*given[: len(args)], **named)

        return self._on_all_rows(with_names, *args, *kwargs.values())


class _Reconstruction(_Replicated):
    """Evaluates a loss of a sparse autoencoder, which reads these outputs of the model among others."""

    _outputs = ("sentence_embedding_backbone", "decoded_embedding_k", "decoded_embedding_4k", "decoded_embedding_aux")
    _outputs += ("decoded_embedding_k_pre_bias",)

    def compute_loss_from_embeddings(self, outputs: Sequence[Mapping[str, Tensor]]) -> Any:
        """Return their losses over the rows of all ranks, from the outputs for each column."""
        return super().compute_loss_from_embeddings(
            [{name: output[name] for name in self._outputs} for output in outputs]
        )


class _ByRows(_OverAllRanks):
    """Evaluates a loss whose rows stay on their rank, as it needs sums over them only."""

    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Any:
        """Return their loss over the rows of all ranks."""
        formula: Any = super().compute_loss_from_embeddings  # type: ignore[misc]
        return global_rows(formula, *_own_rows((embeddings,)), name=type(self).__name__)


class _CachedReplicated(_OverAllRanks):
    """Evaluates on every rank a loss with a gradient cache."""

    def calculate_loss(self, reps: list[list[Tensor]], others: Any = None, *, with_backward: bool = False) -> Tensor:
        """Return the global loss of this rank's mini-batches of each column, after its backward if ``with_backward``.

        Args:
            reps: Embeddings of each mini-batch, by column.
            others: The same of a guide, or labels.
            with_backward: True: the gradients of ``reps`` are computed, and the value has none.
        """
        theirs_on = super().calculate_loss  # type: ignore[misc]

        def in_pieces(columns: Columns, further: Any) -> Tensor:
            if isinstance(further, list):
                further = [[column] for column in further]
            return _back_propagated(lambda pieces, **how: theirs_on(pieces, further, **how), columns)

        columns = [torch.cat(pieces) for pieces in reps]
        if isinstance(others, list):
            others = [torch.cat(pieces) for pieces in others]
        return _finished(self._on_all_rows(in_pieces, columns, others), with_backward)


def _back_propagated(formula: Callable[..., Tensor], columns: Columns) -> Tensor:
    """Return a loss whose gradient is computed at once: each piece of the scores is back-propagated by itself.

    Args:
        formula: Their ``calculate_loss``.
        columns: Embeddings of each column.
    """
    if not torch.is_grad_enabled():
        return formula([[column] for column in columns])
    leaves = [column.detach().requires_grad_() for column in columns]
    value = formula([[leaf] for leaf in leaves], with_backward=True)
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return value_with_grad(value, *columns, factors=gradients)


def _finished(value: Tensor, with_backward: bool) -> Tensor:
    """Return a value, after its backward if ``with_backward``."""
    if not with_backward:
        return value
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


def _own_rows(arguments: Any) -> Any:
    """Return arguments, without the row that stands in on a rank that has none."""
    return inputs.map_tensors(lambda rows: rows[:0], arguments) if _stands_in.get() else arguments


def _refuse_other_rows(named: Sequence[tuple[str, Tensor]]) -> None:
    """Refuse tensors with other numbers of rows: gathered, they would stand beside rows of another rank."""
    counts = {name: tensor.shape[0] if tensor.ndim else "none" for name, tensor in named}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{name} {rows}" for name, rows in counts.items())
        raise InputError(
            "rows of the columns and labels",
            expected="as many in each",
            got=found,
            fix="Give each column and the labels one entry for each row.",
        )


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
        columns = [column.to(dtype) for column in _own_rows(columns)]
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

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """Return the global loss of this rank's columns, (B, D) each."""
        formula: Any = super().compute_loss_from_embeddings  # type: ignore[misc]
        return self._over_all_ranks(embeddings, lambda columns: formula(list(columns), labels))


class _CachedRanking(_Ranking):
    """Evaluates a ranking loss with a gradient cache."""

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Return the global loss of this rank's mini-batches of each column, after its backward if ``with_backward``."""
        formula = functools.partial(_back_propagated, super().calculate_loss)  # type: ignore[misc]
        return _finished(self._over_all_ranks([torch.cat(pieces) for pieces in reps], formula), with_backward)


class MultipleNegativesRankingLoss(_Ranking, theirs.MultipleNegativesRankingLoss):  # type: ignore[misc]  # no types there
    """Compare each anchor with the positives and negatives of all ranks. Arguments and formula are those of sentence-transformers.

    Equivalent to: ``sentence_transformers.losses.MultipleNegativesRankingLoss`` in one process on the rows of all ranks.

    Returns:
        From ``forward``: the global loss, 0-dim, equal on every rank.

    Gradient: after DDP's mean over ranks that of one process, for any numbers of rows per rank.

    Raises:
        RankMismatchError: on every rank, for other options, columns or embedding sizes on some ranks.
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


class CachedMultipleNegativesRankingLoss(_CachedRanking, theirs.CachedMultipleNegativesRankingLoss):  # type: ignore[misc]
    """Compute ``MultipleNegativesRankingLoss`` with the activations of one mini-batch at a time.

    Equivalent to: ``sentence_transformers.losses.CachedMultipleNegativesRankingLoss`` in one process on the rows of all ranks. Ranks may
    have different numbers of mini-batches. The gradients of the model's DDP are reduced once per step.
    """


# ---------------------------------------------------------------------- guided


class _Guided(_OverAllRanks):
    """Evaluates on every rank a loss that a guide model masks."""

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """Return the global loss of this rank's columns."""

        def gathering(name: str) -> _ChangedModel:
            numbers = itertools.count()

            def on_all_rows(embeddings: Tensor) -> Tensor:
                own = _own_rows(embeddings)
                wide = own.to(precision.compute_dtype([own]))
                return self._gather({f"column {next(numbers)} of {name}": wide}, backward="own_slice").tensors[0]

            return _ChangedModel(getattr(self, name), on_all_rows)

        # a copy of this loss with models that return the rows of all ranks
        twin: Any = copy.copy(self)
        models = {name: gathering(name) for name in ("model", "guide")}
        others = {name: module for name, module in self.named_children() if name not in models}  # type: ignore[attr-defined]
        twin.__dict__.update(models, _modules=others)
        # merged columns would be gathered rank by rank
        with column_merging_disabled(), inside_global_batch():
            value = super(_Guided, twin).forward(sentence_features, labels)
        return self._shared(value)


class GISTEmbedLoss(_Guided, theirs.GISTEmbedLoss):  # type: ignore[misc]
    """Compare each anchor with the rows of all ranks but those that a guide model finds closer than the positive.

    Equivalent to: ``sentence_transformers.losses.GISTEmbedLoss`` in one process on the rows of all ranks. Arguments, value and gradient
    are as there.

    Communication: one handshake and one gather per column and model, none in backward.
    """


class _ChangedModel:
    """Stands for a model, and changes its embeddings."""

    def __init__(self, model: Any, change: Callable[[Tensor], Tensor]) -> None:
        self._model, self._change = model, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, features: Features, **kwargs: Any) -> Features:
        output = self._model(features, **kwargs)
        return {**output, "sentence_embedding": self._change(output["sentence_embedding"])}


# ---------------------------------------------------------------------- losses around losses


class _Drawing(_OverAllRanks):
    """Evaluates a loss around another that draws some dimensions or layers a step: rank 0's, on all ranks."""

    _draws = ("n_dims_per_step", "n_layers_per_step")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the global loss of this rank's columns."""
        parts = [self, getattr(self, "loss", None)]
        if not any(getattr(part, name, 0) > 0 for part in parts for name in self._draws):
            return super().__call__(*args, **kwargs)
        with _draws_of_rank_0(type(self).__name__):
            return super().__call__(*args, **kwargs)


class _Layers(_Drawing):
    """Evaluates a loss on several layers, each compared with the last one row by row."""

    def forward(self, sentence_features: Sequence[Features], labels: Tensor | None = None) -> Tensor:
        """Return the global loss of this rank's columns.

        Communication: that of the inner loss for each layer; with the comparison one handshake, and one exchange forward and backward.
        """
        weight = self.kl_div_weight
        world_size = process_groups.world_size()
        theirs_on: Any = super().forward  # type: ignore[misc]
        if world_size == 1 or self.kl_temperature <= 0:
            return theirs_on(sentence_features, labels)  # type: ignore[no-any-return]
        # the mean over the rows of this rank counts as much as it has rows
        rows = 0 if _stands_in.get() else rows_in(sentence_features[0])
        counts = handshake.all_gather_json(type(self).__name__, {"which of several": self._instance}, rows)
        try:
            self.kl_div_weight = weight * rows * world_size / max(sum(counts), 1)
            value = theirs_on(sentence_features, labels)
        finally:
            self.kl_div_weight = weight
        return self._shared(all_reduce_with_grad(value / world_size))


@contextlib.contextmanager
def _draws_of_rank_0(title: str) -> Iterator[None]:
    """Let Python's generator draw on all ranks what it draws on rank 0. Ranks above 0 get their own state back."""
    if process_groups.world_size() == 1:
        yield
        return
    own = random.getstate()
    is_first = process_groups.rank(None) == 0
    state = pickle.dumps(own) if is_first else b""
    shared = handshake.all_gather(f"{title}: random state", {}, state)[0]
    random.setstate(pickle.loads(shared))
    try:
        yield
    finally:
        if not is_first:
            random.setstate(own)


# ---------------------------------------------------------------------- columns


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


# ---------------------------------------------------------------------- any of their losses

_EVALUATIONS: tuple[tuple[type[nn.Module], type[_OverAllRanks]], ...] = (
    (theirs.CachedMultipleNegativesRankingLoss, _CachedRanking),
    (theirs.MultipleNegativesRankingLoss, _Ranking),
    (theirs.GISTEmbedLoss, _Guided),
    (theirs.CachedGISTEmbedLoss, _CachedReplicated),
    (theirs.MegaBatchMarginLoss, _CachedReplicated),
    (sparse.FlopsLoss, _ByRows),
    (sparse.CSRReconstructionLoss, _Reconstruction),
    (theirs.AdaptiveLayerLoss, _Layers),
    (theirs.MatryoshkaLoss, _Drawing),
    (sparse.SpladeLoss, _OverAllRanks),
    (sparse.CSRLoss, _OverAllRanks),
)
"""How a class is evaluated, and those derived from it. The first that fits; any other with ``compute_loss_from_embeddings``: replicated."""

_INNER = ("loss", "document_regularizer", "query_regularizer", "reconstruction_loss")


def over_all_ranks(loss: LossOrLosses, *, name: str | None = None) -> LossOrLosses:
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

    Communication: one handshake and one gather a loss and step; ``_Ranking`` and ``_Layers`` say theirs.

    Raises:
        ConfigurationError: for a loss that hides its embeddings (``SoftmaxLoss``, those of several vectors a text), and for one with
            ``gather_across_devices=True``, which would gather once more.
        RankMismatchError: on every rank, for other options, columns, embedding sizes, or another data set on some ranks.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from sentence_transformers.sentence_transformer.losses import CoSENTLoss
        >>> loss = over_all_ranks(CoSENTLoss(SentenceTransformer("all-MiniLM-L6-v2")))  # doctest: +SKIP
    """
    if isinstance(loss, dict):
        return {key: over_all_ranks(inner, name=key) for key, inner in loss.items()}
    if os.environ.get("LIGHTNING_DDP_LOSSES_DISABLE") == "1" or isinstance(loss, _OverAllRanks):
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
        if isinstance(inner, nn.Module) and evaluation in (_OverAllRanks, _Drawing, _Layers):
            over_all_ranks(inner, name=name)
    # their Trainer puts the DDP module in place of `model`, and of nothing else
    if "sentence_embedder" in loss._modules:
        loss._modules["model"] = loss._modules.pop("sentence_embedder")
    loss.__class__ = _class_over_all_ranks(evaluation, kind)
    loss._instance = Instance(kind.__name__, name)  # type: ignore[assignment]
    # a MatryoshkaLoss has put a function around the method of before
    around = vars(loss).get("calculate_loss")
    if around is not None:
        around.fn = MethodType(type(loss).calculate_loss, loss)  # type: ignore[attr-defined]
    return loss


def _evaluation_of(loss: nn.Module) -> type[_OverAllRanks]:
    """Return how a loss is evaluated over all ranks."""
    for kind, evaluation in _EVALUATIONS:
        if isinstance(loss, kind):
            return evaluation
    if hasattr(loss, "compute_loss_from_embeddings"):
        return _Replicated
    raise ConfigurationError(
        f"over_all_ranks: {type(loss).__name__}",
        expected="a loss of sentence-transformers with the method compute_loss_from_embeddings, or around one",
        got=f"one without it, from {type(loss).__module__}",
        fix="Embed in a loss of your own that has the method: ddp-losses explain migrate sentence_transformers.",
    )


@functools.cache
def _class_over_all_ranks(evaluation: type[_OverAllRanks], kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of the same name that evaluates a loss over all ranks."""
    members = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        # unpickled by what it is made of, as its name is that of theirs
        "__reduce_ex__": lambda self, protocol: (_empty_loss, (evaluation, kind), vars(self)),
    }
    if issubclass(kind, (theirs.BatchAllTripletLoss, theirs.BatchHardTripletLoss, theirs.BatchSemiHardTripletLoss)):
        members["sentence_embedder"] = property(lambda self: self.model)
    return type(kind.__name__, (evaluation, kind), members)


def _empty_loss(evaluation: type[_OverAllRanks], kind: type[nn.Module]) -> nn.Module:
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
