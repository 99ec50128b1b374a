"""`RandomStep`: a step of all ranks whose random numbers are those of one process.

At its beginning the ranks exchange their numbers of rows and start from the generators of rank 0. Inside, ``RowDraws`` draws for the rows
of all ranks. At its end they compare what they have drawn, and the states that their generators are in.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lightning_ddp_losses.core import inputs
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.errors import ConfigurationError, InputError, RankMismatchError, expect_count
from lightning_ddp_losses.randomness.places import NO_ROWS, RowPlace, Rows
from lightning_ddp_losses.randomness.row_draws import DrawNote, RowDraws
from lightning_ddp_losses.randomness.row_tracker import RowTracker
from lightning_ddp_losses.randomness.shared_states import DIGEST_BYTES, digest_of, own_states, take_states_

_COUNT = struct.Struct("<q")
_active: list[RandomStep] = []
_TITLE = "global_randomness"


class RandomStep:
    """The random numbers of one step.

    Args:
        batch: Number of rows of this rank, or the batch: a tensor or a nest of tensors with rows.
        row_dim: The dimension of the batch that counts its rows.
        group: Process group. None is the world.

    Raises:
        InputError: on every rank, for a batch without rows, or with different numbers of them.
        RankMismatchError: on every rank, if ranks come here from different places.

    Communication: one handshake. One more if generators are not in the same state on all ranks.
    """

    def __init__(self, batch: Any, *, row_dim: int = 0, group: Group = None) -> None:
        self._group = group
        with handshake.raising_on_all_ranks(_TITLE, group=group):
            self._refuse_nesting()
            local = rows_in(batch, row_dim)
        states = own_states()
        payload = _COUNT.pack(local) + digest_of(states)
        payloads = handshake.all_gather(_TITLE, {"row_dim": row_dim}, payload, group=group)
        self._counts = [_COUNT.unpack_from(each)[0] for each in payloads]
        if len({each[_COUNT.size :] for each in payloads}) > 1:
            take_states_(states, 0, process_groups.rank(group) == 0, group)
        rank = process_groups.rank(group)
        rows = Rows(local, sum(self._counts[:rank]), sum(self._counts))
        is_number = isinstance(batch, int)
        self._tracker = RowTracker(max(local, 1), takes_by_size=is_number and row_dim == 0)
        if not is_number:
            for tensor in inputs.tensors_in(batch):
                if tensor.ndim > row_dim:
                    self._tracker.mark(tensor, (RowPlace(row_dim),))
        self._draws = RowDraws(rows, self._tracker)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw for the rows of all ranks inside the block: forward, loss and backward."""
        self._refuse_nesting()
        _active.append(self)
        try:
            with self._draws.active():
                yield
        finally:
            _active.remove(self)

    def end(self) -> None:
        """Compare the draws of all ranks, and their generators.

        Raises:
            RankMismatchError: on every rank, naming the first draw that differs.

        Communication: one handshake. One more if a rank has no rows, or if ranks differ.
        """
        states = own_states()
        payload = self._draws.digest() + digest_of(states)
        payloads = handshake.all_gather(f"the end of {_TITLE}", {}, payload, group=self._group)
        with_rows = [rank for rank, count in enumerate(self._counts) if count]
        if not with_rows:
            with_rows = list(range(len(self._counts)))
        if len({payloads[rank][:DIGEST_BYTES] for rank in with_rows}) > 1:
            self._raise_other_draws(with_rows)
        if len({payloads[rank][DIGEST_BYTES:] for rank in with_rows}) > 1:
            self._raise_other_states(payloads, with_rows)
        if len({each[DIGEST_BYTES:] for each in payloads}) > 1:
            source = with_rows[0]
            take_states_(states, source, process_groups.rank(self._group) == source, self._group)

    def mark(self, tensor: Tensor, dim: int | None) -> None:
        """Say in which dimension of a tensor the rows are. None: in no dimension."""
        candidates = NO_ROWS
        if dim is not None:
            candidates = (RowPlace(dim % tensor.ndim),)
        self._tracker.mark(tensor, candidates)

    def _refuse_nesting(self) -> None:
        if _active:
            raise ConfigurationError(
                _TITLE,
                expected="one block at a time",
                got="a block inside a block",
                fix="Open one block around forward, loss and backward.",
            )

    def _raise_other_draws(self, with_rows: Sequence[int]) -> None:
        """Raise the error that names the first draw in which ranks differ. Communication: one handshake."""
        own = [[note.what, note.line] for note in self._draws.notes]
        payload = json.dumps(own).encode()
        payloads = handshake.all_gather(f"draws of {_TITLE}", {}, payload, group=self._group)
        notes = {rank: [DrawNote(*each) for each in json.loads(payloads[rank])] for rank in with_rows}
        shortest = min(map(len, notes.values()))
        first = next((i for i in range(shortest) if len({of_rank[i].what for of_rank in notes.values()}) > 1), shortest)
        texts = {}
        for rank, of_rank in notes.items():
            texts[rank] = f"no draw, {len(of_rank)} in all"
            if first < len(of_rank):
                texts[rank] = f"{of_rank[first].what}, {of_rank[first].line}"
        raise RankMismatchError(
            f"global randomness: draw {first + 1} of the step",
            expected="the same draws in the same order on every rank with rows",
            ranks=texts,
            fix="One process has one sequence of random numbers. Let no branch on the rank, on local rows or on local values decide what "
            "is drawn, and give generators of your own the same state.",
            collective=True,
        )

    def _raise_other_states(self, payloads: Sequence[bytes], with_rows: Sequence[int]) -> None:
        raise RankMismatchError(
            "global randomness: states of generators at the end of the step",
            expected="the same states on every rank with rows",
            ranks={rank: payloads[rank][DIGEST_BYTES:].hex()[:12] for rank in with_rows},
            fix="Something in the step has drawn from numpy's, Python's or torch's generator on some ranks only, or seeded it otherwise "
            "(torch.manual_seed). Seed no generator inside the step, or the same on all ranks.",
            collective=True,
        )


def active_step() -> RandomStep | None:
    """Return the step whose block is open. None outside of one."""
    if not _active:
        return None
    return _active[-1]


def rows_in(batch: Any, row_dim: int) -> int:
    """Return the number of rows in a batch, or the number that was given.

    Raises:
        InputError: for no rows, or different numbers of them.
    """
    if isinstance(batch, int):
        expect_count("global_randomness: rows", batch, at_least=0)
        return int(batch)
    sizes = [tensor.shape[row_dim] for tensor in inputs.tensors_in(batch) if tensor.ndim > row_dim]
    if len(set(sizes)) != 1:
        raise InputError(
            "global_randomness: rows",
            expected=f"a number, or a batch whose tensors have the same number of rows in dimension {row_dim}",
            got=f"sizes {sorted(set(sizes))}" if sizes else f"a {type(batch).__name__} without such a tensor",
            fix="Pass the tensors with rows only, or their number.",
        )
    return sizes[0]
