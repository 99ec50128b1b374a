"""An operator in the form that rules use, and the position of the rows after an operator that only moves entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.losses.certificates.kinds import Broken, Constant, Kind, Rows
from lightning_ddp_losses.losses.certificates.lines import Blame

_FEWEST_SELECTED = 2  # rows that a mask has selected, below which their place in a result is ambiguous


def words(text: str) -> frozenset[str]:
    """Return the names in a text."""
    return frozenset(text.split())


class Operation:
    """A call of one operator of torch.

    Args:
        function: The operator.
        args: Its arguments, numbers and tensors.
        kwargs: The same by name.
        kind_of: Returns the kind of a tensor.
        blame: Makes a reason of this operator.
        rows: Number of rows of the example that is traced, a prime number that no other dimension is a multiple of.
    """

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kind_of: Callable[[Tensor], Kind],
        blame: Blame,
        rows: int,
    ) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.blame, self.rows = blame, rows
        schema = torch_compat.operator_schema(function)
        space, _, name = schema.name.partition("::")
        # an operator of another library does not match a rule, whatever its name
        self.name: str = name if space == "aten" else schema.name
        self.given = {argument.name: argument.default_value for argument in schema.arguments}
        self.given |= {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        self.writes = schema.is_mutable
        self.tensors = [
            (each, kind_of(each)) for each in torch_compat.tree_leaves((args, kwargs)) if isinstance(each, Tensor)
        ]
        self._kind_of = kind_of

    @property
    def base_name(self) -> str:
        """Name of the operator that returns what this one writes in place."""
        return self.name[:-1] if self.writes and self.name.endswith("_") else self.name

    @property
    def kinds(self) -> list[Kind]:
        """Kinds of all tensors among the arguments, in order."""
        return [kind for _, kind in self.tensors]

    @property
    def of_rows(self) -> list[tuple[Tensor, Rows]]:
        """Tensors with rows among the arguments, in order."""
        return [(tensor, kind) for tensor, kind in self.tensors if isinstance(kind, Rows)]

    @property
    def has_grad(self) -> bool:
        """Whether autograd follows the result."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor, _ in self.tensors)

    @property
    def is_data(self) -> bool:
        """Whether the result follows from constants and inputs without a gradient only."""
        are_data = all(isinstance(each, Constant) or (isinstance(each, Rows) and each.is_data) for each in self.kinds)
        return are_data and not self.has_grad

    def kind(self, argument: str) -> Kind | None:
        """Return the kind of an argument. None if it is not a tensor."""
        value = self.given.get(argument)
        return self._kind_of(value) if isinstance(value, Tensor) else None

    def broken(self, why: str) -> Broken:
        """Return that the result is of no kind."""
        return Broken((self.blame(why),))

    def dims(self, argument: str, ndim: int) -> list[int]:
        """Return the dimensions that an argument names, counted from 0. None and an empty list name all."""
        named = self.given.get(argument)
        if isinstance(named, int):
            named = [named]
        if not named:
            return list(range(ndim))
        return [dim % ndim for dim in named]

    def is_as_long_as_rows(self, size: int) -> bool:
        """Return whether a dimension has the rows of the example, some times."""
        return size > 0 and size % self.rows == 0

    def moved(self, outputs: list[Tensor]) -> list[Kind]:
        """Return the kinds of results that hold the same entries at other places.

        The operator runs once more on the numbers of the rows.
        """
        (first, kind), *others = self.of_rows
        if any(not kind.is_aligned(other) or kind.scale != other.scale for _, other in others):
            return [self.broken("rows are joined that are not of the same kind")] * len(outputs)
        if len(self.of_rows) < len(self.tensors):
            return [self.broken("rows are joined with what is not a row of the same batch")] * len(outputs)
        count = self.rows if kind.selected is None else first.shape[kind.dim]
        if count < _FEWEST_SELECTED:
            return [self.broken("too few rows are selected to follow them")] * len(outputs)
        numbers = {id(tensor): _row_numbers(tensor, each, count) for tensor, each in self.of_rows}
        with torch.no_grad():
            found = self.function(*_replaced(self.args, numbers), **_replaced(self.kwargs, numbers))
        moved = [found] if isinstance(found, Tensor) else list(found)
        is_integral = all(each.is_integral for _, each in self.of_rows)
        is_same = all(each.is_same for _, each in self.of_rows)
        is_data = all(each.is_data for _, each in self.of_rows)
        kinds: list[Kind] = []
        for each in moved:
            place = _place_of_rows(each, count)
            if place is None or (kind.selected is not None and place[1:] != (1, 1)):
                kinds.append(self.broken("takes rows by their position in the batch"))
                continue
            dim, outer, inner = place
            kinds.append(
                Rows(
                    dim,
                    outer,
                    inner,
                    kind.scale,
                    kind.selected,
                    is_same=is_same,
                    is_position=any(each.is_position for _, each in self.of_rows),
                    is_integral=is_integral,
                    is_data=is_data,
                )
            )
        return kinds


def _row_numbers(tensor: Tensor, kind: Rows, count: int) -> Tensor:
    """Return a tensor of the same shape whose entries are the numbers of their rows."""
    along = torch.arange(count).repeat_interleave(kind.inner).repeat(kind.outer)
    shape = [1] * tensor.ndim
    shape[kind.dim] = -1
    numbers = torch.empty_like(tensor, dtype=torch.int64, device="cpu")
    return numbers.copy_(along.view(shape).expand(tensor.shape))


def _replaced(nest: Any, numbers: dict[int, Tensor]) -> Any:
    """Return arguments with the tensors of rows replaced."""
    if isinstance(nest, dict):
        return {name: _replaced(value, numbers) for name, value in nest.items()}
    if isinstance(nest, (tuple, list)):
        return type(nest)(_replaced(value, numbers) for value in nest)
    return numbers.get(id(nest), nest)


def _place_of_rows(numbers: Tensor, count: int) -> tuple[int, int, int] | None:
    """Return the dimension of the rows, and how often they are repeated around and within each. None if they are not in order."""
    for dim, size in enumerate(numbers.shape):
        if size == 0 or size % count:
            continue
        along = numbers.movedim(dim, 0).reshape(size, -1)
        if not bool((along == along[:, :1]).all()):
            continue
        column = along[:, 0]
        # the run of the first row is as long as each one
        changes = (column != column[0]).nonzero()
        inner = int(changes[0]) if len(changes) else size
        outer = size // (count * inner)
        if outer * count * inner != size:
            continue
        expected = torch.arange(count).repeat_interleave(inner).repeat(outer)
        if bool((column == expected).all()):
            return dim, outer, inner
    return None
