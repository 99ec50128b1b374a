"""`StepDraws`: the draws of a step in this process. A piece of its rows can take their place for a while (``pieces``).

``RandomStep`` adds what the ranks exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from lightning_ddp_losses.errors import ConfigurationError, InputError
from lightning_ddp_losses.randomness.notes import Refusal, line_of_user
from lightning_ddp_losses.randomness.one_row import OneRowDraws
from lightning_ddp_losses.randomness.places import WITHOUT_ROWS, Mark, RowPlace, Rows
from lightning_ddp_losses.randomness.row_draws import RowDraws
from lightning_ddp_losses.randomness.row_orders import RowOrders
from lightning_ddp_losses.randomness.shared_states import digest_of, own_states
from lightning_ddp_losses.randomness.whole_draws import Draw

_OTHER_GENERATORS = ("numpy", "python")
_active: list[StepDraws] = []


def draws_of_rows(
    rows: Rows, orders: RowOrders | None, draw_part: Draw, outside: Callable[[Tensor], bool] | None = None
) -> RowDraws:
    """Return what processes the operators of a step. Arguments are those of ``RowDraws``."""
    kind = OneRowDraws if rows.local == 1 else RowDraws
    return kind(rows, orders, draw_part, outside)


class StepDraws:
    """The random numbers of one step in this process.

    Args:
        rows: Rows of this rank among the rows of all ranks.
        counts: Numbers of rows of all ranks.
        draws: Processes the operators of the step.
        draw_part: Draws this rank's part of a draw with rows.

    Attributes:
        draws: Processes the operators of the step, or of the piece that runs now.
        takes_blocks: Whether an inner block is treated as part of this step instead of raising an error.
    """

    takes_blocks = False

    def __init__(self, rows: Rows, counts: Sequence[int], draws: RowDraws, draw_part: Draw) -> None:
        self.rows = rows
        self.draw_part = draw_part
        self._counts = counts
        self.draws = draws
        self._local = rows.local
        self._others = self._other_states()

    @property
    def is_active(self) -> bool:
        """Whether the step currently draws for all ranks."""
        return self in _active

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw for the rows of all ranks inside the block: forward, loss and backward."""
        _active.append(self)
        try:
            with self.draws.active():
                yield
            self.compare_others("the end of the step")
        finally:
            _active.remove(self)

    @contextmanager
    def in_piece(self, draws: RowDraws, local: int) -> Iterator[None]:
        """Draw for a piece of the rows inside the block, whose generators have the states with which the first piece began.

        Args:
            draws: Processes the operators of the piece.
            local: Number of rows of the piece.
        """
        whole, self.draws, self._local = self.draws, draws, local
        self._others = self._other_states()
        _active.append(self)
        try:
            with whole.paused(), draws.active():
                yield
            self.compare_others("the end of a piece of microbatched")
        finally:
            _active.remove(self)
            self.draws, self._local = whole, self.rows.local

    def note_others(self) -> None:
        """Take the states of numpy's and Python's generators as declared."""
        self._others = self._other_states()

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Draw numbers that are equal for all rows."""
        if self.draws.is_paused:
            yield
            return
        self.compare_others(f"shared_draws() at {line_of_user()}")
        if 0 in self._counts:
            self.draws.refuse(
                f"shared_draws() at {line_of_user()}",
                f"ranks with {self._counts} rows: a rank without rows is at another place in the sequence of random numbers",
                "Give each rank rows, or draw the number before the block.",
            )
        self.draws.begin_sharing()
        try:
            yield
        finally:
            self.draws.end_sharing()
            self.note_others()

    def mark(self, tensor: Tensor, dim: int | None) -> None:
        """Declare which dimension of a tensor contains the rows, or with None that it does not have rows."""
        mark = WITHOUT_ROWS
        if dim is not None:
            if tensor.shape[dim] != self._local:
                raise InputError(
                    "with_rows: tensor",
                    expected=f"{self._local} rows in dimension {dim}, as the batch has",
                    got=f"shape {tuple(map(int, tensor.shape))}",
                    fix="Name the dimension of the rows.",
                )
            mark = Mark(RowPlace(dim % tensor.ndim))
        self.draws.mark(tensor, mark)

    def _other_states(self) -> bytes:
        states = own_states()
        return digest_of({name: states[name] for name in _OTHER_GENERATORS})

    def compare_others(self, where: str) -> None:
        """Record a refusal if numpy's or Python's generator has been used without a declaration."""
        if self._other_states() == self._others:
            return
        self.draws.refuse(
            f"numpy's or Python's generator before {where}",
            "numbers of which nobody has said whether they belong to rows",
            "Draw numbers that all rows share in a block shared_draws(), and numbers of rows with torch.",
        )


def keep_rows(rows: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """Compute a layer that exchanges numbers between ranks, and is not random. Exchanges would hide the rows from an active step.

    Args:
        rows: Input of the layer.
        compute: Returns its result, with rows in the same dimension.
    """
    step = active_step()
    if step is None:
        return compute()
    mark = step.draws.mark_of_own(rows)
    with step.draws.paused():
        result = compute()
    step.draws.mark(result, mark)
    return result


def active_step() -> StepDraws | None:
    """Return the step whose block is active, or None outside of such blocks."""
    if not _active:
        return None
    return _active[-1]


@contextmanager
def beside_the_step() -> Iterator[None]:
    """Run code inside the block that is not part of the step, such as a measurement. Its draws and sizes are not tracked."""
    step = active_step()
    if step is None:
        yield
        return
    with step.draws.paused():
        yield


def raise_refusal(refusal: Refusal, rank: int) -> None:
    """Raise a refusal of a rank."""
    raise ConfigurationError(
        f"global randomness: {refusal.what}",
        expected="random numbers that are those of one process",
        got=f"{refusal.got} (rank {rank})",
        fix=refusal.fix,
    )
