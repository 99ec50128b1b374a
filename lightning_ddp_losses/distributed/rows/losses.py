"""Rules of torch's loss functions: a loss for each row or number, then the sum, or the mean by its own divisor, over all ranks."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.distributed.rows.local import lead_of, local_operands
from lightning_ddp_losses.distributed.rows.maps import cut, share
from lightning_ddp_losses.distributed.rows.pending import add, plain_of
from lightning_ddp_losses.distributed.rows.tensor import NO_RULE, GlobalRows, rule

_BY_NUMBER = """mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div poisson_nll_loss
soft_margin_loss hinge_embedding_loss margin_ranking_loss"""
_BY_ROW = (
    """cosine_embedding_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss"""
)
_OPERANDS = {"input", "target", "anchor", "positive", "negative", "input1", "input2"}


@functools.lru_cache(maxsize=64)
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return all arguments by name, or None if deprecated arguments or an unknown reduction are used."""
    bound = _signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    if given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    if given.get("reduction") not in ("none", "mean", "sum", "batchmean"):
        return None
    return given


def _reduced(losses: GlobalRows, reduction: str) -> Any:
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


@rule("loss", _BY_NUMBER)
def by_number(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the loss of each number."""
    given = _arguments(func, args, kwargs)
    # except in binary cross entropy, a weighted mean has a different divisor
    if given is None or (given.get("weight") is not None and not func.__name__.startswith("binary_cross_entropy")):
        return NO_RULE
    tensors: dict[str, Any] = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    lead = lead_of(list(tensors.values()))
    if lead is None or lead._dim != lead._ndim - max(value.ndim for value in tensors.values()) + lead._dim:
        return NO_RULE
    operands = local_operands(list(tensors.values()), lead, func.__name__)
    if operands is None:
        return NO_RULE
    changed = dict(zip(tensors, operands, strict=True)) | {"reduction": "none"}
    losses = func(**(given | changed))
    of_rows = lead._same(losses, losses.ndim - (lead._ndim - lead._dim))
    if given["reduction"] == "batchmean":
        return of_rows.sum() / given["input"].shape[0]
    return _reduced(of_rows, given["reduction"])


@rule("loss", _BY_ROW)
def by_row(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the loss of each row."""
    given = _arguments(func, args, kwargs)
    if given is None:
        return NO_RULE
    tensors: dict[str, Any] = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    lead = next((value for value in tensors.values() if isinstance(value, GlobalRows)), None)
    if lead is None or not _are_rows_of_one_batch(tensors, lead):
        return NO_RULE
    changed: dict[str, Any] = {"reduction": "none"}
    for name, value in tensors.items():
        if name in _OPERANDS:
            changed[name] = value._local
        else:
            changed[name] = share(lead._call, value, func.__name__)
    losses = func(**(given | changed))
    return _reduced(lead._same(losses, 0), given["reduction"])


def _are_rows_of_one_batch(tensors: dict[str, Tensor], lead: GlobalRows) -> bool:
    """Return whether all operands are rows with the same counts in dimension 0, and all other tensors are plain."""
    for name, value in tensors.items():
        if name not in _OPERANDS:
            if isinstance(value, GlobalRows):
                return False
        elif not isinstance(value, GlobalRows) or value._dim != 0 or value._counts != lead._counts:
            return False
    return lead._ndim > 1 and lead._dim == 0


@rule("loss", "cross_entropy nll_loss")
def cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the loss of each target, and divide by the total weight of the targets that are not ignored."""
    given = _arguments(func, args, kwargs)
    if given is None:
        return NO_RULE
    if isinstance(given["input"], GlobalRows) and given["input"]._dim == 1:
        return _over_classes(given["input"], given["target"], given)
    return _over_rows(func, given)


def _over_rows(func: Any, given: dict[str, Any]) -> Any:
    """Compute the loss of each row."""
    logits, target, weight = given["input"], given["target"], given.get("weight")
    are_rows = isinstance(logits, GlobalRows) and isinstance(target, (GlobalRows, Tensor))
    if not are_rows or isinstance(weight, GlobalRows) or logits._dim != 0 or logits._ndim < 2:
        return NO_RULE
    if not isinstance(target, GlobalRows):
        if target.ndim == 0 or target.shape[0] != logits._shape[0]:
            return NO_RULE
        target = logits._same(cut(logits._call, target, logits._counts, 0, func.__name__), 0)
    if target._dim != 0 or target._counts != logits._counts:
        return NO_RULE
    shared = None if weight is None else share(logits._call, weight, func.__name__)
    changed = {"input": logits._local, "target": target._local, "weight": shared, "reduction": "none"}
    losses = logits._same(func(**(given | changed)), 0)
    if given["reduction"] != "mean":
        return _reduced(losses, given["reduction"])
    # one exchange for the sum and its divisor
    own_divisor = _divisor(target._local, losses._local, weight, given["ignore_index"])
    pair = torch.stack([losses._local.sum(), own_divisor.to(losses._local.dtype)])
    found = add(logits._call, pair, func.__name__)
    return found[0] / found[1]


def _over_classes(logits: GlobalRows, target: Any, given: dict[str, Any]) -> Any:
    """Compute the loss of logits (N, G) with plain targets (N,), where the classes are the rows (such as rows against rows)."""
    is_plain = given.get("weight") is None and not given.get("label_smoothing") and "label_smoothing" in given
    if not is_plain or logits._ndim != 2 or not isinstance(target, Tensor) or 0 in logits._shape:
        return NO_RULE
    if target.ndim != 1 or target.dtype != torch.int64 or target.shape[0] != logits._shape[0]:
        return NO_RULE
    plain = target._gathered("cross_entropy") if isinstance(target, GlobalRows) else plain_of(target)
    plain = share(logits._call, plain, "cross_entropy")
    is_counted = plain != given["ignore_index"]
    is_known = (plain >= 0) & (plain < logits._shape[1]) | ~is_counted
    if plain.is_cpu and not bool(is_known.all()):
        return NO_RULE  # torch raises an error that names the target
    # 1. the logit of each target, which is on one rank
    counts = logits._counts
    start = sum(counts[: logits._call.rank])
    own = torch.arange(start, start + logits._local.shape[1], device=plain.device)
    chosen = logits._local.masked_fill(own != plain[:, None], 0).sum(1)
    # 2. the normalizer, which is also a sum over ranks
    losses = logits.logsumexp(1) - add(logits._call, chosen, "cross_entropy")
    if plain.is_cpu and bool(is_counted.all()):
        return losses if given["reduction"] == "none" else getattr(losses, given["reduction"])()
    losses = plain_of(losses).masked_fill(~is_known, math.nan).masked_fill(~is_counted, 0)
    if given["reduction"] == "none":
        return losses
    total = losses.sum()
    return total / is_counted.sum() if given["reduction"] == "mean" else total


def _divisor(target: Tensor, losses: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """Return this rank's part of the divisor: the number or the total weight of its targets."""
    if target.is_floating_point():
        return torch.tensor(float(losses.numel()), device=losses.device)
    counts = target != ignored
    if weight is None:
        return counts.sum()
    return (weight.detach()[target.masked_fill(~counts, 0)] * counts).sum()
