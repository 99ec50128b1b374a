"""`OneRowDraws`: the step of a rank with one row, in which each call first runs for two rows.

With one row, sizes and strides do not show which dimension contains the rows. Each call of the user therefore runs twice: first for the
*twin*, which contains this row twice, without gradients and with the generators restored afterwards, and then for the row. The twin is
tracked like any other rows (``RowDraws``). Its draws determine the position of the row, the order of memory, and what is recorded or
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.core.inputs import tensors_in
from lightning_ddp_losses.randomness.notes import line_of_user
from lightning_ddp_losses.randomness.places import LOST, WITHOUT_ROWS, Mark, RowPlace, Rows, empty_whole, memory_order
from lightning_ddp_losses.randomness.row_draws import OF_COLLECTIVES, RowDraws
from lightning_ddp_losses.randomness.row_orders import RowOrders
from lightning_ddp_losses.randomness.row_sizes import OtherSize, RowCount, RowSizes
from lightning_ddp_losses.randomness.shared_states import generators_put_back
from lightning_ddp_losses.randomness.twin_table import NO_TWIN, TwinTable, map_call
from lightning_ddp_losses.randomness.whole_draws import (
    CannotDrawError,
    Draw,
    DrawCall,
    draw_own_part,
    draws_numbers,
)

_TWIN = Rows(2, 0, 2)
_NOT_TWICE = {
    "backward",
    "grad",
    "_make_subclass",
    "__repr__",
    "__format__",
    "__hash__",
    "__reduce_ex__",
    "__deepcopy__",
}
_PICKS = {"index", "index_select", "take", "gather"}
_NUMBERS = {"item", "__float__", "__int__", "__bool__", "__index__", "__complex__"}


class CollectiveError(Exception):
    """A call of the twin would communicate with other ranks."""


class TwinDraw(NamedTuple):
    """A draw that the twin has made.

    Attributes:
        name: The operator.
        place: Position of the rows in it. None if it is equal for all rows, or refused.
        orders: The dimensions of each tensor argument, outermost in memory first.
        shapes: Shapes of the tensor arguments.
    """

    name: str
    place: RowPlace | None
    orders: Sequence[list[int]]
    shapes: Sequence[torch.Size]


class OneRowDraws(RowDraws):  # type: ignore[no-untyped-call]
    """Processes the operators of the twin.

    Args:
        rows: Rows of this rank among the rows of all ranks.
        orders: Draws orders of rows. None if rows cannot be exchanged.
        draw_part: Draws this rank's part of a draw with rows.
        outside: See ``RowDraws``.
    """

    def __init__(
        self,
        rows: Rows,
        orders: RowOrders | None = None,
        draw_part: Draw = draw_own_part,
        outside: Callable[[Tensor], bool] | None = None,
    ) -> None:
        super().__init__(_TWIN, orders, draw_part)
        self._own_rows = rows
        self._is_piece = outside is not None
        self._twins = TwinTable(outside)
        self._sizes = OneRowSizes(self.mark_of_own, rows.local, self.run_call)
        self._sizes.reads_draws = self._refuse_reading
        self._sizes.shares_memory = self._lose_own
        self._own = OwnDraws(self)
        self._drawn: list[TwinDraw] = []
        self._expected: list[TwinDraw] = []
        self.is_twin_running = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Process the operators inside the block."""
        with (
            torch_compat.around_fsdp_exchanges(self.paused),
            self._sizes,
            torch_compat.in_backward(self._sizes),
            self._own,
        ):
            yield
        self._end()

    def mark(self, tensor: Tensor, mark: Mark) -> None:
        """Set the position of the row in a tensor."""
        if mark.is_lost:
            self._twins.write_(tensor, NO_TWIN)
            return
        if mark.place is None:
            self._twins.forget_(tensor)
            return
        twin = empty_whole(tensor.detach(), mark.place, 2)
        twin.copy_(torch.cat([tensor.detach()] * 2, mark.place.dim))
        super().mark(twin, mark)
        self._twins.write_(tensor, twin)

    def mark_of(self, tensor: Tensor) -> Mark:
        """Return the mark of a tensor of the twin."""
        known = self._table.read(tensor)
        if known is None:
            return WITHOUT_ROWS
        return known

    def mark_of_own(self, tensor: Tensor) -> Mark:
        """Return the mark of a tensor of the row."""
        twin = self._twins.read(tensor)
        if twin is None:
            return WITHOUT_ROWS
        if isinstance(twin, str):
            return LOST
        return self.mark_of(twin)

    def has_rows(self, tensor: Tensor) -> bool:
        """Return whether a tensor is known to have a row, or to have it in an unknown place."""
        mark = self.mark_of_own(tensor)
        return mark.place is not None or mark.is_lost

    def _lose_own(self, tensor: Tensor) -> None:
        twin = self._twins.read(tensor)
        if isinstance(twin, Tensor):
            self._table.lose_(twin)
        self._twins.write_(tensor, NO_TWIN)

    # ------------------------------------------------------------------ calls of the user

    def _run_plain(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a call of the user first for the twin and then for the row."""
        name = getattr(func, "__name__", "")
        if name in _NOT_TWICE or self.is_twin_running:
            return func(*args, **kwargs)
        call = _TwinCall(self._twins, args, kwargs)
        has_run, twins = self._run_twin(name, func, call)
        before, self._expected = self._expected, self._drawn
        self._drawn = []
        if self._has_misused_order:
            args, kwargs = map_call(self._in_range, args), map_call(self._in_range, kwargs)
        try:
            result = func(*args, **kwargs)
        finally:
            unused, self._expected = self._expected, before
        if unused:
            self._refuse_other_draws(unused[0].name)
        self._bind(name, call, tensors_in(result), twins if has_run else None)
        return result

    def _run_twin(self, name: str, func: Any, call: _TwinCall) -> tuple[bool, list[Tensor]]:
        """Return whether the call ran for the twin, and the tensors that it returned."""
        notes = len(self.notes)
        self._drawn = []
        self._has_misused_order = False
        self.is_twin_running = True
        try:
            if call.is_lost:
                raise ValueError("rows in an unknown place")
            with torch.no_grad(), self:
                return True, tensors_in(func(*call.args, **call.kwargs))
        except Exception:  # if the call fails for two rows, it runs for the row without being tracked
            del self.notes[notes:]
            self._drawn = []
            self._refuse_unfollowed(name, call)
            return False, []
        finally:
            self.is_twin_running = False

    def _in_range(self, part: Any) -> Any:
        """Return an order that selects this rank's row, for a step that has refused a misused order."""
        if isinstance(part, Tensor) and self.mark_of_own(part).is_order:
            return torch.zeros_like(part)
        return part

    def _refuse_unfollowed(self, name: str, call: _TwinCall) -> None:
        """Refuse a call that cannot be tracked, if it involves draws that may determine the order of rows."""
        marks = [self.mark_of_own(tensor) for tensor in call.own]
        if torch_compat.graph_task_id() != -1:
            return
        if name in _NUMBERS:
            if any(mark.is_drawn for mark in marks):
                self._refuse_reading(name)
            return
        if any(mark.place is not None for mark in marks) and (self._has_shared or any(mark.is_drawn for mark in marks)):
            self.refuse(
                f"{name} at {line_of_user()}",
                "a call that does not run with two rows, in a step that draws for all rows",
                "Let nothing in the step depend on the number of rows.",
            )

    def _bind(self, name: str, call: _TwinCall, results: Sequence[Tensor], twins: Sequence[Tensor] | None) -> None:
        """Record the twins of the results and of tensors that the call has written to."""
        if twins is None or len(twins) != len(results):
            if call.has_twins or twins is not None:
                for tensor in results:
                    self._twins.write_(tensor, NO_TWIN)
                if name.endswith("_") or "out" in call.kwargs:
                    for tensor in call.own:
                        self._twins.write_(tensor, NO_TWIN)
            return
        for tensor, copy, version in call.copies:
            if copy._version != version:
                self._bind_one(tensor, copy)
        for tensor, twin in zip(results, twins, strict=True):
            self._bind_one(tensor, twin)

    def _bind_one(self, tensor: Tensor, twin: Tensor) -> None:
        if isinstance(tensor, nn.Parameter):
            return
        mark = self.mark_of(twin)
        shape = list(tensor.shape)
        if mark.place is not None and mark.place.dim < len(shape):
            shape[mark.place.dim] *= 2
        is_alike = shape == list(twin.shape) and tensor.dtype == twin.dtype
        self._twins.write_(tensor, twin if is_alike or mark.is_lost else NO_TWIN)

    def _lose(self, name: str, func: Any, marks: Sequence[Mark], outputs: Sequence[Tensor]) -> None:
        """Mark results as lost, and refuse rows selected by numbers not computed from the batch (an order of one row may not be drawn)."""
        super()._lose(name, func, marks, outputs)
        has_rows = any(mark.place is not None for mark in marks)
        has_others = any(mark.place is None and not mark.is_lost for mark in marks)
        is_one_of_more = self._own_rows.total > 1 and torch_compat.graph_task_id() == -1
        if is_one_of_more and has_rows and has_others and name in _PICKS:
            self.refuse(
                f"{name} at {line_of_user()}",
                "a row that is picked by numbers that do not come from the batch, on a rank with one row",
                "Pick rows by numbers that are computed from the batch, or take two rows or more on each rank.",
            )

    # ------------------------------------------------------------------ draws

    def _run_operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func.namespace in OF_COLLECTIVES:
            raise CollectiveError
        return super()._run_operator(func, args, kwargs)

    def _compare_state(self, where: str) -> None:
        if not self.is_twin_running:
            super()._compare_state(where)

    def note_state(self) -> None:
        """Record the state after a draw of the row."""
        if not self.is_twin_running:
            super().note_state()

    def _run(self, call: DrawCall, place: RowPlace | None, line: str) -> Any:
        """Draw for the twin, and restore the generators."""
        refused = len(self.refusals)
        given = call.tensors
        if call.name.endswith("_like"):
            given = [torch.empty_like(tensor) for tensor in given]
        orders = [memory_order(tensor) for tensor in given]
        shapes = [tensor.shape for tensor in given]
        with generators_put_back(call.kwargs.get("generator")):
            result = super()._run(call, place, line)
        certain = place if len(self.refusals) == refused else None
        self._drawn.append(TwinDraw(call.name, certain, orders, shapes))
        return result

    def draw_own(self, call: DrawCall) -> Any:
        """Repeat the twin's draw for this rank's row."""
        name = call.name
        line = line_of_user()
        if call.kwargs.get("generator") is None:
            self._compare_state(f"{name} at {line}")
        if self._expected and self._expected[0].name == name:
            result = self._draw_in_order(call, self._expected.pop(0), line)
        else:
            self._refuse_other_draws(name)
            result = call.run()
        self.note_state()
        return result

    def _draw_in_order(self, call: DrawCall, draw: TwinDraw, line: str) -> Any:
        """Draw with tensors whose memory order equals that of the twin."""
        if draw.place is None:
            return call.run()
        given = call.tensors
        laid_out = []
        for tensor, order, shape in zip(given, draw.orders, draw.shapes, strict=True):
            memory = _new_in_order(tensor, order) if draw.name.endswith("_like") else tensor
            ordered = _in_order(memory, order)
            if _long_dims(memory_order(ordered), shape) != _long_dims(order, shape):
                self._refuse_other_draws(draw.name)
            laid_out.append(ordered)
        replaced = iter(laid_out)

        def replace(part: Any) -> Any:
            return next(replaced) if isinstance(part, Tensor) else part

        call = call.mapped(replace)
        try:
            result = self._draw_part(call, draw.place, self._own_rows)
        except CannotDrawError as error:
            self.refuse(f"{draw.name} at {line}", error.got, error.fix)
            return call.run()
        if draw.name.endswith("_"):
            return given[0]
        return result

    def lose_own(self, tensors: Sequence[Tensor]) -> None:
        """Mark tensors as lost if rows are exchanged between ranks."""
        marks = [self.mark_of_own(tensor) for tensor in tensors]
        if any(mark.place is not None or mark.is_lost for mark in marks):
            for tensor in tensors:
                self._lose_own(tensor)

    def _refuse_other_draws(self, name: str) -> None:
        self.refuse(
            f"{name} at {line_of_user()}",
            "a draw on a rank with one row, where it cannot be told which dimension counts rows",
            "Say with_rows(tensor, dim) of a tensor before the draw, or take two rows or more on each rank.",
        )


class OwnDraws(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Processes the operators of the row.

    Args:
        draws: Processes the operators of the twin.
    """

    def __init__(self, draws: OneRowDraws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._draws.is_twin_running or self._draws.is_paused:
            return func(*args, **kwargs)
        if draws_numbers(func, args, kwargs):
            return self._draws.draw_own(DrawCall(func, args, kwargs))
        if func.namespace in OF_COLLECTIVES:
            self._draws.lose_own(tensors_in((args, kwargs)))
        return func(*args, **kwargs)


class OneRowSizes(RowSizes):
    """Marks sizes that are read from tensors with one row."""

    def may_count_rows(self, size: int) -> bool:
        """Return whether a number may be a number of rows: any plain positive number, once a number of rows has become a plain number."""
        return not isinstance(size, OtherSize) and size > 0 and self.has_escaped()


class _TwinCall:
    """A call of the user with its tensors replaced by their twins.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        own: The tensors of the call that runs for the row.
        copies: Tensors without rows, their copies, and the versions of the copies.
        is_lost: Whether a tensor has rows in an unknown position.
        has_twins: Whether a tensor has rows or may have rows.
    """

    def __init__(self, twins: TwinTable, args: Any, kwargs: dict[str, Any]) -> None:
        self._twins = twins
        self.own: list[Tensor] = []
        self.copies: list[tuple[Tensor, Tensor, int]] = []
        self.is_lost = False
        self.has_twins = False
        self.args = map_call(self._twin_of, args)
        self.kwargs = map_call(self._twin_of, kwargs)

    def _twin_of(self, part: Any) -> Any:
        if isinstance(part, RowCount):
            return part.of_two
        if not isinstance(part, Tensor):
            return part
        self.own.append(part)
        twin = self._twins.read(part)
        if twin is None:
            return self._copy(part)
        self.has_twins = True
        if isinstance(twin, str):
            self.is_lost = True
            return part
        return twin

    def _copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor without rows, so that the call for the twin does not change the original."""
        plain = tensor.detach()
        if isinstance(tensor, nn.Parameter):
            return plain
        copy = plain.clone()
        if copy.stride() != plain.stride():
            return plain
        self.copies.append((tensor, copy, copy._version))
        return copy


def _new_in_order(like: Tensor, order: Sequence[int]) -> Tensor:
    """Return an uninitialized tensor whose dimensions are in this order in memory, outermost first."""
    memory = like.new_empty([like.shape[dim] for dim in order])
    return memory.permute([order.index(dim) for dim in range(like.ndim)])


def _in_order(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Return the same elements with strides that place dimensions of size 1 according to this order."""
    strides = list(tensor.stride())
    step = 1
    for dim in reversed(order):
        if tensor.shape[dim] == 1:
            strides[dim] = step
        else:
            step = strides[dim] * tensor.shape[dim]
    return tensor.as_strided(tensor.shape, strides)


def _long_dims(order: Sequence[int], shape: Sequence[int]) -> list[int]:
    return [dim for dim in order if shape[dim] != 1]
