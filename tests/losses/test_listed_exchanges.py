"""A formula's list of exchanges: sums without a handshake from the second call on, and what happens where ranks leave the list."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_ddp_losses import GlobalBatchLoss, global_rows, ssl
from lightning_ddp_losses.testing import RankFailure, RankPool
from tests.counting import CountCollectives
from tests.doors import Listed, handshake, listed
from tests.losses.rows_cases import CASES, D, barlow_of_torch, rows_of, rows_of_all, vicreg
from tests.oracle import own
from tests.refusals import Refused, refusals


def case(name: str, rows: tuple[int, ...], features: int) -> tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]:
    """A formula, the arguments of one process and those of this rank."""
    torch.manual_seed(3)
    if name in VIEWS:
        formula = VIEWS[name]
        whole = [torch.randn(sum(rows), features).double() for _ in range(2)]
    else:
        formula, make = CASES[name]
        whole = make(sum(rows))
    part = own(rows)
    mine = [each[part].requires_grad_(each.is_floating_point()) for each in whole]
    return formula, [each.requires_grad_(each.is_floating_point()) for each in whole], mine


VIEWS = {"vicreg of 128": vicreg, "barlow of 128": barlow_of_torch}
# collectives of forward, and handshakes among them: without a list of exchanges, and with it
COUNTS = {
    "mse": ((2, 2), (2, 2)),
    "cross entropy": ((2, 2), (2, 2)),
    "dice": ((2, 2), (2, 2)),
    "vicreg": ((4, 4), (4, 2)),
    "vicreg of 128": ((6, 4), (4, 1)),
    "barlow of 128": ((5, 4), (4, 1)),
    "info nce": ((4, 4), (4, 3)),
}


def counted(name: str, rows: tuple[int, ...], is_listed: bool) -> tuple[int, int, int]:
    """Collectives, handshakes and bytes of the fourth forward. Value and gradients are exact in each."""
    most_left = listed._MOST_LEFT if is_listed else 0
    for _ in range(4):
        formula, whole, mine = case(name, rows, 128)
        truth = formula(*whole)
        truth.backward()
        before = handshake.number_sent()
        with CountCollectives() as counter, mock.patch.object(listed, "_MOST_LEFT", most_left):
            value = global_rows(formula, *mine, name=name)
        found = len(counter.names), handshake.number_sent() - before, counter.num_bytes
        value.backward()
        assert torch.allclose(value, truth, rtol=1e-9)
        for each, of_all in zip(mine, whole, strict=True):
            if each.grad is not None:
                assert torch.allclose(each.grad, of_all.grad[own(rows)] * len(rows), rtol=1e-9, atol=1e-12)
    return found


@pytest.mark.parametrize("rows", [(6, 6), (5, 0, 4)], ids=str)
@pytest.mark.parametrize("name", COUNTS)
def test_sums_of_a_listed_call_have_no_handshake(pool: RankPool, name: str, rows: tuple[int, ...]) -> None:
    without, with_list = COUNTS[name]
    before = pool.run(len(rows), counted, name, rows, False, fresh=True)
    after = pool.run(len(rows), counted, name, rows, True, fresh=True)
    assert {each[:2] for each in before} == {without}
    assert {each[:2] for each in after} == {with_list}
    if without != with_list:
        assert after[0][2] < before[0][2]
    print(f"{name} {rows}: {before[0]} {after[0]}")


# ---------------------------------------------------------------------- ranks that leave the list


def steps(
    x: Tensor, after: Callable[[int], None] = lambda place: None, large: Any = 1, gathers: bool = False
) -> Tensor:
    """Three exchanges of sums before the last one, and a gather of rows after the second."""
    value = x.sum() * 0
    for place in range(3):
        after(place)
        x = (x - x.mean(0)).tanh() + large
        if place == 1 and gathers:
            x = x + (x @ x.T).softmax(1) @ x
        value = value + x.square().mean(0).sum()
    after(3)
    return value


def truth(formula: Callable[[Tensor], Tensor], sizes: tuple[int, ...] = (5, 2)) -> Tensor:
    return formula(rows_of_all(sizes)).detach()


def other_branch(x: Tensor) -> Tensor:
    return steps(x * 2 - x.std(0))


def on_device(yes: bool) -> Any:
    """Flags are read at the end of the call, as on an accelerator."""
    return mock.patch.object(Listed, "is_on_host", not yes)


def all_branch(delayed: bool) -> list[float]:
    """All ranks take another branch from the third call on, then the first one again: each is exact."""
    found = []
    with on_device(delayed):
        for branch in [steps, steps, *[other_branch] * 6, steps, steps, steps]:
            with CountCollectives() as counter:
                value = global_rows(branch, rows_of(), name="branches")
            found.append(len(counter.names))
            assert torch.allclose(value.detach(), truth(branch), rtol=1e-12)
    return found


@pytest.mark.parametrize("delayed", [False, True])
def test_all_ranks_leave_the_list(pool: RankPool, delayed: bool) -> None:
    for found in pool.run(2, all_branch, delayed, fresh=True):
        assert found[0] == found[1] == 5
        # the call that leaves takes one more, and its list is the one of the next call
        assert found[2:5] == [7, 6, 6]


def lone_branch(place: int, how: str, delayed: bool, gathers: bool) -> None:
    """From the third call on, rank 1 decides on a value of its own."""
    draw = random.Random(dist.get_rank())

    def after(each: int) -> None:
        if each != place or not is_last or dist.get_rank() == 0:
            return
        assert draw.random() < 0.2  # of rank 1
        if how == "raises":
            raise KeyError("absent")
        if how == "reads":
            extra.sum().item()
        if how == "returns":
            raise StopIteration

    def formula(x: Tensor) -> Any:
        nonlocal extra
        extra = x
        try:
            return steps(x, after, gathers=gathers)
        except StopIteration:
            return x.sum() * 0

    extra = torch.zeros(1)
    with on_device(delayed):
        for call in range(3):
            is_last = call == 2
            global_rows(formula, rows_of(), name="alone")


def fail_and_go_on(delayed: bool) -> None:
    """An error of one rank, or of all, in a call that follows the list; then calls go on."""
    for attempt in range(4):
        with on_device(delayed):
            global_rows(steps, rows_of(), name="again")
            global_rows(steps, rows_of(), name="again")

            def after(place: int, attempt: int = attempt) -> None:
                if place == attempt % 2 + 1 and (attempt < 2 or dist.get_rank() == 1):
                    raise KeyError("absent")

            with pytest.raises(Exception, match="absent"):
                global_rows(lambda x: steps(x, after), rows_of(), name="again")
            value = global_rows(steps, rows_of(), name="again")
            assert torch.allclose(value.detach(), truth(steps), rtol=1e-12)


@pytest.mark.parametrize("delayed", [False, True])
def test_calls_after_an_error(pool: RankPool, delayed: bool) -> None:
    pool.run(2, fail_and_go_on, delayed, fresh=True)


def covariance(x: Tensor) -> Tensor:
    """A sum that is too large for a handshake."""
    wide = torch.cat([x] * 32, 1)
    return (wide.T @ wide).square().mean()


def large_end(call: int, how: str, x: Tensor) -> Any:
    """A large sum at the end. In the third call, rank 1 differs after the last exchange before it, or all ranks do."""
    x = (x - x.mean(0)).tanh()
    if call == 2 and (dist.get_rank() == 1 or how == "all"):
        if how == "raises":
            raise KeyError("absent")
        if how == "returns":
            return x.sum() * 0
        if how == "reads":
            x.sum().item()
        if how == "a tensor":
            return covariance(x * torch.full((D,), 3.0).double())
        x = x * (3 if how == "another number" else 2)
    return covariance(x * torch.full((D,), 2.0).double())


def end_with(how: str, delayed: bool) -> list[int]:
    """Collectives of each call. Calls that end alike are exact."""
    found = []
    with on_device(delayed):
        for call in range(5):
            formula = functools.partial(large_end, call, how)
            with CountCollectives() as counter:
                value = global_rows(formula, rows_of(), name="end")
            found.append(len(counter.names))
            assert torch.allclose(value.detach(), truth(formula), rtol=1e-12)
    return found


@pytest.mark.parametrize("delayed", [False, True])
def test_all_ranks_differ_at_the_end(pool: RankPool, delayed: bool) -> None:
    for found in pool.run(2, end_with, "all", delayed, fresh=True):
        # handshakes before and after the formula, a mean and a product; one less once they are listed
        assert found[:2] == [4, 3]
        # the listed product, and then the handshake and the product
        assert found[2] == 5
        assert found[4] == 3


def plain_of_a_rank() -> None:
    """A plain tensor that differs is found at the end of a call that follows the list."""
    for call in range(3):
        offset = torch.full((D,), 1.0 + (call == 2) * dist.get_rank()).double()
        global_rows(steps, rows_of(), large=offset, batch_dims={"large": None}, name="offset")


def other_number() -> None:
    for call in range(3):
        factor = 2 + (call == 2) * dist.get_rank()
        global_rows(lambda x, factor=factor: steps(x * factor), rows_of(), name="factor")


def one_is_gone() -> None:
    def after(place: int) -> None:
        if call == 2 and place == 2 and dist.get_rank() == 1:
            os._exit(3)

    call = 0
    while call < 3:
        global_rows(lambda x: steps(x, after), rows_of(), name="gone")
        call += 1


def test_a_rank_that_dies(pool: RankPool) -> None:
    with pytest.raises(RankFailure) as raised:
        pool.run(2, one_is_gone, fresh=True, seconds=60)
    assert "PeerError" in str(raised.value)
    assert "rank 0 waited in global_rows `gone`: sum (" in str(raised.value)


def calls(formula: Callable[[int, Tensor], Tensor], sizes: list[int]) -> list[int]:
    """Collectives of calls with so many rows on rank 1. Each is exact."""
    found = []
    for call, size in enumerate(sizes):
        each = functools.partial(formula, call)
        with CountCollectives() as counter:
            value = global_rows(each, rows_of((5, size)), name="calls")
        found.append(len(counter.names))
        assert torch.allclose(value.detach(), truth(each, (5, size)), rtol=1e-12)
    return found


def of_features(call: int, x: Tensor) -> Tensor:
    """An exchange that needs an all-reduce."""
    wide = torch.cat([x] * 32, 1)
    return steps(x) + ((wide.T @ wide / len(x)).square().mean() * (x - x.mean(0)).square()).sum()


def annealed(call: int, x: Tensor) -> Tensor:
    return of_features(call, x * (1 + call))


def annealed_end(call: int, x: Tensor) -> Tensor:
    return of_features(call, x) + covariance(x) * (1 + call)


def test_lists_by_numbers_of_rows(pool: RankPool) -> None:
    sizes = [3, 2, 0, 3, 2, 0, 3, 2, 0]
    for found in pool.run(2, calls, of_features, sizes, fresh=True):
        assert found[6:] == [found[3]] * 3
        assert found[6] < found[1]


def test_calls_that_always_differ_are_not_listed(pool: RankPool) -> None:
    for found in pool.run(2, calls, annealed, [3] * 12, fresh=True):
        # the call that leaves its list takes one collective more
        assert found[2] == found[-1] + 1
        assert found[-1] == found[-2]


def test_ends_that_always_differ_are_not_listed(pool: RankPool) -> None:
    for found in pool.run(2, calls, annealed_end, [3] * 12, fresh=True):
        # the sums before the end are still listed
        assert found[2] == found[-1] + 1
        assert found[-1] == found[-2] == found[0] - 1


# ---------------------------------------------------------------------- short cuts that exchange less

SHORT_CUTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "mse": (GlobalBatchLoss(nn.MSELoss(), mode="elements"), F.mse_loss),
    "cross entropy": (GlobalBatchLoss(nn.CrossEntropyLoss(), mode="elements"), F.cross_entropy),
    "vicreg": (ssl.vicreg, vicreg),
    "barlow": (ssl.barlow_twins, barlow_of_torch),
}
# collectives of a step, forward and backward: of the short cut, and of the formula over rows of all ranks
COSTS = {"mse": (1, 2), "cross entropy": (1, 2), "vicreg": (3, 5), "barlow": (3, 5)}


def cost(name: str, number: int) -> int:
    function = SHORT_CUTS[name][number]
    for _ in range(4):
        first = torch.randn(6, 128).double().requires_grad_()
        second = torch.arange(6) if name == "cross entropy" else torch.randn(6, 128).double()
        with CountCollectives() as counter:
            value = function(first, second) if number == 0 else global_rows(function, first, second, name=name)
            value.backward()
    return len(counter.names)


@pytest.mark.parametrize("name", COSTS)
def test_short_cuts_exchange_less(pool: RankPool, name: str) -> None:
    """Why sums over elements and moments have an evaluation of their own."""
    found = [pool.run(2, cost, name, number, fresh=True)[0] for number in (0, 1)]
    assert tuple(found) == COSTS[name]


# ---------------------------------------------------------------------- random departures


DEPARTING = ["mean", "product", "covariance", "gather", "std", "count", "read"]


def departing(draw: random.Random, rank: int, number_of_ranks: int) -> Callable[[Tensor], Tensor]:
    """A formula of some exchanges, which one rank may leave out, add, or fail at."""
    plan = [draw.choice(DEPARTING) for _ in range(draw.randint(1, 4))]
    kind = draw.choice(["", "", "", "raises", "adds", "leaves out"])
    place = draw.randrange(len(plan))
    at = (draw.randrange(number_of_ranks), draw.choice(DEPARTING))
    if kind and rank == at[0]:
        if kind == "leaves out":
            del plan[place]
        else:
            plan.insert(place, "raise" if kind == "raises" else at[1])

    def formula(x: Tensor) -> Tensor:
        value = x.sum() * 0
        for step in plan:
            value = value + departing_step(step, x)
            x = (x - x.mean(0)).tanh() if step == "mean" else x * 1.5
        return value

    formula.is_equal = not kind  # type: ignore[attr-defined]
    return formula


def departing_step(step: str, x: Tensor) -> Tensor:
    if step == "raise":
        raise KeyError("absent")
    if step == "product":
        wide = torch.cat([x] * 32, 1)
        return (x - (wide.T @ wide).mean()).square().mean()
    if step == "covariance":  # is not needed before the end
        return covariance(x)
    if step == "gather":
        return (x @ x.T).softmax(1).square().sum()
    if step == "std":
        return (x / (1 + x.std(0))).sum()
    if step == "count":
        return x[x[:, 0] > 0].sum()
    if step == "read":
        return x.sum() * (1 + abs(x.mean().item()))
    return x.mean()


def departures(first: int, number: int, delayed: bool) -> list[str]:
    """Outcomes of so many calls with one name, each with its own formula, repeated."""
    found = []
    rank, sizes = dist.get_rank(), (3, 2, 4)
    for seed in range(first, first + number):
        draw = random.Random(seed % 7 if seed % 3 else seed)
        formula = departing(draw, rank, 3)
        with on_device(delayed):
            for _ in range(seed % 3 + 1):
                try:
                    value = global_rows(formula, rows_of(sizes), name=f"departures {seed % 2}")
                except Exception as error:
                    found.append(f"error {type(error).__name__}")
                    continue
                is_exact = formula.is_equal and torch.allclose(value.detach(), truth(formula, sizes), rtol=1e-9)
                found.append("exact" if is_exact else f"WRONG {seed}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("delayed", [False, True])
def test_random_departures(pool: RankPool, delayed: bool) -> None:
    """Calls are exact, or an error on all ranks, whichever rank leaves the list; none waits for a time-out, and later calls are exact."""
    by_rank = pool.run(3, departures, 0, 300, delayed, fresh=True, seconds=200)
    for number, found in enumerate(zip(*by_rank, strict=True)):
        assert len({each.partition(" ")[0] for each in found}) == 1, f"{number}: {found}"
        assert not any("WRONG" in each for each in found), f"{number}: {found}"
    assert sum(each == "exact" for each in by_rank[0]) > 100


def leaves(place: int, how: str, delayed: bool, gathers: bool) -> Refused:
    words = "extra.sum().item()" if how == "reads" else ()
    return parting(lambda _: lone_branch(place, how, delayed, gathers), how, words)


def ends(how: str, delayed: bool) -> Refused:
    return parting(lambda _: end_with(how, delayed), how, "the same values on every rank" if how == "a tensor" else ())


def parting(call: Callable[[int], object], how: str, words: str | tuple[str, ...]) -> Refused:
    if how == "raises":
        return Refused(call, "absent", "PeerError", own={1: "KeyError"})
    return Refused(call, words, "RankMismatchError")


REFUSED: dict[str, Refused] = {
    **{
        f"rank 1 {how} at {place}, delayed={delayed}, gathers={gathers}": leaves(place, how, delayed, gathers)
        for how in ("reads", "returns", "raises")
        for place in (0, 1, 2, 3)
        for delayed in (False, True)
        for gathers in (False, True)
    },
    **{
        f"rank 1 ends with {how}, delayed={delayed}": ends(how, delayed)
        for how in ("reads", "returns", "raises", "a tensor", "another number")
        for delayed in (False, True)
    },
    "plain tensors are still compared": Refused(
        lambda _: plain_of_a_rank(), "the same values on every rank", kind="RankMismatchError"
    ),
    "numbers are still compared": Refused(lambda _: other_number(), ("mul 2", "mul 3"), kind="RankMismatchError"),
}
test_refused = refusals(__name__, "REFUSED")
