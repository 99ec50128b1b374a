"""`global_randomness` by hand: W ranks train as plain torch does in one process, number for number. What cannot be is one error on all."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_ddp_losses import (
    ConfigurationError,
    DDPLossError,
    InputError,
    RankMismatchError,
    global_randomness,
    microbatched,
)
from lightning_ddp_losses.core import compat
from lightning_ddp_losses.randomness import with_rows, without_rows
from tests.each_rank import each_rank
from tests.randomness.models import CASES, batches, loss_of, make, one_process

# rows of each rank in each of five steps
SPLITS: dict[int, dict[str, list[tuple[int, ...]]]] = {
    1: {"one": [(4,)] * 5},
    2: {
        "even": [(3, 3)] * 5,
        "uneven": [(4, 2)] * 5,
        "a rank without rows in alternate steps": [(0, 4), (2, 2), (4, 0), (3, 1), (0, 4)],
        "one row each": [(1, 1)] * 5,
    },
    3: {"uneven": [(3, 1, 2)] * 5, "a rank without rows in alternate steps": [(2, 0, 1), (1, 1, 1)] * 2 + [(0, 0, 3)]},
}
WORLDS = [(world, split) for world, splits in SPLITS.items() for split in splits]


def own_rows(x: Tensor, counts: tuple[int, ...]) -> Tensor:
    rank = dist.get_rank()
    return x[sum(counts[:rank]) : sum(counts[: rank + 1])]


def difference(weights: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(weights, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-300)) for a, b in pairs)


def train(name: str, splits: list[tuple[int, ...]], *, whole: bool) -> list[Tensor]:
    """Train on this rank's rows, with the batch or its number of rows given to the block."""
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(7 + dist.get_rank())  # that of rank 0 counts
    numpy.random.seed(7 + dist.get_rank())
    sizes = [sum(counts) for counts in splits]
    for x, counts in zip(batches(sizes), splits, strict=True):
        own = own_rows(x, counts)
        optimizer.zero_grad()
        with global_randomness(rows=own if whole else len(own)):
            (loss_of(model, own) / len(x)).backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(("world_size", "split"), WORLDS)
@each_rank()
def test_weights_are_those_of_one_process(world_size: int, split: str) -> None:
    splits = SPLITS[world_size][split]
    sizes = [sum(counts) for counts in splits]
    for number, name in enumerate(CASES):
        weights = train(name, splits, whole=number % 2 == 0)
        assert difference(weights, one_process(name, sizes)) < 1e-9, name


@each_rank(2)
def test_pieces_of_a_batch_are_drawn_one_after_the_other_and_again_in_backward() -> None:
    """One process that takes the pieces of all ranks one after the other."""
    x = batches([8])[0]
    own = own_rows(x, (4, 4))
    model = make("mc dropout")
    torch.manual_seed(3)
    pieces = [torch.cat([x[i : i + 2], x[i + 4 : i + 6]]) for i in (0, 2)]
    outputs = [model(piece) for piece in pieces]
    sum(output.square().sum() for output in outputs).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model = make("mc dropout")
    torch.manual_seed(3)
    for start in (0, 2):
        piece = own[start : start + 2]
        with global_randomness(rows=piece):
            microbatched(model, 4)(piece).square().sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-9, atol=1e-12)


@each_rank(1)
def test_a_world_of_one_enters_no_mode() -> None:
    with global_randomness(rows=3):
        assert not compat.is_in_dispatch_mode()
        assert type(torch.rand(3, 2).shape[0]) is int
    with pytest.raises(ConfigurationError, match="global_randomness: rows"), global_randomness(rows=-1):
        pass


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
    assert not compat.is_in_dispatch_mode()


# ---------------------------------------------------------------------- draws that differ


def more_on_rank_0(x: Tensor) -> None:
    if dist.get_rank() == 0:
        torch.rand(())
    F.dropout(x, 0.5)


def another_order(x: Tensor) -> None:
    draws = [torch.rand_like, torch.randn_like]
    for draw in draws if dist.get_rank() else draws[::-1]:
        draw(x)


