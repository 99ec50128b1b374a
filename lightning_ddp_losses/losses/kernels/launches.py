"""Functions of tiles that launch a kernel instead of many operators, with the arguments and results of the function of the same name.

A kernel writes only after all memory that the function returns has been allocated. If it cannot be compiled or launched, nothing was
written, and the function of the same name can still be called (``KernelError``). After a kernel, only operators of torch are launched, or
a second kernel, of which neither writes to the products.

Legend: ``T`` rows and ``C`` columns of a tile, ``k`` blocks of rows or of columns.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from lightning_ddp_losses.losses.kernels import element_kernels
from lightning_ddp_losses.losses.products.log_sum_exp import LogSumExp
from lightning_ddp_losses.losses.products.operands import GradTerms
from lightning_ddp_losses.losses.tile_compiler import KernelError

# not measured. Each of 256 threads has 32 entries, and partial results are 2% of a tile
_BLOCK_ROWS, _BLOCK_COLUMNS, _WARPS = 64, 128, 8


Arguments = dict[str, Any]


def _of_rows(products: Tensor, *names: str) -> Arguments:
    """Return empty memory for partial results of rows, (k, T) each."""
    rows, columns = products.shape
    blocks = triton.cdiv(columns, _BLOCK_COLUMNS)
    return {name: products.new_empty(blocks, rows, dtype=torch.float32) for name in names}


def _of_columns(products: Tensor, width: int, *names: str) -> Arguments:
    """Return the same for the first columns, (k, width) each."""
    blocks = triton.cdiv(products.shape[0], _BLOCK_ROWS)
    return {name: products.new_empty(blocks, width, dtype=torch.float32) for name in names}


_TERMS = "high", "low", "lowest"


def _terms(products: Tensor, term_count: int) -> Arguments:
    """Return memory for a gradient in the form for a product with rows (``operands.split``). In float32 it overwrites them."""
    terms: Arguments = {"TERMS": term_count}
    for name in _TERMS[:term_count]:
        terms[name] = products.new_empty(products.shape, dtype=torch.bfloat16)
    return terms


def _written(products: Tensor, terms: Arguments) -> GradTerms:
    """Return the gradient that a kernel has written."""
    return tuple(terms[name] for name in _TERMS[: terms["TERMS"]]) or (products,)


def _of_towers(factors: Any) -> Arguments:
    """Return what makes logits of products of two towers."""
    return {"of_rows": factors.of_rows, "of_columns": factors.of_columns, "scale": factors.scale}


def _of_classes(chunk: Any) -> Arguments:
    """Return what makes logits of products with classes, and where the targets are."""
    targets = {"own_columns": chunk.targets.columns, "has_own": chunk.targets.is_inside}
    return {"of_rows": chunk.of_rows, "of_columns": chunk.of_columns, "plus": chunk.log_weight} | targets


def _of_labels(matrix: Tensor, keys: Any) -> Arguments:
    """Return the labels of a matrix, and where the rows themselves are: in another batch, behind the last column."""
    labels = {"row_labels": keys.row_labels, "column_labels": keys.column_labels}
    return labels | {"own": matrix.shape[1], "own_columns": keys.own_columns}


def _launch(kernel: Any, products: Tensor, *given: Arguments, **further: Any) -> None:
    """Launch a kernel on a tile.

    Raises:
        KernelError: if it cannot be compiled or launched.
    """
    rows, columns = products.shape
    grid = (triton.cdiv(rows, _BLOCK_ROWS) * triton.cdiv(columns, _BLOCK_COLUMNS),)
    arguments: Arguments = {"BLOCK_ROWS": _BLOCK_ROWS, "BLOCK_COLUMNS": _BLOCK_COLUMNS}
    for each in (*given, further):
        for name, value in each.items():
            # an upstream gradient may be one number in the place of many
            arguments[name] = value.contiguous() if isinstance(value, Tensor) else value
    place = torch.cuda.device(products.device) if products.is_cuda else contextlib.nullcontext()
    try:
        with place:
            # multiplications and additions are not fused, as in eager mode (defaults differ between releases)
            launched = kernel[grid]
            launched(products, rows, columns, *products.stride(), **arguments, num_warps=_WARPS, enable_fp_fusion=False)
    except Exception as error:
        raise KernelError(f"{type(error).__name__}: {str(error)[:300]}") from error


# ---------------------------------------------------------------------- two towers


def siglip_tile(
    products: Tensor, factors: Any, bias: Tensor, with_grads: bool, term_count: int, sums_logits: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, GradTerms | None]:
    """Launch ``siglip.siglip_tile``."""
    sums, terms = _of_rows(products, "row_losses"), Arguments()
    if with_grads:
        sums |= _of_rows(products, "row_grads", *["logit_sums"] * sums_logits)
        terms = _terms(products, term_count)
    _launch(element_kernels.siglip_kernel, products, _of_towers(factors), sums, terms, bias=bias, own=factors.own)
    losses = sums["row_losses"].sum(0)
    if not with_grads:
        return losses, None, None, None
    logit_sum = sums["logit_sums"].sum().view(1) if sums_logits else None
    return losses, sums["row_grads"].sum(0), logit_sum, _written(products, terms)


def clip_stats(
    products: Tensor, factors: Any, text_count: int, keep: bool
) -> tuple[LogSumExp, LogSumExp | None, Tensor | None]:
    """Launch ``clip.clip_stats``."""
    stats = _of_rows(products, "row_maxima", "row_sums")
    if text_count:
        stats |= _of_columns(products, text_count, "column_maxima", "column_sums")
    lowest = torch.finfo(products.dtype).min
    own = {"own": factors.own, "OWN": "lowest", "LOWEST": lowest, "text_count": text_count}
    _launch(element_kernels.softmax_stats_kernel, products, _of_towers(factors), stats, own, KEEPS=keep)
    of_columns = None
    if text_count:
        of_columns = LogSumExp.merged(stats["column_maxima"], stats["column_sums"])
    of_rows = LogSumExp.merged(stats["row_maxima"], stats["row_sums"])
    return of_rows, of_columns, products if keep else None


def clip_terms(
    products: Tensor,
    factors: Any,
    row_lse: Tensor,
    column_lse: Tensor | None,
    own: Tensor,
    term_count: int,
    are_logits: bool,
    own_logits: Tensor | None,
) -> tuple[Tensor | None, GradTerms]:
    """Launch ``clip.clip_terms``."""
    terms = _terms(products, term_count)
    sums = Arguments()
    if own_logits is not None:
        sums = _of_rows(products, "logit_sums")
        if are_logits:
            sums["own_logits"] = own_logits
    of_products = {} if are_logits else _of_towers(factors)
    of_softmaxes = {"row_lse": row_lse, "column_lse": column_lse, "own": factors.own, "values": own, "OWN": "put"}
    of_grad = {"grad_of_rows": factors.of_rows, "grad_of_columns": factors.of_columns}
    _launch(element_kernels.softmax_terms_kernel, products, of_products, of_softmaxes, of_grad, sums, terms)
    logit_sum = None if own_logits is None else sums["logit_sums"].sum().view(1)
    return logit_sum, _written(products, terms)


# ---------------------------------------------------------------------- classes


def class_stats(
    products: Tensor, chunk: Any, target: Tensor, has_margin: bool, keep: bool
) -> tuple[Tensor, LogSumExp, Tensor | None]:
    """Launch ``sharded_softmax.class_stats``."""
    stats = _of_rows(products, "row_maxima", "row_sums")
    if not has_margin:
        target = target.clone()
    own = {"values": target, "OWN": "put" if has_margin else "take", "LOWEST": torch.finfo(products.dtype).min}
    _launch(element_kernels.softmax_stats_kernel, products, _of_classes(chunk), stats, own, KEEPS=keep)
    return target, LogSumExp.merged(stats["row_maxima"], stats["row_sums"]), products if keep else None


def class_terms(
    products: Tensor, chunk: Any, minus_lse: Tensor, at_targets: Tensor | None, factors: Any, term_count: int
) -> GradTerms:
    """Launch ``sharded_softmax.class_terms``."""
    terms, (of_rows, of_columns) = _terms(products, term_count), factors
    own = {"values": at_targets, "OWN": "subtract" if at_targets is None else "put"}
    of_grad = {"row_lse": minus_lse, "SIGN": -1, "grad_of_rows": of_rows, "grad_of_columns": of_columns}
    _launch(element_kernels.softmax_terms_kernel, products, _of_classes(chunk), own, of_grad, terms)
    return _written(products, terms)


# ---------------------------------------------------------------------- pairs


def supcon_rows(matrix: Tensor, keys: Any) -> tuple[Tensor, ...]:
    """Launch ``tile_functions.supcon_rows``."""
    stats = _of_rows(matrix, "row_maxima", "row_sums", "positive_sums", "positive_counts")
    _launch_stats(matrix, keys, stats, OWN="lowest")
    maxima, sums, positive_sums, counts = stats.values()
    maximum = maxima.amax(0)
    # a block's sum of positives is relative to its own maximum
    shift = maxima.sub_(maximum)
    total = positive_sums.addcmul_(counts, shift).sum(0)
    return maximum, sums.mul_(shift.exp_()).sum(0), total, counts.sum(0)


def ntxent_rows(matrix: Tensor, keys: Any, _limits: None, tiny: float, _records: bool) -> tuple[Tensor, ...]:
    """Launch ``tile_functions.ntxent_rows``, without limits (``PairLoss.has_kernels``)."""
    stats, sums = (
        _of_rows(matrix, "row_maxima", "row_sums"),
        _of_rows(matrix, "near_pulls", "near_sums", "near_numbers"),
    )
    _launch_stats(matrix, keys, stats, OWN="same")
    of_negatives = LogSumExp.merged(*stats.values())
    lse = of_negatives.maximum + of_negatives.above_maximum()
    given = {"row_lse": lse, "log_tiny": _log(tiny)}
    _launch(element_kernels.pair_losses_kernel, matrix, _of_labels(matrix, keys), given, sums)
    return lse, *(each.sum(0) for each in sums.values())


def multi_similarity_rows(matrix: Tensor, keys: Any, base: float, ratio: float) -> tuple[Tensor, ...]:
    """Launch ``tile_functions.multi_similarity_rows``, with the constant 1 of the formula."""
    stats = _of_rows(matrix, "row_maxima", "row_sums", "positive_maxima", "positive_sums")
    _launch_stats(matrix, keys, stats, OWN="same", base=float(base), ratio=ratio)
    row_maxima, row_sums, positive_maxima, positive_sums = stats.values()
    return *_with_one(row_maxima, row_sums, base), *_with_one(positive_maxima, positive_sums, 0)


def _launch_stats(matrix: Tensor, keys: Any, stats: Arguments, **further: Any) -> None:
    """Launch the kernel of maxima and sums of exponentials on a matrix of labelled pairs."""
    lowest = torch.finfo(matrix.dtype).min
    _launch(element_kernels.softmax_stats_kernel, matrix, _of_labels(matrix, keys), stats, further, LOWEST=lowest)


def _with_one(maxima: Tensor, sums: Tensor, entry: float) -> tuple[Tensor, Tensor]:
    """Return the maximum of k parts (k, T) and a further entry, and the softmax of the maximum."""
    maximum = maxima.amax(0).clamp_min_(entry)
    total = (sums * torch.exp(maxima - maximum)).sum(0)
    return maximum, total.add_(torch.exp(entry - maximum)).reciprocal_()


def _log(tiny: float) -> float | None:
    """Return the logarithm of the number that PML adds to a ratio, or None if it has no effect."""
    return math.log(tiny) if tiny else None


def supcon_grad(matrix: Tensor, keys: Any, softmaxes: Any, shares: Any) -> Tensor:
    """Launch ``tile_functions.supcon_grad``."""
    return _pair_grad(matrix, keys, softmaxes, shares)


def ntxent_grad(
    matrix: Tensor, keys: Any, _limits: None, tiny: float, softmaxes: Any, lses: Any, *counts: Any
) -> Tensor:
    """Launch ``tile_functions.ntxent_grad``, without limits."""
    return _pair_grad(matrix, keys, softmaxes, lses, *counts, PULLS="ntxent", log_tiny=_log(tiny))


def multi_similarity_grad(
    matrix: Tensor, keys: Any, ratio: float, _may_overflow: bool, of_negatives: Any, of_positives: Any
) -> Tensor:
    """Launch ``tile_functions.multi_similarity_grad``."""
    return _pair_grad(matrix, keys, of_negatives, of_positives, PULLS="softmax", ratio=ratio)


def _pair_grad(matrix: Tensor, keys: Any, softmaxes: Any, shares: Any, counts: Any = (), **pulls: Any) -> Tensor:
    """Return the gradient of a tile. The matrix is not overwritten, because some distances need it in addition to its gradient."""
    grad = _empty_like(matrix)
    given: Arguments = {"OWN": "zero", "SIGN": -1, "high": grad, "TERMS": 1}
    for name, term in (("lse", softmaxes), ("shares", shares), ("counts", counts)):
        given |= dict(zip((f"row_{name}", f"column_{name}"), term, strict=False))
    _launch(element_kernels.softmax_terms_kernel, matrix, _of_labels(matrix, keys), given, pulls)
    return grad


def _empty_like(matrix: Tensor) -> Tensor:
    return torch.empty_like(matrix, memory_format=torch.contiguous_format)


def contrastive_rows(
    matrix: Tensor, keys: Any, margins: Any, sign: float, limits: Any, _records: bool
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Launch ``tile_functions.contrastive_rows``, without counts that are only recorded."""
    sums = _of_rows(matrix, "near_sums", "near_numbers", "far_sums", "far_numbers")
    grads = {"near_grads": _empty_like(matrix), "far_grads": _empty_like(matrix)}
    _launch_margins(matrix, keys, margins, sign, limits, sums | grads)
    return tuple(each.sum(0) for each in sums.values()), [*grads.values()]


