"""`RowOrders`: orders of rows whose partners are on other ranks, as drawn by Mixup, and the rows that they select.

``order = torch.randperm(x.shape[0])`` is this rank's part of an order of all rows, and contains indices of rows of all ranks. ``x[order]``
then gathers the rows of all ranks and selects from them, with the gradient of one process: each rank receives the gradients of its rows
from all ranks. Any other use of an order is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.distributed.collectives import all_gather_with_grad
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.randomness.places import Mark, RowPlace, Rows
from lightning_ddp_losses.randomness.row_sizes import RowCount

FIRST = RowPlace(0)
KEEP_ORDER = {"detach", "alias", "_to_copy", "lift_fresh", "clone", "contiguous"}
"""Operators whose result is the same order as their argument."""

_PICKS = {"__getitem__", "index_select"}
CALLS = _PICKS | {"randperm", "randint", "multinomial", "argsort"}
"""Names of the calls that draw orders or select rows."""


class Pick(NamedTuple):
    """Rows that an order selects.

    Attributes:
        tensor: A tensor with rows.
        dim: The dimension of its rows.
    """

    tensor: Tensor
    dim: int


class RowOrders:
    """Draws orders of the rows of all ranks, and exchanges the rows. Each rank must have rows.

    Args:
        rows: Rows of this rank among the rows of all ranks.
        group: Process group. None is the world.
    """

    def __init__(self, rows: Rows, group: Group) -> None:
        self._rows = rows
        self._group = group

    def draw(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """Return this rank's part of an order of all rows.

        Args:
            func: The call.
            args: Arguments with which one process draws (``arguments_of_all``). Tensors contain this rank's rows.
            kwargs: Keyword arguments.

        Communication: for ``multinomial`` and ``argsort``, one handshake and one gather of numbers. Otherwise none.
        """
        with torch_compat.without_dispatch_modes():
            given = [self._whole(part, 0) if isinstance(part, Tensor) else part for part in args]
            whole: Tensor = func(*given, **kwargs)
            return whole[self._rows.start : self._rows.start + self._rows.local].clone()

    def arguments_of_all(
        self, name: str, args: Any, kwargs: dict[str, Any], marks: Mapping[int, Mark]
    ) -> list[Any] | None:
        """Return the arguments with which one process draws an order, or None for a call that does not draw an order.

        Args:
            name: Name of the call.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            marks: Marks of the tensors among them, by ``id``.
        """
        if any(isinstance(value, RowCount) for value in kwargs.values()) or "size" in kwargs or "out" in kwargs:
            return None
        if name in ("randperm", "randint"):
            return self._numbers_of_all(name, args)
        return self._weights_of_all(name, args, marks)

    def _numbers_of_all(self, name: str, args: Any) -> list[Any] | None:
        total = self._rows.total
        is_permutation = name == "randperm" and [type(part) for part in args] == [RowCount]
        if is_permutation:
            return [total]
        if name == "randperm" or len(args) < 2:
            return None
        *bounds, size = args
        low = bounds[0] if len(bounds) > 1 else 0
        is_from_all = type(bounds[-1]) is RowCount and type(low) is int and low == 0
        has_one_each = isinstance(size, (tuple, list)) and [type(part) for part in size] == [RowCount]
        if not is_from_all or not has_one_each:
            return None
        return [*bounds[:-1], total, (total,)]

    def _weights_of_all(self, name: str, args: Any, marks: Mapping[int, Mark]) -> list[Any] | None:
        if len(marks) != 1 or not isinstance(args[0], Tensor) or args[0].ndim != 1:
            return None
        mark = marks[id(args[0])]
        if mark.place != FIRST or mark.is_order:
            return None
        if name == "multinomial" and len(args) >= 2 and type(args[1]) is RowCount:
            return [args[0], self._rows.total, *args[2:]]
        if name == "argsort" and mark.is_drawn:
            return list(args)
        return None

    def pick_of(self, name: str, args: Any, marks: Mapping[int, Mark]) -> Pick | None:
        """Return what a call selects by an order, or None if the call does not select rows or cannot be exchanged.

        Args:
            name: Name of the call.
            args: Its arguments.
            marks: Marks of the tensors among them, by ``id``.
        """
        if name not in _PICKS or not isinstance(args[0], Tensor):
            return None
        dim, order = _picked_dim(name, args)
        if not isinstance(order, Tensor) or order.ndim != 1 or not marks[id(order)].is_order:
            return None
        mark = marks[id(args[0])]
        dim %= args[0].ndim
        if mark.place != RowPlace(dim) or mark.is_order:
            return None
        return Pick(args[0], dim)

    def rows_of(self, pick: Pick, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Return the rows that an order selects.

        Gradient: each rank receives the gradients of its rows from all ranks.

        Communication: one handshake and one gather of all rows, and one exchange in backward.
        """
        with torch_compat.without_dispatch_modes():
            whole = self._whole(pick.tensor, pick.dim)
            picked: Tensor = func(whole, *args[1:], **kwargs)
            return picked

    def _whole(self, tensor: Tensor, dim: int) -> Tensor:
        first = tensor.movedim(dim, 0).contiguous()
        return all_gather_with_grad(first, group=self._group).movedim(0, dim)


def _picked_dim(name: str, args: Any) -> tuple[int, Any]:
    """Return the dimension along which a call selects, and its index. The index is None if the call does anything more than that."""
    if name == "index_select":
        return (args[1], args[2]) if len(args) == 3 else (0, None)
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    dim = next((dim for dim, part in enumerate(index) if isinstance(part, Tensor)), None)
    if dim is None:
        return 0, None
    is_whole_before = all(part == slice(None) for part in index[:dim])
    is_plain_after = all(part is Ellipsis or isinstance(part, slice) for part in index[dim + 1 :])
    return dim, index[dim] if is_whole_before and is_plain_after else None
