"""Functions of tiles that launch a kernel instead of many operators, with the arguments and results of the function of the same name.

A kernel writes only after all memory that the function returns has been allocated. If it cannot be compiled or launched, nothing was
written, and the function of the same name can still be called (``KernelError``). After a kernel, only operators of torch are launched.

Legend: ``T`` rows and ``C`` columns of a tile, ``k`` blocks of rows or of columns.
"""

from __future__ import annotations

import contextlib
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


def _of_labels(matrix: Tensor, keys: Any, own: str) -> Arguments:
    """Return the labels of a matrix, and where the rows themselves are, which are treated as ``own``: nowhere in another batch."""
    labels = {"row_labels": keys.row_labels, "column_labels": keys.column_labels}
    if keys.own_columns is None:
        return labels | {"own": matrix.shape[1], "OWN": "none"}
    return labels | {"own_columns": keys.own_columns, "OWN": own}


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
    of_labels = _of_labels(matrix, keys, "lowest")
    _launch(element_kernels.softmax_stats_kernel, matrix, of_labels, stats, LOWEST=torch.finfo(matrix.dtype).min)
    maxima, sums, positive_sums, counts = stats.values()
    maximum = maxima.amax(0)
    # a block's sum of positives is relative to its own maximum
    shift = maxima.sub_(maximum)
    total = positive_sums.addcmul_(counts, shift).sum(0)
    return maximum, sums.mul_(shift.exp_()).sum(0), total, counts.sum(0)


def supcon_grad(matrix: Tensor, keys: Any, softmaxes: Any, shares: Any) -> Tensor:
    """Launch ``tile_functions.supcon_grad``. The matrix is not overwritten, because some distances need it in addition to its gradient."""
    grad = torch.empty_like(matrix, memory_format=torch.contiguous_format)
    of_softmaxes = dict(zip(("row_lse", "column_lse"), softmaxes, strict=False))
    of_shares = dict(zip(("row_shares", "column_shares"), shares, strict=False))
    of_grad = {"SIGN": -1, "high": grad, "TERMS": 1}
    of_labels = _of_labels(matrix, keys, "zero")
    _launch(element_kernels.softmax_terms_kernel, matrix, of_labels, of_softmaxes, of_shares, of_grad)
    return grad


_FUNCTIONS = siglip_tile, clip_stats, clip_terms, class_stats, class_terms, supcon_rows, supcon_grad
LAUNCHES: dict[str, Callable[..., Any]] = {launch.__name__: launch for launch in _FUNCTIONS}
"""By the name of the function whose place it takes."""
