"""Rules of operators that reduce the dimension of the rows: this rank's part, then one sum over ranks. The result is plain.

Means, variances, norms and ``logsumexp`` are expressed as sums, with torch's operators on rows, so autograd computes their derivatives.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.distributed.rows.local import along_dims, dims_of
from lightning_ddp_losses.distributed.rows.pending import add, stack
from lightning_ddp_losses.distributed.rows.tensor import NO_RULE, GlobalRows, name_of, rule


def _named(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> dict[str, Any] | None:
    """Return arguments after the first one by name, or None if there are unknown arguments or the first one is not ``GlobalRows``."""
    if not args or not isinstance(args[0], GlobalRows) or len(args) > len(names) + 1:
        return None
    found = dict(zip(names, args[1:], strict=False))
    for name, value in kwargs.items():
        if name not in names or name in found:
            return None
        found[name] = value
    if any(isinstance(value, Tensor) for value in found.values()):
        return None
    return found


def _dims(rows: GlobalRows, dim: Any) -> list[int] | None:
    """Return the dimensions of a reduction, where None or an empty list means all dimensions."""
    if dim is None or dim in ((), []):
        return list(range(rows._ndim))
    return dims_of(rows, dim)


def _number(rows: GlobalRows, dims: list[int]) -> int:
    return math.prod(rows._shape[dim] for dim in dims)


@rule("sum", "sum")
def sum_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add numbers."""
    given = _named(args, kwargs, "dim", "keepdim", "dtype")
    if given is None:
        return NO_RULE
    rows = args[0]
    dims = _dims(rows, given.get("dim"))
    if dims is None:
        return NO_RULE
    keepdim = given.get("keepdim", False)
    own = rows._local.sum(dims, keepdim, dtype=given.get("dtype"))
    if rows._dim in dims:
        return add(rows._call, own, "sum")
    below = sum(dim < rows._dim for dim in dims)
    return rows._same(own, rows._dim if keepdim else rows._dim - below)


@rule("sum", "mean")
def mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Divide a sum by the number of its elements."""
    given = _named(args, kwargs, "dim", "keepdim", "dtype")
    if given is None:
        return NO_RULE
    rows, dtype = args[0], given.get("dtype")
    dims = _dims(rows, given.get("dim"))
    if dims is None or not (dtype or rows._local.dtype).is_floating_point:
        return NO_RULE
    total = rows.sum(dims, keepdim=given.get("keepdim", False), dtype=dtype)
    number = _number(rows, dims)
    return total / number if number else total * math.nan


@rule("sum", "var std")
def var(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Divide the sum of squared distances from the mean."""
    if len(args) > 1 and isinstance(args[1], bool):
        args = (args[0], None, *args[1:])
    given = _named(args, kwargs, "dim", "unbiased", "keepdim", "correction")
    if given is None:
        return NO_RULE
    rows = args[0]
    dims = _dims(rows, given.get("dim"))
    if dims is None or not rows._local.dtype.is_floating_point:
        return NO_RULE
    correction = given.get("correction")
    if correction is None:
        correction = 1 if given.get("unbiased", True) else 0
    divisor = _number(rows, dims) - correction
    if divisor <= 0:
        return NO_RULE
    if rows._dim not in dims or not _are_moments_small(rows, dims):
        centred = rows - rows.mean(dims, keepdim=True)
        squares = centred.square().sum(dims, keepdim=given.get("keepdim", False))
    else:
        _, squares = merged_moments(moments_of_ranks(rows, dims, name_of(func)), _number(rows, dims))
        squares = squares if given.get("keepdim", False) else squares.squeeze(dims)
    variance = squares / divisor
    return _root(variance) if name_of(func) == "std" else variance


_LARGEST_MOMENTS = 1 << 20
"""Maximum size in bytes of all ranks' moments. Larger tensors are centered, which takes two sums instead of three numbers per rank."""


def _are_moments_small(rows: GlobalRows, dims: list[int]) -> bool:
    """Return whether the moments are small enough for each rank to send its own. Equal on all ranks."""
    kept = math.prod(size for dim, size in enumerate(rows._shape) if dim not in dims)
    return 3 * kept * rows._local.element_size() * rows._call.world_size <= _LARGEST_MOMENTS


