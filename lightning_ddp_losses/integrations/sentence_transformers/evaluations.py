"""Ways to evaluate a loss of sentence-transformers over all ranks: one class for each, mixed into the class of the loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import inputs, precision
from lightning_ddp_losses.core.autograd_graph import inside_global_batch
from lightning_ddp_losses.distributed import handshake
from lightning_ddp_losses.distributed.gathered_batch import GatheredBatch, gather_batch
from lightning_ddp_losses.distributed.global_values import (
    UpstreamGradWatch,
    micro_batch_to_match,
    reduction_to_match,
    remember_global_value,
)
from lightning_ddp_losses.distributed.messages import Instance
from lightning_ddp_losses.errors import ConfigurationError, InputError
from lightning_ddp_losses.losses.formulas.global_rows import open_rows, run_on_rows
from lightning_ddp_losses.losses.gathered_call import SeedCounter
from lightning_ddp_losses.losses.partial_sums import value_with_grad

Features = dict[str, Any]
"""The features of one column, as returned by the library's tokenizer."""

Columns = Sequence[Tensor]
"""The embeddings of each column, (B, D) or (G, D) each."""

stands_in: ContextVar[bool] = ContextVar("stands_in", default=False)
"""True while a rank without rows embeds a placeholder row, which is dropped before the loss."""

_seeds = SeedCounter()
_evaluations = itertools.count(1)
_last_evaluation = 0


