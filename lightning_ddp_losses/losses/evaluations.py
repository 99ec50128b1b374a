"""The ways to evaluate a loss over the global batch. ``global_batch`` chooses one per call.

| evaluation | this rank computes | ranks exchange |
|---|---|---|
| ``by_elements`` | the element losses of local rows | their sums and divisors |
| ``by_moments`` | products of local rows | their sums, D x D numbers |
| ``by_rows`` | PML's formula on its own anchors against all rows, a few anchors at a time | their sums and divisors |
| ``tiled.TiledCall`` | the same in tiles of our own | sums, divisors and, where symmetric, one statistic per row |
| ``replicated`` | the full loss on all rows | no more |

``by_rows`` works on chunks (``RowChunks``). Backward computes each again. If all anchors of this rank make one chunk of ordinary
size, that chunk is computed once and keeps its graph.

All give the same value and gradient. Each exchange opens with a handshake, so that ranks that disagree get the same error.

Legend: ``B`` rows on this rank, ``G`` references over all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import autograd_graph, precision
from lightning_ddp_losses.core.torch_compat import TORCH_LOSS_TYPES
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.losses import element_losses, partial_sums, pml_registry
from lightning_ddp_losses.losses.gathered_call import PMLCall, TensorCall, same_draws
from lightning_ddp_losses.losses.moments import barlow_twins, vicreg
from lightning_ddp_losses.losses.partial_sums import GlobalSums, PartialSum, SumExchange
from lightning_ddp_losses.losses.plans.global_batch import LossPlan
from lightning_ddp_losses.losses.pml_registry import Mode, facts_of, name_in_lightly
from lightning_ddp_losses.losses.tuples import anchor_tuples, enough_pairs


def by_elements(
    loss: Any, rules: LossPlan, exchange: SumExchange, rows: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Return the global loss that is a sum over samples, from this rank's rows only. PML's losses do not have positional arguments."""
    # sums and divisors of this rank's elements
    number_of_rows = rows.shape[0]
    if rules.is_pml:
        labels, losses = kwargs.get("labels"), {}
        # without rows, the terms that do not depend on them still count, once
        if number_of_rows or labels is not None:
            losses = element_losses.element_losses(loss, rows, labels)
        partials = element_losses.partial_sums_of(loss.reducer, losses, rows, labels)
        empty = 0.0
    else:
        partials = [element_losses.torch_partial_sum(loss, rows, args, kwargs)]
        empty = math.nan  # torch's mean over nothing
    # the global loss, from the sums of all ranks
    sums = _gather_sums(loss, rules, exchange, partials, rows)
    source = loss, exchange.agreement.operation
    value = partial_sums.global_loss(sums, empty=empty, window_source=source, group=exchange.group)
    # a rank without rows may pass a plain ``torch.zeros(0, D)``, and still takes part in backward
    if number_of_rows == 0:
        value = autograd_graph.match_requires_grad(value, wanted=True)
    return value


def by_moments(loss: Any, views: Sequence[Tensor], group: Group) -> Tensor:
    """Return the global loss of lightly that is a function of mean and covariance of two views, (B, D) each."""
    first, second = views
    if name_in_lightly(loss) == "BarlowTwinsLoss":
        return barlow_twins(first, second, lambd=loss.lambda_param, group=group)
    weights = {"invariance": loss.lambda_param, "variance": loss.mu_param, "covariance": loss.nu_param}
    return vicreg(first, second, **weights, eps=loss.eps, group=group)


def by_rows(loss: Any, rules: LossPlan, exchange: SumExchange, call: PMLCall, chunk_bytes: int | None = None) -> Tensor:
    """Return the global loss that is a sum over anchors, by PML's formula: each rank its own anchors.

    Args:
        loss: PML's.
        rules: Rules for all calls of the loss.
        exchange: Exchange of sums between the ranks.
        call: Its arguments over all ranks.
        chunk_bytes: The most that a chunk of anchors may take, roughly. If None, a default.
    """
    # sums and divisors of this rank's anchors
    chunks = RowChunks(loss, call, chunks_of(loss, call, chunk_bytes))
    partials = chunks.local_sums()
    distance = getattr(loss, "distance", None)
    if distance is not None and distance.collect_stats:
        element_losses.record_norms(distance, call.arguments["embeddings"], call.references)
    # the embedding regulariser, which every rank computes in full
    regularizer = None
    if getattr(loss, "embedding_regularizer", None) is not None:
        regularizer = element_losses.embedding_term(loss, call.arguments["embeddings"])
        full = PartialSum(regularizer, full=True, name="embedding_reg_loss", counts=partial_sums.ONE_ELEMENT)
        partials = [*partials, full]
    # sums and divisors of all ranks
    sums = _gather_sums(loss, rules, exchange, partials, call.given["embeddings"])
    if not chunks.recomputes:
        return partial_sums.global_loss(sums)
    # the number now, the gradient chunk by chunk in backward
    value, factors = sums.reduce()
    if regularizer is None:
        return chunks.value(factors, value)
    return partial_sums.value_with_grad(value, chunks.value(factors[:-1], value) + regularizer)


