"""`RowDraws`: the mode of a step in which a draw with rows is this rank's part of the draw that one process makes for all rows.

The mode sees each operator of forward, loss and backward. It follows the rows from the batch on (``propagation``), draws for all rows where
an operator draws for rows (``whole_draws``), and lets all other draws be: in one process they have the same shape. It notes each draw, so
that ranks can compare what they have drawn.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_losses.core import compat
from lightning_ddp_losses.errors import ConfigurationError
from lightning_ddp_losses.randomness.places import (
    NO_ROWS,
    UNKNOWN,
    Candidates,
    RowPlace,
    Rows,
    elements_around,
    memory_order,
)
from lightning_ddp_losses.randomness.propagation import arguments_in
from lightning_ddp_losses.randomness.row_sizes import RowSizes
from lightning_ddp_losses.randomness.row_tracker import RowTracker
from lightning_ddp_losses.randomness.whole_draws import (
    draw_own_part,
    draws_nothing,
    operator_name,
    refused,
    shape_drawn,
)

_NAMES_OF_CHOICES = {"_fused_sdp_choice"}  # torch marks it as drawing, and it does not
_VIEWS = {"view", "_unsafe_view"}
_OF_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")


class DrawNote(NamedTuple):
    """A draw of this rank.

    Attributes:
        what: Operator, shape and dtype, with ``rows`` in the place of a number of rows. Equal on all ranks.
        line: The user's line.
    """

    what: str
    line: str


class RowDraws(compat.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators of a step.

    Args:
        rows: Rows of this rank among those of all ranks.
        tracker: Knows the tensors with rows.

    Attributes:
        notes: The draws so far.
    """

    def __init__(self, rows: Rows, tracker: RowTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows = rows
        self._tracker = tracker
        self._sizes = RowSizes(tracker)
        self.notes: list[DrawNote] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """See the operators inside the block. A rank without rows draws nothing that anybody uses, and runs without the mode."""
        if not self._rows.local:
            yield
            return
        # a checkpointed layer runs again in backward
        with self._sizes, compat.in_backward(self._sizes), self:
            yield

    def digest(self) -> bytes:
        """Return a hash of what was drawn, equal on all ranks with rows that draw the same."""
        text = "\n".join(note.what for note in self.notes)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    # ------------------------------------------------------------------ operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _OF_COLLECTIVES:
            return func(*args, **kwargs)
        tensors = arguments_in((args, kwargs))
        candidates = [self._tracker.candidates(tensor) for tensor in tensors]
        if self._draws(func, args, kwargs):
            return self._draw(func, args, kwargs, tensors, candidates)
        result = func(*args, **kwargs)
        outputs = arguments_in(result)
        if outputs:
            self._follow(func, args, kwargs, candidates, outputs)
        return result

    def _draws(self, func: Any, args: Any, kwargs: Any) -> bool:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return False
        return operator_name(func) not in _NAMES_OF_CHOICES and not draws_nothing(func, args, kwargs)

    def _follow(
        self, func: Any, args: Any, kwargs: Any, candidates: Sequence[Candidates], outputs: Sequence[Tensor]
    ) -> None:
        """Remember where the rows of an operator's results are."""
        if not candidates and self._sizes.declared is not None:
            for output in outputs:
                self._tracker.mark(output, self._declared_place(output.shape))
            return
        self._tracker.follow(func, args, kwargs, candidates, outputs)
        if self._sizes.declared is not None and operator_name(func) in _VIEWS:
            self._tracker.prefer(outputs[0], self._sizes.declared)

    def _declared_place(self, shape: Sequence[int]) -> Candidates:
        """Return the place of the rows in a tensor that is made with a number of rows among its sizes."""
        dim = self._sizes.declared
        if self._sizes.is_computed:
            return (UNKNOWN,)
        if dim is None:
            return NO_ROWS
        if dim < len(shape) and shape[dim] == self._rows.local:
            return (RowPlace(dim),)
        return (UNKNOWN,)

    # ------------------------------------------------------------------ draws

    def _draw(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], candidates: list[Candidates]) -> Any:
        name = operator_name(func)
        line = _users_line()
        if tensors:
            drawn = tensors[0]
            index = 0
            for number, each in enumerate(candidates):
                if any(each):
                    drawn, index = tensors[number], number
                    break
            shape = list(drawn.shape)
            place = self._resolve(name, candidates[index], shape, line, drawn)
            order = memory_order(drawn)
            dtype = str(drawn.dtype)
        else:
            shape = shape_drawn(func, args, kwargs) or []
            place = self._place_of_size(name, func, args, shape, line)
            order = list(range(len(shape)))
            dtype = str(kwargs.get("dtype"))
        generator = kwargs.get("generator")
        order = [dim for dim in order if shape[dim] != 1 or (place is not None and place.dim == dim)]
        self._note(name, shape, place, order, dtype, generator, line)
        result = self._run(func, args, kwargs, place, line)
        for output in arguments_in(result):
            self._tracker.mark(output, (place,))
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, place: RowPlace | None, line: str) -> Any:
        if place is None:
            return func(*args, **kwargs)
        return draw_own_part(func, args, kwargs, place, self._rows, line)

    def _place_of_size(self, name: str, func: Any, args: Any, shape: Sequence[int], line: str) -> RowPlace | None:
        """Return where the rows are in a draw that gets no tensor."""
        if name == "randperm":
            is_of_rows = args[0] == self._rows.local or self._sizes.declared is not None or self._sizes.is_computed
            if is_of_rows:
                raise refused(name, line)
            return None
        if self._sizes.declared is not None or self._sizes.is_computed:
            candidates = self._declared_place(shape)
        else:
            candidates = self._tracker.by_size(shape)
        return self._resolve(name, candidates, shape, line, None)

    def _resolve(
        self, name: str, candidates: Candidates, shape: Sequence[int], line: str, drawn: Tensor | None
    ) -> RowPlace | None:
        """Return the place of the rows in a draw.

        Raises:
            ConfigurationError: if it is not certain.
        """
        places = [each for each in candidates if each is not None]
        if not places:
            return None
        reason = ""
        if UNKNOWN in places:
            reason = "a part of this rank's rows, or rows in several dimensions"
        elif None in candidates:
            reason = self._doubt_by_size(places, shape)
        elif len(places) > 1:
            around = {elements_around(shape, place) for place in places}
            if len(around) > 1 or drawn is None or not drawn.is_contiguous():
                reason = f"{len(places)} dimensions that may be the one of the rows"
        if reason:
            raise ConfigurationError(
                f"global randomness: {name} of shape {tuple(map(int, shape))} at {line}",
                expected="a shape with or without the rows of the batch, in one known dimension",
                got=reason,
                fix="Read the size from the batch (x.shape[0]) and not from len(x) or a constant, pass the batch as rows=, or say "
                "with_rows(tensor, dim) or without_rows(tensor) before the draw.",
            )
        return places[0]

    def _doubt_by_size(self, places: Sequence[RowPlace], shape: Sequence[int]) -> str:
        """Return why a size does not say whether there are rows. Empty if it does."""
        rows = self._rows.local
        if rows == 1:
            return "a dimension of size 1, with one row on this rank"
        if tuple(shape) in self._tracker.shapes_of_parameters:
            return f"the shape of a parameter, with {rows} rows on this rank"
        if len(places) > 1 or places[0].dim != 0:
            return f"dimensions {[place.dim for place in places]} of size {rows}, which is the number of rows"
        return ""

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


_LIBRARIES = ("/torch/", "/lightning/", "/lightning_ddp_losses/", "/contextlib.py")


def _users_line() -> str:
    """Return file and line of the innermost frame that is neither torch's nor ours."""
    frame: Any = inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        if not any(library in path for library in _LIBRARIES):
            return f"{path.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "an unknown line"
