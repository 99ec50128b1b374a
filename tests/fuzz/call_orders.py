"""Objects and functions of one kind, called in an order of each rank's own: exact, or the same error on all ranks.

Objects (metrics, centres, losses) are known by the order in which they were made, named calls by their names. Calls without a name that
have equal shapes cannot be told apart, as their docstrings say: where ranks exchange two of these, there is nothing to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torchmetrics as tm
from hypothesis import strategies as st
from pytorch_metric_learning import losses as pml
from torch import Tensor, nn

from lightning_ddp_losses import GlobalBatchLoss, differentiable, global_mean, ssl, synced
from tests.fuzz.engine import Domain, Found, NotDefined, Place
from tests.oracle import normal

WIDTH = 3


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        kind: A key of ``KINDS``.
        number: Which of several objects of the kind, or which rows.
        name: Name of the object or of the call. None: none.
        columns: Columns of its rows.
    """

    kind: str
    number: int
    name: str | None
    columns: int

    @property
    def identity(self) -> tuple[object, ...]:
        """What tells the call from others. Rows do not."""
        is_function = self.kind in FUNCTIONS
        return self.kind, self.columns, self.name, None if is_function else self.number


@dataclass(frozen=True)
class Case:
    ranks: tuple[int, ...]
    calls: tuple[Call, ...]
    orders: tuple[tuple[int, ...], ...]
    seed: int
    dtype: str = "float64"


@st.composite
def cases(draw: Any) -> Case:
    world = draw(st.integers(1, 3))
    sizes = draw(st.tuples(*[st.integers(0, 4)] * world).filter(lambda sizes: sum(sizes) > 1))
    # mostly of one kind: others are told apart by their names in messages
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=2))
    is_named = draw(st.booleans())
    calls = []
    for number in range(draw(st.integers(2, 4))):
        kind = draw(st.sampled_from(kinds))
        columns = draw(st.sampled_from([WIDTH, WIDTH, WIDTH - 1]))
        calls.append(Call(kind, number, f"call {number}" if is_named else None, columns))
    places = range(len(calls))
    order = draw(st.permutations(places))
    orders = [order] * world
    if draw(st.sampled_from([True, True, False])):
        orders[draw(st.integers(0, world - 1))] = draw(st.permutations(places))
    return Case(sizes, tuple(calls), tuple(map(tuple, orders)), draw(st.integers(0, 99)))


# ---------------------------------------------------------------------- each kind: an object or a function, and its one process

Player = Callable[[Tensor], Tensor]


def of_metric(convert: Callable[[Any], Any]) -> Callable[[Call], Player]:
    def make(call: Call) -> Player:
        metric = convert(tm.MeanSquaredError(num_outputs=call.columns).set_dtype(torch.float64))

        def run(rows: Tensor) -> Tensor:
            if len(rows):
                metric.update(rows, rows * 0)
            value: Tensor = metric.compute()
            return value

        return run

    return make


def centre(call: Call) -> Player:
    made = ssl.Center(call.columns, 0.0, name=call.name).double()

    def run(rows: Tensor) -> Tensor:
        made.update(rows)
        return made.center.clone()

    return run


def of_loss(make_loss: Callable[[], nn.Module], arguments: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Any:
    return lambda call: _called(GlobalBatchLoss(make_loss(), name=call.name), arguments)


def _called(loss: nn.Module, arguments: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Player:
    return lambda rows: torch.as_tensor(loss(*arguments(rows)))


def with_zeros(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows, torch.zeros_like(rows)


def with_labels(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows, (rows[:, 0] > 0).long() + 1


def mean(call: Call) -> Player:
    return lambda rows: global_mean(rows.square().sum(0), len(rows), name=call.name)


def moments(call: Call) -> Player:
    return lambda rows: torch.cat([found.flatten() for found in ssl.moments(rows, name=call.name)[:2]])


def koleo(call: Call) -> Player:
    return lambda rows: ssl.koleo(rows, name=call.name)


def moments_alone(rows: Tensor) -> Tensor:
    return torch.cat([rows.mean(0), torch.cov(rows.T).flatten()])


def koleo_alone(rows: Tensor) -> Tensor:
    own = nn.functional.normalize(rows, dim=1)
    nearest = (own @ own.T).fill_diagonal_(-2).argmax(1)
    return -(nn.functional.pairwise_distance(own, own[nearest], eps=1e-8) + 1e-8).log().mean()


def squares(rows: Tensor) -> Tensor:
    return rows.square().mean(0)


KINDS: dict[str, tuple[Callable[[Call], Player], Player]] = {
    "synced": (of_metric(synced), squares),
    "differentiable": (of_metric(differentiable), squares),
    "centre": (centre, lambda rows: rows.mean(0)),
    "squares": (of_loss(nn.MSELoss, with_zeros), lambda rows: rows.square().mean()),
    "pairs": (of_loss(pml.NTXentLoss, with_labels), lambda rows: pml.NTXentLoss()(*with_labels(rows))),
    "mean": (mean, squares),
    "moments": (moments, moments_alone),
    "koleo": (koleo, koleo_alone),
}
FUNCTIONS = ("mean", "moments", "koleo")


def rows_of(case: Case, call: Call) -> Tensor:
    """The rows of all ranks, of a size of their own for each call."""
    rows = normal(sum(case.ranks), call.columns, seed=case.seed * 10 + call.number)
    return rows * (1 + call.number)


def is_ambiguous(case: Case) -> bool:
    orders = [[case.calls[place] for place in order] for order in case.orders]
    identities = [[call.identity for call in order] for order in orders]
    return any(order != orders[0] for order in orders) and all(each == identities[0] for each in identities)


def play(case: Case, place: Place) -> Found:
    if place.alone and is_ambiguous(case):
        raise NotDefined
    kinds = [KINDS[call.kind] for call in case.calls]
    players = [naive if place.alone else make(call) for (make, naive), call in zip(kinds, case.calls, strict=True)]
    found = {}
    for number in case.orders[place.rank or 0]:
        rows = rows_of(case, case.calls[number])[place.part]
        found[f"value {number}"] = players[number](rows).detach()
    return found


DOMAIN = Domain.of("call orders", cases(), play)
