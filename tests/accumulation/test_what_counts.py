"""A window counts what is back-propagated, in any order; counts and totals may be given before; what cannot be counted is an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_ddp_losses import GlobalBatchLoss, accumulation_window, global_mean
from lightning_ddp_losses.testing import RankPool
from tests.answers import assert_all_close, assert_errors, one_error
from tests.fits import grads_of, mean_over_ranks

ROWS = {
    1: [(5,), (2,), (4,)],
    2: [(2, 3), (0, 4), (6, 1)],
    3: [(1, 2, 2), (4, 0, 1), (2, 3, 3)],
}  # by micro-batch and rank
Objective = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):  # a model with a head and two losses of one class
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh()).double()
        self.head = nn.Linear(6, 3).double()
        self.a = GlobalBatchLoss(nn.CrossEntropyLoss(ignore_index=-1))
        self.b = GlobalBatchLoss(nn.CrossEntropyLoss(ignore_index=-1))

    def forward(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(rows))
        return logits


def all_rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(sum(sizes), 4, generator=generator, dtype=torch.float64) for sizes in ROWS[2]]


def own_rows() -> list[Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    return [
        rows.split(proportional(sizes, len(rows)))[rank] for rows, sizes in zip(all_rows(), ROWS[world], strict=True)
    ]


def proportional(sizes: tuple[int, ...], total: int) -> list[int]:
    """Sizes of about the given proportions that add up to a total."""
    ends = [round(total * sum(sizes[: i + 1]) / sum(sizes)) for i in range(len(sizes))]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def labels_of(rows: Tensor) -> Tensor:
    return torch.where(rows[:, 0] > 0.8, -1, (rows.sum(1).abs() * 10).long() % 3)


def mean_square(net: Net, rows: Tensor, name: str = "square") -> Tensor:
    return global_mean(net(rows).square().sum(), len(rows), name=name)


def first_loss(net: Net, rows: Tensor) -> Tensor:
    return torch.as_tensor(net.a(net(rows), labels_of(rows)))


def plain(window: Any, net: Net, micro_batches: list[Tensor], objective: Objective) -> None:
    for rows in micro_batches:
        with window.micro_batch():
            objective(net, rows).backward()


def forwards(window: Any, net: Net, micro_batches: list[Tensor], objective: Objective) -> list[Tensor]:
    values = []
    for rows in micro_batches:
        with window.micro_batch():
            values.append(objective(net, rows))
    return values


def forwards_first(window: Any, net: Net, micro_batches: list[Tensor], objective: Objective) -> None:
    for value in forwards(window, net, micro_batches, objective):
        value.backward()


def skips_the_second(window: Any, net: Net, micro_batches: list[Tensor], objective: Objective) -> None:
    """All ranks skip a micro-batch after its forward."""
    for i, rows in enumerate((micro_batches[0], micro_batches[0] * 2, *micro_batches[1:])):
        with window.micro_batch():
            value = objective(net, rows)
        if i != 1:
            value.backward()


def backwards_function(window: Any, net: Net, micro_batches: list[Tensor], objective: Objective) -> None:
    for value in forwards(window, net, micro_batches, objective):
        torch.autograd.backward([value])


def penalised_alone(window: Any, net: Net, micro_batches: list[Tensor], objective: Objective) -> None:
    """A gradient of this rank's rows by themselves counts nothing."""
    for rows in micro_batches:
        leaf = rows.clone().requires_grad_()
        torch.autograd.grad(net(leaf).sum(), leaf)
        with window.micro_batch():
            objective(net, rows).backward()


LOOPS = {f.__name__: f for f in (plain, forwards_first, skips_the_second, backwards_function, penalised_alone)}
OBJECTIVES: dict[str, tuple[Objective, Callable[[Net, Tensor], Tensor]]] = {
    "global_mean": (mean_square, lambda net, rows: net(rows).square().sum() / len(rows)),
    "a loss": (first_loss, lambda net, rows: net.a.loss(net(rows), labels_of(rows))),
}


def gradients(loop: str, objective: str, **options: Any) -> dict[str, Tensor]:
    net = Net()
    with accumulation_window(net, **options) as window:
        LOOPS[loop](window, net, own_rows(), OBJECTIVES[objective][0])
    return mean_over_ranks(grads_of(net))


def truth_of(value: Callable[[Net, Tensor], Tensor]) -> dict[str, Tensor]:
    net = Net()
    value(net, torch.cat(all_rows())).backward()
    return grads_of(net)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_order_of_calls(pool: RankPool, world_size: int, loop: str, objective: str) -> None:
    assert_all_close(pool.run(world_size, gradients, loop, objective), truth_of(OBJECTIVES[objective][1]))


