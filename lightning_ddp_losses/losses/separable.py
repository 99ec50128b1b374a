"""A numerical check, in one process, of the claim that a loss is a sum over samples or over anchors."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from lightning_ddp_losses.losses import anchor_tuples as pml_rows
from lightning_ddp_losses.losses.partial_sums import PartialSum, can_split, split
from lightning_ddp_losses.losses.pml_registry import Mode
from lightning_ddp_losses.losses.torch_losses import torch_partial_sum

_HALVES = ((0, 5), (5, 12))  # unequal on purpose


def check_separable(
    loss: nn.Module, *, embedding_size: int = 8, num_classes: int = 4, seed: int = 0, rtol: float = 1e-9
) -> tuple[Mode, ...]:
    """Modes of ``GlobalBatchLoss`` that are exact for a loss, as measured in float64 on two unequal parts of a batch.

    Args:
        loss: An instance; a copy of it is run.
        embedding_size: D of the embeddings it takes.
        num_classes: Labels are 0 ... num_classes - 1.
        seed: Of the random batch of 12 rows.
        rtol: Relative tolerance of value and gradient.

    Returns:
        Those of ``"elements"``, ``"rows"`` that hold, and ``"replicated"``, which always does for a deterministic loss. A claim
        made with ``register_element_wise`` or ``register_row_separable`` is right when its mode is among them.

    Example:
        >>> from pytorch_metric_learning.losses import SupConLoss
        >>> check_separable(SupConLoss())
        ('rows', 'replicated')
    """
    loss = copy.deepcopy(loss).double()
    generator = torch.Generator().manual_seed(seed)
    rows = _HALVES[-1][1]
    embeddings = torch.randn(rows, embedding_size, generator=generator, dtype=torch.float64)
    labels = torch.randint(num_classes, (rows,), generator=generator)
    held: list[Mode] = [mode for mode in ("elements", "rows") if _holds(loss, embeddings, labels, mode, rtol)]
    return (*held, "replicated")


def _holds(loss: nn.Module, embeddings: Tensor, labels: Tensor, mode: Mode, rtol: float) -> bool:
    leaf = embeddings.clone().requires_grad_()
    parameters = [leaf, *(p for p in loss.parameters() if p.requires_grad)]
    try:
        whole = loss(leaf, leaf.detach().flip(0) if isinstance(loss, _Loss) and _wants_values(loss) else labels)
        expected = torch.autograd.grad(whole, parameters, allow_unused=True)
        parts = [_part(loss, leaf, labels, bound, mode) for bound in _HALVES]
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError, AttributeError, KeyError):
        return False  # it cannot be run on a part at all
    total, whole_terms = leaf.new_zeros(()), leaf.new_zeros(())
    for column in zip(*parts, strict=True):
        if column[0].full:
            whole_terms = whole_terms + column[0].total
            continue
        divisor = sum(share.divisor for share in column)
        if divisor:
            total = total + sum(share.total for share in column) / divisor
    value = total + whole_terms
    got = torch.autograd.grad(value, parameters, allow_unused=True)
    pairs = [(whole, value), *zip(expected, got, strict=True)]
    return all(_close(a, b, rtol) for a, b in pairs)


def _part(loss: nn.Module, leaf: Tensor, labels: Tensor, bound: tuple[int, int], mode: Mode) -> list[PartialSum]:
    start, stop = bound
    own, own_labels = leaf[start:stop], labels[start:stop]
    if isinstance(loss, _Loss):
        if mode == "rows":
            raise ValueError("torch.nn losses have no anchors")
        target = leaf.detach().flip(0)[start:stop] if _wants_values(loss) else own_labels
        return [torch_partial_sum(loss, (own, target), {}, len(_HALVES))]
    if not can_split(getattr(loss, "reducer", None)):
        raise ValueError("the reducer cannot be split")
    if mode == "elements":
        found = pml_rows.elements(loss, own, own_labels)
    else:
        tuples = pml_rows.anchor_tuples(loss, labels, labels, bound, None, same=True)
        found = pml_rows.row_elements(loss, own, own_labels, tuples, leaf, labels)
    return split(loss.reducer, found, own, own_labels, len(_HALVES))


def _wants_values(loss: nn.Module) -> bool:
    return not isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss))


def _close(a: Tensor | None, b: Tensor | None, rtol: float) -> bool:
    a = torch.zeros(()) if a is None else a
    b = torch.zeros(()) if b is None else b
    return bool((a - b).norm() <= rtol * a.norm().clamp(min=1e-300))
