"""Lists with one entry per row: predictions whose shapes differ between rows, such as token sequences or the boxes of an image.

In a batch of B rows a ``list`` may hold B entries, one per row, or tensors (B, ...). Both may apply to one batch, so the batches of all
ranks decide together (`possible_kinds`, `agreed_lists`). If they do not determine it, an error is raised. A tuple or dict always holds
tensors (B, ...).

To be gathered, a list of rows is converted to tensors (`pack_lists`): the shapes of the rows, and their elements in one tensor.
`unpack_rows` is the inverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.core import inputs
from lightning_ddp_losses.errors import InputError, expect

ROWS, TENSORS = "rows", "tensors"


class RowList(NamedTuple):
    """The rows of a list.

    Attributes:
        shapes: The nest of a row, with (B, n) in place of a tensor with n dimensions: its shape in each row.
        elements: The same nest, with (N,) in place of a tensor: its elements in all rows, concatenated.
    """

    shapes: Any
    elements: Any


def possible_kinds(batch: Any, rows: int, path: str = "") -> dict[str, list[str]]:
    """Return what each list of a batch may hold, by its path: one entry per row, or tensors (B, ...).

    Args:
        batch: Predictions of a batch.
        rows: Number of its rows, B.
        path: Path of ``batch`` in the prediction.
    """
    found: dict[str, list[str]] = {}
    if type(batch) is list:
        found[path] = []
        if len(batch) == rows:
            found[path].append(ROWS)
        tensors = inputs.tensors_in(batch)
        if tensors and all(tensor.ndim and len(tensor) == rows for tensor in tensors):
            found[path].append(TENSORS)
        if found[path] == [ROWS]:
            return found
    children = () if isinstance(batch, Tensor) else inputs.children_of(batch)
    for key, child in children or ():
        found |= possible_kinds(child, rows, f"{path}{key}")
    return found


def agreed_lists(found: Iterable[Mapping[str, list[str]]], title: str) -> set[str]:
    """Return the paths of the lists that hold one entry per row.

    Args:
        found: Results of `possible_kinds` for each batch of all ranks.
        title: Name of the predictions in errors.

    Raises:
        InputError: for a list that may be either in all batches. Every rank raises it, because ``found`` is the same on all ranks.
    """
    kinds: dict[str, set[str]] = {}
    refused = set()
    for of_batch in found:
        for path, possible in of_batch.items():
            kinds[path] = kinds.get(path, {ROWS, TENSORS}) & set(possible)
            if not possible:
                refused.add(path)
    lists = {path for path, possible in kinds.items() if possible == {ROWS}}
    for path, of_all in kinds.items():
        is_inside = any(path != outer and path.startswith(outer) for outer in lists)
        # a list that is neither in some batch is rejected when that batch is read
        if len(of_all) == 1 or is_inside or path in refused:
            continue
        what = f"{title}: list {path}".rstrip()
        got = "as many tensors as rows, each as long" if of_all else "one in some batches, the other in others"
        raise InputError(
            what,
            expected="one entry for each row of the batch, or tensors (B, ...)",
            got=got,
            fix="Return a tuple of tensors (B, ...), or pad the rows and stack them to one tensor.",
            collective=True,
        )
    return lists


def pack_lists(batch: Any, lists: set[str], title: str, path: str = "") -> Any:
    """Return a batch with a `RowList` in place of each list of rows.

    Args:
        batch: Predictions of a batch with at least one row.
        lists: Paths of the lists with one entry per row.
        title: Name of the batch in errors.
        path: Path of ``batch`` in the prediction.

    Raises:
        InputError: for rows whose nests, dtypes or numbers of dimensions differ.
    """
    if type(batch) is list and path in lists:
        return _packed(batch, f"{title}: list {path}".rstrip())
    children = inputs.children_of(batch)
    if isinstance(batch, Tensor) or children is None:
        return batch
    packed = [pack_lists(child, lists, title, f"{path}{key}") for key, child in children]
    return inputs.rebuild_nest(batch, packed)


def _packed(rows: list[Any], title: str) -> RowList:
    for leaf in (leaf for row in rows for _, leaf in inputs.leaves(row)):
        is_strided = isinstance(leaf, Tensor) and leaf.layout == torch.strided
        expected = "tensors, also in plain dicts, lists and tuples, for each row"
        expect(
            is_strided,
            title,
            expected=expected,
            got=type(leaf).__name__,
            error=InputError,
            fix="Convert numbers to tensors, and look up texts after the predictions are joined.",
        )
    forms = [repr(inputs.map_tensors(_form_of_row, row)) for row in rows]
    for number, form in enumerate(forms):
        what = f"{title}: row {number}"
        expect(
            form == forms[0],
            what,
            expected=f"as row 0: {forms[0]}",
            got=form,
            error=InputError,
            fix="Return the same keys, dtypes and numbers of dimensions for every row.",
        )
    shapes, elements = [], []
    for of_rows in zip(*map(inputs.tensors_in, rows), strict=True):
        sizes = [tuple(tensor.shape) for tensor in of_rows]
        shape = torch.tensor(sizes, dtype=torch.int64, device=of_rows[0].device)
        shapes.append(shape.reshape(len(rows), of_rows[0].ndim))
        elements.append(torch.cat([tensor.detach().reshape(-1) for tensor in of_rows]))
    return RowList(like_nest(rows[0], shapes), like_nest(rows[0], elements))


def _form_of_row(tensor: Tensor) -> str:
    return f"{tensor.dtype} with {tensor.ndim} dimensions"


def like_nest(nest: Any, tensors: Iterable[Tensor]) -> Any:
    """Return a nest of the same form with other tensors."""
    remaining = iter(tensors)
    return inputs.map_tensors(lambda _: next(remaining), nest)


def unpack_rows(nest: Any, order: Tensor) -> Any:
    """Return rows in another order, with lists in place of each `RowList`.

    Args:
        nest: Tensors (G, ...) and lists of G rows.
        order: (K,), indices of the rows to return.
    """
    if isinstance(nest, RowList):
        return _unpacked(nest, order)
    if isinstance(nest, Tensor):
        return nest[order.to(nest.device)]
    children = inputs.children_of(nest)
    if children is None:
        return nest
    return inputs.rebuild_nest(nest, [unpack_rows(child, order) for _, child in children])


def _unpacked(packed: RowList, order: Tensor) -> list[Any]:
    columns = []
    for shapes, elements in zip(inputs.tensors_in(packed.shapes), inputs.tensors_in(packed.elements), strict=True):
        sizes = shapes.tolist()
        pieces = torch.split(elements, shapes.prod(1).tolist())
        columns.append([piece.reshape(size) for piece, size in zip(pieces, sizes, strict=True)])
    rows = list(zip(*columns, strict=True))
    return [like_nest(packed.shapes, rows[place]) for place in order.tolist()]
