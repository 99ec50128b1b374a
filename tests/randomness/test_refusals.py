"""What `global_randomness` refuses: draws that cannot be those of one process, ranks that differ, and options."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses import ConfigurationError, DDPLossStrategy, global_randomness, microbatched
from lightning_ddp_losses.randomness import shared_draws, with_rows
from tests.doors import torch_compat
from tests.each_rank import each_rank
from tests.fits import make_trainer
from tests.randomness.test_block import by_len, own_rows
from tests.randomness.test_note import said
from tests.randomness.test_strategy import (
    Alone,
    Augmented,
    AugmentedBefore,
    DrawnOnRankOne,
    DrawsAfterBackward,
    Module,
    Shuffling,
    Unseen,
)
from tests.refusals import Mistake, Refused, refusals, refusals_of_one_process


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

# ---------------------------------------------------------------------- draws that cannot be those of one process

OF_NUMPY = "numpy's or Python's generator before the end of the step"
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
    "numpy": (lambda x: numpy.random.rand(), OF_NUMPY),
    "python": (lambda x: random.random(), OF_NUMPY),
    "shuffled by numpy": (lambda x: x[numpy.random.permutation(len(x))], OF_NUMPY),
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
WITHOUT_LINE = {case for case in REFUSED if "branch" in case}
WITHOUT_LINE |= {"numpy in a piece", "other draws in a piece", "a seed", "numpy", "python", "shuffled by numpy"}
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


def mixed_on_rank_0(x: Tensor) -> Tensor:
    order = torch.randperm(x.shape[0])
    if dist.get_rank() == 0:
        return x[order]
    return x


def shared_dropout(x: Tensor) -> Tensor:
    with shared_draws():
        return F.dropout(x, 0.5)


# ---------------------------------------------------------------------- rows of the tables


def go_on(error: Exception) -> None:
    assert not torch_compat.is_in_dispatch_mode()
    with global_randomness(rows=X):
        F.dropout(X, 0.5)


def in_a_block(draw: Callable[[Tensor], object], counts: tuple[int, ...], **options: Any) -> Callable[[int], None]:
    """A step on so many rows of each rank."""

    def step(rank: int) -> None:
        own = own_rows(torch.ones(sum(counts), 4), counts)
        with states_are_kept(), global_randomness(rows=own, **options):
            draw(own)

    return step


def drawing(
    draw: Callable[[Tensor], object],
    *words: str,
    counts: tuple[int, ...] = (3, 3),
    kind: str = "ConfigurationError",
    **options: Any,
) -> Refused:
    return Refused(in_a_block(draw, counts, **options), words, kind, len(counts), after=go_on)


def single_and_linear(x: Tensor) -> None:
    """Rank 0 draws a single number."""
    if dist.get_rank() == 0:
        torch.rand(())
    nn.Linear(4, 2)(x).sum().backward()


def in_the_order_of_an_earlier_step(rank: int) -> None:
    own = own_rows(torch.ones(4, 3), (2, 2))
    with global_randomness(rows=own):
        order = torch.randperm(own.shape[0])
    with global_randomness(rows=own):
        own[order]


def in_a_block_inside(x: Tensor) -> None:
    with global_randomness(rows=x):
        pass


def rows_on_the_others(rows: object, rank: int) -> None:
    """Rank 0 has rows."""
    with global_randomness(rows=rows if rank else torch.ones(3, 4)):  # type: ignore[arg-type]
        pass


def fit_refused(kind: type[Module], rank: int) -> None:
    make_trainer(DDPLossStrategy(randomness="global")).fit(kind("mc dropout"))


def fitting(kind: type[Module], *words: str) -> Refused:
    return Refused(partial(fit_refused, kind), words, "ConfigurationError", after=go_on)


X, HOOK, LINE = torch.ones(3, 4), "a hook has drawn", "test_refusals.py:"
ROWS = "global_randomness: rows"
ON_RANKS: dict[str, Refused] = {
    **{
        f"draws that differ: {case}": drawing(draw, *texts, LINE, counts=(3, 2), kind="RankMismatchError")
        for case, (draw, texts) in DIFFERENT.items()
    },
    **{case: drawing(draw, text, *[LINE] * (case not in WITHOUT_LINE)) for case, (draw, text) in REFUSED.items()},
    "a branch on len": drawing(by_len, "draw 1 of the step", counts=(3, 4), kind="RankMismatchError"),
    "a single number on one rank": drawing(single_and_linear, "(rank 0)", counts=(3, 4)),
    "an order of an earlier step": Refused(
        in_the_order_of_an_earlier_step, "drawn in an earlier step", "ConfigurationError"
    ),
    "an order where a rank has no rows": drawing(
        lambda x: x[torch.randperm(x.shape[0])], "an order of rows, whose partners", counts=(0, 4)
    ),
    "rows in an order on one rank": drawing(mixed_on_rank_0, kind="DDPLossError"),
    "rows in another dimension": drawing(lambda x: with_rows(x, dim=1), "3 rows in dimension 1", kind="InputError"),
    "rows in a dimension that is not there": Refused(lambda _: with_rows(X, dim=2), "with_rows: dim", "InputError"),
    "a block inside a block": drawing(in_a_block_inside, "a block inside a block"),
    **{
        f"rows that are {name} on one rank": Refused(partial(rows_on_the_others, rows), ROWS, after=go_on)
        for name, rows in {"a number": 3, "nothing": {}, "two numbers of rows": (X, torch.ones(2))}.items()
    },
    "rows that are a number in a world of one": Refused(lambda _: rows_on_the_others(3, 1), ROWS, "InputError", 1),
    "an order in a piece in a world of one": drawing(
        lambda x: in_pieces(lambda y: y[torch.randperm(y.shape[0])], x), "in a piece of microbatched", counts=(5,)
    ),
    "layers that drop on one rank": Refused(
        lambda rank: said(DDPLossStrategy(), nn.Dropout(0.5) if rank else nn.Identity()),
        "layers that drop",
        "RankMismatchError",
    ),
    # by row
    "poisson, by row": drawing(torch.poisson, randomness="by_row"),
    "rrelu, by row": drawing(lambda x: F.rrelu(x, training=True), randomness="by_row"),
    "by len, by row": drawing(lambda x: torch.rand(len(x), 2), randomness="by_row"),
    "an option that is none": drawing(lambda x: None, "randomness", randomness="rank"),
    # fits
    "a hook that augments": fitting(Augmented, HOOK),
    "a hook that augments before the transfer": fitting(AugmentedBefore, HOOK),
    "a hook that draws after backward": fitting(DrawsAfterBackward, "rand of shape (1,)"),
    "a hook that draws on one rank": fitting(DrawnOnRankOne, HOOK),
    "a shuffle": fitting(Shuffling, "something else than pick rows"),
    "numbers of numpy that nobody sees": fitting(Unseen, "numpy's"),
    "a single number in a fit": fitting(Alone, "rand of shape ()"),
}
test_on_ranks = refusals(__name__, "ON_RANKS")

OPTIONS: dict[str, Mistake] = {
    "randomness": (lambda: DDPLossStrategy(randomness="all"), "randomness"),  # type: ignore[arg-type]
    "no losses": (lambda: DDPLossStrategy(losses=[], randomness="global"), "losses that are looked after"),
}
test_options = refusals_of_one_process(OPTIONS, ConfigurationError)


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