def with_checkpoints(reentrant: bool) -> dict[str, Tensor]:
    net = Net()
    with accumulation_window(net) as window:
        for rows in own_rows():
            hidden = checkpoint(net.layers, rows.requires_grad_(), use_reentrant=reentrant)
            with window.micro_batch():
                global_mean(net.head(hidden).square().sum(), len(rows)).backward()
    return mean_over_ranks(grads_of(net))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers(pool: RankPool, reentrant: bool) -> None:
    assert_all_close(pool.run(2, with_checkpoints, reentrant), truth_of(OBJECTIVES["global_mean"][1]))


def with_shared_parameter() -> dict[str, Tensor]:
    """The head belongs to the model and to the loss."""
    net = Net()
    loss = nn.Module()
    loss.head = net.head
    ddp = DistributedDataParallel(net)
    with accumulation_window(ddp, loss) as window:
        micro_batches = own_rows()
        for i, rows in enumerate(micro_batches):
            last = i + 1 == len(micro_batches)
            with contextlib.nullcontext() if last else ddp.no_sync(), window.micro_batch():
                global_mean(ddp(rows).square().sum(), len(rows)).backward()
    return grads_of(net)


def test_a_parameter_of_model_and_loss_is_corrected_once(pool: RankPool) -> None:
    assert_all_close(pool.run(2, with_shared_parameter), truth_of(OBJECTIVES["global_mean"][1]))


def counts_of(objective: str, *, by_path: bool) -> Any:
    micro_batches = own_rows()
    if objective == "global_mean":
        number = sum(map(len, micro_batches))
        return {"square": number} if by_path else number
    number = sum(int((labels_of(rows) >= 0).sum()) for rows in micro_batches)
    return {"a": number} if by_path else number


def given_counts(objective: str, by_path: bool) -> dict[str, Tensor]:
    net = Net()
    with accumulation_window(net, micro_batches=3, counts=counts_of(objective, by_path=by_path)):
        for rows in own_rows():
            OBJECTIVES[objective][0](net, rows).backward()
        inside = [grad.clone() for grad in grads_of(net).values()]
    assert all(map(torch.equal, inside, grads_of(net).values())), "something was corrected at the end"
    return mean_over_ranks(grads_of(net))


@pytest.mark.parametrize("by_path", [True, False])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_counts_first(pool: RankPool, objective: str, by_path: bool) -> None:
    assert_all_close(pool.run(2, given_counts, objective, by_path), truth_of(OBJECTIVES[objective][1]))


def two_losses() -> dict[str, Tensor]:
    """Two losses of one class, whose counts are not in proportion, named by their paths."""
    net, micro_batches = Net(), own_rows()
    counted = sum(int((labels_of(rows) >= 0).sum()) for rows in micro_batches)
    with accumulation_window(
        DistributedDataParallel(net), micro_batches=3, counts={"a": counted, "b": sum(map(len, micro_batches))}
    ):
        for rows in micro_batches:
            logits = net(rows)
            (net.a(logits, labels_of(rows)) + 0.5 * net.b(logits, labels_of(rows).clamp(min=0))).backward()
    return mean_over_ranks(grads_of(net))


def two_losses_alone(net: Net, rows: Tensor) -> Tensor:
    logits = net(rows)
    return net.a.loss(logits, labels_of(rows)) + 0.5 * net.b.loss(logits, labels_of(rows).clamp(min=0))


def test_two_losses_of_one_class(pool: RankPool) -> None:
    assert_all_close(pool.run(2, two_losses), truth_of(two_losses_alone))


def balance_parts(net: Net, rows: Tensor) -> Tensor:
    """Sums over rows of a fraction without gradient and of a probability: as in the load balance of experts."""
    probabilities = net(rows).softmax(1)
    chosen = nn.functional.one_hot(probabilities.argmax(1), 3).to(rows.dtype)
    return torch.cat([chosen.sum(0), probabilities.sum(0)])


def imbalance(means: Tensor) -> Tensor:
    return 3 * (means[:3] * means[3:]).sum() + means[3:].square().sum()


def balance(net: Net, rows: Tensor) -> Tensor:
    return imbalance(global_mean(balance_parts(net, rows), torch.full((6,), len(rows)), name="experts"))


def balance_alone(net: Net, rows: Tensor) -> Tensor:
    return imbalance(balance_parts(net, rows) / len(rows))


def balanced() -> dict[str, Tensor]:
    net, micro_batches = Net(), own_rows()
    number = float(sum(map(len, micro_batches)))
    totals = sum(balance_parts(net, rows).detach() for rows in micro_batches)
    assert isinstance(totals, Tensor)
    with accumulation_window(
        net, micro_batches=3, counts={"experts": [number] * 6}, totals={"experts": totals.tolist()}
    ):
        for rows in micro_batches:
            balance(net, rows).backward()
    return mean_over_ranks(grads_of(net))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_products_of_means_with_totals(pool: RankPool, world_size: int) -> None:
    assert_all_close(pool.run(world_size, balanced), truth_of(balance_alone))