class OverAllRanks:
    """Evaluates a loss of the library over the rows of all ranks.

    The library's ``gather_across_devices`` does not have an effect: the rows of all ranks are compared in any case.
    """

    _instance: Instance
    get_config_dict: Callable[[], dict[str, Any]]
    gather_across_devices = property(lambda self: False, lambda self, value: None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._instance = Instance(type(self).__name__)

    def __call__(self, sentence_features: Iterable[Features], *args: Any, **kwargs: Any) -> Any:
        """Return the global loss of this rank's columns. An error on one rank is raised on all ranks."""
        features = list(sentence_features)
        is_empty = any(map(_is_empty, features))
        token = stands_in.set(is_empty or stands_in.get())
        try:
            with handshake.raising_on_all_ranks(type(self).__name__):
                before = _last_evaluation
                value = super().__call__([*map(_filled, features)], *args, **kwargs)  # type: ignore[misc]
                self._refuse_local_value(before)
                return value
        finally:
            stands_in.reset(token)

    def _refuse_local_value(self, before: int) -> None:
        """Reject a call in which no loss was evaluated over all ranks, because its value only covers this rank's rows."""
        if _last_evaluation == before:
            raise ConfigurationError(
                f"{type(self).__name__}: forward",
                expected="a call of compute_loss_from_embeddings or calculate_loss, which get the rows of all ranks",
                got="a loss of this rank's rows",
                fix="Let forward return what that method returns for the embeddings.",
            )

    def _watch(self) -> UpstreamGradWatch:
        return UpstreamGradWatch.of(f"{self._instance.kind} {self._instance.number}", None)

    def _must_match(self) -> dict[str, object]:
        """Return the values that must be equal on all ranks: which loss it is, and its options."""
        options: dict[str, object] = {}
        if hasattr(self, "get_config_dict"):
            config = self.get_config_dict()
            options = {name: value for name, value in config.items() if not isinstance(value, nn.Module)}
        return {
            "which of several": self._instance,
            "options": options,
            "coefficient of the last backward": self._watch().take(),
            **reduction_to_match(),
        }

    def _gather(self, columns: dict[str, Tensor], **how: Any) -> GatheredBatch:
        """Gather columns of all ranks. Options that differ between ranks are an error on all ranks."""
        return gather_batch(type(self).__name__, columns, self._must_match(), **how)

    def _shared(self, value: Tensor) -> Tensor:
        """Return a loss that every rank has computed, and compare its coefficient in backward in the next call."""
        remember_global_value(value)
        return self._watch().watch(value)  # type: ignore[no-any-return]

    def _on_all_rows(self, formula: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a formula over the rows of all ranks, which every rank evaluates.

        Args:
            formula: The library's loss.
            arguments: Nests of tensors with rows of this rank. The tensors of the first one are embeddings.

        Communication: one handshake, one gather, none in backward.
        """
        note_evaluation()
        first, *others = own_rows(arguments)
        dtype = precision.compute_dtype(inputs.tensors_in(first))
        arguments = (precision.cast_floating(first, dtype), *others)
        named = []
        for part, argument in zip(("embeddings", "labels", "other"), arguments, strict=False):
            named += [leaf for leaf in inputs.leaves(argument, part) if isinstance(leaf[1], Tensor)]
        devices = {tensor.device.type for _, tensor in named}
        with precision.without_autocast(devices), handshake.raising_on_all_ranks(type(self).__name__):
            _refuse_other_rows(named)
            rows = iter(self._gather(dict(named), backward="own_slice").tensors)
            with inside_global_batch():
                value = formula(*inputs.map_tensors(lambda own: next(rows), arguments))
        return inputs.map_tensors(self._shared, value)


class Replicated(OverAllRanks):
    """Evaluates on every rank a loss that is called with the embeddings of its columns."""

    def compute_loss_from_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Return the library's loss over the rows of all ranks. A parameter of the loss receives one process's gradient on every rank."""
        formula: Any = super().compute_loss_from_embeddings  # type: ignore[misc]
        names = list(kwargs)

        def with_names(*given: Any) -> Any:
            named = dict(zip(names, given[len(args) :], strict=True))
            return formula(*given[: len(args)], **named)

        return self._on_all_rows(with_names, *args, *kwargs.values())


class Reconstruction(Replicated):
    """Evaluates a loss of a sparse autoencoder, which reads these outputs of the model, among others."""

    _outputs = (
        "sentence_embedding_backbone",
        "decoded_embedding_k",
        "decoded_embedding_4k",
        "decoded_embedding_aux",
        "decoded_embedding_k_pre_bias",
    )

    def compute_loss_from_embeddings(self, outputs: Sequence[Mapping[str, Tensor]]) -> Any:
        """Return the library's losses over the rows of all ranks, from the outputs for each column."""
        return super().compute_loss_from_embeddings(
            [{name: output[name] for name in self._outputs} for output in outputs]
        )


class ByRows(Replicated):
    """Evaluates a loss whose rows stay on their rank, because it only requires sums over them."""

    def compute_loss_from_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Return the library's loss over the rows of all ranks.

        Communication: one handshake before the formula and one after it, none in backward. As ``Replicated`` if the loss has its own
        parameters, because DDP does not reduce them.
        """
        if self._has_parameters():
            return super().compute_loss_from_embeddings(*args, **kwargs)
        formula: Any = super(Replicated, self).compute_loss_from_embeddings  # type: ignore[misc]
        note_evaluation()
        title = type(self).__name__
        args, kwargs = own_rows((args, kwargs))
        named = [leaf for leaf in inputs.leaves((args, kwargs), "argument") if isinstance(leaf[1], Tensor)]
        tensors = [tensor for _, tensor in named]
        args, kwargs = precision.cast_floating((args, kwargs), precision.compute_dtype(tensors))
        devices = {tensor.device.type for tensor in tensors}
        with precision.without_autocast(devices), handshake.raising_on_all_ranks(title):
            _refuse_other_rows(named)
            must_match = {**self._must_match(), **micro_batch_to_match()}
            opened = open_rows(title, args, kwargs, {}, must_match, _seeds, None)
            value = formula(*args, **kwargs) if opened is None else run_on_rows(formula, opened)
        return inputs.map_tensors(self._shared, value)

    def _has_parameters(self) -> bool:
        """Return whether the loss itself has parameters, in addition to the model's."""
        modules: Any = self.named_children()  # type: ignore[attr-defined]
        of_parts = [list(module.parameters()) for name, module in modules if name != "model"]
        return any(of_parts) or bool(self._parameters)  # type: ignore[attr-defined]


class CachedReplicated(OverAllRanks):
    """Evaluates on every rank a loss with a gradient cache."""

    def calculate_loss(self, reps: list[list[Tensor]], others: Any = None, *, with_backward: bool = False) -> Tensor:
        """Return the global loss of this rank's mini-batches of each column, after its backward if ``with_backward``.

        Args:
            reps: Embeddings of each mini-batch, by column.
            others: The same for a guide, or labels.
            with_backward: If True, the gradients of ``reps`` are computed, and the value does not have one.
        """
        theirs_on = super().calculate_loss  # type: ignore[misc]

        def in_pieces(columns: Columns, further: Any) -> Tensor:
            if isinstance(further, list):
                further = [[column] for column in further]
            return back_propagated(lambda pieces, **how: theirs_on(pieces, further, **how), columns)

        columns = [torch.cat(pieces) for pieces in reps]
        if isinstance(others, list):
            others = [torch.cat(pieces) for pieces in others]
        return finished(self._on_all_rows(in_pieces, columns, others), with_backward)


def note_evaluation() -> None:
    """Record that a loss is evaluated over all ranks."""
    global _last_evaluation  # noqa: PLW0603 - one number, which only grows
    _last_evaluation = next(_evaluations)


def back_propagated(formula: Callable[..., Tensor], columns: Columns) -> Tensor:
    """Return a loss whose gradient is computed immediately, back-propagating each piece of the scores separately.

    Args:
        formula: The library's ``calculate_loss``.
        columns: Embeddings of each column.
    """
    if not torch.is_grad_enabled():
        return formula([[column] for column in columns])
    leaves = [column.detach().requires_grad_() for column in columns]
    value = formula([[leaf] for leaf in leaves], with_backward=True)
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return value_with_grad(value, *columns, factors=gradients)


def finished(value: Tensor, with_backward: bool) -> Tensor:
    """Return a value, after its backward if ``with_backward``."""
    if not with_backward:
        return value
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


def own_rows(arguments: Any) -> Any:
    """Return arguments without the placeholder row of a rank without rows."""
    return inputs.map_tensors(lambda rows: rows[:0], arguments) if stands_in.get() else arguments


def _refuse_other_rows(named: Sequence[tuple[str, Tensor]]) -> None:
    """Reject tensors with different numbers of rows: after a gather they would be next to rows of another rank."""
    counts = {name: tensor.shape[0] if tensor.ndim else "none" for name, tensor in named}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{name} {rows}" for name, rows in counts.items())
        raise InputError(
            "rows of the columns and labels",
            expected="as many in each",
            got=found,
            fix="Give each column and the labels one entry for each row.",
        )


# ---------------------------------------------------------------------- columns


def _is_empty(features: Features) -> bool:
    """Return whether a column is without rows."""
    return any(isinstance(value, Tensor) and value.ndim > 0 and not len(value) for value in features.values())


def rows_in(features: Features) -> int:
    """Return the number of rows of a column, padded or packed."""
    if "cu_seq_lens_q" in features:
        return len(features["cu_seq_lens_q"]) - 1
    for name in ("input_ids", "attention_mask"):
        if isinstance(features.get(name), Tensor):
            return len(features[name])
    sizes = [len(value) for value in features.values() if isinstance(value, Tensor) and value.ndim]
    return sizes[0]


def _filled(features: Features) -> Features:
    """Return a column, with a row of ones if it is empty, because encoders of transformers do not accept an empty batch."""
    if not _is_empty(features):
        return features
    found = dict(features)
    for name, value in features.items():
        if isinstance(value, Tensor) and value.ndim:
            found[name] = value.new_ones([max(size, 1) for size in value.shape])
    return found