def replicated(
    loss: nn.Module, call: PMLCall | TensorCall, *, draws: bool = True, writes_distances: bool = False
) -> Any:
    """Return the loss itself, on the rows of all ranks: every rank computes the full loss.

    Args:
        loss: The loss.
        call: Its arguments over all ranks.
        draws: True if it may draw random numbers, from rank 0's seed. To save and restore generators takes as long as a small loss.
        writes_distances: True if it writes into its distances, which backward needs.
    """
    drawing = same_draws(call.seed, call.batches) if draws else contextlib.nullcontext()
    writing = _copied_distances(loss) if writes_distances else contextlib.nullcontext()
    with autograd_graph.inside_global_batch(), drawing, writing:
        return loss(*call.args, **call.kwargs)


@contextlib.contextmanager
def _copied_distances(loss: nn.Module) -> Iterator[None]:
    """Give a loss that writes into its distances a copy to write into, so that backward finds the original."""
    distance: Any = loss.distance
    handle = distance.register_forward_hook(lambda module, args, distances: distances.clone())
    try:
        yield
    finally:
        handle.remove()


def _gather_sums(
    loss: Any, rules: LossPlan, exchange: SumExchange, partials: list[PartialSum], like: Tensor
) -> GlobalSums:
    """Return the sums of all ranks, and record their counts on a loss that collects statistics."""
    sums, _ = exchange.gather(partials, like, with_counts=rules.records)
    if rules.records:
        element_losses.record_counts(loss, sums)
    return sums


# ---------------------------------------------------------------------- a few anchors at a time


CHUNK_BYTES = 64 << 20
"""Default limit of a chunk. Computing twice is worth it only if the batch in one go would be large."""


def chunks_of(loss: nn.Module, call: PMLCall, chunk_bytes: int | None) -> list[slice]:
    """Return this rank's rows in chunks of ordinary input: with too few pairs PML returns a zero for the whole chunk.

    Args:
        loss: The loss that runs on the chunks.
        call: Its arguments.
        chunk_bytes: The most that a chunk may take, roughly. If None, a default.
    """
    positives, negatives = call.local_pair_counts()
    mined = "indices_tuple" in call.arguments
    size = _rows_of_a_chunk(loss, call, positives, negatives, float(chunk_bytes or CHUNK_BYTES))
    rows, start = len(positives), 0
    chunks = []
    while start < rows:
        # take as many rows as fit, and add rows until they are valid input for the loss
        stop = min(start + size, rows)
        while stop < rows and not enough_pairs(positives[start:stop], negatives[start:stop], mined=mined):
            stop = min(stop + size, rows)
        chunks.append(slice(start, stop))
        start = stop
    # a rest at the end goes with the chunk before it
    if len(chunks) > 1 and not enough_pairs(positives[chunks[-1]], negatives[chunks[-1]], mined=mined):
        last = chunks.pop()
        chunks[-1] = slice(chunks[-1].start, last.stop)
    return chunks


def _rows_of_a_chunk(loss: nn.Module, call: PMLCall, positives: Tensor, negatives: Tensor, allowed: float) -> int:
    """Return how many rows take ``allowed`` bytes in PML's formula, on average."""
    anchors = max(len(positives), 1)
    mean_positives, mean_negatives = int(positives.sum()) / anchors, int(negatives.sum()) / anchors
    item, columns = call.references.element_size(), len(call.references)
    memory = facts_of(loss).memory
    if memory == "triplets":  # three indices and some numbers for each triplet
        size = allowed / max(mean_positives * mean_negatives * (24 + 6 * item), 1)
    elif memory == "pairs x pairs":
        size = (allowed / max(mean_positives * mean_negatives * 4 * item, 1)) ** 0.5
    elif memory == "positives x columns":
        size = allowed / max((1 + mean_positives) * columns * 6 * item, 1)
    else:
        size = allowed / max(columns * 6 * item, 1)
    return max(1, int(size))