def hidden_module(net: Net, i: int, rows: Tensor) -> None:
    """An unknown module in a later micro-batch, whose graph has the form of an earlier one."""
    head = net.head if i == 0 else nn.Linear(6, 3).double()
    global_mean(head(net.layers(rows)).square().sum(), len(rows)).backward()


def hidden_loss_of_a_loss(net: Net, i: int, rows: Tensor) -> None:
    inner = mean_square(net, rows) if i else net(rows).square().sum() / 11
    global_mean(net(rows).sum() + inner * len(rows), len(rows), name="outer").backward()


def checkpointed_term(net: Net, i: int, rows: Tensor) -> None:
    hidden = checkpoint(net.layers, rows.requires_grad_(), use_reentrant=True)
    (hidden.sum() + mean_square(net, rows)).backward()


def two_in_proportion(net: Net, i: int, rows: Tensor) -> None:
    logits, labels = net(rows), labels_of(rows).clamp(min=0)
    others = labels if i else torch.where(rows[:, 0] > 0, -1, labels)
    (net.a(logits, labels) + net.b(logits, others)).backward()


def square(net: Net, i: int, rows: Tensor) -> None:
    mean_square(net, rows).backward()


def nothing(net: Net, i: int, rows: Tensor) -> None: ...


def own_count() -> int:
    return sum(map(len, own_rows()))


ORIGINAL = torch.autograd.backward
PLACES = [f"GlobalBatchLoss(CrossEntropyLoss) `{name}`: divided" for name in "ab"]
# what is done with each micro-batch, options of the window, words of the error
ERRORS: dict[str, tuple[Callable[[Net, int, Tensor], Any], Callable[[], dict[str, Any]], list[str]]] = {
    "unbalanced": (
        lambda net, i, rows: balance(net, rows).backward(),
        dict,
        ["a weighted sum of losses", "PowBackward0 of", "counts and totals of the whole window"],
    ),
    "weighed": (
        lambda net, i, rows: (mean_square(net, rows) * (1 + i)).backward(),
        dict,
        ["with the same weights in every micro-batch", "global_mean `square`, whose upstream gradients are 1, 2, 3"],
    ),
    "by gradient": (
        lambda net, i, rows: torch.autograd.grad(mean_square(net, rows), list(net.layers.parameters())),
        dict,
        ["torch.autograd.grad", "Call backward()"],
    ),
    "hidden module": (hidden_module, dict, ["a parameter of shape (3,)", "hand in the module that holds it"]),
    "hidden loss of a loss": (
        hidden_loss_of_a_loss,
        dict,
        ["global_mean `outer`", "depends on global_mean `square`"],
    ),
    "checkpointed term": (checkpointed_term, dict, ["a re-entrant checkpoint"]),
    "bypassed": (
        lambda net, i, rows: ORIGINAL(mean_square(net, rows)),
        dict,
        ["another way to back-propagate it"],
    ),
    "two losses in proportion": (two_in_proportion, dict, ["losses with different divisors", *PLACES]),
    "wrong counts": (
        square,
        lambda: {"counts": 3},
        ["count in expect_counts of global_mean `square`", "expected 6 over all ranks", "got 16"],
    ),
    "wrong totals": (
        square,
        lambda: {"counts": {"square": own_count()}, "totals": {"square": 1.0}},
        ["total in expect_counts of global_mean `square`", "expected 2 over all ranks"],
    ),
    "total alone": (nothing, lambda: {"totals": {"square": 1.0}}, ["total of `square`: expected its count, too"]),
    "infinite count": (
        nothing,
        lambda: {"counts": float("inf") if dist.get_rank() else 3.0},
        ["finite counts, not negative", "inf"],
    ),
    "count that is no number": (
        nothing,
        lambda: {"counts": {"a": [3.0, float("nan")]}},
        ["finite counts, not negative", "nan"],
    ),
    "unknown name": (
        square,
        lambda: {"counts": {"square": own_count(), "nothing": 4}},
        ["expect_counts of global_mean `nothing`", "got 0"],
    ),
    "unknown module": (
        square,
        lambda: {"counts": {"square": own_count(), nn.BCELoss(): 5}},
        ["expect_counts of BCELoss", "got 0"],
    ),
    "a loss without its count": (
        square,
        lambda: {"counts": {"a": 5}},
        ["global_mean `square`: expected its count, too", "for all losses of the window, or for none"],
    ),
    "counts of others": (
        nothing,
        lambda: {"counts": {"a" if dist.get_rank() else "b": 3}},
        ["global_mean `a`", "global_mean `b`"],
    ),
}


