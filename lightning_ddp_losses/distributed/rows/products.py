"""Rules of matrix products and distances: a product over the rows is a sum over ranks, and rows against rows use gathered rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.distributed.rows.maps import cut, share
from lightning_ddp_losses.distributed.rows.pending import add
from lightning_ddp_losses.distributed.rows.tensor import NO_RULE, GlobalRows, name_of, rule


@rule("product", "matmul mm mv dot bmm inner vdot __matmul__ __rmatmul__")
def matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply matrices."""
    operator = name_of(func)
    if len(args) != 2 or kwargs or operator in ("inner", "vdot"):
        return NO_RULE
    first, second = args if operator != "__rmatmul__" else args[::-1]
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return NO_RULE
    if operator in ("mm", "mv", "dot", "bmm"):
        sizes = {"mm": (2, 2), "mv": (2, 1), "dot": (1, 1), "bmm": (3, 3)}[operator]
        if (first.ndim, second.ndim) != sizes:
            return NO_RULE
    if first.ndim == 0 or second.ndim == 0 or first.shape[-1] != second.shape[_contracted(second)]:
        return NO_RULE
    return _product(first, second)


def _contracted(second: Tensor) -> int:
    """Return the dimension of the second factor over which a product sums."""
    return max(second.ndim - 2, 0)


def _product(first: Tensor, second: Tensor) -> Any:
    """Return a matrix product, depending on the position of the rows."""
    if isinstance(first, GlobalRows) and isinstance(second, GlobalRows):
        over_rows = first._dim == first._ndim - 1 and second._dim == _contracted(second)
        if over_rows and first._counts == second._counts:
            return add(first._call, first._local @ second._local, "matmul")
        if _are_one_batch(first, second):
            local = first._local @ second._local
            return first._same(local, local.ndim - (first._ndim - first._dim))
        if first._dim == first._ndim - 2:
            return _rows_by_operand(first, second._collected("matmul"))
        second = second._gathered("matmul")
    if isinstance(first, GlobalRows):
        return _rows_by_plain(first, second)
    assert isinstance(second, GlobalRows)
    return _plain_by_rows(first, second)


def _are_one_batch(first: GlobalRows, second: GlobalRows) -> bool:
    from_right = first._ndim - first._dim
    return from_right > 2 and second._ndim - second._dim == from_right and first._counts == second._counts


def _rows_by_plain(first: GlobalRows, second: Tensor) -> Any:
    call, counts = first._call, first._counts
    if first._dim == first._ndim - 1:
        own = cut(call, second, counts, _contracted(second), "matmul")
        return add(call, first._local @ own, "matmul")
    if first._dim == first._ndim - 2:
        return _rows_by_operand(first, share(call, second, "matmul"))
    return _batch_of_rows(first, second, is_first=True)


def _rows_by_operand(first: GlobalRows, operand: Tensor) -> GlobalRows:
    local = first._local @ operand
    return first._same(local, local.ndim - (2 if operand.ndim > 1 else 1))


def _plain_by_rows(first: Tensor, second: GlobalRows) -> Any:
    call, counts = second._call, second._counts
    if second._dim == _contracted(second):
        own = cut(call, first, counts, first.ndim - 1, "matmul")
        return add(call, own @ second._local, "matmul")
    if second._dim == second._ndim - 1:
        local = share(call, first, "matmul") @ second._local
        return second._same(local, local.ndim - 1)
    return _batch_of_rows(second, first, is_first=False)


def _batch_of_rows(rows: GlobalRows, other: Tensor, *, is_first: bool) -> Any:
    """Multiply the matrices of each row by plain matrices."""
    from_right = rows._ndim - rows._dim
    if other.ndim >= from_right and other.shape[other.ndim - from_right] != 1:
        return NO_RULE
    shared = share(rows._call, other, "matmul")
    local = rows._local @ shared if is_first else shared @ rows._local
    lost = 1 if other.ndim == 1 else 0
    return rows._same(local, local.ndim - (from_right - lost))


