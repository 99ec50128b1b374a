"""A numerical check, in one process, of the claim that a loss is a sum over samples or over anchors."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core.compat import TORCH_LOSS_TYPES
from lightning_ddp_losses.losses.element_losses import element_losses, partial_sums_of, torch_partial_sum
from lightning_ddp_losses.losses.partial_sums import PartialSum, global_loss, sum_of, sums_of_all_rows
from lightning_ddp_losses.losses.pml_registry import Mode, can_split, facts_of, labelled_loss
from lightning_ddp_losses.losses.tuples import anchor_tuples

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
    loss = labelled_loss(copy.deepcopy(loss).double())
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
    partials = [parts[0] if parts[0].full else sum_of(parts) for parts in zip(*halves, strict=True)]
    value = global_loss(sums_of_all_rows(partials, leaf))
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
        return [torch_partial_sum(loss, (rows, targets), {})]
    if not can_split(getattr(loss, "reducer", None)):
        raise ValueError("the reducer cannot be split")
    if mode == "elements":
        losses = element_losses(loss, rows, own_labels)
    else:
        triplets = facts_of(loss).compares_triplets
        tuples = anchor_tuples(labels, labels, bounds, None, triplets=triplets, same=True)
        losses = element_losses(loss, rows, own_labels, tuples, (leaf, labels))
    return partial_sums_of(loss.reducer, losses, rows, own_labels)


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
