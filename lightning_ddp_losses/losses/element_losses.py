"""Element losses as partial sums: losses of pytorch-metric-learning (PML) with its reducers, losses of torch.nn, and PML's statistics.

With sums and divisors, uneven ranks yield the mean of one process instead of a mean of means.

| reducer of PML | S_r | n_r |
|---|---|---|
| mean | sum of elements | number of elements |
| sum | sum of elements | none |
| threshold, average of the non-zero | sum of the elements that pass | their number |
| class weighted | sum of weight x element | number of elements |
| divisor | sum of elements | the rank's divisor |
| per anchor | its inner reducer, on one element per anchor | |
| multiple | each sub-loss by its own reducer, then the sum | |

Legend: ``B`` rows on this rank, ``D`` embedding size, ``S_r`` and ``n_r`` this rank's sum and its divisor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import autograd_graph
from lightning_ddp_losses.errors import InputError
from lightning_ddp_losses.losses.partial_sums import ONE_ELEMENT, ElementCounts, GlobalSums, PartialSum
from lightning_ddp_losses.losses.pml_registry import Reduction, reducer_chain, reduction_of

# losses that divide by the weights of the targets that are not ignored. LinearCrossEntropyLoss is new in torch 2.13
_CLASS_INDEX = (nn.CrossEntropyLoss, nn.NLLLoss, getattr(nn, "LinearCrossEntropyLoss", nn.CrossEntropyLoss))


# ---------------------------------------------------------------------- pytorch-metric-learning


def element_losses(
    loss: Any,
    embeddings: Tensor,
    labels: Tensor | None,
    tuples: tuple[Tensor, ...] | None = None,
    references: tuple[Tensor, Tensor | None] | None = None,
) -> dict[str, Any]:
    """Return the element losses of local rows: of the rows only for a sum over samples, or against all rows for a sum over anchors.

    Args:
        loss: The loss from PML.
        embeddings: (B, D), the rows or anchors.
        labels: (B,).
        tuples: Tuples of local anchors and global positives and negatives, from ``anchor_tuples``.
        references: Rows (G, D) and their labels (G,). If None, the rows themselves.
    """
    loss.reset_stats()
    return loss.compute_loss(embeddings, labels, tuples, *(references or (embeddings, labels)))  # type: ignore[no-any-return]


def partial_sums_of(
    reducer: Any, loss_dict: dict[str, Any], embeddings: Tensor, labels: Tensor | None
) -> list[PartialSum]:
    """Return one partial sum per sub-loss.

    Args:
        reducer: The loss's reducer, which ``pml_registry.can_split``.
        loss_dict: Element losses by sub-loss, as returned by PML's ``compute_loss``. The key ``kept`` may contain a mask of valid elements,
            because selecting them would wait for an accelerator.
        embeddings: (B, D), the rows of these losses.
        labels: (B,), their labels.
    """
    return [_partial_sum(reducer, name, info, embeddings, labels) for name, info in loss_dict.items()]


def _partial_sum(
    reducer: Any, name: str, info: dict[str, Any], embeddings: Tensor, labels: Tensor | None
) -> PartialSum:
    losses, indices, kind = info["losses"], info["indices"], info["reduction_type"]
    reduction = reduction_of(reducer, name)
    assert reduction is not None
    if not torch.is_tensor(losses):  # PML's zero loss is the number 0
        return PartialSum(no_loss(embeddings), None if reduction.plain_sum else 0.0, name=name)
    if kind == "already_reduced":
        return PartialSum(_sum_over(losses, embeddings), full=True, name=name, counts=ONE_ELEMENT)
    # with a per-anchor reducer, pairs are first averaged within their anchor
    pairs = len(losses)
    if reduction.per_anchor and kind != "element":
        losses = _mean_per_anchor(losses, indices[0], embeddings.shape[0])
        anchors = torch.arange(len(losses), device=losses.device)
    else:
        anchors = indices if kind == "element" else indices[0]
    # the elements that count, and their weights
    elements = len(losses)
    above_low: float | Tensor = elements
    if reduction.weights is not None:
        assert labels is not None
        losses = losses * reduction.weights.to(device=losses.device, dtype=losses.dtype)[labels[anchors]]
    if reduction.low is not None and reducer_chain(reducer, name)[-1].collect_stats:
        above_low = (losses > reduction.low).sum()
    losses, divisor = _select_passing(reduction, losses, info.get("kept"))
    # the sum and its divisor
    total = _sum_over(losses, embeddings)
    if reduction.plain_sum:
        return PartialSum(total, name=name, counts=ElementCounts(elements, 0.0, above_low, pairs))
    if reduction.given_divisor:
        divisor = info["divisor"]
    partial = PartialSum(total, divisor, name=name, counts=ElementCounts(elements, divisor, above_low, pairs))
    # comparisons with NaN are false, so a NaN would be lost if no element passes
    if reduction.selects and partial.may_count_nothing:
        return replace(partial, total=total + no_loss(embeddings.detach()))
    return partial


def embedding_term(loss: Any, embeddings: Tensor) -> Tensor:
    """Return the regularizer of all ranks' embeddings, which every rank computes in full."""
    return loss.embedding_regularization_loss(embeddings)["losses"]  # type: ignore[no-any-return]


def _sum_over(losses: Tensor, embeddings: Tensor) -> Tensor:
    """Return the sum of element losses, with the embeddings in its graph."""
    total = losses.sum()
    # if the sum already depends on the embeddings, three passes over them in forward and backward are saved
    if not embeddings.requires_grad or autograd_graph.depends_on(total, embeddings):
        return total
    return total + no_loss(embeddings)