def another_shape(x: Tensor) -> None:
    torch.rand(x.shape[0], 2 + dist.get_rank())


def another_generator(x: Tensor) -> None:
    torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(dist.get_rank()))


DIFFERENT: dict[str, tuple[Callable[[Tensor], None], list[str]]] = {
    "a branch on the rank": (more_on_rank_0, ["draw 1 of the step", "rank 0: rand()", "rank 1: bernoulli_(rows, 4)"]),
    "another order": (another_order, ["draw 1 of the step", "rank 0: randn_like(rows, 4)", "rank 1: rand_like"]),
    "another shape": (another_shape, ["rank 0: rand(rows, 2)", "rank 1: rand(rows, 3)"]),
    "another generator": (another_generator, ["draw 1 of the step", "normal_(rows, 4)", "a generator in state"]),
}


@pytest.mark.parametrize("case", DIFFERENT)
@each_rank(2)
def test_draws_that_differ_are_one_error_that_names_operator_and_line(case: str) -> None:
    draw, texts = DIFFERENT[case]
    x = torch.ones(5, 4)
    own = own_rows(x, (3, 2))
    with pytest.raises(RankMismatchError) as caught, global_randomness(rows=own):
        draw(own)
    for text in [*texts, "test_block.py:"]:
        assert text in str(caught.value)


@each_rank(2)
def test_a_seed_inside_the_step_is_followed_if_it_is_equal_and_refused_if_not() -> None:
    x = torch.ones(5, 4)
    own = own_rows(x, (3, 2))
    torch.manual_seed(4)
    expected = own_rows(F.dropout(x, 0.5), (3, 2))
    with global_randomness(rows=own):
        torch.manual_seed(4)
        assert torch.equal(F.dropout(own, 0.5), expected)

    def seeded_by_rank() -> None:
        with global_randomness(rows=own):
            torch.manual_seed(dist.get_rank())
            F.dropout(own, 0.5)

    with pytest.raises(RankMismatchError, match="states of generators"):
        seeded_by_rank()


@each_rank(2)
def test_a_generator_of_the_user_is_followed() -> None:
    x = torch.ones(5, 4)
    own = own_rows(x, (3, 2))
    expected = torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(4))
    with global_randomness(rows=own):
        drawn = torch.empty_like(own).normal_(generator=torch.Generator().manual_seed(4))
    assert torch.equal(drawn, own_rows(expected, (3, 2)))


# ---------------------------------------------------------------------- draws that cannot be those of one process

REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "randperm": (lambda x: torch.randperm(x.shape[0]), "an order of rows"),
    "rrelu": (lambda x: F.rrelu(x, training=True), "as many numbers as its values ask for"),
    "poisson": (torch.poisson, "as many numbers as its values ask for"),
    "Beta": (lambda x: torch.distributions.Beta(x, x).sample(), "_sample_dirichlet"),
    "multinomial among rows": (lambda x: torch.multinomial(x[:, 0], 1), "an order of rows"),
    "rows by rows": (lambda x: F.dropout(x @ x.T, 0.5), "rows in several dimensions"),
    "a part of the rows": (lambda x: F.dropout(x[: len(x) - 1], 0.5), "a part of this rank's rows"),
    "rows that a mask picks": (lambda x: F.dropout(x[x[:, 0] > 0], 0.5), "a part of this rank's rows"),
    "a product": (lambda x: torch.rand(x.shape[0] * 2), "a part of this rank's rows"),
    "the number of rows twice": (lambda x: torch.rand(len(x), len(x)), "dimensions [0, 1]"),
    "the number of rows elsewhere": (lambda x: torch.rand(2, len(x)), "dimensions [1]"),
}


@pytest.mark.parametrize("case", REFUSED)
@each_rank(2)
def test_draws_that_cannot_be_those_of_one_process_are_refused_with_their_line(case: str) -> None:
    draw, text = REFUSED[case]
    x = torch.ones(6, 4)
    own = own_rows(x, (3, 3))
    with pytest.raises(ConfigurationError) as caught, global_randomness(rows=own):
        draw(own)
    assert text in str(caught.value)
    assert "test_block.py:" in str(caught.value)