def _on_host(partial: PartialSum) -> PartialSum:
    """Return a partial sum whose tensors on the CPU are numbers. Others stay on their accelerator."""

    def stored(value: Any) -> Any:
        return value.item() if isinstance(value, Tensor) and value.is_cpu else value

    counts = partial_sums.ElementCounts(*map(stored, partial.counts))
    return replace(partial, total=stored(partial.total), divisor=stored(partial.divisor), counts=counts)


class RowChunks:
    """One evaluation of this rank's anchors, in chunks.

    Args:
        loss: A loss that is a sum over anchors.
        call: Its arguments over all ranks.
        chunks: Rows of each chunk, from ``chunks_of``.
    """

    def __init__(self, loss: Any, call: PMLCall, chunks: list[slice]) -> None:
        self._loss, self._call, self._chunks = loss, call, chunks
        self._owner_of_full: list[int | None] = []

    @property
    def recomputes(self) -> bool:
        """Whether backward computes the chunks once more. Else the one chunk has kept its graph."""
        return len(self._chunks) > 1

    def local_sums(self) -> list[PartialSum]:
        """Return this rank's partial sums, without a graph if backward recomputes them."""
        embeddings, references = self._call.given["embeddings"], self._call.references
        if not self.recomputes:
            return self._partials(None, embeddings, references)
        with torch.no_grad():
            embeddings, references = embeddings.detach(), references.detach()
            # nothing that a chunk allocates may outlive it (``tile_results``)
            by_chunk = [
                [_on_host(partial) for partial in self._partials(chunk, embeddings[chunk], references)]
                for chunk in self._chunks
            ]
        found = []
        for partials in zip(*by_chunk, strict=True):
            # a full term counts once, in the first chunk that has it
            owner = next((number for number, partial in enumerate(partials) if partial.full), None)
            self._owner_of_full.append(owner)
            found.append(partial_sums.sum_of(partials) if owner is None else partials[owner])
        return found

    def value(self, factors: list[Tensor], value: Tensor) -> Tensor:
        """Return the loss. Its gradient is computed chunk by chunk in backward.

        Args:
            factors: Factor of each sub-loss.
            value: Its number.
        """
        parameters = [p for p in self._loss.parameters() if p.requires_grad]
        inputs = (self._call.given["embeddings"], self._call.references, *parameters)
        return partial_sums.value_with_grad(value, *inputs, vjp=lambda wanted: self._gradients(factors, wanted))

    def _gradients(self, factors: list[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
        """Return the gradients of embeddings, references (zeros where not wanted) and parameters."""
        embeddings, references = self._call.given["embeddings"], self._call.references
        dtype, devices = embeddings.dtype, {embeddings.device.type}
        # casts of parameters need a gradient, as in forward
        with torch.enable_grad(), precision.full_precision(dtype, devices), precision.cast_module(self._loss, dtype):
            anchors, columns = embeddings.detach().requires_grad_(), references.detach().requires_grad_(wanted[1])
            leaves = [anchors, columns, *(p for p in self._loss.parameters() if p.requires_grad)]
            gradients = {leaf: torch.zeros_like(leaf) for leaf in leaves}
            leaves = [leaf for leaf in leaves if leaf.requires_grad]
            for number, chunk in enumerate(self._chunks):
                # the chunk once more, now with a graph
                with autograd_graph.own_graph():
                    total = self._weighted_total(number, anchors[chunk], columns, factors)
                found = torch.autograd.grad(total, leaves, allow_unused=True)
                for leaf, added in zip(leaves, found, strict=True):
                    if added is not None:
                        gradients[leaf].add_(added)
        return [*gradients.values()]

    def _weighted_total(self, number: int, anchors: Tensor, references: Tensor, factors: list[Tensor]) -> Tensor:
        """Return one chunk's share of the global loss, with its graph."""
        partials = self._partials(self._chunks[number], anchors, references)
        total = anchors.new_zeros(())
        for partial, factor, owner in zip(partials, factors, self._owner_of_full, strict=True):
            if owner is None or owner == number:
                total = total + partial.total * factor.to(total.dtype)
        return total

    def _partials(self, chunk: slice | None, anchors: Tensor, references: Tensor) -> list[PartialSum]:
        """Return the partial sums of one chunk's anchors, or of all anchors (None)."""
        call, labels = self._call, self._call.local_labels
        if labels is not None and chunk is not None:
            labels = labels[chunk]
        others = references, call.ref_labels
        losses = element_losses.element_losses(self._loss, anchors, labels, call.local_tuples(chunk), others)
        return element_losses.partial_sums_of(self._loss.reducer, losses, anchors, labels)


# ---------------------------------------------------------------------- is a loss a sum over samples or over anchors?


_HALVES = ((0, 5), (5, 12))  # unequal on purpose
# errors of a loss that cannot run on a part
_CANNOT = (RuntimeError, ValueError, TypeError, AssertionError, IndexError, AttributeError, KeyError)


def check_separable(
    loss: nn.Module, *, embedding_size: int = 8, num_classes: int = 4, seed: int = 0, rtol: float = 1e-9
) -> tuple[Mode, ...]:
    """Measure which modes of ``GlobalBatchLoss`` are exact for a loss, in float64 on two unequal parts of a batch.

    Args:
        loss: An instance. A copy of it is run.
        embedding_size: D of the embeddings it takes.
        num_classes: Labels are 0 ... num_classes - 1.
        seed: Seed of the random batch of 12 rows.
        rtol: Relative tolerance of value and gradient.

    Returns:
        Those of ``"elements"``, ``"rows"`` that hold, and ``"replicated"``, which always does for a deterministic loss. A claim
        made with ``register_element_wise`` or ``register_row_separable`` is right when its mode is among them.

    Example:
        >>> from pytorch_metric_learning.losses import SupConLoss
        >>> check_separable(SupConLoss())
        ('rows', 'replicated')
    """
    # a loss of two views compares by the loss inside it
    loss = pml_registry.labelled_loss(copy.deepcopy(loss).double())
    generator = torch.Generator().manual_seed(seed)
    rows = _HALVES[-1][1]
    embeddings = torch.randn(rows, embedding_size, generator=generator, dtype=torch.float64)
    labels = torch.randint(num_classes, (rows,), generator=generator)
    exact: list[Mode] = [mode for mode in ("elements", "rows") if _is_exact(loss, embeddings, labels, mode, rtol)]
    return (*exact, "replicated")


def _is_exact(loss: nn.Module, embeddings: Tensor, labels: Tensor, mode: Mode, rtol: float) -> bool:
    """Return whether the two halves together give the value and the gradients of the full batch."""
    leaf = embeddings.clone().requires_grad_()
    parameters = [leaf, *(p for p in loss.parameters() if p.requires_grad)]
    try:
        # the full batch in one go
        expected_value = loss(leaf, _targets(loss, leaf, labels))
        expected = torch.autograd.grad(expected_value, parameters, allow_unused=True)
        # and in two halves
        halves = [_half(loss, leaf, labels, bounds, mode) for bounds in _HALVES]
    except _CANNOT:
        return False
    partials = [parts[0] if parts[0].full else partial_sums.sum_of(parts) for parts in zip(*halves, strict=True)]
    value = partial_sums.global_loss(partial_sums.sums_of_all_rows(partials, leaf))
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    pairs = [(expected_value, value), *zip(expected, found, strict=True)]
    return all(_is_close(a, b, rtol) for a, b in pairs)


def _half(loss: nn.Module, leaf: Tensor, labels: Tensor, bounds: tuple[int, int], mode: Mode) -> list[PartialSum]:
    start, stop = bounds
    rows, own_labels = leaf[start:stop], labels[start:stop]
    if isinstance(loss, TORCH_LOSS_TYPES):
        if mode == "rows":
            raise ValueError("torch.nn losses have no anchors")
        targets = _targets(loss, leaf, labels)[start:stop]
        return [element_losses.torch_partial_sum(loss, rows, (rows, targets), {})]
    if not pml_registry.can_split(getattr(loss, "reducer", None)):
        raise ValueError("the reducer cannot be split")
    if mode == "elements":
        losses = element_losses.element_losses(loss, rows, own_labels)
    else:
        triplets = facts_of(loss).compares_triplets
        tuples = anchor_tuples(labels, labels, bounds, None, triplets=triplets, same=True)
        losses = element_losses.element_losses(loss, rows, own_labels, tuples, (leaf, labels))
    return element_losses.partial_sums_of(loss.reducer, losses, rows, own_labels)


def _targets(loss: nn.Module, leaf: Tensor, labels: Tensor) -> Tensor:
    """Return labels, or values like the input's if a loss of torch.nn compares with those."""
    by_class = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
    if isinstance(loss, TORCH_LOSS_TYPES) and not isinstance(loss, by_class):
        return leaf.detach().flip(0)
    return labels


def _is_close(a: Tensor | None, b: Tensor | None, rtol: float) -> bool:
    """Compare two gradients by their norms. None is a gradient of zeros."""
    if a is None:
        return b is None or not bool(b.any())
    difference = a if b is None else a - b
    return bool(difference.norm() <= rtol * a.norm().clamp(min=1e-300))