def no_loss(embeddings: Tensor) -> Tensor:
    """Return 0, with the embeddings in its graph. Like PML's zero loss, it is NaN if they contain NaN or an infinity."""
    return torch.sum(embeddings * 0)


def _select_passing(reduction: Reduction, losses: Tensor, kept: Tensor | None) -> tuple[Tensor, float | Tensor]:
    """Return the valid losses that pass, and their number."""
    if kept is None:
        if not reduction.selects:
            return losses, losses.numel()
        passes = reduction.passes(losses)
    else:
        passes = reduction.passes(losses) & kept if reduction.selects else kept
    if losses.is_cpu:
        selected = losses[passes]
        return selected, selected.numel()
    # a selection would wait for its size, so losses that do not pass become 0
    return torch.where(passes, losses, 0), passes.sum()


def _mean_per_anchor(losses: Tensor, anchors: Tensor, rows: int) -> Tensor:
    """Return the mean of each anchor's pair losses, (rows,), and 0 for an anchor without pairs."""
    total = losses.new_zeros(rows).index_add(0, anchors, losses)
    count = losses.new_zeros(rows).index_add(0, anchors, torch.ones_like(losses))
    return total / count.clamp(min=1)


# ---------------------------------------------------------------------- torch.nn


def torch_partial_sum(loss: Any, rows: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PartialSum:
    """Return the sum of this rank's elements, and its part of the global divisor.

    Args:
        loss: A loss of torch.nn with ``reduction`` "mean", "batchmean" or "sum".
        rows: Its first input.
        args: Its inputs, this rank's rows.
        kwargs: Its inputs by keyword.

    Raises:
        InputError: if broadcasting compares every row with every other row, which is not a sum over rows.
    """
    # element losses are the unreduced loss
    reduction = loss.reduction
    object.__setattr__(loss, "reduction", "none")  # nn.Module.__setattr__ takes longer
    try:
        losses = loss(*args, **kwargs)
    finally:
        object.__setattr__(loss, "reduction", reduction)
    if losses.numel() > rows.numel():
        _refuse_broadcast(loss, (*args, *kwargs.values()), losses)
    return PartialSum(losses.sum(), _torch_divisor(loss, losses, args, kwargs))


def _torch_divisor(loss: Any, losses: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | Tensor | None:
    """Return torch's divisor of the sum of these elements, or None if the reduction is a sum."""
    if loss.reduction == "sum":
        return None
    if loss.reduction == "batchmean":
        rows: Tensor = args[0] if args else kwargs["input"]
        return rows.shape[0]
    target = args[1] if len(args) > 1 else kwargs.get("target")
    if isinstance(loss, _CLASS_INDEX) and isinstance(target, Tensor) and not target.is_floating_point():
        return _weight_of(target, loss.weight, loss.ignore_index)
    return losses.numel()


def _refuse_broadcast(loss: Any, given: Sequence[Any], losses: Tensor) -> None:
    """Reject (n, 1) with (n,), which yields n x n differences in one process, while a rank would only compute those of its rows."""
    batches = [value for value in given if isinstance(value, Tensor) and value.ndim]
    if not batches or losses.numel() <= max(batch.numel() for batch in batches):
        return
    dimensions = {batch.ndim for batch in batches if batch.shape[0] == batches[0].shape[0]}
    if len(dimensions) > 1:
        raise InputError(
            f"{type(loss).__name__}: shapes",
            expected="rows along the same dimension in every argument",
            got=", ".join(str(tuple(batch.shape)) for batch in batches),
            fix="Give them the same shape (target.unsqueeze(1), or input.squeeze(1)).",
        )


def _weight_of(target: Tensor, weight: Tensor | None, ignore_index: int | None) -> Tensor:
    """Return the sum of the class weights of targets that are not ignored, without a selection, which would wait for its size."""
    counts = target != (-100 if ignore_index is None else ignore_index)  # torch's default
    if weight is None:
        return counts.sum()
    return torch.where(counts, weight[torch.where(counts, target, 0)], 0).sum()


# ---------------------------------------------------------------------- statistics that PML records (``collect_stats=True``)


def record_norms(distance: Any, embeddings: Tensor, references: Tensor) -> None:
    """Record the mean norms of all ranks' rows on the distance that compared them."""
    with torch.no_grad():
        distance.reset_stats()
        normalized = (distance.maybe_normalize(rows) for rows in (embeddings, references))
        distance.set_default_stats(embeddings, references, *normalized)


def record_counts(loss: Any, sums: GlobalSums) -> None:
    """Record the numbers of elements of each sub-loss over all ranks."""
    for each, counts in zip(sums.partials, sums.counts(), strict=True):
        record_sub_loss(loss, each.name, counts)


def record_sub_loss(loss: Any, name: str, counts: ElementCounts) -> None:
    """Record the numbers of elements of one sub-loss over all ranks, on its reducers."""
    # reducers that average per anchor received the pairs, and the last reducer received the averages
    *per_anchor, last = reducer_chain(loss.reducer, name)
    for reducer, size in (*((each, counts.pairs) for each in per_anchor), (last, counts.elements)):
        reducer.reset_stats()
        if reducer.collect_stats:
            reducer.losses_size = max(int(size), 1)  # a sub-loss without elements is the number 0
    # numbers of elements that passed the limits, or the divisor, in the attributes of PML 2.9
    reduction = reduction_of(last)
    if reduction is None or not last.collect_stats:
        return
    if reduction.selects and counts.elements:
        last.num_past_filter = int(counts.passed)
        if reduction.low is not None:
            last.num_above_low = int(counts.above_low)
        if reduction.high is not None:
            last.num_above_high = int(counts.passed)
    if reduction.given_divisor:
        last.divisor = counts.passed