def fail(name: str) -> None:
    net, (step, options, _) = Net(), ERRORS[name]
    with accumulation_window(net, **options()) as window:
        for i, rows in enumerate(own_rows()):
            with window.micro_batch():
                step(net, i, rows)


test_errors_on_every_rank = one_error(fail, ERRORS)


def weighed_on_one_rank() -> None:
    net = Net()
    for _ in range(2):  # the others learn of it at their next handshake
        net.zero_grad()
        with accumulation_window(net) as window:
            for rows in own_rows():
                with window.micro_batch():
                    mean_square(net, rows).backward()
            with window.micro_batch():
                (mean_square(net, rows) * (1 + dist.get_rank())).backward()


# ---------------------------------------------------------------------- counts without declared micro-batches


def twice(net: Net, rows: Tensor) -> Tensor:
    return mean_square(net, rows) + mean_square(net, rows)


def named_as_a_path(net: Net, rows: Tensor) -> Tensor:
    """The name of the mean is the path of a module."""
    return mean_square(net, rows, name="head")


def named_as_a_loss(net: Net, rows: Tensor) -> Tensor:
    return mean_square(net, rows, name="a") + first_loss(net, rows)


def tensors() -> Any:
    return torch.tensor(own_count())


# the loss of a micro-batch, options of the window, the loss of one process or words of the error
UNDECLARED: dict[str, tuple[Objective, Callable[[], dict[str, Any]], Objective | list[str]]] = {
    "as many calls": (mean_square, lambda: {"counts": own_count(), "micro_batches": 3}, OBJECTIVES["global_mean"][1]),
    "a tensor": (mean_square, lambda: {"counts": tensors(), "micro_batches": 3}, OBJECTIVES["global_mean"][1]),
    "the path of a module": (
        named_as_a_path,
        lambda: {"counts": {"head": own_count()}, "micro_batches": 3},
        OBJECTIVES["global_mean"][1],
    ),
    "other calls": (
        mean_square,
        lambda: {"counts": own_count()},
        [
            "global_mean `square`, outside of declared micro-batches",
            "expected one call in each of micro_batches=1, got 3",
        ],
    ),
    "two calls, counted twice": (
        twice,
        lambda: {"counts": 2 * own_count(), "micro_batches": 3},
        ["outside of declared micro-batches", "got 6 calls", "give a count for each call"],
    ),
    "two calls with a count each": (
        twice,
        lambda: {"counts": {"square": [own_count()] * 2}, "micro_batches": 3},
        ["outside of declared micro-batches", "got 6 calls"],
    ),
    "a name of two losses": (
        named_as_a_loss,
        lambda: {"counts": {"a": own_count()}, "micro_batches": 3},
        ["counts of GlobalBatchLoss(CrossEntropyLoss) `a`", "a name that belongs to one loss", "global_mean `a`"],
    ),
    "several numbers for all losses": (
        mean_square,
        lambda: {"counts": [own_count()] * 2, "micro_batches": 3},
        ["expect_counts: all losses", "expected one number"],
    ),
}


def undeclared(name: str) -> dict[str, Tensor]:
    net, (objective, options, _) = Net(), UNDECLARED[name]
    with accumulation_window(net, **options()):
        for rows in own_rows():
            objective(net, rows).backward()
    return mean_over_ranks(grads_of(net))


@pytest.mark.parametrize("name", UNDECLARED)
def test_counts_without_micro_batches(pool: RankPool, name: str) -> None:
    answer = UNDECLARED[name][2]
    if isinstance(answer, list):
        assert_errors(pool.errors(2, undeclared, name), *answer)
    else:
        assert_all_close(pool.run(2, undeclared, name), truth_of(answer))


WEIGHTS = torch.tensor([0.1, 0.7, 1.3])  # not whole numbers, and in float32 not exact either


def weighted(wrong: float) -> dict[str, Tensor]:
    """Class weights in single precision, whose sum a user takes in another order."""
    net = Net().float()
    net.a = GlobalBatchLoss(nn.CrossEntropyLoss(weight=WEIGHTS))
    micro_batches = [rows.float() for rows in own_rows()]
    numbers = WEIGHTS[torch.cat([labels_of(rows) % 3 for rows in own_rows()])]
    counts = {"a": sum(numbers.flip(0).tolist()) * wrong}
    with accumulation_window(net, micro_batches=3, counts=counts):
        for rows, wide in zip(micro_batches, own_rows(), strict=True):
            net.a(net(rows), labels_of(wide) % 3).backward()
    return mean_over_ranks(grads_of(net))


def test_counts_of_class_weights_in_single_precision(pool: RankPool) -> None:
    net, rows = Net(), torch.cat(all_rows())
    nn.functional.cross_entropy(net(rows), labels_of(rows) % 3, weight=WEIGHTS.double()).backward()
    assert_all_close(pool.run(2, weighted, 1.0), grads_of(net), rtol=1e-4)
