"""`RowPieces`: the runs of an encoder on pieces of a rank's rows (``microbatched``), with the numbers of one run on all rows of all ranks.

Each piece begins with the generators in the states that they had before the first piece, makes the draws of the whole batch, and keeps the
numbers of its rows. Pieces thus decide memory and no numbers, all leave the generators in the same states, and the run of a piece in
backward draws the same again.

A world of one without ``by_row`` tracks no rows. There, pieces are tracked in calls inside ``in_one_process``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from lightning_ddp_losses.core.random_state import PieceRuns, write_random_states_
from lightning_ddp_losses.randomness.notes import Refusal
from lightning_ddp_losses.randomness.piece_draws import PieceDraw
from lightning_ddp_losses.randomness.places import LOST, WITHOUT_ROWS, Mark, RowPlace, Rows
from lightning_ddp_losses.randomness.row_draws import RowDraws
from lightning_ddp_losses.randomness.shared_states import device_of_draws, digest_of, own_states
from lightning_ddp_losses.randomness.step_draws import StepDraws, active_step, draws_of_rows, raise_refusal
from lightning_ddp_losses.randomness.whole_draws import Draw, draw_own_part

_FIRST = RowPlace(0)
_one_process: list[bool] = []


@contextmanager
def in_one_process() -> Iterator[None]:
    """Draw in pieces what one process draws for its whole batch, in a world of one."""
    _one_process.append(True)
    try:
        yield
    finally:
        _one_process.pop()


def start_pieces(batch: Sequence[Tensor], encoder: nn.Module) -> RowPieces | None:
    """Return the runs on the pieces of a batch, or None outside of ``global_randomness`` and for a batch without rows.

    Args:
        batch: Tensors that are cut into pieces along dimension 0, of the same size.
        encoder: Module that runs on the pieces.
    """
    step = active_step()
    if step is None and not _one_process:
        return None
    if step is None:
        rows = Rows(batch[0].shape[0], 0, batch[0].shape[0])
        draws = draws_of_rows(rows, None, draw_own_part)
        for tensor in batch:
            draws.mark(tensor, Mark(_FIRST))
        step = StepDraws(rows, [rows.local], draws, draw_own_part)
    if step.draws.is_paused:
        return None
    marks = [step.draws.mark_of_own(tensor) for tensor in batch]
    places = [mark.place for mark in marks if mark.place is not None and mark.place.dim == 0]
    if not places:
        return None
    with step.draws.paused():
        return RowPieces(step, places[0], encoder)


class _Piece(NamedTuple):
    """A piece of the rows.

    Attributes:
        rows: Position in dimension 0 of the batch.
        tensors: Its tensors, with the marks of the tensors from which they were cut.
    """

    rows: slice
    tensors: Sequence[tuple[Tensor, Mark]]


class RowPieces(PieceRuns):
    """Runs on pieces of the rows of this rank.

    Args:
        step: The step.
        place: Position of the rows in the tensors that are cut.
        encoder: Module that runs on the pieces.
    """

    def __init__(self, step: StepDraws, place: RowPlace, encoder: nn.Module) -> None:
        self._step = step
        self._whole = step.draws
        self._whole.has_pieces = True
        self._place = place
        self._buffers = list(encoder.buffers())
        self._states = own_states()  # with which each piece begins
        self._after = b""  # digest of the states with which the first piece with rows ends
        self._notes: list[str] | None = None  # of this piece
        self._pieces: list[_Piece] = []
        self._runs = 0
        self._last = step.draws  # of the first run that was last
        self._marks: list[list[Mark]] = []  # of the results of each piece with rows

    def of_all(self) -> AbstractContextManager[None]:
        """Return a context in which operators are not part of the step, except in a piece."""
        return self._whole.paused()

    def add(self, rows: slice, whole: Sequence[Tensor], cut: Sequence[Tensor]) -> None:
        """Add the next piece, with the marks of its tensors."""
        tensors = []
        for before, after in zip(whole, cut, strict=True):
            mark = self._whole.mark_of_own(before)
            if after is not before and mark.place == self._place:
                tensors.append((after, mark._replace(place=_FIRST)))
        self._pieces.append(_Piece(rows, tensors))

    @contextmanager
    def of_run(self, number: int) -> Iterator[None]:
        """Run a piece inside the block, for the first time or again. First runs must be in order."""
        piece = self._pieces[number]
        local = piece.rows.stop - piece.rows.start
        is_first = number == self._runs
        is_followed = self._step.is_active
        # 1. the states with which the first piece began
        with self._whole.paused():
            if is_followed:
                self._step.compare_others("a piece of microbatched")
            before = own_states()
            write_random_states_(self._states, device_of_draws())
            draws = self._draws_of(piece, local)
        has_ended = False
        try:
            with self._step.in_piece(draws, local):
                yield
            has_ended = True
        finally:  # torch ends a run in backward by an exception, when it has what it needs
            # 2. the states after the first run of a piece with rows stay, which are those after a run on all rows
            is_last = is_first and has_ended
            with self._whole.paused():
                if local:
                    self._compare(number, draws, is_last)
                if not is_last or not local:
                    write_random_states_(before, device_of_draws())
                self._step.note_others()
            if is_last:
                self._runs += 1
                self._last = draws
            self._take_refusals(draws, is_followed)

    def note_results(self, results: Sequence[Tensor]) -> None:
        """Record where the results of the piece that has run last have rows."""
        if self._pieces[-1].rows.stop > self._pieces[-1].rows.start:
            self._marks.append([self._last.mark_of_own(tensor) for tensor in results])

    def mark(self, joined: Sequence[Tensor]) -> None:
        """Mark the results of all pieces, joined along dimension 0."""
        self._whole.note_state()
        for number, tensor in enumerate(joined):
            of_pieces = {marks[number] for marks in self._marks}
            mark = of_pieces.pop() if len(of_pieces) == 1 else LOST
            if mark.place == _FIRST:
                self._whole.mark(tensor, mark._replace(place=self._place))
            elif self._marks:
                self._whole.mark(tensor, LOST)

    def _draws_of(self, piece: _Piece, local: int) -> RowDraws:
        rows, draw_part = self._rows_of(piece.rows, local)
        draws = draws_of_rows(rows, None, draw_part, self._has_rows_outside)
        draws.follow_sharing_of(self._whole)
        for buffer in self._buffers:
            draws.mark(buffer, WITHOUT_ROWS)
        if local:
            for tensor, mark in piece.tensors:
                draws.mark(tensor, mark)
        return draws

    def _has_rows_outside(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, nn.Parameter) and self._whole.has_rows(tensor)

    def _rows_of(self, piece: slice, local: int) -> tuple[Rows, Draw]:
        """Return the rows of a piece among all rows, and how they are drawn."""
        of_rank, draw_part = self._step.rows, self._step.draw_part
        if self._place != _FIRST:
            draw = PieceDraw(of_rank, self._place, piece, draw_part)
            return Rows(local, 0, of_rank.total * self._place.outer * self._place.inner), draw
        order = of_rank.order
        if order is not None:
            order = order[piece]
        return Rows(local, of_rank.start + piece.start, of_rank.total, order), draw_part

    def _compare(self, number: int, draws: RowDraws, is_first: bool) -> None:
        """Compare the draws of a piece with the draws of the first piece, which are those of the step."""
        notes = [note.what for note in draws.notes]
        digest = digest_of(own_states())
        if self._notes is None:
            self._notes, self._after = notes, digest
            self._whole.notes += draws.notes
            return
        is_same = notes == self._notes[: len(notes)]  # a run in backward may end early
        if is_first:
            is_same = notes == self._notes and digest == self._after
        if not is_same:
            draws.refuse(
                f"the draws of piece {number + 1}",
                "other draws, or other states of generators after them, than in the first run of the first piece",
                "Let nothing that the encoder draws depend on the number of rows or on their values.",
            )

    def _take_refusals(self, draws: RowDraws, is_followed: bool) -> None:
        """Give the refusals of a piece to the step, or raise the first one if no step is active that raises them at its end."""
        for refusal in draws.refusals:
            found = Refusal(f"{refusal.what}, in a piece of microbatched", refusal.got, f"{refusal.fix} {_BESIDE}")
            if not is_followed:
                raise_refusal(found, 0)
            self._whole.refuse(*found)


_BESIDE = "What needs rows of other pieces belongs before or behind microbatched."
