"""`global_randomness` by hand: W ranks train as plain torch does in one process, number for number. What cannot be is one error on all."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses import (
    ConfigurationError,
    DDPLossError,
    InputError,
    RankMismatchError,
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


@contextlib.contextmanager
def states_are_kept() -> Iterator[None]:
    """Put back the states of all generators."""
    before = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        numpy.random.set_state(before[1])
        random.setstate(before[2])


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
    with pytest.raises(InputError, match="global_randomness: rows"), global_randomness(rows=3):
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
    assert not torch_compat.is_in_dispatch_mode()


# ---------------------------------------------------------------------- draws that differ


def more_on_rank_0(x: Tensor) -> None:
    if dist.get_rank() == 0:
        torch.rand_like(x)
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
    "a branch on the rank": (
        more_on_rank_0,
        ["draw 1 of the step", "rank 0: rand_like(rows, 4)", "rank 1: bernoulli_(rows, 4)"],
    ),
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
def test_a_generator_of_the_user_is_followed() -> None:
    x = torch.ones(5, 4)
    own = own_rows(x, (3, 2))
    expected = torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(4))
    with global_randomness(rows=own):
        drawn = torch.empty_like(own).normal_(generator=torch.Generator().manual_seed(4))
    assert torch.equal(drawn, own_rows(expected, (3, 2)))


# ---------------------------------------------------------------------- draws that cannot be those of one process

REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    # operators
    "rrelu": (lambda x: F.rrelu(x, training=True), "as many numbers as its values ask for"),
    "poisson": (torch.poisson, "as many numbers as its values ask for"),
    "Beta": (lambda x: torch.distributions.Beta(x, x).sample(), "_sample_dirichlet"),
    "multinomial among rows": (lambda x: torch.multinomial(x[:, 0].contiguous(), 1), "an order of rows"),
    # rows that are not certain
    "rows by rows": (lambda x: F.dropout(x @ x.T, 0.5), "rows that are not certain"),
    "a part of the rows": (lambda x: F.dropout(x[: len(x) - 1], 0.5), "rows that are not certain"),
    "all rows by chance": (lambda x: F.dropout(x[:3], 0.5), "rows that are not certain"),
    "rows that a mask picks": (lambda x: F.dropout(x[x[:, 0] > 0], 0.5), "rows that are not certain"),
    "another order": (lambda x: F.dropout(x.flip(0), 0.5), "rows that are not certain"),
    "sorted rows": (lambda x: F.dropout(x[x[:, 0].argsort()], 0.5), "rows that are not certain"),
    "row by row": (lambda x: [F.dropout(row, 0.5) for row in x], "rows that are not certain"),
    "pieces of checkpointed rows": (lambda x: checkpointed_pieces(x, False), "a checkpoint inside of a piece"),
    "pieces of rows, re-entrant": (lambda x: checkpointed_pieces(x, True), "a checkpoint inside of a piece"),
    "an order in a piece": (lambda x: in_pieces(lambda y: y[torch.randperm(y.shape[0])], x), "an order of rows"),
    "a branch in a piece": (lambda x: in_pieces(lambda y: y if y.shape[0] > 2 else -y, x), "a branch on this rank's"),
    "rows of another piece": (lambda x: in_pieces(lambda y: F.dropout(y + x[: len(y)], 0.5), x), "rows that are not"),
    "the whole batch in a piece": (lambda x: in_pieces(lambda y: F.dropout(x, 0.5)[: len(y)], x), "rows that are not"),
    "numpy in a piece": (lambda x: in_pieces(lambda y: y * float(numpy.random.rand()), x), "numpy's or Python's"),
    "a generator in pieces": (lambda x: in_pieces(with_a_generator(), x), "a generator of the user"),
    "other draws in a piece": (lambda x: in_pieces(with_other_draws(), x), "the draws of piece"),
    "a product": (lambda x: torch.rand(x.shape[0] * 2), "rows that are not certain"),
    "the number of rows twice": (lambda x: torch.rand(x.shape[0], x.shape[0]), "rows that are not certain"),
    "the number of rows twice, once by len": (lambda x: torch.rand(x.shape[0], len(x)), "rows that are not certain"),
    "by len": (lambda x: torch.rand(len(x), 4), "rows that are not certain"),
    "by a constant": (lambda x: torch.rand(3, 4), "rows that are not certain"),
    "data from numpy": (lambda x: F.dropout(torch.from_numpy(numpy.ones((3, 4))), 0.5), "rows that are not certain"),
    "a view with its rows by chance": (lambda x: F.dropout(x.view(-1, 3, 4), 0.5), "rows that are not certain"),
    # draws that do not come from the batch
    "a single number": (lambda x: torch.rand(()), "does not come from the batch"),
    "another size": (lambda x: torch.rand(2 * len(x) + 1), "does not come from the batch"),
    "a stack of weights": (lambda x: F.dropout(torch.stack([WEIGHT] * 3), 0.5), "does not come from the batch"),
    "numpy": (lambda x: numpy.random.rand(), "numpy's or Python's generator"),
    "python": (lambda x: random.random(), "numpy's or Python's generator"),
    "shuffled by numpy": (lambda x: x[numpy.random.permutation(len(x))], "numpy's or Python's generator"),
    "a seed": (lambda x: torch.manual_seed(4), "torch's generator before the end of the step"),
    "a seed, and a draw": (lambda x: (torch.manual_seed(4), F.dropout(x, 0.5)), "torch's generator before bernoulli_"),
    # shuffles
    "randperm by len": (lambda x: torch.randperm(len(x)), "an order of rows"),
    "an order of a part": (lambda x: torch.randperm(x.shape[0] - 1), "an order of rows"),
    "a part of an order": (lambda x: x[torch.randperm(x.shape[0])[:2]], "slice at"),
    "a computed order": (lambda x: x[(torch.randperm(x.shape[0]) + 1) % 3], "something else than pick rows"),
    "an order of an order": (lambda x: x[torch.randperm(x.shape[0]).argsort()], "something else than pick rows"),
    "an order of weights": (lambda x: WEIGHT[torch.randperm(x.shape[0])], "something else than pick rows"),
    "an order within rows": (lambda x: x[:, torch.randperm(x.shape[0])], "something else than pick rows"),
    "an order and labels": (lambda x: x[torch.randperm(x.shape[0]), x[:, 0].long()], "something else than pick rows"),
    "rows written in an order": (lambda x: x.clone().index_copy_(0, torch.randperm(x.shape[0]), x), "index_copy_ at"),
    "an order as numbers": (lambda x: [x[int(i)] for i in torch.randperm(x.shape[0])], "unbind at"),
    "argsort of ordered draws": (lambda x: x[torch.rand(x.shape[0]).sort()[0].argsort()], "may mix or reorder rows"),
    "randint": (lambda x: x[torch.randint(0, 3, (x.shape[0],))], "may mix or reorder rows"),
    "numbers of Python": (lambda x: torch.rand(x.shape[0]).tolist(), "numbers of Python or numpy"),
    "numbers of numpy": (lambda x: torch.rand(x.shape[0]).numpy(), "numbers of Python or numpy"),
    "a sum as a number": (lambda x: x * torch.rand_like(x).sum().item(), "numbers of Python or numpy"),
    "a branch on a sum of draws": (lambda x: x if torch.rand_like(x).sum() > 1 else -x, "numbers of Python or numpy"),
    "memory that numpy may write": (lambda x: (x.numpy(), F.dropout(x, 0.5)), "rows that are not certain"),
    "a mean of draws": (lambda x: x + torch.randn_like(x).mean(), "a sum or mean over this rank's rows"),
    "Mixup": (lambda x: mixed_up(x), "may mix or reorder rows"),
    "Mixup with numpy's order": (lambda x: mixed_up_by_numpy(x), "picked or reordered"),
    # branches
    "a branch": (lambda x: F.dropout(x, 0.5) if x.shape[0] > 2 else x, "a branch on this rank's number of rows"),
    "a branch on equality": (
        lambda x: F.dropout(x, 0.5) if x.shape[0] == 3 else x,
        "a branch on this rank's number of rows",
    ),
    "a branch on a product": (
        lambda x: F.dropout(x, 0.5) if x.shape[0] % 2 else x,
        "a branch on this rank's number of rows",
    ),
    "a branch in a folder that is named like a library": (
        lambda x: in_a_folder_of_another_name(x),
        "a branch on this rank's number of rows",
    ),
    "a draw with rows that is declared to be shared": (lambda x: shared_dropout(x), "inside of shared_draws()"),
}
WITHOUT_LINE = {case for case in REFUSED if "branch" in case} | {"numpy in a piece", "other draws in a piece"}
# slices that take no row or all, calls that fail, and a single piece
NOT_WITH_ONE_ROW = {
    "a part of the rows",
    "all rows by chance",
    "a view with its rows by chance",
    "randint",
    "a computed order",
    "other draws in a piece",
    # the only piece is the whole batch
    "pieces of checkpointed rows",
    "pieces of rows, re-entrant",
    "the whole batch in a piece",
}
WEIGHT = torch.nn.Parameter(torch.ones(4))


def in_a_folder_of_another_name(x: Tensor) -> Tensor:
    """A branch of a program that lies in folders `torch` and `lightning`."""
    source = "def step(x):\n    return dropout(x, 0.5) if x.shape[0] > 2 else x\n"
    program: dict[str, Any] = {"__name__": "train", "dropout": F.dropout}
    exec(compile(source, "/home/me/torch/lightning/train.py", "exec"), program)
    result: Tensor = program["step"](x)
    return result


def checkpointed_pieces(x: Tensor, use_reentrant: bool) -> None:
    """Pieces that backward computes again, with a layer inside that is computed again, too."""

    class Again(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(F.dropout, x, use_reentrant=use_reentrant)

    microbatched(Again(), 2)(x.clone().requires_grad_()).sum().backward()


def in_pieces(draw: Callable[[Tensor], Tensor], x: Tensor) -> None:
    class Encoder(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return draw(rows)

    microbatched(Encoder(), 2)(x)


def with_a_generator() -> Callable[[Tensor], Tensor]:
    generator = torch.Generator()
    return lambda rows: rows + torch.empty_like(rows).normal_(generator=generator)


def with_other_draws() -> Callable[[Tensor], Tensor]:
    """Draw in each call but in the second piece. The first call looks at the form of the results."""
    calls = iter([True, True, False])
    return lambda rows: F.dropout(rows, 0.5) if next(calls) else rows


def mixed_up(x: Tensor) -> Tensor:
    with shared_draws():
        order = torch.randperm(x.shape[1])[: len(x)] % len(x)
    return 0.3 * x + 0.7 * x[order]


def mixed_up_by_numpy(x: Tensor) -> Tensor:
    with shared_draws():
        order = numpy.random.permutation(len(x))
    return 0.3 * x + 0.7 * x[order]


def by_a_generator_of_numpy(x: Tensor) -> Tensor:
    return x + torch.from_numpy(numpy.random.default_rng(0).random((1, 4)))


def by_a_generator_of_python(x: Tensor) -> Tensor:
    return x * random.Random(0).random()


def by_len(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) if len(x) < 4 else x


def one_each(x: Tensor) -> Tensor:
    with shared_draws():
        return torch.stack([torch.rand(()) for _ in range(len(x))])


def mixed_on_rank_0(x: Tensor) -> Tensor:
    order = torch.randperm(x.shape[0])
    if dist.get_rank() == 0:
        return x[order]
    return x


def shared_dropout(x: Tensor) -> Tensor:
    with shared_draws():
        return F.dropout(x, 0.5)


@pytest.mark.parametrize("case", REFUSED)
@each_rank(2)
def test_what_cannot_be_as_in_one_process_is_refused_with_its_line(case: str) -> None:
    draw, text = REFUSED[case]
    x = torch.ones(6, 4)
    own = own_rows(x, (3, 3))
    with states_are_kept(), pytest.raises(ConfigurationError) as caught, global_randomness(rows=own):
        draw(own)
    assert text in str(caught.value)
    assert "test_block.py:" in str(caught.value) or "the end of the step" in str(caught.value) or case in WITHOUT_LINE


@each_rank(1)
def test_one_process_that_draws_by_row_refuses_the_same() -> None:
    for draw, _ in REFUSED.values():
        x = torch.ones(3, 4)
        refuses = pytest.raises(ConfigurationError)
        with states_are_kept(), refuses, global_randomness(rows=x, randomness="by_row"):
            draw(x)


@each_rank(2)
def test_on_one_row_the_same_is_refused() -> None:
    x = torch.ones(2, 4)
    own = own_rows(x, (1, 1))
    for case, (draw, _) in REFUSED.items():
        if case in NOT_WITH_ONE_ROW:
            continue
        with states_are_kept(), pytest.raises(ConfigurationError), global_randomness(rows=own):
            draw(own)


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
def test_a_branch_on_len_that_ranks_take_differently_is_an_error() -> None:
    own = own_rows(torch.ones(7, 4), (3, 4))
    with pytest.raises(RankMismatchError, match="draw 1 of the step"), global_randomness(rows=own):
        by_len(own)


@each_rank(2)
def test_a_refusal_of_one_rank_is_the_error_of_all() -> None:
    x = torch.ones(7, 4)
    own = own_rows(x, (3, 4))
    layer = torch.nn.Linear(4, 2)

    def drawn_on_one_rank() -> None:
        with global_randomness(rows=own):
            if dist.get_rank() == 0:
                torch.rand(())
            layer(own).sum().backward()

    with pytest.raises(ConfigurationError, match=r"\(rank 0\)"):
        drawn_on_one_rank()


@each_rank(2)
def test_an_order_of_an_earlier_step_is_refused() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    own = own_rows(x, (2, 2))
    with global_randomness(rows=own):
        order = torch.randperm(own.shape[0])
    with pytest.raises(ConfigurationError, match="drawn in an earlier step"), global_randomness(rows=own):
        own[order]


@each_rank(2)
def test_orders_of_rows_need_rows_on_each_rank() -> None:
    x = torch.ones(4, 4)
    own = own_rows(x, (0, 4))
    with pytest.raises(ConfigurationError, match="an order of rows, whose partners"), global_randomness(rows=own):
        own[torch.randperm(own.shape[0])]


@each_rank(2)
def test_a_rank_that_exchanges_no_rows_is_an_error_on_all() -> None:
    x = torch.ones(6, 4)
    own = own_rows(x, (3, 3))
    with pytest.raises(DDPLossError), global_randomness(rows=own):
        mixed_on_rank_0(own)


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
    with pytest.raises(InputError, match="with_rows: dim"):
        with_rows(own, dim=2)
    with pytest.raises(InputError, match="3 rows in dimension 1"), global_randomness(rows=own):
        with_rows(own, dim=1)


@each_rank(2)
def test_bad_input_is_refused_on_all_ranks() -> None:
    x = torch.ones(3, 4)
    bad: list[object] = [3, {}, (x, torch.ones(2))]
    for rows in bad:
        given = rows if dist.get_rank() else x
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
