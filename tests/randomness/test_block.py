"""`global_randomness` by hand: W ranks train as plain torch does in one process, number for number. What cannot be is one error on all."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_losses import (
    ConfigurationError,
    DDPLossError,
    SyncBatchNorm,
    global_randomness,
    microbatched,
)
from lightning_ddp_losses.randomness import shared_draws, with_rows, without_rows
from tests.doors import torch_compat
from tests.each_rank import each_rank
from tests.fits import weights_of
from tests.oracle import assert_close
from tests.randomness.models import CASES, MIXUP, RATE, SHARED, batches, loss_of, make, one_process, seed_all

# rows of each rank in each of five steps
Splits = list[tuple[int, ...]]
SPLITS: dict[int, dict[str, Splits]] = {
    1: {"four rows": [(4,)] * 5, "one row": [(1,)] * 2},
    2: {
        "even": [(3, 3)] * 5,
        "uneven": [(4, 2)] * 5,
        "a rank without rows in alternate steps": [(0, 4), (2, 2), (4, 0), (3, 2), (0, 4)],
        "one row": [(1, 1), (1, 5), (1, 1), (4, 1), (1, 1)],
        "one row of all": [(0, 1), (1, 0)],
    },
    3: {
        "uneven": [(3, 2, 4)] * 5,
        "a rank without rows in alternate steps": [(2, 0, 2), (2, 2, 3)] * 2 + [(0, 0, 3)],
        "one row": [(1, 1, 1), (2, 1, 1), (1, 3, 1)],
    },
}
WORLDS = [(world, split) for world, splits in SPLITS.items() for split in splits]


def own_rows(x: Tensor, counts: tuple[int, ...]) -> Tensor:
    rank = dist.get_rank()
    return x[sum(counts[:rank]) : sum(counts[: rank + 1])]


def totals(splits: Splits) -> list[int]:
    return [sum(counts) for counts in splits]


def train(
    name: str, splits: Splits, randomness: str = "global", *, chunk: int | None = None, ddp: bool = False
) -> dict[str, Tensor]:
    """Train on this rank's rows, in pieces of so many rows or at once. Return the weights."""
    model = make(name)
    run = DistributedDataParallel(model) if ddp else model
    if chunk is not None:
        run = microbatched(run, chunk)  # type: ignore[assignment]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    seed_all(7 + dist.get_rank())  # that of rank 0 counts
    scale = dist.get_world_size() if ddp else 1
    for x, counts in zip(batches(totals(splits)), splits, strict=True):
        own = own_rows(x, counts)
        optimizer.zero_grad()
        with global_randomness(rows=own, randomness=randomness):  # type: ignore[arg-type]
            (loss_of(run, own) * scale / len(x)).backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if not ddp:
                dist.all_reduce(parameter.grad)
        optimizer.step()
    return weights_of(model)


def assert_as_one_process(name: str, splits: Splits, **options: Any) -> None:
    """Training on this rank's rows gives the weights of plain torch on the rows of all."""
    assert_close(train(name, splits, **options), one_process(name, batches(totals(splits))))


def some_rank_is_empty(splits: Splits) -> bool:
    return any(0 in counts for counts in splits)


@pytest.mark.parametrize(("world_size", "split"), WORLDS)
@each_rank()
def test_weights_are_those_of_one_process(world_size: int, split: str) -> None:
    splits = SPLITS[world_size][split]
    for name in CASES:
        if some_rank_is_empty(splits) and name == MIXUP:
            continue  # torch draws no number below 0
        if some_rank_is_empty(splits) and name == SHARED:
            with pytest.raises(ConfigurationError, match="a rank without rows is at another place"):
                train(name, splits)
            continue
        assert_as_one_process(name, splits)


@each_rank(2)
def test_models_in_single_precision() -> None:
    """Other operators run there, such as a whole layer of an LSTM in one kernel."""
    for name in CASES:
        x = batches([6])[0].float()
        model = make(name).float()
        seed_all(7)
        expected = model(x)
        seed_all(7)
        own = own_rows(x, (4, 2))
        with global_randomness(rows=own):
            found = model(own)
            found.sum().backward()
        torch.testing.assert_close(found, own_rows(expected, (4, 2)), rtol=1e-4, atol=1e-5, msg=name)


