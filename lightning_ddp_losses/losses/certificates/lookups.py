"""Rules for lookups: a row of a table for each row, an entry of each row, rows that a mask selects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lightning_ddp_losses.losses.certificates.kinds import Constant, Kind, Rows
from lightning_ddp_losses.losses.certificates.operation import Operation
from lightning_ddp_losses.losses.certificates.sum_rules import is_integral


def _index(op: Operation, output: Tensor) -> Kind:
    """Return the kind of ``values[...]`` with tensors between the brackets."""
    kind = op.kinds[0]
    by_id = {id(tensor): each for tensor, each in op.tensors}
    places = [(place, each, by_id[id(each)]) for place, each in enumerate(op.given["indices"]) if each is not None]
    if len(places) > 1:
        return _one_of_each_row(op, kind, places)
    ((place, index, chosen),) = places
    is_mask = index.dtype == torch.bool
    if isinstance(kind, Rows) and isinstance(chosen, Rows) and is_mask:
        return _selected(op, kind, chosen, place, index)
    if isinstance(kind, Constant) and isinstance(chosen, Rows) and not chosen.is_position and chosen.scale.is_one:
        return _looked_up(op, chosen, place + chosen.dim, output)
    is_column = isinstance(chosen, Constant) and not is_mask and index.ndim == 1
    if isinstance(kind, Rows) and is_column and place != kind.dim:
        return replace(kind, is_same=False)
    return op.broken("takes rows by number")


def _one_of_each_row(op: Operation, kind: Kind, places: list[tuple[int, Tensor, Kind]]) -> Kind:
    """Return the kind of one entry of each row: ``values[arange(n), labels]``."""
    numbered = [place for place, _, chosen in places if isinstance(chosen, Rows) and chosen.is_position]
    if not isinstance(kind, Rows) or kind.is_position or not kind.scale.is_one or numbered != [kind.dim]:
        return op.broken("takes rows by number")
    are_vectors = all(index.ndim == 1 and isinstance(chosen, Rows) for _, index, chosen in places)
    are_aligned = all(isinstance(chosen, Rows) and kind.is_aligned(chosen) for _, _, chosen in places)
    ordered = [place for place, _, _ in places]
    are_neighbours = ordered == list(range(ordered[0], ordered[0] + len(ordered)))
    is_plain = (kind.outer, kind.inner, kind.selected) == (1, 1, None)
    if are_vectors and are_aligned and are_neighbours and is_plain:
        return replace(kind, dim=ordered[0], is_same=False, is_data=op.is_data)
    return op.broken("takes rows by number")


def _selected(op: Operation, kind: Rows, mask: Rows, place: int, index: Tensor) -> Kind:
    """Return the kind of the rows that a mask selects."""
    is_along = place + mask.dim == kind.dim and kind.is_aligned(mask)
    if not is_along or kind.selected is not None or kind.is_position:
        return op.broken("selects rows by a mask that is not one of these rows")
    return replace(kind, dim=place, outer=1, inner=1, selected=id(index), is_same=False)


def _looked_up(op: Operation, chosen: Rows, dim: int, output: Tensor) -> Kind:
    is_integer = not output.is_floating_point()
    return replace(chosen, dim=dim, is_same=False, is_integral=is_integer, is_data=op.is_data)


def _embedding(op: Operation, output: Tensor) -> Kind:
    """Return the kind of rows of a table."""
    table, chosen = op.kinds
    is_lookup = isinstance(table, Constant) and isinstance(chosen, Rows)
    if not is_lookup or not isinstance(chosen, Rows) or chosen.is_position or not chosen.scale.is_one:
        return op.broken("an operator without a rule")
    return _looked_up(op, chosen, chosen.dim, output)


def _index_select(op: Operation, output: Tensor) -> Kind:
    """Return the kind of the entries along one dimension that numbers select."""
    values, chosen = op.kinds[0], op.kinds[1]
    if isinstance(values, Rows) and isinstance(chosen, Constant):
        dim = op.given["dim"] % op.tensors[0][0].ndim
        return replace(values, is_same=False) if dim != values.dim else op.broken("takes rows by number")
    if isinstance(values, Constant) and isinstance(chosen, Rows) and not chosen.is_position and chosen.scale.is_one:
        return _looked_up(op, chosen, op.given["dim"] % output.ndim, output)
    return op.broken("takes rows by number")


def _gather(op: Operation, output: Tensor) -> Kind:
    """Return the kind of entries of each row that are taken, or written, at numbers that the row has."""
    (first, kind), *others = op.tensors
    dim = op.given["dim"] % first.ndim
    if not isinstance(kind, Rows) or kind.dim == dim or kind.is_position or not kind.scale.is_one:
        return op.broken("takes entries across rows")
    if not all(_is_of_same_rows(kind, first, each, tensor) for tensor, each in others):
        return op.broken("takes entries across rows")
    are_integers = all(map(is_integral, op.kinds))
    return replace(kind, is_same=False, is_integral=are_integers, is_data=op.is_data)


def _is_of_same_rows(kind: Rows, first: Tensor, other: Kind, tensor: Tensor) -> bool:
    """Return whether a tensor has the rows of another in the same dimension."""
    if not isinstance(other, Rows) or other.is_position or not other.scale.is_one:
        return False
    return kind.is_aligned(other) and kind.dim == other.dim and tensor.shape[other.dim] == first.shape[kind.dim]


def _masked_select(op: Operation, output: Tensor) -> Kind:
    """Return the kind of the entries that a mask selects, in one dimension."""
    (values, kind), (mask, chosen) = op.tensors
    if not isinstance(kind, Rows) or not isinstance(chosen, Rows) or values.shape != mask.shape:
        return op.broken("an operator without a rule")
    if kind.dim != chosen.dim:
        return op.broken("rows against rows")
    return _selected(op, kind, chosen, 0, mask)


LOOKUPS: dict[str, Callable[[Operation, Tensor], Kind]] = {
    "index": _index,
    "embedding": _embedding,
    "index_select": _index_select,
    "gather": _gather,
    "scatter": _gather,
    "scatter_add": _gather,
    "masked_select": _masked_select,
}
