"""Which rows the sizes that the user passes to a call declare in its result.

With ``B`` rows, a view or a new tensor may have a dimension of size ``B`` by chance. The sizes distinguish these cases, because a number of
rows that was read from a tensor with rows is marked (``row_sizes``).
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_ddp_losses.randomness.places import LOST, WITHOUT_ROWS, Mark, RowPlace
from lightning_ddp_losses.randomness.row_sizes import RowCount, RowSizes
from lightning_ddp_losses.randomness.rules import OperatorCall

STRETCHES = {"expand", "repeat"}
MAKES_SHAPE = STRETCHES | {"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"}
_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias"}
_SPLITS = {"split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes"}


def sizes_agree(sizes: RowSizes, call: OperatorCall, found: Sequence[RowPlace | None]) -> bool:
    """Return whether the sizes that the user passes confirm the apparent positions of the rows.

    Args:
        sizes: Sizes of the user's call.
        call: An operator of that call.
        found: Apparent positions of the rows in its results.
    """
    if call.name in _VIEWS:
        return _fits_sizes(sizes, found[0], call.outputs[0].shape)
    if call.name in _SPLITS:
        place = next(iter(call.places.values()))
        is_along_rows = place.dim == call.values.get("dim", 0) % call.values["self"].ndim
        return not is_along_rows or all(type(size) is RowCount for size in sizes.given or ())
    if call.name in STRETCHES:
        return _stretches_no_rows(sizes, found[0], call.outputs[0].shape)
    return True


def mark_by_size(sizes: RowSizes, shape: Sequence[int], rows: int) -> Mark:
    """Return the mark of a tensor that is created from sizes.

    Args:
        sizes: Sizes of the user's call.
        shape: Shape of the tensor.
        rows: Number of rows of this rank.
    """
    declared = sizes.declared_dims()
    if sizes.is_computed() or len(declared) > 1:
        return LOST
    given = sizes.given or ()
    if len(given) != len(shape):
        given = tuple(shape)
    if not declared:
        return LOST if any(map(sizes.may_count_rows, given)) else WITHOUT_ROWS
    place = RowPlace(declared[0])
    is_there = place.dim < len(shape) and shape[place.dim] == rows
    others = [size for dim, size in enumerate(given) if dim != place.dim]
    has_doubt = sizes.has_escaped() and any(map(sizes.may_count_rows, others))
    return Mark(place) if is_there and not has_doubt else LOST


def _stretches_no_rows(sizes: RowSizes, place: RowPlace | None, shape: Sequence[int]) -> bool:
    """Return whether no other dimension has a number of rows as its size."""
    given = sizes.given
    if given is None or place is None:
        return False
    dim = place.dim - len(shape) + len(given)
    others = [size for number, size in enumerate(given) if number != dim]
    if any(isinstance(size, RowCount) for size in others):
        return False
    return not (sizes.has_escaped() and any(map(sizes.may_count_rows, others)))


def _fits_sizes(sizes: RowSizes, place: RowPlace | None, shape: Sequence[int]) -> bool:
    """Return whether the sizes that the user passes to a view confirm the position of the rows."""
    given = sizes.given
    if given is None or place is None:
        return False
    dim = place.dim - len(shape) + len(given)
    others = [size for number, size in enumerate(given) if number != dim and size is not None]
    if any(isinstance(size, RowCount) for size in others):
        return False
    if not 0 <= dim < len(given) or given[dim] is None or isinstance(given[dim], RowCount):
        return True
    return not any(map(sizes.may_count_rows, others)) and (given[dim] == -1 or -1 not in others)