def train_with_batch_norm(splits: Splits | None) -> dict[str, Tensor]:
    """Dropout behind a batch norm, which on ranks is the exact one: its exchanges are no part of the step's draws."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)).double()
    if splits is not None:
        model = SyncBatchNorm().apply(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(7)
    for step in range(3):
        x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        if splits is None:
            model(x).square().mean().backward()
        else:
            own = own_rows(x, splits[step])
            with global_randomness(rows=own):
                (model(own).square().sum() / 12).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("counts", [(3, 3), (5, 1), (2, 4)], ids=str)
@each_rank(2)
def test_dropout_behind_a_synchronised_batch_norm(counts: tuple[int, ...]) -> None:
    assert_close(train_with_batch_norm([counts, counts[::-1], (3, 3)]), train_with_batch_norm(None))


@each_rank(1)
def test_a_world_of_one_enters_no_mode() -> None:
    x = torch.ones(3, 2)
    with global_randomness(rows=x), shared_draws():
        assert not torch_compat.is_in_dispatch_mode()
        assert type(x.shape[0]) is int


@each_rank(2)
def test_after_the_block_generators_are_where_those_of_one_process_are() -> None:
    x = torch.ones(6, 4)
    torch.manual_seed(1)
    F.dropout(x, 0.5)
    expected = torch.rand(3)
    torch.manual_seed(1)
    own = own_rows(x, (0, 6))
    with global_randomness(rows=own):
        F.dropout(own, 0.5)  # rank 0 draws nothing
    assert torch.equal(torch.rand(3), expected)
    assert not torch_compat.is_in_dispatch_mode()


@each_rank(2)
def test_a_generator_of_the_user_is_followed() -> None:
    x = torch.ones(5, 4)
    own = own_rows(x, (3, 2))
    expected = torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(4))
    with global_randomness(rows=own):
        drawn = torch.empty_like(own).normal_(generator=torch.Generator().manual_seed(4))
    assert torch.equal(drawn, own_rows(expected, (3, 2)))


# ---------------------------------------------------------------------- draws that are not tracked


def by_a_generator_of_numpy(x: Tensor) -> Tensor:
    return x + torch.from_numpy(numpy.random.default_rng(0).random((1, 4)))


def by_a_generator_of_python(x: Tensor) -> Tensor:
    return x * random.Random(0).random()


def by_len(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) if len(x) < 4 else x


def one_each(x: Tensor) -> Tensor:
    with shared_draws():
        return torch.stack([torch.rand(()) for _ in range(len(x))])


# what the docstring of global_randomness names as not tracked, and whether it is nevertheless what one process computes
NOT_TRACKED: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "a generator of numpy, for all rows": (by_a_generator_of_numpy, True),
    "a generator of Python, for all rows": (by_a_generator_of_python, True),
    "numbers of rows by numpy": (lambda x: x + numpy.random.default_rng(0).random((len(x), 4)).tolist()[0][0], True),
    "rows by numpy": (lambda x: x * torch.tensor(numpy.random.default_rng(0).random((len(x), 1)).tolist()), False),
    "a branch on len": (by_len, False),
    "a draw for each row": (one_each, False),
    "a false declaration": (lambda x: x + without_rows(F.dropout(x, 0.5)).flip(0), False),
}


@pytest.mark.parametrize("case", NOT_TRACKED)
@each_rank(2)
def test_what_is_not_tracked_is_silent_where_ranks_do_the_same(case: str) -> None:
    draw, is_equal = NOT_TRACKED[case]
    x = torch.ones(6, 4)
    own = own_rows(x, (3, 3))
    torch.manual_seed(1)
    expected = draw(x)
    torch.manual_seed(1)
    with global_randomness(rows=own):
        found = draw(own)
    is_first = dist.get_rank() == 0  # whose numbers may be those of the first rows
    assert is_first or torch.equal(found, own_rows(expected, (3, 3))) is is_equal


@each_rank(2)
def test_a_batch_with_its_rows_in_another_dimension() -> None:
    x = batches([5])[0].transpose(0, 1).contiguous()
    layer = make("encoder layer, time first").layer
    start, rows = ((0, 3), (3, 2))[dist.get_rank()]
    own = x.narrow(1, start, rows).contiguous()
    torch.manual_seed(0)
    expected = layer(x).narrow(1, start, rows)
    torch.manual_seed(0)
    with global_randomness(rows={"sequences": own}, row_dim=1):
        torch.testing.assert_close(layer(own), expected, rtol=1e-9, atol=1e-12)


@each_rank(2)
def test_the_user_says_where_rows_are() -> None:
    x = torch.ones(6, 4)
    own = own_rows(x, (3, 3))
    torch.manual_seed(0)
    expected = [torch.empty(6, 3).normal_(), torch.empty(3, 6).normal_(), torch.empty(3, 4).normal_()]
    torch.manual_seed(0)
    with global_randomness(rows=own):
        first = with_rows(torch.empty(3, 3)).normal_()
        second = with_rows(torch.empty(3, 3), dim=1).normal_()
        with shared_draws():
            third = without_rows(torch.empty(3, 4)).normal_()
    assert torch.equal(first, own_rows(expected[0], (3, 3)))
    assert torch.equal(second, own_rows(expected[1].T, (3, 3)).T)
    assert torch.equal(third, expected[2])


@each_rank(2)
def test_an_error_of_one_rank_ends_the_block_on_all() -> None:
    x = torch.ones(3, 4)
    expected = DDPLossError if dist.get_rank() else ZeroDivisionError
    divisors = [0, 1]
    with pytest.raises(expected), global_randomness(rows=x):
        _ = 1 / divisors[dist.get_rank()]
    with global_randomness(rows=x):
        F.dropout(x, 0.5)
