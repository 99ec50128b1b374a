"""`Propagation`: where the rows are in the results of an operator, from where they are in its arguments.

Most operators need no rule. The operator runs once more on tensors without memory (``meta``), with another number of rows in the
arguments. The dimension of the result that has changed counts the rows. It runs once for each signature, which is kept.

A rule is needed if an argument is a size: ``view``, ``expand``, ``repeat``, a slice, memory of a given shape. Sizes are numbers, which do
not say where they come from.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.randomness.places import (
    NO_ROWS,
    OF_PARAMETER,
    UNKNOWN,
    Candidates,
    RowPlace,
    places_in_view,
)

Rule: TypeAlias = "Callable[[int, tuple[Any, ...], Sequence[Candidates], Sequence[Tensor]], list[Candidates]]"
"""Takes the number of rows, the operator's arguments, the candidates of its tensors, and its results."""

_OTHER_ROWS = (10_007, 10_009)  # large primes: a size that they divide counts the rows
_MOST_COMBINATIONS = 32
_MOST_SIGNATURES = 20_000
_FAILURES = (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError, AssertionError)


class Propagation:
    """Finds where the rows are in the results of operators.

    Args:
        rows: Number of rows of this rank, 1 or more.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._other = next(prime for prime in _OTHER_ROWS if prime != rows)
        self._known: dict[Any, list[Candidates]] = {}

    def results(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        candidates: Sequence[Candidates],
        outputs: Sequence[Tensor],
    ) -> list[Candidates]:
        """Return where the rows are in each result.

        Args:
            function: An operator of aten.
            args: Its arguments.
            kwargs: Its named arguments.
            candidates: Where the rows are in the tensors among the arguments, in order.
            outputs: The tensors among the results.
        """
        if not any(any(each) for each in candidates):
            return [self._without_rows(function, candidates, each.shape) for each in outputs]
        if any(UNKNOWN in each for each in candidates):
            return [(UNKNOWN,)] * len(outputs)
        key = (function, tuple(candidates), *_signature((args, kwargs)))
        known = self._known.get(key)
        if known is None or len(known) != len(outputs):
            known = self._derive(function, args, kwargs, candidates, outputs)
            if len(self._known) >= _MOST_SIGNATURES:
                self._known.clear()
            self._known[key] = known
        return known

    def _without_rows(self, function: Any, candidates: Sequence[Candidates], shape: Sequence[int]) -> Candidates:
        """Return the candidates of a result whose arguments have no rows."""
        if OF_PARAMETER in candidates and NO_ROWS not in candidates and _name(function) not in _SHAPED_FROM_SELF:
            return OF_PARAMETER
        # rows may have been picked from a data set in the block
        if _makes_shape(function) or _name(function) in _PICKS:
            return self.by_size(shape)
        return NO_ROWS

    def by_size(self, shape: Sequence[int]) -> Candidates:
        """Return the candidates of a tensor that was made from a list of sizes: each dimension with as many entries as there are rows.

        With one row the first dimension only.
        """
        return (None, *_dims_of_size(shape, self._rows))

    def _derive(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        candidates: Sequence[Candidates],
        outputs: Sequence[Tensor],
    ) -> list[Candidates]:
        rule = _RULES.get(_name(function))
        if rule is not None:
            return rule(self._rows, args, candidates, outputs)
        found: list[list[RowPlace | None]] = [[] for _ in outputs]
        combinations = itertools.islice(itertools.product(*candidates), _MOST_COMBINATIONS)
        for combination in combinations:
            places = self._probe(function, args, kwargs, combination, outputs)
            if places is None:  # sizes that do not fit: not how the rows are in the arguments
                continue
            for of_output, place in zip(found, places, strict=True):
                if place not in of_output:
                    of_output.append(place)
        all_have_rows = not any(None in each for each in candidates)
        return [_most_certain(each, keeps_rows=all_have_rows) for each in found]

    def _probe(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        places: Sequence[RowPlace | None],
        outputs: Sequence[Tensor],
    ) -> list[RowPlace | None] | None:
        """Run an operator with another number of rows. None if it fails."""
        remaining = iter(places)

        def resized(tensor: Tensor) -> Tensor:
            place = next(remaining)
            shape = list(tensor.shape)
            if place is not None:
                shape[place.dim] = place.outer * self._other * place.inner
            return torch.empty(shape, dtype=tensor.dtype, device="meta")

        other_args = map_arguments(resized, args)
        other_kwargs = {name: map_arguments(resized, value) for name, value in kwargs.items()}
        if "device" in other_kwargs:
            other_kwargs["device"] = torch.device("meta")
        try:
            result = function(*other_args, **other_kwargs)
        except _FAILURES:
            return None
        others = arguments_in(result)
        if len(others) != len(outputs):
            return [UNKNOWN] * len(outputs)
        return [self._compare(own.shape, other.shape, places) for own, other in zip(outputs, others, strict=True)]

    def _compare(
        self, shape: Sequence[int], other: Sequence[int], places: Sequence[RowPlace | None]
    ) -> RowPlace | None:
        """Return the place of the rows in a result, from its shape and its shape with another number of rows."""
        if len(shape) != len(other):
            return UNKNOWN
        changed = [dim for dim, size in enumerate(shape) if size != other[dim]]
        if not changed:
            return None
        dim = changed[0]
        times, rest = divmod(other[dim], self._other)
        if len(changed) > 1 or rest or times * self._rows != shape[dim]:
            return UNKNOWN
        if times == 1:
            return RowPlace(dim)
        kinds = {(each.outer, each.inner) for each in places if each is not None and each.outer * each.inner == times}
        if len(kinds) != 1:
            return UNKNOWN
        outer, inner = kinds.pop()
        return RowPlace(dim, outer, inner)


@functools.lru_cache(maxsize=8)
def propagation_of(rows: int) -> Propagation:
    """Return the rules for a number of rows. They depend on shapes only, so steps with as many rows share them."""
    return Propagation(rows)


# ---------------------------------------------------------------------- operators whose arguments are sizes


def _dims_of_size(shape: Sequence[int], rows: int) -> list[RowPlace]:
    """Return the dimensions with as many entries as there are rows, with one row the first dimension only."""
    if rows == 1:
        shape = shape[:1]
    return [RowPlace(dim) for dim, size in enumerate(shape) if size == rows]


def _most_certain(places: Sequence[RowPlace | None], *, keeps_rows: bool) -> Candidates:
    """Return the candidates without the unlikely ones, if others are left.

    Args:
        places: The candidates.
        keeps_rows: Whether a result with rows is likelier than a sum over them. The arguments have rows, and with one row a boundary
            between two dimensions leaves open in which of them.
    """
    likely = [place for place in places if place != UNKNOWN]
    if keeps_rows and len(likely) > 1:
        likely = [place for place in likely if place is not None]
    return tuple(likely) or (UNKNOWN,)


def _of_view(
    rows: int, args: tuple[Any, ...], candidates: Sequence[Candidates], outputs: Sequence[Tensor]
) -> list[Candidates]:
    before, after = args[0].shape, outputs[0].shape
    found: list[RowPlace | None] = []
    for place in candidates[0]:
        places: Candidates = NO_ROWS
        if place is not None:
            places = places_in_view(before, place, rows, after)
        found += [each for each in places if each not in found]
    return [tuple(found)]


def _of_expand(
    rows: int, args: tuple[Any, ...], candidates: Sequence[Candidates], outputs: Sequence[Tensor]
) -> list[Candidates]:
    before, after = args[0], outputs[0]
    added = after.ndim - before.ndim
    found: list[RowPlace | None] = []
    for place in candidates[0]:
        moved = place
        if place is not None:
            moved = place._replace(dim=place.dim + added)
            if after.shape[moved.dim] != before.shape[place.dim]:
                moved = UNKNOWN
        found.append(moved)
    return [tuple(found)]


def _of_repeat(
    rows: int, args: tuple[Any, ...], candidates: Sequence[Candidates], outputs: Sequence[Tensor]
) -> list[Candidates]:
    before, repeats = args[0], args[1]
    added = outputs[0].ndim - before.ndim
    found: list[RowPlace | None] = []
    for place in candidates[0]:
        moved = place
        if place is not None:
            dim = place.dim + added
            moved = RowPlace(dim, place.outer * repeats[dim], place.inner)
        found.append(moved)
    return [tuple(found)]


def _of_slice(
    rows: int, args: tuple[Any, ...], candidates: Sequence[Candidates], outputs: Sequence[Tensor]
) -> list[Candidates]:
    before, after = args[0], outputs[0]
    found: list[RowPlace | None] = []
    for place in candidates[0]:
        kept = place is None or before.shape[place.dim] == after.shape[place.dim]
        found.append(place if kept else UNKNOWN)
    return [tuple(found)]


def _of_split(
    rows: int, args: tuple[Any, ...], candidates: Sequence[Candidates], outputs: Sequence[Tensor]
) -> list[Candidates]:
    """Split along another dimension, or between blocks of all rows (two views)."""
    before = args[0]
    dim = args[2] if len(args) > 2 else 0
    found = []
    for output in outputs:
        places: list[RowPlace | None] = []
        for place in candidates[0]:
            part = place
            if place is not None and place.dim == dim % before.ndim:
                blocks, rest = divmod(output.shape[place.dim], rows * place.inner)
                part = UNKNOWN if rest else place._replace(outer=blocks)
            places.append(part)
        found.append(tuple(places))
    return found


def _of_unbind(
    rows: int, args: tuple[Any, ...], candidates: Sequence[Candidates], outputs: Sequence[Tensor]
) -> list[Candidates]:
    before = args[0]
    dim = (args[1] if len(args) > 1 else 0) % before.ndim
    places: list[RowPlace | None] = []
    for place in candidates[0]:
        part = place
        if place is not None and place.dim == dim:
            part = UNKNOWN
        elif place is not None and place.dim > dim:
            part = place._replace(dim=place.dim - 1)
        places.append(part)
    return [tuple(places)] * len(outputs)


def _of_cat(
    rows: int, args: tuple[Any, ...], candidates: Sequence[Candidates], outputs: Sequence[Tensor]
) -> list[Candidates]:
    """Rows next to each other in another dimension, or blocks of all rows (two views)."""
    ndim = outputs[0].ndim
    dim = (args[1] if len(args) > 1 else 0) % ndim
    certain = [each for each in candidates if None not in each]
    if not certain:
        return [(UNKNOWN,)]
    # 1. along another dimension all have the rows at one place
    common = [place for place in certain[0] if all(place in each for each in candidates)]
    found = [place for place in common if place is not None and place.dim != dim]
    # 2. along the rows, each is a number of whole blocks
    stacked = [_block_count(each, dim) for each in candidates]
    if None not in stacked:
        found.append(RowPlace(dim, sum(count or 0 for count in stacked)))
    return [tuple(found) or (UNKNOWN,)]


def _block_count(candidates: Candidates, dim: int) -> int | None:
    """Return the number of blocks of all rows along a dimension. None if there may be others."""
    for place in candidates:
        if place is not None and place.dim == dim and place.inner == 1:
            return place.outer
    return None


def _of_new_memory(
    rows: int, args: tuple[Any, ...], candidates: Sequence[Candidates], outputs: Sequence[Tensor]
) -> list[Candidates]:
    """Memory of a given shape next to a tensor with rows: as many dimensions and as many rows at the same place are the same rows."""
    before, after = args[0], outputs[0]
    if after.ndim == before.ndim:
        same = [each for each in candidates[0] if each is not None and after.shape[each.dim] == before.shape[each.dim]]
        if same and len(same) == len(candidates[0]):
            return [tuple(same)]
    return [(None, *_dims_of_size(after.shape, rows))]


def _of_strides(
    rows: int, args: tuple[Any, ...], candidates: Sequence[Candidates], outputs: Sequence[Tensor]
) -> list[Candidates]:
    return [(UNKNOWN,)] * len(outputs)


_RULES: dict[str, Rule] = {
    "aten::view": _of_view,
    "aten::_unsafe_view": _of_view,
    "aten::reshape": _of_view,
    "aten::_reshape_alias": _of_view,
    "aten::expand": _of_expand,
    "aten::repeat": _of_repeat,
    "aten::slice": _of_slice,
    "aten::split": _of_split,
    "aten::unsafe_split": _of_split,
    "aten::split_with_sizes": _of_split,
    "aten::unsafe_split_with_sizes": _of_split,
    "aten::unbind": _of_unbind,
    "aten::cat": _of_cat,
    "aten::new_empty": _of_new_memory,
    "aten::new_zeros": _of_new_memory,
    "aten::new_ones": _of_new_memory,
    "aten::new_full": _of_new_memory,
    "aten::as_strided": _of_strides,
    "aten::set_": _of_strides,
}


def _name(function: Any) -> str:
    return str(compat.operator_schema(function).name)


def _makes_shape(function: Any) -> bool:
    """Return whether the shape of a result comes from numbers among the arguments."""
    schema = compat.operator_schema(function)
    names = {argument.name for argument in schema.arguments}
    return (bool(names & {"size", "end", "n"}) and "self" not in names) or schema.name in _SHAPED_FROM_SELF


_PICKS = {"aten::slice", "aten::index", "aten::index_select", "aten::gather"}
_SHAPED_FROM_SELF = {
    "aten::new_empty",
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_full",
    "aten::expand",
    "aten::repeat",
}


# ---------------------------------------------------------------------- arguments of an operator


def arguments_in(value: Any) -> list[Tensor]:
    """Return the tensors among the arguments or results of an operator, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in arguments_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in arguments_in(item)]
    return []


def map_arguments(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return arguments of an operator with a function of each tensor in its place."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)([map_arguments(function, item) for item in value])
    return value


def _signature(value: Any) -> tuple[Any, ...]:
    """Return what a result's shape depends on: the shapes of tensors, and all other arguments."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    if isinstance(value, (tuple, list)):
        return (len(value), *[part for item in value for part in _signature(item)])
    if isinstance(value, dict):
        return (*value, *_signature(tuple(value.values())))
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.device)):
        return (value,)
    return (str(value),)