@each_rank(2)
def test_a_batch_with_its_rows_in_another_dimension() -> None:
    x = batches([5])[0].transpose(0, 1).contiguous()
    layer = make("encoder layer, time first").layer
    for counts in ((3, 2), (4, 1)):
        start = sum(counts[: dist.get_rank()])
        own = x.narrow(1, start, counts[dist.get_rank()]).contiguous()
        torch.manual_seed(0)
        expected = layer(x).narrow(1, start, own.shape[1])
        torch.manual_seed(0)
        with global_randomness(rows={"sequences": own}, row_dim=1):
            torch.testing.assert_close(layer(own), expected, rtol=1e-9, atol=1e-12)


@each_rank(2)
def test_rows_that_are_picked_from_the_data_inside_the_block() -> None:
    x = torch.ones(6, 4)
    torch.manual_seed(0)
    expected = own_rows(F.dropout(x, 0.5), (3, 3))
    picked = torch.arange(6)[own_rows(torch.arange(6), (3, 3))]
    for pick in (lambda: own_rows(x, (3, 3)), lambda: x[picked], lambda: x.index_select(0, picked)):
        for rows in (3, picked):
            torch.manual_seed(0)
            with global_randomness(rows=rows):
                assert torch.equal(F.dropout(pick(), 0.5), expected)


@each_rank(2)
def test_the_shape_of_a_parameter_is_no_shape_of_rows() -> None:
    x = torch.ones(6, 4)
    own = own_rows(x, (3, 3))
    layer = torch.nn.Linear(4, 3, bias=False)
    with global_randomness(rows=own):
        layer(own)
        torch.rand_like(layer.weight)

    def of_that_shape() -> None:
        with global_randomness(rows=own):
            layer(own)
            torch.rand(3, 4)

    with pytest.raises(ConfigurationError, match="the shape of a parameter"):
        of_that_shape()


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
        third = without_rows(torch.empty(3, 4)).normal_()
    assert torch.equal(first, own_rows(expected[0], (3, 3)))
    assert torch.equal(second, own_rows(expected[1].T, (3, 3)).T)
    assert torch.equal(third, expected[2])
    with pytest.raises(InputError, match="with_rows: dim"):
        with_rows(own, dim=2)


@each_rank(2)
def test_one_row_and_a_constant_of_1_is_not_guessed() -> None:
    x = torch.ones(2, 4)
    own = own_rows(x, (1, 1))
    with pytest.raises(ConfigurationError, match="with one row on this rank"), global_randomness(rows=own):
        torch.rand(1)
    torch.manual_seed(0)
    expected = [torch.rand(2), torch.rand(())]
    torch.manual_seed(0)
    with global_randomness(rows=own):
        assert torch.equal(torch.rand(own.shape[0]), own_rows(expected[0], (1, 1)))
        assert torch.equal(torch.rand(()), expected[1])


@each_rank(2)
def test_bad_input_is_refused_on_all_ranks() -> None:
    x = torch.ones(3, 4)
    bad: list[object] = [-1, {}, (x, torch.ones(2))]
    for rows in bad:
        given = rows if dist.get_rank() else 3
        with pytest.raises(DDPLossError, match="global_randomness: rows"), global_randomness(rows=given):
            pass
    twice = [global_randomness(rows=x) for _ in range(2)]
    with pytest.raises(ConfigurationError, match="a block inside a block"), twice[0], twice[1]:
        pass
    with global_randomness(rows=x):
        pass


@each_rank(2)
def test_an_error_of_one_rank_ends_the_block_on_all() -> None:
    x = torch.ones(3, 4)
    expected = DDPLossError if dist.get_rank() else ZeroDivisionError
    divisors = [0, 1]
    with pytest.raises(expected), global_randomness(rows=x):
        _ = 1 / divisors[dist.get_rank()]
    with global_randomness(rows=x):
        F.dropout(x, 0.5)
