"""`RowDraws`: the mode of a step, in which a draw with rows is this rank's part of the draw that one process makes for all rows.

The mode processes each operator of forward, loss and backward. It tracks rows from the batch on (``rules``), draws for all rows if an
operator draws for rows (``whole_draws``), and records each draw for comparison between ranks. It refuses everything that it cannot track. A
refusal is stored until the end of the step, where all ranks raise it. Until then the operator draws only for this rank, so that no rank
waits for another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_losses.core import torch_compat
from lightning_ddp_losses.core.inputs import tensors_in
from lightning_ddp_losses.randomness.notes import (
    DrawNote,
    Refusal,
    arguments_by_name,
    line_of_user,
)
from lightning_ddp_losses.randomness.places import LOST, WITHOUT_ROWS, Mark, RowPlace, Rows, is_dense, memory_order
from lightning_ddp_losses.randomness.row_orders import CALLS as CALLS_WITH_ORDERS
from lightning_ddp_losses.randomness.row_orders import KEEP_ORDER, RowOrders
from lightning_ddp_losses.randomness.row_sizes import RowCount, RowSizes
from lightning_ddp_losses.randomness.row_table import RowTable
from lightning_ddp_losses.randomness.rules import LostRowsError, OperatorCall, places_after
from lightning_ddp_losses.randomness.size_rules import MAKES_SHAPE, STRETCHES, mark_by_size, sizes_agree
from lightning_ddp_losses.randomness.state_watch import StateWatch
from lightning_ddp_losses.randomness.twin_table import map_call
from lightning_ddp_losses.randomness.whole_draws import (
    CannotDrawError,
    Draw,
    DrawCall,
    draw_own_part,
    draws_numbers,
    is_random,
    operator_name,
)

OF_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
_REORDERS = {"index", "index_select", "take", "gather", "flip", "roll", "slice", "select", "split", "unbind", "sort"}


# orders of rows of all steps, while they are alive
_drawn_orders = torch_compat.WeakTensorKeys()


class RowDraws(torch_compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Processes the operators of a step.

    Args:
        rows: Rows of this rank among the rows of all ranks.
        orders: Draws orders of rows. None if rows cannot be exchanged.
        draw_part: Draws this rank's part of a draw with rows.
        outside: For a piece of the rows: returns whether a tensor from outside of the piece has, or may have, rows.

    Attributes:
        notes: The draws so far.
        refusals: Operations that cannot be made equal to one process.
        sharing: Whether draws are declared to be equal for all rows.
        has_pieces: Whether an encoder has run on pieces of the rows.
    """

    def __init__(
        self,
        rows: Rows,
        orders: RowOrders | None = None,
        draw_part: Draw = draw_own_part,
        outside: Callable[[Tensor], bool] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draw_part = draw_part
        self._rows = rows
        self._orders = orders
        self._is_piece = outside is not None
        self._table = RowTable(outside)
        self._sizes = RowSizes(self.mark_of, rows.local, self.run_call)
        self._sizes.reads_draws = self._refuse_reading
        self._sizes.shares_memory = self._table.lose_
        self._generator = StateWatch()
        self._has_shared = False
        self.is_paused = False
        self._has_misused_order = False
        self.has_pieces = False
        self.notes: list[DrawNote] = []
        self.refusals: list[Refusal] = []
        self.sharing = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Process the operators inside the block. A rank without rows runs without the mode, because its draws are not used."""
        if not self._rows.local:
            yield
            return
        # a checkpointed layer runs again in backward
        with torch_compat.around_fsdp_exchanges(self.paused), self._sizes, torch_compat.in_backward(self._sizes), self:
            yield
        self._end()

    def _end(self) -> None:
        """Refuse what can only be determined at the end of the step."""
        self._compare_state("the end of the step")
        if self._sizes.use.branch:
            self.refuse(
                f"a comparison {self._sizes.use.branch} of the number of rows",
                "a branch on this rank's number of rows, which in one process is that of all ranks",
                "Let nothing in the step depend on the number of rows.",
            )

    def digest(self) -> bytes:
        """Return a hash of the draws, equal on all ranks with rows that draw the same."""
        text = "\n".join(note.what for note in self.notes)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    def mark(self, tensor: Tensor, mark: Mark) -> None:
        """Set the mark of a tensor."""
        self._table.write_(tensor, mark)

    def mark_of(self, tensor: Tensor) -> Mark:
        """Return the mark of a tensor."""
        known = self._table.read(tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        if known is not None and not (is_parameter and known.is_lost):  # backward sees a parameter as a plain tensor
            return known
        # a tensor that was created outside the step
        known = WITHOUT_ROWS
        if not is_parameter and any(self._sizes.may_count_rows(size) for size in tensor.shape):
            known = LOST
        if tensor in _drawn_orders:
            known = Mark(RowPlace(0), is_drawn=True, is_order=True)
            self.refuse(
                f"an order of rows at {line_of_user()}",
                "an order that was drawn in an earlier step, whose numbers are those of its rows",
                "Draw the order in the step that uses it.",
            )
        self._table.write_(tensor, known)
        return known

    def mark_of_own(self, tensor: Tensor) -> Mark:
        """Return the mark of a tensor with this rank's rows."""
        return self.mark_of(tensor)

    def refuse(self, what: str, got: str, fix: str) -> None:
        """Record a refusal of something that cannot be made equal to one process."""
        self.refusals.append(Refusal(what, got, fix))

    def has_rows(self, tensor: Tensor) -> bool:
        """Return whether a tensor is known to have rows, or to have them in an unknown place."""
        known = self._table.read(tensor)
        return known is not None and (known.place is not None or known.is_lost)

    def follow_sharing_of(self, whole: RowDraws) -> None:
        """Take over what a step has declared before this piece of it."""
        self.sharing = whole.sharing
        self._has_shared = whole._has_shared

    def begin_sharing(self) -> None:
        """Treat draws as equal for all rows from now on."""
        self.sharing = True

    def end_sharing(self) -> None:
        """Treat draws as draws with rows again."""
        self.sharing = False
        self._has_shared = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore operators and sizes inside the block."""
        before = self.is_paused, self._sizes.is_paused
        self.is_paused = self._sizes.is_paused = True
        try:
            yield
        finally:
            self.is_paused, self._sizes.is_paused = before

    # ------------------------------------------------------------------ calls of the user

    def run_call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a call of the user. Calls that draw an order of rows, or select rows by it, apply to the rows of all ranks."""
        name = getattr(func, "__name__", "")
        if self._orders is None or name not in CALLS_WITH_ORDERS:
            return self._run_plain(func, args, kwargs)
        marks = {id(tensor): self.mark_of_own(tensor) for tensor in tensors_in((args, kwargs))}
        whole_args = self._orders.arguments_of_all(name, args, kwargs, marks)
        if whole_args is not None and not self.sharing:
            return self._draw_order(name, func, whole_args, kwargs)
        pick = self._orders.pick_of(name, args, marks)
        if pick is None:
            return self._run_plain(func, args, kwargs)
        picked = self._orders.rows_of(pick, func, args, kwargs)
        self.mark(picked, marks[id(pick.tensor)])
        return picked

    def _run_plain(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a call of the user unchanged."""
        return func(*args, **kwargs)

    def _draw_order(self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """Return this rank's part of an order of all rows."""
        assert self._orders is not None
        line, generator = line_of_user(), kwargs.get("generator")
        if generator is None:
            self._compare_state(f"{name} at {line}")
        self._note(f"{name} of rows", [0], RowPlace(0), [0], str(kwargs.get("dtype")), generator, line)
        order = self._orders.draw(func, args, kwargs)
        self.note_state()
        self.mark(order, Mark(RowPlace(0), is_drawn=True, is_order=True))
        _drawn_orders[order] = True
        return order

    # ------------------------------------------------------------------ operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        before, self._sizes.is_paused = self._sizes.is_paused, True
        try:
            return self._run_operator(func, args, kwargs or {})
        finally:
            self._sizes.is_paused = before

    def _run_operator(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._is_formula_of_backward() and not is_random(func) and func.namespace not in OF_COLLECTIVES:
            return func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        marks = [self.mark_of(tensor) for tensor in tensors]
        if func.namespace in OF_COLLECTIVES:
            if any(mark.place is not None or mark.is_lost for mark in marks):
                for tensor in tensors:
                    self._table.lose_(tensor)
            return func(*args, **kwargs)
        if draws_numbers(func, args, kwargs):
            return self._draw(DrawCall(func, args, kwargs), tensors, marks)
        name = operator_name(func)
        if any(mark.is_order for mark in marks) and name not in KEEP_ORDER and torch_compat.graph_task_id() == -1:
            args, kwargs = self._misuse(name, args, kwargs)
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        if outputs:
            self._follow(func, args, kwargs, tensors, marks, outputs)
        elif any(mark.is_summed for mark in marks) and torch_compat.graph_task_id() == -1:
            self._refuse_reading(name)
        return result

    def _is_formula_of_backward(self) -> bool:
        """Return whether the operator is part of autograd's own formulas, whose results no layer that runs again takes.

        A layer that runs again does so in calls of Python or with gradients.
        """
        if torch_compat.graph_task_id() == -1 or torch.is_grad_enabled():
            return False
        return not self._sizes.is_in_call

    def _misuse(self, name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Refuse an order that does not select rows, and return arguments with indices of this rank's rows so that the step can finish."""
        self._has_misused_order = True
        self.refuse(
            f"{name} at {line_of_user()}",
            "an order of the rows of all ranks that does something else than pick rows",
            _ORDER,
        )

        def in_range(part: Any) -> Any:
            is_order = isinstance(part, Tensor) and self.mark_of(part).is_order
            return part % self._rows.local if is_order else part

        return map_call(in_range, args), map_call(in_range, kwargs)

    def _follow(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: Sequence[Tensor],
        marks: Sequence[Mark],
        outputs: Sequence[Tensor],
    ) -> None:
        """Mark the results of an operator."""
        name = operator_name(func)
        with_rows = [mark for mark in marks if mark.place is not None or mark.is_lost]
        is_drawn = any(mark.is_drawn for mark in marks) and all(mark.is_drawn for mark in with_rows)
        is_summed = any(mark.is_summed for mark in marks)
        if is_summed and with_rows:
            self._refuse_sum(name)
        if not with_rows:
            mark = self._mark_by_size(name, tensors, outputs[0].shape)
            for output in outputs:
                self._table.write_(output, mark._replace(is_drawn=is_drawn, is_summed=is_summed))
            return
        places: list[RowPlace | None] | None = None
        if not any(mark.is_lost for mark in marks):
            places = self._places(name, func, args, kwargs, tensors, marks, outputs)
        if places is not None:
            for output, place in zip(outputs, places, strict=True):
                mark = Mark(place, is_drawn=is_drawn, is_summed=is_drawn and place is None)
                is_order = name in KEEP_ORDER and any(mark.is_order for mark in marks)
                self._table.write_(output, mark._replace(is_order=is_order))
            return
        self._lose(name, func, marks, outputs)

    def _refuse_sum(self, name: str) -> None:
        """Refuse combining rows with a mean of this rank's draws, which in one process is a mean over the rows of all ranks."""
        if torch_compat.graph_task_id() == -1:
            self.refuse(
                f"{name} at {line_of_user()}",
                "a sum or mean over this rank's rows of draws, which goes back to the rows",
                "Take means of draws within a row, or over the rows of all ranks (global_mean).",
            )

    def _lose(self, name: str, func: Any, marks: Sequence[Mark], outputs: Sequence[Tensor]) -> None:
        """Mark results as lost. In forward, draws must not determine the order of rows."""
        changes = torch_compat.operator_schema(func).is_mutable
        for output in outputs:
            if changes:
                self._table.lose_(output)
            else:
                self._table.write_(output, LOST)
        is_in_backward = torch_compat.graph_task_id() != -1
        had_rows = any(mark.place is not None for mark in marks)
        if is_in_backward or not had_rows:
            return
        if any(mark.is_drawn for mark in marks):
            self.refuse(
                f"{name} at {line_of_user()}",
                "an operator that takes a draw, and that may mix or reorder rows, whose partners are on other ranks",
                _MIXES,
            )
        elif self._has_shared and name in _REORDERS:
            self.refuse(
                f"{name} at {line_of_user()}",
                "rows that are picked or reordered in a step that draws numbers for all rows, while their partners are on other ranks",
                _MIXES,
            )

    def _places(
        self,
        name: str,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: Sequence[Tensor],
        marks: Sequence[Mark],
        outputs: Sequence[Tensor],
    ) -> list[RowPlace | None] | None:
        """Return the positions of the rows in the results, or None if they are unknown."""
        places = {id(tensor): mark.place for tensor, mark in zip(tensors, marks, strict=True) if mark.place is not None}
        call = OperatorCall(
            name,
            arguments_by_name(func, args, kwargs),
            places,
            outputs,
            self._rows.local,
            torch.Tag.pointwise in func.tags,
        )
        if name in MAKES_SHAPE - STRETCHES:
            mark = self._mark_by_size(name, (), outputs[0].shape)
            return None if mark.is_lost else [mark.place]
        try:
            found = places_after(call)
        except LostRowsError:
            return None
        if self._sizes.given is not None and not sizes_agree(self._sizes, call, found):
            return None
        return found

    def _mark_by_size(self, name: str, tensors: Sequence[Tensor], shape: Sequence[int]) -> Mark:
        """Return the mark of a result whose arguments do not have rows, but whose sizes may have been read from a tensor with rows."""
        if tensors and name not in MAKES_SHAPE:
            return WITHOUT_ROWS
        return mark_by_size(self._sizes, shape, self._rows.local)

    # ------------------------------------------------------------------ draws

    def _draw(self, call: DrawCall, tensors: Sequence[Tensor], marks: list[Mark]) -> Any:
        name = call.name
        line = line_of_user()
        generator = call.kwargs.get("generator")
        if generator is None:
            self._compare_state(f"{name} at {line}")
        elif self._is_piece:
            self.refuse(
                f"{name} at {line}", "a generator of the user, which each piece finds in another state", _BEFORE
            )
        if tensors:
            shape = list(tensors[0].shape)
            dtype = str(tensors[0].dtype)
            order = memory_order(tensors[0])
        else:
            shape = call.shape
            dtype = str(call.kwargs.get("dtype"))
            order = list(range(len(shape)))
        place = self._place_drawn(name, tensors, marks, shape, line)
        order = [dim for dim in order if shape[dim] != 1]
        self._note(name, shape, place, order, dtype, generator, line)
        result = self._run(call, place, line)
        for output in tensors_in(result):
            self._table.write_(output, Mark(place, is_drawn=name != "native_dropout"))
        self.note_state()
        return result

    def _place_drawn(
        self, name: str, tensors: Sequence[Tensor], marks: Sequence[Mark], shape: Sequence[int], line: str
    ) -> RowPlace | None:
        """Return the position of the rows in a draw, or None for a draw that is equal for all rows. Records a refusal if uncertain."""
        what = f"{name} of shape {tuple(map(int, shape))} at {line}"
        if not tensors:
            marks = [self._mark_by_size(name, (), shape)]
            if name == "randperm" and self._sizes.given is not None:
                marks = [self._mark_by_size(name, (), [int.__int__(size) for size in self._sizes.given])]
        places = {mark.place for mark in marks if mark.place is not None}
        is_lost = any(mark.is_lost for mark in marks)
        if self.sharing:
            if places or is_lost:
                self.refuse(what, "a draw with rows inside of shared_draws()", "Draw it outside of shared_draws().")
            return None
        if name == "randperm":
            self.refuse(what, "an order of rows, whose partners are on other ranks", _MIXES)
            return None
        is_beside_a_piece = self.has_pieces and torch_compat.graph_task_id() != -1
        if is_beside_a_piece and (is_lost or len(places) != 1):
            self.refuse(
                what, "a checkpoint inside of a piece of microbatched, which runs again behind the piece", _SMALLER
            )
            return None
        if is_lost or len(places) > 1:
            self.refuse(
                what,
                "rows that are not certain: a part of them, another order, or a size that is their number by chance",
                _SAY,
            )
            return None
        if not places:
            self.refuse(what, "a draw that does not come from the batch", _SAY)
            return None
        if name == "randint" and any(isinstance(size, RowCount) for size in self._sizes.numbers):
            self.refuse(what, "indices of rows, whose partners are on other ranks", _MIXES)
        for tensor in tensors:
            if not name.endswith("_like") and not is_dense(tensor):
                self.refuse(
                    what,
                    "a draw into memory with gaps or shared elements",
                    "Draw into a contiguous tensor, and copy it.",
                )
        return places.pop()

    def _run(self, call: DrawCall, place: RowPlace | None, line: str) -> Any:
        if place is None:
            return call.run()
        try:
            return self._draw_part(call, place, self._rows)
        except CannotDrawError as error:
            self.refuse(f"{call.name} at {line}", error.got, error.fix)
            return call.run()

    def _compare_state(self, where: str) -> None:
        """Refuse draws that were not made by an operator."""
        if not self._generator.has_moved_unseen():
            return
        self.refuse(
            f"torch's generator before {where}",
            "a state that no draw of the step has left: it was seeded, set, or drawn from in code that torch does not show",
            "Seed and set no generator inside the step, and compile nothing that draws.",
        )

    def note_state(self) -> None:
        """Record the state after a draw."""
        self._generator.note_draw()

    def _refuse_reading(self, name: str) -> None:
        self.refuse(
            f"{name} at {line_of_user()}",
            "draws that become numbers of Python or numpy, which cannot be followed",
            _LOG,
        )

    def _note(
        self,
        name: str,
        shape: Sequence[int],
        place: RowPlace | None,
        order: Sequence[int],
        dtype: str,
        generator: Any,
        line: str,
    ) -> None:
        sizes = [str(int(size)) for size in shape]
        if place is not None:
            sizes[place.dim] = "rows"
            if place.outer > 1 or place.inner > 1:
                sizes[place.dim] = f"{place.outer} x rows x {place.inner}"
        what = f"{name}({', '.join(sizes)}) {dtype}"
        if list(order) != sorted(order):
            what += f", in memory by dimensions {list(order)}"
        if generator is not None:
            state = hashlib.blake2b(generator.get_state().numpy().tobytes(), digest_size=8).hexdigest()
            what += f", from a generator in state {state}"
        self.notes.append(DrawNote(what, line))


_MIXES = "With rows on every rank, index rows by torch.randperm(x.shape[0]), which exchanges them, or take partners within a row."
_ORDER = "Index tensors with rows by it (x[order]), move it to a device, and do nothing else with it."
_SMALLER = (
    "Take smaller pieces (chunk_size) instead of checkpoints inside of them. Backward runs each piece again, too."
)
_BEFORE = "Draw before microbatched, and pass the tensor, or use torch's generator."
_LOG = "Log the tensor, or read it after the step. Let no number that was read from draws go back to the rows."
_SAY = (
    "Draw the shape of a tensor that comes from the batch (torch.randn_like(x)), or read the number of rows from its shape "
    "(torch.randn(x.shape[0], 4)), not from len(x) or a constant. Say with_rows(tensor, dim) of a tensor before the draw, or draw numbers "
    "that all rows share in a block shared_draws()."
)
