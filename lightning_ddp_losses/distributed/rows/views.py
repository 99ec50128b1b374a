"""Rules of operators that reshape rows or select some of them. Results are views of this rank's rows if torch returns views.

The dimension of the rows may move (``transpose``), may take in those behind it (``(N, T, C)`` as ``(N * T, C)``: counts times T) and may be
divided again. A slice of rows, and a mask of rows, are rows of other counts. An order of the rows that is not by rank gathers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.distributed.rows.local import (
    dims_of,
    lead_of,
    local_operands,
    operand_of,
    watch_memory,
)
from lightning_ddp_losses.distributed.rows.maps import cut, share
from lightning_ddp_losses.distributed.rows.nests import mapped
from lightning_ddp_losses.distributed.rows.tensor import NO_RULE, RULES, GlobalRows, Rule, name_of, rule, write_error


def _is_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the first argument is the only tensor and is ``GlobalRows``."""
    others = (*args[1:], *kwargs.values())
    return isinstance(args[0], GlobalRows) and not any(isinstance(value, Tensor) for value in others)


def _sizes(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> tuple[int, ...] | None:
    """Return sizes or dimensions that are passed separately, as one sequence, or by name."""
    given: Any = args[1:] or kwargs.get(name, ())
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = given[0]
    return tuple(given) if given and all(type(each) is int for each in given) else None


# ---------------------------------------------------------------------- another order of dimensions


@rule("view", "transpose swapaxes swapdims t permute movedim moveaxis adjoint")
def reorder(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move dimensions."""
    if not _is_rows(args, kwargs):
        return NO_RULE
    return _reordered(func, args[0], args[1:], kwargs)


def _reordered(func: Any, rows: GlobalRows, others: Sequence[Any], kwargs: dict[str, Any]) -> GlobalRows:
    local = func(rows._local, *others, **kwargs)
    # the shape of a tensor without memory shows the new position of the dimension of the rows
    sizes = torch.empty([1 + (dim == rows._dim) for dim in range(rows._ndim)], device="meta")
    dim = list(func(sizes, *others, **kwargs).shape).index(2)
    return rows._same(local, dim)


def _attribute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move dimensions (``x.T``, ``x.mT``, ``x.H``, ``x.mH``)."""
    return _reordered(func, args[0], (), {})


for _name in ("T", "mT", "H", "mH"):
    RULES[getattr(Tensor, _name).__get__] = Rule("view", _attribute)


@rule("view", "unsqueeze")
def unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add a dimension of size 1."""
    if not _is_rows(args, kwargs):
        return NO_RULE
    rows, dim = args[0], args[1] if len(args) > 1 else kwargs["dim"]
    local = func(rows._local, dim)
    return rows._same(local, rows._dim + (dim % local.ndim <= rows._dim))


@rule("view", "squeeze")
def squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Remove dimensions of size 1. This rank may have one row even if the global tensor has more."""
    if not _is_rows(args, kwargs):
        return NO_RULE
    rows = args[0]
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    dims = list(range(rows._ndim)) if given is None else dims_of(rows, given)
    if dims is None or (rows._dim in dims and sum(rows._counts) == 1):
        return NO_RULE
    ones = [dim for dim in dims if rows._shape[dim] == 1 and dim != rows._dim]
    return rows._same(rows._local.squeeze(ones), rows._dim - sum(dim < rows._dim for dim in ones))


@rule("view", "expand expand_as broadcast_to")
def expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat dimensions of size 1, except the dimension of the rows."""
    if not isinstance(args[0], GlobalRows):
        return NO_RULE
    rows = args[0]
    if len(args) == 2 and isinstance(args[1], Tensor):
        sizes: Any = tuple(args[1].shape)
    else:
        sizes = _sizes(args, kwargs, "size")
    if sizes is None or len(sizes) < rows._ndim:
        return NO_RULE
    sizes, dim = list(sizes), len(sizes) - (rows._ndim - rows._dim)
    if sizes[dim] not in (-1, sum(rows._counts)):
        return NO_RULE
    sizes[dim] = rows._local.shape[rows._dim]
    return rows._same(rows._local.expand(sizes), dim)


# ---------------------------------------------------------------------- other sizes


@rule("view", "view reshape flatten unflatten ravel reshape_as view_as")
def reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Merge dimensions after the dimension of the rows into it, or split it again."""
    rows = args[0]
    if not isinstance(rows, GlobalRows) or 0 in rows._shape:
        return NO_RULE
    if len(args) == 2 and isinstance(args[1], torch.dtype):
        return NO_RULE
    # the shape in one process, computed with a tensor without memory
    others = [torch.empty(each.shape, device="meta") if isinstance(each, Tensor) else each for each in args[1:]]
    shape = list(func(torch.empty(rows._shape, device="meta"), *others, **kwargs).shape)
    place = _place_of_rows(rows, shape)
    if place is None:
        return NO_RULE
    dim, counts = place
    shape[dim] = counts[rows._call.rank]
    is_view = name_of(func).startswith("view")
    local = rows._local.view(shape) if is_view else rows._local.reshape(shape)
    found = rows._same(local, dim, counts)
    if not is_view and min(rows._counts) < 2:
        watch_memory(found, rows, name_of(func))
    return found


def _place_of_rows(rows: GlobalRows, shape: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
    """Return the dimension of the rows in a new shape, and their counts, or None if rows are not divided by rank in it."""
    total, before = sum(rows._counts), math.prod(rows._shape[: rows._dim])
    for dim, size in enumerate(shape):
        if math.prod(shape[:dim]) != before:
            continue
        if size % total == 0:
            return dim, tuple(count * (size // total) for count in rows._counts)
        if total % size == 0 and size > 1:
            each = total // size
            if all(count % each == 0 for count in rows._counts):
                return dim, tuple(count // each for count in rows._counts)
    return None


# ---------------------------------------------------------------------- parts of other dimensions


@rule(
    "view", "select narrow chunk split split_with_sizes unbind tensor_split diagonal hsplit vsplit dsplit __iter__ swap"
)
def part(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return parts along a dimension other than the dimension of the rows."""
    operator = name_of(func)
    if not _is_rows(args, kwargs):
        return NO_RULE
    rows = args[0]
    if operator == "diagonal":
        return _diagonal(rows, args[1:], kwargs)
    place = {
        "select": 1,
        "narrow": 1,
        "unbind": 1,
        "chunk": 2,
        "split": 2,
        "split_with_sizes": 2,
        "tensor_split": 2,
    }.get(operator)
    if place is None:
        return NO_RULE
    dim = kwargs.get("dim", args[place] if len(args) > place else 0)
    dims = dims_of(rows, dim)
    if dims is None or rows._dim in dims:
        return NO_RULE
    found = func(rows._local, *args[1:], **kwargs)
    is_removed = operator in ("select", "unbind") and dims[0] < rows._dim
    return mapped(lambda local: rows._same(local, rows._dim - is_removed), found)


def _diagonal(rows: GlobalRows, others: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the diagonal of rows against as many columns: entry i of row i."""
    names = dict(zip(("offset", "dim1", "dim2"), others, strict=False)) | kwargs
    first, second = names.get("dim1", 0) % rows._ndim, names.get("dim2", 1) % rows._ndim
    if names.get("offset", 0) != 0 or first == second:
        return NO_RULE
    if rows._dim not in (first, second):
        below = (first < rows._dim) + (second < rows._dim)
        return rows._same(torch.diagonal(rows._local, 0, first, second), rows._dim - below)
    other = second if rows._dim == first else first
    if rows._shape[other] != sum(rows._counts):
        return NO_RULE
    start = sum(rows._counts[: rows._call.rank])
    columns = rows._local.narrow(other, start, rows._local.shape[rows._dim])
    local = torch.diagonal(columns, 0, first, second)
    return rows._same(local, local.ndim - 1)


@rule("view", "cat concat concatenate stack hstack vstack")
def join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Concatenate along a dimension other than the dimension of the rows."""
    operator = name_of(func)
    if operator in ("hstack", "vstack") or "out" in kwargs:
        return NO_RULE
    tensors: Any = args[0] if args else kwargs.get("tensors")
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    lead = lead_of(tensors) if isinstance(tensors, (list, tuple)) else None
    if lead is None or not isinstance(dim, int) or any(tensor.ndim != lead._ndim for tensor in tensors):
        return NO_RULE
    adds_dim = operator == "stack"
    dim = dim % (lead._ndim + adds_dim)
    if not adds_dim and dim == lead._dim:
        return NO_RULE
    if any(tensor.shape[lead._dim] != lead._shape[lead._dim] for tensor in tensors):
        return NO_RULE
    found = []
    for tensor in tensors:
        operand = operand_of(tensor, lead, operator)
        # a plain tensor with one row must not broadcast
        if operand is NO_RULE or operand.shape[lead._dim] != lead._local.shape[lead._dim]:
            return NO_RULE
        found.append(operand)
    return lead._same(func(found, dim), lead._dim + (adds_dim and dim <= lead._dim))


# ---------------------------------------------------------------------- indexing


@rule("select", "__getitem__")
def getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read with basic indices of other dimensions, a slice of rows or a mask of rows, or read a plain table at indices that are rows."""
    rows, index = args
    if not isinstance(rows, GlobalRows):
        if isinstance(index, GlobalRows) and index._local.dtype in (torch.int64, torch.int32):
            return index._same(rows_of_table(rows, index))
        return NO_RULE
    rows, index = _with_mask(rows, index)
    if isinstance(index, GlobalRows):
        return _masked(rows, index)
    indices = _basic(index, rows._ndim)
    if indices is None:
        return NO_RULE
    return _basic_part(rows, indices)


def _with_mask(rows: GlobalRows, index: Any) -> tuple[GlobalRows, Any]:
    """Return the columns ``x[:, 1]`` and the mask for ``x[mask, 1]``, and a plain mask as rows. Other arguments are unchanged."""
    mask, *others = index if isinstance(index, tuple) and index else (index,)
    is_plain_mask = type(mask) is Tensor and mask.dtype == torch.bool and mask.ndim > 0 and rows._dim == 0
    if is_plain_mask and mask.shape == rows._shape[: mask.ndim]:
        mask = rows._same(cut(rows._call, mask, rows._counts, 0, "__getitem__"), 0)
    if not isinstance(mask, GlobalRows):
        return rows, index
    if not others:
        return rows, mask
    is_mask = mask._local.dtype == torch.bool and mask._dim == 0 and rows._dim == 0
    if not is_mask or not all(type(each) in (int, slice) for each in others):
        return rows, index
    columns = _basic_part(rows, _basic((*[slice(None)] * mask._ndim, *others), rows._ndim) or [])
    return columns, mask


def rows_of_table(table: Tensor, index: GlobalRows) -> Tensor:
    """Return the entries of a plain tensor at this rank's indices."""
    shared = share(index._call, table, "__getitem__")
    return shared[index._local]


def _basic(index: Any, ndim: int) -> list[Any] | None:
    """Return basic indices, one for each dimension (a None among them adds a dimension), or None if there are other indices."""
    indices = list(index) if isinstance(index, tuple) else [index]
    if not all(each is None or each is Ellipsis or type(each) in (int, slice) for each in indices):
        return None
    used = sum(each is not None and each is not Ellipsis for each in indices)
    missing = [slice(None)] * (ndim - used)
    if Ellipsis in indices:
        place = indices.index(Ellipsis)
        return indices[:place] + missing + indices[place + 1 :]
    return indices + missing


def _basic_part(rows: GlobalRows, indices: list[Any]) -> Any:
    """Return a part of this rank's rows by basic indices."""
    local_indices: list[Any] = []
    old_dim, new_dim, dim_of_rows, counts = 0, 0, 0, rows._counts
    for each in indices:
        if each is None:
            local_indices.append(None)
            new_dim += 1
            continue
        if old_dim == rows._dim:
            chosen = _slice_of_ranks(each, rows)
            if chosen is None:
                return NO_RULE
            own, counts = chosen
            local_indices.append(own)
            dim_of_rows = new_dim
        else:
            local_indices.append(each)
        new_dim += type(each) is slice
        old_dim += 1
    return rows._same(rows._local[tuple(local_indices)], dim_of_rows, counts)


def _slice_of_ranks(index: Any, rows: GlobalRows) -> tuple[slice, tuple[int, ...]] | None:
    """Return this rank's part of a slice of rows, and the counts of all ranks, or None if the index is a number."""
    if type(index) is not slice:
        return None
    total = sum(rows._counts)
    first, stop, step = index.indices(total)
    own, counts, start = slice(0), [], 0
    for rank, count in enumerate(rows._counts):
        # the first selected row at or after this rank's first row
        skipped = max(0, -(-(start - first) // step))
        begin = first + skipped * step - start
        end = max(begin, min(stop, start + count) - start)
        counts.append(len(range(begin, end, step)))
        if rank == rows._call.rank:
            own = slice(begin, end, step)
        start += count
    return own, tuple(counts)


def _masked(rows: GlobalRows, index: GlobalRows) -> Any:
    """Return the rows that a mask of rows selects. Communication: one handshake, which exchanges their counts."""
    is_mask = index._local.dtype == torch.bool
    if not is_mask or rows._dim != 0 or index._dim != 0 or rows._counts != index._counts:
        return NO_RULE
    if rows._shape[: index._ndim] != index._shape:
        return NO_RULE
    local = rows._local[index._local]
    return rows._same(local, 0, rows._call.count(local.shape[0], "mask"))


@rule("select", "masked_select")
def masked_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the elements that a mask of the same shape selects."""
    if len(args) != 2 or kwargs or not all(isinstance(value, GlobalRows) for value in args):
        return NO_RULE
    rows, mask = args
    return _masked(rows, mask) if rows._shape == mask._shape else NO_RULE


@rule("select", "index_select")
def index_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Select along another dimension with plain indices, or from a plain table with indices that are rows."""
    if kwargs or len(args) != 3:
        return NO_RULE
    rows, dim, index = args
    if isinstance(rows, GlobalRows) and not isinstance(index, GlobalRows):
        dims = dims_of(rows, dim)
        if dims is None or dims[0] == rows._dim:
            return NO_RULE
        return rows._same(func(rows._local, dim, share(rows._call, index, "index_select")))
    if isinstance(index, GlobalRows) and not isinstance(rows, GlobalRows):
        dim = dim % rows.ndim
        return index._same(func(share(index._call, rows, "index_select"), dim, index._local), dim)
    return NO_RULE


@rule("local", "__setitem__")
def setitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write at basic indices, or where a mask of rows is true. A plain tensor is written to on every rank."""
    rows, index, value = args
    if not isinstance(rows, GlobalRows):
        return NO_RULE
    rows, index = _with_mask(rows, index)
    if isinstance(index, GlobalRows):
        return _set_masked(rows, index, value)
    indices = _basic(index, rows._ndim)
    target = NO_RULE if indices is None else _basic_part(rows, indices)
    if target is NO_RULE:
        raise write_error("__setitem__")
    _write(target, value)
    return None


def _write(target: GlobalRows, value: Any) -> None:
    """Write a value into a view of this rank's rows."""
    if isinstance(value, GlobalRows) and value._ndim > target._ndim:
        raise write_error("__setitem__")
    operands = local_operands([value], target, "__setitem__")
    if operands is None:
        raise write_error("__setitem__")
    target._local[...] = operands[0]


def _set_masked(rows: GlobalRows, index: GlobalRows, value: Any) -> None:
    """Write a value for each selected place, or one for all of them, where a mask is true."""
    is_mask = index._local.dtype == torch.bool and rows._dim == 0 and index._dim == 0
    is_aligned = is_mask and index._counts == rows._counts and rows._shape[: index._ndim] == index._shape
    if not is_aligned:
        raise write_error("__setitem__")
    if isinstance(value, Tensor):
        value = _values_of_selected(rows, index, value)
    rows._local[index._local] = value


def _values_of_selected(rows: GlobalRows, mask: GlobalRows, value: Tensor) -> Tensor:
    """Return this rank's part of the values that are written where a mask is true.

    Communication: one handshake if there is a value for each selected place.
    """
    call, ndim_of_place = rows._call, rows._ndim - mask._ndim
    if value.ndim <= ndim_of_place and not isinstance(value, GlobalRows):
        return share(call, value, "__setitem__")
    selected = call.count(int(mask._local.sum()), "mask")
    if value.ndim == ndim_of_place + 1:
        # other counts would write a row of one rank into a row of another one
        if isinstance(value, GlobalRows) and value._dim == 0 and value._counts == selected:
            return value._local
        if type(value) is Tensor and value.shape[0] == sum(selected):
            return cut(call, value, selected, 0, "__setitem__")
    raise write_error("__setitem__")
