"""`RandomStep`: a step of all ranks with the same random numbers as in one process.

At its beginning, ranks exchange their numbers of rows and start from the generator states of rank 0. Inside, ``RowDraws`` draws for the
rows of all ranks. At its end, ranks compare their draws, their refusals, and the states of their generators.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_ddp_losses.core import inputs
from lightning_ddp_losses.distributed import handshake, process_groups
from lightning_ddp_losses.distributed.process_groups import Group
from lightning_ddp_losses.errors import ConfigurationError, InputError, RankMismatchError
from lightning_ddp_losses.randomness.notes import DrawNote, Refusal
from lightning_ddp_losses.randomness.places import Mark, RowPlace, Rows
from lightning_ddp_losses.randomness.row_blocks import draw_own_blocks
from lightning_ddp_losses.randomness.row_orders import RowOrders
from lightning_ddp_losses.randomness.shared_states import DIGEST_BYTES, digest_of, own_states, take_states_
from lightning_ddp_losses.randomness.step_draws import StepDraws, active_step, draws_of_rows, raise_refusal
from lightning_ddp_losses.randomness.whole_draws import draw_own_part

_COUNT = struct.Struct("<q")
_HAS_REFUSAL = struct.Struct("<?")
_TITLE = "global_randomness"


class PlannedRows(NamedTuple):
    """Rows of a batch that was assembled from the rows of a larger batch.

    Attributes:
        order: Index of each row in the larger batch.
        total: Number of rows of the larger batch.
        seed: Seed of its draws.
    """

    order: tuple[int, ...]
    total: int
    seed: int

    @property
    def is_whole(self) -> bool:
        """Whether these are all rows of the larger batch, in order."""
        return self.order == tuple(range(self.total))


class RandomStep(StepDraws):
    """The random numbers of one step.

    Args:
        batch: The batch of this rank: a tensor or a nest of tensors with rows.
        row_dim: The dimension of the rows in the batch.
        group: Process group. None is the world.
        planned: The position of the rows in a larger batch. If None, the larger batch is the concatenation of the ranks' batches.
        by_row: Whether each rank draws for its own rows only.

    Raises:
        InputError: on every rank, for a batch without rows or whose tensors have different numbers of rows.
        RankMismatchError: on every rank, if the ranks are at different positions in the program.

    Communication: one handshake. One more if generators are not in the same state on all ranks.
    """

    def __init__(
        self,
        batch: Any,
        *,
        row_dim: int = 0,
        group: Group = None,
        planned: PlannedRows | None = None,
        by_row: bool = False,
    ) -> None:
        self._group = group
        with handshake.raising_on_all_ranks(_TITLE, group=group):
            _refuse_nesting()
            local = rows_in(batch, row_dim)
            if planned is not None and len(planned.order) != local:
                raise InputError(
                    f"{_TITLE}: rows",
                    expected=f"{len(planned.order)} of them",
                    got=local,
                    fix="Keep every row of the batch until training_step.",
                )
        states = own_states()
        payload = _COUNT.pack(local) + digest_of(states)
        payloads = handshake.all_gather(_TITLE, {"row_dim": row_dim, "by_row": by_row}, payload, group=group)
        counts = [_COUNT.unpack_from(each)[0] for each in payloads]
        if len({each[_COUNT.size :] for each in payloads}) > 1:
            take_states_(states, 0, process_groups.rank(group) == 0, group)
        rank = process_groups.rank(group)
        rows = Rows(local, sum(counts[:rank]), sum(counts))
        can_exchange = 0 not in counts
        if planned is not None:
            rows = Rows(local, 0, planned.total, planned.order)
            can_exchange = planned.is_whole and len(counts) == 1
        orders = RowOrders(rows, group) if can_exchange else None
        draw_part = draw_own_blocks if by_row else draw_own_part
        draws = draws_of_rows(rows, orders, draw_part)
        for tensor in inputs.tensors_in(batch):
            if tensor.ndim > row_dim:
                draws.mark(tensor, Mark(RowPlace(row_dim)))
        super().__init__(rows, counts, draws, draw_part)

    def end(self) -> None:
        """Compare the draws of all ranks, and their generators.

        Raises:
            ConfigurationError: on every rank, naming the first refusal of a rank.
            RankMismatchError: on every rank, naming the first draw that differs.

        Communication: one handshake. One more if a rank has zero rows, or if ranks differ.
        """
        states = own_states()
        digests = self.draws.digest() + digest_of(states)
        payload = _HAS_REFUSAL.pack(bool(self.draws.refusals)) + digests
        payloads = handshake.all_gather(f"the end of {_TITLE}", {}, payload, group=self._group)
        if any(_HAS_REFUSAL.unpack_from(each)[0] for each in payloads):
            self._raise_refusals()
        payloads = [each[_HAS_REFUSAL.size :] for each in payloads]
        with_rows = [rank for rank, count in enumerate(self._counts) if count]
        if not with_rows:
            with_rows = list(range(len(self._counts)))
        if len({payloads[rank][:DIGEST_BYTES] for rank in with_rows}) > 1:
            self._raise_other_draws(with_rows)
        if len({payloads[rank][DIGEST_BYTES:] for rank in with_rows}) > 1:
            _raise_other_states(payloads, with_rows)
        if len({each[DIGEST_BYTES:] for each in payloads}) > 1:
            source = with_rows[0]
            take_states_(states, source, process_groups.rank(self._group) == source, self._group)

    def _raise_refusals(self) -> None:
        """Raise the first refusal of the lowest rank that has one. Communication: one handshake."""
        payload = json.dumps(self.draws.refusals[:1]).encode()
        payloads = handshake.all_gather(f"refusals of {_TITLE}", {}, payload, group=self._group)
        found = {rank: Refusal(*each[0]) for rank, each in enumerate(map(json.loads, payloads)) if each}
        first = min(found)
        raise_refusal(found[first], first)

    def _raise_other_draws(self, with_rows: Sequence[int]) -> None:
        """Raise an error that names the first draw in which ranks differ. Communication: one handshake."""
        own = [[note.what, note.line] for note in self.draws.notes]
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


def _raise_other_states(payloads: Sequence[bytes], with_rows: Sequence[int]) -> None:
    raise RankMismatchError(
        "global randomness: states of generators at the end of the step",
        expected="the same states on every rank with rows",
        ranks={rank: payloads[rank][DIGEST_BYTES:].hex()[:12] for rank in with_rows},
        fix="Something in the step has drawn from numpy's, Python's or torch's generator on some ranks only, or seeded it otherwise "
        "(torch.manual_seed). Seed no generator inside the step.",
        collective=True,
    )


def _refuse_nesting() -> None:
    if active_step() is not None:
        raise ConfigurationError(
            _TITLE,
            expected="one block at a time",
            got="a block inside a block",
            fix="Open one block around forward, loss and backward.",
        )


def rows_in(batch: Any, row_dim: int) -> int:
    """Return the number of rows in a batch.

    Raises:
        InputError: if there are no tensors with rows, or if their numbers of rows differ.
    """
    sizes = [tensor.shape[row_dim] for tensor in inputs.tensors_in(batch) if tensor.ndim > row_dim]
    if len(set(sizes)) != 1:
        raise InputError(
            "global_randomness: rows",
            expected=f"a batch whose tensors have the same number of rows in dimension {row_dim}",
            got=f"sizes {sorted(set(sizes))}" if sizes else f"a {type(batch).__name__} without such a tensor",
            fix="Pass the tensors with rows only.",
        )
    return sizes[0]