def moments_of_ranks(rows: GlobalRows, dims: list[int], operator: str) -> Tensor:
    """Return the mean, sum of squared distances from it and weight of each rank, (W, 3, ...), keeping dimensions. It is pending."""
    local = rows._local
    number = math.prod(local.shape[dim] for dim in dims)
    mean_of_rank = local.sum(dims, keepdim=True) / max(number, 1)
    # backward of a difference would negate a gradient of the size of the rows
    squares_of_rank = (local + (-mean_of_rank)).square().sum(dims, keepdim=True)
    # means are weighted by the root of their number, so that their squares are weighted by the number
    weight = math.sqrt(number)
    weights = torch.full_like(squares_of_rank, weight)
    return stack(rows._call, torch.stack([mean_of_rank * weight, squares_of_rank, weights]), operator)


def merged_moments(moments: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the mean of all ranks and the sum of squared distances from it (Chan et al.), of so many numbers."""
    means, squares, weights = moments[:, 0], moments[:, 1], moments[:, 2]
    mean = (means * weights).sum(0) / number
    # squares within the ranks, and squares of the ranks' means
    return mean, squares.sum(0) + (means - weights * mean).square().sum(0)


def _root(squares: Tensor) -> Tensor:
    """Return the root of a sum of squares. Its gradient at 0 is 0, as in torch's ``std`` and ``norm``."""
    is_zero = squares == 0
    return squares.masked_fill(is_zero, 1).sqrt().masked_fill(is_zero, 0)


@rule("sum", "norm vector_norm linalg_vector_norm linalg_norm")
def norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the root of a sum of squares, or a sum of magnitudes."""
    given = _named(args, kwargs, "p", "dim", "keepdim", "dtype")
    if "ord" in kwargs and isinstance(args[0], GlobalRows):
        renamed = {("p" if name == "ord" else name): value for name, value in kwargs.items()}
        given = _named(args, renamed, "p", "dim", "keepdim", "dtype")
    if given is None or given.get("dtype") is not None or not args[0]._local.dtype.is_floating_point:
        return NO_RULE
    rows, order = args[0], given.get("p", 2)
    dims = _dims(rows, given.get("dim"))
    is_matrix_norm = name_of(func) in ("norm", "linalg_norm") and dims is not None and len(dims) > 1
    if order not in (2, "fro", None, 1) or dims is None or (is_matrix_norm and order == 1):
        return NO_RULE
    if is_matrix_norm and order == 2 and name_of(func) == "linalg_norm" and "p" in given and given.get("p") == 2:
        return NO_RULE  # the largest singular value
    keepdim = given.get("keepdim", False)
    if rows._dim not in dims:
        below = sum(dim < rows._dim for dim in dims)
        local = torch.linalg.vector_norm(rows._local, 1 if order == 1 else 2, dims, keepdim)
        return rows._same(local, rows._dim if keepdim else rows._dim - below)
    if order == 1:
        return rows.abs().sum(dims, keepdim=keepdim)
    return _root(rows.square().sum(dims, keepdim=keepdim))


@rule("sum", "any all")
def any_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Count the elements that are nonzero (``any``) or zero (``all``)."""
    given = _named(args, kwargs, "dim", "keepdim")
    if given is None:
        return NO_RULE
    rows = args[0]
    dims = _dims(rows, given.get("dim"))
    if dims is None:
        return NO_RULE
    wanted = rows != 0 if name_of(func) == "any" else rows == 0
    found = wanted.sum(dims, keepdim=given.get("keepdim", False)) > 0
    return found if name_of(func) == "any" else ~found


@rule("sum", "amax amin max min")
def extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the largest or smallest number. The gradient is shared equally among equal numbers."""
    operator = name_of(func)
    is_first_form = operator in ("amax", "amin")
    if not is_first_form and (len(args) > 1 or kwargs):  # with indices, or of two tensors
        return _extreme_along(func, args, kwargs)
    given = _named(args, kwargs, "dim", "keepdim")
    if given is None:
        return NO_RULE
    rows = args[0]
    dims = _dims(rows, given.get("dim"))
    if dims is None or 0 in rows._shape or rows._local.dtype == torch.bool or rows._local.is_complex():
        return NO_RULE
    if rows._dim not in dims:
        return along_dims(func, rows, dims, args[1:], kwargs)
    keepdim = given.get("keepdim", False)
    found = _extreme_number(rows, dims, operator.removeprefix("a") == "max")
    if rows._local.requires_grad and torch.is_grad_enabled():
        is_found = rows == found
        return rows.masked_fill(~is_found, 0).sum(dims, keepdim=keepdim) / is_found.sum(dims, keepdim=keepdim)
    return found if keepdim else found.squeeze(dims)


def _extreme_along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute along another dimension, or of two tensors."""
    from lightning_ddp_losses.distributed.rows.local import pointwise

    others = (*args[1:], *kwargs.values())
    if any(isinstance(value, Tensor) for value in others):
        return pointwise(func, args, kwargs)
    if not args or not isinstance(args[0], GlobalRows) or "out" in kwargs:
        return NO_RULE
    return along_dims(func, args[0], kwargs.get("dim", args[1] if len(args) > 1 else None), args[1:], kwargs)


def _extreme_number(rows: GlobalRows, dims: list[int], is_max: bool) -> Tensor:
    """Return the extreme over the rows of all ranks, keeping dimensions and without a gradient. Empty ranks use the opposite extreme."""
    local = rows._local.detach()
    if local.shape[rows._dim] == 0:
        shape = [1 if dim in dims else size for dim, size in enumerate(rows._shape)]
        info: Any = torch.finfo(local.dtype) if local.is_floating_point() else torch.iinfo(local.dtype)
        end = -math.inf if is_max else math.inf
        if not local.is_floating_point():
            end = info.min if is_max else info.max
        own = local.new_full(shape, end)
    else:
        own = local.amax(dims, keepdim=True) if is_max else local.amin(dims, keepdim=True)
    stacked = stack(rows._call, own, "amax" if is_max else "amin")
    return stacked.amax(0) if is_max else stacked.amin(0)


@rule("sum", "logsumexp")
def logsumexp(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the logarithm of a sum of exponentials, shifted by the largest number."""
    given = _named(args, kwargs, "dim", "keepdim")
    if given is None or "dim" not in given or not args[0]._local.dtype.is_floating_point:
        return NO_RULE
    rows = args[0]
    dims = _dims(rows, given["dim"])
    if dims is None or 0 in rows._shape:
        return NO_RULE
    if rows._dim not in dims:
        return along_dims(func, rows, dims, args[1:], kwargs)
    largest = _extreme_number(rows, dims, True)
    shift = largest.masked_fill(largest.isinf(), 0)
    total = (rows - shift).exp().sum(dims, keepdim=True).log() + shift
    return total if given.get("keepdim", False) else total.squeeze(dims)


@rule("sum", "bincount")
def bincount(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Count numbers, or sum the weights of rows."""
    given = dict(zip(("weights", "minlength"), args[1:], strict=False)) | kwargs
    rows, weights = args[0], given.get("weights")
    if not isinstance(rows, GlobalRows):
        return NO_RULE
    is_aligned = weights is None or (isinstance(weights, GlobalRows) and weights._counts == rows._counts)
    if not is_aligned or 0 in rows._shape:
        return NO_RULE
    length = max(int(rows.max()) + 1, given.get("minlength", 0))
    own = torch.bincount(rows._local, None if weights is None else weights._local, length)
    if weights is not None:
        # torch returns integer counts if there are no rows
        own = own.to(torch.float32 if weights._local.dtype == torch.float32 else torch.float64)
    return add(rows._call, own, "bincount")


@rule("sum", "index_add scatter_reduce index_reduce")
def index_add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add rows to a plain tensor at indices that are rows."""
    if name_of(func) != "index_add" or len(args) != 4 or kwargs:
        return NO_RULE
    target, dim, index, source = args
    are_rows = isinstance(index, GlobalRows) and isinstance(source, GlobalRows)
    if not are_rows or isinstance(target, GlobalRows):
        return NO_RULE
    if source._counts != index._counts or source._dim != dim % target.ndim:
        return NO_RULE
    own = torch.zeros_like(target).index_add(dim, index._local, source._local)
    return target + add(source._call, own, "index_add")