@rule("product", "linear")
def linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a plain layer to each row."""
    names = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    rows, weight, bias = names["input"], names["weight"], names.get("bias")
    if not isinstance(rows, GlobalRows) or isinstance(weight, GlobalRows) or isinstance(bias, GlobalRows):
        return NO_RULE
    if rows._dim == rows._ndim - 1:
        return NO_RULE
    shared = [share(rows._call, each, "linear") for each in (weight, bias) if each is not None]
    return rows._same(func(rows._local, *shared))


@rule("product", "addmm")
def addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add to a product."""
    if len(args) != 3:
        return NO_RULE
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    if set(kwargs) - {"beta", "alpha"} or beta == 0:
        return NO_RULE
    return args[0] * beta + (args[1] @ args[2]) * alpha


@rule("product", "einsum")
def einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sum products over the letters that are missing in the result, and over ranks if the letter of the rows is one of them."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    terms = _terms_of(equation, operands)
    lead = next((each for each in operands if isinstance(each, GlobalRows)), None)
    if terms is None or lead is None or kwargs:
        return NO_RULE
    *given, result = terms
    letter = given[_index_of(operands, lead)][lead._dim]
    # 1. convert every operand to this rank's rows
    own = []
    for term, operand in zip(given, operands, strict=True):
        if term.count(letter) > 1:
            return NO_RULE
        own.append((term, operand))
    local = []
    for term, operand in own:
        is_aligned = isinstance(operand, GlobalRows) and operand._counts == lead._counts
        if is_aligned and term[operand._dim] == letter:
            local.append(operand._local)
            continue
        plain = operand._gathered("einsum") if isinstance(operand, GlobalRows) else operand
        dim = term.find(letter)
        if dim < 0:
            local.append(share(lead._call, plain, "einsum"))
        elif plain.shape[dim] == sum(lead._counts):
            local.append(cut(lead._call, plain, lead._counts, dim, "einsum"))
        else:
            return NO_RULE
    # 2. the sum over ranks, or rows
    found = torch.einsum(f"{','.join(given)}->{result}", *local)
    if letter in result:
        return lead._same(found, result.index(letter))
    return add(lead._call, found, "einsum")


def _index_of(operands: list[Any], wanted: object) -> int:
    return next(place for place, each in enumerate(operands) if each is wanted)


def _terms_of(equation: object, operands: list[Any]) -> list[str] | None:
    """Return the letters of each operand and of the result, or None if the equation is not supported."""
    if not isinstance(equation, str) or "." in equation:
        return None
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        return None
    if any(len(term) != operand.ndim for term, operand in zip(terms, operands, strict=True)):
        return None
    if not arrow:
        once = [letter for letter in sorted(set(left) - {","}) if left.count(letter) == 1]
        right = "".join(once)
    return [*terms, right]


@rule("product", "cdist")
def cdist(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compare this rank's rows with all rows."""
    if len(args) < 2:
        return NO_RULE
    first, second, *others = args
    if first.ndim != 2 or second.ndim != 2 or any(isinstance(each, GlobalRows) and each._dim for each in args[:2]):
        return NO_RULE
    if not isinstance(first, GlobalRows):
        return second._same(func(share(second._call, first, "cdist"), second._local, *others, **kwargs), 1)
    is_rows = isinstance(second, GlobalRows)
    other = second._collected("cdist") if is_rows else share(first._call, second, "cdist")
    return first._same(func(first._local, other, *others, **kwargs), 0)


@rule("product", "cosine_similarity pairwise_distance")
def along_last(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compare rows with the same index."""
    from lightning_ddp_losses.distributed.rows.local import lead_of, local_operands

    names = ("x1", "x2", "dim", "eps") if name_of(func) == "cosine_similarity" else ("x1", "x2", "p", "eps", "keepdim")
    given = dict(zip(names, args, strict=False)) | kwargs
    tensors = [given.get("x1"), given.get("x2")]
    lead = lead_of(tensors)
    if lead is None or any(not isinstance(each, Tensor) or each.ndim != lead._ndim for each in tensors):
        return NO_RULE
    dim = given.get("dim", 1) if name_of(func) == "cosine_similarity" else -1
    dim = dim % lead._ndim
    operands = local_operands(tensors, lead, name_of(func))
    if dim == lead._dim or operands is None:
        return NO_RULE
    given["x1"], given["x2"] = operands
    local = func(**given)
    is_kept = local.ndim == lead._ndim
    return lead._same(local, lead._dim if is_kept else lead._dim - (dim < lead._dim))