def contrastive_grad(matrix: Tensor, keys: Any, margins: Any, sign: float, limits: Any, near: Any, far: Any) -> Tensor:
    """Launch ``tile_functions.contrastive_grad``."""
    grad = _empty_like(matrix)
    given: Arguments = {"near_grads": grad}
    for name, term in (("near", near), ("far", far)):
        given |= dict(zip((f"{name}_of_rows", f"{name}_of_columns"), term, strict=False))
    _launch_margins(matrix, keys, margins, sign, limits, given)
    return grad


def _launch_margins(matrix: Tensor, keys: Any, margins: Any, sign: float, limits: Any, further: Arguments) -> None:
    """Launch the kernel of losses of single pairs for two margins, whose reducers have limits."""
    given: Arguments = {"SIGN": int(sign)}
    for name, margin, bounds in zip(("near", "far"), margins, limits, strict=True):
        given[name] = float(margin)
        for bound, value in zip(("low", "high"), bounds or (None, None), strict=True):
            given[f"{name}_{bound}"] = None if value is None else float(value)
    _launch(element_kernels.pair_losses_kernel, matrix, _of_labels(matrix, keys), given, further)


_OF_TOWERS = siglip_tile, clip_stats, clip_terms
_OF_CLASSES = class_stats, class_terms
_OF_ROWS = supcon_rows, ntxent_rows, multi_similarity_rows, contrastive_rows
_OF_PAIRS = supcon_grad, ntxent_grad, multi_similarity_grad, contrastive_grad
LAUNCHES: dict[str, Callable[..., Any]] = {
    launch.__name__: launch for launch in (*_OF_TOWERS, *_OF_CLASSES, *_OF_ROWS, *_OF_PAIRS)
}
"""By the name of the function whose place it takes."""
